"""What others move on our drives: the kernel's counters of a drive, less what we moved ourselves.

[Note: Others' traffic] The kernel counts what reached the drive. Swapping with O_DIRECT, as ZeRO's is, shows at once;
writes through the page cache show when the kernel writes them back, which may be many seconds later. Of our own
transfers under way any part may be counted already, so that all of their bytes are taken for ours until they end: what
is told of others is never too much, and comes late by the transfers under way. A drive that sysfs does not know
(memory, network and overlay file systems) has no traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ds_tba.errors import StateError
from ds_tba.planner.trace import Traffic
from ds_tba.telemetry.bandwidth import PathMeter
from ds_tba.telemetry.drive_health import sysfs_device

SECTOR_BYTES = 512  # the unit of the kernel's counters, whatever the drive's own
LEAST_S = 0.005  # shorter intervals become one
_READ, _WRITTEN = 2, 6  # fields of /sys/block/*/stat


@dataclass(frozen=True, slots=True)
class _Moved:
    """Bytes since some beginning."""

    write_bytes: int = 0
    read_bytes: int = 0

    def __add__(self, other: _Moved) -> _Moved:
        return _Moved(self.write_bytes + other.write_bytes, self.read_bytes + other.read_bytes)

    def __sub__(self, other: _Moved) -> _Moved:
        return _Moved(self.write_bytes - other.write_bytes, self.read_bytes - other.read_bytes)

    def times(self, factor: int) -> _Moved:
        return _Moved(self.write_bytes * factor, self.read_bytes * factor)

    def at_least(self, other: _Moved) -> _Moved:
        return _Moved(max(self.write_bytes, other.write_bytes), max(self.read_bytes, other.read_bytes))


class _SharedDrive:
    """One drive, and the meters of our paths on it."""

    def __init__(self, device: Path) -> None:
        self.meters: list[PathMeter] = []
        self._stat = device / "stat"
        self._zero = _Moved()
        self._others = _Moved()

    def begin(self, ranks: int) -> None:
        """Count from here. What we have under way is not taken off: it may be on the drive already."""
        ours = sum((_ended(meter) for meter in self.meters), _Moved())
        self._zero = self._counters() - ours.times(ranks)
        self._others = _Moved()

    def others(self, ranks: int) -> _Moved:
        """What others have moved since, as far as that is certain."""
        # The drive first: what begins in between must be in ours, not in theirs.
        counters = self._counters()
        ours = sum((_begun(meter) for meter in self.meters), _Moved())
        self._others = self._others.at_least(counters - ours.times(ranks) - self._zero)
        return self._others

    def _counters(self) -> _Moved:
        try:
            fields = self._stat.read_text().split()
            return _Moved(int(fields[_WRITTEN]) * SECTOR_BYTES, int(fields[_READ]) * SECTOR_BYTES)
        except (OSError, ValueError, IndexError):  # the drive is gone
            return _Moved()


@dataclass(frozen=True, slots=True)
class _Interval:
    start_s: float
    end_s: float
    moved: _Moved

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def joined(self, later: _Interval) -> _Interval:
        return _Interval(self.start_s, later.end_s, self.moved + later.moved)


class OthersTraffic:
    """Traffic of others on the drives of our paths, between the moments at which it is sampled.

    Args:
        paths: each directory with the meter of what we move there.
        ranks: that use the same drives in the same way, each taken to move what this one moves.
        sysfs: where it is mounted.
    """

    def __init__(self, paths: Sequence[tuple[Path, PathMeter]], ranks: int = 1, sysfs: Path = Path("/sys")) -> None:
        self._ranks = ranks
        drives: dict[Path, _SharedDrive] = {}
        for directory, meter in paths:
            device = sysfs_device(directory, sysfs)
            if device is not None:
                drives.setdefault(device, _SharedDrive(device)).meters.append(meter)
        self._drives = list(drives.values())
        self._intervals: list[_Interval] = []
        self._at_s = 0.0
        self._others = _Moved()

    def begin(self, at_s: float = 0.0) -> None:
        """Forget what was, and count from ``at_s`` of the caller's clock."""
        self._at_s, self._others = at_s, _Moved()
        self._intervals.clear()
        for drive in self._drives:
            drive.begin(self._ranks)

    def sample(self, at_s: float) -> None:
        """An interval ends, and the next one begins. Costs the reading of one small file per drive.

        Raises:
            StateError: time goes back.
        """
        if at_s < self._at_s:
            raise StateError(f"traffic was sampled at {self._at_s} s and then at {at_s} s: begin anew instead")
        others = sum((drive.others(self._ranks) for drive in self._drives), _Moved())
        found = _Interval(self._at_s, at_s, others - self._others)
        self._at_s, self._others = at_s, others
        if self._intervals and self._intervals[-1].length_s < LEAST_S:
            found = self._intervals.pop().joined(found)
        self._intervals.append(found)

    def traffic(self) -> tuple[Traffic, ...]:
        """The intervals in which others moved something, in order of time."""
        intervals = list(self._intervals)
        if len(intervals) > 1 and intervals[-1].length_s < LEAST_S:
            last = intervals.pop()
            intervals.append(intervals.pop().joined(last))
        return tuple(
            Traffic(one.start_s, one.end_s, one.moved.write_bytes / one.length_s, one.moved.read_bytes / one.length_s)
            for one in intervals
            if one.length_s > 0 and one.moved != _Moved()
        )


def _ended(meter: PathMeter) -> _Moved:
    return _Moved(meter.writes.moved_bytes, meter.reads.moved_bytes)


def _begun(meter: PathMeter) -> _Moved:
    # Without the lock: a transfer that ends in between is counted twice, never not at all.
    under_way = _Moved(meter.writes.under_way_bytes, meter.reads.under_way_bytes)
    return under_way + _ended(meter)


def on_another_clock(
    traffic: Sequence[Traffic], moments_s: Sequence[float], other_moments_s: Sequence[float]
) -> tuple[Traffic, ...]:
    """The same bytes at the times of another clock.

    Args:
        moments_s: moments on the traffic's own clock, from its beginning to its end, rising.
        other_moments_s: the same moments on the other.
    """
    found = []
    for one in traffic:
        start_s, end_s = (float(np.interp(at_s, moments_s, other_moments_s)) for at_s in (one.start_s, one.end_s))
        if end_s > start_s:
            factor = (one.end_s - one.start_s) / (end_s - start_s)
            found.append(Traffic(start_s, end_s, one.write_bytes_per_s * factor, one.read_bytes_per_s * factor))
    return tuple(found)
