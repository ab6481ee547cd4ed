"""Rematerialization in real engines: by itself, and beside every other placement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs_deepspeed
import pytest
from compare import PLANNED, RECOMPUTED, compare, row
from forked import Program
from programs_plain import plain_loop
from support.runs import plain_config

pytestmark = pytest.mark.engine

SECTION = "Rematerialization"
STEPS = 8  # a plan is in force for the last of them
BUDGET_BYTES = 2 << 20
ALONE: dict[str, Any] = {"placement": "keep", "nvme_path": None}
BLOCKS: dict[str, dict[str, Any]] = {
    "keep, without a drive": ALONE,
    "nvme": {"placement": "nvme"},
    "host": {"placement": "host", "host_budget_bytes": 64 << 20},
    "adaptive": PLANNED,
    "adaptive with a budget": {"placement": "adaptive", "activation_budget_bytes": BUDGET_BYTES},
    "adaptive with recompute": RECOMPUTED,
}
DECIDING = {("Llama", "keep, without a drive"), ("Llama", "adaptive with recompute")}


def config_of(stage: int) -> dict[str, Any]:
    return plain_config(stage, train_micro_batch_size_per_gpu=2)


@pytest.mark.parametrize(
    ("model", "stage", "block"),
    [
        row(SECTION, f"{model}, ZeRO-{stage}, {name}", model, stage, block, decides=(model, name) in DECIDING)
        for model, stage in (("Llama", 3), ("GPT-2", 2))
        for name, block in BLOCKS.items()
    ],
)
def test_placement(
    model: str, stage: int, block: dict[str, Any], tmp_path: Path, row_says: Callable[[str], None]
) -> None:
    is_alone = block is ALONE
    compared = compare(
        plain_loop, config_of(stage), tmp_path, block=block, must_move=not is_alone, model=model, steps=STEPS,
        has_cache=False,
    )  # fmt: skip
    if block.get("placement") != "adaptive":  # a plan may do without: it is a matter of measured times
        assert compared.rematerialized_bytes > 0
    for report in compared.reports:
        assert report["budget_excess_bytes"] == 0
        assert not is_alone or report["step_peak_saved_bytes"] < 0.8 * report["peak_saved_bytes_without"]
    row_says(str(compared))


@pytest.mark.parametrize(
    ("program", "stage", "arguments"),
    [
        row(SECTION, "ZeRO-2, lengths that change in every step", programs_deepspeed.trained, 2,
            {"lengths_change": True, "steps": 12}, decides=True),
        row(SECTION, "ZeRO-3, parameters gathered between forward and backward", programs_deepspeed.trained_with_a_look,
            3, {}, decides=True),
    ],
)  # fmt: skip
def test_way(
    program: Program, stage: int, arguments: dict[str, Any], tmp_path: Path, row_says: Callable[[str], None]
) -> None:
    """Without a drive; with one, all of ``test_deepspeed.py`` rematerializes."""
    compared = compare(program, config_of(stage), tmp_path, block=ALONE, must_move=False, **arguments)
    assert compared.rematerialized_bytes > 0
    row_says(str(compared))


def test_excluded_ops_are_saved(tmp_path: Path) -> None:
    ops = ["mul", "silu", "cast"]
    block = {**ALONE, "rematerialize": {"exclude": ops}}
    compared = compare(plain_loop, config_of(2), tmp_path, block=block, must_move=False, has_cache=False)
    assert not set(compared.reports[0]["rematerialized_sites"]) & set(ops)
