"""What is pinned in place: kept out of forked children, and let go when it is replaced. CUDA is a double here."""

from __future__ import annotations

import faulthandler
import mmap
import os
import re
import signal
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from support import runs
from support.late_device import LateDevice
from update_programs import CHUNKS, build, ds_config, steps

from ds_tba.device.accelerator import PAGE_BYTES
from ds_tba.update import UpdateConfig, pinning, zero3
from ds_tba.update.pinning import Registry
from ds_tba.update.updater import chunks_of

MEBIBYTE = 1 << 20
PINNED_MEBIBYTE = MEBIBYTE - PAGE_BYTES  # of memory that begins and ends within a page


class Pins:
    """Remembers what is pinned, as CUDA does."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.pinned: dict[int, int] = {}
        self.tried = 0
        self.refuses = refuses

    def register(self, address: int, nbytes: int) -> bool:
        self.tried += 1
        if self.refuses:
            return False
        self.pinned[address] = nbytes
        return True

    def unregister(self, address: int) -> None:
        del self.pinned[address]


def in_page(nbytes: int, offset: int = 64) -> torch.Tensor:
    """Memory that begins ``offset`` behind the start of a page, whatever the allocator does."""
    region = mmap.mmap(-1, nbytes + offset, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(region, dtype=torch.uint8, offset=offset)


# ---- the registry


def test_memory_is_pinned_once_up_to_the_limit_and_unpinned_when_it_is_replaced() -> None:
    pins = Pins()
    registry = Registry(pins, 3 * PINNED_MEBIBYTE + PAGE_BYTES)
    first, second, third = (in_page(MEBIBYTE) for _ in range(3))
    assert registry.pin(first) and registry.pin(first[5:]) and registry.pin(second)
    assert registry.is_pinned(first) and registry.is_pinned(second[1:]) and len(pins.pinned) == 2
    fourth = in_page(2 * MEBIBYTE)
    assert not registry.pin(fourth) and not registry.is_pinned(fourth)
    registry.keep([second])
    assert pins.pinned == {second.data_ptr() - 64 + PAGE_BYTES: PINNED_MEBIBYTE}
    assert registry.pinned_bytes == PINNED_MEBIBYTE
    assert registry.pin(fourth) and registry.pinned_bytes == 3 * PINNED_MEBIBYTE + PAGE_BYTES
    assert not registry.pin(third)
    registry.close()
    assert pins.pinned == {} and registry.pinned_bytes == 0 and registry.refused_bytes == 0


@pytest.mark.parametrize("offset", [0, 64, 4032])
def test_only_whole_pages_are_pinned_and_chunks_of_the_device_lie_in_them(offset: int) -> None:
    pins = Pins()
    registry = Registry(pins, None)
    memory = in_page(123_457 * 4, offset)
    assert registry.pin(memory)
    ((address, nbytes),) = pins.pinned.items()
    assert address % PAGE_BYTES == nbytes % PAGE_BYTES == 0
    assert memory.data_ptr() <= address < memory.data_ptr() + PAGE_BYTES
    assert address + nbytes <= memory.data_ptr() + memory.nbytes < address + nbytes + PAGE_BYTES
    for chunk in chunks_of([123_457], 1000):
        assert address <= memory.data_ptr() + 4 * chunk.start
        assert memory.data_ptr() + 4 * chunk.stop <= address + nbytes
    registry.close()


def test_memory_that_is_pinned_cannot_be_freed_before_it_is_unpinned() -> None:
    registry = Registry(Pins(), None)
    tensor = torch.ones(1 << 18)
    address = tensor.untyped_storage().data_ptr()
    registry.pin(tensor)
    del tensor
    others = [torch.zeros(1 << 18) for _ in range(8)]
    assert address not in {other.untyped_storage().data_ptr() for other in others}
    registry.close()


def test_a_small_array_is_left_out_without_a_word() -> None:
    registry = Registry(Pins(), None)
    small = in_page(PAGE_BYTES, 100)
    assert not registry.pin(small) and registry.refused_bytes == 0 and not registry.is_pinned(small)


def test_what_cannot_be_pinned_is_tried_once_and_stays_visible_to_children() -> None:
    pins = Pins(refuses=True)
    registry = Registry(pins, None)
    tensor = in_page(MEBIBYTE)
    assert not registry.pin(tensor) and not registry.pin(tensor)
    assert registry.refused_bytes == PINNED_MEBIBYTE and registry.pinned_bytes == 0
    assert pins.tried == 1 and not hidden_bytes(tensor)
    registry.keep([])
    assert registry.refused_bytes == 0


def test_a_refused_pin_does_not_stay_for_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    last_error = [0]

    def refuse(*_: int) -> int:
        last_error[0] = 712
        return 712

    def launch(*_: Any, **__: Any) -> None:
        if last_error.pop():
            raise RuntimeError("CUDA error: resource already mapped")

    runtime = SimpleNamespace(cudaHostRegister=refuse, cudaHostUnregister=refuse)
    memory = torch.zeros(10_000)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", lambda: runtime)
        patch.setattr(pinning.torch, "ones", launch)
        patch.setattr(torch.Tensor, "is_pinned", lambda _: False)
        registry = Registry(pinning.CudaDriver(), None)
        assert not registry.pin(memory) and 0 < registry.refused_bytes <= memory.nbytes
    assert not last_error


# ---- forks


def hidden_bytes(tensor: torch.Tensor) -> int:
    """How much of a tensor's memory forked children do not have (``dc`` of proc(5), ``VmFlags``)."""
    start, found = tensor.untyped_storage().data_ptr(), 0
    stop, low, high = start + tensor.untyped_storage().nbytes(), 0, 0
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = (int(one, 16) for one in match.groups())
        elif line.startswith("VmFlags:") and "dc" in line.split():
            found += max(0, min(stop, high) - max(start, low))
    return found


def end_of_child(act: Callable[[], object]) -> int:
    """The exit status of a forked child that does this; minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        with suppress(BaseException):  # or it would go on as a second run of the tests
            os._exit(0 if act() else 1)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_children_have_all_but_the_pinned_pages_until_they_are_unpinned() -> None:
    registry = Registry(Pins(), None)
    pinned, replaced = in_page(MEBIBYTE), in_page(MEBIBYTE)
    middle = MEBIBYTE // 2
    pinned[0], pinned[-1] = 3, 5
    assert registry.pin(replaced) and hidden_bytes(pinned) == 0
    assert registry.pin(pinned) and hidden_bytes(pinned) == hidden_bytes(replaced) == PINNED_MEBIBYTE
    registry.keep([pinned])
    assert hidden_bytes(pinned) == PINNED_MEBIBYTE and hidden_bytes(replaced) == 0
    assert end_of_child(lambda: (int(pinned[0]), int(pinned[-1])) == (3, 5)) == 0  # pages that others share
    assert end_of_child(lambda: pinned[middle] == 0) == -signal.SIGSEGV
    registry.close()
    assert hidden_bytes(pinned) == 0 and end_of_child(lambda: pinned[middle] == 0) == 0


CHILD_THAT_EXITS = """
import gc, os, sys
from types import SimpleNamespace
import torch
from ds_tba.update.pinning import Registry
registry = Registry(SimpleNamespace(register=lambda *_: True, unregister=lambda _: None), None)
memory = [torch.ones(5000) for _ in range(50)]  # small enough for malloc's heap
assert all(registry.pin(one) for one in memory)
pid = os.fork()
if pid == 0:
    registry.close()
    del registry, memory
    gc.collect()
    others = [torch.ones(size) for size in range(3000, 30000, 500)]
    sys.exit(0 if sum(float(one.sum()) for one in others) == sum(range(3000, 30000, 500)) else 1)
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255)
"""


def test_a_child_goes_through_its_exit_and_frees_nothing_that_it_has_not() -> None:
    done = runs.python("-c", CHILD_THAT_EXITS)
    assert done.returncode == 0, done.stderr[-4000:]


# ---- a run


class _AsCuda(LateDevice):
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def loads(config: dict[str, Any], *, block: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint that is loaded in mid-run, with pinned moments."""
    pins, folder = Pins(), str(Path.cwd() / "checkpoint")
    zero3.CudaDriver = lambda: pins  # type: ignore[assignment,misc]
    engine = build(config)
    device, zero = _AsCuda(longest_pause_s=0.001), engine.optimizer
    update = zero3.InterleavedUpdate(UpdateConfig.model_validate(block), device, zero)
    engine.interleaved_optimizer_update = update
    counts = [len(pins.pinned)]
    for _ in range(2):
        steps(engine, 1)
        counts.append(len(pins.pinned))
    found: dict[str, Any] = {"pinned": counts, "pinned_bytes": update.report().pinned_bytes}
    engine.save_checkpoint(folder, tag="2")
    steps(engine, 2, seed=2)
    states = [zero.optimizer.state[master] for master in zero.fp32_partitioned_groups_flat]
    storages = [state[name].untyped_storage() for state in states for name in ("exp_avg", "exp_avg_sq")]
    places = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
    others = sorted(address for address in pins.pinned if not any(start <= address < stop for start, stop in places))
    moments = [weakref.ref(storage) for storage in storages]
    found |= {"pinned moments": len(pins.pinned) - len(others), "moments": len(moments)}
    del states, storages
    engine.load_checkpoint(folder, tag="2")
    found["freed"] = sum(moment() is None for moment in moments)
    found["masters and gradients stay"] = bool(others) and sorted(pins.pinned) == others
    found["goes on"] = steps(engine, 2, seed=2)
    engine.load_checkpoint(folder, tag="2")
    found["goes on again"] = steps(engine, 2, seed=2)
    return found


@pytest.mark.engine
@pytest.mark.parametrize("limit_bytes", [None, 10**9])
def test_what_is_there_is_pinned_and_let_go_when_a_load_replaces_it(limit_bytes: int | None, tmp_path: Path) -> None:
    """With a limit whole sub-groups come first, which are whole in the first step only."""
    block = {**CHUNKS, "exact": False, "device_share": 0.5, "pinned_bytes": limit_bytes}
    (found,) = forked.run(loads, ds_config(bf16={"enabled": True}), tmp_path, block=block)
    at_start, first, second = found["pinned"]
    assert first == second > 0 and at_start == (0 if limit_bytes else first // 2)
    assert found["pinned_bytes"] > 0
    assert found["pinned moments"] > 0 and found["moments"] == found["freed"] > 0
    assert found["masters and gradients stay"]
    assert found["goes on"] == found["goes on again"]
