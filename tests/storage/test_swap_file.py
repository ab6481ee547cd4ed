from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from test_store import until

from ds_tba.errors import PathError
from ds_tba.storage import swap_file
from ds_tba.storage.swap_file import SwapFile


def test_it_has_no_name_and_is_private(tmp_path: Path) -> None:
    file = SwapFile(tmp_path, 1 << 20)
    assert list(tmp_path.iterdir()) == []
    assert stat.S_IMODE(os.fstat(file.fd).st_mode) == 0o600
    assert os.path.samestat(os.stat(f"/proc/self/fd/{file.fd}"), os.fstat(file.fd))
    file.close()
    file.close()


def test_it_grows_in_steps_up_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_file, "GROW_STEP_BYTES", 1 << 20)
    file = SwapFile(tmp_path, 5 << 19)
    assert file.grow(4096) and file.size_bytes == 1 << 20
    assert os.fstat(file.fd).st_blocks * 512 >= 1 << 20
    assert file.grow(3 << 19) and file.size_bytes == 5 << 19
    assert not file.grow(4096)
    file.close()


def test_a_failed_step_gives_its_part_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SwapFile(tmp_path, 1 << 60)

    def partial(fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, offset + length // 2 if length < 1 << 30 else offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", partial)
    with pytest.raises(OSError, match="No space"):
        file.grow(1 << 20)
    assert os.fstat(file.fd).st_size == 0 == file.size_bytes
    with pytest.raises(PathError, match="cannot reserve 4096 bytes"):
        file.reserve_first(4096)
    file.close()


def test_without_o_tmpfile_the_name_is_gone_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def without_o_tmpfile(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", without_o_tmpfile)
    file = SwapFile(tmp_path, 1 << 20)
    assert list(tmp_path.iterdir()) == []
    assert file.grow(4096)
    file.close()


def test_without_o_tmpfile_nobody_can_put_a_link_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who may write into the directory swaps the file for a link whenever it is opened by its name."""
    directory, precious, real = tmp_path / "nvme", tmp_path / "precious", os.open
    directory.mkdir()
    precious.touch()

    def with_an_attacker(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        if str(path).startswith(str(directory)):
            Path(str(path)).unlink(missing_ok=True)
            if not flags & os.O_EXCL:
                Path(str(path)).symlink_to(precious)
        return real(path, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", with_an_attacker)
    file = SwapFile(directory, 1 << 20)
    assert not os.path.samestat(os.fstat(file.fd), precious.stat())
    file.close()


def test_a_file_that_cannot_be_opened_leaves_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without O_DIRECT a file system makes the file, and then refuses to open it."""
    real = os.open

    def without_o_direct(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        fd = real(path, flags, *rest)  # type: ignore[arg-type]
        if flags & os.O_DIRECT:
            os.close(fd)
            raise OSError(22, "Invalid argument")
        return fd

    monkeypatch.setattr(os, "open", without_o_direct)
    file = SwapFile(tmp_path, 1 << 20)
    assert list(tmp_path.iterdir()) == [] and not file.direct
    file.close()


@contextmanager
def forked_child() -> Iterator[int]:
    """A child that waits, as a worker of a data loader does."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_child_does_not_hold_the_room_after_close(tmp_path: Path) -> None:
    """Even one that kept its descriptor, as where a library forks in its own way."""
    file = SwapFile(tmp_path, 64 << 20)
    file.reserve_first(64 << 20)
    kept = os.dup(file.fd)
    file.close()
    assert os.fstat(kept).st_blocks == 0
    os.close(kept)


def test_a_forked_child_closes_its_descriptor(tmp_path: Path) -> None:
    """So that it does not hold the room of a parent that was killed."""
    file, other = SwapFile(tmp_path, 1 << 20), SwapFile(tmp_path, 1 << 20)
    inode = os.fstat(file.fd).st_ino
    other.close()
    with forked_child() as child:
        until(lambda: inode not in inodes_of(child), "the child to close it")
        assert inode in inodes_of(os.getpid())
    assert file.grow(4096)
    file.close()


def inodes_of(process: int) -> set[int]:
    return {found.st_ino for found in map(stat_or_none, Path(f"/proc/{process}/fd").iterdir()) if found is not None}


def stat_or_none(path: Path) -> os.stat_result | None:
    with suppress(FileNotFoundError):  # the one with which the directory was read
        return path.stat()
    return None


def test_a_directory_that_takes_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PathError, match="cannot make a swap file"):
        SwapFile(Path("/proc"), 1 << 20)


def test_too_many_open_files_names_the_limit_to_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", no_descriptor)
    with pytest.raises(PathError, match=r"Too many open files.*ulimit -n"):
        SwapFile(tmp_path, 1 << 20)
