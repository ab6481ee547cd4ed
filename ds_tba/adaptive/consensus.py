"""Makes one plan for all ranks: on the rank that saves most, for the slowest drives of any rank.

[Note: A new plan] The cost of steps is fitted anew at every review. A new plan replaces the one in force only if they
differ by more than ``SAME_FRACTION`` in predicted time or peak, or in whether they are within the limits. A smaller
difference is noise, and a change of plans has its cost.

Knows planners and ranks; does not know the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ds_tba.adaptive.calibration import Fit
from ds_tba.adaptive.policy import PlanInForce
from ds_tba.adaptive.ranks import Agreement
from ds_tba.planner.plan import Limits, Plan, is_outside, rank
from ds_tba.planner.search import Planner
from ds_tba.planner.simulator import simulate
from ds_tba.planner.trace import MIN_FRACTION, Layout, Resources, Trace, slowest

logger = logging.getLogger(__name__)

NOTHING = -1
SAME_FRACTION = 0.02


class Machine(Protocol):
    """The rates of this rank's machine."""

    @property
    def compute_error_s_per_byte(self) -> float:
        """How far ``compute_s_per_byte`` of its resources may be off."""
        ...

    def measure(self) -> None:
        """Measure the drives and the copies now."""
        ...

    def note_copies(self, nbytes: int, took_s: float) -> None:
        """So much was copied to the host in so much time of the training thread."""
        ...

    def should_measure(self) -> bool:
        """Whether its rates may be out of date, because nothing was written or read since the last call."""
        ...

    def resources(self) -> Resources:
        """The rates as they are now."""
        ...


@dataclass(frozen=True, slots=True)
class Offer:
    """The facts that each rank shares before a plan is made.

    Attributes:
        saved_bytes: of its trace (NOTHING without one); who has most makes the plan.
        room_bytes: for activations, on its device.
        non_recomputable: paths of the blocks that it cannot recompute.
        resources: its machine, with the fitted cost of moving.
        fit: the cost of its steps; None without a trace.
    """

    saved_bytes: int
    room_bytes: float
    non_recomputable: frozenset[str]
    resources: Resources
    fit: Fit | None


class Planning:
    """The making of plans.

    Args:
        planner: chooses the placements.
        limits: of the cost of a plan, given the seconds of a step.
        machine: of this rank.
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
        fit: Fit | None,
        non_recomputable: frozenset[str],
        current: PlanInForce | None = None,
    ) -> PlanInForce | None:
        """The plan that all ranks follow; None (and an error in the log) if there can be none. A collective.

        Args:
            trace, layout: recorded by this rank; without a trace there is no plan for any rank.
            fit: the cost of its steps; None without a trace.
            non_recomputable: paths of the blocks that it cannot recompute.
            current: the plan in force, if it is for this layout; see [Note: A new plan].
        """
        found = self._agreed(trace, layout, fit, non_recomputable, current)
        if isinstance(found, str):
            logger.error("no plan, because %s: activations go where there is room without waiting", found)
            return None
        if self._agreement.rank == 0 and not found.is_same_as(current):
            self._warn_of_budget(found)
        return found

    def _agreed(
        self,
        trace: Trace | None,
        layout: Layout,
        fit: Fit | None,
        non_recomputable: frozenset[str],
        current: PlanInForce | None,
    ) -> PlanInForce | str:
        """The plan, or why there is none: the same for every rank."""
        resources = self._machine.resources()
        if fit is not None:
            resources = replace(resources, compute_s_per_byte=fit.compute_s_per_byte)
        saved_bytes = NOTHING if trace is None or fit is None else trace.saved_bytes
        offers: list[Offer] = self._agreement.all_gather(
            Offer(saved_bytes, self._room_bytes(), non_recomputable, resources, fit)
        )
        if trace is None or fit is None or any(offer.saved_bytes == NOTHING for offer in offers):
            return "a rank has no trace"
        leader = max(range(len(offers)), key=lambda rank: offers[rank].saved_bytes)
        found: PlanInForce | str = ""
        if leader == self._agreement.rank:
            found = self._planned(trace, fit, layout, offers, current)
        found = self._agreement.broadcast(found, leader)
        return f"rank {leader} could not plan ({found})" if isinstance(found, str) else found

    def _planned(
        self,
        recorded: Trace,
        fit: Fit,
        layout: Layout,
        offers: Sequence[Offer],
        current: PlanInForce | None,
    ) -> PlanInForce | str:
        """A plan within the limits, and within the device's memory whatever they are."""
        try:
            room_bytes = min(offer.room_bytes for offer in offers)
            fits = [offer.fit for offer in offers if offer.fit is not None]
            feared_s_per_byte = max(one.compute_error_s_per_byte + one.feared_wait_s_per_byte for one in fits)
            trace = _for_all(recorded, fit, offers)
            careful = _costlier(trace, max(one.recompute_error for one in fits), feared_s_per_byte)
            wait_s_per_byte = 0.0 if current is None else max(one.wait_s_per_byte for one in fits)
            expected = _costlier(trace, 0.0, wait_s_per_byte)
            limits = self._limits(trace.step_s)
            plan = self._planner(careful, limits)
            if limits.activation_budget_bytes is None and plan.prediction.peak_saved_bytes > room_bytes:
                limits = replace(limits, activation_budget_bytes=int(room_bytes))
                plan = self._planner(careful, limits)
            plan = replace(plan, prediction=simulate(expected, plan))
            if current is not None:
                plan = _old_or_new(current.plan, plan, expected, limits)
            return PlanInForce.of(plan, trace, layout, limits, wait_s_per_byte)
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


def _old_or_new(old: Plan, new: Plan, trace: Trace, limits: Limits) -> Plan:
    """The plan in force with its prediction of now, unless the new one makes a difference."""
    before, after = simulate(trace, old), new.prediction
    is_same = (
        abs(after.step_s - before.step_s) <= SAME_FRACTION * before.step_s
        and abs(after.peak_saved_bytes - before.peak_saved_bytes) <= SAME_FRACTION * before.peak_saved_bytes
        and is_outside(rank(after, limits, trace.step_s)) == is_outside(rank(before, limits, trace.step_s))
        and all(trace.blocks[n].is_recomputable for n, again in enumerate(old.recomputed_blocks) if again)
    )
    return replace(old, prediction=before) if is_same else new


def _for_all(trace: Trace, fit: Fit, offers: Sequence[Offer]) -> Trace:
    """The fitted trace on the slowest machine, without recomputation of blocks that some rank cannot recompute."""
    non_recomputable = frozenset[str]().union(*(offer.non_recomputable for offer in offers))
    fitted = calibrated(trace, fit)
    blocks = tuple(
        replace(block, is_recomputable=block.is_recomputable and block.module not in non_recomputable)
        for block in fitted.blocks
    )
    return replace(fitted, resources=slowest([offer.resources for offer in offers]), blocks=blocks)


def calibrated(trace: Trace, fit: Fit) -> Trace:
    """The trace scaled to the fitted step, with the fitted cost of recomputing."""
    scale = max(MIN_FRACTION, fit.kept_s / trace.step_s) if trace.step_s else 1.0
    found = trace.without((1 - scale) * trace.end_s)
    return replace(found, optimizer_s=trace.optimizer_s * scale, recompute_factor=fit.recompute_factor)


def _costlier(trace: Trace, more_for_recomputing: float, more_s_per_byte: float) -> Trace:
    """The same micro-step with higher costs of recomputing and moving."""
    resources = trace.resources
    return replace(
        trace,
        recompute_factor=trace.recompute_factor + more_for_recomputing,
        resources=replace(resources, compute_s_per_byte=resources.compute_s_per_byte + more_s_per_byte),
    )
