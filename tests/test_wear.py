from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support.offloaders import make, step

from ds_tba import reporting
from ds_tba.report import OffloadReport
from ds_tba.wear import path_wear, rated, share_a_drive, write_limit_bytes_per_step


def test_life_is_rated_endurance_over_the_measured_rate(tmp_path: Path) -> None:
    wear = path_wear(tmp_path, 10**12, 43200.0, 600)
    assert wear.written_bytes_per_day == pytest.approx(2e12) and wear.life_days == pytest.approx(300) == wear.days()
    shared = path_wear(tmp_path, 2 * 10**12, 86400.0, 600, sharers=4)
    assert shared.life_days == pytest.approx(75) == shared.days() and shared.all_bytes_per_day == pytest.approx(8e12)
    assert write_limit_bytes_per_step(600.0 / 4, shared.life_days, 86400.0) == pytest.approx(2e12)


def test_without_a_rating_days_are_by_an_assumption(tmp_path: Path) -> None:
    assumed = path_wear(tmp_path, 10**12, 86400.0, None)
    assert assumed.days() == pytest.approx(600) and assumed.life_days is None
    assert (rated(None), rated(70.0)) == ("600 TBW assumed", "70 TBW")
    assert path_wear(tmp_path, 0, 1.0, None).days() == math.inf


@pytest.mark.parametrize(
    ("block", "told", "tbw"),
    [({}, "600 TBW assumed", 600.0), ({"ssd": {"rated_endurance_tbw": 300}}, "300 TBW", 300.0)],
)
def test_the_lines_tell_the_rating_and_the_days(tmp_path: Path, block: dict[str, Any], told: str, tbw: float) -> None:
    offloader = make(tmp_path, **block)
    step(offloader, written_first=True)
    offloader.close()
    assert f", {told})" in offloader.start_line()
    report = offloader.report()
    days = tbw / (report.wear[0]["written_bytes_per_day"] / 1e12)
    assert report.summary().endswith(f" TB a day ({days:.0f} days to {told})")
    assert (report.wear[0]["life_days"] is None) is (not block)


@pytest.mark.parametrize(("written", "elapsed_s", "tbw"), [(0, 10.0, 600.0), (10, 0.0, 600.0), (10, 10.0, None)])
def test_life_is_unknown_without_a_rating_or_a_write(
    tmp_path: Path, written: int, elapsed_s: float, tbw: float | None
) -> None:
    assert path_wear(tmp_path, written, elapsed_s, tbw).life_days is None


# ---- the drive ------------------------------------------------------------------------------------------------------


def test_directories_are_on_one_drive_by_their_file_system(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    ours, to_be_made, elsewhere = tmp_path / "ours", tmp_path / "zero" / "of a run", Path("/proc")
    assert share_a_drive([ours], [elsewhere, to_be_made])
    assert not share_a_drive([ours], [elsewhere]) and not share_a_drive([ours], []) and not share_a_drive([], [ours])


# ---- in the report --------------------------------------------------------------------------------------------------


def test_a_report_of_before_still_shows(tmp_path: Path) -> None:
    offloader = make(tmp_path)
    offloader.close()
    old = offloader.report().to_dict()
    old["wear"][0] |= {"device": "nvme0n1", "model": "of before", "percentage_used": 7}
    assert any(name.startswith("wear of") for name, _ in OffloadReport(**old).rows())


def test_the_text_counts_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offloader = make(tmp_path, rematerialize=False, ssd={"rated_endurance_tbw": 1.0})
    offloader._tiers._ranks_on_node = 2
    step(offloader, written_first=True)
    now_s, written_bytes = reporting.time.monotonic(), offloader.report().written_bytes
    monkeypatch.setattr(reporting.time, "monotonic", lambda: now_s)
    offloader._reporter._started_at = now_s - 86400 * written_bytes / 10**11
    report = offloader.report()
    assert report.wear[0]["written_bytes_per_day"] == pytest.approx(1e11)
    assert report.wear[0]["life_days"] == pytest.approx(5)
    assert "0.20 TB a day" in report.summary() and "0.20 TB a day of 2 ranks at this rate, 5 days" in str(report.rows())
    monkeypatch.undo()
    offloader.close()
