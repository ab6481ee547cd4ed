"""A plan: a placement for each saved storage, a flag for each block, why, and what it should cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_tba.errors import TraceError
from ds_tba.plan.cost import BlockCosts, StorageCosts
from ds_tba.plan.limits import Limits
from ds_tba.plan.placement import Assignment, Placement
from ds_tba.plan.simulate import Prediction, replay
from ds_tba.planner.simulator import Outcome
from ds_tba.planner.timeline import Timeline
from ds_tba.planner.trace import Trace

MIB = 1 << 20
# Shorter differences are the rounding of sums, not time.
SAME_TIME_S = 1e-9


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


def simulate(trace: Trace, plan: Plan) -> Prediction:
    """What a step of ``trace`` would cost under ``plan``.

    Raises:
        TraceError: the plan is for a trace with other storages or blocks.
    """
    sizes = (len(plan.placements), len(plan.recomputed_blocks))
    if sizes != (len(trace.storages), len(trace.blocks)):
        raise TraceError(
            f"a plan for {sizes[0]} storages and {sizes[1]} blocks cannot be replayed on a trace of "
            f"{len(trace.storages)} and {len(trace.blocks)}: plan again"
        )
    return replay(Timeline.of(trace), plan.assignment, lead=plan.prefetch_lead)[1]


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
