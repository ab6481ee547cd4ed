"""A store under random work and random faults of device and drive: bytes are exact, nothing leaks, no lane dies."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
from conftest import StoreFactory
from support.disks import until
from support.doubles import DeviceBackend, ScriptedBackend
from support.late_device import LateDevice

from ds_tba.errors import DsTbaError, StateError, TransferError
from ds_tba.storage.base import Refusal, Ticket
from ds_tba.storage.nvme import Lanes, NvmeStore

KIB = 1 << 10
CPU = torch.device("cpu")
SIZES = (4 * KIB, 60_000, 128 * KIB, 300_000)
OPERATIONS = ("put", "put", "put", "get", "get", "prefetch", "prefetch", "cancel", "release", "settle")
FAULTS = (torch.OutOfMemoryError, MemoryError, RuntimeError)


class FaultyDevice(LateDevice):
    """Has no memory, or no event, for a part of those who ask for one.

    Attributes:
        fails: that part.
    """

    def __init__(self, chance: random.Random) -> None:
        super().__init__(late_compute=True, longest_pause_s=0.001)
        self.fails = 0.0
        self._chance = chance

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self._chance.random() < self.fails:
            raise self._chance.choice(FAULTS)("CUDA out of memory")
        return super().allocate(nbytes, device)

    def new_event(self) -> Any:
        if self._chance.random() < self.fails / 4:
            raise RuntimeError("CUDA error: out of memory")
        return super().new_event()


class Worker:
    """Puts, gets and drops tensors at random, on any of the device's streams, and looks at all bytes that come back."""

    def __init__(self, store: NvmeStore, device: FaultyDevice, seed: int) -> None:
        self.exact: list[bool] = []
        self._store, self._device, self._chance = store, device, random.Random(seed)
        self._streams = [device.current_stream(), device.new_stream()]
        self._saved: list[tuple[Ticket, torch.Tensor]] = []

    def step(self) -> None:
        chance, device = self._chance, self._device
        device.fails = chance.choice((0.0, 0.0, 0.2))
        operation = chance.choice(OPERATIONS)
        with device.on(chance.choice(self._streams)):
            try:
                if operation == "put":
                    self._put()
                elif operation == "settle":
                    self._store.settle()
                elif self._saved:
                    self._act(operation, chance.randrange(len(self._saved)))
            except DsTbaError:  # a bug, or closed
                raise
            except FAULTS:  # the user's program catches it, and goes on
                pass

    def _put(self) -> None:
        wanted = torch.randint(0, 256, (self._chance.choice(SIZES),), dtype=torch.uint8)
        data = self._device.allocate(wanted.numel(), CPU)
        self._device.launch(lambda to: to.copy_(wanted), data)
        ticket = self._store.put(data, wait=self._chance.random() < 0.5)
        if not isinstance(ticket, Refusal):
            self._saved.append((ticket, wanted))

    def _act(self, operation: str, index: int) -> None:
        ticket, wanted = self._saved[index]
        if operation == "get":
            loaded = self._store.get(ticket, CPU)  # type: ignore[arg-type]
            self._device.launch(lambda found: self.exact.append(torch.equal(found, wanted)), loaded.data)
            if loaded.stored:
                return
        elif operation != "release":
            (self._store.prefetch if operation == "prefetch" else self._store.cancel_prefetch)(ticket)  # type: ignore[arg-type]
            return
        self._store.release(ticket)  # type: ignore[arg-type]
        del self._saved[index]

    def end(self, *, gets: bool = True) -> None:
        """Get all that is left, without faults, and give it up."""
        self._device.fails = 0.0
        while self._saved:
            if gets:
                self._act("get", len(self._saved) - 1)
            if self._saved:
                self._act("release", len(self._saved) - 1)


def made(make_store: StoreFactory, chance: random.Random) -> tuple[NvmeStore, FaultyDevice]:
    device = FaultyDevice(chance)
    pause_s = chance.choice((0.0, 0.002))
    writes_fail, reads_fail = chance.choice((0.0, 0.05)), chance.choice((0.0, 0.1))
    reads = threading.local()  # of each lane, since one has failed: a read that fails is tried once more

    def script(verb: str, _number: int) -> None:
        if chance.random() < 0.5:
            time.sleep(pause_s)
        reads.well = getattr(reads, "well", 0) + (verb == "read")
        is_read_to_fail = verb == "read" and reads.well > 10 and chance.random() < reads_fail
        if is_read_to_fail or (verb == "write" and chance.random() < writes_fail):
            reads.well = 0
            raise TransferError("Input/output error", 5)

    backend = chance.choice((ScriptedBackend, ScriptedBackend, DeviceBackend))(script)
    store = make_store(
        backend,
        staging_bytes=chance.choice((256, 512, 1024)) * KIB,
        swap_file_bytes=16 << 20,
        lanes=Lanes(2, 2),
        accelerator=device,
        paths=chance.choice((1, 2)),
        integrity=chance.choice(("sampled", "full")),
    )
    return store, device


def is_at_rest(store: NvmeStore) -> bool:
    store.settle()
    ahead, space = store.space.read_ahead, store.space
    counts = (
        ahead.prefetched_bytes,
        ahead.early_bytes,
        space.writes_under_way,
        len(space.copying),
        store.ring.slots.used_bytes,
    )
    return not any(counts) and not any(path.extents.used_bytes for path in store.paths)


@pytest.mark.parametrize("seed", range(24))
def test_whatever_fails_bytes_are_exact_and_nothing_is_left(make_store: StoreFactory, seed: int) -> None:
    store, device = made(make_store, random.Random(seed))
    worker = Worker(store, device, seed)
    for _ in range(120):
        worker.step()
    lanes = [thread for path in store.paths for group in (path.reads, path.writes) for thread in group._threads]
    assert all(lane.is_alive() for lane in lanes)
    worker.end()
    device.synchronize()
    assert all(worker.exact), f"{worker.exact.count(False)} of {len(worker.exact)} are wrong"
    assert len(worker.exact) > 10 or any(path.failure for path in store.paths)
    until(lambda: is_at_rest(store), "nothing is held")
    store.close()
    device.end()


@pytest.mark.parametrize("seed", range(12))
def test_a_store_that_another_thread_closes_hands_out_no_wrong_byte(make_store: StoreFactory, seed: int) -> None:
    chance = random.Random(seed)
    store, device = made(make_store, chance)
    workers = [Worker(store, device, 2 * seed + number) for number in range(2)]

    def work(worker: Worker) -> None:
        after = 0
        while after < 25:
            after += store.space.closed
            try:
                worker.step()
            except StateError:
                assert store.space.closed
        worker.end(gets=False)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    time.sleep(chance.random() * 0.05)
    store.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    device.synchronize()
    assert all(exact for worker in workers for exact in worker.exact)
    until(lambda: is_at_rest(store), "nothing is held")
    device.end()
