"""The parts of storages, and where there is room for them: staging slots, extents, and what was read ahead.

A storage is always a list of parts, each of at most a part of staging, so that it fits whatever its size, spreads over
all paths, and its copies, writes and reads overlap with each other. Everything here changes under one lock. Does not
know how bytes move: ``nvme.py`` has that.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import ClassVar

import torch

from ds_tba.config import PREFETCH_FRACTION_OF_STAGING
from ds_tba.device.accelerator import Event
from ds_tba.device.copies import Arrival, Destination, PendingCopy
from ds_tba.errors import StateError, StorageError
from ds_tba.stats import StoreStats
from ds_tba.storage.backends.base import IoHandle
from ds_tba.storage.base import Refusal, StateMachine, Store, Ticket
from ds_tba.storage.finalizers import DeferredFinalizers
from ds_tba.storage.path import LANE_CHECK_S, URGENT, Block, SwapPath
from ds_tba.storage.spans import Span
from ds_tba.storage.staging import StagingRing

logger = logging.getLogger(__name__)

SLOW_WAIT_S = 30.0  # for a drive, before that is told
SLOW_AGAIN_S = 60.0  # from one such warning to the next
COPY_POLL_S = 0.001


class PartState(Enum):
    """The place of a part's bytes, and the user of its memory."""

    QUEUED = "in staging, write not started"
    WRITING = "in staging, write under way"
    STORED = "in the swap file"
    READ_QUEUED = "in the swap file, read not started"
    READING = "read under way"
    LOADED = "in staging, beside it, or on the device, and in the swap file"
    RESCUED = "in host memory or staging, because a write failed"
    LOST = "nowhere"
    ABANDONED = "given up while a lane uses its memory"
    RELEASED = "given up"


_S = PartState
BEFORE_WRITTEN = frozenset({_S.QUEUED, _S.WRITING})
AT_HAND = frozenset({_S.LOADED, _S.RESCUED, _S.LOST})  # LOST: nothing more will come, and the hand-over raises
GIVEN_UP = frozenset({_S.RELEASED, _S.ABANDONED})


class Part(StateMachine):
    """One part of a storage. Changed by its store only, under the store's lock.

    [Note: Who frees a slot] A lane writes from the slot, or reads into it, without the lock; the states WRITING and
    READING say so, and meanwhile nobody else frees it, or the drive would move the bytes of another ticket. A release
    in these states only abandons the part, and the lane frees it at the end. Whether prefetching has come to a part
    is known to ``ReadAhead`` alone.

    Attributes:
        start: offset of its bytes in the storage.
        blocks: the places in the file of what is stored, once it is written.
        copies: copies into the slot; with ``uses``, events of copies out of it: the slot is free after both.
        reader: the task that reads it, while READING: there may be several for one part.
        arrival: the copy into its place on the device, which may be under way.
        host: memory outside of staging: of a read for which there was no slot, or of a failed write.
        error: the reason why its bytes are LOST.
    """

    __slots__ = (
        "arrival", "blocks", "copies", "error", "extent", "host", "nbytes", "path", "reader", "slot", "start",
        "state", "uses",
    )  # fmt: skip

    noun = "a part of a storage"
    moves: ClassVar[Mapping[PartState, tuple[PartState, ...]]] = {
        _S.QUEUED: (_S.WRITING, _S.RELEASED),
        _S.WRITING: (_S.STORED, _S.LOADED, _S.RESCUED, _S.LOST, _S.ABANDONED),
        _S.STORED: (_S.READ_QUEUED, _S.RELEASED),
        _S.READ_QUEUED: (_S.READING, _S.STORED, _S.RELEASED),
        _S.READING: (_S.LOADED, _S.LOST, _S.ABANDONED),
        _S.LOADED: (_S.STORED, _S.RELEASED),
        _S.RESCUED: (_S.RELEASED,),
        _S.LOST: (_S.RELEASED,),
        _S.ABANDONED: (_S.RELEASED,),
        _S.RELEASED: (),
    }

    def __init__(self, start: int, nbytes: int, path: SwapPath, extent: Span, slot: Span) -> None:
        self.start = start
        self.nbytes = nbytes
        self.path = path
        self.extent = extent
        self.slot: Span | None = slot
        self.state = PartState.QUEUED
        self.blocks: tuple[Block, ...] = ()
        self.copies: list[PendingCopy] = []
        self.uses: list[Event] = []
        self.reader: object = None
        self.arrival: Arrival | None = None
        self.host: torch.Tensor | None = None
        self.error: StorageError | None = None

    @property
    def stored_bytes(self) -> int:
        """Return the bytes that the drive has of it."""
        return sum(block.stored_bytes for block in self.blocks)

    @property
    def held_slot(self) -> Span:
        """Return the staging slot; raise a StateError where there is none."""
        if self.slot is None:
            raise StateError(f"a part '{self.state.value}' has no staging slot; this is a bug in ds_tba")
        return self.slot

    @property
    def place(self) -> str:
        """Return the place of its bytes, for an error."""
        return f"{self.path.file.directory}, offset {self.extent.offset}, {self.extent.nbytes} bytes"


class SwapTicket(Ticket):
    """One storage, as its parts.

    Attributes:
        parts: the parts, in the order of their bytes.
        destination: device memory for the whole storage, from when it is wanted until it is handed over.
        is_loading: a thread is handing it over.
        item_bytes: length of an element.
        is_taken: all of its parts found room, so that it counts as offloaded.
    """

    __slots__ = ("destination", "device", "is_loading", "is_taken", "item_bytes", "parts")

    def __init__(self, nbytes: int, store: Store[SwapTicket], device: torch.device, item_bytes: int) -> None:
        super().__init__(nbytes, store)
        self.device = device
        self.item_bytes = item_bytes
        self.parts: list[Part] = []
        self.destination: Destination | None = None
        self.is_loading = self.is_taken = False

    def place_of(self, part: Part) -> Destination | None:
        """Return the place of a part in the destination, where there is one."""
        destination = self.destination
        return None if destination is None else destination.part(part.start, part.nbytes)

    @property
    def is_given_up(self) -> bool:
        """True if nobody may ask for its bytes any more."""
        return any(part.state in GIVEN_UP and part.arrival is None for part in self.parts)


def spans_of(nbytes: int, part_bytes: int) -> Sequence[tuple[int, int]]:
    """Return the start and the length of each part of ``nbytes``."""
    return [(start, min(part_bytes, nbytes - start)) for start in range(0, nbytes, part_bytes)]


# ---- room ----


class ReadAhead:
    """The parts that prefetching has come to, and the bytes that they take: nobody else knows this of a part.

    Most are read ahead. *Unwritten* ones were still to be written when prefetching came: their bytes stay in memory
    when the write ends, and from then on count as read ahead, although they never left.

    Args:
        capacity_bytes: bytes of staging, which bound all of it. Bytes that were read ahead on an asynchronous device
            wait in device memory, and count until backward takes them.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self.prefetched_bytes = 0
        self.unwritten_bytes = 0
        # In the order in which they were asked for, and whether the bytes never left memory.
        self._prefetched: dict[Part, bool] = {}
        self._unwritten: set[Part] = set()

    def __contains__(self, part: Part) -> bool:
        return part in self._prefetched or part in self._unwritten

    def has_room(self, nbytes: int, *, beside_writes: bool) -> bool:
        """Return whether ``nbytes`` more may be read; the first always may; beside writes, less."""
        ahead_bytes = self.prefetched_bytes + nbytes
        bound_bytes = self._capacity_bytes * (PREFETCH_FRACTION_OF_STAGING if beside_writes else 1)
        fits = ahead_bytes <= bound_bytes and ahead_bytes + self.unwritten_bytes <= self._capacity_bytes
        return fits or not self.prefetched_bytes

    def add(self, part: Part, *, never_left: bool = False) -> None:
        """Count a part as read ahead from here on."""
        self.prefetched_bytes += part.extent.nbytes
        self._prefetched[part] = never_left

    def add_unwritten(self, part: Part) -> bool:
        """Add a part that is still to be written; False where the bound has no room.

        It has a slot, and so the share that is left to writes does not matter. If it did, bytes that are being written
        when backward begins would hold up the reads behind them.
        """
        nbytes = part.extent.nbytes
        if self.prefetched_bytes + self.unwritten_bytes + nbytes > self._capacity_bytes:
            return False
        self.unwritten_bytes += nbytes
        self._unwritten.add(part)
        return True

    def end_write(self, part: Part) -> bool:
        """Note the end of a write; return whether the bytes stay in memory, because prefetching came first."""
        if part in self._unwritten:
            self.end(part)
            self.add(part, never_left=True)
        return part in self._prefetched

    def end(self, part: Part) -> bool:
        """Count a part as ahead no more, if it was; return whether its bytes never left memory."""
        if part in self._unwritten:
            self._unwritten.remove(part)
            self.unwritten_bytes -= part.extent.nbytes
            return False
        never_left = self._prefetched.pop(part, None)
        if never_left is not None:
            self.prefetched_bytes -= part.extent.nbytes
        return bool(never_left)

    def newest_first(self) -> list[Part]:
        """Return the parts that are read ahead; backward needs the newest last."""
        return list(reversed(self._prefetched))


class SlowWaits:
    """Tells of a drive that keeps a thread of the user's waiting: else one that hangs would look like a slow model."""

    def __init__(self) -> None:
        self._quiet_until_s = -math.inf

    def note(self, who: str, paths: Iterable[SwapPath], started_s: float) -> None:
        """Log a warning where a wait for the drives of these paths takes long, and no other was logged of late.

        Args:
            started_s: by ``time.perf_counter()``.
        """
        now_s = time.perf_counter()
        if now_s < max(started_s + SLOW_WAIT_S, self._quiet_until_s):
            return
        directories = {str(path.file.directory) for path in paths}
        if not directories:
            return
        self._quiet_until_s = now_s + SLOW_AGAIN_S
        logger.warning(
            "%s has waited %.0f s for the drive of %s, and waits on. Look whether it reports errors (dmesg, smartctl); "
            "if it does not answer again, end the run and name another directory in nvme_path",
            who,
            now_s - started_s,
            ", ".join(sorted(directories)),
        )


class SwapSpace:
    """Slots of the staging ring and extents of the swap files.

    Attributes:
        lock: guards all of it, the tickets included. Held for bookkeeping and for work that is only queued on a device,
            never for I/O nor for another call of a drive: the lanes need it at both ends of a transfer.
        deferred: what finalizers left to the holders of the lock; see ``finalizers.py``.
        changed: notified whenever a part moves on, or a slot or write ends.
        writes: the parts whose writes are under way or to come; whoever waits for a slot may count on them.
        copying: the parts whose bytes are being copied into staging by a put.
        slow_waits: tells of drives that do not answer.
        resting: whether it is between :meth:`NvmeStore.rest` and :meth:`NvmeStore.wake`.
    """

    def __init__(self, paths: Sequence[SwapPath], ring: StagingRing) -> None:
        self.stats = StoreStats()
        self.paths = paths
        self.ring = ring
        self.lock = threading.Lock()  # not reentrant on purpose: see finalizers.py
        self.changed = threading.Condition(self.lock)
        self.deferred: DeferredFinalizers[SwapTicket] = DeferredFinalizers(self.lock, self._finalize)
        self.read_ahead = ReadAhead(ring.slots.capacity_bytes)
        self.writes: set[Part] = set()
        self.copying: set[Part] = set()
        self.slow_waits = SlowWaits()
        self.closed = self.resting = False

    @property
    def is_idle(self) -> bool:
        """True if no bytes are in its care, nor on their way."""
        self.settle_copies()
        is_unused = self.ring.slots.is_unused and all(path.extents.is_unused for path in self.paths)
        return is_unused and not (self.writes_under_way or self.copying or self.ring.copies.under_way)

    @property
    def writes_under_way(self) -> int:
        """Return the number of writes that are under way or to come."""
        return len(self.writes)

    # ---- taking -------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, wait: bool) -> tuple[Span, SwapPath, Span] | Refusal:
        """Take a slot, a path and an extent on it for ``nbytes``."""
        if self.closed or self.resting:
            return Refusal.CLOSED
        self.settle_copies()  # or slots whose copies are done would pass for taken
        slot = self.ring.slots.allocate(nbytes) or self._wait_for_slot(nbytes, wait)
        if slot is None:
            return Refusal.CLOSED if self.closed or self.resting else Refusal.STAGING_FULL
        working = [path for path in self.paths if path.failure is None]
        # The path that would be done first: with equal shares the slowest would end every step alone.
        for path in sorted(working, key=lambda path: path.busy_s(nbytes)):
            extent = self._extent(path, nbytes)
            if extent is not None:
                return slot, path, extent
        self.ring.slots.free(slot)
        no_room = Refusal.NO_SPACE if working else Refusal.PATH_FAILED
        return Refusal.CLOSED if self.closed or self.resting else no_room  # it may have been closed while a file grew

    def _extent(self, path: SwapPath, nbytes: int) -> Span | None:
        """Take an extent, and have the file grow if need be; None where there is no room."""
        nbytes, started = path.extents.padded(nbytes), time.perf_counter()
        while not (self.closed or self.resting):  # asked after each wait, or a put would copy into staging that is gone
            extent = path.extents.allocate(nbytes)
            if extent is not None:
                return extent
            if not path.is_growing:  # else a second growth would take room that the first one brings
                if not path.may_grow(nbytes):
                    break
                path.is_growing = True
                path.reads.put(partial(self._grow, path, nbytes), URGENT)  # forward leaves these lanes idle
            self.changed.wait(LANE_CHECK_S)
            self.slow_waits.note("forward", [path], started)  # or a drive that hangs would look like a slow model
            self.deferred.act()
        return None

    def _grow(self, path: SwapPath, nbytes: int, _handle: IoHandle) -> None:
        """Have a path's file grow, in a lane."""
        path.grow(nbytes)  # without the lock, or lanes and backward would wait for a drive that hangs
        with self.deferred, self.lock:
            path.extents.grow(path.file.size_bytes)
            path.is_growing = False
            self.changed.notify_all()

    def room_ahead(self, ticket: SwapTicket) -> bool:
        """Take device memory for a storage that backward will want; False where there is none now.

        On the CPU bytes that are ahead stay in staging, and memory is taken when backward wants them.
        """
        copies = self.ring.copies
        if ticket.destination is None and not self.ring.is_synchronous:
            with suppress(RuntimeError, MemoryError):
                ticket.destination = None if copies.is_full else copies.room(ticket.nbytes, ticket.device)
        return ticket.destination is not None or self.ring.is_synchronous

    def begin_read_ahead(self, part: Part) -> bool:
        """Take a slot to read a stored part ahead; False where the bound or staging has no room for it."""
        self.settle_copies()
        if not self.read_ahead.has_room(part.extent.nbytes, beside_writes=self.writes_under_way > 0):
            return False
        self.free_slot(part)  # of a write whose end was interrupted
        part.slot = self.ring.slots.allocate(part.extent.nbytes)
        if part.slot is None:
            return False
        self.read_ahead.add(part)
        part.move(_S.READ_QUEUED)
        return True

    def begin_urgent_read(self, part: Part) -> None:
        """Take memory to read a stored part that backward waits for: a slot, or where there is none, beside staging.

        A slot that only copies use is waited for: the device makes them whatever the host does.
        """
        slots, nbytes = self.ring.slots, part.extent.nbytes
        self.free_slot(part)  # of a write whose end was interrupted
        slot = slots.allocate(nbytes)
        while slot is None and slots.has_spans_in_copies and part.state is _S.STORED and not self.closed:
            self.changed.wait(COPY_POLL_S)
            self.settle_copies()
            slot = slots.allocate(nbytes)
        if part.state is not _S.STORED or self.closed:  # another thread has come first
            if slot is not None:
                slots.free(slot)
            return
        part.slot = slot
        if slot is None:
            part.host = self.ring.overflow(nbytes)
        part.move(_S.READ_QUEUED)

    def hold_unwritten(self, ticket: SwapTicket, part: Part) -> bool:
        """Keep at hand what is still to be written, in its slot or by a copy on the device; False without room.

        The slot of a copy is free with the end of its write, for what backward wants next.
        """
        if not self.read_ahead.add_unwritten(part):
            return False
        place = ticket.place_of(part)
        if place is not None:
            with suppress(RuntimeError, MemoryError):
                part.arrival = self.copy_in(part, place)
            if part.arrival is None:
                self.read_ahead.end(part)
                return False
        return True

    def copy_in(self, part: Part, place: Destination) -> Arrival:
        """Queue the copy of a part that is in host memory to its place on the device."""
        if part.host is not None:
            return self.ring.copies.into(part.host, place)
        # After the copies into the slot, or bytes that the device has not written yet would be handed over.
        arrival = self.ring.copies.into(self.ring.view(part.held_slot), place, after=part.copies)
        part.uses.append(arrival.event)  # so that the slot is written again only when the copy has read it
        return arrival

    def _wait_for_slot(self, nbytes: int, wait: bool) -> Span | None:
        """Take a slot once there is one: while writes drain, or without ``wait`` while the device is behind the host.

        The host queues kernels far ahead of the device. It may wait for tensors that do not exist yet: that keeps
        nobody from working, and says nothing about the drive. Slots of parts that were read ahead would be freed by
        the thread that would be waiting here, and are given up.
        """
        started = time.perf_counter()
        slots, copies = self.ring.slots, self.ring.copies
        slot = None
        while slot is None and not (self.closed or self.resting):
            # Nobody notifies of copies that are done: they are polled. All other slots come with a notification.
            # Without ``wait`` nobody waits for writes: what finds no room stays on the device.
            if copies.under_way or (wait and (self.writes_under_way > 0 or slots.has_spans_in_copies)):
                self.changed.wait(COPY_POLL_S if copies.under_way or slots.has_spans_in_copies else LANE_CHECK_S)
            elif not (wait and self._give_up_read_ahead()):
                break
            waited_for = self.writes or self.read_ahead.newest_first()
            self.slow_waits.note("forward", (part.path for part in waited_for), started)
            self.deferred.act()
            self.settle_copies()
            if not (self.closed or self.resting):  # the lanes have ended since
                slot = slots.allocate(nbytes)
        self.stats.stall_s += time.perf_counter() - started
        return slot

    def _give_up_read_ahead(self) -> bool:
        """Give up the newest read ahead, or wait for one that is under way; False if there is neither."""
        parts = self.read_ahead.newest_first()
        if parts and not any(self.cancel_read_ahead(part) for part in parts):
            self.changed.wait(LANE_CHECK_S)
        return bool(parts)

    # ---- giving back --------------------------------------------------------------------------------------------

    def cancel_read_ahead(self, part: Part) -> bool:
        """Give up bytes that are ahead, or are about to be; False where there is nothing to give up now."""
        if part not in self.read_ahead or part.state is _S.READING:  # the drive writes into its slot
            return False
        self.read_ahead.end(part)
        self._drop_arrival(part)
        part.host = None
        if part.state not in BEFORE_WRITTEN:  # else the slot is freed when the write ends
            part.move(_S.STORED)
            self.free_slot(part)
        return True

    def cancel(self, ticket: SwapTicket) -> bool:
        """Give up all of a storage that is ahead, and its memory; False where there is nothing to give up now."""
        ahead = [part for part in ticket.parts if part in self.read_ahead]
        # What was handed over by a get that failed half-way is nowhere else.
        if ticket.is_loading or any(part.state in (_S.READING, _S.RELEASED) for part in ticket.parts):
            return False
        if not ahead and ticket.destination is None:
            return False
        for part in ahead:
            self.cancel_read_ahead(part)
        for part in ticket.parts:  # those of failed writes
            self._drop_arrival(part)
        ticket.destination = None
        return True

    def end_write(self, part: Part) -> None:
        """Note that the write of a part has ended, or will not be. May be called twice."""
        self.writes.discard(part)
        self.changed.notify_all()

    def free_slot(self, part: Part) -> None:
        """Give back the slot of a part, if it has one, once no copy uses it."""
        # Taken before it is freed: an exception between the two loses room, the other order would give it to two parts.
        slot, part.slot = part.slot, None
        if slot is None:
            return
        # Else the next tensor's copy or read would overwrite bytes that the device has still to take.
        events = [copy.event for copy in part.copies] + part.uses
        part.copies, part.uses = [], []
        self.ring.slots.free_after(events, slot)  # not at once, or the next tenant's bytes would be copied
        self.changed.notify_all()

    def settle_copies(self) -> None:
        """Give back the device memory and the slots that copies used, where these are done."""
        self.ring.copies.settle()
        self.ring.slots.settle()

    def end_work(self, part: Part, state: PartState) -> bool:
        """Note that no lane uses a part's memory any more; return False where the part was given up meanwhile."""
        self.changed.notify_all()
        if part.state is _S.ABANDONED:
            self._drop_arrival(part)
            self.give_up(part)
            return False
        part.move(state)
        return True

    def give_up(self, part: Part) -> None:
        """Release a part whose memory no lane uses. A write that has not begun is cancelled."""
        if part.state is _S.QUEUED:
            self.end_write(part)
        self.read_ahead.end(part)
        part.move(_S.RELEASED)
        part.host = None
        self.free_slot(part)
        part.path.extents.free(part.extent)

    def _drop_arrival(self, part: Part) -> None:
        arrival, part.arrival = part.arrival, None
        if arrival is not None:
            self.ring.copies.drop(arrival)

    def _finalize(self, released: SwapTicket) -> None:
        """Act on a released ticket."""
        for part in released.parts:
            if part.state in (_S.WRITING, _S.READING):  # see [Note: Who frees a slot]
                self.read_ahead.end(part)  # or its bytes would count against the bound for ever
                part.move(_S.ABANDONED)
                continue
            if part.state is not _S.ABANDONED:
                self._drop_arrival(part)
            if part.state not in GIVEN_UP:
                self.stats.cancelled_bytes += part.nbytes if part.state is _S.QUEUED and released.is_taken else 0
                self.give_up(part)
        released.destination = None
        self.changed.notify_all()
