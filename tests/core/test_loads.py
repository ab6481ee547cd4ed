"""Loads: no lock is held while a store reads, one thread loads a record, and a failed load leaves it where it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_tba.core.cache import TensorCache
from ds_tba.core.saved import RecordState
from ds_tba.device.accelerator import Accelerator
from ds_tba.errors import ActivationLostError
from ds_tba.storage.base import Loaded
from ds_tba.storage.host import HostStore, HostTicket

LIMIT_S = 60.0


class Gated(HostStore):
    """Reads nothing before the gate is open; so many of the next reads fail."""

    def __init__(self) -> None:
        super().__init__(Accelerator(), 16 << 20)
        self.entered, self.gate = threading.Event(), threading.Event()
        self.gets = self.fails = 0

    def get(self, ticket: HostTicket, device: torch.device) -> Loaded:
        self.gets += 1
        self.entered.set()
        assert self.gate.wait(LIMIT_S)
        if self.fails:
            self.fails -= 1
            raise ActivationLostError("as the test wants it")
        return super().get(ticket, device)


class Run:
    """One tensor that a store has, with the view in its place."""

    def __init__(self) -> None:
        self.store = Gated()
        self.cache = TensorCache([self.store], "cpu", 1024)
        self.found: list[Any] = []
        x = torch.randn(64, 64, requires_grad=True)
        made = x * 2
        self.expected = made.detach().clone()
        with self.cache.saving():
            self.view: Any = self.cache.pack(made)

    def read(self) -> None:
        try:
            self.found.append(self.view.restore())
        except ActivationLostError as error:
            self.found.append(error)

    def read_in_thread(self) -> threading.Thread:
        """Begin to read; return once the store does."""
        reader = started(self.read)
        assert self.store.entered.wait(LIMIT_S)
        return reader


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def end(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


@pytest.fixture
def run() -> Run:
    return Run()


def test_the_lock_is_free_while_a_store_reads(run: Run) -> None:
    reader = run.read_in_thread()
    assert run.view.record.state is RecordState.LOADING

    def forward() -> None:
        with run.cache.saving():
            torch.randn(64, 64, requires_grad=True).exp().sin()

    end(started(forward))
    run.store.gate.set()
    end(reader)
    assert torch.equal(run.found[0], run.expected)


def test_two_threads_that_want_a_record_load_it_once(run: Run) -> None:
    first = run.read_in_thread()
    run.view.record.pending += 1  # of another view, so that it stays for the second
    second = started(run.read)
    second.join(0.1)
    assert second.is_alive() and run.store.gets == 1
    run.store.gate.set()
    end(first, second)
    assert run.store.gets == 1 and all(torch.equal(one, run.expected) for one in run.found)
    run.view.record.pending -= 1


def test_a_load_that_fails_leaves_the_record_to_the_next(run: Run) -> None:
    run.store.fails = 1
    first = run.read_in_thread()
    second = started(run.read)
    run.store.gate.set()
    end(first, second)
    assert isinstance(run.found[0], ActivationLostError) and torch.equal(run.found[1], run.expected)
    assert run.view.record.loading is None


def test_memory_that_runs_out_once_the_bytes_are_there_leaves_them_to_the_next(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load is tried again when the allocator has memory."""
    run.store.gate.set()
    run.cache.limit(1 << 20)
    rooms, make_room = [1 << 20, 0], run.cache.make_room

    def no_more(nbytes: int) -> None:
        if rooms and not rooms.pop(0):
            raise torch.OutOfMemoryError("CUDA out of memory")
        make_room(nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(run.cache, "make_room", no_more)
        run.read()
    assert rooms == [] and torch.equal(run.found[0], run.expected)


def test_what_another_thread_evicts_while_it_is_loaded_early_holds_up_nobody(run: Run) -> None:
    """It is away, and prefetched, as it is noted as loaded early; such bytes cannot be cancelled in host memory."""
    cache, record, x = run.cache, run.view.record, torch.randn(64, 64, requires_grad=True)
    with cache.saving():
        others: list[Any] = [cache.pack(x * number) for number in range(4)]
    run.store.gate.set()

    def load_early() -> None:
        with cache.lock:
            cache.add_early(record)
            assert cache.prefetch(record) and record in cache._ahead
            for one in others:
                cache.add_early(one.record)

    end(started(load_early))
    run.read()
    assert torch.equal(run.found[0], run.expected)
