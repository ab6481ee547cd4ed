"""A small language model whose blocks do, on demand, what is hard for the lifetimes of saved tensors.

A *twist* is a function that keeps shape and dtype and saves tensors in an awkward way. Each forward draws which block
does which, and under which kind of checkpoint (:class:`ForwardPlan`). Here are the twists that a soak can tell more of
than one step can: those that share, change or return what they have saved. The table of hazards (``tests/hazards``) has
all of them, one step each.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from support.awkward import DoubleInPlace, ReturnsWhatItSaved

VOCABULARY = 256
WIDTH = 128
HEADS = 2
DEPTH = 3
LONGEST = 512


class InterruptionError(Exception):
    """Raised by the training itself, in forward, between forward and backward, or in backward."""


@dataclass(frozen=True)
class ForwardPlan:
    """One forward.

    Attributes:
        seed: seed of its tokens.
        twists: name of each block's twist.
        checkpoints: ``""``, ``"reentrant"`` or ``"not reentrant"`` for each block.
        collect: True to collect garbage between two blocks.
        raise_in: ``""``, ``"forward"`` or ``"backward"``, in which the middle block raises.
        penalty: True to add the square of a gradient, so that backward is a double backward.
    """

    seed: int
    batch: int
    sequence: int
    autocast: bool
    dropout: float
    twists: tuple[str, ...]
    checkpoints: tuple[str, ...]
    collect: bool
    raise_in: str = ""
    penalty: bool = False


# ---- twists ---------------------------------------------------------------------------------------------------------


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise InterruptionError("in backward")


def plain(x: Tensor) -> Tensor:
    return x


def views(x: Tensor) -> Tensor:
    """Save two views of one storage with equal shape and stride but different offset."""
    y, half = x * 1.01, x.shape[-1] // 2
    left, right = y[..., :half], y[..., half:]
    return x + 0.1 * torch.cat([left * right, right.sin()], -1)


def own_functions(x: Tensor) -> Tensor:
    return x + 0.01 * DoubleInPlace.apply(x * 0.5).tanh()


def returned_saves(x: Tensor) -> Tensor:
    constant = torch.linspace(-0.01, 0.01, x.numel(), dtype=x.dtype).view_as(x)
    return x + 1e-6 * ReturnsWhatItSaved.apply(x, constant)


def chunks_changed_in_place(x: Tensor) -> Tensor:
    """Change siblings that share bytes but not a version counter, as PyTorch's LSTM cells do."""
    i, f, g, o = (x * 1.5).unsafe_chunk(4, -1)
    i.sigmoid_()
    f.sigmoid_()
    g.tanh_()
    o.sigmoid_()
    gated = o * (f * x[..., : i.shape[-1]] + i * g).tanh()
    return x + 0.1 * torch.cat([gated] * 4, -1)


def data_changed_between_two_saves(x: Tensor) -> Tensor:
    """Change a tensor through ``.data``, around the version counter, between two saves."""
    y = x * 2
    twin = y.data
    twin.mul_(0.5)
    return x + 0.01 * (y * x.detach() + twin * x)


def other_hooks_inside(x: Tensor) -> Tensor:
    y = x.tanh()
    with saved_tensors_hooks(lambda saved: (saved.clone(),), lambda held: held[0]):
        z = (y * x.sin()).tanh()
    with save_on_cpu():  # no operation here may save its own output: on the CPU that would be a cycle, without us too
        z = z.sin() * y
    return x + 0.1 * z * y


TWISTS: dict[str, Callable[[Tensor], Tensor]] = {
    function.__name__: function
    for function in (
        plain, views, own_functions, returned_saves, chunks_changed_in_place, data_changed_between_two_saves,
        other_hooks_inside,
    )
}  # fmt: skip
TWICE_DIFFERENTIABLE = ("plain", "views")


# ---- the model ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm attention (written out, so that it saves its probabilities and can be differentiated twice) and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, twist: str, dropout: float, exposed: list[Tensor] | None) -> Tensor:
        batch, sequence, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, sequence, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        score = (q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5).softmax(-1)
        score = functional.dropout(score, dropout, self.training)
        x = x + self.out((score @ v).transpose(1, 2).reshape(batch, sequence, WIDTH))
        x = TWISTS[twist](x)
        hidden = self.up(self.norm2(x))
        if exposed is not None:
            exposed.append(hidden)
        return x + functional.dropout(self.down(functional.gelu(hidden)), dropout, self.training)


class Model(nn.Module):
    """Random bytes in, mean cross entropy of a fixed permutation of them out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, plan: ForwardPlan, exposed: list[Tensor] | None = None) -> Tensor:
        """Return the loss, and append the tensors that the blocks' GELUs saved to ``exposed``."""
        with torch.autocast("cpu", torch.bfloat16, enabled=plan.autocast):
            first = x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
            for number, block in enumerate(self.blocks):
                x = self._block(block, x, plan, number, exposed)
                if number == DEPTH // 2:
                    x = _raise_if_told(x, plan.raise_in)
                if plan.collect:
                    gc.collect()
            scores = self.head(self.norm(x)).flatten(0, 1).float()
        loss = functional.cross_entropy(scores, (tokens * 7 + 3).flatten() % VOCABULARY)
        if plan.penalty and loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, first, create_graph=True)
            loss = loss + gradient.float().pow(2).sum()
        return loss

    @staticmethod
    def _block(block: nn.Module, x: Tensor, plan: ForwardPlan, number: int, exposed: list[Tensor] | None) -> Tensor:
        inputs = (x, plan.twists[number], plan.dropout, exposed)
        style = plan.checkpoints[number] if torch.is_grad_enabled() else ""
        result: Tensor = checkpoint(block, *inputs, use_reentrant=style == "reentrant") if style else block(*inputs)
        return result


def _raise_if_told(x: Tensor, where: str) -> Tensor:
    if where == "forward":
        raise InterruptionError("in forward")
    if where == "backward":
        result: Tensor = RaisesInBackward.apply(x)
        return result
    return x


def tokens_of(plan: ForwardPlan) -> Tensor:
    """Return the input of a forward: int64 (batch, sequence)."""
    chance = torch.Generator().manual_seed(plan.seed)
    return torch.randint(0, VOCABULARY, (plan.batch, plan.sequence), generator=chance)
