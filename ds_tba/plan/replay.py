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
import numpy.typing as npt

from ds_tba.config import IO_ALIGNMENT_BYTES, PREFETCH_FRACTION_OF_STAGING, Placement
from ds_tba.plan.plan import Prediction
from ds_tba.plan.trace import OUTSIDE, Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Int8s = npt.NDArray[np.int8]

SLOWER = 1.25
MIN_DISTANCE = 2

KEEP, HOST, NVME = Placement.KEEP, Placement.HOST, Placement.NVME
# Events, in this order where they happen at the same time.
_PACK, _BEGIN, _USE, _AGAIN = range(4)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A choice for every storage and every block."""

    # Where a storage exists. RECOMPUTE is as KEEP, as it follows from ``recomputed``, and so is what no store would
    # take, and REMATERIALIZE where a source does not exist or is dropped.
    placements: Int8s
    recomputed: Bools


class Timeline:
    """The columns of a trace: of its storages, and of its blocks."""

    def __init__(self, trace: Trace) -> None:
        rows, blocks = trace.storages, trace.blocks
        self.trace = trace
        self.nbytes: Ints = np.array([row.nbytes for row in rows], np.int64)
        self.padded_bytes: Ints = -(-self.nbytes // IO_ALIGNMENT_BYTES) * IO_ALIGNMENT_BYTES  # in staging, on a drive
        self.pack_s: Floats = np.array([row.pack_s for row in rows], float)
        self.left_s: Floats = np.array([row.last_forward_use_s for row in rows], float)
        self.used_s: Floats = np.array([row.first_backward_use_s for row in rows], float)
        self.freed_s: Floats = np.array([row.freed_s for row in rows], float)
        self.movable: Bools = np.array([row.is_movable for row in rows], bool)
        self.to_nvme: Bools = self.movable & (trace.resources.write_bytes_per_s > 0)
        self.used: Bools = np.array([row.is_used for row in rows], bool)
        # Else only where a block that reads a storage is recomputed.
        self.saved: Bools = np.array([bool(row.blocks) for row in rows], bool)
        # The block whose recomputation makes a storage again; -1 where several blocks saved it, or none.
        self.owner: Ints = np.array([row.blocks[0] if len(row.blocks) == 1 else OUTSIDE for row in rows], np.int64)
        # From its sources; not a number where that cannot be.
        self.rematerialize_s: Floats = np.array([row.rematerialize_s for row in rows], float)
        self.recompute_s: Floats = np.array([one.forward_end_s - one.forward_start_s for one in blocks], float)
        self.backward_start_s: Floats = np.array([block.backward_start_s for block in blocks], float)
        self.recomputable: Bools = np.array([block.is_recomputable for block in blocks], bool)
        # Pairs of a storage and a block: that reads and does not produce it, and also those that saved it.
        inputs = [(index, number) for number, block in enumerate(blocks) for index in block.inputs]
        savers = [(index, number) for index, row in enumerate(rows) for number in row.blocks if number != OUTSIDE]
        self.inputs, self.readers = _pairs(inputs), _pairs(inputs + savers)
        # Pairs of a storage and one that it can be rematerialized from, in the order of the former.
        made = [(index, row) for index, row in enumerate(rows) if row.rematerialize_s is not None]
        self.sources = _pairs([(index, source) for index, row in made for source in dict.fromkeys(row.sources)])

    @property
    def kept(self) -> Assignment:
        """Return the assignment that offloads and recomputes nothing."""
        return Assignment(np.zeros(len(self.nbytes), np.int8), np.zeros(len(self.recompute_s), np.bool_))

    def alike_forwards(self) -> int:
        """Return how many alternating forwards make the micro-step, if all of them are alike; else 1."""
        trace, count = self.trace, len(self.trace.forwards)
        storages = [(row.module, row.is_movable, bool(row.sources)) for row in trace.storages]
        blocks = [block.module for block in trace.blocks]
        per_forward, blocks_per_forward = (len(rows) // max(1, count) for rows in (storages, blocks))
        is_alike = (
            trace.forwards == tuple(per_forward * number for number in range(count))
            and storages == storages[:per_forward] * count
            and blocks == blocks[:blocks_per_forward] * count
        )
        return count if count and is_alike else 1


def _pairs(pairs: list[tuple[int, int]]) -> Ints:
    return np.asarray(np.array(pairs, np.int64).reshape(-1, 2).T)


class Replay:
    """One micro-step, played to its end. Times are of the replay, those named ``at_s`` and arrays are of the trace.

    Args:
        distance: see ``Plan.prefetch_distance``; None to find the one that is just in time.
        may_wait: whether compute waits; else what finds no room in staging is kept, and other waits are only noted.
    """

    def __init__(
        self, timeline: Timeline, assignment: Assignment, distance: Sequence[int] | None = (), *, may_wait: bool = True
    ) -> None:
        self._timeline = timeline
        self._resources = timeline.trace.resources
        self._may_wait = may_wait
        # Lists, as indexing an array is slower.
        self._place: list[int] = self._places(assignment).tolist()
        self._nbytes: list[int] = timeline.nbytes.tolist()
        self._padded: list[int] = timeline.padded_bytes.tolist()
        self._packed_at_s: list[float] = timeline.pack_s.tolist()
        # When the queues of writes, reads, copies out and copies in are free.
        self._writes_s = self._reads_s = self._out_s = self._in_s = 0.0
        count, blocks = len(self._place), len(timeline.recompute_s)
        self._copied_s, self._written_s, self._arrived_s = [0.0] * count, [0.0] * count, [0.0] * count
        # When each storage takes device memory again, and when each block's recomputation begins.
        self._back_s = [0.0] * (count + blocks)
        # The clock: by how much the replay is behind the trace, and since when.
        self._shift_s = self._stall_s = 0.0
        self._shifts: list[tuple[float, float]] = []
        self.stalls: list[tuple[int, float]] = []  # the storages for which compute waited, and the seconds, in order
        # Staging: what is to be written, and what is there for backward, with the bytes that were read for it.
        self._unwritten: deque[int] = deque()
        self._ahead: dict[int, int] = {}
        self._staged_bytes = self._ahead_bytes = self._peak_staging_bytes = 0
        self._written_bytes = self._read_bytes = self._forwarded_bytes = 0
        # Reloads, in order: those before the cursor were asked for.
        self._distance = distance
        self._cursor = self._used = 0
        self._took_s = np.concatenate([timeline.rematerialize_s, timeline.recompute_s])
        self._order, self._events = self._schedule()
        acts = self._pack, self._begin, self._use, self._make_again
        for at_s, kind, which in self._events:
            before_s = self._shift_s
            acts[kind](which, at_s)
            if self._shift_s != before_s:
                self._shifts.append((at_s, self._shift_s))
        # Where each storage really was: KEEP for those that do not exist or found no room.
        self.assignment = Assignment(np.array(self._place, np.int8), self._recomputed)
        self.prefetch_distance = tuple(self._distance or ())
        self.cost = self._cost()

    def _places(self, assignment: Assignment) -> Int8s:
        """Find what is saved, where, and until when; return the placements that can be kept to."""
        timeline = self._timeline
        self._recomputed = assignment.recomputed & timeline.recomputable
        is_input = np.zeros(len(timeline.nbytes), bool)
        is_input[timeline.inputs[0, self._recomputed[timeline.inputs[1]]]] = True
        self.exists = timeline.saved | is_input  # saved at all
        # In forward: the block that runs again makes it, but for its inputs. The -1 of no block picks the False.
        self.dropped = np.append(self._recomputed, False)[timeline.owner] & ~is_input
        self.need_s = timeline.used_s.copy()  # first needed in backward
        self.freed_s = timeline.freed_s.copy()  # no longer needed by anyone
        self.used = timeline.used.copy()  # needed in backward at all
        storage, block = timeline.readers[:, self._recomputed[timeline.readers[1]]]
        np.minimum.at(self.need_s, storage, timeline.backward_start_s[block])
        self.need_s = np.maximum(self.need_s, timeline.left_s)
        self.used[storage] = True  # by the block that runs again, also where backward itself never asks
        there = self.exists & ~self.dropped
        again = there & ~np.isnan(timeline.rematerialize_s) & (assignment.placements == Placement.REMATERIALIZE)
        again[timeline.sources[0, ~there[timeline.sources[1]]]] = False  # of a dropped source nothing can be made
        moves = [assignment.placements == HOST, assignment.placements == NVME]
        can = np.select(moves, [there & timeline.movable, there & timeline.to_nvme], again)
        # A source is needed when the first of what is made of it is; it comes before that, so that chains follow.
        for made, source in timeline.sources[:, again[timeline.sources[0]]].T[::-1].tolist():
            self.need_s[source] = max(timeline.left_s[source], min(self.need_s[source], self.need_s[made]))
            self.freed_s[source] = max(self.freed_s[source], self.need_s[made])
            self.used[source] |= self.used[made]
        return np.where(can, assignment.placements, KEEP)

    def _schedule(self) -> tuple[list[int], list[tuple[float, int, int]]]:
        """Return the order of first uses of what is offloaded, and the events in order (time, kind, storage or block).

        Where times are equal, later packs are used first. Blocks are counted after the storages.
        """
        timeline, places, need_s = self._timeline, np.array(self._place), self.need_s
        moved = np.flatnonzero((places == HOST) | (places == NVME))
        order = moved[np.lexsort((-moved, need_s[moved]))]
        order = order[self.used[order]]
        self._made = np.flatnonzero((places == Placement.REMATERIALIZE) & self.used)
        blocks = np.flatnonzero(self._recomputed)
        again = np.concatenate([self._made, blocks + len(places)])
        again_s = np.concatenate([need_s, timeline.backward_start_s])[again]
        # Reading ahead begins with the first unpack of the micro-step, whatever it is of.
        starts = np.concatenate([need_s[self.exists & self.used], timeline.backward_start_s[blocks]])
        begin_s = np.array([starts.min()]) if len(starts) and len(moved) else np.zeros(0)
        times, which = [timeline.pack_s[moved], begin_s, need_s[order], again_s], [moved, begin_s, order, again]
        kind = np.repeat([_PACK, _BEGIN, _USE, _AGAIN], [len(one) for one in times])
        at_s, index = np.concatenate(times), np.concatenate(which).astype(np.int64)
        sequence = np.lexsort((kind, at_s))
        events = zip(at_s[sequence].tolist(), kind[sequence].tolist(), index[sequence].tolist(), strict=True)
        return order.tolist(), list(events)

    def _wait(self, storage: int, seconds: float) -> None:
        """Have compute wait for a storage."""
        if seconds > 0:
            self.stalls.append((storage, seconds))
            self._stall_s += seconds * self._may_wait
            self._shift_s += seconds * self._may_wait

    # ---- out, in forward ----------------------------------------------------------------------------------------

    def _pack(self, storage: int, at_s: float) -> None:
        resources, padded = self._resources, self._padded[storage]
        on_drive = self._place[storage] == NVME
        staged_bytes = min(padded, resources.staging_bytes)
        now_s = asked_s = at_s + self._shift_s
        if on_drive:
            self._settle(now_s)
            while self._may_wait and self._unwritten and not self._has_room(staged_bytes):
                now_s = max(now_s, self._written_s[self._unwritten[0]])
                self._settle(now_s)
            # No write will make room, so the store refuses; it also refuses pieces where nobody waits.
            if not self._has_room(staged_bytes if self._may_wait else padded):
                self._place[storage] = KEEP
                return
            now_s += (padded - staged_bytes) / resources.write_bytes_per_s  # pieces follow those that are written
        self._wait(storage, now_s - asked_s)
        took_s = self._nbytes[storage] / resources.copy_out_bytes_per_s
        compute_s = self._nbytes[storage] * resources.compute_s_per_byte
        if resources.is_synchronous:
            copied_s = now_s + (compute_s := compute_s + took_s)
        else:
            copied_s = self._out_s = max(self._out_s, now_s) + took_s
        self._copied_s[storage] = copied_s
        self._wait(storage, compute_s)
        if on_drive:
            self._writes_s = max(self._writes_s, copied_s) + staged_bytes / resources.write_bytes_per_s
            self._written_s[storage] = self._writes_s
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
            self._order = [storage for storage in self._order if self._place[storage] != KEEP]
            self._distance = self._just_in_time(np.array(self._order, np.int64))
        self._read_ahead(at_s)

    def _read_ahead(self, at_s: float) -> None:
        """Ask for what is used next, as far as staging and the distance allow."""
        now_s = at_s + self._shift_s
        self._settle(now_s)
        order, distance = self._order, self._distance or ()
        reach = min(len(order), self._used + distance[self._used]) if self._used < len(distance) else len(order)
        while self._cursor < reach and self._packed_at_s[order[self._cursor]] <= at_s:
            storage = order[self._cursor]
            on_drive = self._place[storage] == NVME
            if on_drive or (self._place[storage] == HOST and not self._resources.is_synchronous):
                padded = 0 if self._is_in_staging(storage, now_s) else self._padded[storage]
                part = PREFETCH_FRACTION_OF_STAGING if on_drive and self._writes_s > now_s else 1.0
                is_over = self._ahead_bytes + padded > part * self._resources.staging_bytes
                # One alone may be larger than the bound.
                if padded and ((is_over and self._ahead_bytes) or (on_drive and not self._has_room(padded))):
                    return
                self._ahead[storage] = padded
                self._ahead_bytes += padded
                self._stage(padded if on_drive else 0)
                self._bring(storage, now_s)
            self._cursor += 1

    def _use(self, storage: int, at_s: float) -> None:
        if self._place[storage] != KEEP:  # else it found no room at pack
            self._used += 1
            self._take(storage, at_s + self._shift_s)
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
            self._staged_bytes -= padded if self._place[storage] == NVME and written_s <= now_s else 0
        if is_in_staging:  # handed over, or not written at all
            write_s = padded / self._resources.write_bytes_per_s
            if written_s - write_s > now_s:  # not begun: the drive goes on with the next, and is not worn for this one
                self._writes_s = max(now_s, self._writes_s - write_s)
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
        there_s = max(now_s, self._copied_s[storage])
        if self._place[storage] == NVME:
            read_s = self._padded[storage] / self._resources.read_bytes_per_s
            there_s = self._reads_s = max(self._reads_s, now_s, self._written_s[storage]) + read_s
            self._read_bytes += self._padded[storage]
        self._back_s[storage] = self._arrived_s[storage] = there_s
        if not self._resources.is_synchronous:
            self._arrived_s[storage] = self._in_s = max(self._in_s, there_s) + took_s

    def _just_in_time(self, order: Ints) -> list[int]:
        """Return the prefetch distance for these reloads; see [Note: Latest starts]."""
        timeline, resources, need_s = self._timeline, self._resources, self.need_s[order]
        again = [(at_s, self._took_s[which]) for at_s, kind, which in self._events if kind == _AGAIN]
        again_s, took_s = np.array(again).reshape(-1, 2).T
        use_s = need_s + self._stall_s + np.append(0.0, np.cumsum(took_s))[np.searchsorted(again_s, need_s, "left")]
        on_drive = np.array(self._place)[order] == NVME
        copy_s = np.where(resources.is_synchronous, 0.0, timeline.nbytes[order] / resources.copy_in_bytes_per_s)
        read_s = np.where(on_drive, timeline.padded_bytes[order], 0) / (resources.read_bytes_per_s or 1.0)
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

    def _cost(self) -> Prediction:
        timeline, times = self._timeline, self._timeline.trace.micro_steps
        on_host = self.assignment.placements == HOST
        packed_s, freed_s = self._on_clock(timeline.pack_s, "left"), self._on_clock(self.freed_s, "right")
        return Prediction(
            self._peak_device_bytes(packed_s, freed_s),
            (timeline.trace.end_s + self._shift_s) * times + timeline.trace.optimizer_s,
            self._stall_s * times,
            float(timeline.recompute_s[self._recomputed].sum()) * times,
            self._written_bytes * times,
            self._read_bytes * times,
            self._forwarded_bytes * times,
            _peak(packed_s[on_host], freed_s[on_host], timeline.nbytes[on_host]),
            self._peak_staging_bytes,
            float(timeline.rematerialize_s[self._made].sum()) * times,
        )

    def _peak_device_bytes(self, packed_s: Floats, freed_s: Floats) -> int:
        """Return the most device bytes that storages hold at once; what begins when another ends counts with it."""
        exists, dropped = self.exists, self.dropped
        nbytes = self._timeline.nbytes
        left_s = self._on_clock(self._timeline.left_s, "right")
        gone = self.assignment.placements != KEEP
        # A copy under way holds the bytes, also when forward has long released them.
        end_s = np.where(gone, np.maximum(self._copied_s, left_s), np.where(dropped, left_s, freed_s))
        again = exists & ((gone & self.used) | dropped)  # a loss that is kept with its graph never comes back
        back_s, from_s = np.array(self._back_s[: len(nbytes)]), np.array([*self._back_s[len(nbytes) :], 0.0])
        back_s = np.where(dropped, from_s[self._timeline.owner], back_s)
        return _peak(
            np.concatenate([packed_s[exists], back_s[again]]),
            np.concatenate([end_s[exists], freed_s[again]]),
            np.concatenate([nbytes[exists], nbytes[again]]),
        )

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
