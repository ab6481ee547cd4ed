from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_tba.errors import StateError
from ds_tba.storage.allocator import Span, SpanAllocator


def test_sizes_are_exact_up_to_the_alignment() -> None:
    spans = SpanAllocator(1 << 20, 4096)
    assert spans.allocate(5000) == Span(0, 8192)
    assert spans.allocate(1) == Span(8192, 4096)
    assert spans.used_bytes == 12288


def test_lowest_address_first_so_that_written_extents_are_written_again() -> None:
    spans = SpanAllocator(1 << 20, 4096)
    first, second = spans.allocate(4096), spans.allocate(4096)
    assert first is not None and second is not None
    spans.free(first)
    spans.free(second)
    assert spans.allocate(8192) == Span(0, 8192)


def test_a_full_region_refuses_and_recovers() -> None:
    spans = SpanAllocator(8192, 4096)
    taken = spans.allocate(8192)
    assert spans.allocate(1) is None
    assert taken is not None
    spans.free(taken)
    assert spans.allocate(1) == Span(0, 4096)


@pytest.mark.parametrize("span", [Span(0, 4096), Span(4096, 8192), Span(1 << 20, 4096)])
def test_giving_back_what_is_free_raises(span: Span) -> None:
    spans = SpanAllocator(1 << 20, 4096)
    taken = spans.allocate(8192)
    assert taken is not None
    spans.free(taken)
    with pytest.raises(StateError, match="twice"):
        spans.free(span)


def test_growing_joins_the_free_end() -> None:
    spans = SpanAllocator(8192, 4096)
    spans.grow(16384)
    assert spans.allocate(16384) == Span(0, 16384)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40000)), max_size=200))
def test_spans_never_overlap_and_nothing_is_lost(steps: list[tuple[bool, int]]) -> None:
    spans = SpanAllocator(1 << 18, 4096)
    held: list[Span] = []
    for take, number in steps:
        if take:
            span = spans.allocate(number)
            if span is not None:
                assert span.nbytes >= number and span.offset % 4096 == 0
                assert all(
                    span.offset + span.nbytes <= one.offset or one.offset + one.nbytes <= span.offset for one in held
                )
                held.append(span)
        elif held:
            spans.free(held.pop(number % len(held)))
        assert spans.used_bytes == sum(span.nbytes for span in held)
    for span in held:
        spans.free(span)
    assert spans.allocate(1 << 18) == Span(0, 1 << 18)
