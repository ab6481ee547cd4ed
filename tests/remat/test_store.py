"""What rematerialization holds, and for how long."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from conftest import StoreFactory
from support.doubles import wait_for_writes
from torch import Tensor
from torch.nn import Parameter, functional

from ds_tba.core.cache import TensorCache
from ds_tba.device.accelerator import Accelerator
from ds_tba.remat import sites as sites_module
from ds_tba.remat.sites import Sites
from ds_tba.remat.store import RematStore

SIZE = (128, 128)  # 64 KiB
STEPS = 4


def cache_of(*stores: Any, with_sites: bool = True) -> TensorCache:
    cache = TensorCache(stores, "cpu", 1024, wait_for_staging=True)
    if with_sites:
        cache.rematerialize(RematStore(cache, Sites(cache, Accelerator())))
    return cache


def unet(inputs: list[Parameter]) -> Tensor:
    """Each level's output is made of what the level has saved, and is wanted again on the way up, in reverse."""
    x, skips = inputs[0] * 1.0, []
    for weight in inputs:
        gate = x * weight
        x = functional.silu(gate)
        skips.append(x)
        x = x + 0.1
    for weight, skip in zip(reversed(inputs), reversed(skips), strict=True):
        x = (x + 0.5) * (skip * (weight + 0.25))
    return x.sum()


def peak_in_backward(cache: TensorCache, inputs: list[Parameter]) -> int:
    """Bytes of saved tensors in memory at most in the last of some backwards."""
    for _ in range(STEPS):
        with cache.saving():
            loss = unet(inputs)
        for store in cache.stores:
            wait_for_writes(store)
        cache.settle()
        cache.stats.resident.lap()
        loss.backward()
        peak_bytes = cache.stats.resident.lap()
        del loss
        gc.collect()
        cache.settle()
    return peak_bytes


def test_backward_holds_no_more_than_without(make_store: StoreFactory) -> None:
    inputs = [Parameter(torch.randn(SIZE)) for _ in range(8)]
    plain = peak_in_backward(cache_of(make_store(), with_sites=False), inputs)
    ours = peak_in_backward(cache_of(make_store()), inputs)
    # What is made again, and what it is made of, of one op at a time.
    assert ours <= plain + 2 * inputs[0].nbytes, f"{ours} bytes against {plain}"


def test_sites_in_use_are_not_forgotten_for_lengths_that_never_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites_module, "MAX_SITES", 8)
    x, cache, saved = Parameter(torch.randn(SIZE)), cache_of(), []
    for step in range(40):
        before = cache.stats.rematerialized_bytes
        with cache.saving():
            loss = torch.sin(functional.silu(x * 0.5)).sum() + torch.sin(functional.silu(x[: 20 + step] * 0.5)).sum()
        saved.append(cache.stats.rematerialized_bytes - before >= x.nbytes)
        loss.backward()
    # A few are left to those that are saved, or compared, in turn.
    assert saved[4:].count(False) <= 2, "".join("-#"[one] for one in saved)
