"""Two ranks with unequal drives, sizes and wishes: one plan, the results of the run without us, and nobody waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import runs

pytestmark = pytest.mark.engine
FAST, SLOW = 400e6, 40e6  # as in scripts/two_ranks.py
TIMEOUT_S = 180  # of a run of seconds: whoever waits longer waits for ever


def train(directory: Path, case: str) -> list[dict[str, Any]]:
    """Return what each rank has found."""
    script = runs.SCRIPTS / "two_ranks.py"
    done = runs.run(
        None, directory, str(directory), case, ranks=2, script=script, timeout_s=TIMEOUT_S, told_local_rank=False
    )
    assert done.returncode == 0, done.output
    return [json.loads((directory / f"{case}.{rank}.json").read_text()) for rank in range(2)]


def check(directory: Path, case: str) -> list[dict[str, Any]]:
    """Results as without us, and one plan at every step."""
    without, found = train(directory, f"without {case}"), train(directory, case)
    for one, other in zip(without, found, strict=True):
        assert one["losses"] == other["losses"] and one["parameters"] == other["parameters"]
    assert found[0]["parameters"] == found[1]["parameters"]
    plans = [rank["plans"] for rank in found]
    assert plans[0] == plans[1] and plans[0][-1] is not None
    assert found[0]["report"]["plans"] == found[1]["report"]["plans"] >= 1
    return found


def test_the_slowest_drive_decides_for_both(tmp_path: Path) -> None:
    found = check(tmp_path, "drives")
    own = [rank["report"]["bandwidth"][0]["write_alone_bytes_per_s"] for rank in found]
    assert own[0] > 3 * own[1] and own[1] < 1.2 * SLOW
    planned = [plan["write_bytes_per_s"] for plan in found[0]["plans"] if plan is not None]
    assert planned and max(planned) < 2 * SLOW < FAST / 2


def test_the_rank_that_saves_most_decides_for_both(tmp_path: Path) -> None:
    found = check(tmp_path, "sizes")
    saved = [rank["report"]["peak_saved_bytes_without"] for rank in found]
    assert saved[1] > 2 * saved[0]
    assert found[0]["plans"][-1]["storages_bytes"] >= saved[1]


def test_when_one_rank_wants_a_trace_both_take_one(tmp_path: Path) -> None:
    found = check(tmp_path, "saves")
    plans = [plan for plan in found[0]["plans"] if plan is not None]
    assert len(plans[-1]["placements"]) == len(plans[0]["placements"]) + 1  # what only the other rank saves


def test_a_block_that_one_rank_leaves_out_is_recomputed_on_none(tmp_path: Path) -> None:
    found = check(tmp_path, "checkpointed")
    for rank in found:
        assert rank["plans"][-1]["recomputed"] == [True, True, False, True]
        assert rank["report"]["recomputed_bytes"] > 0
    (left_out,) = found[1]["report"]["blocks_left_out"]
    assert left_out["path"] == "blocks.2" and "saves nothing but its inputs" in left_out["reason"]


def test_ranks_with_unequal_drives_recompute_the_same_blocks_under_zero_3(tmp_path: Path) -> None:
    config, size = runs.plain_config(3), ("--steps", "8", "--tokens", "1024")
    without = runs.run_once(config, tmp_path, *size, ranks=2)
    assert without.returncode == 0, without.output
    # Nothing is large enough to be moved: whatever the ranks measure, recomputing alone makes the peak lower.
    block = {"min_tensor_bytes": 8 << 20, "max_step_overhead": 1000.0, "recompute": True}
    with_us = runs.run(
        runs.with_block(config, tmp_path, **block),
        tmp_path,
        *size,
        ranks=2,
        script=runs.SCRIPTS / "unequal.py",
        DRIVES_BYTES_PER_S="40e6,4e6",
    )
    assert with_us.returncode == 0, with_us.output
    assert with_us.outcome == without.outcome
    assert len(with_us.outcome[0]) == 16 and len(with_us.outcome[1]) == 2
    reports = [json.loads((tmp_path / name).read_text()) for name in ("report.json", "report.json.rank1")]
    own = [report["bandwidth"][0]["write_alone_bytes_per_s"] for report in reports]
    assert own[0] > 3 * own[1]
    assert all(report["plan"]["recomputed_blocks"] > 0 and report["recomputed_bytes"] > 0 for report in reports)
    plans = [{**report["plan"], "reason": "", "measured_step_s": None} for report in reports]  # those are a rank's own
    assert plans[0] == plans[1]


def test_a_path_that_one_of_three_ranks_has_not_is_told_by_all(tmp_path: Path) -> None:
    for rank in (0, 2):
        (tmp_path / str(rank)).mkdir()
    config = runs.with_block(runs.plain_config(2), tmp_path, nvme_path=f"{tmp_path}/$RANK")
    done = runs.run(config, tmp_path, ranks=3)
    assert done.returncode != 0 and "LOSS" not in done.output
    missing = f"PathError: nvme_path {tmp_path}/1 does not exist"
    assert done.output.count(f"rank 1 cannot do what ds_config.json asks for, so no rank trains: {missing}") == 2
    assert done.output.count(missing) == 3
