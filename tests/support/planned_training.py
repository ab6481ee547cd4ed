"""A small model and its training steps, for tests of what a run does under plans."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_tba.device.accelerator import MemoryLevels
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.controller import Controller
from support.doubles import Accelerator
from support.models import Mlp, Stack
from support.stepping import train

WIDTH, ROWS, DEPTH = 64, 64, 4
NARROW_BYTES = 4 * ROWS * WIDTH
# One to warm up, two that are recorded: then comes a plan.
FIRST_PLAN = 3
STEPS = FIRST_PLAN + 3


class Model(Stack):
    def __init__(self) -> None:
        super().__init__(lambda: Mlp(WIDTH, 0.1), DEPTH, nn.Linear(WIDTH, 1))


def controller_of(offloader: ActivationOffloader) -> Controller:
    controller = offloader.controller
    assert controller is not None
    return controller


def steps(model: nn.Module, offloader: ActivationOffloader | None, rows: list[int], micro_steps: int = 1) -> list[Any]:
    """The loss and the gradients of each step; one optimizer step after each."""
    torch.manual_seed(7)
    device = next(model.parameters()).device
    batches = (torch.randn(count, WIDTH).to(device) for count in rows for _ in range(micro_steps))
    return train(model, offloader, batches, micro_steps=micro_steps)


def model() -> Model:
    torch.manual_seed(0)
    return Model()


class SmallDevice(Accelerator):
    """With room for so many bytes of activations."""

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes

    def free_bytes(self) -> float:
        return self.room_bytes

    def levels(self) -> MemoryLevels:
        return MemoryLevels(0, 0, 0, 0)
