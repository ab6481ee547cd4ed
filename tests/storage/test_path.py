"""A directory, its swap file and its lanes."""

from __future__ import annotations

import errno
import os
import queue
import resource
import stat
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from conftest import Alarm, AlarmError
from support.disks import MIB, mounted, until
from support.doubles import raising
from support.machines import run_python

from ds_tba.device.accelerator import Accelerator
from ds_tba.errors import PathError
from ds_tba.storage import path as swap_file
from ds_tba.storage.backends import PosixBackend
from ds_tba.storage.path import SwapFile, SwapPath


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SwapFile]:
    with closing(SwapFile(tmp_path, 64 * MIB)) as file:
        yield file


# Python ignores what comes in a finalizer of its own, such as that of a thread in ``threading``'s set of them.
@pytest.mark.filterwarnings("ignore:(?s).*AlarmError:pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_leaves_lanes_at_work(alarm: Alarm, file: SwapFile) -> None:
    lanes, done = SwapPath(file, 1, 1).writes, queue.SimpleQueue[int]()

    def put_until_it_comes(seconds: float) -> None:
        """In a function: what a handler raises in a loop passes the ``with`` around that loop in Python 3.13.0."""
        alarm(seconds)
        while not alarm.has_come:
            lanes.put(lambda _: None)

    lanes.open(PosixBackend(), file.fd)
    lanes.start("lane", Accelerator())
    try:
        for number in range(1000):
            with suppress(AlarmError):
                put_until_it_comes(20e-6 + number % 50 * 1e-6)
            lanes.put(lambda _, number=number: done.put(number))
            assert done.get(timeout=10) == number, f"after {number + 1} interrupts"
    finally:
        lanes.stop()
    assert lanes.end(time.monotonic() + 10.0)


# ---- the swap file --------------------------------------------------------------------------------------------------


def test_it_has_no_name_and_is_private(file: SwapFile) -> None:
    assert list(file.directory.iterdir()) == []
    assert stat.S_IMODE(os.fstat(file.fd).st_mode) == 0o600
    file.close()  # and by the fixture once more


def test_it_grows_in_steps_up_to_its_limit(file: SwapFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_file, "GROW_STEP_BYTES", 40 * MIB)
    assert file.grow(4096) and file.size_bytes == 40 * MIB
    assert os.fstat(file.fd).st_blocks * 512 >= 40 * MIB
    assert file.grow(20 * MIB) and file.size_bytes == 64 * MIB
    assert not file.grow(4096)


def test_a_failed_step_gives_its_part_back(file: SwapFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def partial(fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, offset + length // 2)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", partial)
    with pytest.raises(OSError, match="No space"):
        file.grow(1 << 20)
    assert os.fstat(file.fd).st_size == 0 == file.size_bytes
    with pytest.raises(PathError, match=r"cannot reserve 4096 bytes there \(No space"):
        file.reserve_first(4096)


def test_without_o_tmpfile_nobody_can_put_a_link_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who may write into the directory swaps the file for a link whenever it is opened by its name."""
    directory, precious, real = tmp_path / "nvme", tmp_path / "precious", os.open
    directory.mkdir()
    precious.touch()

    def with_an_attacker(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        if str(path).startswith(str(directory)):
            Path(path).unlink(missing_ok=True)
            if not flags & os.O_EXCL:
                Path(path).symlink_to(precious)
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", with_an_attacker)
    with closing(SwapFile(directory, MIB)) as file:
        assert not os.path.samestat(os.fstat(file.fd), precious.stat())


def test_a_file_that_cannot_be_opened_leaves_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without O_DIRECT a file system makes the file, and then refuses to open it."""
    real = os.open

    def without_o_direct(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        fd = real(path, flags, *rest)
        if flags & os.O_DIRECT:
            os.close(fd)
            raise OSError(22, "Invalid argument")
        return fd

    monkeypatch.setattr(os, "open", without_o_direct)
    with pytest.raises(PathError, match=r"cannot make a swap file there \(Invalid argument\)\. .* lacks O_DIRECT or"):
        SwapFile(tmp_path, MIB)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_does_not_hold_the_room_after_close(file: SwapFile) -> None:
    """Even one that kept its descriptor, as where a library forks in its own way."""
    file.reserve_first(64 * MIB)
    kept = os.dup(file.fd)
    file.close()
    assert os.fstat(kept).st_blocks == 0
    os.close(kept)


def test_a_forked_child_closes_its_descriptor(file: SwapFile) -> None:
    """So that it does not hold the room of a parent that was killed."""
    SwapFile(file.directory, MIB).close()  # what was closed before is no child's business
    place = f"/proc/self/fd/{file.fd}"
    child = os.fork()
    if child == 0:
        os._exit(os.path.exists(place) or file.fd != -1)
    assert os.waitpid(child, 0)[1] == 0 and os.path.exists(place)
    assert file.grow(4096)


def test_a_drive_that_has_failed_keeps_nobody_from_closing(file: SwapFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that was remounted read-only refuses to cut the file; a network's tells late errors at close."""
    file.grow(4096)
    close, refused = os.close, raising(OSError(errno.EROFS, os.strerror(errno.EROFS)))

    def late(fd: int) -> None:
        close(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(os, "ftruncate", refused)
        failing.setattr(os, "close", late)
        file.close()
    assert file.fd == -1


# ---- file systems and limits as machines have them ------------------------------------------------------------------


def test_a_file_system_without_fallocate_is_refused(tmp_path: Path) -> None:
    with mounted(tmp_path / "loop", 64 * MIB, "mkfs.ext3", "-q", "-m", "0", "-b", "4096") as disk:
        before = disk.free_bytes
        with closing(SwapFile(disk.path, before)) as file:
            with pytest.raises(PathError, match=r"cannot reserve 8388608 bytes there .* lacks O_DIRECT or fallocate"):
                file.reserve_first(8 * MIB)
            assert os.fstat(file.fd).st_size == file.size_bytes == 0
        until(lambda: disk.is_empty(before), "the space comes back")


def test_a_limit_of_file_sizes_is_named(file: SwapFile, caplog: pytest.LogCaptureFixture) -> None:
    path = SwapPath(file, 1, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB + 1024, before[1]))
    try:
        path.grow(4 * MIB)
        assert file.size_bytes >= 4 * MIB and not path.full
        path.grow(16 * MIB)
        assert path.full
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (said,) = caplog.messages
    assert "cannot grow" in said and "ulimit -f" in said and "quota" not in said


def test_memory_is_told_from_drives_whatever_its_name(tmp_path: Path) -> None:
    program = f"""
import os
from pathlib import Path
from ds_tba.errors import PathError
from ds_tba.storage.path import check_directories, file_system_of
path = {str(tmp_path)!r} + os.fsdecode(b"/caf\\xe9")
print(file_system_of(Path(path)), file_system_of(Path({str(tmp_path)!r})))
try:
    check_directories((path,), 1, 1)
except PathError as error:
    print("which is memory" in str(error))
"""
    done = run_python(program, own_mounts=True, setup=f"cd '{tmp_path}'\nmkdir $'caf\\xe9'\nmount -t tmpfs none caf*")
    kinds, said = done.stdout.splitlines()
    assert kinds.split()[0] == "tmpfs" != kinds.split()[1] and said == "True", done.stderr
