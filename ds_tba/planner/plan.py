"""A plan: a placement for each saved storage, a flag for each block, why, and what it should cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_tba.config import Placement
from ds_tba.errors import ConfigError
from ds_tba.planner.timeline import Assignment, Existence, Floats, Ints, Timeline

MIB = 1 << 20
# Shorter differences are the rounding of sums, not time.
SAME_TIME_S = 1e-9


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan may cost.

    Attributes:
        max_step_overhead: part of the step's time that may be added, where there is no budget.
        activation_budget_bytes: bound of the saved bytes in device memory; with it, time is what is made least.
        host_budget_bytes: bound of the host tier.
        write_limit_bytes_per_step: bound of what one step writes; see :func:`write_limit_bytes_per_step`.
        recompute: whether blocks may be recomputed.

    Raises:
        ConfigError: a limit is negative.
    """

    max_step_overhead: float = 0.02
    activation_budget_bytes: int | None = None
    host_budget_bytes: int = 0
    write_limit_bytes_per_step: float = math.inf
    recompute: bool = True

    def __post_init__(self) -> None:
        for name in ("max_step_overhead", "activation_budget_bytes", "host_budget_bytes", "write_limit_bytes_per_step"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} is {value}: it must be 0 or more")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay found; bytes and times of one micro-step.

    Attributes:
        assignment: where each storage really was, KEEP for those that do not exist or were refused.
        order: of the first uses of what was moved.
        lead: that was kept to, as in ``Plan.prefetch_lead``.
        stalls: of each storage for which compute waited, the seconds.
    """

    assignment: Assignment
    existence: Existence
    peak_saved_bytes: int
    end_s: float
    stall_s: float
    recomputed_s: float
    written_bytes: int
    read_bytes: int
    forwarded_bytes: int
    host_bytes: int
    peak_staging_bytes: int
    stalls: list[tuple[int, float]]
    order: list[int]
    lead: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The placements chosen for the next steps.

    Attributes:
        planner: who chose.
        placements: of each storage in pack order; RECOMPUTE where its block's recomputation makes it again.
        recomputed_blocks: for each block, whether its forward runs again.
        prefetch_lead: for reading ahead: when so many of what was moved were used for the first time in backward (none
            at its begin), how many of the next in order are to have been asked for. Empty where it goes as far as the
            bounds allow, as without a plan.
        reasons, block_reasons: a line for each.
        prediction: what it was chosen for.
    """

    planner: str
    placements: tuple[Placement, ...]
    recomputed_blocks: tuple[bool, ...]
    prefetch_lead: tuple[int, ...]
    reasons: tuple[str, ...]
    block_reasons: tuple[str, ...]
    prediction: Prediction

    @property
    def assignment(self) -> Assignment:
        """As arrays, for a replay."""
        placements = np.array(self.placements, np.int8)
        placements[placements == Placement.RECOMPUTE] = Placement.KEEP
        return Assignment(placements, np.array(self.recomputed_blocks, bool))


Rank = tuple[bool, bool, float, float, int]


def rank(prediction: Prediction, limits: Limits, kept_step_s: float) -> Rank:
    """The lower the better: within the bounds of host memory and wear, then what ``limits`` ask for.

    Without a budget the lowest peak of those within ``max_step_overhead``, with one the least time of those that fit;
    of equal ones the better other figure, then fewer bytes written. Where none is within, the nearest.
    """
    step_s = round(prediction.step_s / SAME_TIME_S) * SAME_TIME_S
    peak_bytes = prediction.peak_saved_bytes
    refused = (
        prediction.host_bytes > limits.host_budget_bytes or prediction.written_bytes > limits.write_limit_bytes_per_step
    )
    if limits.activation_budget_bytes is None:
        over = prediction.step_s > longest_step_s(limits, kept_step_s)
        first, second = (step_s, peak_bytes) if over else (peak_bytes, step_s)
    else:
        over = peak_bytes > limits.activation_budget_bytes
        first, second = (peak_bytes, step_s) if over else (step_s, peak_bytes)
    return refused, over, first, second, prediction.written_bytes


def is_outside(found: Rank) -> bool:
    """Whether a rank is that of a plan outside of the limits."""
    return found[0] or found[1]


def longest_step_s(limits: Limits, kept_step_s: float) -> float:
    """The step that ``max_step_overhead`` allows."""
    return kept_step_s * (1 + limits.max_step_overhead) + SAME_TIME_S


def make_plan(planner: str, timeline: Timeline, modules: Sequence[str], outcome: Outcome, cost: Prediction) -> Plan:
    """The plan that a replay's assignment is.

    Args:
        modules: paths of the blocks.
    """
    places = np.where(outcome.existence.dropped, int(Placement.RECOMPUTE), outcome.assignment.placements)
    recomputed = outcome.assignment.recomputed.tolist()
    blocks = BlockCosts.of(timeline)
    return Plan(
        planner,
        tuple(map(list(Placement).__getitem__, places.tolist())),
        tuple(recomputed),
        outcome.lead,
        tuple(_reasons(timeline, outcome, modules)),
        tuple(
            f"recompute: {freed / MIB:.1f} MiB for a forward of {took_s:.3g} s"
            if again
            else f"no recompute: a forward of {took_s:.3g} s would free {freed / MIB:.1f} MiB"
            for again, freed, took_s in zip(
                recomputed, blocks.freed_bytes.tolist(), blocks.compute_s.tolist(), strict=True
            )
        ),
        cost,
    )


def _reasons(timeline: Timeline, outcome: Outcome, modules: Sequence[str]) -> list[str]:
    costs, existence = StorageCosts.of(timeline), outcome.existence
    nvme, host, possible = costs.nvme_s.tolist(), costs.host_s.tolist(), timeline.can_go_to_nvme().tolist()
    dropped, exists, movable = existence.dropped.tolist(), existence.exists.tolist(), timeline.movable.tolist()
    reasons = []
    for index, (place, idle_s, owner) in enumerate(
        zip(outcome.assignment.placements.tolist(), costs.idle_s.tolist(), timeline.owner.tolist(), strict=True)
    ):
        if dropped[index]:
            reasons.append(f"recompute: {modules[owner]} runs again")
        elif place == Placement.NVME:
            reasons.append(f"nvme: idle for {idle_s:.3g} s, there and back in {nvme[index]:.3g} s")
        elif place == Placement.HOST:
            reasons.append(f"host: idle for {idle_s:.3g} s, there and back in {host[index]:.3g} s")
        elif not exists[index]:
            reasons.append("keep: not saved, as no block that reads it is recomputed")
        elif not movable[index]:
            reasons.append("keep: it may not be moved")
        elif not possible[index] and not timeline.resources.paths:
            reasons.append("keep: there is no drive, and host memory is no gain here")
        elif not possible[index]:
            reasons.append("keep: larger than io.staging_bytes")
        elif idle_s < nvme[index]:
            reasons.append(f"keep: idle for {idle_s:.3g} s, but there and back takes {nvme[index]:.3g} s")
        else:
            reasons.append(f"keep: idle for {idle_s:.3g} s, but others gain more from the same bandwidth")
    return reasons


@dataclass(frozen=True, slots=True)
class StorageCosts:
    """Columns, one entry for each storage.

    Attributes:
        idle_s: between forward's last and backward's first use.
        copy_out_s, copy_in_s: of either tier, on the link to the host.
        write_s, read_s: of NVMe, on the drives; infinite without any.
    """

    idle_s: Floats
    copy_out_s: Floats
    copy_in_s: Floats
    write_s: Floats
    read_s: Floats

    @classmethod
    def of(cls, timeline: Timeline) -> StorageCosts:
        """Those of every storage."""
        resources, nowhere = timeline.resources, np.full(timeline.storages, np.inf)
        return cls(
            timeline.first_backward_use_s - timeline.last_forward_use_s,
            timeline.nbytes / resources.copy_out_bytes_per_s,
            timeline.nbytes / resources.copy_in_bytes_per_s,
            timeline.padded_bytes / resources.write_bytes_per_s if resources.paths else nowhere,
            timeline.padded_bytes / resources.read_bytes_per_s if resources.paths else nowhere,
        )

    @property
    def nvme_s(self) -> Floats:
        """There and back over copy engine and drive."""
        return self.copy_out_s + self.write_s + self.read_s + self.copy_in_s

    @property
    def host_s(self) -> Floats:
        """There and back over the copy engine."""
        return self.copy_out_s + self.copy_in_s


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """Columns, one entry for each block.

    Attributes:
        compute_s: of one more forward.
        freed_bytes: what is dropped where it alone is recomputed.
    """

    compute_s: Floats
    freed_bytes: Ints

    @classmethod
    def of(cls, timeline: Timeline) -> BlockCosts:
        """Those of every block."""
        own = timeline.owner >= 0
        freed = np.bincount(timeline.owner[own], timeline.nbytes[own], minlength=timeline.blocks)
        pairs = np.unique(np.stack([timeline.input_storage, timeline.input_block]), axis=1)
        is_own = timeline.owner[pairs[0]] == pairs[1]
        freed -= np.bincount(pairs[1][is_own], timeline.nbytes[pairs[0][is_own]], minlength=timeline.blocks)
        return cls(timeline.recompute_s, freed.astype(np.int64))


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one step of ``micro_steps`` micro-steps would cost.

    Attributes:
        peak_saved_bytes: most device bytes that saved storages hold at once, with what is read ahead and what a copy
            out still holds.
        step_s: with the rest of the step; ``stall_s`` and ``recomputed_s`` are what it has more than the trace.
        written_bytes, read_bytes: what the drives move, padded.
        forwarded_bytes: handed over from staging instead of read.
        host_bytes: most bytes that the host tier holds at once.
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


def predict(timeline: Timeline, outcome: Outcome) -> Prediction:
    """A replay's outcome as figures of a step."""
    times = timeline.micro_steps
    return Prediction(
        outcome.peak_saved_bytes,
        outcome.end_s * times + timeline.rest_s,
        outcome.stall_s * times,
        outcome.recomputed_s * times,
        outcome.written_bytes * times,
        outcome.read_bytes * times,
        outcome.forwarded_bytes * times,
        outcome.host_bytes,
        outcome.peak_staging_bytes,
    )
