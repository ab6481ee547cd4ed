"""The planners: the published rules by hand, ours against them and against the optimum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planners import PLANNERS, teraio
from support import traces
from support.replays import GRACE_S, is_allowed, is_no_worse
from support.traces import SIZE, layers, pipeline, storage, uneven_layers

from ds_tba.config import Placement
from ds_tba.plan.plan import Limits, Plan
from ds_tba.plan.replay import Timeline
from ds_tba.plan.search import SAME_STEP_FRACTION, adaptive
from ds_tba.plan.trace import BlockTrace, Resources, StorageTrace, Trace

K, H, N, R, M = Placement
SIMPLE = ("keep", "recompute")
SHORT, LONG = traces.traces(), traces.traces(most_storages=24, most_blocks=5)


def without_drive(trace: Trace) -> Trace:
    return replace(trace, resources=replace(trace.resources, **traces.NO_DRIVE))


# ---- ours -----------------------------------------------------------------------------------------------------------


@given(SHORT | LONG, traces.limits())
@settings(derandomize=True, deadline=None, max_examples=400)
def test_adaptive_is_never_worse_than_the_simplest_and_keeps_within_its_limits(trace: Trace, limits: Limits) -> None:
    ours = adaptive(trace, limits)
    assert is_allowed(ours.prediction, limits)
    if not limits.recompute:
        assert not any(ours.recomputed_blocks)
    for name in SIMPLE:
        theirs = PLANNERS[name](trace, limits)
        if limits.recompute or not any(theirs.recomputed_blocks):
            assert is_no_worse(ours.prediction, theirs.prediction, limits, trace), name


@given(SHORT | LONG, traces.limits())
@settings(derandomize=True, deadline=None, max_examples=100)
def test_a_plan_says_what_a_replay_of_it_finds(trace: Trace, limits: Limits) -> None:
    for planner in PLANNERS.values():
        plan = planner(trace, limits)
        assert traces.simulate(trace, plan) == plan.prediction
        assert plan == planner(trace, limits)


@pytest.mark.parametrize(("optimizer_s", "writes"), [(0.0, True), (1000.0, False)])
def test_nothing_is_written_for_a_gain_too_small_to_tell(optimizer_s: float, writes: bool) -> None:
    trace = replace(layers(8, 4, rate=0.5), optimizer_s=optimizer_s)
    whole = PLANNERS["recompute"](trace, Limits()).prediction
    plan = adaptive(trace, Limits(activation_budget_bytes=whole.peak_saved_bytes))
    assert plan.prediction.step_s <= whole.step_s
    assert (plan.prediction.written_bytes > 0) is writes


def test_blocks_of_widely_differing_sizes_are_moved_where_that_is_better_than_recomputing_them() -> None:
    """Neither change alone makes a plan better: the block is saved again, or what it saves is moved and dropped."""
    trace = uneven_layers(seed=2, count=12, per_layer=6, spread=2.0, rate=0.6)
    kept_bytes = PLANNERS["keep"](trace, Limits()).prediction.peak_saved_bytes
    assert adaptive(trace, Limits(max_step_overhead=0.1)).prediction.peak_saved_bytes < 0.25 * kept_bytes


@pytest.mark.parametrize("has_drive", [True, False])
def test_where_nothing_fits_a_block_larger_than_the_budget_is_moved_and_not_recomputed(has_drive: bool) -> None:
    logits = replace(storage(0.9, 1.0, 1.1, blocks=(-1,)), nbytes=9 * SIZE, is_movable=False)
    saved = [storage(0.1 * number, 3.0 - 0.2 * number) for number in range(5)]
    trace = Trace((*saved, logits), (BlockTrace("layer.0", 0.0, 0.8, 1.2, 3.0),), traces.resources(), 3.0)
    found = adaptive(trace if has_drive else without_drive(trace), Limits(activation_budget_bytes=3 * SIZE))
    assert found.recomputed_blocks == (not has_drive,)
    assert found.prediction.peak_saved_bytes == 9 * SIZE


def moved_bytes(trace: Trace, plan: Plan) -> int:
    pairs = zip(trace.storages, plan.placements, strict=True)
    return sum(one.nbytes for one, place in pairs if place in (H, N))


@pytest.mark.parametrize("limits", [Limits(), Limits(host_budget_bytes=6 * SIZE), Limits(max_step_overhead=1.0)])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_no_more_is_moved_than_the_share_of_what_is_movable(limits: Limits, share: float) -> None:
    trace = layers(8, 4, rate=20.0)
    whole, part = adaptive(trace, limits), adaptive(trace, replace(limits, movable_share=share))
    assert moved_bytes(trace, part) <= share * 32 * SIZE < moved_bytes(trace, whole)
    assert moved_bytes(trace, part) >= 0.8 * share * 32 * SIZE or any(part.recomputed_blocks)
    assert part.prediction.peak_saved_bytes >= whole.prediction.peak_saved_bytes


def test_a_share_has_blocks_recomputed_instead_and_a_budget_that_only_moves_fit_wins_over_it() -> None:
    trace = layers(8, 4, rate=20.0)
    limits = Limits(activation_budget_bytes=12 * SIZE, movable_share=0.25)
    beside = adaptive(trace, limits)
    assert beside.prediction.peak_saved_bytes <= 12 * SIZE and any(beside.recomputed_blocks)
    assert moved_bytes(trace, beside) <= 8 * SIZE
    alone = adaptive(trace, replace(limits, recompute=False))
    assert alone.prediction.peak_saved_bytes <= 12 * SIZE and moved_bytes(trace, alone) > 8 * SIZE


def test_the_example_of_the_documentation_is_what_the_planner_finds() -> None:
    gib, count = 1 << 30, 8
    blocks, storages = [], []
    for number in range(count):
        packed_s, used_s = (number + 1) / 4, 2 + (count - 1 - number) / 2
        blocks.append(BlockTrace("", packed_s - 0.25, packed_s, used_s, used_s + 0.5, (number - 1,) if number else ()))
        storages.append(StorageTrace(gib, "", (number,), packed_s, packed_s, used_s, used_s + 0.5))
    blocks = [replace(one, module=f"layers.{number}") for number, one in enumerate(blocks)]
    trace = Trace(tuple(storages), tuple(blocks), traces.resources(2 * gib, 4 * gib, 50 * gib, gib), 6.0)
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "plans.md").read_text(encoding="utf-8")
    for budget, recompute in ((None, False), (4, False), (3, False), (4, True)):
        limits = Limits(activation_budget_bytes=None if budget is None else budget * gib, recompute=recompute)
        plan = adaptive(trace, limits)
        places, cost = ", ".join(one.word for one in plan.placements), plan.prediction
        assert f"| {places} | {cost.peak_saved_bytes / gib:.0f} GiB | {cost.step_s:.2f} s |" in page


def test_the_wear_limit_gives_way_to_a_budget_and_no_further_than_it_has_to() -> None:
    trace = layers(8, 4, rate=20.0)
    kept_bytes = adaptive(
        trace, Limits(max_step_overhead=0.0, write_limit_bytes_per_step=0)
    ).prediction.peak_saved_bytes
    budget = Limits(activation_budget_bytes=kept_bytes // 2, recompute=False)
    free = adaptive(trace, budget).prediction
    assert free.peak_saved_bytes <= kept_bytes // 2 and free.written_bytes > 5 * SIZE
    bound = adaptive(trace, replace(budget, write_limit_bytes_per_step=5 * SIZE)).prediction
    assert bound.peak_saved_bytes <= kept_bytes // 2 and 5 * SIZE < bound.written_bytes <= free.written_bytes
    # What fits without writes does not write; and what nothing fits is as low as it gets.
    again = adaptive(trace, Limits(activation_budget_bytes=kept_bytes // 2, write_limit_bytes_per_step=0)).prediction
    assert again.written_bytes == 0 and again.peak_saved_bytes <= kept_bytes // 2
    lowest = adaptive(trace, Limits(activation_budget_bytes=0, recompute=False)).prediction.peak_saved_bytes
    nothing = Limits(activation_budget_bytes=0, recompute=False, write_limit_bytes_per_step=0)
    assert adaptive(trace, nothing).prediction.peak_saved_bytes == lowest


def test_host_memory_is_used_as_far_as_its_budget_goes() -> None:
    trace = without_drive(layers(8, 4, rate=20.0))
    plan = adaptive(trace, Limits(host_budget_bytes=10 * SIZE))
    assert plan.placements.count(H) == 10 and plan.prediction.host_bytes == 10 * SIZE
    assert H not in adaptive(trace, Limits()).placements


def test_among_many_storages_the_overhead_holds_and_no_published_planner_has_a_lower_peak() -> None:
    trace = layers(30, 40, rate=40.0, staging_bytes=100 * SIZE)
    found = adaptive(trace, Limits()).prediction
    assert found.step_s <= trace.step_s * 1.02 + GRACE_S
    assert found.peak_saved_bytes < 0.4 * 1200 * SIZE
    for name in ("tba", "teraio"):
        assert found.peak_saved_bytes <= PLANNERS[name](trace, Limits()).prediction.peak_saved_bytes


def test_a_plan_reads_just_in_time_where_that_lowers_its_peak() -> None:
    trace = layers(8, 4, rate=20.0, staging_bytes=8 * SIZE)
    plan = adaptive(trace, Limits())
    assert plan.prefetch_distance and len(plan.prefetch_distance) == plan.placements.count(N)
    as_far_as_may_be = traces.simulate(trace, replace(plan, prefetch_distance=()))
    assert plan.prediction.peak_saved_bytes < as_far_as_may_be.peak_saved_bytes
    assert plan.prediction.step_s <= trace.step_s * 1.02


@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_a_plan_reads_as_far_ahead_as_may_be_where_that_costs_nothing(name: str) -> None:
    trace = layers(8, 4, rate=20.0, staging_bytes=8 * SIZE)
    trace = replace(trace, resources=replace(trace.resources, is_synchronous=True))  # what is read ahead is in staging
    assert PLANNERS[name](trace, Limits()).prefetch_distance == ()


# ---- storages that are made again from others -----------------------------------------------------------------------


@given(traces.rematerializable() | traces.rematerializable(24, 5), traces.limits(), st.booleans())
@settings(derandomize=True, deadline=None, max_examples=200)
def test_making_storages_again_never_makes_a_plan_worse(trace: Trace, limits: Limits, has_drive: bool) -> None:
    trace = trace if has_drive else without_drive(trace)
    ours, without = adaptive(trace, limits), adaptive(trace, replace(limits, rematerialize=False))
    assert M not in without.placements and without.prediction.rematerialized_s == 0
    assert is_allowed(ours.prediction, limits)
    grace_s = SAME_STEP_FRACTION * trace.step_s + GRACE_S  # steps so close are the same to the planner
    assert is_no_worse(ours.prediction, without.prediction, limits, trace, grace_s)
    assert traces.simulate(trace, ours) == ours.prediction and ours == adaptive(trace, limits)
    if not has_drive and not limits.host_budget_bytes:
        assert {*ours.placements} <= {K, M, R}


def with_sites(trace: Trace, seconds: float) -> Trace:
    """Every second storage of a chain can be made of the one before it."""
    storages = [*trace.storages]
    for index in range(1, len(storages), 2):
        storages[index] = replace(storages[index], rematerialize_s=seconds, sources=(index - 1,))
    return replace(trace, storages=tuple(storages))


def made_again(plan: Plan) -> int:
    return plan.placements.count(M)


def test_with_no_drive_half_of_the_peak_goes_for_the_time_that_there_is() -> None:
    trace = without_drive(with_sites(layers(16, 4, rate=1.0), seconds=0.01))  # 32 sites in 48 s
    limits = Limits(recompute=False)
    plan = adaptive(trace, limits)
    assert made_again(plan) >= 30 and plan.prediction.peak_saved_bytes <= 35 * SIZE  # of 64
    assert plan.prediction.step_s == pytest.approx(48.0 + 0.01 * made_again(plan))
    slower = adaptive(with_sites(trace, seconds=0.1), limits)  # 2 % are 0.96 s
    assert made_again(slower) == 9 and slower.prediction.peak_saved_bytes <= 55 * SIZE
    assert made_again(adaptive(with_sites(trace, seconds=1.0), limits)) == 0


def test_with_a_budget_as_few_are_made_again_as_it_takes() -> None:
    trace = without_drive(with_sites(layers(16, 4, rate=1.0), seconds=0.01))
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
    trace = without_drive(with_sites(layers(16, 4, rate=1.0), seconds=0.01))
    plan = adaptive(trace, Limits(activation_budget_bytes=24 * SIZE))
    alone = adaptive(trace, Limits(activation_budget_bytes=24 * SIZE, rematerialize=False))
    assert plan.prediction.peak_saved_bytes <= 24 * SIZE
    assert made_again(plan) and 0 < sum(plan.recomputed_blocks) < sum(alone.recomputed_blocks)
    assert plan.prediction.step_s < alone.prediction.step_s


# ---- as published ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "moved"), [(0.16, 0), (0.17, 1), (0.29, 1), (0.31, 2), (0.49, 2), (0.51, 3), (100.0, 3)]
)
def test_tba_moves_the_prefix_that_the_drive_has_time_for_and_keeps_the_last(rate: float, moved: int) -> None:
    # Four blocks of one storage each: forward 4 s, so that T is 12, 10, 8, 6 s and V is 2, 3, 4, 5 storages. V / T is
    # 0.167, 0.3, 0.5 storages per second; the last is kept whatever the drive.
    assert PLANNERS["tba"](layers(4, 1, rate), Limits()).placements == (N,) * moved + (K,) * (4 - moved)


def of_lifetimes(machine: Resources, *idle: tuple[float, float]) -> Trace:
    return Trace(tuple(storage(pack_s, use_s, use_s, (-1,)) for pack_s, use_s in idle), (), machine, 100.0)


def test_teraio_moves_the_longest_idle_first_until_the_peak_fits() -> None:
    fast = traces.resources(write=100 * SIZE, read=100 * SIZE)
    trace = of_lifetimes(fast, (10.0, 60.0), (20.0, 90.0), (30.0, 50.0))
    # Above two storages there is memory between 30 and 50 only, which each of them would take off.
    moved = [teraio(trace, Limits(activation_budget_bytes=count * SIZE)).placements.count(N) for count in (3, 2, 1)]
    assert moved == [0, 1, 2]
    assert teraio(trace, Limits()).placements == (N, N, N)


def test_teraio_uses_host_memory_where_the_drive_has_no_time_and_up_to_its_budget() -> None:
    slow = traces.resources(write=SIZE / 30, read=SIZE / 30, copy=10 * SIZE)
    trace = of_lifetimes(slow, (10.0, 90.0), (11.0, 80.0), (12.0, 70.0))
    assert teraio(trace, Limits(host_budget_bytes=SIZE)).placements == (N, K, H)
    assert teraio(trace, Limits(host_budget_bytes=2 * SIZE)).placements == (N, H, H)
    assert teraio(trace, Limits()).placements == (N, K, K)


# ---- several forwards and backwards in one micro-step ---------------------------------------------------------------


@pytest.mark.parametrize(("has_drive", "part"), [(True, 0.7), (False, 0.65)], ids=["moved", "made again"])
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_a_plan_for_many_forwards_in_turn_lowers_the_peak_of_all(ahead: int, has_drive: bool, part: float) -> None:
    trace = pipeline(16, ahead) if has_drive else without_drive(with_sites(pipeline(16, ahead), 0.001))
    assert Timeline(trace).alike_forwards() == 16
    found = adaptive(trace, Limits(recompute=False))
    assert traces.simulate(trace, found).peak_saved_bytes < part * 20 * ahead * SIZE
    taken = (np.array(found.placements) == (N if has_drive else M)).reshape(16, 20)
    assert (has_drive or taken[0].sum() >= 8) and (taken == taken[0]).all(), "each forward alike"
    assert traces.simulate(trace, found).step_s <= 1.02 * trace.step_s + 1e-6


def test_forwards_that_are_not_alike_are_planned_one_by_one() -> None:
    trace = pipeline(4, 2)
    rows = trace.storages
    fixed, made = replace(rows[25], is_movable=False), replace(rows[25], rematerialize_s=0.001, sources=(24,))
    others = [replace(trace, storages=(*rows[:25], other, *rows[26:])) for other in (fixed, made)]
    assert [Timeline(one).alike_forwards() for one in (trace, *others, replace(trace, forwards=()))] == [4, 1, 1, 1]
    assert adaptive(others[0], Limits(recompute=False)).prediction.peak_saved_bytes <= 40 * SIZE
