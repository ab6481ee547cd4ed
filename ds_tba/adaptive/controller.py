"""Records a few steps, makes a plan, has it followed, and makes another where steps ask for it.

[Note: The course] The first step runs with everything that is eligible moved, which is the safe thing to do while
nothing is known. Two micro-steps of the next ones are recorded (``recorder.py``). From then on a plan is in force, and
its steps are measured (``feedback.py``). Every decision falls at the end of an optimizer step, which every rank makes
(a forward may be one rank's alone). The ranks decide together: the highest ``Action`` of any rank is done by all. While
a plan is followed they talk in every eighth step only, since each time waits for the slowest rank.

It cannot see what the next micro-step will save: the policy of a micro-step meets what comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_tba.adaptive.agreement import Agreement, Planning, Wish
from ds_tba.adaptive.feedback import Action, Feedback, Step
from ds_tba.adaptive.policy import ByPlan, PlanInForce
from ds_tba.adaptive.rates import Rates
from ds_tba.adaptive.recorder import MAX_RECORDED_STEPS, Recorder, Recording
from ds_tba.autograd.blocks import Block, Blocks
from ds_tba.autograd.cache import TensorCache
from ds_tba.autograd.residency import MemoryMeter
from ds_tba.config import Placement
from ds_tba.device.accelerator import Clock
from ds_tba.errors import IncompatibleError
from ds_tba.planner.trace import Scopes, Trace
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
        machine: Rates,
        agreement: Agreement,
        clock: Clock,
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
        self._on_trace = on_trace
        self._paths: dict[int, str] = {}  # of each module, by id
        self._recording: Recording | None = None
        self._recorded: tuple[Trace, Scopes] | None = None
        self._growth = 0.0  # the fraction by which storages are larger than those of the plan
        self._blocks: Blocks | None = None
        self._is_strict = False  # a rank that deviates from a plan must not leave others waiting in backward
        self._policy = safe
        self._steps = 0
        self._step: Step | None = None
        self._before: Step | None = None  # the step before that
        self._is_new_step = True
        self._problem = ""  # the last that was said
        self._wanted = Action.GO_ON  # since the ranks talked last
        self._is_over = False
        self.feedback = Feedback()
        self.in_force: PlanInForce | None = None
        self.plans = 0
        self._reason = ""  # for the plan in force; what was asked for since may have changed nothing
        self.recomputed_bytes = 0
        self.step_peak_bytes = 0

    def watch(self, model: nn.Module, blocks: Blocks) -> None:
        """The model whose forward comes, and its blocks, which tell this controller of their passes."""
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._blocks = blocks
        # Under ZeRO-3 a recomputation gathers parameters, which takes all ranks.
        self._is_strict = self._agreement.size > 1 and any(hasattr(one, "ds_id") for one in model.parameters())
        if self._budget_bytes is not None:
            self._cache.limit_resident(self._budget_bytes, "activation_budget_bytes")

    def close(self) -> None:
        """Decide nothing more."""
        self._is_over, self._recording = True, None

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
        self._end_policy()
        self._policy = self._safe
        if has_run and self._step is not None:
            self._step.end(self._clock.mark())
            if self._recording is not None:
                self._recording.end_step(self._step.ended, has_compiled=self._step.has_compiled)
            if self.in_force is None:
                self._memory.sample()
        if self._is_over:
            return
        self._steps += 1
        self._wanted = max(self._wanted, self._wanted_action() if has_run else Action.GO_ON)
        is_steady = self.in_force is not None and self._recording is None
        if not is_steady or self._agreement.size == 1 or self._steps % REVIEW_STEPS == 0:  # alike on all ranks
            wanted, self._wanted = self._wanted, Action.GO_ON
            self._do(Action(self._agreement.all_reduce_max(wanted)))

    def _begin(self) -> None:
        self._end_policy()
        if self._is_new_step:
            self._is_new_step = False
            if self.in_force is None:
                self._memory.sample()
            stats = self._cache.stats
            self.step_peak_bytes = stats.resident.lap()
            number = 0 if self._recording is not None else self.plans
            self._before, self._step = self._step, Step(self._clock.mark(), number, stats.moving_s)
        if self._step is not None:
            self._step.micro_steps += 1
        self._policy = self._safe
        is_recorded = self._recording is not None and self._recording.begin() is not None
        plan = self.in_force
        # What recomputed blocks save in a recording would be kept, and may not fit: then everything is moved.
        if plan is not None and not (is_recorded and any(plan.plan.recomputed_blocks)):
            self._policy = ByPlan(plan, self._tiers, self._may_wait)

    def _end_policy(self) -> None:
        """Collect what the last micro-step has shown."""
        if self._step is not None and isinstance(self._policy, ByPlan):
            self._policy.end()
            self._step.mismatch.add(self._policy.mismatch)
        if self._recording is not None:
            self._recording.settle()

    def _may_wait(self) -> bool:
        """Whether this step has time left to wait for room in staging, by the host's clock.

        The host of an asynchronous device may wait for as long as it would be ahead otherwise.
        """
        step, plan = self._step, self.in_force
        if step is None or plan is None:
            return False
        return self._cache.stats.moving_s - step.moving_before_s <= plan.patience_s

    # ---- passes through blocks ----------------------------------------------------------------------------------

    def enter(self, block: Block, inputs: Sequence[torch.Tensor]) -> int | None:
        """A pass through a block begins; the bytes that it will not save, if it is to be recomputed."""
        recorder = self._recorder
        if recorder is not None:
            is_recomputable = self._blocks is not None and self._blocks.is_recomputable(block)
            recorder.enter(block.path, inputs, is_recomputable=is_recomputable)
        if not isinstance(self._policy, ByPlan) or self._blocks is None:
            return None
        mismatch = self._policy.mismatch
        unknown_saves = mismatch.unknown_saves
        saved_bytes = self._policy.enter(block.path)
        if saved_bytes is not None and not self._blocks.is_recomputable(block):
            mismatch.unknown_saves += 1  # an obstacle that came up since
            saved_bytes = None
        if mismatch.unknown_saves > unknown_saves and self._is_strict and self._policy.recomputes:
            why = self._blocks.left_out().get(block.path, "it comes at another place")
            raise IncompatibleError(
                f"the block {block.path!r} does not do here what the plan of all ranks says ({why}), and the others "
                'would wait for this rank in backward: set "recompute": false.'
            )
        return saved_bytes

    def leave(self, block: Block) -> None:
        """The pass is over."""
        recorder = self._recorder
        if recorder is not None and self._blocks is not None:
            self._blocks.note_saves(block, has_saved=recorder.leave())
        if isinstance(self._policy, ByPlan):
            self._policy.leave()

    def recompute(self, token: int) -> None:
        """Backward begins to run a pass again, which saves so many bytes."""
        self.recomputed_bytes += token
        self._cache.wait_for_room(token)  # at once: what it saves then finds the room

    # ---- decisions ----------------------------------------------------------------------------------------------

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
        if self._steps < WARM_STEPS:
            return Action.GO_ON
        if self._recording is not None:
            return self._decide_recording(self._recording)
        if self.in_force is None:
            return Action.RECORD if self.feedback.may_record(self._steps) else Action.GO_ON
        # A device is behind the host: marks of the step before the last can be read without waiting for the device.
        step = self._step if self._machine.is_synchronous else self._before
        if step is None or step.plan != self.plans or step.ended is None or step.has_compiled:
            return Action.GO_ON
        self._growth = step.mismatch.growth or self._growth
        seen = step.metrics(self.in_force, self._clock, self._machine.resources().rates)
        action = self.feedback.decide(self._steps, seen)
        return Action.MEASURE if action is Action.PLAN and self._machine.should_measure() else action

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
            if self._recording is None:
                self._record()
        elif action is Action.REST:
            self._rest()
        elif action in (Action.PLAN, Action.MEASURE):
            recording, self._recording = self._recording, None
            if recording is not None:
                self._take(recording)
            elif action is Action.MEASURE:  # all together: they share drives
                self._measure()
            self._make_plan()

    def _rest(self) -> None:
        """Go on without another plan, and try again later."""
        self.feedback.rest(self._steps)
        self._recording = None
        if self._planning is not None and self.in_force is None:
            self._safe = Always(list(self._tiers.values()), wait=False, rematerialize=True)

    def _record(self) -> None:
        is_synchronous, look = self._machine.is_synchronous, self._memory.sample
        make = partial(Recorder, self._cache, self._clock, self._paths, is_synchronous=is_synchronous, look=look)
        self._recording = Recording(self._clock, make)

    def _take(self, recording: Recording) -> None:
        """Go on from the recording; where it is broken, from the one before, if there is one."""
        micro_steps = 1 if self._step is None else max(1, self._step.micro_steps)
        if not recording.has_any:
            return
        try:
            trace, scopes = recording.recorded(self._machine.resources(), micro_steps)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this rank's part of the plan
            logger.warning("discarding an inconsistent trace: %s", error)
            return
        self._recorded, self._growth = (trace, scopes), 0.0
        plan = self.in_force
        # Everything is moved, too, in the recording under a plan that recomputes: see _begin.
        moved_share = 1.0 if plan is None or any(plan.plan.recomputed_blocks) else plan.moved_share
        moved_bytes = trace.micro_steps * moved_share * trace.movable_bytes
        self.feedback.recorded(trace.step_s, moved_bytes * trace.resources.compute_s_per_byte)
        try:
            self._on_trace(trace)
        except Exception as error:  # noqa: BLE001 - as above; the plan does not need the file
            logger.warning("the trace is not written: %s: %s", type(error).__name__, error)

    def _measure(self) -> None:
        """Measure drives that are not used: they may have become faster."""
        try:
            self._machine.measure()
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this rank's part of the plan
            logger.warning("%s; what was measured before counts", error)

    # ---- a plan -------------------------------------------------------------------------------------------------

    def _make_plan(self) -> None:
        if self._planning is None:
            self._is_over = True
            return
        found = self._planning.make(self._wish())
        if isinstance(found, PlanInForce):
            self._follow(found)
            return
        self._rest()
        self._is_over = found.is_final  # the last one stays in force

    def _wish(self) -> Wish | None:
        """This rank's part in the next plan: of a trace of larger storages, where steps under the last one had such."""
        try:
            followed = self.in_force
            if followed is not None and self._growth:
                larger, self._growth = 1 + self._growth, 0.0
                self._recorded = followed.trace.scaled(larger, larger), followed.scopes
                self.feedback.recorded(self.feedback.kept_s * larger, 0.0)
            if self._recorded is None:
                return None
            left_out = frozenset[str]()
            if self._blocks is not None:
                left_out = frozenset(self._blocks.left_out())
                if self._agreement.rank == 0:
                    self._blocks.warn_left_out()
            share = 1.0 if followed is None else followed.limits.movable_share
            return Wish(*self._recorded, self.feedback.kept_s, share, self.feedback.movable_share, left_out)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer: no wish is one
            logger.warning("this rank has no part in a plan now: %s: %s", type(error).__name__, error)
            return None

    def _follow(self, found: PlanInForce) -> None:
        is_new = not found.is_same_as(self.in_force)  # on every rank alike
        self.in_force = found
        # A room that the user has not set was told with the plan.
        name = "activation_budget_bytes" if found.held_bytes == self._budget_bytes else ""
        self._cache.limit_resident(found.held_bytes, name)
        if not any(place is Placement.NVME for place, _ in found.bytes_by_placement) and Placement.NVME in self._tiers:
            self._tiers[Placement.NVME].trim()
        self.feedback.planned(found, self._machine.resources().rates, self._steps, is_new=is_new)
        if not is_new:
            return
        self._cache.forget_order()
        self.plans, self._reason = self.plans + 1, self.feedback.reason
        if self._agreement.rank == 0:
            logger.info("plan %d%s: %s", self.plans, self._agreement.where, found.describe(self._reason))

    def blocks_left_out(self) -> list[dict[str, str]]:
        """For the report: blocks that are not recomputed, with the reason."""
        left_out = {} if self._blocks is None else self._blocks.left_out()
        return [{"path": path, "reason": reason} for path, reason in left_out.items()]

    def summary(self) -> dict[str, Any] | None:
        """The plan for the report; None without one."""
        if self.in_force is None:
            return None
        return {
            "reason": self._reason, "measured_step_s": self.feedback.measured_step_s, **self.in_force.summary(),
        }  # fmt: skip
