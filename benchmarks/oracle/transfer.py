"""What a replay keeps count of: its clock, drives, staging and copy engines of one rank, the way out, device memory."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ds_tba.config import Placement
from ds_tba.plan.trace import Resources
from oracle.timeline import Bools, Floats, Ints, Liveness, Places, Timeline

NOBODY = -1
KEEP, HOST, NVME = int(Placement.KEEP), int(Placement.HOST), int(Placement.NVME)
REMATERIALIZE = int(Placement.REMATERIALIZE)

# The states of a storage's bytes, as far as a replay needs them (compare ds_tba/storage/base.py).
UNSEEN, QUEUED, WRITING, STORED, READ_QUEUED, READING, LOADED, FORWARDED = range(8)


@dataclass(slots=True)
class ReplayClock:
    """The trace's clock, delayed by stalls, recomputation and what is made again from its sources.

    Attributes:
        recompute_at_s: of each block, on the replay's clock.
        shift_s: the delay so far.
        stalls: of each storage for which compute waited, the seconds.
    """

    recompute_at_s: Floats
    shift_s: float = 0.0
    stall_s: float = 0.0
    recomputed_s: float = 0.0
    rematerialized_s: float = 0.0
    stalls: list[tuple[int, float]] = field(default_factory=list)
    _at_s: list[float] = field(default_factory=list)
    _shifts_s: list[float] = field(default_factory=list)

    def stall(self, storage: int, seconds: float) -> None:
        """Compute waits for a storage."""
        self.stalls.append((storage, seconds))
        self.stall_s += seconds
        self.shift_s += seconds

    def recompute(self, block: int, at_s: float, seconds: float) -> None:
        """A block's forward runs again, from ``at_s`` of the trace's clock on."""
        self.recompute_at_s[block] = at_s + self.shift_s
        self.recomputed_s += seconds
        self.shift_s += seconds

    def rematerialize(self, seconds: float) -> None:
        """A storage is made again from its sources."""
        self.rematerialized_s += seconds
        self.shift_s += seconds

    def record(self, at_s: float) -> None:
        """Remember the delay after the event at ``at_s`` of the trace's clock, if the event changed it."""
        if self.shift_s != (self._shifts_s[-1] if self._shifts_s else 0.0):
            self._at_s.append(at_s)
            self._shifts_s.append(self.shift_s)

    def shifted(self, at_s: Floats, *, after: bool) -> Floats:
        """Times of the trace's clock as the replay's, before or after the events of that very time."""
        shifts = np.array([0.0, *self._shifts_s])
        return np.asarray(at_s + shifts[np.searchsorted(np.array(self._at_s), at_s, "right" if after else "left")])


@dataclass(slots=True)
class _Direction:
    """The writes or the reads: several lanes share one rate, so that they are served one at a time.

    Attributes:
        rate, concurrent_rate: bytes per second, alone and while the other direction is busy.
        storage: the one in progress, of which ``left`` bytes are still to move.
        total_bytes: of all that were not cancelled.
    """

    rate: float
    concurrent_rate: float
    queue: deque[int] = field(default_factory=deque)
    storage: int = NOBODY
    left: float = 0.0
    total_bytes: int = 0


class DriveQueues:
    """The drives: one queue of writes, one of reads, each as fast as measured.

    Args:
        resources: the rates.
        state: of each storage; changed here between QUEUED and STORED, and between READ_QUEUED and LOADED.
        nbytes: of each storage, as they count on the drive.
        on_written, on_read: called with the storage when its bytes are there; the former may replace the state STORED.
    """

    def __init__(
        self,
        resources: Resources,
        state: list[int],
        nbytes: list[int],
        on_written: Callable[[int], None],
        on_read: Callable[[int], None],
    ) -> None:
        self.now_s = 0.0
        self.writes_under_way = 0
        self._state = state
        self._nbytes = nbytes
        self._on_written = on_written
        self._on_read = on_read
        self.writes = _Direction(
            resources.write_bytes_per_s, sum(path.write_beside_read_bytes_per_s for path in resources.paths)
        )
        self.reads = _Direction(
            resources.read_bytes_per_s, sum(path.read_beside_write_bytes_per_s for path in resources.paths)
        )
        self._ready_s: dict[int, float] = {}  # when a write's bytes are in staging

    def write(self, storage: int, ready_s: float) -> None:
        """Queue a write whose bytes are in staging from ``ready_s`` on."""
        self._state[storage] = QUEUED
        self.writes_under_way += 1
        self.writes.total_bytes += self._nbytes[storage]
        self._ready_s[storage] = ready_s
        self.writes.queue.append(storage)

    def cancel_write(self, storage: int) -> None:
        """Take back a queued write."""
        self._state[storage] = FORWARDED
        self.writes_under_way -= 1
        self.writes.total_bytes -= self._nbytes[storage]

    def read(self, storage: int, *, urgent: bool) -> None:
        """Queue a read; an urgent one overtakes the others, also where it was queued before."""
        if self._state[storage] == STORED:
            self.reads.total_bytes += self._nbytes[storage]
        self._state[storage] = READ_QUEUED
        if urgent:
            self.reads.queue.appendleft(storage)
        else:
            self.reads.queue.append(storage)

    def advance(self, until_s: float) -> None:
        """Move on to ``until_s``."""
        self._run(until_s, False, NOBODY)

    def advance_past_a_write(self) -> float:
        """Move on to the end of the next write, which there must be; the time."""
        self._run(math.inf, True, NOBODY)
        return self.now_s

    def advance_past_read(self, storage: int) -> float:
        """Move on to the end of a storage's read; the time."""
        self._run(math.inf, False, storage)
        return self.now_s

    def _take(self, direction: _Direction, queued: int, moving: int) -> None:
        """Begin the next transfer; the queue also holds storages that were cancelled, or overtook themselves."""
        while direction.queue:
            storage = direction.queue.popleft()
            if self._state[storage] == queued:
                self._state[storage] = moving
                direction.storage = storage
                direction.left = float(self._nbytes[storage])
                return

    def _run(self, until_s: float, stop_at_write: bool, stop_at_read: int) -> None:
        write, read = self.writes, self.reads
        while True:
            if write.storage == NOBODY and write.queue:
                self._take(write, QUEUED, WRITING)
            if read.storage == NOBODY and read.queue:
                self._take(read, READ_QUEUED, READING)
            is_reading = read.storage != NOBODY
            if write.storage == NOBODY and not is_reading:
                self.now_s = max(self.now_s, until_s)
                return
            now_s, end_s, ended = self.now_s, until_s, ""
            ready_s = math.inf if write.storage == NOBODY else self._ready_s[write.storage]
            is_writing = ready_s <= now_s
            write_rate = write.concurrent_rate if is_reading else write.rate
            read_rate = read.concurrent_rate if is_writing else read.rate
            if is_writing:
                if now_s + write.left / write_rate <= end_s:
                    end_s, ended = now_s + write.left / write_rate, "write"
            elif write.storage != NOBODY and ready_s <= end_s:
                end_s, ended = ready_s, "copy"
            if is_reading and now_s + read.left / read_rate <= end_s:
                end_s, ended = now_s + read.left / read_rate, "read"
            if end_s > now_s:
                if is_writing:
                    write.left = max(0.0, write.left - (end_s - now_s) * write_rate)
                if is_reading:
                    read.left = max(0.0, read.left - (end_s - now_s) * read_rate)
                self.now_s = end_s
            if not ended:
                return
            if ended == "write":
                self._end_write()
                if stop_at_write:
                    return
            elif ended == "read" and self._end_read() == stop_at_read:
                return

    def _end_write(self) -> None:
        storage, self.writes.storage = self.writes.storage, NOBODY
        self.writes_under_way -= 1
        if self._state[storage] == WRITING:
            self._state[storage] = STORED
        self._on_written(storage)

    def _end_read(self) -> int:
        storage, self.reads.storage = self.reads.storage, NOBODY
        self._state[storage] = LOADED
        self._on_read(storage)
        return storage


@dataclass(slots=True)
class StagingSlots:
    """Staging memory in use."""

    capacity_bytes: int
    used_bytes: int = 0
    peak_bytes: int = 0
    _copied_from: deque[tuple[float, int]] = field(default_factory=deque)  # copies in end in this order
    _lent: list[tuple[float, int]] = field(default_factory=list)  # a heap, by the trace's clock

    def has_room(self, nbytes: int) -> bool:
        """Whether a slot of so many bytes is free."""
        return self.used_bytes + nbytes <= self.capacity_bytes

    def take(self, nbytes: int) -> None:
        """Use a slot."""
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def free_after_copy(self, done_s: float, nbytes: int) -> None:
        """The slot is free when the copy out of it onto the device is done."""
        self._copied_from.append((done_s, nbytes))

    def lend(self, freed_s: float, nbytes: int) -> None:
        """Autograd uses the slot's memory itself, until that time of the trace's clock."""
        heapq.heappush(self._lent, (freed_s, nbytes))

    @property
    def next_free_s(self) -> float | None:
        """When the next copy out of a slot is done; None without any."""
        return self._copied_from[0][0] if self._copied_from else None

    def settle(self, now_s: float, at_s: float) -> None:
        """Free the slots that copies in and autograd no longer use at a time of the drives' and the trace's clock."""
        while self._copied_from and self._copied_from[0][0] <= now_s:
            self.used_bytes -= self._copied_from.popleft()[1]
        while self._lent and self._lent[0][0] <= at_s:
            self.used_bytes -= heapq.heappop(self._lent)[1]


class Copies:
    """Copies between device and host: an engine for each way, or the training thread on a synchronous device.

    Attributes:
        copied_s: the copy out of each storage is done.
        allocated_s: device memory is taken again.
        arrived_s: the copy in is done.
    """

    def __init__(self, resources: Resources, nbytes: list[int], clock: ReplayClock) -> None:
        self.is_synchronous = resources.is_synchronous
        self.copied_s = [0.0] * len(nbytes)
        self.allocated_s = [0.0] * len(nbytes)
        self.arrived_s = [0.0] * len(nbytes)
        self._resources = resources
        self._nbytes = nbytes
        self._clock = clock
        self._out_free_s = self._in_free_s = 0.0

    def copy_out(self, storage: int, now_s: float) -> float:
        """Copy device bytes to the host; when that is done. Compute pays here for the way back, too."""
        nbytes = self._nbytes[storage]
        took_s = nbytes / self._resources.copy_out_bytes_per_s
        compute_s = nbytes * self._resources.compute_s_per_byte
        compute_s += took_s if self.is_synchronous else 0.0
        if compute_s:
            self._clock.stall(storage, compute_s)
        if self.is_synchronous:
            done_s = now_s + compute_s
        else:
            done_s = self._out_free_s = max(now_s, self._out_free_s) + took_s
        self.copied_s[storage] = done_s
        return done_s

    def copy_in(self, storage: int, now_s: float) -> None:
        """Copy a storage's host bytes to the device; the memory is taken at once."""
        took_s = self._nbytes[storage] / self._resources.copy_in_bytes_per_s
        self.allocated_s[storage] = now_s
        if self.is_synchronous:
            self.arrived_s[storage] = now_s + took_s
            return
        self._in_free_s = max(now_s, self._in_free_s, self.copied_s[storage]) + took_s
        self.arrived_s[storage] = self._in_free_s


@dataclass(frozen=True, slots=True)
class Pacing:
    """Choose during the replay: a storage for which compute would wait at pack goes to host memory, or stays.

    Attributes:
        host_budget_bytes, write_limit_bytes: of one micro-step.
    """

    host_budget_bytes: float
    write_limit_bytes: float


class Storages:
    """Where each storage is placed and how far it has come, as lists: indexing an array is slower."""

    __slots__ = ("freed_s", "nbytes", "packed_s", "padded", "place", "state")

    def __init__(self, timeline: Timeline, liveness: Liveness, place: Places) -> None:
        self.place: list[int] = place.tolist()
        self.nbytes: list[int] = timeline.storages.nbytes.tolist()
        self.padded: list[int] = timeline.storages.padded_bytes.tolist()
        self.packed_s: list[float] = timeline.storages.pack_s.tolist()
        self.freed_s: list[float] = liveness.freed_s.tolist()
        self.state = [0] * len(self.place)


@dataclass(slots=True)
class Offloading:
    """The way out of device memory, in forward."""

    _storages: Storages
    _clock: ReplayClock
    _drive: DriveQueues
    _staging: StagingSlots
    _copies: Copies
    _pacing: Pacing | None
    _paced_host_bytes: int = 0
    _paced_write_bytes: int = 0

    def pack(self, storage: int, at_s: float) -> None:
        """A storage is saved that is placed elsewhere than in device memory."""
        place = self._storages.place
        if place[storage] == NVME:
            self._pack_to_nvme(storage, at_s)
        if place[storage] == HOST:
            self._copies.copy_out(storage, at_s + self._clock.shift_s)

    def _pack_to_nvme(self, storage: int, at_s: float) -> None:
        now_s = at_s + self._clock.shift_s
        self._drive.advance(now_s)
        now_s = self._wait_for_slot(storage, at_s, now_s)
        if self._storages.place[storage] == NVME:
            self._staging.take(self._storages.padded[storage])
            self._drive.write(storage, self._copies.copy_out(storage, now_s))

    def _wait_for_slot(self, storage: int, at_s: float, now_s: float) -> float:
        """Wait until staging has room, or give up; when it has."""
        started_s, drive, staging, padded = now_s, self._drive, self._staging, self._storages.padded[storage]
        staging.settle(drive.now_s, at_s)
        while not staging.has_room(padded):
            free_s = staging.next_free_s
            if self._pacing is not None or not (drive.writes_under_way or free_s is not None):
                break
            if free_s is not None:
                now_s = max(now_s, free_s)
                drive.advance(now_s)
            else:
                now_s = max(now_s, drive.advance_past_a_write())
            staging.settle(drive.now_s, at_s)
        if now_s > started_s:
            self._clock.stall(storage, now_s - started_s)
        self._settle_place(storage, staging.has_room(padded))
        return now_s

    def _settle_place(self, storage: int, has_room: bool) -> None:
        pacing, storages = self._pacing, self._storages
        nbytes, padded = storages.nbytes[storage], storages.padded[storage]
        if pacing is None:
            storages.place[storage] = NVME if has_room else KEEP
        elif has_room and self._paced_write_bytes + padded <= pacing.write_limit_bytes:
            self._paced_write_bytes += padded
        elif self._paced_host_bytes + nbytes <= pacing.host_budget_bytes:
            self._paced_host_bytes += nbytes
            storages.place[storage] = HOST
        else:
            storages.place[storage] = KEEP


# The memory timeline of a replay: device memory and the host tier, in bytes.


@dataclass(frozen=True, slots=True)
class Moves:
    """Where a replay had each storage and when, on the replay's clock.

    Attributes:
        place: of each storage, in the end.
        copied_s: the copy out of device memory is done; 0 where there is none.
        allocated_s: device memory is taken again.
    """

    place: Places
    copied_s: Floats
    allocated_s: Floats


def peak_saved_bytes(timeline: Timeline, liveness: Liveness, clock: ReplayClock, moves: Moves) -> int:
    """Most device bytes that storages held at once; what begins when another ends counts with it."""
    storages, exists, dropped = timeline.storages, liveness.exists, liveness.dropped
    nbytes = storages.nbytes
    packed_s = clock.shifted(storages.pack_s, after=False)
    left_s = clock.shifted(storages.last_forward_use_s, after=True)
    freed_s = clock.shifted(liveness.freed_s, after=True)
    gone = moves.place != Placement.KEEP
    first_end_s = np.where(gone, np.maximum(moves.copied_s, left_s), np.where(dropped, left_s, freed_s))
    again = exists & ((gone & liveness.used) | dropped)
    again_s = np.where(dropped, _made_again_s(timeline, dropped, clock.recompute_at_s), moves.allocated_s)
    begins = np.concatenate([packed_s[exists], again_s[again]])
    ends = np.concatenate([first_end_s[exists], freed_s[again]])
    return _peak(begins, ends, np.concatenate([nbytes[exists], nbytes[again]]))


def peak_host_bytes(timeline: Timeline, liveness: Liveness, clock: ReplayClock, place: Places) -> int:
    """Most bytes that the host tier held at once."""
    on_host = place == Placement.HOST
    return _peak(
        clock.shifted(timeline.storages.pack_s[on_host], after=False),
        clock.shifted(liveness.freed_s[on_host], after=True),
        timeline.storages.nbytes[on_host],
    )


def _made_again_s(timeline: Timeline, dropped: Bools, recompute_at_s: Floats) -> Floats:
    owner = np.where(dropped, timeline.storages.owner, 0)
    if not dropped.any():
        return np.zeros(len(owner))
    into_s = np.minimum(timeline.storages.made_again_s, timeline.blocks.recompute_s[owner])
    return np.asarray(recompute_at_s[owner] + into_s)


def _peak(begins: Floats, ends: Floats, nbytes: Ints) -> int:
    times = np.concatenate([begins, np.maximum(begins, ends)])
    changes = np.concatenate([nbytes, -nbytes])
    order = np.lexsort((-changes, times))
    return int(np.cumsum(changes[order]).max(initial=0))
