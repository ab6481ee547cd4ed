"""Blocks recomputed under ZeRO, in real engines: losses, parameters and random numbers as without."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support import runs

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
    result = runs.run(config, directory, ranks=ranks, script=runs.SCRIPTS / "blocks.py")
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

STATEFUL = ("counter", "memory", "generator", "python", "numpy", "tracker", "contextvar", "argument")


def launch(config: dict[str, Any], directory: Path, kinds: Iterable[str], *, steps: int, ranks: int) -> runs.Result:
    script = runs.SCRIPTS / "stateful.py"
    return runs.run(config, directory, "--steps", str(steps), "--kinds", *kinds, ranks=ranks, script=script)


def train(config: dict[str, Any], directory: Path, kinds: Iterable[str], *, steps: int, ranks: int) -> runs.Result:
    result = launch(config, directory, kinds, steps=steps, ranks=ranks)
    assert result.returncode == 0, result.output
    assert len(result.outcome[0]) == ranks * steps * len(list(kinds))
    return result


def reports(result: runs.Result) -> dict[str, dict[str, Any]]:
    """Rank 0's, by kind."""
    lines = [line for line in result.lines("REPORT") if line.startswith("REPORT 0 ")]
    found = [json.loads(line.removeprefix("REPORT 0 ")) for line in lines]
    return {one["kind"]: one for one in found}


# Nothing is large enough to be moved: recomputing alone makes the peak lower.
RECOMPUTE: dict[str, Any] = {"min_tensor_bytes": 1 << 20, "recompute": True, "max_step_overhead": 1000.0}


def test_under_the_default_block_no_block_runs_twice(tmp_path: Path) -> None:
    config, kinds = runs.plain_config(2), ("plain", *STATEFUL)
    without = train(config, tmp_path, kinds, steps=8, ranks=1)
    default = train(runs.with_block(config, tmp_path, min_tensor_bytes=16384), tmp_path, kinds, steps=8, ranks=1)
    assert default.outcome == without.outcome
    assert all(one["plans"] and not one["recomputed_bytes"] for one in reports(default).values())


@pytest.mark.parametrize(("stage", "ranks"), [(2, 1), (3, 2)])
def test_plain_blocks_train_as_without_us(tmp_path: Path, stage: int, ranks: int) -> None:
    config = runs.plain_config(stage)
    if stage == 3:
        config["zero_optimization"] |= EAGER
    without = train(config, tmp_path, ["plain"], steps=8, ranks=ranks)
    ours = train(runs.with_block(config, tmp_path, **RECOMPUTE), tmp_path, ["plain"], steps=8, ranks=ranks)
    assert ours.outcome == without.outcome
    assert all(one["recomputed_bytes"] > 0 for one in reports(ours).values())


@pytest.mark.parametrize(("kind", "stage", "ranks"), [("counter", 2, 1), ("tracker", 3, 2)])
def test_a_block_with_state_ends_the_run_with_an_error_that_names_it(
    tmp_path: Path, kind: str, stage: int, ranks: int
) -> None:
    """Also on several ranks, of which none is left waiting."""
    config = runs.with_block(runs.plain_config(stage), tmp_path, **RECOMPUTE)
    result = launch(config, tmp_path, [kind], steps=8, ranks=ranks)
    assert result.returncode != 0
    assert "RecomputationError: the forward of the block 'blocks.2'" in result.output
    assert 'naming the others in "blocks"' in result.output
