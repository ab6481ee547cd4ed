"""Training scripts of reporters, under an engine; see ``forked.py``."""

from __future__ import annotations

from typing import Any

import torch
from programs_deepspeed import Net, ended, started, texts, train_on
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

STEPS = 4


def left_out_of_a_checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    """PyTorch #115255: hooks of one's own within a checkpoint, so that a part of it is not made again."""

    def forward(x: Tensor) -> Tensor:
        x = torch.relu(block.norm1(x))
        with saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
            return x + torch.relu(block.mlp(x))

    return checkpoint(forward, x, use_reentrant=False)


def nothing_for_an_argument(block: nn.Module, x: Tensor) -> Tensor:
    """DeepSpeed #598: an argument that is None, as GPT-2's past and mask are, to DeepSpeed's own checkpoint."""
    import deepspeed

    def forward(x: Tensor, past: Tensor | None, mask: Tensor | None) -> Tensor:
        assert past is None and mask is None
        return block(x)

    return deepspeed.checkpointing.checkpoint(forward, x, None, None)


class Multimodal(nn.Module):
    """Torchtune #2709: an encoder of pictures before a decoder of text."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        self.decoder = Net()

    def forward(self, text: Tensor, seen: Tensor) -> Tensor:
        decoder = self.decoder
        x = torch.cat([seen, decoder.embedding(text)], 1)
        for block in decoder.blocks:
            x = block(x)
        return decoder.loss(decoder.head(decoder.norm(x))[:, seen.shape[1] :], text)


class FrozenNet(Net):
    """Transformers #47254: frozen norms under ZeRO-3, which gathers them for each use; the rest is trained."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("norm" not in name)


def recomputed(config: dict[str, Any], steps: int = 14) -> dict[str, Any]:
    """Train what some checkpoints cannot run again."""
    engine = started(config, FrozenNet)
    return ended(engine, train_on(engine, texts(engine.global_rank), steps))


def reported(config: dict[str, Any], report: str) -> dict[str, Any]:
    """Train as a reporter did, one of :data:`REPORTS`."""
    if report == "torchtune 2709":
        return _multimodal(config)
    call = {"pytorch 115255": left_out_of_a_checkpoint, "deepspeed 598": nothing_for_an_argument}[report]
    engine = started(config, lambda: Net(call=call))
    batches, losses = texts(engine.global_rank), []
    for _ in range(STEPS):
        engine(next(batches))  # for a metric, say: nobody goes back through it
        loss = engine(next(batches))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return ended(engine, losses)


def _multimodal(config: dict[str, Any]) -> dict[str, Any]:
    engine = started(config, Multimodal)
    batches, losses = texts(engine.global_rank), []
    for step in range(STEPS):
        pictures = torch.rand(2, 16, 64)
        seen = engine.module.encoder(pictures)  # outside of the engine's forward, and before it
        if step % 2:
            engine(next(batches), engine.module.encoder(pictures))  # and nobody goes back through this
        loss = engine(next(batches), seen)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return ended(engine, losses)


REPORTS = ("pytorch 115255", "torchtune 2709", "deepspeed 598")
