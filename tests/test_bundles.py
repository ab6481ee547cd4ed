"""Bundles: small storages in one request, each with its own bytes, lifetime and version."""

from __future__ import annotations

import gc
import threading

import hazards
import pytest
import torch
from conftest import StoreFactory
from doubles import EventAccelerator, Gate, ScriptedBackend, fails
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hazards import Scenario, scenarios, store_is_empty
from test_store import CPU, noise, until

from ds_tba.autograd.cache import TensorCache
from ds_tba.errors import ActivationLostError, StateError
from ds_tba.storage.backends.base import IoBackend
from ds_tba.storage.base import Refusal
from ds_tba.storage.nvme import NvmeStore
from ds_tba.store.bundles import BundlingStore, MemberTicket

KIB, MIB = 1 << 10, 1 << 20


def put(store: BundlingStore, data: torch.Tensor, *, wait: bool = False) -> MemberTicket:
    ticket = store.put(data, wait=wait)
    assert isinstance(ticket, MemberTicket), ticket
    return ticket


def committed(nvme: NvmeStore, sizes: list[int]) -> tuple[BundlingStore, list[torch.Tensor], list[MemberTicket]]:
    """Storages in bundles that are all written."""
    store = BundlingStore(nvme)
    data = [noise(size) for size in sizes]
    tickets = [put(store, one.clone()) for one in data]
    store.commit()
    nvme.wait_for_writes()
    return store, data, tickets


@scenarios
def test_gradients_are_exact(make_store: StoreFactory, backend: IoBackend, scenario: Scenario) -> None:
    """Every storage of the scenarios is small enough to be bundled; a new bundle every 256 KiB."""
    nvme = make_store(backend, staging_bytes=2 * MIB)
    hazards.check(scenario, TensorCache([BundlingStore(nvme)], "cpu", hazards.LEAST_BYTES, wait_for_staging=True))
    assert nvme.stats.coalesced_bytes > 0 or scenario.__name__ == "sparse_tensors"
    assert store_is_empty(nvme)


@scenarios
def test_gradients_are_exact_when_writes_fail(make_store: StoreFactory, scenario: Scenario) -> None:
    nvme = make_store(ScriptedBackend(fails("write", first=1)), staging_bytes=MIB)
    hazards.check(scenario, TensorCache([BundlingStore(nvme)], "cpu", hazards.LEAST_BYTES))
    assert store_is_empty(nvme)


def test_small_storages_share_requests_of_a_mebibyte_and_more(make_store: StoreFactory) -> None:
    backend = ScriptedBackend(lambda verb, number: None)
    nvme = make_store(backend, staging_bytes=64 * MIB)
    store, data, tickets = committed(nvme, [64 * KIB + 3] * 100 + [MIB] * 6)
    assert backend.counts["write"] == 4  # of at most 4 MiB: 63, 37 and 1, 4, 1 storages
    assert nvme.stats.offloaded_bytes == nvme.stats.coalesced_bytes == sum(one.numel() for one in data)
    for ticket, one in reversed(list(zip(tickets, data, strict=True))):
        assert torch.equal(store.get(ticket, CPU).data, one)
    assert backend.counts["read"] == 4
    for ticket in tickets:
        store.release(ticket)
    assert store_is_empty(nvme)


def test_large_storages_pass_by(make_store: StoreFactory) -> None:
    nvme = make_store(staging_bytes=64 * MIB)
    ticket = BundlingStore(nvme).put(noise(MIB + 1), wait=False)
    assert not isinstance(ticket, Refusal) and ticket.store is nvme and nvme.stats.coalesced_bytes == 0


def test_a_bundle_takes_no_more_room_than_its_members(make_store: StoreFactory) -> None:
    nvme = make_store(staging_bytes=64 * MIB)
    committed(nvme, [100_000, 200_000])
    assert nvme.paths[0].extents.used_bytes == 303_104  # 300,000 padded to 512 each, and to 4096


def test_an_open_bundle_is_handed_over_from_staging(make_store: StoreFactory) -> None:
    nvme = make_store()
    store = BundlingStore(nvme)
    data = [noise(64 * KIB) for _ in range(3)]
    tickets = [put(store, one.clone()) for one in data]
    assert all(store.prefetch(ticket) for ticket in tickets)
    for ticket, one in zip(tickets, data, strict=True):
        got = store.get(ticket, CPU)
        assert got.stored and torch.equal(got.data, one)
        got.data.zero_()  # a holder's business
        assert torch.equal(store.get(ticket, CPU).data, one)
    for ticket in tickets:
        store.release(ticket)
    assert nvme.stats.writes.nbytes == 0 and nvme.stats.cancelled_bytes == 3 * 64 * KIB
    assert store_is_empty(nvme)


def test_what_was_handed_out_is_read_again_not_shared(make_store: StoreFactory, backend: IoBackend) -> None:
    store, data, tickets = committed(make_store(backend), [64 * KIB] * 3)
    first = store.get(tickets[0], CPU).data
    first.zero_()
    assert torch.equal(store.get(tickets[0], CPU).data, data[0])
    for ticket, one in zip(tickets[1:], data[1:], strict=True):
        assert torch.equal(store.get(ticket, CPU).data, one)


def test_members_have_versions_and_storages_of_their_own(make_store: StoreFactory) -> None:
    store, _, tickets = committed(make_store(), [64 * KIB] * 2)
    one, other = (store.get(ticket, CPU).data for ticket in tickets)
    one.add_(1)
    assert (one._version, other._version) == (1, 0)
    assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 64 * KIB


def test_what_was_read_leaves_staging_with_its_last_holder(make_store: StoreFactory) -> None:
    nvme = make_store()
    store, data, tickets = committed(nvme, [64 * KIB] * 3)
    handed = [store.get(ticket, CPU).data for ticket in tickets]
    assert tickets[0].bundle.arrival is None and nvme.ring.slots.used_bytes == 3 * 64 * KIB
    del handed[1:]
    gc.collect()
    assert nvme.ring.slots.used_bytes == 3 * 64 * KIB and torch.equal(handed[0], data[0])
    handed.clear()
    gc.collect()
    until(lambda: nvme.ring.slots.used_bytes == 0, "the slot")


def test_members_given_up_before_they_were_wanted_do_not_hold_the_others(make_store: StoreFactory) -> None:
    store, data, tickets = committed(make_store(), [64 * KIB] * 3)
    store.release(tickets[1])
    bundle = tickets[0].bundle
    for index in (0, 2):
        assert torch.equal(store.get(tickets[index], CPU).data, data[index])
    assert bundle.arrival is None


def test_what_was_read_goes_with_the_last_member_that_was_still_to_be_handed_out(make_store: StoreFactory) -> None:
    store, _, tickets = committed(make_store(), [64 * KIB] * 3)
    for index in (0, 2):
        store.get(tickets[index], CPU)
    bundle = tickets[0].bundle
    assert bundle.arrival is not None
    store.release(tickets[1])
    assert bundle.arrival is None


def test_members_are_aligned_as_an_accelerator_would_allocate_them(make_store: StoreFactory) -> None:
    _, _, tickets = committed(make_store(), [1000, 1, 513, 512])
    assert [ticket.offset for ticket in tickets] == [0, 1024, 1536, 2560]


def test_a_cancelled_write_keeps_the_bytes_until_the_last_member_goes(make_store: StoreFactory) -> None:
    gate = Gate()
    nvme = make_store(ScriptedBackend(gate))
    plug = [nvme.put(noise(MIB), wait=False) for _ in range(2)]  # both lanes are held
    for _ in plug:
        gate.arrived.acquire()
    store = BundlingStore(nvme)
    data = [noise(64 * KIB) for _ in range(3)]
    tickets = [put(store, one.clone()) for one in data]
    store.commit()
    for _ in range(2):
        for ticket, one in zip(tickets, data, strict=True):
            got = store.get(ticket, CPU).data
            assert torch.equal(got, one)
            got.zero_()
    assert nvme.stats.cancelled_bytes == 3 * 64 * KIB
    gate.opened.set()
    for ticket in tickets:
        store.release(ticket)
    until(lambda: nvme.ring.slots.used_bytes == 0, "staging")


def test_full_staging_refuses_the_member_that_would_open_a_bundle(make_store: StoreFactory) -> None:
    gate = Gate()
    nvme = make_store(ScriptedBackend(gate), staging_bytes=8 * MIB)
    store = BundlingStore(nvme)
    held = nvme.put(noise(8 * MIB), wait=False)
    assert store.put(noise(64 * KIB), wait=False) is Refusal.STAGING_FULL
    gate.opened.set()
    assert not isinstance(held, Refusal)


def test_a_large_storage_that_waits_for_staging_gets_what_the_open_bundle_holds(make_store: StoreFactory) -> None:
    nvme = make_store(staging_bytes=8 * MIB)
    store = BundlingStore(nvme)
    member, small = put(store, small := noise(64 * KIB)), small
    large = noise(8 * MIB)
    ticket = store.put(large.clone(), wait=True)
    assert not isinstance(ticket, Refusal)
    nvme.wait_for_writes()
    assert torch.equal(store.get(member, CPU).data, small)
    assert torch.equal(nvme.get(ticket, CPU).data, large)  # type: ignore[arg-type]


def test_a_failed_copy_leaves_the_others_and_no_room_taken(make_store: StoreFactory) -> None:
    nvme = make_store()
    store = BundlingStore(nvme)
    bad = torch.empty(64 * KIB, dtype=torch.uint8, device="meta")
    with pytest.raises(TypeError):
        store.put(bad, wait=False)
    assert store_is_empty(nvme)
    data = noise(64 * KIB)
    ticket = put(store, data.clone())
    with pytest.raises(TypeError):
        store.put(bad, wait=False)
    assert torch.equal(store.get(ticket, CPU).data, data)


def test_the_device_may_still_be_copying_when_all_members_are_given_up(make_store: StoreFactory) -> None:
    copied = threading.Event()
    nvme = make_store(accelerator=EventAccelerator(copied))
    store = BundlingStore(nvme)
    ticket = put(store, noise(64 * KIB))
    store.release(ticket)
    nvme.wait_for_writes()
    assert nvme.ring.slots.used_bytes > 0  # the slot is not handed to anybody else yet
    copied.set()
    assert store_is_empty(nvme)


def test_a_lost_bundle_raises_for_each_of_its_members(make_store: StoreFactory) -> None:
    store, _, tickets = committed(make_store(ScriptedBackend(fails("read"))), [64 * KIB] * 2)
    for ticket in tickets:
        with pytest.raises(ActivationLostError):
            store.get(ticket, CPU)


def test_after_close(make_store: StoreFactory) -> None:
    store = BundlingStore(make_store())
    ticket = put(store, noise(64 * KIB))
    store.close()
    store.close()
    with pytest.raises(StateError, match="closed before backward"):
        store.get(ticket, CPU)
    assert store.put(noise(64 * KIB), wait=False) is Refusal.CLOSED
    store.release(ticket)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 300_000), min_size=1, max_size=30),
    order=st.randoms(use_true_random=False),
)
def test_any_sizes_in_any_order(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], order: object) -> None:
    with hazards.nvme_cache(tmp_path_factory.mktemp("nvme")) as cache:
        (nvme,) = cache._stores
        assert isinstance(nvme, NvmeStore)
        store = BundlingStore(nvme)
        data = [noise(size) for size in sizes]
        tickets = [store.put(one.clone(), wait=True) for one in data]
        pairs = list(zip(tickets, data, strict=True))
        order.shuffle(pairs)  # type: ignore[attr-defined]
        for ticket, one in pairs:
            assert not isinstance(ticket, Refusal)
            assert torch.equal(ticket.store.get(ticket, CPU).data, one)
        for ticket, _ in pairs:
            ticket.store.release(ticket)  # type: ignore[union-attr]
        assert store_is_empty(nvme)
