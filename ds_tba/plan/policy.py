"""Where the storages of one micro-step go, asked by the cache at each save.

Knows stores, and plans where there is one; does not know the cache. It cannot see why a micro-step is another than the
planned one: it counts how they differ, and ``feedback.py`` judges.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass

from ds_tba.config import Placement
from ds_tba.plan.plan import Limits, Plan
from ds_tba.plan.trace import Trace
from ds_tba.storage.base import AnyStore, Choice
from ds_tba.wear import DAY_S, TERABYTE, life_days

MIB = 1 << 20
# Replays of one plan differ in the writes that backward comes to cancel.
WEAR_TOLERANCE = 1.02


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """A plan with the trace and the limits that it was made for.

    Attributes:
        recomputed: paths of the blocks that run again.
        expected: storages that the policy is asked about, in order.
        moved_share: fraction of the movable bytes that goes to NVMe or to the host.
    """

    plan: Plan
    trace: Trace
    limits: Limits
    recomputed: frozenset[str]
    expected: tuple[int, ...]
    moved_share: float

    @classmethod
    def of(cls, plan: Plan, trace: Trace, limits: Limits) -> PlanInForce:
        """Return a plan for ``trace``."""
        blocks = zip(trace.blocks, plan.recomputed_blocks, strict=True)
        recomputed = frozenset(block.module for block, again in blocks if again)
        moved = (Placement.NVME, Placement.HOST)
        placed = zip(trace.storages, plan.placements, strict=True)
        moved_bytes = sum(storage.nbytes for storage, place in placed if place in moved)
        moved_share = moved_bytes / max(1, trace.movable_bytes)
        return cls(plan, trace, limits, recomputed, _expected(trace, recomputed), moved_share)

    @property
    def identity(self) -> tuple[object, ...]:
        """Return what makes a plan another one: where which bytes go, and the blocks that are recomputed."""
        return self.trace.saved_bytes, self.plan.placements, self.plan.recomputed_blocks

    @property
    def bytes_by_placement(self) -> list[tuple[Placement, int]]:
        """Return the bytes of the trace's storages, for each placement that any has."""
        sizes = dict.fromkeys(Placement, 0)
        for storage, placement in zip(self.trace.storages, self.plan.placements, strict=True):
            sizes[placement] += storage.nbytes
        return [(placement, nbytes) for placement, nbytes in sizes.items() if nbytes]

    @property
    def computed_s(self) -> float:
        """Return the seconds of a step in which blocks are recomputed and storages rematerialized, as predicted."""
        return self.plan.prediction.recomputed_s + self.plan.prediction.rematerialized_s

    @property
    def wears_in_days(self) -> float | None:
        """Return the days that the drives last at the plan's rate, where it writes more than the limit of wear."""
        limit_bytes, written_bytes = self.limits.write_limit_bytes_per_step, self.plan.prediction.written_bytes
        if written_bytes <= WEAR_TOLERANCE * limit_bytes:
            return None
        return life_days(self.limits.endurance_tbw, self.daily_bytes)

    @property
    def asked_life_days(self) -> float:
        """Return ``ssd.min_life_days``, by the limit of wear of the most worn drives of any rank."""
        daily_bytes = self.limits.stored_share * self.limits.write_limit_bytes_per_step * DAY_S / self.trace.step_s
        return life_days(self.limits.endurance_tbw, daily_bytes) or 0.0

    @property
    def daily_bytes(self) -> float:
        """Return the bytes that the drives are written in a day of such steps."""
        cost = self.plan.prediction
        return self.limits.stored_share * cost.written_bytes * DAY_S / cost.step_s if cost.step_s else 0.0

    def describe(self, reason: str) -> str:
        """Describe the plan in one line.

        Args:
            reason: why it was made; empty for the first.
        """
        cost, step_s = self.plan.prediction, self.trace.step_s
        where = ", ".join(f"{place.word} {nbytes / MIB:.0f} MiB" for place, nbytes in self.bytes_by_placement)
        longer = cost.step_s / step_s - 1 if step_s else 0.0
        daily_bytes = self.daily_bytes
        days = life_days(self.limits.endurance_tbw, daily_bytes)
        return (
            f"{self.plan.planner}{', because ' + reason if reason else ''}: {where}; expected peak "
            f"{cost.peak_saved_bytes / MIB:.0f} MiB, step {cost.step_s:.3g} s ({longer:+.1%})"
            f"{f', {daily_bytes / TERABYTE:.2f} TB a day' if daily_bytes else ''}"
            f"{'' if days is None else f' ({days:.0f} days)'}"
        )

    def summary(self) -> dict[str, object]:
        """Return the fields of the report."""
        return {
            "planner": self.plan.planner,
            "bytes": {place.word: nbytes for place, nbytes in self.bytes_by_placement},
            "recomputed_blocks": sum(self.plan.recomputed_blocks),
            "blocks": len(self.trace.blocks),
            "kept_step_s": self.trace.step_s,
            "movable_share": self.limits.movable_share,
            **asdict(self.plan.prediction),
        }


def _expected(trace: Trace, recomputed: frozenset[str]) -> tuple[int, ...]:
    """Return what is saved, in order, where these blocks run under a checkpoint, which saves their inputs alone."""
    blocks = trace.blocks
    again = {number for number, block in enumerate(blocks) if block.module in recomputed}
    first_s = {index: blocks[n].forward_start_s for n in sorted(again, reverse=True) for index in blocks[n].inputs}
    for index, storage in enumerate(trace.storages):
        saved_s = storage.pack_s
        for number in storage.blocks:
            if number not in again:
                first_s[index] = min(saved_s, first_s.get(index, saved_s))
                break
            saved_s = blocks[number].forward_end_s
    asked = (index for index in first_s if trace.storages[index].is_asked)
    return tuple(sorted(asked, key=lambda index: (first_s[index], index)))


@dataclass(slots=True)
class PlanMismatch:
    """The differences of a step's saves from those of the plan's trace.

    Attributes:
        micro_steps: how many there were.
        unknown_saves: that the plan has no storage or no block for.
        missed_bytes: of storages of the plan that were not saved.
        drift_bytes: by which storages differ in size, those that were not saved in full.
        growth: the fraction by which what was saved is larger; of the micro-step that grew most.
    """

    micro_steps: int = 0
    unknown_saves: int = 0
    missed_bytes: int = 0
    drift_bytes: int = 0
    growth: float = 0.0


class ByPlan:
    """Follows a plan for one micro-step.

    Storages that the plan does not know are rematerialized where that can be, as it takes no room; else they go where
    there is room without waiting.

    Args:
        in_force: the plan.
        stores: the store of each tier.
        mismatch: of the step; this micro-step's is added to it.
    """

    def __init__(self, in_force: PlanInForce, stores: Mapping[Placement, AnyStore], mismatch: PlanMismatch) -> None:
        self.mismatch = mismatch
        self.prefetch_distance = in_force.plan.prefetch_distance
        self._storages = in_force.trace.storages
        self._placements = in_force.plan.placements
        self._expected = in_force.expected
        # Where one has no room another may have it: a drive with more to do than planned costs time, and no memory.
        self._stores = {place: tuple({one: stores[one] for one in (place, *stores)}.values()) for place in stores}
        self._all_stores = tuple(stores.values())
        self._unknown = Choice(self._all_stores, False, "plan", rematerialize=True)
        self._chosen: dict[Hashable, Choice] = {}
        self._saved_bytes = self._planned_bytes = 0  # of what was saved and planned

    def choose(self, key: Hashable, nbytes: int) -> Choice:
        """Return the plan's choice for the storage that comes next; one that is saved again has the same."""
        choice = self._chosen.get(key)
        if choice is None:  # counted again, it would shift all that comes after it by one place
            choice = self._chosen[key] = self._next(len(self._chosen), nbytes)
        return choice

    def _next(self, position: int, nbytes: int) -> Choice:
        if position >= len(self._expected):
            self.mismatch.unknown_saves += 1
            return self._unknown
        index = self._expected[position]
        planned_bytes, placement = self._storages[index].nbytes, self._placements[index]
        self.mismatch.drift_bytes += abs(nbytes - planned_bytes)
        self._saved_bytes, self._planned_bytes = self._saved_bytes + nbytes, self._planned_bytes + planned_bytes
        if placement is Placement.KEEP:
            return Choice((), False, "plan")
        if placement is Placement.REMATERIALIZE:
            return Choice(self._all_stores, True, "plan", rematerialize=True)
        stores = self._stores.get(placement)
        if stores is None:  # it was to be recomputed with a block that is not
            self.mismatch.unknown_saves += 1
            return self._unknown
        return Choice(stores, True)

    def end(self) -> None:
        """End the micro-step."""
        missed = [self._storages[index] for index in self._expected[len(self._chosen) :]]
        # Not every save of a storage that may not be offloaded is asked about here.
        missed_bytes = sum(one.nbytes for one in missed if one.is_movable)
        self.mismatch.missed_bytes += missed_bytes
        self.mismatch.drift_bytes += missed_bytes
        growth = self._saved_bytes / max(1, self._planned_bytes) - 1
        # The micro-step that grew most counts: a smaller one after it must not hide it.
        self.mismatch.growth = max(self.mismatch.growth, growth)
