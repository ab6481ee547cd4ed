"""Whatever raises in backward: once its graph is gone nothing of ours holds what was saved, as with plain hooks."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from support.disks import until
from support.doubles import raising
from support.models import Stack
from support.stepping import forward, offloader_of, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_tba.offloader import ActivationOffloader

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, WIDTH = 128, 64
RECOMPUTED = {
    "placement": "adaptive", "recompute": True, "rematerialize": False, "activation_budget_bytes": 150_000,
    "ssd": {"rated_endurance_tbw": 1e-6, "min_life_days": 10_000},
}  # fmt: skip


boom = raising(RuntimeError("boom"))


class Boom(torch.autograd.Function):
    """Raises what it is told, before or after it reads what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x, x.exp())
        ctx.kind = kind
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.kind == "before it reads":
            boom()
        one, _ = ctx.saved_tensors
        if ctx.kind == "KeyboardInterrupt":
            raise KeyboardInterrupt
        if ctx.kind == "another shape":
            return one.new_zeros(3), None
        if ctx.kind == "a backward inside":
            with torch.enable_grad():
                Boom.apply(torch.randn(ROWS, WIDTH, requires_grad=True), "").sum().backward()
        return boom()


class Net(Stack):
    kind = "none"

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)), 4)

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        x = checkpoint(layer, x, use_reentrant=False) if self.kind == "behind checkpoints" else layer(x)
        if layer is self.layers[1] and self.kind == "a hook":
            x.register_hook(boom)
        return Boom.apply(x, self.kind) if layer is self.layers[1] and self.kind in FUNCTIONS else x


FUNCTIONS = (
    "before it reads", "after it has read", "KeyboardInterrupt", "another shape", "a backward inside",
    "behind checkpoints",
)  # fmt: skip
KINDS = (*FUNCTIONS, "a hook", "through a freed graph", "a gradient of a gradient", "behind backward")


def backward(net: Net, loss: Tensor) -> None:
    if net.kind == "a gradient of a gradient":
        gradients = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        loss = torch.stack([one.square().sum() for one in gradients]).sum()
        loss.register_hook(boom)
    loss.backward()
    if net.kind == "through a freed graph":
        loss.backward()
    if net.kind == "behind backward":
        boom()


def fail(net: Net, offloader: ActivationOffloader) -> None:
    loss = forward(net, torch.randn(ROWS, WIDTH), offloader)
    try:
        backward(net, loss)
    except (RuntimeError, KeyboardInterrupt):
        return
    raise AssertionError(f"{net.kind}: nothing raised")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "block",
    [{"placement": "keep"}, {"placement": "nvme"}, {"placement": "nvme", "rematerialize": False}, {}, RECOMPUTED],
    ids=["keep", "nvme", "nvme, nothing again", "adaptive", "recompute"],
)
def test_nothing_is_left_of_a_backward_that_raised(tmp_path: Path, block: dict[str, Any], kind: str) -> None:
    net = Net()
    offloader: ActivationOffloader = offloader_of(tmp_path, net, min_tensor_bytes=2048, **block)
    train(net, offloader, (torch.randn(ROWS, WIDTH) for _ in range(5 if block is RECOMPUTED else 1)))
    net.kind = kind
    fail(net, offloader)
    if block is RECOMPUTED:
        gc.collect()  # the frame of PyTorch's checkpoint and the exception refer to each other
    cache = offloader.cache
    # A lane that still writes holds its tensor for a moment.
    until(lambda: not any((cache.live_records, cache.stats.saved.now, cache.stats.resident.now)), "nothing left")
    offloader.close()
