"""An offloader without an engine, and one step of a small training with it."""

from __future__ import annotations

from pathlib import Path

import torch

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.offloader import ActivationOffloader
from support.doubles import CpuAccelerator, wait_for_writes


def make(directory: Path, **block: object) -> ActivationOffloader:
    io = {"backend": "posix", "staging_bytes": 8 << 20, "swap_file_bytes": 64 << 20}
    config = {"nvme_path": str(directory), "io": io, "min_tensor_bytes": 4096, **block}
    return ActivationOffloader(OffloadConfig.model_validate(config), AioConfig(), CpuAccelerator())


def step(offloader: ActivationOffloader, *, written_first: bool = False) -> None:
    x = torch.randn(512, 512, requires_grad=True)
    with offloader.saving():
        loss = x.exp().sin().tanh().sum()
    if written_first and offloader._tiers.nvme is not None:
        wait_for_writes(offloader._tiers.nvme)
    loss.backward()
    offloader.note_step()
