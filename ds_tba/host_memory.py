"""The memory of this machine, as far as this process may have it."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class _Version:
    """Of control groups: where the groups are mounted, who rules memory, and the files of a group."""

    mount: str
    controller: str
    limit: str
    held: str
    cached: str

    def own(self, memberships: list[str]) -> str:
        """The path of the process's group, from lines of ``hierarchy:controllers:/path``."""
        for line in memberships:
            _, controllers, path = line.split(":", 2)
            if self.controller in controllers.split(","):
                return path.lstrip("/")
        return ""

    def left_bytes(self, group: Path) -> int:
        """Until the limit of a group."""
        limit_bytes = int((group / self.limit).read_text(encoding="ascii"))
        held_bytes = int((group / self.held).read_text(encoding="ascii"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return limit_bytes - held_bytes + int(stat.get(self.cached, 0))


_VERSIONS = (
    _Version("", "", "memory.max", "memory.current", "inactive_file"),
    _Version("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """What can be taken without swapping, by all processes together that share it.

    That is ``MemAvailable`` of proc(5), or what is left to a control group (cgroups(7)) that this process is in, as
    containers and batch systems have them; 0 where a limit is exceeded.
    """
    meminfo = (proc / "meminfo").read_text(encoding="ascii")
    machine_bytes = int(meminfo.partition("MemAvailable:")[2].split()[0]) * 1024
    return max(0, min([machine_bytes, *_left_bytes(proc, groups)]))


def _left_bytes(proc: Path, groups: Path) -> list[int]:
    """Of each limited group from this process's own up. What a group has cached can be dropped."""
    memberships: list[str] = []
    with suppress(OSError):  # a kernel may be without them, a sandbox may hide them
        memberships = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    found = []
    for version in _VERSIONS:
        root = groups / version.mount
        own = root / version.own(memberships)
        for group in [own, *own.parents]:
            if group.is_relative_to(root):
                with suppress(OSError, ValueError):  # "max", too: no limit
                    found.append(version.left_bytes(group))
    return found


def give_back_freed_memory() -> None:
    """Have the C library give the system what it holds of freed memory, where it can: glibc keeps much of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
