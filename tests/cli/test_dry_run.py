"""The dry run of models made up here: what it leaves out, refuses and counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.planned import small

from ds_tba.cli.plan.dry_run import dry_run
from ds_tba.cli.plan.model import Recipe, Subject, recipe_of
from ds_tba.cli.plan.training import Device, DryRun, Training
from ds_tba.config import OffloadConfig
from ds_tba.errors import ConfigError, ModelError

BATCH, SEQUENCE = 4, 96
MIN_BYTES = 16384


def estimated(recipe: Recipe, **block: Any) -> DryRun:
    offload = OffloadConfig.model_validate({"placement": "keep", "min_tensor_bytes": MIN_BYTES, **block})
    return dry_run(recipe, BATCH, SEQUENCE, Training({}, offload), Device("made up", None, 1e12, 1e11, 1e10))


def of(make: Callable[[], torch.nn.Module], *rows: int) -> Recipe:
    return lambda *_: Subject(make(), {"x": torch.zeros(*rows)})


def test_what_the_config_keeps_by_name_is_not_moved_and_its_blocks_are_not_recomputed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(small("GPT-2", 3, 256, SEQUENCE)))
    make = recipe_of(str(tmp_path))
    all_of_it, kept = estimated(make).trace, estimated(make, **{"except": ["*.0.mlp"]}).trace
    stays = [one for one in kept.storages if not one.is_movable and one.nbytes >= MIN_BYTES and ".0.mlp" in one.module]
    assert all_of_it.movable_bytes - kept.movable_bytes == sum(one.nbytes for one in stays) > 0
    assert [one.module for one in kept.blocks] == [one.module for one in all_of_it.blocks][1:]
    with pytest.raises(ConfigError, match=r"'\*.mpl', which matches no module of the model: the nearest are .*mlp"):
        estimated(make, only=["*.mpl"])


def test_a_model_that_needs_values_is_refused_and_told_why() -> None:
    class Peeking(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1.0 if x.sum().item() >= 0 else 2.0)

    with pytest.raises(ModelError, match=r"meta tensors.*the values of tensors"):
        estimated(of(Peeking, 2))


def test_buffers_are_the_model_s_and_not_saved_bytes() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(SEQUENCE, 4096))
            self.inner = torch.nn.Linear(64, 4096)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale

    found = estimated(of(Scaled, BATCH, SEQUENCE, 64))
    assert found.saved_bytes == BATCH * SEQUENCE * 64 * 4  # the input of the product; the buffer is larger
