"""Looks at each step under a plan, and says when to look again at the plan, or to record again.

[Note: Looking] A look fits what steps cost anew and plans with it; the plan changes if that makes a difference
(``consensus.py``). Looks come after 5, 10, 20, ... steps. A surprise has the next one come early: storages that found
no room, rates of the drives that have changed, steps that are longer or shorter than expected. After the look the same
is no surprise any more. Saves that the plan does not know ask for a new recording instead. Larger storages than those
of the plan ask for a new plan at once.

Knows numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from statistics import median
from typing import Any

from ds_tba.adaptive.calibration import Observation
from ds_tba.adaptive.policy import PlanInForce
from ds_tba.device.accelerator import Clock
from ds_tba.planner.trace import Trace

MIN_STEPS, MAX_STEPS = 5, 320
# After so many steps without a surprise the next one counts as new.
QUIET_STEPS = 50
# Of so many steps the median is compared with what was expected; by more than this factor it is a surprise.
COMPARED_STEPS = 3
SURPRISE_FACTOR, LARGE_FACTOR = 1.25, 2.0
# A rate that has left this band since the last look is a surprise.
RATE_BAND = (0.67, 1.5)
MAX_DRIFT = 0.1
# For the report.
REPORTED_STEPS = 5


class Action(IntEnum):
    """What a rank would do after a step; of several ranks' wishes the highest is done."""

    GO_ON = 0
    PLAN = 1
    RECORD = 2
    REST = 3  # stop recording for a while


@dataclass(slots=True)
class Backoff:
    """When to look again: each time after twice as many steps, and soon after a surprise that follows quiet."""

    wait: int = 0
    looked_at: int = 0
    surprised_at: int = -QUIET_STEPS

    def is_due(self, step: int, *, is_surprised: bool, is_large: bool = False) -> bool:
        """Whether to look now; a large surprise counts however many small ones there were."""
        if is_large:
            self.wait = MIN_STEPS
        if is_surprised:
            if step - self.surprised_at > QUIET_STEPS:
                self.wait = MIN_STEPS
            self.surprised_at = step
        return step - self.looked_at >= self.wait

    def looked(self, step: int) -> None:
        """It was done."""
        self.looked_at, self.wait = step, min(MAX_STEPS, max(MIN_STEPS, 2 * self.wait))


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one step showed.

    Attributes:
        time_s: from its begin to its end.
        refusals: storages that were to be moved and found no room.
        unplanned: saves that the plan does not know.
        drift: by which part of all saved bytes storages differ in size from those of the plan.
        growth: by which part they are larger.
        rates: of the drives as they are now.
        more_micro_steps: than the plan was made for.
    """

    time_s: float
    refusals: int
    unplanned: int
    drift: float
    rates: tuple[float, ...]
    growth: float = 0.0
    more_micro_steps: int = 0


class Monitor:
    """See [Note: Looking].

    Attributes:
        reason: of the last action.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._looks = Backoff()
        self._times_s: list[float] = []
        self._expected_s = 0.0
        self._refusals = 0
        self._rates: tuple[float, ...] = ()

    @property
    def measured_step_s(self) -> float | None:
        """What steps under the plan take: the median of the last few; None before the first."""
        return median(self._times_s[-REPORTED_STEPS:]) if self._times_s else None

    def planned(self, expected_s: float, rates: tuple[float, ...], *, is_new: bool) -> None:
        """A look is over.

        Args:
            expected_s: what a step takes from now on.
            rates: of the drives, as the plan has them.
            is_new: whether there is another plan.
        """
        self._expected_s, self._rates = expected_s, rates
        if is_new:
            self._times_s, self._refusals = [], 0

    def looked(self, step: int) -> None:
        """A look, or a recording, is over."""
        self._looks.looked(step)

    def may_record(self, step: int) -> bool:
        """Whether steps may be recorded where there is no plan."""
        return self._looks.looked_at == 0 or self._looks.is_due(step, is_surprised=False)

    def decide(self, step: int, seen: StepMetrics) -> Action:
        """What to do after the step of that number."""
        if seen.growth > MAX_DRIFT:
            return self._because(Action.PLAN, f"storages are larger than those of the plan by {seen.growth:.0%}")
        if seen.drift <= MAX_DRIFT and not seen.more_micro_steps:  # else it takes another time
            self._times_s = [*self._times_s[1 - REPORTED_STEPS :], seen.time_s]
        action, surprise = Action.PLAN, self._surprise(seen)
        if seen.unplanned:
            action, surprise = Action.RECORD, f"{seen.unplanned} saves that the plan did not know"
        if seen.more_micro_steps:
            action, surprise = Action.RECORD, f"a step had {seen.more_micro_steps:+d} micro-steps"
        if not self._looks.is_due(step, is_surprised=bool(surprise), is_large=self._is_far_off(LARGE_FACTOR)):
            return Action.GO_ON
        self._refusals = seen.refusals
        return self._because(action, surprise or "steps have shown more of what it costs")

    def _because(self, action: Action, reason: str) -> Action:
        self.reason = reason
        return action

    def _surprise(self, seen: StepMetrics) -> str:
        """What is not as at the last look; empty for nothing."""
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


# One optimizer step under a plan: what was counted in it, and what it shows of what recomputing and moving cost.
#
# Knows the clock and plans; does not know who decides.


@dataclass(frozen=True, slots=True)
class Counts:
    """Of moving, since the beginning.

    Attributes:
        refusals: storages that found no room.
        offloaded_bytes: of those that went out.
        moving_s: of the host, in copies and in waiting for them and for the stores.
        stall_s: that it waited for the stores.
    """

    refusals: int
    offloaded_bytes: int
    moving_s: float
    stall_s: float


@dataclass(slots=True)
class Step:
    """What is known of a step.

    Attributes:
        began, ended: marks of the clock, without what comes between two steps.
        plan: number of the plan in force; 0 for none.
        before: what was counted before it began.
        refusals: storages that found no room in it.
        moved_bytes: of the storages that went out.
        moving_s: of the host, in copies and in waiting for them and for the stores.
        stall_s: that it waited for the stores.
        unplanned: saves that the plan did not know.
        drift_bytes: by which storages differed in size from those of the plan.
        grown_bytes: by which they were larger in one of its micro-steps.
        grown: the sizes of those, by number.
        moves: marks before and after each storage that was moved, or came back.
    """

    began: Any
    plan: int
    before: Counts
    micro_steps: int = 0
    refusals: int = 0
    moved_bytes: int = 0
    moving_s: float = 0.0
    stall_s: float = 0.0
    unplanned: int = 0
    drift_bytes: int = 0
    grown_bytes: int = 0
    grown: dict[int, int] = field(default_factory=dict)
    moves: list[tuple[Any, Any]] = field(default_factory=list)
    ended: Any = None

    def end(self, ended: Any, now: Counts, moves: list[tuple[Any, Any]]) -> None:
        """The optimizer has stepped.

        Args:
            ended: mark of the clock.
            now: what is counted by now.
            moves: marks before and after each storage that was moved, or came back.
        """
        self.ended, self.moves = ended, moves
        self.refusals = now.refusals - self.before.refusals
        self.moved_bytes = now.offloaded_bytes - self.before.offloaded_bytes
        self.moving_s = now.moving_s - self.before.moving_s
        self.stall_s = now.stall_s - self.before.stall_s

    def time_s(self, clock: Clock) -> float:
        """From its begin to its end; blocks the host until the device is there."""
        return clock.elapsed_s(self.began, self.ended)

    def drift(self, followed: PlanInForce) -> float:
        """By which part of all saved bytes storages differed in size from those of the plan."""
        return self.drift_bytes / (max(1, followed.trace.saved_bytes) * max(1, self.micro_steps))

    def observation(self, trace: Trace, followed: PlanInForce, clock: Clock) -> Observation | None:
        """What it shows for the fit; None if it was not of the kind that was recorded.

        Args:
            trace: as it was recorded.
            followed: the plan in force.
            clock: of the marks.
        """
        if self.unplanned or self.drift(followed) > MAX_DRIFT or self.micro_steps != trace.micro_steps:
            return None
        if followed.trace.resources.is_synchronous:  # the training thread itself waits and copies
            waited_s, copied_s = self.stall_s, max(0.0, self.moving_s - self.stall_s)
        else:
            waited_s, copied_s = sum(clock.elapsed_s(before, after) for before, after in self.moves), 0.0
        passes = zip(trace.blocks, followed.plan.recomputed_blocks, strict=False)
        forward_s = self.micro_steps * sum(block.forward_s for block, again in passes if again)
        return Observation(
            max(0.0, self.time_s(clock) - waited_s - copied_s),
            forward_s / trace.step_s if trace.step_s else 0.0,
            self.moved_bytes,
            max(0.0, waited_s - followed.foreseen_wait_s),
        )
