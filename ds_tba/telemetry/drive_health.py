"""The drive behind a directory: what sysfs tells everyone, and what ``smartctl`` tells those who may ask.

Looked at once, when a run starts. Nothing here is ever an error: a drive that cannot be asked is a drive not known.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_tba.errors import ConfigError

TERABYTE = 10**12  # as drives are rated
DAY_S = 86400.0
SMARTCTL = "smartctl"
SMARTCTL_LIMIT_S = 2.0
VIRTUAL = ("vd", "xvd", "loop", "nbd")  # names of virtio, Xen, loop and network drives
DATA_UNIT_BYTES = 512_000  # NVMe counts written data in thousands of 512-byte units


@dataclass(frozen=True, slots=True)
class Drive:
    """A block device.

    Attributes:
        device, model: empty where they are not known (network and overlay file systems).
        rotational: whether the kernel takes it for a spinning disk; None where it does not tell, and for drives that
            are not real, of which it always says so.
        percentage_used: NVMe's own estimate of the life that is used up; above 100 it has outlived its rating.
        drive_written_bytes: what hosts wrote to it in its whole life, to the half megabyte (NVMe).
    """

    device: str = ""
    model: str = ""
    rotational: bool | None = None
    percentage_used: int | None = None
    drive_written_bytes: int | None = None


def sysfs_device(path: Path, sysfs: Path = Path("/sys")) -> Path | None:
    """Where sysfs has the whole drive that holds a directory; None where there is none (memory, network, overlay)."""
    try:
        number = os.stat(path).st_dev
        device = (sysfs / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    except OSError:
        return None
    return device.parent if (device / "partition").exists() else device


def examine(path: Path, sysfs: Path = Path("/sys")) -> Drive:
    """The drive that holds a directory."""
    device = sysfs_device(path, sysfs)
    if device is None:
        return Drive()
    rotational = {"0": False, "1": True}.get(_read(device / "queue" / "rotational"))
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


def _smart(device: str) -> Mapping[str, Any]:
    """What ``smartctl`` says of a device; empty where it is missing, not permitted, slow, or says something else."""
    try:
        done = subprocess.run(
            # Its exit status counts the drive's own troubles too, so only what it says is looked at.
            [SMARTCTL, "-j", "-a", f"/dev/{device}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SMARTCTL_LIMIT_S,
            check=False,
        )
        return _mapping(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# What the writes cost the drive: bytes per day for each path, the drive behind it, and its projected life.
#
# Knows arithmetic. A rated endurance (TBW) counts bytes written by the host under the rating's own workload, so
# the projection assumes that our large sequential writes amplify no worse than that. TBA's multi-year figure multiplies
# the rating by 215 for relaxed retention and an amplification of 1; this one does not.


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


def life_days(rated_endurance_tbw: float | None, written_bytes_per_day: float) -> float | None:
    """How long drives rated for so many terabytes live; None without a rating, or where nothing is written."""
    if not rated_endurance_tbw or not written_bytes_per_day:
        return None
    return rated_endurance_tbw * TERABYTE / written_bytes_per_day


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
    return PathWear(
        str(path),
        drive.device,
        drive.model,
        written_bytes,
        per_day,
        rated_endurance_tbw,
        life_days(rated_endurance_tbw, per_day),
        drive.rotational,
        drive.percentage_used,
        drive.drive_written_bytes,
    )


def write_limit_bytes_per_step(rated_endurance_tbw: float | None, min_life_days: float | None, step_s: float) -> float:
    """What a step of ``step_s`` may write so that drives rated for so many terabytes live for ``min_life_days``.

    Args:
        rated_endurance_tbw: terabytes (10^12 bytes) that all drives together are rated for, less what was written
            before, divided by the ranks that share them.

    Raises:
        ConfigError: a life is asked for and the rating is not known.
    """
    if min_life_days is None:
        return math.inf
    if rated_endurance_tbw is None:
        raise ConfigError(
            f'"ssd.min_life_days" is {min_life_days} without "ssd.rated_endurance_tbw": a life follows from the rating '
            "only; set it from the drive's data sheet."
        )
    return rated_endurance_tbw * TERABYTE / (min_life_days * DAY_S) * step_s
