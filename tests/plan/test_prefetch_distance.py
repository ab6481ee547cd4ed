"""How far ahead a plan lets reading go: worked out by hand, for any trace, and as the cache keeps to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import StoreFactory
from hypothesis import given
from planners import PLANNERS
from support import traces
from support.doubles import EventAccelerator, wait_for_writes
from support.prefetching import KIB, Spy, cache_over, chain
from support.replays import ANY, cases, run
from support.traces import SIZE, UNLIMITED, layers, storage

from ds_tba.config import Placement
from ds_tba.core.prefetch import MicroStep, Phase
from ds_tba.plan.plan import Limits, Prediction
from ds_tba.plan.replay import Assignment, Replay, Timeline
from ds_tba.plan.search import adaptive
from ds_tba.plan.trace import BlockTrace, Resources, Trace
from ds_tba.storage.base import Store, Ticket

K, H, N = Placement.KEEP, Placement.HOST, Placement.NVME

# ---- by hand --------------------------------------------------------------------------------------------------------


def machine(*, read: float, copy: float = UNLIMITED, staging_bytes: int = 100 * SIZE) -> Resources:
    """Rates in storages per second; a write takes no time."""
    return traces.resources(UNLIMITED, read * SIZE, copy * SIZE, staging_bytes)


def evenly(count: int, resources: Resources) -> Trace:
    """Used one second after the other from 11 on, the last one first; backward begins at 10 with one more."""
    used = [storage(0.0, 10.0 + count - index, None, (-1,)) for index in range(count)]
    return Trace((*used, storage(0.0, 10.0, None, (-1,))), (), resources, 11.0 + count)


def in_time(trace: Trace, *places: Placement, recomputed: tuple[bool, ...] = ()) -> tuple[Replay, Prediction]:
    again = np.array(recomputed or [False] * len(trace.blocks), bool)
    outcome = Replay(Timeline(trace), Assignment(np.array(places, np.int8), again), distance=None)
    return outcome, outcome.cost


def distance_of(trace: Trace, *places: Placement, recomputed: tuple[bool, ...] = ()) -> tuple[int, ...]:
    return in_time(trace, *places, recomputed=recomputed)[0].prefetch_distance


def test_what_comes_fast_is_asked_for_one_use_before_the_last_moment() -> None:
    # 0.5 s each with the margin. The next one is asked for in any case, and one more, as plans are made of averages.
    assert distance_of(evenly(6, machine(read=2.5)), *[N] * 6, K) == (2, 2, 2, 2, 2, 1)


def test_what_comes_slowly_is_asked_for_early_enough() -> None:
    # 2.5 s each with the margin: the last must begin at 13.5, the one before at 11, the others before backward does.
    # At 13.5 three were used, at 11 one.
    assert distance_of(evenly(6, machine(read=0.5)), *[N] * 6, K) == (4, 4, 3, 3, 2, 1)


def test_copies_in_take_time_too_but_not_of_the_drive() -> None:
    # Copies of 2.5 s begin at 13.5, 11, 8.5, ...; as the slower ones they set the pace of the reads before them.
    slow = evenly(6, machine(read=1.25, copy=0.5))
    assert distance_of(slow, *[N] * 6, K) == (5, 5, 4, 3, 2, 1)
    assert distance_of(slow, *[H] * 6, K) == (4, 4, 3, 3, 2, 1)
    in_place = replace(slow, resources=replace(slow.resources, is_synchronous=True))
    assert distance_of(in_place, *[N] * 6, K) == (2, 2, 2, 2, 2, 1)


def test_what_is_kept_or_refused_has_no_part_in_it() -> None:
    assert distance_of(evenly(6, machine(read=2.5)), N, K, N, K, N, K, K) == (2, 2, 1)
    assert distance_of(evenly(6, machine(read=2.5)), *[K] * 7) == ()


def test_recomputation_gives_time() -> None:
    trace = replace(evenly(4, machine(read=0.5)), blocks=(BlockTrace("a", 0.0, 5.0, 12.5, 14.5),))
    assert distance_of(trace, *[N] * 4, K) == (3, 3, 2, 1)
    # From 12.5 on all is 5 s later: the last two are used at 18 and 19, and begin at 14 and 16.5, when two were used.
    assert distance_of(trace, *[N] * 4, K, recomputed=(True,)) == (2, 2, 2, 1)


def test_just_in_time_nothing_waits_and_less_lies_on_the_device() -> None:
    trace = evenly(6, machine(read=10.0))
    suffix = [storage(9.0, 10.5, 12.9, (-1,)) for _ in range(4)]
    trace = replace(trace, storages=(*trace.storages, *suffix))
    places = [N] * 6 + [K] * 5
    early, late = run(trace, *places)[1], in_time(trace, *places)[1]
    assert early.stall_s == late.stall_s == 0.0 and early.read_bytes == late.read_bytes
    assert (early.peak_saved_bytes, late.peak_saved_bytes) == (10 * SIZE, 7 * SIZE)  # 7 in forward


# ---- for any trace --------------------------------------------------------------------------------------------------


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


# ---- in a plan ------------------------------------------------------------------------------------------------------


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


def test_of_two_ways_that_cost_the_same_the_one_that_cannot_come_too_late_is_chosen() -> None:
    trace = evenly(6, machine(read=10.0))
    suffix = [replace(storage(9.0, 10.02, 10.05, (-1,)), is_movable=False) for _ in range(4)]
    plan = adaptive(replace(trace, storages=(*trace.storages, *suffix)), Limits())
    # Seven lie there at the beginning of forward, and eleven would in the end; in backward it is six at most.
    assert plan.prediction.peak_saved_bytes == 7 * SIZE and plan.placements.count(N) >= 4
    assert plan.prefetch_distance == ()


# ---- in the cache ---------------------------------------------------------------------------------------------------


class Asked(Store[Ticket]):
    """Tells for which tickets prefetching was asked, as far as there is room."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.tickets: list[Ticket] = []

    def prefetch(self, ticket: Ticket) -> bool:
        if len(self.tickets) < self.room:
            self.tickets.append(ticket)
            return True
        return False

    put = get = release = settle = close = cancel_prefetch = copies_out = None  # type: ignore[assignment]


class Record:
    def __init__(self, store: Asked) -> None:
        self.ticket: Ticket | None = Ticket(1, store)
        self.nbytes = self.pending = 1
        self.node = 0


def prefetched(record: Any) -> bool:
    return bool(record.ticket.store.prefetch(record.ticket))


def five(store: Asked, prefetch_distance: tuple[int, ...]) -> tuple[MicroStep, list[Record]]:
    step, records = MicroStep(), [Record(store) for _ in range(5)]
    for node, record in enumerate(records):
        record.node = node
        step.add(record)
    step.prefetch_distance = prefetch_distance
    step.phase = Phase.WAITING
    return step, records


@pytest.mark.parametrize(
    ("distance", "counts"),
    [
        # Of those after the first use only the next; after the second, all three that are left.
        ((1, 1, 3, 2, 1), [1, 2, 5, 5, 5, 5]),
        ((), [5] * 6),
        ((1,), [1, 5, 5, 5, 5, 5]),
    ],
)
def test_the_cache_asks_for_no_more_than_the_distance_says_and_beyond_its_end_for_all(
    distance: tuple[int, ...], counts: list[int]
) -> None:
    store, found = Asked(), list[int]()
    step, records = five(store, distance)
    for used in (None, 4, 3, 2, 1, 0):
        step.read_ahead(prefetched, used)
        found.append(len(store.tickets))
    assert found == counts and store.tickets == [record.ticket for record in reversed(records)]


def test_the_bounds_of_the_store_hold_with_a_distance_too() -> None:
    store = Asked(room=2)
    step, _ = five(store, (5, 4, 3, 2, 1))
    step.read_ahead(prefetched)
    assert len(store.tickets) == 2
    store.room = 3
    step.read_ahead(prefetched, after=4)
    assert len(store.tickets) == 3


class Interleaved:
    """Three forwards of two records each, of which two are ahead of the first backward."""

    def __init__(self, prefetch_distance: tuple[int, ...] = ()) -> None:
        self.store, self.step = Asked(), MicroStep(is_interleaved=True)
        self._lead, self._records = prefetch_distance, list[Record]()
        self.forward()
        self.forward()

    def forward(self) -> None:
        self.step.begin_forward(self._lead)
        for record in (Record(self.store), Record(self.store)):
            record.node = len(self._records)
            self.step.add(record)
            self._records.append(record)
        self.step.phase = Phase.WAITING

    def use(self, index: int | None) -> list[int]:
        """What is asked for by now."""
        self.step.read_ahead(prefetched, after=index)
        numbers = {record.ticket: number for number, record in enumerate(self._records)}
        return [numbers[ticket] for ticket in self.store.tickets]


def test_of_interleaved_forwards_the_earliest_comes_back_first_and_a_later_one_in_its_turn() -> None:
    schedule = Interleaved()
    assert schedule.use(None) == [1, 0, 3, 2]
    assert schedule.use(1) == schedule.use(0) == [1, 0, 3, 2]
    schedule.forward()
    assert schedule.use(3) == [1, 0, 3, 2, 5, 4]


def test_what_one_node_has_saved_comes_back_in_the_order_in_which_it_was_saved() -> None:
    store, step = Asked(), MicroStep()
    records = [Record(store) for _ in range(5)]
    for record, node in zip(records, (7, 7, 8, 9, 9), strict=True):
        record.node = node
        step.add(record)
    step.phase = Phase.WAITING
    step.read_ahead(prefetched)
    assert store.tickets == [records[at].ticket for at in (3, 4, 2, 0, 1)]


def test_the_distance_goes_on_across_interleaved_forwards() -> None:
    schedule = Interleaved(prefetch_distance=(1, 1, 2, 1, 1, 1))
    assert schedule.use(None) == [1]
    assert schedule.use(1) == [1, 0]
    assert schedule.use(0) == [1, 0, 3, 2]  # of the next forward, before its backward begins
    schedule.forward()
    assert schedule.use(3) == [1, 0, 3, 2]
    assert schedule.use(2) == [1, 0, 3, 2, 5]


def test_in_a_backward_no_more_lies_on_the_device_than_the_distance_says(make_store: StoreFactory) -> None:
    store = make_store(accelerator=EventAccelerator())
    cache, ahead = cache_over(store), list[int]()
    x = torch.randn(128, 128, requires_grad=True)
    with cache.saving():
        cache.forward.micro_step.prefetch_distance = (2,) * 8
        y = x
        for _ in range(8):
            y = Spy.apply(chain(y, 1), torch.ones(4), lambda: ahead.append(store.read_ahead.prefetched_bytes))
    wait_for_writes(store)
    y.sum().backward()
    assert len(ahead) == 8 and max(ahead) == ahead[0] == 2 * 64 * KIB
    assert ahead == sorted(ahead, reverse=True)
