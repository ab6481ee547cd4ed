from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Cli
from support.offloaders import make, step

from ds_tba import reporting
from ds_tba import wear as drive_module
from ds_tba.plan.agreement import Alone
from ds_tba.report import OffloadReport
from ds_tba.wear import Drive, examine, path_wear, share_a_drive, write_limit_bytes_per_step

HEALTH = {"percentage_used": 7, "data_units_written": 20_000_000}
SMART = {"model_name": "Example 990 PRO", "nvme_smart_health_information_log": HEALTH}


def test_life_is_rated_endurance_over_the_measured_rate(tmp_path: Path) -> None:
    wear = path_wear(tmp_path, Drive(), written_bytes=10**12, elapsed_s=43200.0, rated_endurance_tbw=600)
    assert wear.written_bytes_per_day == pytest.approx(2e12) and wear.life_days == pytest.approx(300) == wear.days()
    shared = path_wear(tmp_path, Drive(), 10**12, 43200.0, 600, sharers=4)
    assert shared.life_days == pytest.approx(75) == shared.days() and shared.written_bytes_per_day == pytest.approx(
        2e12
    )


def test_without_a_rating_days_are_by_smart_data_or_by_an_assumption(tmp_path: Path) -> None:
    assumed = path_wear(tmp_path, Drive(), 10**12, 86400.0, None)
    assert assumed.days() == pytest.approx(600) and str(assumed.rating(None)) == "600 TBW assumed"
    drive = Drive("nvme0n1", percentage_used=10, drive_written_bytes=120 * 10**12)
    worn = path_wear(tmp_path, drive, 10**12, 86400.0, None)
    assert worn.days() == pytest.approx(1080) and str(worn.rating(None)) == "1200 TBW by SMART"
    assert str(worn.rating(70.0)) == "70 TBW" and path_wear(tmp_path, Drive(), 0, 1.0, None).days() == math.inf


@pytest.mark.parametrize(
    ("block", "told", "tbw"),
    [({}, "1200 TBW by SMART", 1200.0), ({"ssd": {"rated_endurance_tbw": 300}}, "300 TBW", 300.0)],
)
def test_the_lines_tell_the_rating_and_the_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: dict[str, Any], told: str, tbw: float
) -> None:
    worn = Drive("nvme0n1", percentage_used=10, drive_written_bytes=120 * 10**12)
    monkeypatch.setattr("ds_tba.storage.tiers.examine", lambda _: worn)
    offloader = make(tmp_path, **block)
    step(offloader, written_first=True)
    offloader.close()
    assert f" on nvme0n1, {told})" in offloader.start_line()
    report = offloader.report()
    days = (tbw - 120) / (report.wear[0]["written_bytes_per_day"] / 1e12)
    assert report.summary().endswith(f" TB a day ({days:.0f} days to {told})")
    assert (report.wear[0]["life_days"] is None) is (not block)


def test_a_worn_drive_has_what_its_rating_leaves_in_reports_plans_and_limits_alike() -> None:
    drive = Drive("nvme0n1", percentage_used=90, drive_written_bytes=540 * 10**12)
    found = path_wear(Path("/a"), drive, 3 * 10**12, 2 * 86400.0, 600.0, 2, before_bytes=10**12)
    assert found.life_days == pytest.approx(60 / 2) == found.days()  # 1 TB a day of each of two ranks
    assert write_limit_bytes_per_step(drive.left_tbw(600.0) / 2, found.life_days, 86400.0) == pytest.approx(1e12)
    gone = path_wear(Path("/a"), Drive("b", drive_written_bytes=700 * 10**12), 10**12, 86400.0, 600.0)
    assert gone.life_days == 0.0 == gone.days()


@pytest.mark.parametrize(("written", "elapsed_s", "rated"), [(0, 10.0, 600.0), (10, 0.0, 600.0), (10, 10.0, None)])
def test_life_is_unknown_without_a_rating_or_a_write(
    tmp_path: Path, written: int, elapsed_s: float, rated: float | None
) -> None:
    assert path_wear(tmp_path, Drive(), written, elapsed_s, rated).life_days is None


# ---- the drive ------------------------------------------------------------------------------------------------------


def test_directories_are_on_one_drive_by_file_system_or_by_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours").mkdir()
    ours, to_be_made, elsewhere = tmp_path / "ours", tmp_path / "zero" / "of a run", Path("/proc")
    assert share_a_drive([ours], [elsewhere, to_be_made])
    assert not share_a_drive([ours], [elsewhere]) and not share_a_drive([ours], []) and not share_a_drive([], [ours])
    monkeypatch.setattr(drive_module, "sysfs_device", lambda path: Path("/sys/nvme0"))  # two partitions of it
    assert share_a_drive([ours], [elsewhere])


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A tree in which ``tmp_path`` is on the second partition of nvme0n1, without a model."""
    number = os.stat(tmp_path).st_dev
    drive = tmp_path / "devices" / "nvme0n1"
    (drive / "nvme0n1p2").mkdir(parents=True)
    (drive / "nvme0n1p2" / "partition").touch()
    (drive / "device").mkdir()
    (drive / "queue").mkdir()
    (tmp_path / "dev" / "block").mkdir(parents=True)
    (tmp_path / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}").symlink_to(drive / "nvme0n1p2")
    return tmp_path


@pytest.fixture(autouse=True)
def no_smartctl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


def smartctl(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Put a program of that name on PATH; it notes its arguments."""
    program = directory / "bin" / "smartctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {directory}/asked\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return directory / "asked"


def test_the_drive_behind_a_partition_is_named(sysfs: Path) -> None:
    (sysfs / "devices" / "nvme0n1" / "device" / "model").write_text("Example 990 PRO  \n")
    assert examine(sysfs, sysfs) == Drive("nvme0n1", "Example 990 PRO")


def test_an_unknown_drive_is_no_error(tmp_path: Path) -> None:
    assert examine(tmp_path, tmp_path) == Drive()
    assert examine(tmp_path / "missing") == Drive()


@pytest.mark.parametrize(("content", "rotational"), [("0\n", False), ("1\n", True), ("", None)])
def test_a_spinning_disk_is_known(sysfs: Path, content: str, rotational: bool | None) -> None:
    (sysfs / "devices" / "nvme0n1" / "queue" / "rotational").write_text(content)
    assert examine(sysfs, sysfs).rotational is rotational


def test_of_a_virtual_drive_nothing_is_believed(sysfs: Path) -> None:
    (sysfs / "devices" / "nvme0n1").rename(sysfs / "devices" / "vda")
    (link,) = (sysfs / "dev" / "block").iterdir()
    link.unlink()
    link.symlink_to(sysfs / "devices" / "vda" / "nvme0n1p2")
    (sysfs / "devices" / "vda" / "queue" / "rotational").write_text("1\n")
    assert examine(sysfs, sysfs) == Drive("vda")


def test_smartctl_tells_model_and_life(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with an exit status that speaks of the drive and not of the question."""
    asked = smartctl(sysfs, monkeypatch, f"echo '{json.dumps(SMART)}'; exit 8")
    expected = Drive("nvme0n1", "Example 990 PRO", None, 7, 20_000_000 * 512_000)
    assert examine(sysfs, sysfs) == expected
    assert asked.read_text() == "-j -a /dev/nvme0n1\n"
    (sysfs / "devices" / "nvme0n1" / "device" / "model").write_text("What sysfs says\n")
    assert examine(sysfs, sysfs).model == "What sysfs says"


@pytest.mark.parametrize(
    "script",
    [
        "echo 'Permission denied' >&2; exit 2",
        "echo '[1]'",
        'echo \'{"nvme_smart_health_information_log": 3, "model_name": null}\'',
        'echo \'{"nvme_smart_health_information_log": {"percentage_used": "7", "data_units_written": true}}\'',
        "printf '\\377\\376'",
        "kill -9 $$",
    ],
)
def test_a_smartctl_that_does_not_answer_is_no_error(sysfs: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    asked = smartctl(sysfs, monkeypatch, script)
    assert examine(sysfs, sysfs) == Drive("nvme0n1")
    assert asked.exists()


def test_a_slow_smartctl_is_not_waited_for(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = sysfs / "ended"
    code = f"import time; time.sleep(20); open('{ended}', 'w')"
    smartctl(sysfs, monkeypatch, f'exec {sys.executable} -S -c "{code}"')
    monkeypatch.setattr(drive_module, "SMARTCTL_LIMIT_S", 0.2)
    assert examine(sysfs, sysfs) == Drive("nvme0n1")
    assert not ended.exists()


# ---- in the report --------------------------------------------------------------------------------------------------


def test_the_report_tells_what_the_drive_told_once_at_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cli: Cli,
) -> None:
    looks: list[Path] = []

    def spinning(path: Path) -> Drive:
        looks.append(path)
        return Drive("sda", "Example Disk", True, 7, 10**13)

    monkeypatch.setattr("ds_tba.storage.tiers.examine", spinning)
    offloader = make(tmp_path, report={"path": str(tmp_path / "report.json")})
    for _ in range(3):
        step(offloader)
        offloader.report()
    offloader.close()
    assert looks == [tmp_path]
    assert f"nvme_path {tmp_path} is on sda, which the system takes for a spinning disk" in caplog.text
    (wear,) = json.loads((tmp_path / "report.json").read_text())["wear"]
    assert (wear["rotational"], wear["percentage_used"], wear["drive_written_bytes"]) == (True, 7, 10**13)
    assert (
        "at the start 7 % of its life was used, 10.0 TB written in all"
        in cli("report", str(tmp_path / "report.json")).out
    )


def test_a_report_of_before_still_shows(tmp_path: Path) -> None:
    offloader = make(tmp_path)
    offloader.close()
    old = offloader.report().to_dict()
    for name in ("rotational", "percentage_used", "drive_written_bytes"):
        del old["wear"][0][name]
    assert any(name.startswith("wear of") for name, _ in OffloadReport(**old).rows())


def test_the_rate_is_that_of_plans_and_the_text_counts_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps before the first plan move everything, and tell nothing of the days to come."""
    offloader = make(tmp_path, placement="adaptive", rematerialize=False, ssd={"rated_endurance_tbw": 1.0})
    offloader.watch(torch.nn.Linear(1, 1), Alone())
    offloader._tiers._ranks_on_node = 2
    while not offloader.report().plans:
        step(offloader)
    now_s, (path,) = reporting.time.monotonic(), offloader._tiers.paths
    reporter = offloader._reporter
    steps, _, before = planned = reporter._planned
    assert before == [path.written_bytes] and steps == offloader.report().steps
    reporter._planned = planned._replace(at_s=now_s - 1000.0, written_bytes=[path.written_bytes - 10**9])
    monkeypatch.setattr(reporting.time, "monotonic", lambda: now_s)
    reporter._started_at = now_s - 1.0
    found = offloader.report().wear[0]["written_bytes_per_day"]
    assert found == pytest.approx(86400 * path.written_bytes)  # too few steps to tell
    assert found > 2 * 86400 * 10**6
    monkeypatch.setattr(reporting, "RATED_STEPS", 0)
    report = offloader.report()
    assert report.wear[0]["written_bytes_per_day"] == pytest.approx(86400 * 10**6)
    assert report.wear[0]["life_days"] == pytest.approx(1e12 / (2 * 86400 * 10**6))
    assert "0.17 TB a day" in report.summary() and "0.17 TB a day at this rate of 2 ranks, 6 days" in str(report.rows())
    monkeypatch.undo()
    offloader.close()
