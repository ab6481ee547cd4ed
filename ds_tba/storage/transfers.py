"""What does a lane do with a part? It writes it, or reads it, or has a file grow, and says what became of that.

[Note: Degrading] A failed write leaves the bytes in staging, from where they are copied to plain host memory; its path
takes no more tensors. DeepSpeed's op reports no failed write: the checksum finds it at the read. A failed read is tried
once more and then raises: those bytes are gone, and the path goes on. Memory that runs out in a transfer fails it as
the drive would. Whatever else fails in a lane loses the bytes of its part by name, or backward would wait for ever.

Cannot see who wants a part, nor why.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial

import torch

from ds_tba.errors import ActivationLostError
from ds_tba.stats import Kind
from ds_tba.storage.backends.base import IoHandle
from ds_tba.storage.base import Refusal
from ds_tba.storage.codec import BlockIo
from ds_tba.storage.path import SwapPath, Task
from ds_tba.storage.space import GIVEN_UP, UNDER_WAY, Part, PartState, SwapSpace, SwapTicket

_S = PartState


class Transfers:
    """The tasks of a store's lanes.

    Args:
        space: of the store.
        changed: the store's, with its lock.
        io: moves the bytes, and tells by their checksums whether they are the right ones.
    """

    def __init__(self, space: SwapSpace, changed: threading.Condition, io: BlockIo) -> None:
        self._space = space
        self._ring = space.ring
        self._stats = space.stats
        self._changed = changed
        self._io = io

    def write(self, ticket: SwapTicket, part: Part) -> Task:
        """Return the task that writes a queued part."""
        return Task(partial(self._write, ticket, part), partial(self._lose, part))

    def read(self, ticket: SwapTicket, part: Part) -> Task:
        """Return a task that reads a part which waits for that."""
        return Task(partial(self._read, ticket, part), partial(self._lose, part))

    def grow(self, path: SwapPath, nbytes: int) -> Task:
        """Return the task that has a path's file grow."""
        return Task(partial(self._grow, path, nbytes), partial(self._fail_to_grow, path))

    def _write(self, ticket: SwapTicket, part: Part, handle: IoHandle) -> None:
        """Write a queued part, unless its write was cancelled; keep its bytes in memory if they cannot be written."""
        with self._changed:
            if part.state is not _S.QUEUED:
                return
            part.move(_S.WRITING)
            part.lane = handle
            has_failed = part.path.failure is not None  # then each write would fail anew, after the kernel's own tries
        failure = host = None
        with self._ring.lane_stream():
            lost = _wait_for_copies(part)
            if lost is None and not has_failed:
                failure = self._write_staged(ticket, part, handle)
            if lost is None and not part.blocks:
                with suppress(MemoryError, RuntimeError):  # else they stay in the slot
                    host = self._ring.rescue(self._ring.view(part.held_slot), part.nbytes)
        with self._changed:
            self._space.writes.discard(part)
            if part.blocks:
                self._end_write(part)
            elif lost is None:
                self._keep(ticket, part, host, failure)
            else:
                self._space.read_ahead.end(part)
                part.error = lost
                if not self._space.end_work(part, _S.LOST) and ticket.is_taken:
                    self._stats.cancelled_bytes += part.nbytes
            self._space.settle_copies()
            self._changed.notify_all()

    def _write_staged(self, ticket: SwapTicket, part: Part, handle: IoHandle) -> Exception | None:
        """Write the staged bytes, and note where they are; return what kept them from the drive, if anything did."""
        failure: Exception | None = None
        with self._changed:  # here, because the copy before was not the drive's time
            transfer = part.path.meter.start(Kind.WRITE, part.extent.nbytes)
        try:
            staged = self._ring.view(part.held_slot)
            part.blocks = self._io.write(handle, staged, part.extent.offset, ticket.item_bytes)
        except Exception as error:  # noqa: BLE001 - of the drive, of a library, or of memory: see [Note: Degrading]
            failure = error
        with self._changed:
            part.path.meter.stop(transfer, moved=failure is None, drive_bytes=part.stored_bytes)
        return failure

    def _end_write(self, part: Part) -> None:
        stays = self._space.read_ahead.end_write(part)  # or what backward wants next would be read from the drive
        self._space.end_work(part, _S.LOADED if stays else _S.STORED)
        if not stays or part.arrival is not None:
            self._space.free_slot(part)
        self._stats.written_bytes += part.stored_bytes
        part.path.tensor_bytes += part.extent.nbytes
        part.path.stored_bytes += part.stored_bytes

    def _keep(self, ticket: SwapTicket, part: Part, host: torch.Tensor | None, failure: Exception | None) -> None:
        """Keep the bytes of a failed write in memory: in the slot, where there is no other."""
        self._space.read_ahead.end(part)
        is_first = not any(one.state is _S.RESCUED for one in ticket.parts)
        part.host = host
        if failure is not None:
            part.path.fail(failure)
        if self._space.end_work(part, _S.RESCUED) and is_first:
            self._stats.rescued_storages += 1
        if host is not None:
            self._space.free_slot(part)
        self._stats.rescued_bytes += part.nbytes
        Refusal.PATH_FAILED.count(self._stats, part.nbytes)

    def _read(self, ticket: SwapTicket, part: Part, handle: IoHandle) -> None:
        """Read a part into its slot, or beside staging, unless that was cancelled or done by an urgent request."""
        with self._changed:
            if part.state is not _S.READ_QUEUED:
                return
            part.move(_S.READING)
            part.lane = handle
            transfer = part.path.meter.start(Kind.READ, part.extent.nbytes)
        with self._ring.lane_stream():
            target = part.host if part.host is not None else self._ring.view(part.held_slot)
            error = self._io.read_all(handle, part.blocks, target, part.place)
            with self._changed:  # before the copy onto the device, which is not the drive's time
                part.path.meter.stop(transfer, moved=error is None, drive_bytes=part.stored_bytes)
                place = ticket.place_of(part) if part.state not in GIVEN_UP else None
            # Memory beside staging is left to whoever waits for it, who frees it when the copy is done.
            if error is None and place is not None and part.host is None:
                with suppress(RuntimeError, MemoryError):  # else backward copies it when it wants it
                    part.arrival = self._space.copy_in(part, place)
        with self._changed:
            part.error = error
            if error is not None:
                self._space.read_ahead.end(part)
            self._space.end_work(part, _S.LOADED if error is None else _S.LOST)
            if error is not None or part.arrival is not None:
                part.host = None
                self._space.free_slot(part)
            self._stats.read_bytes += part.stored_bytes if error is None else 0
            self._space.settle_copies()
            self._changed.notify_all()

    def _lose(self, part: Part, handle: IoHandle, error: BaseException) -> None:
        """Give the bytes of a part up by name, because a lane failed at it, and not the drive. May be called twice."""
        with self._changed:
            # Else another lane has it, or nobody waits for it. Memory may have run out before it was noted who has it.
            if part.state in UNDER_WAY and part.lane in (None, handle):
                self._space.writes.discard(part)
                self._space.read_ahead.end(part)
                part.error = ActivationLostError(
                    f"{part.place}: the activation was lost: a lane failed at it ({type(error).__name__}: {error}). "
                    "Resume from the last checkpoint."
                )
                self._space.end_work(part, _S.LOST)
                self._changed.notify_all()
            part.path.fail(error)

    def _grow(self, path: SwapPath, nbytes: int, _handle: IoHandle) -> None:
        """Have a path's file grow, in a lane."""
        path.grow(nbytes)  # without the lock, or lanes and backward would wait for a drive that hangs
        with self._changed:
            path.extents.grow(path.file.size_bytes)
            path.is_growing = False
            self._changed.notify_all()

    def _fail_to_grow(self, path: SwapPath, _handle: IoHandle, error: BaseException) -> None:
        with self._changed:
            path.is_growing = False
            self._changed.notify_all()
            path.fail(error)


def _wait_for_copies(part: Part) -> ActivationLostError | None:
    """Wait until a part's bytes are in staging; return the error of a copy that failed."""
    try:
        for copy in part.copies:
            copy.wait()  # else other bytes would be written
    except Exception as error:  # noqa: BLE001 - whatever it is, staging does not hold the bytes
        return ActivationLostError(f"an activation could not leave the device: {error}")
    return None
