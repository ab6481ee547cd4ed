"""Where the storages of one micro-step go, asked by the cache at each save.

Knows stores, and plans where there is one; does not know the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ds_tba.config import Placement
from ds_tba.planner.plan import Limits, Plan
from ds_tba.planner.trace import Layout, Trace
from ds_tba.storage.base import Choice, Store

MIB = 1 << 20
# How far ahead of its device a host is assumed to be, as a fraction of a step.
HOST_AHEAD_FRACTION = 0.25


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """A plan with the trace and the limits that it was made for.

    Attributes:
        layout: of the trace.
        dropped_bytes: for each pass through a block the bytes that are not saved if the pass is recomputed.
        wait_s_per_byte: unforeseen waits in the prediction; see ``calibration.py``.
    """

    plan: Plan
    trace: Trace
    layout: Layout
    limits: Limits
    dropped_bytes: tuple[int, ...]
    wait_s_per_byte: float = 0.0

    @classmethod
    def of(cls, plan: Plan, trace: Trace, layout: Layout, limits: Limits, wait_s_per_byte: float = 0.0) -> PlanInForce:
        """A plan for ``trace``."""
        dropped = [0] * len(trace.blocks)
        for storage, placement in zip(trace.storages, plan.placements, strict=True):
            if placement is Placement.RECOMPUTE:
                dropped[storage.blocks[0]] += storage.nbytes
        return cls(plan, trace, layout, limits, tuple(dropped), wait_s_per_byte)

    def is_for(self, trace: Trace, layout: Layout) -> bool:
        """Whether the plan was made for a trace of the same storages and blocks."""
        ours = self.trace
        return (
            self.layout == layout
            and len(ours.storages) == len(trace.storages)
            and [block.module for block in ours.blocks] == [block.module for block in trace.blocks]
        )

    def is_same_as(self, other: PlanInForce | None) -> bool:
        """Whether both place every storage alike, and recompute the same blocks."""
        return other is not None and self._work == other._work

    @property
    def _work(self) -> tuple[Any, ...]:
        return self.layout, self.trace.saved_bytes, self.plan.placements, self.plan.recomputed_blocks

    @property
    def foreseen_wait_s(self) -> float:
        """The predicted wait of a step for lanes and copies, without the compute time that moving takes in any case."""
        resources = self.trace.resources
        s_per_byte = resources.compute_s_per_byte + self.wait_s_per_byte
        s_per_byte += 1 / resources.copy_out_bytes_per_s if resources.is_synchronous else 0.0
        moved_bytes = self.trace.micro_steps * sum(
            nbytes for place, nbytes in self.bytes_by_placement if place in (Placement.NVME, Placement.HOST)
        )
        return max(0.0, self.plan.prediction.stall_s - moved_bytes * s_per_byte)

    @property
    def patience_s(self) -> float:
        """How long the host may wait for room in staging, in one step."""
        cost, limits, trace = self.plan.prediction, self.limits, self.trace
        if limits.activation_budget_bytes is not None:
            return math.inf
        ahead_s = 0.0 if trace.resources.is_synchronous else HOST_AHEAD_FRACTION * trace.step_s
        computed_s = cost.recomputed_s + cost.rematerialized_s
        return max(ahead_s, cost.stall_s, limits.max_step_overhead * trace.step_s - computed_s)

    @property
    def bytes_by_placement(self) -> list[tuple[Placement, int]]:
        """Bytes of the trace's storages, for each placement that any has."""
        sizes = dict.fromkeys(Placement, 0)
        for storage, placement in zip(self.trace.storages, self.plan.placements, strict=True):
            sizes[placement] += storage.nbytes
        return [(placement, nbytes) for placement, nbytes in sizes.items() if nbytes]

    @property
    def held_bytes(self) -> int | None:
        """The bound that saved tensors are held to: the budget, or the peak that no plan can lower.

        Where most may be moved, and the plan with the lowest peak moves nothing (because all are saved and taken back
        at once), holding them to the budget would move them in vain.
        """
        budget_bytes, peak_bytes = self.limits.activation_budget_bytes, self.plan.prediction.peak_saved_bytes
        if budget_bytes is None or peak_bytes <= budget_bytes:
            return budget_bytes
        movable_bytes = sum(storage.nbytes for storage in self.trace.storages if storage.is_movable)
        moves_none = all(place in (Placement.KEEP, Placement.REMATERIALIZE) for place in self.plan.placements)
        return math.ceil(peak_bytes) if moves_none and 2 * movable_bytes > peak_bytes else budget_bytes

    def describe(self, reason: str) -> str:
        """In one line.

        Args:
            reason: why it was made; empty for the first.
        """
        cost, step_s = self.plan.prediction, self.trace.step_s
        where = ", ".join(f"{place.word} {nbytes / MIB:.0f} MiB" for place, nbytes in self.bytes_by_placement)
        longer = cost.step_s / step_s - 1 if step_s else 0.0
        return (
            f"{self.plan.planner}{', because ' + reason if reason else ''}: {where}; expected peak "
            f"{cost.peak_saved_bytes / MIB:.0f} MiB, step {cost.step_s:.3g} s ({longer:+.1%})"
        )

    def summary(self) -> dict[str, Any]:
        """For the report."""
        return {
            "planner": self.plan.planner,
            "bytes": {place.word: nbytes for place, nbytes in self.bytes_by_placement},
            "recomputed_blocks": sum(self.plan.recomputed_blocks),
            "blocks": len(self.trace.blocks),
            "kept_step_s": self.trace.step_s,
            **asdict(self.plan.prediction),
        }


@dataclass(slots=True)
class Deviation:
    """How the saves of a micro-step, or of the micro-steps of a step, differ from the plan's trace.

    Attributes:
        unplanned: saves that the plan does not know.
        missed_bytes: of storages of the plan that were not saved.
        drift_bytes: by which storages differ in size, those that were not saved in full.
        grown: sizes of larger storages, by their number in the trace; of the micro-step in which they grew most.
        grown_bytes: by which these are larger.
    """

    unplanned: int = 0
    missed_bytes: int = 0
    drift_bytes: int = 0
    grown_bytes: int = 0
    grown: dict[int, int] = field(default_factory=dict)

    def record_size(self, index: int, nbytes: int, planned_bytes: int) -> None:
        """A storage has another size than in the trace."""
        self.drift_bytes += abs(nbytes - planned_bytes)
        if nbytes > planned_bytes:
            self.grown_bytes += nbytes - self.grown.get(index, planned_bytes)
            self.grown[index] = nbytes

    def record_missed(self, nbytes: int) -> None:
        """Storages of so many bytes were not saved."""
        self.missed_bytes += nbytes
        self.drift_bytes += nbytes

    def add(self, other: Deviation) -> None:
        """Another micro-step of the same step is over."""
        self.unplanned += other.unplanned
        self.missed_bytes += other.missed_bytes
        self.drift_bytes += other.drift_bytes
        if other.grown_bytes > self.grown_bytes:
            self.grown_bytes, self.grown = other.grown_bytes, other.grown


class _Scope:
    """The saves of one scope; see [Note: Scopes] in ``ds_tba/planner/trace.py``.

    Attributes:
        expected: numbers of the storages that the plan expects, in order; ``position`` of them were saved.
        seen: keys of the storages saved so far.
    """

    __slots__ = ("expected", "number", "position", "seen")

    def __init__(self, number: int, in_force: PlanInForce) -> None:
        self.number = number
        self.expected = in_force.layout.expected(number, in_force.trace, in_force.plan.recomputed_blocks)
        self.position = 0
        self.seen: set[Hashable] = set()


class ByPlan:
    """Follows a plan for one micro-step.

    Storages that the plan does not know are made again where that can be, as it takes no room; else they go where there
    is room without waiting.

    Args:
        in_force: the plan.
        stores: the store of each tier.
        may_wait: whether there is time left to wait for room in staging.
    """

    def __init__(
        self, in_force: PlanInForce, stores: Mapping[Placement, Store[Any]], may_wait: Callable[[], bool]
    ) -> None:
        self.deviation = Deviation()
        self._plan = in_force
        self._placements = in_force.plan.placements
        self._storages = in_force.trace.storages
        self._may_wait = may_wait
        # Where NVMe has no room, host memory may take the storage; the reverse would load the drive beyond its plan.
        self._stores = {
            place: tuple({one: stores[one] for one in (place, Placement.HOST) if one in stores}.values())
            for place in stores
        }
        self._anywhere = tuple(stores.values())
        self._unplanned = Choice(self._anywhere, False, rematerialize=True)
        self._kept = Choice((), False, "plan")
        self._depth = 0
        self._scope = _Scope(0, in_force)

    @property
    def recomputes(self) -> bool:
        """Whether the plan has any block recomputed."""
        return any(self._plan.plan.recomputed_blocks)

    @property
    def prefetch_distance(self) -> tuple[int, ...]:
        """See ``Plan.prefetch_distance``."""
        return self._plan.plan.prefetch_distance

    def enter(self, module: str) -> int | None:
        """A pass through a block begins: the bytes that are not saved if the pass is to be recomputed, else None."""
        self._depth += 1
        if self._depth > 1:
            return None
        self._next_scope()
        number = self._scope.number // 2
        blocks = self._plan.trace.blocks
        if number >= len(blocks) or blocks[number].module != module:
            self.deviation.unplanned += 1
            return None
        return self._plan.dropped_bytes[number] if self._plan.plan.recomputed_blocks[number] else None

    def leave(self) -> None:
        """The pass is over."""
        self._depth -= 1
        if self._depth == 0:
            self._next_scope()

    def end(self) -> None:
        """The micro-step is over."""
        while self._scope.number < len(self._plan.layout.scopes):
            self._next_scope()

    def _next_scope(self) -> None:
        left, storages = self._scope, self._storages
        missed = [storages[index] for index in left.expected[left.position :]]
        self.deviation.record_missed(sum(one.nbytes for one in missed if one.is_movable))  # others may not be told of
        self._scope = _Scope(left.number + 1, self._plan)

    def choose(self, key: Hashable, nbytes: int) -> Choice:
        """The plan's choice for the storage that is next in this scope."""
        scope = self._scope
        if key in scope.seen:
            return self._kept  # it has its place
        scope.seen.add(key)
        if scope.position >= len(scope.expected):
            self.deviation.unplanned += 1
            return self._unplanned
        index = scope.expected[scope.position]
        scope.position += 1
        if nbytes != self._storages[index].nbytes:
            self.deviation.record_size(index, nbytes, self._storages[index].nbytes)
        placement = self._placements[index]
        if placement is Placement.KEEP:
            return self._kept
        if placement is Placement.REMATERIALIZE:
            return Choice(self._anywhere, self._may_wait(), "plan", rematerialize=True)
        stores = self._stores.get(placement)
        if stores is None:  # it was to be recomputed with a block that is not
            self.deviation.unplanned += 1
            return self._unplanned
        return Choice(stores, self._may_wait())
