"""Every hazard of the design that concerns the cache, over every placement that exists; see ``hazards.py``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import StoreFactory
from support import hazards, runs
from support.doubles import CpuAccelerator, ScriptedBackend, fails, slow
from support.each_hazard import Scenario, cache_over, mutations, scenarios
from support.stores import store_is_empty
from torch import Tensor

from ds_tba.core.cache import TensorCache
from ds_tba.remat.sites import Sites
from ds_tba.remat.store import RematStore
from ds_tba.storage.backends import IoBackend
from ds_tba.storage.host import HostStore

MIB = 1 << 20
SIDE_BYTES = hazards.SIDE * hazards.SIDE * 4


@scenarios
def test_offloaded_gradients_are_exact(make_store: StoreFactory, backend: IoBackend, scenario: Scenario) -> None:
    store = make_store(backend, staging_bytes=8 * MIB)
    hazards.check(scenario, cache_over(store, wait=True))
    assert store.stats.offloaded_bytes > 0 or scenario in hazards.MOVE_NOTHING
    assert store_is_empty(store)


@scenarios
def test_gradients_are_exact_when_the_lanes_are_slow(make_store: StoreFactory, scenario: Scenario) -> None:
    """Most is handed over from memory, or kept because staging is full."""
    store = make_store(ScriptedBackend(slow(0.02)), staging_bytes=MIB)
    hazards.check(scenario, cache_over(store))
    assert store_is_empty(store)


@scenarios
def test_gradients_are_exact_when_reads_are_slow(make_store: StoreFactory, scenario: Scenario) -> None:
    store = make_store(ScriptedBackend(slow(0.002, "read")), staging_bytes=2 * MIB, integrity="full")
    hazards.check(scenario, cache_over(store, wait=True))


@scenarios
def test_gradients_are_exact_when_writes_begin_to_fail(make_store: StoreFactory, scenario: Scenario) -> None:
    store = make_store(ScriptedBackend(fails("write", first=3)), staging_bytes=8 * MIB)
    hazards.check(scenario, cache_over(store))
    assert store_is_empty(store)


@scenarios
def test_kept_gradients_are_exact(scenario: Scenario) -> None:
    hazards.check(scenario, cache_over(None))


@scenarios
def test_gradients_are_exact_in_host_memory(scenario: Scenario) -> None:
    host = HostStore(CpuAccelerator(), 32 * MIB)
    cache = TensorCache([host], "cpu", hazards.MIN_BYTES)
    hazards.check(scenario, cache)
    host.put(torch.zeros(1, dtype=torch.uint8), wait=False)  # acts on the notes of finalizers
    assert sum(segment.spans.used_bytes for segment in host._segments) == 4096
    host.close()


@scenarios
def test_gradients_are_exact_when_nvme_degrades_to_host_memory(make_store: StoreFactory, scenario: Scenario) -> None:
    store = make_store(ScriptedBackend(fails("write", first=3)), staging_bytes=8 * MIB)
    hazards.check(scenario, TensorCache([store, HostStore(CpuAccelerator(), 4 * MIB)], "cpu", hazards.MIN_BYTES))
    assert store_is_empty(store)


@pytest.mark.parametrize("placed", ["nvme", "keep", "budget"])
@scenarios
def test_gradients_are_exact_when_rematerialized(make_store: StoreFactory, scenario: Scenario, placed: str) -> None:
    cache = cache_over(None if placed == "keep" else make_store(staging_bytes=8 * MIB), wait=True)
    cache.rematerialize(RematStore(cache, Sites(cache, CpuAccelerator())))
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
