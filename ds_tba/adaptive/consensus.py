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
from ds_tba.planner.replay import simulate
from ds_tba.planner.search import Planner
from ds_tba.planner.trace import MIN_FRACTION, Layout, Resources, Trace, slowest

logger = logging.getLogger(__name__)

SAME_FRACTION = 0.02


class Machine(Protocol):
    """The rates of this rank's machine."""

    @property
    def is_synchronous(self) -> bool:
        """Whether the device is the host."""
        ...

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
        saved_bytes: of its trace; the rank with the most makes the plan.
        room_bytes: for activations, on its device.
        non_recomputable: paths of the blocks that it cannot recompute.
        resources: its machine, with the fitted cost of moving.
        fit: the cost of its steps.
    """

    saved_bytes: int
    room_bytes: float
    non_recomputable: frozenset[str]
    resources: Resources
    fit: Fit


@dataclass(frozen=True, slots=True)
class NoPlan:
    """Why there is no plan; the same on every rank.

    Attributes:
        is_final: the planner failed, and would fail again; else a rank had nothing to offer this time.
    """

    reason: str
    is_final: bool


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
        self._warned = ""  # the kind of the last warning
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
    ) -> PlanInForce | NoPlan:
        """The plan that all ranks follow, or why there is none, which is said in the log. A collective.

        Args:
            trace, layout: recorded by this rank; without a trace there is no plan for any rank.
            fit: the cost of its steps; None without a trace.
            non_recomputable: paths of the blocks that it cannot recompute.
            current: the plan in force, if it is for this layout; see [Note: A new plan].
        """
        found = self._agreed(trace, layout, fit, non_recomputable, current)
        if isinstance(found, NoPlan) and found.is_final:
            logger.error("no plan, because %s: activations go where there is room without waiting", found.reason)
        elif self._agreement.rank == 0 and isinstance(found, NoPlan):
            self._warn_once("no plan", f"no new plan now, because {found.reason}: tried again later")
        elif self._agreement.rank == 0 and isinstance(found, PlanInForce) and not found.is_same_as(current):
            self._warn_of_budget(found)
        return found

    def _agreed(
        self,
        trace: Trace | None,
        layout: Layout,
        fit: Fit | None,
        non_recomputable: frozenset[str],
        current: PlanInForce | None,
    ) -> PlanInForce | NoPlan:
        """The plan, or why there is none: the same for every rank."""
        answers: list[Offer | str] = self._agreement.all_gather(self._offer(trace, fit, non_recomputable))
        for number, answer in enumerate(answers):
            if isinstance(answer, str):
                return NoPlan(f"rank {number}{self._agreement.where} {answer}", is_final=False)
        if trace is None or fit is None:  # then its answer was a string
            return NoPlan("this rank has no trace", is_final=False)
        offers = [answer for answer in answers if isinstance(answer, Offer)]
        leader = max(range(len(offers)), key=lambda rank: offers[rank].saved_bytes)
        found: PlanInForce | str = ""
        if leader == self._agreement.rank:
            found = self._planned(trace, fit, layout, offers, current)
        found = self._agreement.broadcast(found, leader)
        if isinstance(found, str):
            return NoPlan(f"rank {leader}{self._agreement.where} could not plan ({found})", is_final=True)
        return found

    def _offer(self, trace: Trace | None, fit: Fit | None, non_recomputable: frozenset[str]) -> Offer | str:
        """The offer of this rank, or why it has none."""
        if trace is None or fit is None:
            return "has no trace"
        try:
            resources = replace(self._machine.resources(), compute_s_per_byte=fit.compute_s_per_byte)
            return Offer(trace.saved_bytes, self._room_bytes(), non_recomputable, resources, fit)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer
            return f"failed ({type(error).__name__}: {error})"

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
            if current is not None and not current.is_for(recorded, layout):  # made from another rank's trace
                current = None
            room_bytes = min(offer.room_bytes for offer in offers)
            fits = [offer.fit for offer in offers]
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
                plan = _old_or_new(current.plan, plan, expected, careful, limits, room_bytes)
            return PlanInForce.of(plan, trace, layout, limits, wait_s_per_byte)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer, and training can go on without
            return f"{type(error).__name__}: {error}"

    def _warn_of_budget(self, found: PlanInForce) -> None:
        budget_bytes, peak_bytes = found.limits.activation_budget_bytes, found.plan.prediction.peak_saved_bytes
        if budget_bytes is None:
            self._warned = ""
            return
        asked = self._limits(found.trace.step_s).activation_budget_bytes is not None
        if peak_bytes > budget_bytes:
            bound = "activation_budget_bytes" if asked else "the free memory of the device"
            self._warn_once(
                "over",
                f"no plan fits {budget_bytes} bytes of activations ({bound}): the lowest peak is {peak_bytes} bytes. A "
                f"larger budget, smaller micro-batches, {_recompute_advice(found)}or a faster drive would help",
            )
        elif not asked:
            self._warn_once(
                "room",
                f"within max_step_overhead activations would not fit the device ({budget_bytes} bytes are free): "
                "planned for the least time that fits",
            )

    def _warn_once(self, kind: str, text: str) -> None:
        """Say it, unless the last warning was of this kind."""
        if kind != self._warned:
            self._warned = kind
            logger.warning("%s", text)


def _recompute_advice(found: PlanInForce) -> str:
    if not found.limits.recompute:
        return '"recompute": true, '
    if all(block.is_recomputable for block in found.trace.blocks):
        return ""
    return "blocks that can be recomputed (the log and unproven_blocks in the report say why some cannot), "


def _old_or_new(old: Plan, new: Plan, expected: Trace, careful: Trace, limits: Limits, room_bytes: float) -> Plan:
    """The plan in force with its prediction of now, unless the new one makes a difference, and that for the better.

    The search is no search of all plans: from another fit it may come to a plan that is worse than the one in force.

    Args:
        expected: the trace for predictions.
        careful: the trace for which the new plan was made.
        room_bytes: on the device, which the new plan fits.
    """
    if any(not expected.blocks[number].is_recomputable for number, again in enumerate(old.recomputed_blocks) if again):
        return new
    before, after = simulate(expected, old), new.prediction
    if limits.activation_budget_bytes is None and before.peak_saved_bytes > room_bytes:
        return new
    is_same = (
        abs(after.step_s - before.step_s) <= SAME_FRACTION * before.step_s
        and abs(after.peak_saved_bytes - before.peak_saved_bytes) <= SAME_FRACTION * before.peak_saved_bytes
        and is_outside(rank(after, limits, expected.step_s)) == is_outside(rank(before, limits, expected.step_s))
    )
    old_rank, new_rank = (rank(simulate(careful, plan), limits, careful.step_s) for plan in (old, new))
    return replace(old, prediction=before) if is_same or old_rank <= new_rank else new


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
