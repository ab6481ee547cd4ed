"""What is compared: ways to keep, drop, recompute or move activations, all around the same forward."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from ds_tba.adaptive.ranks import Alone
from ds_tba.config import AioConfig, IoConfig, OffloadConfig
from ds_tba.errors import DsTbaError
from ds_tba.offloader import ActivationOffloader
from gpu.budget import NotRunError
from gpu.device import Device
from gpu.models import Call, Shape

OURS = {
    "ours host": "host",
    "ours nvme": "nvme",
    "ours adaptive": "adaptive",
    "ours adaptive, host": "adaptive",
    "ours adaptive, budget": "adaptive",
}
# One to warm up, four to prove blocks, two that are recorded: more are not waited for.
MAX_STEPS_TO_A_PLAN = 20
# Of the estimate of what a shape saves, which is from above: about half of what it really does.
BUDGET_FRACTION = 0.35
# And of what host memory a plan may use: pinning takes half a second for each GiB.
HOST_FRACTION = 0.6
LONGEST_STAGING_BYTES = 1 << 30
# In order of importance.
VARIANTS = (
    "keep",
    "recompute",
    "ours adaptive, host",
    "ours adaptive, budget",
    "ours adaptive",
    "ours host",
    "ours nvme",
    "deepspeed cpu checkpointing",
    "save_on_cpu",
)
COUNTED = (
    "offloaded_bytes", "written_bytes", "read_bytes", "forwarded_bytes", "cancelled_bytes", "host_bytes", "kept_bytes",
    "fallbacks", "stall_s",
)  # fmt: skip


def nothing() -> None:
    """Nobody needs to be told."""


@dataclass(frozen=True)
class Way:
    """How a step is made.

    Attributes:
        saving: context of the forward.
        call: how a block is called.
        after_backward, after_step: whom to tell.
    """

    saving: Callable[[], AbstractContextManager[Any]] = nullcontext
    call: Call = lambda block, *inputs: block(*inputs)
    after_backward: Callable[[], None] = nothing
    after_step: Callable[[], None] = nothing


@dataclass(frozen=True)
class Sizes:
    """What ours may use, within what the machine has.

    Attributes:
        host_bytes: for all activations of the largest shape, if there is so much.
        longest_staging_bytes: bound of :meth:`staging_bytes`.
    """

    host_bytes: int
    swap_file_bytes: int
    min_tensor_bytes: int
    longest_staging_bytes: int

    @classmethod
    def for_shapes(cls, shapes: list[Shape], free_host_bytes: int, free_disk_bytes: int, least: int) -> Sizes:
        whole = max(shape.activation_bytes for shape in shapes)
        return cls(
            host_bytes=max(min(whole, free_host_bytes // 4), 4 << 20),
            swap_file_bytes=max(int(0.4 * free_disk_bytes), 16 << 20),  # for each of the two that use it
            min_tensor_bytes=least,
            longest_staging_bytes=max(free_host_bytes // 16, 4 << 20),
        )

    def staging_bytes(self, shape: Shape) -> int:
        """Two of the largest tensors of a shape, up to 1 GiB: more would hold more device memory while copies wait."""
        wanted = 1 << (2 * shape.largest_tensor_bytes - 1).bit_length()
        return max(min(wanted, self.longest_staging_bytes, LONGEST_STAGING_BYTES), 1 << 20)


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
    if shape.model == "T5":
        raise NotRunError("not run: DeepSpeed empties what a block was given, and T5's decoders share an input")
    return deepspeed_call("nccl", in_host_memory=True)


def deepspeed_call(communication: str, *, in_host_memory: bool) -> Call:
    """DeepSpeed's checkpointing, in a process group of one.

    Raises:
        NotRunError: DeepSpeed is not installed.
    """
    try:
        import deepspeed
        from deepspeed.runtime.activation_checkpointing import checkpointing
    except ImportError:
        raise NotRunError("not run: DeepSpeed is not installed") from None
    if not deepspeed.comm.is_initialized():
        meeting = f"file://{tempfile.mkdtemp()}/process_group"
        deepspeed.init_distributed(communication, auto_mpi_discovery=False, init_method=meeting, rank=0, world_size=1)
    checkpointing.configure(None, checkpoint_in_cpu=in_host_memory)

    def call(block: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpointing.checkpoint(block, *inputs)
        return result

    return call


class Variants:
    """Opens what the variants need, each when it is first asked for; closed at the end.

    Args:
        nvme_path: for ours.
        sizes: for ours.

    Attributes:
        start_lines: what each of ours has said at its start.
    """

    def __init__(self, device: Device, nvme_path: Path, sizes: Sizes) -> None:
        self._device = device
        self._nvme_path = nvme_path
        self.sizes = sizes
        self._offloaders: dict[str, ActivationOffloader] = {}
        self._serves: dict[str, tuple[int, int]] = {}
        self.start_lines: dict[str, str] = {}

    def prepared(self, variant: str, shape: Shape, model: nn.Module) -> Way:
        """How to make a step of a variant.

        Raises:
            NotRunError: it cannot run here.
        """
        if variant in OURS:
            ours = self.open(variant, shape, model)
            return Way(ours.saving, plain, ours.note_micro_step, ours.note_step)
        if variant == "save_on_cpu":
            return Way(lambda: save_on_cpu(pin_memory=self._device.is_cuda), plain)
        if variant == "recompute":
            return Way(call=recomputed)
        if variant == "deepspeed cpu checkpointing":
            return Way(call=deepspeed_checkpoint(self._device, shape))
        return Way(call=plain)

    def get_ready(self, variant: str, step: Callable[[], Any]) -> None:
        """Step until a variant does what it will do from then on."""
        if OURS.get(variant) != "adaptive":
            return
        for _ in range(MAX_STEPS_TO_A_PLAN):
            if self._offloaders[variant].report().plans:
                return
            step()

    def plan(self, variant: str) -> dict[str, Any] | None:
        """The plan in force; None for those without."""
        return self._offloaders[variant].report().plan if variant in OURS else None

    def open(self, variant: str, shape: Shape, model: nn.Module) -> ActivationOffloader:
        """Ours, with staging for a shape, and for plans tied to a model.

        Raises:
            NotRunError: it cannot be had here.
        """
        placement = OURS[variant]
        # The host tier has no staging: its bound is the default, and its memory is pinned once for all shapes.
        staging_bytes = IoConfig().staging_bytes if placement == "host" else self.sizes.staging_bytes(shape)
        serves = (staging_bytes, id(model) if placement == "adaptive" else 0)
        present = self._offloaders.get(variant)
        if present is not None and self._serves[variant] == serves:
            return present
        if present is not None:
            self._offloaders.pop(variant).close()
        config = OffloadConfig.model_validate(self._block(variant, shape, staging_bytes))
        try:
            opened = ActivationOffloader(config, AioConfig(), self._device.accelerator)
        except (DsTbaError, RuntimeError) as error:  # RuntimeError: CUDA cannot pin so much
            raise NotRunError(f"not run: {error}") from None
        self._offloaders[variant], self._serves[variant] = opened, serves
        opened.watch(model, Alone())
        self.start_lines[f"{variant}, {shape.name}"] = opened.start_line()
        return opened

    def _block(self, variant: str, shape: Shape, staging_bytes: int) -> dict[str, Any]:
        placement = OURS[variant]
        io = {"backend": "posix", "staging_bytes": staging_bytes, "swap_file_bytes": self.sizes.swap_file_bytes}
        block: dict[str, Any] = {"placement": placement, "min_tensor_bytes": self.sizes.min_tensor_bytes, "io": io}
        if placement == "host":
            return block | {"host_budget_bytes": self.sizes.host_bytes}
        block["nvme_path"] = str(self._nvme_path)
        block["recompute"] = placement == "adaptive"
        if variant in ("ours adaptive, host", "ours adaptive, budget"):
            block["host_budget_bytes"] = min(self.sizes.host_bytes, int(HOST_FRACTION * shape.activation_bytes))
        if variant == "ours adaptive, budget":
            block["activation_budget_bytes"] = int(BUDGET_FRACTION * shape.activation_bytes)
        return block

    def counters(self, variant: str) -> dict[str, float] | None:
        """What ours has counted so far; None for the others."""
        if variant not in OURS:
            return None
        report = self._offloaders[variant].report().to_dict()
        return {name: report[name] for name in COUNTED}

    def reset_peak(self, variant: str) -> None:
        """Start the offloader's own gauges anew."""
        if variant in OURS:
            cache = self._offloaders[variant].cache
            cache.settle()
            for gauge in (cache.stats.saved, cache.stats.resident):
                gauge.peak = gauge.now

    def peaks(self, variant: str) -> tuple[int | None, int | None]:
        """peak_saved_bytes and peak_saved_bytes_without since then."""
        if variant not in OURS:
            return None, None
        report = self._offloaders[variant].report()
        return report.peak_saved_bytes, report.peak_saved_bytes_without

    def let_go_of_models(self) -> None:
        """Close those of ours that are tied to a model."""
        for variant in [name for name in self._offloaders if OURS[name] == "adaptive"]:
            self._offloaders.pop(variant).close()

    def settle(self) -> None:
        """Have all of ours let go of what their last copies held: it would count for the others."""
        for offloader in self._offloaders.values():
            offloader.cache.settle()

    def close(self) -> None:
        for offloader in self._offloaders.values():
            offloader.close()
        self._offloaders.clear()
        if torch.distributed.is_initialized():  # by DeepSpeed's checkpointing
            torch.distributed.destroy_process_group()
