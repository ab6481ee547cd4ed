"""One plan of all ranks: for the slowest of them, as steps were fitted, and only if it makes a difference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planners import PLANNERS
from test_policy import LAYOUT, TRACE
from traces import resources

from ds_tba.adaptive.calibration import Fit
from ds_tba.adaptive.consensus import NoPlan, Offer, Planning, calibrated
from ds_tba.adaptive.policy import PlanInForce
from ds_tba.adaptive.ranks import Alone
from ds_tba.config import Placement
from ds_tba.planner.plan import Limits, Plan
from ds_tba.planner.search import Planner
from ds_tba.planner.trace import Layout, Resources, Trace

SURE = Fit(TRACE.step_s, 1.0, 0.0, 0.0, 0.0)


class FixedMachine:
    """Of known rates."""

    compute_error_s_per_byte = 0.0
    is_synchronous = False

    def measure(self) -> None: ...

    def note_copies(self, nbytes: int, took_s: float) -> None: ...

    def should_measure(self) -> bool:
        return False

    def resources(self) -> Resources:
        return resources()


class Besides(Alone):
    """One of two ranks, and the other offers this instead."""

    size = 2

    def __init__(self, **other: Any) -> None:
        self.other = other

    def all_gather(self, value: Any) -> list[Any]:
        return [value, replace(value, **self.other)] if isinstance(value, Offer) else [value, value]


class Answering(Alone):
    """One of two ranks, and the other answers this instead of an offer."""

    size = 2

    def __init__(self, answer: str) -> None:
        self.answer = answer

    def all_gather(self, value: Any) -> list[Any]:
        return [value, self.answer]


def planning(
    planner: Planner, limits: Limits | None = None, agreement: Alone | None = None, room_bytes: float = float("inf")
) -> Planning:
    return Planning(planner, lambda _: limits or Limits(), FixedMachine(), lambda: room_bytes, agreement or Alone())


class Seeing:
    """A planner that keeps what it is given."""

    def __init__(self, name: str = "keep") -> None:
        self.traces: list[Trace] = []
        self._planner = PLANNERS[name]

    def __call__(self, trace: Trace, limits: Limits) -> Plan:
        self.traces.append(trace)
        return self._planner(trace, limits)


def made(planner: Planner, fit: Fit = SURE, current: PlanInForce | None = None, **more: Any) -> PlanInForce:
    found = planning(planner, **more).make(TRACE, LAYOUT, fit, frozenset(), current)
    assert isinstance(found, PlanInForce)
    return found


@pytest.mark.parametrize("kept_s", [1.0, 2.0, 3.0])
def test_a_trace_is_as_long_as_it_was_fitted_and_so_is_what_recomputing_takes(kept_s: float) -> None:
    trace = replace(TRACE, optimizer_s=0.5)
    found = calibrated(trace, Fit(kept_s, 0.5, 0.0, 0.0, 0.0))
    scale = kept_s / trace.step_s
    assert found.step_s == pytest.approx(kept_s) and found.optimizer_s == pytest.approx(scale * 0.5)
    recomputed_s = [block.forward_s * found.recompute_factor for block in found.blocks]
    assert recomputed_s == pytest.approx([0.5 * scale * block.forward_s for block in TRACE.blocks])


def test_the_plan_is_made_for_one_error_more_and_promises_what_is_most_likely() -> None:
    planner = Seeing("recompute")
    fit = Fit(TRACE.step_s, 0.8, 0.1, 2e-9, 1e-9)
    found = made(planner, fit)
    (careful,) = planner.traces
    assert careful.recompute_factor == pytest.approx(0.9)
    assert careful.resources.compute_s_per_byte == pytest.approx(3e-9)
    assert found.trace.recompute_factor == pytest.approx(0.8)
    assert found.trace.resources.compute_s_per_byte == pytest.approx(2e-9)
    assert found.plan.prediction.recomputed_s == pytest.approx(0.8)


def test_the_slowest_rank_counts_and_what_one_cannot_recompute_nobody_does() -> None:
    planner = Seeing("recompute")
    slow = replace(resources(), compute_s_per_byte=5e-9, staging_bytes=1000)
    other = Besides(resources=slow, fit=replace(SURE, compute_error_s_per_byte=1e-9), non_recomputable=frozenset({"a"}))
    found = made(planner, agreement=other)
    assert planner.traces[0].resources.compute_s_per_byte == pytest.approx(6e-9)
    assert found.trace.resources == slow
    assert found.plan.recomputed_blocks == (False, True)


def test_the_least_room_counts() -> None:
    peak_bytes = made(PLANNERS["adaptive"]).plan.prediction.peak_saved_bytes
    found = made(PLANNERS["adaptive"], agreement=Besides(room_bytes=peak_bytes - 1))
    assert found.limits.activation_budget_bytes == peak_bytes - 1


def test_a_rank_that_has_nothing_to_offer_delays_the_plan_on_all() -> None:
    answering = planning(PLANNERS["keep"], agreement=Answering("has no trace"))
    assert answering.make(TRACE, LAYOUT, SURE, frozenset()) == NoPlan("rank 1 has no trace", is_final=False)
    alone = planning(PLANNERS["keep"])
    assert alone.make(None, LAYOUT, None, frozenset()) == NoPlan("rank 0 has no trace", is_final=False)


def test_what_a_rank_cannot_find_out_is_its_answer_and_no_error() -> None:
    def no_descriptors() -> float:
        raise OSError("Too many open files")

    failing = Planning(PLANNERS["keep"], lambda _: Limits(), FixedMachine(), no_descriptors, Alone())
    found = failing.make(TRACE, LAYOUT, SURE, frozenset())
    assert found == NoPlan("rank 0 failed (OSError: Too many open files)", is_final=False)


def test_a_planner_that_fails_is_not_asked_again() -> None:
    def failing(trace: Trace, limits: Limits) -> Plan:
        raise ZeroDivisionError("a bug")

    found = planning(failing).make(TRACE, LAYOUT, SURE, frozenset())
    assert found == NoPlan("rank 0 could not plan (ZeroDivisionError: a bug)", is_final=True)


def test_a_plan_that_is_worse_than_the_one_in_force_does_not_replace_it() -> None:
    old, longer = made(PLANNERS["keep"]), made(PLANNERS["recompute"])
    assert longer.plan.prediction.step_s > 1.1 * old.plan.prediction.step_s
    assert made(PLANNERS["recompute"], SURE, old).is_same_as(old)
    assert not made(PLANNERS["keep"], SURE, longer).is_same_as(longer)


def test_a_plan_for_another_layout_is_not_compared_with_the_new_one() -> None:
    old = made(PLANNERS["adaptive"])
    assert old.is_for(TRACE, LAYOUT)
    for other in (
        replace(old, layout=Layout(())),
        replace(old, trace=replace(TRACE, storages=(*TRACE.storages, TRACE.storages[-1]))),
        replace(old, trace=replace(TRACE, blocks=tuple(replace(block, module="other") for block in TRACE.blocks))),
    ):
        assert not other.is_for(TRACE, LAYOUT)
        assert made(PLANNERS["adaptive"], SURE, other).is_same_as(old)


def test_the_same_warning_of_a_budget_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tight = planning(PLANNERS["keep"], Limits(activation_budget_bytes=1))
    for _ in range(3):
        tight.make(TRACE, LAYOUT, SURE, frozenset())
    assert sum("no plan fits 1 bytes" in record.message for record in caplog.records) == 1


def test_a_plan_that_makes_no_difference_leaves_the_old_one_with_a_new_promise() -> None:
    old = made(PLANNERS["adaptive"])
    longer = replace(SURE, kept_s=1.5 * TRACE.step_s)
    found = made(PLANNERS["adaptive"], longer, old)
    assert found.is_same_as(old) and found.plan.placements == old.plan.placements
    assert found.plan.prediction.step_s == pytest.approx(1.5 * TRACE.step_s, rel=0.01)


def test_a_plan_that_makes_a_difference_takes_the_place_of_the_old_one() -> None:
    old = made(PLANNERS["tba"])
    assert any(place is Placement.NVME for place in old.plan.placements)
    dear = replace(SURE, compute_s_per_byte=1e-3)
    found = made(PLANNERS["adaptive"], dear, old)
    assert not found.is_same_as(old)
    assert Placement.NVME not in found.plan.placements


def test_what_may_no_longer_be_recomputed_asks_for_another_plan_whatever_it_costs() -> None:
    old = made(PLANNERS["recompute"])
    assert all(old.plan.recomputed_blocks)
    found = planning(PLANNERS["adaptive"], Limits(activation_budget_bytes=10**12)).make(
        TRACE, LAYOUT, replace(SURE, recompute_factor=1e-9), frozenset({"b"}), old
    )
    assert isinstance(found, PlanInForce) and not found.is_same_as(old) and not found.plan.recomputed_blocks[1]


def test_waits_that_nobody_foresaw_are_promised_of_a_plan_that_nothing_can_replace() -> None:
    old = made(PLANNERS["tba"])
    moved_bytes = sum(nbytes for place, nbytes in old.bytes_by_placement if place is Placement.NVME)
    waits = replace(SURE, wait_s_per_byte=2.0 / moved_bytes, feared_wait_s_per_byte=2.0 / moved_bytes)
    found = made(PLANNERS["tba"], waits, old)
    assert found.is_same_as(old)
    assert found.plan.prediction.step_s == pytest.approx(old.plan.prediction.step_s + 2.0)
    assert found.foreseen_wait_s == pytest.approx(old.foreseen_wait_s)  # else they would be forgotten at the next look
