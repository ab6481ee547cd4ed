"""One optimizer step under a plan: what was counted in it, and what it shows of what recomputing and moving cost.

Knows the clock and plans; does not know who decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ds_tba.adaptive.calibration import Observation
from ds_tba.adaptive.monitor import MAX_DRIFT
from ds_tba.adaptive.policy import PlanInForce
from ds_tba.device.accelerator import Clock
from ds_tba.planner.trace import Trace


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
