"""Where do bytes lie on a drive, and can they? One swap file per directory: without a name on disk, readable by this
process alone, grown in steps, reclaimed by the kernel. And the checks of a directory, before training and with numbers.

[Note: Reserving] Blocks are reserved before bytes go there, so that a full drive shows where it can be answered: an op
that tells no errors would lose them. A file system without O_DIRECT or fallocate(2) is refused at the start: the page
cache would take the memory that offloading is to free. (Where there is no fallocate(2), as on ext3, glibc writes single
bytes in its place, which O_DIRECT refuses.)

Cannot see what a drive does with the blocks: a file system may say that there is room and fail a write all the same.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import struct
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ds_tba.errors import PathError
from ds_tba.stats import expanded, readable

GROW_STEP_BYTES = 1 << 30
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# linux/fs.h: FS_IOC_GETFLAGS, FS_IOC_SETFLAGS (their size field says long, their argument is an int), FS_NOCOW_FL.
_GET_FLAGS, _SET_FLAGS, _NOCOW = 0x80086601, 0x40086602, 0x00800000
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
_NO_CALL = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class SwapFile:
    """An anonymous file in a directory.

    Args:
        directory: where it lives.
        limit_bytes: the size it never passes.

    Raises:
        PathError: the file cannot be made there.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory = directory
        self.limit_bytes = limit_bytes
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


MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


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
    directories = [_checked(path, needed_bytes, ranks_on_node, lower) for path in map(expanded, paths)]
    seen: dict[Path, Path] = {}
    for directory in directories:
        other = seen.setdefault(directory.path.resolve(), directory.path)
        if other is not directory.path:
            raise PathError(f"nvme_path names {other} and {directory.path}, which are one directory: list it once.")
    return directories


def _checked(path: Path, needed_bytes: int, ranks_on_node: int, lower: str) -> SwapDirectory:
    try:
        return _check(path, needed_bytes, ranks_on_node, lower)
    except OSError as error:
        raise PathError(f"nvme_path {path} cannot be examined ({error.strerror}): check it and its parents.") from error


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
    """Return the type of a path's file system, by the kernel's number for its mount; ``"unknown"`` where it tells none.

    By the number, because of two mounts with one name only the later one is seen.
    """
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            told = Path(f"/proc/self/fdinfo/{fd}").read_bytes()
        finally:
            os.close(fd)
        mounts = Path("/proc/self/mountinfo").read_bytes()
    except OSError:
        return "unknown"
    number = re.search(rb"^mnt_id:\s*(\d+)", told, re.MULTILINE)
    mount = number and re.search(rb"^%b .*? - (\S+)" % number[1], mounts, re.MULTILINE)
    return os.fsdecode(mount[1]) if mount else "unknown"
