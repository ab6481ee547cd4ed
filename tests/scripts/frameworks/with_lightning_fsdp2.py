"""A training script of Lightning with FSDP2 on two ranks: ``with_lightning_fsdp2.py PAGE DIRECTORY``.

``PAGE`` is docs/guides/frameworks.md: the module opens an Offloader as the page says, with a directory of the test.
With ``-`` for a page it is trained as it is. DeepSpeed takes no part.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from small import BATCH, STEPS, Net, data
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ds_tba

ACCUMULATED = 2


class MyModule(lightning.LightningModule):
    """A module as in Lightning's guide for FSDP2; it knows nothing of ds_tba."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.losses: list[str] = []

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(*batch)
        self.losses.append(loss.item().hex())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def offloading(page: str, directory: str) -> type[MyModule]:
    """Return the class that the page defines, for small tensors and this directory."""
    (code,) = re.findall(r"```python\n(class Offloading.*?)```", Path(page).read_text(), re.DOTALL)
    code = code.replace("/local_nvme", directory).replace('"report.json"', f'"{directory}/report.json"')
    names: dict[str, Any] = {"MyModule": MyModule, "ds_tba": ds_tba}
    exec(code.replace('placement="nvme"', 'placement="nvme", min_tensor_bytes=4096'), names)
    return names["Offloading"]


def own(parameter: torch.Tensor) -> str:
    """The bits of this rank's part."""
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return part.detach().numpy().tobytes().hex()


if __name__ == "__main__":
    page, directory = sys.argv[1:]
    torch.manual_seed(0)
    module = (MyModule if page == "-" else offloading(page, directory))()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=STEPS // ACCUMULATED, accumulate_grad_batches=ACCUMULATED, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=BATCH))
    found = {"losses": module.losses, "parameters": {name: own(one) for name, one in module.named_parameters()}}
    Path(directory, f"result{os.environ.get('LOCAL_RANK', '0')}").write_text(json.dumps(found))
