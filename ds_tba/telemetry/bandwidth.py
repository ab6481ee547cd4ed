"""The rates of one path, for writes and for reads, alone and while the other kind is under way.

[Note: Whose time] While several transfers of a kind are under way, each is charged its part of the time, so that bytes
over time is the rate of the path and not of one lane, whatever the order in which they end; time in which none is under
way is charged to nobody. Where a lane had nothing to do, the path could have been faster, by as much as the lanes are
more than the transfers: then the estimate moves only if it is out of that range. A transfer that was for a part of its
time beside the other kind counts for both estimates, its bytes divided as the estimates so far would have it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ds_tba.telemetry.stats import RollingRate

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
