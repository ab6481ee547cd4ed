"""Training with an offloader or, where that is None, without: what DeepSpeed's engine does, by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.plan import Planner
from support.offloaders import watching


def offloader_of(
    directory: Path, model: nn.Module, planner: Planner | None = None, **block: Any
) -> ActivationOffloader:
    """One that watches the model, with more staging."""
    return watching(directory, model, planner, **{"io": {"backend": "posix", "staging_bytes": 16 << 20}, **block})


def forward(model: nn.Module, x: Tensor, offloader: ActivationOffloader | None) -> Tensor:
    """Return what the model returns; the offloader saves what autograd saves."""
    with nullcontext() if offloader is None else offloader.saving():
        return model(x)


def train(
    model: nn.Module,
    offloader: ActivationOffloader | None,
    batches: Iterable[Tensor],
    between: Callable[[], object] = lambda: None,
    micro_steps: int = 1,
) -> list[list[Tensor]]:
    """Train a step for so many batches; its loss and its gradients. ``between`` comes between forward and backward."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), []
    for number, batch in enumerate(batches, 1):
        loss = forward(model, batch, offloader)
        between()
        loss.backward()
        note_backward(offloader)
        if number % micro_steps:
            continue
        found.append([loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)])
        end_step(optimizer, offloader)
    return found


def assert_same_steps(expected: Iterable[Iterable[Tensor]], found: Iterable[Iterable[Tensor]]) -> None:
    for step, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), f"step {step}"


def note_backward(offloader: ActivationOffloader | None) -> None:
    if offloader is not None:
        offloader.note_micro_step()


def end_step(optimizer: torch.optim.Optimizer, offloader: ActivationOffloader | None) -> None:
    """The optimizer's step; the gradients are gone then."""
    optimizer.step()
    optimizer.zero_grad()
    if offloader is not None:
        offloader.note_step()
