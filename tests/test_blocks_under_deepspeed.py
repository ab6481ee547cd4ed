"""Blocks recomputed under ZeRO, in real engines: losses, parameters and random numbers as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs

pytestmark = pytest.mark.engine

# Parameters leave as soon as they may, so that a use before they are gathered, or after, is an error and not luck.
EAGER = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 0,
    "stage3_prefetch_bucket_size": 0,
}
PASSES, RECOMPUTED = 40, 25


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
