from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_tba.telemetry.wear import drive_of, path_wear


def test_life_is_rated_endurance_over_the_measured_rate(tmp_path: Path) -> None:
    wear = path_wear(tmp_path, written_bytes=10**12, elapsed_s=43200.0, rated_endurance_tbw=600)
    assert wear.written_bytes_per_day == pytest.approx(2e12) and wear.life_days == pytest.approx(300)


@pytest.mark.parametrize(("written", "elapsed_s", "rated"), [(0, 10.0, 600.0), (10, 0.0, 600.0), (10, 10.0, None)])
def test_life_is_unknown_without_a_rating_or_a_write(
    tmp_path: Path, written: int, elapsed_s: float, rated: float | None
) -> None:
    assert path_wear(tmp_path, written, elapsed_s, rated).life_days is None


def test_the_drive_behind_a_partition_is_named(tmp_path: Path) -> None:
    number = os.stat(tmp_path).st_dev
    drive = tmp_path / "devices" / "nvme0n1"
    (drive / "nvme0n1p2").mkdir(parents=True)
    (drive / "nvme0n1p2" / "partition").touch()
    (drive / "device").mkdir()
    (drive / "device" / "model").write_text("Example 990 PRO  \n")
    (tmp_path / "dev" / "block").mkdir(parents=True)
    (tmp_path / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}").symlink_to(drive / "nvme0n1p2")
    assert drive_of(tmp_path, tmp_path) == ("nvme0n1", "Example 990 PRO")


def test_an_unknown_drive_is_no_error(tmp_path: Path) -> None:
    assert drive_of(tmp_path, tmp_path) == ("", "")
    assert drive_of(tmp_path / "missing") == ("", "")
