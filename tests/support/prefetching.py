"""A cache over one store, and a Function that calls back when backward reaches it: for tests of reading ahead."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ds_tba.core.cache import TensorCache
from ds_tba.storage.nvme import NvmeStore
from support.awkward import Read, function

KIB = 1 << 10


def spied(x: Tensor, saved: Tensor, seen: Callable[[], None]) -> Tensor:
    """Return a copy; its backward unpacks ``saved``, then calls back."""

    def gradient(grad: Tensor, read: Read) -> Tensor:
        read()
        seen()
        return grad

    return function(lambda a, saved: (a.clone(), [saved]), gradient)(x, saved)


def cache_over(store: NvmeStore) -> TensorCache:
    return TensorCache([store], "cpu", 64 * KIB)


def chain(x: Tensor, length: int) -> Tensor:
    for _ in range(length):
        x = x.exp().log()
    return x
