"""The parts of storages, where there is room for them, and what a lane does with one.

A storage is always a list of parts, each of at most a part of staging, so that it fits whatever its size, spreads over
all paths, and its copies, writes and reads overlap with each other. Does not know who waits for a part, nor why:
``nvme.py`` has that.

[Note: Degrading] A failed write leaves the bytes in their slot of staging until backward has had them; its path takes
no more tensors. DeepSpeed's op reports no failed write: the checksum finds it at the read. A failed read is tried once
more and then raises: those bytes are gone, and the path goes on. Memory that runs out in a transfer fails it as the
drive would. Whatever else fails in a lane loses all that is not loaded yet by name, or backward would wait for ever
(``path.py``, [Note: A lane that fails]).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import ClassVar

import torch

from ds_tba.config import PREFETCH_FRACTION_OF_STAGING
from ds_tba.device.accelerator import Arrival, Event, PendingCopy
from ds_tba.device.copies import Copies, Destination
from ds_tba.errors import StorageError
from ds_tba.stats import StoreStats
from ds_tba.storage.backends import IoHandle
from ds_tba.storage.base import Span, State, StateMachine, Store, Ticket
from ds_tba.storage.integrity import Piece, PieceIo
from ds_tba.storage.path import LATER, SwapPath
from ds_tba.storage.staging import StagingRing


class PartState(State):
    """The place of a part's bytes, and the user of its memory."""

    QUEUED = "in staging, write not started"
    WRITING = "in staging, write under way"
    STORED = "in the swap file"
    READ_QUEUED = "in the swap file, read not started"
    READING = "read under way"
    LOADED = "in staging, beside it, or on the device, and in the swap file"
    RESCUED = "in staging, because a write failed"
    ABANDONED = "given up while a lane uses its memory"
    RELEASED = "given up"


_S = PartState
BEFORE_WRITTEN = frozenset({_S.QUEUED, _S.WRITING})
OVER = frozenset({_S.LOADED, _S.RESCUED})  # nothing more will come: it is in memory
GIVEN_UP = frozenset({_S.RELEASED, _S.ABANDONED})


class Part(StateMachine):
    """One part of a storage. Changed by its store only, under the store's lock.

    [Note: Who frees a slot] A lane writes from the slot, or reads into it, without the lock; the states WRITING and
    READING say so, and meanwhile nobody else frees it, or the drive would move the bytes of another ticket. A release
    in these states only abandons the part, and the lane frees it at the end. Whether prefetching has come to a part
    is known to ``ReadAhead`` alone.
    """

    __slots__ = (
        "arrival", "copy", "error", "extent", "host", "nbytes", "path", "pieces", "slot", "start", "state", "uses",
    )  # fmt: skip

    noun = "a part of a storage"
    moves: ClassVar[Mapping[PartState, tuple[PartState, ...]]] = {
        _S.QUEUED: (_S.WRITING, _S.RELEASED),
        _S.WRITING: (_S.STORED, _S.LOADED, _S.RESCUED, _S.ABANDONED),
        _S.STORED: (_S.READ_QUEUED, _S.RELEASED),
        _S.READ_QUEUED: (_S.READING, _S.STORED, _S.RELEASED),
        _S.READING: (_S.LOADED, _S.STORED, _S.ABANDONED),
        _S.LOADED: (_S.STORED, _S.RELEASED),
        _S.RESCUED: (_S.RELEASED,),
        _S.ABANDONED: (_S.RELEASED,),
        _S.RELEASED: (),
    }

    def __init__(self, start: int, nbytes: int, path: SwapPath, extent: Span, slot: Span) -> None:
        self.start = start  # offset of its bytes in the storage
        self.nbytes = nbytes
        self.path = path
        self.extent = extent
        self.slot: Span | None = slot
        self.state = PartState.QUEUED
        self.pieces: tuple[Piece, ...] = ()  # the places in the file of what is stored, once it is written
        self.copy: PendingCopy | None = None  # into the slot, which is free after it and the uses
        self.uses: list[Event] = []  # events of copies from the slot
        self.arrival: Arrival | None = None  # the copy into its place on the device, which may be under way
        self.host: torch.Tensor | None = None  # memory outside of staging, of a read for which there was no slot
        self.error: StorageError | None = None  # the reason why its bytes are lost, whatever its state is

    @property
    def stored_bytes(self) -> int:
        """Return the bytes that the drive has of it."""
        return sum(piece.stored_bytes for piece in self.pieces)

    @property
    def place(self) -> str:
        """Return the place of its bytes, for an error."""
        return f"{self.path.file.directory}, offset {self.extent.offset}, {self.extent.nbytes} bytes"


class SwapTicket(Ticket):
    """One storage, as its parts."""

    __slots__ = ("destination", "device", "is_taken", "item_bytes", "parts")

    def __init__(self, nbytes: int, store: Store[SwapTicket], device: torch.device, item_bytes: int) -> None:
        super().__init__(nbytes, store)
        self.device = device
        self.item_bytes = item_bytes  # length of an element
        self.parts: list[Part] = []  # in the order of their bytes
        # Device memory for the whole storage, from when it is wanted until it is handed over.
        self.destination: Destination | None = None
        self.is_taken = False  # all of its parts found room, so that it counts as offloaded

    def place_of(self, part: Part) -> Destination | None:
        """Return the place of a part in the destination, where there is one."""
        destination = self.destination
        return None if destination is None else destination.part(part.start, part.nbytes)


class Ahead(Enum):
    """Whence bytes are in memory ahead of need."""

    UNWRITTEN = "still to be written"
    STAYED = "written, and never gone"
    READ = "read, or about to be"


class ReadAhead:
    """The parts that prefetching has come to, and the bytes that they take: nobody else knows this of a part.

    Most are read. Of those that were still to be written when prefetching came the bytes stay in memory when the write
    ends, and from then on count as if they were read.
    """

    def __init__(self, capacity_bytes: int) -> None:
        # Bytes of staging, which bound all of it. Bytes that were read ahead on an asynchronous device wait in device
        # memory, and count until backward takes them.
        self._capacity_bytes = capacity_bytes
        self.prefetched_bytes = 0
        self.unwritten_bytes = 0
        self._parts: dict[Part, Ahead] = {}  # in the order in which they were asked for

    def __contains__(self, part: Part) -> bool:
        return part in self._parts

    def has_room(self, part: Part, *, beside_writes: bool) -> bool:
        """Return whether one part more may be ahead; the first that is read always may; beside writes, less."""
        ahead_bytes = self.prefetched_bytes + part.extent.nbytes
        fits = ahead_bytes + self.unwritten_bytes <= self._capacity_bytes
        if part.state in BEFORE_WRITTEN:
            # It has a slot, and so the share that is left to writes does not matter. If it did, bytes that are being
            # written when backward begins would hold up the reads behind them.
            return fits
        bound_bytes = self._capacity_bytes * (PREFETCH_FRACTION_OF_STAGING if beside_writes else 1)
        return (fits and ahead_bytes <= bound_bytes) or not self.prefetched_bytes

    def add(self, part: Part, whence: Ahead) -> None:
        """Count a part as ahead from here on."""
        self._parts[part] = whence
        self._count(whence, part.extent.nbytes)

    def _count(self, whence: Ahead, nbytes: int) -> None:
        if whence is Ahead.UNWRITTEN:
            self.unwritten_bytes += nbytes
        else:
            self.prefetched_bytes += nbytes

    def end(self, part: Part) -> Ahead | None:
        """Count a part as ahead no more; return whence it was, or None if it was not."""
        whence = self._parts.pop(part, None)
        if whence is not None:
            self._count(whence, -part.extent.nbytes)
        return whence

    def newest_first(self) -> list[Part]:
        """Return the parts that are ahead; backward needs the newest last."""
        return list(reversed(self._parts))


class SwapSpace:
    """The half of a store in which nobody waits for another: what becomes of parts, and the tasks of its lanes.

    All methods are called under the lock, except for the tasks, which lanes run without it, and what these do to files.
    """

    def __init__(self, paths: list[SwapPath], ring: StagingRing, io: PieceIo) -> None:
        self.stats = StoreStats()
        # Guards the parts, slots and extents, the tickets included. Held for bookkeeping and for work that is only
        # queued on a device, never for I/O nor for another call of a drive: the lanes need it at both ends of a
        # transfer.
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)  # notified whenever a part moves on, or a slot or write ends
        self.paths = paths  # of the swap files, in which parts have their extents
        self.ring = ring  # staging, in which parts have their slots
        self.copies = Copies(ring.accelerator)
        self.io = io  # moves the bytes of parts, and tells by their checksums whether they are the right ones
        self.read_ahead = ReadAhead(ring.slots.capacity_bytes)
        # The parts whose writes are under way or to come; whoever waits for a slot may count on them. Without a
        # ``copy`` a put is copying its bytes into staging.
        self.writes: set[Part] = set()

    @property
    def working(self) -> list[SwapPath]:
        """The paths that take tensors: those that have not failed, or none once a lane has."""
        return [] if self.lane_error else [path for path in self.paths if path.failure is None]

    @property
    def lane_error(self) -> BaseException | None:
        """The reason why a lane has ended before its time, if one has."""
        errors = (group.error for path in self.paths for group in (path.writes, path.reads))
        return next((error for error in errors if error is not None), None)

    @property
    def is_idle(self) -> bool:
        """True if no bytes are in its care, nor on their way."""
        self.settle_copies()
        is_used = self.ring.slots.used_bytes or any(path.extents.used_bytes for path in self.paths)
        return not (is_used or self.writes or self.copies.under_way)

    # ---- ahead of need ------------------------------------------------------------------------------------------

    def left(self, parts: Iterable[Part]) -> list[Part]:
        """Return the parts that may be begun ahead of need."""
        return [
            part
            for part in parts
            if part.arrival is None
            and part.error is None
            and part not in self.read_ahead
            and (part.state is _S.STORED or part.state in BEFORE_WRITTEN)
        ]

    def begin(self, ticket: SwapTicket, parts: Iterable[Part]) -> bool:
        """Bring parts ahead of need as far as there is room; return whether there was any."""
        has_begun = False
        for part in self.left(parts):
            if not self._begin_part(ticket, part):
                break
            has_begun = True
        return has_begun

    def _begin_part(self, ticket: SwapTicket, part: Part) -> bool:
        """Read a stored part, or keep at hand one that is still to be written; False without room.

        The latter stays in its slot, or is copied to the device: then its slot is free with the end of its write.
        """
        self.settle_copies()
        if not self.read_ahead.has_room(part, beside_writes=bool(self.writes)):
            return False
        if part.state is _S.STORED:
            part.slot = self.ring.slots.allocate(part.extent.nbytes)
            if part.slot is None:
                return False
            self.read_ahead.add(part, Ahead.READ)
            part.move(_S.READ_QUEUED)
            self.queue_read(ticket, part)
            return True
        place = ticket.place_of(part)
        if place is not None:
            with suppress(RuntimeError, MemoryError):
                part.arrival = self.copy_in(part, place)
            if part.arrival is None:
                return False
        self.read_ahead.add(part, Ahead.UNWRITTEN)
        return True

    def copy_in(self, part: Part, place: Destination) -> Arrival:
        """Queue the copy of a part that is in host memory to its place on the device."""
        if part.host is not None:
            return self.copies.into(part.host, place)
        # After the copy into the slot, or bytes that the device has not written yet would be handed over.
        arrival = self.copies.into(self.ring.view(part.slot), place, part.copy)
        part.uses.append(arrival.event)  # so that the slot is written again only when the copy has read it
        return arrival

    def cancel_read_ahead(self, part: Part) -> bool:
        """Give up bytes that are ahead, or are about to be; False where there is nothing to give up now."""
        if part not in self.read_ahead or part.state is _S.READING:  # the drive writes into its slot
            return False
        self.read_ahead.end(part)
        self.drop_arrival(part)
        part.host = None
        if part.state not in BEFORE_WRITTEN:  # else the slot is freed when the write ends
            part.move(_S.STORED)
            self.free_slot(part)
        return True

    # ---- giving back --------------------------------------------------------------------------------------------

    def free_slot(self, part: Part) -> None:
        """Give back the slot of a part, if it has one, once no copy uses it."""
        slot, part.slot = part.slot, None
        if slot is None:
            return
        # Else the next tensor's copy or read would overwrite bytes that the device has still to take.
        events = part.uses + ([part.copy.event] if part.copy is not None else [])
        part.copy, part.uses = None, []
        self.ring.slots.free_after(events, slot)  # not at once, or the next tenant's bytes would be copied

    def settle_copies(self) -> None:
        """Give back the device memory and the slots that copies used, where these are done."""
        self.copies.settle()
        self.ring.slots.settle()

    def give_up(self, part: Part) -> None:
        """Release a part whose memory no lane uses. A write that has not begun is cancelled."""
        self.writes.discard(part)
        self.read_ahead.end(part)
        part.move(_S.RELEASED)
        part.host = None
        self.free_slot(part)
        part.path.extents.free(part.extent)

    def drop_arrival(self, part: Part) -> None:
        """Give up the bytes of a part that are on the device, or on their way there."""
        arrival, part.arrival = part.arrival, None
        if arrival is not None:
            self.copies.drop(arrival)

    # ---- tasks of lanes -----------------------------------------------------------------------------------------

    def queue_read(self, ticket: SwapTicket, part: Part, priority: int = LATER) -> None:
        """Have a lane read a part that waits for that; by which of several tasks is nothing to whoever waits."""
        part.path.reads.put(partial(self._read, ticket, part), priority)

    def _write(self, ticket: SwapTicket, part: Part, handle: IoHandle) -> None:
        """Write a queued part, unless its write was cancelled; its bytes stay in staging if they cannot be written."""
        path, failure, transfer = part.path, None, None
        copy = part.copy  # once: another thread may give the part up
        if copy is not None:
            copy.wait()  # else other bytes would be written
        with self.changed:
            if part.state is not _S.QUEUED:
                return
            part.move(_S.WRITING)
            if path.failure is None:  # else it would fail anew, after the kernel's own tries
                transfer = path.meter.start(path.meter.writes, part.extent.nbytes)
        if transfer is not None:
            try:
                part.pieces = self.io.write(handle, self.ring.view(part.slot), part.extent.offset, ticket.item_bytes)
            except Exception as error:  # noqa: BLE001 - of the drive, of a library, or of memory: see [Note: Degrading]
                failure = error.with_traceback(None)  # whose frames would hold themselves
        with self.changed:
            if transfer is not None:
                path.meter.stop(transfer, moved=failure is None, drive_bytes=part.stored_bytes)
            self.writes.discard(part)
            if part.pieces:
                self._end_write(part)
            else:
                self._end_failed_write(ticket, part, failure)
            self.settle_copies()
            self.changed.notify_all()

    def _end_write(self, part: Part) -> None:
        stays = self.read_ahead.end(part) is not None  # or what backward wants next would be read from the drive
        if stays:
            self.read_ahead.add(part, Ahead.STAYED)
        self._end_work(part, _S.LOADED if stays else _S.STORED)
        if not stays or part.arrival is not None:
            self.free_slot(part)

    def _end_failed_write(self, ticket: SwapTicket, part: Part, failure: Exception | None) -> None:
        """Keep bytes in their slot that could not be written."""
        self.read_ahead.end(part)
        if failure is not None:
            part.path.fail("a write failed", failure)
        is_first = not any(one.state is _S.RESCUED for one in ticket.parts)
        is_wanted = self._end_work(part, _S.RESCUED)
        self.stats.rescued_storages += is_wanted and is_first
        self.stats.rescued_bytes += part.nbytes

    def _read(self, ticket: SwapTicket, part: Part, handle: IoHandle) -> None:
        """Read a part into its slot, or beside staging, unless that was cancelled or done by an urgent request."""
        with self.changed:
            if part.state is not _S.READ_QUEUED:
                return
            part.move(_S.READING)
            transfer = part.path.meter.start(part.path.meter.reads, part.extent.nbytes)
        target = part.host if part.host is not None else self.ring.view(part.slot)
        error = self.io.read_all(handle, part.pieces, target, part.place, is_staging=part.host is None)
        with self.changed:  # before the copy onto the device, which is not the drive's time
            part.path.meter.stop(transfer, moved=error is None, drive_bytes=part.stored_bytes)
            place = ticket.place_of(part) if part.state not in GIVEN_UP else None
        # Memory beside staging is left to whoever waits for it, who frees it when the copy is done.
        if error is None and place is not None and part.host is None:
            with suppress(RuntimeError, MemoryError):  # else backward copies it when it wants it
                part.arrival = self.copy_in(part, place)
        # Else this frame would hold the memory until the lane runs again, and backward may be done with it before.
        place = None
        with self.changed:
            part.error = error
            if error is not None:
                self.read_ahead.end(part)
            self._end_work(part, _S.LOADED if error is None else _S.STORED)
            if error is not None or part.arrival is not None:
                part.host = None
                self.free_slot(part)
            self.settle_copies()
            self.changed.notify_all()

    def _end_work(self, part: Part, state: PartState) -> bool:
        """Note that no lane uses a part's memory any more; return False where the part was given up meanwhile."""
        if part.state is _S.ABANDONED:
            self.drop_arrival(part)
            self.give_up(part)
            return False
        part.move(state)
        return True
