"""The parts of storages, and where there is room for them: staging slots, extents, and what was read ahead.

A storage is always a list of parts, each of at most a part of staging, so that it fits whatever its size, spreads over
all paths, and its copies, writes and reads overlap with each other. This is the bookkeeping of a store: every call is
made under the store's lock, and none waits. Does not know how bytes move, nor who waits for them: ``nvme.py`` has that.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import ClassVar

import torch

from ds_tba.config import PREFETCH_FRACTION_OF_STAGING
from ds_tba.device.accelerator import Event
from ds_tba.device.copies import Arrival, Destination, PendingCopy
from ds_tba.errors import StateError, StorageError
from ds_tba.stats import StoreStats
from ds_tba.storage.backends.base import IoHandle
from ds_tba.storage.base import StateMachine, Store, Ticket
from ds_tba.storage.path import SwapPath
from ds_tba.storage.spans import Block, Span
from ds_tba.storage.staging import StagingRing

logger = logging.getLogger(__name__)

SLOW_WAIT_S = 30.0  # for a drive, before that is told
SLOW_AGAIN_S = 60.0  # from one such warning to the next


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
UNDER_WAY = BEFORE_WRITTEN | {_S.READ_QUEUED, _S.READING, _S.ABANDONED}  # a lane has it, or is to have it


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
        lane: the I/O handle of the lane that uses its memory: several tasks may be queued to read one part.
        arrival: the copy into its place on the device, which may be under way.
        host: memory outside of staging: of a read for which there was no slot, or of a failed write.
        error: the reason why its bytes are LOST.
    """

    __slots__ = (
        "arrival", "blocks", "copies", "error", "extent", "host", "lane", "nbytes", "path", "slot", "start", "state",
        "uses",
    )  # fmt: skip

    noun = "a part of a storage"
    moves: ClassVar[Mapping[PartState, tuple[PartState, ...]]] = {
        _S.QUEUED: (_S.WRITING, _S.LOST, _S.RELEASED),
        _S.WRITING: (_S.STORED, _S.LOADED, _S.RESCUED, _S.LOST, _S.ABANDONED),
        _S.STORED: (_S.READ_QUEUED, _S.RELEASED),
        _S.READ_QUEUED: (_S.READING, _S.STORED, _S.LOST, _S.RELEASED),
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
        self.lane: IoHandle | None = None
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
    """Slots of the staging ring and extents of the swap files, and the parts that have them.

    Attributes:
        ring, stats: the store's.
        read_ahead: the parts that prefetching has come to.
        writes: the parts whose writes are under way or to come; whoever waits for a slot may count on them.
        copying: the parts whose bytes are being copied into staging by a put.
    """

    def __init__(self, paths: Sequence[SwapPath], ring: StagingRing, stats: StoreStats) -> None:
        self._paths = paths
        self.ring = ring
        self.stats = stats
        self.read_ahead = ReadAhead(ring.slots.capacity_bytes)
        self.writes: set[Part] = set()
        self.copying: set[Part] = set()

    @property
    def is_idle(self) -> bool:
        """True if no bytes are in its care, nor on their way."""
        self.settle_copies()
        is_unused = self.ring.slots.is_unused and all(path.is_idle for path in self._paths)
        return is_unused and not (self.writes or self.copying or self.ring.copies.under_way)

    @property
    def writes_under_way(self) -> int:
        """Return the number of writes that are under way or to come."""
        return len(self.writes)

    # ---- ahead of need ------------------------------------------------------------------------------------------

    def room_ahead(self, ticket: SwapTicket) -> bool:
        """Take device memory for a storage that backward will want; False where there is none now.

        On the CPU bytes that are ahead stay in staging, and memory is taken when backward wants them.
        """
        copies = self.ring.copies
        if ticket.destination is None and not self.ring.is_synchronous:
            with suppress(RuntimeError, MemoryError):
                ticket.destination = None if copies.is_full else copies.room(ticket.nbytes, ticket.device)
        return ticket.destination is not None or self.ring.is_synchronous

    def left(self, parts: Iterable[Part]) -> list[Part]:
        """Return the parts that may be begun ahead of need."""
        return [
            part
            for part in parts
            if part.arrival is None
            and part not in self.read_ahead
            and (part.state is _S.STORED or part.state in BEFORE_WRITTEN)
        ]

    def begin_read_ahead(self, part: Part) -> bool:
        """Take a slot to read a stored part ahead; False where the bound or staging has no room for it."""
        self.settle_copies()
        if not self.read_ahead.has_room(part.extent.nbytes, beside_writes=self.writes_under_way > 0):
            return False
        part.slot = self.ring.slots.allocate(part.extent.nbytes)
        if part.slot is None:
            return False
        self.read_ahead.add(part)
        part.move(_S.READ_QUEUED)
        return True

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

    # ---- giving back --------------------------------------------------------------------------------------------

    def free_slot(self, part: Part) -> None:
        """Give back the slot of a part, if it has one, once no copy uses it."""
        slot, part.slot = part.slot, None
        if slot is None:
            return
        # Else the next tensor's copy or read would overwrite bytes that the device has still to take.
        events = [copy.event for copy in part.copies] + part.uses
        part.copies, part.uses = [], []
        self.ring.slots.free_after(events, slot)  # not at once, or the next tenant's bytes would be copied

    def settle_copies(self) -> None:
        """Give back the device memory and the slots that copies used, where these are done."""
        self.ring.copies.settle()
        self.ring.slots.settle()

    def end_work(self, part: Part, state: PartState) -> bool:
        """Note that no lane uses a part's memory any more; return False where the part was given up meanwhile."""
        part.lane = None
        if part.state is _S.ABANDONED:
            self._drop_arrival(part)
            self.give_up(part)
            return False
        part.move(state)
        return True

    def give_up(self, part: Part) -> None:
        """Release a part whose memory no lane uses. A write that has not begun is cancelled."""
        self.writes.discard(part)
        self.read_ahead.end(part)
        part.move(_S.RELEASED)
        part.host = None
        self.free_slot(part)
        part.path.extents.free(part.extent)

    def release(self, ticket: SwapTicket) -> None:
        """Give up all parts of a storage; those that a lane is at are given up when it ends."""
        for part in ticket.parts:
            if part.state in (_S.WRITING, _S.READING):  # see [Note: Who frees a slot]
                self.read_ahead.end(part)  # or its bytes would count against the bound for ever
                part.move(_S.ABANDONED)
                continue
            if part.state is not _S.ABANDONED:
                self._drop_arrival(part)
            if part.state not in GIVEN_UP:
                self.stats.cancelled_bytes += part.nbytes if part.state is _S.QUEUED and ticket.is_taken else 0
                self.give_up(part)
        ticket.destination = None

    def _drop_arrival(self, part: Part) -> None:
        arrival, part.arrival = part.arrival, None
        if arrival is not None:
            self.ring.copies.drop(arrival)
