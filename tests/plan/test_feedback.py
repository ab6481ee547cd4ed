"""What steps under a plan show: how much may move from now on, and when to plan or to record again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median
from typing import Any

import pytest
from support.traces import SIZE, resources, storage

from ds_tba.config import Placement
from ds_tba.plan.feedback import (
    INCREASE,
    MAX_DRIFT,
    MAX_STEPS,
    MIN_STEPS,
    RATE_CHANGE,
    Action,
    Feedback,
    OptimizerStep,
)
from ds_tba.plan.plan import Limits, Plan, Prediction
from ds_tba.plan.trace import Trace

RATES = (100.0, 200.0)
KEPT_S, OVERHEAD = 1.0, 0.02
PLANNED_AT = 4
STORAGES = 200
HALF_BYTES = STORAGES * SIZE // 2
TRACE = Trace(tuple(storage(0.0, 1.0, None, (-1,)) for _ in range(STORAGES)), (), resources(), KEPT_S)


def plan_of(
    share: float, moved: float = 1.0, step_s: float = KEPT_S, budget: int | None = None, computed_s: float = 0.0
) -> Plan:
    """A plan that moves so much as far as the share allows that."""
    count = int(min(share, moved) * STORAGES + 1e-6)
    places = (Placement.NVME,) * count + (Placement.KEEP,) * (STORAGES - count)
    cost = Prediction(SIZE, step_s, 0.0, 0.0, 0, 0, 0, 0, 0, rematerialized_s=computed_s)
    limits = Limits(OVERHEAD, budget, movable_share=share)
    return Plan("test", TRACE, limits, places, (), (), cost)


def decided(
    feedback: Feedback, step: int, time_s: float = KEPT_S, rates: tuple[float, float] = RATES, **seen: Any
) -> Action:
    """Judge a step of one micro-step, but for what is given."""
    return feedback.decide(step, time_s, rates, OptimizerStep(None, **{"micro_steps": 1, **seen}))


@dataclass
class World:
    """Steps of a machine on which moving costs more than any plan knows, and a planner that moves what it may."""

    kept_s: float = KEPT_S
    hidden_s: float = 0.0  # of moving everything
    known_s: float = 0.0  # that moving is known to cost the kernels, in the recording too
    unseen_s: float = 0.0  # by which the recording was longer for moving without anybody's knowledge
    noise_s: float = 0.0  # standard deviation of a step's time
    plan: Callable[[float], Plan] = plan_of  # makes one for a share
    feedback: Feedback = field(default_factory=Feedback)
    rates: tuple[float, float] = RATES
    times_s: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    step: int = PLANNED_AT
    chance: random.Random = field(default_factory=lambda: random.Random(5))

    def __post_init__(self) -> None:
        self.feedback.learn(KEPT_S + self.known_s + self.unseen_s, self.known_s)
        self.feedback.change(Action.PLAN, self.step)
        self.follow()

    def follow(self) -> None:
        plan = self.plan(self.feedback.share)
        self.in_force = replace(plan, trace=self.feedback.corrected(plan.trace))
        self.feedback.follow(self.in_force, self.rates)

    def time_s(self) -> float:
        more_s = self.hidden_s * self.in_force.moved_share + self.in_force.prediction.rematerialized_s
        return max(0.01, self.kept_s + more_s + self.chance.gauss(0.0, self.noise_s))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.times_s.append(self.time_s())
            self.shares.append(self.in_force.moved_share)
            action = decided(self.feedback, self.step, self.times_s[-1], self.rates)
            if action is not Action.GO_ON:
                if action is Action.RECORD:
                    self.feedback.learn(self.kept_s + self.known_s + self.unseen_s, self.known_s)
                self.feedback.change(action, self.step)
                self.actions.append(self.step)
                self.follow()


# ---- the share ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise_s", [0.0, 0.005, 0.02])
@pytest.mark.parametrize("hidden_s", [0.0, 0.03, 0.1, 0.5, 3.0])
def test_steps_end_within_the_overhead_whatever_moving_costs(hidden_s: float, noise_s: float) -> None:
    worlds = [World(hidden_s=hidden_s, noise_s=noise_s, chance=random.Random(seed)) for seed in range(6)]
    for world in worlds:
        world.run(400)
    assert fmean(median(world.times_s[-100:]) for world in worlds) <= KEPT_S * (1 + OVERHEAD) + noise_s / 2
    affordable = min(1.0, OVERHEAD * KEPT_S / hidden_s) if hidden_s else 1.0
    moved_share = fmean(world.in_force.moved_share for world in worlds)
    assert affordable < INCREASE or moved_share >= 0.4 * affordable - noise_s


@pytest.mark.parametrize("storages", [5, 12, 24])
def test_few_storages_of_which_a_small_share_moves_none_are_moved_again(storages: int) -> None:
    """A share of 0.1 moves nothing where there are ten storages: raising goes on to one that does."""
    world = World(hidden_s=0.6, plan=lambda share: plan_of(share, moved=int(share * storages) / storages))
    world.run(60)
    world.hidden_s = 0.0
    world.run(900)
    assert world.in_force.limits.movable_share == 1.0 and world.in_force.moved_share == 1.0
    assert len(world.actions) < 40


def test_when_the_hidden_cost_disappears_everything_is_moved_again() -> None:
    world = World(hidden_s=0.1)
    world.run(200)
    assert world.in_force.moved_share <= 0.2
    world.hidden_s = 0.0
    world.run(300)
    shares = world.shares[-300:]
    assert shares[-1] == 1.0 and shares == sorted(shares)
    assert len(set(shares)) >= 4  # slowly: each time what steps have left room for


def test_a_cost_that_comes_in_mid_run_is_met_soon() -> None:
    world = World(noise_s=0.002)
    world.run(300)
    assert world.in_force.moved_share == 1.0
    world.hidden_s = 0.1
    world.run(60)
    assert median(world.times_s[-10:]) <= KEPT_S * (1 + OVERHEAD) + 0.002


@pytest.mark.parametrize("factor", [0.5, 1.3, 10.0])
def test_a_machine_that_is_slower_or_faster_than_recorded_moves_all_the_same(factor: float) -> None:
    """Moving is not the cause: a few steps without it show that."""
    world = World(kept_s=factor * KEPT_S)
    world.run(100)
    assert world.in_force.moved_share == 1.0
    assert world.feedback.kept_s == pytest.approx(factor * KEPT_S)


@pytest.mark.parametrize("factor", [1.3, 3.0])
@pytest.mark.parametrize("hidden_s", [0.0, 0.03, 0.1])
def test_after_a_slow_time_moving_takes_what_is_allowed_of_the_fast_steps(hidden_s: float, factor: float) -> None:
    """With all moved that the slow steps allowed, no step would show how short they are without."""
    world = World(kept_s=factor * KEPT_S, hidden_s=hidden_s)
    world.run(600)
    assert world.feedback.kept_s == pytest.approx(factor * KEPT_S)
    world.kept_s = KEPT_S
    world.run(1000)
    assert world.feedback.kept_s == pytest.approx(KEPT_S)
    assert world.times_s[-1] <= KEPT_S * (1 + OVERHEAD) + 1e-9
    assert max(world.shares[-300:]) >= (0.8 * min(1.0, OVERHEAD / hidden_s) if hidden_s else 1.0)


def test_shorter_steps_that_are_recorded_anew_are_no_end_of_a_slow_time() -> None:
    """Their kept step is a new one: fewer micro-steps, or a shorter sequence, would have everything stay otherwise."""
    world = World(kept_s=2 * KEPT_S)
    world.run(600)
    assert world.feedback.kept_s == pytest.approx(2 * KEPT_S) and world.in_force.moved_share == 1.0
    world.kept_s = KEPT_S
    world.feedback.learn(KEPT_S, 0.0)
    world.feedback.change(Action.RECORD, world.step)
    world.follow()
    actions = [*world.actions]
    world.run(400)
    assert world.actions == actions and world.in_force.moved_share == 1.0


@pytest.mark.parametrize("known_s", [0.0, 0.1, 9.0])
def test_what_the_recording_itself_took_longer_for_moving_is_taken_off(known_s: float) -> None:
    world = World(known_s=known_s)
    assert world.feedback.kept_s == pytest.approx(KEPT_S if known_s < 1 else 0.5 * (KEPT_S + known_s))


@pytest.mark.parametrize("computed_s", [0.015, 0.3])
def test_the_share_bounds_what_is_computed_again_too(computed_s: float) -> None:
    """A plan that computes much again would be too long for ever, if only what it moves became less."""
    world = World(hidden_s=0.03, plan=lambda share: plan_of(share, computed_s=computed_s * share))
    world.run(300)
    assert median(world.times_s[-50:]) <= KEPT_S * (1 + OVERHEAD)
    assert world.feedback.kept_s == pytest.approx(KEPT_S)
    assert computed_s > 0.1 or max(world.shares[-50:]) >= 0.3


def test_steps_that_are_shorter_than_a_kept_one_was_recorded_are_recorded_again() -> None:
    """The recorded steps were a cold machine's: with ten times as long steps allowed, no step would be too long."""
    world = World(hidden_s=0.3)
    world.feedback.learn(10 * KEPT_S, 0.0)
    world.follow()
    world.run(100)
    assert world.feedback.kept_s == pytest.approx(KEPT_S)
    assert median(world.times_s[-50:]) <= KEPT_S * (1 + OVERHEAD)


def test_steps_are_recorded_again_once_where_recordings_stay_too_long() -> None:
    """The share rises to 1, although a budget lets no plan keep everything, and so show what a kept step takes."""
    budget = partial(plan_of, step_s=KEPT_S, budget=SIZE)
    world = World(unseen_s=0.3, plan=lambda share: budget(max(share, 0.3)), feedback=Feedback(is_drive_shared=True))
    world.run(2000)
    assert world.feedback.share == 1.0 and len(world.actions) == 1 + 10


def test_after_a_recording_that_came_to_nothing_a_later_one_counts() -> None:
    world = World()
    world.feedback.learn(10 * KEPT_S, 0.0)
    world.follow()
    step = PLANNED_AT
    for seen in ({}, {"unknown_saves": 1}):  # each ends in a recording; that for shorter steps shows nothing
        action = Action.GO_ON
        while action is Action.GO_ON:
            step += 1
            action = decided(world.feedback, step, KEPT_S, **seen)
        world.feedback.change(action, step)
        world.follow()
    world.feedback.learn(10 * KEPT_S, 0.0)
    world.follow()
    found = [decided(world.feedback, step + 1 + number, KEPT_S) for number in range(50)]
    assert Action.RECORD in found and "with everything kept 10 s before" in world.feedback.reason


def test_slow_steps_among_those_that_keep_everything_hide_no_cost() -> None:
    world = World(feedback=Feedback(is_drive_shared=True))  # whose share begins at 0
    for step in range(15):
        decided(world.feedback, PLANNED_AT + 1 + step, KEPT_S * (1.5 if step % 3 else 1.0))
    assert world.feedback.kept_s == KEPT_S


def test_a_rise_that_makes_steps_too_long_is_taken_back_at_once() -> None:
    world = World(hidden_s=0.1)
    world.run(200)
    rises = [share for before, share in zip(world.shares, world.shares[1:], strict=False) if share > before]
    assert max(world.shares[60:]) <= 0.3 and rises and world.feedback.share == round(world.feedback.share, 3)
    assert sum(time_s > KEPT_S * (1 + OVERHEAD) + 1e-9 for time_s in world.times_s[60:]) <= 40


def test_with_a_budget_steps_are_held_against_what_the_plan_promised() -> None:
    promised = World(hidden_s=0.3, plan=lambda share: plan_of(share, step_s=1.3, budget=SIZE))
    promised.run(100)
    assert promised.in_force.moved_share == 1.0 and not promised.actions
    longer = World(hidden_s=0.6, plan=lambda share: plan_of(share, step_s=1.3, budget=SIZE))
    longer.run(100)
    assert longer.in_force.moved_share < 0.6


def test_where_a_budget_leaves_no_choice_the_share_stays_and_is_asked_for_ever_more_rarely() -> None:
    """The planner moves what it takes."""

    def all_moved(share: float) -> Plan:
        full = plan_of(1.0, budget=SIZE)
        return replace(full, limits=replace(full.limits, movable_share=share))

    world = World(hidden_s=0.6, plan=all_moved)
    world.run(2000)
    assert world.in_force.moved_share == 1.0 and len(world.actions) <= 12
    world.hidden_s = 0.0
    world.run(4000)
    assert world.feedback.share == 1.0


@pytest.mark.parametrize("run", [3, 5, 7, 10, 20, 30])
def test_steps_that_alternate_between_two_times_are_not_reviewed_for_ever(run: int) -> None:
    world = World()
    for number in range(5000):
        world.kept_s = KEPT_S * (4 if (number // run) % 2 else 1)
        world.run(1)
    assert len(world.actions) <= 32 and sum(step > 1000 for step in world.actions) <= 20


def test_one_long_step_changes_nothing() -> None:
    world = World()
    world.run(100)
    world.kept_s = 9.0
    world.run(2)
    world.kept_s = KEPT_S
    world.run(100)
    assert not world.actions and world.feedback.kept_s == pytest.approx(KEPT_S)


@dataclass
class SharedDrive(World):
    """ZeRO reads what each step needs from the drive that takes activations, and both have their part of its rate."""

    zero_s: float = 0.6  # of the drive alone, for what ZeRO reads in a step; all that may be offloaded takes a second

    def __post_init__(self) -> None:
        self.unseen_s = self._step_s(1.0) - KEPT_S  # all is offloaded in the recording
        super().__post_init__()

    def _step_s(self, share: float) -> float:
        return max(KEPT_S, self.zero_s + share)

    def time_s(self) -> float:
        return self._step_s(self.in_force.moved_share) + self.chance.gauss(0.0, self.noise_s)


@pytest.mark.parametrize("noise_s", [0.0, 0.005])
@pytest.mark.parametrize("zero_s", [0.3, 0.6, 0.9])
def test_a_drive_that_zero_uses_gets_what_it_leaves_and_not_what_lanes_can_take_from_it(
    zero_s: float, noise_s: float
) -> None:
    """From the idle drive's share on, every step is as long as the recorded ones, and none shows that."""
    now = SharedDrive(zero_s=zero_s, noise_s=noise_s, feedback=Feedback(is_drive_shared=True))
    assert now.in_force.moved_share == 0.0  # which shows the kept step
    now.run(400)
    assert fmean(now.times_s) <= KEPT_S * (1 + 2 * OVERHEAD)  # it rises until steps are longer, and falls
    assert fmean(now.shares) >= 0.5 * (KEPT_S - zero_s)


# ---- reviews --------------------------------------------------------------------------------------------------------


@pytest.fixture
def feedback() -> Feedback:
    return World().feedback


def asked(feedback: Feedback, steps: range, **seen: Any) -> list[int]:
    """The steps after which it asks for something, and gets a plan."""
    found = []
    for step in steps:
        action = decided(feedback, step, **seen)
        if action is not Action.GO_ON:
            found.append(step)
            feedback.change(action, step)
            feedback.follow(plan_of(feedback.share), seen.get("rates", RATES))
    return found


def test_steps_as_planned_ask_for_nothing(feedback: Feedback) -> None:
    assert asked(feedback, range(PLANNED_AT + 1, 2000)) == [] and feedback.reason == ""


@pytest.mark.parametrize(
    "rates", [(RATES[0] * RATE_CHANGE * 1.01, RATES[1]), (RATES[0], RATES[1] / RATE_CHANGE * 0.99)]
)
def test_other_rates_of_the_drives_ask_for_a_plan_once(feedback: Feedback, rates: tuple[float, float]) -> None:
    found = asked(feedback, range(PLANNED_AT + 1, 1000), rates=rates)
    assert found == [PLANNED_AT + MIN_STEPS] and feedback.reason == "the drives' rates have changed"


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ({"unknown_saves": 2}, "1 micro-steps, 2 unknown saves, 0% missing"),
        ({"missed_bytes": HALF_BYTES, "drift_bytes": HALF_BYTES}, "1 micro-steps, 0 unknown saves, 50% missing"),
        ({"micro_steps": 4, "time_s": 4.0}, ": 4 micro-steps, "),
        ({"micro_steps": 0}, ": 0 micro-steps, "),
    ],
)
def test_other_storages_or_micro_steps_than_planned_ask_for_a_recording(
    feedback: Feedback, seen: dict[str, Any], reason: str
) -> None:
    steps = range(PLANNED_AT + 1, PLANNED_AT + 1 + MIN_STEPS)
    assert [decided(feedback, step, **seen) for step in steps] == [Action.GO_ON] * 4 + [Action.RECORD]
    assert reason in feedback.reason
    assert feedback.measured_step_s is None  # the time of such a step does not count


def test_larger_storages_than_planned_ask_for_a_plan_at_once_and_smaller_ones_for_none(feedback: Feedback) -> None:
    assert decided(feedback, PLANNED_AT + 1, drift_bytes=HALF_BYTES, growth=0.2) is Action.PLAN
    assert "larger than those of the plan by 20%" in feedback.reason
    # Nor is the time of a step with smaller ones held against the plan.
    assert asked(feedback, range(PLANNED_AT + 2, 700), time_s=0.1, drift_bytes=HALF_BYTES) == []
    assert feedback.kept_s == KEPT_S


def test_after_a_plan_that_could_not_be_made_nothing_is_asked_for_before_a_while(feedback: Feedback) -> None:
    grown, grown_more = 2 * MAX_DRIFT, 3 * MAX_DRIFT
    assert decided(feedback, 100, growth=grown) is Action.PLAN
    feedback.change(Action.PLAN, 100)
    assert all(decided(feedback, step, growth=grown) is Action.GO_ON for step in range(101, 100 + MIN_STEPS))
    assert decided(feedback, 101, growth=grown_more) is Action.PLAN  # larger than ever before
    assert any(decided(feedback, step, growth=grown) is Action.PLAN for step in range(101, 130))
    # However often it was asked for: else steps would pass for longer ones, and hide what moving costs.
    assert feedback.corrected(TRACE).step_s == pytest.approx((1 + grown_more) * KEPT_S)


def test_whatever_asks_for_a_plan_or_a_recording_doubles_the_wait_for_all(feedback: Feedback) -> None:
    found, step = [], PLANNED_AT
    for seen in [{"unknown_saves": 2}, {"rates": (1.0, 1.0)}] * 5:
        since, action = step, Action.GO_ON
        while action is Action.GO_ON:
            step += 1
            action = decided(feedback, step, **seen)
        found.append((action, step - since))
        feedback.change(action, step)
        feedback.follow(plan_of(1.0), RATES)
    waits = [min(MAX_STEPS, MIN_STEPS * 2**number) for number in range(10)]
    assert found == [(Action.PLAN if number % 2 else Action.RECORD, wait) for number, wait in enumerate(waits)]


def test_drives_that_change_all_the_time_keep_no_share_from_rising() -> None:
    world = World(hidden_s=0.6)
    world.run(60)
    assert world.feedback.share < 0.5
    world.hidden_s = 0.0
    for number in range(1500):
        world.rates = (RATES[0] * (4 if number % 2 else 1), RATES[1])
        world.run(1)
    assert world.feedback.share == 1.0


def test_what_steps_take_is_the_median_of_the_last_few_under_the_plan(feedback: Feedback) -> None:
    assert feedback.measured_step_s is None
    for step, time_s in enumerate([0.9, 0.9, 0.1, 0.2, 0.3, 0.4, 0.5], PLANNED_AT + 1):
        decided(feedback, step, time_s)
    assert feedback.measured_step_s == 0.4
    feedback.change(Action.PLAN, PLANNED_AT + 8)
    assert feedback.measured_step_s is None
