"""What filled the device? A table of the modules and ops whose tensors are saved, and which key would have helped.

Knows names and bytes only; ``autograd/sample.py`` finds them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds_tba.config import OffloadConfig
from ds_tba.telemetry.stats import readable

MAX_ROWS = 10
# Below this part of what a device holds, saved tensors are not what fills it.
MINOR_PART = 1 / 3
# One tensor outside of all layers with this part of the saved bytes: logits, as a rule.
LARGE_PART = 0.25
_LAYER_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass
class Holder:
    """Saved tensors that one op makes in one module; layers of a list are one module.

    Attributes:
        module: path in the model, with ``*`` for the number of a layer; empty outside of all modules.
        op: that made the tensor, as autograd names it; empty of inputs, and of what an op saves of its own output.
        tensors: storages, each counted once.
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

    def add(self, nbytes: int, where: str) -> None:
        """Count a storage that is ``"resident"``, ``"moved"`` or made ``"again"``."""
        self.tensors += 1
        self.saved_bytes += nbytes
        setattr(self, f"{where}_bytes", getattr(self, f"{where}_bytes") + nbytes)


def merged(module: str) -> str:
    """The path of a module with ``*`` for each number in it."""
    return _LAYER_NUMBER.sub("*", module)


def table(holders: Sequence[Holder]) -> list[str]:
    """Lines for people, the largest first; what is beyond :data:`MAX_ROWS` in one line."""
    if not holders:
        return []
    shown, rest = list(holders[:MAX_ROWS]), holders[MAX_ROWS:]
    if rest:
        other = Holder(f"{len(rest)} more", "")
        for name in ("tensors", "saved_bytes", "resident_bytes", "moved_bytes", "again_bytes"):
            setattr(other, name, sum(getattr(one, name) for one in rest))
        shown.append(other)
    rows: list[tuple[str, ...]] = [("module", "made by", "tensors", "saved", "in memory", "moved", "made again")]
    rows += [
        (
            one.module or "(outside of modules)",
            one.op,
            str(one.tensors),
            *(
                readable(nbytes) if nbytes else "-"
                for nbytes in (one.saved_bytes, one.resident_bytes, one.moved_bytes, one.again_bytes)
            ),
        )
        for one in shown
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(text.ljust(width) if column < 2 else text.rjust(width) for column, (text, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]


def remedies(
    config: OffloadConfig, holders: Sequence[Holder], kept: Mapping[str, int], resident_bytes: int, in_use_bytes: int
) -> list[str]:
    """What to change, the most useful first; each names the key or the call.

    Args:
        kept: bytes that were neither moved nor made again so far, by reason.
        resident_bytes: saved tensors in device memory.
        in_use_bytes: of the device by anything; 0 where that is not known.
    """
    return list(_remedies(config, holders, kept, resident_bytes, in_use_bytes))


def _remedies(
    config: OffloadConfig, holders: Sequence[Holder], kept: Mapping[str, int], resident_bytes: int, in_use_bytes: int
) -> Iterator[str]:
    if in_use_bytes and resident_bytes < MINOR_PART * in_use_bytes:
        yield (
            f"saved tensors are {readable(resident_bytes)} of the {readable(in_use_bytes)} in use: the rest is "
            'parameters, gradients, optimizer states and what ops need; "offload_optimizer" and "offload_param" of '
            '"zero_optimization", more ranks, or a smaller micro-batch lower that'
        )
    saved_bytes = sum(one.saved_bytes for one in holders)
    head = next((one for one in holders if "*" not in one.module and one.saved_bytes >= LARGE_PART * saved_bytes), None)
    if head is not None and head.tensors <= 4:
        yield (
            f"{head.module or 'the loss'} alone saves {readable(head.saved_bytes)}: if these are logits, a loss fused "
            "with the last projection (Liger's fused linear cross entropy) never makes them"
        )
    if config.placement == "keep":
        yield 'nothing is moved: "placement": "adaptive"'
    if config.placement == "adaptive" and config.activation_budget_bytes is None:
        yield f'set a limit: "activation_budget_bytes", for example {resident_bytes // 2 or 1 << 20}'
    elif config.placement == "adaptive" and config.activation_budget_bytes:
        yield f'lower "activation_budget_bytes" {config.activation_budget_bytes}: the step will take longer'
    if kept:
        reason = max(kept, key=lambda one: kept[one])
        if "small" in reason and kept[reason] > MINOR_PART * sum(kept.values()):
            yield f'most of what is kept is small: lower "min_tensor_bytes" {config.min_tensor_bytes}'
        elif "staging" in reason:
            yield f'staging was full: raise "io.staging_bytes" {config.io.ring_bytes}'
    if config.placement == "adaptive" and not config.recompute:
        yield '"recompute": true has layers run again in backward, on the terms of gradient checkpointing'
