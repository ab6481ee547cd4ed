"""Which bytes of a bounded region are free? Slots of staging, extents of a swap file, and the room of the host tier.

Cannot see what the bytes are; a holder of a span gives it back once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ds_tba.device.accelerator import AT_ONCE, Event
from ds_tba.device.memory import PAGE_BYTES
from ds_tba.errors import StateError


@dataclass(frozen=True, slots=True)
class Span:
    """A byte range ``[offset, offset + nbytes)``."""

    offset: int
    nbytes: int


class SpanAllocator:
    """First fit by address, neighbours merged on free.

    Lowest address first means that the bytes just given back are the first to be used again: extents that were already
    written are overwritten at twice the rate of fresh ones on thin-provisioned drives, and the used part stays short.
    Every span is of whole pages, which is all that direct I/O moves.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = 0
        self.used_bytes = 0
        self.peak_used_bytes = 0
        # Free ranges as (offset, length), by offset. Each change of it is one statement: the exception of a signal
        # handler comes between two, and a range half changed would be handed out twice.
        self._free: list[tuple[int, int]] = []
        self.grow(capacity_bytes)

    def grow(self, capacity_bytes: int) -> None:
        """Extend the region to ``capacity_bytes``, rounded down to the alignment."""
        capacity_bytes -= capacity_bytes % PAGE_BYTES
        if capacity_bytes > self.capacity_bytes:
            added = Span(self.capacity_bytes, capacity_bytes - self.capacity_bytes)
            self.capacity_bytes = capacity_bytes
            self._insert(added)

    def padded(self, nbytes: int) -> int:
        """Return ``nbytes`` rounded up to the alignment."""
        return -(-nbytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def is_unused(self) -> bool:
        """True if all of the region is free, by the ranges: an exception may have interrupted the counting."""
        return sum(length for _, length in self._free) == self.capacity_bytes

    def allocate(self, nbytes: int) -> Span | None:
        """Take a span of at least ``nbytes``; None where no free range is long enough."""
        nbytes = self.padded(max(nbytes, 1))
        for index, (offset, length) in enumerate(self._free):
            if length >= nbytes:
                self._free[index : index + 1] = [(offset + nbytes, length - nbytes)] if length > nbytes else []
                self.used_bytes += nbytes
                self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)
                return Span(offset, nbytes)
        return None

    def free(self, span: Span) -> None:
        """Give a span back.

        Raises:
            StateError: the span, or a part of it, is free already.
        """
        self._insert(span)
        self.used_bytes -= span.nbytes

    def _insert(self, span: Span) -> None:
        start, end = span.offset, span.offset + span.nbytes
        first = last = bisect_left(self._free, (start, 0))
        previous_end = sum(self._free[first - 1]) if first > 0 else -1
        next_start = self._free[last][0] if last < len(self._free) else self.capacity_bytes + 1
        if previous_end > start or next_start < end or end > self.capacity_bytes:
            raise StateError(f"bytes {start}..{end} were given back twice or never handed out")
        if previous_end == start:
            first -= 1
            start = self._free[first][0]
        if next_start == end:
            end += self._free[last][1]
            last += 1
        self._free[first:last] = [(start, end - start)]


class CopySafeAllocator(SpanAllocator):
    """Spans of memory that copies may still use when they are freed. Changed only under the store's lock.

    Such a span is free once its copies are done, which :meth:`settle` looks for: the host never waits for the device
    to free memory, and no copy reads or writes a span that was handed out again.
    """

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._in_copies: deque[tuple[list[Event], Span]] = deque()

    def free_after(self, events: Iterable[Event], span: Span) -> None:
        """Free a span when these events are done, at once where there is nothing to wait for.

        Asks no event: a finalizer may run while its thread captures a graph, which a query would spoil.
        """
        under_way = [event for event in events if event is not AT_ONCE]
        if under_way:
            self._in_copies.append((under_way, span))
        else:
            self.free(span)

    def settle(self) -> None:
        """Free the spans whose copies are done. Never blocks."""
        for _ in range(len(self._in_copies)):  # turned round, so that an event that cannot be asked loses none
            events, span = self._in_copies[0]
            if all(event.query() for event in events):  # else a copy would use what is handed out again
                self._in_copies.popleft()
                self.free(span)
            else:
                self._in_copies.rotate(-1)

    @property
    def has_spans_in_copies(self) -> bool:
        """True if :meth:`settle` will free a span later."""
        return bool(self._in_copies)
