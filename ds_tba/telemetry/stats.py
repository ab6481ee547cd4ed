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

    def add(self, nbytes: int) -> None:
        """Move the level by ``nbytes``, which may be negative."""
        self.now += nbytes
        self.peak = max(self.peak, self.now)


@dataclass
class CacheStats:
    """What the tensor cache saw."""

    packed_tensors: int = 0
    passed_through_tensors: int = 0
    deduplicated_bytes: int = 0
    kept_bytes: Counter[str] = field(default_factory=Counter)
    micro_steps: int = 0
    saved: Gauge = field(default_factory=Gauge)
    resident: Gauge = field(default_factory=Gauge)
