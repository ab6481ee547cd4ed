"""``ds_tba tune``: the verdicts with made-up drives, and the command with the real one."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Cli

from ds_tba.cli import tune
from ds_tba.cli.tune import Candidate, DriveRates, Found, recommended, tuned
from ds_tba.config import OffloadConfig

MIB = 1 << 20
DEFAULT = Candidate("posix", 2)
ALL = [DEFAULT, Candidate("posix", 1), Candidate("posix", 4)]


class Drives(tune.Drives):
    """Made-up drives: every measurement takes a second and writes 100 MiB; the clock stands still else."""

    def __init__(self, rate: Callable[[Candidate], float]) -> None:
        super().__init__([])
        self._now_s = 0.0
        self._rate = rate

    def measure(self, one: Candidate) -> DriveRates:
        self._now_s += 1.0
        rate = self._rate(one)
        return DriveRates(rate, rate, rate, 100 * MIB)

    def tuned(self, seconds: float = 100.0, max_written_bytes: float = 1e15) -> tuple[Found, float]:
        return tuned(ALL, self, seconds, max_written_bytes)

    def now_s(self) -> float:
        return self._now_s


def test_what_is_faster_is_recommended() -> None:
    found, _ = Drives(lambda one: one.lanes * 1e9).tuned()
    best = recommended(found, DEFAULT)
    assert best == Candidate("posix", 4) and found.keys() == set(ALL)
    assert best.block() == {"backend": "posix", "write_lanes": 4, "read_lanes": 4}
    OffloadConfig.model_validate({"nvme_path": "/x", "io": best.block()})


def test_luck_is_no_difference() -> None:
    chance = itertools.cycle([1.0e9, 1.3e9, 0.9e9, 1.1e9, 1.2e9, 0.8e9, 1.25e9])
    assert recommended(Drives(lambda one: next(chance)).tuned()[0], DEFAULT) == DEFAULT


def test_slower_ones_leave_the_defaults() -> None:
    found, _ = Drives(lambda one: 1e9 if one == DEFAULT else 0.5e9).tuned()
    assert recommended(found, DEFAULT) == DEFAULT


def test_a_round_trip_is_a_write_and_a_read() -> None:
    assert DriveRates(1e9, 3e9, 0.0).round_trip == pytest.approx(2 / (1 / 1e9 + 1 / 3e9))


@pytest.mark.parametrize("seconds", [0.1, 1.0, 10.0, 60.0])
def test_time_and_bytes_are_bounded_and_the_default_is_always_measured(seconds: float) -> None:
    found, took_s = Drives(lambda one: 1e9).tuned(seconds)
    assert took_s <= seconds + 1.0 and DEFAULT in found
    found, _ = Drives(lambda one: 1e9).tuned(1e9, max_written_bytes=2000 * MIB)
    assert sum(each.written_bytes for many in found.values() for each in many) == 2000 * MIB


# ---- with the real drive --------------------------------------------------------------------------------------------


def test_a_measurement_tells_rates_and_what_it_wrote(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    found = tune.Drives([str(tmp_path / "a"), str(tmp_path / "b")]).measure(Candidate("posix", 1))
    assert min(found) > 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_command_prints_blocks_to_paste(tmp_path: Path, cli: Cli) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    given = ["--nvme_path", str(drive), "--seconds", "1", "--backend", "posix"]
    text = cli("tune", *given).out
    (block,) = re.findall('"io": ({.*})', text)
    OffloadConfig.model_validate({"nvme_path": str(drive), "io": json.loads(block)})
    assert "(defaults)" in text and "counts as wear" in text and "kvikio" in text
    assert "io.compression" not in text
    found = json.loads(cli("tune", *given, "--json").out)
    OffloadConfig.model_validate({"nvme_path": str(drive), "io": found["recommended"]})
    assert found["written_bytes"] > 0 and not list(drive.iterdir())


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_directory_that_cannot_be_measured_is_named(tmp_path: Path, cli: Cli, name: str) -> None:
    (tmp_path / "file").touch()
    error = cli("tune", "--nvme_path", str(tmp_path / name), "--backend", "posix", status=2).err
    assert f"nvme_path {tmp_path / name}" in error


def test_compression_has_rows_where_its_package_is_installed(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Candidate] = []

    def measure(_: tune.Drives, one: Candidate) -> DriveRates:
        seen.append(one)
        rate = 2e9 if one.compression == "zstd" else 1e9
        return DriveRates(rate, rate, rate, MIB)

    monkeypatch.setattr(tune.Drives, "measure", measure)
    given = ["tune", "--nvme_path", str(tmp_path), "--seconds", "0.2", "--backend", "posix"]
    (block,) = re.findall('"io": ({.*})', cli(*given).out)
    assert json.loads(block)["compression"] == "zstd"
    assert {(one.lanes, one.compression) for one in seen if one.compression} == {
        (2, "lz4"), (4, "lz4"), (2, "zstd"), (4, "zstd"),
    }  # fmt: skip
    OffloadConfig.model_validate({"nvme_path": "/x", "io": json.loads(block)})
    monkeypatch.setattr(tune, "find_spec", lambda name: None)
    seen.clear()
    assert 'pip install "ds_tba[compression]"' in cli(*given).out
    assert not [one for one in seen if one.compression]


@pytest.mark.parametrize("name", ["lz4", "zstd"])
def test_a_measurement_with_compression(tmp_path: Path, name: str) -> None:
    assert min(tune.Drives([str(tmp_path)]).measure(Candidate("posix", 1, name))) > 0
