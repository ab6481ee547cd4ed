"""The cost of recomputing and moving: one fit over the steps that have run.

[Note: One equation] The time of a step, without its waits for lanes and copies, is::

    kept_s * (1 + recompute_factor * recomputed_fraction) + compute_s_per_byte * moved_bytes

Storages that are made again from others take their measured seconds, which are taken off before.
``recomputed_fraction`` is the forward of the recomputed blocks as a fraction of a step; ``moved_bytes`` went out and
came back. Steps under one plan are one observation, their median, which a few odd steps do not change. The recorded
micro-steps are the first observation, in which everything was moved; each plan adds one. Where observations say
little, the prior counts, and the error stays large. Plans are made for the estimates plus one standard error each.
Where the steps of now contradict those under earlier plans, the machine has changed, and the earlier ones are left out.

[Note: Unforeseen waits] A replay predicts how long a plan waits. Where steps waited longer, the excess per byte is one
more cost of moving: the next plan moves less. This cost is remembered after the plan has changed, and is halved at
every review, until moving more is tried again.

Knows numbers only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# Of each plan so many steps count, and so many plans.
MAX_STEPS, MAX_PLANS = 8, 8
# The least error of an observation, as a fraction of its time: a machine is not the same from one plan to the next.
MIN_ERROR_FRACTION = 0.02
# Where the steps of now are further from the fit, earlier plans are left out, the oldest first.
MAX_RESIDUAL_FRACTION = 0.1
# Of the shortest step: moving and recomputing take at most the rest.
MIN_KEPT_FRACTION = 0.5
# Prior: recomputing a block takes as long as its forward, give or take this error, and stays within these bounds.
RECOMPUTE_ERROR = 0.25
MIN_RECOMPUTE_FACTOR, MAX_RECOMPUTE_FACTOR = 1 / 3, 3.0
# So small a part of an unknown's usual size is the error of one that is held at its bound.
_FIXED = 1e-6
_NO_ERROR = 1e-15
_MIN_TIME_S = 1e-6  # of a step that only waited
# Of a normal distribution: the standard deviation as a multiple of the median absolute deviation.
_DEVIATION = 1.4826


@dataclass(frozen=True, slots=True)
class Observation:
    """The measured cost of one step.

    Attributes:
        time_s: of the step, without its waits, without the training thread's own copies, and without what it took to
            make storages again from others.
        recomputed_fraction: the forward of the recomputed blocks, as a fraction of the trace's step.
        moved_bytes: of the storages that went out and came back.
        unforeseen_wait_s: how much longer the step waited than its plan predicted.
    """

    time_s: float
    recomputed_fraction: float
    moved_bytes: int
    unforeseen_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """The cost of steps; see the notes.

    Attributes:
        kept_s: of a step in which nothing is moved or recomputed.
        recompute_factor: the time of recomputing, as a fraction of the forward.
        compute_s_per_byte: of moving, besides copies and waits.
        recompute_error, compute_error_s_per_byte: standard errors of these.
        wait_s_per_byte: how much longer than foreseen the last steps waited, for each byte that they moved.
        feared_wait_s_per_byte: the most of all plans, older ones discounted; new plans are made for this.
    """

    kept_s: float
    recompute_factor: float
    recompute_error: float
    compute_s_per_byte: float
    compute_error_s_per_byte: float
    wait_s_per_byte: float = 0.0
    feared_wait_s_per_byte: float = 0.0

    def time_s(self, step: Observation) -> float:
        """The time of such a step by [Note: One equation]."""
        again = self.recompute_factor * step.recomputed_fraction
        return self.kept_s * (1 + again) + self.compute_s_per_byte * step.moved_bytes


_Row = tuple[Observation, float]
Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Group:
    """The steps under one plan; with age ``doubt`` grows, which multiplies their error and divides their waits."""

    steps: deque[Observation] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    doubt: float = 1.0

    def row(self) -> _Row:
        """The median, and its standard error in seconds."""
        times_s = [one.time_s for one in self.steps]
        middle_s = max(_MIN_TIME_S, median(times_s))
        spread_s = _DEVIATION * median(abs(time_s - middle_s) for time_s in times_s) / len(times_s) ** 0.5
        found = Observation(
            middle_s,
            median(one.recomputed_fraction for one in self.steps),
            int(median(one.moved_bytes for one in self.steps)),
        )
        return found, self.doubt * (spread_s + MIN_ERROR_FRACTION * middle_s)

    @property
    def wait_s_per_byte(self) -> float:
        """Of unforeseen waits."""
        moved_bytes = median(one.moved_bytes for one in self.steps)
        return median(one.unforeseen_wait_s for one in self.steps) / moved_bytes if moved_bytes else 0.0


class Calibration:
    """Observations of one trace, and the fit to them."""

    def __init__(self) -> None:
        self._groups: deque[_Group] = deque(maxlen=MAX_PLANS)
        self._recompute_factor = 1.0

    def begin(self, recorded: Observation, recompute_factor: float = 1.0) -> None:
        """There is a new trace: forget the steps of the earlier one.

        Args:
            recorded: its micro-steps, as a step.
            recompute_factor: prior of the cost of recomputing.
        """
        self._groups.clear()
        self._recompute_factor = recompute_factor
        self.begin_plan()
        self.add(recorded)

    def begin_plan(self) -> None:
        """The next steps run under another plan."""
        if not self._groups or self._groups[-1].steps:
            self._groups.append(_Group())

    @property
    def is_beginning(self) -> bool:
        """Whether there is nothing but the recording."""
        return len(self._groups) <= 1

    def add(self, step: Observation) -> None:
        """A step is over."""
        self._groups[-1].steps.append(step)

    def age(self) -> None:
        """A review: trust earlier plans' steps half as much, as the machine may have changed since."""
        for group in list(self._groups)[:-1]:
            group.doubt *= 2.0

    def fit(self, compute_s_per_byte: float, error_s_per_byte: float) -> Fit:
        """The values that explain the observations best.

        Args:
            compute_s_per_byte, error_s_per_byte: prior of the cost of moving, and its error.
        """
        groups = [group for group in self._groups if group.steps]
        prior = _Prior(self._recompute_factor, compute_s_per_byte, error_s_per_byte)
        now, _ = groups[-1].row()
        found = prior.fit(now.time_s)
        for first in range(len(groups)):
            try:
                found = _fit([group.row() for group in groups[first:]], prior)
            except np.linalg.LinAlgError:  # no finite fit
                continue
            if abs(found.time_s(now) - now.time_s) <= MAX_RESIDUAL_FRACTION * now.time_s:
                break  # else the machine has changed since the first of these
        waits = [group.wait_s_per_byte / group.doubt for group in groups]
        return replace(found, wait_s_per_byte=waits[-1], feared_wait_s_per_byte=max(waits))


@dataclass(frozen=True, slots=True)
class _Prior:
    """The estimates before there are steps."""

    recompute_factor: float
    compute_s_per_byte: float
    compute_error_s_per_byte: float

    def fit(self, kept_s: float) -> Fit:
        """The fit where nothing but the time of a step is known."""
        error = RECOMPUTE_ERROR * self.recompute_factor
        return Fit(kept_s, self.recompute_factor, error, self.compute_s_per_byte, self.compute_error_s_per_byte)


def _fit(rows: list[_Row], prior: _Prior) -> Fit:
    """The fit to observations; what comes out of bounds is held at its bound, and the rest is fitted again.

    The unknowns are kept_s, kept_s * recompute_factor and compute_s_per_byte: in these the equation is linear.

    Raises:
        LinAlgError: the observations have no finite fit.
    """
    shortest_s = min(one.time_s for one, _ in rows)
    factor, error_s_per_byte = prior.recompute_factor, max(prior.compute_error_s_per_byte, _NO_ERROR)
    equations = [
        _Equation((1.0, one.recomputed_fraction, float(one.moved_bytes)), one.time_s, error_s) for one, error_s in rows
    ]
    equations.append(_Equation((-factor, 1.0, 0.0), 0.0, RECOMPUTE_ERROR * factor * shortest_s))
    equations.append(_Equation((0.0, 0.0, 1.0), prior.compute_s_per_byte, error_s_per_byte))
    scale = np.array([shortest_s, shortest_s, error_s_per_byte])  # or the matrix is skewed
    found, errors = _solved(equations, scale)
    kept_s, again_s, s_per_byte = _within(found, shortest_s, factor)
    if (kept_s, again_s, s_per_byte) != tuple(found):
        for number, value in enumerate((kept_s, again_s, s_per_byte)):
            if value != found[number]:
                one = tuple(float(number == other) for other in range(3))
                equations.append(_Equation(one, value, _FIXED * float(scale[number])))  # type: ignore[arg-type]
        kept_s, again_s, s_per_byte = _within(_solved(equations, scale)[0], shortest_s, factor)
    again = again_s / kept_s
    of_factor = np.array([-again, 1.0, 0.0]) / kept_s  # how the factor changes with the unknowns
    factor_error, bytes_error = np.linalg.norm(of_factor @ errors), np.linalg.norm(errors[2])
    return Fit(kept_s, again, float(factor_error), s_per_byte, float(bytes_error))


def _within(found: Floats, shortest_s: float, factor: float) -> tuple[float, float, float]:
    """The unknowns within their bounds."""
    kept_s = max(MIN_KEPT_FRACTION * shortest_s, float(found[0]))
    least_s, most_s = MIN_RECOMPUTE_FACTOR * factor * kept_s, MAX_RECOMPUTE_FACTOR * factor * kept_s
    return kept_s, min(max(float(found[1]), least_s), most_s), max(0.0, float(found[2]))


class _Equation(NamedTuple):
    """A sum of the unknowns, each times a number, and what it comes to, give or take an error."""

    numbers: tuple[float, float, float]
    value: float
    error: float


def _solved(equations: Sequence[_Equation], scale: Floats) -> tuple[Floats, Floats]:
    """The unknowns by least squares, and a matrix whose product with its own transpose is their covariance.

    The product itself is never formed: rounding could make a variance negative.

    Raises:
        LinAlgError: they are not finite.
    """
    weights = 1 / np.array([one.error for one in equations])
    left = np.array([one.numbers for one in equations]) * weights[:, None] * scale
    right = np.array([one.value for one in equations]) * weights
    orthogonal, triangle = np.linalg.qr(left)
    errors = np.linalg.inv(triangle) * scale[:, None]
    found = errors @ (orthogonal.T @ right)
    if not (np.isfinite(found).all() and np.isfinite(errors).all()):
        raise np.linalg.LinAlgError("the fit is not finite")
    return found, errors
