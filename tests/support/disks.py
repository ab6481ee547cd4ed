"""Small file systems of their own on loop devices, which can fill, fail, freeze and go away. Root only (a mount)."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

MIB = 1 << 20
EXT4 = ("mkfs.ext4", "-q", "-m", "0", "-b", "4096")
PATIENCE_S = 30.0

# linux/loop.h: two requests, and the place of lo_sizelimit in struct loop_info64.
_LOOP_SET_STATUS64, _LOOP_GET_STATUS64 = 0x4C04, 0x4C05
_LOOP_INFO_BYTES, _SIZE_LIMIT_AT = 232, 32


class Disk:
    """A mounted file system on a loop device."""

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        self.device = device

    @property
    def free_bytes(self) -> int:
        """Bytes that a user who is not root may still take."""
        usage = os.statvfs(self.path)
        return usage.f_bavail * usage.f_frsize

    def break_beyond(self, nbytes: int) -> None:
        """Every request beyond the first ``nbytes`` of the device now fails with EIO, until :meth:`repair`."""
        info = bytearray(_LOOP_INFO_BYTES)
        fd = os.open(self.device, os.O_RDWR)
        try:
            fcntl.ioctl(fd, _LOOP_GET_STATUS64, info)
            struct.pack_into("Q", info, _SIZE_LIMIT_AT, nbytes)
            fcntl.ioctl(fd, _LOOP_SET_STATUS64, info)
        finally:
            os.close(fd)

    def repair(self) -> None:
        """The whole device works again; what was written to it before it broke is there."""
        self.break_beyond(0)  # no limit

    def freeze(self) -> None:
        """Writes now wait, until :meth:`thaw`."""
        run("fsfreeze", "-f", str(self.path))

    def thaw(self) -> None:
        run("fsfreeze", "-u", str(self.path))

    def unmount_lazily(self) -> None:
        """Take the name away at once; the file system lives until the last file in it is closed."""
        run("umount", "-l", str(self.path))

    def is_empty(self, free_bytes: int) -> bool:
        """Return whether it holds no file, and has as much free as given."""
        run("sync", "-f", str(self.path))  # btrfs gives space back when it commits
        return self.free_bytes >= free_bytes and not [one for one in self.path.iterdir() if one.name != "lost+found"]

    @property
    def is_attached(self) -> bool:
        """Return whether the device still serves an image, which it does until its file system is gone."""
        return subprocess.run(["losetup", self.device], capture_output=True).returncode == 0


def run(*argv: str) -> str:
    """A command's standard output.

    Raises:
        OSError, subprocess.CalledProcessError: it is not there, or failed.
    """
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that must come, however loaded the machine is."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.001)


@contextmanager
def mounted(directory: Path, nbytes: int, *mkfs: str) -> Iterator[Disk]:
    """A new file system of ``nbytes`` in a file of ``directory``; gone afterwards, whatever happened to it.

    Args:
        mkfs: the command that makes it, without the file; ext4 where it is left out.
    """
    image, mount_point = directory / "image", directory / "disk"
    mount_point.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(nbytes)
    try:
        run(*(mkfs or EXT4), str(image))
        run("mount", "-o", "loop", str(image), str(mount_point))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no loop mount here: {getattr(error, 'stderr', None) or error}")
    disk = Disk(mount_point, run("findmnt", "-no", "SOURCE", str(mount_point)).strip())
    try:
        yield disk
    finally:
        _remove(disk)
        image.unlink()


@contextmanager
def limited(disk: Disk, quota: str) -> Iterator[Path]:
    """A directory of a btrfs that may hold so much, as btrfs writes it; deleted afterwards."""
    directory = disk.path / "job"
    run("btrfs", "subvolume", "create", str(directory))
    run("btrfs", "qgroup", "limit", quota, str(directory))
    yield directory
    run("btrfs", "subvolume", "delete", "-c", str(directory))


def _remove(disk: Disk) -> None:
    with suppress(OSError, subprocess.CalledProcessError):
        disk.thaw()
    with suppress(OSError):
        disk.repair()
    deadline = time.monotonic() + PATIENCE_S
    while os.path.ismount(disk.path) and time.monotonic() < deadline:
        with suppress(subprocess.CalledProcessError):
            run("umount", str(disk.path))
            return
        time.sleep(0.05)
    if os.path.ismount(disk.path):
        disk.unmount_lazily()
        pytest.fail(f"{disk.path} was still in use; it is unmounted as soon as it is not")
