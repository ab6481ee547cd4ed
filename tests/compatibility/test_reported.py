"""Programs of public reports, each with and without the block: what is given up, forked, or called past the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import programs_reported as programs
import pytest
from compare import PLANNED, compare, refusal
from support.runs import plain_config

pytestmark = pytest.mark.engine
CONFIG = plain_config(0, train_micro_batch_size_per_gpu=2)
UNTIL_BACKWARD: dict[str, Any] = {"until_backward": True, "rematerialize": False}


def test_a_step_that_was_given_up_takes_nothing_of_the_next_engine_s(tmp_path: Path) -> None:
    program = programs.trained_after_a_step_that_failed
    longer, shorter = (
        compare(program, CONFIG, tmp_path / str(steps), block=UNTIL_BACKWARD, steps=steps).results[0]
        for steps in (4, 3)
    )
    assert longer["seen"] == shorter["seen"] == 0
    per_step = longer["report"]["packed_tensors"] - shorter["report"]["packed_tensors"]
    assert per_step * 4 == longer["report"]["packed_tensors"]  # the first step saves as much as the others


@pytest.mark.parametrize("how", ["exits", "unwinds"])
@pytest.mark.parametrize(
    "block",
    [
        {},
        PLANNED,
        pytest.param({"placement": "adaptive", "activation_budget_bytes": 100_000}, marks=pytest.mark.thorough),
        pytest.param({"placement": "keep"}, marks=pytest.mark.thorough),
        {"placement": "host", "host_budget_bytes": 8 << 20},
    ],
    ids=lambda block: "-".join(f"{value}" for value in block.values()) or "nvme",
)
def test_a_child_forked_in_forward_trains_and_its_parent_goes_on(
    tmp_path: Path, block: dict[str, Any], how: str
) -> None:
    moves = block.get("placement") != "keep"
    compare(programs.trained_with_forks, CONFIG, tmp_path, block=block, must_move=moves, how=how)


def test_mutations_that_pytorch_allows_are_refused_by_name(tmp_path: Path) -> None:
    told = refusal(programs.trained_with_mutations, CONFIG, tmp_path, "allow_mutation_on_saved_tensors clones")
    assert "take forward out of that context" in told


@pytest.mark.parametrize(
    ("how", "block", "why"),
    [
        ("module", {}, "Call engine(x), not engine.module(x) or a copy or wrapper of it"),
        ("no_grad", PLANNED, "not under torch.no_grad()"),
        ("engine", {}, ""),
    ],
)
def test_where_nothing_is_offloaded_the_log_and_the_report_say_so(
    tmp_path: Path, how: str, block: dict[str, Any], why: str
) -> None:
    """Beside logging of the script's own, with warnings alone: each line once."""
    program = programs.trained_past_the_engine
    found = compare(program, CONFIG, tmp_path, block=block, must_move=not why, how=how).results[0]
    said = found["output"].splitlines()
    lines = [line for line in said if "nothing was offloaded in step" in line]
    assert [why in line and line.startswith("WARNING:ds_tba:nothing was") for line in lines] == [True] * bool(why)
    assert sum("activations go to" in line for line in said) == 1
    ending = ": nothing was offloaded" if why else ""
    assert (found["report"]["state"], found["ended"]) == (f"running{ending}", f"finished{ending}")
    assert json.loads((tmp_path / "nvme" / "report.json").read_text())["state"] == f"finished{ending}"
    assert found["summary"].startswith("nothing was offloaded, ") == bool(why)
    assert sum(f"rank 0: {found['summary']}" in line for line in said) == 1
