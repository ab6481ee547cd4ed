"""Models that people train, under the plain DeepSpeed loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from compare import PLANNED, RECOMPUTED, compare, row
from models import MODELS
from programs_plain import plain_loop
from support.runs import plain_config

pytestmark = pytest.mark.engine

SECTION = "Models"
DECIDING = {("Llama with tied embeddings", 3), "Mamba-2", ("Qwen3-MoE", 3, 2)}
OF_RANKS = (("Llama", 3, 2), ("T5", 2, 2), ("Qwen3-MoE", 3, 2), ("GPT-2", 2, 4), ("BERT", 3, 4))


@pytest.mark.parametrize(
    ("model", "stage"),
    [
        row(SECTION, f"{model}, ZeRO-{stage}", model, stage, decides=(model, stage) in DECIDING)
        for model in MODELS
        for stage in (2, 3)
    ],
)
def test_model(model: str, stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    config = plain_config(stage, train_micro_batch_size_per_gpu=2)
    row_says(str(compare(plain_loop, config, tmp_path, model=model)))


@pytest.mark.parametrize(
    "model", [row(SECTION, f"{model}, ZeRO-3, recompute", model, decides=model in DECIDING) for model in MODELS]
)
def test_recomputed_model(model: str, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    config = plain_config(3, train_micro_batch_size_per_gpu=2)
    compared = compare(plain_loop, config, tmp_path, block=RECOMPUTED, model=model, steps=12, has_cache=False)
    assert compared.recomputed_bytes > 0
    row_says(str(compared))


@pytest.mark.parametrize(
    ("model", "stage", "ranks"),
    [
        row(SECTION, f"{one[0]}, ZeRO-{one[1]}, {one[2]} ranks, adaptive", *one, decides=one in DECIDING)
        for one in OF_RANKS
    ],
)
def test_ranks(model: str, stage: int, ranks: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    config = plain_config(stage, train_micro_batch_size_per_gpu=2)
    row_says(str(compare(plain_loop, config, tmp_path, ranks=ranks, block=PLANNED, model=model, steps=8)))
