"""The replay: figures worked out by hand, and what must hold for any trace and assignment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import traces
from support.replays import ANY, cases, cost, run
from support.traces import SIZE, UNLIMITED, one_block, storage

from ds_tba.config import Placement
from ds_tba.plan.plan import Prediction
from ds_tba.plan.replay import Assignment, Replay, Timeline
from ds_tba.plan.trace import BlockTrace, Resources, StorageTrace, Trace

K, H, N, M = Placement.KEEP, Placement.HOST, Placement.NVME, Placement.REMATERIALIZE


# ---- by hand: SIZE bytes take a second to write and a second to read ------------------------------------------------


@pytest.mark.parametrize(("place", "written"), [(N, SIZE), (H, 0)])
def test_what_backward_never_uses_does_not_come_back(place: Placement, written: int) -> None:
    unused = replace(storage(0.2, 3.0), is_used=False)
    trace = one_block(unused, storage(0.5, 2.0, 3.0), machine=traces.resources())
    found = cost(trace, place, K)
    assert (found.peak_saved_bytes, found.stall_s, found.read_bytes) == (SIZE, 0.0, 0)
    assert found.written_bytes == written
    assert cost(trace, K, K).peak_saved_bytes == 2 * SIZE


def test_a_recomputed_block_uses_its_inputs_whoever_else_does() -> None:
    unused = replace(storage(0.0, 3.0, blocks=(-1,)), is_used=False)
    trace = one_block(unused, storage(0.5, 2.0), machine=traces.resources(), inputs=(0,))
    assert cost(trace, N, K, recomputed=(True,)).read_bytes == SIZE


def test_reading_ahead_begins_with_the_first_use_of_any_storage() -> None:
    trace = one_block(storage(0.0, 2.5), storage(0.9, 1.25), machine=traces.resources())
    assert cost(trace, N, K).stall_s == 0.0  # read from 1.25 to 2.25


def test_what_a_later_forward_saves_is_read_ahead_in_its_turn() -> None:
    # Two forwards, a backward, a third forward; then the other backwards.
    saved = [(0.0, 3.0, 4.0), (1.0, 7.0, 7.5), (5.0, 10.0, 10.5)]
    storages = tuple(storage(pack_s, use_s, freed_s, blocks=(-1,)) for pack_s, use_s, freed_s in saved)
    trace = Trace(storages, (), traces.resources(), 11.0, forwards=(0, 1, 2))
    found = cost(trace, N, N, N)
    assert (found.stall_s, found.read_bytes) == (1.0, 3 * SIZE)  # the first use of all has nothing before it


def test_what_is_still_being_written_is_handed_over_from_staging() -> None:
    found = cost(one_block(storage(0.5, 1.2), machine=traces.resources()), N)
    assert (found.stall_s, found.forwarded_bytes, found.written_bytes, found.read_bytes) == (0.0, SIZE, SIZE, 0)


def test_a_write_that_has_not_begun_is_cancelled() -> None:
    trace = one_block(storage(0.1, 1.05), storage(0.2, 1.0), machine=traces.resources())
    found = cost(trace, N, N)
    assert (found.forwarded_bytes, found.written_bytes, found.stall_s) == (2 * SIZE, SIZE, 0.0)


def test_what_is_being_written_when_it_is_its_turn_to_be_read_ahead_stays() -> None:
    # At 1.0, when reading ahead begins, the second is being written until 1.25; used at 2.0, it is still there.
    trace = one_block(
        storage(0.0, 2.5), storage(0.25, 2.0), storage(0.9, 1.0), machine=traces.resources(write=1.6 * SIZE)
    )
    found, _ = run(trace, K, N, K)
    assert found.stalls == []  # alone it is written by 0.875, and read from 1.0 to 2.0
    both, figures = run(trace, N, N, K)
    assert both.stalls == []  # the first is read from 1.0 to 2.0
    assert (figures.forwarded_bytes, figures.read_bytes, figures.written_bytes) == (SIZE, SIZE, 2 * SIZE)
    assert found.cost.forwarded_bytes == 0


def test_what_stays_is_on_the_device_from_the_end_of_its_write_on() -> None:
    # Written until 1.25; of the other two, one is gone by then and one comes after.
    trace = one_block(
        storage(0.25, 2.0), storage(0.9, 1.0, 1.2), storage(0.95, 1.1, 1.3), machine=traces.resources(copy=8 * SIZE)
    )
    found = cost(trace, N, K, K)
    assert (found.forwarded_bytes, found.read_bytes, found.stall_s) == (SIZE, 0, 0.0)
    assert found.peak_saved_bytes == 2 * SIZE  # 3 if it were there from 1.0 on
    later = replace(trace, storages=(*trace.storages, storage(0.97, 1.0, 1.4)))
    assert cost(later, N, K, K, K).peak_saved_bytes == 3 * SIZE


def test_what_is_to_stay_counts_within_staging_and_does_not_hold_up_reads_behind_it() -> None:
    # At 1.0 the last two are in staging, more than a half of it; the first is read beside them, from 1.0 to 2.0.
    machine = traces.resources(write=SIZE, staging_bytes=3 * SIZE)
    storages = (storage(-0.0, 2.0), storage(0.9, 1.6), storage(0.95, 1.5), storage(0.97, 1.0))
    found, figures = run(one_block(*storages, machine=machine), N, N, N, K)
    assert found.stalls == [] and figures.forwarded_bytes == 2 * SIZE
    # Without room for a third, its read waits until the first of the others is written and used.
    less, figures = run(one_block(*storages, machine=replace(machine, staging_bytes=2 * SIZE)), N, N, N, K)
    assert less.stalls == [(2, pytest.approx(0.05)), (0, pytest.approx(1.0))]


def test_compute_waits_at_pack_until_a_write_frees_staging() -> None:
    machine = traces.resources(staging_bytes=SIZE)
    trace = one_block(storage(0.1, 2.0), storage(0.2, 1.9), machine=machine)
    outcome, found = run(trace, N, N)
    assert outcome.stalls[0] == (1, pytest.approx(0.9))  # until 1.1
    assert found.peak_staging_bytes == SIZE


def test_without_waiting_what_finds_no_room_is_kept() -> None:
    trace = one_block(storage(0.1, 2.0), storage(0.2, 1.9), machine=traces.resources(staging_bytes=SIZE))
    outcome, found = run(trace, N, N, may_wait=False)
    assert outcome.assignment.placements.tolist() == [N, K] and found.written_bytes == SIZE


def test_what_is_larger_than_staging_passes_through_it_while_compute_waits() -> None:
    trace = one_block(storage(0.1, 2.0), storage(0.2, 1.9), machine=traces.resources(staging_bytes=SIZE // 4))
    outcome, found = run(trace, N, K)
    # At pack until all but a quarter is written; at the use for all of the read.
    assert outcome.stalls == [(0, pytest.approx(0.75)), (0, pytest.approx(1.0))]
    assert (found.written_bytes, found.read_bytes, found.peak_staging_bytes) == (SIZE, SIZE, SIZE // 4)
    assert cost(trace, N, N).peak_saved_bytes == SIZE < cost(trace, K, K).peak_saved_bytes
    kept, _ = run(trace, N, N, may_wait=False)  # as the store refuses it where nobody may wait
    assert kept.assignment.placements.tolist() == [K, K]
    assert cost(trace, H, K) == cost(replace(trace, resources=traces.resources()), H, K)  # host memory has no staging


def test_what_may_not_move_is_kept() -> None:
    fixed = one_block(replace(storage(0.1, 2.0), is_movable=False), machine=traces.resources())
    assert cost(fixed, N) == cost(fixed, H) == cost(fixed, K)
    nowhere = one_block(storage(0.1, 2.0), machine=replace(traces.resources(), **traces.NO_DRIVE))
    assert cost(nowhere, N) == cost(nowhere, K)


def test_reads_ahead_take_half_of_staging_while_there_are_writes() -> None:
    machine = traces.resources(write=4 * SIZE, staging_bytes=4 * SIZE)
    storages = (storage(0.0, 2.9), storage(0.25, 2.8), storage(0.5, 2.7))
    late, last = storage(0.9, 1.1), storage(0.95, 1.0)
    assert cost(one_block(*storages, last, machine=machine), N, N, N, K).peak_staging_bytes == 3 * SIZE
    # The late one is being written at 1.0: two go ahead beside it, and not three.
    assert cost(one_block(*storages, late, last, machine=machine), N, N, N, N, K).peak_staging_bytes == 3 * SIZE


def test_copies_wait_for_each_other() -> None:
    trace = one_block(storage(0.0, 2.9), storage(0.0, 2.8), machine=traces.resources(copy=SIZE / 2))
    # Out by 2 and 4; the second, which is used first, is in by 6, the first by 8 instead of 2.9.
    assert cost(trace, H, H).stall_s == pytest.approx(8.0 - 2.9)


def test_a_slow_copy_holds_device_memory_and_delays_the_write() -> None:
    trace = one_block(storage(0.0, 2.9), storage(0.75, 1.0), machine=traces.resources(copy=2 * SIZE))
    found = cost(trace, N, K)
    assert found.peak_saved_bytes == SIZE  # gone at 0.5, before the other comes; back from 2.5 on
    earlier = one_block(storage(0.0, 2.9), storage(0.4, 1.0), machine=trace.resources)
    assert cost(earlier, N, K).peak_saved_bytes == 2 * SIZE


def test_the_host_tier_costs_its_copies_only() -> None:
    trace = one_block(storage(0.0, 2.0), storage(0.9, 1.0, 1.1), machine=traces.resources(copy=2 * SIZE))
    found = cost(trace, H, K)
    assert (found.stall_s, found.host_bytes, found.written_bytes) == (0.0, SIZE, 0)
    alone = cost(one_block(storage(0.0, 2.0), machine=trace.resources), H)
    assert alone.stall_s == 0.5


def test_a_synchronous_device_copies_in_the_training_thread() -> None:
    machine = replace(traces.resources(copy=4 * SIZE), is_synchronous=True)
    trace = one_block(storage(0.0, 2.0), storage(0.9, 1.0), machine=machine)
    assert cost(trace, H, K).stall_s == 0.5  # out and in
    assert cost(trace, N, K).stall_s == 0.5  # out, and in from staging, into which it is read from 1.25 to 2.25


def test_recomputed_blocks_hold_only_inputs_until_their_backward() -> None:
    blocks = (BlockTrace("a", 0.0, 1.0, 4.0, 6.0, (0,)), BlockTrace("b", 1.0, 2.0, 2.0, 4.0, (2,)))
    storages = (storage(0.0, 5.9), storage(0.5, 5.0), storage(1.0, 3.9, None, (1,)), storage(1.5, 3.0, None, (1,)))
    trace = Trace(storages, blocks, traces.resources(), 6.0)
    assert cost(trace, K, K, K, K).peak_saved_bytes == 4 * SIZE
    assert cost(trace, K, K, K, K, recomputed=(True, True)).peak_saved_bytes == 3 * SIZE
    moved = cost(trace, N, K, N, K, recomputed=(True, True))
    assert moved.peak_saved_bytes == 3 * SIZE  # the inputs are gone in forward; the second is read ahead in backward
    assert moved.written_bytes == 2 * SIZE


def test_an_input_of_a_recomputed_block_is_needed_at_the_start_of_its_backward() -> None:
    trace = one_block(storage(0.1, 2.9), machine=traces.resources(), inputs=(0,))
    assert cost(trace, N, recomputed=(True,)).forwarded_bytes == SIZE  # at 1.0, while it is written until 1.1
    assert cost(trace, N).forwarded_bytes == 0


def test_an_input_that_nobody_saves_exists_only_where_its_reader_is_recomputed() -> None:
    trace = one_block(storage(0.0, 1.0, 3.0, ()), machine=traces.resources(), inputs=(0,))
    assert cost(trace, N).peak_saved_bytes == cost(trace, N).written_bytes == 0
    assert cost(trace, K, recomputed=(True,)).peak_saved_bytes == SIZE


def test_a_storage_that_two_blocks_share_is_not_dropped() -> None:
    blocks = (BlockTrace("a", 0.0, 1.0, 2.0, 3.0), BlockTrace("b", 1.0, 1.0, 1.0, 2.0))
    trace = Trace((storage(0.5, 1.5, 2.5, (0, 1)),), blocks, traces.resources(), 3.0)
    outcome, found = run(trace, K, recomputed=(True, True))
    assert not outcome.dropped.any() and found.peak_saved_bytes == SIZE


# ---- storages that are made again from others -----------------------------------------------------------------------


def remade(one: StorageTrace, seconds: float, *sources: int) -> StorageTrace:
    """The same, which can be made again in so many seconds."""
    return replace(one, rematerialize_s=seconds, sources=sources)


def needed_s(trace: Trace, *places: Placement) -> list[float]:
    found: list[float] = run(trace, *places)[0].need_s.tolist()
    return found


def test_a_source_that_was_moved_is_back_when_the_first_that_is_made_of_it_is_needed() -> None:
    source, other = storage(0.0, 2.5, 2.75), remade(storage(0.25, 1.5, 1.75), 0.25, 0)
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
        remade(storage(0.25, 2.0, 2.25), 0.25, 0),
        remade(storage(0.5, 1.5, 1.75), 0.5, 1),
        storage(0.75, 1.6, 1.6),
    )
    trace = one_block(*chain, machine=machine)
    _, found = run(trace, first, M, M, K)
    assert needed_s(trace, first, M, M, K) == [1.5, 1.5, 1.5, 1.6]
    assert (found.rematerialized_s, found.step_s) == (0.75, 3.75)
    # The middle one alone is wanted at 2.0, and its source only then.
    assert needed_s(trace, first, M, K, K) == [2.0, 2.0, 1.5, 1.6]


def test_what_is_made_again_is_gone_until_then_and_its_source_stays_for_it() -> None:
    saved = storage(0.0, 1.0, 1.25), remade(storage(0.25, 2.0), 0.5, 0)
    short = one_block(*saved, storage(0.5, 1.0, 1.5), machine=traces.resources())
    assert [cost(short, K, place, K).peak_saved_bytes for place in (K, M)] == [3 * SIZE, 2 * SIZE]
    long = one_block(*saved, storage(0.5, 2.0), machine=traces.resources())
    assert cost(long, K, M, K).peak_saved_bytes == 3 * SIZE  # at 2.0; alone the source would be gone at 1.25


# 0: input of a; 1: made in a, from 0; 2: input of b, made of 1 in a; 3: in b, made of 2.
TWO_BLOCKS = Trace(
    (
        storage(0.0, 2.9),
        remade(storage(0.1, 2.5), 0.25, 0),
        remade(storage(0.3, 2.25, None, (0, 1)), 0.25, 1),
        remade(storage(0.6, 1.5, None, (1,)), 0.25, 2),
    ),
    (BlockTrace("a", 0.0, 0.5, 2.0, 3.0, (0,)), BlockTrace("b", 0.5, 1.0, 1.0, 2.0, (2,))),
    traces.resources(),
    3.0,
)


def test_what_a_recomputed_block_drops_is_no_source_and_is_not_made_twice() -> None:
    outcome, found = run(TWO_BLOCKS, K, M, M, M, recomputed=(True, False))
    # 1 comes again with its block, so that 2 has no source before.
    assert outcome.assignment.placements.tolist() == [K, K, K, M]
    assert (found.rematerialized_s, found.recomputed_s) == (0.25, 0.5)
    outcome, found = run(TWO_BLOCKS, K, M, M, M, recomputed=(False, True))
    assert outcome.assignment.placements.tolist() == [K, M, M, K] and found.rematerialized_s == 0.5


def test_the_input_of_a_recomputed_block_is_made_again_before_the_block_is() -> None:
    outcome, found = run(TWO_BLOCKS, N, M, M, K, recomputed=(False, True))
    assert outcome.need_s.tolist()[:3] == [1.0, 1.0, 1.0]
    assert found.step_s == TWO_BLOCKS.step_s + 1.0 + 0.5 + 0.5  # 0 is read, 1 and 2 are made, the block runs


# ---- how far ahead reading goes -------------------------------------------------------------------------------------


def evenly(count: int, read: float, copy: float = UNLIMITED) -> Trace:
    """Used one second after the other from 11 on, the last one first; backward begins at 10 with one more.

    Rates are in storages per second; a write takes no time.
    """
    used = [storage(0.0, 10.0 + count - index, None, (-1,)) for index in range(count)]
    machine = traces.resources(UNLIMITED, read * SIZE, copy * SIZE)
    return Trace((*used, storage(0.0, 10.0, None, (-1,))), (), machine, 11.0 + count)


def distance_of(trace: Trace, *places: Placement, recomputed: tuple[bool, ...] = ()) -> tuple[int, ...]:
    again = np.array(recomputed or [False] * len(trace.blocks), bool)
    return Replay(Timeline(trace), Assignment(np.array(places, np.int8), again), distance=None).prefetch_distance


def test_what_comes_back_is_asked_for_one_use_before_the_last_moment() -> None:
    # 0.5 s each with the margin. The next one is asked for in any case, and one more, as plans are made of averages.
    assert distance_of(evenly(6, read=2.5), *[N] * 6, K) == (2, 2, 2, 2, 2, 1)
    # 2.5 s each with the margin: the last must begin at 13.5, the one before at 11, the others before backward does.
    # At 13.5 three were used, at 11 one.
    assert distance_of(evenly(6, read=0.5), *[N] * 6, K) == (4, 4, 3, 3, 2, 1)


def test_copies_in_take_time_too_but_not_of_the_drive() -> None:
    # Copies of 2.5 s begin at 13.5, 11, 8.5, ...; as the slower ones they set the pace of the reads before them.
    slow = evenly(6, read=1.25, copy=0.5)
    assert distance_of(slow, *[N] * 6, K) == (5, 5, 4, 3, 2, 1)
    assert distance_of(slow, *[H] * 6, K) == (4, 4, 3, 3, 2, 1)
    in_place = replace(slow, resources=replace(slow.resources, is_synchronous=True))
    assert distance_of(in_place, *[N] * 6, K) == (2, 2, 2, 2, 2, 1)


def test_what_is_kept_or_refused_has_no_part_in_it() -> None:
    assert distance_of(evenly(6, read=2.5), N, K, N, K, N, K, K) == (2, 2, 1)
    assert distance_of(evenly(6, read=2.5), *[K] * 7) == ()


def test_recomputation_and_rematerialization_give_time() -> None:
    trace = replace(evenly(4, read=0.5), blocks=(BlockTrace("a", 0.0, 5.0, 12.5, 14.5),))
    assert distance_of(trace, *[N] * 4, K) == (3, 3, 2, 1)
    # From 12.5 on all is 5 s later: the last two are used at 18 and 19, and begin at 14 and 16.5, when two were used.
    assert distance_of(trace, *[N] * 4, K, recomputed=(True,)) == (2, 2, 2, 1)
    other = remade(storage(0.0, 12.5, None, (-1,)), 5.0)
    assert distance_of(replace(trace, storages=(*trace.storages, other)), *[N] * 4, K, M) == (2, 2, 2, 1)


# ---- for any trace --------------------------------------------------------------------------------------------------


@given(traces.traces())
@ANY
def test_keeping_everything_costs_nothing_and_peaks_where_most_lies(trace: Trace) -> None:
    saved = [one for one in trace.storages if one.blocks]
    times = {one.pack_s for one in saved}
    peak = max((sum(one.nbytes for one in saved if one.pack_s <= at <= one.freed_s) for at in times), default=0)
    assert Replay(Timeline(trace), Timeline(trace).kept).cost == Prediction(peak, trace.step_s, 0.0, 0.0, 0, 0, 0, 0, 0)


@given(cases())
@ANY
def test_figures_agree_with_each_other(case: tuple[Trace, Assignment]) -> None:
    trace, assignment = case
    outcome = Replay(Timeline(trace), assignment)
    found = outcome.cost
    sizes = np.array([one.nbytes for one in trace.storages])[outcome.exists]
    assert sizes.max(initial=0) <= found.peak_saved_bytes <= 2 * sizes.sum()
    assert found.step_s == pytest.approx(trace.step_s + found.stall_s + found.recomputed_s + found.rematerialized_s)
    made = [one for one, at in zip(trace.storages, outcome.assignment.placements.tolist(), strict=True) if at == M]
    assert found.rematerialized_s == pytest.approx(sum(one.rematerialize_s or 0.0 for one in made) * trace.micro_steps)
    assert found.stall_s == pytest.approx(sum(seconds for _, seconds in outcome.stalls) * trace.micro_steps)
    again = [
        block.forward_end_s - block.forward_start_s
        for block, flag in zip(trace.blocks, assignment.recomputed, strict=True)
        if flag and block.is_recomputable
    ]
    assert found.recomputed_s == pytest.approx(sum(again) * trace.micro_steps)
    assert found.peak_staging_bytes <= trace.resources.staging_bytes
    # What goes to NVMe is written or handed over.
    moved = int(Timeline(trace).padded_bytes[outcome.assignment.placements == N].sum()) * trace.micro_steps
    assert moved - found.forwarded_bytes - 4096 * 2 * 7 < found.written_bytes <= moved
    assert found.forwarded_bytes or found.written_bytes == found.read_bytes == moved
    # A replay is deterministic, and its assignment is what it did.
    assert all(Replay(Timeline(trace), one).cost == found for one in (assignment, outcome.assignment))
    # Where everything is unlimited nothing waits.
    machine = Resources(*[UNLIMITED] * 4, trace.resources.staging_bytes, trace.resources.is_synchronous)
    assert Replay(Timeline(replace(trace, resources=machine)), assignment).cost.stall_s == 0.0


def slowed(trace: Trace, factor: float) -> Trace:
    """Everything takes ``factor`` times as long."""
    return traces.with_rates(trace.scaled(factor), 1 / factor, 1 / factor, 1 / factor)


@given(cases(), st.sampled_from([0.25, 0.5, 2.0, 8.0]), st.sampled_from([(), None]))
@ANY
def test_a_slower_clock_changes_times_and_nothing_else(
    case: tuple[Trace, Assignment], factor: float, distance: tuple[int, ...] | None
) -> None:
    trace, assignment = case
    one, other = (Replay(Timeline(which), assignment, distance=distance) for which in (trace, slowed(trace, factor)))
    assert one.prefetch_distance == other.prefetch_distance
    times = ("step_s", "stall_s", "recomputed_s", "rematerialized_s")
    assert other.cost == replace(one.cost, **{name: factor * getattr(one.cost, name) for name in times})


@given(cases())
@ANY
def test_a_distance_is_for_each_use_and_says_all_there_is_to_say(case: tuple[Trace, Assignment]) -> None:
    trace, assignment = case
    timeline = Timeline(trace)
    outcome = Replay(timeline, assignment, distance=None)
    moved = int(np.isin(outcome.assignment.placements, (H, N)).sum())
    assert len(outcome.prefetch_distance) == moved
    assert all(0 < distance <= moved - used for used, distance in enumerate(outcome.prefetch_distance))
    reach = [used + distance for used, distance in enumerate(outcome.prefetch_distance)]
    assert reach == sorted(reach)
    assert Replay(timeline, assignment, distance=outcome.prefetch_distance).cost == outcome.cost
    assert Replay(timeline, outcome.assignment, distance=None).cost == outcome.cost
