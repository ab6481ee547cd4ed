"""The memory of this machine, as far as this process may have it."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """What can be taken without swapping, by all processes together that share it.

    That is ``MemAvailable`` of proc(5), or what is left to a control group (version 2) that this process is in, as
    containers and batch systems have them; 0 where a limit is exceeded.
    """
    meminfo = (proc / "meminfo").read_text(encoding="ascii")
    machine_bytes = int(meminfo.partition("MemAvailable:")[2].split()[0]) * 1024
    return max(0, min([machine_bytes, *_left_bytes(proc, groups)]))


def _left_bytes(proc: Path, groups: Path) -> list[int]:
    """Of each limited group from this process's own up. What a group has cached can be dropped."""
    own = ""
    with suppress(OSError):  # a kernel may be without them, a sandbox may hide them
        memberships = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
        own = next((line.removeprefix("0::/") for line in memberships if line.startswith("0::/")), "")
    found = []
    for group in [groups / own, *(groups / own).parents]:
        if group.is_relative_to(groups):
            with suppress(OSError, ValueError):  # "max", too: no limit
                limit_bytes = int((group / "memory.max").read_text(encoding="ascii"))
                held_bytes = int((group / "memory.current").read_text(encoding="ascii"))
                stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
                found.append(limit_bytes - held_bytes + int(stat.get("inactive_file", 0)))
    return found


def give_back_freed_memory() -> None:
    """Have the C library give the system what it holds of freed memory, where it can: glibc keeps much of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
