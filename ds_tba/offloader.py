"""The activation offloader of one engine: builds the parts from the config, counts steps, reports, cleans up.

Knows every part below; does not know DeepSpeed's engine (``engine.py`` holds the two together).
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

from torch import nn

from ds_tba.adaptive.consensus import Planning
from ds_tba.adaptive.controller import Controller
from ds_tba.adaptive.monitor import Counts
from ds_tba.adaptive.ranks import Agreement
from ds_tba.adaptive.rates import Rates
from ds_tba.autograd.blocks import Blocks, find_blocks
from ds_tba.autograd.budget import MemoryMeter
from ds_tba.autograd.cache import TensorCache
from ds_tba.config import BLOCK, AioConfig, OffloadConfig, with_staging
from ds_tba.device.accelerator import Accelerator
from ds_tba.device.memory import available_bytes
from ds_tba.errors import ConfigError, IncompatibleError, PathError
from ds_tba.planner.plan import Limits
from ds_tba.planner.search import Planner, adaptive
from ds_tba.planner.trace import Trace
from ds_tba.storage.base import Always
from ds_tba.storage.finalizers import Closer, interrupts_us
from ds_tba.storage.tiers import Tiers
from ds_tba.telemetry.drive_health import write_limit_bytes_per_step
from ds_tba.telemetry.report import OffloadReport, rank_path
from ds_tba.telemetry.stats import StoreStats

logger = logging.getLogger(__name__)

# The JSON at report.path is at most so old when the process is killed (or one step, where steps are longer).
REPORT_AGE_S = 0.25

# More than the stores take to give up a request that does not end.
CLOSE_LIMIT_S = 90.0
# A signal handler that interrupted our own code gets no further than this before that code goes on.
INTERRUPTED_CLOSE_LIMIT_S = 3.0

# Keys that a plan acts on: naming them where there is none must not look like it had an effect.
_FOR_PLANS = ("activation_budget_bytes", "blocks", "max_step_overhead", "recompute")


def _host_bytes() -> int:
    """Of host memory that can be had; 0 where the system does not tell, or there is no descriptor left to ask with."""
    try:
        return available_bytes()
    except OSError:
        return 0


def _measure_together(rates: Rates, agreement: Agreement) -> None:
    """Measure at the same time as the ranks that share the drives; fail with all if one fails."""
    agreement.all_gather(None)
    problem = None
    try:
        rates.measure()
    except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer; it is raised below
        problem = str(error)
    for rank, found in enumerate(agreement.all_gather(problem)):
        if found is not None:
            raise PathError(f"rank {rank}: {found}")


class ActivationOffloader:
    """What ``engine.activation_offloader`` is.

    Args:
        config: the block.
        aio_config: DeepSpeed's ``"aio"`` block.
        accelerator: the training device.
        zero_uses_nvme: ZeRO's own NVMe offload is on.
        rank: this process's rank, for the report.
        ranks_on_node: ranks that share this machine's directories.

    Raises:
        PathError, ConfigError, BackendUnavailableError: what stands in the way of training, with
            the repair; nothing is left open.
    """

    def __init__(
        self,
        config: OffloadConfig,
        aio_config: AioConfig,
        accelerator: Accelerator,
        *,
        zero_uses_nvme: bool = False,
        rank: int = 0,
        ranks_on_node: int = 1,
    ) -> None:
        is_host = accelerator.is_synchronized_device()
        self.config = config = with_staging(config, _host_bytes() / ranks_on_node, is_host=is_host)
        self._accelerator = accelerator
        self._rank = rank
        self._steps = 0
        self._state = "running"
        self._pid = os.getpid()
        self._started_at = time.monotonic()
        self._ended_at: float | None = None
        self._written_at = -REPORT_AGE_S
        self._ranks_on_node = ranks_on_node
        self._report_path = _checked_path("report.path", config.report.path, rank)
        self._trace_path = _checked_path("report.trace_path", config.report.trace_path, rank)
        self._controller: Controller | None = None
        self._undo: list[Callable[[], object]] = []
        self._tiers = Tiers(
            config, aio_config, accelerator, zero_uses_nvme=zero_uses_nvme, rank=rank, ranks_on_node=ranks_on_node
        )
        self.cache = TensorCache(
            list(self._tiers.by_placement.values()),
            accelerator.device(),
            config.min_tensor_bytes,
            wait_for_staging=config.placement == "nvme",
            accelerator=None if accelerator.is_synchronized_device() else accelerator,
        )
        self._memory = MemoryMeter(accelerator.memory, self.cache.stats.resident)
        self._closer = Closer(self._close)
        atexit.register(self.close)

    def _room_bytes(self) -> float:
        """For activations, on the device; the memory of a CPU is that of all ranks of its machine."""
        ranks = self._ranks_on_node if self._accelerator.is_synchronized_device() else 1
        return self._memory.room_bytes() / ranks

    def _counts(self) -> Counts:
        stores = [store.stats for store in (self._tiers.nvme, self._tiers.host) if store is not None]
        return Counts(
            self._tiers.refusals,
            sum(one.offloaded_bytes for one in stores),
            self.cache.stats.moving_s,
            sum(one.stall_s for one in stores),
        )

    def watch(self, model: nn.Module, agreement: Agreement, planner: Planner = adaptive) -> None:
        """Plan for a model, where the placement is "adaptive", and record a trace where ``report.trace_path`` is set.

        Args:
            model: whose forward runs in :meth:`saving`.
            agreement: the ranks; all of them call this.
            planner: makes the plans.

        Raises:
            ConfigError: ``blocks`` names what is not in the model, or a rank cannot measure its drives.
        """
        plans = self.config.placement == "adaptive"
        if self._controller is not None or not (plans or self._trace_path):
            return
        rates = Rates(self._tiers.nvme, self._accelerator, self.config.io.ring_bytes)
        _measure_together(rates, agreement)
        controller = Controller(
            self.cache,
            self._tiers.by_placement,
            Always(list(self._tiers.by_placement.values()), wait=True),
            Planning(planner, self._limits, rates, self._room_bytes, agreement) if plans else None,
            rates,
            agreement,
            self._accelerator.clock,
            self._counts,
            self._write_trace,
            self._memory,
            self.config.activation_budget_bytes if plans else None,
        )
        is_watching = plans and self.config.recompute
        controller.watch(model, Blocks(find_blocks(model, self.config.blocks), controller, is_watching=is_watching))
        self._controller = controller

    def on_close(self, undo: Callable[[], object]) -> None:
        """Have something undone at :meth:`close`, such as a hook on the model."""
        self._undo.append(undo)

    # ---- what a run calls ---------------------------------------------------------------------------------------

    def saving(self) -> AbstractContextManager[None]:
        """The context in which a forward runs so that what autograd saves goes through us.

        Raises:
            IncompatibleError: the stream is being captured into a graph.
        """
        if self._accelerator.is_capturing():
            raise IncompatibleError(
                "forward is being captured into a graph (torch.cuda.graph), whose replays would neither write nor read "
                f'activations: capture without "{BLOCK}", or run forward outside of the capture.'
            )
        if self._pid != os.getpid():
            return nullcontext()  # a forked child has neither our threads nor our memory
        self._refresh_report()
        return self.cache.saving() if self._controller is None else self._controller.saving()

    def note_micro_step(self) -> None:
        """Tell that backward is over."""
        if self._pid != os.getpid():
            return
        if self._controller is not None:
            self._controller.end_micro_step()
        else:
            self.cache.end_micro_step()

    def note_step(self) -> None:
        """Tell that an optimizer step is done; reports every ``report.every_steps`` of them."""
        if self._pid != os.getpid():
            return
        self._steps += 1
        if self._controller is not None:
            self._controller.end_step()
        every = self.config.report.every_steps
        if every and self._steps % every == 0:
            logger.info("rank %d: %s", self._rank, self.report().summary())
            self.write_report()
        self._refresh_report()

    def report(self) -> OffloadReport:
        """What happened so far."""
        cache = self.cache.stats
        tiers, controller = self._tiers, self._controller
        budget_bytes = self.config.activation_budget_bytes if self.config.placement == "adaptive" else None
        store = tiers.nvme.stats if tiers.nvme is not None else StoreStats()
        host = tiers.host.stats if tiers.host is not None else StoreStats()
        slots = tiers.nvme.ring.slots if tiers.nvme is not None else None
        # What NVMe refuses and the host tier refuses too is one fallback.
        kept, fallbacks = Counter(cache.kept_bytes), Counter((store if tiers.nvme else host).fallbacks)
        return OffloadReport(
            state=self._state,
            rank=self._rank,
            backend=tiers.selection.backend.name if tiers.selection else "none",
            backend_reason=tiers.selection.reason if tiers.selection else f"placement {self.config.placement}",
            paths=[str(directory.path) for directory in tiers.directories],
            placement=self.config.placement,
            integrity=self.config.io.integrity,
            steps=self._steps,
            micro_steps=cache.micro_steps,
            packed_tensors=cache.packed_tensors,
            passed_through_tensors=cache.passed_through_tensors,
            offloaded_bytes=store.offloaded_bytes + host.offloaded_bytes,
            written_bytes=store.writes.nbytes,
            read_bytes=store.reads.nbytes,
            forwarded_bytes=store.forwarded_bytes,
            cancelled_bytes=store.cancelled_bytes,
            deduplicated_bytes=cache.deduplicated_bytes,
            kept_bytes=sum(kept.values()),
            host_bytes=host.offloaded_bytes + store.rescued_bytes,
            recomputed_bytes=controller.recomputed_bytes if controller is not None else 0,
            peak_staging_bytes=slots.peak_used_bytes if slots else 0,
            swap_file_bytes=sum(path.file.size_bytes for path in tiers.paths),
            peak_saved_bytes=cache.resident.peak,
            peak_saved_bytes_without=cache.saved.peak,
            budget_excess_bytes=0 if budget_bytes is None else max(0, cache.resident.peak - budget_bytes),
            fallbacks=sum(fallbacks.values()),
            write_bytes_per_s=store.writes.bytes_per_s,
            read_bytes_per_s=store.reads.bytes_per_s,
            stall_s=store.stall_s,
            kept_bytes_by_reason=dict(kept),
            fallbacks_by_reason=dict(fallbacks),
            bandwidth=[path.bandwidth() for path in tiers.paths],
            wear=[asdict(one) for one in tiers.wear((self._ended_at or time.monotonic()) - self._started_at)],
            step_peak_saved_bytes=controller.step_peak_bytes if controller is not None else 0,
            plans=controller.plans if controller is not None else 0,
            plan=controller.summary() if controller is not None else None,
            unproven_blocks=controller.unproven_blocks() if controller is not None else [],
        )

    def start_line(self) -> str:
        """What will run, for the log."""
        parts = self._tiers.describe()
        if not parts and self._tiers.host is not None:
            parts = [f"activations go to host memory, up to {self.config.host_budget_bytes} bytes per rank"]
        if not parts:
            return 'ds_tba: placement "keep": activations are measured, not moved'
        parts[0] = f"ds_tba: {parts[0]}"
        return "; ".join([*parts, self._plan_line()])

    def _plan_line(self) -> str:
        config = self.config
        if config.placement == "adaptive":
            least = (
                f"least time within {config.activation_budget_bytes} bytes of activations"
                if config.activation_budget_bytes is not None
                else f"lowest peak within {config.max_step_overhead:.1%} of the step's time"
            )
            how = "moved, recomputed or kept" if config.recompute else "moved or kept"
            return f"the first steps are measured with everything {how}, then planned for the {least}"
        ignored = [key for key in _FOR_PLANS if getattr(config, key) != OffloadConfig.model_fields[key].default]
        ignored += ["ssd.min_life_days"] if config.ssd.min_life_days else []
        rule = f'placement "{config.placement}" is a rule, not a plan'
        return f"{rule}: no effect of {', '.join(ignored)}" if ignored else rule

    def write_report(self) -> None:
        """Write the JSON at ``report.path``, if one is set; a failure is logged, never raised into training."""
        if self._report_path is None:
            return
        try:
            self.report().write_json(self._report_path)
        except OSError as error:
            logger.warning("report.path %s cannot be written: %s", self._report_path, error)
        self._written_at = time.monotonic()

    def _refresh_report(self) -> None:
        # Instead of a signal handler: that would run only when the main thread comes back from C++, SIGKILL has none,
        # and a process that is killed in a hang still leaves a report this way.
        if self._report_path is not None and time.monotonic() - self._written_at >= REPORT_AGE_S:
            self.write_report()

    def close(self) -> None:
        """Stop the lanes, give every byte back, write the last report. Idempotent.

        Blocks until the I/O under way is done, so a finalizer must call :meth:`close_soon` instead. A signal handler
        may call it: where it interrupted our own code, which may hold a lock that closing needs, it waits for a few
        seconds only, and closing ends when that code goes on.
        """
        if self._pid != os.getpid():
            return  # a forked child has neither our threads nor our report
        self._closer.ask()
        if interrupts_us("ds_tba.engine"):
            self._closer.wait(INTERRUPTED_CLOSE_LIMIT_S)
        elif not self._closer.wait(CLOSE_LIMIT_S):
            logger.error(
                "rank %d: not closed after %.0f s; the rest is left to process exit", self._rank, CLOSE_LIMIT_S
            )
            self.write_report()

    def close_soon(self) -> None:
        """Close in another thread: a finalizer may run in a lane, or while this very thread holds one of our locks."""
        if self._pid == os.getpid():
            self._closer.ask()

    def _close(self) -> None:
        try:
            for undo in self._undo:
                undo()
            self._undo.clear()
            if self._controller is not None:
                self._controller.close()
            self.cache.settle()
        finally:
            self._tiers.close()
            self._state = "finished"
            self._ended_at = time.monotonic()
            logger.info("ds_tba, rank %d: %s", self._rank, self.report().summary())
            self.write_report()
            atexit.unregister(self.close)

    # ---- planning -----------------------------------------------------------------------------------------------

    def _limits(self, step_s: float) -> Limits:
        config = self.config
        return Limits(
            config.max_step_overhead,
            config.activation_budget_bytes,
            config.host_budget_bytes,
            write_limit_bytes_per_step(self._tiers.endurance_left_tbw(), config.ssd.min_life_days, step_s),
            config.recompute,
        )

    def _write_trace(self, trace: Trace) -> None:
        if self._trace_path is None:
            return
        try:
            self._trace_path.write_text(trace.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            logger.warning("report.trace_path %s cannot be written: %s", self._trace_path, error)


def _checked_path(key: str, path: str | None, rank: int) -> Path | None:
    if path is None:
        return None
    target = rank_path(path, rank)
    if target.is_dir():
        raise ConfigError(f"{key} {target} is a directory: name a file, for example {target / 'report.json'}.")
    if not os.access(target.parent, os.W_OK):
        raise ConfigError(f"{key} {target}: its directory is missing or not writable: create it first.")
    return target
