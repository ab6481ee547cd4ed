"""The host tier: storages in host memory, bounded by ``host_budget_bytes``, all of it taken (and pinned) at the start.

An accelerator's pinning rounds an allocation up to a power of two (2.25 GiB become 4.0), so the budget is taken as the
powers of two that it is the sum of.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from ds_tba.config import IO_ALIGNMENT_BYTES
from ds_tba.device.accelerator import Accelerator, Arrival, Copies, PendingCopy, pins_memory
from ds_tba.device.memory import huge_page_memory
from ds_tba.errors import StateError
from ds_tba.storage.allocator import CopySafeAllocator, Span
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
        self.arrival: Arrival | None = None  # the copy on the device, if it was made ahead

    def view(self) -> torch.Tensor:
        """The bytes in host memory.

        Raises:
            StateError: they were given up.
        """
        if self.span is None:
            raise StateError("bytes were asked for after they were given up; this is a bug in ds_tba")
        return self.segment.memory[self.span.offset : self.span.offset + self.span.nbytes]


class Segment:
    """One contiguous part of the budget."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.spans = CopySafeAllocator(memory.numel(), IO_ALIGNMENT_BYTES)


class HostMemory:
    """The budget, in segments. Changed only under the store's lock."""

    def __init__(self, accelerator: Accelerator, budget_bytes: int) -> None:
        self.segments = [Segment(_allocate(nbytes, accelerator)) for nbytes in segment_sizes(budget_bytes)]

    def allocate(self, nbytes: int) -> tuple[Segment, Span] | None:
        """A span of the first segment that has room for it."""
        for segment in self.segments:
            span = segment.spans.allocate(nbytes)
            if span is not None:
                return segment, span
        return None

    def settle(self) -> None:
        """Free the spans that were given up and whose copies are done."""
        for segment in self.segments:
            segment.spans.settle()

    def close(self) -> None:
        """Give the memory back, once no copy uses it; blocks until then."""
        for segment in self.segments:
            segment.spans.finish()
        self.segments.clear()


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
        self._is_synchronous = accelerator.is_synchronized_device()
        self._copies = Copies(accelerator)
        self._ahead_bytes = 0
        self._ahead_limit_bytes = ahead_bytes
        self._lock = threading.Lock()
        self._deferred: DeferredFinalizers[HostTicket] = DeferredFinalizers(self._lock, self._free)
        self._memory = HostMemory(accelerator, budget_bytes)
        self._held_after_close: list[Segment] = []  # copies in still read them
        self._closed = False

    def put(self, data: torch.Tensor, *, wait: bool) -> HostTicket | Refusal:
        with self._lock:
            self._deferred.act()
            self._copies.settle()
            self._memory.settle()
            self._copies.hold_at_most(max(0, self._ahead_limit_bytes - data.numel()))
            reserved = self._memory.allocate(data.numel())
            if reserved is None:
                refusal = Refusal.CLOSED if self._closed else Refusal.HOST_FULL
                refusal.count(self.stats, data.numel())
            else:
                ticket = HostTicket(data.numel(), self, *reserved, data.device)
        if reserved is None:
            self._deferred.act_if_free()
            return refusal
        try:
            ticket.copy = self._copies.out(data, ticket.view())  # without the lock: nobody else has the ticket yet
        except BaseException:
            self.release(ticket)
            raise
        with self._lock:
            self.stats.offloaded_bytes += ticket.nbytes
        self._deferred.act_if_free()
        return ticket

    def prefetch(self, ticket: HostTicket) -> bool:
        with self._lock:
            self._deferred.act()
            self._copies.settle()
            has_room = not self._ahead_bytes or self._ahead_bytes + ticket.nbytes <= self._ahead_limit_bytes
            is_done = self._is_synchronous or ticket.arrival is not None or self._closed
            if has_room and not is_done:
                with suppress(RuntimeError):  # no device memory: backward tries again
                    ticket.arrival = self._copy_in(ticket, ticket.device)
                    self._ahead_bytes += ticket.nbytes
        self._deferred.act_if_free()
        return is_done or has_room

    def get(self, ticket: HostTicket, device: torch.device) -> Loaded:
        with self._lock:
            self._deferred.act()
            if self._closed:
                raise StateError("the activation offloader was closed before backward: keep the engine until then")
            self._copies.settle()
            arrival = self._take_arrival(ticket) or self._copy_in(ticket, device)
        self._deferred.act_if_free()
        return Loaded(arrival, stored=True)

    def release(self, ticket: HostTicket) -> None:
        self._deferred.leave(ticket)

    def settle(self) -> None:
        with self._lock:
            self._deferred.act()
            self._copies.settle()
            self._memory.settle()
        self._deferred.act_if_free()

    def cancel_prefetch(self, ticket: HostTicket) -> bool:
        with self._lock:
            return self._take_arrival(ticket) is not None

    def copies_out(self) -> Sequence[PendingCopy]:
        with self._lock:
            self._deferred.act()
            self._copies.settle()
            self._memory.settle()
            found = self._copies.under_way
        self._deferred.act_if_free()
        return found

    def close(self) -> None:
        with self._lock:
            self._deferred.act()
            self._closed = True
            self._copies.finish()
            self._memory.close()
        self._deferred.act_if_free()

    def _copy_in(self, ticket: HostTicket, device: torch.device) -> Arrival:
        after = [ticket.copy] if ticket.copy is not None else []
        arrival = self._copies.into(ticket.view(), ticket.nbytes, device, after)
        ticket.uses = [event for event in ticket.uses if not event.query()]
        if arrival.event is not None:
            ticket.uses.append(arrival.event)
        return arrival

    def _take_arrival(self, ticket: HostTicket) -> Arrival | None:
        arrival, ticket.arrival = ticket.arrival, None
        if arrival is not None:
            self._ahead_bytes -= ticket.nbytes
        return arrival

    def _free(self, ticket: HostTicket) -> None:
        """Finalize a released ticket."""
        self._take_arrival(ticket)
        span, ticket.span = ticket.span, None
        if span is not None:
            events = ticket.uses + ([ticket.copy.event] if ticket.copy is not None else [])
            ticket.segment.spans.free_after(events, span)
            if self._closed and ticket.segment.spans.has_spans_in_copies:
                self._held_after_close.append(ticket.segment)


def _allocate(nbytes: int, accelerator: Accelerator) -> torch.Tensor:
    if not pins_memory(accelerator):
        return huge_page_memory(nbytes)
    return accelerator.pin_memory(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))


def segment_sizes(budget_bytes: int) -> list[int]:
    """The powers of two, largest first, that sum up to the budget less what is below 1 MiB."""
    bits = range(budget_bytes.bit_length() - 1, MIN_SEGMENT_BYTES.bit_length() - 2, -1)
    return [1 << bit for bit in bits if budget_bytes >> bit & 1]
