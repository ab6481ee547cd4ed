"""How long does a drive last at this rate? The rating that the config has, over what all ranks write.

[Note: Projected life] One definition, of ``ssd.min_life_days``, of plans and of the report: the days in which all ranks
write the drive's rating. The report's rate is that of the whole run, whose first steps move everything before there is
a plan. A rated endurance (TBW) counts bytes written by the host under the rating's own workload, so the projection
assumes that our large sequential writes amplify no worse than that workload. What the drive was written before, and
what other processes write, is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TERABYTE = 10**12  # as drives are rated
DAY_S = 86400.0
ASSUMED_TBW = 600.0  # of a drive of 1 TB, where the config has no rating


def rated(tbw: float | None) -> str:
    """Return the rating in words."""
    return f"{ASSUMED_TBW:g} TBW assumed" if tbw is None else f"{tbw:.4g} TBW"


def drive_of(path: Path) -> int:
    """Return the number of a directory's file system, which stands for its drive: two partitions of one count as two.

    A directory that is yet to be made will be where its parent is.
    """
    return next(place for place in (path, *path.parents) if place.exists()).stat().st_dev


def share_a_drive(ours: Iterable[Path], others: Iterable[Path]) -> bool:
    """Return whether any directory is on the drive of one of the others."""
    try:
        return not {*map(drive_of, ours)}.isdisjoint(map(drive_of, others))
    except OSError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class PathWear:
    """Wear of one directory of ``nvme_path``.

    Attributes:
        written_bytes: written there by this rank.
        written_bytes_per_day: of this rank since the engine was built, pauses included.
        rated_endurance_tbw: terabytes (10^12 bytes) that the drive is rated for, as configured.
        life_days: the rating over the rate of all ranks; None without a rating or before the first write.
            See [Note: Projected life].
        sharers: ranks that write to the drive, each taken to write as much as this one.
    """

    path: str
    written_bytes: int
    written_bytes_per_day: float
    rated_endurance_tbw: float | None
    life_days: float | None
    sharers: int = 1

    @property
    def all_bytes_per_day(self) -> float:
        """Bytes that all ranks write in a day."""
        return self.sharers * self.written_bytes_per_day

    def days(self) -> float:
        """Return the life, also where the rating is assumed; infinite before the first write."""
        return life_days(self.rated_endurance_tbw or ASSUMED_TBW, self.all_bytes_per_day) or math.inf


def life_days(tbw: float | None, written_bytes_per_day: float) -> float | None:
    """Return the days in which so many terabytes are written; None where that is not known, or nothing is written."""
    return tbw * TERABYTE / written_bytes_per_day if tbw is not None and written_bytes_per_day else None


def path_wear(path: Path, written_bytes: int, elapsed_s: float, tbw: float | None, sharers: int = 1) -> PathWear:
    """Return the wear of a directory to which each of ``sharers`` ranks wrote ``written_bytes`` in ``elapsed_s``."""
    per_day = written_bytes / elapsed_s * DAY_S if elapsed_s > 0 else 0.0
    return PathWear(
        path=str(path), written_bytes=written_bytes, written_bytes_per_day=per_day, rated_endurance_tbw=tbw,
        life_days=life_days(tbw, sharers * per_day), sharers=sharers,
    )  # fmt: skip


def write_limit_bytes_per_step(tbw: float, min_life_days: float | None, step_s: float) -> float:
    """Return the bytes that a step of ``step_s`` may write so that the drives last for ``min_life_days``.

    ``tbw`` is of all drives together, divided by the ranks that share them. See [Note: Projected life].
    """
    return math.inf if min_life_days is None else tbw * TERABYTE / (min_life_days * DAY_S) * step_s
