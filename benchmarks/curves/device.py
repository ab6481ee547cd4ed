"""The device under test: the accelerator that ds_tba needs, with DeepSpeed or without, and a gauge of its memory."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

from ds_tba.device.accelerator import Accelerator, CpuAccelerator, adapted


class TorchCuda:
    """Answers to ``DeviceAccelerator`` as DeepSpeed's accelerator does, from torch itself, without DeepSpeed."""

    Stream = torch.cuda.Stream
    Event = torch.cuda.Event

    @staticmethod
    def device_name() -> str:
        return "cuda"

    @staticmethod
    def current_device() -> int:
        return torch.cuda.current_device()

    @staticmethod
    def set_device(index: int) -> None:
        torch.cuda.set_device(index)

    @staticmethod
    def is_synchronized_device() -> bool:
        return False

    @staticmethod
    def is_current_stream_capturing() -> bool:
        return torch.cuda.is_current_stream_capturing()

    @staticmethod
    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    @staticmethod
    def current_stream(index: int | None = None) -> Any:
        return torch.cuda.current_stream(index)

    @staticmethod
    def total_memory(index: int | None = None) -> int:
        return torch.cuda.get_device_properties(index).total_memory

    @staticmethod
    def available_memory(index: int | None = None) -> int:
        return torch.cuda.mem_get_info(index)[0]

    @staticmethod
    def memory_stats(index: int | None = None) -> dict[str, int]:
        return torch.cuda.memory_stats(index)

    @staticmethod
    def memory_allocated(index: int | None = None) -> int:
        return torch.cuda.memory_allocated(index)

    @staticmethod
    def max_memory_allocated(index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(index)

    @staticmethod
    def stream(stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)


# Counts of CUDA's allocator by their names in the results: peaks since the last reset, and totals.
COUNTS = {
    "allocated_peak_bytes": "allocated_bytes.all.peak",
    "active_peak_bytes": "active_bytes.all.peak",
    "reserved_peak_bytes": "reserved_bytes.all.peak",
    "alloc_retries": "num_alloc_retries",
    "mallocs": "num_device_alloc",
    "frees": "num_device_free",
}


def cuda_api() -> Any:
    """Return DeepSpeed's CUDA accelerator if DeepSpeed runs here, else torch's: the import alone takes seconds."""
    if "deepspeed" not in sys.modules:
        return TorchCuda()
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator()
    return found if found.device_name() == "cuda" else TorchCuda()


class Device:
    """CPU or CUDA: how to wait for it and ask for its memory.

    Args:
        kind: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, kind: str) -> None:
        self.torch = torch.device(kind)
        self.is_cuda = kind == "cuda"
        self.accelerator: Accelerator = adapted(cuda_api()) if self.is_cuda else CpuAccelerator()

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

    def counts(self) -> dict[str, int]:
        """Return what CUDA's allocator counts (``COUNTS``); nothing on a CPU."""
        found = torch.cuda.memory_stats() if self.is_cuda else {}
        return {name: found[key] for name, key in COUNTS.items() if key in found}

    def give_back(self) -> None:
        """Free the device memory and the pinned memory that no tensor uses."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
            self.accelerator.give_pinned_back()
