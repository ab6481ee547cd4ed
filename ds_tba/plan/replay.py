"""One micro-step under an assignment: how long it takes, and how many bytes it holds at most.

[Note: Replay model] Compute is one stream that waits. Writes, reads, and the copies of either way are queues, served
one transfer at a time: each ends its own duration after it was asked for or the one before has ended, whichever is
later. A storage on its way to NVMe takes a place in staging at pack, is copied out, and is written; compute waits at
pack until writes have left room. In backward reads are asked for in the order of first use: as far as half of staging
while there are writes, else as far as all of it, and no further than the prefetch distance says. A storage that is
still being written by then stays in staging and is not read; one whose write has not begun at its use is not written
either. A storage that is larger than staging passes through all of it in pieces: compute waits at pack until no more of
it is left than staging holds, and at its use. What backward never uses does not come back. Host memory is the same
without staging and drive. A recomputed block runs its forward again and makes its storages anew; a rematerialized
storage is made at its first use.

It is a model of averages. What it leaves out (lanes that share a drive unevenly, writes that slow when reads begin,
kernels that copies slow) shows in the measured steps, which ``feedback.py`` answers, and costs time, never memory.

[Note: Synchronous devices] There the training thread does the copies, and compute waits for them. Nothing is copied
ahead; what was read is used where it lies, in staging.

[Note: Latest starts] First uses are walked backwards: each reload ends before its use (a read before its copy begins)
and before the next one begins. It lasts as long as the longer of its read and its copy, ``SLOWER`` times as long as
measured. Each storage is asked for at the use before the one that its start allows: a reload that comes too late costs
time, where one that comes too early costs only memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ds_tba.config import PREFETCH_FRACTION_OF_STAGING, Placement
from ds_tba.plan.plan import Prediction
from ds_tba.plan.timeline import Assignment, Bools, Floats, Ints, Spans, Timeline

SLOWER = 1.25
MIN_DISTANCE = 2

_KEEP, _HOST, _NVME = int(Placement.KEEP), int(Placement.HOST), int(Placement.NVME)
# In this order where they happen at the same time.
_PACK, _BEGIN, _USE, _AGAIN = range(4)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a replay.

    Attributes:
        assignment: where each storage really was: KEEP for those that do not exist or found no room.
        dropped: storages that the recomputation of their block makes again.
        cost: of a step.
        stalls: the storages for which compute waited, and the seconds, in order.
        prefetch_distance: that was kept to, as in ``Plan``.
    """

    assignment: Assignment
    dropped: Bools
    cost: Prediction
    stalls: list[tuple[int, float]]
    prefetch_distance: tuple[int, ...]


class _Queue:
    """Transfers one at a time, in the order in which they are asked for."""

    def __init__(self) -> None:
        self.free_s = 0.0

    def serve(self, from_s: float, took_s: float) -> float:
        """Return when a transfer is done that may begin at ``from_s``."""
        self.free_s = max(self.free_s, from_s) + took_s
        return self.free_s


class _Replay:
    """One micro-step in progress. Times are of the replay, unless they are named ``at_s``: these are of the trace."""

    def __init__(
        self, timeline: Timeline, assignment: Assignment, distance: Sequence[int] | None, may_wait: bool
    ) -> None:
        resources, lifetimes = timeline.trace.resources, timeline.lifetimes(assignment)
        self._timeline, self._resources, self._lifetimes = timeline, resources, lifetimes
        self._may_wait = may_wait
        # Lists, as indexing an array is slower.
        self._place: list[int] = lifetimes.placements.tolist()
        self._nbytes: list[int] = timeline.nbytes.tolist()
        self._padded: list[int] = timeline.padded_bytes.tolist()
        self._packed_at_s: list[float] = timeline.pack_s.tolist()
        drive = resources.drives
        self._read_beside = drive.read_beside_write_bytes_per_s
        self._write_rate, self._read_rate = drive.write_bytes_per_s, drive.read_bytes_per_s
        if timeline.trace.forwards:  # writes and reads alternate all the time
            self._write_rate, self._read_rate = drive.write_beside_read_bytes_per_s, self._read_beside
        self._writes, self._reads, self._out, self._in = _Queue(), _Queue(), _Queue(), _Queue()
        count, blocks = len(self._place), len(timeline.recompute_s)
        self._copied_s, self._written_s = [0.0] * count, [0.0] * count
        self._arrived_s = [0.0] * count
        # When each storage takes device memory again, and when each block's recomputation begins.
        self._back_s = [0.0] * (count + blocks)
        # The clock: by how much the replay is behind the trace, and since when.
        self._shift_s = self._stall_s = 0.0
        self._shifts: list[tuple[float, float]] = []
        self._stalls: list[tuple[int, float]] = []
        # Staging: what is to be written, and what is there for backward, with the bytes that were read for it.
        self._unwritten: deque[int] = deque()
        self._ahead: dict[int, int] = {}
        self._staged_bytes = self._ahead_bytes = self._peak_staging_bytes = 0
        self._written_bytes = self._read_bytes = self._forwarded_bytes = 0
        # Reloads, in order: those before the cursor were asked for.
        self._distance = distance
        self._cursor = self._used = 0
        self._order, self._events = self._schedule()

    def run(self, beside: Spans | None) -> Outcome:
        """Play it all; what is held beside storages is part of the peak."""
        acts = self._pack, self._begin, self._use, self._make_again
        for at_s, kind, which in self._events:
            before_s = self._shift_s
            acts[kind](which, at_s)
            if self._shift_s != before_s:
                self._shifts.append((at_s, self._shift_s))
        lifetimes = self._lifetimes
        return Outcome(
            Assignment(np.array(self._place, np.int8), lifetimes.recomputed),
            lifetimes.dropped,
            self._cost(beside),
            self._stalls,
            tuple(self._distance or ()),
        )

    def _schedule(self) -> tuple[list[int], list[tuple[float, int, int]]]:
        """Return the order of first uses of what is offloaded, and the events in order (time, kind, storage or block).

        Where times are equal, later packs are used first. Blocks are counted after the storages.
        """
        timeline, lifetimes = self._timeline, self._lifetimes
        placements, need_s = lifetimes.placements, lifetimes.need_s
        moved = np.flatnonzero((placements == _HOST) | (placements == _NVME))
        order = moved[np.lexsort((-moved, need_s[moved]))]
        order = order[lifetimes.used[order]]
        self._made = np.flatnonzero((placements == Placement.REMATERIALIZE) & lifetimes.used)
        blocks = np.flatnonzero(lifetimes.recomputed)
        again_s = np.concatenate([need_s, timeline.backward_start_s])
        again = np.concatenate([self._made, blocks + len(placements)])
        self._again_at_s = np.sort(again_s[again])
        self._took_s = np.concatenate([timeline.rematerialize_s, timeline.recompute_s])
        self._again_until_s = np.append(0.0, np.cumsum(self._took_s[again[np.argsort(again_s[again], kind="stable")]]))
        # Reading ahead begins with the first unpack of the micro-step, whatever it is of.
        starts = np.concatenate([need_s[lifetimes.exists], timeline.backward_start_s[blocks]])
        begin_s = np.array([starts.min()]) if len(starts) and len(moved) else np.zeros(0)
        times, which = [timeline.pack_s[moved], begin_s, need_s[order], again_s[again]], [moved, begin_s, order, again]
        kind = np.repeat([_PACK, _BEGIN, _USE, _AGAIN], [len(one) for one in times])
        at_s, index = np.concatenate(times), np.concatenate(which).astype(np.int64)
        sequence = np.lexsort((kind, at_s))
        events = zip(at_s[sequence].tolist(), kind[sequence].tolist(), index[sequence].tolist(), strict=True)
        return order.tolist(), list(events)

    def _wait(self, storage: int, seconds: float) -> None:
        """Have compute wait for a storage."""
        if seconds > 0:
            self._stalls.append((storage, seconds))
            self._stall_s += seconds * self._may_wait
            self._shift_s += seconds * self._may_wait

    # ---- out, in forward ----------------------------------------------------------------------------------------

    def _pack(self, storage: int, at_s: float) -> None:
        resources, padded = self._resources, self._padded[storage]
        on_drive, staged_bytes = self._place[storage] == _NVME, min(padded, resources.staging_bytes)
        now_s = asked_s = at_s + self._shift_s
        if on_drive:
            self._settle(now_s)
            while self._may_wait and self._unwritten and not self._has_room(staged_bytes):
                now_s = max(now_s, self._written_s[self._unwritten[0]])
                self._settle(now_s)
            # No write makes room, and waiting would never end: the store refuses, as it does pieces where nobody waits.
            if not self._has_room(staged_bytes if self._may_wait else padded):
                self._place[storage] = _KEEP
                return
            now_s += (padded - staged_bytes) / self._write_rate  # pieces follow those that are written
        self._wait(storage, now_s - asked_s)
        took_s = self._nbytes[storage] / resources.copy_out_bytes_per_s
        compute_s = self._nbytes[storage] * resources.compute_s_per_byte
        if resources.is_synchronous:
            compute_s += took_s
        copied_s = now_s + compute_s if resources.is_synchronous else self._out.serve(now_s, took_s)
        self._copied_s[storage] = copied_s
        self._wait(storage, compute_s)
        if on_drive:
            self._written_s[storage] = self._writes.serve(copied_s, staged_bytes / self._write_rate)
            self._written_bytes += padded
            self._unwritten.append(storage)
            self._stage(staged_bytes)

    def _settle(self, now_s: float) -> None:
        """Free the staging of what is written by now, unless backward gets it from there."""
        while self._unwritten and self._written_s[self._unwritten[0]] <= now_s:
            storage = self._unwritten.popleft()
            if storage not in self._ahead:
                self._staged_bytes -= min(self._padded[storage], self._resources.staging_bytes)

    def _stage(self, padded: int) -> None:
        self._staged_bytes += padded
        self._peak_staging_bytes = max(self._peak_staging_bytes, self._staged_bytes)

    def _has_room(self, padded: int) -> bool:
        return self._staged_bytes + padded <= self._resources.staging_bytes

    # ---- back, in backward --------------------------------------------------------------------------------------

    def _begin(self, _which: int, at_s: float) -> None:
        """Begin backward: it is known what was offloaded."""
        if self._distance is None:
            self._order = [storage for storage in self._order if self._place[storage] != _KEEP]
            self._distance = self._just_in_time(np.array(self._order, np.int64))
        self._read_ahead(at_s)

    def _use(self, storage: int, at_s: float) -> None:
        now_s = at_s + self._shift_s
        if self._place[storage] != _KEEP:  # else it found no room at pack
            self._used += 1
            self._take(storage, now_s)
        self._cursor += self._cursor < len(self._order) and self._order[self._cursor] == storage
        self._read_ahead(at_s)

    def _take(self, storage: int, now_s: float) -> None:
        """Have compute wait for a storage that is needed now."""
        self._settle(now_s)
        padded, written_s = self._padded[storage], self._written_s[storage]
        is_in_staging = self._is_in_staging(storage, now_s)
        took_s = self._nbytes[storage] / self._resources.copy_in_bytes_per_s
        if storage not in self._ahead:
            self._bring(storage, now_s)
        else:
            self._ahead_bytes -= self._ahead.pop(storage)
            self._staged_bytes -= padded if self._place[storage] == _NVME and written_s <= now_s else 0
        if is_in_staging:  # handed over, or not written at all
            write_s = padded / self._write_rate
            if written_s - write_s > now_s:  # not begun: the drive goes on with the next, and is not worn for this one
                self._writes.free_s = max(now_s, self._writes.free_s - write_s)
                self._written_bytes -= padded
            self._arrived_s[storage] = now_s + took_s
            self._back_s[storage] = now_s
        elif self._resources.is_synchronous:  # the host copies it
            self._arrived_s[storage] = self._back_s[storage] = max(now_s, self._arrived_s[storage]) + took_s
        self._wait(storage, self._arrived_s[storage] - now_s)

    def _is_in_staging(self, storage: int, now_s: float) -> bool:
        """Return whether all of a storage is there on its way to the drive."""
        return self._written_s[storage] > now_s and self._padded[storage] <= self._resources.staging_bytes

    def _bring(self, storage: int, now_s: float) -> None:
        """Ask for the reload of a storage."""
        took_s = self._nbytes[storage] / self._resources.copy_in_bytes_per_s
        if self._is_in_staging(storage, now_s):
            self._forwarded_bytes += self._nbytes[storage]
            self._back_s[storage] = self._written_s[storage]
            self._arrived_s[storage] = self._written_s[storage] + took_s  # copies of what was read do not wait for it
            return
        on_drive = self._place[storage] == _NVME
        begin_s = max(now_s, self._written_s[storage] if on_drive else self._copied_s[storage])
        there_s = self._read(begin_s, self._padded[storage]) if on_drive else begin_s
        self._back_s[storage] = there_s
        self._arrived_s[storage] = there_s if self._resources.is_synchronous else self._in.serve(there_s, took_s)

    def _read(self, now_s: float, padded: int) -> float:
        """Return when a read is done: slower as long as there are writes."""
        beside_s = max(0.0, self._writes.free_s - max(now_s, self._reads.free_s))
        took_s = padded / self._read_beside
        if took_s > beside_s:
            took_s = beside_s + (padded - self._read_beside * beside_s) / self._read_rate
        self._read_bytes += padded
        return self._reads.serve(now_s, took_s)

    def _read_ahead(self, at_s: float) -> None:
        """Ask for what is used next, as far as staging and the distance allow."""
        now_s = at_s + self._shift_s
        self._settle(now_s)
        order, distance = self._order, self._distance or ()
        reach = min(len(order), self._used + distance[self._used]) if self._used < len(distance) else len(order)
        while self._cursor < reach and self._packed_at_s[order[self._cursor]] <= at_s:
            storage = order[self._cursor]
            on_drive = self._place[storage] == _NVME
            if on_drive or (self._place[storage] == _HOST and not self._resources.is_synchronous):
                padded = 0 if self._is_in_staging(storage, now_s) else self._padded[storage]
                part = PREFETCH_FRACTION_OF_STAGING if on_drive and self._writes.free_s > now_s else 1.0
                is_over = self._ahead_bytes + padded > part * self._resources.staging_bytes
                # One alone may be larger than the bound.
                if padded and ((is_over and self._ahead_bytes) or (on_drive and not self._has_room(padded))):
                    return
                self._ahead[storage] = padded
                self._ahead_bytes += padded
                self._stage(padded if on_drive else 0)
                self._bring(storage, now_s)
            self._cursor += 1

    def _just_in_time(self, order: Ints) -> list[int]:
        """Return the prefetch distance for these reloads; see [Note: Latest starts]."""
        timeline, resources, need_s = self._timeline, self._resources, self._lifetimes.need_s[order]
        use_s = need_s + self._stall_s + self._again_until_s[np.searchsorted(self._again_at_s, need_s, "left")]
        on_drive = np.array(self._place)[order] == _NVME
        rate = np.where(use_s <= self._writes.free_s, self._read_beside, self._read_rate)
        copy_s = np.where(resources.is_synchronous, 0.0, timeline.nbytes[order] / resources.copy_in_bytes_per_s)
        read_s = np.divide(timeline.padded_bytes[order], rate, out=np.zeros(len(order)), where=on_drive)
        before_s = np.concatenate([[0.0], np.cumsum(np.maximum(read_s, copy_s) * SLOWER)])
        slack_s = use_s - np.where(on_drive, copy_s, 0.0) * SLOWER - before_s[1:]
        starts_s = before_s[:-1] + np.minimum.accumulate(slack_s[::-1])[::-1]
        number = np.arange(len(order))
        asked_after = np.searchsorted(use_s, starts_s, "right")
        # At the last moment itself a plan whose times are a little wrong would wait.
        asked_after = np.clip(asked_after, 0, np.maximum(number - (MIN_DISTANCE - 1), 0))
        return (np.searchsorted(asked_after, number, "right") - number).tolist()

    def _make_again(self, which: int, at_s: float) -> None:
        self._back_s[which] = at_s + self._shift_s
        self._shift_s += float(self._took_s[which])

    # ---- what it came to ----------------------------------------------------------------------------------------

    def _cost(self, beside: Spans | None) -> Prediction:
        timeline, lifetimes, times = self._timeline, self._lifetimes, self._timeline.trace.micro_steps
        on_host = np.array(self._place) == _HOST
        return Prediction(
            self._peak_device_bytes(beside),
            (timeline.trace.end_s + self._shift_s) * times + timeline.trace.optimizer_s,
            self._stall_s * times,
            float(timeline.recompute_s[lifetimes.recomputed].sum()) * times,
            self._written_bytes * times,
            self._read_bytes * times,
            self._forwarded_bytes * times,
            _peak(
                self._on_clock(timeline.pack_s[on_host], "left"),
                self._on_clock(lifetimes.freed_s[on_host], "right"),
                timeline.nbytes[on_host],
            ),
            self._peak_staging_bytes,
            float(timeline.rematerialize_s[self._made].sum()) * times,
        )

    def _peak_device_bytes(self, beside: Spans | None) -> int:
        """Return the most device bytes that storages hold at once; what begins when another ends counts with it."""
        timeline, lifetimes = self._timeline, self._lifetimes
        exists, dropped, nbytes = lifetimes.exists, lifetimes.dropped, timeline.nbytes
        left_s = self._on_clock(timeline.left_s, "right")
        freed_s = self._on_clock(lifetimes.freed_s, "right")
        gone = np.array(self._place) != _KEEP
        # A copy under way holds the bytes, also when forward has long released them.
        end_s = np.where(gone, np.maximum(self._copied_s, left_s), np.where(dropped, left_s, freed_s))
        again = exists & ((gone & lifetimes.used) | dropped)  # a loss that is kept with its graph never comes back
        back_s, from_s = np.array(self._back_s[: len(nbytes)]), np.array([*self._back_s[len(nbytes) :], 0.0])
        back_s = np.where(dropped, from_s[timeline.owner], back_s)
        begins = [self._on_clock(timeline.pack_s, "left")[exists], back_s[again]]
        ends, sizes = [end_s[exists], freed_s[again]], [nbytes[exists], nbytes[again]]
        if beside is not None:
            begins.append(self._on_clock(beside.begins_s, "right"))
            ends.append(self._on_clock(beside.ends_s, "left"))
            sizes.append(beside.nbytes)
        return _peak(np.concatenate(begins), np.concatenate(ends), np.concatenate(sizes))

    def _on_clock(self, at_s: Floats, side: Literal["left", "right"]) -> Floats:
        """Return times of the trace by the replay's clock, before (left) or after (right) events at that very time."""
        times = np.array([at for at, _ in self._shifts])
        shifts = np.array([0.0, *(shift_s for _, shift_s in self._shifts)])
        return np.asarray(at_s + shifts[np.searchsorted(times, at_s, side)])


def _peak(begins: Floats, ends: Floats, nbytes: Ints) -> int:
    times = np.concatenate([begins, np.maximum(begins, ends)])
    changes = np.concatenate([nbytes, -nbytes])
    order = np.lexsort((-changes, times))  # begins first: what ends at the same time counts with it
    return int(np.cumsum(changes[order]).max(initial=0))


def replay(
    timeline: Timeline,
    assignment: Assignment,
    distance: Sequence[int] | None = (),
    *,
    may_wait: bool = True,
    beside: Spans | None = None,
) -> Outcome:
    """Replay an assignment.

    Args:
        distance: see ``Plan.prefetch_distance``; None to find the one that is just in time.
        may_wait: whether compute waits; else what finds no room in staging is kept, and other waits are only noted.
        beside: held on the device, too, and part of the peak.
    """
    return _Replay(timeline, assignment, distance, may_wait).run(beside)
