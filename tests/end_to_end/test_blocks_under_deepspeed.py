"""Blocks recomputed under ZeRO, in real engines: losses, parameters and random numbers as without."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from compare import agrees
from programs import parts
from programs_deepspeed import ended, loop, started
from support import runs
from torch import Tensor, nn
from torch.nn import functional

pytestmark = pytest.mark.engine

# Parameters leave as soon as they may, so that a use before they are gathered, or after, is an error and not luck.
EAGER = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 0,
    "stage3_prefetch_bucket_size": 0,
}
# Nothing is large enough to be moved: recomputing alone makes the peak lower.
RECOMPUTE: dict[str, Any] = {"min_tensor_bytes": 1 << 20, "recompute": True, "max_step_overhead": 1000.0}
STEPS, WIDTH, ROWS, DEPTH = 8, 64, 512, 3


class Layer(nn.Module):
    """Has parameters of its own, which ZeRO-3 gathers with the hooks of the block itself; takes more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gain, self.mix = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.eye(WIDTH))
        self.router = nn.Linear(WIDTH, 4)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, side: list[Tensor], *, scale: Tensor) -> Tensor:
        h = self.norm(x * self.gain) @ self.mix
        side.append(self.router(h))
        return x + self.down(self.drop(functional.gelu(self.up(h))) * scale)


class Routed(nn.Module):
    """Its backward reaches the routers before the outputs of their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scale = x.detach().std()
        routed: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, routed, scale=scale)
        return self.last(x).float().square().mean() + 0.1 * sum(one.float().logsumexp(-1).mean() for one in routed)


def trained(config: dict[str, Any]) -> dict[str, Any]:
    parts.reset_states(0)
    engine = started(deepcopy(config), Routed)
    parts.reset_states(100 + engine.global_rank)
    dtype = next(engine.module.parameters()).dtype
    chance = torch.Generator().manual_seed(1 + engine.global_rank)
    losses = loop(engine, lambda: engine(torch.randn(ROWS, WIDTH, generator=chance).to(dtype)), STEPS)
    return ended(engine, losses, states=repr(parts.states()))


def eager(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "zero_optimization": config["zero_optimization"] | EAGER}


def on_nvme(directory: Path) -> dict[str, Any]:
    config = eager(runs.nvme_parameters(directory))
    config["zero_optimization"]["offload_param"]["buffer_count"] = 6
    return config


@pytest.mark.parametrize(
    ("config_in", "ranks"),
    [
        pytest.param(lambda _: runs.plain_config(2, bf16={"enabled": True}), 1, id="ZeRO-2, bf16"),
        pytest.param(lambda _: eager(runs.plain_config(3)), 2, id="ZeRO-3, released at once"),
        pytest.param(on_nvme, 1, id="ZeRO-3, parameters on NVMe"),
    ],
)
def test_recomputed_blocks_train_as_without_us(
    tmp_path: Path, config_in: Callable[[Path], dict[str, Any]], ranks: int
) -> None:
    config = config_in(tmp_path)
    # Where ZeRO uses the drive, plans begin by keeping everything: there the blocks are named.
    block = {**RECOMPUTE, "recompute": ["layers.*"]} if config_in is on_nvme else RECOMPUTE
    each = [(one, {}) for one in (config, runs.with_block(config, tmp_path, **block))]
    compared = agrees(*forked.run_each(trained, each, tmp_path, ranks=ranks), must_move=False, more=["states"])
    assert compared.reports[0]["recomputed_bytes"] > 0
