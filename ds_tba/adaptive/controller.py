"""Measures a few steps, plans, and has the plan followed, as long as it keeps its promises.

[Note: The course] The first step runs with everything that is eligible moved, which is the safe thing to do while
nothing is known; two micro-steps of the next ones are recorded; more recompute every block that may be, where there is
one rank (``survey.py``); from then on a plan is in force, and ``monitor.py`` looks at each step. Every
decision falls at the end of an optimizer step, which every rank makes (a forward may be one rank's alone), and is one
of all ranks: what one of them wants, all do.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ds_tba.adaptive.consensus import Machine, Planning
from ds_tba.adaptive.policy import Always, ByPlan, PlanInForce, Policy
from ds_tba.adaptive.ranks import Agreement
from ds_tba.adaptive.recording import Others
from ds_tba.autograd.blocks import Block, Blocks
from ds_tba.autograd.cache import TensorCache
from ds_tba.device.accelerator import Clock
from ds_tba.errors import IncompatibleError, PathError
from ds_tba.monitor import Look, Monitor, Want
from ds_tba.plan.placement import Placement
from ds_tba.planner.trace import Resources, Trace
from ds_tba.storage.base import Store
from ds_tba.survey import Survey

logger = logging.getLogger(__name__)

WARM_STEPS = 1  # allocators, compilers and caches take their time once
# Of a step: how far ahead of its device a host is taken to be.
HOST_AHEAD_PART = 0.25


@dataclass(slots=True)
class Step:
    """What is known of a step.

    Attributes:
        began, ended: marks of the clock, without what comes between two steps.
        plan: number of the plan in force; 0 for none.
        moving_s, refusals: counted before it began.
        refused: storages that found no room in it.
        unplanned: saves that the plan did not know.
        drift_bytes: by which storages differed in size from those of the plan.
        moves: marks before and after each storage that was moved, or came back.
    """

    began: Any
    plan: int
    moving_s: float
    refusals: int
    micro_steps: int = 0
    refused: int = 0
    unplanned: int = 0
    drift_bytes: int = 0
    moves: list[tuple[Any, Any]] = field(default_factory=list)
    ended: Any = None


class Controller:
    """The policy of each micro-step.

    Args:
        cache: does the moving.
        tiers: the store of each tier there is.
        safe: the policy while there is no plan.
        planning: makes the plans; None records a trace, and nothing more.
        machine: what it can move, measured already.
        others: what others move.
        agreement: the ranks.
        clock: of the training device.
        refusals: how many storages the stores have refused so far.
        on_trace: told of each trace.

    Attributes:
        in_force: the plan that is followed.
        plans: how many there were.
        recomputed_bytes: what was made again in backward so far.
        step_peak_bytes: most bytes that saved tensors held at once in the last whole step.
    """

    def __init__(
        self,
        cache: TensorCache,
        tiers: Mapping[Placement, Store[Any]],
        safe: Policy,
        planning: Planning | None,
        machine: Machine,
        others: Others,
        agreement: Agreement,
        clock: Clock,
        refusals: Callable[[], int],
        on_trace: Callable[[Trace], None],
    ) -> None:
        self._cache = cache
        self._tiers = dict(tiers)
        self._safe = safe
        self._planning = planning
        self._machine = machine
        self._survey = Survey(cache, clock, machine, others, planning, on_trace)
        self._agreement = agreement
        self._clock = clock
        self._refusals = refusals
        self._blocks: Blocks | None = None
        self._policy = safe
        self._steps = 0
        self._step: Step | None = None
        self._before: Step | None = None  # the step before that
        self._is_new_step = True
        self._is_over = False
        self._patience_s = 0.0
        self.monitor = Monitor()
        self.in_force: PlanInForce | None = None
        self.plans = 0
        self.recomputed_bytes = 0
        self.step_peak_bytes = 0

    def watch(self, model: nn.Module, blocks: Blocks) -> None:
        """The model whose forward comes, and its blocks, which tell this controller of their passes."""
        self._survey.paths = {id(module): path for path, module in model.named_modules()}
        self._blocks = blocks
        # Under ZeRO-3 a recomputation gathers parameters, which takes all ranks.
        blocks.is_strict = self._agreement.size > 1 and any(hasattr(one, "ds_id") for one in model.parameters())
        blocks.install()

    def close(self) -> None:
        """Leave the model as it was, and decide nothing more."""
        self._is_over = True
        self._survey.stop()
        self._cache.time_moves(None)
        if self._blocks is not None:
            self._blocks.uninstall()

    # ---- a micro-step -------------------------------------------------------------------------------------------

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The forward of one micro-step."""
        if not torch.is_grad_enabled():
            yield
            return
        self._begin()
        recorder = self._survey.recorder
        around = None if recorder is None else recorder.around
        lead = self._policy.prefetch_lead if isinstance(self._policy, ByPlan) else ()
        listening = nullcontext() if self._blocks is None else self._blocks.listening()
        watching = nullcontext() if recorder is None else recorder.watching()
        with watching, self._cache.saving(self._policy, around, lead), listening:
            yield
        self._survey.end_forward()

    def end_micro_step(self) -> None:
        """Backward is over."""
        self._survey.end_micro_step()
        self._cache.note_recomputation(0)

    def end_step(self) -> None:
        """The optimizer has stepped. A collective."""
        self._is_new_step = True
        self._end_policy()
        self._policy = self._safe
        step = self._step
        if step is not None:
            step.ended = self._clock.mark()
            step.refused = self._refusals() - step.refusals
            step.moves = self._cache.take_moves()
            self._machine.note_step()
            if Placement.HOST not in self._tiers:
                self._machine.learn(self._cache.stats.moving_s, is_usual=self._survey.plan is None)
            self._survey.end_step(step.began, step.ended, step.moves, is_planned=not step.unplanned)
        if not self._is_over:
            self._steps += 1
            self._do(Want(self._agreement.highest(self._wish())))

    def _begin(self) -> None:
        self._end_policy()
        if self._is_new_step:
            self._is_new_step = False
            stats = self._cache.stats
            self.step_peak_bytes = stats.resident.lap()
            self._before = self._step
            self._step = Step(self._clock.mark(), self.plans, stats.moving_s, self._refusals())
        if self._step is not None:
            self._step.micro_steps += 1
        self._policy = self._safe
        if self._survey.is_recording:
            if self._survey.begin() is not None:
                self._policy = self._while_recording()
        elif self._survey.plan is not None:
            self._policy = ByPlan(self._survey.plan, self._tiers, lambda: True)
        elif self.in_force is not None:
            self._policy = ByPlan(self.in_force, self._tiers, self._may_wait)

    def _while_recording(self) -> Policy:
        """With everything moved it shows when forward is done with each storage; a slow drive has no time for that."""
        if self.in_force is None or any(self.in_force.plan.recomputed_blocks):
            return self._safe  # without what is recomputed, what a plan keeps may not fit
        sizes = dict(self.in_force.bytes_by_placement)
        kept_bytes = sizes.pop(Placement.KEEP, 0)
        return ByPlan(self.in_force, self._tiers, self._may_wait) if kept_bytes > sum(sizes.values()) else self._safe

    def _end_policy(self) -> None:
        """What the micro-step before this one has shown."""
        if self._step is not None and isinstance(self._policy, ByPlan):
            self._step.unplanned += self._policy.unplanned
            self._step.drift_bytes += self._policy.drift_bytes
        self._survey.settle()

    def _may_wait(self) -> bool:
        """Whether this step has time left to wait for room in staging, by the host's clock.

        The host of an asynchronous device may wait for as long as it would be ahead otherwise.
        """
        return self._step is not None and self._cache.stats.moving_s - self._step.moving_s <= self._patience_s

    # ---- what blocks tell ---------------------------------------------------------------------------------------

    def enter(self, block: Block, inputs: Sequence[torch.Tensor]) -> int | None:
        """A pass through a block begins; the bytes that it will not save, if it is to be recomputed."""
        recorder = self._survey.recorder
        if recorder is not None:
            is_recomputable = self._blocks is not None and self._blocks.is_recomputable(block)
            recorder.enter(block.path, inputs, is_recomputable=is_recomputable)
        if not isinstance(self._policy, ByPlan) or self._blocks is None:
            return None
        unplanned = self._policy.unplanned
        mark = self._policy.enter(block.path)
        if mark is not None and not self._blocks.is_recomputable(block):
            self._policy.unplanned += 1  # an obstacle that came up since
            mark = None
        if self._policy.unplanned > unplanned and self._blocks.is_strict and self._policy.recomputes:
            raise IncompatibleError(
                f"the block {block.path!r} does not do here what the plan of all ranks says "
                f"({self._blocks.obstacle(block) or 'it comes at another place'}), and the others would wait for this "
                'rank in backward: set "recompute": false.'
            )
        return mark

    def leave(self, block: Block) -> None:
        """The pass is over."""
        recorder = self._survey.recorder
        if recorder is not None:
            recorder.leave()
        if isinstance(self._policy, ByPlan):
            self._policy.leave()

    def recompute(self, mark: int) -> None:
        """Backward begins to run a pass again."""
        self.recomputed_bytes += mark
        self._cache.note_recomputation(mark)
        self._survey.note_recomputation()

    def recomputed(self, mark: int) -> None:
        """It has; what was made again is counted until the next recomputation, or the end of backward."""
        self._survey.note_recomputation()

    # ---- a step -------------------------------------------------------------------------------------------------

    def _wish(self) -> Want:
        if self._steps < WARM_STEPS or self._step is None:
            return Want.GO_ON
        if self._survey.is_running:
            return self._survey.wish()
        if self.in_force is None:
            return Want.RECORD
        resources = self._machine.resources()
        # A device is behind the host: of the step before the last it knows everything without being waited for.
        step = self._step if resources.is_synchronous else self._before
        if step is None or step.plan != self.plans or step.ended is None:
            return Want.GO_ON
        elapsed_s = self._clock.elapsed_s
        look = Look(
            elapsed_s(step.began, step.ended),
            sum(elapsed_s(before, after) for before, after in step.moves),
            step.refused,
            step.unplanned,
            step.drift_bytes / max(1, self.in_force.trace.saved_bytes * step.micro_steps),
            _rates(resources),
            self._machine.moved_bytes() if resources.is_synchronous else 0,
        )
        want = self.monitor.wish(self._steps, look)
        if excess_s := self.monitor.excess_s:
            left_s = self._machine.learn_excess(excess_s, look.lane_bytes)
            if left_s == excess_s > 0:
                return Want.GO_ON  # moving cannot have taken more, and another plan would be the same
            self._survey.shorten(max(0.0, -left_s))
        return want

    def _do(self, want: Want) -> None:
        if want is Want.RECORD:
            self._survey.record()
        elif want is Want.GIVE_UP:
            self._give_up()
        elif want is not Want.GO_ON:
            if want is Want.PROBE:
                self._probe()
            if not (self._survey.is_running and self._advance()):
                self._make_plan()

    def _probe(self) -> None:
        try:
            self._machine.measure()
        except (PathError, RuntimeError) as error:  # RuntimeError: no device memory for it
            logger.warning("%s; what was measured before counts", error)
        self.monitor.probed(self._steps)

    def _give_up(self) -> None:
        """Make no more plans; the last one stays in force."""
        self._is_over = True
        self._survey.stop()
        self._cache.time_moves(None)
        if self._planning is not None:
            self._safe = Always(list(self._tiers.values()), wait=False)

    # ---- a plan -------------------------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Whether the survey needs more steps."""
        if self._survey.is_recording:
            self.monitor.traced(self._steps)
        micro_steps = 1 if self._step is None else max(1, self._step.micro_steps)
        # Blocks may communicate: where other ranks could wait for a recomputation, none is tried that no plan asks for.
        may_rehearse = self._blocks is not None and self._agreement.size == 1
        return self._survey.advance(micro_steps, self._unfit_blocks(), may_rehearse=may_rehearse)

    def _make_plan(self) -> None:
        if self._planning is None:
            self._give_up()
            return
        survey = self._survey
        found = self._planning.make(
            survey.trace, survey.layout, self.monitor.safety, self._unfit_blocks(), survey.hooks_part
        )
        if found is None:
            self._give_up()
            return
        self.in_force = found
        self._cache.forget_order()
        self.plans += 1
        limits, cost = found.limits, found.plan.prediction
        allowed_s = max(cost.stall_s, limits.max_step_overhead * found.trace.step_s - cost.recomputed_s)
        if limits.activation_budget_bytes is not None:
            allowed_s = math.inf
        ahead_s = 0.0 if found.trace.resources.is_synchronous else HOST_AHEAD_PART * found.trace.step_s
        self._patience_s = max(allowed_s, ahead_s)
        rates = _rates(self._machine.resources())
        self.monitor.planned(self._steps, cost.step_s, allowed_s, cost.stall_s, rates)
        if self._agreement.rank == 0:
            logger.info("plan %d: %s", self.plans, found.describe(self.monitor.reason))

    def _unfit_blocks(self) -> frozenset[str]:
        """Paths of the blocks that may not be recomputed."""
        blocks = self._blocks
        return (
            frozenset()
            if blocks is None
            else frozenset(block.path for block in blocks.all if not blocks.is_recomputable(block))
        )

    def summary(self) -> dict[str, Any] | None:
        """The plan for the report; None without one."""
        if self.in_force is None:
            return None
        monitor = self.monitor
        return {"reason": monitor.reason, "measured_step_s": monitor.measured_step_s, **self.in_force.summary()}


def _rates(resources: Resources) -> tuple[float, ...]:
    return tuple(rate for path in resources.paths for rate in (path.write_bytes_per_s, path.read_bytes_per_s))
