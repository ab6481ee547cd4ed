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

from ds_tba.adaptive.consensus import Planning
from ds_tba.adaptive.policy import PlanInForce
from ds_tba.adaptive.ranks import Alone
from ds_tba.adaptive.recorder import APART_FACTOR, Recorder, usual_s
from ds_tba.adaptive.recording import RECORDINGS, Recording
from ds_tba.autograd.cache import TensorCache
from ds_tba.plan.limits import Limits
from ds_tba.plan.placement import Placement
from ds_tba.plan.planner import PLANNERS, recompute_and_move
from ds_tba.planner.trace import Resources, Trace
from ds_tba.rehearsal import DEVIATION, MOST_FACTOR, REHEARSALS, TURNS, Rehearsal, Rehearsed
from ds_tba.survey import Survey


class FixedMachine:
    """Of known rates, for ``Planning``."""

    def measure(self) -> None: ...
    def note_step(self) -> None: ...
    def learn(self, moving_s: float, *, is_usual: bool) -> None: ...
    def learn_taken(self, taken_s: float, error_s: float, moved_bytes: int) -> None: ...

    def learn_excess(self, excess_s: float, moved_bytes: int) -> float:
        return excess_s

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


Steps = list[tuple[float, float]]


def rehearsed(
    steps: Steps, *, in_turns: bool = False, trace: Trace = TRACE, is_planned: bool = True, passes: int = 2
) -> Rehearsal:
    """After steps of so many seconds, with recomputations that took so long together, and a move of 0.25 s.

    Those that rehearse move 1000 bytes, the others 5000.
    """
    plan = PlanInForce.of(recompute_and_move(trace, Limits()), trace, LAYOUT, Limits())
    ticks = Ticks()
    rehearsal = Rehearsal(plan, ticks, in_turns=in_turns)
    for step_s, recomputed_s in steps:
        began, moves_all = ticks.mark(), rehearsal.plan is None
        for _ in range(0 if moves_all else passes):
            rehearsal.mark()
            ticks.now_s += recomputed_s / passes
            rehearsal.mark()
        ticks.now_s = began + step_s
        moved_bytes = 5000 if moves_all else 1000
        rehearsal.end_step(began, ticks.mark(), [(0.0, 0.25)], moved_bytes, is_planned=is_planned)
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


def test_recomputing_takes_what_it_took_in_the_rehearsals_without_the_first() -> None:
    rehearsal = rehearsed([(9.0, 5.0), (2.0, 0.8), (2.0, 0.6)])
    assert shown(rehearsal).recomputed_s == pytest.approx(0.6)
    assert rehearsal.recompute_factor(TRACE, 0.7) == pytest.approx(0.7)  # the forward of both blocks took 1 s
    for absurd_s in (1.01 * MOST_FACTOR, 0.99 / MOST_FACTOR, 0.0):
        assert rehearsal.recompute_factor(TRACE, absurd_s) == 1.0
    assert rehearsal.recompute_factor(replace(TRACE, storages=(), blocks=()), 1.0) == 1.0


def test_a_step_without_its_recomputations_and_moves_is_one_that_keeps_all() -> None:
    found = shown(rehearsed([(9.0, 0.5), (2.25, 0.5), (2.5, 0.5)]))
    assert (found.recomputed_s, found.kept_s) == (pytest.approx(0.5), pytest.approx(1.5))
    assert found.taken_s is None


@pytest.mark.parametrize("odd", [{"is_planned": False}, {"passes": 1}])
@pytest.mark.parametrize("in_turns", [False, True])
def test_steps_that_did_not_go_as_planned_show_nothing(odd: dict[str, Any], in_turns: bool) -> None:
    rehearsal = rehearsed([(2.0, 0.5)] * (TURNS if in_turns else REHEARSALS), in_turns=in_turns, **odd)
    assert rehearsal.is_enough and rehearsal.result() is None
    assert rehearsed([(2.0, 0.5)]).result() is None  # the first has much to set up


@pytest.mark.parametrize(("in_turns", "count"), [(False, REHEARSALS), (True, TURNS)])
def test_rehearsals_come_to_an_end(in_turns: bool, count: int) -> None:
    assert not rehearsed([(1.0, 0.1)] * (count - 1), in_turns=in_turns).is_enough
    assert rehearsed([(1.0, 0.1)] * count, in_turns=in_turns).is_enough


# Steps of what is kept: 1 s at first, 2 s later on; those that move everything in between take 0.4 s more.
REHEARSES, MOVES = (1.75, 0.5), (1.65, 0.0)
SLOW_REHEARSES, SLOW_MOVES = (2.75, 0.5), (2.65, 0.0)


def test_what_lanes_take_is_how_much_longer_steps_are_than_their_neighbours() -> None:
    first, others = (30.0, 20.0), [REHEARSES, MOVES] + 3 * [SLOW_REHEARSES, SLOW_MOVES]
    found = shown(rehearsed([first, MOVES, *others][:TURNS], in_turns=True))
    # For the time in which others have the machine nobody is to blame.
    assert found.taken_s == pytest.approx(0.4) and found.moved_bytes == 4000
    assert found.taken_error_s == pytest.approx(0.0)  # three of four are alike
    assert found.recomputed_s == pytest.approx(0.5) and found.kept_s == pytest.approx(2.0)


def test_how_well_it_is_known_is_by_how_much_the_differences_are_apart() -> None:
    longer_s = (0.1, 0.3, 0.5, 0.9)
    turns = [one for more_s in longer_s for one in [(1.25 + more_s, 0.0), REHEARSES]]
    found = shown(rehearsed([REHEARSES, *turns], in_turns=True))
    assert found.taken_s == pytest.approx(0.4)
    assert found.taken_error_s == pytest.approx(DEVIATION * 0.2 / 2)  # 0.3, 0.1, 0.1 and 0.5 from the median


def test_moving_steps_without_a_neighbour_that_went_as_planned_show_nothing() -> None:
    found = rehearsed([(2.0, 0.5), (1.65, 0.0)] * 2, in_turns=True)
    found._rehearsed = {10: found._rehearsed[2], 12: found._rehearsed[2]}
    assert (shown(found).kept_s, shown(found).taken_s) == (pytest.approx(1.25), None)


def test_a_drive_so_slow_that_steps_mostly_wait_is_tried_once_only() -> None:
    rehearsal = rehearsed([REHEARSES], in_turns=True)
    assert rehearsal.plan is None  # now everything is to be moved
    began = 100.0
    rehearsal.end_step(began, began + 3.0, [(began, began + 2.0)], 5000, is_planned=True)
    for _ in range(2):
        assert rehearsal.plan is not None and not rehearsal.is_enough
        for at_s in (200.0, 200.25, 200.5, 200.75):
            rehearsal._marks.append(at_s)
        rehearsal.end_step(200.0, 202.0, [], 0, is_planned=True)
    assert rehearsal.is_enough and shown(rehearsal).recomputed_s == pytest.approx(0.5)
    assert shown(rehearsal).taken_s is None  # one step may be odd


def test_rehearsals_in_turns_are_of_the_plan_and_of_none() -> None:
    rehearsal, kinds = rehearsed([], in_turns=True), []
    while not rehearsal.is_enough:
        kinds.append(rehearsal.plan is None)
        rehearsal.end_step(0.0, 1.0, [], 0, is_planned=True)
    assert kinds == [bool(number % 2) for number in range(TURNS)]


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


class CpuMachine(FixedMachine):
    """The same with a device that the host cannot run ahead of."""

    def resources(self, traffic: Any = ()) -> Resources:
        return replace(resources(), is_synchronous=True)


def rehearsing(limits: Limits, room_bytes: float = float("inf"), machine: FixedMachine | None = None) -> Planning:
    return Planning(PLANNERS["keep"], lambda _: limits, machine or FixedMachine(), lambda: room_bytes, Alone())


def test_nothing_is_rehearsed_on_a_device_where_no_block_may_be_recomputed() -> None:
    assert rehearsing(Limits()).rehearsal(TRACE, LAYOUT, frozenset()) is not None
    assert rehearsing(Limits()).rehearsal(TRACE, LAYOUT, frozenset({"a", "b"})) is None
    assert rehearsing(Limits()).rehearsal(None, LAYOUT, frozenset()) is None
    assert rehearsing(Limits(recompute=False)).rehearsal(TRACE, LAYOUT, frozenset()) is None


@pytest.mark.parametrize(("limits", "unfit"), [(Limits(recompute=False), ()), (Limits(), ("a", "b"))])
def test_where_nothing_may_be_recomputed_a_cpu_shows_what_a_step_takes_without_lanes(
    limits: Limits, unfit: tuple[str, ...]
) -> None:
    planning = rehearsing(limits, machine=CpuMachine())
    found = planning.rehearsal(TRACE, LAYOUT, frozenset(unfit))
    assert found is not None and set(found.plan.placements) == {Placement.KEEP}
    kept_bytes = found.plan.prediction.peak_saved_bytes
    tight = rehearsing(replace(limits, activation_budget_bytes=kept_bytes - 1), machine=CpuMachine())
    assert tight.rehearsal(TRACE, LAYOUT, frozenset(unfit)) is None
    crowded = rehearsing(limits, kept_bytes - 1, machine=CpuMachine())
    assert crowded.rehearsal(TRACE, LAYOUT, frozenset(unfit)) is None


def test_on_a_cpu_a_rehearsal_moves_nothing_unless_it_must() -> None:
    def moved(limits: Limits, machine: FixedMachine, room_bytes: float = float("inf")) -> bool:
        found = rehearsing(limits, room_bytes, machine).rehearsal(TRACE, LAYOUT, frozenset())
        assert found is not None and all(found.plan.recomputed_blocks)
        return Placement.NVME in found.plan.placements

    needs_bytes = PLANNERS["recompute"](TRACE, Limits()).prediction.peak_saved_bytes
    tight = Limits(activation_budget_bytes=needs_bytes - 1)
    assert not moved(Limits(), CpuMachine())
    assert not moved(Limits(activation_budget_bytes=needs_bytes), CpuMachine(), needs_bytes)
    assert moved(tight, CpuMachine()) and moved(Limits(), FixedMachine())


def test_nothing_is_rehearsed_that_would_not_fit_the_device() -> None:
    needs_bytes = recompute_and_move(TRACE, Limits()).prediction.peak_saved_bytes
    assert rehearsing(Limits(), needs_bytes - 1).rehearsal(TRACE, LAYOUT, frozenset()) is None
    assert rehearsing(Limits(activation_budget_bytes=0), needs_bytes).rehearsal(TRACE, LAYOUT, frozenset()) is not None


class Learning(FixedMachine):
    """Remembers what it is told, and knows what lanes take of kernels."""

    def __init__(self) -> None:
        self.learned: list[tuple[float, float, int]] = []

    def learn_taken(self, taken_s: float, error_s: float, moved_bytes: int) -> None:
        self.learned.append((taken_s, error_s, moved_bytes))

    def taken_s(self, moved_bytes: int) -> float:
        return 0.5


SYNCHRONOUS = replace(TRACE, resources=replace(TRACE.resources, is_synchronous=True))


def corrected(
    rehearsal: Rehearsal | None, hooks_s: float, trace: Trace = SYNCHRONOUS
) -> tuple[Survey, Learning, Trace]:
    machine = Learning()
    survey = Survey(
        TensorCache([], "cpu", 1, wait_for_staging=True), Ticks(), machine, NoOthers(), None, lambda _: None
    )
    survey._recorded_bytes, survey._hooks_s = 5000, hooks_s
    return survey, machine, survey._corrected(trace, rehearsal)


def test_without_rehearsals_lanes_are_taken_to_take_what_they_take_elsewhere() -> None:
    survey, machine, trace = corrected(None, 0.1)
    assert trace.step_s == pytest.approx(2.0 - 0.5 + 0.1) and not machine.learned
    assert survey.hooks_part == pytest.approx(0.1 / 1.6) and trace.recompute_factor == 1.0


@pytest.mark.parametrize("hooks_s", [0.0, 0.1])  # rehearsed steps have them as well
def test_after_rehearsals_a_kept_step_is_what_they_had_of_it(hooks_s: float) -> None:
    _, machine, trace = corrected(rehearsed([REHEARSES, MOVES] * 4 + [REHEARSES], in_turns=True), hooks_s)
    assert trace.step_s == pytest.approx(1.0)
    assert machine.learned == [(pytest.approx(0.4), pytest.approx(0.0), 4000)]
    assert trace.recompute_factor == pytest.approx(0.5 / 0.5)  # of forwards that are half as long now


def test_without_turns_rehearsals_say_nothing_of_lanes() -> None:
    _, machine, trace = corrected(rehearsed([REHEARSES] * 3), 0.1)
    assert trace.step_s == pytest.approx(1.0) and not machine.learned


def test_a_kept_step_may_be_longer_than_what_was_recorded() -> None:
    _, _, trace = corrected(rehearsed([(5.75, 0.5)] * 3), 0.1)
    assert trace.step_s == pytest.approx(5.0)


def test_rehearsals_that_show_nothing_change_nothing() -> None:
    _, machine, trace = corrected(rehearsed([REHEARSES] * 3, is_planned=False), 0.1)
    assert trace.step_s == pytest.approx(1.6) and not machine.learned and trace.recompute_factor == 1.0


def test_on_a_device_the_times_are_those_of_its_own_clock() -> None:
    _, machine, trace = corrected(rehearsed([REHEARSES] * 3), 0.0, TRACE)
    assert trace.step_s == TRACE.step_s and not machine.learned
    assert trace.recompute_factor == pytest.approx(0.5)
