"""Offloaders without an engine, and one step of a small training with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.device.accelerator import Accelerator
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.agreement import Agreement, Alone
from ds_tba.plan.plan import Planner
from support.doubles import wait_for_writes


def make(
    directory: Path,
    accelerator: Accelerator | None = None,
    zero_paths: tuple[str, ...] = (),
    ranks_on_node: int = 1,
    **block: object,
) -> ActivationOffloader:
    io = {"backend": "posix", "staging_bytes": 8 << 20, "swap_file_bytes": 64 << 20}
    config = OffloadConfig.model_validate({"nvme_path": str(directory), "io": io, "min_tensor_bytes": 4096, **block})
    accelerator = accelerator or Accelerator()
    return ActivationOffloader(config, AioConfig(), accelerator, zero_paths=zero_paths, ranks_on_node=ranks_on_node)


def watching(
    directory: Path,
    model: nn.Module,
    planner: Planner | None = None,
    agreement: Agreement | None = None,
    **options: Any,
) -> ActivationOffloader:
    offloader = make(directory, **options)
    offloader.watch(model, agreement or Alone(), planner)
    return offloader


def step(offloader: ActivationOffloader, *, written_first: bool = False) -> None:
    x = torch.randn(512, 512, requires_grad=True)
    with offloader.saving():
        loss = x.exp().sin().tanh().sum()
    if written_first and offloader._tiers.nvme is not None:
        wait_for_writes(offloader._tiers.nvme)
    loss.backward()
    offloader.note_step()


def finished(directory: Path, steps: int = 1, *, written_first: bool = False, **block: object) -> ActivationOffloader:
    """Make one, train so many steps with it and close it."""
    offloader = make(directory, **block)
    for _ in range(steps):
        step(offloader, written_first=written_first)
    offloader.close()
    return offloader
