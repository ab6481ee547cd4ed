"""Counters of the stores and the cache, the rates of each path, and the wear of drives at such a rate.

The lock of the part that is counted guards its counters. A path has a rate of writes and one of reads.

[Note: Whose time] While several transfers of a kind are under way, each is charged its share of the time. Bytes over
charged time are then the rate of the path and not of one lane, in whatever order the transfers end. Idle time is
charged to none. Where a lane had nothing to do, the path could have been faster, by at most the ratio of lanes to
transfers: an estimate within that range stays, or light work would make drives look slow, and plans move less still.

[Note: Projected life] One definition, of ``ssd.min_life_days``, of plans and of the report: the days in which all ranks
write the drive's rating. The report's rate is that of the whole run, whose first steps move everything before there is
a plan. A rated endurance (TBW) counts bytes written by the host under the rating's own workload, so the projection
assumes that our large sequential writes amplify no worse than that workload. What the drive was written before, and
what other processes write, is not known here.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RECENT_BYTES = 64 << 20  # of a rate: the last so many bytes count as much as all before them
TERABYTE = 10**12  # as drives are rated
DAY_S = 86400.0
ASSUMED_TBW = 600.0  # of a drive of 1 TB, where the config has no rating


@dataclass
class StoreStats:
    """Counters of a store. Bytes are those of tensors; what drives moved for them is in the meters of their paths."""

    offloaded_bytes: int = 0
    cancelled_bytes: int = 0
    forwarded_bytes: int = 0
    rescued_bytes: int = 0
    rescued_storages: int = 0  # number of those with a part whose write failed
    stall_s: float = 0.0


class Gauge:
    """A level in bytes, and its peak."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self.lap_peak = 0

    def add(self, nbytes: int) -> None:
        """Change the level by ``nbytes``, which may be negative."""
        now = self.now = self.now + nbytes
        if now > self.lap_peak:  # not max(): each saved tensor comes here several times
            self.lap_peak = now
            if now > self.peak:
                self.peak = now

    def lap(self) -> int:
        """Return the peak since the last lap."""
        peak, self.lap_peak = self.lap_peak, self.now
        return peak


@dataclass
class CacheStats:
    """Counters of the tensor cache."""

    packed_tensors: int = 0
    passed_through_tensors: int = 0
    deduplicated_bytes: int = 0
    rematerialized_bytes: int = 0
    recomputed_bytes: int = 0
    kept_bytes: Counter[str] = field(default_factory=Counter)
    # Number of storages that no store took, each once, by the reason of the last store.
    fallbacks: Counter[str] = field(default_factory=Counter)
    micro_steps: int = 0
    moving_s: float = 0.0  # host time in copies, and in waiting for copies and stores
    saved: Gauge = field(default_factory=Gauge)  # what autograd would hold without us
    resident: Gauge = field(default_factory=Gauge)  # what is in device memory of that


def readable(nbytes: float) -> str:
    """Return bytes in the largest unit that gives 1 or more."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return rows of cells as lines: the first ``left`` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def expanded(path: str) -> Path:
    """Return a path of the config as an absolute one, with ``~`` and environment variables replaced."""
    return Path(os.path.expanduser(os.path.expandvars(path))).absolute()  # Path's raises for users it does not know


# ---- rates of a path ------------------------------------------------------------------------------------------------


class RecentRate:
    """A bandwidth as the mean of the recent transfers: it fades with bytes and not with time, so that it stays while
    nothing is measured.
    """

    def __init__(self) -> None:
        # Bytes and seconds, changed together: a report is made in any thread, without the lock.
        self._moved = (0.0, 0.0)

    def add(self, nbytes: float, min_s: float, max_s: float) -> None:
        """Add a transfer that takes the path from ``min_s`` to ``max_s``; see [Note: Whose time]."""
        if nbytes <= 0 or max_s <= 0:
            return
        moved_bytes, seconds = self._moved
        took_s = min(max(nbytes * seconds / moved_bytes, min_s), max_s) if moved_bytes else max_s
        kept = 0.5 ** (nbytes / RECENT_BYTES)
        self._moved = (moved_bytes * kept + nbytes, seconds * kept + took_s)

    @property
    def bytes_per_s(self) -> float:
        """The estimate; 0.0 before the first measurement."""
        moved_bytes, seconds = self._moved
        return moved_bytes / seconds if moved_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer under way, with the times of its kind when it began (see :class:`KindMeter`)."""

    meter: KindMeter
    nbytes: int
    busy_s: float
    charged_s: float
    started_s: float
    lane_s: float  # of the thread's processor time


class KindMeter:
    """The transfers of one kind on a path."""

    def __init__(self, name: str, lanes: int) -> None:
        self.name = name
        self.recent = RecentRate()  # the rate, whatever else was under way
        # Bytes of transfers that succeeded, and as the drive counts them (a codec makes fewer); how many are under way.
        self.moved_bytes = self.drive_bytes = self.active = 0
        # Seconds in which one was under way; the share of these that each of them is charged; and the processor time
        # that the lanes' threads took for ``moved_bytes``.
        self.busy_s = self.charged_s = self.lane_s = 0.0
        self._lanes = lanes  # maximum number of transfers at once

    @property
    def lane_s_per_byte(self) -> float:
        """Processor time for a byte; 0 before the first."""
        return self.lane_s / self.moved_bytes if self.moved_bytes else 0.0

    def charge(self, passed_s: float) -> None:
        """Charge ``passed_s`` to the transfers under way."""
        if self.active:
            self.busy_s += passed_s
            self.charged_s += passed_s / self.active

    def learn(self, transfer: Transfer) -> None:
        """Add a transfer that has ended to the rates."""
        busy_s, charged_s = self.busy_s - transfer.busy_s, self.charged_s - transfer.charged_s
        self.recent.add(transfer.nbytes, busy_s / self._lanes, charged_s)


class PathMeter:
    """Measures the transfers of a path. All calls are made under one lock."""

    def __init__(self, write_lanes: int, read_lanes: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.writes = KindMeter("write", write_lanes)
        self.reads = KindMeter("read", read_lanes)
        self._clock = clock  # in seconds
        self._now_s = 0.0
        # Takes each transfer as it ends: kind, name, its begin and end in seconds, and its bytes. Set without the lock.
        self.listener: Callable[[str, str, float, float, int], None] | None = None

    def start(self, one: KindMeter, nbytes: int) -> Transfer:
        """Record that a transfer of a kind begins, in the thread that does it."""
        self._charge()
        one.active += 1
        return Transfer(one, nbytes, one.busy_s, one.charged_s, self._now_s, time.thread_time())

    def stop(self, transfer: Transfer, *, moved: bool = True, drive_bytes: int | None = None) -> None:
        """Record that a transfer ends, in the same thread.

        Args:
            moved: whether it succeeded.
            drive_bytes: those that the drive moved for it; None for all.
        """
        self._charge()
        one = transfer.meter
        one.active -= 1
        if moved:
            one.lane_s += time.thread_time() - transfer.lane_s
            one.moved_bytes += transfer.nbytes
            one.drive_bytes += transfer.nbytes if drive_bytes is None else drive_bytes
        listener = self.listener  # read once: a step may end meanwhile, and take it away
        if listener is not None:
            listener(
                one.name, one.name if moved else f"{one.name}, failed", transfer.started_s, self._now_s, transfer.nbytes
            )
        if moved:
            one.learn(transfer)

    def _charge(self) -> None:
        now_s = self._clock()
        passed_s, self._now_s = now_s - self._now_s, now_s
        self.writes.charge(passed_s)
        self.reads.charge(passed_s)


# ---- wear of drives -------------------------------------------------------------------------------------------------


def rated(tbw: float | None) -> str:
    """Return the rating in words."""
    return f"{ASSUMED_TBW:g} TBW assumed" if tbw is None else f"{tbw:.4g} TBW"


def drive_of(path: Path) -> int:
    """Return the number of a directory's file system, which stands for its drive: two partitions of one count as two.

    A directory that is yet to be made will be where its parent is.
    """
    return next(place for place in (path, *path.parents) if place.exists()).stat().st_dev


def life_days(tbw: float | None, written_bytes_per_day: float) -> float | None:
    """Return the days in which so many terabytes are written; None where that is not known, or nothing is written."""
    return tbw * TERABYTE / written_bytes_per_day if tbw is not None and written_bytes_per_day else None


def write_limit_bytes_per_step(tbw: float, min_life_days: float | None, step_s: float) -> float:
    """Return the bytes that a step of ``step_s`` may write so that the drives last for ``min_life_days``.

    ``tbw`` is of all drives together, divided by the ranks that share them. See [Note: Projected life].
    """
    return math.inf if min_life_days is None else tbw * TERABYTE / (min_life_days * DAY_S) * step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PathWear:
    """Wear of one directory of ``nvme_path``."""

    path: str
    written_bytes: int  # to the directory, by this rank
    written_bytes_per_day: float  # of this rank since the engine was built, pauses included
    rated_endurance_tbw: float | None  # terabytes (10^12 bytes) that the drive is rated for, as configured
    # The rating over the rate of all ranks; None without a rating or before the first write: [Note: Projected life].
    life_days: float | None
    sharers: int = 1  # ranks that write to the drive, each taken to write as much as this one

    @classmethod
    def of(cls, path: Path, written_bytes: int, elapsed_s: float, tbw: float | None, sharers: int = 1) -> PathWear:
        """Return the wear of a directory to which each of ``sharers`` ranks wrote so many bytes in ``elapsed_s``."""
        per_day = written_bytes / elapsed_s * DAY_S if elapsed_s > 0 else 0.0
        return cls(
            path=str(path), written_bytes=written_bytes, written_bytes_per_day=per_day, rated_endurance_tbw=tbw,
            life_days=life_days(tbw, sharers * per_day), sharers=sharers,
        )  # fmt: skip

    @property
    def all_bytes_per_day(self) -> float:
        """Bytes that all ranks write in a day."""
        return self.sharers * self.written_bytes_per_day

    def days(self) -> float:
        """Return the life, also where the rating is assumed; infinite before the first write."""
        return life_days(self.rated_endurance_tbw or ASSUMED_TBW, self.all_bytes_per_day) or math.inf

    def in_words(self) -> str:
        of = f" of {self.sharers} ranks" if self.sharers > 1 else ""
        return (
            f"{self.all_bytes_per_day / TERABYTE:.2f} TB a day{of} ({self.days():.0f} days to "
            f"{rated(self.rated_endurance_tbw)})"
        )
