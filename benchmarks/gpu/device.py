"""The device under test: the accelerator that ds_tba needs, with DeepSpeed or without, and clocks and gauges for it."""

from __future__ import annotations

import gc
import os
import re
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from ds_tba.device.accelerator import Accelerator, CpuAccelerator, DeviceAccelerator

GIB = 1 << 30


class TorchCuda:
    """What ``DeviceAccelerator`` asks of DeepSpeed's accelerator, from torch itself, where DeepSpeed is not there."""

    Stream = torch.cuda.Stream
    Event = torch.cuda.Event

    @staticmethod
    def device_name() -> str:
        return "cuda"

    @staticmethod
    def current_device() -> int:
        return torch.cuda.current_device()

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
    def memory_allocated(index: int | None = None) -> int:
        return torch.cuda.memory_allocated(index)

    @staticmethod
    def max_memory_allocated(index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(index)

    @staticmethod
    def stream(stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)


def cuda_api() -> Any:
    """DeepSpeed's CUDA accelerator where DeepSpeed is installed (and not told to use another), else torch's own."""
    try:
        from deepspeed.accelerator import get_accelerator
    except ImportError:
        return TorchCuda()
    found = get_accelerator()
    return found if found.device_name() == "cuda" else TorchCuda()


class Device:
    """CPU or CUDA: how to wait for it, time it and ask for its memory.

    Args:
        kind: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.torch = torch.device(kind)
        self.is_cuda = kind == "cuda"
        self.api = cuda_api() if self.is_cuda else None
        self.accelerator: Accelerator = DeviceAccelerator(self.api) if self.is_cuda else CpuAccelerator()

    @property
    def name(self) -> str:
        """As the driver names it, or the number of CPU cores."""
        return torch.cuda.get_device_name() if self.is_cuda else f"CPU, {os.cpu_count()} cores"

    @property
    def slug(self) -> str:
        """The name for a file: ``h200``, ``cpu2``."""
        if not self.is_cuda:
            return f"cpu{os.cpu_count()}"
        return re.sub(r"[^a-z0-9]", "", self.name.lower().replace("nvidia", "").replace("geforce", ""))

    @property
    def total_bytes(self) -> int | None:
        """Its memory; None on the CPU."""
        return torch.cuda.get_device_properties(0).total_memory if self.is_cuda else None

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def time_s(self, work: Any) -> float:
        """Wall seconds of ``work()``, with the device idle before and after."""
        self.synchronize()
        started = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - started

    def allocated_bytes(self) -> int | None:
        return torch.cuda.memory_allocated() if self.is_cuda else None

    def reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> tuple[int | None, int | None]:
        """Most bytes allocated and most bytes reserved since the last reset; None where nobody counts."""
        if not self.is_cuda:
            return None, None
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def give_back(self, *, pinned: bool = False) -> None:
        """Let go of the device memory that no tensor uses, and of the pinned memory too (which is slow to get)."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
            empty_pinned = getattr(torch._C, "_host_emptyCache", None)
            if pinned and empty_pinned is not None:  # torch keeps it, of every size that was asked for
                empty_pinned()


def free_host_bytes() -> int:
    """MemAvailable of this machine."""
    return int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024
