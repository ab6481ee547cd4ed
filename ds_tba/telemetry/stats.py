"""Counters, kept by whoever holds the lock of the part that is counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum


class BusyMeter:
    """Bytes and the time during which at least one transfer was under way, for a bandwidth without idle time."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.busy_s = 0.0
        self._active = 0
        self._since = 0.0

    def start(self) -> None:
        """A transfer begins."""
        if self._active == 0:
            self._since = time.perf_counter()
        self._active += 1

    def stop(self, nbytes: int) -> None:
        """A transfer ends, having moved ``nbytes`` (0 if it failed)."""
        self._active -= 1
        self.nbytes += nbytes
        if self._active == 0:
            self.busy_s += time.perf_counter() - self._since

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth while busy; 0.0 before the first transfer."""
        return self.nbytes / self.busy_s if self.busy_s > 0 else 0.0


class RollingRate:
    """The bandwidth of late.

    It fades by bytes and not by time, so that without new data it stays.

    Args:
        half_bytes: the last so many bytes count as much as all before them.
    """

    UNKNOWN_S_PER_BYTE = 1e-9

    def __init__(self, half_bytes: int) -> None:
        self._half_bytes = half_bytes
        self.s_per_byte = self.UNKNOWN_S_PER_BYTE
        self._faded = 1.0  # the part of the estimate that was never measured

    def add(self, nbytes: float, least_s: float, most_s: float) -> None:
        """Take a transfer into account that says no more than that its bytes take from ``least_s`` to ``most_s``.

        Between the two the estimate stays as it is.
        """
        if nbytes <= 0 or most_s <= 0:
            return
        least, most = least_s / nbytes, most_s / nbytes
        found = min(max(self.s_per_byte, least), most) if self.is_known else most
        kept = 0.5 ** (nbytes / self._half_bytes)
        self._faded *= kept
        self.s_per_byte += (found - self.s_per_byte) * (1 - kept) / (1 - self._faded)

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._faded < 1

    @property
    def bytes_per_s(self) -> float:
        """The estimate; 0.0 before the first measurement."""
        return 1 / self.s_per_byte if self.is_known else 0.0


@dataclass
class StoreStats:
    """What the store did. Bytes are those of the tensors, except where a meter says what the drive moved."""

    writes: BusyMeter = field(default_factory=BusyMeter)
    reads: BusyMeter = field(default_factory=BusyMeter)
    offloaded_bytes: int = 0
    cancelled_bytes: int = 0
    forwarded_bytes: int = 0
    rescued_bytes: int = 0
    stall_s: float = 0.0
    fallbacks: Counter[str] = field(default_factory=Counter)


class Gauge:
    """A level and the highest it ever was, in bytes."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self.lap_peak = 0

    def add(self, nbytes: int) -> None:
        """Move the level by ``nbytes``, which may be negative."""
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        self.lap_peak = max(self.lap_peak, self.now)

    def lap(self) -> int:
        """The highest level since the last lap."""
        highest, self.lap_peak = self.lap_peak, self.now
        return highest


@dataclass
class CacheStats:
    """What the tensor cache saw."""

    packed_tensors: int = 0
    passed_through_tensors: int = 0
    deduplicated_bytes: int = 0
    kept_bytes: Counter[str] = field(default_factory=Counter)
    micro_steps: int = 0
    moving_s: float = 0.0  # of the host, in copies, in waiting for them and for the store
    saved: Gauge = field(default_factory=Gauge)
    resident: Gauge = field(default_factory=Gauge)


def readable(nbytes: float) -> str:
    """Bytes in the largest unit of which there is one."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


# The rates of one path, for writes and for reads, alone and while the other kind is under way.
#
# [Note: Whose time] While several transfers of a kind are under way, each is charged its part of the time, so that
# bytes over time is the rate of the path and not of one lane, whatever the order in which they end; time in which
# none is under way is charged to nobody. Where a lane had nothing to do, the path could have been faster, by as much
# as the lanes are more than the transfers: then the estimate moves only if it is out of that range. A transfer that
# was for a part of its time beside the other kind counts for both estimates, its bytes divided as the estimates so
# far would have it.


QUICK_BYTES = 16 << 20
STEADY_BYTES = 64 << 20


class Kind(Enum):
    """The kinds of transfers."""

    WRITE = "write"
    READ = "read"


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds in which a kind was busy, and the part of them that each of its transfers is charged."""

    busy_s: float = 0.0
    charged_s: float = 0.0

    def __sub__(self, other: _Times) -> _Times:
        return _Times(self.busy_s - other.busy_s, self.charged_s - other.charged_s)

    def after(self, passed_s: float, active: int) -> _Times:
        return _Times(self.busy_s + passed_s, self.charged_s + passed_s / active)


class KindMeter:
    """What one kind of transfers did on a path.

    Attributes:
        of_late: its rate, whatever else was under way; steadier, because the bytes are divided among paths by it.
        alone, beside: its rate without and with the other kind.
        moved_bytes: in transfers that ended well.
    """

    def __init__(self, lanes: int) -> None:
        self.of_late = RollingRate(STEADY_BYTES)
        self.alone = RollingRate(QUICK_BYTES)
        self.beside = RollingRate(QUICK_BYTES)
        self.moved_bytes = 0
        self.active = 0
        self.alone_times = _Times()
        self.beside_times = _Times()
        self._lanes = lanes

    def pass_by(self, passed_s: float, *, is_beside: bool) -> None:
        """So much time went by with the transfers that are under way."""
        if self.active and is_beside:
            self.beside_times = self.beside_times.after(passed_s, self.active)
        elif self.active:
            self.alone_times = self.alone_times.after(passed_s, self.active)

    def learn(self, nbytes: int, alone: _Times, beside: _Times) -> None:
        """Take into account that a transfer of ``nbytes`` took so long. See [Note: Whose time]."""
        alone_part = alone.charged_s / _known(self.alone, self.beside).s_per_byte
        beside_part = beside.charged_s / _known(self.beside, self.alone).s_per_byte
        if alone_part + beside_part <= 0:
            return
        alone_bytes = nbytes * alone_part / (alone_part + beside_part)
        self._add(self.alone, alone_bytes, alone)
        self._add(self.beside, nbytes - alone_bytes, beside)
        both = _Times(alone.busy_s + beside.busy_s, alone.charged_s + beside.charged_s)
        self._add(self.of_late, nbytes, both)

    def _add(self, rate: RollingRate, nbytes: float, times: _Times) -> None:
        rate.add(nbytes, times.busy_s / self._lanes, times.charged_s)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer under way."""

    kind: Kind
    nbytes: int
    alone_times: _Times
    beside_times: _Times


class PathMeter:
    """Told of every transfer of a path, under one lock.

    Args:
        write_lanes, read_lanes: how many transfers of each kind can be under way.
        clock: seconds.
    """

    def __init__(self, write_lanes: int, read_lanes: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.writes = KindMeter(write_lanes)
        self.reads = KindMeter(read_lanes)
        self._clock = clock
        self._now_s = 0.0

    def of(self, kind: Kind) -> KindMeter:
        """The meter of one kind."""
        return self.writes if kind is Kind.WRITE else self.reads

    def start(self, kind: Kind, nbytes: int) -> Transfer:
        """A transfer begins."""
        self._pass_by()
        one = self.of(kind)
        one.active += 1
        return Transfer(kind, nbytes, one.alone_times, one.beside_times)

    def stop(self, transfer: Transfer, *, moved: bool = True, is_typical: bool = True) -> None:
        """A transfer ends.

        Args:
            moved: it did not fail.
            is_typical: its time tells the rate of the path.
        """
        self._pass_by()
        one = self.of(transfer.kind)
        one.active -= 1
        one.moved_bytes += transfer.nbytes if moved else 0
        if moved and is_typical:
            one.learn(transfer.nbytes, one.alone_times - transfer.alone_times, one.beside_times - transfer.beside_times)

    def _pass_by(self) -> None:
        now_s = self._clock()
        passed_s, self._now_s = now_s - self._now_s, now_s
        is_beside = self.writes.active > 0 and self.reads.active > 0
        self.writes.pass_by(passed_s, is_beside=is_beside)
        self.reads.pass_by(passed_s, is_beside=is_beside)


def _known(rate: RollingRate, other: RollingRate) -> RollingRate:
    return rate if rate.is_known or not other.is_known else other
