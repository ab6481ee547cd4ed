"""Whether a directory can hold a swap file, told before training and with numbers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ds_tba.errors import PathError

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


@dataclass(frozen=True, slots=True)
class SwapDirectory:
    """A directory that passed every check."""

    path: Path
    file_system: str
    free_bytes: int


def check_directories(paths: tuple[str, ...], needed_bytes: int, ranks_on_node: int) -> list[SwapDirectory]:
    """Check every directory of ``nvme_path``.

    Args:
        needed_bytes: room that each rank must find in each directory.
        ranks_on_node: ranks that share the directories of this machine.

    Raises:
        PathError: naming the directory, the rule, the numbers and the repair.
    """
    directories = [_checked(Path(path).expanduser(), needed_bytes, ranks_on_node) for path in paths]
    seen: dict[Path, Path] = {}
    for directory in directories:
        other = seen.setdefault(directory.path.resolve(), directory.path)
        if other is not directory.path:
            raise PathError(f"nvme_path names {other} and {directory.path}, which are one directory: list it once.")
    return directories


def _checked(path: Path, needed_bytes: int, ranks_on_node: int) -> SwapDirectory:
    try:
        return _check(path, needed_bytes, ranks_on_node)
    except OSError as error:
        raise PathError(f"nvme_path {path} cannot be examined ({error.strerror}): check it and its parents.") from error


def _check(path: Path, needed_bytes: int, ranks_on_node: int) -> SwapDirectory:
    if not path.exists():
        raise PathError(f"nvme_path {path} does not exist: create it (mkdir -p {path}) or name another directory.")
    if not path.is_dir():
        raise PathError(f"nvme_path {path} is a file: name a directory on an NVMe drive.")
    file_system = file_system_of(path)
    if file_system in MEMORY_FILE_SYSTEMS:
        raise PathError(
            f"nvme_path {path} is on {file_system}, which is memory: activations would not leave RAM. "
            "Name a directory on an NVMe drive."
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise PathError(f"nvme_path {path} is not writable by user {os.geteuid()}: chown it or name another directory.")
    usage = os.statvfs(path)
    free_bytes = usage.f_bavail * usage.f_frsize
    if free_bytes < needed_bytes * ranks_on_node:
        raise PathError(
            f"nvme_path {path} has {_gib(free_bytes)} free, but {ranks_on_node} rank(s) on this machine need "
            f"{_gib(needed_bytes)} each: free {_gib(needed_bytes * ranks_on_node - free_bytes)}, lower "
            "io.swap_file_bytes, or name another directory."
        )
    return SwapDirectory(path, file_system, free_bytes)


def file_system_of(path: Path) -> str:
    """The file system type of a path, from ``/proc/self/mountinfo``; ``"unknown"`` where that cannot be read."""
    resolved = str(path.resolve())
    best, kind = "", "unknown"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        fields, _, rest = line.partition(" - ")
        mount_point = fields.split()[4].encode().decode("unicode_escape")
        inside = resolved == mount_point or resolved.startswith(mount_point.rstrip("/") + "/")
        if inside and len(mount_point) >= len(best):
            best, kind = mount_point, rest.split()[0]
    return kind


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB ({nbytes} bytes)"
