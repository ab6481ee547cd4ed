"""Trainers that people use, with interleaved updates and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forked
import programs_deepspeed
import programs_hf
import pytest

pytestmark = pytest.mark.engine

AUTO = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
OF_TRAINERS = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": AUTO},
    "scheduler": {"type": "WarmupLR", "params": {f"warmup_{of}": "auto" for of in ("min_lr", "max_lr", "num_steps")}},
}
OF_LOOPS = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
}
ZERO = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
BLOCK = {"interleaved_optimizer_update": {"chunk_bytes": 1 << 16, "device_buffer_bytes": 5 << 16, "device_share": 0.5}}


@pytest.mark.parametrize(
    ("program", "config", "ranks", "arguments"),
    [
        (programs_hf.trainer, OF_TRAINERS, 2, {"steps": 4}),
        pytest.param(
            programs_hf.trainer, OF_TRAINERS, 1, {"steps": 4, "lora": True, "gradient_accumulation_steps": 2},
            marks=pytest.mark.thorough,
        ),
        (programs_hf.resumed_trainer, OF_TRAINERS, 1, {"steps": 6}),
        (programs_deepspeed.trained_from_zero_init, OF_LOOPS, 1, {}),
    ],
    ids=["Trainer, 2 ranks", "Trainer, LoRA", "Trainer, resumed", "zero.Init"],
)  # fmt: skip
def test_a_trainer_trains_alike(
    program: forked.Program, config: dict[str, Any], ranks: int, arguments: dict[str, Any], tmp_path: Path
) -> None:
    stock = forked.run(program, {**config, **ZERO}, tmp_path / "stock", ranks=ranks, **arguments)
    ours = forked.run(program, {**config, **ZERO, **BLOCK}, tmp_path / "ours", ranks=ranks, **arguments)
    assert "optimizer updates: 50% on the device" in ours[0]["output"]
    assert "optimizer updates" not in stock[0]["output"]
    for one, other in zip(stock, ours, strict=True):
        assert other["losses"] == one["losses"] and other["parameters"] == one["parameters"]
