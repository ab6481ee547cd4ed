"""A cache over one store, and a Function that calls back when backward reaches it: for tests of reading ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_tba.core.cache import TensorCache
from ds_tba.storage.nvme import NvmeStore

KIB = 1 << 10


class Spy(torch.autograd.Function):
    """Saves a tensor; its backward unpacks that, then calls back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, saved: torch.Tensor, seen: Callable[[], None]) -> torch.Tensor:
        ctx.save_for_backward(saved)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (_,) = ctx.saved_tensors
        ctx.seen()
        return grads[0], None, None


def cache_over(store: NvmeStore) -> TensorCache:
    return TensorCache([store], "cpu", 64 * KIB)


def chain(x: torch.Tensor, length: int) -> torch.Tensor:
    for _ in range(length):
        x = x.exp().log()
    return x
