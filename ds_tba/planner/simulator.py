"""One micro-step under an assignment, event by event, as the cache and the stores would run it.

[Note: What is modelled] Compute is one stream that waits. A storage on its way to NVMe takes a staging slot at pack,
for which compute waits where writes hold all of them; it is copied out, then written in its turn, and its slot is
free. In backward, reads go ahead in the order of first use, as far as half of staging while there are writes, else as
far as all of it; what is still being written then stays when its write ends. At its use a storage is handed over from
staging (a write that has not begun is cancelled), is there already, or is read at once, ahead of the others, while
compute waits.
A storage on its way to host memory is copied out, and copied in ahead of its use as far as the bound of what is ahead.
With a lead, nothing is asked for earlier than that says; see ``ds_tba/planner/prefetch_distance.py``.
Lanes and copies may slow the kernels: what a storage's way takes of them (``compute_s_per_byte``) counts at its pack.
A block that is recomputed gets its inputs, runs its forward again, and its other storages are made anew.

[Note: Synchronous devices] There the training thread does the copies and compute waits for them; what was read, or
taken back from a cancelled write, is used where it lies, and its slot is free when autograd lets go of it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_tba.config import PREFETCH_FRACTION_OF_STAGING, Placement
from ds_tba.errors import TraceError
from ds_tba.planner.drive import (
    FORWARDED,
    LOADED,
    QUEUED,
    READ_QUEUED,
    READING,
    STORED,
    WRITING,
    DriveQueues,
)
from ds_tba.planner.plan import Outcome, Plan, Prediction, predict
from ds_tba.planner.prefetch_distance import Moment, Reloads, prefetch_lead
from ds_tba.planner.timeline import (
    Assignment,
    Clock,
    Moves,
    Places,
    Timeline,
    peak_host_bytes,
    peak_saved_bytes,
)
from ds_tba.planner.trace import Trace

_KEEP, _HOST, _NVME = int(Placement.KEEP), int(Placement.HOST), int(Placement.NVME)
# In this order where they happen at the same time.
_PACK, _BEGIN, _USE, _RECOMPUTE = range(4)


@dataclass(frozen=True, slots=True)
class Pacing:
    """Choose during the replay: what would make compute wait for staging goes to host memory, or stays.

    Attributes:
        host_budget_bytes, write_limit_bytes: of one micro-step.
    """

    host_budget_bytes: float
    write_limit_bytes: float


class Replay:
    """One micro-step in progress.

    Args:
        timeline: what happens.
        assignment: what is done about it.
        pacing: see there; else every wait is waited.
        lead: see ``Plan.prefetch_lead``; None to find the one that is just in time.
    """

    def __init__(
        self,
        timeline: Timeline,
        assignment: Assignment,
        pacing: Pacing | None = None,
        lead: Sequence[int] | None = (),
    ) -> None:
        count, resources = timeline.storages, timeline.resources
        self._timeline = timeline
        self._resources = resources
        self._recomputed = assignment.recomputed & timeline.recomputable
        self._existence = timeline.existence(self._recomputed)
        self._pacing = pacing
        self._place: list[int] = self._effective(assignment).tolist()
        self._nbytes: list[int] = timeline.nbytes.tolist()
        self._padded: list[int] = timeline.padded_bytes.tolist()
        self._freed_s: list[float] = timeline.freed_s.tolist()
        self._state = [0] * count
        self._copied_s = [0.0] * count
        self._allocated_s = [0.0] * count
        self._arrived_s = [0.0] * count
        self._drive = DriveQueues(resources, self._state, self._padded, self._on_written, self._on_read)
        self._clock = Clock()
        self._stall_s = self._recomputed_s = 0.0
        self._out_free_s = self._in_free_s = 0.0
        self._staged_bytes = self._peak_staged_bytes = 0
        self._slots_in_use: deque[tuple[float, int]] = deque()  # by copies in, which end in this order
        self._slots_lent: list[tuple[float, int]] = []  # a heap, by the trace's clock
        self._prefetched_bytes = self._wanted_bytes = self._host_ahead_bytes = 0
        self._prefetched: set[int] = set()
        self._wanted: set[int] = set()
        self._stayed: set[int] = set()
        self._slotless: set[int] = set()
        self._lead = lead
        self._used = 0  # first uses of what was moved
        self._cursor = 0
        self._order: list[int] = []
        self._stalls: list[tuple[int, float]] = []
        self._recompute_at_s = np.zeros(timeline.blocks)
        self._cancelled_bytes = self._forwarded_bytes = self._read_bytes = 0
        self._paced_host_bytes = self._paced_write_bytes = 0

    def run(self) -> Outcome:
        """Play it all."""
        acts = (self._pack, self._begin_backward, self._use, self._recompute)
        for at_s, kind, which in self._events():
            acts[kind](which, at_s)
            self._clock.note(at_s)
        place = np.array(self._place, np.int8)
        moved = int(self._timeline.padded_bytes[place == _NVME].sum())
        moves = Moves(place, np.array(self._copied_s), np.array(self._allocated_s), self._recompute_at_s)
        return Outcome(
            Assignment(place, self._recomputed),
            self._existence,
            peak_saved_bytes(self._timeline, self._existence, self._clock, moves),
            self._timeline.end_s + self._clock.shift_s,
            self._stall_s,
            self._recomputed_s,
            moved - self._cancelled_bytes,
            self._read_bytes,
            self._forwarded_bytes,
            peak_host_bytes(self._timeline, self._existence, self._clock, place),
            self._peak_staged_bytes,
            self._stalls,
            self._order,
            tuple(self._lead or ()),
        )

    # ---- what happens -------------------------------------------------------------------------------------------

    def _effective(self, assignment: Assignment) -> Places:
        """The placements, less what no store would take."""
        place = np.where(self._existence.exists & ~self._existence.dropped, assignment.placements, _KEEP)
        place[~self._timeline.movable | (place == Placement.RECOMPUTE)] = _KEEP
        place[(place == _NVME) & ~self._timeline.can_go_to_nvme()] = _KEEP
        return np.asarray(place)

    def _events(self) -> list[tuple[float, int, int]]:
        """What to act on, in order: later packs are used first where times are equal."""
        timeline, existence = self._timeline, self._existence
        moved = np.flatnonzero(np.array(self._place, np.int8) != _KEEP)
        blocks = np.flatnonzero(self._recomputed)
        uses = existence.need_s[moved]
        order = np.lexsort((-moved, uses))
        self._order = moved[order].tolist()
        starts = np.concatenate([existence.need_s[existence.exists], timeline.backward_start_s[blocks]])
        begins = self._resources.prefetches_from_backward_start and bool(starts.size) and bool(moved.size)
        at_s = [timeline.pack_s[moved], uses[order], timeline.backward_start_s[blocks]]
        kinds = [np.full(moved.size, _PACK), np.full(moved.size, _USE), np.full(blocks.size, _RECOMPUTE)]
        which = [moved, moved[order], blocks]
        if begins:
            at_s.append(np.array([starts.min()]))
            kinds.append(np.array([_BEGIN]))
            which.append(np.array([0]))
        times, kind, index = np.concatenate(at_s), np.concatenate(kinds), np.concatenate(which)
        sequence = np.lexsort((kind, times))
        return list(zip(times[sequence].tolist(), kind[sequence].tolist(), index[sequence].tolist(), strict=True))

    def _pack(self, storage: int, at_s: float) -> None:
        if self._place[storage] == _NVME:
            self._pack_to_nvme(storage, at_s)
        if self._place[storage] == _HOST:
            self._copied_s[storage] = self._copy_out(storage, at_s + self._clock.shift_s)

    def _pack_to_nvme(self, storage: int, at_s: float) -> None:
        now_s = at_s + self._clock.shift_s
        self._drive.advance(now_s)
        now_s = self._wait_for_slot(storage, at_s, now_s)
        if self._place[storage] != _NVME:
            return
        self._staged_bytes += self._padded[storage]
        self._peak_staged_bytes = max(self._peak_staged_bytes, self._staged_bytes)
        self._copied_s[storage] = self._copy_out(storage, now_s)
        self._drive.write(storage, self._copied_s[storage])

    def _begin_backward(self, which: int, at_s: float) -> None:
        self._drive.advance(at_s + self._clock.shift_s)
        self._prefetch(at_s)

    def _use(self, storage: int, at_s: float) -> None:
        now_s = at_s + self._clock.shift_s
        self._drive.advance(now_s)
        self._settle_slots(at_s)
        there_s = self._there_s(storage, at_s, now_s)
        if there_s > now_s:
            self._stall(storage, there_s - now_s)
        self._used += self._place[storage] != _KEEP
        self._cursor += 1 if self._cursor < len(self._order) and self._order[self._cursor] == storage else 0
        self._prefetch(at_s)

    def _recompute(self, block: int, at_s: float) -> None:
        took_s = float(self._timeline.recompute_s[block])
        self._recompute_at_s[block] = at_s + self._clock.shift_s
        self._drive.advance(at_s + self._clock.shift_s)
        self._prefetch(at_s)
        self._recomputed_s += took_s
        self._clock.shift_s += took_s

    # ---- out ----------------------------------------------------------------------------------------------------

    def _copy_out(self, storage: int, now_s: float) -> float:
        """Copy device bytes to the host; when that is done. Compute pays here for the way back, too."""
        took_s = self._nbytes[storage] / self._resources.copy_out_bytes_per_s
        of_compute_s = self._nbytes[storage] * self._resources.compute_s_per_byte
        of_compute_s += took_s if self._resources.is_synchronous else 0.0
        if of_compute_s:
            self._stall(storage, of_compute_s)
        if self._resources.is_synchronous:
            return now_s + of_compute_s
        self._out_free_s = max(now_s, self._out_free_s) + took_s
        return self._out_free_s

    def _wait_for_slot(self, storage: int, at_s: float, now_s: float) -> float:
        """Wait until staging has room, or give up; when it has."""
        started_s, drive = now_s, self._drive
        self._settle_slots(at_s)
        while not self._has_room(storage):
            if self._pacing is not None or not (drive.writes_under_way or self._slots_in_use):
                break
            if self._slots_in_use:
                now_s = max(now_s, self._slots_in_use[0][0])
                drive.advance(now_s)
            else:
                now_s = max(now_s, drive.advance_past_a_write())
            self._settle_slots(at_s)
        if now_s > started_s:
            self._stall(storage, now_s - started_s)
        self._settle_place(storage, self._has_room(storage))
        return now_s

    def _settle_place(self, storage: int, has_room: bool) -> None:
        pacing, nbytes = self._pacing, self._nbytes[storage]
        if pacing is None:
            self._place[storage] = _NVME if has_room else _KEEP
        elif has_room and self._paced_write_bytes + self._padded[storage] <= pacing.write_limit_bytes:
            self._paced_write_bytes += self._padded[storage]
        elif self._paced_host_bytes + nbytes <= pacing.host_budget_bytes:
            self._paced_host_bytes += nbytes
            self._place[storage] = _HOST
        else:
            self._place[storage] = _KEEP

    def _has_room(self, storage: int) -> bool:
        return self._staged_bytes + self._padded[storage] <= self._resources.staging_bytes

    def _settle_slots(self, at_s: float) -> None:
        """Give back the slots that copies in and autograd no longer use."""
        while self._slots_in_use and self._slots_in_use[0][0] <= self._drive.now_s:
            self._staged_bytes -= self._slots_in_use.popleft()[1]
        while self._slots_lent and self._slots_lent[0][0] <= at_s:
            self._staged_bytes -= heapq.heappop(self._slots_lent)[1]

    def _on_written(self, storage: int) -> None:
        if storage not in self._wanted:
            self._staged_bytes -= self._padded[storage]
            return
        self._no_longer_wanted(storage)
        self._stayed.add(storage)
        self._prefetched.add(storage)
        self._prefetched_bytes += self._padded[storage]
        self._state[storage] = LOADED
        self._on_read(storage)

    # ---- in -----------------------------------------------------------------------------------------------------

    def _there_s(self, storage: int, at_s: float, now_s: float) -> float:
        """When a storage can be used that is asked for now."""
        if self._place[storage] == _KEEP:  # was refused at pack
            return now_s
        if self._place[storage] == _HOST:
            return self._from_host(storage, now_s)
        state = self._state[storage]
        if state in (QUEUED, WRITING):
            return self._forward(storage, at_s, now_s)
        if state in (STORED, READ_QUEUED, READING):
            if state == STORED:
                self._read_bytes += self._padded[storage]
                if self._has_room(storage):
                    self._take_slot(storage)
                else:  # read to memory beside the ring
                    self._slotless.add(storage)
            if state != READING:
                self._drive.read(storage, urgent=True)
            now_s = max(now_s, self._drive.advance_past_read(storage))
        if storage in self._stayed:
            self._forwarded_bytes += self._nbytes[storage]
        if storage in self._prefetched:
            self._prefetched.remove(storage)
            self._prefetched_bytes -= self._padded[storage]
        if self._resources.is_synchronous:
            self._allocated_s[storage] = now_s
            self._lend_slot(storage)
        return max(now_s, self._arrived_s[storage])

    def _take_slot(self, storage: int) -> None:
        self._staged_bytes += self._padded[storage]
        self._peak_staged_bytes = max(self._peak_staged_bytes, self._staged_bytes)

    def _lend_slot(self, storage: int) -> None:
        if storage not in self._slotless:
            heapq.heappush(self._slots_lent, (self._freed_s[storage], self._padded[storage]))

    def _from_host(self, storage: int, now_s: float) -> float:
        if storage in self._prefetched:
            self._prefetched.remove(storage)
            self._host_ahead_bytes -= self._nbytes[storage]
        else:
            self._copy_in(storage, now_s)
        return self._arrived_s[storage]

    def _forward(self, storage: int, at_s: float, now_s: float) -> float:
        """Hand over from staging; when it is there."""
        is_queued, padded = self._state[storage] == QUEUED, self._padded[storage]
        self._forwarded_bytes += self._nbytes[storage]
        self._no_longer_wanted(storage)
        self._state[storage] = FORWARDED
        if is_queued:
            self._cancelled_bytes += padded
            self._drive.cancel_write(storage)
        if is_queued and self._resources.is_synchronous:
            self._allocated_s[storage] = now_s
            self._lend_slot(storage)
            return now_s
        self._copy_in(storage, now_s)
        if is_queued:
            self._slots_in_use.append((self._arrived_s[storage], padded))
        return self._arrived_s[storage]

    def _copy_in(self, storage: int, now_s: float) -> None:
        """Copy a storage's host bytes to the device; the memory is taken at once."""
        took_s = self._nbytes[storage] / self._resources.copy_in_bytes_per_s
        self._allocated_s[storage] = now_s
        if self._resources.is_synchronous:
            self._arrived_s[storage] = now_s + took_s
            return
        self._in_free_s = max(now_s, self._in_free_s, self._copied_s[storage]) + took_s
        self._arrived_s[storage] = self._in_free_s

    def _on_read(self, storage: int) -> None:
        if self._resources.is_synchronous:
            self._arrived_s[storage] = self._drive.now_s
            return
        self._copy_in(storage, self._drive.now_s)
        if storage not in self._slotless:
            self._slots_in_use.append((self._arrived_s[storage], self._padded[storage]))

    def _prefetch(self, at_s: float) -> None:
        """Begin to bring back what will be used next, as far as the bounds allow."""
        now_s = at_s + self._clock.shift_s
        self._drive.advance(now_s)
        self._settle_slots(at_s)
        if self._lead is None:
            self._keep_to_what_is_just_in_time(at_s)
        reach = self._reach
        while self._cursor < reach:
            storage = self._order[self._cursor]
            place = self._place[storage]
            if (place == _NVME and not self._read_ahead(storage)) or (
                place == _HOST and not self._copy_ahead(storage, now_s)
            ):
                return
            self._cursor += 1

    @property
    def _reach(self) -> int:
        """How far in the order may be asked for by now."""
        count, used, lead = len(self._order), self._used, self._lead or ()
        return min(count, used + lead[used]) if used < len(lead) else count

    def _keep_to_what_is_just_in_time(self, at_s: float) -> None:
        """Find the lead, now that it is known what was moved."""
        order = self._order = [storage for storage in self._order if self._place[storage] != _KEEP]
        self._cursor = self._used
        self._lead = ()
        if order:
            unwritten = sum(self._padded[storage] for storage in order if self._state[storage] in (QUEUED, WRITING))
            choice = Assignment(np.array(self._place, np.int8), self._recomputed)
            moment = Moment(at_s, self._clock.shift_s, unwritten)
            reloads = Reloads.of(self._timeline, self._existence, choice, np.array(order), moment)
            self._lead = prefetch_lead(reloads, self._resources)

    def _read_ahead(self, storage: int) -> bool:
        if self._state[storage] in (QUEUED, WRITING):
            return self._want(storage)
        if self._state[storage] != STORED:
            return True
        padded = self._padded[storage]
        if not self._may_read_ahead(padded) or not self._has_room(storage):
            return False
        self._take_slot(storage)
        self._prefetched.add(storage)
        self._prefetched_bytes += padded
        self._read_bytes += padded
        self._drive.read(storage, urgent=False)
        return True

    def _may_read_ahead(self, padded: int) -> bool:
        capacity, ahead = self._resources.staging_bytes, self._prefetched_bytes + padded
        part = PREFETCH_FRACTION_OF_STAGING if self._drive.writes_under_way else 1.0
        return not self._prefetched_bytes or (ahead <= capacity * part and ahead + self._wanted_bytes <= capacity)

    def _want(self, storage: int) -> bool:
        """Let what is still to be written stay when its write ends."""
        padded = self._padded[storage]
        if storage in self._wanted:
            return True
        if self._prefetched_bytes + self._wanted_bytes + padded > self._resources.staging_bytes:
            return False
        self._wanted.add(storage)
        self._wanted_bytes += padded
        return True

    def _no_longer_wanted(self, storage: int) -> None:
        if storage in self._wanted:
            self._wanted.remove(storage)
            self._wanted_bytes -= self._padded[storage]

    def _copy_ahead(self, storage: int, now_s: float) -> bool:
        if self._resources.is_synchronous or storage in self._prefetched:
            return True
        nbytes = self._nbytes[storage]
        if self._host_ahead_bytes and self._host_ahead_bytes + nbytes > self._resources.staging_bytes:
            return False
        self._prefetched.add(storage)
        self._host_ahead_bytes += nbytes
        self._copy_in(storage, now_s)
        return True

    # ---- afterwards ---------------------------------------------------------------------------------------------

    def _stall(self, storage: int, seconds: float) -> None:
        self._stalls.append((storage, seconds))
        self._stall_s += seconds
        self._clock.shift_s += seconds


def replay(
    timeline: Timeline, assignment: Assignment, pacing: Pacing | None = None, lead: Sequence[int] | None = ()
) -> tuple[Outcome, Prediction]:
    """What happens under an assignment, and its cost; see :class:`Replay`."""
    outcome = Replay(timeline, assignment, pacing, lead).run()
    return outcome, predict(timeline, outcome)


def simulate(trace: Trace, plan: Plan) -> Prediction:
    """What a step of ``trace`` would cost under ``plan``.

    Raises:
        TraceError: the plan is for a trace with other storages or blocks.
    """
    sizes = (len(plan.placements), len(plan.recomputed_blocks))
    if sizes != (len(trace.storages), len(trace.blocks)):
        raise TraceError(
            f"a plan for {sizes[0]} storages and {sizes[1]} blocks cannot be replayed on a trace of "
            f"{len(trace.storages)} and {len(trace.blocks)}: plan again"
        )
    return replay(Timeline.of(trace), plan.assignment, lead=plan.prefetch_lead)[1]
