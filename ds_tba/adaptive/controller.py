"""Records a few steps, makes a plan, and has the plan followed and reviewed.

[Note: The course] The first step runs with everything that is eligible moved, which is the safe thing to do while
nothing is known. Where the config lets blocks be recomputed, the next one or two prove which can be (``proving.py``).
Two micro-steps of the next ones are recorded (``recording.py``). From then on a plan is in force. Its steps show the
cost of recomputing and moving (``calibration.py``), and ``monitor.py`` says when to review the plan. Every decision
falls at the end of an optimizer step, which every rank makes (a forward may be one rank's alone). The ranks decide
together: the highest ``Action`` of any rank is done by all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_tba.adaptive.calibration import Calibration, Fit, Observation
from ds_tba.adaptive.consensus import Machine, Planning, calibrated
from ds_tba.adaptive.monitor import Action, Counts, Monitor, Step
from ds_tba.adaptive.policy import ByPlan, PlanInForce
from ds_tba.adaptive.proving import Proving
from ds_tba.adaptive.ranks import Agreement
from ds_tba.adaptive.recorder import Recorder
from ds_tba.adaptive.recording import MAX_RECORDED_STEPS, RecordedTrace, Recording
from ds_tba.autograd.blocks import Block, Blocks
from ds_tba.autograd.cache import TensorCache
from ds_tba.autograd.residency import MemoryMeter
from ds_tba.config import Placement
from ds_tba.device.accelerator import Clock
from ds_tba.errors import IncompatibleError
from ds_tba.planner.trace import Layout, Trace
from ds_tba.storage.base import Always, Policy, Store

logger = logging.getLogger(__name__)

REVIEW_STEPS = 8  # from one talk of the ranks to the next, while a plan is followed
WARM_STEPS = 1  # not recorded: allocators, compilers and caches warm up


class Controller:
    """The policy of each micro-step.

    Args:
        cache: does the moving.
        tiers: the store of each tier there is.
        safe: the policy while there is no plan.
        planning: makes the plans; None records a trace, and nothing more.
        machine: its rates, measured already.
        agreement: the ranks.
        clock: of the training device.
        counts: of moving, so far.
        on_trace: called with each trace.
        memory: measures the device memory of everything but saved tensors.
        budget_bytes: bound of the saved tensors in device memory, as the user set it.

    Attributes:
        in_force: the plan that is followed.
        plans: how many there were.
        recomputed_bytes: of all storages that recomputation has made again so far.
        step_peak_bytes: most bytes that saved tensors held at once in the last whole step.
    """

    def __init__(
        self,
        cache: TensorCache,
        tiers: Mapping[Placement, Store[Any]],
        safe: Policy,
        planning: Planning | None,
        machine: Machine,
        agreement: Agreement,
        clock: Clock,
        counts: Callable[[], Counts],
        on_trace: Callable[[Trace], None],
        memory: MemoryMeter,
        budget_bytes: int | None = None,
    ) -> None:
        self._cache = cache
        self._tiers = dict(tiers)
        self._safe = safe
        self._planning = planning
        self._machine = machine
        self._memory = memory
        self._budget_bytes = budget_bytes
        self._agreement = agreement
        self._clock = clock
        self._counts = counts
        self._on_trace = on_trace
        self._paths: dict[int, str] = {}  # of each module, by id
        self._calibration = Calibration()
        self._recording: Recording | None = None
        self._recorded: RecordedTrace | None = None
        self._is_other_trace = False  # than that of the plan in force
        self._blocks: Blocks | None = None
        self._proving: Proving | None = None
        self._policy = safe
        self._steps = 0
        self._step: Step | None = None
        self._before: Step | None = None  # the step before that
        self._reviewed: Step | None = None  # of these, for the decision
        self._is_new_step = True
        self._problem = ""  # the last that was said
        self._wanted = Action.GO_ON  # since the ranks talked last
        self._is_over = False
        self.monitor = Monitor()
        self.in_force: PlanInForce | None = None
        self.plans = 0
        self.recomputed_bytes = 0
        self.step_peak_bytes = 0

    def watch(self, model: nn.Module, blocks: Blocks) -> None:
        """The model whose forward comes, and its blocks, which tell this controller of their passes."""
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._blocks = blocks
        # Under ZeRO-3 a recomputation gathers parameters, which takes all ranks.
        blocks.is_strict = self._agreement.size > 1 and any(hasattr(one, "ds_id") for one in model.parameters())
        if blocks.is_watching:
            self._proving = Proving(blocks, self._agreement)
        blocks.install()
        if self._budget_bytes is not None:
            self._cache.limit_resident(self._budget_bytes, "activation_budget_bytes")

    def close(self) -> None:
        """Remove the hooks from the model, and decide nothing more."""
        self._is_over = True
        self._stop_recording()
        if self._blocks is not None:
            self._blocks.uninstall()

    # ---- a micro-step -------------------------------------------------------------------------------------------

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A forward: of a micro-step of its own, or one more before the backward of the last one."""
        if not torch.is_grad_enabled():
            yield
            return
        self._cache.end_recomputations()  # of a backward that raised, or of another micro-batch
        continues = not self._is_new_step and self._cache.expects_forward
        if not continues:
            self._begin()
        recorder = self._recorder
        around = None if recorder is None else recorder.around
        lead = self._policy.prefetch_distance if isinstance(self._policy, ByPlan) else ()
        listening = nullcontext() if self._blocks is None else self._blocks.listening()
        is_recorded = recorder is not None
        with self._cache.saving(self._policy, around, lead, continues=continues, is_recorded=is_recorded), listening:
            yield

    @contextmanager
    def interleaving(self) -> Iterator[None]:
        """The forwards and backwards of one whole step, which alternate: one micro-step to a plan."""
        self._begin()
        try:
            with self._cache.interleaving():
                yield
        except BaseException:  # the step is not over, and shows nothing
            self._is_new_step = True
            self._cache.take_moves()
            if self._recording is not None:
                self._recording.abandon()
            raise
        finally:
            self.end_micro_step()

    def end_micro_step(self) -> None:
        """Backward is over."""
        if self._recording is not None:
            self._recording.end_micro_step()
        self._cache.end_recomputations()
        self._cache.end_micro_step()

    def end_step(self) -> None:
        """The optimizer has stepped. A collective in some steps, the same ones on all ranks."""
        has_run, self._is_new_step = not self._is_new_step, True
        self._reviewed = None
        self._end_policy()
        self._policy = self._safe
        step = self._step
        if has_run and step is not None:
            step.end(self._clock.mark(), self._counts(), self._cache.take_moves())
            self._machine.note_copies(step.counts.offloaded_bytes, step.counts.moving_s - step.counts.stall_s)
            if self._recording is not None:
                self._recording.end_step(step.ended, step.counts.offloaded_bytes, has_compiled=step.has_compiled)
            if self.in_force is None:
                self._memory.sample()
        if not self._is_over:
            if self._proving is not None:
                self._proving.end_step()
            self._steps += 1
            self._wanted = max(self._wanted, self._wanted_action() if has_run else Action.GO_ON)
            if self._is_review:
                wanted, self._wanted = self._wanted, Action.GO_ON
                self._do(Action(self._agreement.all_reduce_max(wanted)))

    @property
    def _is_review(self) -> bool:
        """Whether the ranks talk at the end of this step: the same on all of them.

        While a plan is followed they do so seldom, since each time waits for the slowest rank.
        """
        is_steady = self.in_force is not None and self._recording is None
        return not is_steady or self._agreement.size == 1 or self._steps % REVIEW_STEPS == 0

    def _begin(self) -> None:
        self._end_policy()
        if self._is_new_step:
            self._is_new_step = False
            if self.in_force is None:
                self._memory.sample()
            stats = self._cache.stats
            self.step_peak_bytes = stats.resident.lap()
            self._before = self._step
            plan = 0 if self._is_proving or self._recording is not None else self.plans
            self._step = Step(self._clock.mark(), plan, self._counts())
        if self._step is not None:
            self._step.micro_steps += 1
        self._policy = self._safe
        if self._recording is not None and self._recording.begin() is not None:
            self._policy = self._while_recording()
        elif self.in_force is not None and not self._is_proving:
            self._policy = ByPlan(self.in_force, self._tiers, self._may_wait)

    @property
    def _is_proving(self) -> bool:
        """Whether blocks are proven in this step: no plan foresees the saves and the time of such a step."""
        return self._proving is not None and self._proving.is_running

    def _while_recording(self) -> Policy:
        """The policy of a recorded micro-step.

        With everything moved, the recording shows when forward is done with each storage; a slow drive has no time for
        that.
        """
        if self.in_force is None or any(self.in_force.plan.recomputed_blocks):
            return self._safe  # the kept storages may not fit where recomputed blocks are saved, too
        sizes = dict(self.in_force.bytes_by_placement)
        kept_bytes = sizes.pop(Placement.KEEP, 0)
        return ByPlan(self.in_force, self._tiers, self._may_wait) if kept_bytes > sum(sizes.values()) else self._safe

    def _end_policy(self) -> None:
        """Collect what the last micro-step has shown."""
        if self._step is not None and isinstance(self._policy, ByPlan):
            self._policy.end()
            self._step.deviation.add(self._policy.deviation)
        if self._recording is not None:
            self._recording.settle()

    def _may_wait(self) -> bool:
        """Whether this step has time left to wait for room in staging, by the host's clock.

        The host of an asynchronous device may wait for as long as it would be ahead otherwise.
        """
        step, plan, moving_s = self._step, self.in_force, self._cache.stats.moving_s
        return step is not None and plan is not None and moving_s - step.before.moving_s <= plan.patience_s

    # ---- passes through blocks ---------------------------------------------------------------------------------------

    def enter(self, block: Block, inputs: Sequence[torch.Tensor]) -> int | None:
        """A pass through a block begins; the bytes that it will not save, if it is to be recomputed."""
        recorder = self._recorder
        if recorder is not None:
            is_recomputable = self._blocks is not None and self._blocks.leaves_no_trace(block)
            recorder.enter(block.path, inputs, is_recomputable=is_recomputable)
        if not isinstance(self._policy, ByPlan) or self._blocks is None:
            return None
        deviation = self._policy.deviation
        unplanned = deviation.unplanned
        saved_bytes = self._policy.enter(block.path)
        if saved_bytes is not None and not self._blocks.is_proven(block):
            deviation.unplanned += 1  # an obstacle that came up since
            saved_bytes = None
        if deviation.unplanned > unplanned and self._blocks.is_strict and self._policy.recomputes:
            raise IncompatibleError(
                f"the block {block.path!r} does not do here what the plan of all ranks says "
                f"({self._blocks.obstacle(block) or 'it comes at another place'}), and the others would wait for this "
                'rank in backward: set "recompute": false.'
            )
        return saved_bytes

    def leave(self, block: Block) -> None:
        """The pass is over."""
        recorder = self._recorder
        if recorder is not None:
            recorder.leave()
        if isinstance(self._policy, ByPlan):
            self._policy.leave()

    def recompute(self, token: int) -> None:
        """Backward begins to run a pass again, which saves so many bytes."""
        self.recomputed_bytes += token
        self._cache.has_room(token)  # at once: what it saves then finds the room

    def recomputed(self, token: int) -> None:
        """The pass has run."""

    # ---- a step -------------------------------------------------------------------------------------------------

    @property
    def is_recording(self) -> bool:
        """Whether micro-steps of this step are recorded."""
        return self._recording is not None

    @property
    def _recorder(self) -> Recorder | None:
        """The recorder of the running micro-step, if that is recorded."""
        return None if self._recording is None else self._recording.running

    def _wanted_action(self) -> Action:
        """The action that this rank asks for. Raises nothing: the other ranks wait for the answer."""
        try:
            return self._decide()
        except Exception as error:  # noqa: BLE001 - see above
            problem = f"{type(error).__name__}: {error}"
            if problem != self._problem:
                logger.warning("steps say nothing about the plan: %s", problem)
            self._problem = problem
            return Action.GO_ON

    def _decide(self) -> Action:
        if self._steps < WARM_STEPS or self._step is None or self._is_proving:
            return Action.GO_ON
        if self._recording is not None:
            return self._decide_recording(self._recording)
        if self.in_force is None:
            return Action.RECORD if self.monitor.may_record(self._steps) else Action.GO_ON
        resources = self._machine.resources()
        # A device is behind the host: marks of the step before the last can be read without waiting for the device.
        step = self._step if resources.is_synchronous else self._before
        if step is None or step.plan != self.plans or step.ended is None or step.has_compiled:
            return Action.GO_ON
        self._reviewed = step
        seen = step.metrics(self.in_force, self._clock, resources.rates)
        if self._recorded is not None and not self._is_other_trace:
            shown = step.observation(self._recorded.trace, self.in_force, self._clock)
            if shown is not None:
                self._calibration.add(shown)
        return self.monitor.decide(self._steps, seen)

    def _decide_recording(self, recording: Recording) -> Action:
        if recording.is_enough:
            return Action.PLAN
        if recording.steps < MAX_RECORDED_STEPS:
            return Action.RECORD
        if recording.has_any:
            return Action.PLAN
        logger.warning(
            "no plan yet: %d steps compiled something, or had no complete forward and backward. Activations are "
            "offloaded without a plan, and steps are recorded again later",
            recording.steps,
        )
        return Action.REST

    def _do(self, action: Action) -> None:
        if action is Action.RECORD:
            if self._recording is None and (self._proving is None or not self._proving.begin()):
                self._record()
        elif action is Action.REST:
            self.monitor.reviewed(self._steps)
            self._rest()
        elif action is Action.PLAN:
            recording, self._recording = self._recording, None
            if recording is not None:
                self._take(recording)
            elif self._agreement.all_reduce_max(int(self._machine.should_measure())):  # together: they share drives
                self._measure()
            self._make_plan()

    def _rest(self) -> None:
        """Go on without another plan, and try again later."""
        self._recording = None
        if self._planning is not None and self.in_force is None:
            self._safe = Always(list(self._tiers.values()), wait=False, rematerialize=True)

    def _record(self) -> None:
        self._cache.transfers.clock = self._clock
        is_synchronous, look = self._machine.is_synchronous, self._memory.sample
        make = partial(Recorder, self._cache, self._clock, self._paths, is_synchronous=is_synchronous, look=look)
        self._recording = Recording(self._clock, make)

    def _stop_recording(self) -> None:
        self._recording = None
        self._cache.transfers.clock = None

    def _take(self, recording: Recording) -> None:
        """Go on from the recording; where it is broken, from the one before, if there is one."""
        micro_steps = 1 if self._step is None else max(1, self._step.micro_steps)
        if not recording.has_any:
            return
        try:
            recorded = recording.recorded(self._machine.resources(), micro_steps).at_least(self._recorded)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this rank's part of the plan
            logger.warning("discarding an inconsistent trace: %s", error)
            return
        self._recorded, self._is_other_trace = recorded, True
        self._calibration.begin(recorded.observation, recorded.trace.recompute_factor)
        try:
            self._on_trace(calibrated(recorded.trace, self._fit()))
        except Exception as error:  # noqa: BLE001 - as above; the plan does not need the file
            logger.warning("the trace is not written: %s: %s", type(error).__name__, error)

    def _measure(self) -> None:
        """Measure drives that are not used: they may have become faster."""
        try:
            self._machine.measure()
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this rank's part of the plan
            logger.warning("%s; what was measured before counts", error)

    def _give_up(self) -> None:
        """Make no more plans; the last one stays in force."""
        self._is_over = True
        self._stop_recording()
        if self._planning is not None:
            self._safe = Always(list(self._tiers.values()), wait=False, rematerialize=True)

    # ---- a plan -------------------------------------------------------------------------------------------------

    def _fit(self) -> Fit:
        return self._calibration.fit(
            self._machine.resources().compute_s_per_byte, self._machine.compute_error_s_per_byte
        )

    def _make_plan(self) -> None:
        if self._planning is None:
            self._give_up()
            return
        trace, layout, fit, non_recomputable = None, Layout(()), None, frozenset[str]()
        try:
            self._grow()
            non_recomputable = frozenset() if self._blocks is None else self._blocks.unproven
            if self._recorded is not None:
                layout, fit, trace = self._recorded.layout, self._fit(), self._recorded.trace
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer: no trace is one
            logger.warning("this rank has no part in a plan now: %s: %s", type(error).__name__, error)
        current = None if self._is_other_trace else self.in_force
        found = self._planning.make(trace, layout, fit, non_recomputable, current)
        if isinstance(found, PlanInForce):
            self._is_other_trace = False
            self.monitor.reviewed(self._steps)
            self._follow(found)
        elif found.is_final:
            self._give_up()
        else:
            self.monitor.rest(self._steps)
            self._rest()

    def _follow(self, found: PlanInForce) -> None:
        is_new = not found.is_same_as(self.in_force)  # on every rank alike
        self.in_force = found
        # A room that the user has not set was told with the plan.
        name = "activation_budget_bytes" if found.held_bytes == self._budget_bytes else ""
        self._cache.limit_resident(found.held_bytes, name)
        if not any(place is Placement.NVME for place, _ in found.bytes_by_placement) and Placement.NVME in self._tiers:
            self._tiers[Placement.NVME].trim()
        self.monitor.planned(found.plan.prediction.step_s, self._machine.resources().rates, is_new=is_new)
        self._calibration.age()
        if is_new or self._calibration.is_beginning:
            self._calibration.begin_plan()
        if not is_new:
            return
        self._cache.forget_order()
        self.plans += 1
        if self._agreement.rank == 0:
            logger.info("plan %d%s: %s", self.plans, self._agreement.where, found.describe(self.monitor.reason))

    def _grow(self) -> None:
        """Go on from a trace of larger storages, where the reviewed step had such."""
        followed, step = self.in_force, self._reviewed
        if followed is None or step is None or not step.deviation.grown or self._is_other_trace:
            return
        trace = followed.trace.grown(step.deviation.grown)
        self._recorded = RecordedTrace(trace, followed.layout, Observation(trace.step_s, 0.0, 0))
        self._calibration.begin(self._recorded.observation, trace.recompute_factor)
        self._is_other_trace = True

    def unproven_blocks(self) -> list[dict[str, str]]:
        """For the report: blocks that are not recomputed, with the reason."""
        return [] if self._proving is None else self._proving.unproven()

    def summary(self) -> dict[str, Any] | None:
        """The plan for the report; None without one."""
        if self.in_force is None:
            return None
        monitor = self.monitor
        return {"reason": monitor.reason, "measured_step_s": monitor.measured_step_s, **self.in_force.summary()}
