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

    def lap(self) -> tuple[int, float]:
        """Bytes and busy seconds since the last lap; counting goes on from zero, also in the middle of a transfer."""
        now = time.perf_counter()
        if self._active:
            self.busy_s += now - self._since
            self._since = now
        lap, self.nbytes, self.busy_s = (self.nbytes, self.busy_s), 0, 0.0
        return lap

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth while busy; 0.0 before the first transfer."""
        return self.nbytes / self.busy_s if self.busy_s > 0 else 0.0


class RollingRate:
    """The bandwidth of late while busy: each window of bytes counts as much as all windows before it."""

    WINDOW_BYTES = 64 << 20
    UNKNOWN_S_PER_BYTE = 1e-9

    def __init__(self) -> None:
        self.s_per_byte = self.UNKNOWN_S_PER_BYTE
        self._known = False
        self._window = BusyMeter()

    def start(self) -> None:
        """A transfer begins."""
        self._window.start()

    def stop(self, nbytes: int) -> None:
        """A transfer ends, having moved ``nbytes`` (0 if it failed)."""
        self._window.stop(nbytes)
        if self._window.nbytes >= self.WINDOW_BYTES:
            self.settle()

    def settle(self) -> None:
        """Take what was measured since the last time into account."""
        nbytes, busy_s = self._window.lap()
        if nbytes and busy_s > 0:
            found = busy_s / nbytes
            self.s_per_byte = (self.s_per_byte + found) / 2 if self._known else found
            self._known = True

    @property
    def bytes_per_s(self) -> float:
        """The estimate; 0.0 before the first measurement."""
        return 1 / self.s_per_byte if self._known else 0.0


@dataclass
class StoreStats:
    """What the store did. Bytes are those of the tensors, except where a meter says what the drive moved."""

    writes: BusyMeter = field(default_factory=BusyMeter)
    reads: BusyMeter = field(default_factory=BusyMeter)
    offloaded_bytes: int = 0
    coalesced_bytes: int = 0
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
