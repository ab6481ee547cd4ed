"""The limits of a plan, the plan itself, and the order of two predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from ds_tba.config import OffloadConfig, Placement
from ds_tba.plan.trace import Trace

# Shorter differences are the rounding of sums, not time.
SAME_TIME_S = 1e-9


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the cost of a plan.

    Attributes:
        max_step_overhead: fraction of the step's time that may be added, where there is no budget.
        activation_budget_bytes: bound of the saved bytes in device memory; with a budget, step time is minimized.
        host_budget_bytes: bound of the host tier.
        write_limit_bytes_per_step: bound of what one step writes.
        recompute: whether blocks may be recomputed.
        rematerialize: whether storages may be made again from others.
        movable_share: fraction of the bytes of all movable storages that host memory and NVMe may take together. A
            budget that fits with more only is kept all the same.
        endurance_tbw: terabytes that the drives still take, as one rank's share; bounds nothing, tells how long they
            last.
        stored_share: bytes that a drive is written for a byte of storages; below 1 with compression.
    """

    max_step_overhead: float = 0.02
    activation_budget_bytes: int | None = None
    host_budget_bytes: int = 0
    write_limit_bytes_per_step: float = math.inf
    recompute: bool = True
    rematerialize: bool = True
    movable_share: float = 1.0
    endurance_tbw: float | None = None
    stored_share: float = 1.0

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
            config.rematerialize_enabled,
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """The cost of one step of ``micro_steps`` micro-steps.

    Attributes:
        peak_saved_bytes: most device bytes that saved storages hold at once, with what is read ahead and what a copy
            out still holds.
        step_s: with the optimizer; ``stall_s``, ``recomputed_s`` and ``rematerialized_s`` are what the step has more
            than the trace.
        written_bytes, read_bytes: moved by the drives, padded.
        forwarded_bytes: handed over from staging instead of read.
        host_bytes: most bytes that the host tier holds at once.
        rematerialized_s: in which storages are made again from others.
        rematerialized_bytes: of these storages.
    """

    peak_saved_bytes: int
    step_s: float
    stall_s: float
    recomputed_s: float
    written_bytes: int
    read_bytes: int
    forwarded_bytes: int
    host_bytes: int
    peak_staging_bytes: int
    rematerialized_s: float = 0.0
    rematerialized_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The placements chosen for the next steps.

    Attributes:
        planner: who chose.
        placements: of each storage in pack order; RECOMPUTE where its block's recomputation makes it again,
            REMATERIALIZE where it is made of its sources.
        recomputed_blocks: for each block, whether its forward runs again.
        prefetch_distance: ``prefetch_distance[i]`` is how many of the next reloads to have issued once backward has
            used ``i`` of the moved storages; empty where prefetching goes as far as the bounds allow.
        prediction: the cost for which the plan was chosen.
    """

    planner: str
    placements: tuple[Placement, ...]
    recomputed_blocks: tuple[bool, ...]
    prefetch_distance: tuple[int, ...]
    prediction: Prediction


class Planner(Protocol):
    """Chooses the placements for a trace."""

    def __call__(self, trace: Trace, limits: Limits, /) -> Plan:
        """Return the plan."""
        ...


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
        is_over = step_s > kept_step_s * (1 + limits.max_step_overhead) + SAME_TIME_S
        first, second = (step_s, peak_bytes) if is_over else (peak_bytes, step_s)
        return is_refused or worn_bytes > 0, is_over, first, second, worn_bytes, written_bytes
    if peak_bytes > limits.activation_budget_bytes:
        return is_refused, True, peak_bytes, worn_bytes, step_s, written_bytes
    return is_refused, False, worn_bytes, step_s, peak_bytes, written_bytes


def is_outside(found: Order) -> bool:
    """Return whether an order is that of a plan outside of the limits."""
    return found[0] or found[1]
