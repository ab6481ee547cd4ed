"""A training script of Lightning: ``with_lightning.py deepspeed DS_CONFIG RESULT``, or ``fsdp2 PAGE RESULT``.

deepspeed: Lightning's DeepSpeedStrategy accepts a CUDA accelerator only, so an accelerator that is one by name computes
on the CPU; all else is Lightning's own.
fsdp2: on two ranks, without DeepSpeed. ``PAGE`` is docs/guides/frameworks.md: the module opens an Offloader as the page
says, with the directory of the result. With ``-`` for a page it is trained as it is.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from small import BATCH, STEPS, Net, data, write_outcome
from torch.distributed.fsdp import fully_shard

import ds_tba

ACCUMULATED = 2


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
    """A module as in Lightning's guides; it knows nothing of ds_tba."""

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


class Sharded(Module):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def offloading(page: str, directory: Path) -> type[Module]:
    """Return the class that the page defines, for small tensors and this directory."""
    (code,) = re.findall(r"```python\n(class Offloading.*?)```", Path(page).read_text(), re.DOTALL)
    code = code.replace("/local_nvme", str(directory)).replace('"report.json"', f'"{directory}/report.json"')
    names: dict[str, Any] = {"MyModule": Sharded, "ds_tba": ds_tba}
    exec(code.replace('placement="nvme"', 'placement="nvme", min_tensor_bytes=4096'), names)
    return names["Offloading"]


if __name__ == "__main__":
    way, source, result = sys.argv[1:]
    torch.manual_seed(0)
    if way == "deepspeed":
        module = Module()
        options = {"accelerator": CpuInItsPlace(), "devices": 1, "strategy": DeepSpeedStrategy(config=source)}
        options |= {"max_steps": STEPS, "precision": "32-true"}
    else:
        module = (Sharded if source == "-" else offloading(source, Path(result).parent))()
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        options = {"accelerator": "cpu", "devices": 2, "strategy": strategy, "max_steps": STEPS // ACCUMULATED}
        options["accumulate_grad_batches"] = ACCUMULATED
    trainer = lightning.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, **options)
    trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=BATCH))
    write_outcome(f"{result}{os.environ.get('LOCAL_RANK', '0')}", module.losses, module)
