"""How do the bytes of a part go between staging and a drive? The work of the lanes.

[Note: Degrading] A failed write leaves the bytes in staging, from where they are copied to plain host memory; its path
takes no more tensors. A failed read is tried once more and then raises: those bytes are gone. A lane survives whatever
a transfer raises, or backward would wait for ever; the part carries the error.

[Note: Again] Memory may also run out between the lines of a lane. Then its task is called again (``path.py``, [Note:
Lanes do not die]), with what it knows in a :class:`_Work`. A transfer is made again: the same bytes between the same
places. What ends it under the lock can be done twice, up to the change of the part's state; a slot that is to be
freed after that may stay with its part, until that is used again or given up. Spans are taken from parts before
they are freed: an exception between the two loses room until the end, where a second try could give it to two
tickets. After ``MOST_TRIES`` the bytes of a write stay where they are, and those of a read are lost by name.

Cannot see which bytes are wanted, nor when.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial

import torch

from ds_tba.device.memory import is_out_of_memory
from ds_tba.errors import ActivationCorruptionError, ActivationLostError, StorageError, TransferError
from ds_tba.stats import Kind, Transfer
from ds_tba.storage.backends.base import IoHandle
from ds_tba.storage.base import Refusal
from ds_tba.storage.codec import BlockIo
from ds_tba.storage.path import Block, Part, PartState, SwapTicket, Task
from ds_tba.storage.space import SwapSpace

logger = logging.getLogger(__name__)

MOST_TRIES = 3  # of a transfer by a lane in which something fails that is not the drive
LAST_TRY = 50  # of what ends it
_S = PartState


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
        if work.tries > LAST_TRY:
            self._give_up_work(work)
            return
        with space.deferred, space.deferred.lock:
            if part.state is _S.QUEUED:
                part.move(_S.WRITING)
            elif part.state not in (_S.WRITING, _S.ABANDONED):
                return  # cancelled, or ended by a try before; nobody else writes this part
            has_failed = part.path.failure is not None
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
        with space.deferred, space.deferred.lock:
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
                stays = space.read_ahead.end_write(part)
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
        """Read a part into its slot, unless its read was cancelled or done by an urgent request."""
        part, space = work.part, self._space
        work.tries += 1
        with space.deferred, space.deferred.lock:
            if part.state is _S.READ_QUEUED:
                part.reader = work
                part.move(_S.READING)
            elif part.reader is not work or part.state not in (_S.READING, _S.ABANDONED):
                return
            if work.transfer is None and not work.is_done:
                work.transfer = part.path.meter.start(Kind.READ, part.extent.nbytes)
        if work.tries > LAST_TRY:
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
        with space.deferred, space.deferred.lock:
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
