"""Every hazard of the design that concerns the cache, over every placement that exists; see ``hazards.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import StoreFactory
from support import hazards
from support.doubles import CpuAccelerator, Gate, ScriptedBackend, fails, slow, wait_for_writes
from support.each_hazard import Scenario, cache_over, mutations, scenarios
from support.stores import store_is_empty
from torch import Tensor, nn

from ds_tba.core.cache import TensorCache
from ds_tba.core.prefetch import MicroStep
from ds_tba.core.saved import RecordState, SavedStorage, StorageKey
from ds_tba.errors import ActivationCorruptionError, ActivationLostError, StateError
from ds_tba.remat.sites import Sites
from ds_tba.remat.store import RematStore
from ds_tba.storage.backends.base import IoBackend
from ds_tba.storage.host import HostStore
from ds_tba.storage.nvme import Lanes, NvmeStore

MIB = 1 << 20
SIDE_BYTES = hazards.SIDE * hazards.SIDE * 4


def written(store: NvmeStore) -> tuple[TensorCache, Tensor, Tensor]:
    """A cache, a leaf, and a loss for whose backward everything has to be read."""
    cache, x = cache_over(store), torch.randn(256, 256, requires_grad=True)
    with cache.saving():
        loss = x.exp().sin().sum()
    wait_for_writes(store)
    return cache, x, loss


@scenarios
def test_offloaded_gradients_are_exact(make_store: StoreFactory, backend: IoBackend, scenario: Scenario) -> None:
    store = make_store(backend, staging_bytes=8 * MIB)
    hazards.check(scenario, cache_over(store, wait=True))
    assert store.stats.offloaded_bytes > 0 or scenario.__name__ == "sparse_tensors"
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
        cache.limit_resident(8 * SIDE_BYTES)
    for _ in range(2):  # what is proven in the first pass is left out in the second
        hazards.check(scenario, cache)


@mutations
@pytest.mark.parametrize("placed", ["nvme", "keep"])
def test_a_mutation_after_the_save_raises(
    make_store: StoreFactory, mutation: Callable[[hazards.Saving], Tensor], placed: str
) -> None:
    hazards.check_mutation(mutation, cache_over(make_store() if placed == "nvme" else None))


@pytest.mark.long
def test_the_same_under_python_o() -> None:
    here = Path(__file__).parents[1]
    paths = os.pathsep.join([str(here), str(here.parent)])
    done = subprocess.run(
        [sys.executable, "-O", str(here / "support" / "hazards.py")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(hazards.SCENARIOS)} scenarios" in done.stdout and "debug is False" in done.stdout


# ---- what is stored, and how often ----------------------------------------------------------------------------------


def test_each_storage_is_written_once(make_store: StoreFactory) -> None:
    store = make_store()
    cache = cache_over(store)
    x = torch.randn(256, 256, requires_grad=True)
    with cache.saving():
        y = x * 2
        loss = (y[:128] * y[128:]).sum() + (y.t() @ y).sum() + (y.view(-1) * y.reshape(-1)).sum()
    x_bytes = 256 * 256 * 4
    assert store.stats.offloaded_bytes <= 2 * x_bytes  # y, and at most x: never one of the views
    assert cache.stats.deduplicated_bytes >= 4 * x_bytes
    loss.backward()


def test_parameters_and_buffers_are_never_written(make_store: StoreFactory) -> None:
    store = make_store()
    cache = cache_over(store)
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256, affine=False), nn.Linear(256, 256))
    with cache.saving():
        loss = model(torch.zeros(1, 256).expand(512, 256)).sum()
    stored = {record.nbytes for record in cache.forward.by_key.values() if record.state is not RecordState.KEPT}
    assert 256 * 256 * 4 not in stored
    assert cache.stats.passed_through_tensors > 0
    loss.backward()


def test_small_storages_are_kept_and_counted(make_store: StoreFactory) -> None:
    store = make_store()
    cache = TensorCache([store], "cpu", 1 << 20)
    x = torch.randn(1000, requires_grad=True)
    with cache.saving():
        loss = x.exp().sum()
    assert store.stats.offloaded_bytes == 0 and cache.stats.kept_bytes["small"] == 4000
    loss.backward()


def test_full_staging_keeps_the_tensor_and_counts_it(make_store: StoreFactory) -> None:
    gate = Gate()
    store = make_store(ScriptedBackend(gate), staging_bytes=MIB)
    cache = cache_over(store)
    x = torch.randn(128 * 1024, requires_grad=True)  # 512 KiB
    with cache.saving():
        loss = x.exp().sin().tanh().sigmoid().sum()
    assert store.stats.fallbacks["staging full"] == 1 and cache.stats.kept_bytes["staging full"] == MIB // 2
    gate.opened.set()
    loss.backward()


def test_backward_prefetches_in_reverse_and_within_its_bound(make_store: StoreFactory) -> None:
    order: list[int] = []
    gate = Gate("none")

    class Recording(ScriptedBackend):
        def open_handle(self, fd: int) -> object:  # type: ignore[override]
            handle = super().open_handle(fd)
            read = handle.read

            def recorded(data: Tensor, offset: int) -> None:
                order.append(offset // (64 * 1024))
                read(data, offset)

            handle.read = recorded  # type: ignore[method-assign]
            return handle

    store = make_store(Recording(gate), lanes=Lanes(2, 1))
    cache = cache_over(store)
    x = torch.randn(128, 128, requires_grad=True)
    for _ in range(2):
        with cache.saving():
            y = x * 1
            for _ in range(8):
                y = y.exp().log()
            loss = y.sum()
        wait_for_writes(store)
        order.clear()
        loss.backward()
        assert order == sorted(order, reverse=True) and len(order) >= 8
    assert len(cache.learned_order) == len(order)


def test_a_second_backward_reads_again_instead_of_holding_memory(make_store: StoreFactory) -> None:
    store = make_store()
    cache, _, loss = written(store)
    loss.backward(retain_graph=True)
    assert all(record.reloaded is None for record in cache.forward.by_key.values())
    once = store.stats.read_bytes
    loss.backward()
    assert store.stats.read_bytes >= 2 * once > 0


def test_peaks_with_and_without_offload_are_counted(make_store: StoreFactory) -> None:
    cache = cache_over(make_store(), wait=True)
    x = torch.randn(512, 512, requires_grad=True)  # 1 MiB, saved by the first operation too
    with cache.saving():
        y = x
        for _ in range(10):
            y = y.sin()
        loss = y.sum()
    # What is offloaded counts until its memory is free, and the leaf is still there.
    assert cache.stats.saved.now == 10 * MIB and cache.stats.resident.now == MIB
    loss.backward()
    del loss, y
    assert cache.stats.saved.peak == 10 * MIB and 2 * MIB <= cache.stats.resident.peak <= 3 * MIB
    assert cache.stats.saved.now == cache.stats.resident.now == 0


# ---- bytes that are gone must raise, not become a gradient ---------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (fails("read"), ActivationLostError),
        (lambda verb, n: "drop" if verb == "write" else None, ActivationCorruptionError),
    ],
)
def test_lost_bytes_raise_out_of_backward(
    make_store: StoreFactory, script: Callable[[str, int], str | None], error: type[Exception]
) -> None:
    store = make_store(ScriptedBackend(script))
    cache, x, loss = written(store)
    store.ring._memory.random_(0, 256)  # type: ignore[union-attr]
    with pytest.raises(error):
        loss.backward()
    assert x.grad is None
    del loss
    hazards.check_nothing_is_left(cache, "lost bytes")


def test_backward_after_close_says_so(make_store: StoreFactory) -> None:
    store = make_store()
    *_, loss = written(store)
    store.close()
    with pytest.raises(StateError, match="closed before backward"):
        loss.backward()


def test_saved_tensors_can_still_be_written_and_loaded(make_store: StoreFactory, tmp_path: Path) -> None:
    cache = cache_over(make_store())
    batch = torch.randn(256, 256)
    weight = torch.randn(256, 256, requires_grad=True)
    with cache.saving():
        loss = (batch @ weight).sum()
    torch.save({"batch": batch, "view": batch[0]}, tmp_path / "batch.pt")
    assert torch.equal(torch.load(tmp_path / "batch.pt", weights_only=True)["batch"], batch)
    loss.backward()


def test_illegal_moves_raise() -> None:
    record = SavedStorage(StorageKey(0, 1, 0, 1), MicroStep())
    with pytest.raises(StateError, match="from 'kept in device memory' to 'in device memory again'"):
        record.move(RecordState.BACK)
    assert MicroStep().add(record) == 0
