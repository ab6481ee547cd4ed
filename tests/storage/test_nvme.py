"""The NVMe store: the way of a ticket, bounds, forwarding, parts, and what happens when a drive fails."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import StoreFactory
from support.disks import until
from support.doubles import (
    Accelerator,
    DeviceBackend,
    EventAccelerator,
    Gate,
    ScriptedBackend,
    fails,
    in_turn,
    part_of,
    raising,
    slow,
    wait_for_writes,
)
from support.stores import CPU, MIB, noise, nothing_is_held, put, slots_in_use, stored

from ds_tba.errors import ActivationCorruptionError, ActivationLostError, StateError
from ds_tba.stats import PathMeter
from ds_tba.storage import path as swap_file
from ds_tba.storage.backends import IoBackend, IoHandle, PosixBackend, PosixHandle
from ds_tba.storage.base import Refusal
from ds_tba.storage.nvme import Lanes
from ds_tba.storage.space import PartState


def test_reads_are_bounded_and_overtake_writes_and_the_unwanted_are_given_back(make_store: StoreFactory) -> None:
    gate = Gate()
    store = make_store(ScriptedBackend(gate), staging_bytes=8 * MIB, lanes=Lanes(1, 1))
    gate.opened.set()
    tickets = [stored(store, last := noise(MIB)) for _ in range(10)]
    gate.opened.clear()
    writes = [put(store, noise(MIB)) for _ in range(2)]
    assert [store.prefetch(ticket) for ticket in tickets] == [True] * 4 + [False] * 6  # half, beside writes
    assert torch.equal(store.get(tickets[-1], CPU).data, last)  # while no write can end
    assert all(part_of(write).state in (PartState.QUEUED, PartState.WRITING) for write in writes)
    gate.opened.set()
    until(lambda: all(part_of(write).state is PartState.STORED for write in writes), "the writes")
    assert [store.prefetch(ticket) for ticket in tickets] == [True] * 8 + [False] * 2  # all of staging
    for ticket in [*tickets, *writes]:
        store.release(ticket)
    nothing_is_held(store)


@pytest.mark.parametrize("accelerator", [Accelerator, EventAccelerator], ids=["synchronous", "asynchronous"])
def test_full_staging_refuses_instead_of_waiting(make_store: StoreFactory, accelerator: type[Accelerator]) -> None:
    gate = Gate()
    store = make_store(ScriptedBackend(gate), staging_bytes=4 * MIB, accelerator=accelerator())
    tickets = [put(store, noise(MIB)) for _ in range(4)]
    for _ in range(2):
        assert store.put(noise(MIB), wait=False) is Refusal.STAGING_FULL
    assert store.put(noise(5 * MIB), wait=False) is Refusal.STAGING_FULL
    gate.opened.set()
    until(lambda: slots_in_use(store) == 0, "the writes to drain")
    assert all(part_of(ticket).state is PartState.STORED for ticket in tickets)
    assert store.ring.slots.peak_used_bytes == 4 * MIB


def test_waiting_for_staging_waits_for_writes_and_gives_up_what_was_read_ahead(make_store: StoreFactory) -> None:
    store = make_store(ScriptedBackend(slow(0.02)), staging_bytes=4 * MIB)
    store.part_bytes = store.ring.slots.capacity_bytes  # not cut
    pieces = [noise(MIB) for _ in range(12)]  # made beforehand, or making them might take as long as the writes
    tickets = [put(store, piece, wait=True) for piece in pieces]
    until(lambda: all(part_of(ticket).state is PartState.STORED for ticket in tickets), "the writes")
    assert store.stats.stall_s > 0
    assert all(store.prefetch(ticket) for ticket in tickets[:2])
    until(lambda: all(part_of(ticket).state is PartState.LOADED for ticket in tickets[:2]), "the reads")
    assert store.put(noise(3 * MIB), wait=False) is Refusal.STAGING_FULL
    larger = noise(3 * MIB)
    put(store, larger, wait=True)
    # The one that was asked for last had to go; its bytes are in the file.
    assert [part_of(ticket).state for ticket in tickets[:2]] == [PartState.LOADED, PartState.STORED]
    assert all(torch.equal(store.get(ticket, CPU).data, piece) for ticket, piece in zip(tickets, pieces, strict=True))


def test_the_limit_of_the_swap_file_means_keep(make_store: StoreFactory, caplog: pytest.LogCaptureFixture) -> None:
    store = make_store(swap_file_bytes=2 * MIB)
    tickets = [put(store, noise(MIB)) for _ in range(2)]
    for _ in range(2):
        assert store.put(noise(MIB), wait=True) is Refusal.NO_SPACE
    (said,) = caplog.messages
    assert "has reached its limit of 2.00 MiB" in said and "io.swap_file_bytes" in said
    store.release(tickets[0])
    until(lambda: store.paths[0].extents.used_bytes == MIB, "the release")
    put(store, noise(MIB))


def test_paths_hold_bytes_in_proportion_to_their_bandwidth(make_store: StoreFactory) -> None:
    gate = Gate()
    store = make_store(ScriptedBackend(gate), paths=3, staging_bytes=64 * MIB)
    for path, factor in zip(store.paths, (1, 2, 5), strict=True):
        for kind in (path.meter.writes, path.meter.reads):
            kind.recent.add(1 << 40, 1.0, 1.0 / factor)
    for _ in range(32):
        put(store, noise(MIB))
    assert [path.extents.used_bytes // MIB for path in store.paths] == [4, 8, 20]
    gate.opened.set()


# ---- faults ---------------------------------------------------------------------------------------------------------


def test_a_failed_write_keeps_the_bytes_and_says_so(make_store: StoreFactory, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    drive = ScriptedBackend(in_turn(gate, fails("write", first=1)))
    store = make_store(drive, lanes=Lanes(1, 1), staging_bytes=6 * MIB)
    pieces = [noise(MIB) for _ in range(6)]
    tickets = [put(store, piece) for piece in pieces]
    gate.opened.set()
    until(lambda: not store.writes, "the writes")
    assert [part_of(ticket).state for ticket in tickets] == [PartState.STORED] + [PartState.RESCUED] * 5
    for ticket, piece in zip(tickets, pieces, strict=True):
        assert torch.equal(store.get(ticket, CPU).data, piece)
    # Also where what could not be written leaves no room in staging.
    assert [store.put(noise(2 * MIB), wait=wait) for wait in (False, True)] == [Refusal.PATH_FAILED] * 2
    assert len(caplog.records) == 1 and "stay in memory" in caplog.text
    for ticket in tickets:
        store.release(ticket)
    nothing_is_held(store)


def test_a_path_that_fails_leaves_the_set(make_store: StoreFactory) -> None:
    backend = ScriptedBackend(fails("write", first=0, last=0))
    store = make_store(backend, lanes=Lanes(1, 1), paths=2)
    first = put(store, noise(MIB))
    until(lambda: part_of(first).state is PartState.RESCUED, "the failure")
    broken = part_of(first).path
    later = [stored(store, noise(MIB)) for _ in range(4)]
    assert all(part_of(ticket).path is not broken for ticket in later)


def test_bytes_that_came_wrong_are_read_once_more(make_store: StoreFactory, caplog: pytest.LogCaptureFixture) -> None:
    store = make_store(ScriptedBackend(lambda verb, number: "drop" if (verb, number) == ("read", 0) else None))
    data = noise(MIB)
    ticket = stored(store, data)
    store.ring._memory.random_(0, 256)  # type: ignore[union-attr]  # or the slot would still hold the right bytes
    assert torch.equal(store.get(ticket, CPU).data, data)
    assert caplog.text.count("bytes read back are not the bytes written; trying once more") == 1


def test_bytes_that_cannot_be_read_back_raise_with_the_place(make_store: StoreFactory) -> None:
    store = make_store(ScriptedBackend(fails("read")))
    ticket = stored(store, noise(MIB))
    for _ in range(2):
        with pytest.raises(ActivationLostError, match=r"offset 0, 1048576 bytes.*Input/output error.*checkpoint"):
            store.get(ticket, CPU)
        assert part_of(ticket).error is not None
    store.release(ticket)
    nothing_is_held(store)


@pytest.mark.parametrize("loss", ["drop", "half"])
@pytest.mark.parametrize("integrity", ["sampled", "full"])
@pytest.mark.parametrize("verb", ["write", "read"])
@pytest.mark.parametrize("backend", [ScriptedBackend, DeviceBackend], ids=["from host memory", "from the device"])
def test_a_lost_or_short_transfer_is_seen(
    make_store: StoreFactory, loss: str, integrity: str, verb: str, backend: type[ScriptedBackend]
) -> None:
    device = EventAccelerator() if backend is DeviceBackend else Accelerator()
    drive = backend(lambda what, number: loss if what == verb else None)
    store = make_store(drive, integrity=integrity, accelerator=device)
    ticket = stored(store, noise(8 * MIB))
    store.ring._memory.random_(0, 256)  # type: ignore[union-attr]  # or the slot would still hold the right bytes
    said = r"offset \d+ have checksum 0x[0-9a-f]{16}, expected 0x[0-9a-f]{16}"
    with pytest.raises(ActivationCorruptionError, match=said):
        store.get(ticket, CPU)


def test_what_backward_holds_is_its_own(make_store: StoreFactory, backend: IoBackend) -> None:
    """It takes no staging, outlives the store, is read by a forked child, and may be resized."""
    store = make_store(backend, staging_bytes=4 * MIB)
    pieces = [noise(MIB) for _ in range(6)]
    held = [store.get(stored(store, piece), CPU).data for piece in pieces]
    assert store.ring.slots.used_bytes == 0
    store.close()
    assert store.ring._memory is None
    wanted = pieces[0].numpy().tobytes()
    child = os.fork()
    if child == 0:
        os._exit(held[0].numpy().tobytes() != wanted)
    assert os.waitpid(child, 0)[1] == 0
    held[0].untyped_storage().resize_(2 * MIB)
    assert all(torch.equal(one, piece) for one, piece in zip(held, pieces, strict=True))


def test_a_handle_that_cannot_be_had_leaves_none_open(make_store: StoreFactory) -> None:
    """kvikio's and gds' hold descriptors, and a name of the swap file."""
    opened, closed = list[IoHandle](), list[IoHandle]()

    class CountedHandle(PosixHandle):
        def close(self) -> None:
            closed.append(self)

    class FewHandles(PosixBackend):
        def open_handle(self, fd: int) -> IoHandle:
            if len(opened) == 3:
                raise OSError(errno.EAGAIN, "fs.aio-max-nr reached")
            opened.append(CountedHandle(fd))
            return opened[-1]

    with pytest.raises(OSError, match=r"aio-max-nr"):
        make_store(FewHandles())
    assert opened == closed != []


def test_a_slot_is_not_used_again_while_the_device_still_copies_into_it(make_store: StoreFactory) -> None:
    gate, copied = Gate(), threading.Event()
    store = make_store(ScriptedBackend(gate), lanes=Lanes(1, 1), accelerator=EventAccelerator(copied))
    for ticket in [put(store, noise(MIB)) for _ in range(2)]:
        store.release(ticket)
    assert store.ring.slots.used_bytes == 2 * MIB
    gate.opened.set()
    copied.set()
    nothing_is_held(store)
    assert store.paths[0].meter.writes.drive_bytes <= MIB


@pytest.mark.parametrize("who", ["forward", "backward"])
def test_a_drive_that_does_not_answer_is_told_of_now_and_then(
    make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, who: str
) -> None:
    monkeypatch.setattr("ds_tba.storage.nvme.SLOW_WAIT_S", 0.05)
    monkeypatch.setattr("ds_tba.storage.nvme.LANE_CHECK_S", 0.01)
    gate = Gate("write" if who == "forward" else "read")
    store = make_store(ScriptedBackend(gate), staging_bytes=4 * MIB, lanes=Lanes(1, 1))
    if who == "forward":
        waiting = threading.Thread(target=store.put, args=(noise(5 * MIB),), kwargs={"wait": True})
    else:
        waiting = threading.Thread(target=store.get, args=(stored(store, noise(MIB)), CPU))
    waiting.start()
    until(lambda: len(caplog.messages) > 0, "the warning")
    time.sleep(0.2)
    (said,) = caplog.messages  # no other for a minute
    assert said.startswith(f"{who} has waited 0 s for the drive of {store.paths[0].file.directory}, and waits on")
    assert "dmesg" in said and "nvme_path" in said
    store._quiet_until_s = 0.0  # which is over
    until(lambda: len(caplog.messages) == 2, "another warning")
    gate.opened.set()
    waiting.join(30)
    assert not waiting.is_alive()


# ---- ending ---------------------------------------------------------------------------------------------------------


def test_a_store_that_nobody_uses_has_no_lanes_staging_or_space(make_store: StoreFactory, backend: IoBackend) -> None:
    before, store, data = threading.active_count(), make_store(backend), noise(MIB)
    assert threading.active_count() == before and store.ring._memory is None
    for _ in range(2):
        ticket = stored(store, data.clone())
        assert threading.active_count() == before + 4 and not store.give_back()  # there is something in its care
        assert torch.equal(store.get(ticket, CPU).data, data)
        store.release(ticket)
        assert store.give_back()
        assert threading.active_count() == before and store.ring._memory is None
        assert all(path.file.fd == -1 and path.file.size_bytes == 0 for path in store.paths)
    stored(store, data)
    store.close()
    assert threading.active_count() == before and all(path.file.fd == -1 for path in store.paths)


def test_what_cannot_be_had_at_a_put_is_told_once_and_tensors_stay_in_memory(
    make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, data = make_store(), noise(MIB)
    start, before = threading.Thread.start, threading.active_count()

    def start_few(thread: threading.Thread) -> None:
        if threading.active_count() > before + 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_few)
        assert [store.put(data, wait=True) for _ in range(2)] == [Refusal.PATH_FAILED] * 2
    (said,) = caplog.messages
    assert "cannot be opened (can't start new thread); from here on activations stay in memory instead" in said
    assert store.put(data, wait=True) is Refusal.PATH_FAILED and store.ring._memory is None
    assert threading.active_count() == before


def test_a_path_that_cannot_be_reopened_fails_alone(make_store: StoreFactory, caplog: pytest.LogCaptureFixture) -> None:
    store = make_store(paths=2)
    store.release(stored(store, noise(MIB)))
    assert store.give_back()
    dead, alive = (path.file.directory for path in store.paths)
    dead.rmdir()
    assert [part_of(stored(store, noise(MIB))).path.file.directory for _ in range(3)] == [alive] * 3
    (said,) = caplog.messages
    assert said.startswith(f"{dead}: what is needed cannot be opened (") and "No such file or directory" in said


@pytest.mark.parametrize("verb", ["write", "read"])
def test_what_is_given_up_under_a_lane_goes_when_the_lane_is_done(make_store: StoreFactory, verb: str) -> None:
    """Earlier, and the drive would move the bytes of the slot's next ticket; but it is ahead no more."""
    gate = Gate(verb)
    store = make_store(ScriptedBackend(gate), lanes=Lanes(1, 1))
    ticket = put(store, noise(MIB)) if verb == "write" else stored(store, noise(MIB))
    assert store.prefetch(ticket)
    gate.arrived.acquire()
    ahead = store.read_ahead
    assert ahead.prefetched_bytes + ahead.unwritten_bytes == MIB
    store.release(ticket)
    assert ahead.prefetched_bytes + ahead.unwritten_bytes == 0
    part = part_of(ticket)
    assert part.state is PartState.ABANDONED and part.slot is not None and slots_in_use(store) == MIB
    with pytest.raises(StateError, match="given up"):
        store.get(ticket, CPU)
    gate.opened.set()
    until(lambda: part_of(ticket).state is PartState.RELEASED, "the lane")
    nothing_is_held(store)


def test_checksums_take_no_memory_that_a_device_lacks(
    make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(DeviceBackend(), accelerator=EventAccelerator(), staging_bytes=8 * MIB)
    data = noise(2 * MIB)
    monkeypatch.setattr(torch, "cat", raising(torch.OutOfMemoryError("CUDA out of memory")))
    ticket = stored(store, data)
    assert torch.equal(store.get(ticket, CPU).data, data)
    assert store.paths[0].failure is None


def test_parts_find_the_room_that_copies_have_left(make_store: StoreFactory) -> None:
    store = make_store(accelerator=EventAccelerator(), staging_bytes=4 * MIB)
    for _ in range(8):
        ticket = store.put(noise(7 * MIB // 2), wait=False)
        assert not isinstance(ticket, Refusal)
        wait_for_writes(store)
        store.get(ticket, CPU)
        store.release(ticket)


def test_one_storage_is_spread_over_all_paths(make_store: StoreFactory) -> None:
    store = make_store(paths=3, staging_bytes=8 * MIB)
    for path in store.paths:
        path.meter = PathMeter(2, 2, lambda: 0.0)  # none is faster than another
    ticket = put(store, noise(24 * MIB), wait=True)
    assert [path.extents.used_bytes for path in store.paths] == [8 * MIB] * 3
    assert len(ticket.parts) == 12


def test_a_swap_file_without_room_gives_the_parts_back(make_store: StoreFactory) -> None:
    store = make_store(staging_bytes=4 * MIB, swap_file_bytes=6 * MIB)
    assert store.put(noise(8 * MIB), wait=True) is Refusal.NO_SPACE
    nothing_is_held(store)
    assert (store.stats.offloaded_bytes, store.stats.cancelled_bytes) == (0, 0)  # no part of what is refused counts
    data = noise(5 * MIB)
    ticket = put(store, data.clone(), wait=True)
    assert torch.equal(store.get(ticket, CPU).data, data) and store.stats.offloaded_bytes == 5 * MIB


# ---- calls that hang ------------------------------------------------------------------------------------------------


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, *threads: threading.Thread) -> Iterator[None]:
    """Begin within a call that the first of these threads makes, and which goes on at the end."""
    hangs, goes_on, real = threading.Event(), threading.Event(), getattr(owner, name)

    def hung(*arguments: Any) -> Any:
        hangs.set()
        assert goes_on.wait(30)
        return real(*arguments)

    monkeypatch.setattr(owner, name, hung)
    threads[0].start()
    try:
        assert hangs.wait(30)
        yield
    finally:
        goes_on.set()
        for thread in threads:
            thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


def test_closing_waits_for_copies_of_other_threads(make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(staging_bytes=4 * MIB)
    putting = threading.Thread(target=store.put, args=(noise(MIB),), kwargs={"wait": True})
    closing = threading.Thread(target=store.close)
    with hanging(monkeypatch, store.ring.accelerator, "copy", putting, closing):
        closing.start()
        time.sleep(0.1)
        assert closing.is_alive() and store.ring._memory is not None
    assert store.ring._memory is None and store.paths[0].meter.writes.drive_bytes == MIB


@pytest.mark.parametrize("end", ["the drive answers", "closed", "interrupted"])
def test_a_put_for_which_the_file_has_to_grow_keeps_no_other_hook_waiting_and_may_come_to_nothing(
    make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Closing frees staging, and ends the lanes: a put that found room afterwards would copy into freed memory."""
    monkeypatch.setattr(swap_file, "GROW_STEP_BYTES", MIB)
    store, got = make_store(lanes=Lanes(1, 1), staging_bytes=4 * MIB), list[object]()
    before = [stored(store, noise(MIB)) for _ in range(4)]
    growing = threading.Thread(target=lambda: got.append(store.put(noise(MIB), wait=False)))
    closing = threading.Thread(target=store.close)
    if end == "interrupted":
        monkeypatch.setattr(os, "posix_fallocate", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            store.put(noise(MIB), wait=False)
    elif end == "closed":
        with hanging(monkeypatch, os, "posix_fallocate", growing, closing):
            closing.start()
            until(lambda: store.closed, "the end")
        assert got == [Refusal.CLOSED]
    else:
        with hanging(monkeypatch, os, "posix_fallocate", growing):
            assert store.get(before[0], CPU).data.numel() == MIB
            assert growing.is_alive()
        assert not isinstance(got[0], Refusal)
        store.release(got[0])  # type: ignore[arg-type]
    until(lambda: slots_in_use(store) == 0 and store.paths[0].extents.used_bytes == 4 * MIB, "what the put has taken")


@pytest.mark.parametrize("end", ["give_back", "close"])
def test_no_lock_is_held_while_space_goes(make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    store = make_store()
    store.release(put(store, noise(MIB)))
    with hanging(monkeypatch, os, "ftruncate", threading.Thread(target=getattr(store, end))):
        assert store.lock.acquire(timeout=5)
        store.lock.release()
