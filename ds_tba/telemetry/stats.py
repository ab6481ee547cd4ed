"""Counters of the stores and the cache, and the rates of each path; the lock of the part that is counted guards them.

A path has rates of writes and of reads, each alone and concurrent with the other kind.

[Note: Whose time] While several transfers of a kind are under way, each is charged its share of the time. Bytes over
charged time are then the rate of the path and not of one lane, in whatever order the transfers end. Idle time is
charged to none. Where a lane had nothing to do, the path could have been faster, by at most the ratio of lanes to
transfers: the estimate moves only if it is outside of that range. A transfer that ran partly alone and partly
concurrent with the other kind counts for both estimates; its bytes are divided in the proportion that the estimates so
far predict.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

# Bytes that count as much as all before them: in the rates alone and concurrent, and in the recent rate.
QUICK_BYTES = 16 << 20
STEADY_BYTES = 64 << 20


class BusyMeter:
    """Bytes, and the time in which at least one transfer was under way: a bandwidth without idle time."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.busy_s = 0.0
        self._active = 0
        self._since = 0.0

    def start(self) -> None:
        """Record that a transfer begins."""
        if self._active == 0:
            self._since = time.perf_counter()
        self._active += 1

    def stop(self, nbytes: int) -> None:
        """Record that a transfer ends, having moved ``nbytes`` (0 if it failed)."""
        self._active -= 1
        self.nbytes += nbytes
        if self._active == 0:
            self.busy_s += time.perf_counter() - self._since

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth while busy; 0.0 before the first transfer."""
        return self.nbytes / self.busy_s if self.busy_s > 0 else 0.0


@dataclass
class StoreStats:
    """Counters of a store. Bytes are those of tensors, except in the meters, which count what the drive moved."""

    writes: BusyMeter = field(default_factory=BusyMeter)
    reads: BusyMeter = field(default_factory=BusyMeter)
    offloaded_bytes: int = 0
    cancelled_bytes: int = 0
    forwarded_bytes: int = 0
    rescued_bytes: int = 0
    stall_s: float = 0.0
    fallbacks: Counter[str] = field(default_factory=Counter)


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
        """The peak since the last lap."""
        peak, self.lap_peak = self.lap_peak, self.now
        return peak


class StorageGauge(Gauge):
    """A level of storages, each counted once, with the most bytes that one of its users has of it."""

    def __init__(self) -> None:
        super().__init__()
        self._users: dict[int, tuple[int, int]] = {}  # by stamp: how many, and the bytes that are counted

    def enter(self, stamp: int, nbytes: int) -> int:
        """One user more of a storage; returns the bytes that this adds."""
        users, counted_bytes = self._users.get(stamp, (0, 0))
        added_bytes = max(nbytes - counted_bytes, 0)
        self._users[stamp] = users + 1, counted_bytes + added_bytes
        self.add(added_bytes)
        return added_bytes

    def leave(self, stamp: int) -> None:
        """A user is gone, and with the last of them the bytes."""
        users, counted_bytes = self._users.pop(stamp)
        if users > 1:
            self._users[stamp] = users - 1, counted_bytes
        else:
            self.add(-counted_bytes)


@dataclass
class CacheStats:
    """Counters of the tensor cache.

    Attributes:
        saved: what autograd would hold without us.
        resident: what is in device memory of that.
    """

    packed_tensors: int = 0
    passed_through_tensors: int = 0
    deduplicated_bytes: int = 0
    rematerialized_bytes: int = 0
    kept_bytes: Counter[str] = field(default_factory=Counter)
    micro_steps: int = 0
    moving_s: float = 0.0  # host time in copies, and in waiting for copies and stores
    saved: StorageGauge = field(default_factory=StorageGauge)
    resident: Gauge = field(default_factory=Gauge)


def readable(nbytes: float) -> str:
    """Bytes in the largest unit that gives 1 or more."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def expanded(path: str) -> Path:
    """A path of the config as an absolute one, with ``~`` and environment variables replaced."""
    return Path(os.path.expanduser(os.path.expandvars(path))).absolute()  # Path's raises for users it does not know


# ---- rates of a path ------------------------------------------------------------------------------------------------


class RollingRate:
    """A recent bandwidth: a mean that fades with bytes and not with time, so that it stays while nothing is measured.

    Args:
        half_bytes: the last so many bytes count as much as all before them.
    """

    UNKNOWN_S_PER_BYTE = 1e-9

    def __init__(self, half_bytes: int) -> None:
        self._half_bytes = half_bytes
        self.s_per_byte = self.UNKNOWN_S_PER_BYTE
        self._unmeasured = 1.0  # weight of the initial value, which was never measured

    def add(self, nbytes: float, min_s: float, max_s: float) -> None:
        """Add a transfer of which is known only that its bytes take from ``min_s`` to ``max_s``.

        An estimate within that range stays as it is.
        """
        if nbytes <= 0 or max_s <= 0:
            return
        low, high = min_s / nbytes, max_s / nbytes
        found = min(max(self.s_per_byte, low), high) if self.is_known else high
        kept = 0.5 ** (nbytes / self._half_bytes)
        self._unmeasured *= kept
        self.s_per_byte += (found - self.s_per_byte) * (1 - kept) / (1 - self._unmeasured)

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._unmeasured < 1

    @property
    def bytes_per_s(self) -> float:
        """The estimate; 0.0 before the first measurement."""
        return 1 / self.s_per_byte if self.is_known else 0.0


class Kind(Enum):
    """The kinds of transfers."""

    WRITE = "write"
    READ = "read"


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds in which a kind was busy, and the share of them that each of its transfers is charged."""

    busy_s: float = 0.0
    charged_s: float = 0.0

    def __sub__(self, other: _Times) -> _Times:
        return _Times(self.busy_s - other.busy_s, self.charged_s - other.charged_s)

    def after(self, passed_s: float, active: int) -> _Times:
        return _Times(self.busy_s + passed_s, self.charged_s + passed_s / active)


class KindMeter:
    """The transfers of one kind on a path.

    Attributes:
        recent: the rate, whatever else was under way; steadier, because bytes are divided among paths by it.
        alone, concurrent: the rate without and with transfers of the other kind.
        moved_bytes: of transfers that succeeded.
    """

    def __init__(self, lanes: int) -> None:
        self.recent = RollingRate(STEADY_BYTES)
        self.alone = RollingRate(QUICK_BYTES)
        self.concurrent = RollingRate(QUICK_BYTES)
        self.moved_bytes = 0
        self.active = 0
        self.alone_times = _Times()
        self.concurrent_times = _Times()
        self._lanes = lanes

    def charge(self, passed_s: float, *, is_concurrent: bool) -> None:
        """Charge ``passed_s`` to the transfers under way."""
        if self.active and is_concurrent:
            self.concurrent_times = self.concurrent_times.after(passed_s, self.active)
        elif self.active:
            self.alone_times = self.alone_times.after(passed_s, self.active)

    def learn(self, nbytes: int, alone: _Times, concurrent: _Times) -> None:
        """Add a transfer to the estimates. See [Note: Whose time]."""
        alone_part = alone.charged_s / _known(self.alone, self.concurrent).s_per_byte
        concurrent_part = concurrent.charged_s / _known(self.concurrent, self.alone).s_per_byte
        if alone_part + concurrent_part <= 0:
            return
        alone_bytes = nbytes * alone_part / (alone_part + concurrent_part)
        self._add(self.alone, alone_bytes, alone)
        self._add(self.concurrent, nbytes - alone_bytes, concurrent)
        both = _Times(alone.busy_s + concurrent.busy_s, alone.charged_s + concurrent.charged_s)
        self._add(self.recent, nbytes, both)

    def _add(self, rate: RollingRate, nbytes: float, times: _Times) -> None:
        rate.add(nbytes, times.busy_s / self._lanes, times.charged_s)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer under way, with the times of its kind when it began."""

    kind: Kind
    nbytes: int
    alone_times: _Times
    concurrent_times: _Times


class PathMeter:
    """Measures the transfers of a path. All calls are made under one lock.

    Args:
        write_lanes, read_lanes: maximum number of transfers of each kind at once.
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
        """Record that a transfer begins."""
        self._charge()
        one = self.of(kind)
        one.active += 1
        return Transfer(kind, nbytes, one.alone_times, one.concurrent_times)

    def stop(self, transfer: Transfer, *, moved: bool = True, is_typical: bool = True) -> None:
        """Record that a transfer ends.

        Args:
            moved: whether it succeeded.
            is_typical: whether its time shows the rate of the path.
        """
        self._charge()
        one = self.of(transfer.kind)
        one.active -= 1
        one.moved_bytes += transfer.nbytes if moved else 0
        if moved and is_typical:
            alone = one.alone_times - transfer.alone_times
            one.learn(transfer.nbytes, alone, one.concurrent_times - transfer.concurrent_times)

    def _charge(self) -> None:
        now_s = self._clock()
        passed_s, self._now_s = now_s - self._now_s, now_s
        is_concurrent = self.writes.active > 0 and self.reads.active > 0
        self.writes.charge(passed_s, is_concurrent=is_concurrent)
        self.reads.charge(passed_s, is_concurrent=is_concurrent)


def _known(rate: RollingRate, other: RollingRate) -> RollingRate:
    return rate if rate.is_known or not other.is_known else other
