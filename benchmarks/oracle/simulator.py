"""One micro-step under an assignment, event by event, as the cache and the stores would run it.

[Note: Replay model] Compute is one stream that waits. A storage on its way to NVMe takes a staging slot at pack, and
compute waits for the slot where writes hold all of them. The storage is copied out, then written in its turn, and its
slot is free. In backward, reads go ahead in the order of first use: as far as half of staging while there are writes,
else as far as all of it. A storage that is still being written then is retained in staging when its write ends. At its
use a storage is handed over from staging (a write that has not begun is cancelled), is there already, or is read at
once, ahead of the others, while compute waits.
What backward never uses does not come back.
A storage on its way to host memory is copied out, and copied in ahead of its use as far as the bound of what is ahead.
With a prefetch distance, nothing is asked for earlier than the distance says; see ``prefetch_distance.py``.
I/O and copies may slow the kernels: a storage's share of that (``compute_s_per_byte``) counts at its pack.
A block that is recomputed gets its inputs, runs its forward again, and its other storages are made anew.
A storage that is rematerialized is there until forward no longer needs it, and again from its first use on, for which
compute takes the time to make it. Its sources are needed by then, and stay until then.

[Note: Synchronous devices] There the training thread does the copies and compute waits for them. Autograd uses the
memory of a slot itself after a read or a cancelled write; the slot is free when autograd lets go of the storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ds_tba.config import Placement
from ds_tba.errors import TraceError
from ds_tba.plan.plan import Plan, Prediction
from ds_tba.plan.trace import Resources, Trace
from oracle.plan import Outcome, assignment_of
from oracle.prefetch_distance import BackwardStart, Reloads, prefetch_distance
from oracle.timeline import Assignment, Places, Timeline
from oracle.transfer import (
    FORWARDED,
    HOST,
    KEEP,
    LOADED,
    NVME,
    QUEUED,
    READ_QUEUED,
    READING,
    REMATERIALIZE,
    STORED,
    WRITING,
    Copies,
    DriveQueues,
    Moves,
    Offloading,
    Pacing,
    ReplayClock,
    StagingSlots,
    Storages,
    peak_host_bytes,
    peak_saved_bytes,
)

# A part of staging that reads ahead leave to writes.
PREFETCH_FRACTION_OF_STAGING = 0.5

# In this order where they happen at the same time.
_PACK, _BEGIN, _USE, _REMATERIALIZE, _RECOMPUTE = range(5)


@dataclass(slots=True)
class _Window:
    """The storages that are brought back before their use, and those whose bytes are retained in staging for it."""

    capacity_bytes: int
    prefetched: set[int] = field(default_factory=set)
    retained: set[int] = field(default_factory=set)
    staged_bytes: int = 0
    retained_bytes: int = 0
    host_bytes: int = 0

    def may_read(self, padded: int, *, while_writing: bool) -> bool:
        """Whether one more storage may be read ahead."""
        ahead_bytes = self.staged_bytes + padded
        bound_bytes = self.capacity_bytes * PREFETCH_FRACTION_OF_STAGING if while_writing else self.capacity_bytes
        return not self.staged_bytes or (
            ahead_bytes <= bound_bytes and ahead_bytes + self.retained_bytes <= self.capacity_bytes
        )

    def add(self, storage: int, padded: int) -> None:
        """A storage has its place in staging before its use."""
        self.prefetched.add(storage)
        self.staged_bytes += padded

    def retain(self, storage: int, padded: int) -> bool:
        """Let a storage that is still to be written stay in staging when its write ends, if there is room."""
        if storage in self.retained:
            return True
        if self.staged_bytes + self.retained_bytes + padded > self.capacity_bytes:
            return False
        self.retained.add(storage)
        self.retained_bytes += padded
        return True

    def release(self, storage: int, padded: int) -> bool:
        """Retain a storage no longer; whether it was."""
        if storage not in self.retained:
            return False
        self.retained.remove(storage)
        self.retained_bytes -= padded
        return True


@dataclass(slots=True)
class _Prefetcher:
    """Brings back the storages that are used next, as far as the bounds allow.

    Attributes:
        order: of the first uses of moved storages.
        distance: see ``Plan.prefetch_distance``; None until ``_just_in_time`` has computed it, for an order of first
            uses and a time of the trace's clock.
    """

    _storages: Storages
    _drive: DriveQueues
    _staging: StagingSlots
    _copies: Copies
    _window: _Window
    order: list[int]
    distance: Sequence[int] | None
    _just_in_time: Callable[[list[int], float], Sequence[int]]
    _used: int = 0  # first uses of moved storages so far
    _cursor: int = 0

    def record_use(self, storage: int) -> None:
        """The first use of a storage."""
        self._used += self._storages.place[storage] != KEEP
        self._cursor += self._cursor < len(self.order) and self.order[self._cursor] == storage

    def run(self, at_s: float, now_s: float) -> None:
        """Go ahead at a time of the trace's clock, which is ``now_s`` of the replay's."""
        self._drive.advance(now_s)
        self._staging.settle(self._drive.now_s, at_s)
        if self.distance is None:
            self._find_distance(at_s)
        order, place, reach = self.order, self._storages.place, self._reach()
        while self._cursor < reach:
            storage = order[self._cursor]
            if self._storages.packed_s[storage] > at_s:  # by a forward that is yet to come
                return
            if (place[storage] == NVME and not self._read_ahead(storage)) or (
                place[storage] == HOST and not self._copy_ahead(storage, now_s)
            ):
                return
            self._cursor += 1

    def _reach(self) -> int:
        """How far in the order may be asked for by now."""
        count, used, distance = len(self.order), self._used, self.distance or ()
        return min(count, used + distance[used]) if used < len(distance) else count

    def _find_distance(self, at_s: float) -> None:
        """The distance that is just in time, now that it is known what was moved."""
        self.order = [storage for storage in self.order if self._storages.place[storage] != KEEP]
        self.distance = self._just_in_time(self.order, at_s) if self.order else ()
        self._cursor = self._used

    def _read_ahead(self, storage: int) -> bool:
        state, padded = self._storages.state[storage], self._storages.padded[storage]
        if state in (QUEUED, WRITING):
            return self._window.retain(storage, padded)
        if state != STORED:
            return True
        is_writing = self._drive.writes_under_way > 0
        if not self._window.may_read(padded, while_writing=is_writing) or not self._staging.has_room(padded):
            return False
        self._staging.take(padded)
        self._window.add(storage, padded)
        self._drive.read(storage, urgent=False)
        return True

    def _copy_ahead(self, storage: int, now_s: float) -> bool:
        window, nbytes = self._window, self._storages.nbytes[storage]
        if self._copies.is_synchronous or storage in window.prefetched:
            return True
        if window.host_bytes and window.host_bytes + nbytes > window.capacity_bytes:
            return False
        window.prefetched.add(storage)
        window.host_bytes += nbytes
        self._copies.copy_in(storage, now_s)
        return True


class _Reloading:
    """The way back into device memory, in backward.

    Attributes:
        forwarded_bytes: handed over from staging instead of read.
    """

    def __init__(
        self, resources: Resources, storages: Storages, staging: StagingSlots, copies: Copies, window: _Window
    ) -> None:
        self.drive = DriveQueues(resources, storages.state, storages.padded, self._on_written, self._on_read)
        self.staging = staging
        self.copies = copies
        self.forwarded_bytes = 0
        self._storages = storages
        self._window = window
        self._stayed: set[int] = set()  # in staging, from their write to their use
        self._slotless: set[int] = set()

    def _on_written(self, storage: int) -> None:
        padded = self._storages.padded[storage]
        if not self._window.release(storage, padded):
            self.staging.used_bytes -= padded
            return
        self._stayed.add(storage)
        self._window.add(storage, padded)
        self._storages.state[storage] = LOADED
        self._on_read(storage)

    def _on_read(self, storage: int) -> None:
        if self.copies.is_synchronous:
            self.copies.arrived_s[storage] = self.drive.now_s
            return
        self.copies.copy_in(storage, self.drive.now_s)
        if storage not in self._slotless:
            self.staging.free_after_copy(self.copies.arrived_s[storage], self._storages.padded[storage])

    def there_s(self, storage: int, now_s: float) -> float:
        """When a storage can be used that is asked for now."""
        storages = self._storages
        place, state, padded = storages.place[storage], storages.state[storage], storages.padded[storage]
        if place == KEEP:  # was refused at pack
            return now_s
        if place == HOST:
            return self._from_host(storage, now_s)
        if state in (QUEUED, WRITING):
            return self._forward(storage, now_s)
        if state == STORED:
            if self.staging.has_room(padded):
                self.staging.take(padded)
            else:  # read to memory outside of the ring
                self._slotless.add(storage)
        if state in (STORED, READ_QUEUED):
            self.drive.read(storage, urgent=True)
        if state in (STORED, READ_QUEUED, READING):
            now_s = max(now_s, self.drive.advance_past_read(storage))
        if storage in self._stayed:
            self.forwarded_bytes += storages.nbytes[storage]
        if storage in self._window.prefetched:
            self._window.prefetched.remove(storage)
            self._window.staged_bytes -= padded
        if self.copies.is_synchronous:
            self.copies.allocated_s[storage] = now_s
            self._lend_slot(storage)
        return max(now_s, self.copies.arrived_s[storage])

    def _lend_slot(self, storage: int) -> None:
        if storage not in self._slotless:
            self.staging.lend(self._storages.freed_s[storage], self._storages.padded[storage])

    def _from_host(self, storage: int, now_s: float) -> float:
        if storage in self._window.prefetched:
            self._window.prefetched.remove(storage)
            self._window.host_bytes -= self._storages.nbytes[storage]
        else:
            self.copies.copy_in(storage, now_s)
        return self.copies.arrived_s[storage]

    def _forward(self, storage: int, now_s: float) -> float:
        """Hand over from staging; when it is there."""
        state, padded, copies = self._storages.state, self._storages.padded[storage], self.copies
        is_queued = state[storage] == QUEUED
        self.forwarded_bytes += self._storages.nbytes[storage]
        self._window.release(storage, padded)
        state[storage] = FORWARDED
        if is_queued:
            self.drive.cancel_write(storage)
        if is_queued and copies.is_synchronous:
            copies.allocated_s[storage] = now_s
            self._lend_slot(storage)
            return now_s
        copies.copy_in(storage, now_s)
        if is_queued:
            self.staging.free_after_copy(copies.arrived_s[storage], padded)
        return copies.arrived_s[storage]


class Replay:
    """One micro-step in progress.

    Args:
        timeline: of the trace.
        assignment: the placements and recomputed blocks to replay.
        pacing: see :class:`Pacing`; without it compute waits for staging.
        distance: see ``Plan.prefetch_distance``; None to compute the one that is just in time.
    """

    def __init__(
        self, timeline: Timeline, assignment: Assignment, pacing: Pacing | None, distance: Sequence[int] | None
    ) -> None:
        resources = timeline.resources
        self._timeline = timeline
        self._recomputed = assignment.recomputed & timeline.blocks.recomputable
        self._liveness = timeline.liveness(self._recomputed)
        place = self._effective(assignment.placements)
        again = place == REMATERIALIZE
        if again.any():
            self._liveness = timeline.rematerializing(self._liveness, again)
        self._rematerialized = np.flatnonzero(again & self._liveness.used)
        order, self._events = self._schedule(place)
        self._storages = storages = Storages(timeline, self._liveness, place)
        self._clock = clock = ReplayClock(np.zeros(len(timeline.blocks)))
        staging = StagingSlots(resources.staging_bytes)
        copies = Copies(resources, storages.nbytes, clock)
        window = _Window(resources.staging_bytes)
        self._copies = copies
        self._reloading = _Reloading(resources, storages, staging, copies, window)
        drive = self._reloading.drive
        self._offloading = Offloading(storages, clock, drive, staging, copies, pacing)
        self._prefetcher = _Prefetcher(
            storages, drive, staging, copies, window, order, distance, self._just_in_time_distance
        )

    def run(self) -> Outcome:
        """Play it all."""
        acts = (self._offloading.pack, self._begin_backward, self._use, self._rematerialize, self._recompute)
        for at_s, kind, which in self._events:
            acts[kind](which, at_s)
            self._clock.record(at_s)
        copies = self._copies
        place = np.array(self._storages.place, np.int8)
        moves = Moves(place, np.array(copies.copied_s), np.array(copies.allocated_s))
        return Outcome(
            Assignment(place, self._recomputed),
            self._liveness,
            self._cost(moves),
            self._clock.stalls,
            self._prefetcher.order,
            tuple(self._prefetcher.distance or ()),
        )

    def _cost(self, moves: Moves) -> Prediction:
        timeline, clock, drive = self._timeline, self._clock, self._reloading.drive
        times = timeline.micro_steps
        return Prediction(
            peak_saved_bytes(timeline, self._liveness, clock, moves),
            (timeline.end_s + clock.shift_s) * times + timeline.optimizer_s,
            clock.stall_s * times,
            clock.recomputed_s * times,
            drive.writes.total_bytes * times,
            drive.reads.total_bytes * times,
            self._reloading.forwarded_bytes * times,
            peak_host_bytes(timeline, self._liveness, clock, moves.place),
            self._reloading.staging.peak_bytes,
            clock.rematerialized_s * times,
            int(timeline.storages.nbytes[self._rematerialized].sum()) * times,
        )

    # ---- before -------------------------------------------------------------------------------------------------

    def _effective(self, placements: Places) -> Places:
        """The placements, less what no store would take and what cannot be made again."""
        timeline = self._timeline
        place = np.where(self._liveness.exists & ~self._liveness.dropped, placements, KEEP)
        again = place == REMATERIALIZE
        place[~(timeline.storages.movable | again) | (place == Placement.RECOMPUTE)] = KEEP
        place[(place == NVME) & ~timeline.can_go_to_nvme()] = KEEP
        if again.any():
            place[again & ~timeline.rematerializable(self._liveness)] = KEEP
        return np.asarray(place)

    def _schedule(self, place: Places) -> tuple[list[int], list[tuple[float, int, int]]]:
        """The order of first uses of what is moved, and the events in order (time, kind, storage or block).

        Where times are equal, later packs are used first, and made again last.
        """
        timeline, need_s = self._timeline, self._liveness.need_s
        moved, made = np.flatnonzero((place == HOST) | (place == NVME)), self._rematerialized
        blocks = np.flatnonzero(self._recomputed)
        ordered = moved[np.lexsort((-moved, need_s[moved]))]
        ordered = ordered[self._liveness.used[ordered]]
        recompute_s = timeline.blocks.backward_start_s[blocks]
        starts = np.concatenate([need_s[self._liveness.exists], recompute_s])
        at_s = [timeline.storages.pack_s[moved], need_s[ordered], need_s[made], recompute_s]
        kinds = [np.full(moved.size, _PACK), np.full(ordered.size, _USE)]
        kinds += [np.full(made.size, _REMATERIALIZE), np.full(blocks.size, _RECOMPUTE)]
        which = [moved, ordered, made, blocks]
        if starts.size and moved.size:
            at_s.append(np.array([starts.min()]))
            kinds.append(np.array([_BEGIN]))
            which.append(np.array([0]))
        times, kind, index = np.concatenate(at_s), np.concatenate(kinds), np.concatenate(which)
        sequence = np.lexsort((kind, times))
        events = zip(times[sequence].tolist(), kind[sequence].tolist(), index[sequence].tolist(), strict=True)
        return ordered.tolist(), list(events)

    # ---- events -------------------------------------------------------------------------------------------------

    def _begin_backward(self, _which: int, at_s: float) -> None:
        self._prefetcher.run(at_s, at_s + self._clock.shift_s)

    def _use(self, storage: int, at_s: float) -> None:
        now_s, reloading = at_s + self._clock.shift_s, self._reloading
        reloading.drive.advance(now_s)
        reloading.staging.settle(reloading.drive.now_s, at_s)
        there_s = reloading.there_s(storage, now_s)
        if there_s > now_s:
            self._clock.stall(storage, there_s - now_s)
        self._prefetcher.record_use(storage)
        self._prefetcher.run(at_s, at_s + self._clock.shift_s)

    def _rematerialize(self, storage: int, at_s: float) -> None:
        self._copies.allocated_s[storage] = at_s + self._clock.shift_s
        self._clock.rematerialize(float(self._timeline.storages.rematerialize_s[storage]))

    def _recompute(self, block: int, at_s: float) -> None:
        self._prefetcher.run(at_s, at_s + self._clock.shift_s)
        self._clock.recompute(block, at_s, float(self._timeline.blocks.recompute_s[block]))

    def _just_in_time_distance(self, order: list[int], at_s: float) -> list[int]:
        storages = self._storages
        unwritten = sum(storages.padded[one] for one in order if storages.state[one] in (QUEUED, WRITING))
        assignment = Assignment(np.array(storages.place, np.int8), self._recomputed)
        start = BackwardStart(at_s, self._clock.shift_s, unwritten)
        reloads = Reloads.of(self._timeline, self._liveness, assignment, np.array(order), start)
        return prefetch_distance(reloads, self._timeline.resources)


def replay(
    timeline: Timeline, assignment: Assignment, pacing: Pacing | None = None, distance: Sequence[int] | None = ()
) -> Outcome:
    """Replay an assignment; see :class:`Replay`."""
    return Replay(timeline, assignment, pacing, distance).run()


def simulate(trace: Trace, plan: Plan) -> Prediction:
    """The cost of a step of ``trace`` under ``plan``.

    Raises:
        TraceError: the plan is for a trace with other storages or blocks.
    """
    sizes = (len(plan.placements), len(plan.recomputed_blocks))
    if sizes != (len(trace.storages), len(trace.blocks)):
        raise TraceError(
            f"a plan for {sizes[0]} storages and {sizes[1]} blocks cannot be replayed on a trace of "
            f"{len(trace.storages)} and {len(trace.blocks)}: plan again"
        )
    return replay(Timeline.of(trace), assignment_of(plan), distance=plan.prefetch_distance).cost
