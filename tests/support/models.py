"""A layer, and a stack of layers with a loss, that many tests train."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional


class Mlp(nn.Module):
    """A residual MLP: with dropout it saves eight storages of a width and two of four."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Layers one after the other, then a head; returns the mean square."""

    def __init__(self, make: Callable[[], nn.Module], depth: int, head: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(depth))
        self.head = head or nn.Identity()

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Run one layer; a subclass runs it in its own way."""
        return layer(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(x).square().mean()
