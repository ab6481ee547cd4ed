"""What is compared: ways to keep, drop, recompute or move activations, all around the same forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.offloader import ActivationOffloader
from gpu.budget import NotRunError
from gpu.device import Device
from gpu.models import Call, Shape

OURS = {"ours host": "host", "ours nvme": "nvme", "ours adaptive": "adaptive"}
VARIANTS = ("keep", "recompute", "save_on_cpu", "deepspeed cpu checkpointing", *OURS)
COUNTED = (
    "offloaded_bytes", "written_bytes", "read_bytes", "forwarded_bytes", "cancelled_bytes", "host_bytes", "kept_bytes",
    "fallbacks", "stall_s",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """What ours may use, the same for all shapes."""

    staging_bytes: int
    host_bytes: int
    swap_file_bytes: int
    min_tensor_bytes: int

    @classmethod
    def for_shapes(
        cls, shapes: list[Shape], free_host_bytes: int, free_disk_bytes: int, min_tensor_bytes: int
    ) -> Sizes:
        """Staging for two of the largest tensors, host memory for all activations; both within what there is."""
        largest = max(shape.largest_tensor_bytes for shape in shapes)
        whole = max(shape.activation_bytes for shape in shapes)
        staging = min(1 << (2 * largest - 1).bit_length(), free_host_bytes // 16)
        return cls(
            staging_bytes=max(staging, 4 << 20),
            host_bytes=max(min(whole, int(0.3 * free_host_bytes)), 4 << 20),
            swap_file_bytes=max(int(0.4 * free_disk_bytes), 8 << 20),
            min_tensor_bytes=min_tensor_bytes,
        )


def plain(block: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = block(*inputs)
    return result


def recomputed(block: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = checkpoint(block, *inputs, use_reentrant=False)
    return result


def deepspeed_checkpoint(device: Device, shape: Shape) -> Call:
    """DeepSpeed's checkpointing with the inputs of blocks in host memory.

    Raises:
        NotRunError: it cannot run here, or not with this model.
    """
    if not device.is_cuda:
        raise NotRunError("not run: no CUDA")
    try:
        from deepspeed.runtime.activation_checkpointing import checkpointing
    except ImportError:
        raise NotRunError("not run: DeepSpeed is not installed") from None
    if shape.model == "T5":
        raise NotRunError("not run: DeepSpeed empties what a block was given, and T5's decoders share an input")
    if not checkpointing.is_configured():
        checkpointing.configure(None, checkpoint_in_cpu=True)

    def call(block: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        found = checkpointing.checkpoint(block, *inputs)
        result: torch.Tensor = found if isinstance(found, torch.Tensor) else found[0]
        return result

    return call


class Variants:
    """Opens what the variants need, each when it is first asked for; closed at the end.

    Args:
        nvme_path: for ours.
        sizes: for ours.
    """

    def __init__(self, device: Device, nvme_path: Path, sizes: Sizes) -> None:
        self._device = device
        self._nvme_path = nvme_path
        self.sizes = sizes
        self._offloaders: dict[str, ActivationOffloader] = {}

    def prepared(self, variant: str, shape: Shape) -> tuple[Callable[[], AbstractContextManager[Any]], Call]:
        """(context of the forward, how to call a block).

        Raises:
            NotRunError: as :func:`deepspeed_checkpoint`.
        """
        if variant in OURS:
            return self.offloader(variant).saving, plain
        if variant == "save_on_cpu":
            return lambda: save_on_cpu(pin_memory=self._device.is_cuda), plain
        if variant == "recompute":
            return nullcontext, recomputed
        if variant == "deepspeed cpu checkpointing":
            return nullcontext, deepspeed_checkpoint(self._device, shape)
        return nullcontext, plain

    def offloader(self, variant: str) -> ActivationOffloader:
        """Ours, by variant."""
        if variant not in self._offloaders:
            sizes, placement = self.sizes, OURS[variant]
            io = {"backend": "posix", "staging_bytes": sizes.staging_bytes, "swap_file_bytes": sizes.swap_file_bytes}
            block: dict[str, Any] = {"placement": placement, "min_tensor_bytes": sizes.min_tensor_bytes, "io": io}
            if placement == "host":
                block["host_budget_bytes"] = sizes.host_bytes
            else:
                block["nvme_path"] = str(self._nvme_path)
            config = OffloadConfig.model_validate(block)
            self._offloaders[variant] = ActivationOffloader(config, AioConfig(), self._device.accelerator)
        return self._offloaders[variant]

    def counters(self, variant: str) -> dict[str, float] | None:
        """What ours has counted so far; None for the others."""
        if variant not in OURS:
            return None
        report = self.offloader(variant).report().to_dict()
        return {name: report[name] for name in COUNTED}

    def reset_peak(self, variant: str) -> None:
        """Start the offloader's own gauges anew."""
        if variant in OURS:
            cache = self.offloader(variant).cache
            cache.settle()
            for gauge in (cache.stats.saved, cache.stats.resident):
                gauge.peak = gauge.now

    def peaks(self, variant: str) -> tuple[int | None, int | None]:
        """peak_saved_bytes and peak_saved_bytes_without since then."""
        if variant not in OURS:
            return None, None
        report = self.offloader(variant).report()
        return report.peak_saved_bytes, report.peak_saved_bytes_without

    def start_lines(self) -> dict[str, str]:
        """What each of ours runs on."""
        return {name: offloader.start_line() for name, offloader in self._offloaders.items()}

    def close(self) -> None:
        for offloader in self._offloaders.values():
            offloader.close()
        self._offloaders.clear()
