"""Steps in which every block is recomputed: what recomputing takes, and what moving takes of the kernels.

[Note: What a rehearsal shows] A block's second forward is not its first: what it reads lies in caches, and frameworks
stop it early. So it is run and measured before a plan counts on it. The same steps move little. Without their
recomputations and what they moved they are what a step takes with everything kept; where the lanes run on the
processor of the kernels, the recorded steps, which move all there is, took longer than that by what lanes take.

Knows plans and the clock; does not know the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from ds_tba.plan.trace import Trace
from ds_tba.policy import PlanInForce
from ds_tba.streams import Clock

REHEARSALS = 3
# So many of them must have gone as planned; the longest does not count: the first has much to set up.
LEAST_REHEARSED = 2
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
        moved_bytes: in a step, by the lanes, either way.
    """

    recomputed_s: float
    kept_s: float
    moved_bytes: int


class Rehearsal:
    """A few steps under a plan that recomputes all there is.

    Args:
        plan: that plan.
        clock: of the training device.
    """

    def __init__(self, plan: PlanInForce, clock: Clock) -> None:
        self.plan = plan
        self._clock = clock
        self._marks: list[Any] = []
        self._steps: list[_Step] = []
        self._count = 0

    @property
    def is_enough(self) -> bool:
        """Whether no more steps are needed."""
        return self._count >= REHEARSALS

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
        self._count += 1
        marks, self._marks = self._marks, []
        recomputed = sum(self.plan.plan.recomputed_blocks) * self.plan.trace.micro_steps
        if is_planned and len(marks) == 2 * recomputed:
            self._steps.append(_Step(began, ended, marks, moves, moved_bytes))

    def result(self) -> Rehearsed | None:
        """What was measured; None if too few steps went as planned. Blocks the host until the device is there."""
        if len(self._steps) < LEAST_REHEARSED:
            return None
        elapsed_s = self._clock.elapsed_s
        found = []
        for step in self._steps:
            recomputed_s = sum(elapsed_s(*pair) for pair in list(pairwise(step.recomputations))[::2])
            moving_s = sum(elapsed_s(*move) for move in step.moves)
            found.append((recomputed_s, elapsed_s(step.began, step.ended) - recomputed_s - moving_s))
        recomputed, kept = zip(*found, strict=True)
        return Rehearsed(_usual_s(recomputed), _usual_s(kept), min(step.moved_bytes for step in self._steps))

    def recompute_factor(self, trace: Trace, recomputed_s: float) -> float:
        """What recomputing takes, as a part of the forward in a trace of the same blocks; 1 where that cannot be."""
        passes = zip(trace.blocks, self.plan.plan.recomputed_blocks, strict=False)
        forward_s = trace.micro_steps * sum(block.forward_s for block, again in passes if again)
        factor = recomputed_s / forward_s if forward_s else 1.0
        return factor if 1 / MOST_FACTOR <= factor <= MOST_FACTOR else 1.0


def _usual_s(times_s: Sequence[float]) -> float:
    return fmean(sorted(times_s)[: max(1, len(times_s) - 1)])
