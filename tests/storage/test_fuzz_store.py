"""A store under random work and random faults of device and drive: bytes are exact, nothing leaks, no lane dies."""

from __future__ import annotations

import random
import threading
import time
from itertools import product
from typing import Any, get_args

import pytest
import torch
from conftest import StoreFactory
from support.disks import until
from support.doubles import Accelerator, DeviceBackend, ScriptedBackend, wait_for_writes
from support.late_device import LateDevice
from support.stores import CPU, MIB, noise, nothing_is_held, put

from ds_tba.config import Compression
from ds_tba.errors import ActivationLostError, DsTbaError, StateError, TransferError
from ds_tba.storage.base import Refusal, Ticket
from ds_tba.storage.integrity import Codec
from ds_tba.storage.nvme import Lanes, NvmeStore
from ds_tba.storage.space import SwapSpace

KIB = 1 << 10
SIZES = (4 * KIB, 60_000, 128 * KIB, 300_000)
OPERATIONS = ("put", "put", "put", "get", "get", "prefetch", "prefetch", "cancel", "release", "settle")
FAULTS = (torch.OutOfMemoryError, MemoryError, RuntimeError)


class FaultyDevice(LateDevice):
    """Has no memory, or no event, for the part ``fails`` of those who ask for one."""

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

    def __init__(self, store: NvmeStore, device: FaultyDevice, seed: int, *, gives_back: bool = False) -> None:
        self._gives_back = gives_back
        self.exact: list[bool] = []
        self._store, self._device, self._chance = store, device, random.Random(seed)
        self._streams = [device.current_stream(), device.new_stream()]
        self._saved: list[tuple[Ticket, torch.Tensor]] = []

    def step(self) -> None:
        chance, device = self._chance, self._device
        device.fails = chance.choice((0.0, 0.0, 0.2))
        operation = chance.choice((*OPERATIONS, "give back") if self._gives_back else OPERATIONS)
        with device.on(chance.choice(self._streams)):
            try:
                if operation == "put":
                    self._put()
                elif operation == "settle":
                    self._store.settle()
                elif operation == "give back":
                    self._give_back()
                elif self._saved:
                    self._act(operation, chance.randrange(len(self._saved)))
            except DsTbaError:  # a bug, or closed
                raise
            except FAULTS:  # the user's program catches it, and goes on
                pass

    def _give_back(self) -> None:
        """Give all that is saved up now and then, and with it memory, lanes and files; take them again."""
        if self._chance.random() < 0.3:
            self.end()
        if self._store.give_back():
            self._device.fails = 0.0
            self._store.open()

    def _put(self) -> None:
        values = self._chance.choice((1, 16, 256))  # all alike, some for a codec, and none
        wanted = torch.randint(0, values, (self._chance.choice(SIZES),), dtype=torch.uint8)
        ticket = self._store.put(self._device.filled(wanted), wait=self._chance.random() < 0.5)
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


def made(make_store: StoreFactory, chance: random.Random, codec: Codec | None = None) -> tuple[NvmeStore, FaultyDevice]:
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
            raise TransferError("Input/output error")

    backends = (ScriptedBackend,) if codec else (ScriptedBackend, ScriptedBackend, DeviceBackend)
    backend = chance.choice(backends)(script)
    store = make_store(
        backend,
        staging_bytes=chance.choice((256, 512, 1024)) * KIB,
        swap_file_bytes=16 << 20,
        lanes=Lanes(2, 2),
        accelerator=device,
        paths=chance.choice((1, 2)),
        integrity=chance.choice(("sampled", "full")),
        codec=codec,
    )
    return store, device


class FailingCodec(Codec):
    """Fails now and then, or finds no memory: of each lane not again soon, because it tries a few times only."""

    def __init__(self, name: str, chance: random.Random) -> None:
        super().__init__(name)
        self._chance = chance
        self._well = threading.local()

    def _fails(self) -> bool:
        self._well.calls = getattr(self._well, "calls", 0) + 1
        fails = self._well.calls > 100 and self._chance.random() < 0.1
        self._well.calls *= not fails
        return fails

    def compress(self, data: torch.Tensor, into: torch.Tensor, item_bytes: int) -> int:
        if self._fails():
            raise self._chance.choice((MemoryError, TransferError))("in the codec")
        return super().compress(data, into, item_bytes)

    def decompress(self, packed: torch.Tensor, into: torch.Tensor) -> None:
        if self._fails():
            raise MemoryError("in the codec")
        super().decompress(packed, into)


@pytest.mark.parametrize(
    ("seed", "codec"), [*((seed, None) for seed in range(24)), *product(range(8), get_args(Compression))]
)
def test_whatever_fails_bytes_are_exact_and_nothing_is_left(
    make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch, seed: int, codec: str | None
) -> None:
    monkeypatch.setattr("ds_tba.storage.nvme.IDLE_LIMIT_S", 0.05)
    chance = random.Random(seed)
    store, device = made(make_store, chance, FailingCodec(codec, chance) if codec else None)
    worker = Worker(store, device, seed, gives_back=True)
    for _ in range(120):
        worker.step()
    lanes = [thread for path in store.paths for group in (path.reads, path.writes) for thread in group._threads]
    assert all(lane.is_alive() for lane in lanes)
    worker.end()
    device.synchronize()
    assert all(worker.exact), f"{worker.exact.count(False)} of {len(worker.exact)} are wrong"
    assert len(worker.exact) > 10 or any(path.failure for path in store.paths)
    nothing_is_held(store)
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
            after += store.closed
            try:
                worker.step()
            except StateError:
                assert store.closed
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
    nothing_is_held(store)
    device.end()


# ---- memory that runs out in a lane ---------------------------------------------------------------------------------


WORK = {
    "write": ("_write", "_end_write", "_end_work", "free_slot", "settle_copies"),
    "read": ("_read", "copy_in", "_end_work", "free_slot", "settle_copies"),
}


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("work", [f"{lane} {name}" for lane, names in WORK.items() for name in names])
def test_whatever_a_lane_fails_at_is_exact_or_lost_by_name(
    make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, work: str, late: bool
) -> None:
    """Memory that runs out in its bookkeeping: nobody hangs, the store takes no more, and says so once."""
    lane, name = work.split()
    device, struck, exact, lost = LateDevice(late_compute=True, longest_pause_s=0.0), list[str](), list[bool](), 0
    store, real = make_store(lanes=Lanes(1, 1), accelerator=device, staging_bytes=MIB), getattr(SwapSpace, name)

    def strike(*arguments: Any) -> Any:
        if struck or not threading.current_thread().name.startswith(f"ds_tba-{lane}"):
            return real(*arguments)
        struck.append(name)
        if late:
            real(*arguments)
        raise MemoryError

    monkeypatch.setattr(SwapSpace, name, strike)
    saved = []
    for size in SIZES:
        wanted = noise(size)
        ticket = store.put(data := device.filled(wanted), wait=True)
        if not isinstance(ticket, Refusal):
            saved.append((ticket, wanted))
    until(lambda: not store.writes or store.lane_error is not None, "the writes")
    store.prefetch(saved[0][0])
    for ticket, wanted in saved:
        try:
            found = store.get(ticket, CPU).data
            device.launch(lambda found, wanted=wanted: exact.append(torch.equal(found, wanted)), found)
        except ActivationLostError as error:
            assert "a lane failed (MemoryError" in str(error)
            lost += 1
        store.release(ticket)
    device.synchronize()
    assert struck and all(exact) and len(exact) + lost == len(saved)
    if name != "copy_in":  # which backward does where the lane has no memory for it
        until(lambda: len(caplog.messages) > 0, "the log")
        assert store.put(data, wait=True) is Refusal.PATH_FAILED
        (said,) = caplog.messages
        assert "a lane failed (MemoryError); from here on activations stay in memory instead" in said
    store.close()
    device.end()
    assert store.put(data, wait=True) is Refusal.CLOSED and store.ring._memory is None


def test_a_lane_whose_device_is_broken_works_and_ends(make_store: StoreFactory) -> None:
    class Broken(Accelerator):
        def enter_thread(self) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    store = make_store(lanes=Lanes(1, 1), accelerator=Broken())
    ticket = put(store, data := noise(MIB), wait=True)
    wait_for_writes(store)
    assert torch.equal(store.get(ticket, CPU).data, data)
    assert store._end()
