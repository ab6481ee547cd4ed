"""CUDA through torch alone, under the names that DeepSpeed's accelerator has: for programs that do not import it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


class TorchCuda:
    """Answers :class:`ds_tba.device.accelerator.DeviceApi` without DeepSpeed."""

    def device_name(self) -> str:
        return "cuda"

    def is_synchronized_device(self) -> bool:
        return False

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def set_device(self, device_index: int) -> None:
        torch.cuda.set_device(device_index)

    def is_current_stream_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def Stream(self, device: int) -> Any:  # noqa: N802 - DeepSpeed's names
        return torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]

    def stream(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def current_stream(self, device_index: int) -> Any:
        return torch.cuda.current_stream(device_index)

    def Event(self, **options: bool) -> Any:  # noqa: N802
        return torch.cuda.Event(**options)  # type: ignore[no-untyped-call]

    def available_memory(self, device_index: int) -> int:
        return torch.cuda.mem_get_info(device_index)[0]

    def total_memory(self, device_index: int) -> int:
        return torch.cuda.get_device_properties(device_index).total_memory

    def memory_stats(self, device_index: int) -> dict[str, int] | None:
        return torch.cuda.memory_stats(device_index)

    def memory_allocated(self, device_index: int) -> int:
        return torch.cuda.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int) -> int:
        return torch.cuda.max_memory_allocated(device_index)
