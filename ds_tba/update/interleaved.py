"""What ``engine.interleaved_optimizer_update`` is: owns the parts of the optimizer update, and reports."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ds_tba.device.accelerator import Accelerator
from ds_tba.telemetry.report import checked_path, write_json
from ds_tba.update.config import UpdateConfig
from ds_tba.update.device import DevicePipeline, uploads_before
from ds_tba.update.formula import HostAdam, is_exact
from ds_tba.update.host import SLICE_ELEMENTS, HostUpdate, SubGroup, WriteBack
from ds_tba.update.pinning import cuda_registry
from ds_tba.update.updater import Parts, UpdateCounters, run_update
from ds_tba.update.zero3 import Zero3Update, refuse_unsupported

logger = logging.getLogger("ds_tba")

REPORT_AGE_S = 10.0


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The report. Counts and seconds are of this rank, since the run began.

    Attributes:
        steps: updates that were interleaved.
        stock_steps: updates that were left to DeepSpeed; ``fallbacks`` says why.
        elements: parameters updated in ``steps``, each counted once per step.
        device_elements: those of them that the device updated.
        device_share: the part of the device, over all steps.
        last_device_share: in the last step.
        update_s: from the first chunk until everything is in place.
        host_s: of it, in the host's own chunks.
        drain_s: of it, waiting for the device at the end.
        device_busy_s: from the first chunk that went to the device until the last one was seen to be back.
        device_idle_s: the rest of ``update_s``.
        host_adam_per_s: elements per second of the host in its own chunks, with unscaling and cast; 0.0: none yet.
        device_adam_per_s: elements per second of the device, with both copies; 0.0: none yet.
        uploaded_bytes, written_back_bytes: to the device and from it, in updates.
        upload_bytes_per_s, write_back_bytes_per_s: those by ``device_busy_s``.
        predicted_s: of the updates at the rates of both sides, had neither waited for the other; beside ``update_s``.
        pinned_bytes: of host memory, master and moments (in place) and buffers.
        fallbacks: how often something was left to the host or to DeepSpeed, by reason.
    """

    rank: int = 0
    state: str = "running"
    steps: int = 0
    stock_steps: int = 0
    elements: int = 0
    device_elements: int = 0
    device_share: float = 0.0
    last_device_share: float = 0.0
    update_s: float = 0.0
    host_s: float = 0.0
    drain_s: float = 0.0
    device_busy_s: float = 0.0
    device_idle_s: float = 0.0
    host_adam_per_s: float = 0.0
    device_adam_per_s: float = 0.0
    uploaded_bytes: int = 0
    written_back_bytes: int = 0
    upload_bytes_per_s: float = 0.0
    write_back_bytes_per_s: float = 0.0
    predicted_s: float = 0.0
    pinned_bytes: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def line(self) -> str:
        """For the log, after a number of steps."""
        steps = max(self.steps, 1)
        return (
            f"{self.steps} optimizer updates of {self.update_s / steps:.3f} s: {self.device_share:.0%} on the device, "
            f"{self.host_s / steps:.3f} s in the host's part, {self.drain_s / steps:.3f} s waiting for the device"
        )


class InterleavedUpdate:
    """The object at ``engine.interleaved_optimizer_update``.

    Args:
        config: the block.
        accelerator: the training device.
        zero: the engine's ``optimizer``: a ``DeepSpeedZeroOptimizer_Stage3``.
        rank: of this process, for the report.

    Raises:
        ConfigError: the report cannot be written where the config says.
        IncompatibleError: the optimizer is one whose update cannot be taken over.
    """

    def __init__(self, config: UpdateConfig, accelerator: Accelerator, zero: Any, *, rank: int = 0) -> None:
        refuse_unsupported(zero)
        self.config = config
        self._rank = rank
        self._pid = os.getpid()
        self._path = checked_path("report.path", config.report.path, rank)
        self._written_at = -REPORT_AGE_S
        self._is_closed = False
        self._counters = UpdateCounters()
        device = accelerator.device()
        self._registry = cuda_registry(config.pinned_bytes) if device.type == "cuda" else None
        self._device_share, self._share_words = self._share(accelerator, zero)
        chunk_elements = min(config.chunk_elements, max(one.numel() for one in zero.fp32_partitioned_groups_flat))
        self._write_back = self._new_write_back(accelerator, zero, chunk_elements)
        self._pipeline = DevicePipeline(accelerator, device, chunk_elements, config.device_buffer_bytes)
        self._zero3 = Zero3Update(zero, self._run, self._leave, self._done, self._loaded)
        self._parts = Parts(
            config=config,
            accelerator=accelerator,
            host=HostUpdate(HostAdam(zero.optimizer.ds_opt_adam, zero.optimizer.opt_id), self._write_back),
            pipeline=self._pipeline,
            powers=self._zero3.powers,
            is_pinned=self._is_pinned,
            counters=self._counters,
            target_on_device=not zero.offload_param,
            device_share=self._device_share,
        )
        if self._registry is not None:
            weakref.finalize(self, self._registry.close)
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)
        if config.pinned_bytes is None:  # else whole sub-groups first, whose moments come with the first step
            self._pin(self._zero3.arrays())

    def report(self) -> UpdateReport:
        """The counters so far."""
        counters, stats = self._counters, self._pipeline.stats
        busy_s = stats.busy_s or float("inf")
        both_per_s = counters.host_adam_per_s + stats.elements / busy_s
        return UpdateReport(
            rank=self._rank,
            state="finished" if self._is_closed else "running",
            steps=counters.steps,
            stock_steps=counters.stock_steps,
            elements=counters.elements,
            device_elements=counters.device_elements,
            device_share=counters.device_elements / max(counters.elements, 1),
            last_device_share=counters.last_device_share,
            update_s=counters.update_s,
            host_s=counters.host_s,
            drain_s=counters.drain_s,
            device_busy_s=stats.busy_s,
            device_idle_s=max(0.0, counters.update_s - stats.busy_s),
            host_adam_per_s=counters.host_adam_per_s,
            device_adam_per_s=stats.elements / busy_s,
            uploaded_bytes=stats.uploaded_bytes,
            written_back_bytes=stats.written_back_bytes,
            upload_bytes_per_s=stats.uploaded_bytes / busy_s,
            write_back_bytes_per_s=stats.written_back_bytes / busy_s,
            predicted_s=counters.elements / both_per_s if both_per_s else 0.0,
            pinned_bytes=self._pinned_bytes,
            fallbacks=dict(counters.fallbacks),
        )

    def agree(self, highest_of_ranks: Callable[[int], int]) -> None:
        """Let all ranks refuse to go on where the update of one was interrupted.

        Args:
            highest_of_ranks: the highest number that any rank has; a collective of all of them, in host memory.
        """
        self._zero3.highest_of_ranks = highest_of_ranks

    def start_line(self) -> str:
        """The start-up line of the log."""
        return f"optimizer updates: {self._share_words}, in chunks of {self.config.chunk_bytes >> 20} MiB of parameters"

    def close(self) -> None:
        """Give the update back to DeepSpeed, unpin memory and write the last report. Idempotent."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        self._zero3.remove()
        if self._registry is not None:
            self._registry.close()
        self._write()
        if self._rank == 0 and self._counters.steps:
            logger.info("%s", self.report().line())

    # ---- how it starts ------------------------------------------------------------------------------------------

    def _new_write_back(self, accelerator: Accelerator, zero: Any, chunk_elements: int) -> WriteBack | None:
        if accelerator.is_synchronized_device() or zero.offload_param:
            return None
        queued_bytes = 0 if self._device_share == 0 else uploads_before(chunk_elements)
        return WriteBack(accelerator, zero.dtype, SLICE_ELEMENTS, queued_bytes)

    def _share(self, accelerator: Accelerator, zero: Any) -> tuple[float | None, str]:
        """The device's share, in words, too: as configured, if the device's bits are those of CPUAdam."""
        share, adam = self.config.device_share, zero.optimizer
        if share == 0:
            return share, "all on the host (device_share 0)"
        if self.config.exact and not is_exact(adam.ds_opt_adam, accelerator.device(), adamw=adam.adam_w_mode):
            self._counters.fall_back(
                "not exact",
                "the device does not give the bits of this processor's CPUAdam, so that the host updates everything; "
                'set "exact": false to accept other roundings',
            )
            return 0.0, "all on the host"
        if share is None:
            return share, "on host and device, whoever is faster takes more"
        return share, f"{share:.0%} on the device, the rest on the host"

    # ---- in each step -------------------------------------------------------------------------------------------

    def _run(self, sub_groups: list[SubGroup]) -> None:
        self._pin([array for one in sub_groups for array in one.arrays])
        run_update(self._parts, sub_groups)

    def _pin(self, arrays: list[torch.Tensor]) -> None:
        """Pin from the back, where the device begins; what somebody has replaced is unpinned."""
        if self._registry is None or self._device_share == 0:
            return
        self._registry.keep(arrays)
        began_s, before_bytes = time.perf_counter(), self._registry.pinned_bytes
        for array in reversed(arrays):
            self._registry.pin(array)
        pinned_bytes = self._registry.pinned_bytes - before_bytes
        if pinned_bytes and self._rank == 0:
            seconds = time.perf_counter() - began_s
            logger.info("optimizer states: %d bytes of host memory pinned in %.1f s", pinned_bytes, seconds)
        if self._registry.refused_bytes:
            self._counters.fall_back(
                "pageable memory",
                f"{self._registry.refused_bytes} bytes of optimizer states cannot be pinned, so that the host updates "
                "them: leave the driver more memory to pin (other pinned buffers, the container's limit), or set "
                "pinned_bytes to what it can pin",
            )

    def _loaded(self, arrays: list[torch.Tensor]) -> None:
        """Let what a checkpoint has replaced go at once."""
        if self._registry is not None:
            self._registry.keep(arrays)

    def _is_pinned(self, sub_group: SubGroup) -> bool:
        registry = self._registry
        return registry is None or all(registry.is_pinned(array) for array in sub_group.arrays)

    def _leave(self, reason: str, words: str) -> None:
        self._counters.stock_steps += 1
        self._counters.fall_back(reason, words)

    def _done(self) -> None:
        every = self.config.report.every_steps
        is_due = every and self._counters.steps % every == 0
        if is_due and self._rank == 0:
            logger.info("%s", self.report().line())
        if is_due or time.monotonic() - self._written_at > REPORT_AGE_S:
            self._write()

    @property
    def _pinned_bytes(self) -> int:
        in_place_bytes = self._registry.pinned_bytes if self._registry is not None else 0
        return in_place_bytes + (self._write_back.pinned_bytes if self._write_back is not None else 0)

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            write_json(self._path, self.report().to_dict())
        except OSError as error:
            logger.warning("report.path %s cannot be written: %s", self._path, error)
        self._written_at = time.monotonic()


def _close(update: weakref.ref[InterleavedUpdate]) -> None:
    """At the interpreter's exit; keeps no engine alive until then."""
    present = update()
    if present is not None:
        present.close()
