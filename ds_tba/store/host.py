"""The host tier: storages in host memory, bounded by ``host_budget_bytes``, all of it taken (and pinned) at the start.

An accelerator's pinning rounds an allocation up to a power of two (2.25 GiB become 4.0), so the budget is taken as the
powers of two that it is the sum of.
"""

from __future__ import annotations

import threading

import torch

from ds_tba.errors import StateError
from ds_tba.io.memory import huge_page_memory
from ds_tba.notes import FinalizerNotes
from ds_tba.spans import Span, SpanAllocator
from ds_tba.store.base import Loaded, Refusal, Store, Ticket
from ds_tba.telemetry.stats import StoreStats
from ds_tba.transfer import Accelerator, PendingCopy, copy_in, copy_out, pins_memory

ALIGNMENT_BYTES = 4096
LEAST_SEGMENT_BYTES = 1 << 20


class HostTicket(Ticket):
    """One storage in the host tier."""

    __slots__ = ("copy", "segment", "span")

    def __init__(self, nbytes: int, store: HostStore, segment: Segment, span: Span) -> None:
        super().__init__(nbytes, store)
        self.segment = segment
        self.span: Span | None = span
        self.copy: PendingCopy | None = None


class Segment:
    """One contiguous part of the budget."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.spans = SpanAllocator(memory.numel(), ALIGNMENT_BYTES)

    def view(self, span: Span) -> torch.Tensor:
        """The bytes of a span."""
        return self.memory[span.offset : span.offset + span.nbytes]


class HostStore(Store[HostTicket]):
    """Storages in host memory.

    Args:
        accelerator: pins the memory and orders the copies.
        budget_bytes: taken at once; a multiple of 1 MiB is used.
    """

    def __init__(self, accelerator: Accelerator, budget_bytes: int) -> None:
        self.stats = StoreStats()
        self._accelerator = accelerator
        self._lock = threading.Lock()
        self._notes: FinalizerNotes[HostTicket] = FinalizerNotes(self._lock, self._act_on_release)
        self._segments = [Segment(self._allocate(nbytes)) for nbytes in segment_sizes(budget_bytes)]
        self._closed = False

    def put(self, data: torch.Tensor, *, wait: bool) -> HostTicket | Refusal:
        with self._lock:
            self._notes.act()
            ticket = self._reserve(data.numel())
            if isinstance(ticket, Refusal):
                self.stats.fallbacks[ticket.value] += 1
                return ticket
            self.stats.offloaded_bytes += ticket.nbytes
        ticket.copy = copy_out(self._accelerator, data, self._view(ticket))
        return ticket

    def prefetch(self, ticket: HostTicket) -> bool:
        return True  # in memory already

    def get(self, ticket: HostTicket, device: torch.device) -> Loaded:
        if self._closed:
            raise StateError("the activation offloader was closed before backward: keep the engine until then")
        if ticket.copy is not None:
            ticket.copy.wait()
            ticket.copy = None
        return Loaded(copy_in(self._accelerator, self._view(ticket), ticket.nbytes, device), stored=True)

    def release(self, ticket: HostTicket) -> None:
        self._notes.leave_for_later(ticket)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._segments.clear()

    def _reserve(self, nbytes: int) -> HostTicket | Refusal:
        if self._closed:
            return Refusal.CLOSED
        for segment in self._segments:
            span = segment.spans.allocate(nbytes)
            if span is not None:
                return HostTicket(nbytes, self, segment, span)
        return Refusal.HOST_FULL

    @staticmethod
    def _act_on_release(ticket: HostTicket) -> None:
        if ticket.copy is not None:
            ticket.copy.wait()  # the device may still be writing into the span
        span, ticket.span = ticket.span, None
        if span is not None:
            ticket.segment.spans.free(span)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if not pins_memory(self._accelerator):
            return huge_page_memory(nbytes)
        return self._accelerator.pin_memory(torch.empty(nbytes, dtype=torch.uint8))

    @staticmethod
    def _view(ticket: HostTicket) -> torch.Tensor:
        if ticket.span is None:
            raise StateError("bytes were asked for after they were given up; this is a bug in ds_tba")
        return ticket.segment.view(ticket.span)


def segment_sizes(budget_bytes: int) -> list[int]:
    """The powers of two, largest first, that sum up to the budget less what is below 1 MiB."""
    bits = range(budget_bytes.bit_length() - 1, LEAST_SEGMENT_BYTES.bit_length() - 2, -1)
    return [1 << bit for bit in bits if budget_bytes >> bit & 1]
