"""How does a storage come to NVMe and back? The store over anonymous swap files, one per directory.

[Note: The way of a part] ``put`` cuts a storage into parts. For each it reserves an extent and a staging slot, copies
the device bytes into the slot and queues a write. A write lane writes the part and frees the slot. ``prefetch``
allocates device memory for the storage and queues reads into new slots, from where a read lane queues the copy to the
device; bytes that are still to be written are copied at once. On the CPU bytes ahead of need stay in staging.
``get`` hands over bytes that are still in staging (cancelling a write that has not begun), waits for reads under way,
and queues others that overtake those which nobody waits for. ``release`` only defers, because finalizers call it; see
``ds_tba/storage/finalizers.py``.

[Note: Degrading] A failed write leaves the bytes in staging, from where they are copied to plain host memory; its path
takes no more tensors. DeepSpeed's op reports no failed write: the checksum finds it at the read. A failed read is tried
once more and then raises: those bytes are gone, and the path goes on. A lane survives whatever a transfer raises, or
backward would wait for ever; the part carries the error.

[Note: Again] Memory may also run out between the lines of a lane. Then its task is called again (``path.py``, [Note:
Lanes do not die]), with what it knows in a :class:`_Work`. A transfer is made again: the same bytes between the same
places. What ends it under the lock can be done twice, up to the change of the part's state; a slot that is to be
freed after that may stay with its part, until that is used again or given up. Spans are taken from parts before
they are freed: an exception between the two loses room until the end, where a second try could give it to two
tickets. After ``MOST_TRIES`` the bytes of a write stay where they are, and those of a read are lost by
name; after ``MOST_END_TRIES`` both are.

Cannot see which storages are worth moving, nor in which order backward wants them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from ds_tba.device.copies import Arrival, PendingCopy
from ds_tba.device.memory import is_out_of_memory
from ds_tba.errors import ActivationCorruptionError, ActivationLostError, StateError, StorageError, TransferError
from ds_tba.stats import Kind, Transfer
from ds_tba.storage.backends.base import IoBackend, IoHandle
from ds_tba.storage.base import Loaded, Refusal, Store
from ds_tba.storage.codec import BlockIo, Codec
from ds_tba.storage.integrity import Integrity
from ds_tba.storage.path import LANE_CHECK_S, URGENT, Block, SwapPath, Task
from ds_tba.storage.space import (
    AT_HAND,
    BEFORE_WRITTEN,
    COPY_POLL_S,
    GIVEN_UP,
    Part,
    PartState,
    SwapSpace,
    SwapTicket,
    spans_of,
)
from ds_tba.storage.staging import CLOSED, StagingRing
from ds_tba.storage.swap_file import SwapFile

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0
RESTING_LIMIT_S = 1.0  # for writes and reads under way whose bytes nobody wants any more
COPYING_LIMIT_S = 5.0  # a copy into staging takes less, unless closing has interrupted the thread that copies
PART_FRACTION_OF_STAGING = 0.25
_ASKED_TOO_LATE = "bytes were asked for after they were given up; this is a bug in ds_tba"
MOST_TRIES = 3  # of a transfer by a lane in which something fails that is not the drive
MOST_END_TRIES = 50  # of what ends a transfer under the lock; then the part is lost, by a bug
_S = PartState


# ---- the work of the lanes ----


class _Work:
    """A transfer by a lane, from one try to the next.

    Attributes:
        is_done: whether the transfer has ended, well or not.
        is_written: whether the file has the bytes.
        failure: the drive's, for which its path takes no more tensors.
        error: the reason why the bytes must not be used.
        host: the bytes in host memory.
    """

    __slots__ = ("error", "failure", "host", "is_done", "is_written", "part", "ticket", "transfer", "tries")

    def __init__(self, ticket: SwapTicket, part: Part) -> None:
        self.ticket = ticket
        self.part = part
        self.tries = 0
        self.transfer: Transfer | None = None  # under way, for the meter
        self.is_done = self.is_written = False
        self.failure: Exception | None = None
        self.error: StorageError | None = None
        self.host: torch.Tensor | None = None


class Transfers:
    """Writes and reads of parts, as tasks for the lanes of their paths.

    Args:
        io: moves the bytes, and tells by their checksums whether they are the right ones.
    """

    def __init__(self, space: SwapSpace, io: BlockIo) -> None:
        self._space = space
        self._ring = space.ring
        self._stats = space.stats
        self._io = io

    def write(self, ticket: SwapTicket, part: Part) -> Task:
        """Return the task that writes a queued part."""
        return partial(self._write, _Work(ticket, part))

    def read(self, ticket: SwapTicket, part: Part) -> Task:
        """Return a task that reads a part which waits for that."""
        return partial(self._read, _Work(ticket, part))

    # ---- writes -------------------------------------------------------------------------------------------------

    def _write(self, work: _Work, handle: IoHandle) -> None:
        """Write a queued part, unless its write was cancelled; keep its bytes in memory if they cannot be written."""
        part, space = work.part, self._space
        work.tries += 1
        if work.tries > MOST_END_TRIES:
            self._give_up_work(work)
            return
        with space.deferred, space.lock:
            if part.state is _S.QUEUED:
                part.move(_S.WRITING)
            elif part.state not in (_S.WRITING, _S.ABANDONED):
                return  # cancelled, or ended by a try before; nobody else writes this part
            has_failed = part.path.failure is not None  # then each write would fail anew, after the kernel's own tries
        if not work.is_done and work.tries <= MOST_TRIES:
            with self._ring.lane_stream():
                self._write_staged(work, handle, has_failed=has_failed)
            work.is_done = True
        self._end_write(work)

    def _write_staged(self, work: _Work, handle: IoHandle, *, has_failed: bool) -> None:
        part = work.part
        try:
            for copy in part.copies:
                copy.wait()  # else other bytes would be written
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the copy out failed, so staging does not hold the bytes
            work.error = ActivationLostError(f"an activation could not leave the device: {error}")
            return
        staged = self._ring.view(part.held_slot)
        if not has_failed:
            self._write_out(work, staged, handle)
        if not work.is_written:
            with suppress(MemoryError, RuntimeError):
                work.host = self._ring.rescue(staged, part.nbytes)

    def _write_out(self, work: _Work, staged: torch.Tensor, handle: IoHandle) -> None:
        """Write the staged bytes; see [Note: Degrading]."""
        part = work.part
        if work.transfer is None:
            with self._space.deferred, self._space.lock:  # here, because the copy before was not the drive's time
                work.transfer = part.path.meter.start(Kind.WRITE, part.extent.nbytes)
        try:
            part.blocks = self._io.write(handle, staged, part.extent.offset, work.ticket.item_bytes)
            work.is_written = True
        except Exception as error:
            if is_out_of_memory(error):
                raise  # it says nothing of the drive: see [Note: Again]
            work.failure = error
        with self._space.deferred, self._space.lock:
            self._stop_transfer(work, moved=work.is_written)

    def _stop_transfer(self, work: _Work, *, moved: bool) -> None:
        transfer, work.transfer = work.transfer, None
        if transfer is not None:
            work.part.path.meter.stop(transfer, moved=moved, drive_bytes=work.part.stored_bytes)

    def _end_write(self, work: _Work) -> None:
        """Say what became of a write: the bytes are in the file, in memory, or lost. See [Note: Again]."""
        part, space = work.part, self._space
        with space.deferred, space.lock:
            self._stop_transfer(work, moved=work.is_written)
            if part.state not in (_S.WRITING, _S.ABANDONED):
                return
            space.end_write(part)
            if work.error is not None:
                space.read_ahead.end(part)
                part.error = work.error
                if not space.end_work(part, _S.LOST) and work.ticket.is_taken:
                    self._stats.cancelled_bytes += part.nbytes
            elif work.is_written:
                stays = space.read_ahead.end_write(part)  # or what backward wants next would be read from the drive
                space.end_work(part, _S.LOADED if stays else _S.STORED)
                if not stays or part.arrival is not None:
                    space.free_slot(part)
                self._stats.written_bytes += part.stored_bytes
                part.path.tensor_bytes += part.extent.nbytes
                part.path.stored_bytes += part.stored_bytes
            else:
                self._keep(work)
            space.settle_copies()

    def _keep(self, work: _Work) -> None:
        """Keep the bytes of a failed write in memory: in the slot, where there is no other."""
        part, space = work.part, self._space
        space.read_ahead.end(part)
        is_first = not any(one.state is _S.RESCUED for one in work.ticket.parts)
        part.host = work.host
        if work.failure is not None:
            part.path.fail(work.failure)
        if space.end_work(part, _S.RESCUED) and is_first:
            self._stats.rescued_storages += 1
        if work.host is not None:
            space.free_slot(part)
        self._stats.rescued_bytes += part.nbytes
        Refusal.PATH_FAILED.count(self._stats, part.nbytes)

    def _give_up_work(self, work: _Work) -> None:
        """End what a bug keeps from ending, so that nobody waits for it."""
        part, space = work.part, self._space
        logger.error("a lane cannot end its work with a part '%s'; this is a bug in ds_tba", part.state.value)
        with space.deferred, space.lock:
            if part.state is not _S.RELEASED:
                part.error = ActivationLostError("a lane could not end its work; this is a bug in ds_tba")
                part.state = _S.LOST
            space.end_write(part)

    # ---- reads --------------------------------------------------------------------------------------------------

    def _read(self, work: _Work, handle: IoHandle) -> None:
        """Read a part into its slot, or beside staging, unless that was cancelled or done by an urgent request."""
        part, space = work.part, self._space
        work.tries += 1
        with space.deferred, space.lock:
            if part.state is _S.READ_QUEUED:
                part.reader = work
                part.move(_S.READING)
            elif part.reader is not work or part.state not in (_S.READING, _S.ABANDONED):
                return  # another task reads it, or has: two would read into one slot, of which the first ends the use
            if work.transfer is None and not work.is_done:
                work.transfer = part.path.meter.start(Kind.READ, part.extent.nbytes)
        if work.tries > MOST_END_TRIES:
            self._give_up_work(work)
            return
        if not work.is_done and work.tries <= MOST_TRIES:
            with self._ring.lane_stream():
                self._read_staged(work, handle)
        self._end_read(work)

    def _read_staged(self, work: _Work, handle: IoHandle) -> None:
        part = work.part
        target = part.host if part.host is not None else self._ring.view(part.held_slot)
        work.error = self._read_checked(part, target, handle)
        work.is_done = True
        with self._space.deferred, self._space.lock:  # before the copy onto the device, which is not the drive's time
            self._stop_transfer(work, moved=work.error is None)
        place = work.ticket.place_of(part)
        # Memory beside staging is left to whoever waits for it, who frees it when the copy is done.
        if work.error is None and place is not None and part.host is None and part.state is not _S.ABANDONED:
            with suppress(RuntimeError, MemoryError):  # else backward copies it when it wants it
                part.arrival = self._space.copy_in(part, place)

    def _end_read(self, work: _Work) -> None:
        """Say what became of a read: the bytes are in memory, or lost. See [Note: Again]."""
        part, space = work.part, self._space
        if not work.is_done and work.error is None:
            work.error = ActivationLostError(
                f"{part.place}: the activation was not read back: memory ran out in {MOST_TRIES} tries (the log "
                "has each). Look for what takes the memory of this machine, and resume from the last checkpoint."
            )
        with space.deferred, space.lock:
            self._stop_transfer(work, moved=False)
            if part.reader is not work or part.state not in (_S.READING, _S.ABANDONED):
                return
            part.error = work.error
            if work.error is not None:
                space.read_ahead.end(part)
            space.end_work(part, _S.LOADED if work.error is None else _S.LOST)
            if work.error is not None or part.arrival is not None:
                part.host = None
                space.free_slot(part)
            self._stats.read_bytes += part.stored_bytes if work.error is None else 0
            part.reader = None
            space.settle_copies()

    def _read_checked(self, part: Part, target: torch.Tensor, handle: IoHandle) -> StorageError | None:
        """Read a part's bytes into ``target``; return the error for which they must not be used, if there is one."""
        for block in part.blocks:
            error = self._read_block(part, block, target, handle)
            if error is not None:
                return error
        return None

    def _read_block(self, part: Part, block: Block, target: torch.Tensor, handle: IoHandle) -> StorageError | None:
        """Read a block, and once more if that failed or brought other bytes: DeepSpeed's op tells no error of it."""
        where = part.place
        try:
            try:
                problem = self._io.read(handle, block, target)
                why = problem and "bytes read back are not the bytes written"
            except TransferError as error:
                why = str(error)
            if not why:
                return None
            logger.warning("%s: %s; trying once more", where, why)
            problem = self._io.read(handle, block, target, again=True)
        except Exception as error:
            if is_out_of_memory(error):
                raise  # as above
            lost = ActivationLostError(
                f"{where}: the activation cannot be read back ({error}). Stop, check the drive (dmesg, smartctl), and "
                "resume from the last checkpoint."
            )
            lost.__cause__ = error
            return lost
        if not problem:
            return None
        return ActivationCorruptionError(
            f"{where}: bytes read back are not the bytes written: {problem}. A write was lost, short or stale: check "
            "the drive (dmesg, smartctl), and resume from the last checkpoint."
        )


# ---- the store ----


@dataclass(frozen=True, slots=True)
class Lanes:
    """The number of lanes of each path."""

    write: int
    read: int

    def of(self, paths: int) -> int:
        """Return the number of lanes of so many paths."""
        return paths * (self.write + self.read)


class NvmeStore(Store[SwapTicket]):
    """Storages on NVMe.

    Args:
        files: one swap file per directory, already of their first size; closed with the store.
        backend: moves bytes between staging and the files.
        ring: staging; closed with the store.
        lanes: threads per file.
        integrity: checksum mode.
        codec: compresses in the lanes, for each of which the ring has a buffer.
        is_last: whether what finds no room stays in device memory; else host memory takes it.

    Attributes:
        part_bytes: the length of all parts of a storage but the last.
        io: moves the bytes of parts.
    """

    def __init__(
        self,
        files: Sequence[SwapFile],
        backend: IoBackend,
        ring: StagingRing,
        lanes: Lanes,
        integrity: str,
        codec: Codec | None = None,
        *,
        is_last: bool = True,
    ) -> None:
        self.ring = ring
        self.paths = [SwapPath(file, backend, lanes.write, lanes.read) for file in files]
        self.space = SwapSpace(self.paths, ring)
        self.stats = self.space.stats
        self.io = BlockIo(Integrity(integrity, backend.blocks, on_device=backend.stages_on_device), ring, codec)
        self._transfers = Transfers(self.space, self.io)
        part_bytes = int(ring.slots.capacity_bytes * PART_FRACTION_OF_STAGING)
        self.part_bytes = max(part_bytes - part_bytes % ring.slots.alignment_bytes, ring.slots.alignment_bytes)
        self._backend, self._lanes, self._is_last = backend, lanes, is_last
        self._start_lanes()

    # ---- out ----------------------------------------------------------------------------------------------------

    def put(self, data: torch.Tensor, *, wait: bool, item_bytes: int = 1) -> SwapTicket | Refusal:
        spans = spans_of(data.numel(), self.part_bytes)
        if len(spans) > 1 and not wait:
            refusal = self._lacks_room(data.numel())
            if refusal is not None:
                return refusal
        ticket = SwapTicket(data.numel(), self, data.device, item_bytes)
        try:
            for start, nbytes in spans:
                refusal = self._put_part(ticket, data[start : start + nbytes], start, wait)
                if refusal is not None:
                    self.release(ticket)  # or the parts before would take room that nobody gives back
                    return refusal
        except BaseException:
            self.release(ticket)
            raise
        return ticket

    def _lacks_room(self, nbytes: int) -> Refusal | None:
        """Refuse a storage that would have to wait for staging, before its first parts are copied for nothing."""
        slots = self.ring.slots
        with self.space.deferred, self.space.lock:
            self.space.settle_copies()
            if self.space.closed or slots.padded(nbytes) <= slots.capacity_bytes - slots.used_bytes:
                return None
            too_large = slots.padded(nbytes) > slots.capacity_bytes
            refusal = Refusal.LARGER_THAN_STAGING if too_large else Refusal.STAGING_FULL
            refusal.count(self.stats, nbytes, is_last=self._is_last)
            return refusal

    def _put_part(self, ticket: SwapTicket, data: torch.Tensor, start: int, wait: bool) -> Refusal | None:
        space, part = self.space, None
        try:
            with space.deferred, space.lock:
                reserved = space.reserve(data.numel(), wait)
                if isinstance(reserved, Refusal):
                    reserved.count(self.stats, ticket.nbytes, is_last=self._is_last)
                    return reserved
                slot, path, extent = reserved
                part = Part(start, data.numel(), path, extent, slot)
                ticket.parts.append(part)  # first: from here on releasing the ticket frees slot and extent
                space.writes.add(part)
                space.copying.add(part)  # or closing would free the memory under the copy
            # Without the lock, which a copy of the host would keep from the lanes; nobody else has the ticket yet.
            part.copies.append(self.ring.copies.out(data, self.ring.view(slot)))
            with space.deferred, space.lock:
                path.writes.put(self._transfers.write(ticket, part))
                space.copying.discard(part)
                if part.start + part.nbytes == ticket.nbytes:  # not before: a later part may be refused
                    ticket.is_taken = True
                    self.stats.offloaded_bytes += ticket.nbytes
        except BaseException:  # of a signal handler, too: whoever waits for a slot waits for this write
            if part is not None:
                try:
                    self.ring.copies.drain()  # one that nobody knows of may be under way into the slot
                finally:
                    space.copying.discard(part)
            raise
        return None

    # ---- back ---------------------------------------------------------------------------------------------------

    def prefetch(self, ticket: SwapTicket) -> bool:
        space = self.space
        with space.deferred, space.lock:
            if space.closed or not self._left(ticket.parts):
                return True  # in memory or on its way already, or nothing to do
            is_new = ticket.destination is None
            if not space.room_ahead(ticket):
                return False
            has_begun = self._begin(ticket, ticket.parts)
            if is_new and not has_begun:
                ticket.destination = None
            # Where it has memory of its own, that counts from here on, and the other parts follow.
            return has_begun if ticket.destination is not None else not self._left(ticket.parts)

    def _left(self, parts: Iterable[Part]) -> list[Part]:
        """Return the parts that may be begun ahead of need."""
        ahead = self.space.read_ahead
        return [
            part
            for part in parts
            if part.arrival is None and part not in ahead and (part.state is _S.STORED or part.state in BEFORE_WRITTEN)
        ]

    def _begin(self, ticket: SwapTicket, parts: Iterable[Part]) -> bool:
        """Bring parts ahead of need as far as there is room; return whether there was any."""
        space, has_begun = self.space, False
        for part in self._left(parts):
            if part.state in BEFORE_WRITTEN:
                has_room = space.hold_unwritten(ticket, part)
            else:
                has_room = space.begin_read_ahead(part)
                if has_room:
                    part.path.reads.put(self._transfers.read(ticket, part))
            if not has_room:
                break
            has_begun = True
        return has_begun

    def get(self, ticket: SwapTicket, device: torch.device) -> Loaded:
        space, beside = self.space, list[Arrival]()
        with space.deferred, space.lock:
            space.settle_copies()  # backward needs the memory of what forward has finished copying
            while ticket.is_loading:  # by another thread: each would free the slots of the parts that it hands over
                space.changed.wait(LANE_CHECK_S)
            if ticket.is_given_up:
                raise StateError(_ASKED_TOO_LATE)
            ticket.is_loading = True
            try:
                loaded = self._load(ticket, device, beside)
            finally:
                ticket.is_loading = False
                space.changed.notify_all()
        # Here: if the caller never did, the memory could go to the next tenant while it is still copied into.
        loaded.arrival.join()
        for arrival in beside:
            arrival.wait()  # the memory that it is copied from may go now
        return loaded

    def _load(self, ticket: SwapTicket, device: torch.device, beside: list[Arrival]) -> Loaded:
        """Bring all parts of a storage to the device. If it raises, parts that came stay, and it may be repeated.

        Args:
            beside: gets copies from memory beside staging, which goes when they are done.
        """
        if ticket.destination is None:
            ticket.destination = self.ring.copies.room(ticket.nbytes, device)
        for index, part in enumerate(ticket.parts):
            if part.arrival is not None and part.state in (_S.STORED, _S.RELEASED):
                continue  # handed over before something failed
            self._begin(ticket, [one for one in ticket.parts[index + 1 :] if one.state is _S.STORED])
            self._wait_until_at_hand(ticket, part)
            if part.arrival is None:
                is_beside = part.host is not None or part.state is _S.RESCUED
                part.arrival = self.space.copy_in(part, ticket.destination.part(part.start, part.nbytes))
                beside += [part.arrival] if is_beside else []
            self._hand_over(part)
        arrivals = [part.arrival for part in ticket.parts if part.arrival is not None]
        arrival = self.ring.copies.whole(ticket.destination, arrivals)
        for part in ticket.parts:
            part.arrival = None
        ticket.destination = None
        return Loaded(arrival, stored=all(part.state is not _S.RELEASED for part in ticket.parts))

    def _hand_over(self, part: Part) -> None:
        """Free what a part held that is handed over: cancel a write that has not begun, free the slot of a read."""
        space, state = self.space, part.state
        if state in BEFORE_WRITTEN:
            self.stats.forwarded_bytes += part.nbytes
        if state is _S.QUEUED:
            self.stats.cancelled_bytes += part.nbytes
            space.give_up(part)  # the lane skips it: the write is cancelled
            return
        space.read_ahead.end(part)
        if state is _S.LOADED:
            part.host = None
            part.move(_S.STORED)
            space.free_slot(part)

    def _wait_until_at_hand(self, ticket: SwapTicket, part: Part) -> None:
        """Block until the bytes of a part are in memory. Called under the lock, which each wait releases."""
        if part.state in BEFORE_WRITTEN:
            return
        space, started = self.space, time.perf_counter()
        if space.read_ahead.end(part):  # from here on it is ours, and cannot be given up
            self.stats.forwarded_bytes += part.nbytes
        if space.closed and part.state in (_S.STORED, _S.READ_QUEUED):
            raise StateError(CLOSED)
        if part.state is _S.STORED:
            space.begin_urgent_read(part)
        if part.state is _S.READ_QUEUED:
            part.path.reads.put(self._transfers.read(ticket, part), URGENT)
        while part.state not in AT_HAND | GIVEN_UP and not space.closed:
            space.changed.wait(LANE_CHECK_S)
            space.slow_waits.note("backward", [part.path], started)
        if part.state in GIVEN_UP:
            raise StateError(_ASKED_TOO_LATE)
        has_nothing = part.host is None and part.arrival is None and part.error is None
        if part.state not in AT_HAND or (space.closed and has_nothing):
            raise StateError(CLOSED)
        self.stats.stall_s += time.perf_counter() - started
        if part.error is not None:
            # A new exception each time: one that is kept would keep the frames it passed through.
            raise type(part.error)(str(part.error)) from part.error

    # ---- giving up ----------------------------------------------------------------------------------------------

    def release(self, ticket: SwapTicket) -> None:
        self.space.deferred.leave(ticket)

    def refuse_broken(self) -> None:
        self.space.deferred.refuse_broken()

    def settle(self) -> None:
        with self.space.deferred, self.space.lock:
            self.space.settle_copies()

    def cancel_prefetch(self, ticket: SwapTicket) -> bool:
        with self.space.deferred, self.space.lock:
            return self.space.cancel(ticket)

    def copies_out(self) -> Sequence[PendingCopy]:
        with self.space.deferred, self.space.lock:
            self.space.settle_copies()
            return self.ring.copies.under_way

    # ---- beginning, resting, ending -----------------------------------------------------------------------------

    def _start_lanes(self) -> None:
        lanes, ring = self._lanes, self.ring
        try:
            # Every handle comes before any thread: a failure must leave no thread behind.
            for path in self.paths:
                for group, count in ((path.writes, lanes.write), (path.reads, lanes.read)):
                    for _ in range(count):
                        group.handles.append(self._backend.open_handle(path.file.fd))
            self.io.give_buffers([lane for path in self.paths for lane in path.writes.handles + path.reads.handles])
            for index, path in enumerate(self.paths):
                path.writes.start(f"ds_tba-write-{index}", ring.accelerator)
                path.reads.start(f"ds_tba-read-{index}", ring.accelerator)
        except BaseException:
            self._stop_lanes()
            raise

    def rest(self) -> bool:
        space = self.space
        with space.deferred, space.lock:
            if space.closed or space.resting:
                return space.resting
            deadline_s = time.monotonic() + RESTING_LIMIT_S
            while not space.is_idle and time.monotonic() < deadline_s:
                space.changed.wait(COPY_POLL_S)  # lanes may be at work on what was given up
                space.deferred.act()
            space.resting = space.is_idle
            if not space.resting:
                return False
        if self._stop_lanes():  # else a lane hangs: what it uses stays, and closing will tell of it
            self._give_back()
        return True

    def _check_lanes_ended(self) -> None:
        if any(path.writes.handles or path.reads.handles for path in self.paths):
            raise RuntimeError("a lane of the activation offloader hangs in a request to its drive (dmesg)")

    def _give_back(self) -> None:
        for path in self.paths:
            path.rest()  # without the lock: nobody else has a use for a path while the store rests
        with self.space.deferred, self.space.lock:
            self.ring.close()

    def wake(self) -> None:
        with self.space.deferred, self.space.lock:
            is_wanted = self.space.resting and not self.space.closed
        if not is_wanted:
            return
        self._check_lanes_ended()
        try:
            for path in self.paths:
                path.wake(self.ring.slots.capacity_bytes)
            self.ring.wake()
            self._start_lanes()
        except BaseException:
            self._give_back()
            raise
        with self.space.deferred, self.space.lock:
            self.space.resting = False
            is_closed = self.space.closed
        if is_closed:  # by another thread, which knew nothing of these lanes
            self.close()

    def close(self) -> None:
        with self.space.deferred, self.space.lock:
            self.space.closed = True
            self.space.changed.notify_all()
            deadline_s = time.monotonic() + COPYING_LIMIT_S
            while self.space.copying and time.monotonic() < deadline_s:  # else staging would go under a put
                self.space.changed.wait(COPY_POLL_S)
        if not self._stop_lanes():
            logger.error(
                "an I/O request did not end within %.0f s; its memory is left to process exit", CLOSE_TIMEOUT_S
            )
            return
        try:
            with self.space.deferred, self.space.lock:
                # Copies that are under way read and write the memory that closing the ring frees.
                self.ring.copies.finish()
                self.ring.close()
        finally:  # without the lock: a drive may hang in giving the space back
            for path in self.paths:
                path.file.close()

    def _stop_lanes(self) -> bool:
        """Let the lanes do what is queued and end; whether all of them did within the time for that."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        groups = [group for path in self.paths for group in (path.writes, path.reads)]
        for group in groups:  # all of them first: they end at the same time
            group.stop()
        ended = [group.end(deadline_s) for group in groups]
        return all(ended)
