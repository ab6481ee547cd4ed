"""DeepSpeed's pipeline engine, several micro-batches in flight: the results of the run without us, and a lower peak.

The cases of one number of ranks train one after the other in one job, which takes longer to start than they take.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import runs

pytestmark = pytest.mark.engine
MICRO_BATCHES = 4
ADAPTIVE = {"placement": "adaptive", "max_step_overhead": 1000.0}
HOST = {"placement": "host", "host_budget_bytes": 32 << 20}
# The memory of the first steps is looked at, which is more where they prove.
SAVED = {"rematerialize": False}
BF16 = {"bf16": {"enabled": True}}
TIMEOUT_S = 600
BY_NAME = 'excluded by name: "except" has 4'
Found = dict[tuple[str, int], dict[str, Any]]


def case(
    directory: Path, name: str, options: dict[str, Any], config: dict[str, Any], *blocks: dict[str, Any]
) -> list[dict[str, Any]]:
    """A training without the block, and with each of these blocks."""
    plain = runs.plain_config(config.pop("stage", 0), gradient_accumulation_steps=MICRO_BATCHES, **config)
    plain["train_micro_batch_size_per_gpu"] = 1
    cases = [{"name": name, "options": options, "config": plain}]
    for number, block in enumerate(blocks):
        own = directory / f"{name}.{number}"
        own.mkdir()
        io = {"staging_bytes": 8 << 20, "swap_file_bytes": 128 << 20}
        with_us = runs.with_block(plain, own, **{"min_tensor_bytes": 65536, "io": io, **block})
        cases.append({"name": own.name, "options": options, "config": with_us})
    return cases


def train(directory: Path, cases: list[dict[str, Any]], ranks: int, **environment: str) -> Found:
    """Return what each rank of each case has found, with its report where it has the block."""
    path = directory / "cases.json"
    path.write_text(json.dumps(cases))
    script = runs.SCRIPTS / ("unequal.py" if environment else "pipeline.py")
    result = runs.run(None, directory, str(path), ranks=ranks, script=script, timeout_s=TIMEOUT_S, **environment)
    assert result.returncode == 0, result.output
    found: Found = {}
    for line in result.lines("FOUND"):
        one = json.loads(line.removeprefix("FOUND "))
        name, rank = one.pop("case"), one.pop("rank")
        report = directory / name / ("report.json" + (f".rank{rank}" if rank else ""))
        found[name, rank] = {"results": one, "report": json.loads(report.read_text()) if report.exists() else None}
    assert len(found) == len(cases) * ranks
    for (name, rank), one in found.items():
        assert one["results"] == found[name.partition(".")[0], rank]["results"], f"{name}, rank {rank}"
    return found


def test_two_stages_with_micro_batches_in_flight(tmp_path: Path) -> None:
    keep, nvme = {"placement": "keep"}, {"placement": "nvme"}
    moved = [{**block, **SAVED} for block in (keep, nvme, HOST, ADAPTIVE)]
    seen = {"steps": 7, "evaluates": True}
    found = train(
        tmp_path,
        [
            *case(tmp_path, "fp32", seen, {}, *moved),
            *case(tmp_path, "bf16", {**seen, "tied": True}, {"stage": 1, **BF16}, nvme, ADAPTIVE),
            *case(tmp_path, "checkpointed", seen, {"pipeline": {"activation_checkpoint_interval": 1}}, ADAPTIVE),
            *case(
                tmp_path,
                "non_reentrant",
                {},
                {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}},
                nvme,
            ),
            *case(tmp_path, "varies", {"varies": True, "steps": 9}, {}, nvme, ADAPTIVE),
            *case(tmp_path, "named", {}, {}, {"placement": "nvme", "except": ["4"]}),  # of the second stage
            *case(
                tmp_path, "masked", {"is_masked": True}, {"stage": 1}, {**ADAPTIVE, "activation_budget_bytes": 3 << 20}
            ),
        ],
        ranks=2,
    )
    for rank in range(2):
        kept, *others = (found[f"fp32.{number}", rank]["report"] for number in range(4))
        assert kept["offloaded_bytes"] == 0
        for report in others:
            assert report["offloaded_bytes"] > 0 and report["fallbacks"] == 0
            assert report["peak_saved_bytes_without"] == kept["peak_saved_bytes"]
            assert report["peak_saved_bytes"] < kept["peak_saved_bytes"] / 3
        for name in ("fp32.3", "bf16.1", "varies.1", "masked.0"):
            report = found[name, rank]["report"]
            assert report["plans"] >= 1 and report["plan"]["bytes"]["nvme"] > 0
            assert report["steps"] == report["micro_steps"]
        assert found["masked.0", rank]["report"]["budget_excess_bytes"] == 0
    excluded = [found["named.0", rank]["report"]["kept_bytes_by_reason"].get(BY_NAME, 0) for rank in range(2)]
    assert excluded[0] == 0 < excluded[1]
    first, last = (found["fp32.0", rank]["report"]["peak_saved_bytes"] for rank in range(2))
    assert first > 1.9 * last  # the first stage has two micro-batches in flight


@pytest.mark.thorough
def test_stages_recompute_each_what_its_drive_asks_for(tmp_path: Path) -> None:
    # More than the 4.2 MB that the trial of a block takes.
    block = {**ADAPTIVE, "activation_budget_bytes": 5_000_000, "recompute": True}
    options = {"steps": 10, "is_masked": True, "is_seeded": True}
    found = train(
        tmp_path,
        case(tmp_path, "slow", options, {}, block),
        ranks=2,
        DRIVES_BYTES_PER_S="10e6,10e6",
        SCRIPT="pipeline.py",
    )
    for rank in range(2):
        report = found["slow.0", rank]["report"]
        assert report["recomputed_bytes"] > 0 and report["plan"]["recomputed_blocks"] > 0
        assert report["budget_excess_bytes"] == 0


@pytest.mark.thorough
def test_one_stage_alone_also_after_a_step_that_raised(tmp_path: Path) -> None:
    options = {"stages": 1, "steps": 8}
    found = train(
        tmp_path,
        [
            *case(tmp_path, "one", options, {}, {**ADAPTIVE, **SAVED}),
            *case(tmp_path, "raises", {**options, "raises": True}, {}, {"placement": "nvme"}, {**ADAPTIVE, **SAVED}),
        ],
        ranks=1,
    )
    for name in ("one.0", "raises.1"):
        report = found[name, 0]["report"]
        assert report["plans"] >= 1 and report["peak_saved_bytes"] < report["peak_saved_bytes_without"] / 3
    assert found["raises", 0]["results"]["losses"].count("raised") == 1
    assert found["raises.1", 0]["report"]["steps"] == 7


def test_two_stages_of_two_ranks_follow_a_plan_for_each_stage(tmp_path: Path) -> None:
    options = {"steps": 8, "tied": True, "evaluates": True}
    divided = {"pipe_partitioned": True, "grad_partitioned": True}
    found = train(
        tmp_path,
        [
            *case(tmp_path, "grid", options, {"stage": 1}, ADAPTIVE),
            # DeepSpeed replaces the data of what a stage returns, and puts it back together for backward.
            *case(tmp_path, "divided", {"tensor_parallel": 2}, {"pipeline": divided}, {"placement": "nvme"}),
        ],
        ranks=4,
    )
    plans = [found["grid.0", rank]["report"]["plan"] for rank in range(4)]
    for plan in plans:
        plan |= {"reason": "", "measured_step_s": None}  # those are a rank's own
    assert plans[0] == plans[1] and plans[2] == plans[3]  # ranks 0 and 1 hold the first stage
    assert plans[0] != plans[2]
    assert all(found["grid.0", rank]["report"]["plans"] >= 1 for rank in range(4))
