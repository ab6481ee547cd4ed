"""Beside the activation offload of others: what both do, who gets what, and that no bit differs.

``docs/guides/other_offloads.md`` says which setting is the better one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from compare import PLANNED, RECOMPUTED, compare, refusal, row
from programs_deepspeed import checkpointed, trained
from programs_hf import checkpointing, config_of, trainer
from programs_offloads import (
    with_deepspeed_offload,
    with_torch_remat,
    with_transformers_offload,
    with_trl_offload,
)
from support.runs import plain_config

pytestmark = pytest.mark.engine

SECTION = "Beside other offloads"


@dataclass(frozen=True)
class Other:
    """A row for each stage."""

    row: str
    program: Callable[..., dict[str, Any]]
    arguments: dict[str, Any] = field(default_factory=dict)
    block: dict[str, Any] | None = None
    stages: tuple[int, ...] = (2, 3)
    decides: int | None = None  # the stage whose row does

    def config(self, stage: int) -> dict[str, Any]:
        is_trainer = self.program in (trainer, with_transformers_offload, with_trl_offload)
        config = config_of(stage) if is_trainer else plain_config(stage, train_micro_batch_size_per_gpu=2)
        if self.arguments.get("call") == "selective":
            config["zero_optimization"]["memory_efficient_linear"] = False  # see SAVED_OPS
        return config


EVERY_SECOND = checkpointing(False, every_n_layers=2)
OTHERS = [
    Other("transformers: every_n_layers, nvme", trainer, EVERY_SECOND),
    Other("transformers: every_n_layers, adaptive", trainer, EVERY_SECOND, PLANNED, (2,)),
    Other("transformers: every_n_layers, recompute", trainer, {**EVERY_SECOND, "steps": 14}, RECOMPUTED, (3,), 3),
    Other("transformers: offload, nvme", with_transformers_offload, decides=2),
    Other("transformers: offload and every_n_layers, adaptive", with_transformers_offload,
          {"every_n_layers": 2}, PLANNED, (2,)),
    # Under ZeRO-3 it ends without us, too: TRL's chunked loss looks for parameters, and its hooks return other tensors.
    Other("TRL: activation_offloading, SFT, nvme", with_trl_offload, stages=(2,)),
    Other("TRL: activation_offloading, DPO, adaptive", with_trl_offload, {"way": "dpo"}, PLANNED, (2,), 2),
    Other("DeepSpeed: CheckpointHiddenStatesOffload", with_deepspeed_offload, decides=3),
    Other("torch_remat, nvme", with_torch_remat, decides=3),
    Other("torch_remat, adaptive", with_torch_remat, {"steps": 10}, PLANNED, (2,)),
    Other("selective checkpointing, adaptive", checkpointed, {"call": "selective", "steps": 10}, PLANNED),
    Other("selective checkpointing, recompute", checkpointed, {"call": "selective", "steps": 14}, RECOMPUTED, (2,)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("other", "stage"),
    [
        row(SECTION, f"{other.row}, ZeRO-{stage}", other, stage, decides=stage == other.decides)
        for other in OTHERS
        for stage in other.stages
    ],
)
def test_other(other: Other, stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    if other.program is with_torch_remat:
        pytest.importorskip("torch_remat")
    block = other.block or {"placement": "nvme"}
    row_says(str(compare(other.program, other.config(stage), tmp_path, block=block, **other.arguments)))


@pytest.mark.compatible(SECTION, "DeepCompile: offload_activation, ZeRO-3", decides=True)
def test_deepcompile(tmp_path: Path, row_says: Callable[[str], None]) -> None:
    config = plain_config(3, train_micro_batch_size_per_gpu=2)
    config["compile"] = {"deepcompile": True, "offload_activation": True}
    row_says(refusal(trained, config, tmp_path, r'offload_activation.*set "compile": {"deepcompile": false}'))
