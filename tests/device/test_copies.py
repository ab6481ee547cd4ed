"""Memory of what comes back belongs to the pool of the stream that asked: pools of a caching allocator do not share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import Closing, StoreFactory
from support.disks import until
from support.doubles import DeviceBackend, Gate, ScriptedBackend, new_operation, wait_for_writes
from support.late_device import LateDevice
from support.stores import CPU, MIB
from torch import Tensor

from ds_tba.core.cache import TensorCache
from ds_tba.device.copies import Copies
from ds_tba.errors import StateError
from ds_tba.storage.base import Always, Refusal, Store, Ticket
from ds_tba.storage.host import HostStore
from ds_tba.storage.nvme import NvmeStore
from ds_tba.storage.space import SwapTicket

KIB = 1 << 10


@pytest.fixture
def device(closing: Closing) -> LateDevice:
    """Tells of memory that was written after it was freed. Named before ``make_store``, whose stores end first."""
    return closing(LateDevice, LateDevice.end)(late_compute=True, longest_pause_s=0.0, watch_freed=True)


@pytest.fixture(params=["nvme", "nvme in parts", "nvme from the device", "host"])
def store(request: pytest.FixtureRequest, device: LateDevice, make_store: StoreFactory, closing: Closing) -> Store[Any]:
    made: dict[str, Callable[[], Store[Any]]] = {
        "nvme": lambda: make_store(accelerator=device, staging_bytes=8 * MIB),
        "nvme in parts": lambda: make_store(accelerator=device, staging_bytes=MIB),
        "nvme from the device": lambda: make_store(DeviceBackend(), accelerator=device, staging_bytes=8 * MIB),
        "host": lambda: closing(HostStore)(device, 64 * MIB, ahead_bytes=4 * MIB),
    }
    return made[request.param]()


def copies_of(store: Store[Any]) -> Copies:
    copies: Copies = store._copies if isinstance(store, HostStore) else store.copies  # type: ignore[attr-defined]
    return copies


def saved_by(store: Store[Any], device: LateDevice, nbytes: int = MIB, value: int = 7) -> Ticket:
    """A ticket whose bytes have left the device."""
    data = device.allocate(nbytes, CPU)
    device.launch(lambda to: to.fill_(value), data)
    ticket = store.put(data, wait=True)
    assert not isinstance(ticket, Refusal)
    del data
    if isinstance(store, NvmeStore):
        wait_for_writes(store)
    device.synchronize()
    store.settle()
    return ticket


def sees(device: LateDevice, found: Tensor, value: int = 7) -> list[bool]:
    """Launch a kernel that looks at bytes which have come back; whether they are right stands there once it has run."""
    seen: list[bool] = []
    device.launch(lambda data: seen.append(bool((data == value).all())), found)
    return seen


def test_kept_and_reloaded_bytes_stay_within_the_budget_in_one_pool(device: LateDevice, store: Store[Any]) -> None:
    count, budget_bytes = 24, 8 * MIB
    cache = TensorCache([store], "cpu", KIB, wait_for_staging=True, accelerator=device)
    cache.limit(budget_bytes, "the budget")
    saved: list[Any] = []
    for number in range(count):
        stays = number % 3 == 0
        with cache.saving(Always((), wait=False) if stays else None, continues=number > 0):
            data = device.allocate(MIB, CPU)
            device.launch(lambda to, value=number: to.fill_(value), data)
            saved.append(cache.pack(data))
            del data
            new_operation()
    step, exact = cache.forward.micro_step, list[list[bool]]()
    while saved:
        exact.append(sees(device, cache.unpack(step, saved.pop()), len(saved)))
    device.synchronize()
    cache.settle()
    assert exact == [[True]] * count
    assert list(device.reserved_bytes) == [device.current_stream()]
    in_all = sum(device.reserved_bytes.values())
    assert budget_bytes // 2 < in_all <= budget_bytes + MIB  # and what forward is about to save


def test_a_copy_waits_until_its_memory_is_free(device: LateDevice, store: Store[Any]) -> None:
    """Kernels that were queued before the allocation still write there, for its former tenant."""
    ticket, gate = saved_by(store, device), threading.Event()
    device.current_stream().run(lambda: gate.wait(30))
    store.prefetch(ticket)
    time.sleep(0.05)  # for a copy that does not wait
    threading.Timer(0.2, gate.set).start()
    seen = sees(device, store.get(ticket, CPU).data)
    device.synchronize()
    assert seen == [True]
    store.release(ticket)


@pytest.mark.parametrize("verb", ["cancel_prefetch", "release", "close"])
def test_memory_that_nobody_wants_any_more_is_held_until_its_copy_is_done(
    device: LateDevice, store: Store[Any], verb: str
) -> None:
    ticket, gate = saved_by(store, device), threading.Event()
    copies_of(store)._in_stream.run(lambda: gate.wait(30))
    assert store.prefetch(ticket)
    parts: list[Any] = ticket.parts if isinstance(ticket, SwapTicket) else [ticket]
    until(lambda: all(part.arrival is not None for part in parts), "the copies to be queued")
    threading.Timer(0.2, gate.set).start()
    if verb == "close":
        store.release(ticket)
        store.close()
        assert device.copies_under_way == []
    else:
        getattr(store, verb)(ticket)
    device.synchronize()
    store.settle()
    assert device.allocated_bytes == 0
    assert not device.is_freed_memory_written()


def test_memory_that_its_caller_drops_at_once_is_held_until_its_copy_is_done(
    device: LateDevice, store: Store[Any]
) -> None:
    ticket = saved_by(store, device)
    copies_of(store)._in_stream.longest_pause_s = 0.1
    for _ in range(4):
        store.get(ticket, CPU)
    device.synchronize()
    assert device.allocated_bytes == 0 and not device.is_freed_memory_written()
    store.release(ticket)


def test_without_device_memory_nothing_is_read_ahead_until_somebody_has_got_some(
    device: LateDevice, store: Store[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator gives back all that it caches before it says no, so that it is asked once ahead of need."""
    ticket, asked = saved_by(store, device), list[int]()

    def allocate(nbytes: int, _device: torch.device) -> Tensor:
        asked.append(nbytes)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(device, "allocate", allocate)
        assert not any(store.prefetch(ticket) for _ in range(3)) and len(asked) == 1
        with pytest.raises(torch.OutOfMemoryError):
            store.get(ticket, CPU)
        assert device.allocated_bytes == 0
    assert not store.prefetch(ticket)
    seen = sees(device, store.get(ticket, CPU).data)
    device.synchronize()
    assert seen == [True] and store.prefetch(ticket)
    store.release(ticket)


def test_reloads_ahead_of_a_late_device_wait_for_its_copies_and_take_no_memory_beside_staging(
    device: LateDevice, make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    store = make_store(accelerator=device, staging_bytes=MIB)
    tickets = [saved_by(store, device, 256 * KIB, value) for value in range(6)]
    monkeypatch.setattr(store.ring, "overflow", lambda nbytes: pytest.fail("memory beside staging"))
    device.current_stream().run(lambda: gate.wait(30))
    read = ThreadPoolExecutor(1).submit(
        lambda: [sees(device, store.get(ticket, CPU).data, value) for value, ticket in enumerate(tickets)]
    )
    time.sleep(0.2)
    assert not read.done() and store.ring.slots.used_bytes == MIB
    gate.set()
    seen = read.result(30)
    device.synchronize()
    assert seen == [[True]] * 6


def test_what_is_given_up_while_another_thread_waits_for_it_is_no_hang(
    device: LateDevice, make_store: StoreFactory
) -> None:
    gate = Gate("read")
    store: Store[Any] = make_store(ScriptedBackend(gate), accelerator=device)
    ticket = saved_by(store, device)
    read = ThreadPoolExecutor(1).submit(store.get, ticket, CPU)
    assert gate.arrived.acquire(timeout=10)
    store.release(ticket)
    gate.opened.set()
    with pytest.raises(StateError, match="given up"):
        read.result(20)
