from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from conftest import StoreFactory
from hypothesis import given
from hypothesis import strategies as st
from support.doubles import CpuAccelerator, EventAccelerator

from ds_tba.errors import StateError
from ds_tba.storage.base import Refusal
from ds_tba.storage.host import HostStore, HostTicket, segment_sizes

MIB = 1 << 20
CPU = torch.device("cpu")


def put(store: HostStore, data: torch.Tensor) -> HostTicket:
    ticket = store.put(data, wait=False)
    assert isinstance(ticket, HostTicket), ticket
    return ticket


@given(st.integers(0, 1 << 45))
def test_the_budget_is_used_in_powers_of_two_to_the_mebibyte(budget_bytes: int) -> None:
    sizes = segment_sizes(budget_bytes)
    assert all(size & (size - 1) == 0 for size in sizes) and sizes == sorted(set(sizes), reverse=True)
    assert 0 <= budget_bytes - sum(sizes) < MIB


@pytest.mark.parametrize("nbytes", [1, 4097, MIB])
def test_bytes_come_back_as_often_as_asked(nbytes: int) -> None:
    store = HostStore(CpuAccelerator(), 3 * MIB)
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    ticket = put(store, data)
    for _ in range(2):
        assert torch.equal(store.get(ticket, CPU).data, data)
    store.close()


def test_the_budget_is_kept_and_room_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ds_tba")
    store = HostStore(CpuAccelerator(), 3 * MIB)
    tickets = [put(store, torch.zeros(MIB, dtype=torch.uint8)) for _ in range(3)]
    assert store.put(torch.zeros(1, dtype=torch.uint8), wait=True) is Refusal.HOST_FULL
    assert "no room in host_budget_bytes: a saved storage of 1 bytes stays in device memory" in caplog.text
    store.release(tickets[1])
    put(store, torch.ones(MIB, dtype=torch.uint8))
    assert store.stats.fallbacks == {"no room in host_budget_bytes": 1}
    with pytest.raises(StateError, match="given up"):
        store.get(tickets[1], CPU)
    store.close()


def test_room_is_used_again_only_when_the_device_has_stopped_writing_into_it() -> None:
    done = threading.Event()
    store = HostStore(EventAccelerator(done), MIB)
    store.release(put(store, torch.zeros(MIB, dtype=torch.uint8)))
    assert store.put(torch.zeros(MIB, dtype=torch.uint8), wait=False) is Refusal.HOST_FULL
    done.set()
    put(store, torch.zeros(MIB, dtype=torch.uint8))
    store.close()


def test_a_copy_that_fails_gives_its_room_back_and_does_not_count() -> None:
    store = HostStore(CpuAccelerator(), MIB)
    with pytest.raises(TypeError):
        store.put(torch.empty(MIB, dtype=torch.uint8, device="meta"), wait=False)
    assert store.stats.offloaded_bytes == 0
    put(store, torch.zeros(MIB, dtype=torch.uint8))
    assert store.stats.offloaded_bytes == MIB
    store.close()


def test_what_is_copied_ahead_is_bounded_and_given_back() -> None:
    store = HostStore(EventAccelerator(), 8 * MIB, ahead_bytes=2 * MIB)
    data = [torch.full((MIB,), index, dtype=torch.uint8) for index in range(4)]
    tickets = [put(store, one) for one in data]
    assert [store.prefetch(ticket) for ticket in tickets] == [True, True, False, False]
    assert torch.equal(store.get(tickets[0], CPU).data, data[0])
    assert [store.prefetch(ticket) for ticket in tickets[1:]] == [True, True, False]
    store.release(tickets[1])
    assert store.prefetch(tickets[3])
    for index in (2, 3):
        assert torch.equal(store.get(tickets[index], CPU).data, data[index])
    assert store._ahead_bytes == 0
    store.close()


def test_after_close() -> None:
    store = HostStore(CpuAccelerator(), MIB)
    ticket = put(store, torch.zeros(1, dtype=torch.uint8))
    store.close()
    assert store.put(torch.zeros(1, dtype=torch.uint8), wait=True) is Refusal.CLOSED
    with pytest.raises(StateError, match="closed before backward"):
        store.get(ticket, CPU)


def test_the_budget_is_host_memory_whatever_the_default_device(make_store: StoreFactory) -> None:
    """Scripts build models under ``torch.device("cuda")``, and call ``torch.set_default_device``."""
    asked: list[torch.device] = []

    class Pins(EventAccelerator):
        def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
            asked.append(tensor.device)
            return super().pin_memory(tensor)

    with torch.device("meta"):
        store = HostStore(Pins(), MIB)
        make_store(accelerator=Pins())
    assert asked == [CPU, CPU]
    store.close()


def test_memory_that_a_copy_still_reads_outlives_the_store_and_its_last_ticket() -> None:
    done = threading.Event()
    store = HostStore(EventAccelerator(done), MIB)
    ticket = put(store, torch.zeros(4096, dtype=torch.uint8))
    done.set()  # the copy out
    assert store.copies_out() == []
    done.clear()
    store.get(ticket, CPU)
    memory = weakref.ref(ticket.segment.memory)
    store.close()
    store.release(ticket)
    del ticket
    gc.collect()
    assert memory() is not None
