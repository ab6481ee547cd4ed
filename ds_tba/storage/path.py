"""One directory of ``nvme_path``: its swap file, and the lanes that write and read it.

A lane is a thread with an I/O handle of its own. Writes and reads of a file have lanes and a queue each, so that reads
never queue behind writes. Does not know what the bytes are, nor how they move.

[Note: A lane that fails] A task tells of the drive's failures by itself. Whatever else fails in a lane, such as memory
for Python itself, ends it: nobody can tell what is half done. Whoever waits for a lane looks at ``LaneGroup.error`` now
and then. From then on the store takes nothing, and what is not loaded yet is lost by name.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from ds_tba.device.accelerator import Accelerator, new_thread
from ds_tba.errors import TransferError
from ds_tba.stats import PathMeter, RecentRate, readable
from ds_tba.storage.backends.base import IoBackend, IoHandle
from ds_tba.storage.spans import SpanAllocator
from ds_tba.storage.swap_file import SwapFile, repair_of

logger = logging.getLogger(__name__)

LANE_CHECK_S = 1.0  # between two looks of a thread that waits for a lane, which may have failed, or have a slow drive
_FULL = (errno.ENOSPC, errno.EDQUOT)
URGENT, AHEAD = 0, 1  # priorities: backward waits for what is urgent
Task: TypeAlias = Callable[[IoHandle], None]  # the work of a lane, with its handle
Queues: TypeAlias = "list[queue.SimpleQueue[Task | None]]"


class LaneGroup:
    """The lanes of one kind, and their tasks in order of priority, then of arrival.

    Args:
        path: whose file they write or read; told where one fails.
        count: of lanes.

    Attributes:
        handles: one for each lane, used by its thread.
        error: the reason why a lane has ended before its time; see [Note: A lane that fails].
    """

    def __init__(self, path: SwapPath, count: int) -> None:
        self._path = path
        self._count = count
        self.error: BaseException | None = None
        self._forget()

    def _forget(self) -> None:
        self.handles: list[IoHandle] = []
        self._threads: list[threading.Thread] = []
        # Queues that are written in C: a signal handler's exception leaves no lock of theirs taken.
        self._tasks: Queues = [queue.SimpleQueue(), queue.SimpleQueue()]  # by priority
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each task, or more

    def open(self, backend: IoBackend, fd: int) -> None:
        """Open the handles that are missing."""
        while len(self.handles) < self._count:
            self.handles.append(backend.open_handle(fd))

    def start(self, name: str, accelerator: Accelerator) -> None:
        """Start a thread for each handle, on the accelerator's device."""
        for handle in self.handles:
            thread = new_thread(accelerator, partial(self._run, handle, self._tasks, self._wakes), name)
            # First: a signal handler may raise while start() waits for the thread, which then runs, and has to end.
            self._threads.append(thread)
            thread.start()

    def put(self, task: Task | None, priority: int = AHEAD) -> None:
        """Queue a task: ``URGENT`` for bytes that backward waits for, ``AHEAD`` for all else; None ends a lane."""
        try:
            self._tasks[priority].put(task)
        finally:  # a task that no lane is woken for would be waited for without end
            self._wakes.put(None)

    def stop(self) -> None:
        """Let the lanes end once the tasks before are done."""
        for _ in self._threads:
            self.put(None)

    def end(self, deadline_s: float) -> bool:
        """Wait until the lanes have ended, close their handles, and forget them; False where one has not."""
        for thread in self._threads:
            if thread.ident is not None:  # else it never started
                thread.join(max(0.0, deadline_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        for handle in self.handles:
            handle.close()
        self._forget()
        return True

    def _run(self, handle: IoHandle, tasks: Queues, wakes: queue.SimpleQueue[None]) -> None:
        try:  # with the queues of its start: an interrupt then may have had it forgotten before it ran
            while (task := _next(tasks, wakes)) is not None:
                task(handle)
        except BaseException as error:  # noqa: BLE001 - see [Note: A lane that fails]
            self.error = error  # first: it takes no memory
            error.__traceback__ = None  # its frames have tensors
            self._path.fail("a lane failed", error)


def _next(tasks: Queues, wakes: queue.SimpleQueue[None]) -> Task | None:
    """Wait for the next task; None where the lane is to end."""
    while True:
        wakes.get()
        for one in tasks:
            with suppress(queue.Empty):  # in all of them after a task whose queuing was interrupted
                return one.get_nowait()


class SwapPath:
    """The file, extents, queues and rates of one directory.

    Changed only under the store's lock, except the queues, which have their own, and the file, which nobody touches
    under the store's: a drive may hang in any call. :meth:`grow` may mark the path as full without it, and nobody else
    uses a path that is opened or given back.

    Args:
        file: its swap file; closed by the store.
    """

    def __init__(self, file: SwapFile, write_lanes: int, read_lanes: int) -> None:
        self.file = file
        self.extents = SpanAllocator(0)
        self.writes = LaneGroup(self, write_lanes)
        self.reads = LaneGroup(self, read_lanes)
        self.meter = PathMeter(write_lanes, read_lanes)
        self.tensor_bytes = self.stored_bytes = 0  # of storages: before the codec, and as the drive has them
        self.failure: str | None = None
        self.full = False  # it grows no more

    def open(self, backend: IoBackend, least_bytes: int) -> None:
        """Take the file, its handles and the first disk space, unless they are taken. No extent is in use.

        Raises:
            PathError, BackendUnavailableError: one cannot be had.
        """
        if self.file.fd < 0:
            self.extents, self.full = SpanAllocator(0), False
            self.file.open()
        for group in (self.writes, self.reads):
            group.open(backend, self.file.fd)
        if not self.file.size_bytes:
            self.file.reserve_first(least_bytes)
            self.extents.grow(self.file.size_bytes)

    def busy_s(self, more_bytes: int) -> float:
        """Return the seconds to write and read back the bytes that the path holds, and ``more_bytes``.

        Tensors go where these are least, so that paths hold bytes in proportion to their bandwidth.
        """
        s_per_byte = self.meter.writes.recent.s_per_byte + self.meter.reads.recent.s_per_byte
        return (self.extents.used_bytes + more_bytes) * s_per_byte

    def bandwidth(self) -> dict[str, Any]:
        """Return the row of the report."""
        writes, reads = self.meter.writes, self.meter.reads
        return {
            "path": str(self.file.directory),
            "write_bytes_per_s": writes.recent.bytes_per_s,
            "read_bytes_per_s": reads.recent.bytes_per_s,
            "write_alone_bytes_per_s": writes.alone.bytes_per_s,
            "read_alone_bytes_per_s": reads.alone.bytes_per_s,
            "write_beside_read_bytes_per_s": writes.concurrent.bytes_per_s,
            "read_beside_write_bytes_per_s": reads.concurrent.bytes_per_s,
            "tensor_bytes": self.tensor_bytes,
            "stored_bytes": self.stored_bytes,
            "failure": self.failure,
        }

    def rates(self) -> tuple[float, float]:
        """Return the bytes per second of writes and of reads, as of late. Call it under the lock.

        A kind that has moved nothing yet counts as the other one; where neither has, both are a guess.
        """
        writes, reads = self.meter.writes.recent.bytes_per_s, self.meter.reads.recent.bytes_per_s
        guess = 1 / RecentRate.UNKNOWN_S_PER_BYTE
        return writes or reads or guess, reads or writes or guess

    def grow(self, nbytes: int) -> None:
        """Have the file grow by so many bytes at least, or be full, and say so. Without the lock: a drive may hang."""
        file = self.file
        if file.size_bytes + nbytes > file.limit_bytes:
            self.full = True
            logger.warning(
                "%s: the swap file has reached its limit of %s; what does not fit stays in memory. Raise "
                "io.swap_file_bytes to what one step saves, or, where it is not set, free space there: then the limit "
                "is 90 %% of what was free on the drive, shared by the ranks",
                file.directory,
                readable(file.limit_bytes),
            )
            return
        try:
            file.grow(nbytes)
        except OSError as error:
            self.full = True
            logger.warning(
                "%s: the swap file cannot grow beyond %d bytes (%s); what does not fit stays in memory. %s",
                file.directory,
                file.size_bytes,
                error.strerror,
                repair_of(error),
            )

    def fail(self, what: str, failure: BaseException) -> None:
        """Take no more tensors for as long as the engine lives; say once what has happened, and why."""
        if self.failure is not None:
            return
        self.failure = str(failure) or type(failure).__name__  # Python's own lack of memory has no words
        logger.warning(
            "%s: %s (%s); from here on activations stay in memory instead",
            self.file.directory,
            "the drive is full" if isinstance(failure, TransferError) and failure.errno in _FULL else what,
            self.failure,
        )
