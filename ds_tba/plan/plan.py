"""The limits of a plan, the plan itself, and the order of two predictions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property

from ds_tba.config import OffloadConfig, Placement
from ds_tba.plan.trace import Trace

MIB = 1 << 20
# Replays of one plan differ in the writes that backward comes to cancel.
WEAR_TOLERANCE = 1.02
# Shorter differences are the rounding of sums, not time.
SAME_TIME_S = 1e-9


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the cost of a plan."""

    max_step_overhead: float = 0.02  # fraction of the step's time that may be added, where there is no budget
    activation_budget_bytes: int | None = None  # of saved bytes in device memory; with it, step time is minimized
    host_budget_bytes: int = 0
    write_limit_bytes_per_step: float = math.inf
    recompute: bool = True  # blocks may be
    rematerialize: bool = True  # storages may be
    # The fraction of the bytes of all movable storages that host memory and NVMe may take together, and the part of
    # max_step_overhead that may be spent. A budget that fits with more only is kept all the same.
    movable_share: float = 1.0
    room_bytes: float = math.inf  # of the device for activations: the budget where a plan without one would not fit

    @classmethod
    def of(cls, config: OffloadConfig, write_limit_bytes_per_step: float) -> Limits:
        """Return the limits that a config sets; the bound of wear depends on the drives and the step, too.

        A host tier that takes what is free counts as none: how much that is the machine knows.
        """
        return cls(
            config.max_step_overhead,
            config.activation_budget_bytes,
            config.host_budget_bytes or 0,
            write_limit_bytes_per_step,
            config.recompute is True,
            config.rematerialize is not False,
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """The cost of one step."""

    peak_saved_bytes: int  # in device memory at once, with what is read ahead and what a copy out still holds
    step_s: float  # with the optimizer; it is longer than the trace's by the next two and by ``rematerialized_s``
    stall_s: float
    recomputed_s: float
    written_bytes: int  # to the drives, padded
    read_bytes: int
    forwarded_bytes: int  # handed over from staging instead of read
    host_bytes: int  # in the host tier at once
    peak_staging_bytes: int
    rematerialized_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """The placements chosen for the next steps."""

    planner: str  # who chose
    trace: Trace
    limits: Limits
    placements: tuple[Placement, ...]  # of the storages; RECOMPUTE: the block that made it runs again
    recomputed_blocks: tuple[bool, ...]
    # At index i: how many of the next reloads to have issued once backward has used i of the moved storages. Empty:
    # prefetching goes as far as the bounds allow.
    prefetch_distance: tuple[int, ...]
    prediction: Prediction

    @cached_property
    def recomputed(self) -> frozenset[str]:
        """Return the paths of the blocks that run again."""
        blocks = zip(self.trace.blocks, self.recomputed_blocks, strict=True)
        return frozenset(block.module for block, again in blocks if again)

    @property
    def moved_share(self) -> float:
        """Return the fraction of the movable bytes that goes to NVMe or to the host."""
        sizes = self.bytes_by_placement
        return (sizes.get(Placement.NVME, 0) + sizes.get(Placement.HOST, 0)) / max(1, self.trace.movable_bytes)

    @cached_property
    def keeps_all(self) -> bool:
        """Return whether nothing is offloaded or computed again."""
        return set(self.placements) <= {Placement.KEEP}

    @cached_property
    def expected(self) -> tuple[int, ...]:
        """Return the storages that are saved, in order: of a block under a checkpoint its inputs alone."""
        storages, blocks = self.trace.storages, self.trace.blocks
        again = {number for number, block in enumerate(blocks) if block.module in self.recomputed}
        first_s = {index: blocks[n].forward_start_s for n in sorted(again, reverse=True) for index in blocks[n].inputs}
        for index, storage in enumerate(storages):
            saved_s = storage.pack_s
            for number in storage.blocks:
                if number not in again:
                    first_s[index] = min(saved_s, first_s.get(index, saved_s))
                    break
                saved_s = blocks[number].forward_end_s
        asked = (index for index in first_s if storages[index].is_asked)
        return tuple(sorted(asked, key=lambda index: (first_s[index], index)))

    @property
    def identity(self) -> tuple[object, ...]:
        """Return what makes a plan another one: where which bytes go, and the blocks that are recomputed."""
        return self.trace.saved_bytes, self.placements, self.recomputed_blocks

    @property
    def bytes_by_placement(self) -> dict[Placement, int]:
        """Return the bytes of the trace's storages, for each placement that any has."""
        sizes = dict.fromkeys(Placement, 0)
        for storage, placement in zip(self.trace.storages, self.placements, strict=True):
            sizes[placement] += storage.nbytes
        return {placement: nbytes for placement, nbytes in sizes.items() if nbytes}

    def describe(self, reason: str) -> str:
        """Describe the plan in one line, with the reason for it; the first has none."""
        cost, step_s = self.prediction, self.trace.step_s
        where = ", ".join(f"{place.word} {nbytes / MIB:.0f} MiB" for place, nbytes in self.bytes_by_placement.items())
        longer = cost.step_s / step_s - 1 if step_s else 0.0
        return (
            f"{self.planner}{', because ' + reason if reason else ''}: {where}; expected peak "
            f"{cost.peak_saved_bytes / MIB:.0f} MiB, step {cost.step_s:.3g} s ({longer:+.1%})"
        )

    def summary(self) -> dict[str, object]:
        """Return the fields of the report."""
        return {
            "planner": self.planner,
            "bytes": {place.word: nbytes for place, nbytes in self.bytes_by_placement.items()},
            "recomputed_blocks": sum(self.recomputed_blocks),
            "blocks": len(self.trace.blocks),
            "kept_step_s": self.trace.step_s,
            "movable_share": self.limits.movable_share,
            **asdict(self.prediction),
        }


Planner = Callable[[Trace, Limits], Plan]  # chooses the placements for a trace
Order = tuple[bool, bool, float, float, float, int]


def order_of(prediction: Prediction, limits: Limits, kept_step_s: float) -> Order:
    """Return a key that sorts predictions, the best first: within host memory, then by what ``limits`` ask for.

    Without a budget the lowest peak of those within ``max_step_overhead`` and the limit of wear. With a budget those
    that fit and exceed the limit of wear least, and of these the least time. Of equal ones the better other figure,
    then fewer bytes written. Where none is within, the nearest.
    """
    step_s = round(prediction.step_s / SAME_TIME_S) * SAME_TIME_S
    peak_bytes, written_bytes = prediction.peak_saved_bytes, prediction.written_bytes
    is_refused = prediction.host_bytes > limits.host_budget_bytes
    worn_bytes = max(0.0, written_bytes - limits.write_limit_bytes_per_step)
    if limits.activation_budget_bytes is None:
        is_over = step_s > kept_step_s * (1 + limits.movable_share * limits.max_step_overhead) + SAME_TIME_S
        first, second = (step_s, peak_bytes) if is_over else (peak_bytes, step_s)
        return is_refused or worn_bytes > 0, is_over, first, second, worn_bytes, written_bytes
    if peak_bytes > limits.activation_budget_bytes:
        return is_refused, True, peak_bytes, worn_bytes, step_s, written_bytes
    return is_refused, False, worn_bytes, step_s, peak_bytes, written_bytes


def is_outside(found: Order) -> bool:
    """Return whether an order is that of a plan outside of the limits."""
    return found[0] or found[1]
