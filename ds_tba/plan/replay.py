"""One micro-step under an assignment: how long it takes, and how many bytes it holds at most.

[Note: Model] Compute is one stream that waits. Writes, reads and the copies of either way are queues, in order. What
goes to NVMe takes a place in staging when it is saved, and compute waits there until writes have left room. It is read
back at the latest moment that lets it, and all that is used after it, come in time; on a device it is copied in then.
What is still being written when it is used comes from staging, and is not written if its write has not begun. A storage
larger than staging passes through in pieces, while compute waits. What backward never uses does not come back. On a
synchronous device (a CPU) the training thread copies, and what was read is used where it lies. A recomputed block runs
its forward again when backward reaches it; a rematerialized storage is made at its first use.

It is a model of averages: what it leaves out shows in the measured steps, and costs time, never memory. The peak is one
sweep over the lifetimes that result.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ds_tba.config import PREFETCH_FRACTION_OF_STAGING, Placement
from ds_tba.plan.plan import SAME_TIME_S, Prediction
from ds_tba.plan.timeline import Assignment, Bools, Floats, Ints, Spans, Timeline

# Reads are assumed to take so many times as long as measured, and at least so many are asked for at once: a reload that
# comes too late costs time, where one that comes too early costs only memory.
SLOWER = 1.25
MIN_DISTANCE = 2

_KEEP, _HOST, _NVME = int(Placement.KEEP), int(Placement.HOST), int(Placement.NVME)
_PACK, _USE, _AGAIN = range(3)  # in this order where they happen at the same time


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a replay.

    Attributes:
        assignment: where each storage really was: KEEP for those that do not exist or found no room.
        dropped: storages that the recomputation of their block makes again.
        cost: of a step.
        stalls: the storages for which compute waited, and the seconds, in order.
        prefetch_distance: as in ``Plan``.
    """

    assignment: Assignment
    dropped: Bools
    cost: Prediction
    stalls: list[tuple[int, float]]
    prefetch_distance: tuple[int, ...]


class _Replay:
    """One micro-step in progress. Times are of the replay, unless they are named ``at_s``: these are of the trace."""

    def __init__(self, timeline: Timeline, assignment: Assignment, may_wait: bool = True) -> None:
        self._may_wait, self._stalls = may_wait, list[tuple[int, float]]()
        self._timeline, self._machine = timeline, timeline.trace.resources
        self._lives = lives = timeline.lifetimes(assignment)
        self._place, self._nbytes, self._padded = (
            one.tolist() for one in (lives.placements, timeline.nbytes, timeline.padded_bytes)
        )
        drive, beside = self._machine.drives, bool(timeline.trace.forwards)  # there writes and reads alternate
        self._write_rate = drive.write_beside_read_bytes_per_s if beside else drive.write_bytes_per_s
        self._read_beside = drive.read_beside_write_bytes_per_s
        self._read_rate = self._read_beside if beside else drive.read_bytes_per_s
        # Beside writes that alternate with reads, these take half of staging.
        self._staging_bytes = int(self._machine.staging_bytes * (PREFETCH_FRACTION_OF_STAGING if beside else 1))
        self._write_free_s = self._read_free_s = self._out_free_s = self._in_free_s = 0.0
        self._copied_s, self._written_s = [0.0] * len(self._place), [0.0] * len(self._place)
        # When each storage takes device memory again, and when each block's recomputation begins.
        self._back_s = [0.0] * (len(self._place) + len(timeline.recompute_s))
        self._shift_s = self._stall_s = 0.0  # the replay is behind the trace
        self._shifts: list[tuple[float, float]] = []
        self._staged: deque[tuple[float, int]] = deque()  # when each write is done, and its bytes
        self._staged_bytes = self._peak_staging_bytes = 0
        self._written_bytes = self._read_bytes = self._forwarded_bytes = 0
        self._starts_s: dict[int, float] = {}  # the latest of each reload, once backward begins
        self._distance: tuple[int, ...] = ()

    def run(self) -> Outcome:
        """Play it all."""
        timeline, lives = self._timeline, self._lives
        moved = np.flatnonzero((lives.placements == _HOST) | (lives.placements == _NVME))
        order = moved[np.lexsort((-moved, lives.need_s[moved]))]
        order = order[lives.used[order]]
        self._made = np.flatnonzero((lives.placements == Placement.REMATERIALIZE) & lives.used)
        again = np.concatenate([self._made, np.flatnonzero(lives.recomputed) + len(self._place)])
        again_at_s = np.concatenate([lives.need_s, timeline.backward_start_s])[again]
        again_s = self._took_s = np.concatenate([timeline.rematerialize_s, timeline.recompute_s])
        at_s = np.concatenate([timeline.pack_s[moved], lives.need_s[order], again_at_s])
        kinds = np.repeat([_PACK, _USE, _AGAIN], [len(moved), len(order), len(again)])
        which = np.concatenate([moved, order, again]).astype(np.int64)
        sequence = np.lexsort((kinds, at_s))
        acts = self._pack, self._use, self._again
        events = zip(at_s[sequence].tolist(), kinds[sequence].tolist(), which[sequence].tolist(), strict=True)
        for at, kind, one in events:
            before_s = self._shift_s
            if kind == _USE and not self._starts_s:
                self._plan_reads(order[lives.placements[order] != _KEEP], again_at_s, again_s[again])
            acts[kind](one, at + self._shift_s)
            if self._shift_s != before_s:
                self._shifts.append((at, self._shift_s))
        assignment = Assignment(lives.placements, lives.recomputed)
        return Outcome(assignment, lives.dropped, self._cost(), self._stalls, self._distance)

    def _wait(self, storage: int, seconds: float) -> None:
        if seconds > SAME_TIME_S:
            self._stalls.append((storage, seconds))
            self._stall_s += seconds * self._may_wait
            self._shift_s += seconds * self._may_wait

    def _pack(self, storage: int, now_s: float) -> None:
        nbytes, padded, staging_bytes = self._nbytes[storage], self._padded[storage], self._staging_bytes
        on_drive, begun_s, staged = self._place[storage] == _NVME, now_s, min(padded, staging_bytes)
        if on_drive:
            full = self._may_wait and self._staged_bytes + staged > staging_bytes
            while self._staged and (self._staged[0][0] <= now_s or full):
                done_s, freed = self._staged.popleft()
                now_s, self._staged_bytes = max(now_s, done_s), self._staged_bytes - freed
                full = self._may_wait and self._staged_bytes + staged > staging_bytes
            if not self._may_wait and self._staged_bytes + padded > staging_bytes:
                self._place[storage] = self._lives.placements[storage] = _KEEP
                return
            now_s += (padded - staged) / self._write_rate  # in pieces
        took_s, compute_s = nbytes / self._machine.copy_out_bytes_per_s, nbytes * self._machine.compute_s_per_byte
        if self._machine.is_synchronous:
            copied_s = now_s = now_s + took_s + compute_s
        else:
            copied_s = self._out_free_s = max(self._out_free_s, now_s) + took_s
            now_s += compute_s
        self._copied_s[storage] = self._written_s[storage] = copied_s
        if on_drive:
            self._write_free_s = max(self._write_free_s, copied_s) + staged / self._write_rate
            self._written_s[storage] = self._write_free_s
            self._written_bytes += padded
            self._staged.append((self._write_free_s, staged))
            self._staged_bytes += staged
            self._peak_staging_bytes = max(self._peak_staging_bytes, self._staged_bytes)
        self._wait(storage, now_s - begun_s)

    def _plan_reads(self, order: Ints, again_at_s: Floats, again_s: Floats) -> None:
        """Find the latest start of each reload, and the prefetch distance that keeps to it."""
        machine, need_s = self._machine, self._lives.need_s[order]
        by_time = np.argsort(again_at_s, kind="stable")
        before_s = np.append(0.0, np.cumsum(again_s[by_time]))
        use_s = need_s + self._shift_s + before_s[np.searchsorted(again_at_s[by_time], need_s, "left")]
        on_drive = self._lives.placements[order] == _NVME
        rate = np.where(use_s <= self._write_free_s, self._read_beside, self._read_rate) if on_drive.any() else 1.0
        read_s = np.where(on_drive, self._timeline.padded_bytes[order] / rate, 0.0)
        copy_s = np.where(machine.is_synchronous, 0.0, self._timeline.nbytes[order] / machine.copy_in_bytes_per_s)
        starts_s = _latest_starts(use_s, copy_s * SLOWER)
        starts_s = np.where(on_drive, _latest_starts(np.where(on_drive, starts_s, np.inf), read_s * SLOWER), starts_s)
        starts_s = np.minimum.accumulate(starts_s[::-1])[::-1]  # they are asked for in order
        number = np.arange(len(order))
        asked_after = np.searchsorted(use_s, starts_s, "right")
        asked_after = np.clip(asked_after, 0, np.maximum(number - (MIN_DISTANCE - 1), 0))
        # No more is read ahead than staging holds, of which writes leave half.
        ahead_bytes = np.append(0, np.cumsum(np.where(on_drive, self._timeline.padded_bytes[order], 0)))
        bound = np.where(use_s <= self._write_free_s, PREFETCH_FRACTION_OF_STAGING, 1.0) * machine.staging_bytes
        fits_after = np.searchsorted(ahead_bytes, ahead_bytes[1:] - bound)
        asked_after = np.clip(np.maximum(asked_after, fits_after), 0, number)
        if machine.is_synchronous:  # what is read ahead lies in staging, so it is as early as may be
            asked_after = np.minimum(fits_after, number)
        # They are asked for at a use, or as backward begins.
        begins_s = np.append(min(self._lives.need_s[self._lives.exists]) + self._shift_s, use_s)
        in_pieces = on_drive & (self._timeline.padded_bytes[order] > machine.staging_bytes)  # at their use alone
        starts_s = np.where(in_pieces, use_s, begins_s[asked_after])
        self._starts_s = dict(zip(order.tolist(), starts_s.tolist(), strict=True))
        if not machine.is_synchronous:
            self._distance = tuple((np.searchsorted(asked_after, number, "right") - number).tolist())

    def _use(self, storage: int, now_s: float) -> None:
        if self._place[storage] == _KEEP:
            return
        nbytes, padded, written_s = self._nbytes[storage], self._padded[storage], self._written_s[storage]
        copy_s, is_host = nbytes / self._machine.copy_in_bytes_per_s, self._machine.is_synchronous
        on_drive, there_s = self._place[storage] == _NVME, min(self._starts_s[storage], now_s)
        if on_drive and written_s > there_s and padded <= self._machine.staging_bytes:  # it is still in staging
            self._forwarded_bytes += nbytes
            write_s = padded / self._write_rate
            if written_s - write_s > now_s:  # not begun: the drive is not worn for this one
                self._write_free_s -= write_s
                self._written_bytes -= padded
            there_s = min(written_s, now_s)
        elif on_drive:
            there_s = self._read_free_s = self._read(max(there_s, written_s, self._read_free_s), padded)
        else:
            there_s = max(there_s, written_s)
        there_s = max(now_s, there_s) + copy_s if is_host else max(self._in_free_s, there_s) + copy_s
        self._in_free_s = self._in_free_s if is_host else there_s
        self._back_s[storage] = there_s - copy_s
        self._wait(storage, there_s - now_s)

    def _read(self, start_s: float, padded: int) -> float:
        """Return when a read is done: slower as long as there are writes."""
        beside_s = max(0.0, self._write_free_s - start_s)
        took_s = padded / self._read_beside
        if took_s > beside_s:
            took_s = beside_s + (padded - self._read_beside * beside_s) / self._read_rate
        self._read_bytes += padded
        return start_s + took_s

    def _again(self, which: int, now_s: float) -> None:
        self._back_s[which] = now_s
        self._shift_s += float(self._took_s[which])

    # ---- what it came to ----------------------------------------------------------------------------------------

    def _cost(self) -> Prediction:
        timeline, lives, times = self._timeline, self._lives, self._timeline.trace.micro_steps
        on_host = lives.placements == _HOST
        begins_s = self._on_clock(timeline.pack_s[on_host], "left")
        ends_s = self._on_clock(lives.freed_s[on_host], "right")
        return Prediction(
            self.peak_device_bytes(),
            (timeline.trace.end_s + self._shift_s) * times + timeline.trace.optimizer_s,
            self._stall_s * times,
            float(timeline.recompute_s[lives.recomputed].sum()) * times,
            self._written_bytes * times,
            self._read_bytes * times,
            self._forwarded_bytes * times,
            _peak(begins_s, ends_s, timeline.nbytes[on_host]),
            self._peak_staging_bytes,
            float(timeline.rematerialize_s[self._made].sum()) * times,
            int(timeline.nbytes[self._made].sum()) * times,
        )

    def peak_device_bytes(self, beside: Spans | None = None) -> int:
        """Return the most device bytes that storages hold at once; what begins when another ends counts with it."""
        timeline, lives = self._timeline, self._lives
        exists, dropped, nbytes, gone = lives.exists, lives.dropped, timeline.nbytes, lives.placements != _KEEP
        left_s, freed_s = self._on_clock(timeline.left_s, "right"), self._on_clock(lives.freed_s, "right")
        # A copy under way holds the bytes, also when forward has long released them.
        end_s = np.where(gone, np.maximum(self._copied_s, left_s), np.where(dropped, left_s, freed_s))
        again = exists & ((gone & lives.used) | dropped)  # a loss that is kept with its graph never comes back
        # Into a recomputation as far as its own length goes: the trace's pack may be later, in a nested call.
        into_s = np.minimum(timeline.made_again_s, np.append(timeline.recompute_s, 0.0)[timeline.owner])
        back_s, from_s = np.array(self._back_s[: len(nbytes)]), np.array([*self._back_s[len(nbytes) :], 0.0])
        back_s = np.where(dropped, from_s[timeline.owner] + into_s, back_s)
        begins = [self._on_clock(timeline.pack_s, "left")[exists], back_s[again]]
        ends, sizes = [end_s[exists], freed_s[again]], [nbytes[exists], nbytes[again]]
        if beside is not None:
            begins.append(self._on_clock(beside.begins_s, "right"))
            ends.append(self._on_clock(beside.ends_s, "left"))
            sizes.append(beside.nbytes)
        return _peak(np.concatenate(begins), np.concatenate(ends), np.concatenate(sizes))

    def _on_clock(self, at_s: Floats, side: str) -> Floats:
        """Return times of the trace by the replay's clock, before (left) or after (right) events at that very time."""
        times = np.array([at for at, _ in self._shifts])
        shifts = np.array([0.0, *(shift_s for _, shift_s in self._shifts)])
        return np.asarray(at_s + shifts[np.searchsorted(times, at_s, "left" if side == "left" else "right")])


def _latest_starts(ends: Floats, durations: Floats) -> Floats:
    """Return when each must begin to end by its end and before the next begins."""
    before = np.concatenate([[0.0], np.cumsum(durations)])
    slack = np.minimum.accumulate((ends - before[1:])[::-1])[::-1]
    return np.asarray(before[:-1] + slack)


def _peak(begins: Floats, ends: Floats, nbytes: Ints) -> int:
    times = np.concatenate([begins, np.maximum(begins, ends)])
    changes = np.concatenate([nbytes, -nbytes])
    order = np.lexsort((-changes, times))  # begins first: what ends at the same time counts with it
    return int(np.cumsum(changes[order]).max(initial=0))


def replay(timeline: Timeline, assignment: Assignment, *, may_wait: bool = True) -> Outcome:
    """Replay an assignment.

    Args:
        may_wait: whether compute waits; else what finds no room in staging is kept, and other waits are only noted.
    """
    return _Replay(timeline, assignment, may_wait).run()


def peak_beside(timeline: Timeline, assignment: Assignment, beside: Spans) -> int:
    """Return the most device bytes that storages and what is held beside them take at once, under an assignment."""
    played = _Replay(timeline, assignment)
    played.run()
    return played.peak_device_bytes(beside)
