"""One, two and four ranks on one machine, and ranks on two hosts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hosts
import programs_deepspeed as programs
import pytest
from compare import MIB, compare
from support.runs import SCRIPTS, plain_config, with_block

pytestmark = pytest.mark.engine

STEPS = 10
ADAPTIVE: dict[str, Any] = {"placement": "adaptive", "max_step_overhead": 1000.0}


def plan_of(report: dict[str, Any]) -> dict[str, Any]:
    """What all ranks must have in common; the reason and the time are a rank's own."""
    assert report["plan"] is not None, "no plan was made"
    return {**report["plan"], "reason": "", "measured_step_s": None}


@pytest.mark.parametrize(
    ("ranks", "stage"),
    [
        pytest.param(ranks, stage, marks=pytest.mark.compatible("Ranks", f"{ranks} on one machine, ZeRO-{stage}"))
        for ranks in (1, 2, 4)
        for stage in (2, 3)
    ],
)
def test_ranks(ranks: int, stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    config = plain_config(stage, train_micro_batch_size_per_gpu=programs.BATCH)
    compared = compare(programs.trained, config, tmp_path, ranks=ranks, block=ADAPTIVE, steps=STEPS)
    plans = [plan_of(report) for report in compared.reports]
    assert plans == [plans[0]] * ranks
    row_says(str(compared))


@pytest.mark.compatible("Ranks", "2 hosts, drives of 1000 and 100 MB/s, ZeRO-3")
def test_two_hosts(tmp_path: Path, row_says: Callable[[str], None]) -> None:
    config = plain_config(3)
    script, arguments = SCRIPTS / "unequal.py", ("--steps", str(STEPS))
    variables = {"DRIVES_BYTES_PER_S": "1000e6,100e6"}
    with hosts.two_hosts() as pair:
        without = hosts.launch(pair, config, tmp_path, script, *arguments, **variables)
        assert without.returncode == 0, without.output
        block = {"min_tensor_bytes": 65536, **ADAPTIVE}
        found = hosts.launch(pair, with_block(config, tmp_path, **block), tmp_path, script, *arguments, **variables)
        assert found.returncode == 0, found.output
    assert found.outcome == without.outcome
    assert [len(lines) for lines in found.outcome] == [2 * STEPS, 2]
    reports = [json.loads((tmp_path / name).read_text()) for name in ("report.json", "report.json.rank1")]
    own = [report["bandwidth"][0]["write_alone_bytes_per_s"] for report in reports]
    assert own[1] < 2 * 100e6 and own[0] > own[1], "the drives are as fast as each other"
    plans = [plan_of(report) for report in reports]
    assert plans[0] == plans[1]
    moved_bytes = sum(report["offloaded_bytes"] for report in reports)
    assert moved_bytes > 0
    row_says(f"bit-equal, one plan, {moved_bytes / MIB:.0f} MiB moved in {STEPS} steps")
