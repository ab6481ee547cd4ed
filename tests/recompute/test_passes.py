"""Blocks that run again because the config asks for it, in whole training runs beside a twin without us.

A block of plain layers gives every bit; under the default block nothing runs twice, whatever state it has; and with
``"recompute": true`` a block that reads or changes more than its arguments raises an error that names it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from support import recomputed_training
from support.recomputed_training import (
    DEPTH,
    ROWS,
    WIDTH,
    Make,
    Net,
    Plain,
    begin,
    check,
    check_steps,
    steps,
    twin_of,
)
from torch import Tensor, nn

from ds_tba.errors import RecomputationError
from ds_tba.offloader import ActivationOffloader

pytestmark = pytest.mark.usefixtures("one_thread")
make = recomputed_training.make


class Renormalizes(Plain):
    """Its forward changes a parameter in place, and to the same value again when it runs once more."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = nn.Embedding(ROWS, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.offsets(torch.arange(ROWS)))


class Scales(Plain):
    """Scales its input by what a function of its own returns."""

    def __init__(self, factor: Callable[[], Any]) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.factor())


def counts() -> Scales:
    numbers = itertools.count(1)
    return Scales(lambda: 1 + next(numbers) / 100)


def has_a_generator() -> Scales:
    chance = torch.Generator().manual_seed(5)
    return Scales(lambda: 1 + torch.rand(WIDTH, generator=chance) / 10)


class Memory(Plain):
    """What the last segment left, set between forward and backward by the model, as in Transformer-XL."""

    memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.memory is None else x + self.memory)


SCALE: ContextVar[float] = ContextVar("SCALE", default=1.0)


# ---- models ---------------------------------------------------------------------------------------------------------


class SetsMemory(Net):
    def call(self, layer: Any, x: Tensor) -> Tensor:
        inside: Tensor = layer(x)
        layer.memory = x.detach()
        return inside


class InContext(Net):
    def forward(self, x: Tensor) -> Tensor:
        token = SCALE.set(1.5)
        try:
            return super().forward(x)
        finally:
            SCALE.reset(token)


STATEFUL: dict[str, tuple[Make, type[Net]]] = {
    "counter": (counts, Net),
    "own generator": (has_a_generator, Net),
    "Python's random": (lambda: Scales(lambda: 1 + random.random()), Net),
    "memory of the last segment": (Memory, SetsMemory),
    "ContextVar": (lambda: Scales(SCALE.get), InContext),
}
PLAIN: dict[str, tuple[Make, type[Net]]] = {
    "an embedding with max_norm": (Renormalizes, Net),
    "MLP with dropout": (Plain, Net),
    "torch's own": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32), Net),
}


# ---- running them ---------------------------------------------------------------------------------------------------


def test_under_the_default_block_nothing_runs_twice(make: Callable[..., ActivationOffloader]) -> None:
    report = check(make, counts, Net).report()
    assert report.plans >= 1 and report.recomputed_bytes == 0


@pytest.mark.parametrize("name", PLAIN)
def test_a_block_without_state_is_recomputed_to_the_bit(make: Callable[..., ActivationOffloader], name: str) -> None:
    report = check(make, *PLAIN[name], recompute=True).report()
    assert report.recomputed_bytes > 0 and report.plan is not None and report.plan["recomputed_blocks"] == DEPTH


@pytest.mark.parametrize("name", STATEFUL)
def test_a_block_with_state_raises_in_its_first_recomputation(
    make: Callable[..., ActivationOffloader], name: str
) -> None:
    block, net = STATEFUL[name]
    torch.manual_seed(0)
    begin()
    ours = net(block)
    offloader = make(ours, recompute=True)
    done = 0
    with pytest.raises(RecomputationError, match=r"'layers\.2' .*\"recompute\", or set \"recompute\": false"):
        for _ in steps(ours, offloader):
            done += 1
    assert offloader.report().plans == 1 and done >= 1


def test_a_block_with_state_is_left_out_by_naming_the_others(make: Callable[..., ActivationOffloader]) -> None:
    made: list[nn.Module] = []

    def block() -> nn.Module:
        made.append(counts() if len(made) % DEPTH == 1 else Plain())
        return made[-1]

    report = check(make, block, Net, recompute=["layers.0", "*.2"]).report()
    assert report.plan is not None and report.recomputed_bytes > 0


def test_an_evaluation_with_gradients_under_a_plan_is_exact(make: Callable[..., ActivationOffloader]) -> None:
    torch.manual_seed(0)
    begin()
    ours = Net(Plain)
    offloader = make(ours, recompute=True)
    list(steps(ours, offloader))
    recomputed = check_steps(ours.eval(), offloader, twin_of(ours, Plain).eval(), 3)
    assert recomputed[-1] > recomputed[0]
