"""When a step under a plan asks for another plan, another measurement or another trace."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from ds_tba.monitor import (
    FEW_STEPS,
    LEAST_LANE_BYTES,
    LEAST_SAFETY,
    LONGEST_SAFETY_STEP,
    NOISE_FACTOR,
    NOISE_S,
    OFF_PART,
    OFF_STEPS,
    PROBE_STEPS,
    RATE_BAND,
    RATE_STEPS,
    SAFETY_STEP,
    TAKEN_STEPS,
    TRACE_STEPS,
    WALL_STEPS,
    Backoff,
    Look,
    Monitor,
    Want,
)

RATES = (100.0, 200.0)
GOOD = Look(wall_s=1.0, moved_s=0.02, refusals=0, unplanned=0, drift=0.0, rates=RATES)


@pytest.fixture
def monitor() -> Monitor:
    monitor = Monitor()
    monitor.traced(2)
    monitor.planned(2, step_s=1.02, allowed_s=0.02, promised_s=0.02, rates=RATES)
    return monitor


EXPECTED_S = 1.02
JUST_LONG_S = (1 + OFF_PART) * EXPECTED_S + NOISE_S + 1e-6
MOVING = replace(GOOD, lane_bytes=LEAST_LANE_BYTES)


def asked(monitor: Monitor, looks: list[Look], step: int = 20) -> list[Want]:
    return [monitor.wish(step + number, look) for number, look in enumerate(looks)]


def test_steps_that_are_longer_one_and_all_have_the_lanes_to_blame(monitor: Monitor) -> None:
    wants = asked(monitor, [replace(MOVING, wall_s=JUST_LONG_S)] * OFF_STEPS)
    assert wants == [Want.GO_ON] * (OFF_STEPS - 1) + [Want.PLAN]
    assert monitor.excess_s == pytest.approx(JUST_LONG_S - EXPECTED_S)
    assert "s longer than was expected" in monitor.reason and monitor.safety == 1.0
    assert monitor.wish(40, GOOD) is Want.GO_ON and monitor.excess_s == 0.0


@pytest.mark.parametrize(
    "look",
    [
        replace(MOVING, wall_s=JUST_LONG_S - 2e-6),
        replace(MOVING, wall_s=1.01 * NOISE_FACTOR * EXPECTED_S),  # moving does not explain so much
        replace(MOVING, wall_s=JUST_LONG_S, lane_bytes=LEAST_LANE_BYTES - 1),
    ],
)
def test_lanes_are_not_blamed_for_all_that_is_long(monitor: Monitor, look: Look) -> None:
    assert Want.PLAN not in asked(monitor, [look] * OFF_STEPS) and monitor.excess_s == 0.0


@pytest.mark.parametrize(("shorter", "expected"), [(FEW_STEPS, Want.PLAN), (FEW_STEPS + 1, Want.GO_ON)])
def test_lanes_are_not_blamed_where_some_steps_are_as_promised(monitor: Monitor, shorter: int, expected: Want) -> None:
    looks = [MOVING] * shorter + [replace(MOVING, wall_s=JUST_LONG_S)] * (OFF_STEPS - shorter)
    assert asked(monitor, looks)[-1] is expected


def test_steps_that_are_shorter_one_and_all_are_to_the_lanes_credit(monitor: Monitor) -> None:
    wall_s = 2 * EXPECTED_S - JUST_LONG_S
    wants = asked(monitor, [replace(MOVING, wall_s=wall_s + 2e-6)] * OFF_STEPS)
    assert set(wants) == {Want.GO_ON} and monitor.excess_s == 0.0
    looks = [replace(MOVING, wall_s=1.1)] * FEW_STEPS + [replace(MOVING, wall_s=wall_s)] * (OFF_STEPS - FEW_STEPS)
    wants = asked(monitor, looks, step=28)
    assert wants == [Want.GO_ON] * (OFF_STEPS - 1) + [Want.PLAN]
    assert monitor.excess_s == pytest.approx(EXPECTED_S - JUST_LONG_S)
    assert "s shorter than was expected" in monitor.reason
    assert {monitor.wish(step, GOOD) for step in range(36, 300)} == {Want.GO_ON}  # nothing is to be measured


@pytest.mark.parametrize("first", [3, 200])
def test_lanes_that_were_blamed_are_measured_again_in_time(monitor: Monitor, first: int) -> None:
    asked(monitor, [replace(MOVING, wall_s=JUST_LONG_S)] * OFF_STEPS, step=first)
    blamed_at = first + OFF_STEPS - 1
    wants = [monitor.wish(step, GOOD) for step in range(blamed_at + 1, blamed_at + PROBE_STEPS[0] + 1)]
    assert (set(wants[:-1]), wants[-1]) == ({Want.GO_ON}, Want.PROBE)
    monitor.probed(blamed_at + PROBE_STEPS[0])
    assert {monitor.wish(step, GOOD) for step in range(blamed_at + PROBE_STEPS[0] + 1, 500)} == {Want.GO_ON}


def test_lanes_are_blamed_less_and_less_often(monitor: Monitor) -> None:
    asked_at = []
    for step in range(3, 300):
        want = monitor.wish(step, replace(MOVING, wall_s=JUST_LONG_S))
        if want is Want.PROBE:
            monitor.probed(step)
        if want is Want.PLAN:
            asked_at.append(step)
            monitor.planned(step, EXPECTED_S, 0.02, 0.02, RATES)
    assert asked_at[0] == 2 + OFF_STEPS
    assert [later - earlier for earlier, later in pairwise(asked_at)] == [TAKEN_STEPS[0] * 2**n for n in range(5)]


def test_what_steps_take_is_the_median_of_the_last_few_under_the_plan(monitor: Monitor) -> None:
    assert monitor.measured_step_s is None
    for step, wall_s in enumerate([9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0], 3):
        monitor.wish(step, replace(GOOD, wall_s=wall_s))
    assert monitor.measured_step_s == 3.0
    monitor.planned(10, step_s=1.02, allowed_s=0.02, promised_s=0.02, rates=RATES)
    assert monitor.measured_step_s is None


def test_a_promise_that_is_kept_is_no_reason(monitor: Monitor) -> None:
    assert {monitor.wish(step, GOOD) for step in range(3, 500)} == {Want.GO_ON}
    assert monitor.safety == 1.0


@pytest.mark.parametrize(
    ("look", "safety"),
    [
        (replace(GOOD, moved_s=0.2), LONGEST_SAFETY_STEP),
        (replace(GOOD, refusals=3), SAFETY_STEP),
        (replace(GOOD, refusals=3, moved_s=0.0), SAFETY_STEP),
    ],
)
def test_a_step_that_moved_for_too_long_or_found_no_room_asks_for_a_plan_at_once(
    monitor: Monitor, look: Look, safety: float
) -> None:
    assert monitor.wish(3, look) is Want.PLAN
    assert monitor.safety == pytest.approx(safety)  # the rates are those of the plan: they promise too much
    assert "moving took" in monitor.reason


@pytest.mark.parametrize(("moved_s", "safety"), [(0.032, 0.625), (0.027, SAFETY_STEP)])
def test_a_little_too_long_asks_for_a_plan_when_it_was_so_more_often(
    monitor: Monitor, moved_s: float, safety: float
) -> None:
    look = replace(GOOD, moved_s=moved_s)
    assert [monitor.wish(step, look) for step in range(3, 6)] == [Want.GO_ON, Want.GO_ON, Want.PLAN]
    assert monitor.safety == pytest.approx(safety)


def test_a_new_trace_makes_no_drive_faster_but_measuring_it_may(monitor: Monitor) -> None:
    monitor.wish(3, replace(GOOD, moved_s=0.2))
    monitor.traced(4)
    assert monitor.safety == LONGEST_SAFETY_STEP
    monitor.probed(5)
    assert monitor.safety == 1.0


def test_rates_that_explain_it_are_believed(monitor: Monitor) -> None:
    assert monitor.wish(3, replace(GOOD, moved_s=0.2, rates=(10.0, 200.0))) is Want.PLAN
    assert monitor.safety == 1.0


def test_safety_falls_until_the_promise_holds_but_not_to_nothing(monitor: Monitor) -> None:
    late = [step for step in range(3, 400) if monitor.wish(step, replace(GOOD, moved_s=5.0)) is Want.PLAN]
    assert late == [3, 4, 6, 10, 18, 34, 66, 130, 258]  # planning takes time, too
    assert LEAST_SAFETY <= monitor.safety < 0.01


def test_other_rates_ask_for_a_plan_once_the_last_one_has_had_its_time(monitor: Monitor) -> None:
    look = replace(GOOD, rates=(RATES[0] * RATE_BAND[1] * 1.01, RATES[1]))
    wants = [monitor.wish(step, look) for step in range(3, 3 + WALL_STEPS)]
    assert wants == [Want.GO_ON] * (WALL_STEPS - 1) + [Want.PLAN]


def test_rates_that_go_up_and_down_do_not_ask_all_the_time(monitor: Monitor) -> None:
    asked = []
    for step in range(3, 200):
        now = tuple(rate * (4 if (step // 5) % 2 else 1) for rate in RATES)
        if monitor.wish(step, replace(GOOD, rates=now)) is Want.PLAN:
            asked.append(step)
            monitor.planned(step, 1.02, 0.02, 0.02, now)
    assert len(asked) >= 4
    assert all(later - earlier >= RATE_STEPS[1] for earlier, later in pairwise(asked[3:]))


def test_a_drive_that_was_faster_is_measured_again(monitor: Monitor) -> None:
    slow = replace(GOOD, rates=(1.0, 2.0))
    monitor.planned(3, 1.02, 0.02, 0.0, slow.rates)
    assert Want.PROBE in [monitor.wish(step, slow) for step in range(4, 2 + PROBE_STEPS[0])]
    assert monitor.safety == 1.0


def test_a_rate_never_measured_says_nothing(monitor: Monitor) -> None:
    monitor.planned(2, 1.02, 0.02, 0.02, (0.0, 200.0))
    assert {monitor.wish(step, replace(GOOD, rates=(50.0, 200.0))) for step in range(3, 40)} == {Want.GO_ON}


def test_drives_are_measured_again_after_they_were_taken_to_be_slower(monitor: Monitor) -> None:
    monitor.wish(3, replace(GOOD, moved_s=0.2))
    wants = [monitor.wish(step, GOOD) for step in range(4, PROBE_STEPS[0] + 1)]
    assert (set(wants[:-1]), wants[-1]) == ({Want.GO_ON}, Want.PROBE)
    monitor.probed(PROBE_STEPS[0])
    assert monitor.safety == 1.0


@pytest.mark.parametrize("look", [replace(GOOD, unplanned=1), replace(GOOD, drift=0.2)])
def test_other_storages_than_planned_ask_for_a_trace_but_not_all_the_time(monitor: Monitor, look: Look) -> None:
    wants = [monitor.wish(step, look) for step in range(3, 2 + TRACE_STEPS[0] + 1)]
    assert (set(wants[:-1]), wants[-1]) == ({Want.GO_ON}, Want.RECORD)


def test_longer_steps_without_a_reason_ask_for_a_trace_but_one_does_not(monitor: Monitor) -> None:
    long = replace(GOOD, wall_s=2.0)
    first = 3 + TRACE_STEPS[0]
    wants = [monitor.wish(step, long if step == first else GOOD) for step in range(3, first + 20)]
    assert set(wants) == {Want.GO_ON}
    assert Want.RECORD in [monitor.wish(step, long) for step in range(first + 20, first + 20 + WALL_STEPS)]


def test_steps_that_are_shorter_than_the_trace_says_ask_for_another_one(monitor: Monitor) -> None:
    first = 3 + TRACE_STEPS[0]
    wants = [monitor.wish(step, replace(GOOD, wall_s=0.7)) for step in range(3, first + WALL_STEPS)]
    assert Want.RECORD in wants and "steps took 0.7 s where 1.02 s were expected" in monitor.reason


def test_what_is_done_again_and_again_is_done_ever_more_rarely_until_there_is_quiet() -> None:
    backoff, done = Backoff(2, 16), []
    for step in range(1, 60):
        if backoff.is_due(step):
            backoff.done(step)
            done.append(step)
    assert done == [2, 4, 8, 16, 32, 48]
    backoff.done(200)
    assert backoff.is_due(202)


def test_of_several_wishes_the_highest_is_done() -> None:
    assert sorted(Want) == [Want.GO_ON, Want.PLAN, Want.PROBE, Want.RECORD, Want.GIVE_UP]
