"""Every hazard of the design that concerns the cache, over every placement that exists; see ``hazards.py``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import StoreFactory
from support import hazards, runs
from support.doubles import Accelerator, ScriptedBackend, fails, slow
from support.hazards import Scenario, cache_over, mutations, scenarios
from torch import Tensor

from ds_tba.core.cache import TensorCache
from ds_tba.remat.sites import Sites
from ds_tba.remat.store import RematStore
from ds_tba.storage.backends import IoBackend
from ds_tba.storage.host import HostStore

MIB = 1 << 20
SIDE_BYTES = hazards.SIDE * hazards.SIDE * 4
Placed = Callable[[StoreFactory], TensorCache]


@scenarios
def test_offloaded_gradients_are_exact(make_store: StoreFactory, backend: IoBackend, scenario: Scenario) -> None:
    store = make_store(backend, staging_bytes=8 * MIB)
    hazards.check(scenario, cache_over(store, wait=True))
    assert store.stats.offloaded_bytes > 0 or scenario in hazards.MOVE_NOTHING


def slow_writes(make_store: StoreFactory) -> TensorCache:
    """Most is handed over from memory, or kept because staging is full."""
    return cache_over(make_store(ScriptedBackend(slow(0.02)), staging_bytes=MIB))


def slow_reads(make_store: StoreFactory) -> TensorCache:
    backend = ScriptedBackend(slow(0.002, "read"))
    return cache_over(make_store(backend, staging_bytes=2 * MIB, integrity="full"), wait=True)


def failing_writes(make_store: StoreFactory) -> TensorCache:
    return cache_over(make_store(ScriptedBackend(fails("write", first=3)), staging_bytes=8 * MIB))


def kept(_: StoreFactory) -> TensorCache:
    return cache_over(None)


def host_memory(_: StoreFactory) -> TensorCache:
    return TensorCache([HostStore(Accelerator(), 32 * MIB)], "cpu", hazards.MIN_BYTES)


def host_memory_behind_failing_writes(make_store: StoreFactory) -> TensorCache:
    tiers = [*failing_writes(make_store).stores, HostStore(Accelerator(), 4 * MIB)]
    return TensorCache(tiers, "cpu", hazards.MIN_BYTES)


@scenarios
@pytest.mark.parametrize(
    "placed",
    [slow_writes, slow_reads, failing_writes, kept, host_memory, host_memory_behind_failing_writes],
    ids=lambda placed: placed.__name__,
)
def test_gradients_are_exact(make_store: StoreFactory, placed: Placed, scenario: Scenario) -> None:
    hazards.check(scenario, placed(make_store))


@pytest.mark.parametrize("placed", ["nvme", "keep", "budget"])
@scenarios
def test_gradients_are_exact_when_rematerialized(make_store: StoreFactory, scenario: Scenario, placed: str) -> None:
    cache = cache_over(None if placed == "keep" else make_store(staging_bytes=8 * MIB), wait=True)
    cache.rematerialize(RematStore(cache, Sites(cache, Accelerator())))
    if placed == "budget":
        cache.limit(8 * SIDE_BYTES)
    for _ in range(2):  # what is proven in the first pass is left out in the second
        hazards.check(scenario, cache)


@mutations
@pytest.mark.parametrize("placed", ["nvme", "keep"])
def test_a_mutation_after_the_save_raises(
    make_store: StoreFactory, mutation: Callable[[hazards.Saving], Tensor], placed: str
) -> None:
    hazards.check_mutation(mutation, cache_over(make_store() if placed == "nvme" else None))


def test_memory_is_given_back_after_each_operation_of_backward(make_store: StoreFactory) -> None:
    cache = cache_over(make_store(), wait=True)
    x, alive = hazards.leaf(), list[int]()
    with cache.saving():
        y = x
        for _ in range(16):
            y = y.sin()
            y.register_hook(lambda _: alive.append(cache.live_records))
        loss = y.sum()
    del y
    assert cache.stats.saved.now == 16 * SIDE_BYTES
    loss.backward()
    assert alive == sorted(alive, reverse=True) and alive[-1] <= 2
    hazards.check_nothing_is_left(cache, "memory")


@pytest.mark.long
def test_the_same_under_python_o() -> None:
    done = runs.python("-O", hazards.__file__)
    assert done.returncode == 0, done.stderr
    assert f"{len(hazards.SCENARIOS)} scenarios" in done.stdout and "debug is False" in done.stdout
