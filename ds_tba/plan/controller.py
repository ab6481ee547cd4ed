"""Records a few steps, makes a plan, has it followed, and makes another where steps ask for it.

[Note: The course] The first step runs with everything that is eligible moved, which is the safe thing to do while
nothing is known, and is not recorded: allocators, compilers and caches warm up. Two micro-steps of the next ones are
recorded (``recorder.py``). From then on a plan is in force, and its steps are measured (``feedback.py``). Every
decision falls at the end of an optimizer step, which every rank makes (a forward may be one rank's alone). The ranks
decide together: the highest ``Action`` of any rank is done by all. While a plan is followed they talk in every eighth
step only, since each time waits for the slowest rank.

It cannot see what the next micro-step will save: the policy of a micro-step meets what comes, and counts how that
differs from the plan.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from ds_tba.config import Placement
from ds_tba.core.cache import TensorCache
from ds_tba.core.hooks import ForwardHooks
from ds_tba.plan.agreement import Planning
from ds_tba.plan.feedback import Action, Feedback, OptimizerStep
from ds_tba.plan.machine import Machine
from ds_tba.plan.plan import Limits, Plan
from ds_tba.plan.recorder import Recording, Scene
from ds_tba.plan.trace import Trace
from ds_tba.recompute import Blocks
from ds_tba.remat.where import RunningModule
from ds_tba.report import ReportFile
from ds_tba.storage.base import Always, AnyStore, Choice

logger = logging.getLogger(__name__)

REVIEW_STEPS = 8  # from one talk of the ranks to the next, while a plan is followed


class ByPlan:
    """Follows a plan for one micro-step, asked by the cache at each save; ``step`` counts how that differs.

    Storages that the plan does not know are rematerialized where that can be, as it takes no room; else they go where
    there is room without waiting. It cannot see why a micro-step is another than the planned one.
    """

    def __init__(self, plan: Plan, stores: Mapping[Placement, AnyStore], step: OptimizerStep) -> None:
        self.prefetch_distance = plan.prefetch_distance
        self._plan, self._step = plan, step
        every = tuple(stores.values())
        self._unknown = Choice(every, False, "plan", rematerialize=True)
        self._choices = {
            Placement.KEEP: Choice((), False, "plan"),
            Placement.REMATERIALIZE: Choice(every, True, "plan", rematerialize=True),
        }
        for place, store in stores.items():
            # Where one has no room another may have it: a drive with more to do than planned costs time, and no memory.
            self._choices[place] = Choice(tuple(dict.fromkeys((store, *every))), True)
        self._chosen: dict[Hashable, Choice] = {}
        self._saved_bytes = self._planned_bytes = 0  # of what was saved and planned

    def choose(self, key: Hashable, nbytes: int) -> Choice:
        """Return the plan's choice for the storage that comes next; one that is saved again has the same."""
        if key not in self._chosen:  # counted again, it would shift all that comes after it by one place
            self._chosen[key] = self._next(len(self._chosen), nbytes)
        return self._chosen[key]

    def _next(self, position: int, nbytes: int) -> Choice:
        plan = self._plan
        choice: Choice | None = None
        if position < len(plan.expected):
            index = plan.expected[position]
            planned_bytes = plan.trace.storages[index].nbytes
            self._step.drift_bytes += abs(nbytes - planned_bytes)
            self._saved_bytes += nbytes
            self._planned_bytes += planned_bytes
            choice = self._choices.get(plan.placements[index])
        if choice is None:  # one more than planned, or it was to be recomputed with a block that is not
            self._step.unknown_saves += 1
        return choice or self._unknown

    def end(self) -> None:
        """End the micro-step."""
        missed = (self._plan.trace.storages[index] for index in self._plan.expected[len(self._chosen) :])
        # Not every save of a storage that may not be offloaded is asked about here.
        missed_bytes = sum(one.nbytes for one in missed if one.is_movable)
        self._step.missed_bytes += missed_bytes
        self._step.drift_bytes += missed_bytes
        growth = self._saved_bytes / max(1, self._planned_bytes) - 1
        # The micro-step that grew most counts: a smaller one after it must not hide it.
        self._step.growth = max(self._step.growth, growth)


class Controller:
    """Opens each micro-step with the policy of the plan in force.

    Args:
        blocks: modules of the model that may run again; none where ``recompute`` is off.
        trace_file: takes each trace.
    """

    def __init__(
        self,
        cache: TensorCache,
        machine: Machine,
        planning: Planning,
        running: RunningModule,
        blocks: Blocks,
        trace_file: ReportFile,
    ) -> None:
        self._cache = cache
        self._machine = machine
        self._planning = planning
        self._agreement = planning.agreement
        self._blocks = blocks
        self._trace_file = trace_file
        self._makes_plans = machine.config.placement == "adaptive"  # else a trace is wanted, and no plan
        self._chooses_blocks = machine.config.recompute is True
        self._budget_bytes = machine.config.activation_budget_bytes if self._makes_plans else None
        self._stores = machine.tiers.by_placement
        self._safe = Always(list(self._stores.values()), wait=True, rematerialize=True)
        self._by_plan: ByPlan | None = None  # the policy of the running micro-step; else it is the safe one
        is_synchronous = machine.accelerator.is_synchronous
        self._scene = Scene(cache.eligibility_of, machine.accelerator, running, machine.memory, is_synchronous)
        self._recording = Recording(self._scene, 0)
        self._trace: Trace | None = None  # recorded, or that of the plan in force
        self._steps = 0
        self._step: OptimizerStep | None = None  # that runs
        # The first of them is judged. A device is behind the host: of the step before the last, marks can be read
        # without waiting for it.
        self._ended: deque[OptimizerStep] = deque(maxlen=1 if is_synchronous else 2)
        self._problem = ""  # the last that was said
        self._wanted = Action.GO_ON  # since the ranks talked last
        self._is_over = False
        self.feedback = Feedback(is_drive_shared=machine.is_drive_shared)
        self.in_force: Plan | None = None  # the plan that is followed
        self.plans = 0  # how many there were
        self._reason = ""  # for the plan in force; what was asked for since may have changed nothing
        cache.limit(self._budget_bytes, "activation_budget_bytes")

    def close(self) -> None:
        self._is_over = True
        self._recording = Recording(self._scene, 0)

    # ---- a micro-step -------------------------------------------------------------------------------------------

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Open a forward: of a micro-step of its own, or one more before the backward of the last one."""
        self._cache.end_recomputations()  # one that raised, or of another micro-batch
        continues = self._step is not None and self._cache.expects_forward
        if not continues:
            self._begin()
        recorder, policy = self._recording.current, self._by_plan
        around = None if recorder is None else recorder.around
        distance = () if policy is None else policy.prefetch_distance
        try:
            with (
                self._cache.saving(policy or self._safe, around, distance, continues=continues),
                self._blocks.forward(recorder.passing if recorder is not None and self._chooses_blocks else None),
            ):
                yield
        except BaseException:  # a loop may go on with the next batch
            if self._step is not None:
                self._step.is_usual = False
            raise

    def after_forward(self) -> ForwardHooks | None:
        """See :meth:`TensorCache.after_forward`: to a plan it is a part of the forward, behind its last block."""
        recorder = self._recording.current
        return self._cache.after_forward(None if recorder is None else recorder.around)

    @contextmanager
    def interleaving(self) -> Iterator[None]:
        """Open a whole step whose forwards and backwards alternate: one micro-step to a plan."""
        self._begin()
        try:
            with self._cache.interleaving():
                yield
        except BaseException:  # the step is not over, and shows nothing
            self._step = self._recording.current = None
            raise
        finally:
            self.end_micro_step()

    def end_micro_step(self) -> None:
        """Note that backward is over."""
        self._recording.end_micro_step()
        self._cache.end_micro_step()
        self._cache.end_recomputations()

    def end_step(self) -> None:
        """Note that the optimizer has stepped. A collective in some steps, the same ones on all ranks."""
        self._end_policy()
        step, self._step = self._step, None
        if step is not None:
            step.end(self._machine.accelerator.mark())
            self._ended.append(step)
            self._recording.end_step(step.ended, is_usual=step.is_usual)
            if self.in_force is None:
                self._machine.memory.sample()
        if self._is_over:
            return
        self._steps += 1
        if step is not None:
            with self._going_on("steps say nothing about the plan"):
                reason = self.feedback.reason
                found = self._decide()
                if found < self._wanted:  # which stays what is done, for its own reason
                    self.feedback.reason = reason
                self._wanted = max(self._wanted, found)
        is_steady = self.in_force is not None and not self._recording.wanted
        # By what is alike on all ranks: by anything else, one would wait in a collective that the others never enter.
        if not is_steady or self._agreement.size == 1 or self._steps % REVIEW_STEPS == 0:
            action = Action(self._agreement.all_reduce_max(self._wanted))
            if action > self._wanted and not self._recording.wanted:
                self.feedback.reason = "another rank asked for it"
            self._wanted = Action.GO_ON
            self._do(action)

    def _begin(self) -> None:
        self._end_policy()
        if self._step is None:
            self._step = OptimizerStep(self._machine.accelerator.mark())
        self._step.micro_steps += 1
        self._recording.begin()
        plan = self.in_force
        # Blocks are not recomputed in a recording. All that they save would be kept, and may not fit: it is offloaded.
        if plan is not None and not (plan.recomputed and self._recording.current):
            self._by_plan = ByPlan(plan, self._stores, self._step)

    def _end_policy(self) -> None:
        """Collect what the last micro-step has shown."""
        if self._by_plan is not None:
            self._by_plan.end()
        self._by_plan = None

    # ---- decisions ----------------------------------------------------------------------------------------------

    @contextmanager
    def _going_on(self, consequence: str) -> Iterator[None]:
        """Log what fails, once, and go on: the other ranks wait for this one in the next collective."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - see above
            problem = f"{consequence}: {type(error).__name__}: {error}"
            if problem != self._problem:
                logger.warning("%s", problem)
            self._problem = problem

    def _decide(self) -> Action:
        """Return the action that this rank asks for."""
        if self._recording.wanted:
            return Action.PLAN if self._recording.is_over else Action.RECORD
        if self.in_force is None:
            return Action.RECORD if self.feedback.is_due(self._steps) else Action.GO_ON
        step = self._ended[0]
        # Another would be held against a plan that had no part in its time.
        if not step.is_usual or len(self._ended) < (self._ended.maxlen or 0):
            return Action.GO_ON
        time_s = self._machine.accelerator.elapsed_s(step.began, step.ended)
        return self.feedback.decide(self._steps, time_s, self._machine.tiers.rates(), step)

    def _do(self, action: Action) -> None:
        if action is Action.GO_ON:
            return
        if action is Action.RECORD:
            if not self._recording.wanted:
                self._recording = Recording(self._scene)
            return
        recording, self._recording = self._recording, Recording(self._scene, 0)
        if recording.wanted:
            self._take(recording)
        self._ended.clear()  # or a step of the plan before would be held against the next one
        self.feedback.change(action, self._steps)
        self._make_plan()

    def _take(self, recording: Recording) -> None:
        """Go on from the recording; where it is broken, from the one before, if there is one."""
        with self._going_on("discarding an inconsistent trace"):
            micro_steps = self._ended[-1].micro_steps if self._ended else 1  # this rank had no forward
            trace = recording.trace(self._machine.resources(), micro_steps)
            if trace is None:
                logger.warning(
                    "no plan yet: %d steps compiled something, or had no complete forward and backward. Activations "
                    "are offloaded without a plan, and steps are recorded again later",
                    recording.steps,
                )
                return
            self._trace = trace
            plan = self.in_force
            # Everything is moved, too, in the recording under a plan that recomputes: see _begin.
            moved_share = 1.0 if plan is None or plan.recomputed else plan.moved_share
            moved_bytes = trace.micro_steps * moved_share * trace.movable_bytes
            self.feedback.learn(trace.step_s, moved_bytes * trace.resources.compute_s_per_byte)
            if self._trace_file.path is not None:
                self._trace_file.write_text(trace.to_json() + "\n")

    # ---- a plan -------------------------------------------------------------------------------------------------

    def _make_plan(self) -> None:
        trace, limits = None, Limits()
        with self._going_on("this rank has no part in a plan now"):
            if self._trace is not None:
                corrected = replace(self.feedback.corrected(self._trace), resources=self._machine.resources())
                limits = replace(self._machine.limits(corrected.step_s), movable_share=self.feedback.share)
                trace = corrected
        if not self._makes_plans:  # over once there is a trace, for all ranks at once: they go on talking else
            self._is_over = not self._agreement.all_reduce_max(int(trace is None))
            return
        found = self._planning.make(trace, limits)
        if found is not None:
            self._follow(found)
        elif self.in_force is None:
            self._safe = Always(list(self._stores.values()), wait=False, rematerialize=True)

    def _follow(self, found: Plan) -> None:
        is_new = self.in_force is None or found.identity != self.in_force.identity  # on every rank alike
        if self._chooses_blocks:
            self._blocks.chosen = found.recomputed
        self._trace = found.trace
        self.in_force = found
        held_bytes = found.limits.activation_budget_bytes
        # The plan's own warning tells where no plan fits a room that the user has not set.
        self._cache.limit(held_bytes, "activation_budget_bytes" if held_bytes == self._budget_bytes else "")
        self.feedback.follow(found, self._machine.tiers.rates())
        if not is_new:
            return
        self.plans += 1
        self._reason = self.feedback.reason
        if self._agreement.rank == 0:
            logger.info("plan %d%s: %s", self.plans, self._agreement.where, found.describe(self._reason))

    def summary(self) -> dict[str, object]:
        """Return the fields of the report that are about plans."""
        plan = self.in_force
        told = {"reason": self._reason, "measured_step_s": self.feedback.measured_step_s}
        return {"plans": self.plans, "plan": plan and {**told, **plan.summary()}}
