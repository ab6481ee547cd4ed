"""What the writes cost the drive: bytes per day for each path, the drive behind it, and its projected life.

Knows arithmetic. A rated endurance (TBW) counts bytes written by the host under the rating's own workload, so
the projection assumes that our large sequential writes amplify no worse than that. TBA's multi-year figure multiplies
the rating by 215 for relaxed retention and an amplification of 1; this one does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ds_tba.telemetry.drive_health import Drive

TERABYTE = 10**12
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class PathWear:
    """One directory of ``nvme_path``.

    Attributes:
        device, model: the block device behind it, empty where sysfs does not tell (network and overlay file systems).
        written_bytes: what this rank wrote there.
        written_bytes_per_day: at the rate since the engine was built, pauses included.
        life_days: rated endurance over this rate; None without ``ssd.rated_endurance_tbw`` or before the first write.
        rotational, percentage_used, drive_written_bytes: as the drive told when the run started; see
            :class:`ds_tba.telemetry.drive_health.Drive`. None where it did not.
    """

    path: str
    device: str
    model: str
    written_bytes: int
    written_bytes_per_day: float
    rated_endurance_tbw: float | None
    life_days: float | None
    rotational: bool | None = None
    percentage_used: int | None = None
    drive_written_bytes: int | None = None


def path_wear(
    path: Path, drive: Drive, written_bytes: int, elapsed_s: float, rated_endurance_tbw: float | None
) -> PathWear:
    """The wear of one path.

    Args:
        drive: what is behind it.
        written_bytes: bytes written so far.
        elapsed_s: seconds in which they were written.
        rated_endurance_tbw: terabytes (10^12 bytes) that the drive is rated for.
    """
    per_day = written_bytes / elapsed_s * DAY_S if elapsed_s > 0 else 0.0
    life_days = rated_endurance_tbw * TERABYTE / per_day if rated_endurance_tbw and per_day else None
    return PathWear(
        str(path),
        drive.device,
        drive.model,
        written_bytes,
        per_day,
        rated_endurance_tbw,
        life_days,
        drive.rotational,
        drive.percentage_used,
        drive.drive_written_bytes,
    )
