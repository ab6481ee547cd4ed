"""Counters, kept by whoever holds the lock of the part that is counted."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field


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
