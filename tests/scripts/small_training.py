"""A small training and its offloader, for the scripts whose trainings signals interrupt."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.agreement import Alone

WIDTH = 64


class Interrupted(Exception):
    """Raised by the user's handler, for the training loop to catch."""


def is_in_package(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("ds_tba."):
            return True
        frame = frame.f_back
    return False


def make(directory: Path, watched: nn.Module | None = None, **block: Any) -> ActivationOffloader:
    """Return an offloader with little staging; of a model that is given it makes plans."""
    io = {"backend": "posix", "staging_bytes": 1 << 20, "swap_file_bytes": 64 << 20}
    host_bytes = 4 << 20 if block.get("placement") == "host" else 0
    more = {"nvme_path": str(directory), "io": io, "min_tensor_bytes": 4096, "host_budget_bytes": host_bytes}
    offloader = ActivationOffloader(OffloadConfig.model_validate(more | block), AioConfig(), CpuAccelerator())
    if watched is not None:
        offloader.watch(watched, Alone())
    return offloader


def new_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))] * 6
    return nn.Sequential(*(layer for block in layers for layer in block))


def step(model: nn.Module, x: torch.Tensor, offloader: ActivationOffloader | None) -> list[torch.Tensor]:
    with nullcontext() if offloader is None else offloader.saving():
        loss = model(x).square().mean()
    loss.backward()
    if offloader is not None:
        offloader.note_micro_step()
        offloader.note_step()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
