"""Where the storages of one micro-step go, asked by the cache at each save.

Knows stores, and plans where there is one; does not know the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ds_tba.config import Placement
from ds_tba.planner.plan import Limits, Plan
from ds_tba.planner.trace import Layout, Trace
from ds_tba.storage.base import Choice, Store

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """A plan, and what it takes to follow it.

    Attributes:
        trace: what it was made from.
        layout: of that trace.
        limits: what it may cost.
        dropped_bytes: for each pass through a block what it does not save if it is recomputed.
        wait_s_per_byte: that no replay foresees, in the prediction; see ``calibration.py``.
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

    def is_same_as(self, other: PlanInForce | None) -> bool:
        """Whether both have the same done with every storage and block."""
        return other is not None and self._work == other._work

    @property
    def _work(self) -> tuple[Any, ...]:
        return self.layout, self.trace.saved_bytes, self.plan.placements, self.plan.recomputed_blocks

    @property
    def foreseen_wait_s(self) -> float:
        """What a step is to wait for lanes and copies, without what moving takes of compute in any case."""
        resources = self.trace.resources
        s_per_byte = resources.compute_s_per_byte + self.wait_s_per_byte
        s_per_byte += 1 / resources.copy_out_bytes_per_s if resources.is_synchronous else 0.0
        moved_bytes = self.trace.micro_steps * sum(
            nbytes for place, nbytes in self.bytes_by_placement if place in (Placement.NVME, Placement.HOST)
        )
        return max(0.0, self.plan.prediction.stall_s - moved_bytes * s_per_byte)

    @property
    def bytes_by_placement(self) -> list[tuple[Placement, int]]:
        """Bytes of the trace's storages, for each placement that any has."""
        sizes = dict.fromkeys(Placement, 0)
        for storage, placement in zip(self.trace.storages, self.plan.placements, strict=True):
            sizes[placement] += storage.nbytes
        return [(placement, nbytes) for placement, nbytes in sizes.items() if nbytes]

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


class ByPlan:
    """What a plan says, for one micro-step; what it does not know goes where there is room without waiting.

    Args:
        in_force: the plan.
        stores: the store of each tier.
        may_wait: whether there is time left to wait for room in staging.

    Attributes:
        unplanned: saves that the plan does not know.
        drift_bytes: by which storages differ in size from those of the trace.
        grown: sizes of storages that are larger than in the trace, by their number there.
    """

    def __init__(
        self, in_force: PlanInForce, stores: Mapping[Placement, Store[Any]], may_wait: Callable[[], bool]
    ) -> None:
        self._plan = in_force
        self._placements = in_force.plan.placements
        self._storages = in_force.trace.storages
        self._may_wait = may_wait
        # What NVMe has no room for may go to host memory; the other way round would be a surprise for the drive.
        self._stores = {
            place: tuple({one: stores[one] for one in (place, Placement.HOST) if one in stores}.values())
            for place in stores
        }
        self._unplanned = Choice(tuple(stores.values()), False)
        self._kept = Choice((), False, "plan")
        self._depth = 0
        self.unplanned = 0
        self.drift_bytes = 0
        self.grown: dict[int, int] = {}
        self._scope = -1
        self._next_scope()

    @property
    def recomputes(self) -> bool:
        """Whether the plan has any block recomputed."""
        return any(self._plan.plan.recomputed_blocks)

    @property
    def prefetch_distance(self) -> tuple[int, ...]:
        """See ``Plan.prefetch_distance``."""
        return self._plan.plan.prefetch_distance

    @property
    def grown_bytes(self) -> int:
        """By which storages are larger than in the trace."""
        return sum(nbytes - self._storages[index].nbytes for index, nbytes in self.grown.items())

    def enter(self, module: str) -> int | None:
        """A pass through a block begins: the bytes that it will not save if it is to be recomputed, else None."""
        self._depth += 1
        if self._depth > 1:
            return None
        self._next_scope()
        number = self._scope // 2
        blocks = self._plan.trace.blocks
        if number >= len(blocks) or blocks[number].module != module:
            self.unplanned += 1
            return None
        return self._plan.dropped_bytes[number] if self._plan.plan.recomputed_blocks[number] else None

    def leave(self) -> None:
        """The pass is over."""
        self._depth -= 1
        if self._depth == 0:
            self._next_scope()

    def choose(self, key: Hashable, nbytes: int) -> Choice:
        """What the plan says of the storage that is next in this scope."""
        if key in self._seen:
            return self._kept  # it has its place
        self._seen.add(key)
        if self._position >= len(self._expected):
            self.unplanned += 1
            return self._unplanned
        index = self._expected[self._position]
        self._position += 1
        if nbytes != self._storages[index].nbytes:
            self.drift_bytes += abs(nbytes - self._storages[index].nbytes)
            if nbytes > self._storages[index].nbytes:
                self.grown[index] = nbytes
        placement = self._placements[index]
        if placement is Placement.KEEP:
            return self._kept
        stores = self._stores.get(placement)
        if stores is None:  # it was to be recomputed with a block that is not
            self.unplanned += 1
            return self._unplanned
        return Choice(stores, self._may_wait())

    def _next_scope(self) -> None:
        self._scope += 1
        self._seen: set[Hashable] = set()
        self._position = 0
        self._expected = self._plan.layout.expected(self._scope, self._plan.trace, self._plan.plan.recomputed_blocks)
