from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.disks import Disk, run

from ds_tba.errors import PathError
from ds_tba.report import checked_path
from ds_tba.storage.path import check_directories, file_system_of


def refusal(*paths: object) -> str:
    with pytest.raises(PathError) as caught:
        check_directories(tuple(map(str, paths)), 1, 1)
    return str(caught.value)


def test_what_is_no_directory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SCRATCH_OF_JOB", raising=False)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    assert f"nvme_path {tmp_path}/none does not exist: create it (mkdir -p" in refusal("none")
    assert "Several directories are a list" in refusal(f"{tmp_path}, /b")
    assert "is a file" in refusal(tmp_path / "file")
    assert "list it once" in refusal(tmp_path, tmp_path / "link")
    assert "a variable stays as it is where this rank's environment lacks it" in refusal("$SCRATCH_OF_JOB/swap")


def test_tmpfs() -> None:
    if file_system_of(Path("/dev/shm")) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    assert "tmpfs, which is memory" in refusal("/dev/shm")


def test_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # root may write anywhere, so the kernel's answer is put in its place
        monkeypatch.setattr(os, "access", lambda *_: False)
    tmp_path.chmod(0o500)
    assert "not writable by user" in refusal(tmp_path)


def test_a_read_only_mount(disk: Disk) -> None:
    run("mount", "-o", "remount,ro", str(disk.path))
    try:
        message = refusal(disk.path)
    finally:
        run("mount", "-o", "remount,rw", str(disk.path))
    assert "not writable" in message and "mount its ext4 for writing" in message and "chown" not in message


def test_environment_variables_and_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("swap", "$weird"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCRATCH_OF_JOB", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("$SCRATCH_OF_JOB/swap", "${SCRATCH_OF_JOB}/swap", "~/swap", "$HOME/swap", "swap"):
        (directory,) = check_directories((name,), 1, 1)
        assert directory.path == tmp_path / "swap"
        assert directory.free_bytes > 0 and directory.file_system != "unknown"
    assert check_directories(("$weird",), 1, 1)[0].path == tmp_path / "$weird"
    assert checked_path("report.path", "$SCRATCH_OF_JOB/report.json", 1) == tmp_path / "report.json.rank1"
