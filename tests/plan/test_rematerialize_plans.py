"""Storages that are made again from others: what that costs in a replay, and which of them a plan takes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import traces
from support.judging import GRACE_S, is_allowed, is_no_worse
from support.replays import ANY, cost, run
from support.traces import SIZE, UNLIMITED, layers, one_block, pipeline, storage

from ds_tba.config import OffloadConfig, Placement
from ds_tba.plan.plan import Limits, Plan, Prediction
from ds_tba.plan.replay import Assignment, Replay, Timeline
from ds_tba.plan.search import SAME_STEP_FRACTION, adaptive
from ds_tba.plan.trace import BlockTrace, StorageTrace, Trace

K, H, N, M = Placement.KEEP, Placement.HOST, Placement.NVME, Placement.REMATERIALIZE
R = Placement.RECOMPUTE


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

PAIR = (storage(0.0, 2.5, 2.75), made(storage(0.25, 1.5, 1.75), 0.25, 0))


def test_a_source_that_was_moved_is_back_when_the_first_that_is_made_of_it_is_needed() -> None:
    trace = one_block(*PAIR, machine=traces.resources())
    assert cost(trace, N, K).stall_s == 0.0  # read from 1.5 to 2.5
    _, found = run(trace, N, M)
    assert needed_s(trace, N, M) == [1.5, 1.5]
    assert (found.stall_s, found.step_s) == (1.0, 4.25)


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


def test_the_time_that_making_others_takes_is_time_for_reads() -> None:
    machine = traces.resources(read=5 * SIZE)
    moved = [storage(0.0, use_s) for use_s in (1.3, 1.15, 1.1)]
    trace = one_block(*moved, storage(0.1, 1.0), made(storage(0.1, 1.2), 1.0), machine=machine)
    kept, again = (
        Replay(Timeline(trace), Assignment(np.array([N, N, N, K, place], np.int8), np.zeros(1, bool)), distance=None)
        for place in (K, M)
    )
    # The last read takes 0.2 s: from the beginning on, or else once the first of the others is used.
    assert (kept.prefetch_distance[0], again.prefetch_distance[0]) == (3, 2)
    assert again.stalls == [one for one in kept.stalls if one[0] != 0]


# ---- a replay, told again -------------------------------------------------------------------------------------------


def told_again(trace: Trace, places: list[Placement]) -> tuple[list[Placement], int, float]:
    """Where storages really are, the peak and a step, of storages that are kept or made again and no recomputation."""
    rows = trace.storages
    there = [bool(row.blocks) for row in rows]
    again = [
        number
        for number, (row, place) in enumerate(zip(rows, places, strict=True))
        if place is M and there[number] and row.rematerialize_s is not None and all(there[one] for one in row.sources)
    ]

    def need_s(number: int) -> float:
        wanted = [need_s(one) for one in again if number in rows[one].sources]
        return max(rows[number].last_forward_use_s, min([rows[number].first_backward_use_s, *wanted]))

    def took_s(number: int) -> float:
        return rows[number].rematerialize_s or 0.0

    def later_s(at_s: float, up_to: float) -> float:
        """So much later is the replay at a time of the trace, with what is made again up to another."""
        return at_s + sum(took_s(one) for one in again if need_s(one) < up_to)

    def after_s(at_s: float) -> float:
        return later_s(at_s, np.nextafter(at_s, np.inf))

    spans = []
    for number, row in enumerate(rows):
        if not there[number]:
            continue
        users = [need_s(one) for one in again if number in rows[one].sources]
        end_s, begin_s = after_s(max([row.freed_s, *users])), later_s(row.pack_s, row.pack_s)
        if number in again:
            before = sum(took_s(one) for one in again if (need_s(one), one) < (need_s(number), number))
            spans.append((begin_s, after_s(row.last_forward_use_s), row.nbytes))
            begin_s = need_s(number) + before
        spans.append((begin_s, max(begin_s, end_s), row.nbytes))
    peak = max((sum(n for start, end, n in spans if start <= at <= end) for at, _, _ in spans), default=0)
    effective = [M if number in again else K for number in range(len(rows))]
    return effective, peak, trace.step_s + trace.micro_steps * sum(took_s(one) for one in again)


@given(traces.rematerializable(), st.randoms(use_true_random=False))
@ANY
def test_a_replay_agrees_with_one_that_is_told_again(trace: Trace, chance: object) -> None:
    places = [chance.choice([K, M, M]) for _ in trace.storages]  # type: ignore[attr-defined]
    outcome, found = run(trace, *places)
    effective, peak_bytes, step_s = told_again(trace, places)
    assert outcome.assignment.placements.tolist() == effective
    assert (found.peak_saved_bytes, found.step_s) == (peak_bytes, step_s)


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


@pytest.mark.parametrize("machine", [True, False])
def test_more_room_more_time_and_cheaper_sites_are_never_worse(machine: bool) -> None:
    trace = on(machine, with_sites(layers(6, 4, rate=1.0), seconds=0.02))
    steps = [adaptive(trace, Limits(activation_budget_bytes=n * SIZE)).prediction.step_s for n in range(8, 25, 4)]
    same = 1 + (SAME_STEP_FRACTION if machine else 0.0)
    assert all(more <= same * less for less, more in itertools.pairwise(steps)) and steps[0] > steps[-1]
    peaks = [adaptive(trace, Limits(max_step_overhead=part)).prediction.peak_saved_bytes for part in (0, 0.01, 0.1, 1)]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[-1]
    sites = [adaptive(with_sites(trace, seconds), Limits()).prediction.peak_saved_bytes for seconds in (0.0, 0.05, 1.0)]
    assert sites == sorted(sites) and sites[0] < sites[-1]


@pytest.mark.parametrize("ahead", [1, 4])
def test_forwards_in_turn_are_made_again_alike(ahead: int) -> None:
    trace = on(False, pipeline(8, ahead))
    trace = replace(with_sites(trace, 0.001), forwards=trace.forwards)
    assert Timeline(trace).alike_forwards() == 8
    plan = adaptive(trace, Limits(recompute=False))
    again = (np.array(plan.placements) == M).reshape(8, 20)
    assert again[0].sum() >= 8 and (again == again[0]).all()
    assert plan.prediction.peak_saved_bytes <= 0.65 * 20 * ahead * SIZE


def test_forwards_with_other_sites_are_not_alike() -> None:
    trace, change = with_sites(pipeline(4, 2), 0.001), {"rematerialize_s": None, "sources": ()}
    storages = tuple(replace(one, **change) if at == 25 else one for at, one in enumerate(trace.storages))
    assert Timeline(replace(trace, storages=storages)).alike_forwards() == 1


@pytest.mark.parametrize("chosen", [True, False])
def test_the_config_says_whether_storages_may_be_made_again(chosen: bool) -> None:
    assert Limits.of(OffloadConfig(nvme_path="/local_nvme", rematerialize=chosen), UNLIMITED).rematerialize is chosen
