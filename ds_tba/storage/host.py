"""How does a storage come to host memory and back? The tier of ``host_budget_bytes``.

An accelerator's pinning rounds an allocation up to a power of two (2.25 GiB become 4.0), so memory is taken in powers
of two. A budget is the sum of some, all taken at the first save; ``tiers.py`` asks whether the machine has so much.

[Note: Spare memory] Without a budget the tier takes one segment after the other, as storages come, while the machine
can spare them, and gives those that are empty back when it cannot: a process that grows takes precedence. The system
ends the largest process when memory runs out, and that is the one with such a tier. To spare is what is free, less the
tenth of it that was left at the start to whatever comes later (as on a device), and less what everything else in this
process has needed before and will need again. Nobody knows that of a step that is larger than all before it, as the
first one is: what such a step saves in excess of them goes to the drive, where there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ds_tba.config import IO_ALIGNMENT_BYTES
from ds_tba.device.accelerator import (
    TEMPORARY_FRACTION,
    Accelerator,
    Event,
    HostMemoryUse,
    MemoryMeter,
    available_bytes,
)
from ds_tba.device.copies import Arrival, Copies, PendingCopy
from ds_tba.device.memory import huge_page_memory, is_out_of_memory
from ds_tba.errors import StateError
from ds_tba.stats import Gauge, StoreStats
from ds_tba.storage.base import Loaded, Refusal, Store, Ticket
from ds_tba.storage.spans import CopySafeAllocator, Span
from ds_tba.storage.staging import CLOSED

MIN_SEGMENT_BYTES = 1 << 20
# A segment has room for so many storages as it was taken for, and a new one is at least that part of all.
PARTS = 8


class SpareMemory:
    """Host memory that the machine can spare for this rank; see [Note: Spare memory].

    Args:
        accelerator: where its memory is the host's, everything else has peaks there in each step.
        ranks: of this machine, each with a tier.

    Attributes:
        taken: by the tier.
        most_bytes: as much as it may ever have.
    """

    def __init__(self, accelerator: Accelerator, ranks: int) -> None:
        free_bytes = available_bytes()
        self.taken = Gauge()
        self._ranks = ranks
        self._left_bytes = int(TEMPORARY_FRACTION * free_bytes)
        self.most_bytes = (free_bytes - self._left_bytes) // ranks
        self._meter = MemoryMeter(HostMemoryUse(), lambda: self.taken.now) if accelerator.is_synchronous else None
        self.sample()  # peaks count from here on

    def sample(self) -> float:
        """Return the peak memory of everything else above its present; called before and after each allocation."""
        return 0.0 if self._meter is None else self._meter.sample()

    def more_bytes(self) -> float:
        """Return the bytes that the tier may take in addition now; below 0, those that it had better give back."""
        try:
            spare_bytes = (available_bytes() - self._left_bytes) / self._ranks - self.sample()
        except OSError:  # no file descriptor to ask with
            return 0.0
        return min(spare_bytes, self.most_bytes - self.taken.now)


class Segment:
    """One contiguous part of the tier. Changed only under the store's lock."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.spans = CopySafeAllocator(memory.numel(), IO_ALIGNMENT_BYTES)


class HostTicket(Ticket):
    """One storage in the host tier.

    Attributes:
        copy: the copy into the span; with ``uses``, events of copies out of it: the span is free after both.
        arrival: the copy on the device, if it was made ahead.
    """

    __slots__ = ("arrival", "copy", "device", "segment", "span", "uses")

    def __init__(self, nbytes: int, store: HostStore, segment: Segment, span: Span, device: torch.device) -> None:
        super().__init__(nbytes, store)
        self.device = device
        self.segment = segment
        self.span: Span | None = span
        self.copy: PendingCopy | None = None
        self.uses: list[Event] = []
        self.arrival: Arrival | None = None

    def view(self) -> torch.Tensor:
        """Return the bytes in host memory.

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
        budget: bytes, all taken at the first put (a multiple of 1 MiB is used), or what the machine can spare, taken
            when wanted.
        ahead_bytes: bound of what is copied to the device before backward asks for it, and of the device memory that
            waits for its copy out (a larger tensor goes alone). The host runs far ahead of a device: without the second
            bound a whole forward would be held until the device has come so far.
        is_last: whether what finds no room stays in device memory; else a drive takes it.

    Attributes:
        limit_bytes: as much as it holds at most.
    """

    def __init__(
        self, accelerator: Accelerator, budget: int | SpareMemory, ahead_bytes: int = 256 << 20, *, is_last: bool = True
    ) -> None:
        self.stats = StoreStats()
        self._accelerator = accelerator
        self._spare = budget if isinstance(budget, SpareMemory) else None
        self._is_last = is_last
        self._may_grow = True
        self._offered_bytes = self._known_bytes = 0  # in this step, and at most in one before
        self._is_synchronous = accelerator.is_synchronous
        self._copies = Copies(accelerator)
        self._ahead_bytes = 0
        self._ahead_limit_bytes = ahead_bytes
        # No lanes wait for this lock, so that copies into the device may be queued under it.
        self._lock = threading.Lock()
        self._sizes = [] if isinstance(budget, SpareMemory) else segment_sizes(budget)
        self._segments: list[Segment] = []  # from the first put on, until they are given back
        self.limit_bytes = budget.most_bytes if isinstance(budget, SpareMemory) else sum(self._sizes)
        self._closed = False

    def put(self, data: torch.Tensor, *, wait: bool, item_bytes: int = 1) -> HostTicket | Refusal:
        with self._lock:
            self._settle()
            # Or a whole forward would be held in device memory until the device has come so far.
            self._copies.hold_at_most(max(0, self._ahead_limit_bytes - data.numel()))
            self._offered_bytes += data.numel()
            found = self._allocate(data.numel())
            if found is None:
                refusal = Refusal.CLOSED if self._closed else Refusal.HOST_FULL
                refusal.count(self.stats, data.numel(), is_last=self._is_last)
                return refusal
        ticket = HostTicket(data.numel(), self, *found, data.device)
        try:
            ticket.copy = self._copies.out(data, ticket.view())  # without the lock: nobody else has the ticket yet
        except BaseException:
            try:
                self._copies.drain()  # one that nobody knows of may be under way
            finally:
                self.release(ticket)
            raise
        with self._lock:
            self.stats.offloaded_bytes += ticket.nbytes
        return ticket

    def prefetch(self, ticket: HostTicket) -> bool:
        with self._lock:
            self._copies.settle()
            if self._is_synchronous or ticket.arrival is not None or self._closed:
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
            self._free(ticket)

    def settle(self) -> None:
        with self._lock:
            self._settle()

    def cancel_prefetch(self, ticket: HostTicket) -> bool:
        with self._lock:
            return self._drop_arrival(ticket)

    def copies_out(self) -> Sequence[PendingCopy]:
        with self._lock:
            self._settle()
            return self._copies.under_way

    def end_step(self) -> None:
        """Ask the machine anew what it can spare: a whole step is over, and has shown what else it needs."""
        with self._lock:
            if self._spare is not None:  # now: who measures steps may have the peak reset before the next
                self._spare.sample()
            self._may_grow = True
            self._known_bytes, self._offered_bytes = max(self._known_bytes, self._offered_bytes), 0

    def capacity_bytes(self) -> int:
        """Return the bytes that it could hold now."""
        with self._lock:
            if self._spare is None:
                return self.limit_bytes
            return max(0, self._spare.taken.now + int(self._spare.more_bytes()))

    def give_back(self) -> bool:
        with self._lock:
            self._settle()
            if self._closed or self._copies.under_way or not all(one.spans.is_unused for one in self._segments):
                return self._closed
            if self._spare is not None:
                self._spare.taken.add(-sum(one.spans.capacity_bytes for one in self._segments))
            self._segments.clear()
        return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._copies.finish()  # or those under way would use memory that is gone
            self._segments.clear()

    def _allocate(self, nbytes: int) -> tuple[Segment, Span] | None:
        if self._spare is None:
            if not (self._segments or self._closed):
                self._segments = [Segment(host_memory(size, self._accelerator)) for size in self._sizes]
            return self._fitted(nbytes)
        if not self._is_last and self._offered_bytes > self._known_bytes:
            return None
        is_first = self._offered_bytes == nbytes  # in this step
        was_empty = all(segment.spans.is_unused for segment in self._segments)
        if (is_first or was_empty) and self._spare.more_bytes() < 0:  # not each time: it takes a millisecond
            self._shrink(self._spare)
        return self._fitted(nbytes) or self._grown(nbytes, self._spare)

    def _fitted(self, nbytes: int) -> tuple[Segment, Span] | None:
        for segment in self._segments:
            span = segment.spans.allocate(nbytes)
            if span is not None:
                return segment, span
        return None

    def _shrink(self, spare: SpareMemory) -> None:
        """Give empty segments back until the machine is short no longer."""
        while spare.more_bytes() < 0:
            unused = [index for index, segment in enumerate(self._segments) if segment.spans.is_unused]
            if not unused:
                break
            spare.taken.add(-self._segments.pop(unused[-1]).spans.capacity_bytes)
            self._accelerator.give_pinned_back()

    def _grown(self, nbytes: int, spare: SpareMemory) -> tuple[Segment, Span] | None:
        """Take one more segment, if the machine can spare that; if not, it is asked again in the next step."""
        if self._closed or not self._may_grow:
            return None
        least_bytes = max(nbytes, MIN_SEGMENT_BYTES)
        wanted_bytes = max(PARTS * least_bytes, spare.taken.now // PARTS)
        size, more_bytes = 1 << (wanted_bytes - 1).bit_length(), spare.more_bytes()
        while size > more_bytes and size >= least_bytes:
            size //= 2
        try:
            segment = Segment(host_memory(size, self._accelerator)) if size >= least_bytes else None
        except (OSError, RuntimeError, MemoryError) as error:
            if not (isinstance(error, OSError) or is_out_of_memory(error)):
                raise
            segment = None
        span = None if segment is None else segment.spans.allocate(nbytes)
        if segment is None or span is None:
            self._may_grow = False
            return None
        self._segments.append(segment)
        spare.taken.add(size)
        return segment, span

    def _settle(self) -> None:
        """Let go of what copies used that are done. Never blocks."""
        self._copies.settle()
        for segment in self._segments:
            segment.spans.settle()

    def _copy_in(self, ticket: HostTicket, device: torch.device) -> Arrival:
        # After the copy out, or bytes that the device has not written yet would be handed over.
        after = [ticket.copy] if ticket.copy is not None else []
        arrival = self._copies.into(ticket.view(), self._copies.room(ticket.nbytes, device), after)
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

    def _free(self, ticket: HostTicket) -> None:
        self._drop_arrival(ticket)
        span, ticket.span = ticket.span, None
        if span is not None:
            # Both ways, or the next tenant would overwrite what the device has still to take, or be overwritten by it.
            events = ticket.uses + ([ticket.copy.event] if ticket.copy is not None else [])
            ticket.segment.spans.free_after(events, span)


def host_memory(nbytes: int, accelerator: Accelerator) -> torch.Tensor:
    """Return memory for copies to and from the device: pinned where that is another."""
    if accelerator.is_synchronous:
        return huge_page_memory(nbytes)
    return accelerator.pinned(nbytes)


def segment_sizes(budget_bytes: int) -> list[int]:
    """Return the powers of two, largest first, that sum up to the budget less what is below 1 MiB."""
    bits = range(budget_bytes.bit_length() - 1, MIN_SEGMENT_BYTES.bit_length() - 2, -1)
    return [1 << bit for bit in bits if budget_bytes >> bit & 1]
