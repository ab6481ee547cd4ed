"""Looks at each step under a plan, and says what should be done about it.

[Note: Looking] A plan promises what moving will cost. A step in which it cost more than that and than what the user
allows, or in which storages found no room, asks for a new plan from what was measured since; where the rates are still
those of the plan, they are taken to be lower than measured, by as much as the promise was exceeded, until it holds.
Steps in which lanes moved much on the processor of the kernels, and which are longer than promised one and all (or
shorter), ask for a plan that counts that as taken by the lanes (or less), and what is shorter than that as not taken by
the step. What is not moved is not measured, so that drives that are slower than they were, or are taken to be, and
lanes that were blamed, are measured anew now and then. Storages that the plan does not know, or steps that take longer
for no reason of ours, or less time than the trace says, ask for a new trace.

Knows numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from statistics import median

# What a look takes for the noise of the machine; one step may be further off than a few.
NOISE_S = 0.001
NOISE_FACTOR = 1.25
ONE_STEP_FACTOR = 2.0
# A rate that has left this band since the plan was made asks for another plan.
RATE_BAND = (0.67, 1.5)
# By how much rates are trusted less at a time: where the promise was just missed, and where it was far off.
SAFETY_STEP, LONGEST_SAFETY_STEP = 0.7, 0.5
LEAST_SAFETY = 1e-3
MOST_DRIFT = 0.1
WALL_STEPS = 5
MOVED_STEPS = 3
# Of so many steps all but a few are longer than promised by more than this part (or all but a few shorter), and not by
# more than moving can explain: then lanes that moved so much in a step are said to have taken it.
OFF_STEPS, FEW_STEPS = 8, 2
OFF_PART = 0.03
LEAST_LANE_BYTES = 4 << 20
# Least and most steps between two of a kind; each time twice as many.
LATE_STEPS = (1, 1000)
RATE_STEPS = (5, 40)
TAKEN_STEPS = (8, 1000)
PROBE_STEPS = (50, 1000)
TRACE_STEPS = (10, 1000)
QUIET_STEPS = 50


class Want(IntEnum):
    """What a rank would do at the beginning of a step; of several ranks' wishes the highest is done."""

    GO_ON = 0
    PLAN = 1
    PROBE = 2  # measure the machine again, then plan
    RECORD = 3
    GIVE_UP = 4


@dataclass(slots=True)
class Backoff:
    """How many steps must pass before something is done again."""

    least: int
    most: int
    wait: int = 0
    done_at: int = 0

    def is_due(self, step: int) -> bool:
        """Whether it may be done now."""
        return step - self.done_at >= max(self.wait, self.least)

    def done(self, step: int) -> None:
        """It was done; the next time comes after twice as many steps, unless there was quiet in between."""
        if step - self.done_at > max(QUIET_STEPS, 2 * self.wait):
            self.wait = 0
        self.done_at, self.wait = step, min(self.most, max(self.least, 2 * self.wait))


@dataclass(frozen=True, slots=True)
class Look:
    """What one step showed.

    Attributes:
        wall_s: from its beginning to that of the next.
        moved_s: of the host, in moving.
        refusals: storages that were to be moved and found no room.
        unplanned: saves that the plan does not know.
        drift: by which part of all saved bytes storages differ in size from those of the plan.
        rates: of the drives as they are now.
        lane_bytes: moved by lanes beside kernels that run on the same processor; 0 where they run on a device.
    """

    wall_s: float
    moved_s: float
    refusals: int
    unplanned: int
    drift: float
    rates: tuple[float, ...]
    lane_bytes: int = 0


class Monitor:
    """See [Note: Looking].

    Attributes:
        safety: the part of the measured rates that a plan should count on.
        reason: of the last wish.
        excess_s: by which steps are longer than promised (or shorter: below 0), if the last look asked for a plan for
            that reason; else 0.
    """

    def __init__(self) -> None:
        self.safety = 1.0
        self.reason = ""
        self.excess_s = 0.0
        self._has_blamed = False
        self._late = Backoff(*LATE_STEPS)
        self._rates_moved = Backoff(*RATE_STEPS)
        self._taken = Backoff(*TAKEN_STEPS)
        self._probe = Backoff(*PROBE_STEPS)
        self._again = Backoff(*TRACE_STEPS)
        self._walls_s: list[float] = []
        self._moved_s: list[float] = []
        self._planned_at = 0
        self._step_s = self._allowed_s = self._promised_s = 0.0
        self._rates: tuple[float, ...] = ()
        self._best_rates: tuple[float, ...] = ()

    def planned(self, step: int, step_s: float, allowed_s: float, promised_s: float, rates: tuple[float, ...]) -> None:
        """A plan is in force from this step on.

        Args:
            step_s: what it promises.
            allowed_s: what moving may cost in a step.
            promised_s: what the plan says that it will.
            rates: what was measured when it was made.
        """
        self._planned_at, self._step_s, self._allowed_s, self._promised_s = step, step_s, allowed_s, promised_s
        best = self._best_rates if len(self._best_rates) == len(rates) else rates
        self._rates, self._best_rates = rates, tuple(map(max, rates, best))
        self._walls_s, self._moved_s = [], []

    @property
    def measured_step_s(self) -> float | None:
        """What steps under the plan take: the median of the last few; None before the first."""
        return median(self._walls_s[-WALL_STEPS:]) if self._walls_s else None

    def traced(self, step: int) -> None:
        """There is a new trace."""
        self._again.done(step)

    def probed(self, step: int) -> None:
        """The machine was measured again."""
        self.safety = 1.0
        self._has_blamed = False
        self._probe.done(step)

    def wish(self, step: int, look: Look) -> Want:
        """What to do at the beginning of ``step``, after what the one before it showed."""
        self._walls_s = [*self._walls_s[1 - OFF_STEPS :], look.wall_s]
        self.excess_s = 0.0
        if look.unplanned and self._again.is_due(step):
            return self._because(Want.RECORD, f"{look.unplanned} saves that the plan did not know")
        if look.drift > MOST_DRIFT and self._again.is_due(step):
            return self._because(Want.RECORD, f"storages differ in size from those of the plan by {look.drift:.0%}")
        self._moved_s = [*self._moved_s[1 - MOVED_STEPS :], look.moved_s]
        is_late = look.moved_s > ONE_STEP_FACTOR * self._allowed_s + NOISE_S or (
            len(self._moved_s) == MOVED_STEPS and median(self._moved_s) > NOISE_FACTOR * self._allowed_s + NOISE_S
        )
        if (is_late or look.refusals) and self._late.is_due(step):
            self._late.done(step)
            if self._are_as_planned(look.rates):
                part = self._promised_s / look.moved_s if look.moved_s else SAFETY_STEP
                fall = min(SAFETY_STEP, max(LONGEST_SAFETY_STEP, part))
                self.safety = max(LEAST_SAFETY, self.safety * fall)
            found = f"moving took {look.moved_s:.3g} s where {self._allowed_s:.3g} s were allowed"
            return self._because(Want.PLAN, f"{found}, {look.refusals} storages found no room")
        if (
            step - self._planned_at >= WALL_STEPS
            and not self._are_as_planned(look.rates)
            and self._rates_moved.is_due(step)
        ):
            self._rates_moved.done(step)
            return self._because(Want.PLAN, "the drives' rates have changed")
        excess_s = self._found_excess_s() if look.lane_bytes >= LEAST_LANE_BYTES else 0.0
        if excess_s and self._taken.is_due(step):
            self._taken.done(step)
            self.excess_s = excess_s
            if excess_s > 0 and not self._has_blamed:
                self._has_blamed, self._probe.done_at = True, step  # the plan that comes has its time first
            apart = f"{abs(excess_s):.3g} s {'longer' if excess_s > 0 else 'shorter'} than was expected"
            return self._because(Want.PLAN, f"steps that move are {apart}")
        if (self.safety < 1.0 or self._has_blamed or self._were_better(look.rates)) and self._probe.is_due(step):
            return self._because(Want.PROBE, "the drives may be faster again")
        if len(self._walls_s) >= WALL_STEPS and self._again.is_due(step):
            wall_s = self.measured_step_s or 0.0
            if wall_s and not self._step_s / NOISE_FACTOR <= wall_s <= NOISE_FACTOR * self._step_s:
                return self._because(Want.RECORD, f"steps took {wall_s:.3g} s where {self._step_s:.3g} s were expected")
        return Want.GO_ON

    def _because(self, want: Want, reason: str) -> Want:
        self.reason = reason
        return want

    def _found_excess_s(self) -> float:
        """By which steps are longer than promised, or shorter, one and all, as moving may well explain; else 0."""
        if len(self._walls_s) < OFF_STEPS:
            return 0.0
        *_, longer_s = sorted(self._walls_s, reverse=True)[: OFF_STEPS - FEW_STEPS]
        *_, shorter_s = sorted(self._walls_s)[: OFF_STEPS - FEW_STEPS]
        excess_s = max(0.0, longer_s - self._step_s) or min(0.0, shorter_s - self._step_s)
        is_off = OFF_PART * self._step_s + NOISE_S < abs(excess_s) < (NOISE_FACTOR - 1) * self._step_s
        return excess_s if is_off else 0.0

    def _were_better(self, rates: tuple[float, ...]) -> bool:
        """Whether a drive was seen to be faster: where the plan does not use it any more, nobody notices that it is."""
        return len(rates) == len(self._best_rates) and any(
            now < RATE_BAND[0] * best for now, best in zip(rates, self._best_rates, strict=True)
        )

    def _are_as_planned(self, rates: tuple[float, ...]) -> bool:
        return len(rates) == len(self._rates) and all(
            not planned or RATE_BAND[0] <= now / planned <= RATE_BAND[1]
            for now, planned in zip(rates, self._rates, strict=True)
        )
