"""How fast are the drives? The first measurement of all paths: their lanes write, then read, then both, for a moment.

[Note: The probe] Every lane of every path takes part, with an extent and a slot of its own, so that a rate is that of
a path with all its lanes while the other paths work. First the extents are written, which is not measured: a fresh
extent is written slower, and read without the drive. A request grows while it is done quickly, up to the size of
storages, so that a slow drive ends in time: at 10 MB/s after about 2 s, of which a drive of some GB/s needs a tenth.
The bytes written are noise, which no drive can compress. What a drive does under minutes of writes is not seen here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
import torch

from ds_tba.errors import PathError
from ds_tba.storage.allocator import Span
from ds_tba.storage.backends.base import IoHandle
from ds_tba.storage.integrity import Integrity
from ds_tba.storage.space import SwapSpace
from ds_tba.storage.swap_path import SwapPath
from ds_tba.telemetry.stats import Kind

REGION_BYTES = 32 << 20  # of each path
PHASE_BYTES = 2 * REGION_BYTES  # of each kind, path and phase; less where the region is smaller
PHASE_S = 0.35
FIRST_REQUEST_BYTES = 256 << 10
LARGEST_REQUEST_BYTES = 8 << 20
QUICK_S = 0.02  # a request that takes less is followed by one of twice its size
PHASES = (frozenset({Kind.WRITE}), frozenset({Kind.READ}), frozenset(Kind))


class BandwidthProbe:
    """One measurement; see [Note: The probe].

    Args:
        space: has the lock, and staging.
        integrity: a lane's time with a request has its checksums in it.
        clock: seconds.
    """

    def __init__(self, space: SwapSpace, integrity: Integrity, clock: Callable[[], float] = time.perf_counter) -> None:
        self.space = space
        self.integrity = integrity
        self.clock = clock
        self.failure: tuple[SwapPath, Exception] | None = None
        self.until_s = 0.0  # the phase that runs ends then, for all lanes
        self.barrier = threading.Barrier(1)
        self.ended = threading.Semaphore(0)

    def run(self, paths: Sequence[SwapPath]) -> None:
        """Measure all paths that have room for it; the meters have their rates afterwards. Blocks.

        Raises:
            PathError: a transfer failed; the first bytes of that path's file are not to be relied upon.
        """
        lanes: list[LaneProbe] = []
        with self.space.lock:
            slots = self.space.ring.slots
            count = sum(len(path.writes.handles) + len(path.reads.handles) for path in paths)
            slot_bytes = min(LARGEST_REQUEST_BYTES, (slots.capacity_bytes - slots.used_bytes) // max(count, 1))
            noise = torch.from_numpy(numpy.random.default_rng(0).integers(0, 256, slot_bytes, numpy.uint8))
            for path in paths:
                lanes += self._lanes(path, noise[: slot_bytes - slot_bytes % slots.alignment_bytes])
        self.barrier = threading.Barrier(len(lanes) or 1, action=self._begin_phase)
        for lane in lanes:
            (lane.path.writes if lane.kind is Kind.WRITE else lane.path.reads).put(lane.run)
        for _ in lanes:
            self.ended.acquire()
        with self.space.lock:
            self._give_back(lanes)
        if self.failure is not None:
            path, error = self.failure
            raise PathError(
                f"nvme_path {path.file.directory}: {error}. Check the drive (dmesg, smartctl), or name another "
                "directory."
            ) from error

    def _begin_phase(self) -> None:
        self.until_s = self.clock() + PHASE_S

    def _lanes(self, path: SwapPath, noise: torch.Tensor) -> list[LaneProbe]:
        """What the lanes of a path have to do; nothing where it has no room for all of them."""
        slots, extents = self.space.ring.slots, path.extents
        kinds = [Kind.WRITE] * len(path.writes.handles) + [Kind.READ] * len(path.reads.handles)
        region_bytes = min(REGION_BYTES, extents.capacity_bytes - extents.used_bytes)
        extent_bytes = region_bytes // len(kinds) // extents.alignment_bytes * extents.alignment_bytes
        found: list[LaneProbe] = []
        for kind in kinds if noise.numel() and extent_bytes else ():
            slot, extent = slots.allocate(noise.numel()), extents.allocate(extent_bytes)
            if slot is not None and extent is not None:
                self.space.ring.fill(slot, noise)
                limit_bytes = min(PHASE_BYTES, 2 * region_bytes) // kinds.count(kind)
                found.append(LaneProbe(self, path, kind, slot, extent, limit_bytes))
                continue
            if slot is not None:  # pieces of the room are in use
                slots.free(slot)
            if extent is not None:
                extents.free(extent)
            self._give_back(found)
            return []
        return found

    def _give_back(self, lanes: Sequence[LaneProbe]) -> None:
        for lane in lanes:
            self.space.ring.slots.free(lane.slot)
            lane.path.extents.free(lane.extent)


@dataclass(eq=False)
class LaneProbe:
    """The part of one lane in a probe.

    Attributes:
        slot, extent: its own.
        limit_bytes: of a phase.
        written_bytes: the beginning of the extent that may be read.
    """

    probe: BandwidthProbe
    path: SwapPath
    kind: Kind
    slot: Span
    extent: Span
    limit_bytes: int
    written_bytes: int = 0
    request_bytes: int = 0

    def __post_init__(self) -> None:
        first = self.path.extents.padded(FIRST_REQUEST_BYTES)
        self.request_bytes = min(first, self.slot.nbytes, self.extent.nbytes)

    def run(self, handle: IoHandle) -> None:
        """Take part in every phase, in a lane. Waits for the other lanes between them, also after a failure."""
        probe = self.probe
        try:
            with probe.space.ring.lane_stream():
                for kinds in (None, *PHASES):
                    probe.barrier.wait()
                    try:
                        if kinds is None:
                            self._prepare(handle)
                        elif self.kind in kinds:
                            self._repeat(handle)
                    except Exception as error:  # noqa: BLE001 - the other lanes wait for this one
                        probe.failure = (self.path, error)
        finally:
            probe.ended.release()

    def _prepare(self, handle: IoHandle) -> None:
        """Write the extent, a little at least."""
        while self.written_bytes < self.extent.nbytes and self.probe.failure is None:
            nbytes = min(self.request_bytes, self.extent.nbytes - self.written_bytes)
            self._move(handle, Kind.WRITE, self.written_bytes, nbytes, is_typical=False)
            self.written_bytes += nbytes
            if self.probe.clock() >= self.probe.until_s:
                return

    def _repeat(self, handle: IoHandle) -> None:
        """Move what was written of the extent again and again, once at least, until the phase ends."""
        position = moved_bytes = 0
        while self.probe.failure is None:
            nbytes = min(self.request_bytes, self.written_bytes - position)
            if self._move(handle, self.kind, position, nbytes):
                moved_bytes += nbytes
                if moved_bytes >= self.limit_bytes or self.probe.clock() >= self.probe.until_s:
                    return
            position = (position + nbytes) % self.written_bytes

    def _move(self, handle: IoHandle, kind: Kind, position: int, nbytes: int, *, is_typical: bool = True) -> bool:
        """One request; False where it was so quick that the next one is larger, and this one is not measured."""
        probe, meter = self.probe, self.path.meter
        staged, offset = probe.space.ring.view(self.slot)[:nbytes], self.extent.offset + position
        with probe.space.lock:
            transfer = meter.start(kind, nbytes)
        started_s, moved, grows = probe.clock(), False, False
        try:
            if kind is Kind.WRITE:
                probe.integrity.digest(staged)
                handle.write(staged, offset)
            else:
                handle.read(staged, offset)
                probe.integrity.digest(staged)
            moved, grows = True, self._grow(nbytes, probe.clock() - started_s)
        finally:
            with probe.space.lock:
                meter.stop(transfer, moved=moved, is_typical=is_typical and not grows)
                self.path.probe_bytes += nbytes if moved and kind is Kind.WRITE else 0
        return not grows

    def _grow(self, nbytes: int, took_s: float) -> bool:
        before = self.request_bytes
        if nbytes == before and took_s < QUICK_S:
            self.request_bytes = min(2 * before, self.slot.nbytes, self.extent.nbytes)
        return self.request_bytes > before
