"""How much may move: the steps under a plan are measured, and what they took beyond what is allowed is moved less.

[Note: One number] A plan's replay knows the rates of the drives and of the copies. It cannot know what moving costs
the kernels, the host's threads or other processes. So a plan is followed, its steps are measured, and where their
median is longer than ``max_step_overhead`` allows, the share of the bytes that may move is lowered: to the part whose
time beyond a step with everything kept is allowed. The share is raised again, slowly, once steps leave room for that.
With a budget, time is already the least that the planner finds: there a step is too long that takes longer than its
plan said, and the planner moves more than the share where less would not fit.

[Note: The kept step] What a step takes with everything kept is first read from the recording, in which our own work
does not count. It is corrected where steps show better: no step is shorter for moving, and where a plan moves nothing
its steps are the kept ones. Where steps stay too long although less is moved, moving is not the cause, or not alone:
nothing is moved then for a few steps, which show the kept step, and the share that this allows is moved. What moving
costs the kernels in the recording itself, where everything is moved, is taken off as far as ``rates.py`` knows it.

[Note: Reviews] Drives whose rates have changed ask for a new plan, larger storages than those of the plan at once.
Saves that the plan does not know, or that it expects in vain, ask for a new recording. Each comes after 5, 10, 20, ...
up to 640 steps as long as its cause stays, and soon again after a quiet time.

Knows numbers only, and no clock; does not decide alone, as ranks have to agree.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from statistics import median, median_low
from typing import Any

from ds_tba.core.compiled import compilations
from ds_tba.plan.policy import PlanInForce, PlanMismatch

MIN_STEPS, MAX_STEPS = 5, 640
# After so many steps without its cause, a cause is new.
QUIET_STEPS = 100
# The median of the last so many steps counts, of ``MIN_STEPS`` at least.
COUNTED_STEPS = 16
# A rate that has left this band since the last plan asks for another.
RATE_BAND = (0.67, 1.5)
MAX_DRIFT = 0.1
# The share is raised by this factor, from nothing to the least.
RAISE_FACTOR, LEAST_SHARE = 1.5, 0.1
# The share is lowered to this part at the least, before steps have shown that moving is the cause.
LEAST_PART = 0.5
# Of a step: what everything kept takes at least.
MIN_KEPT_FRACTION = 0.5
# The standard error of a median, as a multiple of the median absolute deviation over the root of the count.
_ERROR = 1.86


class Action(IntEnum):
    """The next thing to do after a step; where ranks differ, the highest is done."""

    GO_ON = 0
    PLAN = 1
    MEASURE = 2  # the drives, which nobody uses, and plan
    RECORD = 3


@dataclass(slots=True)
class Backoff:
    """When to act on a cause: each time after twice as many steps, and soon if it comes after a quiet time.

    Attributes:
        first: the steps to wait for then.
    """

    first: int = MIN_STEPS
    wait: int = 0
    last_run: int = 0
    last_seen: int = -QUIET_STEPS

    def is_due(self, step: int) -> bool:
        """The cause is there: whether to act now."""
        if step - self.last_seen > QUIET_STEPS:
            self.wait = self.first
        self.last_seen = step
        return step - self.last_run >= self.wait

    def run(self, step: int) -> None:
        """It is acted on; double the wait."""
        self.last_run, self.wait = step, min(MAX_STEPS, max(MIN_STEPS, 2 * self.wait))


@dataclass(frozen=True, slots=True)
class _Tried:
    """A share that took too long: as it was allowed, as it was moved, and the step without what was computed again."""

    movable_share: float
    moved_share: float
    step_s: float


class Feedback:
    """See the notes.

    Attributes:
        movable_share: that the next plan is to move at most.
        kept_s: of a step with everything kept.
        growth: the fraction by which storages are larger than those of the plan.
        reason: of the last action.
    """

    def __init__(self) -> None:
        self.movable_share = 1.0
        self.kept_s = 0.0
        self.growth = 0.0
        self.reason = ""
        self._plan: PlanInForce | None = None
        self._rates: tuple[float, ...] = ()
        self._times_s: deque[float] = deque(maxlen=COUNTED_STEPS)
        self._tried: _Tried | None = None
        self._raises = 0  # since the share was lowered
        self._share_backoff, self._rates_backoff, self._record_backoff = Backoff(), Backoff(first=0), Backoff()
        self._resting_until = 0

    @property
    def measured_step_s(self) -> float | None:
        """The median of the last steps under the plan, as it counts here; None before the first."""
        return median_low(self._times_s) if self._times_s else None

    def recorded(self, step_s: float, moving_s: float) -> None:
        """There is a new trace.

        Args:
            step_s: of its step.
            moving_s: that kernels took longer in it for moving, as far as that is known.
        """
        self.kept_s, self.growth = max(MIN_KEPT_FRACTION * step_s, step_s - moving_s), 0.0
        self._tried = None
        self._times_s.clear()

    def planned(self, plan: PlanInForce, rates: tuple[float, ...], step: int, *, is_new: bool) -> None:
        """A plan is made.

        Args:
            rates: of the drives, as the plan has them.
            step: number of the last step.
            is_new: whether it is another than the one before.
        """
        if self._plan is None:  # nothing but larger storages asks for another at once
            for backoff in (self._share_backoff, self._rates_backoff, self._record_backoff):
                backoff.last_run = step
        self._plan, self._rates, self.movable_share = plan, rates, plan.limits.movable_share
        if is_new or self.growth:
            self._times_s.clear()
        if self.growth:
            self.kept_s, self.growth, self._tried = self.kept_s * (1 + self.growth), 0.0, None

    def rest(self, step: int) -> None:
        """No plan could be made, or nothing be recorded: ask for nothing for a while."""
        self._record_backoff.run(step)
        self._resting_until = step + self._record_backoff.wait

    def may_record(self, step: int) -> bool:
        """Whether steps may be recorded where there is no plan."""
        return step >= self._resting_until

    def decide(self, step: int, time_s: float, rates: tuple[float, ...], mismatch: PlanMismatch) -> Action:
        """The action after a step under the plan.

        Args:
            step: its number.
            time_s: from its begin to its end.
            rates: of the drives as they are now.
            mismatch: with the plan.
        """
        plan = self._plan
        self.growth = mismatch.growth or self.growth
        if plan is None or step < self._resting_until:
            return Action.GO_ON
        if mismatch.growth > MAX_DRIFT:
            return self._because(Action.PLAN, f"storages are larger than those of the plan by {mismatch.growth:.0%}")
        planned_bytes = max(1, plan.trace.saved_bytes * mismatch.micro_steps)
        unlike = _unlike(plan, mismatch, mismatch.missed_bytes / planned_bytes)
        if unlike:
            if not self._record_backoff.is_due(step):
                return Action.GO_ON
            self._record_backoff.run(step)
            return self._because(Action.RECORD, unlike)
        if mismatch.drift_bytes / planned_bytes > MAX_DRIFT:  # its time says nothing of the plan
            return Action.GO_ON
        self._times_s.append(time_s)
        changed = self._changed(plan, rates)
        if changed and self._rates_backoff.is_due(step):
            self._rates_backoff.run(step)
            return self._because(Action.PLAN, changed)
        adjusted = self._adjusted(plan, step) if len(self._times_s) >= MIN_STEPS else ""
        return self._because(Action.PLAN, adjusted) if adjusted else Action.GO_ON

    def _because(self, action: Action, reason: str) -> Action:
        self.reason = reason
        return action

    def _changed(self, plan: PlanInForce, rates: tuple[float, ...]) -> str:
        """What has changed about the drives, or may have."""
        if len(rates) != len(self._rates) or any(
            planned and not RATE_BAND[0] <= now / planned <= RATE_BAND[1]
            for now, planned in zip(rates, self._rates, strict=True)
        ):
            return "the drives' rates have changed"
        is_idle = bool(rates) and plan.limits.movable_share >= LEAST_SHARE and not plan.moved_share
        return "nothing is moved, and the drives may be faster by now" if is_idle else ""

    # ---- the share ----------------------------------------------------------------------------------------------

    def _adjusted(self, plan: PlanInForce, step: int) -> str:
        """Why the share is another from now on; empty if it is not."""
        median_s = median_low(self._times_s)  # of two groups of steps it is that of one
        spread_s = median(abs(time_s - median_s) for time_s in self._times_s)
        error_s = _ERROR * spread_s / len(self._times_s) ** 0.5
        self.kept_s = min(self.kept_s, median_s + error_s)
        if not plan.moved_share:
            self.kept_s = max(median_s - plan.computed_s, MIN_KEPT_FRACTION * median_s)
        moving_s, room_s = median_s - plan.computed_s - self.kept_s, self._room_s(plan)
        if plan.moved_share and moving_s > 0 and moving_s - error_s > room_s:
            return self._lowered(plan, median_s, step)
        return self._raised(plan, step, has_room=RAISE_FACTOR * moving_s <= room_s)

    def _room_s(self, plan: PlanInForce) -> float:
        """What moving may take of a step."""
        overhead = plan.limits.max_step_overhead
        allowed_s = self.kept_s * (1 + overhead)
        if plan.limits.activation_budget_bytes is not None:
            allowed_s = max(allowed_s, plan.plan.prediction.step_s * (1 + overhead))
        return max(0.0, allowed_s - self.kept_s - plan.computed_s)

    def _lowered(self, plan: PlanInForce, median_s: float, step: int) -> str:
        backoff, share, step_s = self._share_backoff, plan.moved_share, median_s - plan.computed_s
        if self._raises:
            backoff.last_seen = step  # the cause was there all the while: this is no news after a quiet time
        if not backoff.is_due(step):
            return ""
        backoff.run(step)
        self._raises = 0
        if self._tried is None:
            self.movable_share = share * max(LEAST_PART, self._room_s(plan) / (step_s - self.kept_s))
            self._tried = _Tried(plan.limits.movable_share, share, step_s)
        else:  # less did not help as it should: with nothing moved, steps show what they take at least
            self.movable_share = 0.0
        return f"steps took {median_s:.3g} s where {self.kept_s:.3g} s were measured with everything kept"

    def _raised(self, plan: PlanInForce, step: int, *, has_room: bool) -> str:
        share, tried, backoff = plan.limits.movable_share, self._tried, self._share_backoff
        if tried is not None:  # what that share takes is known by now
            if not share and step - backoff.last_run < backoff.wait // 2:
                return ""
            self._tried = None
            moving_s, room_s = tried.step_s - self.kept_s, self._room_s(plan)
            found = tried.movable_share if moving_s <= room_s else tried.moved_share * room_s / moving_s
            if found > RAISE_FACTOR * share:
                self.movable_share = found
                backoff.run(step)
                return f"a step with everything kept takes {self.kept_s:.3g} s by now"
        if share >= 1 or not has_room or step - backoff.last_run < max(MIN_STEPS, backoff.wait >> self._raises // 2):
            return ""
        least = 0.0 if plan.moved_share else LEAST_SHARE  # where a share moves nothing, the next does, or the one after
        self.movable_share = min(1.0, max(least, RAISE_FACTOR * share))
        self._raises, backoff.last_run = self._raises + 1, step
        return "steps leave room to move more"


def _unlike(plan: PlanInForce, mismatch: PlanMismatch, missed: float) -> str:
    """How the step was another than the recorded ones; empty if it was not."""
    if mismatch.micro_steps != plan.trace.micro_steps:
        had, planned = mismatch.micro_steps, plan.trace.micro_steps
        return f"a step had {had} micro-step{'s' if had != 1 else ''} instead of {planned}"
    if mismatch.unknown_saves:
        return f"{mismatch.unknown_saves} saves that the plan did not know"
    return f"{missed:.0%} of what the plan expects was not saved" if missed > MAX_DRIFT else ""


# ---- one optimizer step ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Step:
    """One optimizer step.

    Attributes:
        began, ended: marks of the clock, without the time between two steps.
        plan: number of the plan in force; 0 for none.
        moving_before_s: seconds that the host had spent on moving when the step began.
        mismatch: with the plan.
        has_compiled: whether something was compiled in it; then its times say nothing of other steps.
    """

    began: Any
    plan: int = 0
    moving_before_s: float = 0.0
    mismatch: PlanMismatch = field(default_factory=PlanMismatch)
    ended: Any = None
    has_compiled: bool = False
    _compilations: int = field(default_factory=compilations)

    def end(self, ended: Any) -> None:
        self.ended, self.has_compiled = ended, compilations() != self._compilations
