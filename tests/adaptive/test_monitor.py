"""When a step under a plan asks for a look at the plan, or for another recording."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from traces import SIZE, resources, storage

from ds_tba.adaptive.calibration import Observation
from ds_tba.adaptive.monitor import (
    COMPARED_STEPS,
    MAX_DRIFT,
    MAX_STEPS,
    MIN_STEPS,
    QUIET_STEPS,
    RATE_BAND,
    SURPRISE_FACTOR,
    Action,
    Counts,
    Monitor,
    Step,
    StepMetrics,
    compilations,
    moves_in_vain,
)
from ds_tba.adaptive.policy import PlanInForce
from ds_tba.config import Placement
from ds_tba.device.accelerator import Clock
from ds_tba.planner.plan import Limits, Plan, Prediction
from ds_tba.planner.trace import Layout, Trace
from ds_tba.telemetry.stats import CacheStats

RATES = (100.0, 200.0)
EXPECTED_S = 1.02
PLANNED_AT = 2
GOOD = StepMetrics(time_s=1.0, refusals=0, unplanned=0, drift=0.0, rates=RATES)


@pytest.fixture
def monitor() -> Monitor:
    monitor = Monitor()
    monitor.reviewed(PLANNED_AT)
    monitor.planned(EXPECTED_S, RATES, is_new=True)
    return monitor


def looks(monitor: Monitor, seen: StepMetrics, steps: range, expected_s: float = EXPECTED_S) -> list[int]:
    """The steps after which it asks to look, each look finding that steps take so long."""
    found = []
    for step in steps:
        if monitor.decide(step, seen) is not Action.GO_ON:
            found.append(step)
            monitor.reviewed(step)
            monitor.planned(expected_s, seen.rates, is_new=False)
    return found


def test_looks_come_ever_more_rarely(monitor: Monitor) -> None:
    asked = [PLANNED_AT, *looks(monitor, GOOD, range(PLANNED_AT + 1, 2000))]
    waits = [later - earlier for earlier, later in pairwise(asked)]
    assert waits[:6] == [MIN_STEPS * 2**n for n in range(6)] and set(waits[6:]) == {MAX_STEPS}
    assert "steps have shown more" in monitor.reason


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (replace(GOOD, refusals=3), "3 storages found no room"),
        (replace(GOOD, rates=(RATES[0] * RATE_BAND[1] * 1.01, RATES[1])), "rates have changed"),
        (replace(GOOD, rates=(RATES[0], RATES[1] * RATE_BAND[0] * 0.99)), "rates have changed"),
        (replace(GOOD, time_s=EXPECTED_S * SURPRISE_FACTOR * 1.01), "were expected"),
        (replace(GOOD, time_s=EXPECTED_S / SURPRISE_FACTOR * 0.99), "were expected"),
    ],
)
def test_a_surprise_after_quiet_has_the_next_look_come_soon_and_is_none_afterwards(
    monitor: Monitor, seen: StepMetrics, reason: str
) -> None:
    looks(monitor, GOOD, range(PLANNED_AT + 1, 700))
    asked = looks(monitor, seen, range(700, 700 + MIN_STEPS), expected_s=seen.time_s)
    assert len(asked) == 1 and asked[0] < 700 + MIN_STEPS
    assert reason in monitor.reason
    again = looks(monitor, seen, range(700 + MIN_STEPS, 1000), expected_s=seen.time_s)
    assert [later - earlier for earlier, later in pairwise([*asked, *again])] == [10, 20, 40, 80]  # as after any look


def test_a_machine_that_surprises_all_the_time_is_not_reviewed_all_the_time(monitor: Monitor) -> None:
    asked = []
    for step in range(3, 1000):
        now = tuple(rate * (4 if (step // 5) % 2 else 1) for rate in RATES)
        if monitor.decide(step, replace(GOOD, rates=now)) is Action.PLAN:
            asked.append(step)
            monitor.reviewed(step)
            monitor.planned(EXPECTED_S, now, is_new=True)
    assert len(asked) <= 9
    assert asked[0] <= 3 + MIN_STEPS


@pytest.mark.parametrize("run", [3, 5, 7, 10])
def test_steps_that_alternate_between_two_lengths_are_not_reviewed_for_ever(monitor: Monitor, run: int) -> None:
    expected_s, asked = EXPECTED_S, 0
    for step in range(3, 5000):
        seen = replace(GOOD, time_s=EXPECTED_S * (4 if (step // run) % 2 else 1))
        if monitor.decide(step, seen) is not Action.GO_ON:
            asked, expected_s = asked + 1, seen.time_s
            monitor.reviewed(step)
            monitor.planned(expected_s, RATES, is_new=False)
    assert asked <= 30


def test_small_surprises_do_not_hide_a_large_one(monitor: Monitor) -> None:
    for step in range(3, 900):
        seen = replace(GOOD, refusals=step // 40)
        if monitor.decide(step, seen) is not Action.GO_ON:
            monitor.reviewed(step)
            monitor.planned(EXPECTED_S, RATES, is_new=False)
    slow = replace(GOOD, time_s=2.1 * EXPECTED_S, refusals=900 // 40)
    asked = looks(monitor, slow, range(900, 1000), expected_s=slow.time_s)
    assert asked and asked[0] < 900 + COMPARED_STEPS + MIN_STEPS


def test_a_step_that_took_long_is_no_surprise_but_several_are(monitor: Monitor) -> None:
    looks(monitor, GOOD, range(PLANNED_AT + 1, 700))
    long = replace(GOOD, time_s=3.0)
    assert looks(monitor, long, range(700, 701)) == looks(monitor, GOOD, range(701, 720)) == []
    assert looks(monitor, long, range(720, 730), expected_s=3.0) == [720 + COMPARED_STEPS // 2]


def test_a_rate_never_measured_says_nothing(monitor: Monitor) -> None:
    monitor.planned(EXPECTED_S, (0.0, 200.0), is_new=True)
    looks(monitor, GOOD, range(PLANNED_AT + 1, 700))
    monitor.planned(EXPECTED_S, (0.0, 200.0), is_new=True)
    assert looks(monitor, replace(GOOD, rates=(50.0, 200.0)), range(700, 700 + QUIET_STEPS)) == []


def test_other_storages_than_planned_ask_for_a_recording(monitor: Monitor) -> None:
    seen = replace(GOOD, unplanned=2)
    assert [monitor.decide(step, seen) for step in range(3, 8)] == [Action.GO_ON] * 4 + [Action.RECORD]
    assert "2 saves that the plan did not know" in monitor.reason


def test_storages_that_the_plan_expects_in_vain_ask_for_a_recording(monitor: Monitor) -> None:
    due = PLANNED_AT + MIN_STEPS
    assert monitor.decide(due, replace(GOOD, missed=0.5, drift=0.5)) is Action.RECORD
    assert monitor.reason == "50% of what the plan expects was not saved"


def test_other_micro_steps_in_a_step_ask_for_a_recording_and_their_time_is_no_surprise(monitor: Monitor) -> None:
    seen = replace(GOOD, more_micro_steps=3, time_s=4.0)
    assert [monitor.decide(step, seen) for step in range(3, 8)] == [Action.GO_ON] * 4 + [Action.RECORD]
    assert "+3 micro-steps" in monitor.reason and monitor.measured_step_s is None


def test_larger_storages_than_planned_ask_for_a_plan_at_once_and_smaller_ones_for_none(monitor: Monitor) -> None:
    assert monitor.decide(3, replace(GOOD, drift=0.2, growth=0.2)) is Action.PLAN
    assert "larger than those of the plan by 20%" in monitor.reason
    monitor.reviewed(3)
    looks(monitor, GOOD, range(4, 700))
    smaller = replace(GOOD, time_s=0.1, drift=0.5)  # nor is the time of such a step held against the plan
    assert looks(monitor, smaller, range(700, 700 + QUIET_STEPS)) == []


def test_after_a_plan_that_could_not_be_made_nothing_is_asked_for_before_the_next_review(monitor: Monitor) -> None:
    grown = replace(GOOD, growth=2 * MAX_DRIFT)
    assert monitor.decide(100, grown) is Action.PLAN
    monitor.rest(100)
    asked = looks(monitor, grown, range(101, 130))
    assert asked[0] >= 100 + MIN_STEPS


def test_what_steps_take_is_the_median_of_the_last_few_under_the_plan(monitor: Monitor) -> None:
    assert monitor.measured_step_s is None
    for step, time_s in enumerate([9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0], 3):
        monitor.decide(step, replace(GOOD, time_s=time_s))
    assert monitor.measured_step_s == 3.0
    monitor.planned(EXPECTED_S, RATES, is_new=False)
    assert monitor.measured_step_s == 3.0
    monitor.planned(EXPECTED_S, RATES, is_new=True)
    assert monitor.measured_step_s is None


def test_where_nothing_could_be_recorded_it_is_tried_again_later() -> None:
    monitor = Monitor()
    assert monitor.may_record(1)
    monitor.reviewed(7)
    assert [monitor.may_record(step) for step in range(8, 13)] == [False] * 4 + [True]


def test_of_several_wishes_the_highest_is_done() -> None:
    assert sorted(Action) == [Action.GO_ON, Action.PLAN, Action.RECORD, Action.REST]


def test_a_step_knows_whether_something_was_compiled_in_it() -> None:
    def step() -> Step:
        return Step(0.0, 0, Counts())

    compiled = torch.compile(lambda x: x.sin() + 1, backend="aot_eager")
    x = torch.ones(2, requires_grad=True)
    first = step()
    loss = compiled(x).sum()
    first.end(1.0, Counts(), [])
    loss.backward()
    second = step()
    compiled(x).sum().backward()
    second.end(1.0, Counts(), [])
    third = step()
    compiled(torch.ones(3, requires_grad=True)).sum().backward()  # another shape
    third.end(1.0, Counts(), [])
    assert [one.has_compiled for one in (first, second, third)] == [True, False, True]


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_time_in_which_storages_are_made_again_is_no_time_of_a_step_in_which_all_is_kept(is_synchronous: bool) -> None:
    machine = replace(resources(), is_synchronous=is_synchronous)
    trace = Trace((storage(0.0, 1.0, None, (-1,)), storage(0.0, 1.0, None, (-1,))), (), machine, 2.0)
    predicted = Prediction(SIZE, 2.25, 0.0, 0.0, 0, 0, 0, 0, 0, rematerialized_s=0.25, rematerialized_bytes=SIZE)
    plan = Plan("test", (Placement.KEEP, Placement.REMATERIALIZE), (), (), predicted)
    step = Step(0.0, 1, Counts(), micro_steps=1)
    step.end(2.5, Counts(), [])
    clock = SimpleNamespace(elapsed_s=lambda before, after: after - before)
    followed = PlanInForce.of(plan, trace, Layout(()), Limits())
    assert step.observation(trace, followed, cast(Clock, clock)) == Observation(2.25, 0.0, 0, 0.0)


def test_moving_is_in_vain_where_it_lowers_no_peak_of_compiled_code() -> None:
    def stats(saved_bytes: int, resident_bytes: int) -> CacheStats:
        found = CacheStats()
        found.saved.add(saved_bytes)
        found.resident.add(resident_bytes)
        return found

    before = compilations()
    assert not moves_in_vain(stats(1000, 1000), 600, before)
    torch.compile(lambda x: x.sin(), backend="eager")(torch.ones(2))
    assert moves_in_vain(stats(1000, 1000), 600, before) and moves_in_vain(stats(1000, 1010), 600, before)
    assert not moves_in_vain(stats(1000, 900), 600, before) and not moves_in_vain(stats(1000, 1000), 500, before)
    torch._dynamo.reset()
    assert not moves_in_vain(stats(1000, 1000), 600, compilations())  # compiled before: says nothing of this step
