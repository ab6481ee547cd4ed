"""Loads: no lock is held while a store reads, one thread loads a record, and a failed load leaves it where it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_tba.core.cache import TensorCache
from ds_tba.core.saved import RecordState, SavedView
from ds_tba.device.accelerator import Accelerator
from ds_tba.errors import ActivationLostError
from ds_tba.storage.base import Loaded
from ds_tba.storage.host import HostStore, HostTicket

LIMIT_S = 60.0


class Gated(HostStore):
    """Reads nothing before the gate is open.

    Attributes:
        fails: how many of the next reads fail.
    """

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
        views: list[SavedView] = []

        def looking(hooks: Any) -> Any:
            def pack(tensor: torch.Tensor) -> Any:
                views.append(hooks[0](tensor))
                return views[-1]

            return pack, hooks[1]

        x = torch.randn(64, 64, requires_grad=True)
        with self.cache.saving(around=looking):
            made = x * 2
            self.graph = made.sin()
        self.expected = made.detach().clone()
        [self.view] = [one for one in views if isinstance(one, SavedView)]

    def read(self) -> None:
        try:
            self.found.append(self.view.restore())
        except ActivationLostError as error:
            self.found.append(error)

    def thread(self, work: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    def end(self, *threads: threading.Thread) -> None:
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()


@pytest.fixture
def run() -> Run:
    return Run()


def test_the_lock_is_free_while_a_store_reads(run: Run) -> None:
    reader = run.thread(run.read)
    assert run.store.entered.wait(LIMIT_S) and run.view.record.state is RecordState.LOADING

    def forward() -> None:
        with run.cache.saving():
            torch.randn(64, 64, requires_grad=True).exp().sin()

    run.end(run.thread(forward))
    run.store.gate.set()
    run.end(reader)
    assert torch.equal(run.found[0], run.expected)


def test_two_threads_that_want_a_record_load_it_once(run: Run) -> None:
    first = run.thread(run.read)
    assert run.store.entered.wait(LIMIT_S)
    run.view.record.pending += 1  # of another view, so that it stays for the second
    second = run.thread(run.read)
    second.join(0.1)
    assert second.is_alive() and run.store.gets == 1
    run.store.gate.set()
    run.end(first, second)
    assert run.store.gets == 1 and all(torch.equal(one, run.expected) for one in run.found)
    run.view.record.pending -= 1


def test_a_load_that_fails_leaves_the_record_to_the_next(run: Run) -> None:
    run.store.fails = 1
    first = run.thread(run.read)
    assert run.store.entered.wait(LIMIT_S)
    second = run.thread(run.read)
    run.store.gate.set()
    run.end(first, second)
    assert isinstance(run.found[0], ActivationLostError) and torch.equal(run.found[1], run.expected)
    assert run.view.record.loading is None


def test_memory_that_runs_out_once_the_bytes_are_there_leaves_them_to_the_next(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load is tried again when the allocator has memory."""
    run.store.gate.set()
    run.cache.limit(1 << 20)
    residency, rooms = run.cache, [1 << 20, 0]
    make_room = residency.make_room

    def no_more(nbytes: int) -> None:
        if rooms and not rooms.pop(0):
            raise torch.OutOfMemoryError("CUDA out of memory")
        make_room(nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(residency, "make_room", no_more)
        run.read()
    assert rooms == []
    assert torch.equal(run.found[0], run.expected)


def test_what_another_thread_evicts_while_it_is_loaded_early_holds_up_nobody(run: Run) -> None:
    """It is away, and prefetched, as it is noted as loaded early; such bytes cannot be cancelled in host memory."""
    cache, record, others = run.cache, run.view.record, list[SavedView]()

    def pack(tensor: torch.Tensor) -> SavedView:
        others.append(cache.pack(tensor))
        return others[-1]

    with cache.saving(around=lambda hooks: (pack, hooks[1])):
        x = torch.randn(64, 64, requires_grad=True)
        graph = [(x * number).sin() for number in range(4)]
    run.store.gate.set()

    def load_early() -> None:
        with cache.lock:
            cache.add_early(record)
            assert cache.prefetch(record) and record in cache._ahead
            for one in others:
                cache.add_early(one.record)

    run.end(run.thread(load_early))
    run.read()
    assert torch.equal(run.found[0], run.expected) and len(graph) == 4
