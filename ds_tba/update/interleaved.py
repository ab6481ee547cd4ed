"""The object at ``engine.interleaved_optimizer_update``: builds the parts of the update, reports, and closes."""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from typing import Any

from ds_tba.device.accelerator import Accelerator
from ds_tba.report import ReportFile
from ds_tba.update.config import UpdateConfig
from ds_tba.update.device import DevicePipeline, uploads_before
from ds_tba.update.formula import HostAdam, Powers, is_exact
from ds_tba.update.host import SLICE_ELEMENTS, HostUpdate, WriteBack
from ds_tba.update.pinning import CudaDriver, Registry
from ds_tba.update.updater import Updater, UpdateReport
from ds_tba.update.zero3 import HighestOfRanks, Zero3Update, refuse_unsupported


class InterleavedUpdate:
    """The object at ``engine.interleaved_optimizer_update``.

    Args:
        config: the block.
        accelerator: the training device.
        zero: the engine's ``optimizer``, a ``DeepSpeedZeroOptimizer_Stage3``.
        rank: rank of this process, for the report.

    Raises:
        ConfigError: the report cannot be written where the config says.
        IncompatibleError: the optimizer is one whose update cannot be taken over.
    """

    shared_keys = "interleaved_optimizer_update"  # see ``ranks.py``: no rank gets here without it

    def __init__(self, config: UpdateConfig, accelerator: Accelerator, zero: Any, *, rank: int = 0) -> None:
        refuse_unsupported(zero)
        self._pid = os.getpid()
        self._is_closed = False
        file = ReportFile("report.path", config.report.path, rank)
        counts, adam, device = UpdateReport(rank=rank), zero.optimizer, accelerator.device()
        self.config = config = _with_exact_share(config, accelerator, adam, counts)
        registry = Registry(CudaDriver(), config.pinned_bytes) if device.type == "cuda" else None
        chunk_elements = min(config.chunk_elements, max(one.numel() for one in zero.fp32_partitioned_groups_flat))
        write_back = None
        if not (accelerator.is_synchronous or zero.offload_param):
            queued_bytes = 0 if config.device_share == 0 else uploads_before(chunk_elements)
            write_back = WriteBack(accelerator, zero.dtype, SLICE_ELEMENTS, queued_bytes)
        self._updater = Updater(
            config,
            accelerator,
            HostUpdate(HostAdam(adam.ds_opt_adam, adam.opt_id), write_back),
            DevicePipeline(accelerator, device, chunk_elements, config.device_buffer_bytes),
            Powers(*adam.defaults["betas"]),
            registry,
            target_on_device=not zero.offload_param,
            counts=counts,
            file=file,
        )
        self._zero3 = Zero3Update(zero, self._updater)
        if registry is not None:
            weakref.finalize(self, registry.close)
        # Through a weak reference, or the interpreter would keep the engine until its exit.
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)
        # With a limit whole sub-groups are pinned first, whose moments come with the first step.
        if config.pinned_bytes is None:
            self._updater.pin(self._zero3.arrays())

    def report(self) -> UpdateReport:
        """Return the counters so far."""
        return self._updater.report()

    def agree(self, highest_of_ranks: HighestOfRanks) -> None:
        """Let all ranks refuse to go on where the update of one was interrupted."""
        self._zero3.highest_of_ranks = highest_of_ranks

    def start_line(self) -> str:
        """Return the start-up line of the log."""
        share = self.config.device_share
        words = "on host and device, whoever is faster takes more" if share is None else f"{share:.0%} on the device"
        return f"optimizer updates: {words}, in chunks of {self.config.chunk_bytes >> 20} MiB of parameters"

    def close(self) -> None:
        """Give the update back to DeepSpeed, unpin memory and write the last report. Idempotent."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        self._zero3.remove()
        self._updater.close()


def _with_exact_share(config: UpdateConfig, accelerator: Accelerator, adam: Any, counts: UpdateReport) -> UpdateConfig:
    """Return the config, with a share of 0 for a device that does not give CPUAdam's bits."""
    if not config.exact or config.device_share == 0:
        return config
    if is_exact(adam.ds_opt_adam, accelerator.device(), adamw=adam.adam_w_mode):
        return config
    counts.fall_back(
        "not exact",
        "the device does not give the bits of this processor's CPUAdam, so that the host updates everything; "
        'set "exact": false to accept other roundings',
    )
    return config.model_copy(update={"device_share": 0.0})


def _close(update: weakref.ref[InterleavedUpdate]) -> None:
    present = update()
    if present is not None:
        present.close()
