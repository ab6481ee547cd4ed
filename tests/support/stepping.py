"""Training with an offloader or, where that is None, without: what DeepSpeed's engine does, by hand."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ds_tba.offloader import ActivationOffloader


def forward(model: nn.Module, x: Tensor, offloader: ActivationOffloader | None) -> Tensor:
    """What the model returns, with the offloader saving what autograd saves."""
    with nullcontext() if offloader is None else offloader.saving():
        result: Tensor = model(x)
        return result


def note_backward(offloader: ActivationOffloader | None) -> None:
    """A backward is done."""
    if offloader is not None:
        offloader.note_micro_step()


def end_step(optimizer: torch.optim.Optimizer, offloader: ActivationOffloader | None) -> None:
    """The optimizer's step; the gradients are gone then."""
    optimizer.step()
    optimizer.zero_grad()
    if offloader is not None:
        offloader.note_step()
