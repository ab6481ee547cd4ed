"""Device memory that backward really takes: the host lets go of a tensor long before the device is done with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import Closing
from support.disks import until
from support.doubles import new_operation
from support.late_device import LateDevice
from support.stores import CPU, MIB
from torch import Tensor

from ds_tba.core.cache import TensorCache
from ds_tba.storage.base import Always
from ds_tba.storage.host import HostStore

COUNT = 40


@pytest.fixture
def device(closing: Closing) -> LateDevice:
    return closing(LateDevice, LateDevice.end)(late_compute=True, longest_pause_s=0.0)


@pytest.fixture
def store(device: LateDevice, closing: Closing) -> HostStore:
    return closing(HostStore)(device, COUNT * MIB, ahead_bytes=MIB)


@pytest.fixture
def cache(device: LateDevice, store: HostStore) -> TensorCache:
    return TensorCache([store], "cpu", 1024, accelerator=device, released_bytes=3 * MIB)


@pytest.fixture(autouse=True)
def _tensors_stand_for_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a graph, so that they may leave whoever holds them: here the device's queue does, which no GPU does."""
    monkeypatch.setattr("ds_tba.core.cache.has_graph", lambda tensor: True)


def forward(device: LateDevice, cache: TensorCache, count: int = COUNT, nbytes: int = MIB) -> list[object]:
    """Each tensor is saved twice, for a consumer on each of two streams."""
    saved: list[object] = []
    with cache.saving():
        for number in range(count):
            data = device.allocate(nbytes, CPU)
            device.launch(lambda to, value=number: to.fill_(value), data)
            saved.append((cache.pack(data), cache.pack(data)))
            del data
            new_operation()
    return saved


def use(device: LateDevice, cache: TensorCache, held: object, other: Any, kernel: Callable[[Tensor], object]) -> None:
    """Run a kernel on what comes back, on two streams: its memory is free after both."""
    for view, stream in zip(held, (device.current_stream(), other), strict=True):  # type: ignore[call-overload]
        with device.on(stream):
            device.launch(kernel, cache.unpack(cache.forward.micro_step, view))


def backward(device: LateDevice, cache: TensorCache, saved: list[object], seconds: float = 0.005) -> None:
    """Kernels that take so long; every one of them must see what forward saved."""
    exact: list[bool] = []

    def kernel(found: Tensor, wanted: int) -> None:
        time.sleep(seconds)
        exact.append(bool((found == wanted).all()))

    count, other = len(saved), device.new_stream()
    while saved:
        held = saved.pop()
        use(device, cache, held, other, partial(kernel, wanted=len(saved)))
        del held
    device.synchronize()
    assert exact == [True] * 2 * count


def settle(device: LateDevice, cache: TensorCache) -> None:
    device.synchronize()
    cache.settle()
    device.synchronize()  # what settling let go of, a stream gives back


def peak_of_backward(device: LateDevice, cache: TensorCache) -> int:
    saved = forward(device, cache)
    settle(device, cache)
    assert device.held_bytes == 0 == cache.stats.resident.now
    device.peak_held_bytes = 0
    backward(device, cache, saved)
    settle(device, cache)
    cache.settle()  # and what that stream has given back counts no longer
    assert cache.stats.resident.now == 0
    return device.peak_held_bytes


@pytest.mark.parametrize("budget_bytes", [2 * MIB, 5 * MIB])
def test_backward_holds_no_more_than_the_budget(device: LateDevice, cache: TensorCache, budget_bytes: int) -> None:
    cache.limit(budget_bytes, "the budget")
    assert peak_of_backward(device, cache) <= budget_bytes
    assert cache.stats.resident.peak <= budget_bytes


def test_without_a_budget_backward_holds_little_more_than_its_bound(device: LateDevice, cache: TensorCache) -> None:
    assert peak_of_backward(device, cache) <= (3 + 1 + 1) * MIB  # and what is wanted now, and what is read ahead


def test_what_another_stream_writes_and_the_caller_waits_for_is_there_in_backward(
    device: LateDevice, cache: TensorCache
) -> None:
    """A Function that begins an asynchronous collective saves its result; the caller waits after the Function."""
    side, gate = device.new_stream(), threading.Event()
    with cache.saving():
        received, allocated = device.allocate(MIB, CPU), device.new_event()
        allocated.record(device.current_stream())
        side.wait_event(allocated)
        with device.on(side):
            device.launch(lambda to: (gate.wait(30), to.fill_(0)), received)
        written = device.new_event()
        written.record(side)
        held = cache.pack(received)
        device.current_stream().wait_event(written)
        new_operation()
        cache.pack(device.allocate(MIB, CPU))
        gate.set()
    del received
    backward(device, cache, [(held, held)])


def test_what_was_kept_on_one_stream_is_moved_from_another_after_its_kernels(
    device: LateDevice, cache: TensorCache
) -> None:
    cache.limit(MIB + 1024, "the budget")
    maker, other, gate = device.new_stream(), device.new_stream(), threading.Event()
    with cache.saving(Always((), wait=False)):
        with device.on(maker):
            made = device.allocate(MIB, CPU)
            device.launch(lambda to: (gate.wait(30), to.fill_(0)), made)
            held = cache.pack(made)
            new_operation()
            cache.pack(device.allocate(512, CPU))  # ends the operation before; it is too small to be in use itself
        del made
        with device.on(other):
            new_operation()
            threading.Timer(0.2, gate.set).start()
            cache.pack(device.allocate(MIB, CPU))  # there is room for one
    assert held.held is None
    with device.on(other):
        backward(device, cache, [(held, held)])


class FullDevice(LateDevice):
    """Has room for so many bytes, and does not look again for what its streams are done with by now."""

    room_bytes = COUNT * MIB
    refusals = 0

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        if self.held_bytes + nbytes > self.room_bytes:
            self.refusals += 1
            raise torch.OutOfMemoryError("out of memory")
        return super().allocate(nbytes, device)


def test_a_reload_that_finds_no_memory_waits_for_what_was_let_go_of_and_tries_again() -> None:
    device = FullDevice(late_compute=True, longest_pause_s=0.0)
    store = HostStore(device, COUNT * MIB, ahead_bytes=MIB)
    cache = TensorCache([store], "cpu", 1024, accelerator=device, released_bytes=COUNT * MIB)
    saved = forward(device, cache)
    settle(device, cache)
    device.room_bytes = 4 * MIB
    backward(device, cache, saved)
    assert device.refusals > 0
    device.end()


def assert_lock_is_free(cache: TensorCache) -> None:
    assert cache.lock.acquire(timeout=10)
    cache.lock.release()


def test_the_wait_is_without_the_lock_and_for_the_oldest(device: LateDevice, cache: TensorCache) -> None:
    cache.limit(3 * MIB, "the budget")
    saved = forward(device, cache, 6)
    settle(device, cache)  # or backward would get the last storage itself, which a copy out still holds
    gates = [threading.Event() for _ in saved]
    other, done = device.new_stream(), []

    def run() -> None:
        for gate in gates:
            use(device, cache, saved.pop(), other, lambda found, gate=gate: gate.wait(30))  # type: ignore[misc]
            done.append(gate)

    threading.Thread(target=run, daemon=True).start()
    for fit, gate in enumerate(gates[:3], start=3):
        until(lambda fit=fit: len(done) >= fit, "as many as fit, beside those that the device is done with")
        time.sleep(0.05)
        assert len(done) == fit
        assert_lock_is_free(cache)
        gate.set()
    for gate in gates:
        gate.set()
    until(lambda: len(done) == 6, "all of them")


def test_forward_waits_for_the_oldest_copy_out_and_without_the_lock(device: LateDevice) -> None:
    store = HostStore(device, COUNT * MIB, ahead_bytes=8 * MIB)
    cache = TensorCache([store], "cpu", 1024, accelerator=device)
    cache.limit(4 * MIB, "the budget")
    gates, packed, held = [threading.Event(), threading.Event()], threading.Event(), list[object]()

    def pack() -> None:
        new_operation()
        held.append(cache.pack(device.allocate(MIB, CPU)))

    for gate in gates:  # two copies out that hold their tensors until their gates open
        store._copies._out_stream.run(lambda gate=gate: gate.wait(30))
        with cache.saving():
            pack()
    with cache.saving(Always((), wait=False)):
        pack()
        pack()
        threading.Thread(target=lambda: (pack(), packed.set()), daemon=True).start()
        assert not packed.wait(0.1) and cache.stats.resident.now == 4 * MIB
        assert_lock_is_free(cache)
        gates[0].set()
        assert packed.wait(10) and not gates[1].is_set()
        assert cache.stats.resident.peak <= 4 * MIB
        gates[1].set()
    store.close()


def test_what_a_later_step_saves_again_counts_for_as_long_as_its_copy_runs(
    device: LateDevice, store: HostStore, cache: TensorCache
) -> None:
    """An encoder's output, say, that decoders of two micro-steps save."""
    data, gates = device.allocate(MIB, CPU), list[threading.Event]()
    for _ in range(2):
        gates.append(threading.Event())
        store._copies._out_stream.run(gates[-1].wait)
        with cache.saving():
            held = cache.pack(data)
            new_operation()
        del held
        gates[0].set()  # the first copy ends, and nobody looks
        if len(gates) == 1:
            device.synchronize()
    cache.end_micro_step()
    assert cache.stats.resident.now == MIB
    gates[1].set()
    device.synchronize()
    cache.end_micro_step()
    assert cache.stats.resident.now == 0


def test_a_long_batch_keeps_no_later_one_from_being_read_ahead(
    device: LateDevice, store: HostStore, cache: TensorCache
) -> None:
    asked, counts, prefetch = list[object](), list[int](), store.prefetch
    cache.limit(3 * MIB + MIB // 8)
    store.prefetch = lambda ticket: asked.append(ticket) or prefetch(ticket)  # type: ignore[method-assign]
    for nbytes in (3 * MIB, MIB // 4):
        saved = forward(device, cache, 4, nbytes)
        device.synchronize()
        cache.settle()
        asked.clear()
        backward(device, cache, saved, 0.0)
        counts.append(len(asked))
        cache.end_micro_step()
    assert counts == [0, 3]
