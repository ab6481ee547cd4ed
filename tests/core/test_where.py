"""The module that runs, by the call stack."""

from __future__ import annotations

import torch
from torch import nn

from ds_tba.core.where import RunningModule


class Asks(nn.Module):
    def __init__(self, running: RunningModule) -> None:
        super().__init__()
        self.running, self.found = running, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found = self.running.path()
        return x


def test_the_innermost_module_of_the_model_is_named() -> None:
    running = RunningModule({})
    asks = Asks(running)
    model = nn.Sequential(nn.Identity(), nn.Sequential(asks))
    model(torch.ones(1))
    assert asks.found == ""  # not watched
    running.watch(model)
    model(torch.ones(1))
    assert asks.found == "1.0" and running.path() == ""
