"""A model on a clock of its own, and what the recorder makes of its micro-steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ds_tba.core.cache import TensorCache
from ds_tba.plan.recorder import Recorder, Scene
from ds_tba.plan.trace import Resources
from ds_tba.remat.where import RunningModule

WIDTH, ROWS = 64, 32
MIN_BYTES = 4096
MACHINE = Resources(1e9, 1e9, 1e9, 1e9, 1 << 24)


class Ticks:
    """A clock on which only ``tick`` lets time pass."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def mark(self) -> float:
        return self.now_s

    def elapsed_s(self, earlier: float, later: float) -> float:
        return later - earlier


class Block(nn.Module):
    """Saves its input, the inside of its MLP (4 wide) and a small tensor."""

    def __init__(self, ticks: Ticks) -> None:
        super().__init__()
        self.ticks = ticks
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ticks.now_s += 1.0
        small = torch.tanh(self.scale * 2.0)
        y: torch.Tensor = x + self.down(torch.relu(self.up(x))) * small
        self.ticks.now_s += 1.0
        return y


class Stack(nn.Module):
    def __init__(self, ticks: Ticks, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(ticks) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, recorder: Recorder | None = None) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            with nullcontext() if recorder is None else recorder.passing(f"blocks.{number}", [x]):
                x = block(x)
        return self.head(x).square().mean()


@contextmanager
def recorded(cache: TensorCache, ticks: Any, model: nn.Module) -> Iterator[Recorder]:
    running = RunningModule()
    running.watch(model)
    recorder = Recorder(Scene(cache.eligibility_of, ticks, running))
    with cache.saving(around=recorder.around):
        yield recorder


def record(cache: TensorCache, ticks: Ticks, model: Stack, x: torch.Tensor) -> Recorder:
    with recorded(cache, ticks, model) as recorder:
        loss = model(x, recorder)
    ticks.now_s += 1.0
    loss.backward()
    recorder.end()
    return recorder
