"""The drive behind a directory: what sysfs tells everyone, and what ``smartctl`` tells those who may ask.

Looked at once, when a run starts. Nothing here is ever an error: a drive that cannot be asked is a drive not known.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
