"""``ds_tba tune``: the verdicts with made-up drives, and the command with the real one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_tba.cli import main
from ds_tba.cli.opened_store import flow, probe
from ds_tba.cli.tune import Candidate, Measured, Ratios, Tuned, Tuning, candidates_of, default_of
from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.storage.backends.posix import PosixBackend
from ds_tba.storage.nvme import Lanes

MIB = 1 << 20
DEFAULT = default_of("posix")
OTHERS = [one for one in candidates_of(["posix"], AioConfig(), DEFAULT.staging_bytes) if one != DEFAULT]


class Drives:
    """Made-up drives: every measurement takes a second and writes 100 MiB; the clock stands still else."""

    def __init__(self, rate: Callable[[Candidate, int], float]) -> None:
        self.now_s = 0.0
        self.seen: list[Candidate] = []
        self.flows: list[int] = []
        self._rate = rate

    def measure(self, one: Candidate) -> Measured:
        self.now_s += 1.0
        self.seen.append(one)
        rate = self._rate(one, len(self.seen))
        return Measured(rate, rate, rate, 100 * MIB)

    def flow(self, one: Candidate, nbytes: int) -> Measured:
        self.flows.append(nbytes)
        return self.measure(one)

    def tuned(self, seconds: float = 100.0, most_written_bytes: int = 1 << 50) -> Tuned:
        tuning = Tuning(DEFAULT, OTHERS, self.measure, self.flow, seconds, most_written_bytes, lambda: self.now_s)
        return tuning.run()


def test_what_is_faster_in_every_pair_is_recommended() -> None:
    found = Drives(lambda one, number: 2e9 if one.lanes == 4 else 1e9).tuned()
    assert found.recommended.lanes == 4 and found.ratios.is_faster and found.ratios.median == 2.0
    assert found.recommended.blocks() == {
        "io": {"backend": "posix", "write_lanes": 4, "read_lanes": 4, "staging_bytes": 256 * MIB}
    }
    OffloadConfig.model_validate({"nvme_path": "/x", **found.recommended.blocks()})


def test_luck_in_the_first_rounds_is_no_difference() -> None:
    chance = itertools.cycle([1.0e9, 1.3e9, 0.9e9, 1.1e9, 1.2e9, 0.8e9, 1.25e9])
    found = Drives(lambda one, number: next(chance)).tuned()
    assert found.best is not None and found.best != DEFAULT
    assert not found.ratios.is_faster and found.recommended == DEFAULT
    assert "no difference" in found.ratios.words


def test_slower_ones_leave_the_defaults() -> None:
    found = Drives(lambda one, number: 1e9 if one == DEFAULT else 0.5e9).tuned()
    assert found.recommended == DEFAULT and found.ratios.is_slower and "slower" in found.ratios.words


def test_too_few_pairs_tell_nothing() -> None:
    assert not Ratios((2.0, 2.0)).is_faster and "too few" in Ratios((2.0, 2.0)).words
    assert Ratios((2.0, 2.0, 2.0)).is_faster and not Ratios((2.0, 2.0, 1.0)).is_faster
    assert Ratios((0.5, 0.5, 0.9)).is_slower
    found = Drives(lambda one, number: 2e9 if one.lanes == 4 else 1e9).tuned(seconds=8.0)
    assert len(found.ratios.values) < 3 and found.recommended == DEFAULT


@pytest.mark.parametrize("seconds", [1.0, 10.0, 60.0])
def test_time_and_bytes_are_bounded(seconds: float) -> None:
    drives = Drives(lambda one, number: 1e9)
    found = drives.tuned(seconds)
    assert found.took_s <= seconds + 3.0 and drives.seen[0] in (DEFAULT, *OTHERS)
    drives = Drives(lambda one, number: 1e9)
    found = drives.tuned(1e9, most_written_bytes=2000 * MIB)
    assert 1500 * MIB < found.written_bytes <= 2300 * MIB and found.written_bytes == 100 * MIB * len(drives.seen)


def test_the_default_is_always_measured() -> None:
    assert DEFAULT in Drives(lambda one, number: 1e9).tuned(0.1).found


def test_staging_is_told_and_slow_drives_get_few_bytes() -> None:
    drives = Drives(lambda one, number: 1e7 if one.staging_bytes > 100 * MIB else 0.5e7)
    found = drives.tuned()
    assert found.staging[64 * MIB].is_slower and not found.staging[128 * MIB].is_slower
    assert found.recommended.staging_bytes == 256 * MIB
    assert set(drives.flows) == {64 * MIB}


def test_aio_is_compared_with_a_deeper_queue() -> None:
    found = candidates_of(["aio", "posix"], AioConfig(), 256 * MIB)
    assert len(found) == len(set(found)) == 7
    assert {one.aio.queue_depth for one in found if one.backend == "aio"} == {8, 32}
    deep = next(one for one in found if one.aio.queue_depth == 32)
    assert AioConfig.model_validate(deep.blocks()["aio"]) == deep.aio


# ---- with the real drive --------------------------------------------------------------------------------------------


def test_a_probe_tells_rates_and_what_it_wrote(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    found = probe([str(tmp_path / "a"), str(tmp_path / "b")], PosixBackend(), Lanes(1, 2), "sampled")
    assert len(found.paths) == 2 and all(path.write_bytes_per_s > 0 < path.read_bytes_per_s for path in found.paths)
    assert found.written_bytes > 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_flow_passes_through_staging_smaller_than_itself(tmp_path: Path) -> None:
    found = flow([str(tmp_path)], PosixBackend(), Lanes(1, 1), 32 * MIB, "full", 64 * MIB)
    assert found.written_bytes >= 64 * MIB and found.write_bytes_per_s > 0 < found.read_bytes_per_s
    assert not list(tmp_path.iterdir())


def test_the_command_prints_blocks_to_paste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    given = ["--nvme_path", str(drive), "--seconds", "1.5", "--backend", "posix", "--json", str(tmp_path / "out.json")]
    assert main(["tune", *given]) == 0
    text = capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text())
    OffloadConfig.model_validate({"nvme_path": str(drive), **found["recommended"]})
    assert f'"io": {json.dumps(found["recommended"]["io"])}' in text
    assert "(defaults)" in text and "counts as wear" in text and "kvikio" in text
    assert found["written_bytes"] > 0 and not list(drive.iterdir())


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_directory_that_cannot_be_measured_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "file").touch()
    assert main(["tune", "--nvme_path", str(tmp_path / name), "--backend", "posix"]) == 2
    assert f"nvme_path {tmp_path / name}" in capsys.readouterr().err
