"""Which drive is behind a directory, how worn it is, and how long it lasts at this rate: by sysfs and ``smartctl``.

Drives are examined once, when a run starts. Nothing here is ever an error: a drive that does not answer is unknown. It
cannot see through network and overlay file systems, nor what other processes write.

[Note: Projected life] One definition, of ``ssd.min_life_days``, of plans and of the report: the days in which all ranks
write what the rating leaves, less what the drive reported as written when the run started. Where plans are made, the
report's rate is that of the steps under them: those before move everything, and are few. A rated endurance (TBW) counts
bytes written by the host under the rating's own workload, so the projection assumes that our large sequential writes
amplify no worse than that workload. TBA's multi-year figure multiplies the rating by 215 for relaxed retention and an
amplification of 1; the projection here does not.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from ds_tba.errors import ConfigError

TERABYTE = 10**12  # as drives are rated
DAY_S = 86400.0
SMARTCTL = "smartctl"
SMARTCTL_LIMIT_S = 2.0
VIRTUAL = ("vd", "xvd", "loop", "nbd")  # names of virtio, Xen, loop and network drives
LEAST_PERCENTAGE_USED = 5  # below, its rounding is most of it
ASSUMED_TBW = 600.0  # of a drive of 1 TB, where nobody tells
DATA_UNIT_BYTES = 512_000  # NVMe counts written data in thousands of 512-byte units


class Rating(NamedTuple):
    """A rated endurance in terabytes, and who says so; empty for the config."""

    tbw: float
    source: str

    def __str__(self) -> str:
        return " ".join(filter(None, (f"{self.tbw:.4g} TBW", self.source)))


@dataclass(frozen=True, slots=True)
class Drive:
    """A block device.

    Attributes:
        device, model: empty where they are not known (network and overlay file systems).
        rotational: whether the kernel takes the drive for a spinning disk; None where it does not tell, and for virtual
            drives, which it always calls spinning.
        percentage_used: NVMe's own estimate of the life that is used up; above 100 the drive has outlived its rating.
        drive_written_bytes: written by hosts in the drive's whole life, to the half megabyte (NVMe).
    """

    device: str = ""
    model: str = ""
    rotational: bool | None = None
    percentage_used: int | None = None
    drive_written_bytes: int | None = None

    def rating(self, configured_tbw: float | None) -> Rating:
        """Return the rating: as configured, else by what the drive reports as written and worn, else assumed."""
        if configured_tbw is not None:
            return Rating(configured_tbw, "")
        if self.drive_written_bytes is None or (self.percentage_used or 0) < LEAST_PERCENTAGE_USED:
            return Rating(ASSUMED_TBW, "assumed")
        return Rating(100 * self.drive_written_bytes / (self.percentage_used or 1) / TERABYTE, "by SMART")

    def left_tbw(self, configured_tbw: float | None) -> float:
        """Return the terabytes that the rating leaves."""
        return max(0.0, self.rating(configured_tbw).tbw - (self.drive_written_bytes or 0) / TERABYTE)


def sysfs_device(path: Path, sysfs: Path = Path("/sys")) -> Path | None:
    """Return the sysfs directory of the drive that holds a directory; None without one (memory, network, overlay)."""
    try:
        number = os.stat(path).st_dev
        device = (sysfs / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    except OSError:
        return None
    return device.parent if (device / "partition").exists() else device


def share_a_drive(ours: Iterable[Path], others: Iterable[Path]) -> bool:
    """Return whether any directory is on the drive of one of the others."""
    try:
        return not {*map(_drive_id, ours)}.isdisjoint(map(_drive_id, others))
    except OSError:
        return False


def _drive_id(path: Path) -> Path | int:
    """Return what is alike for directories on one drive. One that is yet to be made will be where its parent is."""
    place = next(place for place in (path, *path.parents) if place.exists())
    return sysfs_device(place) or place.stat().st_dev


def examine(path: Path, sysfs: Path = Path("/sys")) -> Drive:
    """Return the drive that holds a directory."""
    device = sysfs_device(path, sysfs)
    if device is None:
        return Drive()
    rotational = {"0": False, "1": True}.get(_read(device / "queue" / "rotational"))
    # Else every cloud instance would be warned of a spinning disk.
    if device.name.startswith(VIRTUAL):
        rotational = None
    smart = _smart(device.name)
    health = _mapping(smart.get("nvme_smart_health_information_log"))
    units = _number(health.get("data_units_written"))
    return Drive(
        device.name,
        _read(device / "device" / "model") or str(smart.get("model_name") or ""),
        rotational,
        _number(health.get("percentage_used")),
        None if units is None else units * DATA_UNIT_BYTES,
    )


def _smart(device: str) -> Mapping[str, object]:
    """Return what ``smartctl`` says of a device; empty where it is missing, not permitted, slow, or says otherwise."""
    # Its exit status counts the drive's own troubles too, so only its output is used.
    command = [SMARTCTL, "-j", "-a", f"/dev/{device}"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SMARTCTL_LIMIT_S, check=False
        )
        return _mapping(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PathWear(Drive):
    """Wear of one directory of ``nvme_path``, on a drive as it was at the start of the run.

    Attributes:
        written_bytes: written there by this rank.
        written_bytes_per_day: of this rank, pauses included: at the rate since there are plans, else since the engine
            was built.
        rated_endurance_tbw: terabytes (10^12 bytes) that the drive is rated for, as configured.
        life_days: what the rating leaves over the rate of all ranks; None without a rating or before the first write.
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
        """Return the life, also where only an assumption gives the rating; infinite before the first write."""
        days = life_days(self.left_tbw(self.rated_endurance_tbw), self.all_bytes_per_day)
        return math.inf if days is None else days


def life_days(left_tbw: float | None, written_bytes_per_day: float) -> float | None:
    """Return the days in which so many terabytes are written; None where that is not known, or nothing is written."""
    if left_tbw is None or not written_bytes_per_day:
        return None
    return left_tbw * TERABYTE / written_bytes_per_day


def path_wear(
    path: Path,
    drive: Drive,
    written_bytes: int,
    elapsed_s: float,
    rated_endurance_tbw: float | None,
    sharers: int = 1,
    before_bytes: int = 0,
) -> PathWear:
    """Return the wear of a directory to which each of ``sharers`` ranks wrote ``written_bytes``.

    Args:
        elapsed_s: time in which the last of them were written, but for the first ``before_bytes``.
    """
    per_day = (written_bytes - before_bytes) / elapsed_s * DAY_S if elapsed_s > 0 else 0.0
    left_tbw = None if rated_endurance_tbw is None else drive.left_tbw(rated_endurance_tbw)
    return PathWear(
        **asdict(drive),
        path=str(path),
        written_bytes=written_bytes,
        written_bytes_per_day=per_day,
        rated_endurance_tbw=rated_endurance_tbw,
        life_days=life_days(left_tbw, sharers * per_day),
        sharers=sharers,
    )


def write_limit_bytes_per_step(left_tbw: float | None, min_life_days: float | None, step_s: float) -> float:
    """Return the bytes that a step of ``step_s`` may write so that the drives last for ``min_life_days``.

    ``left_tbw`` is of all drives together, divided by the ranks that share them. See [Note: Projected life].

    Raises:
        ConfigError: a life is asked for and the rating is not known.
    """
    if min_life_days is None:
        return math.inf
    if left_tbw is None:
        raise ConfigError(
            f'"ssd.min_life_days" is {min_life_days} without "ssd.rated_endurance_tbw": a life follows from the rating '
            "only; set the rating from the drive's data sheet."
        )
    return left_tbw * TERABYTE / (min_life_days * DAY_S) * step_s
