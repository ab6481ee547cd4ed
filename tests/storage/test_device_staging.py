"""Staging on the device: the store over a backend that reaches files from device memory, which host memory plays here.

The accelerator looks asynchronous, as every device with such a backend is.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import StoreFactory
from support.disks import until
from support.doubles import DeviceBackend, EventAccelerator, Gate, part_of
from support.stores import CPU, MIB, noise, put, stored

from ds_tba.storage.nvme import Lanes
from ds_tba.storage.space import PartState

Script = Callable[[str, int], str | None]


def test_its_zeroing_is_waited_for_and_a_slot_is_free_once_its_bytes_are_copied(make_store: StoreFactory) -> None:
    accelerator = EventAccelerator()
    backend = DeviceBackend()
    store = make_store(backend, accelerator=accelerator)
    store.open()
    assert len(accelerator.waited) == len(backend.staging) == 1  # the zeroing of staging
    data = noise(MIB)
    loaded = store.get(stored(store, data), CPU).data
    assert torch.equal(loaded, data)
    until(lambda: store.ring.slots.used_bytes == 0, "the slot")
    store.close()
    assert backend.staging == []


def test_each_lane_computes_in_a_stream_of_its_own(make_store: StoreFactory) -> None:
    accelerator = EventAccelerator()
    store = make_store(DeviceBackend(), accelerator=accelerator, lanes=Lanes(1, 1))
    copies = (store.ring.copies._out_stream, store.ring.copies._in_stream)
    for _ in range(2):
        store.get(stored(store, noise(MIB)), CPU)
    write, read = [stream for stream in accelerator.entered if stream not in copies]
    assert write is not read


def test_a_lane_survives_a_device_without_streams(make_store: StoreFactory) -> None:
    def no_stream() -> object:
        raise RuntimeError("CUDA error: out of memory")

    accelerator = EventAccelerator()
    store = make_store(DeviceBackend(), accelerator=accelerator)
    accelerator.new_stream = no_stream  # type: ignore[assignment]
    data = noise(MIB)
    assert torch.equal(store.get(stored(store, data), CPU).data, data)


def test_a_read_without_room_goes_around_staging_once_its_memory_is_idle(
    make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, accelerator = Gate(), EventAccelerator()
    store = make_store(DeviceBackend(gate), staging_bytes=4 * MIB, accelerator=accelerator)
    store.part_bytes = 4 * MIB  # not cut
    gate.opened.set()
    data = noise(3 * MIB)
    ticket = stored(store, data)
    gate.opened.clear()
    filler = [put(store, noise(MIB)) for _ in range(4)]
    waits: list[int] = []
    overflow = store.ring.overflow

    def watched(nbytes: int) -> torch.Tensor:
        before = len(accelerator.waited)
        memory = overflow(nbytes)
        waits.append(len(accelerator.waited) - before)
        return memory

    monkeypatch.setattr(store.ring, "overflow", watched)
    assert torch.equal(store.get(ticket, CPU).data, data) and waits == [1]
    gate.opened.set()
    until(lambda: all(part_of(one).state is PartState.STORED for one in filler), "the writes")
