from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_tba.errors import PathError
from ds_tba.storage.swap_file import check_directories, file_system_of


def refusal(*paths: object, needed_bytes: int = 1, ranks: int = 1) -> str:
    with pytest.raises(PathError) as caught:
        check_directories(tuple(map(str, paths)), needed_bytes, ranks)
    return str(caught.value)


def test_a_good_directory_is_described(tmp_path: Path) -> None:
    (directory,) = check_directories((str(tmp_path),), 1, 1)
    assert directory.path == tmp_path and directory.free_bytes > 0 and directory.file_system != "unknown"


def test_missing(tmp_path: Path) -> None:
    assert f"{tmp_path}/none does not exist: create it (mkdir -p" in refusal(tmp_path / "none")


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is a file" in refusal(tmp_path / "file")


def test_tmpfs() -> None:
    if file_system_of(Path("/dev/shm")) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    assert "tmpfs, which is memory" in refusal("/dev/shm")


def test_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # root may write anywhere, so the kernel's answer is put in its place
        monkeypatch.setattr(os, "access", lambda *_: False)
    tmp_path.chmod(0o500)
    assert "not writable by user" in refusal(tmp_path)


def test_without_room_says_the_numbers(tmp_path: Path) -> None:
    message = refusal(tmp_path, needed_bytes=1 << 50, ranks=2)
    assert "2 rank(s)" in message and str(1 << 50) in message and "io.swap_file_bytes" in message


def test_one_directory_twice(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert "list it once" in refusal(tmp_path, tmp_path / "link")
