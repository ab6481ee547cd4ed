"""Byte ranges handed out of a bounded region: staging slots and extents of a swap file."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from ds_tba.errors import StateError


@dataclass(frozen=True, slots=True)
class Span:
    """A byte range ``[offset, offset + nbytes)``."""

    offset: int
    nbytes: int

    def split(self, nbytes: int) -> tuple[Span, Span]:
        """The first ``nbytes``, and the rest (which may be empty)."""
        return Span(self.offset, nbytes), Span(self.offset + nbytes, self.nbytes - nbytes)


class SpanAllocator:
    """First fit by address, neighbours merged on free.

    Lowest address first means that the bytes just given back are the first to be used again: extents that were already
    written are overwritten at twice the rate of fresh ones on thin-provisioned drives, and the used part stays short.

    Args:
        capacity_bytes: size of the region.
        alignment_bytes: every span starts at, and is as long as, a multiple of this.
    """

    def __init__(self, capacity_bytes: int, alignment_bytes: int) -> None:
        self.alignment_bytes = alignment_bytes
        self.capacity_bytes = 0
        self.used_bytes = 0
        self.peak_used_bytes = 0
        self._offsets: list[int] = []
        self._sizes: list[int] = []
        self.grow(capacity_bytes)

    def grow(self, capacity_bytes: int) -> None:
        """Extend the region to ``capacity_bytes``, rounded down to the alignment."""
        capacity_bytes -= capacity_bytes % self.alignment_bytes
        if capacity_bytes > self.capacity_bytes:
            added = Span(self.capacity_bytes, capacity_bytes - self.capacity_bytes)
            self.capacity_bytes = capacity_bytes
            self._insert(added)

    def padded(self, nbytes: int) -> int:
        """``nbytes`` rounded up to the alignment."""
        return -(-nbytes // self.alignment_bytes) * self.alignment_bytes

    def allocate(self, nbytes: int) -> Span | None:
        """A span of at least ``nbytes``, or None where no free range is long enough."""
        nbytes = self.padded(max(nbytes, 1))
        for index, size in enumerate(self._sizes):
            if size >= nbytes:
                offset = self._offsets[index]
                if size == nbytes:
                    del self._offsets[index], self._sizes[index]
                else:
                    self._offsets[index] += nbytes
                    self._sizes[index] -= nbytes
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
        index = bisect_left(self._offsets, span.offset)
        end = span.offset + span.nbytes
        overlaps_next = index < len(self._offsets) and self._offsets[index] < end
        overlaps_previous = index > 0 and self._offsets[index - 1] + self._sizes[index - 1] > span.offset
        if overlaps_next or overlaps_previous or end > self.capacity_bytes:
            raise StateError(f"bytes {span.offset}..{end} were given back twice or never handed out")
        joins_next = index < len(self._offsets) and self._offsets[index] == end
        joins_previous = index > 0 and self._offsets[index - 1] + self._sizes[index - 1] == span.offset
        if joins_previous:
            self._sizes[index - 1] += span.nbytes
            if joins_next:
                self._sizes[index - 1] += self._sizes[index]
                del self._offsets[index], self._sizes[index]
        elif joins_next:
            self._offsets[index] = span.offset
            self._sizes[index] += span.nbytes
        else:
            self._offsets.insert(index, span.offset)
            self._sizes.insert(index, span.nbytes)
