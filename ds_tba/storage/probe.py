"""How fast are the drives? The first measurement of all paths: their lanes write, then read, then both, for a moment.

[Note: The probe] Every lane of every path takes part, with an extent and a slot of its own, so that a rate is that of
a path with all its lanes while the other paths work. First the extents are written, which is not measured: a fresh
extent is written slower, and read without the drive. A request grows while it is done quickly, up to the size of
storages, so that a slow drive ends in time: at 10 MB/s after about 2 s, of which a drive of some GB/s needs a tenth.
The bytes written are noise, which no drive can compress. Where the lanes compress, it is noise of BF16 numbers, of
which a codec leaves some more than of activations; lanes then read one request again and again, because only what a
codec has made can be decompressed. What a drive does under minutes of writes is not seen here.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Protocol

import numpy
import torch

from ds_tba.errors import PathError, StateError, TransferError
from ds_tba.stats import Kind
from ds_tba.storage.backends.base import IoHandle
from ds_tba.storage.codec import BlockIo
from ds_tba.storage.path import LANE_CHECK_S, LaneGroup, SwapPath, Task
from ds_tba.storage.space import SlowWaits
from ds_tba.storage.spans import Block, Span
from ds_tba.storage.staging import StagingRing

REGION_BYTES = 32 << 20  # of each path
PHASE_BYTES = 2 * REGION_BYTES  # of each kind, path and phase; less where the region is smaller
PHASE_S = 0.35
FIRST_REQUEST_BYTES = 256 << 10
LARGEST_REQUEST_BYTES = 8 << 20
QUICK_S = 0.02  # a request that takes less is followed by one of twice its size
ITEM_BYTES = 2  # BF16
PHASES = (frozenset({Kind.WRITE}), frozenset({Kind.READ}), frozenset(Kind))


class Measured(Protocol):
    """The store whose drives are measured: ``NvmeStore`` documents these."""

    lock: threading.Lock
    paths: list[SwapPath]
    ring: StagingRing
    slow_waits: SlowWaits

    def open(self) -> None: ...


def measure_drives(store: Measured, io: BlockIo, clock: Callable[[], float] = time.perf_counter) -> None:
    """Have the lanes of all working paths find their rates, in room that is free; blocks for a moment.

    A path that has no room for it, as before its file has a size, is left out. The bytes that this writes count as wear
    (``SwapPath.written_bytes``), not in the store's counters, which are about tensors.

    Args:
        io: a lane's time with a request has its checksums in it, and its codec.

    Raises:
        PathError: a transfer failed; the first bytes of that path's file are not to be relied upon.
    """
    store.open()
    probe, started_s = _Probe(store, io, clock), time.perf_counter()
    try:
        with store.lock:
            paths = [path for path in store.paths if path.failure is None]
            _begin(probe, paths)
        while probe.left:
            with suppress(queue.Empty):
                probe.ended.get(timeout=LANE_CHECK_S)
            store.slow_waits.note("the measurement of drives", (path for path in paths if path.is_busy), started_s)
    except BaseException:  # of a signal handler: lanes that have begun would wait for those that have not
        probe.barrier.abort()
        raise
    if probe.failure is not None:
        path, error = probe.failure
        raise PathError(
            f"nvme_path {path.file.directory}: {error}. Check the drive (dmesg, smartctl), or name another directory."
        ) from error


class DriveProbe:
    """The drives of a store, as plans ask for them: measured together, and their rates of now.

    Args:
        may_drop_codec: whether a codec that makes them slower is left off.
    """

    def __init__(self, store: Measured, io: BlockIo, *, may_drop_codec: bool = False) -> None:
        self._store = store
        self._io = io
        self._may_drop_codec = may_drop_codec
        self._plain_bytes_per_s = self._packed_bytes_per_s = 0.0  # of round trips without and with a codec, once known

    def measure(self) -> None:
        """Measure all working paths; see :func:`measure_drives`."""
        measure_drives(self._store, self._io)

    def measure_plain(self) -> None:
        """Measure them once without the codec, if there is one; the rates are unknown after that."""
        if self._io.codec is None or self._plain_bytes_per_s:
            return
        self._forget_rates()  # those with it, which are known where bytes are divided among paths
        measure_drives(self._store, BlockIo(self._io.integrity, self._store.ring))
        self._plain_bytes_per_s = self._round_trips()
        self._forget_rates()

    def drop_codec(self) -> bool:
        """Leave off a codec that has just made the drives slower; return whether they are to be measured again.

        Decided once: under other load the comparison would fall out otherwise, and writes would go back and forth.
        """
        if self._io.codec is None or self._packed_bytes_per_s:
            return False
        self._packed_bytes_per_s = self._round_trips()
        if self._is_codec_faster or not self._may_drop_codec:
            return False
        self._io.compresses = False
        self._forget_rates()
        return True

    @property
    def _is_codec_faster(self) -> bool:
        return self._packed_bytes_per_s >= self._plain_bytes_per_s

    def advice(self) -> str:
        """Return what to say about a codec with which the drives are slower than without; empty where they are not."""
        if self._io.codec is None or self._is_codec_faster:
            return ""
        taken = "Leave it out unless the drive's life counts for more"
        if not self._io.compresses:
            taken = "It is left off in this run; ssd.min_life_days keeps it, where the drive's life counts for more"
        return (
            f'io.compression "{self._io.codec.name}" costs more time here than it saves: bytes go out and back at '
            f"{self._packed_bytes_per_s / 1e9:.2f} GB/s with it, at {self._plain_bytes_per_s / 1e9:.2f} GB/s without. "
            f"{taken}. More io.write_lanes and io.read_lanes compress faster: each takes a core of its own"
        )

    def _round_trips(self) -> float:
        """Return the bytes per second that go out and back; 0 where a path had no room to be measured."""
        with suppress(StateError):
            return sum(1 / (1 / write + 1 / read) for write, read, *_ in self.rates())
        return 0.0

    def _forget_rates(self) -> None:
        with self._store.lock:
            for path in self._store.paths:
                path.meter.writes.forget_rates()
                path.meter.reads.forget_rates()

    def fade(self) -> None:
        """Have the rates of the next transfers outweigh those of now, as plans see them."""
        with self._store.lock:
            for path in self._store.paths:
                for kind in (path.meter.writes, path.meter.reads):
                    kind.alone.fade()
                    kind.concurrent.fade()

    def rates(self) -> list[tuple[float, float, float, float]]:
        """Return :meth:`SwapPath.rates` of each path that works."""
        with self._store.lock:
            return [path.rates() for path in self._store.paths if path.failure is None]

    def moved_bytes(self) -> int:
        """Return the bytes that the lanes have written and read since the beginning."""
        with self._store.lock:
            return sum(path.meter.writes.moved_bytes + path.meter.reads.moved_bytes for path in self._store.paths)


class _Probe:
    """The state that the lanes of a probe share."""

    def __init__(self, store: Measured, io: BlockIo, clock: Callable[[], float]) -> None:
        self.store = store
        self.io = io
        self.clock = clock
        self.failure: tuple[SwapPath, Exception] | None = None
        self.until_s = 0.0  # the phase that runs ends then, for all lanes
        self.barrier = threading.Barrier(1)  # before each phase
        self.left: set[_Lane] = set()  # still at it
        self.ended: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes whoever waits for the last of them

    def begin_phase(self) -> None:
        self.until_s = self.clock() + PHASE_S


def _begin(probe: _Probe, paths: Sequence[SwapPath]) -> None:
    """Have the lanes of these paths take part, as far as there is room for all of a path."""
    slots, lanes = probe.store.ring.slots, list[_Lane]()
    count = sum(len(path.writes.handles) + len(path.reads.handles) for path in paths)
    slot_bytes = min(LARGEST_REQUEST_BYTES, (slots.capacity_bytes - slots.used_bytes) // max(count, 1))
    noise = _noise(slot_bytes - slot_bytes % slots.alignment_bytes, are_numbers=probe.io.compresses)
    for path in paths:
        lanes += _lanes_of(path, probe, noise)
    probe.barrier = threading.Barrier(len(lanes) or 1, action=probe.begin_phase)
    probe.left.update(lanes)
    for lane in lanes:
        lane.group.put(Task(lane.run, lane.fail))


def _noise(nbytes: int, *, are_numbers: bool) -> torch.Tensor:
    chance = numpy.random.default_rng(0)
    if not are_numbers or nbytes < ITEM_BYTES:  # PyTorch gives no view of nothing in another dtype
        return torch.from_numpy(chance.integers(0, 256, nbytes, numpy.uint8))
    return torch.from_numpy(chance.standard_normal(nbytes // ITEM_BYTES, numpy.float32)).bfloat16().view(torch.uint8)


def _lanes_of(path: SwapPath, probe: _Probe, noise: torch.Tensor) -> list[_Lane]:
    """Return the parts of a path's lanes; empty where it has no room for all of them."""
    ring, extents = probe.store.ring, path.extents
    kinds = [Kind.WRITE] * len(path.writes.handles) + [Kind.READ] * len(path.reads.handles)
    region_bytes = min(REGION_BYTES, extents.capacity_bytes - extents.used_bytes)
    extent_bytes = region_bytes // len(kinds) // extents.alignment_bytes * extents.alignment_bytes
    if not noise.numel() or not extent_bytes:
        return []
    found_slots = [slot for _ in kinds if (slot := ring.slots.allocate(noise.numel())) is not None]
    found_extents = [extent for _ in kinds if (extent := extents.allocate(extent_bytes)) is not None]
    if len(found_slots) + len(found_extents) < 2 * len(kinds):  # what is free is in pieces
        for span in found_slots:
            ring.slots.free(span)
        for span in found_extents:
            extents.free(span)
        return []
    for slot in found_slots:
        ring.fill(slot, noise)
    limit_bytes = min(PHASE_BYTES, 2 * region_bytes)
    return [
        _Lane(probe, path, kind, slot, extent, limit_bytes // kinds.count(kind))
        for kind, slot, extent in zip(kinds, found_slots, found_extents, strict=True)
    ]


class _Lane:
    """The part of one lane in a probe, with a slot and an extent of its own."""

    def __init__(self, probe: _Probe, path: SwapPath, kind: Kind, slot: Span, extent: Span, limit_bytes: int) -> None:
        self.path = path
        self.kind = kind
        self.slot = slot
        self.extent = extent
        self._probe = probe
        self._limit_bytes = limit_bytes  # of a phase
        self._largest_bytes = min(slot.nbytes, extent.nbytes)
        self._request_bytes = min(path.extents.padded(FIRST_REQUEST_BYTES), self._largest_bytes)
        self._written_bytes = 0  # the beginning of the extent that may be read
        self._blocks: tuple[Block, ...] = ()  # of the last request that was written
        self._is_freed = False

    @property
    def group(self) -> LaneGroup:
        """Return the lanes to which it belongs."""
        return self.path.writes if self.kind is Kind.WRITE else self.path.reads

    def run(self, handle: IoHandle) -> None:
        """Take part in every phase. Waits for the other lanes between them, also after a failure."""
        probe = self._probe
        with probe.store.ring.lane_stream(), suppress(threading.BrokenBarrierError):
            for kinds in (None, *PHASES):
                probe.barrier.wait()
                self._take_part(handle, kinds)
        self._end()

    def fail(self, _handle: IoHandle, error: BaseException) -> None:
        """End the phases for all lanes, because this one failed between two transfers."""
        self._probe.failure = (self.path, TransferError(f"it could not be measured ({type(error).__name__}: {error})"))
        self._end()

    def _end(self) -> None:
        probe = self._probe
        if probe.failure is not None:
            probe.barrier.abort()  # or the others would wait for this one
        with probe.store.lock:  # here: a signal handler may have ended the wait for the lanes
            if not self._is_freed:
                self._is_freed = True
                probe.store.ring.slots.free(self.slot)
                self.path.extents.free(self.extent)
        probe.left.discard(self)
        probe.ended.put(None)

    def _take_part(self, handle: IoHandle, kinds: Collection[Kind] | None) -> None:
        try:
            if kinds is None:
                self._prepare(handle)
            elif self.kind in kinds:
                self._repeat(handle)
        except Exception as error:  # noqa: BLE001 - the other lanes wait for this one
            self._probe.failure = (self.path, error)

    def _prepare(self, handle: IoHandle) -> None:
        """Write the extent, a little at least."""
        while self._written_bytes < self.extent.nbytes and self._probe.failure is None:
            nbytes = min(self._request_bytes, self.extent.nbytes - self._written_bytes)
            self._move(handle, Kind.WRITE, self._written_bytes, nbytes, is_typical=False)
            self._written_bytes += nbytes
            if self._probe.clock() >= self._probe.until_s:
                break
        if self._probe.io.compresses and self._probe.failure is None:
            self._request_bytes = self._largest_bytes = self._written_bytes = min(
                self._request_bytes, self._written_bytes
            )
            self._move(handle, Kind.WRITE, 0, self._written_bytes, is_typical=False)

    def _repeat(self, handle: IoHandle) -> None:
        """Move what was written of the extent again and again, once at least, until the phase ends."""
        position = moved_bytes = 0
        while self._probe.failure is None:
            nbytes = min(self._request_bytes, self._written_bytes - position)
            if self._move(handle, self.kind, position, nbytes):
                moved_bytes += nbytes
                if moved_bytes >= self._limit_bytes or self._probe.clock() >= self._probe.until_s:
                    return
            position = (position + nbytes) % self._written_bytes

    def _move(self, handle: IoHandle, kind: Kind, position: int, nbytes: int, *, is_typical: bool = True) -> bool:
        """One request; False where it was so quick that the next one is larger, and this one is not measured."""
        probe, meter = self._probe, self.path.meter
        staged, offset = probe.store.ring.view(self.slot)[:nbytes], self.extent.offset + position
        with probe.store.lock:
            transfer = meter.start(kind, nbytes)
        started_s, moved, grows = probe.clock(), False, False
        try:
            if kind is Kind.WRITE:
                self._blocks = probe.io.write(handle, staged, offset, ITEM_BYTES)
            elif probe.io.compresses:
                for block in self._blocks:
                    probe.io.read(handle, block, staged)
            else:
                handle.read(staged, offset)
                probe.io.integrity.digest(staged)
            moved = True
            grows = nbytes == self._request_bytes < self._largest_bytes and probe.clock() - started_s < QUICK_S
            if grows:
                self._request_bytes = min(2 * nbytes, self._largest_bytes)
        finally:
            drive_bytes = sum(block.stored_bytes for block in self._blocks) if probe.io.compresses else nbytes
            with probe.store.lock:
                meter.stop(transfer, moved=moved, is_typical=is_typical and not grows, drive_bytes=drive_bytes)
                self.path.probe_bytes += drive_bytes if moved and kind is Kind.WRITE else 0
        return not grows
