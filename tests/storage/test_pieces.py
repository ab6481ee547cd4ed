"""Storages of several parts: larger than a part of staging, or than all of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import StoreFactory
from support.disks import until
from support.doubles import Accelerator, EventAccelerator, Gate, ScriptedBackend, wait_for_writes
from support.stores import CPU, MIB, noise, nothing_is_held, put

from ds_tba.stats import PathMeter
from ds_tba.storage.backends import IoBackend
from ds_tba.storage.base import Refusal
from ds_tba.storage.nvme import Lanes


@pytest.mark.parametrize("nbytes", [4 * MIB + 1, 5 * MIB + 4097, 40 * MIB + 3])
def test_what_is_larger_than_staging_comes_back(make_store: StoreFactory, backend: IoBackend, nbytes: int) -> None:
    nvme = make_store(backend, staging_bytes=4 * MIB)
    store, data = nvme, noise(nbytes)
    ticket = put(store, data.clone(), wait=True)
    wait_for_writes(nvme)
    for _ in range(2):
        loaded = store.get(ticket, CPU)
        assert loaded.stored and torch.equal(loaded.data, data)
        loaded.data.zero_()
    assert nvme.stats.offloaded_bytes == nbytes and nvme.ring.slots.peak_used_bytes <= 4 * MIB
    store.release(ticket)
    nothing_is_held(nvme)


def test_one_storage_is_spread_over_all_paths(make_store: StoreFactory) -> None:
    nvme = make_store(paths=3, staging_bytes=8 * MIB)
    for path in nvme.paths:
        path.meter = PathMeter(2, 2, lambda: 0.0)  # none is faster than another
    ticket = put(nvme, noise(24 * MIB), wait=True)
    assert [path.extents.used_bytes for path in nvme.paths] == [8 * MIB] * 3
    assert len(ticket.parts) == 12


def test_a_swap_file_without_room_gives_the_pieces_back(make_store: StoreFactory) -> None:
    nvme = make_store(staging_bytes=4 * MIB, swap_file_bytes=6 * MIB)
    assert nvme.put(noise(8 * MIB), wait=True) is Refusal.NO_SPACE
    nothing_is_held(nvme)
    assert (nvme.stats.offloaded_bytes, nvme.stats.cancelled_bytes) == (0, 0)  # no part of what is refused counts
    data = noise(5 * MIB)
    ticket = put(nvme, data.clone(), wait=True)
    assert torch.equal(nvme.get(ticket, CPU).data, data) and nvme.stats.offloaded_bytes == 5 * MIB


@pytest.mark.parametrize("accelerator", [Accelerator, EventAccelerator], ids=["synchronous", "asynchronous"])
def test_what_was_handed_over_before_a_get_failed_is_not_given_up_with_what_is_ahead(
    make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch, accelerator: Callable[[], Accelerator]
) -> None:
    """The budget wants the room of what is ahead, but the first parts are nowhere else."""
    gate = Gate()
    store = make_store(ScriptedBackend(gate), staging_bytes=8 * MIB, accelerator=accelerator(), lanes=Lanes(1, 1))
    data = noise(8 * MIB)
    ticket = put(store, data.clone(), wait=True)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(store.copies, "into", _fails_after(3, store.copies.into))
        store.get(ticket, CPU)
    assert not store.cancel_prefetch(ticket)
    assert torch.equal(store.get(ticket, CPU).data, data)
    gate.opened.set()
    store.release(ticket)
    nothing_is_held(store)


@pytest.mark.parametrize("given_up", [False, True], ids=["wanted", "given up"])
def test_a_storage_of_parts_is_read_ahead_into_its_memory(make_store: StoreFactory, given_up: bool) -> None:
    store, data = make_store(staging_bytes=4 * MIB, accelerator=EventAccelerator()), noise(6 * MIB)
    ticket = put(store, data.clone(), wait=True)
    wait_for_writes(store)
    assert store.prefetch(ticket) and ticket.destination is not None
    memory = ticket.destination.data.data_ptr()
    if given_up:
        until(lambda: store.cancel_prefetch(ticket), "the reads")
        assert ticket.destination is None and store.read_ahead.prefetched_bytes == 0
    loaded = store.get(ticket, CPU)
    assert torch.equal(loaded.data, data) and (given_up or loaded.data.data_ptr() == memory)
    store.release(ticket)
    nothing_is_held(store)


def _fails_after(calls: int, original: Callable[..., object]) -> Callable[..., object]:
    left = [calls]

    def call(*arguments: object, **more: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError
        return original(*arguments, **more)

    return call
