"""How is one directory of ``nvme_path`` doing? Its swap file, the extents in it, its lanes, and their rates.

Cannot see what the bytes are.
"""

from __future__ import annotations

import errno
import logging
from typing import Any

from ds_tba.errors import StateError, TransferError
from ds_tba.storage.allocator import Span, SpanAllocator
from ds_tba.storage.backends.base import IoBackend
from ds_tba.storage.lanes import LaneGroup
from ds_tba.storage.swap_file import SwapFile
from ds_tba.telemetry.stats import KindMeter, PathMeter, readable

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SwapPath:
    """The file, extents, queues and rates of one directory.

    Changed only under the store's lock, except the queues, which have their own.

    Args:
        file: of its first size; closed by the store.
        backend: gives the alignment.
        write_lanes, read_lanes: how many will serve it.
    """

    def __init__(self, file: SwapFile, backend: IoBackend, write_lanes: int, read_lanes: int) -> None:
        self.file = file
        self.extents = SpanAllocator(file.size_bytes, backend.alignment_bytes)
        self.writes = LaneGroup()
        self.reads = LaneGroup()
        self.meter = PathMeter(write_lanes, read_lanes)
        self.probe_bytes = 0  # written to measure the path
        self.failure: str | None = None
        self.full = False
        self._is_limit_said = False

    def open_lanes(self, backend: IoBackend, write_lanes: int, read_lanes: int) -> None:
        """Open the handles of its lanes, which are not started yet."""
        self.writes.open(write_lanes, lambda: backend.open_handle(self.file.fd))
        self.reads.open(read_lanes, lambda: backend.open_handle(self.file.fd))

    @property
    def written_bytes(self) -> int:
        """Bytes that this process had the drive write: they count as wear."""
        return self.meter.writes.moved_bytes

    def busy_s(self, more_bytes: int) -> float:
        """Seconds to write and read back the bytes that the path holds, and ``more_bytes``.

        Tensors go where this is least, so that paths hold bytes in proportion to their bandwidth.
        """
        s_per_byte = self.meter.writes.recent.s_per_byte + self.meter.reads.recent.s_per_byte
        return (self.extents.used_bytes + more_bytes) * s_per_byte

    def bandwidth(self) -> dict[str, Any]:
        """For the report."""
        writes, reads = self.meter.writes, self.meter.reads
        return {
            "path": str(self.file.directory),
            "write_bytes_per_s": writes.recent.bytes_per_s,
            "read_bytes_per_s": reads.recent.bytes_per_s,
            "write_alone_bytes_per_s": writes.alone.bytes_per_s,
            "read_alone_bytes_per_s": reads.alone.bytes_per_s,
            "write_beside_read_bytes_per_s": writes.concurrent.bytes_per_s,
            "read_beside_write_bytes_per_s": reads.concurrent.bytes_per_s,
            "trial_bytes": self.probe_bytes,
            "failure": self.failure,
        }

    def rates(self) -> tuple[float, float, float, float]:
        """Bytes per second of writes, of reads, and of each while the other runs. Call it under the lock.

        Raises:
            StateError: one kind was never measured.
        """
        write, concurrent_write = self._rates_of(self.meter.writes)
        read, concurrent_read = self._rates_of(self.meter.reads)
        return write, read, concurrent_write, concurrent_read

    def _rates_of(self, kind: KindMeter) -> tuple[float, float]:
        alone = kind.alone if kind.alone.is_known else kind.concurrent
        if not alone.is_known:
            raise StateError(f"{self.file.directory} was not measured before its rates were asked for; this is a bug")
        # A rate without recent transfers stays as it was, but neither kind is faster while the other runs.
        return alone.bytes_per_s, min(kind.concurrent.bytes_per_s or alone.bytes_per_s, alone.bytes_per_s)

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
                "%s: the swap file cannot grow beyond %d bytes (%s); what does not fit stays in memory. "
                "Free space there, or raise the quota",
                self.file.directory,
                self.file.size_bytes,
                error.strerror,
            )
            return False
        self.extents.grow(self.file.size_bytes)
        if not grown and not self._is_limit_said:
            self._is_limit_said = True
            logger.warning(
                "%s: the swap file has reached its limit of %s; what does not fit stays in memory. %s",
                self.file.directory,
                readable(self.file.limit_bytes),
                "Raise io.swap_file_bytes to what one step saves"
                if self.file.is_limit_set
                else "That is 90 % of what was free on the drive, shared by the ranks: free space there",
            )
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
