"""Where do bytes lie on a drive, and can they? One swap file per directory: without a name on disk, readable by this
process alone, grown in steps, reclaimed by the kernel. And the checks of a directory, before training and with numbers.

Cannot see what a drive does with the blocks: a file system may say that there is room and fail a write all the same.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import struct
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ds_tba.errors import PathError
from ds_tba.telemetry.stats import expanded, readable

GROW_STEP_BYTES = 1 << 30
# linux/fs.h: FS_IOC_GETFLAGS, FS_IOC_SETFLAGS (their size field says long, their argument is an int), FS_NOCOW_FL.
_GET_FLAGS, _SET_FLAGS, _NOCOW = 0x80086601, 0x40086602, 0x00800000
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


class SwapFile:
    """An anonymous file in a directory.

    Args:
        directory: where it lives.
        limit_bytes: the size it never passes.
        is_limit_set: whether io.swap_file_bytes says so; else it follows from the free space.

    Raises:
        PathError: the file cannot be made there.
    """

    def __init__(self, directory: Path, limit_bytes: int, *, is_limit_set: bool = False) -> None:
        self.directory = directory
        self.limit_bytes = limit_bytes
        self.is_limit_set = is_limit_set
        self.size_bytes = 0
        self.direct = True
        self.fd = -1
        try:
            self.fd = self._open()
            _write_in_place(self.fd)
        except OSError as error:
            self._close()
            repair = (
                "Raise the limit of open files (ulimit -n)"
                if error.errno in (errno.EMFILE, errno.ENFILE)
                else "Check its permissions and mount options, or name another directory"
            )
            raise PathError(
                f"nvme_path {directory}: cannot make a swap file there ({error.strerror}). {repair}."
            ) from error
        # A child that outlives this process would keep the disk space of a file that it does not use.
        os.register_at_fork(after_in_child=partial(_close_if_alive, weakref.ref(self)))

    def reserve_first(self, least_bytes: int) -> None:
        """Reserve the first step before training, so that a full disk shows now.

        Raises:
            PathError: there is no room for ``least_bytes``.
        """
        try:
            self.grow(min(least_bytes, self.limit_bytes))
        except OSError as error:
            raise PathError(
                f"nvme_path {self.directory}: cannot reserve {least_bytes} bytes there ({error.strerror}). Free space, "
                "raise the quota where there is one, or name another directory."
            ) from error

    def grow(self, least_bytes: int) -> bool:
        """Reserve disk blocks for at least ``least_bytes`` more; False where the limit does not allow it.

        Raises:
            OSError: the file system has no room (or no quota) for it; what was reserved on the way is given back.
        """
        if self.size_bytes + least_bytes > self.limit_bytes:
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
        if self.fd >= 0:
            with suppress(OSError):  # the kernel gives it back with the last descriptor
                os.ftruncate(self.fd, 0)
            self._close()

    def _close(self) -> None:  # without giving the space back: a forked child may not take it from its parent
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _reserve(self, step_bytes: int) -> None:
        try:
            os.posix_fallocate(self.fd, self.size_bytes, step_bytes)
        except OSError:
            os.ftruncate(self.fd, self.size_bytes)  # a failed fallocate leaves its partial allocation
            raise
        self.size_bytes += step_bytes

    def _open(self) -> int:
        try:
            return self._open_anonymous(os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self.direct = False  # the file system has no O_DIRECT
        return self._open_anonymous(0)

    def _open_anonymous(self, flags: int) -> int:
        flags |= os.O_RDWR | os.O_CLOEXEC
        try:
            return os.open(self.directory, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        return self._open_and_unlink(flags)

    def _open_and_unlink(self, flags: int) -> int:
        """Without O_TMPFILE on this file system: a name for a moment, opened once because a link may replace it."""
        name = self.directory / f".ds_tba-{secrets.token_hex(16)}"
        try:
            return os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        finally:
            name.unlink(missing_ok=True)  # there also where the kernel made it and then refused O_DIRECT


def _close_if_alive(file: weakref.ref[SwapFile]) -> None:
    alive = file()
    if alive is not None:
        alive._close()


def _write_in_place(fd: int) -> None:
    """Where a file system would copy on write (btrfs), have it overwrite reserved blocks instead, as others do.

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
    directories = [_checked(path, needed_bytes, ranks_on_node, lower) for path in paths]
    seen: dict[Path, Path] = {}
    for directory in directories:
        other = seen.setdefault(directory.path.resolve(), directory.path)
        if other is not directory.path:
            raise PathError(f"nvme_path names {other} and {directory.path}, which are one directory: list it once.")
    return directories


def _checked(name: str, needed_bytes: int, ranks_on_node: int, lower: str) -> SwapDirectory:
    path = expanded(name)
    try:
        return _check(path, needed_bytes, ranks_on_node, lower)
    except PathError as error:
        unset = re.findall(r"\$\{?(\w+)", str(path))
        if unset and not path.exists():
            raise PathError(
                f"nvme_path {name}: the environment variable {unset[0]} is not set in this process: set it for every "
                "rank, or write the directory out."
            ) from error
        raise
    except OSError as error:
        raise PathError(f"nvme_path {path} cannot be examined ({error.strerror}): check it and its parents.") from error


def _check(path: Path, needed_bytes: int, ranks_on_node: int, lower: str) -> SwapDirectory:
    if not path.exists() and "," in str(path):
        parts = json.dumps([part.strip() for part in str(path).split(",")])
        raise PathError(f"nvme_path {path} does not exist: several directories are a list, {parts}.")
    if not path.exists():
        raise PathError(f"nvme_path {path} does not exist: create it (mkdir -p {path}) or name another directory.")
    if not path.is_dir():
        raise PathError(f"nvme_path {path} is a file: name a directory on an NVMe drive.")
    file_system = file_system_of(path)
    if file_system in MEMORY_FILE_SYSTEMS:
        raise PathError(
            f"nvme_path {path} is on {file_system}, which is memory: activations would not leave RAM. "
            "Name a directory on an NVMe drive."
        )
    usage = os.statvfs(path)
    if usage.f_flag & os.ST_RDONLY:
        raise PathError(
            f"nvme_path {path} is on a read-only mount ({file_system}): mount it for writing (a drive that reported "
            "errors is remounted read-only; see dmesg), or name another directory."
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise PathError(f"nvme_path {path} is not writable by user {os.geteuid()}: chown it or name another directory.")
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
    """The file system type of a path, from ``/proc/self/mountinfo``; ``"unknown"`` where that cannot be read."""
    resolved = str(path.resolve())
    best, kind = "", "unknown"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        fields, _, rest = line.partition(" - ")
        mount_point = fields.split()[4].encode().decode("unicode_escape")
        inside = resolved == mount_point or resolved.startswith(mount_point.rstrip("/") + "/")
        if inside and len(mount_point) >= len(best):
            best, kind = mount_point, rest.split()[0]
    return kind
