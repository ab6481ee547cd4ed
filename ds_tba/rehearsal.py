"""Steps in which every block is recomputed: what recomputing takes, and what moving takes of the kernels.

[Note: What a rehearsal shows] A block's second forward is not its first: what it reads lies in caches, and frameworks
stop it early. So it is run and measured before a plan counts on it. The same steps move little. Without their
recomputations and what they moved they are what a step takes with everything kept; where the lanes run on the
processor of the kernels, the recorded steps, which move all there is, took longer than that by what lanes take.

Knows plans and the clock; does not know the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from ds_tba.plan.trace import Trace
from ds_tba.policy import PlanInForce
from ds_tba.streams import Clock

# The longest of them does not count: the first has much to set up.
REHEARSALS = 3
# A recomputation that took so many times more or less than its forward was measured wrong.
MOST_FACTOR = 3.0


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
        self._recomputed_s: list[float] = []
        self._kept_s: list[float] = []
        self._moved_bytes: list[int] = []

    @property
    def is_enough(self) -> bool:
        """Whether no more steps are needed."""
        return len(self._kept_s) >= REHEARSALS

    def mark(self) -> None:
        """A recomputation begins, or it ends."""
        self._marks.append(self._clock.mark())

    def end_step(self, began: Any, ended: Any, moves: Sequence[tuple[Any, Any]], moved_bytes: int) -> None:
        """A step is over; blocks the host until the device has come so far.

        Args:
            began, ended: marks of the clock.
            moves: marks before and after each storage that was moved, or came back.
            moved_bytes: by the lanes, either way.
        """
        elapsed_s = self._clock.elapsed_s
        marks, self._marks = self._marks, []
        recomputed_s = sum(elapsed_s(*pair) for pair in list(pairwise(marks))[::2])
        self._recomputed_s.append(recomputed_s)
        self._kept_s.append(elapsed_s(began, ended) - recomputed_s - sum(elapsed_s(*move) for move in moves))
        self._moved_bytes.append(moved_bytes)

    def recompute_factor(self, trace: Trace) -> float:
        """What recomputing takes, as a part of the forward in a trace of the same blocks."""
        passes = zip(trace.blocks, self.plan.plan.recomputed_blocks, strict=True)
        forward_s = trace.micro_steps * sum(block.forward_s for block, again in passes if again)
        found = _usual_s(self._recomputed_s) / forward_s if forward_s else 1.0
        return min(MOST_FACTOR, max(1 / MOST_FACTOR, found))

    @property
    def kept_s(self) -> float:
        """A step without its recomputations and moves: one that keeps all, with the hooks that it has."""
        return _usual_s(self._kept_s)

    @property
    def moved_bytes(self) -> int:
        """In a step, by the lanes, either way."""
        return min(self._moved_bytes)


def _usual_s(times_s: Sequence[float]) -> float:
    return fmean(sorted(times_s)[: REHEARSALS - 1])
