"""Memory that is pinned in place, as programs for processes of their own."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.late_device import LateDevice
from update_programs import build, steps

from ds_tba.device.accelerator import PAGE_BYTES
from ds_tba.update import UpdateConfig, zero3
from ds_tba.update.pinning import Registry

ENDS = [1.0, 2.0]
ELEMENTS = 1 << 20
PINNED_BYTES = 4 * ELEMENTS - PAGE_BYTES  # torch's memory begins within a page


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


def child(act: Callable[[], object]) -> str:
    """How a forked child ends that does this: its exit status, or the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        act()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else str(os.WEXITSTATUS(status))


def faults_of_writing(tensor: torch.Tensor) -> int:
    """Page faults of writing to all of it, while a child is there."""
    ready, end = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(ready[1], b"x")
        os.read(end[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor.add_(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    os.write(end[1], b"x")
    os.waitpid(pid, 0)
    return faults


def new_memory() -> torch.Tensor:
    """Of pages of 4 KiB, so that faults can be counted, that begin and end within others, as torch's do."""
    region = mmap.mmap(-1, 4 * ELEMENTS + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(15)  # MADV_NOHUGEPAGE
    memory = torch.frombuffer(region, dtype=torch.float32, offset=64, count=ELEMENTS)
    ctypes.memset(memory.data_ptr(), 0, memory.nbytes)
    return memory


def forks() -> dict[str, Any]:
    """Children of a process that has pinned memory."""
    pins = Pins()
    registry = Registry(pins, None)
    pinned, replaced, shared = new_memory(), new_memory(), new_memory()
    pinned[0], pinned[-1] = ENDS
    found: dict[str, Any] = {"hidden": {"before": hidden_bytes(pinned)}}
    registry.pin(replaced)
    registry.pin(pinned)
    found["hidden"]["pinned"] = hidden_bytes(pinned)
    registry.keep([pinned])
    found["hidden"]["replaced"] = hidden_bytes(replaced)
    read, write = os.pipe()
    child(lambda: os.write(write, repr([float(pinned[0]), float(pinned[-1])]).encode()))
    found["ends"] = [float(one) for one in os.read(read, 100).decode().strip("[]").split(",")]
    found["pinned pages"] = child(lambda: float(pinned[ELEMENTS // 2]))
    found["faults"] = {"pinned": faults_of_writing(pinned), "shared": faults_of_writing(shared)}
    found["child's end"] = child_that_exits()
    registry.close()
    found["hidden"]["closed"] = hidden_bytes(pinned)
    found["unpinned pages"] = child(lambda: float(pinned[ELEMENTS // 2]))
    return found


def child_that_exits() -> str:
    """A child that goes through the interpreter's whole exit, with pinned memory that is malloc's."""
    program = """
import gc, os, sys, weakref
import torch
from ds_tba.update.pinning import Registry
class Driver:
    def register(self, address, nbytes): return True
    def unregister(self, address): pass
registry = Registry(Driver(), None)
class Owner: pass
owner = Owner()
memory = [torch.ones(5000) for _ in range(50)]  # small enough for malloc's heap
assert all(registry.pin(one) for one in memory)
weakref.finalize(owner, registry.close)
pid = os.fork()
if pid == 0:
    del owner, registry, memory
    gc.collect()
    others = [torch.ones(size) for size in range(3000, 30000, 500)]
    sys.exit(0 if sum(float(one.sum()) for one in others) == sum(range(3000, 30000, 500)) else 1)
status = os.waitpid(pid, 0)[1]
os._exit(os.waitstatus_to_exitcode(status) & 255)
"""
    return str(subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode)


def loads(config: dict[str, Any], *, block: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint that is loaded in mid-run, with pinned moments."""
    engine = build(config, late=block)
    update, pins = engine.interleaved_optimizer_update, Pins()
    update._updater.registry = Registry(pins, None)
    steps(engine, 2)
    engine.save_checkpoint(str(Path.cwd() / "checkpoint"), tag="2")
    steps(engine, 2, seed=2)
    zero = engine.optimizer
    states = [zero.optimizer.state[master] for master in zero.fp32_partitioned_groups_flat]
    storages = [state[name].untyped_storage() for state in states for name in ("exp_avg", "exp_avg_sq")]
    places = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
    of_moments = {address for address in pins.pinned if any(start <= address < stop for start, stop in places)}
    others = sorted(set(pins.pinned) - of_moments)
    moments = [weakref.ref(storage) for storage in storages]
    found: dict[str, Any] = {"pinned": len(of_moments), "moments": len(moments)}
    del states, storages
    engine.load_checkpoint(str(Path.cwd() / "checkpoint"), tag="2")
    found["freed"] = sum(moment() is None for moment in moments)
    found["masters and gradients stay"] = bool(others) and sorted(pins.pinned) == others
    found["goes on"] = steps(engine, 2, seed=2)
    engine.load_checkpoint(str(Path.cwd() / "checkpoint"), tag="2")
    found["goes on again"] = steps(engine, 2, seed=2)
    return found


class _AsCuda(LateDevice):
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def starts(config: dict[str, Any], *, block: dict[str, Any]) -> dict[str, Any]:
    """Return what is pinned when the update is taken over and after each of two steps, and what the report says."""
    pins = Pins()
    zero3.CudaDriver = lambda: pins  # type: ignore[assignment,misc]
    engine = build(config)
    device = _AsCuda(longest_pause_s=0.001)
    update = zero3.InterleavedUpdate(UpdateConfig.model_validate(block), device, engine.optimizer)
    engine.interleaved_optimizer_update = update
    found: dict[str, Any] = {"pinned": [len(pins.pinned)]}
    for _ in range(2):
        steps(engine, 1)
        found["pinned"].append(len(pins.pinned))
    found["pinned_bytes"] = update.report().pinned_bytes
    update.close()
    engine.destroy()
    return found
