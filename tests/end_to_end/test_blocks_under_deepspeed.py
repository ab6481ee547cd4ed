"""Blocks recomputed under ZeRO, in real engines: losses, parameters and random numbers as without."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
# Nothing is large enough to be moved: recomputing alone makes the peak lower.
RECOMPUTE: dict[str, Any] = {"min_tensor_bytes": 1 << 20, "recompute": True, "max_step_overhead": 1000.0}
WITHOUT_STATE, WITH_STATE = ("routed", "plain"), ("counter", "tracker")
STEPS = 8


def eager(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "zero_optimization": config["zero_optimization"] | EAGER}


def on_nvme(directory: Path) -> dict[str, Any]:
    config = eager(runs.nvme_parameters(directory))
    config["zero_optimization"]["offload_param"]["buffer_count"] = 6
    return config


def launch(config: dict[str, Any], directory: Path, kinds: Sequence[str], ranks: int = 1) -> runs.Result:
    script = runs.SCRIPTS / "blocks.py"
    return runs.run(config, directory, "--steps", str(STEPS), "--kinds", *kinds, ranks=ranks, script=script)


def train(config: dict[str, Any], directory: Path, kinds: Sequence[str], ranks: int = 1) -> runs.Result:
    result = launch(config, directory, kinds, ranks)
    assert result.returncode == 0, result.output
    assert len(result.outcome[0]) == ranks * STEPS * len(kinds)
    return result


def reports(result: runs.Result) -> list[dict[str, Any]]:
    """Rank 0's, of each kind."""
    return [json.loads(line.removeprefix("REPORT 0 ")) for line in result.lines("REPORT") if "REPORT 0 " in line]


def test_under_the_default_block_no_block_runs_twice(tmp_path: Path) -> None:
    config, kinds = runs.plain_config(2), (*WITHOUT_STATE, *WITH_STATE)
    without = train(config, tmp_path, kinds)
    default = train(runs.with_block(config, tmp_path, min_tensor_bytes=16384), tmp_path, kinds)
    assert default.outcome == without.outcome
    assert [one["plans"] > 0 and not one["recomputed_bytes"] for one in reports(default)] == [True] * len(kinds)


@pytest.mark.parametrize(
    ("config_in", "ranks"),
    [
        pytest.param(lambda _: runs.plain_config(2, bf16={"enabled": True}), 1, id="ZeRO-2, bf16"),
        pytest.param(lambda _: eager(runs.plain_config(3)), 2, id="ZeRO-3, released at once"),
        pytest.param(lambda _: runs.plain_config(3), 2, id="ZeRO-3, defaults"),
        pytest.param(on_nvme, 1, id="ZeRO-3, parameters on NVMe"),
    ],
)
def test_recomputed_blocks_train_as_without_us(
    tmp_path: Path, config_in: Callable[[Path], dict[str, Any]], ranks: int
) -> None:
    config = config_in(tmp_path)
    without = train(config, tmp_path, WITHOUT_STATE, ranks)
    ours = train(runs.with_block(config, tmp_path, **RECOMPUTE), tmp_path, WITHOUT_STATE, ranks)
    assert ours.outcome == without.outcome
    assert [one["recomputed_bytes"] > 0 for one in reports(ours)] == [True] * len(WITHOUT_STATE)


@pytest.mark.parametrize(("kind", "stage", "ranks"), [("counter", 2, 1), ("tracker", 3, 2)])
def test_a_block_with_state_ends_the_run_with_an_error_that_names_it(
    tmp_path: Path, kind: str, stage: int, ranks: int
) -> None:
    """Also on several ranks, of which none is left waiting."""
    config = runs.with_block(runs.plain_config(stage), tmp_path, **RECOMPUTE)
    result = launch(config, tmp_path, [kind], ranks)
    assert result.returncode != 0
    assert "RecomputationError: the forward of the block 'blocks.2'" in result.output
    assert 'naming the others in "blocks"' in result.output
