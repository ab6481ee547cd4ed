"""Makes one plan for all ranks: by the one that saves most, for the slowest drives that any has.

Knows planners and ranks; does not know the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ds_tba.adaptive.policy import PlanInForce
from ds_tba.adaptive.ranks import Agreement
from ds_tba.plan.layout import Layout
from ds_tba.plan.limits import Limits
from ds_tba.plan.planner import Planner, keep, recompute, recompute_and_move
from ds_tba.plan.resources import scaled, slowest
from ds_tba.planner.trace import Resources, Trace, Traffic

logger = logging.getLogger(__name__)

NOTHING = -1


class Machine(Protocol):
    """What the machine can move."""

    def measure(self) -> None:
        """Measure the drives and the copies now."""
        ...

    def note_step(self) -> None:
        """A step is over."""
        ...

    def moved_bytes(self) -> int:
        """By the lanes in the last step, either way."""
        ...

    def taken_s(self, moved_bytes: int) -> float:
        """What moving so many bytes takes of the processor on which the kernels run."""
        ...

    def learn(self, moving_s: float, *, is_usual: bool) -> None:
        """Take into account what moving has taken of the training thread so far."""
        ...

    def learn_taken(self, taken_s: float, error_s: float, moved_bytes: int) -> None:
        """Take into account what moving so many bytes has taken of the kernels, and how well that is known."""
        ...

    def learn_excess(self, excess_s: float, moved_bytes: int) -> float:
        """Moving so many bytes may have taken so much more of the kernels than a plan counted: what it cannot have."""
        ...

    def resources(self, traffic: tuple[Traffic, ...] = ()) -> Resources:
        """The rates as they are now."""
        ...


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank tells the others before a plan is made.

    Attributes:
        saved_bytes: of its trace (NOTHING without one); who has most makes the plan.
        safety: see ``Monitor``.
        room_bytes: for activations, on its device.
        unfit_blocks: paths of those that it cannot recompute.
        resources: its machine.
        hooks_part: see :meth:`Planning.make`.
    """

    saved_bytes: int
    safety: float
    room_bytes: float
    unfit_blocks: frozenset[str]
    resources: Resources
    hooks_part: float


class Planning:
    """The making of plans.

    Args:
        planner: chooses the placements.
        limits: what a plan may cost, given the seconds of a step.
        machine: what this rank can move.
        room_bytes: device memory that is free for activations at the beginning of a step.
        agreement: the ranks.
    """

    def __init__(
        self,
        planner: Planner,
        limits: Callable[[float], Limits],
        machine: Machine,
        room_bytes: Callable[[], float],
        agreement: Agreement,
    ) -> None:
        self._planner = planner
        self._limits = limits
        self._machine = machine
        self._room_bytes = room_bytes
        self._agreement = agreement

    def make(
        self,
        trace: Trace | None,
        layout: Layout,
        safety: float,
        unfit_blocks: frozenset[str],
        hooks_part: float = 0.0,
    ) -> PlanInForce | None:
        """The plan that all ranks follow; None (and an error in the log) if there can be none. A collective.

        Args:
            trace, layout: what this rank recorded; without a trace there is no plan for anyone.
            safety: the part of its measured rates to count on.
            unfit_blocks: paths of blocks that it cannot recompute.
            hooks_part: of the step, what autograd's hooks take whatever moves: it counts as overhead, too.
        """
        found = self._agreed(self._planner, self._limits, trace, layout, safety, unfit_blocks, hooks_part)
        if isinstance(found, str):
            logger.error("no plan, because %s: activations go where there is room without waiting", found)
            return None
        if self._agreement.rank == 0:
            self._warn_of_budget(found)
        return found

    def rehearsal(self, trace: Trace | None, layout: Layout, unfit_blocks: frozenset[str]) -> PlanInForce | None:
        """A plan for steps that show what recomputing takes, or what a step takes without lanes. A collective.

        It recomputes all blocks that may be. On a CPU, where lanes would disturb what is measured, it moves nothing
        unless that would be too much for the budget or the memory, and is one that keeps everything where nothing may
        be recomputed; on a device it moves everything else.

        Args:
            trace, layout, unfit_blocks: see :meth:`make`.

        Returns:
            None if it would show nothing, or not fit the device.
        """
        is_cpu = self._machine.resources().is_synchronous
        planners = [recompute, recompute_and_move] if self._limits(0.0).recompute else [keep]
        for planner in planners if is_cpu else [one for one in planners if one is recompute_and_move]:
            found = self._agreed(planner, self._unbounded, trace, layout, 1.0, unfit_blocks, 0.0)
            if isinstance(found, str):
                return None
            if planner is recompute_and_move and not any(found.plan.recomputed_blocks):
                return None
            budget_bytes = self._limits(found.trace.step_s).activation_budget_bytes
            is_small = budget_bytes is None or found.plan.prediction.peak_saved_bytes <= budget_bytes
            if found.limits.activation_budget_bytes is None and (is_small or planner is recompute_and_move):
                return found
        return None

    def _unbounded(self, step_s: float) -> Limits:
        """Without a budget: then a plan has one only if it would not fit the device."""
        return replace(self._limits(step_s), activation_budget_bytes=None)

    def _agreed(
        self,
        planner: Planner,
        limits: Callable[[float], Limits],
        trace: Trace | None,
        layout: Layout,
        safety: float,
        unfit_blocks: frozenset[str],
        hooks_part: float,
    ) -> PlanInForce | str:
        """The plan, or why there is none: the same for every rank."""
        saved_bytes = NOTHING if trace is None else trace.saved_bytes
        mine = self._machine.resources(() if trace is None else trace.resources.traffic)
        offers: list[Offer] = self._agreement.gather(
            Offer(saved_bytes, safety, self._room_bytes(), unfit_blocks, mine, hooks_part)
        )
        if trace is None or any(offer.saved_bytes == NOTHING for offer in offers):
            return "a rank has no trace"
        part = max(offer.hooks_part for offer in offers)
        leader = max(range(len(offers)), key=lambda rank: offers[rank].saved_bytes)
        found: PlanInForce | str = ""
        if leader == self._agreement.rank:
            room_bytes = min(offer.room_bytes for offer in offers)
            found = self._planned(
                planner, lambda step_s: _beside_hooks(limits(step_s), part), _for_all(trace, offers), layout, room_bytes
            )
        found = self._agreement.share(found, leader)
        return f"rank {leader} could not plan ({found})" if isinstance(found, str) else found

    @staticmethod
    def _planned(
        planner: Planner, limits_of: Callable[[float], Limits], trace: Trace, layout: Layout, room_bytes: float
    ) -> PlanInForce | str:
        """A plan within the limits, and within the device's memory whatever they are."""
        try:
            limits = limits_of(trace.step_s)
            plan = planner(trace, limits)
            peak_bytes = plan.prediction.peak_saved_bytes
            if limits.activation_budget_bytes is None and peak_bytes > room_bytes:
                limits = replace(limits, activation_budget_bytes=int(room_bytes))
                plan = planner(trace, limits)
            return PlanInForce.of(plan, trace, layout, limits)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer, and training can go on without
            return f"{type(error).__name__}: {error}"

    def _warn_of_budget(self, found: PlanInForce) -> None:
        budget_bytes, peak_bytes = found.limits.activation_budget_bytes, found.plan.prediction.peak_saved_bytes
        if budget_bytes is None:
            return
        asked = self._limits(found.trace.step_s).activation_budget_bytes is not None
        if peak_bytes > budget_bytes:
            logger.warning(
                "no plan fits %d bytes of activations (%s): the lowest peak is %d bytes. A larger budget, smaller "
                'micro-batches, "recompute": true or a faster drive would help',
                budget_bytes,
                "activation_budget_bytes" if asked else "what is free on the device",
                peak_bytes,
            )
        elif not asked:
            logger.warning(
                "within max_step_overhead activations would not fit the device (%d bytes are free): planned for the "
                "least time that fits",
                budget_bytes,
            )


def _beside_hooks(limits: Limits, hooks_part: float) -> Limits:
    """What is left for moving and recomputing: ``max_step_overhead`` is of a step without hooks."""
    return replace(limits, max_step_overhead=max(0.0, (1 + limits.max_step_overhead) * (1 - hooks_part) - 1))


def _for_all(trace: Trace, offers: Sequence[Offer]) -> Trace:
    """A trace on a machine that is no faster than any rank's, with no block recomputed that some rank cannot."""
    resources = scaled(slowest([offer.resources for offer in offers]), min(offer.safety for offer in offers))
    unfit = frozenset[str]().union(*(offer.unfit_blocks for offer in offers))
    blocks = tuple(
        replace(block, is_recomputable=block.is_recomputable and block.module not in unfit) for block in trace.blocks
    )
    return replace(trace, resources=resources, blocks=blocks)
