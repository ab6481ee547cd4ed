"""Rematerialization in real engines: by itself, and beside every other placement."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from compare import PLANNED, RECOMPUTED, Compared, Way, rows
from programs_deepspeed import trained, trained_with_a_look
from programs_plain import plain_loop

pytestmark = pytest.mark.engine

ALONE: dict[str, Any] = {"placement": "keep", "nvme_path": None}
BLOCKS: dict[str, dict[str, Any]] = {
    "keep, without a drive": ALONE,
    "nvme": {"placement": "nvme"},
    "host": {"placement": "host", "host_budget_bytes": 64 << 20},
    "adaptive": PLANNED,
    "adaptive with a budget": {"placement": "adaptive", "activation_budget_bytes": 2 << 20},
    "adaptive with recompute": RECOMPUTED,
}
DECIDING = {("Llama", "keep, without a drive"): 3, ("Llama", "adaptive with recompute"): 3}
# A plan is in force for the last of these steps.
LOOP = {"steps": 8, "has_cache": False}


def again(compared: Compared, *, is_alone: bool = False) -> str:
    assert compared.total("rematerialized") > 0
    for report in compared.reports:
        assert not is_alone or report["step_peak_saved_bytes"] < 0.8 * report["peak_saved_bytes_without"]
    return str(compared)


WAYS = [
    # A plan may do without: it is a matter of measured times.
    *(
        Way(f"{model}, ZeRO-{{}}, {name}", plain_loop, {"model": model, **LOOP}, [stage], block=block,
            decides=DECIDING.get((model, name)),
            says=str if block["placement"] == "adaptive" else partial(again, is_alone=block is ALONE))
        for model, stage in (("Llama", 3), ("GPT-2", 2))
        for name, block in BLOCKS.items()
    ),
    # Without a drive; with one, all of ``test_deepspeed.py`` rematerializes.
    Way("ZeRO-{}, lengths that change in every step", trained, {"lengths_change": True, "steps": 12}, [2], decides=2,
        block=ALONE, says=again),
    Way("ZeRO-{}, parameters gathered between forward and backward", trained_with_a_look, {}, [3], decides=3,
        block=ALONE, says=again),
]  # fmt: skip


@pytest.mark.parametrize(("way", "stage"), rows("Rematerialization", WAYS))
def test_way(way: Way, stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    compared = way.compared(stage, tmp_path, must_move=way.block is not ALONE)
    assert [report["budget_excess_bytes"] for report in compared.reports] == [0]
    row_says(way.says(compared))


def test_excluded_ops_are_saved(tmp_path: Path) -> None:
    way = Way("", plain_loop, {"has_cache": False}, block={**ALONE, "rematerialize": {"exclude": ["silu"]}})
    sites = way.compared(2, tmp_path, must_move=False).reports[0]["rematerialized_sites"]
    assert "mul" in sites and "silu" not in sites
