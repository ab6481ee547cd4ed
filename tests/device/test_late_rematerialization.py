"""Rematerialization on a device that runs late: what is made again is right, and no answer is read before its time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Closing, StoreFactory
from support import hazards
from support.disks import until
from support.hazards import Scenario, scenarios
from support.late_device import POISON, LateDevice
from support.models import Mlp, Stack
from torch import Tensor, nn
from torch.nn import functional

from ds_tba.core.cache import TensorCache
from ds_tba.core.hooks import hooks_of_forward
from ds_tba.core.prefetch import Phase
from ds_tba.errors import RematerializationError
from ds_tba.remat.sites import Sites
from ds_tba.remat.store import RematStore
from ds_tba.storage.host import HostStore

MIB = 1 << 20
KIB = 1 << 10
WIDTH = 64
STEPS = 3


class Answers(LateDevice):
    """Hears late of its kernels."""

    def __init__(self) -> None:
        super().__init__(late_answers=True, longest_pause_s=0.002)

    def pinned(self, nbytes: int) -> Tensor:
        return super().pinned(nbytes).fill_(POISON)


@pytest.fixture
def device(closing: Closing) -> Answers:
    return closing(Answers, LateDevice.end)()


@pytest.fixture(params=["kept", "host memory", "a drive"])
def cache(request: pytest.FixtureRequest, device: Answers, make_store: StoreFactory, closing: Closing) -> TensorCache:
    stores: dict[str, Callable[[], list[Any]]] = {
        "kept": list,
        "host memory": lambda: [closing(HostStore)(device, 16 * MIB)],
        "a drive": lambda: [make_store(accelerator=device, staging_bytes=4 * MIB)],
    }
    return cache_over(device, stores[request.param]())


def over(*places: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cache", places, indirect=True)


def cache_over(device: LateDevice, stores: list[Any]) -> TensorCache:
    cache = TensorCache(stores, "cpu", hazards.MIN_BYTES, wait_for_staging=True, accelerator=device)
    cache.rematerialize(RematStore(cache, Sites(cache, device)))
    return cache


def end_step(cache: TensorCache) -> None:
    cache.end_micro_step()
    cache.rematerialization.sites.step += 1


@pytest.fixture
def training() -> Scenario:
    model = Stack(lambda: Mlp(WIDTH), 3)

    def three_layers(saving: hazards.Saving) -> list[Tensor]:
        model.zero_grad()
        with saving():
            loss = model(torch.randn(64, WIDTH))
        return [loss, *hazards.grads_after(loss, *model.parameters())]

    return three_layers


def test_what_is_made_again_trains_to_the_bit(cache: TensorCache, training: Scenario) -> None:
    hazards.check_made_again(training, cache)
    assert cache.stats.rematerialized_bytes > STEPS * 64 * KIB
    assert not cache.stores or sum(store.stats.offloaded_bytes for store in cache.stores) > 0
    assert not cache.rematerialization.sites.summary()["refused_sites"].get("it differs when recomputed")


@scenarios
@over("host memory", "a drive")
def test_gradients_are_exact(cache: TensorCache, scenario: Scenario) -> None:
    hazards.check_made_again(scenario, cache)


class Watched:
    """A lock that a thread may not take while it has one of those that come after."""

    def __init__(self, after: list[Watched]) -> None:
        self._lock, self._after, self._owner = threading.Lock(), after, 0
        self.locked = self._lock.locked

    def __enter__(self) -> None:
        self.acquire()

    def acquire(self) -> None:
        me = threading.get_ident()
        assert all(lock._owner != me for lock in self._after), "the cache's lock is taken after a store's"
        self._lock.acquire()
        self._owner = me

    def release(self) -> None:
        self._owner = 0
        self._lock.release()

    def __exit__(self, *_: object) -> None:
        self.release()


@over("kept", "host memory")
def test_no_thread_takes_the_cache_s_lock_after_a_store_s(cache: TensorCache, training: Scenario) -> None:
    """Or two threads would wait for each other, and one whose save acts on an end for itself."""
    locks = [Watched([]) for _ in cache.issuers]
    cache.lock = Watched(locks)  # type: ignore[assignment]
    for store, lock in zip(cache.issuers, locks, strict=True):
        store._lock = lock  # type: ignore[attr-defined]
    hazards.check_made_again(training, cache)
    assert cache.stats.rematerialized_bytes > 0


@over("host memory")
def test_a_comparison_after_forward_does_not_begin_backward(device: Answers, cache: TensorCache) -> None:
    """It loads its operands: as if backward wanted them, all would be read ahead, and a second forward stand alone."""
    weight, phases = nn.Parameter(torch.randn(64, WIDTH)), []
    for _ in range(4):
        with cache.saving():
            x = weight @ weight.t() @ weight
        device.synchronize()
        cache.settle()
        hooks = cache.after_forward()
        assert hooks is not None
        with hooks_of_forward(hooks):
            y = functional.silu(x * 2.0 @ weight.t())  # saves what the comparison of its output loads
            loss = (y @ weight).sin().sum()
        phases.append((cache.forward.micro_step.phase, cache.expects_forward))
        loss.backward()
        del loss, x, y
        end_step(cache)
    assert phases == [(Phase.WAITING, True)] * 4 and cache.stats.rematerialized_bytes > 0


class TwoStreams:
    """Two forwards of one site on two streams, the first of which runs when it is told to."""

    def __init__(self, device: Answers) -> None:
        self._device, self._layer = device, nn.Linear(WIDTH, WIDTH)
        self.cache = cache_over(device, [])
        self.store: Any = self.cache.rematerialization
        self.slow, self.fast, self.opened = device.new_stream(), device.current_stream(), threading.Event()
        for _ in range(3):  # until the site is proven
            self.forward(self.fast).backward()
            self.cache.end_micro_step()
            self.store.sites.end_step()
        self.slow.run(self.opened.wait)

    def forward(self, stream: Any, *, changes: bool = False) -> Tensor:
        for site in self.store.sites._sites.values():
            site.next_visit = 0  # it is compared
        with self.cache.saving():
            saved = functional.silu(self._layer(torch.randn(4 * WIDTH, WIDTH)))
            if changes:
                saved.data.mul_(2)
            with self._device.on(stream):
                return saved.sin().sum()

    def is_answered(self) -> list[bool]:
        return [pending.comparison.done.query() for pending in self.store._pending]


def test_a_later_answer_does_not_hide_that_an_earlier_one_differs(device: Answers) -> None:
    both = TwoStreams(device)
    both.forward(both.slow, changes=True)
    both.forward(both.fast)
    until(lambda: both.is_answered() == [False, True], "the second has answered")
    both.store.settle()
    both.opened.set()
    with pytest.raises(RematerializationError, match="silu"):
        both.cache.end_micro_step()


def test_whoever_waits_for_an_answer_waits_for_those_before_it(device: Answers) -> None:
    """Else room would be asked for again and again: answers are read in order."""
    both = TwoStreams(device)
    first = both.forward(both.slow)
    for site in both.store.sites._sites.values():
        site.equal_in = None  # the next storage stays until it is proven again
    second = both.forward(both.fast)
    until(lambda: both.is_answered() == [False, True], "the second has answered")
    with both.cache.lock:
        (copy,) = both.store.copies_out()
    waiter = threading.Thread(target=copy.wait)
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive()
    both.opened.set()
    waiter.join(60)
    assert all(both.is_answered())
    (first + second).backward()
    both.cache.end_micro_step()
    assert not both.store._pending
