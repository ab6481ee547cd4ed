"""A training script of Lightning: ``with_lightning.py DS_CONFIG RESULT``.

Lightning's DeepSpeedStrategy accepts a CUDA accelerator only, so an accelerator that is one by name computes on the
CPU; all else is Lightning's own.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from small import BATCH, STEPS, Net, data, write_outcome


class CpuInItsPlace(CUDAAccelerator):
    """Passes for CUDA, and computes on the CPU."""

    def setup_device(self, device: torch.device) -> None: ...

    def setup(self, trainer: lightning.Trainer) -> None: ...

    def teardown(self) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cpu", index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True


class Module(lightning.LightningModule):
    """A module as in Lightning's guide; it imports nothing of ds_tba."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(*batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    config, result = sys.argv[1:]
    torch.manual_seed(0)
    module = Module()
    trainer = lightning.Trainer(
        accelerator=CpuInItsPlace(), devices=1, strategy=DeepSpeedStrategy(config=config),
        max_steps=STEPS, precision="32-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=BATCH))
    write_outcome(f"{result}0", module.losses, module)
