"""The holders of device memory: the model and its optimizer, and the modules and ops whose tensors are saved.

Knows names and bytes only. A run counts them (``explain/``), and ``ds_tba plan`` estimates them; both name holders and
what makes them smaller by these words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ds_tba.stats import aligned, readable

PARAMETERS, GRADIENTS, STATES = "parameters", "gradients", "optimizer states"
SAVED, TEMPORARY = "saved tensors", "logits and other temporary tensors"
_LESS_SAVED = "a smaller batch or a shorter sequence"
_STATES_ON_HOST = 'ZeRO stage 2 or 3 with "offload_optimizer": {"device": "cpu"}'
# By holder, what makes it smaller.
REMEDIES = {
    PARAMETERS: 'ZeRO stage 3 with "offload_param": {"device": "cpu"}, or more ranks',
    GRADIENTS: f"{_STATES_ON_HOST}, or LoRA",
    STATES: f"{_STATES_ON_HOST}, more ranks or LoRA",
    "gathered parameters": "a lower stage3_max_live_parameters, which a module's own parameters may exceed",
    "ZeRO's buckets": "a lower reduce_bucket_size",
    SAVED: f"gradient checkpointing, {_LESS_SAVED}",
    TEMPORARY: f"a fused loss for logits, an MLP in tiles, {_LESS_SAVED}",
    "CUDA context": "a larger GPU",
}
MAX_ROWS = 10
# Whole names between dots: "conv2d" and "layer1" are no numbers of layers.
_LAYER_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class ModelMemory:
    """The device bytes that a training holds beside what comes and goes in a micro-step, by holder.

    ``always`` is there all the time, ``passing`` in forward and backward, ``stepping_bytes`` in the optimizer's step.
    """

    always: Mapping[str, int] = field(default_factory=dict)
    passing: Mapping[str, int] = field(default_factory=dict)
    stepping_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes in forward and backward."""
        return sum(self.always.values()) + sum(self.passing.values())


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
