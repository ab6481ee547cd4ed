"""Storages that are made again from others: what that costs in a replay, and which of them a plan takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import traces
from support.replays import GRACE_S, cost, is_allowed, is_no_worse, run
from support.traces import SIZE, UNLIMITED, layers, one_block, pipeline, storage

from ds_tba.config import OffloadConfig, Placement
from ds_tba.plan.plan import Limits, Plan, Prediction
from ds_tba.plan.replay import Timeline
from ds_tba.plan.search import SAME_STEP_FRACTION, adaptive
from ds_tba.plan.trace import BlockTrace, StorageTrace, Trace

K, H, N, R, M = Placement


def made(one: StorageTrace, seconds: float, *sources: int) -> StorageTrace:
    """The same, which can be made again in so many seconds."""
    return replace(one, rematerialize_s=seconds, sources=sources)


def on(machine: bool, trace: Trace) -> Trace:
    """The same with its drive or without."""
    return trace if machine else replace(trace, resources=replace(trace.resources, **traces.NO_DRIVE))


def needed_s(trace: Trace, *places: Placement, recomputed: tuple[bool, ...] = ()) -> list[float]:
    found: list[float] = run(trace, *places, recomputed=recomputed)[0].need_s.tolist()
    return found


# ---- a replay, by hand: SIZE bytes take a second to write and a second to read --------------------------------------


def test_a_source_that_was_moved_is_back_when_the_first_that_is_made_of_it_is_needed() -> None:
    source, other = storage(0.0, 2.5, 2.75), made(storage(0.25, 1.5, 1.75), 0.25, 0)
    assert cost(one_block(source, other, machine=traces.resources()), N, K).stall_s == 0.0  # read from 1.5 to 2.5
    for is_used in (True, False):  # by backward itself
        trace = one_block(replace(source, is_used=is_used), other, machine=traces.resources())
        found = cost(trace, N, M)
        assert needed_s(trace, N, M) == [1.5, 1.5]
        assert (found.stall_s, found.step_s, found.read_bytes) == (1.0, 4.25, SIZE)


@pytest.mark.parametrize("first", [K, H, N])
def test_in_a_chain_each_is_made_before_what_is_made_of_it(first: Placement) -> None:
    machine = traces.resources(write=UNLIMITED, read=UNLIMITED)
    chain = (
        storage(0.0, 2.5, 2.75),
        made(storage(0.25, 2.0, 2.25), 0.25, 0),
        made(storage(0.5, 1.5, 1.75), 0.5, 1),
        storage(0.75, 1.6, 1.6),
    )
    trace = one_block(*chain, machine=machine)
    _, found = run(trace, first, M, M, K)
    assert needed_s(trace, first, M, M, K) == [1.5, 1.5, 1.5, 1.6]
    assert (found.rematerialized_s, found.step_s) == (0.75, 3.75)
    # The middle one alone is wanted at 2.0, and its source only then.
    assert needed_s(trace, first, M, K, K) == [2.0, 2.0, 1.5, 1.6]


def test_what_is_made_again_is_gone_until_then_and_its_source_stays_for_it() -> None:
    saved = storage(0.0, 1.0, 1.25), made(storage(0.25, 2.0), 0.5, 0)
    short = one_block(*saved, storage(0.5, 1.0, 1.5), machine=traces.resources())
    assert [cost(short, K, place, K).peak_saved_bytes for place in (K, M)] == [3 * SIZE, 2 * SIZE]
    long = one_block(*saved, storage(0.5, 2.0), machine=traces.resources())
    assert cost(long, K, M, K).peak_saved_bytes == 3 * SIZE  # at 2.0; alone the source would be gone at 1.25


BLOCKS = (BlockTrace("a", 0.0, 0.5, 2.0, 3.0, (0,)), BlockTrace("b", 0.5, 1.0, 1.0, 2.0, (2,)))
# 0: input of a; 1: made in a, from 0; 2: input of b, made of 1 in a; 3: in b, made of 2.
TWO_BLOCKS = (
    storage(0.0, 2.9),
    made(storage(0.1, 2.5), 0.25, 0),
    made(storage(0.3, 2.25, None, (0, 1)), 0.25, 1),
    made(storage(0.6, 1.5, None, (1,)), 0.25, 2),
)


def two_blocks(*places: Placement, recomputed: tuple[bool, bool]) -> tuple[list[int], Prediction]:
    outcome, found = run(Trace(TWO_BLOCKS, BLOCKS, traces.resources(), 3.0), *places, recomputed=recomputed)
    return outcome.assignment.placements.tolist(), found


def test_what_a_recomputed_block_drops_is_no_source_and_is_not_made_twice() -> None:
    places, found = two_blocks(K, M, M, M, recomputed=(True, False))
    assert places == [K, K, K, M]  # 1 comes again with its block, so that 2 has no source before
    assert (found.rematerialized_s, found.recomputed_s) == (0.25, 0.5)
    places, found = two_blocks(K, M, M, M, recomputed=(False, True))
    assert places == [K, M, M, K] and found.rematerialized_s == 0.5


def test_the_input_of_a_recomputed_block_is_made_again_before_the_block_is() -> None:
    trace = Trace(TWO_BLOCKS, BLOCKS, traces.resources(), 3.0)
    _, found = run(trace, N, M, M, K, recomputed=(False, True))
    assert needed_s(trace, N, M, M, K, recomputed=(False, True))[:3] == [1.0, 1.0, 1.0]
    assert found.step_s == trace.step_s + 1.0 + 0.5 + 0.5  # 0 is read, 1 and 2 are made, the block runs


# ---- plans ----------------------------------------------------------------------------------------------------------


@given(traces.rematerializable() | traces.rematerializable(24, 5), traces.limits(), st.booleans())
@settings(derandomize=True, deadline=None, max_examples=200)
def test_making_storages_again_never_makes_a_plan_worse(trace: Trace, limits: Limits, machine: bool) -> None:
    trace = on(machine, trace)
    ours, without = adaptive(trace, limits), adaptive(trace, replace(limits, rematerialize=False))
    assert M not in without.placements and without.prediction.rematerialized_s == 0
    assert is_allowed(ours.prediction, limits)
    grace_s = SAME_STEP_FRACTION * trace.step_s + GRACE_S  # steps so close are the same to the planner
    assert is_no_worse(ours.prediction, without.prediction, limits, trace, grace_s)
    assert traces.simulate(trace, ours) == ours.prediction and ours == adaptive(trace, limits)
    if not machine and not limits.host_budget_bytes:
        assert {*ours.placements} <= {K, M, R}


def with_sites(trace: Trace, seconds: float, every: int = 2) -> Trace:
    """Of each ``every`` storages of a chain one can be made of the one before it."""
    storages = tuple(
        made(one, seconds, index - 1) if index % every else one for index, one in enumerate(trace.storages)
    )
    return replace(trace, storages=storages)


def made_again(plan: Plan) -> int:
    return plan.placements.count(M)


def test_with_no_drive_half_of_the_peak_goes_for_the_time_that_there_is() -> None:
    trace = on(False, with_sites(layers(16, 4, rate=1.0), seconds=0.01))  # 32 sites in 48 s
    limits = Limits(recompute=False)
    plan = adaptive(trace, limits)
    assert made_again(plan) >= 30 and plan.prediction.peak_saved_bytes <= 35 * SIZE  # of 64
    assert plan.prediction.step_s == pytest.approx(48.0 + 0.01 * made_again(plan))
    slower = adaptive(with_sites(trace, seconds=0.1), limits)  # 2 % are 0.96 s
    assert made_again(slower) == 9 and slower.prediction.peak_saved_bytes <= 55 * SIZE
    assert made_again(adaptive(with_sites(trace, seconds=1.0), limits)) == 0


def test_with_a_budget_as_few_are_made_again_as_it_takes() -> None:
    trace = on(False, with_sites(layers(16, 4, rate=1.0), seconds=0.01))
    plans = {count: adaptive(trace, Limits(activation_budget_bytes=count * SIZE)) for count in (64, 56, 48, 40)}
    for count, plan in plans.items():
        assert plan.prediction.peak_saved_bytes <= count * SIZE
        assert made_again(plan) <= 64 - count + 2 and not any(plan.recomputed_blocks)
    assert made_again(plans[64]) == 0


def test_what_the_drive_does_at_no_cost_is_not_made_again() -> None:
    trace = with_sites(layers(8, 4, rate=20.0), seconds=0.01)
    assert made_again(adaptive(trace, Limits(activation_budget_bytes=16 * SIZE))) == 0


def test_what_a_slow_drive_has_no_time_for_is_made_again() -> None:
    trace = with_sites(layers(16, 4, rate=1.0), seconds=0.01)
    limits = Limits(recompute=False)
    plan, without = adaptive(trace, limits), adaptive(trace, replace(limits, rematerialize=False))
    assert made_again(plan) and N in plan.placements
    assert plan.prediction.peak_saved_bytes < 0.75 * without.prediction.peak_saved_bytes


def test_blocks_are_recomputed_besides_where_that_alone_does_not_fit() -> None:
    trace = on(False, with_sites(layers(16, 4, rate=1.0), seconds=0.01))
    plan = adaptive(trace, Limits(activation_budget_bytes=24 * SIZE))
    alone = adaptive(trace, Limits(activation_budget_bytes=24 * SIZE, rematerialize=False))
    assert plan.prediction.peak_saved_bytes <= 24 * SIZE
    assert made_again(plan) and 0 < sum(plan.recomputed_blocks) < sum(alone.recomputed_blocks)
    assert plan.prediction.step_s < alone.prediction.step_s


@pytest.mark.parametrize("ahead", [1, 4])
def test_forwards_in_turn_are_made_again_alike(ahead: int) -> None:
    trace = on(False, pipeline(8, ahead))
    trace = replace(with_sites(trace, 0.001), forwards=trace.forwards)
    assert Timeline(trace).alike_forwards() == 8
    plan = adaptive(trace, Limits(recompute=False))
    again = (np.array(plan.placements) == M).reshape(8, 20)
    assert again[0].sum() >= 8 and (again == again[0]).all()
    assert plan.prediction.peak_saved_bytes <= 0.65 * 20 * ahead * SIZE


@pytest.mark.parametrize("chosen", [True, False])
def test_the_config_says_whether_storages_may_be_made_again(chosen: bool) -> None:
    assert Limits.of(OffloadConfig(nvme_path="/local_nvme", rematerialize=chosen), UNLIMITED).rematerialize is chosen
