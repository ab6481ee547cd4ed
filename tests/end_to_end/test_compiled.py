"""Compiled models: what ``torch.compile`` compiles, and every loss, are as without the block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import runs

pytestmark = pytest.mark.engine

ADVICE = "moving activations does not lower their peak"
# Saved by the whole model in the script, which is compiled as one graph.
STEP_BYTES = 21 << 20
STEPS = 10


def train(
    directory: Path, stage: int, blocks: list[dict[str, Any]], *arguments: str
) -> tuple[list[dict[str, Any]], str]:
    """One run without the block, one with each, and the output."""
    plain = runs.plain_config(stage)
    if stage == 3:
        plain["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    common = {"min_tensor_bytes": 65536, "max_step_overhead": 1000.0}
    configs = [plain, *(runs.with_block(plain, directory, **common, **block) for block in blocks)]
    (directory / "configs.json").write_text(json.dumps(configs))
    arguments = ("--configs", str(directory / "configs.json"), "--steps", str(STEPS), *arguments)
    done = runs.run(None, directory, *arguments, script=runs.SCRIPTS / "compiled.py", timeout_s=900)
    assert done.returncode == 0, done.output
    found = [json.loads(line.removeprefix("RUN ")) for line in done.lines("RUN")]
    of_run = {run["number"]: run for run in found}
    return [of_run[number] for number in range(len(configs))], done.output


def same(runs: list[dict[str, Any]]) -> None:
    """Results are those of the first run, and nothing else was compiled, in no other step."""
    for key in ("losses", "parameters", "compiled", "graphs", "breaks", "compiled_in"):
        assert [run[key] for run in runs] == [runs[0][key]] * len(runs), key


@pytest.mark.parametrize(
    ("stage", "arguments"),
    [
        (0, ["--way", "engine", "--breaks"]),  # Python runs the frame then, with the compiler on for what it calls
        pytest.param(2, ["--way", "model", "--varying"], marks=pytest.mark.slow),
        pytest.param(2, ["--way", "wrapped", "--varying"], marks=pytest.mark.slow),
        pytest.param(3, ["--way", "engine"], marks=pytest.mark.slow),
        pytest.param(3, ["--way", "blocks", "--varying"], marks=pytest.mark.slow),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else f"ZeRO-{one}",
)
def test_the_same_is_compiled_with_us_and_without(tmp_path: Path, stage: int, arguments: list[str]) -> None:
    traced = {"placement": "keep", "report": {"trace_path": str(tmp_path / "trace.json")}}
    blocks: list[dict[str, Any]] = [{}, {"recompute": True}, {"placement": "nvme"}, traced]
    found, _ = train(tmp_path, stage, blocks, *arguments)
    same(found)
    adaptive, recompute, nvme, keep = (run["report"] for run in found[1:])
    assert adaptive["plans"] >= 1 and recompute["plans"] >= 1 and (tmp_path / "trace.json").exists()
    assert nvme["offloaded_bytes"] > 0 and keep["offloaded_bytes"] == 0


def test_compiled_layers_save_less_at_once(tmp_path: Path) -> None:
    found, output = train(tmp_path, 2, [{}, {"placement": "nvme"}], "--way", "blocks", "--backend", "inductor")
    same(found)
    for run in found[1:]:
        report = run["report"]
        # Half, and the model's input, which leaves when the operation that saves it is over.
        assert report["peak_saved_bytes"] < 0.51 * report["peak_saved_bytes_without"]
    assert ADVICE not in output


@pytest.mark.thorough
def test_of_a_model_that_is_one_graph_plans_move_nothing_and_that_is_said_once(tmp_path: Path) -> None:
    budget = {"activation_budget_bytes": STEP_BYTES // 2}
    found, output = train(tmp_path, 0, [{}, budget, {"placement": "nvme"}], "--way", "engine")
    same(found)
    adaptive, held, nvme = (run["report"] for run in found[1:])
    assert nvme["offloaded_bytes"] == STEPS * STEP_BYTES
    for report in (adaptive, held):  # in the steps before the first plan
        assert report["plans"] >= 1 and report["offloaded_bytes"] < 0.6 * STEPS * STEP_BYTES
    for report in (adaptive, held, nvme):
        assert report["peak_saved_bytes"] >= report["peak_saved_bytes_without"]
    assert output.count(ADVICE) == 3 and "layer.compile()" in output  # once in each run
