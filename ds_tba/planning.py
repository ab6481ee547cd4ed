"""Makes one plan for all ranks: by the one that saves most, for the slowest drives that any has.

Knows planners and ranks; does not know the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ds_tba.agreement import Agreement
from ds_tba.plan.layout import Layout
from ds_tba.plan.limits import Limits
from ds_tba.plan.planner import Planner
from ds_tba.plan.resources import scaled, slowest
from ds_tba.plan.trace import Resources, Trace, Traffic
from ds_tba.policy import PlanInForce

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

    def taken_s(self) -> float:
        """What moving has taken, in the last step, of the processor on which the kernels run."""
        ...

    def learn(self, moving_s: float) -> None:
        """Take into account what moving has taken of the training thread so far."""
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
    """

    saved_bytes: int
    safety: float
    room_bytes: float
    unfit_blocks: frozenset[str]
    resources: Resources


class Planning:
    """The making of plans.

    Args:
        planner: chooses the placements.
        limits: what a plan may cost, given the seconds of a step.
        machine: what this rank can move.
        room_bytes: device memory that is free for activations at the beginning of a step; infinite if nobody knows.
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
        self, trace: Trace | None, layout: Layout, safety: float, unfit_blocks: frozenset[str]
    ) -> PlanInForce | None:
        """The plan that all ranks follow; None (and an error in the log) if there can be none. A collective.

        Args:
            trace, layout: what this rank recorded; without a trace there is no plan for anyone.
            safety: the part of its measured rates to count on.
            unfit_blocks: paths of blocks that it cannot recompute.
        """
        saved_bytes = NOTHING if trace is None else trace.saved_bytes
        mine = self._machine.resources(() if trace is None else trace.resources.traffic)
        offers: list[Offer] = self._agreement.gather(Offer(saved_bytes, safety, self._room_bytes(), unfit_blocks, mine))
        if trace is None or any(offer.saved_bytes == NOTHING for offer in offers):
            logger.error("no plan, because a rank has no trace: activations go where there is room without waiting")
            return None
        leader = max(range(len(offers)), key=lambda rank: offers[rank].saved_bytes)
        found: PlanInForce | str = ""
        if leader == self._agreement.rank:
            found = self._planned(_for_all(trace, offers), layout, min(offer.room_bytes for offer in offers))
        found = self._agreement.share(found, leader)
        if isinstance(found, str):
            logger.error(
                "rank %d could not plan (%s): activations go where there is room without waiting", leader, found
            )
            return None
        if self._agreement.rank == 0:
            self._warn_of_budget(found)
        return found

    def _planned(self, trace: Trace, layout: Layout, room_bytes: float) -> PlanInForce | str:
        """A plan within the limits, and within the device's memory whatever they are."""
        try:
            limits = self._limits(trace.step_s)
            plan = self._planner(trace, limits)
            peak_bytes = plan.prediction.peak_saved_bytes
            if limits.activation_budget_bytes is None and peak_bytes > room_bytes:
                limits = replace(limits, activation_budget_bytes=int(room_bytes))
                plan = self._planner(trace, limits)
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


def _for_all(trace: Trace, offers: Sequence[Offer]) -> Trace:
    """A trace on a machine that is no faster than any rank's, with no block recomputed that some rank cannot."""
    resources = scaled(slowest([offer.resources for offer in offers]), min(offer.safety for offer in offers))
    unfit = frozenset[str]().union(*(offer.unfit_blocks for offer in offers))
    blocks = tuple(
        replace(block, is_recomputable=block.is_recomputable and block.module not in unfit) for block in trace.blocks
    )
    return replace(trace, resources=resources, blocks=blocks)
