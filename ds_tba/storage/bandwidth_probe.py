"""The first measurement of all paths: their lanes write, then read, then both, for a moment and within few bytes.

[Note: The probe] Every lane of every path takes part, with an extent and a slot of its own, so that a rate is that of
a path with all its lanes while the other paths work. First the extents are written, which is not measured: a fresh
extent is written slower, and read without the drive. A request grows while it is done quickly, up to the size of
storages, so that a slow drive ends in time: at 10 MB/s after about 2 s, of which a drive of some GB/s needs a tenth.
The bytes written are noise, which no drive can compress.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy
import torch

from ds_tba.errors import PathError
from ds_tba.storage.allocator import Span
from ds_tba.storage.backends.base import IoHandle
from ds_tba.storage.integrity import Integrity
from ds_tba.storage.space import SwapSpace
from ds_tba.storage.swap_path import SwapPath, Task
from ds_tba.telemetry.stats import Kind

REGION_BYTES = 32 << 20  # of each path
PHASE_BYTES = 2 * REGION_BYTES  # of each kind, path and phase; less where the region is smaller
PHASE_S = 0.35
FIRST_REQUEST_BYTES = 256 << 10
LARGEST_REQUEST_BYTES = 8 << 20
QUICK_S = 0.02  # a request that takes less is followed by one of twice its size
PHASES = (frozenset({Kind.WRITE}), frozenset({Kind.READ}), frozenset(Kind))

Clock = Callable[[], float]


class BandwidthProbe:
    """One measurement; see [Note: The probe].

    Args:
        space: has the lock, and staging.
        integrity: a lane's time with a request has its checksums in it.
        clock: seconds.
    """

    def __init__(self, space: SwapSpace, integrity: Integrity, clock: Clock = time.perf_counter) -> None:
        self.space = space
        self.integrity = integrity
        self.clock = clock
        self.failure: tuple[SwapPath, Exception] | None = None
        self.barrier = threading.Barrier(1)
        self.ended = threading.Semaphore(0)

    def run(self, paths: Sequence[SwapPath]) -> None:
        """Measure all paths that have room for it; the meters have their rates afterwards. Blocks.

        Raises:
            PathError: a transfer failed; the first bytes of that path's file are not to be relied upon.
        """
        with self.space.lock:
            parts = self._parts(paths)
        self.barrier = threading.Barrier(sum(len(part) for part in parts) or 1)
        for part in parts:
            for lane in part:
                (lane.path.writes if lane.kind is Kind.WRITE else lane.path.reads).put(lane)
        for part in parts:
            for _ in part:
                self.ended.acquire()
        with self.space.lock:
            for lane in (lane for part in parts for lane in part):
                self.space.ring.slots.free(lane.slot)
                lane.path.extents.free(lane.extent)
        if self.failure is not None:
            path, error = self.failure
            raise PathError(
                f"nvme_path {path.file.directory}: {error}. Check the drive (dmesg, smartctl), or name another "
                "directory."
            ) from error

    def _parts(self, paths: Sequence[SwapPath]) -> list[list[LaneProbe]]:
        """For each path with room what its lanes have to do."""
        lanes = sum(len(path.write_lanes) + len(path.read_lanes) for path in paths)
        slots = self.space.ring.slots
        slot_bytes = min(LARGEST_REQUEST_BYTES, (slots.capacity_bytes - slots.used_bytes) // max(lanes, 1))
        noise = torch.from_numpy(numpy.random.default_rng(0).integers(0, 256, slot_bytes, numpy.uint8))
        return [part for path in paths if (part := self._part(path, slot_bytes, noise))]

    def _part(self, path: SwapPath, slot_bytes: int, noise: torch.Tensor) -> list[LaneProbe]:
        slots, extents = self.space.ring.slots, path.extents
        kinds = [Kind.WRITE] * len(path.write_lanes) + [Kind.READ] * len(path.read_lanes)
        slot_bytes -= slot_bytes % slots.alignment_bytes
        region_bytes = min(REGION_BYTES, extents.capacity_bytes - extents.used_bytes)
        extent_bytes = region_bytes // len(kinds)
        extent_bytes -= extent_bytes % extents.alignment_bytes
        phase = PathPhase(min(PHASE_BYTES, 2 * region_bytes), self.clock)
        part: list[LaneProbe] = []
        for kind in kinds if slot_bytes and extent_bytes else ():
            slot, extent = slots.allocate(slot_bytes), extents.allocate(extent_bytes)
            if slot is None or extent is None:  # pieces of the room are in use
                self._give_back(part, path, slot, extent)
                return []
            self.space.ring.fill(slot, noise[:slot_bytes])
            part.append(LaneProbe(self, path, kind, slot, extent, phase))
        writers = [lane for lane in part if lane.kind is Kind.WRITE]
        for lane, writer in zip(part, cycle(writers), strict=False):
            writer.to_prepare.append(lane)
        return part

    def _give_back(self, part: list[LaneProbe], path: SwapPath, slot: Span | None, extent: Span | None) -> None:
        slots, extents = [lane.slot for lane in part], [lane.extent for lane in part]
        for one in [*slots, slot] if slot is not None else slots:
            self.space.ring.slots.free(one)
        for one in [*extents, extent] if extent is not None else extents:
            path.extents.free(one)


class PathPhase:
    """How far one path is in the phase that runs. Changed under the store's lock."""

    def __init__(self, limit_bytes: int, clock: Clock) -> None:
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._moved: Counter[tuple[int, Kind]] = Counter()
        self._until_s: dict[int, float] = {}

    def begin(self, number: int) -> None:
        """A lane has come so far; the first one sets the time."""
        self._until_s.setdefault(number, self._clock() + PHASE_S)

    def add(self, number: int, kind: Kind, nbytes: int) -> bool:
        """So much was moved; whether that or the time ends the phase, for all lanes of the path."""
        self._moved[number, kind] += nbytes
        return self.is_late(number) or any(self._moved[number, kind] >= self._limit_bytes for kind in Kind)

    def is_late(self, number: int) -> bool:
        """Whether the time is used up."""
        return self._clock() >= self._until_s[number]


@dataclass(eq=False)
class LaneProbe(Task):
    """The part of one lane in a probe.

    Attributes:
        slot, extent: its own.
        phase: shared by the lanes of the path.
    """

    probe: BandwidthProbe
    path: SwapPath
    kind: Kind
    slot: Span
    extent: Span
    phase: PathPhase
    written_bytes: int = 0  # the beginning of the extent that may be read
    request_bytes: int = 0

    def __post_init__(self) -> None:
        self.to_prepare: list[LaneProbe] = []
        alignment_bytes = self.path.extents.alignment_bytes
        first = -(-FIRST_REQUEST_BYTES // alignment_bytes) * alignment_bytes
        self.request_bytes = min(first, self.slot.nbytes, self.extent.nbytes)

    def run_in_lane(self, handle: IoHandle) -> None:
        """Take part in every phase. Waits for the other lanes between them."""
        try:
            with self.probe.space.ring.lane_stream():
                self.probe.barrier.wait()
                if self.kind is Kind.WRITE:
                    self._attempt(self._prepare, 0, handle)
                for number, kinds in enumerate(PHASES, 1):
                    self.probe.barrier.wait()
                    if self.kind in kinds:
                        self._attempt(self._repeat, number, handle)
        finally:
            self.probe.ended.release()

    def _attempt(self, phase: Callable[[int, IoHandle], None], number: int, handle: IoHandle) -> None:
        if self.probe.failure is not None:
            return
        with self.probe.space.lock:
            self.phase.begin(number)
        try:
            phase(number, handle)
        except Exception as error:  # noqa: BLE001 - the other lanes wait for this one
            self.probe.failure = (self.path, error)

    def _prepare(self, number: int, handle: IoHandle) -> None:
        """Write the extents, each a little at least."""
        while rest := [lane for lane in self.to_prepare if lane.written_bytes < lane.extent.nbytes]:
            for lane in rest:
                nbytes = min(self.request_bytes, lane.extent.nbytes - lane.written_bytes)
                self._move(handle, lane.extent.offset + lane.written_bytes, nbytes, is_typical=False)
                lane.written_bytes += nbytes
            if self.probe.failure is not None or self.phase.is_late(number):
                return

    def _repeat(self, number: int, handle: IoHandle) -> None:
        """Move what was written of the extent again and again, once at least, until the phase ends."""
        position, is_over = 0, False
        while not is_over and self.probe.failure is None:
            nbytes = min(self.request_bytes, self.written_bytes - position)
            if self._move(handle, self.extent.offset + position, nbytes):
                with self.probe.space.lock:
                    is_over = self.phase.add(number, self.kind, nbytes)
            position = (position + nbytes) % self.written_bytes

    def _move(self, handle: IoHandle, offset: int, nbytes: int, *, is_typical: bool = True) -> bool:
        """One request; False where it was so quick that the next one is larger, and this one is not measured."""
        space, meter = self.probe.space, self.path.meter
        staged = space.ring.view(self.slot)[:nbytes]
        with space.lock:
            transfer = meter.start(self.kind, nbytes)
        started_s, moved, grows = self.probe.clock(), False, False
        try:
            self._transfer(handle, staged, offset)
            moved, grows = True, self._grow(nbytes, self.probe.clock() - started_s)
        finally:
            with space.lock:
                meter.stop(transfer, moved=moved, is_typical=is_typical and not grows)
                self.path.probe_bytes += nbytes if moved and self.kind is Kind.WRITE else 0
        return not grows

    def _transfer(self, handle: IoHandle, staged: torch.Tensor, offset: int) -> None:
        if self.kind is Kind.WRITE:
            self.probe.integrity.digest(staged)
            handle.write(staged, offset)
        else:
            handle.read(staged, offset)
            self.probe.integrity.digest(staged)

    def _grow(self, nbytes: int, took_s: float) -> bool:
        before = self.request_bytes
        if nbytes == before and took_s < QUICK_S:
            self.request_bytes = min(2 * before, self.slot.nbytes, self.extent.nbytes)
        return self.request_bytes > before
