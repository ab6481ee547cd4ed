"""What ``engine.activation_offloader`` is: builds the parts from the config, opens ``saving()``, reports, closes.

Knows every part below, and decides nothing itself; cannot see DeepSpeed's engine (``engine.py`` ties the two together).
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ds_tba.config import BLOCK, AioConfig, OffloadConfig, with_staging
from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import SHOWS_HOOKS, innermost_hooks, mark_inputs, take_off
from ds_tba.device.accelerator import Accelerator, MemoryMeter, available_bytes, new_thread
from ds_tba.device.memory import is_out_of_memory
from ds_tba.errors import IncompatibleError, PathError
from ds_tba.explain.out_of_memory import Diagnosis, Failure, ModelMemory
from ds_tba.explain.sample import StepSamples, failure_of
from ds_tba.explain.timeline import StepTimeline
from ds_tba.holders import table
from ds_tba.plan.agreement import Agreement, Planning
from ds_tba.plan.controller import Controller, Watched
from ds_tba.plan.feedback import compilations, moves_in_vain
from ds_tba.plan.plan import Planner
from ds_tba.plan.rates import Machine, Rates
from ds_tba.plan.search import adaptive
from ds_tba.plan.trace import Trace
from ds_tba.recompute.blocks import find_blocks
from ds_tba.remat.sites import open_sites
from ds_tba.remat.store import RematStore
from ds_tba.remat.where import RunningModule
from ds_tba.report import LittleMoved, OffloadReport, ReportFile
from ds_tba.stats import StoreStats, readable
from ds_tba.storage.finalizers import Closer
from ds_tba.storage.tiers import Tiers

logger = logging.getLogger(__name__)

# Longer than the stores take to give up on an I/O request that never ends.
CLOSE_LIMIT_S = 90.0
RATED_STEPS = 5  # under plans: fewer tell no rate
LIFE_LIMIT_S = 2.0
RESTING_FACTOR = 100  # seconds idle for each that waking takes
_EXPLAINED = "_ds_tba_explained"  # of an error

# Keys that only a plan uses. The start-up line names those that are set without a plan, or users take them for active.
_PLAN_KEYS = ("activation_budget_bytes", "blocks", "max_step_overhead", "recompute")


def _host_bytes() -> int:
    """Available host memory; 0 where the system does not tell, or no file descriptor is left to ask with."""
    try:
        return available_bytes()
    except OSError:
        return 0


def _measure_together(rates: Rates, agreement: Agreement) -> None:
    """Measure at the same time as the ranks that share the drives; if one rank fails, all fail."""
    agreement.all_gather(None)
    problem = None
    try:
        rates.measure()
    except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer; it is raised below
        problem = str(error)
    for rank, found in enumerate(agreement.all_gather(problem)):
        if found is not None:
            raise PathError(f"rank {rank}: {found}")


class _Kept(threading.local):
    """The hooks of a thread that :meth:`ActivationOffloader.keep_saving` has opened last, and whose they are."""

    hooks: saved_tensors_hooks | None = None
    owner: weakref.ref[ActivationOffloader] | None = None


_kept = _Kept()
os.register_at_fork(after_in_child=lambda: take_off(_kept.hooks))  # a child has neither our lanes nor our staging


class _OfProcess:
    """The offloaders of this process: what one of them takes another may want; see [Note: Resting].

    Attributes:
        open: those that are not closed.
        claims: whose the paths of reports are.
    """

    def __init__(self) -> None:
        self.open: list[ActivationOffloader] = []
        self.claims: dict[Path, ReportFile] = {}


_process = _OfProcess()


class ActivationOffloader:
    """The object at ``engine.activation_offloader``.

    [Note: Resting] DeepSpeed keeps every engine alive, and most programs never call ``destroy()``: a cell of a notebook
    that runs again, a search for the batch size, a sweep. So an offloader has lanes, staging and disk space while its
    engine trains: it takes them (*wakes*) at a forward with gradients, and gives them back (*rests*) where nothing is
    in their care, as another engine is made, or as another steps and waking again would be a hundredth of the time
    idle. Engines that take turns within a step keep theirs.

    Args:
        config: the block.
        aio_config: DeepSpeed's ``"aio"`` block.
        accelerator: the training device.
        zero_uses_nvme: whether ZeRO's own NVMe offload is on.
        rank: of this process, for the report.
        ranks_on_node: ranks that share this machine's directories.

    Raises:
        PathError, ConfigError, BackendUnavailableError: training cannot start; the message names the repair. Nothing is
            left open.
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
        if config.until_backward and not SHOWS_HOOKS:
            raise IncompatibleError(
                f'"{BLOCK}.until_backward" needs PyTorch 2.8, which tells whose hooks are the innermost: leave it '
                "out, or compute the loss inside of the model's forward."
            )
        for other in (*_process.open,):
            other.rest(now=True)
        self._started_at, self._ended_at = time.monotonic(), math.inf
        self._life = threading.Lock()  # of the next five; the first to be taken of all locks of ours
        self._is_awake, self._has_trained, self._has_warned = True, False, False
        self._in_use = 0  # forwards and ends of steps under way
        self._used_at = self._started_at
        is_host = accelerator.is_synchronized_device()
        self.config = config = with_staging(config, _host_bytes() / ranks_on_node, is_host=is_host)
        self._accelerator = accelerator
        self._rank, self._ranks_on_node, self._pid = rank, ranks_on_node, os.getpid()
        self._controller: Controller | None = None
        self._bandwidth_at_start: list[dict[str, Any]] = []
        self._undo: list[Callable[[], object]] = []
        self._compilations_before = compilations()
        self._steps = self._step_peak_bytes = 0  # optimizer steps so far; peak of the last
        self._little = LittleMoved(config)
        # Steps, time and bytes written to each path as the first plan came: from then on wear has a rate to project.
        self._planned: tuple[int, float, list[int]] | None = None
        self._earlier_bytes = 0  # saved before this step
        self._running = RunningModule({})
        self.model_memory: Callable[[], ModelMemory] = ModelMemory
        self._told: OffloadReport | None = None  # to the monitors
        paths, claims = config.report, (rank, _process.claims, lambda: self._steps)
        self._report_file = ReportFile("report.path", paths.path, *claims)
        self._trace_file = ReportFile("report.trace_path", paths.trace_path, *claims)
        self._timeline_file = ReportFile("report.timeline_path", paths.timeline_path, *claims)
        started_s = time.monotonic()
        self._tiers = Tiers(
            config, aio_config, accelerator, zero_uses_nvme=zero_uses_nvme, rank=rank, ranks_on_node=ranks_on_node
        )
        self._waking_s = time.monotonic() - started_s
        self.cache = TensorCache(
            list(self._tiers.by_placement.values()),
            accelerator.device(),
            config.min_tensor_bytes,
            wait_for_staging=config.placement != "adaptive",
            accelerator=None if is_host else accelerator,
            released_bytes=config.io.ring_bytes,
        )
        self._sites = open_sites(config, self.cache, accelerator)
        if self._sites is not None:
            self.cache.rematerialize(RematStore(self.cache, self._sites))
        store = self._tiers.nvme.stats if self._tiers.nvme is not None else StoreStats()
        self._samples = StepSamples(
            self.cache.stats,
            lambda: store.stall_s,
            [path.meter for path in self._tiers.paths],
            partial(_write_timeline, self._timeline_file, config, rank) if config.report.timeline_path else None,
        )
        self.cache.looked_at = self._samples.around
        self._closer = Closer(self._close, accelerator)
        _process.open.append(self)
        atexit.register(self.close)

    def watch(
        self, model: nn.Module, agreement: Agreement, planner: Planner = adaptive, *, everyone: Agreement | None = None
    ) -> None:
        """Plan for a model under placement "adaptive", and record a trace if ``report.trace_path`` is set.

        Args:
            model: whose forward runs in :meth:`saving`.
            agreement: the ranks that follow one plan; all of them call this.
            planner: makes the plans.
            everyone: the ranks that may share drives, where these are more.

        Raises:
            ConfigError: ``blocks`` names a module that the model lacks, or a rank cannot measure its drives.
        """
        with self._using():
            self._watch(model, agreement, planner, everyone or agreement)

    def _watch(self, model: nn.Module, agreement: Agreement, planner: Planner, everyone: Agreement) -> None:
        config, tiers = self.config, self._tiers
        self._running = RunningModule({id(module): path for path, module in model.named_modules()})
        self._samples.module = self._running.path
        if self._sites is not None:
            self._sites.running_module = self._samples.module
        plans = config.placement == "adaptive"
        if self._controller is not None or not (plans or config.report.trace_path):
            return
        rates = Rates(tiers.nvme, self._accelerator, config.io.ring_bytes)
        _measure_together(rates, everyone)
        self._bandwidth_at_start = [path.bandwidth() for path in tiers.paths]
        memory = MemoryMeter(self._accelerator.memory, lambda: self.cache.stats.resident.now)
        # The memory of a CPU is shared by all ranks of the machine.
        sharers = self._ranks_on_node if self._accelerator.is_synchronized_device() else 1
        machine = Machine(config, tiers, rates, memory, self._accelerator.clock, sharers)
        found = find_blocks(model, config.blocks) if config.recompute or config.blocks else []
        watched = Watched(model, found if config.recompute else (), may_recompute=plans and config.recompute)
        planning = Planning(planner if plans else None, machine, agreement)
        self._controller = Controller(self.cache, machine, planning, watched, _TraceFile(self._trace_file))

    def on_close(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` in :meth:`close`, for example to remove a hook from the model."""
        self._undo.append(undo)

    # ---- resting ------------------------------------------------------------------------------------------------

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Lanes, staging and disk space are wanted; see [Note: Resting]."""
        with self._life:
            self._in_use += 1
            if not self._is_awake and not self.is_closed:
                self._wake()
        try:
            yield
        finally:
            with self._life:
                self._in_use -= 1
                self._used_at = time.monotonic()

    def _wake(self) -> None:
        started_s = time.monotonic()
        try:
            self._tiers.wake()
            self._is_awake = True
        except (OSError, RuntimeError, MemoryError, PathError) as error:
            if not self._has_warned:
                logger.warning("rank %d: activations stay in memory, for want of %s", self._rank, error)
            self._has_warned = True
        self._waking_s = time.monotonic() - started_s

    def rest(self, *, now: bool = False) -> None:
        """Give lanes, staging and disk space back where nothing is in their care; see [Note: Resting].

        Args:
            now: also where the engine may go on in a moment.
        """
        if self._is_forked():  # the lock may be taken for ever in a child
            return
        with self._life:
            idle_s = time.monotonic() - self._used_at
            if self.is_closed or not self._is_awake or self._in_use or self.cache.live_records:
                return
            if now or idle_s > RESTING_FACTOR * self._waking_s:
                self._is_awake = not self._tiers.rest()

    # ---- called in training -------------------------------------------------------------------------------------

    @property
    def _saver(self) -> TensorCache | Controller:
        """Whoever opens forwards: the cache by a rule, the controller by plans."""
        return self._controller or self.cache

    def saving(self, inputs: Any = ()) -> AbstractContextManager[None]:
        """Context for a forward whose saved tensors are offloaded.

        Args:
            inputs: arguments of the forward: nothing is made again from tensors that their owner may refill.

        Raises:
            IncompatibleError: the stream is being captured into a graph.
        """
        if self._accelerator.is_capturing():
            raise IncompatibleError(
                "forward is being captured into a graph (torch.cuda.graph), whose replays would neither write nor read "
                f'activations: capture without "{BLOCK}", or run forward outside of the capture.'
            )
        if self._is_forked():
            return nullcontext()
        if not torch.is_grad_enabled():  # nothing is saved, and a reference never trains
            return self._saver.saving()
        self._has_trained = True
        self._refresh_report()
        if self._sites is not None:
            mark_inputs(inputs)
        return self._forward(self._samples.forward(self._saver.saving()))

    @contextmanager
    def _forward(self, saving: AbstractContextManager[None]) -> Iterator[None]:
        with self._using(), saving:
            yield

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or is about to be."""
        return self._ended_at < math.inf

    def keep_saving(self) -> None:
        """After a forward: until :meth:`stop_saving` what this thread saves is offloaded, too, with ``until_backward``.

        PyTorch's hooks are a stack of each thread, and whoever ends takes the innermost off. Ours go on it where nobody
        else's are, and come off only while they are the innermost: no others are ever taken off in their place.
        """
        is_wanted = self.config.until_backward and torch.is_grad_enabled() and not self.is_closed
        if not is_wanted or self._is_forked() or innermost_hooks() is not None:
            return
        hooks = self._saver.after_forward()
        if hooks is not None:
            # Before they are there: a signal handler may raise in between.
            _kept.owner, _kept.hooks = weakref.ref(self), hooks
            hooks.__enter__()

    def stop_saving(self) -> None:
        """Backward, or another forward, begins. Where hooks of others are inside of ours, a later call takes these off.

        The hooks are remembered all the same: autograd restores a stack that was changed inside of a backward. Those of
        an offloader that was closed, which may have been in another thread, go with anybody's.
        """
        owner = None if _kept.owner is None else _kept.owner()
        if owner is None or owner is self or owner.is_closed:
            take_off(_kept.hooks)

    def look_outside(self, losses: Any) -> None:
        """Say once where most of what the backward of these losses needs was saved outside of forward."""
        told = "" if self._is_forked() else self._samples.begin_backward(losses)
        if told and self._rank == 0:
            logger.warning("%s", told)

    def interleaving(self) -> AbstractContextManager[None]:
        """Context for a whole step in which forwards and backwards of several micro-batches alternate."""
        if self._is_forked():
            return nullcontext()
        self._has_trained = True
        return self._forward(self._saver.interleaving())

    def note_micro_step(self) -> None:
        """Record that backward is over."""
        if self._is_forked():
            return
        self._saver.end_micro_step()
        self._samples.end_backward()

    def note_step(self) -> None:
        """Record that an optimizer step is done; reports every ``report.every_steps`` of them."""
        if self._is_forked():
            return
        with self._using():
            self._end_step()
        for other in (*_process.open,):
            if other is not self:
                other.rest()

    def _end_step(self) -> None:
        self._steps += 1
        if self._sites is not None:
            self._sites.step = self._steps + 1
        if self._tiers.host is not None:
            self._tiers.host.end_step()
        if self._controller is not None:
            self._controller.end_step()
        self._step_peak_bytes = self.cache.stats.resident.lap()
        self._samples.end_step()
        self._earlier_bytes = self.cache.stats.resident.now
        moved_bytes = _offloaded_bytes(self._tiers)
        if self._steps == 1 and moves_in_vain(self.cache.stats, moved_bytes, self._compilations_before):
            self._advise_to_compile_layers()
        plans = 0 if self._controller is None else self._controller.plans
        self._little.peak_bytes = self._step_peak_bytes
        if plans and self._planned is None:
            self._planned = self._steps, time.monotonic(), [path.written_bytes for path in self._tiers.paths]
        little = self._little.end_step(self.cache.stats.kept_bytes, self._done_bytes(), self._steps, plans)
        if little and self._rank == 0:
            logger.info("%s", little)
        every = self.config.report.every_steps
        is_due = every > 0 and self._steps % every == 0
        if is_due:
            logger.info("rank %d: %s", self._rank, self.report().summary())
        self._refresh_report(now=is_due)

    def _advise_to_compile_layers(self) -> None:
        if self._rank == 0:
            logger.warning(
                "moving activations does not lower their peak: probably the model is compiled as one graph, which "
                "saves all of them at the end of forward and takes all back before backward begins. %s. Compile each "
                "layer, for example: for layer in engine.module.layers: layer.compile(). Hugging Face's torch_compile "
                "does so with ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true in the environment",
                "Plans keep them" if self.config.placement == "adaptive" else "They are moved, as placement says",
            )

    # ---- reports ------------------------------------------------------------------------------------------------

    def report(self) -> OffloadReport:
        """The counters of all parts as they are now."""
        # Takes no lock: training calls this, and the closer's thread after a lane has hung with its lock held.
        cache = self.cache.stats
        config, tiers = self.config, self._tiers
        budget_bytes = config.activation_budget_bytes if config.placement == "adaptive" else None
        store = tiers.nvme.stats if tiers.nvme is not None else StoreStats()
        host = tiers.host.stats if tiers.host is not None else StoreStats()
        memory = None if self._accelerator.is_synchronized_device() else self._accelerator.memory
        # A tensor that both NVMe and the host tier refuse is one fallback.
        kept, fallbacks = Counter(cache.kept_bytes), Counter((store if tiers.nvme else host).fallbacks)
        return OffloadReport(
            state="finished" if self.is_closed else "running",
            rank=self._rank,
            backend=tiers.selection.backend.name if tiers.selection else "none",
            backend_reason=tiers.selection.reason if tiers.selection else f"placement {config.placement}",
            paths=[str(directory.path) for directory in tiers.directories],
            placement=config.placement,
            integrity=config.io.integrity,
            steps=self._steps,
            micro_steps=cache.micro_steps,
            packed_tensors=cache.packed_tensors,
            passed_through_tensors=cache.passed_through_tensors,
            offloaded_bytes=store.offloaded_bytes + host.offloaded_bytes,
            written_bytes=store.written_bytes,
            read_bytes=store.read_bytes,
            forwarded_bytes=store.forwarded_bytes,
            cancelled_bytes=store.cancelled_bytes,
            deduplicated_bytes=cache.deduplicated_bytes,
            kept_bytes=sum(kept.values()),
            host_bytes=host.offloaded_bytes + store.rescued_bytes,
            recomputed_bytes=cache.recomputed_bytes,
            peak_staging_bytes=tiers.nvme.ring.slots.peak_used_bytes if tiers.nvme is not None else 0,
            swap_file_bytes=sum(path.file.largest_bytes for path in tiers.paths),
            peak_saved_bytes=cache.resident.peak,
            peak_saved_bytes_without=cache.saved.peak,
            budget_excess_bytes=0 if budget_bytes is None else max(0, cache.resident.peak - budget_bytes),
            fallbacks=sum(fallbacks.values()),
            write_bytes_per_s=sum(path.meter.writes.recent.bytes_per_s for path in tiers.paths),
            read_bytes_per_s=sum(path.meter.reads.recent.bytes_per_s for path in tiers.paths),
            stall_s=store.stall_s,
            kept_bytes_by_reason=dict(kept),
            fallbacks_by_reason=dict(fallbacks),
            bandwidth=[path.bandwidth() for path in tiers.paths],
            bandwidth_at_start=self._bandwidth_at_start,
            wear=self._wear(),
            step_peak_saved_bytes=self._step_peak_bytes,
            rematerialized_bytes=cache.rematerialized_bytes,
            device_memory={} if memory is None else memory.levels()._asdict(),
            holders=[asdict(one) for one in self._samples.holders],
            holders_step=self._samples.holders_step,
            timeline_path=None if self._timeline_file.path is None else str(self._timeline_file.path),
            **({} if self._controller is None else self._controller.summary()),
            **({} if self._sites is None else self._sites.summary()),
        )

    def _wear(self) -> list[dict[str, Any]]:
        since_s, before = self._started_at, list[int]()
        if self._planned is not None and self._steps >= self._planned[0] + RATED_STEPS:
            _, since_s, before = self._planned
        return [asdict(one) for one in self._tiers.wear(min(self._ended_at, time.monotonic()) - since_s, before)]

    def scalars(self) -> list[tuple[str, float]]:
        """Eight figures of the last step, for a monitor; bytes and seconds, of this rank."""
        report, before = self.report(), self._told
        self._told = report
        sums = ("offloaded_bytes", "written_bytes", "read_bytes", "rematerialized_bytes", "recomputed_bytes", "stall_s")
        changes = [(name, getattr(report, name) - (getattr(before, name) if before else 0)) for name in sums]
        return [
            ("peak_saved_bytes", report.step_peak_saved_bytes),
            ("peak_saved_bytes_without", report.peak_saved_bytes_without),
            *changes,
        ]

    def explain(self) -> str:
        """What fills the device: who holds saved bytes, what else is in use, and which key or call would help.

        Within a forward of the steps 1, 2, 4, 8, ... it tells of now; else of the end of the last such forward.
        """
        return self._explained(Failure())

    def _explained(self, failure: Failure) -> str:
        stats, levels = self.cache.stats, self._accelerator.memory.levels()
        is_host = self._accelerator.is_synchronized_device()
        holders, model = self._samples.now(), self.model_memory()
        found = Diagnosis(
            self.config,
            holders,
            stats.kept_bytes,
            saved_bytes=stats.resident.now,
            peak_bytes=stats.resident.peak,
            earlier_bytes=min(self._earlier_bytes, stats.resident.now),
            in_use_bytes=0 if is_host else levels.in_use_bytes,
            is_host=is_host,
            model=model,
            failure=failure,
        )
        in_use = "" if is_host else f"; {readable(levels.in_use_bytes)} are in use in all"
        when = f"saved at the end of the last forward looked at, in step {self._samples.holders_step}:"
        if holders is not self._samples.holders:
            when = "saved so far in this forward:"
        lines = [
            f"rank {self._rank}, step {self._steps + 1}{f', {failure}' if failure.phase else ''}.",
            f"What fills it: {found.verdict()}.",
            "",
            f"In memory: saved tensors hold {readable(stats.resident.now)} ({readable(stats.resident.peak)} at their "
            f"peak, {readable(stats.saved.peak)} without ds_tba), parameters {readable(model.parameters)}, gradients "
            f"{readable(model.gradients)}, optimizer states {readable(model.states)}{in_use}.",
            *([when, *table(holders)] if holders else []),
            "What would help, the most useful first:",
            *(f"  {number}. {one}" for number, one in enumerate(found.remedies(), 1)),
        ]
        return "\n".join(lines)

    def note_failure(self, error: BaseException | None) -> None:
        """Log :meth:`explain` where ``error`` says that memory ran out. Never raises; once for each error."""
        try:
            if error is None or getattr(error, _EXPLAINED, False) or not is_out_of_memory(error):
                return
            # On the error itself: a reference to it would hold its frames, and all tensors in them, as long as we live.
            setattr(error, _EXPLAINED, True)
            failure = failure_of(error, self._running, self._accelerator.device())
            logger.error("memory ran out; %s", self._explained(failure))
            self._refresh_report(now=True)
        except Exception:  # nothing may hide the user's error
            logger.exception("memory ran out, and what fills it cannot be told")

    def _refresh_report(self, *, now: bool = False) -> None:
        """Write the JSON at ``report.path`` again where it is old, or ``now``."""
        self._report_file.refresh(lambda: self.report().to_dict(), now=now)

    def _done_bytes(self) -> int:
        """Moved, made again or recomputed so far."""
        stats = self.cache.stats
        return _offloaded_bytes(self._tiers) + stats.recomputed_bytes + stats.rematerialized_bytes

    def start_line(self) -> str:
        """The start-up line of the log: where activations go, and by which rule."""
        parts = self._tiers.describe()
        if not parts and self._tiers.host is not None:
            parts = [f"activations go to {self._tiers.host_in_words}"]
        if not parts:
            again = ", and made again where that is cheap" if self.config.rematerialize_enabled else ""
            ignored = _ignored_keys(self.config)
            return f'placement "keep": activations are measured, not moved{again}{ignored and f"; {ignored}"}'
        return "; ".join([*parts, _planning_text(self.config)])

    def start_details(self) -> str:
        """What else will run, for a log at level DEBUG."""
        return "; ".join(self._tiers.details())

    def _is_forked(self) -> bool:
        """Whether the caller runs in a forked child, which has neither our threads nor our memory nor our report."""
        return self._pid != os.getpid()

    # ---- closing ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the lanes, free all memory and files, write the last report. Idempotent.

        Blocks until the I/O under way is done, so a finalizer must call :meth:`close_soon` instead, and so should a
        signal handler: it may have interrupted our own code, which holds a lock that closing needs and cannot go on
        before the handler returns. This call then gives up after its limit of time.
        """
        if self._is_forked():
            return
        self._closer.ask()
        if not self._closer.wait(CLOSE_LIMIT_S):
            logger.error(
                "rank %d: not closed after %.0f s; the rest is left to process exit", self._rank, CLOSE_LIMIT_S
            )
            self._refresh_report(now=True)

    def close_soon(self) -> None:
        """Close in another thread: a finalizer may run in a lane, or while this very thread holds one of our locks."""
        if not self._is_forked():
            self._closer.ask()

    def _close(self) -> None:  # in the closer's thread
        try:
            for undo in self._undo:
                undo()
            self._undo.clear()
            if self._controller is not None:
                self._controller.close()
            self.cache.settle()
        finally:
            # A signal handler may have interrupted its holder, who cannot go on before it returns.
            is_taken = self._life.acquire(timeout=LIFE_LIMIT_S)
            try:
                self._tiers.close()
                self._ended_at = time.monotonic()  # it wakes no more
            finally:
                if is_taken:
                    self._life.release()
            if self.cache.live_records:  # their host memory goes with them, and no hook of ours runs any more
                follow = partial(self.cache.finalizers.follow, lambda: self.cache.live_records > 0)
                new_thread(self._accelerator, follow, "ds_tba-graphs").start()
            # That of a backward which no engine has called: the interpreter leaves it there before it exits.
            self.note_failure(getattr(sys, "last_value", None))
            if self._has_trained:
                little = self._little.judge(self.cache.stats.kept_bytes, self._done_bytes())
                logger.info("rank %d: %s", self._rank, "; ".join(filter(None, [self.report().summary(), little])))
                self._refresh_report(now=True)
            for file in (self._report_file, self._trace_file, self._timeline_file):
                file.give_up()
            _process.open.remove(self)
            atexit.unregister(self.close)


def _offloaded_bytes(tiers: Tiers) -> int:
    return sum(store.stats.offloaded_bytes for store in (tiers.nvme, tiers.host) if store is not None)


class _TraceFile:
    """Writes each trace to ``report.trace_path``; not the offloader, which would hold itself."""

    def __init__(self, file: ReportFile) -> None:
        self._file = file

    def write(self, trace: Trace) -> None:
        if self._file.path is not None:
            self._file.write_text(trace.to_json() + "\n")


def _write_timeline(file: ReportFile, config: OffloadConfig, rank: int, timeline: StepTimeline, step: int) -> None:
    file.write_text(timeline.to_json(step=step, rank=rank, budget_bytes=config.activation_budget_bytes))


def _planning_text(config: OffloadConfig) -> str:
    if config.placement == "adaptive":
        return (
            f"least time within {readable(config.activation_budget_bytes)}"
            if config.activation_budget_bytes is not None
            else f"steps +{config.max_step_overhead:.1%} at most"
        )
    rule, ignored = f'placement "{config.placement}" is a rule, not a plan', _ignored_keys(config)
    return f"{rule}: {ignored}" if ignored else rule


def _ignored_keys(config: OffloadConfig) -> str:
    """Return which keys for plans have no effect, where the placement makes none; empty where none is set."""
    ignored = [key for key in _PLAN_KEYS if getattr(config, key) != OffloadConfig.model_fields[key].default]
    ignored += ["ssd.min_life_days"] if config.ssd.min_life_days else []
    return f"no effect of {', '.join(ignored)}" if ignored else ""
