"""Samples of what a process holds: memory, threads, files, disk, objects of ours; and the slope of their growth."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One look at the process.

    Attributes:
        step: training steps done.
        segment: the engine's number, -1 between two engines.
        memory_bytes: private resident bytes (``RssAnon``), after garbage collection and ``malloc_trim``.
        disk_bytes: of open files in the directory, named or not, and of the files in it.
        objects: instances of classes of ``ds_tba``.
        left: amounts that the offloader still holds although no graph is alive, by name, without those that are 0.
    """

    step: int
    segment: int
    memory_bytes: int
    threads: int
    files: int
    disk_bytes: int
    objects: int
    left: dict[str, int]


def take(step: int, segment: int, directory: Path, offloader: Any, patience_s: float) -> Sample:
    """Return a sample of this process, once the offloader (if any) has released what nobody wants."""
    gc.collect()
    left = settled(offloader, patience_s)
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return Sample(
        step=step,
        segment=segment,
        memory_bytes=int(status.partition("RssAnon:")[2].split()[0]) * 1024,
        threads=int(status.partition("Threads:")[2].split()[0]),
        files=len(os.listdir("/proc/self/fd")),
        disk_bytes=disk_bytes(directory),
        objects=sum(str(type(one).__module__).startswith("ds_tba") for one in gc.get_objects()),
        left=left,
    )


def settled(offloader: Any, patience_s: float) -> dict[str, int]:
    """Return the amounts, other than 0, that an offloader holds when no graph is alive and its lanes are done."""
    deadline = time.monotonic() + patience_s
    while (left := +Counter(_held(offloader))) and time.monotonic() < deadline:
        time.sleep(0.001)
    return dict(left)


def _held(offloader: Any) -> dict[str, int]:
    if offloader is None:
        return {}
    cache, store = offloader.cache, offloader._tiers.nvme
    cache.settle()
    held = {"records": cache.live_records, "saved": cache.stats.saved.now, "resident": cache.stats.resident.now}
    if store is not None:
        held["staging"] = store.ring.slots.used_bytes
        held["swap file"] = sum(path.extents.used_bytes for path in store.paths)
    return held


def disk_bytes(directory: Path) -> int:
    """Return the bytes allocated below a directory, in files with a name or only open in this process."""
    found: dict[tuple[int, int], int] = {}
    for path in [*Path("/proc/self/fd").iterdir(), *directory.rglob("*")]:
        try:
            target = os.readlink(path) if path.is_symlink() else str(path)
            status = path.stat()
        except FileNotFoundError:  # the descriptor with which /proc/self/fd itself was listed
            continue
        if target.startswith(f"{directory}/") and not path.is_dir():
            found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def slope(points: Sequence[tuple[float, float, object]]) -> float:
    """Return the least squares slope of y over x for points (x, y, group); each group has a level of its own."""
    groups: dict[object, list[tuple[float, float]]] = {}
    for x, y, group in points:
        groups.setdefault(group, []).append((x, y))
    above = below = 0.0
    for members in groups.values():
        mean_x, mean_y = (sum(column) / len(members) for column in zip(*members, strict=True))
        above += sum((x - mean_x) * (y - mean_y) for x, y in members)
        below += sum((x - mean_x) ** 2 for x, _ in members)
    return above / below if below else 0.0
