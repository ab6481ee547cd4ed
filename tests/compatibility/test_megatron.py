"""Tensor and sequence parallelism as Megatron-LM has them, on two ranks; see ``megatron.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron
import pytest
from compare import RECOMPUTED, compare, refusal
from forked import Program

pytestmark = pytest.mark.engine

CONFIG = {"train_micro_batch_size_per_gpu": megatron.BATCH, "gradient_accumulation_steps": 2}
PIPELINE = {**CONFIG, "gradient_accumulation_steps": 4}
ADAPTIVE: dict[str, Any] = {"placement": "adaptive", "max_step_overhead": 1000.0}


def row(name: str, *values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.compatible("Megatron-style, 2 ranks", name), id=name)


@pytest.mark.parametrize(
    ("program", "config", "arguments"),
    [
        row("tensor parallelism, gradients added to main_grad", megatron.trained, CONFIG, {}),
        row("tensor parallelism, adaptive", megatron.trained, CONFIG, {"block": ADAPTIVE, "steps": 10}),
        row("tensor and sequence parallelism", megatron.trained, CONFIG, {"splits_sequence": True}),
        row(
            "tensor and sequence parallelism, adaptive",
            megatron.trained,
            CONFIG,
            {"splits_sequence": True, "block": ADAPTIVE, "steps": 10},
        ),
        row(
            "a checkpoint that restores named random states",
            megatron.trained,
            CONFIG,
            {"splits_sequence": True, "checkpoint": "full"},
        ),
        row("a checkpoint whose input is shared by the ranks", megatron.trained, CONFIG, {"checkpoint": "shared"}),
        row(
            "outputs freed while two micro-batches are in flight",
            megatron.trained_as_first_stage,
            PIPELINE,
            {"splits_sequence": True},
        ),
        row(
            "outputs freed, a checkpoint, three micro-batches in flight, adaptive",
            megatron.trained_as_first_stage,
            PIPELINE,
            {"checkpoint": "full", "in_flight": 3, "block": ADAPTIVE, "steps": 10},
        ),
    ],
)
def test_megatron(
    program: Program,
    config: dict[str, Any],
    arguments: dict[str, Any],
    tmp_path: Path,
    row_says: Callable[[str], None],
) -> None:
    row_says(str(compare(program, config, tmp_path, ranks=2, **arguments)))


@pytest.mark.compatible("Megatron-style, 2 ranks", '"recompute": true: blocks that draw from named random states')
def test_blocks_with_random_states_of_their_own_are_refused(tmp_path: Path, row_says: Callable[[str], None]) -> None:
    """A checkpoint restores PyTorch's random states alone; the digest of the first recomputation shows it."""
    row_says(refusal(megatron.trained, CONFIG, tmp_path, "RecomputationError", RECOMPUTED, ranks=2, steps=12))
