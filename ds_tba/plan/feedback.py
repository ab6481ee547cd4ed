"""Judges the steps under a plan: what share of the bytes may be offloaded, and when to plan or to record again.

[Note: One number] A replay cannot know what offloading costs the kernels, the host's threads or other processes, nor
all that computing again costs. So the steps of a plan are measured. Where three of four take longer than
``max_step_overhead`` allows, the share falls to a quarter; where they leave room for it, it rises by a tenth. It bounds
the bytes that may be offloaded and the part of ``max_step_overhead`` that the planner may spend: with 0 everything is
kept. With a budget a step is too long that takes longer than its plan said, and the planner takes more than the share
where less would not fit. All ranks rise and fall together. Where ZeRO uses the drive, too, the share begins at 0.

[Note: One back-off] Each plan and each recording doubles the steps until the next, whatever asks for it; the share
alone rises without that. So a machine whose steps change by themselves is left alone. Too long steps take a rise back
at once, and only storages that are larger than ever before are planned for at once.

[Note: The kept step] What a step takes with everything kept is read from the recording, in which our own work does not
count, and from the steps of a plan that keeps everything. If it is too short, because the machine has become slower,
falls end in such a plan. If it is too long (of a slow time), a step under a plan is shorter. No step is shorter because
it offloads: so the kept step is as short, and if that is a tenth shorter, steps are recorded again, once.

Knows numbers only, and no clock; does not decide alone, as ranks have to agree.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from statistics import median_low

from ds_tba.core.hooks import compilations
from ds_tba.plan.plan import Plan
from ds_tba.plan.trace import Trace

# Steps under a plan before it is judged, and the shortest and the longest wait of the back-off.
MIN_STEPS, MAX_STEPS = 5, 640
# Fraction by which the share rises, and the least that it is; the factor by which it falls.
INCREASE, DECREASE = 0.1, 4
# Factor of a drive's rate, up or down, that asks for another plan.
RATE_CHANGE = 1.5
# Fraction by which the bytes of a step may differ from those of the plan, and its time fall short of the kept step.
MAX_DRIFT = 0.1


class Action(IntEnum):
    """The next thing to do after a step; where ranks differ, the highest is done."""

    GO_ON = 0
    RISE = 1  # of the share, and plan
    FALL = 2
    PLAN = 3
    RECORD = 4


class Feedback:
    """See the notes."""

    def __init__(self, *, is_drive_shared: bool = False) -> None:  # by ZeRO
        # The fraction of the movable bytes, and of max_step_overhead, for the next plan; the same on all ranks.
        self.share = 0.0 if is_drive_shared else 1.0
        self.kept_s = 0.0  # of a step with everything kept
        self.growth = 0.0  # fraction by which storages were larger than those of the plan, at most
        self.reason = ""  # for the last action that was asked for
        self._plan: Plan  # in force
        self._rates = (0.0, 0.0)  # at which it was made
        self._learnt_s = 0.0  # the kept step of the recording, or of a plan that keeps all
        self._times_s: deque[float] = deque(maxlen=MAX_STEPS // 10)
        self._wait_steps = self._acted_at = 0  # of the back-off, and the step at which it began
        self._risen_at = -MAX_STEPS  # the step of a rise, if that was the last change; on all ranks alike
        self._is_recording_again = False  # because the kept step was too long

    @property
    def measured_step_s(self) -> float | None:
        """Return the median seconds of the last steps under the plan; None before the first."""
        times_s = [*self._times_s]  # as a report is made in any thread, and another plan may begin meanwhile
        return median_low(times_s) if times_s else None

    def learn(self, step_s: float, moving_s: float) -> None:
        """Take the kept step from a new trace, to whose kernels offloading added ``moving_s``, as far as is known."""
        # Half of it at least: a high estimate of offloading must not explain the whole step away, and forbid all moves.
        self.kept_s = max(step_s / 2, step_s - moving_s)
        self.growth = 0.0
        # Recorded again, it is too long for a reason that stays: no third recording.
        self._learnt_s = 0.0 if self._is_recording_again else self.kept_s
        self._is_recording_again = False

    def corrected(self, trace: Trace) -> Trace:
        """Return a trace as long as a kept step takes, and with storages as large as steps under the plan had."""
        larger = 1 + self.growth
        longer = self.kept_s * larger / trace.step_s if trace.step_s and self.kept_s else 1.0
        return trace.scaled(longer, larger)

    def follow(self, plan: Plan, rates: tuple[float, float]) -> None:
        """Judge steps by a plan from now on, which was made at these rates of the drives."""
        self._plan = plan
        self._rates = rates
        self.kept_s = plan.trace.step_s
        self.growth = 0.0

    def is_due(self, step: int) -> bool:
        """Return whether the wait since the last plan or recording is over; see [Note: One back-off]."""
        return step - self._acted_at >= self._wait_steps

    def decide(self, step: int, time_s: float, rates: tuple[float, float], seen: OptimizerStep) -> Action:
        """Return the action to take after a step under the plan, with the rates of the drives as they are now."""
        plan, is_due = self._plan, self.is_due(step)
        if seen.growth > MAX_DRIFT:
            # Where no plan could be made for as large ones, it is tried again when it is due.
            if seen.growth <= self.growth and not is_due:
                return Action.GO_ON
            self.growth = max(self.growth, seen.growth)
            return self._ask(Action.PLAN, f"storages are larger than those of the plan by {seen.growth:.0%}")
        planned_bytes = max(1, plan.trace.saved_bytes * seen.micro_steps)
        missed = seen.missed_bytes / planned_bytes
        if seen.micro_steps != plan.trace.micro_steps or seen.unknown_saves or missed > MAX_DRIFT:
            counts = f"{seen.micro_steps} micro-steps, {seen.unknown_saves} unknown saves, {missed:.0%} missing"
            if not is_due:
                return Action.GO_ON
            self._is_recording_again = False  # the recording for that has come to nothing
            return self._ask(Action.RECORD, f"a step differs from the recorded ones: {counts}")
        if seen.drift_bytes / planned_bytes > MAX_DRIFT:  # its time says nothing of the plan
            return Action.GO_ON
        self._times_s.append(time_s)
        if len(self._times_s) < MIN_STEPS:
            return Action.GO_ON
        # The share first: rates that change all the time would keep it from rising.
        found = self._judged(plan, step)
        pairs = zip(rates, self._rates, strict=True)
        is_changed = any(not planned / RATE_CHANGE <= now <= planned * RATE_CHANGE for now, planned in pairs)
        if found is Action.GO_ON and is_due and is_changed:
            return self._ask(Action.PLAN, "the drives' rates have changed")
        return found

    def change(self, action: Action, step: int) -> None:
        """Begin anew after a step with another plan, for which the share rises or falls, as all ranks do together."""
        self._times_s.clear()  # or steps of the plan before would be held against the next one
        if action is Action.RISE:
            self.share = min(1.0, round(self.share + INCREASE, 3))
            self._risen_at = step
            return
        is_on_trial = step - self._risen_at <= 5 * MIN_STEPS  # ranks talk some steps later
        self._risen_at = -MAX_STEPS
        self._acted_at = step
        self._wait_steps = min(MAX_STEPS, max(MIN_STEPS, 2 * self._wait_steps))
        if action is Action.FALL:
            lower = round(self.share - INCREASE, 3) if is_on_trial else self.share / DECREASE
            self.share = lower if lower >= INCREASE else 0.0  # falls end in a plan that keeps everything

    def _ask(self, action: Action, reason: str) -> Action:
        self.reason = reason
        return action

    def _judged(self, plan: Plan, step: int) -> Action:
        """Return whether the share is to rise or to fall, by the times of the last steps."""
        # Three of four steps decide, of as many as were waited for, or alternating steps would be reviewed for ever.
        needed = MIN_STEPS if step - self._risen_at <= 3 * MIN_STEPS else min(self._wait_steps, MAX_STEPS // 10)
        times_s = sorted([*self._times_s][-max(needed, 3 * MIN_STEPS) :])
        quarter = len(times_s) // 4
        median_s = median_low(times_s)  # of two groups of steps it is that of one
        self.kept_s = min(self.kept_s, times_s[-1 - quarter])
        if plan.keeps_all:
            self.kept_s = self._learnt_s = times_s[quarter]
        promised_s = plan.prediction.step_s if plan.limits.activation_budget_bytes is not None else 0.0
        allowed_s = (1 + plan.limits.max_step_overhead) * max(self.kept_s, promised_s)
        if len(times_s) >= needed and self.share and not plan.keeps_all and times_s[quarter] > allowed_s:
            took = f"steps took {median_s:.3g} s where {self.kept_s:.3g} s were measured with everything kept"
            return self._ask(Action.FALL, took)
        if self.is_due(step) and self.kept_s < (1 - MAX_DRIFT) * self._learnt_s:
            took = f"steps took {median_s:.3g} s, and with everything kept {self._learnt_s:.3g} s before"
            self._is_recording_again = True
            return self._ask(Action.RECORD, took)
        # With the cost of the rise, or it would be taken back at once.
        more = 1 + INCREASE / self.share if self.share else 1.0
        if self.share < 1 and self.is_due(step) and self.kept_s + more * (median_s - self.kept_s) <= allowed_s:
            return self._ask(Action.RISE, "steps leave room to move more")
        return Action.GO_ON


# ---- one optimizer step ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class OptimizerStep:
    """One optimizer step, and how its saves differ from those of the plan's trace."""

    began: object  # mark of the clock, without the time since the step before
    micro_steps: int = 0
    unknown_saves: int = 0  # that the plan has no storage or no block for
    missed_bytes: int = 0  # of storages of the plan that were not saved
    drift_bytes: int = 0  # by which storages differ in size, those that were not saved in full
    growth: float = 0.0  # fraction by which what was saved is larger, of the micro-step that grew most
    ended: object = None
    is_usual: bool = True  # else something was compiled in it, or a forward raised: its time says nothing of others
    _compilations: int = field(default_factory=compilations)

    def end(self, ended: object) -> None:
        self.ended = ended
        self.is_usual &= compilations() == self._compilations
