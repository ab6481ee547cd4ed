"""BERT, GPT and T5 as stacks of pre-norm blocks, built from numbers; no dropout, so that runs can be compared in bits.

BERT attends both ways, GPT causally; T5 has ``layers - layers // 2`` encoder and ``layers // 2`` decoder blocks, the
latter with cross-attention, and as many tokens on both sides. All have learned positions and a head over the
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from ds_tba.core.tensors import mark_owned


@dataclass(frozen=True)
class Shape:
    """A model and its micro-batch."""

    model: str
    hidden: int
    layers: int
    sequence: int
    vocabulary: int
    head: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.model} h{self.hidden} l{self.layers} b{self.batch}"

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def largest_tensor_bytes(self) -> int:
        """The largest tensor that is saved: an MLP's inside (bf16), or the logits (fp32)."""
        return self.tokens * max(2 * 4 * self.hidden, 4 * self.vocabulary)

    @property
    def activation_bytes(self) -> int:
        """An estimate from above of what is saved, for sizing swap files only."""
        crossing = self.layers // 2 if self.model == "T5" else 0
        return self.tokens * (2 * self.hidden * (20 * self.layers + 8 * crossing) + 12 * self.vocabulary)


class Attention(nn.Module):
    """Multi-head attention through ``scaled_dot_product_attention``."""

    def __init__(self, shape: Shape, *, causal: bool, crossing: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = shape.hidden // shape.head, causal
        self.query = nn.Linear(shape.hidden, shape.hidden) if crossing else None
        self.projection = nn.Linear(shape.hidden, (2 if crossing else 3) * shape.hidden)
        self.out = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        parts = self.projection(x if memory is None else memory).chunk(2 if self.query else 3, dim=-1)
        if self.query is not None:
            parts = (self.query(x), *parts)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Self-attention, cross-attention where there is something to attend to, MLP."""

    def __init__(self, shape: Shape, *, causal: bool, crossing: bool = False) -> None:
        super().__init__()
        width = shape.hidden
        self.norm, self.attention = nn.LayerNorm(width), Attention(shape, causal=causal)
        self.norm_cross = nn.LayerNorm(width) if crossing else None
        self.cross = Attention(shape, causal=False, crossing=True) if crossing else None
        self.norm_mlp = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        if self.cross is not None and self.norm_cross is not None:
            x = x + self.cross(self.norm_cross(x), memory)
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


class Transformer(nn.Module):
    """Token numbers in, mean cross entropy out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        decoders = shape.layers // 2 if shape.model == "T5" else 0
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden)
        causal = shape.model == "GPT"
        self.blocks = nn.ModuleList(Block(shape, causal=causal) for _ in range(shape.layers - decoders))
        self.decoders = nn.ModuleList(Block(shape, causal=True, crossing=True) for _ in range(decoders))
        self.norm, self.head = nn.LayerNorm(shape.hidden), nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        at = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.tokens(inputs) + self.positions(at)
        for block in self.blocks:
            x = block(x)
        if len(self.decoders):
            memory, x = x, self.tokens(targets) + self.positions(at)
            for block in self.decoders:
                x = block(x, memory)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True)
class Workload:
    """A model in bf16 with one batch (token numbers, and targets for some), shared by all contenders."""

    model: nn.Module
    batch: tuple[torch.Tensor, ...]
    parameters: list[nn.Parameter]

    @classmethod
    def of(cls, shape: Shape, device: torch.device) -> Workload:
        with device:
            model = Transformer(shape).bfloat16()
        _initialize(model)
        generator = torch.Generator().manual_seed(2)
        text = torch.randint(0, shape.vocabulary, (2, shape.batch, shape.sequence), generator=generator)
        return cls.prepared(model, *text.to(device))

    @classmethod
    def prepared(cls, model: nn.Module, *batch: torch.Tensor) -> Workload:
        """Return a model and its batch, with gradients of zero that stay allocated."""
        for module in model.modules():
            mark_owned(module)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return cls(model, batch, list(model.parameters()))


@torch.no_grad()
def _initialize(model: Transformer) -> None:
    """Set the same parameters each time."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.02)
        else:
            parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
