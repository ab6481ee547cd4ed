"""Blocks recomputed under ZeRO, in real engines: losses, parameters and random numbers as without."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import runs

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("needs_recompute")]

# Parameters leave as soon as they may, so that a use before they are gathered, or after, is an error and not luck.
EAGER = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 0,
    "stage3_prefetch_bucket_size": 0,
}
PASSES, RECOMPUTED = 40, 21


def check(config: dict[str, Any], directory: Path, ranks: int) -> None:
    result = runs.launch(config, directory, ranks=ranks, script=runs.SCRIPTS / "blocks.py")
    assert result.returncode == 0, result.output
    assert result.lines("BLOCKS") == [f"BLOCKS {rank} EQUAL {PASSES} {RECOMPUTED}" for rank in range(ranks)]


@pytest.mark.parametrize("stage3", [EAGER, {}], ids=["released at once", "defaults"])
def test_zero_3_with_two_ranks(tmp_path: Path, stage3: dict[str, int]) -> None:
    config = runs.plain_config(3)
    config["zero_optimization"] |= stage3
    check(config, tmp_path, 2)


def test_zero_3_with_two_ranks_and_activations_on_nvme(tmp_path: Path) -> None:
    """The inputs of recomputed blocks come from the file."""
    config = runs.plain_config(3)
    config["zero_optimization"] |= EAGER
    check(runs.with_block(config, tmp_path, placement="nvme", min_tensor_bytes=16384), tmp_path, 2)


def test_zero_3_with_parameters_on_nvme_in_bf16(tmp_path: Path) -> None:
    config = runs.nvme_parameters(tmp_path)
    config["zero_optimization"] |= EAGER
    config["zero_optimization"]["offload_param"]["buffer_count"] = 6
    check(config, tmp_path, 1)


def test_zero_2_in_bf16(tmp_path: Path) -> None:
    check(runs.plain_config(2, bf16={"enabled": True}), tmp_path, 1)


# ---- blocks with state, as a user has them --------------------------------------------------------------------------

# What each kind is left out for; plain blocks are proven.
REASONS = {
    "plain": "",
    "counter": "its forward changes its 'calls'",
    "memory": "its 'memory' is changed between forward and backward",
    "generator": "its forward changes its 'chance'",
    "python": "draws numbers from Python's random",
    "numpy": "draws numbers from numpy.random",
    "tracker": "its forward changes its ",
    "contextvar": "is changed between forward and backward",
    "argument": "argument of class Extra.scale is changed between forward and backward",
    "sdpa": "a global setting of PyTorch is changed between forward and backward",
}


def train(config: dict[str, Any], directory: Path, kinds: Iterable[str], *, steps: int, ranks: int) -> runs.Result:
    script = runs.SCRIPTS / "stateful.py"
    result = runs.launch(config, directory, "--steps", str(steps), "--kinds", *kinds, ranks=ranks, script=script)
    assert result.returncode == 0, result.output
    assert len(result.outcome[0]) == ranks * steps * len(list(kinds))
    return result


def reports(result: runs.Result) -> dict[str, dict[str, Any]]:
    """Rank 0's, by kind."""
    lines = [line for line in result.lines("REPORT") if line.startswith("REPORT 0 ")]
    found = [json.loads(line.removeprefix("REPORT 0 ")) for line in lines]
    return {one["kind"]: one for one in found}


def test_blocks_with_state_train_as_without_us(tmp_path: Path) -> None:
    """Under the default block, and with "recompute": true."""
    config = runs.plain_config(2)
    without = train(config, tmp_path, REASONS, steps=20, ranks=1)
    default = train(runs.with_block(config, tmp_path, min_tensor_bytes=16384), tmp_path, REASONS, steps=20, ranks=1)
    assert default.outcome == without.outcome
    assert all(not one["unproven_blocks"] and not one["recomputed_bytes"] for one in reports(default).values())
    # Nothing is large enough to be moved: recomputing alone makes the peak lower.
    block = runs.with_block(config, tmp_path, min_tensor_bytes=1 << 20, recompute=True, max_step_overhead=1000.0)
    asked = train(block, tmp_path, REASONS, steps=20, ranks=1)
    assert asked.outcome == without.outcome
    for kind, report in reports(asked).items():
        assert (report["recomputed_bytes"] > 0) == (kind == "plain"), kind
        left_out = report["unproven_blocks"]
        assert [one["path"] for one in left_out] == [f"blocks.{at}" for at in range(0 if kind == "plain" else 3)], kind
        assert all(REASONS[kind] in one["reason"] for one in left_out), left_out


def test_blocks_are_proven_by_two_ranks_under_zero_3(tmp_path: Path) -> None:
    config, kinds = runs.plain_config(3), ["plain", "tracker", "memory"]
    config["zero_optimization"] |= EAGER
    without = train(config, tmp_path, kinds, steps=8, ranks=2)
    block = runs.with_block(config, tmp_path, min_tensor_bytes=16384, recompute=True, max_step_overhead=1000.0)
    ours = train(block, tmp_path, kinds, steps=8, ranks=2)
    assert ours.outcome == without.outcome
    left_out = {kind: len(report["unproven_blocks"]) for kind, report in reports(ours).items()}
    assert left_out == {"plain": 0, "tracker": 3, "memory": 3}
