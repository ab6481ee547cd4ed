"""How far ahead a plan lets reading go: worked out by hand, for any trace, and as the cache keeps to it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import StoreFactory
from hypothesis import given
from planners import PLANNERS
from support import traces
from support.doubles import EventAccelerator, wait_for_writes
from support.prefetching import KIB, cache_over, chain, spied
from support.replays import ANY, cases
from support.traces import SIZE, UNLIMITED, layers, storage

from ds_tba.config import Placement
from ds_tba.core.prefetch import MicroStep, Phase
from ds_tba.plan.plan import Limits
from ds_tba.plan.replay import Assignment, Replay, Timeline
from ds_tba.plan.search import adaptive
from ds_tba.plan.trace import BlockTrace, Trace

K, H, N, M = Placement.KEEP, Placement.HOST, Placement.NVME, Placement.REMATERIALIZE

# ---- by hand --------------------------------------------------------------------------------------------------------


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
    made = replace(storage(0.0, 12.5, None, (-1,)), rematerialize_s=5.0)
    assert distance_of(replace(trace, storages=(*trace.storages, made)), *[N] * 4, K, M) == (2, 2, 2, 1)


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


# ---- in the cache ---------------------------------------------------------------------------------------------------


class Course:
    """A micro-step, and the indices of the records that were asked for, of which so many find room."""

    def __init__(self, distance: tuple[int, ...] = (), room: int = 100, *, is_interleaved: bool = False) -> None:
        self.step, self.room, self.asked = MicroStep(is_interleaved=is_interleaved), room, list[int]()
        self._distance = distance

    def forward(self, *nodes: int) -> None:
        """One record for each node."""
        self.step.begin_forward(self._distance)
        for node in nodes:
            record = SimpleNamespace(node=node)
            record.index = self.step.add(record)
        self.step.phase = Phase.WAITING

    def use(self, index: int | None) -> list[int]:
        """What was asked for by then."""
        self.step.read_ahead(self._ask, after=index)
        return self.asked

    def _ask(self, record: Any) -> bool:
        if len(self.asked) < self.room:
            self.asked.append(record.index)
            return True
        return False


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
    course = Course(distance)
    course.forward(*range(5))
    assert [len(course.use(used)) for used in (None, 4, 3, 2, 1, 0)] == counts
    assert course.asked == [4, 3, 2, 1, 0]


def test_what_finds_no_room_within_the_distance_is_asked_for_again() -> None:
    course = Course((5, 4, 3, 2, 1), room=2)
    course.forward(*range(5))
    assert course.use(None) == [4, 3]
    course.room = 3
    assert course.use(4) == [4, 3, 2]


def test_what_one_node_has_saved_comes_back_in_the_order_in_which_it_was_saved() -> None:
    course = Course()
    course.forward(7, 7, 8, 9, 9)
    assert course.use(None) == [3, 4, 2, 0, 1]


def test_of_interleaved_forwards_the_earliest_comes_back_first_and_a_later_one_in_its_turn() -> None:
    course = Course(is_interleaved=True)
    course.forward(0, 1)
    course.forward(2, 3)
    assert course.use(None) == [1, 0, 3, 2]
    assert course.use(1) == course.use(0) == [1, 0, 3, 2]
    course.forward(4, 5)
    assert course.use(3) == [1, 0, 3, 2, 5, 4]


def test_the_distance_goes_on_across_interleaved_forwards() -> None:
    course = Course((1, 1, 2, 1, 1, 1), is_interleaved=True)
    course.forward(0, 1)
    course.forward(2, 3)
    assert course.use(None) == [1]
    assert course.use(1) == [1, 0]
    assert course.use(0) == [1, 0, 3, 2]  # of the next forward, before its backward begins
    course.forward(4, 5)
    assert course.use(3) == [1, 0, 3, 2]
    assert course.use(2) == [1, 0, 3, 2, 5]


def test_in_a_backward_no_more_lies_on_the_device_than_the_distance_says(make_store: StoreFactory) -> None:
    store = make_store(accelerator=EventAccelerator())
    cache, ahead = cache_over(store), list[int]()
    x = torch.randn(128, 128, requires_grad=True)
    with cache.saving():
        cache.forward.micro_step.prefetch_distance = (2,) * 8
        y = x
        for _ in range(8):
            y = spied(chain(y, 1), torch.ones(4), lambda: ahead.append(store.read_ahead.prefetched_bytes))
    wait_for_writes(store)
    y.sum().backward()
    assert len(ahead) == 8 and max(ahead) == ahead[0] == 2 * 64 * KIB
    assert ahead == sorted(ahead, reverse=True)
