"""One directory of ``nvme_path`` at work: its swap file, the extents in it, and the queues and lanes that serve it."""

from __future__ import annotations

import errno
import logging

import torch

from ds_tba.errors import ActivationCorruptionError, ActivationLostError, StorageError, TransferError
from ds_tba.io.base import IoBackend, IoHandle
from ds_tba.spans import Span, SpanAllocator
from ds_tba.store.integrity import Integrity
from ds_tba.store.lanes import Lane, LaneQueue
from ds_tba.store.swap_file import SwapFile
from ds_tba.store.ticket import SwapTicket

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SwapPath:
    """What belongs to one directory. Changed only under the store's lock, except the queues, which have their own."""

    def __init__(self, file: SwapFile, backend: IoBackend) -> None:
        self.file = file
        self.extents = SpanAllocator(file.size_bytes, backend.alignment_bytes)
        self.writes = LaneQueue()
        self.reads = LaneQueue()
        self.write_lanes: list[Lane] = []
        self.read_lanes: list[Lane] = []
        self.queued_bytes = 0
        self.written_bytes = 0
        self.failure: str | None = None
        self.full = False

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
            try:
                handle.read(target, ticket.extent.offset)
            except TransferError as first:
                logger.warning("%s: %s; trying once more", where, first)
                handle.read(target, ticket.extent.offset)
            mismatch = integrity.compare(target, ticket.checksums)
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
