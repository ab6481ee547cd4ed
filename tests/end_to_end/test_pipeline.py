"""DeepSpeed's pipeline engine, several micro-batches in flight: the results of the run without us, and a lower peak.

The cases of one number of ranks train one after the other in one job, which takes longer to start than they take.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import forked
import pytest
import torch
from compare import agrees
from curves.throttled import opened
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from programs_deepspeed import ended
from support import runs
from support.modelled_drive import ModelledDrive
from support.models import Mlp
from torch import Tensor, nn

pytestmark = pytest.mark.engine
MICRO_BATCHES = 4
ADAPTIVE = {"placement": "adaptive", "max_step_overhead": 1000.0}
HOST = {"placement": "host", "host_budget_bytes": 32 << 20}
# The memory of the first steps is looked at, which is more where they prove.
SAVED = {"rematerialize": False}
BF16 = {"bf16": {"enabled": True}}
TIMEOUT_S = 600
BY_NAME = 'excluded by name: "except" has 4'


# ---- the program ----------------------------------------------------------------------------------------------------

WIDTH, CLASSES, DEPTH, ROWS = 64, 32, 4, 32


class Stage(nn.Module):
    """A layer that hands over the mask that it gets beside its input."""

    def forward(self, x: Any) -> Any:
        x, *mask = x if isinstance(x, tuple) else (x,)
        x = self.of(x)
        return (x * mask[0].to(x.dtype), *mask) if mask else x


class Embedding(Stage):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH) / 8)

    def of(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x, self.weight)


class Block(Stage):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(WIDTH, 0.1)

    def of(self, x: Tensor) -> Tensor:
        # The output is saved, too, and is what the engine sends to the next stage.
        return torch.tanh(self.mlp(x))


class Head(nn.Linear):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x[0] if isinstance(x, tuple) else x)


def logits(embedding: Embedding, x: Tensor) -> Tensor:
    return nn.functional.linear(x, embedding.weight)


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.float().view(-1, CLASSES), labels.view(-1))


def batches(seed: int, varies: bool, is_masked: bool) -> Iterator[tuple[Any, Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    for number in itertools.count():
        length = 32 + 8 * (number // MICRO_BATCHES % 3) if varies else 32
        tokens = torch.randint(0, CLASSES, (ROWS, length), generator=chance)
        mask = (torch.rand(ROWS, length, 1, generator=chance) > 0.1).long()
        yield (tokens, mask) if is_masked else tokens, tokens.roll(1, 1)


def trained(
    config: dict[str, Any],
    *,
    steps: int = 6,
    stages: int = 2,
    tied: bool = False,
    evaluates: bool = False,
    varies: bool = False,
    is_masked: bool = False,
    is_seeded: bool = False,
    tensor_parallel: int = 1,
    bytes_per_s: float | None = None,
) -> dict[str, Any]:
    """Train a pipeline.

    Args:
        varies: micro-batches of another length in every step.
        is_masked: stages hand over a tuple.
        is_seeded: PipelineModule seeds every layer.
        tensor_parallel: ranks that divide what stages hand over among them.
        bytes_per_s: rate of the drives, or None for the machine's own.
    """
    deepspeed.init_distributed(dist_backend="gloo")
    others = deepspeed.comm.get_world_size() // stages
    topology = PipeDataParallelTopology(stages, others)
    if tensor_parallel > 1:
        topology = PipeModelDataParallelTopology(stages, tensor_parallel, others // tensor_parallel)
    torch.manual_seed(0)
    first, last = LayerSpec(Embedding), LayerSpec(Head, WIDTH, CLASSES)
    if tied:
        first = TiedLayerSpec("embedding", Embedding)
        last = TiedLayerSpec("embedding", Embedding, forward_fn=logits)
    model = PipelineModule(
        [first, *(LayerSpec(Block) for _ in range(DEPTH)), last], topology=topology, loss_fn=loss_of,
        partition_method="uniform", checkpointable_layers=["Block"], seed_layers=is_seeded, dynamic_shape=varies,
    )  # fmt: skip
    with opened(ModelledDrive(bytes_per_s) if bytes_per_s else None):
        engine, *_ = deepspeed.initialize(config=config, model=model, model_parameters=list(model.parameters()))
    torch.manual_seed(100 + engine.global_rank)
    data, held_out = (batches(seed, varies, is_masked) for seed in (engine.grid.data_parallel_id, 1000))
    losses = []
    for step in range(steps):
        losses.append(engine.train_batch(data).item())
        if evaluates and step % 2:
            losses.append(engine.eval_batch(held_out).item())
    return ended(engine, losses)


# ---- its cases ------------------------------------------------------------------------------------------------------


def train(
    directory: Path, ranks: int, cases: dict[str, tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]]
) -> dict[str, list[dict[str, Any]]]:
    """Return what each rank returns of each case, and of it with each block as ``CASE.NUMBER``: the same as without.

    Args:
        cases: options of the program, what the config has beside the usual, and the blocks.
    """
    each: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for name, (options, more, blocks) in cases.items():
        common = {"gradient_accumulation_steps": MICRO_BATCHES, "train_micro_batch_size_per_gpu": 1}
        plain = runs.plain_config(**{**common, **more})
        each[name] = plain, options
        for number, block in enumerate(blocks):
            own = directory / f"{name}.{number}"
            own.mkdir()
            io = {"staging_bytes": 8 << 20, "swap_file_bytes": 128 << 20}
            each[own.name] = runs.with_block(plain, own, **{"min_tensor_bytes": 65536, "io": io, **block}), options
    results = forked.run_each(trained, [*each.values()], directory, ranks=ranks, timeout_s=TIMEOUT_S)
    found = dict(zip(each, results, strict=True))
    for name in found:
        if "." in name:
            agrees(found[name.partition(".")[0]], found[name], must_move=False)
    return found


def test_two_stages_with_micro_batches_in_flight(tmp_path: Path) -> None:
    keep, nvme = {"placement": "keep"}, {"placement": "nvme"}
    named = {**nvme, "except": ["4"]}  # of the second stage
    moved = [{**block, **SAVED} for block in (keep, nvme, HOST, ADAPTIVE, named)]
    seen = {"steps": 7, "evaluates": True}
    checkpointed, non_reentrant = {"activation_checkpoint_interval": 1}, {"use_reentrant": False}
    held = {**ADAPTIVE, "activation_budget_bytes": 3 << 20}
    cases = {
        "fp32": (seen, {}, moved),
        "bf16": ({**seen, "tied": True}, {"stage": 1, **BF16}, [ADAPTIVE]),
        "checkpointed": (seen, {"pipeline": checkpointed}, [ADAPTIVE]),
        "non_reentrant": ({}, {"pipeline": {**checkpointed, **non_reentrant}}, [nvme]),
        "varies": ({"varies": True, "steps": 9}, {}, [ADAPTIVE]),
        "masked": ({"is_masked": True}, {"stage": 1}, [held]),
        "one_stage": ({"stages": 1, "steps": 8}, {}, [ADAPTIVE]),
    }
    found = train(tmp_path, 2, cases)
    for rank in range(2):
        kept, *others = (found[f"fp32.{number}"][rank]["report"] for number in range(4))
        assert kept["offloaded_bytes"] == 0
        for report in others:
            assert report["offloaded_bytes"] > 0 and report["fallbacks"] == 0
            assert report["peak_saved_bytes_without"] == kept["peak_saved_bytes"]
            assert report["peak_saved_bytes"] < kept["peak_saved_bytes"] / 3
        for name in ("fp32.3", "bf16.0", "varies.0", "masked.0", "one_stage.0"):
            report = found[name][rank]["report"]
            assert report["plans"] >= 1 and report["plan"]["bytes"]["nvme"] > 0
            assert report["steps"] == report["micro_steps"]
        assert found["masked.0"][rank]["report"]["budget_excess_bytes"] == 0
    excluded = [found["fp32.4"][rank]["report"]["kept_bytes_by_reason"].get(BY_NAME, 0) for rank in range(2)]
    assert excluded[0] == 0 < excluded[1]
    first, last = (found["fp32.0"][rank]["report"]["peak_saved_bytes"] for rank in range(2))
    assert first > 1.9 * last  # the first stage has two micro-batches in flight


@pytest.mark.thorough
def test_stages_recompute_each_what_its_drive_asks_for(tmp_path: Path) -> None:
    # More than the 4.2 MB that the trial of a block takes.
    block = {**ADAPTIVE, "activation_budget_bytes": 5_000_000, "recompute": True}
    options = {"steps": 10, "is_masked": True, "is_seeded": True, "bytes_per_s": 10e6}
    found = train(tmp_path, 2, {"slow": (options, {}, [block])})
    for rank in range(2):
        report = found["slow.0"][rank]["report"]
        assert report["recomputed_bytes"] > 0 and report["plan"]["recomputed_blocks"] > 0
        assert report["budget_excess_bytes"] == 0


def test_two_stages_of_two_ranks_follow_a_plan_for_each_stage(tmp_path: Path) -> None:
    options = {"steps": 8, "tied": True, "evaluates": True}
    divided = {"pipe_partitioned": True, "grad_partitioned": True}
    cases = {
        "grid": (options, {"stage": 1}, [ADAPTIVE]),
        # DeepSpeed replaces the data of what a stage returns, and puts it back together for backward.
        "divided": ({"tensor_parallel": 2}, {"pipeline": divided}, [{"placement": "nvme"}]),
    }
    found = train(tmp_path, 4, cases)
    plans = [found["grid.0"][rank]["report"]["plan"] for rank in range(4)]
    for plan in plans:
        plan |= {"reason": "", "measured_step_s": None}  # those are a rank's own
    assert plans[0] == plans[1] and plans[2] == plans[3]  # ranks 0 and 1 hold the first stage
    assert plans[0] != plans[2]
    assert all(found["grid.0"][rank]["report"]["plans"] >= 1 for rank in range(4))
