"""DeepSpeed's pipeline engine, several micro-batches in flight: the results of the run without us, and a lower peak.

The cases of one number of ranks train one after the other in one job, which takes longer to start than they take.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import forked
import pytest
import torch
from curves.throttled import opened
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from support import runs
from support.modelled_drive import ModelledDrive
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
Found = dict[tuple[str, int], dict[str, Any]]


# ---- the program ----------------------------------------------------------------------------------------------------

WIDTH, CLASSES = 64, 32
OPTIONS = {
    "steps": 6,
    "stages": 2,
    "depth": 4,
    "rows": 32,
    "tied": False,
    "evaluates": False,
    "varies": False,  # micro-batches of other lengths in every step
    "is_masked": False,  # stages hand over a tuple
    "is_seeded": False,  # PipelineModule seeds every layer
    "tensor_parallel": 1,  # ranks that divide what stages hand over among them
    "raises": False,  # once, in the middle of a schedule; the script goes on with the next batch
}


class Interruption(Exception):
    """Raised by a block."""


class Embedding(nn.Module):
    def __init__(self, options: SimpleNamespace) -> None:
        super().__init__()
        self.is_masked = options.is_masked
        self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH) / 8)

    def forward(self, x: Any) -> Any:
        if self.is_masked:
            tokens, mask = x
            return nn.functional.embedding(tokens, self.weight), mask
        return nn.functional.embedding(x, self.weight)


class Block(nn.Module):
    def __init__(self, options: SimpleNamespace) -> None:
        super().__init__()
        self.is_masked = options.is_masked
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        x, *mask = x if self.is_masked else (x,)
        # The output is saved, too, and is what the engine sends to the next stage.
        x = torch.tanh(x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x))))))
        return (x * mask[0].to(x.dtype), *mask) if self.is_masked else x


class Raising(Block):
    passes = 0

    def forward(self, x: Any) -> Any:
        if torch.is_grad_enabled():
            Raising.passes += 1
            if Raising.passes == 14:
                raise Interruption
        return super().forward(x)


class Head(nn.Module):
    def __init__(self, options: SimpleNamespace) -> None:
        super().__init__()
        self.is_masked = options.is_masked
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.out(x[0] if self.is_masked else x)


def logits(embedding: Embedding, x: Any) -> Tensor:
    return nn.functional.linear(x[0] if embedding.is_masked else x, embedding.weight)


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.float().view(-1, CLASSES), labels.view(-1))


def batches(options: SimpleNamespace, micro_batches: int, seed: int) -> Iterator[tuple[Any, Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    step = 0
    while True:
        for _ in range(micro_batches):
            length = 32 + 8 * (step % 3) if options.varies else 32
            tokens = torch.randint(0, CLASSES, (options.rows, length), generator=chance)
            mask = (torch.rand(options.rows, length, 1, generator=chance) > 0.1).long()
            yield (tokens, mask) if options.is_masked else tokens, tokens.roll(1, 1)
        step += 1


def layers_of(options: SimpleNamespace) -> list[Any]:
    block = Raising if options.raises else Block
    first, last = LayerSpec(Embedding, options), LayerSpec(Head, options)
    if options.tied:
        first = TiedLayerSpec("embedding", Embedding, options)
        last = TiedLayerSpec("embedding", Embedding, options, forward_fn=logits)
    return [first, *(LayerSpec(block, options) for _ in range(options.depth)), last]


def topology_of(options: SimpleNamespace) -> Any:
    others = deepspeed.comm.get_world_size() // options.stages
    if options.tensor_parallel == 1:
        return PipeDataParallelTopology(options.stages, others)
    return PipeModelDataParallelTopology(options.stages, options.tensor_parallel, others // options.tensor_parallel)


def trained(config: dict[str, Any], options: SimpleNamespace) -> dict[str, Any]:
    Raising.passes = 0
    torch.manual_seed(0)
    model = PipelineModule(
        layers_of(options),
        topology=topology_of(options),
        loss_fn=loss_of,
        partition_method="uniform",
        checkpointable_layers=["Block"],
        seed_layers=options.is_seeded,
        dynamic_shape=options.varies,
    )
    engine, *_ = deepspeed.initialize(config=config, model=model, model_parameters=list(model.parameters()))
    torch.manual_seed(100 + engine.global_rank)
    micro_batches = engine.gradient_accumulation_steps()
    data = batches(options, micro_batches, engine.grid.data_parallel_id)
    held_out = batches(options, micro_batches, 1000)
    losses = []
    for step in range(options.steps):
        try:
            losses.append(engine.train_batch(data).item().hex())
        except Interruption:
            engine.timers("train_batch").stop()
            engine.zero_grad()
            losses.append("raised")
            continue
        if options.evaluates and step % 2:
            losses.append(engine.eval_batch(held_out).item().hex())
    digest = hashlib.sha256()
    for parameter in engine.module.parameters():
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    engine.destroy()
    return {"losses": losses, "parameters": digest.hexdigest()}


def train_cases(_: None, cases: list[dict[str, Any]], bytes_per_s: float | None) -> dict[str, Any]:
    """Train pipelines one after the other, with drives of a rate, or the machine's own."""
    deepspeed.init_distributed(dist_backend="gloo")
    found = {}
    with opened(ModelledDrive(bytes_per_s) if bytes_per_s else None):
        for one in cases:
            found[one["name"]] = trained(one["config"], SimpleNamespace(**{**OPTIONS, **one["options"]}))
            gc.collect()
    deepspeed.comm.destroy_process_group()
    return found


# ---- its cases ------------------------------------------------------------------------------------------------------


def case(
    directory: Path, name: str, options: dict[str, Any], config: dict[str, Any], *blocks: dict[str, Any]
) -> list[dict[str, Any]]:
    """A training without the block, and with each of these blocks."""
    plain = runs.plain_config(config.pop("stage", 0), gradient_accumulation_steps=MICRO_BATCHES, **config)
    plain["train_micro_batch_size_per_gpu"] = 1
    cases = [{"name": name, "options": options, "config": plain}]
    for number, block in enumerate(blocks):
        own = directory / f"{name}.{number}"
        own.mkdir()
        io = {"staging_bytes": 8 << 20, "swap_file_bytes": 128 << 20}
        with_us = runs.with_block(plain, own, **{"min_tensor_bytes": 65536, "io": io, **block})
        cases.append({"name": own.name, "options": options, "config": with_us})
    return cases


def train(directory: Path, cases: list[dict[str, Any]], ranks: int, bytes_per_s: float | None = None) -> Found:
    """Return what each rank of each case has found, with its report where it has the block."""
    arguments = {"cases": cases, "bytes_per_s": bytes_per_s}
    trained = forked.run(train_cases, None, directory, ranks=ranks, timeout_s=TIMEOUT_S, **arguments)
    found: Found = {}
    for rank, of_rank in enumerate(trained):
        del of_rank["output"]
        for name, one in of_rank.items():
            report = directory / name / ("report.json" + (f".rank{rank}" if rank else ""))
            found[name, rank] = {"results": one, "report": json.loads(report.read_text()) if report.exists() else None}
    assert len(found) == len(cases) * ranks
    for (name, rank), one in found.items():
        assert one["results"] == found[name.partition(".")[0], rank]["results"], f"{name}, rank {rank}"
    return found


def test_two_stages_with_micro_batches_in_flight(tmp_path: Path) -> None:
    keep, nvme = {"placement": "keep"}, {"placement": "nvme"}
    named = {**nvme, "except": ["4"]}  # of the second stage
    moved = [{**block, **SAVED} for block in (keep, nvme, HOST, ADAPTIVE, named)]
    seen = {"steps": 7, "evaluates": True}
    found = train(
        tmp_path,
        [
            *case(tmp_path, "fp32", seen, {}, *moved),
            *case(tmp_path, "bf16", {**seen, "tied": True}, {"stage": 1, **BF16}, ADAPTIVE),
            *case(tmp_path, "checkpointed", seen, {"pipeline": {"activation_checkpoint_interval": 1}}, ADAPTIVE),
            *case(
                tmp_path,
                "non_reentrant",
                {},
                {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}},
                nvme,
            ),
            *case(tmp_path, "varies", {"varies": True, "steps": 9}, {}, ADAPTIVE),
            *case(
                tmp_path, "masked", {"is_masked": True}, {"stage": 1}, {**ADAPTIVE, "activation_budget_bytes": 3 << 20}
            ),
        ],
        ranks=2,
    )
    for rank in range(2):
        kept, *others = (found[f"fp32.{number}", rank]["report"] for number in range(4))
        assert kept["offloaded_bytes"] == 0
        for report in others:
            assert report["offloaded_bytes"] > 0 and report["fallbacks"] == 0
            assert report["peak_saved_bytes_without"] == kept["peak_saved_bytes"]
            assert report["peak_saved_bytes"] < kept["peak_saved_bytes"] / 3
        for name in ("fp32.3", "bf16.0", "varies.0", "masked.0"):
            report = found[name, rank]["report"]
            assert report["plans"] >= 1 and report["plan"]["bytes"]["nvme"] > 0
            assert report["steps"] == report["micro_steps"]
        assert found["masked.0", rank]["report"]["budget_excess_bytes"] == 0
    excluded = [found["fp32.4", rank]["report"]["kept_bytes_by_reason"].get(BY_NAME, 0) for rank in range(2)]
    assert excluded[0] == 0 < excluded[1]
    first, last = (found["fp32.0", rank]["report"]["peak_saved_bytes"] for rank in range(2))
    assert first > 1.9 * last  # the first stage has two micro-batches in flight


@pytest.mark.thorough
def test_stages_recompute_each_what_its_drive_asks_for(tmp_path: Path) -> None:
    # More than the 4.2 MB that the trial of a block takes.
    block = {**ADAPTIVE, "activation_budget_bytes": 5_000_000, "recompute": True}
    options = {"steps": 10, "is_masked": True, "is_seeded": True}
    found = train(tmp_path, case(tmp_path, "slow", options, {}, block), ranks=2, bytes_per_s=10e6)
    for rank in range(2):
        report = found["slow.0", rank]["report"]
        assert report["recomputed_bytes"] > 0 and report["plan"]["recomputed_blocks"] > 0
        assert report["budget_excess_bytes"] == 0


@pytest.mark.thorough
def test_one_stage_alone_also_after_a_step_that_raised(tmp_path: Path) -> None:
    options = {"stages": 1, "steps": 8}
    found = train(
        tmp_path,
        [
            *case(tmp_path, "one", options, {}, {**ADAPTIVE, **SAVED}),
            *case(tmp_path, "raises", {**options, "raises": True}, {}, {"placement": "nvme"}, {**ADAPTIVE, **SAVED}),
        ],
        ranks=1,
    )
    for name in ("one.0", "raises.1"):
        report = found[name, 0]["report"]
        assert report["plans"] >= 1 and report["peak_saved_bytes"] < report["peak_saved_bytes_without"] / 3
    assert found["raises", 0]["results"]["losses"].count("raised") == 1
    assert found["raises.1", 0]["report"]["steps"] == 7


def test_two_stages_of_two_ranks_follow_a_plan_for_each_stage(tmp_path: Path) -> None:
    options = {"steps": 8, "tied": True, "evaluates": True}
    divided = {"pipe_partitioned": True, "grad_partitioned": True}
    found = train(
        tmp_path,
        [
            *case(tmp_path, "grid", options, {"stage": 1}, ADAPTIVE),
            # DeepSpeed replaces the data of what a stage returns, and puts it back together for backward.
            *case(tmp_path, "divided", {"tensor_parallel": 2}, {"pipeline": divided}, {"placement": "nvme"}),
        ],
        ranks=4,
    )
    plans = [found["grid.0", rank]["report"]["plan"] for rank in range(4)]
    for plan in plans:
        plan |= {"reason": "", "measured_step_s": None}  # those are a rank's own
    assert plans[0] == plans[1] and plans[2] == plans[3]  # ranks 0 and 1 hold the first stage
    assert plans[0] != plans[2]
    assert all(found["grid.0", rank]["report"]["plans"] >= 1 for rank in range(4))
