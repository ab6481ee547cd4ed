"""Plans in a run: measured, made, followed, made again; and gradients that are the same bits all the while."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Closing
from planners import PLANNERS
from support import traces
from support.doubles import Accelerator, EventAccelerator, raising
from support.modelled_drive import ModelledDrive
from support.offloaders import watching
from support.planned_training import (
    DEPTH,
    FIRST_PLAN,
    NARROW_BYTES,
    ROWS,
    STEPS,
    WIDTH,
    Model,
    SmallDevice,
    controller_of,
    model,
    steps,
)
from support.stepping import assert_same_steps, end_step, forward
from torch import nn

from ds_tba.config import Placement
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.agreement import Alone
from ds_tba.plan.feedback import Action
from ds_tba.plan.plan import Limits, Plan, Planner
from ds_tba.plan.search import adaptive
from ds_tba.plan.trace import Trace
from ds_tba.storage.tiers import Selection

Make = Callable[..., ActivationOffloader]


@pytest.fixture
def make(tmp_path: Path, closing: Closing) -> Make:
    io = {"backend": "posix", "staging_bytes": 4 << 20, "swap_file_bytes": 64 << 20}
    return closing(partial(watching, tmp_path, io=io, max_step_overhead=1000.0, recompute=True))


def check(make: Make, micro_steps: int = 1, kind: type[Model] = Model, **block: Any) -> ActivationOffloader:
    """Train with and without; every loss and gradient must be the same."""
    torch.manual_seed(0)
    ours = kind()
    expected = steps(deepcopy(ours), None, [ROWS] * STEPS, micro_steps)
    offloader = make(ours, **block)
    assert_same_steps(expected, steps(ours, offloader, [ROWS] * STEPS, micro_steps))
    return offloader


def trained(make: Make, count: int, **options: Any) -> tuple[Model, ActivationOffloader]:
    """A model and its offloader after so many steps."""
    ours = model()
    offloader = make(ours, **options)
    steps(ours, offloader, [ROWS] * count)
    return ours, offloader


class Mapped(Model):
    """Calls its blocks inside of ``vmap``, where tensors have no storage to tell them by."""

    def call(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(layer, randomness="different")(x)


def test_blocks_inside_of_vmap_are_recorded_and_planned(make: Make) -> None:
    report = check(make, kind=Mapped).report()
    assert report.plans >= 1 and report.recomputed_bytes == 0


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
def test_gradients_are_exact_under_every_plan(make: Make, planner: Any, micro_steps: int) -> None:
    report = check(make, micro_steps=micro_steps, planner=planner).report()
    assert report.plans >= 1 and report.plan is not None and report.plan["planner"] == planner.__name__


def test_everything_is_moved_until_there_is_a_plan_which_is_then_followed(make: Make) -> None:
    ours, offloader = trained(make, FIRST_PLAN - 1, planner=PLANNERS["keep"])
    assert offloader.report().plans == 0
    steps(ours, offloader, [ROWS])
    before = offloader.report()
    assert before.plans == 1 and before.offloaded_bytes > 0
    steps(ours, offloader, [ROWS] * 3)
    after = offloader.report()
    assert after.plans == 1 and after.offloaded_bytes == before.offloaded_bytes
    assert after.kept_bytes_by_reason["plan"] > 0


def test_the_report_says_what_steps_take_beside_what_was_promised(make: Make) -> None:
    ours, offloader = trained(make, FIRST_PLAN)
    promised = offloader.report()
    assert promised.plan is not None and promised.plan["measured_step_s"] is None
    assert dict(promised.rows())["  plan: step"].count("(not measured yet; ") == 1
    began_s = time.perf_counter()
    steps(ours, offloader, [ROWS] * 3)
    took_s = time.perf_counter() - began_s
    found = offloader.report()
    assert found.plan is not None and 0 < found.plan["measured_step_s"] < took_s
    assert dict(found.rows())["  plan: step"].count(f"({found.plan['measured_step_s']:.3g} s measured; ") == 1


def test_the_peak_is_what_the_plan_promised(make: Make) -> None:
    """And it moves what it says."""
    ours, offloader = trained(make, FIRST_PLAN + 2)
    before = offloader.report()
    steps(ours, offloader, [ROWS])
    report = offloader.report()
    assert report.plan is not None
    assert report.offloaded_bytes - before.offloaded_bytes == report.plan["bytes"]["nvme"] > 0
    # It may be less: in steps of a millisecond reads come in the order in which threads are woken.
    assert report.step_peak_saved_bytes <= 1.05 * report.plan["peak_saved_bytes"]
    assert report.plan["peak_saved_bytes"] < report.peak_saved_bytes_without


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_would_not_fit_the_device_is_moved_whatever_it_costs(make: Make, ranks: int) -> None:
    room_bytes = 30 * NARROW_BYTES
    device = SmallDevice(ranks * room_bytes)  # the ranks of a CPU share its memory
    _, offloader = trained(make, FIRST_PLAN + 3, accelerator=device, ranks_on_node=ranks, max_step_overhead=0.0)
    report = offloader.report()
    assert 0 < report.step_peak_saved_bytes <= room_bytes < report.peak_saved_bytes_without


@pytest.mark.parametrize("accelerator", [Accelerator, EventAccelerator])
def test_lengths_that_alternate_are_planned_for_once(make: Make, accelerator: type[Accelerator]) -> None:
    ours, calls = model(), list[Any]()

    def counted(trace: Any, limits: Any) -> Any:
        calls.append(trace)
        return adaptive(trace, limits)

    offloader = make(ours, planner=counted, accelerator=accelerator(), recompute=False)
    steps(ours, offloader, [ROWS] * FIRST_PLAN + [2 * ROWS, ROWS] * 4)
    controller, found = controller_of(offloader), offloader.report().plan
    assert controller.in_force is not None and found is not None and "storages are larger" in found["reason"]
    saved_bytes, before = controller.in_force.trace.saved_bytes, len(calls)
    assert saved_bytes > 1.8 * 4 * ROWS * WIDTH * DEPTH
    steps(ours, offloader, [2 * ROWS, ROWS] * 10)
    assert controller.in_force.trace.saved_bytes == saved_bytes
    assert len(calls) <= before + 5  # reviews, more of them on a busy machine, and none for each of ten long steps


def test_steps_of_the_optimizer_without_a_forward_are_no_steps(make: Make) -> None:
    ours, offloader = trained(make, FIRST_PLAN, recompute=False)
    controller = controller_of(offloader)
    seen: list[int] = []
    controller.feedback.decide = lambda step, *_: (seen.append(step), Action.GO_ON)[1]  # type: ignore[method-assign]
    for _ in range(3):
        steps(ours, offloader, [ROWS])
        offloader.note_step()
        offloader.note_step()
    assert len(seen) == 3 and offloader.report().steps == FIRST_PLAN + 9


def test_other_blocks_than_planned_ask_for_another_trace(make: Make) -> None:
    ours, offloader = trained(make, FIRST_PLAN + 2)
    ours.layers = nn.ModuleList([*ours.layers, *ours.layers[:2]])  # two of them are called twice from now on
    steps(ours, offloader, [ROWS] * 14)
    report = offloader.report()
    assert report.plans >= 2 and report.plan is not None and report.plan["blocks"] == DEPTH + 2


def test_forwards_without_a_backward_are_said_once_and_tried_again_later(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    ours, offloader = trained(make, 0)
    for _ in range(10):
        with offloader.saving():
            ours(torch.randn(ROWS, WIDTH))
        offloader.note_micro_step()
        offloader.note_step()
    assert offloader.report().plans == 0
    assert sum("no plan yet" in record.message for record in caplog.records) == 1
    steps(ours, offloader, [ROWS] * 40)
    assert offloader.report().plans >= 1


class LacksTrace(Alone):
    """One of two ranks, and the other does as this one, but for its trace: that is always missing."""

    size = 2

    def all_reduce_max(self, value: int) -> int:
        return value if isinstance(value, Action) else 1


@pytest.mark.parametrize(("agreement", "is_over"), [(Alone(), True), (LacksTrace(), False)])
def test_ranks_record_for_the_trace_alone_until_all_of_them_have_one(
    make: Make, tmp_path: Path, agreement: Alone, is_over: bool
) -> None:
    """One that was done alone would talk no more, and the others would wait for it."""
    _, offloader = trained(
        make, FIRST_PLAN + 1, placement="nvme", report={"trace_path": str(tmp_path / "trace.json")}, agreement=agreement
    )
    assert (tmp_path / "trace.json").exists()
    assert controller_of(offloader)._is_over is is_over


def test_a_recording_that_is_no_trace_is_made_again_later(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("ds_tba.plan.recorder.Recorder.trace", raising(ZeroDivisionError("a rate of 0")))
        ours, offloader = trained(make, 0)
        steps(ours, offloader, [ROWS] * STEPS)
        report = offloader.report()
        assert report.plans == 0 and report.offloaded_bytes > 0
    steps(ours, offloader, [ROWS] * 40)
    assert offloader.report().plans >= 1


no_descriptors = raising(OSError("Too many open files"))


@pytest.mark.usefixtures("steady_drives")
def test_what_cannot_be_found_out_when_a_plan_is_made_delays_the_plan(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, offloader = trained(make, FIRST_PLAN)
    with monkeypatch.context() as patched:
        patched.setattr("ds_tba.plan.feedback.Feedback.decide", lambda *_: Action.PLAN)
        patched.setattr("ds_tba.plan.machine.Machine.limits", no_descriptors)
        steps(ours, offloader, [ROWS] * 2)
    assert any("no part in a plan now: OSError" in record.message for record in caplog.records)
    assert sum("no new plan now" in record.message for record in caplog.records) == 1
    assert offloader.report().plans == 1 and not controller_of(offloader)._is_over
    steps(ours, offloader, [ROWS + 64] * 40)
    assert offloader.report().plans >= 2


@pytest.mark.usefixtures("steady_drives")
def test_a_new_plan_is_made_with_the_rates_of_its_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, offloader = trained(make, FIRST_PLAN)
    monkeypatch.setattr("ds_tba.plan.feedback.Feedback.decide", lambda *_: Action.PLAN)
    monkeypatch.setattr("ds_tba.storage.tiers.Tiers.rates", lambda _: (1.0, 2.0))
    steps(ours, offloader, [ROWS])
    in_force = controller_of(offloader).in_force
    assert in_force is not None
    machine = in_force.trace.resources
    assert (machine.write_bytes_per_s, machine.read_bytes_per_s) == (1.0, 2.0)


@pytest.mark.usefixtures("steady_drives")
def test_a_new_recording_counts_also_where_the_step_that_asked_for_it_had_larger_storages(make: Make) -> None:
    ours, offloader = trained(make, FIRST_PLAN + 2, planner=PLANNERS["keep"])
    for _ in range(40):
        steps(ours, offloader, [ROWS + 2], micro_steps=2)
        in_force = controller_of(offloader).in_force
        if in_force is not None and offloader.report().plans == 2:
            break
    assert in_force is not None and in_force.trace.micro_steps == 2


def test_a_rank_that_cannot_judge_a_step_tells_the_others_to_go_on(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, offloader = trained(make, FIRST_PLAN)
    monkeypatch.setattr("ds_tba.plan.feedback.Feedback.decide", no_descriptors)
    steps(ours, offloader, [ROWS] * 4)
    assert offloader.report().plans == 1
    assert any("OSError: Too many open files" in record.message for record in caplog.records)


class Counting(Alone):
    """Counts the collectives."""

    def __init__(self) -> None:
        self.calls = 0

    def all_reduce_max(self, value: int) -> int:
        self.calls += 1
        return value

    def all_gather(self, value: Any) -> list[Any]:
        self.calls += 1
        return [value]


def test_a_forward_of_one_rank_alone_waits_for_nobody(make: Make) -> None:
    ours, agreement = model(), Counting()
    offloader = make(ours, agreement=agreement)
    for _ in range(4):
        before = agreement.calls
        with offloader.saving():
            ours(torch.randn(ROWS, WIDTH))
        assert agreement.calls == before
        steps(ours, offloader, [ROWS])
        assert agreement.calls > before


def test_ranks_that_follow_a_plan_talk_seldom_and_announce_no_look_that_changes_nothing(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    ours, agreement = model(), Counting()
    agreement.size = 2
    offloader = make(ours, planner=PLANNERS["keep"], agreement=agreement)
    with caplog.at_level("INFO", logger="ds_tba"):
        steps(ours, offloader, [ROWS] * (FIRST_PLAN + 1))
        before = agreement.calls
        steps(ours, offloader, [ROWS] * 24)
        assert 0 < agreement.calls - before <= 2 * 3
        steps(ours, offloader, [ROWS] * 15)
    assert offloader.report().plans == 1
    assert sum(record.message.startswith("plan ") for record in caplog.records) == 1


class Led(Alone):
    """Another rank asks for an action, if there is one."""

    asks: Action | None = None

    def all_reduce_max(self, value: int) -> int:
        return value if self.asks is None or not isinstance(value, Action) else max(value, self.asks)


def test_a_plan_that_another_rank_asked_for_says_so(make: Make) -> None:
    ours, ranks = model(), Led()
    offloader = make(ours, planner=PLANNERS["keep"], agreement=ranks, recompute=False)
    steps(ours, offloader, [ROWS] * FIRST_PLAN)
    feedback = controller_of(offloader).feedback
    feedback.reason = "an earlier one"
    feedback.growth = 1.0  # so that the plan is another one
    ranks.asks = Action.PLAN
    steps(ours, offloader, [ROWS])
    report = offloader.report()
    assert report.plan is not None and report.plans == 2 and report.plan["reason"] == "another rank asked for it"


def test_what_is_done_has_the_reason_of_who_asked_for_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, ranks = model(), Counting()
    ranks.size = 2  # they talk in every eighth step
    offloader = make(ours, planner=PLANNERS["keep"], agreement=ranks, recompute=False)
    steps(ours, offloader, [ROWS] * FIRST_PLAN)
    feedback, asked = controller_of(offloader).feedback, iter([Action.RECORD, Action.FALL])

    def decide(*_: object) -> Action:
        action = next(asked, Action.GO_ON)
        return action if action is Action.GO_ON else feedback._ask(action, f"for {action.name}")

    monkeypatch.setattr(feedback, "decide", decide)
    steps(ours, offloader, [ROWS] * 8)
    assert feedback.reason == "for RECORD"


def test_a_rank_without_a_forward_in_the_recorded_steps_says_that_it_has_no_trace(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Led()
    offloader = make(model(), agreement=ranks, recompute=False)
    for ranks.asks in (Action.RECORD, Action.PLAN):
        offloader.note_step()
    said = [record.message for record in caplog.records]
    assert any(text.startswith("no plan yet: ") for text in said) and not any("discarding" in text for text in said)


@pytest.mark.usefixtures("steady_drives")
@pytest.mark.parametrize("keeps", [False, True], ids=["lost", "kept"])
def test_a_step_in_which_a_forward_raised_is_neither_recorded_nor_judged(make: Make, keeps: bool) -> None:
    """A loop that goes on with the next batch, perhaps while it holds the graph of the one that raised."""
    ours = model()
    offloader = make(ours, planner=PLANNERS["keep"], recompute=False)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
    kept = []
    for number in range(FIRST_PLAN + 20):
        if number in (1, FIRST_PLAN + 8):
            with pytest.raises(ValueError, match="a bad batch"), offloader.saving():
                kept.append(ours(torch.randn(ROWS, WIDTH)))
                raise ValueError("a bad batch")
        if not keeps:
            kept.clear()
        forward(ours, torch.randn(ROWS, WIDTH), offloader).backward()
        offloader.note_micro_step()
        end_step(optimizer, offloader)
        kept.clear()
    found = controller_of(offloader)
    assert found.in_force is not None and found.in_force.trace.micro_steps == 1
    assert found.plans == 1 and found.feedback.reason == ""


@pytest.mark.usefixtures("steady_drives")
def test_after_the_end_no_plan_is_made(make: Make) -> None:
    ours, offloader = trained(make, FIRST_PLAN + 2)
    offloader.close()
    found = steps(ours, offloader, [ROWS] * 3)
    assert len(found) == 3 and offloader.report().plans == 1


@pytest.mark.parametrize("placement", ["adaptive", "nvme", "keep"])
def test_a_trace_is_written_and_can_be_read(make: Make, tmp_path: Path, placement: str) -> None:
    path = tmp_path / "trace.json"
    precious = tmp_path / "precious"
    precious.write_text("of somebody else")
    path.symlink_to(precious)
    check(make, placement=placement, report={"trace_path": str(path)})
    assert precious.read_text() == "of somebody else" and not path.is_symlink()
    trace = traces.read(path.read_text())
    # Where no plan is made, nobody looks at blocks, which could be recomputed.
    blocks = [f"layers.{number}" for number in range(DEPTH)] if placement == "adaptive" else []
    assert [block.module for block in trace.blocks] == blocks
    assert trace.end_s > 0 and trace.optimizer_s > 0
    assert all(block.is_recomputable for block in trace.blocks)


@pytest.mark.usefixtures("steady_drives")
@pytest.mark.parametrize("every", [1, 2])
def test_the_blocks_that_a_plan_has_chosen_run_again_and_are_counted(make: Make, every: int) -> None:
    def some(trace: Any, limits: Any) -> Any:
        again = tuple(number % every == 0 for number in range(DEPTH))
        return dataclasses.replace(PLANNERS["recompute"](trace, limits), recomputed_blocks=again)

    offloader = check(make, planner=some)
    report, in_force = offloader.report(), controller_of(offloader).in_force
    assert in_force is not None and len(in_force.recomputed) == DEPTH // every
    assert controller_of(offloader)._blocks.chosen == in_force.recomputed
    assert report.plan is not None and report.plan["recomputed_blocks"] == DEPTH // every
    assert report.recomputed_bytes > 0
    if every == 1:  # they save their inputs only
        assert report.recomputed_bytes == (STEPS - FIRST_PLAN) * report.plan["bytes"]["recompute"]


def test_steps_that_compile_are_neither_recorded_nor_counted(make: Make) -> None:
    """Else the plan would promise steps that take as long as the compiler."""
    compiled = torch.compile(lambda y: y + 1, backend="eager")
    dtypes = iter([None, torch.float64, None, torch.float16, None, torch.int64, None, None])  # each is compiled anew

    class Compiling(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dtype = next(dtypes)
            if dtype is not None:
                compiled(torch.ones(2, dtype=dtype))
            return super().forward(x)

    ours = Compiling()
    offloader = make(ours, recompute=False)
    controller, plans, times = controller_of(offloader), [], []
    for _ in range(8):
        steps(ours, offloader, [ROWS])
        plans.append(controller.plans)
        times.append(len(controller.feedback._times_s))
    # The first is warm-up; of the next four two compile; the sixth does so under the plan.
    assert plans == [0, 0, 0, 0, 1, 1, 1, 1]
    assert times == [0, 0, 0, 0, 0, 0, 1, 2]


# ---- several forwards before their backwards, as in a stage of a pipeline: one plan for all that are in flight ------

FORWARDS = 4
Counts = tuple[int, ...]
EVERY: Counts = (FORWARDS,) * 8


class InterruptionError(Exception):
    """Raised between the passes of a schedule."""


def run_schedule(ours: Model, offloader: ActivationOffloader | None, ahead: int, forwards: int, fails: bool) -> None:
    """One step of a schedule with so many forwards ahead of the first backward; then one follows the other."""
    with nullcontext() if offloader is None else offloader.interleaving():
        waiting: list[torch.Tensor] = []
        for number in range(forwards):
            waiting.append(forward(ours, torch.randn(ROWS, WIDTH), offloader))
            if fails and number == forwards - 2:
                raise InterruptionError
            if len(waiting) == ahead:
                waiting.pop(0).backward()
        for loss in waiting:
            loss.backward()


def train_in_turn(
    ours: Model, offloader: ActivationOffloader | None, ahead: int, forwards: Counts, fails_at: Counts = ()
) -> list[list[torch.Tensor]]:
    """The gradients of each step that did not fail."""
    optimizer, found = torch.optim.SGD(ours.parameters(), lr=0.01), []
    torch.manual_seed(7)
    for number, count in enumerate(forwards):
        try:
            run_schedule(ours, offloader, ahead, count, number in fails_at)
        except InterruptionError:
            optimizer.zero_grad()
            continue
        found.append([parameter.grad.clone() for parameter in ours.parameters() if parameter.grad is not None])
        end_step(optimizer, offloader)
    return found


def check_in_turn(
    make: Make, ahead: int, planner: Planner = adaptive, forwards: Counts = EVERY, fails_at: Counts = (), **rest: Any
) -> ActivationOffloader:
    """Train with and without; every gradient must be the same."""
    expected, ours = train_in_turn(model(), None, ahead, forwards, fails_at), model()
    offloader = make(ours, planner, **rest)
    assert_same_steps(expected, train_in_turn(ours, offloader, ahead, forwards, fails_at))
    return offloader


@pytest.mark.parametrize("ahead", [1, 2, FORWARDS])
@pytest.mark.parametrize("planner", [PLANNERS["adaptive"], PLANNERS["recompute"]], ids=["adaptive", "recompute"])
def test_gradients_are_exact_under_a_plan_for_all_forwards_in_flight(make: Make, planner: Planner, ahead: int) -> None:
    report = check_in_turn(make, ahead, planner, recompute=True).report()
    assert report.plans >= 1 and report.plan is not None  # more on a busy machine, whose rates change
    assert report.steps == report.micro_steps == len(EVERY)
    assert report.plan["blocks"] == FORWARDS * 4
    if planner is adaptive:
        assert report.step_peak_saved_bytes < report.peak_saved_bytes_without / 2
    else:
        assert report.recomputed_bytes > 0


def test_every_forward_of_a_schedule_is_in_the_trace_and_all_are_planned_alike(make: Make) -> None:
    seen: list[tuple[Trace, Plan]] = []

    def watched(trace: Trace, limits: Limits) -> Plan:
        seen.append((trace, adaptive(trace, dataclasses.replace(limits, recompute=False))))
        return seen[-1][1]

    check_in_turn(make, 2, watched, recompute=True)  # or no block is looked at
    trace, plan = seen[-1]
    count = len(trace.storages) // FORWARDS
    assert trace.forwards == tuple(count * number for number in range(FORWARDS))
    moved = np.array(plan.placements) == Placement.NVME
    assert (moved.reshape(FORWARDS, -1).sum(1) > 0).all()
    # The backward of the first forward is over when the third begins.
    assert trace.blocks[0].backward_end_s <= trace.blocks[2 * 4].forward_start_s <= trace.blocks[4].backward_start_s


@pytest.mark.parametrize("fails_at", [(1, 2), (5,)], ids=["while steps are recorded", "later"])
def test_steps_that_raised_are_not_recorded_and_the_next_ones_are_exact(make: Make, fails_at: Counts) -> None:
    offloader = check_in_turn(make, 2, fails_at=fails_at)
    report, in_force = offloader.report(), controller_of(offloader).in_force
    assert report.plans >= 1 and report.steps == len(EVERY) - len(fails_at)
    assert in_force is not None and len(in_force.trace.forwards) == FORWARDS
    assert offloader.cache.live_records == 0


def test_another_number_of_forwards_is_recorded_again(make: Make) -> None:
    offloader = check_in_turn(make, 2, forwards=EVERY + (FORWARDS + 2,) * 20)
    found = controller_of(offloader).in_force
    assert found is not None and len(found.trace.forwards) == FORWARDS + 2


def test_a_forward_alone_after_a_schedule_is_a_micro_step_of_its_own(make: Make) -> None:
    ours = model()
    offloader = make(ours)
    train_in_turn(ours, offloader, 2, (FORWARDS,))
    for _ in range(2):
        forward(ours, torch.randn(ROWS, WIDTH), offloader).backward()
        offloader.note_micro_step()
    assert offloader.report().micro_steps == 3


# ---- drives of a half, a tenth and a hundredth of their speed -------------------------------------------------------

LARGE = 2048  # rows: 0.5 MiB, and 2 MiB in the middle of a block: too large to share a request
FULL = 800e6  # bytes per second
ENOUGH_STEPS = FIRST_PLAN + 20  # for the monitor to have come to an end
MakeOn = Callable[..., tuple[Model, ActivationOffloader]]


@pytest.fixture
def make_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closing: Closing) -> MakeOn:
    # Neither may take the drive's place.
    made = closing(partial(watching, tmp_path, max_step_overhead=0.5, recompute=False, rematerialize=False))

    def make(
        backend: ModelledDrive, *zero_paths: str, staging_bytes: int = 16 << 20
    ) -> tuple[Model, ActivationOffloader]:
        monkeypatch.setattr("ds_tba.storage.tiers.select_backend", lambda *_, **__: Selection(backend, "the test's"))
        ours, io = model(), {"staging_bytes": staging_bytes, "swap_file_bytes": 128 << 20}
        return ours, made(ours, io=io, zero_paths=zero_paths)

    return make


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("part", [2, 10, 100])
def test_where_a_drive_becomes_slower_in_mid_run_results_are_exact(make_on: MakeOn, part: int) -> None:
    backend, plain = ModelledDrive(FULL), model()
    ours, offloader = make_on(backend)
    for count in (FIRST_PLAN, ENOUGH_STEPS):
        assert_same_steps(steps(plain, None, [LARGE] * count), steps(ours, offloader, [LARGE] * count))
        backend.throttle(FULL / part, FULL / part)
    report = offloader.report()
    assert report.plans >= 1 and 0 < report.step_peak_saved_bytes <= report.peak_saved_bytes_without


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("is_shared", [True, False])
def test_the_first_plan_counts_the_rates_that_steps_leave_of_a_drive_and_a_second_one_is_advised(
    make_on: MakeOn, tmp_path: Path, is_shared: bool
) -> None:
    left = 16e6
    backend = ModelledDrive(FULL)
    # Staging is so small that backward reads from the drive, and takes nothing from writes that wait.
    zero_path = str(tmp_path / "zero") if is_shared else "/proc/zero"
    ours, offloader = make_on(backend, zero_path, staging_bytes=1 << 20)
    backend.throttle(left, left)
    steps(ours, offloader, [256] * (FIRST_PLAN + 3))
    followed = controller_of(offloader).in_force
    assert followed is not None
    machine = followed.trace.resources
    assert 0 < max(machine.write_bytes_per_s, machine.read_bytes_per_s) < 2.5 * left  # a lane alone could be half
    assert followed.limits.movable_share == (0.0 if is_shared else 1.0)
    advice = "offload more in the same time with either of them on a second"
    assert (advice in offloader.start_line()) is is_shared
