"""The host tier: storages in host memory, bounded by ``host_budget_bytes``, all of it taken (and pinned) at the start.

An accelerator's pinning rounds an allocation up to a power of two (2.25 GiB become 4.0), so the budget is taken as the
powers of two that it is the sum of.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import torch

from ds_tba.config import IO_ALIGNMENT_BYTES
from ds_tba.device.accelerator import Accelerator, Arrival, Copies, PendingCopy, Retirement, pins_memory
from ds_tba.device.memory import huge_page_memory
from ds_tba.errors import StateError
from ds_tba.storage.allocator import Span, SpanAllocator
from ds_tba.storage.base import Loaded, Refusal, Store, Ticket
from ds_tba.storage.finalizers import DeferredFinalizers
from ds_tba.telemetry.stats import StoreStats

MIN_SEGMENT_BYTES = 1 << 20


class HostTicket(Ticket):
    """One storage in the host tier."""

    __slots__ = ("arrival", "copy", "device", "segment", "span", "uses")

    def __init__(self, nbytes: int, store: HostStore, segment: Segment, span: Span, device: torch.device) -> None:
        super().__init__(nbytes, store)
        self.device = device
        self.segment = segment
        self.span: Span | None = span
        self.copy: PendingCopy | None = None  # into the span
        self.uses: list[Any] = []  # events of copies out of the span
        self.arrival: Arrival | None = None  # what was copied ahead, on the device


class Segment:
    """One contiguous part of the budget."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.spans = SpanAllocator(memory.numel(), IO_ALIGNMENT_BYTES)

    def view(self, span: Span) -> torch.Tensor:
        """The bytes of a span."""
        return self.memory[span.offset : span.offset + span.nbytes]


class HostStore(Store[HostTicket]):
    """Storages in host memory.

    Args:
        accelerator: pins the memory and orders the copies.
        budget_bytes: taken at once; a multiple of 1 MiB is used.
        ahead_bytes: bound of what is copied to the device before backward asks for it, and of the device memory that
            waits for its copy out (a larger tensor goes alone). The host runs far ahead of a device: without the second
            bound a whole forward would be held until the device has come so far.
    """

    def __init__(self, accelerator: Accelerator, budget_bytes: int, ahead_bytes: int = 256 << 20) -> None:
        self.stats = StoreStats()
        self._accelerator = accelerator
        self._copies = Copies(accelerator)
        self._ahead_bytes = 0
        self._ahead_limit_bytes = ahead_bytes
        self._lock = threading.Lock()
        self._notes: DeferredFinalizers[HostTicket] = DeferredFinalizers(self._lock, self._act_on_release)
        self._retirement = Retirement()
        self._segments = [Segment(self._allocate(nbytes)) for nbytes in segment_sizes(budget_bytes)]
        self._closed = False

    def put(self, data: torch.Tensor, *, wait: bool) -> HostTicket | Refusal:
        with self._lock:
            self._notes.act()
            ticket = self._reserve(data.numel(), data.device)
        if isinstance(ticket, HostTicket):
            self._copy_out(ticket, data)
        self._notes.act_if_free()
        return ticket

    def prefetch(self, ticket: HostTicket) -> bool:
        with self._lock:
            self._notes.act()
            is_ahead = self._prefetch(ticket)
        self._notes.act_if_free()
        return is_ahead

    def get(self, ticket: HostTicket, device: torch.device) -> Loaded:
        with self._lock:
            self._notes.act()
            if self._closed:
                raise StateError("the activation offloader was closed before backward: keep the engine until then")
            self._copies.settle()
            arrival = self._take_arrival(ticket) or self._copy_in(ticket, device)
        self._notes.act_if_free()
        return Loaded(arrival, stored=True)

    def release(self, ticket: HostTicket) -> None:
        self._notes.leave(ticket)

    def settle(self) -> None:
        with self._lock:
            self._notes.act()
            self._settle_copies()
        self._notes.act_if_free()

    def cancel_prefetch(self, ticket: HostTicket) -> bool:
        with self._lock:
            return self._take_arrival(ticket) is not None

    def finish_copies(self) -> None:
        with self._lock:
            self._copies.finish()
            self._notes.act()
            self._settle_copies()
        self._notes.act_if_free()

    def close(self) -> None:
        with self._lock:
            self._notes.act()
            self._closed = True
            self._copies.finish()
            self._retirement.finish()
            self._segments.clear()
        self._notes.act_if_free()

    def _copy_out(self, ticket: HostTicket, data: torch.Tensor) -> None:
        try:
            ticket.copy = self._copies.out(data, self._view(ticket))
        except BaseException:
            self.release(ticket)
            raise
        with self._lock:
            self.stats.offloaded_bytes += ticket.nbytes

    def _prefetch(self, ticket: HostTicket) -> bool:
        self._copies.settle()
        if self._accelerator.is_synchronized_device() or ticket.arrival is not None or self._closed:
            return True
        if self._ahead_bytes and self._ahead_bytes + ticket.nbytes > self._ahead_limit_bytes:
            return False
        with suppress(RuntimeError):  # no device memory: not ahead, then
            ticket.arrival = self._copy_in(ticket, ticket.device)
            self._ahead_bytes += ticket.nbytes
        return True

    def _copy_in(self, ticket: HostTicket, device: torch.device) -> Arrival:
        after = [ticket.copy] if ticket.copy is not None else []
        arrival = self._copies.into(self._view(ticket), ticket.nbytes, device, after)
        ticket.uses = [event for event in ticket.uses if not event.query()]
        if arrival.event is not None:
            ticket.uses.append(arrival.event)
        return arrival

    def _take_arrival(self, ticket: HostTicket) -> Arrival | None:
        arrival, ticket.arrival = ticket.arrival, None
        if arrival is not None:
            self._ahead_bytes -= ticket.nbytes
        return arrival

    def _settle_copies(self) -> None:
        self._copies.settle()
        for segment, span in self._retirement.retired():
            segment.spans.free(span)

    def _reserve(self, nbytes: int, device: torch.device) -> HostTicket | Refusal:
        """Room for a storage, once copies hold less device memory; a refusal is counted."""
        self._settle_copies()
        self._copies.hold_at_most(max(0, self._ahead_limit_bytes - nbytes))
        for segment in self._segments:
            span = segment.spans.allocate(nbytes)
            if span is not None:
                return HostTicket(nbytes, self, segment, span, device)
        refusal = Refusal.CLOSED if self._closed else Refusal.HOST_FULL
        self.stats.fallbacks[refusal.value] += 1
        return refusal

    def _act_on_release(self, ticket: HostTicket) -> None:
        self._take_arrival(ticket)
        span, ticket.span = ticket.span, None
        if span is None:
            return
        events = ticket.uses + ([ticket.copy.event] if ticket.copy is not None else [])
        if not self._retirement.add(events, (ticket.segment, span)):
            ticket.segment.spans.free(span)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if not pins_memory(self._accelerator):
            return huge_page_memory(nbytes)
        return self._accelerator.pin_memory(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))

    @staticmethod
    def _view(ticket: HostTicket) -> torch.Tensor:
        if ticket.span is None:
            raise StateError("bytes were asked for after they were given up; this is a bug in ds_tba")
        return ticket.segment.view(ticket.span)


def segment_sizes(budget_bytes: int) -> list[int]:
    """The powers of two, largest first, that sum up to the budget less what is below 1 MiB."""
    bits = range(budget_bytes.bit_length() - 1, MIN_SEGMENT_BYTES.bit_length() - 2, -1)
    return [1 << bit for bit in bits if budget_bytes >> bit & 1]
