"""Where the storages of one micro-step go, asked by the cache at each save.

Knows stores, and plans where there is one; does not know the cache. It cannot see why a micro-step is another than the
planned one: it counts how they differ, and ``feedback.py`` judges.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from ds_tba.config import Placement
from ds_tba.errors import IncompatibleError
from ds_tba.plan.plan import Limits, Plan
from ds_tba.plan.trace import Scopes, Trace
from ds_tba.storage.base import AnyStore, Choice
from ds_tba.wear import DAY_S, TERABYTE, life_days

MIB = 1 << 20
# Replays of one plan differ in the writes that backward comes to cancel.
WEAR_TOLERANCE = 1.02


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """A plan with the trace and the limits that it was made for.

    Attributes:
        watched: paths of the blocks of which any pass is recomputed.
        passes: numbers of the passes through these, in order.
        expected: storages that are saved, in order: before the first of these passes, in it, before the next, ...
        dropped_bytes: for each pass through a block the bytes that are not saved if the pass is recomputed.
        moved_share: fraction of the movable bytes that goes to NVMe or to the host.
    """

    plan: Plan
    trace: Trace
    limits: Limits
    watched: frozenset[str]
    passes: tuple[int, ...]
    expected: Scopes
    dropped_bytes: tuple[int, ...]
    moved_share: float

    @classmethod
    def of(cls, plan: Plan, trace: Trace, limits: Limits) -> PlanInForce:
        """Return a plan for ``trace``."""
        recomputed = [block for block, again in zip(trace.blocks, plan.recomputed_blocks, strict=True) if again]
        watched = frozenset(block.module for block in recomputed)
        passes = tuple(number for number, block in enumerate(trace.blocks) if block.module in watched)
        dropped, moved_bytes = [0] * len(trace.blocks), 0
        for storage, placement in zip(trace.storages, plan.placements, strict=True):
            if placement is Placement.RECOMPUTE:
                dropped[storage.blocks[0]] += storage.nbytes
            elif placement in (Placement.NVME, Placement.HOST):
                moved_bytes += storage.nbytes
        moved_share = moved_bytes / max(1, trace.movable_bytes)
        expected = _expected(plan, trace, passes)
        return cls(plan, trace, limits, watched, passes, expected, tuple(dropped), moved_share)

    def is_same_as(self, other: PlanInForce | None) -> bool:
        """Return whether both place every storage alike, and recompute the same blocks."""
        if other is None:
            return False
        mine, theirs = (
            # With the bytes: the same placements of larger storages have other limits, and are told again.
            (one.trace.scopes, one.trace.saved_bytes, one.plan.placements, one.plan.recomputed_blocks)
            for one in (self, other)
        )
        return mine == theirs

    @property
    def bytes_by_placement(self) -> list[tuple[Placement, int]]:
        """Return the bytes of the trace's storages, for each placement that any has."""
        sizes = dict.fromkeys(Placement, 0)
        for storage, placement in zip(self.trace.storages, self.plan.placements, strict=True):
            sizes[placement] += storage.nbytes
        return [(placement, nbytes) for placement, nbytes in sizes.items() if nbytes]

    @property
    def recomputes(self) -> bool:
        """True if any block is recomputed."""
        return any(self.plan.recomputed_blocks)

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


def _expected(plan: Plan, trace: Trace, passes: Sequence[int]) -> Scopes:
    """Return what is saved before, in and behind each of these passes, where the plan is followed."""
    found: list[tuple[int, ...]] = []
    before: dict[int, None] = {}
    of_pass = {2 * number + 1: number for number in passes}
    for number, members in enumerate(trace.scopes):
        if number not in of_pass:
            before |= dict.fromkeys(members)
            continue
        is_recomputed = plan.recomputed_blocks[of_pass[number]]
        found += [tuple(before), trace.blocks[of_pass[number]].inputs if is_recomputed else members]
        before = {}
    return (*found, tuple(before))


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
    there is room without waiting. The saves are matched in order, from one recomputed pass to the next.

    Args:
        in_force: the plan.
        stores: the store of each tier.
        mismatch: of the step; this micro-step's is added to it.
        is_strict: another pass than planned ends the run.
    """

    def __init__(
        self,
        in_force: PlanInForce,
        stores: Mapping[Placement, AnyStore],
        mismatch: PlanMismatch,
        *,
        is_strict: bool = False,
    ) -> None:
        self.mismatch = mismatch
        self._is_strict = is_strict
        self.prefetch_distance = in_force.plan.prefetch_distance
        self._plan = in_force
        self._storages = in_force.trace.storages
        # Where one has no room another may have it: a drive with more to do than planned costs time, and no memory.
        self._stores = {place: tuple({one: stores[one] for one in (place, *stores)}.values()) for place in stores}
        self._all_stores = tuple(stores.values())
        self._unknown = Choice(self._all_stores, False, "plan", rematerialize=True)
        self._kept = Choice((), False, "plan")
        self._depth = 0
        self._saved_bytes = self._planned_bytes = 0  # of what was saved and planned
        self._begin_part(0)

    def _begin_part(self, number: int) -> None:
        self._part, expected = number, self._plan.expected
        self._expected = expected[number] if number < len(expected) else ()
        self._position = 0  # how many of the expected were saved
        self._seen: set[Hashable] = set()

    def _end_part(self) -> None:
        missed = [self._storages[index] for index in self._expected[self._position :]]
        # Not every save of a storage that may not be offloaded is asked about here.
        missed_bytes = sum(one.nbytes for one in missed if one.is_movable)
        self.mismatch.missed_bytes += missed_bytes
        self.mismatch.drift_bytes += missed_bytes
        self._begin_part(self._part + 1)

    def enter(self, path: str, _inputs: Sequence[torch.Tensor] = (), obstacle: str = "") -> int | None:
        """Begin a pass through a watched block; see :class:`ds_tba.recompute.blocks.PassListener`.

        Raises:
            IncompatibleError: the plan has another pass here, or one to be recomputed, and is to be kept to.
        """
        self._depth += 1
        if self._depth > 1:  # a part of the pass around it: as one of its own it would shift all that come after
            return None
        self._end_part()
        at, plan = self._part // 2, self._plan
        number = plan.passes[at] if at < len(plan.passes) else None
        # Another block than planned: recomputed in its place, it would drop what the plan keeps for other passes.
        if number is not None and plan.trace.blocks[number].module == path:
            if not plan.plan.recomputed_blocks[number]:
                return None
            if not obstacle:
                return plan.dropped_bytes[number]
        self.mismatch.unknown_saves += 1
        if self._is_strict:
            raise IncompatibleError(
                f"the block {path!r} does not do here what the plan of all ranks says "
                f"({obstacle or 'it comes at another place'}), and the others would wait for this rank in backward: "
                'set "recompute": false.'
            )
        return None

    def leave(self, _obstacle: str = "") -> None:
        """End the pass."""
        self._depth -= 1
        if self._depth == 0:
            self._end_part()

    def end(self) -> None:
        """End the micro-step."""
        while self._part < len(self._plan.expected):  # what later passes would have saved is missed, too
            self._end_part()
        growth = self._saved_bytes / max(1, self._planned_bytes) - 1
        # The micro-step that grew most counts: a smaller one after it must not hide it.
        self.mismatch.growth = max(self.mismatch.growth, growth)

    def choose(self, key: Hashable, nbytes: int) -> Choice:
        """Return the plan's choice for the storage that comes next."""
        if key in self._seen:  # counted again, it would shift all that comes after it by one place
            return self._kept
        self._seen.add(key)
        if self._position >= len(self._expected):
            self.mismatch.unknown_saves += 1
            return self._unknown
        index = self._expected[self._position]
        self._position += 1
        planned_bytes = self._storages[index].nbytes
        self.mismatch.drift_bytes += abs(nbytes - planned_bytes)
        self._saved_bytes, self._planned_bytes = self._saved_bytes + nbytes, self._planned_bytes + planned_bytes
        placement = self._plan.plan.placements[index]
        if placement is Placement.KEEP:
            return self._kept
        if placement is Placement.REMATERIALIZE:
            return Choice(self._all_stores, True, "plan", rematerialize=True)
        stores = self._stores.get(placement)
        if stores is None:  # it was to be recomputed with a block that is not
            self.mismatch.unknown_saves += 1
            return self._unknown
        return Choice(stores, True)
