"""Small trainings that each fill the memory with something else; sizes come from a seed.

A program is what a user has: a model, a loss, an optimizer. What a message advises to change in it is a word in
``changes``; what it advises for ``ds_config.json`` is in the config.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
SGD = {"type": "SGD", "params": {"lr": 1e-3}}


@dataclass
class Program:
    """One training.

    Attributes:
        make: the model.
        inputs: of one step, for a micro-batch of that size.
        named: words that the first sentence of the message must have.
        batch: micro-batch in the config.
        placement: in the block.
        changes: for each change that the program can make, words by which a message asks for it.
        keeps: what a user's loop holds on to from step to step.
    """

    make: Callable[[frozenset[str]], nn.Module]
    inputs: Callable[[int], Tensor]
    named: tuple[str, ...]
    batch: int = 8
    placement: str = "keep"
    optimizer: dict[str, Any] = field(default_factory=lambda: dict(SGD))
    changes: dict[str, str] = field(default_factory=dict)
    steps: int = 6
    keeps_outputs: bool = False


def near(sizes: random.Random, number: int, step: int = 8) -> int:
    """Within a quarter of a number, a multiple of ``step``."""
    return round(number * sizes.uniform(0.75, 1.25) / step) * step


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Stack(nn.Module):
    """Layers, and the mean square of what comes out."""

    def __init__(self, layers: list[nn.Module], *, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x.float().square().mean()


# ---- the culprits ---------------------------------------------------------------------------------------------------


class Vocabulary(nn.Module):
    def __init__(self, width: int, vocabulary: int, *, in_pieces: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Residual(Mlp(width, 2 * width), width) for _ in range(2))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.in_pieces = in_pieces

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.lm_head(x)
        return functional.cross_entropy(logits, labels, reduction="sum")

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x, labels = x.flatten(0, 1), tokens.flatten()
        if not self.in_pieces:
            return self.loss(x, labels) / len(labels)
        pieces = zip(x.split(128), labels.split(128), strict=True)
        total: Tensor = sum(checkpoint(self.loss, one, other, use_reentrant=False) for one, other in pieces)
        return total / len(labels)


def logits(sizes: random.Random) -> Program:
    width, vocabulary, length = near(sizes, 32), near(sizes, 16_000), near(sizes, 128)
    return Program(
        lambda changes: Vocabulary(width, vocabulary, in_pieces="pieces" in changes),
        lambda batch: torch.randint(0, vocabulary, (batch, length)),
        ("logits",),
        placement="adaptive",
        changes={"pieces": "cross entropy"},
    )


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, is_eager: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.is_eager = heads, is_eager

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.is_eager:
            weights = (q @ k.mT / math.sqrt(width // self.heads)).softmax(-1)
            mixed = weights @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def attention(sizes: random.Random) -> Program:
    length, heads = near(sizes, 512), sizes.choice([4, 8])
    return Program(
        lambda changes: Stack([Residual(Attention(64, heads, is_eager="sdpa" not in changes), 64) for _ in range(4)]),
        lambda batch: torch.randn(batch, length, 64),
        ("attention", "layers.*.inner"),
        batch=4,
        changes={"sdpa": "scaled_dot_product_attention"},
    )


def mlp(sizes: random.Random) -> Program:
    hidden, length, depth = near(sizes, 2048), near(sizes, 128), sizes.randint(4, 8)
    return Program(
        lambda _: Stack([Residual(Mlp(64, hidden), 64) for _ in range(depth)]),
        lambda batch: torch.randn(batch, length, 64),
        ("layers.*.inner",),
    )


class Features(nn.Module):
    """A wide table of features, of which layers see a part."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table, self.norm, self.down = nn.Embedding(rows, width), nn.LayerNorm(width), nn.Linear(width, 32)
        self.layers = nn.ModuleList(Residual(Mlp(32, 64), 32) for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        x = self.down(self.norm(self.table(rows)).relu())
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def embedding(sizes: random.Random) -> Program:
    width, length = near(sizes, 2048), near(sizes, 512)
    return Program(
        lambda _: Features(128, width),
        lambda batch: torch.randint(0, 128, (batch, length)),
        ("norm", "Embedding"),
    )


class WithMetric(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.stack, self.probe = Stack([Residual(Mlp(width, 64), width)]), Mlp(width, hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.stack(x), self.probe(x).tanh().mean()


def leak(sizes: random.Random) -> Program:
    hidden, length = near(sizes, 1024), near(sizes, 128)
    return Program(
        lambda _: WithMetric(64, hidden),
        lambda batch: torch.randn(batch, length, 64),
        ("earlier steps",),
        changes={"detach": ".detach()"},
        steps=10,
        keeps_outputs=True,
    )


def gradients(sizes: random.Random) -> Program:
    """A backbone that nobody meant to train."""
    width = near(sizes, 1536)

    def make(changes: frozenset[str]) -> nn.Module:
        model = Stack([*(nn.Linear(width, width) for _ in range(4)), nn.Linear(width, 8)])
        if "frozen" in changes:
            model.layers[:4].requires_grad_(False)
        return model

    return Program(
        make, lambda batch: torch.randn(batch, width), ("gradients",), placement=sizes.choice(["keep", "adaptive"]),
        changes={"frozen": "requires_grad_(False)"},
    )  # fmt: skip


def states(sizes: random.Random) -> Program:
    width = near(sizes, 768)
    return Program(
        lambda _: Stack([nn.Linear(width, width) for _ in range(16)]),
        lambda batch: torch.randn(batch, width),
        ("optimizer",),
        placement="adaptive",
        optimizer=dict(ADAMW),
    )


class SavesCopies(torch.autograd.Function):
    """An activation of the user's own, careful beyond need."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        exact = x.float() * 1.0
        ctx.save_for_backward(exact, exact.sigmoid(), exact.square())
        return (exact * exact.sigmoid()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        exact, gate, _ = ctx.saved_tensors
        return (gradient.float() * (gate + exact * gate * (1 - gate))).to(gradient.dtype)


class OwnActivation(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(SavesCopies.apply(self.up(x)))


def function(sizes: random.Random) -> Program:
    hidden, length = near(sizes, 768), near(sizes, 128)
    return Program(
        lambda _: Stack([Residual(OwnActivation(64, hidden), 64) for _ in range(6)]),
        lambda batch: torch.randn(batch, length, 64),
        ("SavesCopies",),
    )


def recomputation(sizes: random.Random) -> Program:
    """Few layers, checkpointed, and a long sequence: what one of them saves is the peak."""
    hidden, length = near(sizes, 512), near(sizes, 2048)

    def make(changes: frozenset[str]) -> nn.Module:
        inner = [nn.Sequential(*(Residual(Mlp(32, hidden), 32) for _ in range(4))) for _ in range(3)]
        return Stack(list(inner), checkpoints="no_checkpoints" not in changes)

    return Program(
        make,
        lambda batch: torch.randn(batch, length, 32),
        ("again in backward", "layers."),
        batch=4,
        placement=sizes.choice(["keep", "nvme"]),
        changes={"no_checkpoints": "gradient_checkpointing_disable()"},
    )


def convolutions(sizes: random.Random) -> Program:
    channels, side, depth = near(sizes, 32), near(sizes, 48), sizes.randint(4, 6)

    def make(_: frozenset[str]) -> nn.Module:
        stem = nn.Conv2d(3, channels, 3, padding=1)
        stages = [
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
            for _ in range(depth)
        ]
        return Stack([stem, *stages])

    return Program(make, lambda batch: torch.randn(batch, 3, side, side), ("layers.*", "Conv"))


class Experts(nn.Module):
    """The best expert of each token, as Mixtral's loop does it."""

    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(Mlp(width, hidden) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        mixed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, which = (chosen == number).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, rows, expert(flat[rows]) * weights[rows, which, None])
        return mixed.view_as(x)


def experts(sizes: random.Random) -> Program:
    hidden, length, count = near(sizes, 512), near(sizes, 256), sizes.choice([4, 8])
    return Program(
        lambda _: Stack([Residual(Experts(48, hidden, count), 48) for _ in range(4)]),
        lambda batch: torch.randn(batch, length, 48),
        ("experts.*",),
    )


CULPRITS = {
    "logits": logits,
    "attention": attention,
    "mlp": mlp,
    "embedding": embedding,
    "leak": leak,
    "gradients": gradients,
    "states": states,
    "function": function,
    "recomputation": recomputation,
    "convolutions": convolutions,
    "experts": experts,
}
