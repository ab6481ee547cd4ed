"""What does a lane do with a ticket? Write it, or keep its bytes in memory; read it back, verified.

Does not know who asks, nor when: a ticket's state says whether the work is still wanted.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import torch

from ds_tba.device.accelerator import Arrival
from ds_tba.errors import ActivationCorruptionError, ActivationLostError, StorageError, TransferError
from ds_tba.storage.backends.base import IoHandle
from ds_tba.storage.base import Refusal, SwapTicket, TicketState
from ds_tba.storage.integrity import Integrity, Mismatch
from ds_tba.storage.space import SwapSpace
from ds_tba.telemetry.stats import Kind

logger = logging.getLogger(__name__)

_S = TicketState


class LaneWork:
    """Writes and reads of tickets, in whatever lane takes them.

    A lane survives whatever a transfer raises, or backward would wait for ever; the ticket carries the error.

    Args:
        space: holds the bytes, and the lock.
        integrity: takes and compares the checksums.
    """

    def __init__(self, space: SwapSpace, integrity: Integrity) -> None:
        self._space = space
        self._integrity = integrity

    def write(self, ticket: SwapTicket, handle: IoHandle) -> None:
        """Write a queued ticket, unless its write was cancelled; keep its bytes in memory if they cannot be written."""
        with self._space.ring.lane_stream():
            self._write(ticket, handle)

    def read(self, ticket: SwapTicket, handle: IoHandle) -> None:
        """Read a ticket into its slot, unless its read was cancelled or done by an urgent request."""
        with self._space.ring.lane_stream():
            self._read(ticket, handle)

    def _write(self, ticket: SwapTicket, handle: IoHandle) -> None:
        space = self._space
        with space.deferred:
            if ticket.state is not _S.QUEUED:
                return  # cancelled
            ticket.move(_S.WRITING)
            has_failed = ticket.path.failure is not None
            space.stats.writes.start()
        try:
            ticket.wait_for_copies()
        except Exception as error:  # noqa: BLE001 - the copy out failed, so staging does not hold the bytes
            self._lose(ticket, ActivationLostError(f"an activation could not leave the device: {error}"))
            return
        staged = space.ring.view(ticket.held_slot)
        failure = None if has_failed else self._write_out(ticket, staged, handle)
        if has_failed or failure is not None:
            self._rescue(ticket, staged, failure)
            return
        # Prefetching came to it: onto the device now, so that its slot is free for what backward wants next.
        arrival = self._onto_device(ticket, staged) if ticket in space.read_ahead else None
        with space.deferred:
            self._count_write(ticket.extent.nbytes)
            stays = space.read_ahead.end_write(ticket)
            written = space.end_work(ticket, _S.LOADED if stays else _S.STORED)
            if written and stays:
                space.stats.forwarded_bytes += ticket.nbytes
                ticket.arrival = arrival
            arrival = None  # this frame must not hold it when backward has let go of it
            if written and (not stays or ticket.arrival is not None):
                space.free_slot(ticket)
            space.settle_copies()

    def _write_out(self, ticket: SwapTicket, staged: torch.Tensor, handle: IoHandle) -> Exception | None:
        """Write the staged bytes. Returns the error, if there was one."""
        space, failure = self._space, None
        with space.lock:  # here, because the copy before was not the drive's time
            transfer = ticket.path.meter.start(Kind.WRITE, ticket.extent.nbytes)
        try:
            ticket.checksums = self._integrity.digest(staged)
            handle.write(staged, ticket.extent.offset)
        except Exception as error:  # noqa: BLE001 - see the class
            failure = error
        with space.lock:
            ticket.path.meter.stop(transfer, moved=failure is None)
        return failure

    def _count_write(self, nbytes: int) -> None:
        self._space.stats.writes.stop(nbytes)
        self._space.end_write()

    def _lose(self, ticket: SwapTicket, error: StorageError) -> None:
        space = self._space
        with space.deferred:
            self._count_write(0)
            space.read_ahead.end(ticket)
            ticket.error = error
            if not space.end_work(ticket, _S.LOST):
                space.stats.cancelled_bytes += ticket.nbytes

    def _rescue(self, ticket: SwapTicket, staged: torch.Tensor, failure: Exception | None) -> None:
        """Keep bytes that cannot be written in host memory, or in their slot where no host memory is left."""
        space = self._space
        host: torch.Tensor | None = None
        with suppress(MemoryError, RuntimeError):
            host = space.ring.rescue(staged, ticket.nbytes)
        with space.deferred:
            self._count_write(0)
            space.read_ahead.end(ticket)
            ticket.host = host
            space.stats.rescued_bytes += ticket.nbytes
            Refusal.PATH_FAILED.count(space.stats, ticket.nbytes)
            if failure is not None:
                ticket.path.fail(failure)
            if space.end_work(ticket, _S.RESCUED) and host is not None:
                space.free_slot(ticket)
            space.settle_copies()

    def _read(self, ticket: SwapTicket, handle: IoHandle) -> None:
        space = self._space
        with space.deferred:
            if ticket.state is not _S.READ_QUEUED:
                return  # given up, or read by an urgent request
            ticket.move(_S.READING)
            space.stats.reads.start()
            transfer = ticket.path.meter.start(Kind.READ, ticket.extent.nbytes)
        target = ticket.host if ticket.host is not None else space.ring.view(ticket.held_slot)
        failure = _read_checked(ticket, target, handle, self._integrity)
        with space.lock:  # before the copy onto the device, which is not the drive's time
            ticket.path.meter.stop(transfer, moved=failure is None)
        arrival = self._onto_device(ticket, target) if failure is None else None
        with space.deferred:
            space.stats.reads.stop(ticket.extent.nbytes if failure is None else 0)
            ticket.error = failure
            ticket.arrival, arrival = arrival, None  # as above
            if failure is not None:
                space.read_ahead.end(ticket)
            read = space.end_work(ticket, _S.LOADED if failure is None else _S.LOST)
            if read and (failure is not None or ticket.arrival is not None):
                ticket.host = None
                space.free_slot(ticket)
            space.settle_copies()

    def _onto_device(self, ticket: SwapTicket, source: torch.Tensor) -> Arrival | None:
        """Copy staged bytes to the device, so that backward need not wait for that; None where they stay staged."""
        if self._space.ring.zero_copy or ticket.state is _S.ABANDONED:
            return None
        try:
            arrival = self._space.ring.copies.into(source, ticket.nbytes, ticket.device)
            arrival.wait()  # else the slot would be read into again under the copy
        except RuntimeError:  # no device memory: backward tries again, and tells the user if there is none then
            return None
        return arrival


def _read_checked(
    ticket: SwapTicket, target: torch.Tensor, handle: IoHandle, integrity: Integrity
) -> StorageError | None:
    """Read a ticket's bytes into ``target``. Returns the error for which they must not be used, if there is one."""
    where = f"{ticket.path.file.directory}, offset {ticket.extent.offset}, {ticket.extent.nbytes} bytes"
    try:
        mismatch = _read_up_to_twice(ticket, target, handle, integrity, where)
    except Exception as error:  # noqa: BLE001 - a lane must survive anything, or backward would wait for ever
        lost = ActivationLostError(
            f"{where}: the activation cannot be read back ({error}). Stop, check the drive (dmesg, smartctl), and "
            "resume from the last checkpoint."
        )
        lost.__cause__ = error
        return lost
    if mismatch is None:
        return None
    return ActivationCorruptionError(
        f"{where}: bytes read back are not the bytes written: {mismatch.nbytes} bytes at file offset "
        f"{ticket.extent.offset + mismatch.offset} have checksum {mismatch.found:#018x}, expected "
        f"{mismatch.expected:#018x}. A write was lost, short or stale: check the drive (dmesg, smartctl), and "
        "resume from the last checkpoint."
    )


def _read_up_to_twice(
    ticket: SwapTicket, target: torch.Tensor, handle: IoHandle, integrity: Integrity, where: str
) -> Mismatch | None:
    """Read, and once more if that failed or brought other bytes: DeepSpeed's op tells no error of a read."""
    try:
        handle.read(target, ticket.extent.offset)
        if integrity.compare(target, ticket.checksums) is None:
            return None
        why = "bytes read back are not the bytes written"
    except TransferError as error:
        why = str(error)
    logger.warning("%s: %s; trying once more", where, why)
    handle.read_again(target, ticket.extent.offset)
    return integrity.compare(target, ticket.checksums)
