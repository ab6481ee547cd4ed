"""What the writes cost the drive: bytes per day for each path, the drive behind it, and its projected life.

Knows sysfs and arithmetic. A rated endurance (TBW) counts bytes written by the host under the rating's own workload, so
the projection assumes that our large sequential writes amplify no worse than that. TBA's multi-year figure multiplies
the rating by 215 for relaxed retention and an amplification of 1; this one does not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

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
    """

    path: str
    device: str
    model: str
    written_bytes: int
    written_bytes_per_day: float
    rated_endurance_tbw: float | None
    life_days: float | None


def path_wear(path: Path, written_bytes: int, elapsed_s: float, rated_endurance_tbw: float | None) -> PathWear:
    """The wear of one path.

    Args:
        written_bytes: bytes written so far.
        elapsed_s: seconds in which they were written.
        rated_endurance_tbw: terabytes (10^12 bytes) that the drive is rated for.
    """
    per_day = written_bytes / elapsed_s * DAY_S if elapsed_s > 0 else 0.0
    life_days = rated_endurance_tbw * TERABYTE / per_day if rated_endurance_tbw and per_day else None
    device, model = drive_of(path)
    return PathWear(str(path), device, model, written_bytes, per_day, rated_endurance_tbw, life_days)


def drive_of(path: Path, sysfs: Path = Path("/sys")) -> tuple[str, str]:
    """Name and model of the block device that holds a directory; empty strings where they are not known."""
    try:
        number = os.stat(path).st_dev
        device = (sysfs / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    except OSError:
        return "", ""
    if (device / "partition").exists():
        device = device.parent
    try:
        model = (device / "device" / "model").read_text().strip()
    except OSError:
        model = ""
    return device.name, model
