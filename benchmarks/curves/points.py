"""The results of a race: one point of the curve for each contender, and the claims about them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from curves.turns import AGAIN, PLAIN, Contender, Race, StepTaken

# Peaks closer than this part of the plain model's are equal: what is read ahead then differs from step to step.
PEAK_NOISE = 0.02
MIN_STEP_NOISE = 0.02
PEAK_ERROR, STEP_ERROR = 0.05, 0.15
# Where the same model differs from itself by more, nothing can be said of others.
MAX_STEP_NOISE = 0.10


@dataclass(frozen=True)
class Spread:
    """One figure over the rounds: its median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high)

    @property
    def noise(self) -> float:
        """Half the width of the middle half, as a part of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0


@dataclass(frozen=True)
class Point:
    """One contender.

    Attributes:
        turns_s: the median step of each turn.
        step_s: the same over the rounds.
        to_plain: the same as ratios to the plain model's turn in the same round.
        peak_bytes: by the neutral meter.
        saved_peak_bytes: as the offloader counts, and as the plan in force promised it.
        step_error, peak_error: promised by measured figure, less 1; medians over the steps.
    """

    name: str
    planner: str
    limits: dict[str, Any]
    rounds: int
    turns_s: tuple[float, ...]
    step_s: Spread
    to_plain: Spread
    peak_bytes: int | None
    saved_peak_bytes: float | None
    promised_peak_bytes: float | None
    promised_step_s: float | None
    step_error: float | None
    peak_error: float | None
    plan: dict[str, Any] | None
    plans: int


Rounds = Sequence[dict[str, list[StepTaken]]]


class Outcome(NamedTuple):
    """A point for each contender of a race, and whether all trained alike, bit for bit."""

    points: list[Point]
    rounds: int
    are_equal: bool


def outcome(race: Race, rounds: int, steps: int, ends_s: float) -> Outcome:
    """Run a race (:meth:`Race.run`) and return its outcome."""
    taken = race.run(rounds, steps, ends_s)
    peaks, are_equal = race.proven()
    found = [point(runner.contender, taken, peaks[name]) for name, runner in race.runners.items()]
    return Outcome(found, len(taken), are_equal)


def point(contender: Contender, rounds: Rounds, peak_bytes: int | None, base: str = PLAIN.name) -> Point:
    """Return the point of one contender; ``to_plain`` is to the contender ``base``."""
    turns = [one[contender.name] for one in rounds]
    plain_s = [statistics.median(step.step_s for step in one[base]) for one in rounds]
    times_s = [statistics.median(step.step_s for step in turn) for turn in turns]
    steps = [step for turn in turns for step in turn]
    planned = [(step, step.plan) for step in steps if step.plan is not None and not step.is_recorded]
    peaks = [(step.saved_peak_bytes, plan) for step, plan in planned if step.saved_peak_bytes]
    device = [step.device_peak_bytes for step in steps if step.device_peak_bytes is not None]
    return Point(
        contender.name, contender.planner or PLAIN.name, dict(contender.limits), len(rounds), tuple(times_s),
        step_s=Spread.of(times_s),
        to_plain=Spread.of([mine / plain for mine, plain in zip(times_s, plain_s, strict=True)]),
        peak_bytes=max(device) if device else peak_bytes,
        saved_peak_bytes=_median([peak for peak, _ in peaks]),
        promised_peak_bytes=_median([plan["peak_saved_bytes"] for _, plan in planned]),
        promised_step_s=_median([plan["step_s"] for _, plan in planned]),
        step_error=_median([plan["step_s"] / step.step_s - 1 for step, plan in planned]),
        peak_error=_median([plan["peak_saved_bytes"] / peak - 1 for peak, plan in peaks]),
        plan=steps[-1].plan,
        plans=steps[-1].plans,
    )  # fmt: skip


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


@dataclass(frozen=True)
class Verdict:
    """The claims about one model at one batch.

    Attributes:
        beaten: points for which adaptive has none as good, in peak and in time. The plain model is not among them: like
            all planners, adaptive has hooks, and ``hooks`` says what they cost.
        step_noise: least fraction by which equal things differ here: the plain model from itself, and contenders under
            equal plans from each other. Where two are compared, half of what the middle half of the rounds spans
            counts, if that is more.
        hooks: fraction of the plain step that everything kept by us adds to it.
    """

    beaten: list[str]
    step_noise: float
    peak_errors: dict[str, float]
    step_errors: dict[str, float]
    hooks: float | None = None

    @property
    def holds(self) -> bool:
        """True if every claim held."""
        near = all(abs(one) <= PEAK_ERROR for one in self.peak_errors.values())
        near = near and all(abs(one) <= STEP_ERROR for one in self.step_errors.values())
        return near and not self.beaten and self.step_noise <= MAX_STEP_NOISE

    def line(self) -> str:
        """Return the verdict in words."""
        beyond = "yes" if not self.beaten else f"NO: not beyond {', '.join(self.beaten)}"
        if self.step_noise > MAX_STEP_NOISE:
            beyond = "TOO NOISY TO TELL"
        noise = f"noise: step {self.step_noise:.1%}, peak {PEAK_NOISE:.0%} of the plain model's"
        said = [f"adaptive on or beyond every other curve: {beyond} ({noise})"]
        said += [_worst("peak", self.peak_errors, PEAK_ERROR), _worst("step time", self.step_errors, STEP_ERROR)]
        said += [] if self.hooks is None else [f"the hooks alone: {self.hooks:+.1%} of the plain step"]
        return "; ".join(said)


def _worst(what: str, errors: dict[str, float], bound: float) -> str:
    if not errors:
        return f"predicted {what}: nothing to compare"
    name = max(errors, key=lambda one: abs(errors[one]))
    within = "within" if abs(errors[name]) <= bound else "NOT within"
    return f"predicted {what} {within} {bound:.0%} (worst {errors[name]:+.1%}: {name})"


def verdict(points: Sequence[Point]) -> Verdict:
    """Check the claims."""
    apart = [max(abs(one.to_plain.median - 1), one.to_plain.noise) for one in points if one.name == AGAIN.name]
    ours = [one for one in points if one.planner == "adaptive"]
    others = [one for one in points if one.planner not in ("adaptive", PLAIN.name)]
    pairs = [(one, other) for one in ours for other in others if _does_the_same(one, other)]
    step_noise = max([MIN_STEP_NOISE, *apart, *(abs(_ratio(*pair).median - 1) for pair in pairs)])
    plain_bytes = max((one.peak_bytes or 0 for one in points if one.name == PLAIN.name), default=0)
    room_bytes = PEAK_NOISE * plain_bytes
    return Verdict(
        [other.name for other in others if not any(_is_as_good(one, other, step_noise, room_bytes) for one in ours)],
        step_noise,
        {one.name: one.peak_error for one in points if one.peak_error is not None},
        {one.name: one.step_error for one in points if one.step_error is not None},
        next((one.to_plain.median - 1 for one in points if one.planner == "keep"), None),
    )


def _is_as_good(one: Point, other: Point, step_noise: float, room_bytes: float) -> bool:
    ratio = _ratio(one, other)
    is_small = None not in (one.peak_bytes, other.peak_bytes) and one.peak_bytes <= other.peak_bytes + room_bytes
    return is_small and ratio.median <= 1 + max(step_noise, ratio.noise)


def _ratio(one: Point, other: Point) -> Spread:
    """Return the ratio of steps in the same round: whatever slows the machine for some seconds slows both."""
    return Spread.of([mine / its for mine, its in zip(one.turns_s, other.turns_s, strict=True)])


def _does_the_same(one: Point, other: Point) -> bool:
    """Return whether their plans have the same work in a step, whatever they promise."""
    if one.plan is None or other.plan is None or one.peak_bytes != other.peak_bytes:
        return False
    return all(one.plan[what] == other.plan[what] for what in ("bytes", "recomputed_blocks", "written_bytes"))
