"""One directory of ``nvme_path`` at work: its swap file, the extents in it, and the queues and lanes that serve it."""

from __future__ import annotations

import errno
import logging
from typing import Any

import torch

from ds_tba.errors import ActivationCorruptionError, ActivationLostError, StorageError, TransferError
from ds_tba.storage.allocator import Span, SpanAllocator
from ds_tba.storage.backends.base import IoBackend, IoHandle
from ds_tba.storage.integrity import Integrity, Mismatch
from ds_tba.storage.lanes import Lane, LaneQueue
from ds_tba.storage.swap_file import SwapFile
from ds_tba.storage.ticket import SwapTicket
from ds_tba.telemetry.bandwidth import PathMeter
from ds_tba.telemetry.stats import RollingRate

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SwapPath:
    """What belongs to one directory. Changed only under the store's lock, except the queues, which have their own.

    Args:
        file: of its first size; closed by the store.
        backend: gives the alignment.
        write_lanes, read_lanes: how many lanes will serve it.
    """

    def __init__(self, file: SwapFile, backend: IoBackend, write_lanes: int, read_lanes: int) -> None:
        self.file = file
        self.extents = SpanAllocator(file.size_bytes, backend.alignment_bytes)
        self.writes = LaneQueue()
        self.reads = LaneQueue()
        self.write_lanes: list[Lane] = []
        self.read_lanes: list[Lane] = []
        self.queued_bytes = 0
        self.meter = PathMeter(write_lanes, read_lanes)
        self.trial_bytes = 0  # written to measure the path
        self.failure: str | None = None
        self.full = False

    @property
    def written_bytes(self) -> int:
        """What the drive wrote for us: it counts as wear."""
        return self.meter.writes.moved_bytes

    @property
    def write_rate(self) -> RollingRate:
        """Of late, whatever else was under way."""
        return self.meter.writes.of_late

    @property
    def read_rate(self) -> RollingRate:
        """Of late, whatever else was under way."""
        return self.meter.reads.of_late

    def busy_s(self, more_bytes: int) -> float:
        """How long the path is busy with writing and reading back what it holds, and ``more_bytes``.

        Tensors go where this is least, so that paths hold bytes in proportion to their bandwidth.
        """
        s_per_byte = self.write_rate.s_per_byte + self.read_rate.s_per_byte
        return (self.extents.used_bytes + more_bytes) * s_per_byte

    def bandwidth(self) -> dict[str, Any]:
        """For the report."""
        writes, reads = self.meter.writes, self.meter.reads
        return {
            "path": str(self.file.directory),
            "write_bytes_per_s": writes.of_late.bytes_per_s,
            "read_bytes_per_s": reads.of_late.bytes_per_s,
            "write_alone_bytes_per_s": writes.alone.bytes_per_s,
            "read_alone_bytes_per_s": reads.alone.bytes_per_s,
            "write_beside_read_bytes_per_s": writes.beside.bytes_per_s,
            "read_beside_write_bytes_per_s": reads.beside.bytes_per_s,
            "trial_bytes": self.trial_bytes,
            "failure": self.failure,
        }

    def reserve(self, nbytes: int) -> Span | None:
        """An extent, growing the file if it must; None where there is no room."""
        extent = self.extents.allocate(nbytes)
        if extent is None and not self.full and self._grow(self.extents.padded(nbytes)):
            extent = self.extents.allocate(nbytes)
        return extent

    def _grow(self, nbytes: int) -> bool:
        try:
            grown = self.file.grow(nbytes)
        except OSError as error:
            self.full = True
            logger.warning(
                "%s: the swap file cannot grow beyond %d bytes (%s); what does not fit stays in memory",
                self.file.directory,
                self.file.size_bytes,
                error.strerror,
            )
            return False
        self.extents.grow(self.file.size_bytes)
        return grown

    def fail(self, failure: Exception) -> None:
        """Take no more tensors, because a write failed. Said once."""
        if self.failure is not None:
            return
        self.failure = str(failure)
        full = isinstance(failure, TransferError) and failure.errno in _FULL
        logger.warning(
            "%s: %s (%s); from here on activations stay in memory instead",
            self.file.directory,
            "the drive is full" if full else "a write failed",
            failure,
        )

    def read_checked(
        self, ticket: SwapTicket, target: torch.Tensor, handle: IoHandle, integrity: Integrity
    ) -> StorageError | None:
        """Read a ticket's bytes into ``target``; what stands against using them, or None."""
        where = f"{self.file.directory}, offset {ticket.extent.offset}, {ticket.extent.nbytes} bytes"
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
