"""A small model whose blocks run again, and its training beside a twin without us."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Closing
from planners import PLANNERS
from torch import nn

from ds_tba.offloader import ActivationOffloader
from support.models import Mlp, Stack
from support.offloaders import watching
from support.stepping import assert_same_steps, train

WIDTH, ROWS, DEPTH, STEPS = 16, 32, 3, 20
Make = Callable[[], nn.Module]


class Plain(Mlp):
    """Has no state that a forward changes."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 0.1)


class Net(Stack):
    def __init__(self, make: Make) -> None:
        super().__init__(make, DEPTH, nn.Linear(WIDTH, 1))


@pytest.fixture
def make(tmp_path: Path, closing: Closing) -> Callable[..., ActivationOffloader]:
    def make(model: nn.Module, **block: Any) -> ActivationOffloader:
        # The plan recomputes all that may be.
        planner = PLANNERS["recompute"] if block.get("recompute") else PLANNERS["adaptive"]
        return watching(tmp_path, model, planner, **{"min_tensor_bytes": 1024, "max_step_overhead": 1000.0, **block})

    return closing(make)


def begin() -> None:
    """Every random number from its beginning."""
    torch.manual_seed(7)
    random.seed(7)


def steps(model: Net, offloader: ActivationOffloader | None, count: int = STEPS) -> Iterator[list[Any]]:
    for _ in range(count):
        (found,) = train(model, offloader, [torch.randn(ROWS, WIDTH)])
        yield [*found, torch.get_rng_state(), torch.tensor(random.getstate()[1])]


def check(make: Callable[..., ActivationOffloader], block: Make, net: type[Net], **config: Any) -> ActivationOffloader:
    """Train with and without; every bit must be the same."""
    torch.manual_seed(0)
    ours = net(block)
    offloader = make(ours, **config)
    check_steps(ours, offloader, twin_of(ours, block))
    return offloader


def twin_of(ours: Net, block: Make) -> Net:
    """Another model of the same kind, blocks and parameters."""
    twin = type(ours)(block)
    twin.load_state_dict(ours.state_dict())
    return twin


def check_steps(ours: Net, offloader: ActivationOffloader, twin: Net, count: int = STEPS) -> None:
    """Train both from the same beginning; every bit must be the same."""
    begin()
    expected = list(steps(twin, None, count))
    begin()
    assert_same_steps(expected, steps(ours, offloader, count))
