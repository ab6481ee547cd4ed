"""The object at ``engine.activation_offloader``: wires the core and the parts that its config asks for.

The core (cache, tiers, report) is always there. Every other part is imported here, and only where its key asks for it.
Decides nothing itself; cannot see DeepSpeed's engine (``engine.py`` ties the two together).
"""

from __future__ import annotations

import atexit
import logging
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from ds_tba.config import BLOCK, AioConfig, OffloadConfig, matching
from ds_tba.core.cache import TensorCache
from ds_tba.core.hooks import OPEN_HOOKS, ForwardHooks, innermost_hooks
from ds_tba.core.tensors import mark_inputs
from ds_tba.device.accelerator import (
    THREAD_PREFIX,
    Accelerator,
    MemoryMeter,
    available_bytes,
    is_out_of_memory,
    new_thread,
)
from ds_tba.errors import ConfigError, IncompatibleError
from ds_tba.ranks import agreement
from ds_tba.report import OffloadReport, ReportFile
from ds_tba.reporting import Reporter, start_line
from ds_tba.stats import StoreStats, readable
from ds_tba.storage.staging import slots_bytes_of, with_staging
from ds_tba.storage.tiers import Tiers

if TYPE_CHECKING:
    from ds_tba.explain.out_of_memory import ModelMeter
    from ds_tba.explain.sample import StepSamples
    from ds_tba.plan.agreement import Agreement
    from ds_tba.plan.controller import Controller
    from ds_tba.plan.machine import Machine
    from ds_tba.plan.plan import Planner
    from ds_tba.remat.sites import Sites
    from ds_tba.remat.where import ChosenModules, RunningModule

logger = logging.getLogger(__name__)

# Longer than the stores take to give up on an I/O request that never ends.
CLOSE_LIMIT_S = 90.0
_EXPLAINED = "_ds_tba_explained"  # of an error


class Engines:
    """The offloaders of this process: what one of them takes another may want.

    DeepSpeed keeps every engine alive, and most programs never call ``destroy()``: a cell of a notebook that runs
    again, a search for the batch size, a sweep. So those before give back what they hold when another engine is made,
    and take it again if they train on.
    """

    def __init__(self) -> None:
        self.open: list[ActivationOffloader] = []  # those that are not closed

    def give_back(self) -> None:
        """Have all give back what is not in use."""
        for one in (*self.open,):
            one.give_back()

    def beside(self, new: ActivationOffloader) -> str:
        """Return what the start line of a new one says of those that train beside it."""
        others = [one for one in (*self.open,) if one is not new and one.cache.stats.micro_steps]
        if not others:
            return ""
        staging_bytes = sum(one.config.io.ring_bytes for one in (new, *others) if one.config.uses_nvme)
        return (
            f"; {len(others)} more engine(s) of this process have trained: if they train on beside this one, all "
            f"together take {readable(staging_bytes)} of staging, and each has lanes and swap files of its own"
        )


ENGINES = Engines()


class ActivationOffloader:
    """The object at ``engine.activation_offloader``.

    Attributes:
        shared_keys: see ``ranks.py``.
        is_closed: it was closed, or is about to be.
        controller: plans and recordings; None where forwards follow a rule.

    Args:
        config: the block.
        aio_config: DeepSpeed's ``"aio"`` block.
        accelerator: the training device.
        zero_paths: directories of ZeRO's own offload to NVMe.
        rank: of this process, for the report.
        ranks_on_node: ranks that share this machine's directories and memory.

    Raises:
        PathError, ConfigError, BackendUnavailableError, IncompatibleError: training cannot start; the message names the
            repair. Nothing is left open.
    """

    def __init__(
        self,
        config: OffloadConfig,
        aio_config: AioConfig,
        accelerator: Accelerator,
        *,
        zero_paths: Sequence[str] = (),
        rank: int = 0,
        ranks_on_node: int = 1,
    ) -> None:
        # First: engines that train no more have the pinned memory and the disk space that this one is about to take.
        ENGINES.give_back()
        try:
            host_bytes = available_bytes() / ranks_on_node  # each of them derives its staging from the same memory
        except OSError:  # no descriptor is left to ask with: the store's check refuses that, with the numbers
            host_bytes = 0.0
        self.config = config = with_staging(config, host_bytes, is_host=accelerator.is_synchronous)
        self.shared_keys = config.shared_keys
        self.is_closed = False
        self.controller: Controller | None = None
        self._accelerator, self._ranks_on_node = accelerator, ranks_on_node
        self._meter: ModelMeter | None = None
        self._samples: StepSamples | None = None  # None before anybody asks who holds saved bytes
        self._chosen: ChosenModules | None = None
        self._undo = ExitStack()
        self._kept: dict[int, ForwardHooks] = {}  # open after a forward, by thread
        report = ReportFile("report.path", config.report.path, rank)
        self._trace_file = ReportFile("report.trace_path", config.report.trace_path, rank)
        self._timeline_file = ReportFile("report.timeline_path", config.report.timeline_path, rank)
        self._tiers = tiers = Tiers(config, aio_config, accelerator, zero_paths=zero_paths, ranks_on_node=ranks_on_node)
        try:
            self.cache = TensorCache(
                list(tiers.by_placement.values()),
                accelerator.device(),
                config.min_tensor_bytes,
                wait_for_staging=config.placement != "adaptive",  # a controller's own policy decides in its forwards
                accelerator=accelerator,
                released_bytes=config.io.ring_bytes,
            )
            self._reporter = Reporter(config, tiers, self.cache.stats, accelerator, report)
            self._sites = self._open_sites() if config.rematerialize is not False else None
            if config.report.timeline_path:
                self._sampling()
            # Here, because starting a thread waits for it, and whoever asks for the end may not wait.
            self._end_is_wanted: queue.SimpleQueue[None] = queue.SimpleQueue()
            self._closing = new_thread(accelerator, self._close, f"{THREAD_PREFIX}close")
            self._closing.start()
        except BaseException:  # its lanes would never end, nor its swap file
            tiers.close()
            raise
        # Most programs never close an engine: without this nobody would write the last report.
        atexit.register(self.close)
        ENGINES.open.append(self)

    # ---- the parts that keys ask for, each of them loaded where the first such key is seen -----------------------

    @cached_property
    def _running(self) -> RunningModule:
        """The name of the module that runs."""
        from ds_tba.remat.where import RunningModule

        return RunningModule()

    @property
    def _saver(self) -> Controller | TensorCache:
        """The controller, which opens forwards by plans; else the cache, which does by a rule."""
        return self.controller or self.cache

    def watch(
        self,
        model: nn.Module,
        everyone: Agreement | None = None,
        planner: Planner | None = None,
        *,
        stage: Agreement | None = None,
        meter: ModelMeter | None = None,
    ) -> None:
        """Sample the steps of a model, plan for it under placement "adaptive", record it for ``report.trace_path``.

        Args:
            model: whose forward runs in :meth:`saving`.
            everyone: the ranks that may share drives, all of which call this; None for all there are.
            planner: makes the plans; None takes that of ``plan/search.py``.
            stage: the ranks that follow one plan, where these are fewer.
            meter: counts what the model holds, for :meth:`explain`.

        Raises:
            ConfigError: ``blocks``, ``only`` or ``except`` names a module that the model lacks.
        """
        self._meter = meter
        self._running.watch(model)
        self._sampling()
        if self.config.is_planned or self.config.patterns:
            everyone = everyone or agreement()
            if self.config.patterns:
                self._choose_by_name(model, everyone)
            if self.config.is_planned and self.controller is None:
                self.controller = self._open_controller(model, everyone, stage or everyone, planner)
                self._reporter.add(self.controller)
        self.give_back()  # until its engine trains: a reference model's may have the config of one that does

    def on_close(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` in :meth:`close`, for example to remove a hook from the model."""
        self._undo.callback(undo)

    def _sampling(self) -> StepSamples:
        """Return what samples steps."""
        if self._samples is None:
            from ds_tba.explain.sample import StepSamples

            file = self._timeline_file if self.config.report.timeline_path else None
            store = StoreStats() if self._tiers.nvme is None else self._tiers.nvme.stats
            paths = [path.meter for path in self._tiers.paths]
            step = self._reporter.steps + 1
            self._samples = StepSamples(self.cache.stats, store, paths, self._running, file, step)
            self.cache.observe(self._samples.around)
            self._reporter.add(self._samples)
        return self._samples

    def _choose_by_name(self, model: nn.Module, everyone: Agreement) -> None:
        """Keep what ``only`` and ``except`` exclude from now on; refuse patterns that match no module of any rank."""
        from ds_tba.remat.where import ChosenModules

        self._chosen = ChosenModules(self._running, self.config.patterns)
        unmatched = self._chosen.watch(model)
        of_ranks = everyone.all_gather(unmatched)
        problems = [text for pattern, text in unmatched.items() if all(pattern in one for one in of_ranks)]
        if problems:
            raise ConfigError(f'"{BLOCK}" names what the model lacks: {"; ".join(problems)}.')
        self.cache.gate.excluded_by = self._chosen.reason

    def _open_sites(self) -> Sites:
        from ds_tba.remat.sites import Sites
        from ds_tba.remat.store import RematStore

        sites = Sites(self.cache, self._accelerator, self.config.rematerialize_exclude, self._running)
        self.cache.rematerialize(RematStore(self.cache, sites))
        self._reporter.add(sites)
        return sites

    def _open_controller(
        self, model: nn.Module, everyone: Agreement, stage: Agreement, planner: Planner | None
    ) -> Controller:
        from ds_tba.plan.agreement import Planning
        from ds_tba.plan.controller import Controller
        from ds_tba.plan.search import adaptive
        from ds_tba.recompute import Blocks, find_blocks

        config, plans, chosen = self.config, self.config.placement == "adaptive", self._chosen
        machine = self._open_machine(everyone)
        found = find_blocks(model, config.blocks) if config.recompute or config.blocks else {}
        if chosen is not None:  # recomputing a block would free what these keep in it
            found = {path: one for path, one in found.items() if not chosen.excludes_part_of(one)}
        patterns = config.recompute if isinstance(config.recompute, list) else []
        named = matching([*found], patterns, "recompute")
        blocks = Blocks(found if plans and config.recompute else {}, self.cache, named)
        planning = Planning(planner or adaptive, stage)
        return Controller(self.cache, machine, planning, self._running, blocks, self._trace_file)

    def _open_machine(self, everyone: Agreement) -> Machine:
        from ds_tba.plan.machine import COPY_BYTES, Machine, measure_copies
        from ds_tba.storage.host import host_memory

        config, tiers, accelerator, cache = self.config, self._tiers, self._accelerator, self.cache
        staged = host_memory(min(COPY_BYTES, slots_bytes_of(config)), accelerator)
        copies = measure_copies(accelerator, staged)
        memory = MemoryMeter(accelerator, lambda: cache.stats.resident.now)  # without what is gone by now
        # The memory of a CPU is shared by all ranks of the machine.
        sharers = self._ranks_on_node if accelerator.is_synchronous else 1
        is_shared = any(everyone.all_gather(tiers.shares_drive_with_zero))  # one share of the bytes for all ranks
        return Machine(config, tiers, copies, memory, accelerator, sharers, is_shared)

    # ---- called in training -------------------------------------------------------------------------------------

    def saving(self, inputs: object = ()) -> AbstractContextManager[None]:
        """Return the context of a forward whose saved tensors are offloaded.

        Args:
            inputs: arguments of the forward: nothing is rematerialized from tensors that their owner may refill.

        Raises:
            IncompatibleError: the stream is being captured into a graph, or PyTorch clones what is saved.
            StateError: an exception came in the middle of our bookkeeping.
        """
        if torch.is_grad_enabled():  # else a reference, say, for the loss of the forward before
            OPEN_HOOKS.close()
        self.cache.refuse_broken()
        if self._accelerator.is_capturing():
            raise IncompatibleError(
                "forward is being captured into a graph (torch.cuda.graph), whose replays would neither write nor read "
                f'activations: capture without "{BLOCK}", or run forward outside of the capture.'
            )
        if self.cache.is_forked or not torch.is_grad_enabled():  # nothing is saved, and a reference never trains
            return nullcontext()
        if torch.autograd.graph._allow_mutation_on_saved_tensors_enabled:
            raise IncompatibleError(
                "torch.autograd.graph.allow_mutation_on_saved_tensors clones what forward saved when it is changed in "
                f'place, which is not there any more: take forward out of that context, or remove "{BLOCK}".'
            )
        self._reporter.begin_forward()
        if self._sites is not None:
            mark_inputs(inputs)
        saving = self._saver.saving()
        return saving if self._samples is None else self._samples.forward(saving)

    def keep_saving(self) -> None:
        """Offload what this thread saves until :meth:`stop_saving`, too, with ``until_backward``; after a forward."""
        is_wanted = self.config.until_backward and torch.is_grad_enabled() and not self.is_closed
        if not is_wanted or self.cache.is_forked or innermost_hooks() is not None:  # those of others stay in place
            return
        hooks = self._saver.after_forward()
        if hooks is not None:
            self._kept[threading.get_ident()] = hooks
            OPEN_HOOKS.open(hooks)

    def stop_saving(self) -> None:
        """End that: backward begins."""
        hooks = self._kept.get(threading.get_ident())
        if hooks is not None:
            hooks.end()

    def interleaving(self) -> AbstractContextManager[None]:
        """Return the context of a whole step in which forwards and backwards of several micro-batches alternate.

        Raises:
            StateError: an exception came in the middle of our bookkeeping.
        """
        self.cache.refuse_broken()
        if self.cache.is_forked:
            return nullcontext()
        return self._saver.interleaving()

    def note_micro_step(self) -> None:
        """Record that backward is over.

        Raises:
            StateError: an exception came in the middle of our bookkeeping: its gradients may be wrong.
        """
        self.cache.refuse_broken()
        if not self.cache.is_forked:
            self._saver.end_micro_step()
            if self._samples is not None:
                self._samples.end_backward()

    def note_step(self) -> None:
        """Record that an optimizer step is done; reports every ``report.every_steps`` of them."""
        if self.cache.is_forked:
            return
        for part in (self._sites, self.controller, self._samples):
            if part is not None:
                part.end_step()
        self._reporter.end_step(0 if self.controller is None else self.controller.plans)

    def give_back(self) -> None:
        """Give lanes, staging and disk space back until the next save, if nothing is in their care."""
        if not (self.cache.is_forked or self.is_closed or self.cache.live_records):
            self._tiers.give_back()

    # ---- reports ------------------------------------------------------------------------------------------------

    def report(self) -> OffloadReport:
        """Return the counters of all parts as they are now."""
        return self._reporter.report()

    def explain(self, error: BaseException | None = None) -> str:
        """Return what fills the device: who holds saved bytes, what else is in use, and which key or call would help.

        Within a forward of the steps 1, 2, 4, 8, ... it tells of now; else of the end of the last such forward. Of an
        error by which memory ran out it tells where that was.
        """
        from ds_tba.explain.out_of_memory import explained

        where = f"rank {self._reporter.rank}, step {self._reporter.steps + 1}"
        return explained(where, self.config, self.cache.stats, self._accelerator, self._sampling(), self._meter, error)

    def note_failure(self, error: BaseException | None) -> None:
        """Log :meth:`explain` where ``error`` says that memory ran out. Never raises; once for each error."""
        try:
            if error is None or getattr(error, _EXPLAINED, False) or not is_out_of_memory(error):
                return
            # On the error itself: a reference to it would hold its frames, and all tensors in them, as long as we live.
            setattr(error, _EXPLAINED, True)
            logger.error("memory ran out; %s", self.explain(error))
            self._reporter.refresh(now=True)
        except Exception:  # nothing may hide the user's error
            logger.exception("memory ran out, and what fills it cannot be told")

    def start_line(self) -> str:
        """Return the start-up line of the log: where activations go, and by which rule."""
        return start_line(self.config, self._tiers) + ENGINES.beside(self)

    # ---- closing ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the lanes, free all memory and files, write the last report. Idempotent.

        Blocks until the I/O under way is done, so a finalizer must call :meth:`close_soon` instead, and so should a
        signal handler: it may have interrupted our own code, which holds a lock that closing needs and cannot go on
        before the handler returns. This call then gives up after its limit of time.
        """
        self.close_soon()
        # In a thread of ours a user's finalizer may call this, and closing waits for that thread.
        if self.cache.is_forked or threading.current_thread().name.startswith(THREAD_PREFIX):
            return
        self._closing.join(CLOSE_LIMIT_S)
        if self._closing.is_alive():
            rank = self._reporter.rank
            logger.error("rank %d: not closed after %.0f s; the rest is left to process exit", rank, CLOSE_LIMIT_S)
            self._reporter.refresh(now=True)

    def close_soon(self) -> None:
        """Close in another thread: a finalizer may run in a lane, or while this very thread holds one of our locks."""
        if self.cache.is_forked:
            return
        self.is_closed = True
        for hooks in (*self._kept.values(),):  # or threads whose hooks are open after a forward would save on
            hooks.end()
        self._end_is_wanted.put(None)

    def _close(self) -> None:  # in a thread of its own
        self._end_is_wanted.get()
        with ExitStack() as last:  # each, whatever becomes of those before: a device that has failed raises everywhere
            last.callback(atexit.unregister, self.close)
            last.callback(ENGINES.open.remove, self)
            last.callback(self._reporter.end)
            # The interpreter leaves here the error of a backward that no engine has called, before it exits.
            last.callback(self.note_failure, getattr(sys, "last_value", None))
            last.callback(self._tiers.close)
            last.callback(self.cache.settle)
            if self.controller is not None:
                last.callback(self.controller.close)
            last.callback(self._undo.close)
