from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import StoreFactory
from hypothesis import given
from hypothesis import strategies as st
from support.doubles import CpuAccelerator, EventAccelerator

from ds_tba.device.accelerator import MemoryLevels
from ds_tba.errors import StateError
from ds_tba.storage.base import Refusal
from ds_tba.storage.host import HostStore, HostTicket, SpareMemory, segment_sizes

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


def test_the_budget_is_host_memory_whatever_the_default_device(make_store: StoreFactory) -> None:
    """Scripts build models under ``torch.device("cuda")``, and call ``torch.set_default_device``."""
    asked: list[torch.device] = []

    class Pins(EventAccelerator):
        def pinned(self, nbytes: int) -> torch.Tensor:
            asked.append(CpuAccelerator.pinned(self, nbytes).device)
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
    ticket = put(store, torch.zeros(4096, dtype=torch.uint8))
    done.set()  # the copy out
    assert store.copies_out() == []
    done.clear()
    store.get(ticket, CPU)
    threading.Timer(0.1, done.set).start()
    store.close()
    assert done.is_set()
    store.release(ticket)


# ---- memory that the machine can spare ----


class Machine:
    """With so much memory free, less what a store has taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        self.asked = 0
        self.spare: SpareMemory | None = None
        monkeypatch.setattr("ds_tba.storage.host.available_bytes", self.available_bytes)

    def available_bytes(self) -> int:
        self.asked += 1
        return self.free_bytes - (0 if self.spare is None else self.spare.taken.now)

    def store(self, *, ranks: int = 1, is_last: bool = True) -> HostStore:
        self.spare = SpareMemory(EventAccelerator(), ranks)  # everything else is on the device
        return HostStore(CpuAccelerator(), self.spare, is_last=is_last)


def fill(store: HostStore, nbytes: int = MIB, most: int = 1000) -> list[HostTicket]:
    """As many storages as it takes."""
    found: list[HostTicket] = []
    while len(found) < most:
        taken = store.put(torch.full((nbytes,), len(found) % 251, dtype=torch.uint8), wait=False)
        if not isinstance(taken, HostTicket):
            assert taken is Refusal.HOST_FULL
            break
        found.append(taken)
    return found


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("nbytes", [1, MIB, 3 * MIB])
def test_memory_is_taken_as_it_is_wanted_and_a_tenth_of_it_left(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, ranks: int
) -> None:
    machine = Machine(monkeypatch, 100 * MIB)
    store = machine.store(ranks=ranks)
    assert store.capacity_bytes() == store.limit_bytes == 90 * MIB // ranks
    tickets = fill(store, nbytes, most=1)
    assert machine.spare is not None and nbytes <= machine.spare.taken.now <= 32 * MIB
    tickets += fill(store, nbytes, most=200)
    assert machine.spare.taken.now <= 90 * MIB // ranks
    if nbytes >= MIB:  # all of its share, but for the last bits of it; ranks share what is left, too
        assert len(tickets) * nbytes > (0.75 if ranks == 1 else 0.5) * 90 * MIB / ranks
    for number, ticket in enumerate(tickets[1:]):
        assert store.get(ticket, CPU).data.unique().tolist() == [number % 251]
    store.close()


def test_nothing_is_asked_for_storages_that_find_room(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1 << 30)
    store = machine.store()
    fill(store, 64 << 10, most=1)
    asked = machine.asked
    fill(store, 64 << 10, most=100)
    assert machine.asked == asked
    store.close()


def test_a_process_that_grows_gets_back_what_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 100 * MIB)
    store = machine.store()
    tickets = fill(store)
    machine.free_bytes = 50 * MIB
    assert machine.spare is not None
    full = machine.spare.taken.now
    assert fill(store) == []
    assert machine.spare.taken.now == full  # all of it is in use
    for ticket in tickets:
        store.release(ticket)
    again = fill(store)
    assert len(again) == 40 - 40 % 8 and machine.spare.taken.now <= 40 * MIB  # a tenth of what was free is left
    for number, ticket in enumerate(again):
        assert store.get(ticket, CPU).data.unique().tolist() == [number % 251]
        store.release(ticket)
    machine.free_bytes = 5 * MIB
    assert fill(store) == [] and machine.spare.taken.now == 0
    machine.free_bytes = 100 * MIB
    assert fill(store) == []  # asked again in the next step
    store.end_step()
    assert len(fill(store)) > 60
    store.close()


def test_a_storage_that_is_held_over_steps_keeps_no_empty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 100 * MIB)
    store = machine.store()
    held = put(store, torch.ones(MIB, dtype=torch.uint8))  # of a graph that the user keeps
    for ticket in fill(store):
        store.release(ticket)
    assert machine.spare is not None
    full = machine.spare.taken.now
    machine.free_bytes = 40 * MIB
    store.end_step()
    store.release(put(store, torch.zeros(MIB, dtype=torch.uint8)))
    assert machine.spare.taken.now < full and machine.spare.more_bytes() >= 0
    assert torch.equal(store.get(held, CPU).data, torch.ones(MIB, dtype=torch.uint8))
    store.close()


def test_where_a_drive_is_behind_it_takes_what_a_step_saves_beyond_all_before_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ds_tba")
    store = Machine(monkeypatch, 100 * MIB).store(is_last=False)
    for _ in range(5):
        assert fill(store) == [] and "stays in device memory" not in caplog.text
    store.end_step()
    assert len(fill(store)) == 5  # the step before has saved no more
    for _ in range(100):
        assert fill(store) == []
    store.end_step()
    assert len(fill(store)) > 60
    store.close()
    store.end_step()
    assert store.put(torch.zeros(1, dtype=torch.uint8), wait=False) is Refusal.CLOSED


def test_what_everything_else_has_needed_before_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    level = MemoryLevels(50 * MIB, 50 * MIB, 0, 0)
    monkeypatch.setattr("ds_tba.storage.host.available_bytes", lambda: 100 * MIB)
    monkeypatch.setattr("ds_tba.storage.host.HostMemoryUse.levels", lambda _: level)
    spare = SpareMemory(CpuAccelerator(), 1)
    level = MemoryLevels(50 * MIB, 90 * MIB, 0, 0)  # there was a peak
    assert spare.more_bytes() == 50 * MIB
    spare.taken.add(30 * MIB)
    level = MemoryLevels(80 * MIB, 90 * MIB, 0, 0)
    assert spare.more_bytes() == 50 * MIB  # of which the doubles above know nothing that was taken
    level = MemoryLevels(110 * MIB, 120 * MIB, 0, 0)  # 80 of others now, and 90 at most
    assert spare.more_bytes() == 60 * MIB


def test_where_nobody_can_tell_or_give_memory_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 100 * MIB)
    store = machine.store()

    def no_descriptor() -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("ds_tba.storage.host.available_bytes", no_descriptor)
    assert fill(store) == [] and store.capacity_bytes() == 0
    monkeypatch.setattr("ds_tba.storage.host.available_bytes", machine.available_bytes)
    for error in (OSError(12, "Cannot allocate memory"), RuntimeError("CUDA error: out of memory"), MemoryError()):
        store.end_step()
        with monkeypatch.context() as patch:
            patch.setattr("ds_tba.storage.host.host_memory", raising(error))
            assert fill(store) == []
    store.end_step()
    with monkeypatch.context() as patch:
        patch.setattr("ds_tba.storage.host.host_memory", raising(RuntimeError("something else")))
        with pytest.raises(RuntimeError, match="something else"):
            fill(store)
    assert fill(store)
    store.close()


def raising(error: Exception) -> Callable[..., torch.Tensor]:
    def fail(*_: Any) -> torch.Tensor:
        raise error

    return fail
