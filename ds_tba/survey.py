"""The steps before a plan: micro-steps that are recorded, then steps in which every block is recomputed.

Knows recordings, rehearsals and who makes plans; does not know policies, nor when a survey is due.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ds_tba.adaptive.consensus import Machine, Planning
from ds_tba.adaptive.policy import PlanInForce
from ds_tba.adaptive.recorder import Recorder
from ds_tba.adaptive.recording import Others, Recording
from ds_tba.autograd.cache import TensorCache
from ds_tba.device.accelerator import Clock
from ds_tba.errors import TraceError
from ds_tba.monitor import Want
from ds_tba.plan.layout import Layout
from ds_tba.planner.trace import Trace
from ds_tba.rehearsal import Rehearsal, Rehearsed

logger = logging.getLogger(__name__)

MOST_RECORDED_STEPS = 5


class Survey:
    """What the steps before a plan show.

    Args:
        cache: does the saving.
        clock: of the training device.
        machine: what it can move, measured already; learns what moving takes of kernels that run on the same processor.
        others: what others move.
        planning: makes the plan of the rehearsals; None needs none.
        on_trace: told of each trace.

    Attributes:
        paths: for each module (by ``id``) its path in the model.
        trace, layout: what was found; no trace where what was recorded is not consistent.
        hooks_part: of a step, what autograd's hooks take whatever moves. 0 where the host runs ahead of a device.
    """

    def __init__(
        self,
        cache: TensorCache,
        clock: Clock,
        machine: Machine,
        others: Others,
        planning: Planning | None,
        on_trace: Callable[[Trace], None],
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._machine = machine
        self._others = others
        self._planning = planning
        self._on_trace = on_trace
        self._recording: Recording | None = None
        self._rehearsal: Rehearsal | None = None
        self._recorded_bytes = 0  # moved in each step of the last recording
        self._hooks_s = 0.0  # in each of its micro-steps, beside moving
        self._recompute_factor: float | None = None
        self.paths: dict[int, str] = {}
        self.trace: Trace | None = None
        self.layout = Layout(())
        self.hooks_part = 0.0

    @property
    def is_running(self) -> bool:
        """Whether this step is part of it."""
        return self.is_recording or self._rehearsal is not None

    @property
    def is_recording(self) -> bool:
        """Whether micro-steps of this step are recorded."""
        return self._recording is not None

    @property
    def recorder(self) -> Recorder | None:
        """Of the micro-step that runs, if it is recorded."""
        return None if self._recording is None else self._recording.running

    @property
    def plan(self) -> PlanInForce | None:
        """Of the rehearsal, if this step is one."""
        return None if self._rehearsal is None else self._rehearsal.plan

    # ---- while a step runs --------------------------------------------------------------------------------------

    def begin(self) -> Recorder | None:
        """A forward begins: what records it, if it is to be recorded."""
        return None if self._recording is None else self._recording.begin()

    def end_forward(self) -> None:
        """Forward is over."""
        if self._recording is not None:
            self._recording.end_forward()

    def end_micro_step(self) -> None:
        """Backward is over."""
        if self._recording is not None:
            self._recording.end_micro_step()

    def settle(self) -> None:
        """Take what has run so far, before the next forward, or at the end of the step."""
        if self._recording is not None:
            self._recording.settle()

    def note_recomputation(self) -> None:
        """A recomputation begins, or it ends."""
        if self._rehearsal is not None:
            self._rehearsal.mark()

    def end_step(self, began: Any, ended: Any, moves: Sequence[tuple[Any, Any]], *, is_planned: bool) -> None:
        """The optimizer has stepped.

        Args:
            began, ended: marks of the clock.
            moves: marks before and after each storage that was moved, or came back, in no recorded micro-step.
            is_planned: whether it saved what the rehearsal's plan knows.
        """
        if self._recording is not None:
            self._recording.end_step(ended, self._machine.moved_bytes())
        if self._rehearsal is not None:
            self._rehearsal.end_step(began, ended, moves, self._machine.moved_bytes(), is_planned=is_planned)
            self._cache.forget_order()  # the next step may move other storages

    # ---- between steps ------------------------------------------------------------------------------------------

    def record(self) -> None:
        """Record the micro-steps of the next step, too."""
        if self._recording is None:
            is_synchronous = self._machine.resources().is_synchronous
            self._cache.time_moves(self._clock)
            self._recording = Recording(
                self._cache, self._clock, self.paths, self._others, is_synchronous=is_synchronous
            )

    def shorten(self, shorter_s: float) -> None:
        """Steps are so much shorter than was found, whatever is moved or recomputed.

        The steps before a plan are few, and all of them may fall into a slow second.
        """
        if self.trace is not None and shorter_s:
            self.trace = self.trace.without(shorter_s / self.trace.micro_steps)

    def stop(self) -> None:
        """Record nothing more."""
        self._recording = self._rehearsal = None

    def wish(self) -> Want:
        """What to do after a step of it."""
        if self._recording is None:
            return Want.PLAN if self._rehearsal is None or self._rehearsal.is_enough else Want.GO_ON
        if self._recording.is_enough:
            return Want.PLAN
        if self._recording.steps < MOST_RECORDED_STEPS:
            return Want.RECORD
        if self._recording.has_any:
            return Want.PLAN
        logger.warning(
            "no plan: in %d steps no forward was followed by its own backward. Activations go to NVMe as far as there "
            "is room without waiting",
            self._recording.steps,
        )
        return Want.GIVE_UP

    def advance(self, micro_steps: int, unfit_blocks: frozenset[str], *, may_rehearse: bool) -> bool:
        """Whether more steps are needed before there can be a plan. A collective, with one answer for all ranks.

        Args:
            micro_steps: of a step.
            unfit_blocks: paths of blocks that cannot be recomputed.
            may_rehearse: whether nobody would wait for a pass that is not recomputed after all.
        """
        recording, self._recording = self._recording, None
        rehearsal, self._rehearsal = self._rehearsal, None
        if recording is not None:
            self._take(recording, micro_steps)
            if may_rehearse and self._begin_rehearsing(unfit_blocks):
                return True
        if self.trace is not None:
            self.trace = self._corrected(self.trace, rehearsal)
            self._on_trace(self.trace)
        return False

    def _take(self, recording: Recording, micro_steps: int) -> None:
        self.trace = None
        if not recording.has_any:
            return
        try:
            self.trace = recording.trace(self._machine.resources, micro_steps)
        except TraceError as error:
            logger.warning("what was recorded is no trace: %s", error)
            return
        self.layout = recording.layout()
        self._recorded_bytes = recording.moved_bytes
        self._hooks_s = recording.hooks_s()

    def _begin_rehearsing(self, unfit_blocks: frozenset[str]) -> bool:
        if self._planning is None or self._recompute_factor is not None:
            return False
        self._recompute_factor = 1.0
        plan = self._planning.rehearsal(self.trace, self.layout, unfit_blocks)
        if plan is not None:
            self._rehearsal = Rehearsal(plan, self._clock, in_turns=plan.trace.resources.is_synchronous)
            self._cache.forget_order()
            self._on_trace(plan.trace)  # for runs that end before there is a better one
        return plan is not None

    def _corrected(self, trace: Trace, rehearsal: Rehearsal | None) -> Trace:
        """With what rehearsals have shown; without what lanes took of the kernels, with the hooks of every step."""
        rehearsed = None if rehearsal is None else rehearsal.result()
        if trace.resources.is_synchronous:
            trace = trace.without((trace.step_s - self._kept_step_s(trace, rehearsed)) / trace.micro_steps)
        if rehearsal is not None and rehearsed is not None:
            self._recompute_factor = rehearsal.recompute_factor(trace, rehearsed.recomputed_s)
        self.hooks_part = min(1.0, trace.micro_steps * self._hooks_s / trace.step_s) if trace.step_s else 0.0
        return trace if self._recompute_factor is None else replace(trace, recompute_factor=self._recompute_factor)

    def _kept_step_s(self, trace: Trace, rehearsed: Rehearsed | None) -> float:
        """A step with everything kept, hooks included: as rehearsals had it, else without what lanes take elsewhere."""
        if rehearsed is None:
            lanes_s = self._machine.taken_s(self._recorded_bytes)
            return trace.step_s + trace.micro_steps * self._hooks_s - lanes_s
        if rehearsed.taken_s is not None:
            self._machine.learn_taken(rehearsed.taken_s, rehearsed.taken_error_s, rehearsed.moved_bytes)
        return rehearsed.kept_s
