"""One directory of ``nvme_path`` at work: its swap file, the extents in it, and the queues and lanes that serve it."""

from __future__ import annotations

import logging

from ds_tba.io.base import IoBackend
from ds_tba.spans import Span, SpanAllocator
from ds_tba.store.lanes import Lane, LaneQueue
from ds_tba.store.swap_file import SwapFile

logger = logging.getLogger(__name__)


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
