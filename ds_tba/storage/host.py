"""How does a storage come to host memory and back? The tier of ``host_budget_bytes``.

Memory is taken in segments, as storages come, and kept until the engine ends. An accelerator's pinning rounds an
allocation up to a power of two (2.25 GiB become 4.0), so each segment is one. ``tiers.py`` says how much the tier takes
at most, and how much of the machine's memory it has to leave.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ds_tba.device.accelerator import (
    Accelerator,
    Arrival,
    Event,
    PendingCopy,
    available_bytes,
    huge_page_memory,
    is_out_of_memory,
)
from ds_tba.device.copies import Copies
from ds_tba.errors import StateError
from ds_tba.stats import StoreStats
from ds_tba.storage.base import ASKED_TOO_LATE, Loaded, Refusal, Span, Store, Ticket
from ds_tba.storage.staging import CLOSED, CopySafeAllocator

MIN_SEGMENT_BYTES = 1 << 20
# A segment has room for so many storages as it was taken for, and a new one is at least that part of all.
PARTS = 8


class Segment(NamedTuple):
    """One contiguous part of the tier. Changed only under the store's lock."""

    memory: torch.Tensor
    spans: CopySafeAllocator


class HostTicket(Ticket):
    """One storage in the host tier."""

    __slots__ = ("arrival", "copy", "device", "segment", "span", "uses")

    def __init__(self, nbytes: int, store: HostStore, segment: Segment, span: Span, device: torch.device) -> None:
        super().__init__(nbytes, store)
        self.device = device
        self.segment = segment
        self.span: Span | None = span
        self.copy: PendingCopy | None = None  # into the span, which is free after it and the uses
        self.uses: list[Event] = []  # events of copies out of the span
        self.arrival: Arrival | None = None  # the copy on the device, if it was made ahead

    def view(self) -> torch.Tensor:
        """Return the bytes in host memory.

        Raises:
            StateError: they were given up.
        """
        if self.span is None:
            raise StateError(ASKED_TOO_LATE)
        return self.segment.memory[self.span.offset : self.span.offset + self.span.nbytes]


class HostStore(Store[HostTicket]):
    """Storages in host memory."""

    def __init__(
        self,
        accelerator: Accelerator,
        limit_bytes: int,
        ahead_bytes: int = 256 << 20,
        *,
        reserve_bytes: int = 0,
    ) -> None:
        self.stats = StoreStats()
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0  # host memory that it has
        self._reserve_bytes = reserve_bytes  # memory of the machine that stays free, so that the tier may stay smaller
        self._is_full = False  # it grows no more
        self._accelerator = accelerator
        self._copies = Copies(accelerator)
        self._ahead_bytes = 0
        # The bound of what is copied to the device before backward asks for it, and of the device memory that waits for
        # its copy out (a larger tensor goes alone). The host runs far ahead of a device: without the second bound a
        # whole forward would be held until the device has come so far.
        self._ahead_limit_bytes = ahead_bytes
        # No lanes wait for this lock, so that copies into the device may be queued under it.
        self._lock = threading.Lock()
        self._segments: list[Segment] = []
        self._closed = False

    def put(self, data: torch.Tensor, *, wait: bool, item_bytes: int = 1) -> HostTicket | Refusal:
        with self._lock:
            self._settle()
            # Or a whole forward would be held in device memory until the device has come so far.
            self._copies.hold_at_most(max(0, self._ahead_limit_bytes - data.numel()))
            found = self._allocate(data.numel())
            if found is None:
                return Refusal.CLOSED if self._closed else Refusal.HOST_FULL
        ticket = HostTicket(data.numel(), self, *found, data.device)
        try:
            ticket.copy = self._copies.out(data, ticket.view())  # without the lock: nobody else has the ticket yet
            with self._lock:
                self.stats.offloaded_bytes += ticket.nbytes
        except BaseException:  # a signal handler may raise here, too
            self._copies.drain()  # one that nobody knows of may be under way
            self.release(ticket)  # not after a second interrupt: the copy would hit the next tenant
            raise
        return ticket

    def prefetch(self, ticket: HostTicket) -> bool:
        with self._lock:
            self._copies.settle()
            if self._accelerator.is_synchronous or ticket.arrival is not None or self._closed:
                return True
            is_far = self._ahead_bytes and self._ahead_bytes + ticket.nbytes > self._ahead_limit_bytes
            if is_far or self._copies.is_full:
                return False
            try:
                ticket.arrival = self._copy_in(ticket, ticket.device)
            except (RuntimeError, MemoryError):  # no device memory: backward tries again
                return False
            self._ahead_bytes += ticket.nbytes
            return True

    def get(self, ticket: HostTicket, device: torch.device) -> Loaded:
        with self._lock:
            if self._closed:
                raise StateError(CLOSED)
            self._copies.settle()
            arrival = self._take_arrival(ticket) or self._copy_in(ticket, device)
        # Here: if the caller never did, the memory could go to the next tenant while it is still copied into.
        arrival.join()
        return Loaded(arrival, stored=True)

    def release(self, ticket: HostTicket) -> None:
        with self._lock:
            self._drop_arrival(ticket)
            span, ticket.span = ticket.span, None
            if span is not None:
                # Both ways: the next tenant may neither overwrite what is still to be taken, nor be overwritten.
                events = ticket.uses + ([ticket.copy.event] if ticket.copy is not None else [])
                ticket.segment.spans.free_after(events, span)

    def cancel_prefetch(self, ticket: HostTicket) -> bool:
        with self._lock:
            return self._drop_arrival(ticket)

    def copies_out(self) -> Sequence[PendingCopy]:
        with self._lock:
            self._settle()
            return self._copies.under_way

    def give_back(self) -> bool:
        with self._lock:
            self._settle()
            if self._closed or self._copies.under_way or any(one.spans.used_bytes for one in self._segments):
                return self._closed
            self._segments.clear()
            self.taken_bytes, self._is_full = 0, False
        return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._copies.finish()  # or those under way would use memory that is gone
            self._segments.clear()

    def _allocate(self, nbytes: int) -> tuple[Segment, Span] | None:
        while True:
            for segment in self._segments:
                span = segment.spans.allocate(nbytes)
                if span is not None:
                    return segment, span
            if not self._grow(max(nbytes, MIN_SEGMENT_BYTES)):
                return None

    def _grow(self, least_bytes: int) -> bool:
        """Take one more segment, if the limit and the machine have room; once the machine has none, never again."""
        room_bytes = self.limit_bytes - self.taken_bytes
        if self._closed or self._is_full or room_bytes < least_bytes:
            return False
        size = 1 << (max(PARTS * least_bytes, self.taken_bytes // PARTS) - 1).bit_length()
        try:
            if self._reserve_bytes:
                room_bytes = min(room_bytes, available_bytes() - self._reserve_bytes)
            while size > room_bytes and size >= least_bytes:
                size //= 2
            if size < least_bytes:
                self._is_full = room_bytes < MIN_SEGMENT_BYTES
                return False
            memory = host_memory(size, self._accelerator)
        except (OSError, RuntimeError, MemoryError) as error:  # OSError: no descriptor to ask with, or no map
            if not (isinstance(error, OSError) or is_out_of_memory(error)):
                raise
            self._is_full = True
            return False
        self._segments.append(Segment(memory, CopySafeAllocator(size)))
        self.taken_bytes += size
        return True

    def _settle(self) -> None:
        """Let go of what copies used that are done. Never blocks."""
        self._copies.settle()
        for segment in self._segments:
            segment.spans.settle()

    def _copy_in(self, ticket: HostTicket, device: torch.device) -> Arrival:
        # After the copy out, or bytes that the device has not written yet would be handed over.
        arrival = self._copies.into(ticket.view(), self._copies.allocate(ticket.nbytes, device), ticket.copy)
        ticket.uses = [event for event in ticket.uses if not event.query()]
        ticket.uses.append(arrival.event)
        return arrival

    def _take_arrival(self, ticket: HostTicket) -> Arrival | None:
        arrival, ticket.arrival = ticket.arrival, None
        if arrival is not None:
            self._ahead_bytes -= ticket.nbytes
        return arrival

    def _drop_arrival(self, ticket: HostTicket) -> bool:
        arrival = self._take_arrival(ticket)
        if arrival is not None:
            self._copies.drop(arrival)
        return arrival is not None


def host_memory(nbytes: int, accelerator: Accelerator) -> torch.Tensor:
    """Return memory for copies to and from the device: pinned where that is another."""
    if accelerator.is_synchronous:
        return huge_page_memory(nbytes)
    return accelerator.pinned(nbytes)
