"""The room of the NVMe store: staging slots and extents, who holds them, and the lock over both.

Every method is called under ``lock``, except where it says otherwise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from ds_tba.config import may_read_ahead, may_retain
from ds_tba.storage.allocator import Span, SpanAllocator
from ds_tba.storage.base import Refusal, SwapTicket, TicketState
from ds_tba.storage.finalizers import DeferredFinalizers
from ds_tba.storage.staging import StagingRing
from ds_tba.storage.swap_path import SwapPath
from ds_tba.telemetry.stats import StoreStats

SLOW_WAIT_S = 30.0
COPY_POLL_S = 0.001
_S = TicketState
# A thread is using the bytes of a ticket in these states, and gives them up at the end.
_IN_USE = frozenset({_S.STAGING, _S.FORWARDING, _S.WRITING, _S.RETURNING, _S.READING})


class ReadAhead:
    """Which tickets are read ahead, or will stay in staging as if they were, and how many bytes that takes.

    Args:
        slots: of staging, whose size is the bound.
    """

    def __init__(self, slots: SpanAllocator) -> None:
        self._slots = slots
        self.prefetched_bytes = 0
        self.retained_bytes = 0
        self._tickets: dict[SwapTicket, None] = {}  # prefetched, in the order in which they were asked for

    def has_room(self, nbytes: int, *, beside_writes: bool) -> bool:
        """Whether ``nbytes`` may be read ahead.

        Bytes that were read ahead on an asynchronous device wait in device memory, and count until backward takes them.
        So do bytes that are retained.
        """
        return may_read_ahead(
            nbytes, self.prefetched_bytes, self.retained_bytes, self._slots.capacity_bytes, while_writing=beside_writes
        )

    def add(self, ticket: SwapTicket) -> None:
        """The ticket is read ahead from here on."""
        ticket.prefetched = True
        self.prefetched_bytes += ticket.extent.nbytes
        self._tickets[ticket] = None

    def retain(self, ticket: SwapTicket) -> bool:
        """Let bytes that are still to be written stay when their write ends; False where the bound has no room."""
        if ticket.retain_in_staging or ticket.forwarding:
            return True
        nbytes = ticket.extent.nbytes
        if not may_retain(nbytes, self.prefetched_bytes, self.retained_bytes, self._slots.capacity_bytes):
            return False
        ticket.retain_in_staging = True
        self.retained_bytes += nbytes
        return True

    def add_retained(self, ticket: SwapTicket) -> None:
        """The write of a ticket to be retained has ended: from now on its bytes are as if read ahead."""
        self.end(ticket)
        ticket.was_retained = True
        self.add(ticket)

    def end(self, ticket: SwapTicket) -> None:
        """The ticket is neither read ahead nor to be retained, if it was."""
        if ticket.retain_in_staging:
            ticket.retain_in_staging = False
            self.retained_bytes -= ticket.extent.nbytes
        if ticket.prefetched:
            ticket.prefetched = False
            self.prefetched_bytes -= ticket.extent.nbytes
            del self._tickets[ticket]

    def newest_first(self) -> list[SwapTicket]:
        """The tickets that are read ahead; backward needs the newest last."""
        return list(reversed(self._tickets))


class SwapSpace:
    """Slots of the staging ring and extents of the swap files.

    Args:
        paths: the directories at work.
        ring: staging.
    """

    def __init__(self, paths: Sequence[SwapPath], ring: StagingRing) -> None:
        self.stats = StoreStats()
        self.paths = paths
        self.ring = ring
        # Not reentrant on purpose: see finalizers.py. A `with` takes the lock itself, not the condition: a signal
        # handler that raises, as that of Ctrl-C does, may come after a condition's taking it and before the body.
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.deferred: DeferredFinalizers[SwapTicket | Span] = DeferredFinalizers(self.lock, self._finalize)
        self.read_ahead = ReadAhead(ring.slots)
        self.writes_under_way = 0  # and to come: whoever waits for a slot may count on them
        self.closed = False

    # ---- taking -------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, wait: bool) -> tuple[Span, SwapPath, Span] | Refusal:
        """A slot, a path and an extent on it for ``nbytes``."""
        if self.closed:
            return Refusal.CLOSED
        self.settle_copies()
        if self.ring.slots.padded(nbytes) > self.ring.slots.capacity_bytes:
            return Refusal.LARGER_THAN_STAGING
        slot = self.ring.slots.allocate(nbytes) or self._wait_for_slot(nbytes, wait)
        if slot is None:
            return Refusal.STAGING_FULL
        working = [path for path in self.paths if path.failure is None]
        for path in sorted(working, key=lambda path: path.busy_s(nbytes)):
            extent = path.reserve(nbytes)
            if extent is not None:
                return slot, path, extent
        self.ring.slots.free(slot)
        return Refusal.NO_SPACE if working else Refusal.PATH_FAILED

    def begin_prefetch(self, ticket: SwapTicket) -> bool:
        """Take a slot to read a ticket ahead; False where the bound or staging has no room for it."""
        self.settle_copies()
        if not self.read_ahead.has_room(ticket.extent.nbytes, beside_writes=self.writes_under_way > 0):
            return False
        ticket.slot = self.ring.slots.allocate(ticket.extent.nbytes)
        if ticket.slot is None:
            return False
        self.read_ahead.add(ticket)
        return True

    def cancel_prefetch(self, ticket: SwapTicket) -> bool:
        """Give up bytes that are read ahead, or are about to be; False where there is nothing to give up now."""
        if ticket.retain_in_staging:  # still to be written: the slot is freed when the write ends
            self.read_ahead.end(ticket)
            return True
        if not ticket.prefetched or ticket.state not in (_S.READ_QUEUED, _S.LOADED):
            return False
        self.read_ahead.end(ticket)
        ticket.was_retained = False
        ticket.host = ticket.arrival = None
        ticket.move(_S.STORED)
        self.free_slot(ticket)
        return True

    def _wait_for_slot(self, nbytes: int, wait: bool) -> Span | None:
        """A slot, once there is one: while writes drain, or without ``wait`` while the device is behind the host.

        The host queues kernels far ahead of the device. It may wait for tensors that do not exist yet: that keeps
        nobody from working, and says nothing about the drive. Slots of tickets that were read ahead would be freed by
        the thread that would be waiting here, so these are given up.
        """
        started = time.perf_counter()
        slots, copies = self.ring.slots, self.ring.copies
        slot = None
        while slot is None and not self.closed:
            # Nobody notifies of copies that are done, so they are polled. All other slots come with a notification.
            if copies.pending or (wait and (self.writes_under_way or slots.has_spans_in_copies)):
                self.changed.wait(COPY_POLL_S if copies.pending or slots.has_spans_in_copies else SLOW_WAIT_S)
            elif not (wait and self._give_up_read_ahead()):
                break
            self.deferred.act()
            self.settle_copies()
            if not self.closed:
                slot = slots.allocate(nbytes)
        self.stats.stall_s += time.perf_counter() - started
        return slot

    def _give_up_read_ahead(self) -> bool:
        """Give up the newest read ahead, or wait for one that is under way; False if there is neither."""
        tickets = self.read_ahead.newest_first()
        if tickets and not any(self.cancel_prefetch(ticket) for ticket in tickets):
            self.changed.wait(SLOW_WAIT_S)
        return bool(tickets)

    # ---- giving back --------------------------------------------------------------------------------------------

    def end_write(self) -> None:
        """A write has ended, or will not be."""
        self.writes_under_way -= 1
        self.changed.notify_all()

    def free_slot(self, ticket: SwapTicket) -> None:
        """Give back the slot of a ticket, if it has one, once no copy uses it."""
        slot, ticket.slot = ticket.slot, None
        if slot is None:
            return
        events = [copy.event for copy in ticket.copies] + ticket.uses
        ticket.copies, ticket.uses = [], []
        self.ring.slots.free_after(events, slot)
        self.changed.notify_all()

    def settle_copies(self) -> None:
        """Give back the device memory and the slots that copies used, where these are done."""
        self.ring.copies.settle()
        self.ring.slots.settle()

    def free(self, ticket: SwapTicket) -> None:
        """Give back slot and extent."""
        self.free_slot(ticket)
        ticket.path.extents.free(ticket.extent)

    def give_up(self, ticket: SwapTicket) -> None:
        """Release a ticket whose bytes nobody is using. A write that has not begun is cancelled."""
        if ticket.state is _S.QUEUED:
            self.stats.cancelled_bytes += ticket.nbytes
            self.end_write()
        self.read_ahead.end(ticket)
        ticket.move(_S.RELEASED)
        ticket.host = ticket.arrival = None
        self.free(ticket)

    def _finalize(self, released: SwapTicket | Span) -> None:
        """Act on a released ticket, or on a lent slot whose tensor is gone."""
        if isinstance(released, Span):
            self.ring.end_loan(released)
            self.changed.notify_all()
            return
        released.released = True
        # Otherwise the thread that is using the bytes gives them up: a lane, or one that hands them over.
        if released.state not in _IN_USE and released.state is not _S.RELEASED:
            self.give_up(released)
