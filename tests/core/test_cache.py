"""The cache: how often it reads, what it counts, and interrupts."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from types import FrameType

import numpy as np
import pytest
import torch
from conftest import AlarmError, StoreFactory
from support.doubles import Gate, ScriptedBackend, raising, wait_for_writes
from support.each_hazard import cache_over
from support.stores import bytes_read
from torch import Tensor

from ds_tba.core.cache import TensorCache
from ds_tba.device.accelerator import Accelerator
from ds_tba.errors import StateError
from ds_tba.remat.sites import Sites
from ds_tba.remat.store import RematStore
from ds_tba.storage.host import HostStore
from ds_tba.storage.nvme import Lanes, NvmeStore

MIB = 1 << 20


def written(store: NvmeStore) -> tuple[TensorCache, Tensor, Tensor]:
    """A cache, a leaf, and a loss for whose backward everything has to be read."""
    cache, x = cache_over(store), torch.randn(256, 256, requires_grad=True)
    with cache.saving():
        loss = x.exp().sin().sum()
    wait_for_writes(store)
    return cache, x, loss


def test_forwards_without_backward_are_micro_steps_of_their_own_whatever_else_is_alive() -> None:
    """A loss that a program keeps with its graph joined all evaluations after it into one micro-step."""
    cache, x = TensorCache([], "cpu", 1), torch.randn(8, requires_grad=True)
    with cache.saving():
        kept_loss = x.sin().sum()
    assert cache.expects_forward  # a second forward may come before the backward of both
    with cache.saving():
        loss = x.cos().sum()
    assert cache.expects_forward
    loss.backward()
    for _ in range(3):
        with cache.saving():
            loss = x.exp().sum()
        assert cache.expects_forward
        del loss
        assert not cache.expects_forward
    assert kept_loss.requires_grad and cache.stats.saved.now > 0


def test_what_a_forward_that_failed_leaves_behind_leaves_with_the_next_save(make_store: StoreFactory) -> None:
    store, x = make_store(), torch.randn(256, 256, requires_grad=True)
    cache = cache_over(store)
    with pytest.raises(AlarmError), cache.saving():
        loss = x.exp()
        raise AlarmError
    assert loss.requires_grad and store.stats.offloaded_bytes == 0
    with cache.saving():
        x[0].exp()
    assert store.stats.offloaded_bytes == x.nbytes


def test_what_has_no_graph_stays_while_it_is_in_use(make_store: StoreFactory) -> None:
    """Its memory is NumPy's here, which refills it once no tensor of the program has it."""
    memory = np.full((64, 64), 3.0, np.float32)
    store = make_store()
    cache, x, data = cache_over(store), torch.ones(64, 64, requires_grad=True), torch.from_numpy(memory)
    with cache.saving():
        loss = (x * data).sum()
    assert cache.stats.kept_bytes["no graph, and in use elsewhere"] == data.nbytes
    wait_for_writes(store)
    del data
    memory[:] = 7
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((64, 64), 7.0))  # as without us


# ---- what is stored, and how often ----------------------------------------------------------------------------------


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


def test_a_second_backward_reads_again_instead_of_holding_memory(make_store: StoreFactory) -> None:
    store = make_store()
    cache, _, loss = written(store)
    loss.backward(retain_graph=True)
    assert all(record.loaded is None for record in cache.forward.by_key.values())
    once = bytes_read(store)
    loss.backward()
    assert bytes_read(store) >= 2 * once > 0


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


# ---- interrupts -----------------------------------------------------------------------------------------------------


def interrupted_step(cache: TensorCache, at: int) -> bool:
    """Train a step, and interrupt it as the function of ds_tba of that number is called; False if there is none."""
    calls = 0

    def interrupt(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        if event == "call" and str(frame.f_globals.get("__name__")).startswith("ds_tba."):
            calls += 1
            if calls == at:
                sys.setprofile(None)
                raise AlarmError

    x = torch.randn(32, 32, requires_grad=True)
    sys.setprofile(interrupt)
    try:
        with cache.saving():
            made = x.sin() * 2
            loss = (made * made * made.mean(1, keepdim=True)).sum()
        del made
        loss.backward()
    except AlarmError:
        return True
    finally:
        sys.setprofile(None)
    return False


# Python itself ignores an exception that comes as it closes a generator, and says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_step_is_remembered_or_leaves_nothing() -> None:
    """An interrupt between two sections loses no count that one of them adds and the other takes back."""
    host, at, left = HostStore(Accelerator(), MIB), 1, list[int]()
    while True:
        cache = TensorCache([host], "cpu", 1024)
        cache.rematerialize(RematStore(cache, Sites(cache, Accelerator())))
        cache.limit(64 << 10)
        interrupted_step(cache, 0)
        if not interrupted_step(cache, at):
            break
        with suppress(StateError):
            cache.refuse_broken()
            gc.collect()
            cache.end_micro_step()
            cache.settle()
            if cache.live_records or cache.stats.saved.now or cache.stats.resident.now:
                left.append(at)
        at += 1
    assert at > 100 and left == []
    host.close()


def test_a_storage_whose_load_was_interrupted_is_given_up_with_its_graph(
    make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TensorCache([make_store()], "cpu", 4096, wait_for_staging=True)
    with cache.saving():
        loss = torch.randn(64, 64, requires_grad=True).sin().exp().sum()
    monkeypatch.setattr(cache, "_fetch", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    del loss
    cache.settle()
    assert cache.live_records == 0
    with pytest.raises(StateError):
        cache.refuse_broken()
