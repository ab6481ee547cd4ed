"""What a device is asked for, and what memory it and its machine have left; doubles stand for driver and torch."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Closing
from support import hazards
from support.cuda_doubles import Devices
from support.doubles import EventAccelerator
from support.late_device import LateDevice, LateEvent
from support.offloaders import make
from support.stores import MIB
from torch import Tensor

from ds_tba.core.cache import TensorCache
from ds_tba.device import accelerator as module
from ds_tba.device.accelerator import TEMPORARY_FRACTION, Accelerator, MemoryLevels, available_bytes
from ds_tba.device.copies import Copies
from ds_tba.errors import ConfigError
from ds_tba.storage.backends import PosixBackend
from ds_tba.storage.host import HostStore
from ds_tba.storage.nvme import NvmeStore
from ds_tba.storage.staging import StagingRing
from ds_tba.storage.tiers import can_lock


def adapted(api: Devices) -> Accelerator:
    """That of a rank whose device is the second."""
    api.set_device(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda kind: api)
        return module.accelerator_of("cuda")


def test_memory_is_pinned_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    empty = torch.empty

    def pinned(nbytes: int, **options: Any) -> Tensor:
        asked.append(options)
        return empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pytest.fail("pinned as a copy"))
    assert adapted(Devices()).pinned(3).numel() == 3
    assert asked == [{"dtype": torch.uint8, "device": "cpu", "pin_memory": True}]


def test_pinned_memory_goes_back_where_pytorch_can_do_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else that of a closed engine stays pinned to the end of the process."""
    gone = list[str]()
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: gone.append("back"), raising=False)
    adapted(Devices()).give_pinned_back()
    monkeypatch.delattr(torch._C, "_host_emptyCache")
    adapted(Devices()).give_pinned_back()
    assert gone == ["back"]


def test_whoever_waits_for_an_event_sleeps() -> None:
    api = Devices()
    Copies(adapted(api)).out(torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8))
    assert set(api.blocking) == {True}


def test_the_pool_of_compiled_graphs_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    name, inside, outside = "torch._inductor.cudagraph_trees", torch.zeros(1), torch.zeros(1)
    accelerator = adapted(Devices())
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert not accelerator.is_of_graph(inside.untyped_storage())
    managers: dict[int, Any] = {}
    trees = SimpleNamespace(get_manager=lambda index, create_if_none_exists: managers.get(index))
    monkeypatch.setitem(sys.modules, name, trees)  # type: ignore[arg-type]
    assert not accelerator.is_of_graph(inside.untyped_storage())
    live = [inside.untyped_storage()._cdata]
    managers[1] = SimpleNamespace(live_cudagraph_pool_storages_in_curr_execution=lambda: live)
    assert accelerator.is_of_graph(inside.untyped_storage()) and not accelerator.is_of_graph(outside.untyped_storage())


def test_torch_still_has_what_is_asked() -> None:
    """Names of torch that are not public."""
    from torch._inductor import cudagraph_trees

    assert cudagraph_trees.get_manager.__code__.co_varnames[:2] == ("device_index", "create_if_none_exists")
    assert hasattr(cudagraph_trees.CUDAGraphTreeManager, "live_cudagraph_pool_storages_in_curr_execution")


class Graphs(LateDevice):
    """Memory of some storages belongs to a graph; or a graph is being captured."""

    def __init__(self, *, capturing: bool = False) -> None:
        super().__init__()
        self.capturing = capturing
        self.of_graph = set[int]()

    def is_capturing(self) -> bool:
        return self.capturing

    def is_of_graph(self, storage: torch.UntypedStorage) -> bool:
        return storage.data_ptr() in self.of_graph


@pytest.mark.parametrize("capturing", [False, True], ids=["in the pool", "while capturing"])
def test_what_belongs_to_a_graph_is_kept(closing: Closing, capturing: bool) -> None:
    device = closing(Graphs, LateDevice.end)(capturing=capturing)
    store = closing(HostStore)(device, 8 * MIB)
    cache = TensorCache([store], "cpu", 1024, accelerator=device)
    x, inner = hazards.leaf(), hazards.leaf().exp()
    device.of_graph.add(inner.untyped_storage().data_ptr())
    with cache.saving():
        loss = ((x.exp() * 2).sin() + inner.sin()).sum()
    moved_bytes = 0 if capturing else 2 * x.nbytes
    assert store.stats.offloaded_bytes == moved_bytes
    assert cache.stats.kept_bytes["of a CUDA graph"] == 3 * x.nbytes - moved_bytes
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, *torch.autograd.grad((x.exp() * 2).sin().sum(), x))
    device.capturing = False


@pytest.mark.parametrize("budget_bytes", [None, 40_000])
def test_no_event_is_asked_while_a_graph_is_captured(
    closing: Closing, monkeypatch: pytest.MonkeyPatch, budget_bytes: int | None
) -> None:
    """In forward, or where the garbage collector comes upon an older graph: it would spoil the capture."""
    device, asked = closing(Graphs, LateDevice.end)(), list[str]()
    for name, usual in {"query": LateEvent.query, "synchronize": LateEvent.synchronize}.items():

        def watched(event: LateEvent, name: str = name, usual: Any = usual) -> Any:
            if device.capturing and "late-stream" not in threading.current_thread().name:
                asked.append(name)
            return usual(event)

        monkeypatch.setattr(LateEvent, name, watched)
    cache = TensorCache([closing(HostStore)(device, 8 * MIB)], "cpu", 1024, accelerator=device)
    cache.limit(budget_bytes, "the budget")
    x = hazards.leaf()
    with cache.saving():
        y = x
        for _ in range(6):
            y = y.sin()
        device.capturing = True
        z = x[:8]
        for _ in range(4):
            z = z.cos()  # small ones, and larger ones
        w = x.exp().sin()
        del y
    device.capturing = False
    assert not asked
    del z, w
    device.synchronize()
    cache.settle()


def test_pinned_memory_that_no_drive_takes_is_refused() -> None:
    """As PyTorch's is with ``pinned_use_cuda_host_register:True``."""
    device = EventAccelerator()
    device.pinned = lambda nbytes: torch.empty(nbytes + 64, dtype=torch.uint8)[1:]  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="pinned_use_cuda_host_register"):
        StagingRing(device, PosixBackend(), MIB)


def test_closing_gives_pinned_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else PyTorch keeps it for the next engine, which asks for another size."""
    device, order, close = EventAccelerator(), list[str](), NvmeStore.close
    monkeypatch.setattr(device, "give_pinned_back", lambda: order.append("pinned"))
    monkeypatch.setattr(NvmeStore, "close", lambda store: (close(store), order.append("store")))
    make(tmp_path, device, placement="nvme").close()
    assert order == ["store", "pinned"]


# ---- memory, by the counts of driver, allocator and kernel ----------------------------------------------------------


def test_what_this_machine_has_available_is_a_part_of_its_memory() -> None:
    assert 0 < available_bytes() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """With 1000 KiB available, and this process in a group within a group."""
    proc, own = tmp_path / "proc", tmp_path / "groups/job/step"
    (proc / "self").mkdir(parents=True)
    own.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:   1000 kB\n")
    (proc / "self/cgroup").write_text("1:name=systemd:/other\n0::/job/step\n")
    return tmp_path


def limit(group: Path, most: object, held_bytes: int, cached_bytes: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    is_of_version_1 = "memory" in group.parts
    names = ("limit_in_bytes", "usage_in_bytes", "total_") if is_of_version_1 else ("max", "current", "")
    (group / f"memory.{names[0]}").write_text(f"{most}\n")
    (group / f"memory.{names[1]}").write_text(f"{held_bytes}\n")
    (group / "memory.stat").write_text(f"anon 5\n{names[2]}inactive_file {cached_bytes}\nactive_file 7\n")


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
@pytest.mark.parametrize("mount", ["", "memory"], ids=["version 2", "version 1"])
def test_a_group_that_has_less_left_counts(machine: Path, mount: str, group: str) -> None:
    if mount:
        (machine / "proc/self/cgroup").write_text("5:cpu,cpuacct:/elsewhere\n4:hugetlb,memory:/job/step\n0::/job\n")
    limited = machine / "groups" / mount / group
    limit(limited, 5000, held_bytes=3000, cached_bytes=500)
    assert found_bytes(machine) == 2500
    for most in (5 << 20, 9223372036854771712 if mount else "max"):  # more than the machine has, and no limit
        limit(limited, most, held_bytes=3000, cached_bytes=500)
        assert found_bytes(machine) == 1000 << 10
    limit(limited, 5000, held_bytes=6000, cached_bytes=0)
    assert found_bytes(machine) == 0


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


class Counting(Devices):
    """Of a device whose allocator has these counts."""

    def __init__(self, counts: dict[str, int] | None) -> None:
        super().__init__()
        self.counts = counts
        self.asked = 0

    def memory_stats(self, index: int) -> Any:
        assert index == 1
        self.asked += 1
        return self.counts

    def mem_get_info(self, index: int) -> Any:
        assert index == 1
        return FREE_BYTES, TOTAL_BYTES


LESS = {"allocated_bytes.all.current": 240, "allocated_bytes.all.peak": 395}
LEVELS: dict[str, tuple[dict[str, int] | None, MemoryLevels]] = {
    "what streams still use is in use": (COUNTS, MemoryLevels(300, 390, 400, 2)),
    "all is counted": (COUNTS | LESS, MemoryLevels(300, 395, 400, 2)),
    "less is counted": (LESS, MemoryLevels(240, 395, 0, 0)),
    "nothing is counted": (None, MemoryLevels(0, 0, 0, 0)),
}


@pytest.mark.parametrize(("counts", "levels"), LEVELS.values(), ids=LEVELS)
def test_the_levels_are_those_of_the_allocator(counts: dict[str, int] | None, levels: MemoryLevels) -> None:
    """Asked once: PyTorch takes all counts anew each time, and a recorded step asks at each saved tensor."""
    module = Counting(counts)
    assert adapted(module).levels() == levels and module.asked == 1


def test_room_is_what_the_driver_and_the_allocator_have_left() -> None:
    room_bytes = FREE_BYTES + (400 - 300) - TEMPORARY_FRACTION * TOTAL_BYTES
    assert adapted(Counting(COUNTS)).free_bytes() == room_bytes


def test_the_report_has_the_levels_of_a_device(tmp_path: Path, closing: Closing) -> None:
    accelerator = EventAccelerator()
    accelerator.levels = adapted(Counting(COUNTS)).levels  # type: ignore[method-assign]
    offloader = closing(make)(tmp_path, accelerator, placement="keep")
    assert offloader.report().to_dict()["device_memory"] == MemoryLevels(300, 390, 400, 2)._asdict()


def test_more_than_there_is_cannot_be_locked() -> None:
    assert not can_lock(1 << 50)
    assert not can_lock(1 << 80)  # no length that mmap takes
