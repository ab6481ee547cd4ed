"""How far ahead the cache reads, which a plan says; what it says is in ``test_replay.py``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import StoreFactory
from support.doubles import EventAccelerator, wait_for_writes
from support.prefetching import KIB, cache_over, chain, spied

from ds_tba.core.prefetch import MicroStep, Phase


class Course:
    """A micro-step, and the indices of the records that were asked for."""

    def __init__(self, distance: tuple[int, ...] = (), *, is_interleaved: bool = False) -> None:
        self.step, self.asked = MicroStep(is_interleaved=is_interleaved), list[int]()
        self._distance = distance

    def forward(self, *nodes: int) -> None:
        """One record for each node."""
        self.step.begin_forward(self._distance)
        for node in nodes:
            record = SimpleNamespace(node=node)
            record.index = self.step.add(record)
        self.step.phase = Phase.WAITING

    def use(self, index: int | None, room: int = 100) -> list[int]:
        """What was asked for by then, of which so many find room."""

        def ask(record: SimpleNamespace) -> bool:
            return len(self.asked) < room and self.asked.append(record.index) is None

        self.step.read_ahead(ask, after=index)
        return self.asked


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
    course = Course((5, 4, 3, 2, 1))
    course.forward(*range(5))
    assert course.use(None, room=2) == [4, 3]
    assert course.use(4, room=3) == [4, 3, 2]


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
