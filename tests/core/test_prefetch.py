"""Reading ahead: what is still to be written when it is asked for stays, in every state and failure; when it begins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import StoreFactory
from support.disks import until
from support.doubles import EventAccelerator, Gate, ScriptedBackend, fails, in_turn, part_of, wait_for_writes
from support.prefetching import cache_over, chain, spied
from support.stores import CPU, MIB, bytes_read, noise, nothing_is_held, put, slots_in_use, stored

from ds_tba.core.cache import TensorCache
from ds_tba.device.accelerator import Accelerator
from ds_tba.storage.nvme import Lanes, NvmeStore
from ds_tba.storage.space import PartState, SwapTicket


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def drive(gate: Gate) -> ScriptedBackend:
    """Writes once the gate is open."""
    return ScriptedBackend(gate)


@pytest.fixture(params=[Accelerator, EventAccelerator], ids=["synchronous", "asynchronous"])
def store(request: pytest.FixtureRequest, make_store: StoreFactory, drive: ScriptedBackend) -> NvmeStore:
    """One lane each way, on either kind of device."""
    return make_store(drive, lanes=Lanes(1, 1), staging_bytes=8 * MIB, accelerator=request.param())


def states(tickets: list[SwapTicket]) -> set[PartState]:
    return {part_of(ticket).state for ticket in tickets}


def release(store: NvmeStore, tickets: list[SwapTicket]) -> None:
    for ticket in tickets:
        store.release(ticket)
    nothing_is_held(store)


def under_write(store: NvmeStore, gate: Gate, *pieces: torch.Tensor) -> list[SwapTicket]:
    """Tickets of which the first is being written, and the others wait for it."""
    tickets = [put(store, piece.clone()) for piece in pieces]
    gate.arrived.acquire()
    until(lambda: part_of(tickets[0]).state is PartState.WRITING, "the first write to begin")
    return tickets


def test_what_two_nodes_have_saved_comes_back_for_the_later_one(make_store: StoreFactory) -> None:
    """A gated layer does this: its gate saves the layer's input again."""
    cache, asked = cache_over(make_store()), list[int]()
    x = torch.randn(128, 128, requires_grad=True)
    with cache.saving():
        first = x.exp()
        second = first.sin()  # saves the first
        third = second.cos()  # saves the second
        loss = third.sum() + first.square().sum()  # saves the first once more
    cache.prefetch = lambda record: asked.append(record.index) is None  # type: ignore[assignment]
    loss.backward()
    assert asked == [1]  # while backward has the first


def test_what_is_wanted_under_its_write_is_handed_over_without_a_read(store: NvmeStore, gate: Gate) -> None:
    pieces = [noise(MIB + 1) for _ in range(3)]
    tickets = under_write(store, gate, *pieces)
    assert all(store.prefetch(ticket) for ticket in tickets)
    gate.opened.set()
    until(lambda: states(tickets) == {PartState.LOADED}, "the writes to leave it there")
    if store.ring.accelerator.is_synchronous:  # it stays in its slot until it is needed
        assert all(ticket.destination is None for ticket in tickets) and slots_in_use(store) == 3 * (MIB + 4096)
    else:
        assert all(part_of(ticket).arrival is not None for ticket in tickets) and slots_in_use(store) == 0
        assert store.read_ahead.prefetched_bytes == 3 * (MIB + 4096)
    for ticket, piece in zip(tickets, pieces, strict=True):
        loaded = store.get(ticket, CPU)
        assert loaded.stored and torch.equal(loaded.data, piece)
        del loaded
    assert slots_in_use(store) == 0
    assert store.stats.forwarded_bytes == 3 * (MIB + 1) and bytes_read(store) == 0
    for ticket, piece in zip(tickets, pieces, strict=True):  # a second backward reads what was written
        assert torch.equal(store.get(ticket, CPU).data, piece)
    assert store.stats.forwarded_bytes == 3 * (MIB + 1) and bytes_read(store) == 3 * (MIB + 4096)
    release(store, tickets)


@pytest.mark.parametrize("store", [Accelerator], indirect=True)
def test_reads_behind_what_is_being_written_are_not_held_up(store: NvmeStore, gate: Gate) -> None:
    """Six of eight slots are being written, more than the half that reads leave to writes."""
    gate.opened.set()
    before = [stored(store, noise(MIB)) for _ in range(3)]
    gate.opened.clear()
    late = [put(store, noise(MIB)) for _ in range(6)]
    assert [store.prefetch(ticket) for ticket in late + before] == [True] * 8 + [False]
    until(lambda: states(before[:2]) == {PartState.LOADED}, "the reads")
    gate.opened.set()


def test_what_is_wanted_counts_within_the_bound_of_what_is_read_ahead(store: NvmeStore, gate: Gate) -> None:
    gate.opened.set()
    early = [stored(store, noise(MIB)) for _ in range(10)]
    assert all(store.prefetch(ticket) for ticket in early[:6])
    until(lambda: states(early[:6]) == {PartState.LOADED}, "the reads")
    gate.opened.clear()
    late = [put(store, noise(MIB)) for _ in range(2)]
    assert [store.prefetch(ticket) for ticket in late] == [True, True]
    assert [store.prefetch(ticket) for ticket in late] == [True, True]  # counted once
    assert store.read_ahead.prefetched_bytes + store.read_ahead.unwritten_bytes == 8 * MIB
    assert not store.prefetch(early[6])
    if not store.ring.accelerator.is_synchronous:
        # What was read ahead waits on the device, so that there is room for one more write.
        late.append(put(store, noise(MIB)))
        assert not store.prefetch(late[-1])
        store.get(early[0], CPU)
        assert store.prefetch(late[-1])
    gate.opened.set()
    wait_for_writes(store)
    release(store, early + late)


@pytest.mark.parametrize("which", [0, 1], ids=["being written", "queued"])
def test_what_is_asked_for_before_its_write_ends_is_handed_over_as_ever(
    store: NvmeStore, gate: Gate, which: int
) -> None:
    pieces = [noise(MIB) for _ in range(2)]
    tickets = under_write(store, gate, *pieces)
    assert store.prefetch(tickets[which])
    loaded = store.get(tickets[which], CPU)
    assert torch.equal(loaded.data, pieces[which]) and loaded.stored is (which == 0)
    assert store.read_ahead.unwritten_bytes == 0
    gate.opened.set()
    wait_for_writes(store)
    assert (store.stats.forwarded_bytes, store.stats.cancelled_bytes) == (MIB, which * MIB)
    del loaded
    release(store, tickets)


def test_a_write_that_fails_after_it_was_wanted_keeps_the_bytes(
    store: NvmeStore, gate: Gate, drive: ScriptedBackend
) -> None:
    drive.script = in_turn(gate, fails("write"))
    pieces = [noise(MIB) for _ in range(2)]
    tickets = under_write(store, gate, *pieces)
    assert all(store.prefetch(ticket) for ticket in tickets)
    gate.opened.set()
    until(lambda: states(tickets) == {PartState.RESCUED}, "the failures")
    assert store.read_ahead.unwritten_bytes == store.read_ahead.prefetched_bytes == 0
    for ticket, piece in zip(tickets, pieces, strict=True):
        assert store.prefetch(ticket)
        assert torch.equal(store.get(ticket, CPU).data, piece)
    release(store, tickets)


# ---- when it begins -------------------------------------------------------------------------------------------------


def tickets_of(cache: TensorCache) -> list[SwapTicket]:
    records = [record for record in cache.forward.micro_step._records if record is not None]
    return [record.ticket for record in records if isinstance(record.ticket, SwapTicket)]


STORED, READ_AHEAD = {PartState.STORED}, {PartState.READ_QUEUED, PartState.READING, PartState.LOADED}
LAST: dict[str, Callable[[], torch.Tensor]] = {
    "a small tensor": lambda: torch.ones(4),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(1024, 64)),
    "a tensor that staging cannot hold": lambda: torch.ones(1 << 20),
}


@pytest.mark.parametrize("last", LAST)
def test_reading_ahead_begins_with_the_first_unpack_of_anything(make_store: StoreFactory, last: str) -> None:
    store = make_store(staging_bytes=2 * MIB)
    cache, seen = cache_over(store), list[set[PartState]]()
    x = torch.randn(128, 128, requires_grad=True)
    with cache.saving():
        y = spied(chain(x, 8), LAST[last](), lambda: seen.append(states(tickets)))
    tickets = tickets_of(cache)
    wait_for_writes(store)
    assert len(tickets) == 8 and states(tickets) == STORED
    y.sum().backward()
    assert len(seen) == 1 and seen[0] <= READ_AHEAD


def test_what_is_unpacked_in_forward_begins_nothing(make_store: StoreFactory) -> None:
    """Else the order would be made of what is packed by then, and what comes after would never be read ahead."""
    store = make_store(staging_bytes=2 * MIB)
    cache, seen = cache_over(store), list[set[PartState]]()
    x = torch.randn(128, 128, requires_grad=True)
    with cache.saving():
        early = chain(x, 4)
        wait_for_writes(store)
        inner = spied(x, torch.ones(4), lambda: seen.append(states(tickets_of(cache))))
        torch.autograd.grad(inner.sum(), x)
        torch.autograd.grad(chain(x, 1).sum(), x)  # unpacks what was moved, too
        y = spied(chain(early, 4), torch.ones(4), lambda: seen.append(states(tickets)))
    tickets = tickets_of(cache)
    wait_for_writes(store)
    y.sum().backward()
    assert seen[0] == STORED
    assert len(tickets) == 8 and seen[1] <= READ_AHEAD


def test_of_several_forwards_only_that_whose_backward_begins_is_read_ahead(make_store: StoreFactory) -> None:
    store = make_store(staging_bytes=2 * MIB)
    cache, seen = cache_over(store), list[list[set[PartState]]]()
    x = torch.randn(128, 128, requires_grad=True)
    outputs, tickets = [], []
    for _ in range(3):
        with cache.saving():
            outputs.append(spied(chain(x, 2), torch.ones(4), lambda: seen.append([*map(states, tickets)])))
        tickets.append(tickets_of(cache))
    wait_for_writes(store)
    outputs[1].sum().backward()
    assert seen[0][0] == seen[0][2] == STORED and seen[0][1] <= READ_AHEAD
    outputs[0].sum().backward()
    assert seen[1][2] == STORED and seen[1][0] <= READ_AHEAD


@pytest.mark.parametrize("kind", [Accelerator, EventAccelerator], ids=["synchronous", "asynchronous"])
def test_a_storage_that_is_read_ahead_is_counted_once(make_store: StoreFactory, kind: type[Accelerator]) -> None:
    device = kind()
    store = make_store(accelerator=device)
    cache = TensorCache([store], "cpu", 64 << 10, accelerator=device)
    with cache.saving():
        loss = chain(torch.randn(128, 128, requires_grad=True), 2).sum()
    wait_for_writes(store)
    record, before = cache.forward.micro_step._records[0], cache.stats.resident.now
    with cache.lock:
        assert record is not None and cache.prefetch(record) and cache.prefetch(record)
        assert cache.stats.resident.now == before + (not device.is_synchronous) * record.nbytes
    with cache.lock:  # a load counts it in place of the read ahead, not beside it
        cache.end_load(record, cache.begin_load(record), None)
        assert cache.stats.resident.now == before
    loss.backward()
    cache.settle()
    assert cache.stats.resident.now == 0
