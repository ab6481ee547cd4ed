"""Compiled models: what ``torch.compile`` compiles, and every loss, are as without the block."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from compare import agrees
from programs_deepspeed import ended, started
from support import runs
from support.models import Mlp, Stack
from torch import Tensor, nn
from torch._dynamo.utils import compilation_time_metrics, counters
from torch.nn import functional

pytestmark = pytest.mark.engine

# Saved by the whole model in the script, which is compiled as one graph.
STEP_BYTES = 20 << 20
STEPS = 10
WIDTH, BATCH, LAYERS = 64, 4, 4
LENGTHS = (256, 384, 256, 512, 448, 320)


class Net(Stack):
    """A model whose forward may be a frame that the compiler gives up."""

    def __init__(self, breaks: bool) -> None:
        super().__init__(partial(Mlp, WIDTH), LAYERS, nn.Linear(WIDTH, 1))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        if not self.breaks:
            return super().forward(x)
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
            x = functional.gelu(x)
        return self.head(x).square().mean()


def built(config: dict[str, Any], way: str, backend: str, breaks: bool) -> Any:
    def build() -> nn.Module:
        model = Net(breaks)
        if way == "model":
            model.compile(backend=backend)
        if way == "wrapped":
            for index, block in enumerate(model.layers):
                model.layers[index] = torch.compile(block, backend=backend)
        return model

    engine = started(config, build)
    for module in {"engine": [engine], "blocks": engine.module.layers}.get(way, []):
        module.compile(backend=backend)
    return engine


def compiled_frames() -> int:
    return len(compilation_time_metrics.get("_compile.compile_inner", ()))


def trained(
    config: dict[str, Any], way: str, backend: str = "aot_eager", varies: bool = False, breaks: bool = False
) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    compilation_time_metrics.clear()
    engine = built(config, way, backend, breaks)
    chance = torch.Generator().manual_seed(1)
    losses, compiled_in = [], []
    for step in range(STEPS):
        compiled, length = compiled_frames(), LENGTHS[step % 6] if varies else 512
        loss = engine(torch.randn(BATCH, length, WIDTH, generator=chance))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if compiled_frames() > compiled:
            compiled_in.append(step)
    graphs, graph_breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    more = {"compiled": compiled_frames(), "graphs": graphs, "breaks": graph_breaks, "compiled_in": compiled_in}
    return ended(engine, losses, **more)


def train(directory: Path, stage: int, blocks: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    """Train without the block, and with each; nothing else is compiled, in no other step. Return the reports."""
    plain = runs.plain_config(stage)
    if stage == 3:
        plain["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    common = {"min_tensor_bytes": 65536, "max_step_overhead": 1000.0}
    configs = [plain, *(runs.with_block(plain, directory, **common, **block) for block in blocks)]
    expected, *found = forked.run_each(trained, [(one, options) for one in configs], directory, timeout_s=900)
    counts = ("compiled", "graphs", "breaks", "compiled_in")
    return [agrees(expected, one, must_move=False, more=counts).reports[0] for one in found]


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, {"way": "engine", "breaks": True}),  # Python runs the frame then, with the compiler on for what it calls
        pytest.param(2, {"way": "model", "varies": True}, marks=pytest.mark.slow),
        pytest.param(2, {"way": "wrapped", "varies": True}, marks=pytest.mark.slow),
        pytest.param(3, {"way": "engine"}, marks=pytest.mark.slow),
        pytest.param(3, {"way": "blocks", "varies": True}, marks=pytest.mark.slow),
    ],
    ids=lambda one: " ".join(map(str, one.values())) if isinstance(one, dict) else f"ZeRO-{one}",
)
def test_the_same_is_compiled_with_us_and_without(tmp_path: Path, stage: int, options: dict[str, Any]) -> None:
    traced = {"placement": "keep", "report": {"trace_path": str(tmp_path / "trace.json")}}
    blocks: list[dict[str, Any]] = [{}, {"recompute": True}, {"placement": "nvme"}, traced]
    adaptive, recompute, nvme, keep = train(tmp_path, stage, blocks, **options)
    assert adaptive["plans"] >= 1 and recompute["plans"] >= 1 and (tmp_path / "trace.json").exists()
    assert nvme["offloaded_bytes"] > 0 and keep["offloaded_bytes"] == 0


def test_compiled_layers_save_less_at_once(tmp_path: Path) -> None:
    for report in train(tmp_path, 2, [{}, {"placement": "nvme"}], way="blocks", backend="inductor"):
        # Half, and the model's input, which leaves when the operation that saves it is over.
        assert report["peak_saved_bytes"] < 0.51 * report["peak_saved_bytes_without"]


@pytest.mark.thorough
def test_of_a_model_that_is_one_graph_plans_move_nothing(tmp_path: Path) -> None:
    budget = {"activation_budget_bytes": STEP_BYTES // 2}
    adaptive, held, nvme = train(tmp_path, 0, [{}, budget, {"placement": "nvme"}], way="engine")
    assert nvme["offloaded_bytes"] == STEPS * STEP_BYTES
    for report in (adaptive, held):  # in the steps before the first plan
        assert report["plans"] >= 1 and report["offloaded_bytes"] < 0.6 * STEPS * STEP_BYTES
    for report in (adaptive, held, nvme):
        assert report["peak_saved_bytes"] >= report["peak_saved_bytes_without"]
