"""Training with ZeRO-3 and its optimizer in host memory, as programs for processes of their own."""

from __future__ import annotations

import hashlib
import itertools
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from support.late_device import LateDevice
from torch import nn
from torch.utils.data import DataLoader

BLOCK = "interleaved_optimizer_update"
CHUNKS = {"chunk_bytes": 1 << 16, "device_buffer_bytes": 3 * 5 << 16}


class Model(nn.Module):
    """Odd sizes, a parameter that some steps do not use, a frozen one, and one that decays unlike the others."""

    def __init__(self, width: int = 193) -> None:
        super().__init__()
        self.first = nn.Linear(37, width)
        self.norm = nn.LayerNorm(width)
        self.middle = nn.Linear(width, width)
        self.sometimes = nn.Linear(width, width, bias=False)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.last = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        x = torch.relu(self.middle(x)) + self.frozen(x)
        if uses_all:
            x = x + self.sometimes(x)
        return self.last(x).float().square().mean()


def ds_config(**more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 200,
            "sub_group_size": 30_000,
        },
    }  # fmt: skip
    config["zero_optimization"] |= more.pop("zero_optimization", {})
    return {**config, **more}


def groups_of(model: nn.Module, kind: str) -> Any:
    """Parameter groups."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if kind == "one":
        return trained
    flat, matrices = ([one for one in trained if (one.dim() > 1) == is_matrix] for is_matrix in (False, True))
    other = {"betas": (0.8, 0.99), "lr": 3e-3} if kind == "betas" else {}
    return [{"params": matrices, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0, **other}]


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha1(data.numpy().tobytes()).hexdigest()[:12]


def state_of(engine: Any) -> dict[str, Any]:
    """Everything that a step leaves, as digests; by parameter, because DeepSpeed leaves padding uninitialized."""
    found: dict[str, Any] = {
        "norm": repr(engine.get_global_grad_norm()),
        "lr": engine.get_lr(),
        "skipped": engine.skipped_steps,
        "taken": [int(state["step"]) for state in engine.optimizer.optimizer.state.values()],
    }
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[f"parameter {name}"] = digest(parameter)
        if parameter.requires_grad:
            found[f"master {name}"] = digest(safe_get_full_fp32_param(parameter))
            found[f"gradient {name}"] = digest(safe_get_full_grad(parameter))
            for moment in ("exp_avg", "exp_avg_sq"):
                found[f"{moment} {name}"] = digest(safe_get_full_optimizer_state(parameter, moment))
    return found


def build(
    config: dict[str, Any], groups: str = "one", late: dict[str, Any] | None = None, seed: int = 0, width: int = 193
) -> Any:
    """An engine; with ``late``, its updates run on the double of a device, under that block."""
    torch.manual_seed(seed)
    model = Model(width)
    engine = deepspeed.initialize(model=model, model_parameters=groups_of(model, groups), config=config)[0]
    if late is not None:
        from ds_tba.update import UpdateConfig
        from ds_tba.update.zero3 import InterleavedUpdate

        engine.interleaved_optimizer_update = InterleavedUpdate(
            UpdateConfig.model_validate(late), LateDevice(longest_pause_s=0.001), engine.optimizer
        )
    return engine


def steps(engine: Any, count: int, seed: int = 1, *, workers: bool = False) -> list[dict[str, Any]]:
    """Train; what each optimizer step leaves. With ``workers``, forked ones are there during each."""
    generator = torch.Generator().manual_seed(seed)
    dtype, found = next(engine.module.parameters()).dtype, []
    for number in range(count):
        losses = []
        batches = iter(forking_loader() if workers else ())
        next(batches, None)
        for _ in range(engine.gradient_accumulation_steps()):
            x = torch.randn(4, 37, generator=generator).to(engine.device, dtype)
            loss = engine(x, number % 3 != 1)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item().hex())
        found.append({"losses": losses, "batches": [batch.tolist() for batch in batches], **state_of(engine)})
    return found


def forking_loader() -> DataLoader[float]:
    return DataLoader([float(one) for one in range(16)], batch_size=2, num_workers=2, multiprocessing_context="fork")


def compare(config: dict[str, Any], *, variants: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Train each variant; what all steps of each left, and the reports.

    Args:
        variants: each with ``block`` or None, and what :func:`build` and :func:`steps` take.
    """
    results = []
    for variant in variants:
        variant = dict(variant)
        block, is_late = variant.pop("block", None), variant.pop("late", False)
        own = {**config, **variant.pop("config", {}), **({BLOCK: block} if block is not None and not is_late else {})}
        count, workers = variant.pop("count", 4), variant.pop("workers", False)
        engine = build(own, late=block if is_late else None, **variant)
        found = steps(engine, count, workers=workers)
        update = getattr(engine, "interleaved_optimizer_update", None)
        results.append({"steps": found, "report": update.report().to_dict() if update is not None else {}})
        engine.destroy()
        if is_late:
            update.close()
    return {"variants": results}


def loaded(
    config: dict[str, Any], saved: dict[str, dict[str, Any]], folder: Path, tag: str, count: int
) -> dict[str, Any]:
    """Load each checkpoint with the block and without it; what the steps from there leave."""
    found = {}
    for (name, own), other in itertools.product(saved.items(), saved):
        engine = build({**config, **own}, "decay", seed=5)
        engine.load_checkpoint(str(folder / other), tag=tag)
        found[f"{name} loads {other}"] = steps(engine, count, seed=2)
        engine.destroy()
    return found


def resume(config: dict[str, Any], *, saved_in: str, block: dict[str, Any]) -> dict[str, Any]:
    """Checkpoints saved with the block and without it, each loaded with it and without it, also in mid-run."""
    found: dict[str, Any] = {}
    saved: dict[str, Any] = {"stock": {}, "ours": {BLOCK: block}}
    for name, own in saved.items():
        engine, folder = build({**config, **own}, "decay"), str(Path(saved_in) / name)
        steps(engine, 3)
        engine.save_checkpoint(folder, tag="at 3")
        found[f"{name} goes on"] = steps(engine, 3, seed=2)
        engine.load_checkpoint(folder, tag="at 3")
        found[f"{name} goes back"] = steps(engine, 3, seed=2)
        engine.destroy()
    return found | loaded(config, saved, Path(saved_in), "at 3", 3)


def universal(config: dict[str, Any], *, saved_in: str, block: dict[str, Any]) -> dict[str, Any]:
    """Checkpoints saved with the block and without it, converted to universal ones, each loaded with and without it."""
    saved: dict[str, Any] = {"stock": {}, "ours": {BLOCK: block}}
    for name, own in saved.items():
        engine, folder = build({**config, **own}, "decay"), Path(saved_in) / name
        steps(engine, 3)
        engine.save_checkpoint(str(folder), tag="3")
        engine.destroy()
        convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers", "1"]
        folders = ["--input_folder", str(folder / "3"), "--output_folder", str(folder / "universal")]
        subprocess.run([*convert, "--num_merge_workers", "1", *folders], check=True)
        (folder / "latest_universal").write_text("universal")
    return loaded({**config, "checkpoint": {"load_universal": True}}, saved, Path(saved_in), "universal", 2)


BF16 = {"bf16": {"enabled": True}}
WARMUP = {"total_num_steps": 8, "warmup_num_steps": 3, "warmup_max_lr": 2e-2}
SCHEDULE = {"scheduler": {"type": "WarmupDecayLR", "params": WARMUP}}
L2 = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}}}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "fp32": ({}, "one"),
    "bf16, clipped": ({**BF16, "gradient_clipping": 0.01}, "one"),
    "bf16, accumulated": ({**BF16, "gradient_accumulation_steps": 2}, "decay"),
    "bf16, groups with other betas": ({**BF16, **SCHEDULE}, "betas"),
    "Adam with L2": ({**BF16, **L2}, "decay"),
    "parameters on the host": (
        {**BF16, "gradient_clipping": 0.01, "zero_optimization": {"offload_param": {"device": "cpu"}}}, "decay",
    ),
}  # fmt: skip


def draw(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A DeepSpeed config at random, and what :func:`compare` takes of a variant."""
    chance = random.Random(seed)
    zero: dict[str, Any] = {
        "sub_group_size": chance.choice([100, 3_000, 30_000, 10**9]),
        "stage3_param_persistence_threshold": chance.choice([0, 200, 10**6]),
        "contiguous_gradients": chance.random() < 0.7,
        "overlap_comm": chance.random() < 0.5,
    }
    if chance.random() < 0.25:
        zero["offload_param"] = {"device": "cpu"}
    adam = {
        "lr": 10 ** chance.uniform(-4, -1),
        "weight_decay": chance.choice([0.0, 0.1]),
        "eps": chance.choice([1e-8, 1e-4]),
        "betas": chance.choice([[0.9, 0.999], [0.0, 0.95], [0.8, 0.9]]),
        "adam_w_mode": chance.random() < 0.7,
    }
    config = ds_config(
        zero_optimization=zero,
        optimizer={"type": "Adam", "params": adam},
        gradient_accumulation_steps=chance.choice([1, 1, 2, 3]),
        gradient_clipping=chance.choice([0.0, 0.01, 1.0]),
        bf16={"enabled": chance.random() < 0.7},
    )
    chunk_bytes = chance.choice([1 << 16, 3 << 15, 1 << 18])
    block = {
        "chunk_bytes": chunk_bytes,
        "device_buffer_bytes": chunk_bytes * 5 * chance.choice([1, 2, 4]),
        "device_share": chance.choice([0, 1, None, chance.random()]),
    }
    return config, {
        "groups": chance.choice(["one", "decay", "betas"]),
        "width": chance.choice([1, 30, 128, 193, 300]),
        "count": chance.randint(2, 4),
        "block": block,
        "late": chance.random() < 0.4,
    }


def compare_drawn(config: None, *, seeds: list[int]) -> dict[str, Any]:
    """The seeds whose steps differ from stock's; a program."""
    failed: dict[str, str] = {}
    elements = [0, 0]
    for seed in seeds:
        drawn, ours = draw(seed)
        stock = {name: value for name, value in ours.items() if name not in ("block", "late")}
        try:
            expected, found = compare(drawn, variants=[stock, ours])["variants"]
            pairs = enumerate(zip(expected["steps"], found["steps"], strict=True))
            differing = [(number, name) for number, (one, other) in pairs for name in one if one[name] != other[name]]
            if differing:
                failed[str(seed)] = f"{differing[:3]} of {ours}"
            elements[0] += found["report"]["elements"]
            elements[1] += found["report"]["device_elements"]
        except Exception as error:  # noqa: BLE001 - any is a finding
            failed[str(seed)] = f"{type(error).__name__}: {error}"
    return {"failed": failed, "elements": elements}
