"""How does a storage come to host memory and back? The tier bounded by ``host_budget_bytes``, all taken at the start.

An accelerator's pinning rounds an allocation up to a power of two (2.25 GiB become 4.0), so the budget is taken as the
powers of two that it is the sum of. Cannot see whether other processes leave so much memory: ``tiers.py`` asks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from ds_tba.config import IO_ALIGNMENT_BYTES
from ds_tba.device.accelerator import Accelerator, Arrival, Copies, PendingCopy
from ds_tba.device.memory import huge_page_memory
from ds_tba.errors import StateError
from ds_tba.storage.base import Loaded, Refusal, Store, Ticket
from ds_tba.storage.finalizers import DeferredFinalizers
from ds_tba.storage.staging import CopySafeAllocator, Span
from ds_tba.telemetry.stats import StoreStats

MIN_SEGMENT_BYTES = 1 << 20


class Segment:
    """One contiguous part of the budget. Changed only under the store's lock."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.spans = CopySafeAllocator(memory.numel(), IO_ALIGNMENT_BYTES)


class HostTicket(Ticket):
    """One storage in the host tier.

    Attributes:
        copy: into the span, and ``uses``: events of copies out of it. The span is free after both.
        arrival: the copy on the device, if it was made ahead.
    """

    __slots__ = ("arrival", "copy", "device", "segment", "span", "uses")

    def __init__(self, nbytes: int, store: HostStore, segment: Segment, span: Span, device: torch.device) -> None:
        super().__init__(nbytes, store)
        self.device = device
        self.segment = segment
        self.span: Span | None = span
        self.copy: PendingCopy | None = None
        self.uses: list[Any] = []
        self.arrival: Arrival | None = None

    def view(self) -> torch.Tensor:
        """The bytes in host memory.

        Raises:
            StateError: they were given up.
        """
        if self.span is None:
            raise StateError("bytes were asked for after they were given up; this is a bug in ds_tba")
        return self.segment.memory[self.span.offset : self.span.offset + self.span.nbytes]


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
        # No lanes wait for this lock, so that copies into the device may be queued under it.
        self._deferred: DeferredFinalizers[HostTicket] = DeferredFinalizers(threading.Lock(), self._free)
        self._segments = [Segment(host_memory(nbytes, accelerator)) for nbytes in segment_sizes(budget_bytes)]
        self._held_after_close: list[Segment] = []  # copies in still read them
        self._closed = False

    def put(self, data: torch.Tensor, *, wait: bool) -> HostTicket | Refusal:
        with self._deferred, self._deferred.lock:
            self._settle()
            self._copies.hold_at_most(max(0, self._ahead_limit_bytes - data.numel()))
            for segment in self._segments:
                span = segment.spans.allocate(data.numel())
                if span is not None:
                    break
            else:
                refusal = Refusal.CLOSED if self._closed else Refusal.HOST_FULL
                refusal.count(self.stats, data.numel())
                return refusal
        ticket = HostTicket(data.numel(), self, segment, span, data.device)
        try:
            ticket.copy = self._copies.out(data, ticket.view())  # without the lock: nobody else has the ticket yet
        except BaseException:
            self.release(ticket)
            raise
        with self._deferred, self._deferred.lock:
            self.stats.offloaded_bytes += ticket.nbytes
        return ticket

    def prefetch(self, ticket: HostTicket) -> bool:
        with self._deferred, self._deferred.lock:
            self._copies.settle()
            if self._is_synchronous or ticket.arrival is not None or self._closed:
                return True
            if self._ahead_bytes and self._ahead_bytes + ticket.nbytes > self._ahead_limit_bytes:
                return False
            with suppress(RuntimeError):  # no device memory: backward tries again
                ticket.arrival = self._copy_in(ticket, ticket.device)
                self._ahead_bytes += ticket.nbytes
            return True

    def get(self, ticket: HostTicket, device: torch.device) -> Loaded:
        with self._deferred, self._deferred.lock:
            if self._closed:
                raise StateError("the activation offloader was closed before backward: keep the engine until then")
            self._copies.settle()
            return Loaded(self._take_arrival(ticket) or self._copy_in(ticket, device), stored=True)

    def release(self, ticket: HostTicket) -> None:
        self._deferred.leave(ticket)

    def settle(self) -> None:
        with self._deferred, self._deferred.lock:
            self._settle()

    def cancel_prefetch(self, ticket: HostTicket) -> bool:
        with self._deferred, self._deferred.lock:
            return self._take_arrival(ticket) is not None

    def copies_out(self) -> Sequence[PendingCopy]:
        with self._deferred, self._deferred.lock:
            self._settle()
            return self._copies.under_way

    def close(self) -> None:
        with self._deferred, self._deferred.lock:
            self._closed = True
            self._copies.finish()
            for segment in self._segments:
                segment.spans.finish()
            self._segments.clear()

    def _settle(self) -> None:
        """Let go of what copies used that are done. Never blocks."""
        self._copies.settle()
        for segment in self._segments:
            segment.spans.settle()

    def _copy_in(self, ticket: HostTicket, device: torch.device) -> Arrival:
        # After the copy out, or bytes that the device has not written yet would be handed over.
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
        self._take_arrival(ticket)
        span, ticket.span = ticket.span, None
        if span is not None:
            events = ticket.uses + ([ticket.copy.event] if ticket.copy is not None else [])
            ticket.segment.spans.free_after(events, span)
            if self._closed and ticket.segment.spans.has_spans_in_copies:
                self._held_after_close.append(ticket.segment)


def host_memory(nbytes: int, accelerator: Accelerator) -> torch.Tensor:
    """Memory for copies to and from the device: pinned where that is another."""
    if accelerator.is_synchronized_device():
        return huge_page_memory(nbytes)
    return accelerator.pin_memory(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))


def segment_sizes(budget_bytes: int) -> list[int]:
    """The powers of two, largest first, that sum up to the budget less what is below 1 MiB."""
    bits = range(budget_bytes.bit_length() - 1, MIN_SEGMENT_BYTES.bit_length() - 2, -1)
    return [1 << bit for bit in bits if budget_bytes >> bit & 1]
