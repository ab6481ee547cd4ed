"""Layers of Llama-3-8B with random weights, and the ways to train them: ours, and checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from curves.models import Workload
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

BYTE_VALUES = 256  # the vocabulary: what is measured are layers
LEARNABLE_BYTES = 2 + 2  # of a parameter in bf16 and its gradient


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer, and the number of layers."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    key_heads: int = 8
    layers: int = 32

    @property
    def layer_parameters(self) -> int:
        keys = self.hidden // self.heads * self.key_heads
        return self.hidden * (2 * self.hidden + 2 * keys + 3 * self.inner)

    @property
    def token_bytes(self) -> int:
        """Bytes that one layer saves of one token, about: ten tensors of the width, six of the MLP's, in bf16."""
        return 2 * (10 * self.hidden + 6 * self.inner)

    def layers_for(self, tokens: int, memory_bytes: int) -> int:
        """Return how many layers one GPU holds with everything kept, with a tenth to spare; at most the model's."""
        of_one = LEARNABLE_BYTES * self.layer_parameters + tokens * self.token_bytes
        return min(self.layers, max(1, int(0.9 * memory_bytes / of_one)))


class Norm(nn.Module):
    """RMS norm, computed in fp32 as in transformers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


class Layer(nn.Module):
    """Attention and MLP of a Llama.

    Args:
        side: a stream on which a part of the MLP runs, as scripts with streams of their own have it.
    """

    def __init__(self, shape: Shape, side: torch.cuda.Stream | None) -> None:
        super().__init__()
        self._head, self._side = shape.hidden // shape.heads, side
        keys = self._head * shape.key_heads
        self.norms = nn.ModuleList(Norm(shape.hidden) for _ in range(2))
        self.query, self.out = (nn.Linear(shape.hidden, shape.hidden, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(shape.hidden, keys, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(shape.hidden, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        y = self.norms[0](x)
        query, key, value = (
            one(y).unflatten(-1, (-1, self._head)).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        query, key = (_rotated(one, *angles).to(value.dtype) for one in (query, key))
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self._up(y))

    def _up(self, y: torch.Tensor) -> torch.Tensor:
        if self._side is None:
            return self.up(y)
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            made = self.up(y)
        current.wait_stream(self._side)
        made.record_stream(current)
        return made


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Llama(nn.Module):
    """Token numbers in, mean cross entropy out; ``run`` runs a layer on its arguments."""

    def __init__(self, shape: Shape, side: torch.cuda.Stream | None = None) -> None:
        super().__init__()
        self.run: Callable[..., torch.Tensor] = run_layer
        self._head = shape.hidden // shape.heads
        self.tokens = nn.Embedding(BYTE_VALUES, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, side) for _ in range(shape.layers))
        self.norm, self.lm_head = Norm(shape.hidden), nn.Linear(shape.hidden, BYTE_VALUES, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        at = torch.arange(tokens.shape[1], device=x.device)[:, None]
        slow = 10000 ** (torch.arange(0, self._head, 2, device=x.device) / self._head)
        angles = tuple(torch.cat((turn(at / slow),) * 2, -1).to(x.dtype) for turn in (torch.cos, torch.sin))
        for layer in self.layers:
            x = self.run(layer, x, angles)
        return functional.cross_entropy(self.lm_head(self.norm(x)).float().flatten(0, 1), tokens.flatten())


def run_layer(layer: nn.Module, *args: Any) -> Any:
    """Run a layer as it is."""
    return layer(*args)


def workload(shape: Shape, tokens: int, device: torch.device) -> Workload:
    """Return the model in bf16, with gradients of zero, and one sequence."""
    torch.manual_seed(1)
    with device:
        model = Llama(shape).bfloat16()
    batch = torch.randint(BYTE_VALUES, (1, tokens), generator=torch.Generator().manual_seed(2)).to(device)
    return Workload.prepared(model, batch)


Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Room:
    """The bytes saved with everything kept, and those of host and drive for ways that move all, or plan (``small``)."""

    kept: int
    host: int
    swap: int
    small_host: int
    small_swap: int


@dataclass(frozen=True)
class Way:
    """One way to train: the context in which forward runs, made from the model, keys of our block, whether it plans."""

    name: str
    title: str
    around: Callable[[nn.Module], Around] = lambda _: nullcontext
    block: Callable[[Room], dict[str, Any]] | None = None
    plans: bool = False


def checkpointing(model: Any) -> Around:
    """Checkpoint every layer by torch's function."""

    @contextmanager
    def checkpointed() -> Iterator[None]:
        model.run = partial(checkpoint, use_reentrant=False)
        try:
            yield
        finally:
            model.run = run_layer

    return checkpointed


def _nvme(swap_bytes: int) -> dict[str, Any]:
    return {"placement": "nvme", "io": {"swap_file_bytes": swap_bytes}}


def _planned(room: Room, **more: Any) -> dict[str, Any]:
    return {"host_budget_bytes": room.small_host, "io": {"swap_file_bytes": room.small_swap}, **more}


def _within(share: float, **more: Any) -> Callable[[Room], dict[str, Any]]:
    # An overhead that no plan reaches: the budget decides.
    return lambda room: _planned(room, activation_budget_bytes=int(share * room.kept), max_step_overhead=100.0, **more)


BOTH = "torch checkpointing + **ours**, nvme"
RECOMPUTED = '**ours**, adaptive in a quarter, `"recompute": true`'
WAYS = (
    Way("keep", "keep (nothing)"),
    Way("checkpointing", "torch checkpointing of every layer", checkpointing),
    Way("checkpointing + nvme", BOTH, checkpointing, lambda room: _nvme(room.small_swap)),
    Way("rematerialize", "**ours**, rematerialization alone", block=lambda _: {"placement": "keep"}),
    Way("host", "**ours**, host", block=lambda room: {"placement": "host", "host_budget_bytes": room.host}),
    Way("adaptive 2 %", "**ours**, adaptive, 2 %", block=_planned, plans=True),
    Way("adaptive 0.5", "**ours**, adaptive in half of what keep saves", block=_within(0.5), plans=True),
    Way("adaptive 0.25", "**ours**, adaptive in a quarter", block=_within(0.25), plans=True),
    Way("nvme", "**ours**, nvme (everything)", block=lambda room: _nvme(room.swap)),
    Way("adaptive 0.25, recompute", RECOMPUTED, block=_within(0.25, recompute=True), plans=True),
)
