"""The host store: its budget, its memory, and copies that still use it."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import StoreFactory
from support.doubles import Accelerator, EventAccelerator, raising
from support.stores import CPU, MIB, noise

from ds_tba.storage.base import Refusal
from ds_tba.storage.host import HostStore, HostTicket

AVAILABLE, GIVES = "ds_tba.storage.host.available_bytes", "ds_tba.storage.host.host_memory"


def put(store: HostStore, data: torch.Tensor) -> HostTicket:
    ticket = store.put(data, wait=False)
    assert isinstance(ticket, HostTicket), ticket
    return ticket


def test_room_is_used_again_only_when_the_device_has_stopped_writing_into_it() -> None:
    done = threading.Event()
    store = HostStore(EventAccelerator(done), MIB)
    store.release(put(store, noise(MIB)))
    assert store.put(noise(MIB), wait=False) is Refusal.HOST_FULL
    done.set()
    put(store, noise(MIB))
    store.close()


def test_what_is_copied_ahead_is_bounded_and_given_back() -> None:
    store = HostStore(EventAccelerator(), 8 * MIB, ahead_bytes=2 * MIB)
    data = [noise(MIB) for _ in range(4)]
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


def test_the_budget_is_host_memory_whatever_the_default_device(make_store: StoreFactory) -> None:
    """Scripts build models under ``torch.device("cuda")``, and call ``torch.set_default_device``."""
    asked: list[torch.device] = []

    class Pins(EventAccelerator):
        def pinned(self, nbytes: int) -> torch.Tensor:
            asked.append(Accelerator.pinned(self, nbytes).device)
            return super().pinned(nbytes)

    with torch.device("meta"):
        store = HostStore(Pins(), MIB)
        ticket = store.put(torch.zeros(4096, dtype=torch.uint8, device=CPU), wait=False)
        make_store(accelerator=Pins()).open()
    assert not isinstance(ticket, Refusal) and asked == [CPU] * 3  # one more, to see where pages begin
    store.close()


def test_a_store_is_closed_only_when_no_copy_reads_its_memory() -> None:
    done = threading.Event()
    store = HostStore(EventAccelerator(done), MIB)
    ticket = put(store, noise(4096))
    done.set()  # the copy out
    assert store.copies_out() == []
    done.clear()
    store.get(ticket, CPU)
    threading.Timer(0.1, done.set).start()
    store.close()
    assert done.is_set()
    store.release(ticket)


# ---- memory as it is wanted ----


def fill(store: HostStore, nbytes: int = MIB, most: int = 1000) -> list[HostTicket]:
    """Put as many storages as the store takes, and return their tickets."""
    found: list[HostTicket] = []
    for number in range(most):
        taken = store.put(torch.full((nbytes,), number % 251, dtype=torch.uint8), wait=False)
        if not isinstance(taken, HostTicket):
            assert taken is Refusal.HOST_FULL
            break
        found.append(taken)
    return found


@pytest.mark.parametrize("nbytes", [1, MIB, 3 * MIB])
def test_memory_is_taken_as_it_is_wanted(nbytes: int) -> None:
    store = HostStore(Accelerator(), 45 * MIB)
    assert store.taken_bytes == 0
    tickets = fill(store, nbytes, most=1)
    assert nbytes <= store.taken_bytes <= 32 * MIB
    tickets += fill(store, nbytes, most=200)
    assert store.taken_bytes <= 45 * MIB
    if nbytes >= MIB:  # all of it, but for the last bits
        assert len(tickets) * nbytes > 0.8 * 45 * MIB
    for number, ticket in enumerate(tickets[1:]):
        assert store.get(ticket, CPU).data.unique().tolist() == [number % 251]
    store.close()


def test_what_the_machine_has_to_keep_free_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = 100 * MIB  # less what the stores take
    first, second = (HostStore(Accelerator(), 50 * MIB, reserve_bytes=50 * MIB) for _ in range(2))
    monkeypatch.setattr(AVAILABLE, lambda: free_bytes - first.taken_bytes - second.taken_bytes)
    tickets = fill(first, most=24)
    of_second = fill(second)
    assert first.taken_bytes >= 24 * MIB and first.taken_bytes + second.taken_bytes == 50 * MIB
    free_bytes = 20 * MIB  # another process grows: what is taken stays in use
    for ticket in tickets:
        first.release(ticket)
    assert len(fill(first)) == first.taken_bytes // MIB
    free_bytes = 200 * MIB
    assert fill(second) == []  # once the machine had no memory it is asked no more, but after a pause
    for ticket in of_second:
        second.release(ticket)
    assert second.give_back() and fill(second) != [] and second.taken_bytes <= 50 * MIB
    for store in (first, second):
        store.close()


def test_where_nobody_can_tell_or_give_memory_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AVAILABLE, lambda: 100 * MIB)
    store = HostStore(Accelerator(), 50 * MIB, reserve_bytes=50 * MIB)
    for name, error in (
        (AVAILABLE, OSError(24, "Too many open files")),
        (GIVES, OSError(12, "Cannot allocate memory")),
        (GIVES, RuntimeError("CUDA error: out of memory")),
        (GIVES, MemoryError()),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, raising(error))
            assert fill(store) == []
        assert store.give_back()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="something else"):
        patch.setattr(GIVES, raising(RuntimeError("something else")))
        fill(store)
    assert fill(store)
    store.close()
