"""Spans, staging on a device, and the buffers of lanes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from conftest import StoreFactory
from hypothesis import given, settings
from hypothesis import strategies as st
from support.disks import until
from support.doubles import DeviceBackend, EventAccelerator, Gate
from support.stores import CPU, MIB, noise, put, stored

import ds_tba.storage.staging as spans_module
from ds_tba.errors import StateError
from ds_tba.storage.base import Span, SpanAllocator
from ds_tba.storage.nvme import Lanes
from ds_tba.storage.staging import CopySafeAllocator


def test_lowest_address_first_so_that_written_extents_are_written_again() -> None:
    spans = SpanAllocator(1 << 20)
    first, second = spans.allocate(4096), spans.allocate(4096)
    assert first is not None and second is not None
    spans.free(first)
    spans.free(second)
    assert spans.allocate(8192) == Span(0, 8192)


@pytest.mark.parametrize("span", [Span(0, 4096), Span(4096, 8192), Span(1 << 20, 4096)])
def test_giving_back_what_is_free_raises(span: Span) -> None:
    spans = SpanAllocator(1 << 20)
    taken = spans.allocate(8192)
    assert taken is not None
    spans.free(taken)
    with pytest.raises(StateError, match="twice"):
        spans.free(span)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40000)), max_size=200))
def test_spans_never_overlap_and_nothing_is_lost(steps: list[tuple[bool, int]]) -> None:
    spans = SpanAllocator(1 << 17)
    held: list[Span] = []
    for take, number in steps:
        if take:
            span = spans.allocate(number)
            if span is not None:
                assert span.nbytes == -(-number // 4096) * 4096 and span.offset % 4096 == 0
                assert all(
                    span.offset + span.nbytes <= one.offset or one.offset + one.nbytes <= span.offset for one in held
                )
                held.append(span)
        elif held:
            spans.free(held.pop(number % len(held)))
        assert spans.used_bytes == sum(span.nbytes for span in held)
    spans.grow(1 << 18)  # joins the free end
    for span in held:
        spans.free(span)
    assert spans.allocate(1 << 18) == Span(0, 1 << 18)


def interrupted(work: Callable[[], object], line: int) -> bool:
    """Run ``work`` and raise before its line number ``line``, as a signal handler may; whether it had so many."""
    left = iter(range(line))

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and frame.f_code.co_filename == spans_module.__file__ and next(left, None) is None:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("given_back", range(4))
@pytest.mark.parametrize("frees", [False, True])
def test_an_interrupt_may_lose_a_span_but_hands_none_out_twice(frees: bool, given_back: int) -> None:
    for line in itertools.count():
        spans = SpanAllocator(1 << 16)
        held = [spans.allocate(4096 * (1 + number % 3)) for number in range(6)]
        taken = [span for span in held if span is not None]
        for _ in range(given_back):
            spans.free(taken.pop(len(taken) // 2))
        work = partial(spans.free, taken.pop(1)) if frees else partial(spans.allocate, 4096)
        was_interrupted = interrupted(work, line)
        while (span := spans.allocate(4096)) is not None:
            taken.append(span)
        taken.sort(key=lambda span: span.offset)
        assert all(one.offset + one.nbytes <= other.offset for one, other in itertools.pairwise(taken)), line
        assert taken[-1].offset + taken[-1].nbytes <= 1 << 16
        if not was_interrupted:
            return


def test_an_event_that_cannot_be_asked_loses_no_span() -> None:
    answers = [True, None, False, True, True, True]

    class Event:
        def query(self) -> bool:
            answer = answers.pop(0)
            if answer is None:
                raise RuntimeError("operation not permitted when stream is capturing")
            return answer

    spans = CopySafeAllocator(1 << 16)
    for _ in range(3):
        spans.free_after([Event()], spans.allocate(4096))
    with pytest.raises(RuntimeError, match="not permitted"):
        spans.settle()
    for left_bytes in (4096, 0):
        spans.settle()
        assert spans.used_bytes == left_bytes


# ---- staging on the device, which host memory plays here ------------------------------------------------------------


def test_its_zeroing_is_waited_for_and_a_slot_is_free_once_its_bytes_are_copied(make_store: StoreFactory) -> None:
    accelerator, backend, data = EventAccelerator(), DeviceBackend(), noise(MIB)
    store = make_store(backend, accelerator=accelerator)
    store.open()
    assert len(accelerator.waited) == len(backend.staging) == 1  # the zeroing of staging
    assert torch.equal(store.get(stored(store, data), CPU).data, data)
    until(lambda: store.ring.slots.used_bytes == 0, "the slot")
    store.close()
    assert backend.staging == []


def test_each_lane_computes_in_a_stream_of_its_own(make_store: StoreFactory) -> None:
    accelerator = EventAccelerator()
    store = make_store(DeviceBackend(), accelerator=accelerator, lanes=Lanes(1, 1))
    copies = (store.copies._out_stream, store.copies._in_stream)
    for _ in range(2):
        store.get(stored(store, noise(MIB)), CPU)
    write, read = [stream for stream in accelerator.entered if stream not in copies]
    assert write is not read


def test_a_read_beside_staging_waits_for_idle_memory(make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, accelerator = Gate(), EventAccelerator()
    store = make_store(DeviceBackend(gate), staging_bytes=4 * MIB, accelerator=accelerator)
    store.part_bytes = 4 * MIB  # not cut
    gate.opened.set()
    data = noise(3 * MIB)
    ticket = stored(store, data)
    gate.opened.clear()
    for _ in range(4):
        put(store, noise(MIB))
    waits: list[int] = []
    overflow = store.ring.overflow

    def watched(nbytes: int) -> torch.Tensor:
        before = len(accelerator.waited)
        memory = overflow(nbytes)
        waits.append(len(accelerator.waited) - before)
        return memory

    monkeypatch.setattr(store.ring, "overflow", watched)
    assert torch.equal(store.get(ticket, CPU).data, data) and waits == [1]
    gate.opened.set()
