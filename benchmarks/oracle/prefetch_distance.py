"""How far ahead of its use each storage is to be reloaded, so that it is back just in time.

[Note: Latest starts] The first uses are walked backwards: each copy in ends before its use and before the next copy
begins, each read ends before its copy in begins and before the next read begins. Every transfer is assumed to last
``SLOWER`` times as long as measured, reads at their rate beside concurrent writes. Each storage is asked for at the use
before the one that its start allows: a plan is made of averages, and a reload that comes too late costs time, where one
that comes too early costs only memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_tba.config import Placement
from ds_tba.plan.trace import Resources
from oracle.timeline import Assignment, Floats, Ints, Liveness, Timeline

SLOWER = 1.25
MIN_DISTANCE = 2


@dataclass(frozen=True, slots=True)
class BackwardStart:
    """The begin of backward in a replay.

    Attributes:
        at_s: by the trace's clock.
        shift_s: the delay of the replay's clock.
        unwritten_bytes: of storages that are still to be written.
    """

    at_s: float
    shift_s: float
    unwritten_bytes: int


@dataclass(frozen=True, slots=True)
class Reloads:
    """The storages that backward brings back, in the order of first uses, by the replay's clock.

    Attributes:
        begin_s: when the first of them can be asked for.
        written_s: when the last write ends.
        use_s: first uses.
        read_s: on the drives, without concurrent writes; 0 for host memory.
        copy_s: onto the device, where that is done ahead.
    """

    begin_s: float
    written_s: float
    use_s: Floats
    read_s: Floats
    copy_s: Floats

    @classmethod
    def of(
        cls, timeline: Timeline, liveness: Liveness, assignment: Assignment, order: Ints, start: BackwardStart
    ) -> Reloads:
        """The reloads to expect when backward begins.

        Args:
            order: of the first uses of what was moved.
        """
        resources, need_s = timeline.resources, liveness.need_s[order]
        made = assignment.placements == Placement.REMATERIALIZE
        again_at_s = np.concatenate([timeline.blocks.backward_start_s[assignment.recomputed], liveness.need_s[made]])
        took_s = [timeline.blocks.recompute_s[assignment.recomputed], timeline.storages.rematerialize_s[made]]
        again = np.flatnonzero(again_at_s >= start.at_s)
        again = again[np.argsort(again_at_s[again], kind="stable")]
        delays_s = np.concatenate([[0.0], np.cumsum(np.concatenate(took_s)[again])])
        delays_s = delays_s[np.searchsorted(again_at_s[again], need_s, "left")]
        on_drive = assignment.placements[order] == Placement.NVME
        write_rate = sum(path.write_beside_read_bytes_per_s for path in resources.paths)
        begin_s = start.at_s + start.shift_s
        ahead = np.zeros(len(order)) if resources.is_synchronous else timeline.storages.nbytes[order]
        return cls(
            begin_s,
            begin_s + (start.unwritten_bytes / write_rate if start.unwritten_bytes else 0.0),
            need_s + start.shift_s + delays_s,
            np.where(on_drive, timeline.storages.padded_bytes[order], 0) / (resources.read_bytes_per_s or 1.0),
            ahead / resources.copy_in_bytes_per_s,
        )


def prefetch_distance(reloads: Reloads, resources: Resources) -> list[int]:
    """See ``Plan.prefetch_distance``."""
    count = len(reloads.use_s)
    copy_start_s = _latest_starts(reloads.use_s, reloads.copy_s * SLOWER)
    is_read = reloads.read_s > 0
    pace = _Pace.of(reloads, resources)
    # A read's deadline counts in seconds of an undisturbed drive.
    deadlines = np.where(is_read, pace.work_at(copy_start_s), np.inf)
    read_start_s = pace.time_of(_latest_starts(deadlines, reloads.read_s * SLOWER))
    start_s = np.where(is_read, read_start_s, copy_start_s)
    start_s = np.minimum.accumulate(start_s[::-1])[::-1]  # they are asked for in order
    asked_after = np.searchsorted(reloads.use_s, start_s, "right")
    asked_after = np.clip(asked_after, 0, np.maximum(np.arange(count) - (MIN_DISTANCE - 1), 0))
    reached = np.searchsorted(asked_after, np.arange(count), "right")
    return (reached - np.arange(count)).tolist()  # type: ignore[no-any-return]


def _latest_starts(ends: Floats, durations: Floats) -> Floats:
    """When each must begin to end by its end and before the next begins."""
    before = np.concatenate([[0.0], np.cumsum(durations)])
    slack = np.minimum.accumulate((ends - before[1:])[::-1])[::-1]
    return np.asarray(before[:-1] + slack)


@dataclass(frozen=True, slots=True)
class _Pace:
    """The reads of a drive that also writes: work over time, piecewise linear."""

    times_s: Floats
    work_s: Floats

    @classmethod
    def of(cls, reloads: Reloads, resources: Resources) -> _Pace:
        """From the begin to the last use."""
        begin_s, end_s = reloads.begin_s, max(reloads.begin_s, float(reloads.use_s[-1]))
        inner = [reloads.written_s] if begin_s < reloads.written_s < end_s else []
        times = np.unique(np.array([begin_s, *inner, end_s]))
        read_rate = sum(path.read_beside_write_bytes_per_s for path in resources.paths)
        slowed = read_rate / resources.read_bytes_per_s if 0 < resources.read_bytes_per_s < np.inf else 1.0
        speeds = np.where(times[:-1] < reloads.written_s, slowed, 1.0)
        return cls(times, np.concatenate([[0.0], np.cumsum(np.diff(times) * speeds)]))

    def work_at(self, at_s: Floats) -> Floats:
        """Work done from the begin to a time."""
        return np.interp(at_s, self.times_s, self.work_s)

    def time_of(self, work_s: Floats) -> Floats:
        """When an amount of work is done; the begin where that would be earlier."""
        return np.interp(work_s, self.work_s, self.times_s)
