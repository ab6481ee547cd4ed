"""Models that people train, under the plain DeepSpeed loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from compare import compare
from models import MODELS
from programs import plain_loop
from runs import plain_config

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("model", "stage"),
    [
        pytest.param(model, stage, marks=pytest.mark.compatible("Models", f"{model}, ZeRO-{stage}"))
        for model in MODELS
        for stage in (2, 3)
    ],
)
def test_model(model: str, stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    config = plain_config(stage, train_micro_batch_size_per_gpu=2)
    row_says(str(compare(plain_loop, config, tmp_path, model=model)))
