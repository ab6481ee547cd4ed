"""CUDA through torch alone, under the names that DeepSpeed's accelerator has: for programs that do not import it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


class TorchCuda:
    """Answers what :class:`ds_tba.device.accelerator.DeviceAccelerator` asks of DeepSpeed's accelerator."""

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
    def current_stream(index: int | None = None) -> torch.cuda.Stream:
        return torch.cuda.current_stream(index)

    @staticmethod
    def stream(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

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
