from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ds_tba.errors import PathError
from ds_tba.storage import swap_file
from ds_tba.storage.swap_file import SwapFile


def test_it_has_no_name_and_is_private(tmp_path: Path) -> None:
    file = SwapFile(tmp_path, 1 << 20)
    assert list(tmp_path.iterdir()) == []
    assert stat.S_IMODE(os.fstat(file.fd).st_mode) == 0o600
    assert os.path.samestat(os.stat(file.name), os.fstat(file.fd))
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


def test_a_directory_that_takes_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PathError, match="cannot make a swap file"):
        SwapFile(Path("/proc"), 1 << 20)


def test_too_many_open_files_names_the_limit_to_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", no_descriptor)
    with pytest.raises(PathError, match=r"Too many open files.*ulimit -n"):
        SwapFile(tmp_path, 1 << 20)
