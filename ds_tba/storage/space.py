"""The room of the NVMe store: staging slots and extents, who holds them, and the lock over both.

Every method is called under ``lock``, except where it says otherwise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from ds_tba.config import PREFETCH_FRACTION_OF_STAGING
from ds_tba.device.accelerator import Retirement
from ds_tba.storage.allocator import Span
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
        self.notes: DeferredFinalizers[SwapTicket | Span] = DeferredFinalizers(self.lock, self._act_on_release)
        self._retirement = Retirement()
        self.prefetched_bytes = 0
        self.wanted_bytes = 0
        self._read_ahead: dict[SwapTicket, None] = {}  # prefetched, in the order in which they were asked for
        self.writes_under_way = 0
        self.closed = False

    # ---- taking -------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, wait: bool) -> tuple[Span, SwapPath, Span] | Refusal:
        """A slot, a path and an extent on it for ``nbytes``; a refusal is counted."""
        reserved = self._reserve(nbytes, wait)
        if isinstance(reserved, Refusal):
            self.stats.fallbacks[reserved.value] += 1
        return reserved

    def refuse(self, nbytes: int) -> Refusal:
        """The reason why staging has no room for ``nbytes``, counted."""
        slots = self.ring.slots
        too_large = slots.padded(nbytes) > slots.capacity_bytes
        reason = Refusal.LARGER_THAN_STAGING if too_large else Refusal.STAGING_FULL
        self.stats.fallbacks[reason.value] += 1
        return reason

    def is_short_of(self, nbytes: int) -> bool:
        """Whether a storage of ``nbytes`` would have to wait for staging. Needs no lock."""
        slots = self.ring.slots
        return slots.padded(nbytes) > slots.capacity_bytes - slots.used_bytes

    def begin_write(self, ticket: SwapTicket) -> None:
        """A write of the ticket will come: whoever waits for a slot may count on it."""
        self.writes_under_way += 1
        ticket.path.queued_bytes += ticket.extent.nbytes

    def begin_prefetch(self, ticket: SwapTicket) -> bool:
        """Take a slot to read a ticket ahead; False where the bound or staging has no room for it."""
        self.settle_copies()
        if not self._may_prefetch(ticket.extent.nbytes):
            return False
        ticket.slot = self.ring.slots.allocate(ticket.extent.nbytes)
        if ticket.slot is None:
            return False
        self._count_prefetch(ticket)
        return True

    def cancel_prefetch(self, ticket: SwapTicket) -> bool:
        """Give up what was read ahead of a ticket, or is about to be; False where there is nothing to give up now."""
        if ticket.wanted:  # still to be written: it does not stay when its write ends
            self.end_prefetch(ticket)
            return True
        if not ticket.prefetched or ticket.state not in (_S.READ_QUEUED, _S.LOADED):
            return False
        self.end_prefetch(ticket)
        ticket.stayed = False
        ticket.host = ticket.arrival = None
        ticket.move(_S.STORED)
        self.free_slot(ticket)
        return True

    def want(self, ticket: SwapTicket) -> bool:
        """Let what is still to be written stay when its write ends; False where the bound has no room for it.

        It has a slot, so that the half of staging that reads ahead leave to writes is no matter here: were it one, what
        is being written when backward begins would hold up the reads behind it.
        """
        if ticket.wanted or ticket.forwarding:
            return True
        if self.prefetched_bytes + self.wanted_bytes + ticket.extent.nbytes > self.ring.slots.capacity_bytes:
            return False
        ticket.wanted = True
        self.wanted_bytes += ticket.extent.nbytes
        return True

    def _reserve(self, nbytes: int, wait: bool) -> tuple[Span, SwapPath, Span] | Refusal:
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

    def _wait_for_slot(self, nbytes: int, wait: bool) -> Span | None:
        """A slot, once there is one: while writes drain, or without ``wait`` while the device is behind the host.

        The host queues kernels far ahead of the device. It may wait for tensors that do not exist yet: that keeps
        nobody from working, and says nothing about the drive. Slots of what was read ahead would be freed by the
        thread that would be waiting here, so these are given up.
        """
        started = time.perf_counter()
        slot = None
        while slot is None and not self.closed:
            if self.ring.copies.pending or (wait and self._is_draining):
                self.changed.wait(COPY_POLL_S if self.ring.copies.pending or self._retirement else SLOW_WAIT_S)
            elif not (wait and self._give_up_read_ahead()):
                break
            self.notes.act()
            self.settle_copies()
            if not self.closed:
                slot = self.ring.slots.allocate(nbytes)
        self.stats.stall_s += time.perf_counter() - started
        return slot

    def _give_up_read_ahead(self) -> bool:
        """Give up what was asked for last, as backward wants it last, or wait for a read; False if there is neither."""
        if any(self.cancel_prefetch(ticket) for ticket in reversed(list(self._read_ahead))):
            return True
        if self._read_ahead:
            self.changed.wait(SLOW_WAIT_S)
            return True
        return False

    @property
    def _is_draining(self) -> bool:
        return self.writes_under_way > 0 or len(self._retirement) > 0

    def _may_prefetch(self, nbytes: int) -> bool:
        """Reads ahead leave half of staging to writes, while there are any; one tensor may always be read ahead.

        What was read ahead on an asynchronous device waits in device memory, and counts until it is handed over. So
        will what is wanted and still to be written.
        """
        capacity_bytes = self.ring.slots.capacity_bytes
        part = PREFETCH_FRACTION_OF_STAGING if self.writes_under_way else 1.0
        ahead_bytes = self.prefetched_bytes + nbytes
        fits = ahead_bytes <= capacity_bytes * part and ahead_bytes + self.wanted_bytes <= capacity_bytes
        return not self.prefetched_bytes or fits

    # ---- giving back --------------------------------------------------------------------------------------------

    def end_write(self, ticket: SwapTicket) -> None:
        """The write of a ticket has ended, or will not be."""
        self.writes_under_way -= 1
        ticket.path.queued_bytes -= ticket.extent.nbytes
        self.changed.notify_all()

    def stay(self, ticket: SwapTicket) -> None:
        """The write of a wanted ticket has ended: from now on its bytes are as if read ahead."""
        self.end_prefetch(ticket)
        ticket.stayed = True
        self._count_prefetch(ticket)

    def end_prefetch(self, ticket: SwapTicket) -> None:
        """A ticket no longer counts as read ahead, or as wanted."""
        if ticket.wanted:
            ticket.wanted = False
            self.wanted_bytes -= ticket.extent.nbytes
        if ticket.prefetched:
            ticket.prefetched = False
            self.prefetched_bytes -= ticket.extent.nbytes
            del self._read_ahead[ticket]

    def _count_prefetch(self, ticket: SwapTicket) -> None:
        ticket.prefetched = True
        self.prefetched_bytes += ticket.extent.nbytes
        self._read_ahead[ticket] = None

    def free_slot(self, ticket: SwapTicket) -> None:
        """Give back the slot of a ticket, if it has one."""
        slot, ticket.slot = ticket.slot, None
        if slot is None:
            return
        events = [copy.event for copy in ticket.copies] + ticket.uses
        ticket.copies, ticket.uses = [], []
        if not self._retirement.add(events, slot):
            self.ring.slots.free(slot)
        self.changed.notify_all()

    def settle_copies(self) -> None:
        """Give back the device memory and the slots that copies used, where these are done."""
        self.ring.copies.settle()
        for slot in self._retirement.retired():
            self.ring.slots.free(slot)

    def finish_copies(self) -> None:
        """Block until no copy is under way."""
        self.ring.copies.finish()
        self._retirement.finish()

    def free(self, ticket: SwapTicket) -> None:
        """Give back slot and extent."""
        self.free_slot(ticket)
        ticket.path.extents.free(ticket.extent)

    def give_up(self, ticket: SwapTicket) -> None:
        """Nobody wants the ticket's bytes any more, and nobody is using them."""
        if ticket.state is _S.QUEUED:
            self.stats.cancelled_bytes += ticket.nbytes
            self.end_write(ticket)
        self.end_prefetch(ticket)
        ticket.move(_S.RELEASED)
        ticket.host = ticket.arrival = None
        self.free(ticket)

    def _act_on_release(self, released: SwapTicket | Span) -> None:
        if isinstance(released, Span):  # a slot that was lent
            self.ring.slots.free(released)
            self.ring.returned()
            self.changed.notify_all()
            return
        released.released = True
        if released.state not in _IN_USE and released.state is not _S.RELEASED:
            self.give_up(released)
