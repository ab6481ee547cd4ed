"""Steps that recompute every block, or keep everything: what recomputing takes, and what moving takes of the kernels.

[Note: What a rehearsal shows] A block's second forward is not its first: what it reads lies in caches, and frameworks
stop it early. So it is run and measured before a plan counts on it. The same steps move nothing, or little: without
their recomputations (and what they moved) they are what a step takes with everything kept, but for the little that
checkpoints do in forward.

[Note: Turns] Where the lanes run on the processor of the kernels, steps that move everything take longer than that,
also without their copies: by what lanes take. Both kinds are run in turns, and neighbours compared, because other users
of the machine slow all steps of some seconds: one kind alone would be blamed for it. A drive so slow that such a step
mostly waits has one turn only.

Knows plans and the clock; does not know the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, median_low
from typing import Any

from ds_tba.adaptive.policy import PlanInForce
from ds_tba.device.accelerator import Clock
from ds_tba.planner.trace import Trace

# Steps, of which the first does not count: it has much to set up. In turns the odd ones move everything.
REHEARSALS, TURNS = 3, 9
# Of a step that moves everything: where the training thread moves or waits for more, there are no more such steps.
MOST_MOVING_PART = 0.5
# Of a normal distribution: the standard deviation as a multiple of the median absolute deviation.
DEVIATION = 1.4826
# A recomputation that took so many times more or less than its forward was measured wrong.
MOST_FACTOR = 3.0


@dataclass(frozen=True, slots=True)
class _Step:
    """Marks of the clock: of a step, of recomputations by turns of their begin and end, of moves; and bytes moved."""

    began: Any
    ended: Any
    recomputations: list[Any]
    moves: Sequence[tuple[Any, Any]]
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What the rehearsals have shown.

    Attributes:
        recomputed_s: of a step, in recomputations.
        kept_s: the rest of a step without what it moved: what it takes with everything kept.
        taken_s: by lanes, of the kernels of a step that moves everything; None where fewer than two tell.
        taken_error_s: the standard error of that.
        moved_bytes: by the lanes in such a step, either way, more than in a rehearsal.
    """

    recomputed_s: float
    kept_s: float
    taken_s: float | None
    taken_error_s: float
    moved_bytes: int


class Rehearsal:
    """A few steps under a plan that recomputes all there is, or keeps everything.

    Args:
        plan: that plan.
        clock: of the training device.
        in_turns: with steps that move everything. See [Note: Turns].
    """

    def __init__(self, plan: PlanInForce, clock: Clock, *, in_turns: bool) -> None:
        self._plan = plan
        self._clock = clock
        self._in_turns = in_turns
        self._marks: list[Any] = []
        self._rehearsed: dict[int, _Step] = {}  # by their number
        self._moving: dict[int, _Step] = {}
        self._count = 0

    @property
    def plan(self) -> PlanInForce | None:
        """Of the step that comes or runs; None if it is to move everything."""
        return None if self._in_turns and self._count % 2 else self._plan

    @property
    def is_enough(self) -> bool:
        """Whether no more steps are needed."""
        return self._count >= (TURNS if self._in_turns else REHEARSALS + len(self._moving))

    def mark(self) -> None:
        """A recomputation begins, or it ends."""
        self._marks.append(self._clock.mark())

    def end_step(
        self, began: Any, ended: Any, moves: Sequence[tuple[Any, Any]], moved_bytes: int, *, is_planned: bool
    ) -> None:
        """A step is over.

        Args:
            began, ended: marks of the clock.
            moves: marks before and after each storage that was moved, or came back.
            moved_bytes: by the lanes, either way.
            is_planned: whether it saved what the plan knows.
        """
        marks, self._marks = self._marks, []
        step, number = _Step(began, ended, marks, moves, moved_bytes), self._count
        if self.plan is None:
            self._moving[number] = step
            self._in_turns = self._rest_s(step) > (1 - MOST_MOVING_PART) * self._clock.elapsed_s(began, ended)
        elif number and is_planned and len(marks) == 2 * self._recomputations:
            self._rehearsed[number] = step
        self._count += 1

    def result(self) -> Rehearsed | None:
        """What was measured; None if at most the first went as planned. Blocks the host until the device is there."""
        if not self._rehearsed:
            return None
        recomputed_s = {number: self._recomputed_s(step) for number, step in self._rehearsed.items()}
        kept_s = {number: self._rest_s(step) - recomputed_s[number] for number, step in self._rehearsed.items()}
        found_s = self._taken_s(kept_s)
        is_known = len(found_s) > 1
        taken_s = median(found_s) if is_known else None
        error_s = DEVIATION * _median_deviation(found_s) / math.sqrt(len(found_s)) if is_known else 0.0
        moved_bytes = median_low(step.moved_bytes for step in self._moving.values()) if self._moving else 0
        more_bytes = moved_bytes - min(step.moved_bytes for step in self._rehearsed.values())
        return Rehearsed(median_low(recomputed_s.values()), median_low(kept_s.values()), taken_s, error_s, more_bytes)

    def recompute_factor(self, trace: Trace, recomputed_s: float) -> float:
        """What recomputing takes, as a part of the forward in a trace of the same blocks; 1 where that cannot be."""
        passes = zip(trace.blocks, self._plan.plan.recomputed_blocks, strict=False)
        forward_s = trace.micro_steps * sum(block.forward_s for block, again in passes if again)
        factor = recomputed_s / forward_s if forward_s else 1.0
        return factor if 1 / MOST_FACTOR <= factor <= MOST_FACTOR else 1.0

    @property
    def _recomputations(self) -> int:
        return sum(self._plan.plan.recomputed_blocks) * self._plan.trace.micro_steps

    def _recomputed_s(self, step: _Step) -> float:
        return sum(self._clock.elapsed_s(*pair) for pair in list(pairwise(step.recomputations))[::2])

    def _rest_s(self, step: _Step) -> float:
        """A step without its moves."""
        elapsed_s = self._clock.elapsed_s
        return elapsed_s(step.began, step.ended) - sum(elapsed_s(*move) for move in step.moves)

    def _taken_s(self, kept_s: dict[int, float]) -> list[float]:
        """By which steps that move everything are longer than the rehearsals beside them."""
        found = []
        for number, step in self._moving.items():
            beside_s = [kept_s[other] for other in (number - 1, number + 1) if other in kept_s]
            if beside_s:
                found.append(self._rest_s(step) - fmean(beside_s))
        return found


def _median_deviation(values: Sequence[float]) -> float:
    """One odd value of many does not change it."""
    middle = median(values)
    return median(abs(value - middle) for value in values)
