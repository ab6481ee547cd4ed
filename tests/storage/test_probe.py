"""The first measurement of the paths: its phases, bounds, rates, and what it leaves."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable

import numpy
import pytest
import torch
from conftest import Alarm, AlarmError, StoreFactory
from support.disks import until
from support.doubles import CpuAccelerator, Gate, ScriptedBackend, fails, wait_for_writes

from ds_tba.errors import PathError
from ds_tba.plan.rates import Rates
from ds_tba.stats import PathMeter
from ds_tba.storage import probe as probe_module
from ds_tba.storage.backends.base import IoBackend, IoHandle
from ds_tba.storage.backends.posix import PosixBackend
from ds_tba.storage.codec import Codec
from ds_tba.storage.nvme import Lanes, NvmeStore
from ds_tba.storage.path import LaneGroup, Task
from ds_tba.storage.probe import LARGEST_REQUEST_BYTES, PHASE_BYTES, REGION_BYTES, DriveProbe, measure_drives
from ds_tba.storage.spans import SpanAllocator

MIB = 1 << 20


class SlowDrive(PosixBackend):
    """Moves nothing, and has a clock of its own: one request after the other, at the rate of its verb."""

    def __init__(self, write_bytes_per_s: float, read_bytes_per_s: float) -> None:
        self._s_per_byte = {"write": 1 / write_bytes_per_s, "read": 1 / read_bytes_per_s}
        self._lock = threading.Lock()
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def open_handle(self, fd: int) -> IoHandle:
        return _Head(self)

    def serve(self, verb: str, nbytes: int) -> None:
        with self._lock:
            self.now_s += nbytes * self._s_per_byte[verb]


class _Head(IoHandle):
    def __init__(self, drive: SlowDrive) -> None:
        self._drive = drive

    def write(self, data: torch.Tensor, offset: int) -> None:
        self._drive.serve("write", data.numel())

    def read(self, data: torch.Tensor, offset: int) -> None:
        self._drive.serve("read", data.numel())


def with_room(store: NvmeStore, nbytes: int = 64 * MIB) -> NvmeStore:
    for path in store.paths:
        path.file.reserve_first(nbytes)
        path.extents.grow(path.file.size_bytes)
    return store


def nothing_is_held(store: NvmeStore) -> bool:
    return store.ring.slots.used_bytes == 0 and all(path.extents.used_bytes == 0 for path in store.paths)


@pytest.mark.parametrize("read_part", [1.0, 0.25])
@pytest.mark.parametrize("write_rate", [1e7, 1e8, 5e9])
def test_it_finds_the_rates(
    make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch, write_rate: float, read_part: float
) -> None:
    """Without the last phase, in which this drive serves its lanes in an order of chance."""
    monkeypatch.setattr(probe_module, "PHASES", probe_module.PHASES[:2])
    drive = SlowDrive(write_rate, write_rate * read_part)
    store = with_room(make_store(drive, lanes=Lanes(1, 1), staging_bytes=64 * MIB))
    (path,) = store.paths
    path.meter = PathMeter(1, 1, drive)
    measure_drives(store, store.io, drive)
    assert path.meter.writes.alone.bytes_per_s == pytest.approx(write_rate)
    assert path.meter.reads.alone.bytes_per_s == pytest.approx(write_rate * read_part)
    assert not path.meter.writes.concurrent.is_known and not path.meter.reads.concurrent.is_known


@pytest.mark.parametrize("read_part", [1.0, 0.25])
@pytest.mark.parametrize("write_rate", [1e7, 1e8, 5e9])
def test_its_time_and_its_bytes_are_bounded(make_store: StoreFactory, write_rate: float, read_part: float) -> None:
    drive = SlowDrive(write_rate, write_rate * read_part)
    store = with_room(make_store(drive, lanes=Lanes(1, 1), staging_bytes=64 * MIB))
    (path,) = store.paths
    path.meter = PathMeter(1, 1, drive)
    measure_drives(store, store.io, drive)
    assert drive.now_s < (2.2 if write_rate < 1e9 else 0.3)
    assert 0 < path.probe_bytes <= REGION_BYTES + 2 * PHASE_BYTES + 2 * LARGEST_REQUEST_BYTES
    assert path.written_bytes == path.probe_bytes
    assert store.stats.written_bytes == store.stats.offloaded_bytes == 0
    assert nothing_is_held(store)


class Phases:
    """Knows how often the lanes met."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = -1
        real = threading.Barrier

        def barrier(parties: int, action: Callable[[], None] = lambda: None) -> threading.Barrier:
            return real(parties, action=lambda: (action(), self._next())[1])

        monkeypatch.setattr(probe_module.threading, "Barrier", barrier)

    def _next(self) -> None:
        self.number += 1


PREPARE, WRITE, READ, BOTH = range(4)


def test_every_lane_works_at_the_same_time_and_each_kind_alone_and_beside(
    make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first requests of a phase wait for those of all its lanes, of both paths."""
    meeting = {WRITE: threading.Barrier(4), READ: threading.Barrier(4), BOTH: threading.Barrier(8)}
    phases = Phases(monkeypatch)
    met: dict[int, set[int]] = {}
    verbs: dict[int, set[str]] = {}
    lock = threading.Lock()

    def script(verb: str, number: int) -> None:
        phase, lane = phases.number, threading.get_ident()
        with lock:
            verbs.setdefault(phase, set()).add(verb)
            is_first = lane not in met.setdefault(phase, set())
            met[phase].add(lane)
        if is_first and phase in meeting:
            meeting[phase].wait(30)

    store = make_store(ScriptedBackend(script), paths=2)  # without room, so that nothing is measured
    measure_drives(with_room(store), store.io)
    assert verbs == {PREPARE: {"write"}, WRITE: {"write"}, READ: {"read"}, BOTH: {"write", "read"}}
    assert [len(met[phase]) for phase in (PREPARE, WRITE, READ, BOTH)] == [8, 4, 4, 8]
    for path in store.paths:
        row = path.bandwidth()
        assert all(row[key] > 0 for key in row if key.endswith("bytes_per_s"))
    assert nothing_is_held(store)


@pytest.mark.parametrize("verb", ["write", "read"])
@pytest.mark.parametrize("first", [0, 5, 12])
def test_a_failed_request_is_refused_with_the_path_and_nobody_waits_for_ever(
    make_store: StoreFactory, verb: str, first: int
) -> None:
    store = with_room(make_store(ScriptedBackend(fails(verb, first=first))))
    with pytest.raises(PathError, match=rf"nvme_path {store.paths[0].file.directory}: {verb} failed.*dmesg"):
        measure_drives(store, store.io)
    assert nothing_is_held(store)
    assert store.paths[0].failure is None


def test_where_a_handler_ends_the_wait_the_lanes_give_back_what_they_hold(
    make_store: StoreFactory, alarm: Alarm
) -> None:
    store = with_room(make_store(ScriptedBackend(lambda *_: time.sleep(0.05))))
    with pytest.raises(AlarmError):
        alarm(0.2)
        measure_drives(store, store.io)
    assert not nothing_is_held(store)  # they are at work still
    until(lambda: nothing_is_held(store), "lanes hold nothing")
    measure_drives(store, store.io)
    assert nothing_is_held(store)


def test_where_a_handler_comes_as_lanes_begin_none_waits_for_the_others(
    make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = with_room(make_store())
    put = LaneGroup.put

    def interrupted(group: LaneGroup, task: Task) -> None:
        put(group, task)
        if group is store.paths[0].reads:
            raise AlarmError

    with monkeypatch.context() as early, pytest.raises(AlarmError):
        early.setattr(LaneGroup, "put", interrupted)
        measure_drives(store, store.io)
    assert store._stop_lanes()


def test_a_drive_that_does_not_answer_while_it_is_measured_is_named(
    make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ds_tba.storage.space.SLOW_WAIT_S", 0.05)
    monkeypatch.setattr(probe_module, "LANE_CHECK_S", 0.01)
    gate = Gate()
    store = with_room(make_store(ScriptedBackend(gate)))
    measuring = threading.Thread(target=measure_drives, args=(store, store.io))
    measuring.start()
    until(lambda: len(caplog.messages) > 0, "the warning")
    gate.opened.set()
    measuring.join(30)
    (said,) = caplog.messages
    assert said.startswith(f"the measurement of drives has waited 0 s for the drive of {store.paths[0].file.directory}")


def test_it_works_with_every_backend_and_what_was_stored_before_is_left_alone(
    make_store: StoreFactory, backend: IoBackend
) -> None:
    store = with_room(make_store(backend))
    data = torch.randint(0, 256, (MIB,), dtype=torch.uint8)
    ticket = store.put(data, wait=True)
    wait_for_writes(store)
    measure_drives(store, store.io)
    assert torch.equal(store.get(ticket, torch.device("cpu")).data, data)  # type: ignore[arg-type]
    (found,) = Rates(DriveProbe(store, store.io), CpuAccelerator(), MIB).resources().paths
    assert 0 < found.write_beside_read_bytes_per_s <= found.write_bytes_per_s
    assert 0 < found.read_beside_write_bytes_per_s <= found.read_bytes_per_s


def in_crumbs(spans: SpanAllocator) -> int:
    """Leave eight pages free, none beside another; the bytes in use."""
    crumbs = [spans.allocate(4096) for _ in range(16)]
    spans.allocate(spans.capacity_bytes - spans.used_bytes)
    for crumb in crumbs[::2]:
        spans.free(crumb)  # type: ignore[arg-type]
    return spans.used_bytes


@pytest.mark.parametrize("codec", [None, "lz4"])
@pytest.mark.parametrize("where", ["staging", "full staging", "file"])
def test_room_in_crumbs_is_given_back_and_nothing_is_measured(
    make_store: StoreFactory, where: str, codec: str | None
) -> None:
    store = with_room(make_store(codec=None if codec is None else Codec(codec)))
    (path,) = store.paths
    if where == "full staging":
        used_bytes = store.ring.slots.capacity_bytes
        assert store.ring.slots.allocate(used_bytes) is not None
    else:
        used_bytes = in_crumbs(store.ring.slots if where == "staging" else path.extents)
    measure_drives(store, store.io)
    assert path.probe_bytes == 0
    assert store.ring.slots.used_bytes + path.extents.used_bytes == used_bytes
    drives = DriveProbe(store, store.io, may_drop_codec=True)
    drives.measure_plain()
    drives.measure()
    assert not drives.drop_codec() and not drives.advice()  # nothing is known against it


def test_without_a_file_nothing_is_measured(make_store: StoreFactory) -> None:
    without_file = make_store()
    measure_drives(without_file, without_file.io)
    assert without_file.paths[0].bandwidth()["write_bytes_per_s"] == 0.0


def test_what_is_written_cannot_be_shortened_and_no_random_state_changes(make_store: StoreFactory) -> None:
    seen: list[bytes] = []

    class Backend(PosixBackend):
        def open_handle(self, fd: int) -> IoHandle:
            return _Spy(super().open_handle(fd), lambda data: seen.append(data[: 64 << 10].numpy().tobytes()))

    store = with_room(make_store(Backend()))
    states = torch.get_rng_state(), numpy.random.get_state()[1].copy()  # type: ignore[index]
    measure_drives(store, store.io)
    assert torch.equal(states[0], torch.get_rng_state())
    assert numpy.array_equal(states[1], numpy.random.get_state()[1])  # type: ignore[arg-type]
    assert seen and all(len(zlib.compress(one)) > 0.99 * len(one) for one in set(seen))


class _Spy(IoHandle):
    def __init__(self, inner: IoHandle, look: Callable[[torch.Tensor], None]) -> None:
        self._inner = inner
        self._look = look

    def write(self, data: torch.Tensor, offset: int) -> None:
        self._look(data)
        self._inner.write(data, offset)

    def read(self, data: torch.Tensor, offset: int) -> None:
        self._inner.read(data, offset)


@pytest.mark.parametrize("staging_bytes", [MIB, 64 * MIB])
@pytest.mark.parametrize("name", ["lz4", "zstd"])
def test_with_a_codec_rates_are_of_bytes_before_it_and_wear_of_those_behind(
    make_store: StoreFactory, name: str, staging_bytes: int
) -> None:
    calls = {"compress": 0, "decompress": 0}

    class Counted(Codec):
        def compress(self, data: torch.Tensor, into: torch.Tensor, item_bytes: int) -> int:
            calls["compress"] += 1
            return super().compress(data, into, item_bytes)

        def decompress(self, packed: torch.Tensor, into: torch.Tensor) -> None:
            super().decompress(packed, into)
            calls["decompress"] += 1

    store = with_room(make_store(codec=Counted(name), staging_bytes=staging_bytes))
    measure_drives(store, store.io)
    (path,) = store.paths
    assert all(value > 0 for key, value in path.bandwidth().items() if key.endswith("bytes_per_s"))
    assert 0 < path.probe_bytes == path.written_bytes < 0.9 * path.meter.writes.moved_bytes
    assert min(calls.values()) > 0 and nothing_is_held(store)
    assert path.tensor_bytes == path.stored_bytes == 0  # of storages alone
