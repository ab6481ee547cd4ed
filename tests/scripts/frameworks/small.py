"""A small model, its data, and what a training of it leaves to be compared; needs PyTorch and DeepSpeed only."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import nn

STEPS, BATCH, WIDTH, CLASSES = 8, 16, 64, 10


class Net(nn.Module):
    """Four MLPs with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = inputs + layer(inputs)
        return nn.functional.cross_entropy(self.head(inputs), targets)


def data() -> torch.utils.data.TensorDataset:
    """Return samples for all steps of two ranks."""
    chance = torch.Generator().manual_seed(1)
    count = 2 * STEPS * BATCH
    inputs, targets = torch.randn(count, WIDTH, generator=chance), torch.randint(CLASSES, (count,), generator=chance)
    return torch.utils.data.TensorDataset(inputs, targets)


def write_outcome(path: str, losses: list[float], model: nn.Module) -> None:
    """Write losses in hexadecimal and a digest of each parameter, gathered from ZeRO-3, or a rank's part of FSDP's."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        own = {name: getattr(one, "to_local", one.detach)() for name, one in model.named_parameters()}
        digests = {name: hashlib.sha256(one.detach().cpu().numpy().tobytes()).hexdigest() for name, one in own.items()}
    Path(path).write_text(json.dumps({"losses": [loss.hex() for loss in losses], "parameters": digests}))
