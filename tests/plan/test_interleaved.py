"""Several forwards before their backwards, as in a stage of a pipeline: one plan for all that are in flight."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Closing
from planners import PLANNERS
from support.offloaders import watching
from support.planned_training import ROWS, WIDTH, Model, controller_of, model
from support.stepping import assert_same_steps, end_step, forward

from ds_tba.config import Placement
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.plan import Limits, Plan, Planner
from ds_tba.plan.search import adaptive
from ds_tba.plan.trace import Trace

FORWARDS = 4
STEPS = 8
Counts = tuple[int, ...]
EVERY: Counts = (FORWARDS,) * STEPS
ALONE_BYTES = 750_000  # a little more than one forward saves
Make = Callable[..., ActivationOffloader]


class InterruptionError(Exception):
    """Raised between the passes of a schedule."""


@pytest.fixture
def make(tmp_path: Path, closing: Closing) -> Make:
    return closing(partial(watching, tmp_path, max_step_overhead=1000.0))


def step(ours: Model, offloader: ActivationOffloader | None, ahead: int, forwards: int, fails: bool) -> None:
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


def train(
    ours: Model, offloader: ActivationOffloader | None, ahead: int, forwards: Counts, fails_at: Counts = ()
) -> list[list[torch.Tensor]]:
    """The gradients of each step that did not fail."""
    optimizer, found = torch.optim.SGD(ours.parameters(), lr=0.01), []
    torch.manual_seed(7)
    for number, count in enumerate(forwards):
        try:
            step(ours, offloader, ahead, count, number in fails_at)
        except InterruptionError:
            optimizer.zero_grad()
            continue
        found.append([parameter.grad.clone() for parameter in ours.parameters() if parameter.grad is not None])
        end_step(optimizer, offloader)
    return found


def check(
    make: Make, ahead: int, planner: Planner = adaptive, forwards: Counts = EVERY, fails_at: Counts = (), **rest: Any
) -> ActivationOffloader:
    """Train with and without; every gradient must be the same."""
    expected, ours = train(model(), None, ahead, forwards, fails_at), model()
    offloader = make(ours, planner, **rest)
    assert_same_steps(expected, train(ours, offloader, ahead, forwards, fails_at))
    return offloader


@pytest.mark.parametrize("ahead", [1, 2, FORWARDS])
@pytest.mark.parametrize("planner", [PLANNERS["adaptive"], PLANNERS["recompute"]], ids=["adaptive", "recompute"])
def test_gradients_are_exact_under_a_plan_for_all_forwards_in_flight(make: Make, planner: Planner, ahead: int) -> None:
    report = check(make, ahead, planner, recompute=True).report()
    assert report.plans >= 1 and report.plan is not None  # more on a busy machine, whose rates change
    assert report.steps == report.micro_steps == STEPS
    assert report.plan["blocks"] == FORWARDS * 4
    if planner is adaptive:
        assert report.step_peak_saved_bytes < report.peak_saved_bytes_without / 2
    else:
        assert report.recomputed_bytes > 0


def test_every_forward_of_a_schedule_is_in_the_trace_and_all_are_planned_alike(make: Make) -> None:
    seen: list[tuple[Trace, Plan]] = []

    def watched(trace: Trace, limits: Limits) -> Plan:
        seen.append((trace, adaptive(trace, replace(limits, recompute=False))))
        return seen[-1][1]

    check(make, 2, watched, recompute=True)  # or no block is looked at
    trace, plan = seen[-1]
    count = len(trace.storages) // FORWARDS
    assert trace.forwards == tuple(count * number for number in range(FORWARDS))
    moved = np.array(plan.placements) == Placement.NVME
    assert (moved.reshape(FORWARDS, -1).sum(1) > 0).all()
    # The backward of the first forward is over when the third begins.
    assert trace.blocks[0].backward_end_s <= trace.blocks[2 * 4].forward_start_s <= trace.blocks[4].backward_start_s


@pytest.mark.parametrize("fails_at", [(1, 2), (5,)], ids=["while steps are recorded", "later"])
def test_steps_that_raised_are_not_recorded_and_the_next_ones_are_exact(make: Make, fails_at: Counts) -> None:
    offloader = check(make, 2, fails_at=fails_at)
    report, in_force = offloader.report(), controller_of(offloader).in_force
    assert report.plans >= 1 and report.steps == STEPS - len(fails_at)
    assert in_force is not None and len(in_force.trace.forwards) == FORWARDS
    assert offloader.cache.live_records == 0


def test_another_number_of_forwards_is_recorded_again(make: Make) -> None:
    offloader = check(make, 2, forwards=EVERY + (FORWARDS + 2,) * 20)
    found = controller_of(offloader).in_force
    assert found is not None and len(found.trace.forwards) == FORWARDS + 2


@pytest.mark.parametrize("recompute", [False, True])
def test_a_budget_holds_with_several_forwards_in_flight(make: Make, recompute: bool) -> None:
    report = check(make, 3, activation_budget_bytes=ALONE_BYTES, recompute=recompute).report()
    assert report.peak_saved_bytes_without > 2.9 * ALONE_BYTES
    assert report.budget_excess_bytes == 0 and report.peak_saved_bytes <= ALONE_BYTES


def test_a_forward_alone_after_a_schedule_is_a_micro_step_of_its_own(make: Make) -> None:
    ours = model()
    offloader = make(ours)
    train(ours, offloader, 2, (FORWARDS,))
    for _ in range(2):
        forward(ours, torch.randn(ROWS, WIDTH), offloader).backward()
        offloader.note_micro_step()
    assert offloader.report().micro_steps == 3
