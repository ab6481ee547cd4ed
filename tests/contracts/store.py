"""The contract of a store: one class of tests, which every store passes. Not about speed, nor where the bytes lie.

A store of your own is tested by a subclass that makes it; ``docs/develop/stores.md`` has one. Only what
:class:`ds_tba.storage.base.Store` has is used, on the CPU; what an asynchronous device asks beyond is in ``tests/gpu``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from support.disks import until
from support.stores import CPU, MIB, noise

from ds_tba.core.cache import TensorCache
from ds_tba.errors import StateError
from ds_tba.storage.base import Refusal, Store, Ticket

PATIENCE_S = 30.0


def taken(store: Store[Any], data: torch.Tensor) -> Ticket:
    """The ticket of bytes for which the store has room."""
    ticket = store.put(data, wait=True)
    assert isinstance(ticket, Ticket), ticket
    return ticket


def within_patience(*calls: Callable[[], object]) -> None:
    """Make each call in a thread of its own, so that one that blocks is a failure and not a hang."""
    problems: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as problem:  # noqa: BLE001 - raised again below, in the test's own thread
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a call blocks"
    for problem in problems:
        raise problem


class StoreContract:
    """The promises of a store that the tensor cache relies on.

    Subclasses give the fixture ``store``: empty, with room for 8 MiB at least and for ``most_bytes`` at most. What it
    has opened, the fixture closes.
    """

    most_bytes = 64 * MIB

    @pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 3 * MIB + 17])
    def test_bytes_come_back(self, store: Store[Any], nbytes: int) -> None:
        data = noise(nbytes)
        ticket = taken(store, data.clone())
        assert ticket.nbytes == nbytes and ticket.store is store
        loaded = store.get(ticket, CPU)
        found = loaded.data
        assert found.dtype is torch.uint8 and found.shape == (nbytes,) and found.device == CPU
        assert torch.equal(found, data)
        if loaded.stored:  # else ``found`` is the only copy
            assert torch.equal(store.get(ticket, CPU).data, data)
        store.release(ticket)

    def test_the_tensor_may_be_overwritten_once_it_is_put(self, store: Store[Any]) -> None:
        data = noise(MIB)
        wanted = data.clone()
        ticket = taken(store, data)
        data.zero_()
        assert torch.equal(store.get(ticket, CPU).data, wanted)
        store.release(ticket)

    @pytest.mark.parametrize("prefetched", [True, False])
    def test_tickets_come_back_in_any_order(self, store: Store[Any], prefetched: bool) -> None:
        pieces = [noise(256 * 1024 + index) for index in range(8)]
        tickets = [taken(store, piece.clone()) for piece in pieces]
        order = [3, 0, 7, 1, 6, 2, 5, 4]
        if prefetched:
            assert all(store.prefetch(tickets[index]) in (True, False) for index in order * 2)
        for index in order:
            assert torch.equal(store.get(tickets[index], CPU).data, pieces[index])
            store.release(tickets[index])

    def test_a_prefetch_that_is_cancelled_loses_nothing(self, store: Store[Any]) -> None:
        data = noise(MIB)
        ticket = taken(store, data.clone())
        store.prefetch(ticket)
        assert store.cancel_prefetch(ticket) in (True, False)
        assert store.prefetch(ticket) in (True, False)
        assert torch.equal(store.get(ticket, CPU).data, data)
        store.release(ticket)

    def test_without_room_it_refuses_and_room_comes_back(self, store: Store[Any]) -> None:
        """A refusal is an answer, not an error: the cache keeps the tensor, or asks the next store."""
        tickets: list[Ticket] = []

        def fill() -> Refusal:
            while len(tickets) <= self.most_bytes // MIB:
                answer = store.put(torch.full((MIB,), len(tickets) % 251, dtype=torch.uint8), wait=False)
                if isinstance(answer, Refusal):
                    return answer
                tickets.append(answer)
            raise AssertionError(f"it has room for more than most_bytes {self.most_bytes}")

        within_patience(fill)
        assert len(tickets) >= 1
        for index, ticket in enumerate(tickets):
            assert torch.equal(store.get(ticket, CPU).data, torch.full((MIB,), index % 251, dtype=torch.uint8))
        for ticket in tickets:
            store.release(ticket)
        store.release(taken(store, noise(MIB)))

    def test_what_was_given_up_is_not_handed_out(self, store: Store[Any]) -> None:
        ticket = taken(store, noise(MIB))
        store.release(ticket)
        with pytest.raises(StateError, match="given up"):
            store.get(ticket, CPU)

    def test_any_thread_may_use_it(self, store: Store[Any]) -> None:
        """Forward, and autograd's own threads."""

        def work(seed: int) -> None:
            for round_ in range(20):
                data = torch.full((8192,), (seed * 20 + round_) % 251, dtype=torch.uint8)
                ticket = taken(store, data.clone())
                store.prefetch(ticket)
                assert torch.equal(store.get(ticket, CPU).data, data)
                store.release(ticket)

        within_patience(*(partial(work, seed) for seed in range(4)))

    def test_housekeeping_is_allowed_at_any_time(self, store: Store[Any]) -> None:
        data = noise(MIB)
        store.settle()
        ticket = taken(store, data.clone())
        store.settle()
        until(lambda: len(store.copies_out()) == 0, "the copies out of device memory")
        assert torch.equal(store.get(ticket, CPU).data, data)
        store.release(ticket)

    def test_it_gives_back_what_it_holds_where_nothing_is_in_its_care(self, store: Store[Any]) -> None:
        data = noise(MIB)
        ticket = taken(store, data.clone())
        store.give_back()
        assert torch.equal(store.get(ticket, CPU).data, data)
        store.release(ticket)
        until(store.give_back, "what was in its care")
        assert store.give_back()
        for _ in range(2):  # the next put takes it again
            ticket = taken(store, data.clone())
            assert torch.equal(store.get(ticket, CPU).data, data)
            store.release(ticket)
            until(store.give_back, "what was in its care")

    def test_after_close(self, store: Store[Any]) -> None:
        ticket = taken(store, noise(MIB))
        store.close()
        store.close()
        assert store.put(noise(MIB), wait=True) is Refusal.CLOSED
        with pytest.raises(StateError, match="closed before backward"):
            store.get(ticket, CPU)
        store.release(ticket)
        store.settle()

    def test_a_model_trains_over_it_with_the_same_gradients(self, store: Store[Any]) -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)), torch.nn.GELU())
        for step in range(2):
            cache = TensorCache([store], "cpu", 4096, wait_for_staging=True)
            inputs = torch.randn(64, 128, generator=torch.Generator().manual_seed(step))
            found = []
            for saving in (nullcontext(), cache.saving()):
                model.zero_grad()
                with saving:
                    loss = model(inputs).square().mean()
                loss.backward()
                found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
            wanted, got = found
            assert wanted and all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))
