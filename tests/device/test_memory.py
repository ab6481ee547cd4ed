"""What memory a device and its machine have left, by the counts of driver, allocator and kernel."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Closing
from support.doubles import EventAccelerator

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.device.accelerator import (
    TEMPORARY_FRACTION,
    Accelerator,
    MemoryLevels,
    accelerator_of,
    available_bytes,
    can_lock,
)
from ds_tba.offloader import ActivationOffloader

MIB = 1 << 20


def test_what_is_taken_is_not_available() -> None:
    def is_missing() -> bool:
        before = available_bytes()
        assert 0 < before < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        taken = torch.ones(512 * MIB // 4)
        for _ in range(50):  # the kernel's counts may be late
            if available_bytes() < before - 256 * MIB:
                return taken.numel() > 0
            time.sleep(0.02)
        return False

    assert any(is_missing() for _ in range(20))  # others may give some back in the meantime


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """With 1000 KiB available, and this process in a group within a group."""
    proc, own = tmp_path / "proc", tmp_path / "groups/job/step"
    (proc / "self").mkdir(parents=True)
    own.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:   1000 kB\n")
    (proc / "self/cgroup").write_text("1:name=systemd:/other\n0::/job/step\n")
    return tmp_path


def limit(group: Path, most: str, held_bytes: int, cached_bytes: int) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{held_bytes}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {cached_bytes}\nactive_file 7\n")


def found_bytes(machine: Path) -> int:
    return available_bytes(machine / "proc", machine / "groups")


def test_without_limits_it_is_the_machine_s(machine: Path) -> None:
    assert found_bytes(machine) == 1000 << 10
    limit(machine / "groups/job/step", "max", 100, 0)
    assert found_bytes(machine) == 1000 << 10
    (machine / "proc/self/cgroup").write_text("4:memory:/not/mounted\n")
    assert found_bytes(machine) == 1000 << 10
    (machine / "groups/memory.max").write_text("1\n")  # nobody knows what is held
    assert found_bytes(machine) == 1000 << 10
    (machine / "groups/memory.current").mkdir()
    assert found_bytes(machine) == 1000 << 10
    (machine / "proc/self/cgroup").unlink()
    assert found_bytes(machine) == 1000 << 10


@pytest.mark.parametrize("group", ["job/step", "job", "."])
def test_a_group_that_has_less_left_counts(machine: Path, group: str) -> None:
    limit(machine / "groups" / group, "5000", held_bytes=3000, cached_bytes=500)
    assert found_bytes(machine) == 2500
    limit(machine / "groups" / group, str(5 << 20), held_bytes=3000, cached_bytes=500)
    assert found_bytes(machine) == 1000 << 10
    limit(machine / "groups" / group, "5000", held_bytes=6000, cached_bytes=0)
    assert found_bytes(machine) == 0


@pytest.mark.parametrize("group", ["job/step", "job", "."])
def test_a_group_of_version_1_counts(machine: Path, group: str) -> None:
    (machine / "proc/self/cgroup").write_text("5:cpu,cpuacct:/elsewhere\n4:hugetlb,memory:/job/step\n0::/job\n")
    limited = machine / "groups/memory" / group
    limited.mkdir(parents=True)
    (limited / "memory.limit_in_bytes").write_text("5000\n")
    (limited / "memory.usage_in_bytes").write_text("3000\n")
    (limited / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 500\n")
    assert found_bytes(machine) == 2500
    (limited / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # no limit
    assert found_bytes(machine) == 1000 << 10


def test_the_room_of_a_cpu_is_memory_less_a_part_for_temporaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_tba.device.accelerator.available_bytes", lambda: 1000)
    assert Accelerator().free_bytes() == pytest.approx((1 - TEMPORARY_FRACTION) * 1000)


def test_what_the_c_library_keeps_of_freed_memory_is_available() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    torch.ones(16 * MIB // 4)  # when it is freed, glibc takes smaller ones from its heap
    held = [torch.ones(size // 4) for _ in range(100) for size in (2 * MIB, 4096)]
    before = resident_bytes()
    del held[::2]
    Accelerator().free_bytes()
    assert resident_bytes() < before - 150 * MIB


TOTAL_BYTES = 1000
FREE_BYTES = 500  # others have 100
COUNTS = {
    "active_bytes.all.current": 300,  # 50 of which a stream still uses
    "active_bytes.all.peak": 390,
    "reserved_bytes.all.current": 400,
    "num_alloc_retries": 2,
}


class Module:
    """A module of torch, whose second device is the current one."""

    def __init__(self, counts: dict[str, int] | None) -> None:
        self.counts = counts
        self.asked = 0

    def current_device(self) -> int:
        return 1

    def memory_stats(self, index: int) -> Any:
        assert index == 1
        self.asked += 1
        return self.counts

    def mem_get_info(self, index: int) -> Any:
        assert index == 1
        return FREE_BYTES, TOTAL_BYTES


def device(module: Module) -> Accelerator:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda kind: module)
        return accelerator_of("cuda")


@pytest.mark.parametrize(
    ("counts", "levels"),
    [
        (COUNTS, MemoryLevels(300, 390, 400, 2)),
        (
            COUNTS | {"allocated_bytes.all.current": 240, "allocated_bytes.all.peak": 395},
            MemoryLevels(300, 395, 400, 2),
        ),
        ({"allocated_bytes.all.current": 250, "allocated_bytes.all.peak": 350}, MemoryLevels(250, 350, 0, 0)),
        (None, MemoryLevels(0, 0, 0, 0)),
    ],
    ids=["what streams still use is in use", "all is counted", "less is counted", "nothing is counted"],
)
def test_the_levels_are_those_of_the_allocator(counts: dict[str, int] | None, levels: MemoryLevels) -> None:
    """Asked once: PyTorch takes all counts anew each time, and a recorded step asks at each saved tensor."""
    module = Module(counts)
    assert device(module).levels() == levels and module.asked == 1


def test_room_is_what_the_driver_and_the_allocator_have_left() -> None:
    room_bytes = FREE_BYTES + (400 - 300) - TEMPORARY_FRACTION * TOTAL_BYTES
    assert device(Module(COUNTS)).free_bytes() == room_bytes


def test_the_report_has_the_levels_of_a_device(closing: Closing) -> None:
    accelerator = EventAccelerator()
    accelerator.levels = device(Module(COUNTS)).levels  # type: ignore[method-assign]
    offloader = closing(ActivationOffloader)(OffloadConfig(placement="keep"), AioConfig(), accelerator)
    assert offloader.report().to_dict()["device_memory"] == MemoryLevels(300, 390, 400, 2)._asdict()


def test_more_than_there_is_cannot_be_locked() -> None:
    assert not can_lock(1 << 50)
    assert not can_lock(1 << 80)  # no length that mmap takes
