"""What the steps before a plan show: two recordings, and rehearsals of recomputation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import StoreFactory
from test_policy import LAYOUT, TRACE
from test_recorder import LEAST_BYTES, MACHINE, ROWS, WIDTH, Stack, Ticks, record
from traces import resources

from ds_tba.agreement import Alone
from ds_tba.cache import TensorCache
from ds_tba.plan.limits import Limits
from ds_tba.plan.placement import Placement
from ds_tba.plan.planner import PLANNERS, recompute_and_move
from ds_tba.plan.trace import Resources, Trace
from ds_tba.planning import Planning
from ds_tba.policy import PlanInForce
from ds_tba.recorder import APART_FACTOR, Recorder, usual_s
from ds_tba.recording import RECORDINGS, Recording
from ds_tba.rehearsal import LEAST_REHEARSED, MOST_FACTOR, REHEARSALS, Rehearsal, Rehearsed
from ds_tba.survey import Survey


class FixedMachine:
    """Of known rates, for ``Planning``."""

    def measure(self) -> None: ...
    def note_step(self) -> None: ...
    def learn(self, moving_s: float, *, is_usual: bool) -> None: ...
    def learn_taken(self, taken_s: float, moved_bytes: int) -> None: ...

    def moved_bytes(self) -> int:
        return 0

    def taken_s(self, moved_bytes: int) -> float:
        return 0.0

    def resources(self, traffic: Any = ()) -> Resources:
        return resources()


class NoOthers:
    """Nobody else moves anything."""

    def begin(self, at_s: float = 0.0) -> None: ...
    def sample(self, at_s: float) -> None: ...

    def traffic(self) -> tuple[()]:
        return ()


# ---- recordings ---------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(make_store: StoreFactory) -> TensorCache:
    return TensorCache([make_store()], "cpu", LEAST_BYTES, wait_for_staging=True)


def recorded(cache: TensorCache, before_backward_s: float, rows: int = ROWS) -> Recorder:
    """A micro-step whose forward takes 6 s, with so much time before its backward."""
    ticks = Ticks()
    model = Stack(ticks)
    found = record(cache, ticks, model, torch.randn(rows, WIDTH))
    before, after = found._pauses[found._forward_end]  # the first of backward
    found._pauses[found._forward_end] = (before + before_backward_s - 1.0, after + before_backward_s - 1.0)
    moved = [(one + before_backward_s - 1.0, two + before_backward_s - 1.0) for one, two in
             found._pauses[found._forward_end + 1 :]]  # fmt: skip
    found._pauses[found._forward_end + 1 :] = moved
    found._ended += before_backward_s - 1.0
    return found


def test_two_recordings_of_the_same_give_the_mean_of_what_lies_between_hooks(cache: TensorCache) -> None:
    first, second = recorded(cache, 1.0), recorded(cache, 1.4)
    assert second.confirm(first)
    assert second.trace(MACHINE).end_s == pytest.approx(7.2)


def test_a_pause_of_the_machine_in_one_of_them_does_not_count(cache: TensorCache) -> None:
    first, second = recorded(cache, 1.0), recorded(cache, 1.01 * APART_FACTOR)
    assert second.confirm(first)
    assert second.trace(MACHINE).end_s == pytest.approx(7.0)


def test_a_recording_of_another_shape_says_nothing_of_this_one(cache: TensorCache) -> None:
    first, second = recorded(cache, 1.0, 2 * ROWS), recorded(cache, 1.4)
    assert not second.confirm(first)
    assert second.trace(MACHINE).end_s == pytest.approx(7.4)


@pytest.mark.parametrize(
    ("times_s", "expected"), [([1.0], 1.0), ([1.0, 1.2], 1.1), ([1.0, 1.6], 1.0), ([1e-6, 9e-6], 5e-6)]
)
def test_what_is_usual(times_s: list[float], expected: float) -> None:
    assert usual_s(times_s) == pytest.approx(expected)


class SlowHooks(TensorCache):
    """Whose pack takes a second of the clock, half of it for moving."""

    def __init__(self, ticks: Ticks, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.ticks = ticks
        self.timed: list[tuple[float, float]] = []

    def pack(self, tensor: torch.Tensor) -> Any:
        self.ticks.now_s += 1.0
        self.timed.append((self.ticks.now_s - 0.5, self.ticks.now_s))
        return super().pack(tensor)

    def take_moves(self) -> list[tuple[Any, Any]]:
        timed, self.timed = self.timed, []
        return timed


def test_hooks_are_what_they_take_beside_moving() -> None:
    ticks = Ticks()
    cache = SlowHooks(ticks, [], "cpu", LEAST_BYTES, wait_for_staging=True)
    found = record(cache, ticks, Stack(ticks), torch.randn(ROWS, WIDTH))
    assert found.trace(MACHINE).end_s == pytest.approx(7.0)  # as if there were none
    assert found.hooks_s() == pytest.approx(0.5 * cache.stats.packed_tensors)


def test_a_recording_is_enough_when_it_has_two_and_counts_what_moved(cache: TensorCache) -> None:
    ticks = Ticks()
    recording, model = Recording(cache, ticks, {}, NoOthers(), is_synchronous=True), Stack(ticks)
    for number in range(RECORDINGS):
        assert not recording.is_enough
        recorder = recording.begin()
        assert recorder is not None
        with recorder.watching(), cache.saving(around=recorder.around):
            loss = model(torch.randn(ROWS, WIDTH), recorder)
        recording.end_forward()
        loss.backward()
        recording.end_micro_step()
        ticks.now_s += 0.25
        recording.settle()
        recording.end_step(ticks.mark(), 100 + number)
    assert recording.is_enough and recording.begin() is None and recording.moved_bytes == 100
    trace = recording.trace(lambda traffic: replace(MACHINE, traffic=traffic), 1)
    assert (trace.end_s, trace.rest_s) == (pytest.approx(6.0), pytest.approx(0.25))


def test_two_forwards_before_a_backward_are_no_recording(cache: TensorCache) -> None:
    ticks = Ticks()
    recording, model = Recording(cache, ticks, {}, NoOthers(), is_synchronous=True), Stack(ticks)
    for _ in range(2):
        recorder = recording.begin()
        if recorder is not None:
            with recorder.watching(), cache.saving(around=recorder.around):
                model(torch.randn(ROWS, WIDTH), recorder)
        recording.settle()
    assert not recording.has_any and recording.begin() is None
    recording.end_step(ticks.mark(), 0)
    assert recording.begin() is not None and recording.steps == 1


# ---- rehearsals ---------------------------------------------------------------------------------------------------


def rehearsed(*steps: tuple[float, float], trace: Trace = TRACE, is_planned: bool = True, passes: int = 2) -> Rehearsal:
    """After steps of so many seconds, with recomputations that took so long together, and a move of 0.25 s."""
    plan = PlanInForce.of(recompute_and_move(trace, Limits()), trace, LAYOUT, Limits())
    ticks = Ticks()
    rehearsal = Rehearsal(plan, ticks)
    for step_s, recomputed_s in steps:
        began = ticks.mark()
        for _ in range(passes):
            rehearsal.mark()
            ticks.now_s += recomputed_s / passes
            rehearsal.mark()
        ticks.now_s = began + step_s
        rehearsal.end_step(began, ticks.mark(), [(0.0, 0.25)], 1000, is_planned=is_planned)
    return rehearsal


def shown(rehearsal: Rehearsal) -> Rehearsed:
    found = rehearsal.result()
    assert found is not None
    return found


def test_all_blocks_are_recomputed_and_all_else_that_may_be_is_moved() -> None:
    trace = replace(TRACE, blocks=(TRACE.blocks[0], replace(TRACE.blocks[1], is_recomputable=False)))
    plan = recompute_and_move(trace, Limits())
    assert plan.recomputed_blocks == (True, False)
    assert set(plan.placements) == {Placement.RECOMPUTE, Placement.NVME}
    nowhere = replace(trace, resources=replace(trace.resources, paths=()))
    assert set(recompute_and_move(nowhere, Limits()).placements) == {Placement.RECOMPUTE, Placement.KEEP}


def test_recomputing_takes_what_it_took_in_the_rehearsals() -> None:
    rehearsal = rehearsed((2.0, 0.6), (9.0, 5.0), (2.0, 0.8))  # the longest does not count
    assert shown(rehearsal).recomputed_s == pytest.approx(0.7)
    assert rehearsal.recompute_factor(TRACE, 0.7) == pytest.approx(0.7)  # the forward of both blocks took 1 s
    for absurd_s in (1.01 * MOST_FACTOR, 0.99 / MOST_FACTOR, 0.0):
        assert rehearsal.recompute_factor(TRACE, absurd_s) == 1.0
    assert rehearsal.recompute_factor(replace(TRACE, storages=(), blocks=()), 1.0) == 1.0


def test_a_step_without_its_recomputations_and_moves_is_one_that_keeps_all() -> None:
    found = shown(rehearsed((2.25, 0.5), (2.25, 0.5), (2.25, 0.5)))
    assert found.kept_s == pytest.approx(1.5) and found.moved_bytes == 1000


@pytest.mark.parametrize("odd", [{"is_planned": False}, {"passes": 1}])
def test_steps_that_did_not_go_as_planned_show_nothing(odd: dict[str, Any]) -> None:
    rehearsal = rehearsed(*[(2.0, 0.5)] * REHEARSALS, **odd)
    assert rehearsal.is_enough and rehearsal.result() is None
    assert rehearsed(*[(2.0, 0.5)] * (LEAST_REHEARSED - 1)).result() is None


def test_rehearsals_come_to_an_end() -> None:
    assert not rehearsed(*[(1.0, 0.1)] * (REHEARSALS - 1)).is_enough
    assert rehearsed(*[(1.0, 0.1)] * REHEARSALS).is_enough


def test_what_recomputing_takes_is_in_the_prediction() -> None:
    limits = Limits(max_step_overhead=100.0)
    dear, cheap = (PLANNERS["recompute"](replace(TRACE, recompute_factor=factor), limits) for factor in (2.0, 0.5))
    assert dear.prediction.recomputed_s == pytest.approx(2.0)
    assert cheap.prediction.recomputed_s == pytest.approx(0.5)


# ---- the plan that follows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overhead", "hooks_part", "expected"), [(0.1, 0.0, 0.1), (0.1, 0.05, 1.1 * 0.95 - 1), (0.02, 0.05, 0.0)]
)
def test_the_hooks_count_as_overhead(overhead: float, hooks_part: float, expected: float) -> None:
    seen: list[Limits] = []

    def planner(trace: Trace, limits: Limits) -> Any:
        seen.append(limits)
        return PLANNERS["keep"](trace, limits)

    def limits(step_s: float) -> Limits:
        return Limits(max_step_overhead=overhead)

    planning = Planning(planner, limits, FixedMachine(), lambda: float("inf"), Alone())
    assert planning.make(TRACE, LAYOUT, 1.0, frozenset(), hooks_part) is not None
    assert seen[0].max_step_overhead == pytest.approx(expected)


def rehearsing(limits: Limits, room_bytes: float = float("inf")) -> Planning:
    return Planning(PLANNERS["keep"], lambda _: limits, FixedMachine(), lambda: room_bytes, Alone())


def test_nothing_is_rehearsed_where_no_block_may_be_recomputed() -> None:
    assert rehearsing(Limits()).rehearsal(TRACE, LAYOUT, frozenset()) is not None
    assert rehearsing(Limits()).rehearsal(TRACE, LAYOUT, frozenset({"a", "b"})) is None
    assert rehearsing(Limits()).rehearsal(None, LAYOUT, frozenset()) is None
    assert rehearsing(Limits(recompute=False)).rehearsal(TRACE, LAYOUT, frozenset()) is None


def test_nothing_is_rehearsed_that_would_not_fit_the_device() -> None:
    needs_bytes = recompute_and_move(TRACE, Limits()).prediction.peak_saved_bytes
    assert rehearsing(Limits(), needs_bytes - 1).rehearsal(TRACE, LAYOUT, frozenset()) is None
    assert rehearsing(Limits(activation_budget_bytes=0), needs_bytes).rehearsal(TRACE, LAYOUT, frozenset()) is not None


class Learning(FixedMachine):
    """Remembers what it is told, and knows what lanes take of kernels."""

    def __init__(self) -> None:
        self.learned: list[tuple[float, int]] = []

    def learn_taken(self, taken_s: float, moved_bytes: int) -> None:
        self.learned.append((taken_s, moved_bytes))

    def taken_s(self, moved_bytes: int) -> float:
        return 0.5


SYNCHRONOUS = replace(TRACE, resources=replace(TRACE.resources, is_synchronous=True))


def corrected(
    rehearsal: Rehearsal | None, hooks_s: float, trace: Trace = SYNCHRONOUS, pauses_s: float = 0.0
) -> tuple[Survey, Learning, Trace]:
    machine = Learning()
    survey = Survey(
        TensorCache([], "cpu", 1, wait_for_staging=True), Ticks(), machine, NoOthers(), None, lambda _: None
    )
    survey._recorded_bytes, survey._hooks_s, survey._pauses_s = 5000, hooks_s, hooks_s + pauses_s
    return survey, machine, survey._corrected(trace, rehearsal)


def test_without_rehearsals_lanes_are_taken_to_take_what_they_take_elsewhere() -> None:
    survey, machine, trace = corrected(None, 0.1)
    assert trace.step_s == pytest.approx(2.0 - 0.5 + 0.1) and not machine.learned
    assert survey.hooks_part == pytest.approx(0.1 / 1.6) and trace.recompute_factor == 1.0


def test_after_rehearsals_a_kept_step_is_what_they_had_of_it() -> None:
    _, machine, trace = corrected(rehearsed(*[(1.75, 0.5)] * 3), 0.1)  # with a move of 0.25 s: 1 s is kept
    assert trace.step_s == pytest.approx(1.0)
    assert machine.learned == [(pytest.approx(2.0 + 0.1 - 1.0), 4000)]
    assert trace.recompute_factor == pytest.approx(0.5 / 0.5)  # of forwards that are half as long now


def test_rehearsals_slower_than_what_was_recorded_show_nothing_that_lanes_took() -> None:
    _, machine, trace = corrected(rehearsed(*[(5.75, 0.5)] * 3), 0.1)
    assert machine.learned[0][0] < 0 and trace.step_s == pytest.approx(2.1)


def test_rehearsals_that_show_nothing_change_nothing() -> None:
    _, machine, trace = corrected(rehearsed(*[(1.75, 0.5)] * 3, is_planned=False), 0.1)
    assert trace.step_s == pytest.approx(1.6) and not machine.learned and trace.recompute_factor == 1.0


def test_on_a_device_the_times_are_those_of_its_own_clock() -> None:
    _, machine, trace = corrected(rehearsed(*[(1.75, 0.5)] * 3), 0.0, TRACE)
    assert trace.step_s == TRACE.step_s and not machine.learned
    assert trace.recompute_factor == pytest.approx(0.5)


def test_what_a_recorder_takes_stands_for_what_checkpoints_take_outside_of_recomputations() -> None:
    _, machine, trace = corrected(rehearsed(*[(1.75, 0.5)] * 3), 0.1, pauses_s=0.2)
    assert trace.step_s == pytest.approx(1.0 - 0.2)
    assert machine.learned == [(pytest.approx(2.0 + 0.3 - 1.0), 4000)]
