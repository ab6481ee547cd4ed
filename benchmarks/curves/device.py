"""The device under test: the accelerator that ds_tba needs, through torch alone, and a gauge of its memory."""

from __future__ import annotations

import gc
import os
import sys

import torch

from ds_tba.device.accelerator import Accelerator, CudaAccelerator

# Counts of CUDA's allocator by their names in the results: peaks since the last reset, and totals.
COUNTS = {
    "allocated_peak_bytes": "allocated_bytes.all.peak",
    "active_peak_bytes": "active_bytes.all.peak",
    "reserved_peak_bytes": "reserved_bytes.all.peak",
    "alloc_retries": "num_alloc_retries",
    "mallocs": "num_device_alloc",
    "frees": "num_device_free",
}
TOTALS = ("alloc_retries", "mallocs", "frees")


# Kept and given out again, as CUDA's allocator and those recommended for training on CPUs do: else a model that keeps
# its activations would pay for fresh pages in every step, and who frees them early would seem faster than it is.
HOLDING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(64 << 20)}


class Device:
    """CPU or CUDA: how to wait for it and ask for its memory."""

    def __init__(self, kind: str) -> None:
        self.torch = torch.device(kind)
        self.is_cuda = kind == "cuda"
        self.accelerator: Accelerator = CudaAccelerator() if self.is_cuda else Accelerator()

    @property
    def name(self) -> str:
        """The driver's name of the device, or the number of CPU cores."""
        return torch.cuda.get_device_name() if self.is_cuda else f"CPU, {os.cpu_count()} cores"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def held_bytes(self) -> int | None:
        """Return the bytes held, with those that were freed and a stream may still use: "allocated" lacks these."""
        return torch.cuda.memory_stats()["active_bytes.all.current"] if self.is_cuda else None

    def reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        """Return the most bytes held since the last reset; None where nobody counts."""
        return torch.cuda.memory_stats()["active_bytes.all.peak"] if self.is_cuda else None

    def counts(self, before: dict[str, int] | None = None) -> dict[str, int]:
        """Return what CUDA's allocator counts (``COUNTS``), totals less those before; nothing on a CPU."""
        stats = torch.cuda.memory_stats() if self.is_cuda else {}
        found = {name: stats[key] for name, key in COUNTS.items() if key in stats}
        return found | {name: found[name] - before[name] for name in TOTALS if before and name in before}

    def give_back(self) -> None:
        """Free the device memory and the pinned memory that no tensor uses."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
            self.accelerator.give_pinned_back()


def hold_freed_memory() -> None:
    """Start this program again if need be: glibc reads its settings once. Call it first of all."""
    if any(os.environ.get(name) != value for name, value in HOLDING.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **HOLDING})
