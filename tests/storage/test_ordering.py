"""Copies on streams of their own, on a device that is as late and as hostile as the rules of streams allow."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Closing, StoreFactory
from support import hazards
from support import late_stores as late
from support.disks import until
from support.doubles import Gate, ScriptedBackend, raising, wait_for_writes
from support.hazards import Scenario, scenarios
from support.late_device import LateDevice
from support.late_stores import KIB, Make
from support.offloaders import make as make_offloader
from support.stores import CPU, MIB, noise, nothing_is_held, slots_in_use

from ds_tba.core.cache import TensorCache
from ds_tba.device.accelerator import Arrival
from ds_tba.errors import IncompatibleError
from ds_tba.storage.base import Refusal, Ticket
from ds_tba.storage.host import HostStore
from ds_tba.storage.nvme import Lanes, NvmeStore

DeviceFactory = Callable[..., LateDevice]


@pytest.fixture
def make_device(closing: Closing) -> DeviceFactory:
    """Named before ``make_store`` in a test, so that stores are closed before their device ends."""
    return closing(LateDevice, LateDevice.end)


@pytest.fixture
def device(make_device: DeviceFactory) -> LateDevice:
    """One whose kernels run late, too."""
    return make_device(late_compute=True)


stores = pytest.mark.parametrize(
    "make",
    [late.over_nvme, late.slow_writes, late.slow_reads, late.failing_writes,
     late.device_staging, late.pieces, late.in_host_memory],
    ids=lambda make: make.__name__,
)  # fmt: skip


@scenarios
@stores
def test_gradients_are_exact_on_a_late_device(
    make_device: DeviceFactory, make_store: StoreFactory, make: Make, scenario: Scenario
) -> None:
    device = make_device(longest_pause_s=0.001)
    store = make(make_store, device)
    hazards.check(scenario, TensorCache([store], "cpu", hazards.MIN_BYTES, wait_for_staging=True, accelerator=device))
    if isinstance(store, NvmeStore):
        nothing_is_held(store)
    store.close()


@stores
@pytest.mark.parametrize("count", [1, 3], ids=["one stream", "three streams"])
def test_late_kernels_see_the_right_bytes(device: LateDevice, make_store: StoreFactory, make: Make, count: int) -> None:
    """Kernels write late what is saved, and read late what comes back; the host lets go of both at once."""
    chance = random.Random(0)
    streams = [device.current_stream(), *(device.new_stream() for _ in range(count - 1))]
    store = make(make_store, device)
    exact: list[bool] = []
    for _ in range(6):
        saved: list[tuple[Ticket, torch.Tensor]] = []
        for _ in range(chance.randrange(8, 16)):
            expected = noise(chance.choice((4 * KIB, 60_000, 128 * KIB)))
            with device.on(chance.choice(streams)):
                data = device.filled(expected)
                ticket = store.put(data, wait=True)
            del data
            if not isinstance(ticket, Refusal):
                saved.append((ticket, expected))
        if not saved:  # the late device still uses all the room there is
            device.synchronize()
        saved.reverse()
        for index, (ticket, expected) in enumerate(saved):
            for ahead, _ in saved[index + 1 : index + 3]:
                ahead.store.prefetch(ahead)
            for _ in range(chance.choice((1, 1, 2))):
                with device.on(chance.choice(streams)):
                    loaded = ticket.store.get(ticket, CPU)
                    device.launch(lambda found, wanted=expected: exact.append(torch.equal(found, wanted)), loaded.data)
                again, loaded = loaded.stored, None
                if not again:
                    break
            ticket.store.release(ticket)
    device.synchronize()
    assert len(exact) > 50 and all(exact), f"{exact.count(False)} of {len(exact)} kernels saw wrong bytes"
    store.close()
    del ticket, ahead, saved, loaded
    assert device.allocated_bytes == 0
    assert not isinstance(store, NvmeStore) or not store.copies.under_way


@stores
@pytest.mark.parametrize("budget_bytes", [None, 256 * KIB], ids=["no budget", "budget"])
def test_a_stream_that_saves_uses_the_tensor_although_the_host_has_let_go_of_it(
    device: LateDevice, make_store: StoreFactory, make: Make, budget_bytes: int | None
) -> None:
    """Autograd saves what an op reads before its kernel is queued, on whatever stream, and would hold it longer.

    The first consumer of a storage is not the only one that waits for its copy, nor the only one that uses its memory.
    """
    chance = random.Random(0)
    streams = [device.new_stream() for _ in range(3)]
    for stream in streams[1:]:
        stream.longest_pause_s = 0.01
    store = make(make_store, device)
    cache = TensorCache([store], "cpu", KIB, wait_for_staging=True, accelerator=device)
    if budget_bytes is not None:
        cache.limit(budget_bytes)
    exact, moved = list[bool](), 0

    def use(tensor: torch.Tensor, wanted: torch.Tensor) -> None:
        device.launch(lambda found: exact.append(torch.equal(found, wanted)), tensor)

    for _ in range(8):
        held = []
        with cache.saving():
            for _ in range(6):
                wanted = noise(chance.choice((4 * KIB, 60_000, 128 * KIB)))
                maker, *users = chance.sample(streams, 3)
                with device.on(maker):
                    data, made = device.filled(wanted), device.new_event()
                    made.record()
                for user in users[: chance.choice((1, 2))]:
                    user.wait_event(made)
                    with device.on(user):
                        held.append((cache.pack(data), wanted, user))
                        use(data, wanted)
                del data
        while held:
            view, wanted, user = held.pop()
            moved += view.held is None
            with device.on(user):
                use(view.restore(), wanted)
            del view
    device.synchronize()
    assert len(exact) > 100 and all(exact), f"{exact.count(False)} of {len(exact)} kernels saw wrong bytes"
    assert moved > 10, "most stayed, so that nothing was shown"
    cache.settle()
    store.close()


@pytest.mark.parametrize("fate", ["given up", "handed over", "handed over and given up"])
@pytest.mark.parametrize("make", [late.slow_writes, late.in_host_memory], ids=["nvme", "host"])
def test_memory_is_not_given_back_under_copies(
    make_device: DeviceFactory, make_store: StoreFactory, make: Make, fate: str
) -> None:
    device = make_device(longest_pause_s=0.1)
    store = make(make_store, device)
    for _ in range(4):
        ticket = store.put(torch.zeros(256 * KIB, dtype=torch.uint8), wait=False)
        assert not isinstance(ticket, Refusal)
        if "handed over" in fate:
            store.get(ticket, CPU)  # its copy in is for nobody to wait for
        if "given up" in fate:
            store.release(ticket)
    store.close()
    assert device.copies_under_way == []


@pytest.mark.parametrize("who", ["forward", "backward"])
def test_device_memory_goes_once_its_copy_is_done(device: LateDevice, make_store: StoreFactory, who: str) -> None:
    gate = Gate()  # the writes have nothing to do with it
    store: Any = make_store(ScriptedBackend(gate), accelerator=device)
    tickets = [store.put(device.allocate(MIB, CPU), wait=False) for _ in range(8)]  # more than there are lanes
    device.synchronize()
    assert device.allocated_bytes > 0
    more = store.put(device.allocate(MIB, CPU), wait=False) if who == "forward" else store.get(tickets[-1], CPU)
    assert device.allocated_bytes <= MIB
    assert not any(isinstance(one, Refusal) for one in [*tickets, more])
    gate.opened.set()


@pytest.mark.parametrize("goes_to", ["the drive", "host memory"])
def test_device_memory_that_waits_for_its_copy_is_bounded_by_staging(
    device: LateDevice, make_store: StoreFactory, closing: Closing, goes_to: str
) -> None:
    """The host waits for a device that is behind, though it may not wait for the drive."""
    device.longest_pause_s = 0.02  # of the copies
    host = closing(HostStore)(device, 12 * MIB, ahead_bytes=4 * MIB)
    store = host if goes_to == "host memory" else make_store(accelerator=device, staging_bytes=4 * MIB)
    for _ in range(12):
        assert not isinstance(store.put(device.allocate(MIB, CPU), wait=False), Refusal)
        assert device.allocated_bytes <= 4 * MIB


def test_memory_beside_staging_is_there_until_it_was_copied(
    device: LateDevice, make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.longest_pause_s = 0.05  # of the copies
    gate = Gate()
    gate.opened.set()
    store = make_store(ScriptedBackend(gate), accelerator=device, staging_bytes=4 * MIB)
    data = noise(MIB)
    ticket = store.put(data.clone(), wait=False)
    device.synchronize()
    wait_for_writes(store)
    gate.opened.clear()
    for _ in range(4):
        store.put(device.allocate(MIB, CPU), wait=False)
    device.synchronize()
    assert slots_in_use(store) == 4 * MIB
    took, wait = list[bool](), Arrival.wait

    def waits(arrival: Arrival) -> None:
        """Lanes need the store's lock while a copy is waited for."""
        took.append(store.lock.acquire(timeout=5))
        store.lock.release()
        wait(arrival)

    monkeypatch.setattr(Arrival, "wait", waits)
    loaded = store.get(ticket, CPU)  # type: ignore[arg-type]
    assert device.copies_under_way == [] and took == [True]
    device.synchronize()
    assert torch.equal(loaded.data, data)
    gate.opened.set()


def test_a_capture_is_refused(make_device: DeviceFactory, tmp_path: Path, closing: Closing) -> None:
    device = make_device()
    device.is_capturing = lambda: True  # type: ignore[method-assign]
    with pytest.raises(IncompatibleError, match="captured into a graph"):
        closing(make_offloader)(tmp_path, device).saving()


@pytest.mark.parametrize("is_written", [True, False], ids=["written", "still to be written"])
def test_a_get_of_parts_that_failed_half_way_may_be_repeated_on_another_stream(
    device: LateDevice, make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    """What was handed over before it failed may be nowhere else, and is not given up with what is ahead."""
    gate = Gate()
    store = make_store(ScriptedBackend(gate), accelerator=device, staging_bytes=MIB, lanes=Lanes(1, 1))
    first, second, wanted = device.new_stream(), device.new_stream(), noise(MIB)
    ticket: Any = store.put(device.filled(wanted), wait=True)
    if is_written:
        gate.opened.set()
        wait_for_writes(store)
    device.synchronize()
    into, left = store.copies.into, [None, None]  # two of its four parts come

    def no_more(*arguments: Any, **more: Any) -> Any:
        if not left:
            raise torch.OutOfMemoryError("CUDA out of memory")
        left.pop()
        return into(*arguments, **more)

    first.longest_pause_s = 0.5
    with monkeypatch.context() as patch, device.on(first), pytest.raises(torch.OutOfMemoryError):
        patch.setattr(store.copies, "into", no_more)
        store.get(ticket, CPU)
    assert is_written or not store.cancel_prefetch(ticket)
    exact: list[bool] = []
    with device.on(second):
        device.launch(lambda found: exact.append(torch.equal(found, wanted)), store.get(ticket, CPU).data)
    device.synchronize()
    assert exact == [True]
    gate.opened.set()
    store.release(ticket)
    nothing_is_held(store)


class Interrupted:
    __iadd__ = raising(KeyboardInterrupt())


@pytest.mark.parametrize("make", [late.over_nvme, late.in_host_memory], ids=["nvme", "host"])
@pytest.mark.parametrize(
    "fault",
    ["error behind the copy", "interrupt behind the copy", "interrupt behind its count", "device fails for good"],
)
def test_a_put_that_is_cut_short_leaves_nothing_taken_and_no_copy_under_way(
    device: LateDevice, make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch, make: Make, fault: str
) -> None:
    """Nobody knows of the copy, and it would write into the next tenant of its memory."""
    store: Any = make(make_store, device)
    out = (store.copies if isinstance(store, NvmeStore) else store._copies)._out_stream
    data = device.allocate(MIB // 2, CPU)
    device.synchronize()
    out.longest_pause_s = 0.5
    with monkeypatch.context() as patch, pytest.raises((RuntimeError, KeyboardInterrupt)):
        if fault == "error behind the copy":
            patch.setattr("ds_tba.device.copies.PendingCopy", raising(RuntimeError("CUDA error: out of memory")))
        elif fault == "interrupt behind the copy":
            patch.setattr("ds_tba.device.copies.PendingCopy", raising(KeyboardInterrupt()))
        elif fault == "interrupt behind its count":
            patch.setattr(store.stats, "offloaded_bytes", Interrupted())
        else:
            fails = raising(RuntimeError("CUDA error: an illegal memory access was encountered"))
            patch.setattr(device, "copy", fails)
            patch.setattr(out, "synchronize", fails)
        store.put(data, wait=True)
    assert device.copies_under_way == []
    until(store.give_back, "what the put has taken")
    store.close()
