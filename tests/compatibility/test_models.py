"""Models that people train, under the plain DeepSpeed loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from compare import PLANNED, RECOMPUTED, Way, recomputed, rows
from models import MODELS
from programs_plain import plain_loop

pytestmark = pytest.mark.engine

AGAIN = {"steps": 12, "has_cache": False}
OF_RANKS = (("Llama", 3, 2), ("T5", 2, 2), ("Qwen3-MoE", 3, 2), ("GPT-2", 2, 4), ("BERT", 3, 4))
WAYS = [
    *(
        Way(one, plain_loop, {"model": one}, decides={"Llama with tied embeddings": 3}.get(one))
        for one in MODELS
    ),
    *(
        Way(one + ", ZeRO-{}, recompute", plain_loop, {"model": one, **AGAIN}, [3], block=RECOMPUTED, says=recomputed,
            decides={"Mamba-2": 3}.get(one))
        for one in MODELS
    ),
    *(
        Way(one + f", ZeRO-{{}}, {ranks} ranks, adaptive", plain_loop, {"model": one, "steps": 8}, [stage], ranks=ranks,
            block=PLANNED, decides={"Qwen3-MoE": 3}.get(one))
        for one, stage, ranks in OF_RANKS
    ),
]  # fmt: skip


@pytest.mark.parametrize(("way", "stage"), rows("Models", WAYS))
def test_model(way: Way, stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    row_says(way.says(way.compared(stage, tmp_path)))
