"""The holders of saved bytes: a table of the modules and ops whose tensors are saved.

Knows names and bytes only; ``explain/sample.py`` finds them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ds_tba.stats import aligned, readable

MAX_ROWS = 10
# Whole names between dots: "conv2d" and "layer1" are no numbers of layers.
_LAYER_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass
class Holder:
    """Saved tensors that one op makes in one module; layers of a list are one module.

    Attributes:
        module: path in the model, with ``*`` for the number of a layer; outside of all modules below the model the line
            of the program, as ``(train.py:57)``.
        op: that made the tensor, as autograd names it, or the user's own Function that saves it; empty of inputs, and
            of what an op alone saves of its own output.
        tensors: storages, each counted once.
        largest: shape and dtype of the largest tensor.
        largest_bytes: of its storage.
        saved_bytes: in all, of which ``resident_bytes`` are in device memory, ``moved_bytes`` in a store, and
            ``again_bytes`` made again in backward.
    """

    module: str
    op: str
    tensors: int = 0
    saved_bytes: int = 0
    resident_bytes: int = 0
    moved_bytes: int = 0
    again_bytes: int = 0
    largest: str = ""
    largest_bytes: int = 0

    def add(self, nbytes: int, where: str, shape: str = "") -> None:
        """Count a storage that is ``"resident"``, ``"moved"`` or made ``"again"``."""
        if nbytes > self.largest_bytes:
            self.largest, self.largest_bytes = shape, nbytes
        self.tensors += 1
        self.saved_bytes += nbytes
        setattr(self, f"{where}_bytes", getattr(self, f"{where}_bytes") + nbytes)


def merged(module: str) -> str:
    """Return the path of a module with ``*`` for each number in it."""
    return _LAYER_NUMBER.sub("*", module)


def cells(holders: Sequence[Holder]) -> list[tuple[str, ...]]:
    """Return the head and the rows of a table for people; holders beyond :data:`MAX_ROWS` are one row."""
    shown, rest = list(holders[:MAX_ROWS]), holders[MAX_ROWS:]
    if rest:
        other = Holder(f"{len(rest)} more", "")
        for name in ("tensors", "saved_bytes", "resident_bytes", "moved_bytes", "again_bytes"):
            setattr(other, name, sum(getattr(one, name) for one in rest))
        shown.append(other)
    rows: list[tuple[str, ...]] = [
        ("module", "made by", "largest tensor", "tensors", "saved", "in memory", "moved", "made again")
    ]
    for one in shown:
        sizes = (one.saved_bytes, one.resident_bytes, one.moved_bytes, one.again_bytes)
        names = (one.module or "(outside of modules)", one.op, one.largest, str(one.tensors))
        rows.append((*names, *(readable(nbytes) if nbytes else "-" for nbytes in sizes)))
    return rows


def table(holders: Sequence[Holder]) -> list[str]:
    """Return lines for people; none where there are no holders."""
    return aligned(cells(holders), left=3) if holders else []
