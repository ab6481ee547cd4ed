"""One swap file: without a name on disk, readable by this process alone, grown in steps, reclaimed by the kernel."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import tempfile
from contextlib import suppress
from pathlib import Path

from ds_tba.errors import PathError

GROW_STEP_BYTES = 1 << 30
# linux/fs.h: FS_IOC_GETFLAGS, FS_IOC_SETFLAGS (their size field says long, their argument is an int), FS_NOCOW_FL.
_GET_FLAGS, _SET_FLAGS, _NOCOW = 0x80086601, 0x40086602, 0x00800000
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


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
        self.size_bytes = 0
        self.direct = True
        try:
            self.fd = self._open()
            _write_in_place(self.fd)
        except OSError as error:
            repair = (
                "Raise the limit of open files (ulimit -n)"
                if error.errno in (errno.EMFILE, errno.ENFILE)
                else "Check its permissions and mount options, or name another directory"
            )
            raise PathError(
                f"nvme_path {directory}: cannot make a swap file there ({error.strerror}). {repair}."
            ) from error

    @property
    def name(self) -> str:
        """A path that opens this very file in this process."""
        return f"/proc/self/fd/{self.fd}"

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
                "lower io.swap_file_bytes, or name another directory."
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
        """Close the file, which gives its space back. Idempotent."""
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
        # No O_TMPFILE on this file system: a private name, taken away before the first byte is written.
        fd, name = tempfile.mkstemp(prefix=".ds_tba-", dir=self.directory)
        try:
            os.close(fd)
            return os.open(name, flags)
        finally:
            Path(name).unlink()


def _write_in_place(fd: int) -> None:
    """Where a file system would copy on write (btrfs), have it overwrite reserved blocks instead, as others do.

    Else every rewrite needs new room, so that it can fail for want of it, which DeepSpeed's op would not tell.
    """
    with suppress(OSError):  # a file system without such flags
        (flags,) = struct.unpack("i", fcntl.ioctl(fd, _GET_FLAGS, struct.pack("i", 0)))
        fcntl.ioctl(fd, _SET_FLAGS, struct.pack("i", flags | _NOCOW))
