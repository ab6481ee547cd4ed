"""The cache: how often it reads, what it counts, how much it does, and interrupts."""

from __future__ import annotations

import gc
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import numpy as np
import pytest
import torch
from conftest import AlarmError, StoreFactory
from support.doubles import wait_for_writes
from support.hazards import cache_over
from support.stores import MIB

from ds_tba.core.cache import TensorCache
from ds_tba.device.accelerator import Accelerator
from ds_tba.errors import StateError
from ds_tba.remat.sites import Sites
from ds_tba.remat.store import RematStore
from ds_tba.storage.backends import PosixHandle
from ds_tba.storage.host import HostStore
from ds_tba.storage.nvme import Lanes


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
    """And comes back, should somebody want it."""
    store, x = make_store(), torch.randn(256, 256, requires_grad=True)
    cache = cache_over(store)
    with pytest.raises(AlarmError), cache.saving():
        loss = x.exp()
        raise AlarmError
    assert loss.requires_grad and store.stats.offloaded_bytes == 0
    with cache.saving():
        x[0].exp()
    assert store.stats.offloaded_bytes == x.nbytes
    loss.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, x.detach().exp())


def test_what_has_no_graph_stays_while_it_is_in_use(make_store: StoreFactory) -> None:
    """Its memory is NumPy's here, which refills it once no tensor of the program has it."""
    memory = np.full((64, 64), 3.0, np.float32)
    store, x, data = make_store(), torch.ones(64, 64, requires_grad=True), torch.from_numpy(memory)
    cache = cache_over(store)
    with cache.saving():
        loss = (x * data).sum()
    assert cache.stats.kept_bytes["no graph, and in use elsewhere"] == data.nbytes
    wait_for_writes(store)
    del data
    memory[:] = 7
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((64, 64), 7.0))  # as without us


# ---- what is stored, and how often ----------------------------------------------------------------------------------


def test_backward_prefetches_in_reverse_and_within_its_bound(
    make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, read = list[int](), PosixHandle.read
    monkeypatch.setattr(PosixHandle, "read", lambda *read_at: order.append(read_at[-1]) or read(*read_at))
    store = make_store(lanes=Lanes(2, 1))
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


# ---- every call -----------------------------------------------------------------------------------------------------


@contextmanager
def telling_of_calls(tell: Callable[[str], object]) -> Iterator[None]:
    """Tell the name of each function of ds_tba that Python enters."""

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and str(frame.f_globals.get("__name__")).startswith("ds_tba."):
            tell(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_a_kept_tensor_takes_few_calls_from_its_save_to_its_end() -> None:
    """Models of small tensors feel each of them."""
    gc.collect()  # or the ends of what earlier tests have left are among the calls
    calls, cache, tensors = list[str](), TensorCache([], "cpu", 1), [torch.randn(8) for _ in range(100)]
    cache._function_saves.begin([])  # or those of an earlier test's Function, which nobody packed, are looked for
    with cache.saving(), telling_of_calls(calls.append):
        held = [cache.pack(one) for one in tensors]
    step = cache.forward.micro_step
    cache.unpack(step, held[-1])
    with telling_of_calls(calls.append):
        while held:
            cache.unpack(step, held.pop())
        cache.settle()
    assert len(calls) <= 32 * len(tensors), Counter(calls)
    assert cache.live_records == 0


def interrupted_step(cache: TensorCache, at: int) -> bool:
    """Train a step, and interrupt it as the function of ds_tba of that number is called; False if there is none."""
    numbers = itertools.count(1)

    def interrupt(_: str) -> None:
        if next(numbers) == at:
            raise AlarmError

    x = torch.randn(32, 32, requires_grad=True)
    try:
        with telling_of_calls(interrupt):
            with cache.saving():
                made = x.sin() * 2
                loss = (made * made * made.mean(1, keepdim=True)).sum()
            del made
            loss.backward()
    except AlarmError:
        return True
    return False


# Python itself ignores an exception that comes as it closes a generator, and says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_step_is_remembered_or_leaves_nothing() -> None:
    """An interrupt between two sections loses no count that one of them adds and the other takes back."""
    host, left = HostStore(Accelerator(), MIB), list[int]()
    for at in itertools.count(1):
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
    assert at > 100 and left == []
    host.close()
