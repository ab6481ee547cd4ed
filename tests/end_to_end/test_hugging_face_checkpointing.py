"""Hugging Face models that are checkpointed in every way, under ZeRO and with ``"recompute": true``: losses and
parameters as without us, and each block that is not recomputed is named with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support import runs

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]

STEPS, LAYERS = 14, 3
SAVES_NOTHING, CACHE = "its forward saves nothing but its inputs", "it fills a cache of keys and values"
# Larger than anything that these models save: recomputing alone makes the peak lower.
NOTHING_MOVES_BYTES = 32 << 20
# By case: how many blocks are not recomputed, and why, as the log says it.
REASONS = {
    "llama/none": (0, ""),
    "llama/selective": (0, ""),
    "llama/tiled_loss": (0, ""),
    "llama/non_reentrant": (LAYERS, SAVES_NOTHING),
    "llama/reentrant": (LAYERS, SAVES_NOTHING),
    "llama/deepspeed": (LAYERS, SAVES_NOTHING),
    "llama/cached": (LAYERS, CACHE),
    "qwen3_moe/non_reentrant": (LAYERS, SAVES_NOTHING),
    "t5/non_reentrant": (2 * LAYERS, SAVES_NOTHING),
    "t5/reentrant": (2 * LAYERS, SAVES_NOTHING),
    "t5/cached": (LAYERS, CACHE),
}
IN_BRIEF = ["llama/selective", "llama/tiled_loss", "llama/deepspeed", "llama/cached", "t5/non_reentrant"]


def train(config: dict[str, Any], directory: Path, cases: Iterable[str], ranks: int = 1) -> runs.Result:
    script = runs.SCRIPTS / "hugging_face.py"
    result = runs.run(config, directory, "--cases", *cases, ranks=ranks, script=script, timeout_s=900)
    assert result.returncode == 0, result.output
    assert len(result.outcome[0]) == ranks * STEPS * len(list(cases))
    return result


def check(config: dict[str, Any], directory: Path, cases: list[str], ranks: int = 1, **block: Any) -> None:
    without = train(config, directory, cases, ranks)
    block = {"min_tensor_bytes": 16384, "recompute": True, "max_step_overhead": 1000.0, **block}
    ours = train(runs.with_block(config, directory, **block), directory, cases, ranks)
    assert ours.outcome == without.outcome
    lines = [line for line in ours.lines("REPORT") if line.startswith("REPORT 0 ")]
    reports = {one["case"]: one for one in (json.loads(line.removeprefix("REPORT 0 ")) for line in lines)}
    assert list(reports) == sorted(cases)
    said = [line for line in ours.output.splitlines() if "not recomputed: " in line]
    assert len(said) == sum(count > 0 for count, _ in map(REASONS.get, cases))
    for count, reason in filter(lambda one: one[0], map(REASONS.get, cases)):
        assert any(f"and {count - 1} more blocks are not recomputed: {reason}" in line for line in said), (reason, said)
    for case, report in reports.items():
        count, reason = REASONS[case]
        assert report["plans"] >= 1
        if block["min_tensor_bytes"] == NOTHING_MOVES_BYTES:
            assert (report["recomputed_bytes"] > 0) == (count < LAYERS or case == "t5/cached"), case
        else:
            assert report["written_bytes"] > 0, case


def config(stage: int) -> dict[str, Any]:
    return runs.plain_config(stage, train_micro_batch_size_per_gpu=2)


def test_zero_3(tmp_path: Path) -> None:
    check(config(3), tmp_path, IN_BRIEF)


@pytest.mark.slow
def test_zero_3_with_every_way_to_checkpoint(tmp_path: Path) -> None:
    check(config(3), tmp_path, [case for case in REASONS if case not in IN_BRIEF])


@pytest.mark.slow
def test_zero_3_where_recomputing_is_all_that_helps(tmp_path: Path) -> None:
    cases = ["llama/selective", "llama/tiled_loss", "llama/non_reentrant", "t5/cached"]
    check(config(3), tmp_path, cases, min_tensor_bytes=NOTHING_MOVES_BYTES)


@pytest.mark.slow
def test_zero_3_with_two_ranks(tmp_path: Path) -> None:
    cases = ["llama/selective", "llama/non_reentrant"]
    check(config(3), tmp_path, cases, 2, min_tensor_bytes=NOTHING_MOVES_BYTES)


@pytest.mark.slow
def test_zero_2(tmp_path: Path) -> None:
    check(config(2), tmp_path, ["llama/non_reentrant", "llama/selective", "t5/reentrant", "llama/cached"])
