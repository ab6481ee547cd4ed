"""What a step would cost under a plan: peak, time, stall and bytes written. Pure and deterministic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_tba.plan.placement import Assignment
from ds_tba.planner.simulator import Outcome, Pacing, Replay
from ds_tba.planner.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one step of ``micro_steps`` micro-steps would cost.

    Attributes:
        peak_saved_bytes: most device bytes that saved storages hold at once, with what is read ahead and what a copy
            out still holds.
        step_s: with the rest of the step; ``stall_s`` and ``recomputed_s`` are what it has more than the trace.
        written_bytes, read_bytes: what the drives move, padded.
        forwarded_bytes: handed over from staging instead of read.
        host_bytes: most bytes that the host tier holds at once.
    """

    peak_saved_bytes: int
    step_s: float
    stall_s: float
    recomputed_s: float
    written_bytes: int
    read_bytes: int
    forwarded_bytes: int
    host_bytes: int
    peak_staging_bytes: int


def predict(timeline: Timeline, outcome: Outcome) -> Prediction:
    """A replay's outcome as figures of a step."""
    times = timeline.micro_steps
    return Prediction(
        outcome.peak_saved_bytes,
        outcome.end_s * times + timeline.rest_s,
        outcome.stall_s * times,
        outcome.recomputed_s * times,
        outcome.written_bytes * times,
        outcome.read_bytes * times,
        outcome.forwarded_bytes * times,
        outcome.host_bytes,
        outcome.peak_staging_bytes,
    )


def replay(
    timeline: Timeline, assignment: Assignment, pacing: Pacing | None = None, lead: Sequence[int] | None = ()
) -> tuple[Outcome, Prediction]:
    """What happens under an assignment, and its cost; see :class:`Replay`."""
    outcome = Replay(timeline, assignment, pacing, lead).run()
    return outcome, predict(timeline, outcome)
