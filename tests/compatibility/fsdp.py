"""FSDP2, DDP and tensor parallelism in a loop without DeepSpeed: losses, gradients and parameters of all steps.

``loop.py`` trains the model where importing DeepSpeed raises, so nothing here imports it.
"""

from __future__ import annotations

import io
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from support.models import Mlp, Stack
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from ds_tba import Offloader

WIDTH, ROWS, STEPS, MICRO_STEPS = 64, 32, 8, 2


class Model(Stack):
    def __init__(self, checkpoints: str) -> None:
        super().__init__(lambda: Mlp(WIDTH), 4)
        if checkpoints == "wrapper":
            self.layers = nn.ModuleList(map(checkpoint_wrapper, self.layers))
        self._checkpoints = checkpoints

    def call(self, layer: nn.Module, x: Tensor) -> Any:
        return checkpoint(layer, x, use_reentrant=False) if self._checkpoints == "function" else layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


def made(way: str, checkpoints: str) -> nn.Module:
    torch.manual_seed(0)
    model = Model(checkpoints)
    if way == "alone":
        return model
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if way == "tp":
        for block in model.layers:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "bf16" in way else MixedPrecisionPolicy()
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward="kept" not in way)
    return model


def bits(tensor: Tensor) -> str:
    """The bits of this rank's part."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.detach().numpy().tobytes().hex()


def train(
    model: nn.Module, optimizer: Optimizer, offloader: Offloader | None, steps: range, rows: int = ROWS, rank: int = 0
) -> list[str]:
    """Return the bits of each loss and of the gradients of each step."""
    found: list[str] = []
    for step in steps:
        for micro_step in range(MICRO_STEPS):
            torch.manual_seed(100 * step + 10 * micro_step + rank)
            x = torch.randn(rows, WIDTH)
            with nullcontext() if offloader is None else offloader.saving():
                loss = model(x)
            (loss / MICRO_STEPS).backward()
            found.append(bits(loss))
        found += [bits(one.grad) for one in model.parameters() if one.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if offloader is not None:
            offloader.step()
    return found


def meet_at_the_end() -> None:
    """Wait until all ranks have come so far, and leave their group as it is.

    Where it is destroyed, DDP is its last owner and ends it under Python's lock: a thread that it joins may want that.
    """
    dist.barrier()


def trained(_: None, way: str, checkpoints: str, block: dict[str, Any] | None) -> dict[str, Any]:
    """Train on each rank; the training is saved after half of its steps, and goes on in new objects.

    Args:
        way: ``ddp``; ``tp``, with the two Linears of a block divided; or ``fsdp`` with ``-bf16`` (a mixed precision
            policy) and ``-kept`` (parameters stay gathered after forward).
        checkpoints: ``none``, ``function`` (torch.utils.checkpoint) or ``wrapper`` (CheckpointWrapper).
        block: of ``Offloader``; None is without it.
    """
    dist.init_process_group("gloo")
    found, saved, reports = [], io.BytesIO(), []
    half = STEPS // 2
    for steps in (range(half), range(half, STEPS)):
        model = made(way, checkpoints)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if steps.start:
            saved.seek(0)
            state = torch.load(saved, weights_only=False)
            set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])
        with ExitStack() as stack:
            offloader = None if block is None else stack.enter_context(Offloader(model, **block))
            found += train(model, optimizer, offloader, steps, rank=dist.get_rank())
            if offloader is not None:
                reports.append(offloader.report().to_dict())
        torch.save(get_state_dict(model, optimizer), saved)
    found += [bits(one) for one in model.parameters()]
    meet_at_the_end()
    return {"found": found, "reports": reports}
