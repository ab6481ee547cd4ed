"""The steps under a plan: the metrics of each, and when to review the plan or to record again.

[Note: Reviews] A review fits the cost of steps anew and plans with the fit; the plan changes if that makes a difference
(``consensus.py``). Reviews come after 5, 10, 20, ... steps. A surprise makes the next one come early: storages that
found no room, changed rates of the drives, steps longer or shorter than expected. After the review the same is no
surprise any more. Saves that the plan does not know, or that it expects in vain, ask for a new recording instead.
Larger storages than those of the plan ask for a new plan at once.

``Monitor`` knows numbers only, ``Step`` the clock and the plan; neither decides alone, as ranks have to agree.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import IntEnum
from statistics import median
from typing import Any

from ds_tba.adaptive.calibration import Observation
from ds_tba.adaptive.policy import Deviation, PlanInForce
from ds_tba.device.accelerator import Clock
from ds_tba.planner.trace import Trace
from ds_tba.telemetry.stats import CacheStats

MIN_STEPS, MAX_STEPS = 5, 320
# After so many steps without a surprise the next surprise counts as new.
QUIET_STEPS = 50
# The median of so many steps is compared with the expected time; a ratio above this factor is a surprise.
COMPARED_STEPS = 3
SURPRISE_FACTOR, LARGE_FACTOR = 1.25, 2.0
# A rate that has left this band since the last review is a surprise.
RATE_BAND = (0.67, 1.5)
MAX_DRIFT = 0.1
# The fraction by which moving is to lower the peak.
MIN_GAIN = 0.02
# For the report.
REPORTED_STEPS = 5


class Action(IntEnum):
    """The next thing to do after a step; where ranks differ, the highest is done."""

    GO_ON = 0
    PLAN = 1
    RECORD = 2
    REST = 3  # stop recording for a while


@dataclass(slots=True)
class Backoff:
    """When to run again: each time after twice as many steps, and soon after a surprise that follows a quiet period."""

    wait: int = 0
    last_run: int = 0
    surprised_at: int = -QUIET_STEPS
    largely_surprised_at: int = -QUIET_STEPS

    def is_due(self, step: int, *, is_surprised: bool, is_large: bool = False) -> bool:
        """Whether to run now.

        A large surprise is new if no large one came shortly before, however many small ones did. Without that condition
        steps that alternate between two lengths would have the plan reviewed for ever.
        """
        if is_large:
            if step - self.largely_surprised_at > QUIET_STEPS:
                self.wait = MIN_STEPS
            self.largely_surprised_at = step
        if is_surprised:
            if step - self.surprised_at > QUIET_STEPS:
                self.wait = MIN_STEPS
            self.surprised_at = step
        return step - self.last_run >= self.wait

    def record_run(self, step: int) -> None:
        """Record a run; double the interval."""
        self.last_run, self.wait = step, min(MAX_STEPS, max(MIN_STEPS, 2 * self.wait))


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The facts of one step by which the monitor decides.

    Attributes:
        time_s: from its begin to its end.
        refusals: storages that were to be moved and found no room.
        unplanned: saves that the plan does not know.
        drift: the fraction of all saved bytes by which storages differ in size from those of the plan.
        growth: the fraction by which they are larger.
        rates: of the drives as they are now.
        more_micro_steps: than the plan was made for.
        missed: the fraction of all saved bytes of the plan that was not saved.
    """

    time_s: float
    refusals: int
    unplanned: int
    drift: float
    rates: tuple[float, ...]
    growth: float = 0.0
    more_micro_steps: int = 0
    missed: float = 0.0


class Monitor:
    """See [Note: Reviews].

    Attributes:
        reason: of the last action.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._reviews = Backoff()
        self._times_s: list[float] = []
        self._expected_s = 0.0
        self._refusals = 0
        self._rates: tuple[float, ...] = ()
        self._resting_until = 0

    @property
    def measured_step_s(self) -> float | None:
        """The median of the last few steps under the plan; None before the first."""
        return median(self._times_s[-REPORTED_STEPS:]) if self._times_s else None

    def planned(self, expected_s: float, rates: tuple[float, ...], *, is_new: bool) -> None:
        """A review is over.

        Args:
            expected_s: the time of a step from now on.
            rates: of the drives, as the plan has them.
            is_new: whether there is another plan.
        """
        self._expected_s, self._rates = expected_s, rates
        if is_new:
            self._times_s, self._refusals = [], 0

    def reviewed(self, step: int) -> None:
        """A review, or a recording, is over."""
        self._reviews.record_run(step)

    def rest(self, step: int) -> None:
        """No plan could be made: ask for nothing before the next review is due, whatever happens."""
        self.reviewed(step)
        self._resting_until = step + self._reviews.wait

    def may_record(self, step: int) -> bool:
        """Whether steps may be recorded where there is no plan."""
        return self._reviews.last_run == 0 or self._reviews.is_due(step, is_surprised=False)

    def decide(self, step: int, seen: StepMetrics) -> Action:
        """The action after the step of that number."""
        if step < self._resting_until:
            return Action.GO_ON
        if seen.growth > MAX_DRIFT:
            return self._because(Action.PLAN, f"storages are larger than those of the plan by {seen.growth:.0%}")
        if seen.drift <= MAX_DRIFT and not seen.more_micro_steps:  # else its time says nothing of the plan
            self._times_s = [*self._times_s[1 - REPORTED_STEPS :], seen.time_s]
        action, surprise = Action.PLAN, self._surprise(seen)
        if seen.unplanned:
            action, surprise = Action.RECORD, f"{seen.unplanned} saves that the plan did not know"
        elif seen.missed > MAX_DRIFT:
            action, surprise = Action.RECORD, f"{seen.missed:.0%} of what the plan expects was not saved"
        if seen.more_micro_steps:
            action, surprise = Action.RECORD, f"a step had {seen.more_micro_steps:+d} micro-steps"
        if not self._reviews.is_due(step, is_surprised=bool(surprise), is_large=self._is_far_off(LARGE_FACTOR)):
            return Action.GO_ON
        self._refusals = seen.refusals
        return self._because(action, surprise or "steps have shown more of its cost")

    def _because(self, action: Action, reason: str) -> Action:
        self.reason = reason
        return action

    def _surprise(self, seen: StepMetrics) -> str:
        """The change since the last review, in words; empty for none."""
        if seen.refusals > self._refusals:
            return f"{seen.refusals} storages found no room"
        if not self._are_as_planned(seen.rates):
            return "the drives' rates have changed"
        if self._is_far_off(SURPRISE_FACTOR):
            time_s = median(self._times_s[-COMPARED_STEPS:])
            return f"steps took {time_s:.3g} s where {self._expected_s:.3g} s were expected"
        return ""

    def _is_far_off(self, factor: float) -> bool:
        """Whether the last few steps took so many times more than expected, or less."""
        if len(self._times_s) < COMPARED_STEPS:
            return False
        time_s = median(self._times_s[-COMPARED_STEPS:])
        return not self._expected_s / factor <= time_s <= factor * self._expected_s

    def _are_as_planned(self, rates: tuple[float, ...]) -> bool:
        return len(rates) == len(self._rates) and all(
            not planned or RATE_BAND[0] <= now / planned <= RATE_BAND[1]
            for now, planned in zip(rates, self._rates, strict=True)
        )


# One optimizer step under a plan: its counts, and what the step shows of the cost of recomputing and moving.


def compilations() -> int:
    """What ``torch.compile`` has compiled in this process so far; 0 where nobody has imported it.

    Counts everything that it times: frames, backwards (compiled when they first run), kernels and their tuning.
    """
    times: dict[str, list[float]] = getattr(sys.modules.get("torch._dynamo.utils"), "compilation_time_metrics", {})
    return sum(map(len, list(times.values())))


def moves_in_vain(stats: CacheStats, moved_bytes: int, compilations_before: int) -> bool:
    """Whether most of what is saved was moved and the peak is no lower for it, since code was compiled.

    Code that is compiled as one graph saves everything at its end, and takes all of it back before its backward begins.

    Args:
        compilations_before: how many there were when the first step began; they say nothing about what it ran.
    """
    in_vain = stats.resident.peak > (1 - MIN_GAIN) * stats.saved.peak
    return in_vain and moved_bytes > stats.saved.peak / 2 and compilations() > compilations_before


@dataclass(frozen=True, slots=True)
class Counts:
    """Of moving, since the beginning or in one step.

    Attributes:
        refusals: storages that found no room.
        offloaded_bytes: of those that went out.
        moving_s: of the host, in copies and in waiting for copies and for the stores.
        stall_s: that the host waited for the stores.
    """

    refusals: int = 0
    offloaded_bytes: int = 0
    moving_s: float = 0.0
    stall_s: float = 0.0

    def __sub__(self, before: Counts) -> Counts:
        return Counts(
            self.refusals - before.refusals,
            self.offloaded_bytes - before.offloaded_bytes,
            self.moving_s - before.moving_s,
            self.stall_s - before.stall_s,
        )


@dataclass(slots=True)
class Step:
    """One optimizer step.

    Attributes:
        began, ended: marks of the clock, without the time between two steps.
        plan: number of the plan in force; 0 for none.
        before: the counts when the step began.
        counts: of the step.
        deviation: from the plan.
        moves: marks before and after each storage that was moved, or came back.
        has_compiled: whether something was compiled in it; then its times say nothing of other steps.
    """

    began: Any
    plan: int
    before: Counts
    micro_steps: int = 0
    counts: Counts = Counts()
    deviation: Deviation = field(default_factory=Deviation)
    moves: list[tuple[Any, Any]] = field(default_factory=list)
    ended: Any = None
    has_compiled: bool = False
    _compilations: int = field(default_factory=compilations)

    def end(self, ended: Any, now: Counts, moves: list[tuple[Any, Any]]) -> None:
        """The optimizer has stepped.

        Args:
            ended: mark of the clock.
            now: the counts by now.
            moves: marks before and after each storage that was moved, or came back.
        """
        self.ended, self.counts, self.moves = ended, now - self.before, moves
        self.has_compiled = compilations() != self._compilations

    def metrics(self, plan: PlanInForce, clock: Clock, rates: tuple[float, ...]) -> StepMetrics:
        """What the step shows of the plan that was in force in it; blocks the host until the device is there."""
        return StepMetrics(
            self.time_s(clock),
            self.counts.refusals,
            self.deviation.unplanned,
            self.drift(plan),
            rates,
            self.deviation.grown_bytes / max(1, plan.trace.saved_bytes),
            self.micro_steps - plan.trace.micro_steps,
            self._part(plan, self.deviation.missed_bytes),
        )

    def time_s(self, clock: Clock) -> float:
        """From its begin to its end; blocks the host until the device is there."""
        return clock.elapsed_s(self.began, self.ended)

    def drift(self, followed: PlanInForce) -> float:
        """The fraction of all saved bytes by which storages differed in size from those of the plan."""
        return self._part(followed, self.deviation.drift_bytes)

    def _part(self, followed: PlanInForce, nbytes: int) -> float:
        return nbytes / (max(1, followed.trace.saved_bytes) * max(1, self.micro_steps))

    def observation(self, trace: Trace, followed: PlanInForce, clock: Clock) -> Observation | None:
        """The step's observation for the fit; None if the step was not of the kind that was recorded.

        Args:
            trace: as it was recorded.
            followed: the plan in force.
            clock: of the marks.
        """
        if self.deviation.unplanned or self.drift(followed) > MAX_DRIFT or self.micro_steps != trace.micro_steps:
            return None
        if followed.trace.resources.is_synchronous:  # the training thread itself waits and copies
            waited_s, copied_s = self.counts.stall_s, max(0.0, self.counts.moving_s - self.counts.stall_s)
        else:
            waited_s, copied_s = sum(clock.elapsed_s(before, after) for before, after in self.moves), 0.0
        passes = zip(trace.blocks, followed.plan.recomputed_blocks, strict=False)
        computed_s = followed.plan.prediction.rematerialized_s
        forward_s = self.micro_steps * sum(block.forward_s for block, again in passes if again)
        return Observation(
            max(0.0, self.time_s(clock) - waited_s - copied_s - computed_s),
            forward_s / trace.step_s if trace.step_s else 0.0,
            self.counts.offloaded_bytes,
            max(0.0, waited_s - followed.foreseen_wait_s),
        )
