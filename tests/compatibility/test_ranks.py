"""One, two and four ranks on one machine, and two ranks on each of two hosts."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import hosts
import pytest
from compare import MIB, PLANNED, Way, rows
from programs_deepspeed import trained
from support.runs import SCRIPTS, plain_config, run, run_once, with_block

pytestmark = pytest.mark.engine

STEPS = 10


def plan_of(report: dict[str, Any]) -> dict[str, Any]:
    """Return what all ranks must have in common; the reason and the time are a rank's own."""
    assert report["plan"] is not None, "no plan was made"
    return {**report["plan"], "reason": "", "measured_step_s": None}


WAYS = [
    Way(f"{ranks} on one machine", trained, {"steps": STEPS}, decides={2: 2}.get(ranks), ranks=ranks, block=PLANNED)
    for ranks in (1, 2, 4)
]


@pytest.mark.parametrize(("way", "stage"), rows("Ranks", WAYS))
def test_ranks(way: Way, stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    compared = way.compared(stage, tmp_path)
    plans = [plan_of(report) for report in compared.reports]
    assert plans == [plans[0]] * way.ranks
    row_says(str(compared))


@pytest.mark.compatible(
    "Ranks", "2 hosts of 2 ranks, drives of 1000 and 100 MB/s in other directories, ZeRO-3", decides=True
)
def test_two_hosts(tmp_path: Path, row_says: Callable[[str], None]) -> None:
    config = plain_config(3)
    script, arguments = SCRIPTS / "unequal.py", ("--steps", str(STEPS))
    together = run_once(config, tmp_path, *arguments, ranks=4)
    assert together.returncode == 0, together.output
    block = {"min_tensor_bytes": 65536, **PLANNED, "nvme_path": "$DRIVE/activations"}
    drives = [tmp_path / name / "activations" for name in ("fast", "slow")]
    for drive in drives:
        drive.mkdir(parents=True)
    own = [{"DRIVE": str(drive.parent)} for drive in drives]
    ours, rates = with_block(config, tmp_path, **block), "1000e6,1000e6,100e6,100e6"
    with hosts.two_hosts() as pair:
        start = partial(hosts.on_hosts, pair, own)
        found = run(ours, tmp_path, *arguments, ranks=4, script=script, start=start, DRIVES_BYTES_PER_S=rates)
        assert found.returncode == 0, found.output
    assert found.outcome == together.outcome, "not as on one host, without the block"
    assert [len(lines) for lines in found.outcome] == [4 * STEPS, 4]
    reports = [json.loads((tmp_path / f"report.json{rank}").read_text()) for rank in ("", ".rank1", ".rank2", ".rank3")]
    paths = [report["bandwidth"][0] for report in reports]
    assert [path["path"] for path in paths] == [str(drives[0])] * 2 + [str(drives[1])] * 2
    alone = [path["write_bytes_per_s"] for path in paths]
    assert max(alone[2:]) < 2 * 100e6 and min(alone[:2]) > max(alone[2:]), "the drives are as fast as each other"
    assert [plan_of(report) for report in reports] == [plan_of(reports[0])] * 4
    moved_bytes = sum(report["offloaded_bytes"] for report in reports)
    assert moved_bytes > 0
    row_says(f"bit-equal with 4 ranks on one host, one plan, {moved_bytes / MIB:.0f} MiB moved in {STEPS} steps")


@pytest.mark.thorough
@pytest.mark.fault(
    "a host is lost",
    by="SIGKILL of all processes of one of two hosts of two ranks, under ZeRO-3",
    outcome="the ranks of the other end with an error of the collective and write their reports; no file is left",
)
def test_a_host_is_lost(tmp_path: Path, user_sees: Callable[[str], None]) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    block = {"placement": "nvme", "min_tensor_bytes": 65536, "nvme_path": str(drive)}
    config = with_block(plain_config(3), tmp_path, **block)
    arguments = ("--steps", "1000", "--pause_s", "0.2")
    outputs = [tmp_path / f"output{rank}.txt" for rank in range(4)]
    with hosts.two_hosts() as pair, ThreadPoolExecutor(1) as beside:
        start = partial(hosts.on_hosts, pair, ({}, {}))
        training = beside.submit(run, config, tmp_path, *arguments, ranks=4, start=start)
        while not training.done() and not all(one.exists() and "LOSS " in one.read_text() for one in outputs):
            time.sleep(0.05)
        hosts.kill(pair[1])
        assert training.result().returncode == signal.SIGKILL
    for output in outputs[:2]:
        assert "Connection closed by peer" in output.read_text() or "Connection reset by peer" in output.read_text()
    assert list(drive.iterdir()) == []
    for name in ("report.json", "report.json.rank1"):
        report = json.loads((tmp_path / name).read_text())
        assert report["steps"] > 0 and report["written_bytes"] > 0
    user_sees("(gloo's own) Connection closed by peer")
