"""Where is there room for a storage, and who holds it? The NVMe store's staging slots and extents, and their lock.

Does not know how bytes move: ``nvme.py`` has the ways of a ticket, ``worker.py`` the work of the lanes. Every method is
called under ``lock``, except where it says otherwise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from ds_tba.config import PREFETCH_FRACTION_OF_STAGING
from ds_tba.storage.allocator import Span
from ds_tba.storage.base import Refusal, SwapTicket, TicketState
from ds_tba.storage.finalizers import DeferredFinalizers
from ds_tba.storage.staging import StagingRing
from ds_tba.storage.swap_path import SwapPath
from ds_tba.telemetry.stats import StoreStats

SLOW_WAIT_S = 30.0
COPY_POLL_S = 0.001
_S = TicketState
BEFORE_WRITTEN = frozenset({_S.QUEUED, _S.WRITING})


class ReadAhead:
    """The tickets that prefetching has come to, and the bytes that they take: nobody else knows this of a ticket.

    Most are read ahead. *Early* ones were still to be written when prefetching came: their bytes stay in memory when
    the write ends, and from then on count as read ahead.

    Args:
        capacity_bytes: of staging, which bounds all of it. Bytes that were read ahead on an asynchronous device wait in
            device memory, and count until backward takes them.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self.prefetched_bytes = 0
        self.early_bytes = 0
        self._prefetched: dict[SwapTicket, None] = {}  # in the order in which they were asked for
        self._early: set[SwapTicket] = set()

    def __contains__(self, ticket: SwapTicket) -> bool:
        return ticket in self._prefetched or ticket in self._early

    def has_room(self, nbytes: int, *, beside_writes: bool) -> bool:
        """Whether ``nbytes`` more may be read; the first always may; beside writes, less."""
        ahead_bytes = self.prefetched_bytes + nbytes
        bound_bytes = self._capacity_bytes * (PREFETCH_FRACTION_OF_STAGING if beside_writes else 1)
        fits = ahead_bytes <= bound_bytes and ahead_bytes + self.early_bytes <= self._capacity_bytes
        return fits or not self.prefetched_bytes

    def add(self, ticket: SwapTicket) -> None:
        """The ticket is read ahead from here on."""
        self.prefetched_bytes += ticket.extent.nbytes
        self._prefetched[ticket] = None

    def add_early(self, ticket: SwapTicket) -> bool:
        """Add a ticket that is still to be written; False where the bound has no room.

        It has a slot, so that the part left to writes does not matter. If it did, bytes that are being written when
        backward begins would hold up the reads behind them.
        """
        nbytes = ticket.extent.nbytes
        if self.prefetched_bytes + self.early_bytes + nbytes > self._capacity_bytes:
            return False
        self.early_bytes += nbytes
        self._early.add(ticket)
        return True

    def end_write(self, ticket: SwapTicket) -> bool:
        """The write of a ticket has ended; returns whether its bytes stay in memory, because prefetching came first."""
        is_early = ticket in self._early
        if is_early:
            self.end(ticket)
            self.add(ticket)
        return is_early

    def end(self, ticket: SwapTicket) -> None:
        """The ticket is not ahead any more, if it was."""
        if ticket in self._early:
            self._early.remove(ticket)
            self.early_bytes -= ticket.extent.nbytes
        elif ticket in self._prefetched:
            del self._prefetched[ticket]
            self.prefetched_bytes -= ticket.extent.nbytes

    def newest_first(self) -> list[SwapTicket]:
        """The tickets that are read ahead; backward needs the newest last."""
        return list(reversed(self._prefetched))


class SwapSpace:
    """Slots of the staging ring and extents of the swap files.

    Args:
        paths: the directories at work.
        ring: staging.

    Attributes:
        lock: over all of it, the tickets included. Held for bookkeeping and for what is only queued on a device, never
            for I/O: the lanes need it at both ends of a transfer.
        deferred: ``with space.deferred`` takes the lock and acts on what finalizers left.
        changed: notified whenever a ticket moves on, or a slot or write ends.
        writes_under_way: and to come; whoever waits for a slot may count on them.
    """

    def __init__(self, paths: Sequence[SwapPath], ring: StagingRing) -> None:
        self.stats = StoreStats()
        self.paths = paths
        self.ring = ring
        self.lock = threading.Lock()  # not reentrant on purpose: see finalizers.py
        self.changed = threading.Condition(self.lock)
        self.deferred: DeferredFinalizers[SwapTicket | Span] = DeferredFinalizers(self.lock, self._finalize)
        self.read_ahead = ReadAhead(ring.slots.capacity_bytes)
        self.writes_under_way = 0
        self.closed = False

    # ---- taking -------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, wait: bool) -> tuple[Span, SwapPath, Span] | Refusal:
        """A slot, a path and an extent on it for ``nbytes``."""
        if self.closed:
            return Refusal.CLOSED
        self.settle_copies()
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
        ticket.move(_S.READ_QUEUED)
        return True

    def cancel_prefetch(self, ticket: SwapTicket) -> bool:
        """Give up bytes that are ahead, or are about to be; False where there is nothing to give up now."""
        if ticket not in self.read_ahead or ticket.state is _S.READING:
            return False
        self.read_ahead.end(ticket)
        ticket.host = ticket.arrival = None
        if ticket.state not in BEFORE_WRITTEN:  # else the slot is freed when the write ends
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
        # Else the next tensor's copy or read would overwrite bytes that the device has still to take.
        events = [copy.event for copy in ticket.copies] + ticket.uses
        ticket.copies, ticket.uses = [], []
        self.ring.slots.free_after(events, slot)
        self.changed.notify_all()

    def settle_copies(self) -> None:
        """Give back the device memory and the slots that copies used, where these are done."""
        self.ring.copies.settle()
        self.ring.slots.settle()

    def end_work(self, ticket: SwapTicket, state: TicketState) -> bool:
        """The lane that used a ticket's memory has ended; False where the ticket was given up meanwhile."""
        self.changed.notify_all()
        if ticket.state is _S.ABANDONED:
            self.give_up(ticket)
            return False
        ticket.move(state)
        return True

    def give_up(self, ticket: SwapTicket) -> None:
        """Release a ticket whose memory no lane uses. A write that has not begun is cancelled."""
        if ticket.state is _S.QUEUED:
            self.stats.cancelled_bytes += ticket.nbytes
            self.end_write()
        self.read_ahead.end(ticket)
        ticket.move(_S.RELEASED)
        ticket.host = ticket.arrival = None
        self.free_slot(ticket)
        ticket.path.extents.free(ticket.extent)

    def _finalize(self, released: SwapTicket | Span) -> None:
        """Act on a released ticket, or on a lent slot whose tensor is gone."""
        if isinstance(released, Span):
            self.ring.end_loan(released)
            self.changed.notify_all()
        elif released.state in (_S.WRITING, _S.READING):  # see [Note: Who frees a slot]
            self.read_ahead.end(released)
            released.move(_S.ABANDONED)
        elif released.state not in (_S.ABANDONED, _S.RELEASED):
            self.give_up(released)
