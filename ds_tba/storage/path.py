"""One directory of ``nvme_path``: can bytes lie there, where do they, and who moves them? Its checks, before training
and with numbers; its swap file: without a name on disk, readable by this process alone, grown in steps, reclaimed by
the kernel; and the lanes that write and read it.

A lane is a thread with an I/O handle of its own. Writes and reads of a file have lanes and a queue each, so that reads
never queue behind writes. Does not know what the bytes are, nor how they move, nor what a drive does with its blocks: a
file system may say that there is room and fail a write all the same.

[Note: Reserving] Blocks are reserved before bytes go there, so that a full drive shows where it can be answered: an op
that tells no errors would lose them. A file system without O_DIRECT or fallocate(2) is refused at the start: the page
cache would take the memory that offloading is to free. (Where there is no fallocate(2), as on ext3, glibc writes single
bytes in its place, which O_DIRECT refuses.)

[Note: A lane that fails] A task tells of the drive's failures by itself. Whatever else fails in a lane, such as memory
for Python itself, ends it: nobody can tell what is half done. Whoever waits for a lane looks at ``LaneGroup.error`` now
and then. From then on the store takes nothing, and what is not loaded yet is lost by name.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import queue
import secrets
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ds_tba.device.accelerator import Accelerator, new_thread
from ds_tba.errors import PathError
from ds_tba.stats import PathMeter, expanded, readable
from ds_tba.storage.backends import IoBackend, IoHandle
from ds_tba.storage.base import SpanAllocator, padded

logger = logging.getLogger(__name__)

LANE_CHECK_S = 1.0  # between two looks of a thread that waits for a lane, which may have failed, or have a slow drive
URGENT, LATER = 0, 1  # priorities: backward waits for what is urgent
Task: TypeAlias = Callable[[IoHandle], None]  # the work of a lane, with its handle
Queues: TypeAlias = list["queue.SimpleQueue[Task | None]"]  # by priority
GROW_STEP_BYTES = 1 << 30
UNKNOWN_BYTES_PER_S = 1e9  # of a path that has moved nothing yet
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# linux/fs.h: FS_IOC_GETFLAGS, FS_IOC_SETFLAGS (their size field says long, their argument is an int), FS_NOCOW_FL.
_GET_FLAGS, _SET_FLAGS, _NOCOW = 0x80086601, 0x40086602, 0x00800000
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
_NO_CALL = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_FILE_SYSTEMS = {  # linux/magic.h, and those of zfs and lustre
    0xEF53: "ext4", 0x58465342: "xfs", 0x9123683E: "btrfs", 0x2FC12FC1: "zfs", 0x794C7630: "overlay",
    0x6969: "nfs", 0x0BD00BD0: "lustre", 0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs",
}  # fmt: skip
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")


class LaneGroup:
    """The lanes of one kind, and their tasks in order of priority, then of arrival."""

    def __init__(self, path: SwapPath, count: int) -> None:
        self._path = path  # whose file they write or read; told where one fails
        self._count = count  # of lanes
        self.error: BaseException | None = None  # why a lane has ended before its time; see [Note: A lane that fails]
        self._forget()

    def _forget(self) -> None:
        self.handles: list[IoHandle] = []  # one for each lane, used by its thread
        self._threads: list[threading.Thread] = []
        # Queues that are written in C: a signal handler's exception leaves no lock of theirs taken.
        self._tasks: Queues = [queue.SimpleQueue(), queue.SimpleQueue()]
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each task, or more

    def open(self, backend: IoBackend, fd: int) -> None:
        """Open the handles that are missing."""
        while len(self.handles) < self._count:
            self.handles.append(backend.open_handle(fd))

    def start(self, name: str, accelerator: Accelerator) -> None:
        """Start a thread for each handle, on the accelerator's device."""
        for handle in self.handles:
            thread = new_thread(accelerator, partial(self._run, handle, self._tasks, self._wakes), name)
            self._threads.append(thread)  # first: where an interrupt comes while it starts, it has to end, too
            thread.start()

    def put(self, task: Task | None, priority: int = LATER) -> None:
        """Queue a task: ``URGENT`` for bytes that backward waits for, else ``LATER``; None ends a lane."""
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
            while (task := self._next(tasks, wakes)) is not None:
                task(handle)
        except BaseException as error:  # noqa: BLE001 - see [Note: A lane that fails]
            self.error = error  # first: it takes no memory
            error.__traceback__ = None  # its frames have tensors
            self._path.fail("a lane failed", error)

    @staticmethod
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
    """

    def __init__(self, file: SwapFile, write_lanes: int, read_lanes: int) -> None:
        self.file = file  # closed by the store
        self.extents = SpanAllocator(0)
        self.writes = LaneGroup(self, write_lanes)
        self.reads = LaneGroup(self, read_lanes)
        self.meter = PathMeter(write_lanes, read_lanes)
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
        return (self.extents.used_bytes + more_bytes) * sum(1 / rate for rate in self.rates())

    def bandwidth(self) -> dict[str, Any]:
        """Return the row of the report."""
        writes, reads = self.meter.writes, self.meter.reads
        return {
            "path": str(self.file.directory),
            "write_bytes_per_s": writes.recent.bytes_per_s,
            "read_bytes_per_s": reads.recent.bytes_per_s,
            "tensor_bytes": writes.moved_bytes,
            "stored_bytes": writes.drive_bytes,
            "failure": self.failure,
        }

    def rates(self) -> tuple[float, float]:
        """Return the bytes per second of writes and of reads, as of late. Call it under the lock.

        A kind that has moved nothing yet counts as the other one; where neither has, both are a guess.
        """
        writes, reads = self.meter.writes.recent.bytes_per_s, self.meter.reads.recent.bytes_per_s
        return writes or reads or UNKNOWN_BYTES_PER_S, reads or writes or UNKNOWN_BYTES_PER_S

    def grow(self, nbytes: int) -> None:
        """Have the file grow by so many bytes at least, or be full, and say so. Without the lock: a drive may hang."""
        file = self.file
        try:
            if file.grow(padded(nbytes)) or file.fd < 0:  # it was closed
                return
            why = f"the swap file has reached its limit of {readable(file.limit_bytes)}"
            repair = (
                "Raise io.swap_file_bytes to what one step saves, or, where it is not set, free space there: then the "
                "limit is 90 % of what was free on the drive, shared by the ranks"
            )
        except OSError as error:
            why = f"the swap file cannot grow beyond {file.size_bytes} bytes ({error.strerror})"
            repair = repair_of(error)
        self.full = True
        logger.warning("%s: %s; what does not fit stays in memory. %s", file.directory, why, repair)

    def fail(self, what: str, failure: BaseException) -> None:
        """Take no more tensors for as long as the engine lives; say once what has happened, and why.

        As text: a log that keeps the error would keep its frames, and the tensors in them.
        """
        if self.failure is not None:
            return
        self.failure = str(failure) or type(failure).__name__  # Python's own lack of memory has no words
        logger.warning(
            "%s: %s (%s); from here on activations stay in memory instead", self.file.directory, what, self.failure
        )


# ---- the file --------------------------------------------------------------------------------------------------------


class SwapFile:
    """An anonymous file in a directory.

    Raises:
        PathError: the file cannot be made there.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory = directory
        self.limit_bytes = limit_bytes  # the size it never passes
        self.size_bytes = self.largest_bytes = 0  # now, and at most so far
        self._use = threading.Lock()  # held for each call, or closing would give the number to another file under it
        self.fd = -1
        self.open()
        # A child that outlives this process would keep the disk space of a file that it does not use.
        os.register_at_fork(after_in_child=partial(_close_if_alive, weakref.ref(self)))

    def open(self) -> None:
        """Make the file anew, after :meth:`close`.

        Raises:
            PathError: it cannot be made.
        """
        try:
            self.fd = self._open()
            _write_in_place(self.fd)
        except OSError as error:
            self._close()
            raise self._error("make a swap file", error) from error

    def reserve_first(self, least_bytes: int) -> None:
        """Reserve the first step before training, so that a full disk shows now.

        Raises:
            PathError: there is no room for ``least_bytes``.
        """
        try:
            self.grow(min(least_bytes, self.limit_bytes))
        except OSError as error:
            raise self._error(f"reserve {least_bytes} bytes", error) from error

    def _error(self, verb: str, error: OSError) -> PathError:
        return PathError(
            f"nvme_path {self.directory}: cannot {verb} there ({error.strerror}). {repair_of(error)}, or name another "
            "directory."
        )

    def grow(self, least_bytes: int) -> bool:
        """Reserve disk blocks for at least ``least_bytes`` more; False beyond the limit, or once it is closed.

        Raises:
            OSError: the file system has no room (or no quota) for it; what was reserved on the way is given back.
        """
        with self._use:
            if self.fd < 0 or self.size_bytes + least_bytes > self.limit_bytes:
                return False
            step = min(max(least_bytes, GROW_STEP_BYTES), self.limit_bytes - self.size_bytes)
            try:
                self._reserve(step)
            except OSError:
                if step == least_bytes:
                    raise
                self._reserve(least_bytes)
            return True

    def close(self) -> None:
        """Close the file and give its space back, also where somebody else still has it open. Idempotent."""
        with self._use:
            if self.fd >= 0:
                with suppress(OSError):  # the kernel gives it back with the last descriptor
                    os.ftruncate(self.fd, 0)
                self._close()
                self.size_bytes = 0

    def _close(self) -> None:  # without giving the space back: a forked child may not take it from its parent
        fd, self.fd = self.fd, -1  # before it is closed: the number may be another file's as soon as it is
        if fd >= 0:
            with suppress(OSError):  # of a drive that has failed; the descriptor is gone all the same
                os.close(fd)

    def _reserve(self, nbytes: int) -> None:
        try:
            os.posix_fallocate(self.fd, self.size_bytes, nbytes)
        except OSError:
            os.ftruncate(self.fd, self.size_bytes)  # a failed fallocate leaves its partial allocation
            raise
        self.size_bytes += nbytes
        self.largest_bytes = max(self.largest_bytes, self.size_bytes)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT
        try:
            return os.open(self.directory, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
        # With a name for a moment; opened by it only once, because a link may replace it.
        name = self.directory / f".ds_tba-{secrets.token_hex(16)}"
        try:
            return os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        finally:
            name.unlink(missing_ok=True)  # there also where the kernel made it and then refused O_DIRECT


def repair_of(error: OSError) -> str:
    """Say what to do where a swap file could not be made or grow."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "Raise the limit of open files (ulimit -n)"
    if error.errno == errno.EFBIG:
        return "Raise the limit of file sizes (ulimit -f), or lower io.swap_file_bytes"
    if error.errno in _NO_ROOM:
        return "Free space there (or inodes: df -i), or raise the quota"
    if error.errno in _NO_CALL:
        return "Its file system lacks O_DIRECT or fallocate(2): mount one that has them, such as ext4 or xfs"
    return "Check its permissions and mount options"


def _close_if_alive(file: weakref.ref[SwapFile]) -> None:
    alive = file()
    if alive is not None:
        alive._close()


def _write_in_place(fd: int) -> None:
    """Have a file system that would copy on write (btrfs) overwrite reserved blocks instead, as others do.

    Else every rewrite needs new room, so that it can fail for want of it, which DeepSpeed's op would not tell.
    """
    with suppress(OSError):  # a file system without such flags
        (flags,) = struct.unpack("i", fcntl.ioctl(fd, _GET_FLAGS, struct.pack("i", 0)))
        fcntl.ioctl(fd, _SET_FLAGS, struct.pack("i", flags | _NOCOW))


# ---- the directory ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SwapDirectory:
    """A directory that passed every check."""

    path: Path
    file_system: str
    free_bytes: int


def check_directories(
    paths: tuple[str, ...], needed_bytes: int, ranks_on_node: int, lower: str = ""
) -> list[SwapDirectory]:
    """Check every directory of ``nvme_path``; their paths come back absolute, ``~`` and variables replaced.

    Args:
        needed_bytes: room that each rank must find in each directory.
        ranks_on_node: ranks that share the directories of this machine.
        lower: advice for who needs less, with a comma at its end.

    Raises:
        PathError: naming the directory, the rule, the numbers and the repair.
    """
    directories: list[SwapDirectory] = []
    seen: dict[Path, Path] = {}
    for path in paths:
        try:
            directory = _check(expanded(path), needed_bytes, ranks_on_node, lower)
        except OSError as error:
            raise PathError(
                f"nvme_path {path} cannot be examined ({error.strerror}): check it and its parents."
            ) from error
        directories.append(directory)
        other = seen.setdefault(directory.path.resolve(), directory.path)
        if other is not directory.path:
            raise PathError(f"nvme_path names {other} and {directory.path}, which are one directory: list it once.")
    return directories


def _check(path: Path, needed_bytes: int, ranks_on_node: int, lower: str) -> SwapDirectory:
    if not path.exists():
        raise PathError(
            f"nvme_path {path} does not exist: create it (mkdir -p {path}) or name another directory. Several "
            "directories are a list; a variable stays as it is where this rank's environment lacks it."
        )
    if not path.is_dir():
        raise PathError(f"nvme_path {path} is a file: name a directory on an NVMe drive.")
    file_system = file_system_of(path)
    if file_system in MEMORY_FILE_SYSTEMS:
        raise PathError(
            f"nvme_path {path} is on {file_system}, which is memory: activations would not leave RAM. "
            "Name a directory on an NVMe drive."
        )
    usage = os.statvfs(path)
    if not os.access(path, os.W_OK | os.X_OK):
        is_read_only = usage.f_flag & os.ST_RDONLY  # a drive that reported errors is remounted so
        repair = f"mount its {file_system} for writing, after a look into dmesg," if is_read_only else "chown it"
        raise PathError(f"nvme_path {path} is not writable by user {os.geteuid()}: {repair} or name another directory.")
    free_bytes = usage.f_bavail * usage.f_frsize
    if free_bytes < needed_bytes * ranks_on_node:
        numbers = (free_bytes, needed_bytes, needed_bytes * ranks_on_node - free_bytes)
        free, needed, missing = (f"{readable(nbytes)} ({nbytes} bytes)" for nbytes in numbers)
        raise PathError(
            f"nvme_path {path} has {free} free, but {ranks_on_node} rank(s) on this machine need {needed} each: free "
            f"{missing}, {lower}or name another directory."
        )
    return SwapDirectory(path, file_system, free_bytes)


def file_system_of(path: Path) -> str:
    """Return the type of a path's file system by its number in statfs(2); ``"unknown"`` where that says nothing."""
    answer = (ctypes.c_long * 64)()  # more than it fills; the number comes first
    refused = ctypes.CDLL(None).statfs(os.fsencode(path), answer)
    return "unknown" if refused else _FILE_SYSTEMS.get(answer[0] & 0xFFFFFFFF, "unknown")
