"""From a trace and limits to a plan: one order of everything that frees memory, and how much of it to take.

[Note: The order] What a plan can do is move a storage to NVMe or host memory, rematerialize it, or recompute a block.
Each frees bytes for the seconds between forward's last use and backward's first. Compute that runs again always costs
time: it is ordered by bytes x idle seconds per second, and a bisection finds how much of it to take, beside the moves
for which nobody waits. A move costs time only where somebody waits for it, and all take as long for a byte: so those
that nobody waits for come first, and of both kinds the longest idle. A bisection finds how many to take: until the
budget fits, or ``max_step_overhead`` is spent. Each try is a replay, and of all replays the best is taken
(``plan.rank``). No clock is asked: every rank would find the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ds_tba.config import Placement
from ds_tba.plan.plan import SAME_TIME_S, Limits, Plan, Rank, is_outside, rank
from ds_tba.plan.replay import Outcome, replay
from ds_tba.plan.timeline import Assignment, Ints, Timeline
from ds_tba.plan.trace import Trace

# How much is taken is counted as finely as this fraction of all.
RESOLUTION = 1 / 64
PARTS = 16
# Steps closer than this fraction of one are equal: the drive is not worn for less.
SAME_STEP_FRACTION = 0.02

_HOST, _NVME, _REMATERIALIZE = int(Placement.HOST), int(Placement.NVME), int(Placement.REMATERIALIZE)


def adaptive(trace: Trace, limits: Limits) -> Plan:
    """Return the lowest peak within ``max_step_overhead``, or the least time within ``activation_budget_bytes``.

    Keeps within ``host_budget_bytes``, and within ``movable_share`` and ``write_limit_bytes_per_step`` unless a budget
    takes more; where no plan fits the budget, the plan with the lowest peak.
    """
    timeline = Timeline.of(trace)
    found = _Search(timeline, limits).found()
    budget_bytes = limits.activation_budget_bytes
    # A share that steps have lowered may not keep a budget from fitting.
    if limits.movable_share < 1 and budget_bytes is not None and found.cost.peak_saved_bytes > budget_bytes:
        found = _Search(timeline, replace(limits, movable_share=1.0)).found()
    return plan_of("adaptive", found)


def plan_of(planner: str, outcome: Outcome) -> Plan:
    """Return the plan that a replay found."""
    places = np.where(outcome.dropped, int(Placement.RECOMPUTE), outcome.assignment.placements).tolist()
    return Plan(
        planner,
        tuple(map(list(Placement).__getitem__, places)),
        tuple(outcome.assignment.recomputed.tolist()),
        outcome.prefetch_distance,
        outcome.cost,
    )


@dataclass(frozen=True, slots=True)
class _Item:
    """Something to take: some storages placed, or some passes recomputed; the lowest price first."""

    price: float
    place: int
    storages: Ints
    passes: Ints


_NONE = np.zeros(0, np.int64)


class _Search:
    """See [Note: The order]."""

    def __init__(self, timeline: Timeline, limits: Limits) -> None:
        self._timeline, self._limits = timeline, limits
        # Step time is minimized within a budget, instead of the peak within an overhead.
        self._has_budget = limits.activation_budget_bytes is not None
        self._best = kept = replay(timeline, timeline.kept)
        # What interleaved forwards save alike is placed alike: what one of them saves lowers no peak.
        forwards, count = len(timeline.trace.forwards), len(timeline.nbytes)
        alike = forwards if forwards > 1 and count % forwards == 0 else 1
        self._rows: Ints = np.arange(count, dtype=np.int64).reshape(alike, -1).T
        self._idle_s = np.maximum(timeline.used_s - timeline.left_s, SAME_TIME_S)
        # All forwards' bytes over those in memory at once: the host holds no more of them at a time.
        self._in_flight = min(1.0, kept.cost.peak_saved_bytes / max(1, timeline.nbytes.sum())) if alike > 1 else 1.0

    def found(self) -> Outcome:
        """Return the best plan; one that writes nothing for about the same time is better."""
        again = self._computed_again()

        def beside(count: int) -> Outcome:
            moves, free = self._moves(again[:count])
            return self._replay([*again[:count], *moves[:free]])

        most = self._bisect(len(again), beside)
        for count in sorted({0, most // 2, most}):
            moves, _ = self._moves(again[:count])
            by_idle = sorted(moves, key=lambda item: item.price)
            for one in (moves,) if self._has_budget else (moves, by_idle):
                taken = self._bisect(len(one), partial(self._moved, again[:count], one))
                if self._has_budget and not self._is_within(self._best):  # the lowest peak need not be that of all
                    for part in range(PARTS):
                        self._moved(again[:count], one, len(one) * part // PARTS)
                if not self._has_budget:
                    self._fill([*again[:count], *one[:taken]], [*one[taken:], *again[count:]])
        best = self._best
        if self._has_budget and best.cost.written_bytes:  # predictions cannot tell a small gain, and drives wear for it
            most = self._bisect(len(again), lambda count: self._replay(again[:count]))
            alone = self._replay(again[:most])
            gained_s = alone.cost.step_s - best.cost.step_s
            is_gain = gained_s > SAME_STEP_FRACTION * self._timeline.trace.step_s
            best = alone if self._is_within(alone) and not is_gain else self._best
        return best

    def _moved(self, again: Sequence[_Item], moves: Sequence[_Item], count: int) -> Outcome:
        return self._replay([*again, *moves[:count]])

    def _fill(self, taken: list[_Item], rest: Sequence[_Item]) -> None:
        """Take what still fits of the rest, a part at a time: one that does not may stand before others that do."""
        size = max(1, len(rest) // PARTS)
        for at in range(0, len(rest), size):
            more = [*taken, *rest[at : at + size]]
            taken = more if self._is_within(self._replay(more)) else taken

    # ---- items --------------------------------------------------------------------------------------------------

    def _price(self, cost_s: float, storages: Ints, idle_s: float | None = None) -> float:
        idle = self._idle_s[storages] if idle_s is None else idle_s
        freed = float((self._timeline.nbytes[storages] * idle).sum())
        return float(f"{cost_s / max(freed, SAME_TIME_S):.2e}")  # or the rounding of times would order equal ones

    def _moves(self, again: Sequence[_Item]) -> tuple[list[_Item], int]:
        """Return the moves beside what is computed again, in order, and how many of them nobody would wait for.

        With a budget those that the wear limit forbids come last.
        """
        timeline, limits, trace = self._timeline, self._limits, self._timeline.trace
        assignment = self._assigned(again)
        lives = timeline.lifetimes(assignment)
        is_open = timeline.movable & lives.exists & ~lives.dropped & (assignment.placements == 0)
        rows = [row for row in self._rows if is_open[row].any()]
        paced = timeline.to_nvme & is_open
        assignment.placements[paced] = _NVME
        played = replay(timeline, assignment, may_wait=False)
        has_room = played.assignment.placements == _NVME
        free = has_room & ~np.isin(np.arange(len(has_room)), [storage for storage, _ in played.stalls])

        def order(row: Ints) -> tuple[bool, bool, float]:
            return 2 * free[row].sum() < row.size, 2 * has_room[row].sum() < row.size, -float(self._idle_s[row].mean())

        rows = _fitting(
            sorted(rows, key=order), timeline.nbytes, limits.movable_share * timeline.nbytes[timeline.movable].sum()
        )
        on_drive = [row for row in rows if trace.resources.paths]
        written = _fitting(on_drive, timeline.padded_bytes, limits.write_limit_bytes_per_step / trace.micro_steps)
        # Host memory takes what the drive would have no room for first, and all if all fit: then no drive wears.
        host_bytes = limits.host_budget_bytes / self._in_flight
        worn = {id(row) for row in written if not order(row)[1]}
        first = [row for row in rows if id(row) not in worn]
        all_fit = sum(timeline.nbytes[row].sum() for row in rows) <= host_bytes
        hosted = {id(row) for row in _fitting(rows if all_fit else first, timeline.nbytes, host_bytes)}
        items: dict[int, list[_Item]] = {0: [], 1: [], 2: []}
        for row in rows:
            on_host, may = id(row) in hosted, any(row is one for one in written)
            kind = 0 if on_host or (may and not order(row)[0]) else 1 if may else 2
            if on_host or trace.resources.paths:
                items[kind].append(_Item(order(row)[2], _HOST if on_host else _NVME, row, _NONE))
        return [*items[0], *items[1], *(items[2] if self._has_budget else ())], len(items[0])

    def _computed_again(self) -> list[_Item]:
        """Return what is rematerialized and the blocks that run again, the cheapest first; equal blocks are spread."""
        timeline, limits, items = self._timeline, self._limits, list[_Item]()
        if limits.rematerialize:
            for row in self._rows:
                if timeline.rematerializable[row].all():
                    items.append(
                        _Item(self._price(timeline.rematerialize_s[row].sum(), row), _REMATERIALIZE, row, _NONE)
                    )
        passes: dict[str, list[int]] = {}
        for number, block in enumerate(timeline.trace.blocks):
            if block.is_recomputable and limits.recompute:
                passes.setdefault(block.module, []).append(number)
        blocks = [np.array(one, np.int64) for one in passes.values()]
        mean_s = float(self._idle_s.mean()) if blocks else 0.0  # of all alike, or the first blocks would go, not any
        for at in sorted(range(len(blocks)), key=lambda number: f"{number:032b}"[::-1]):
            own = np.flatnonzero(np.isin(timeline.owner, blocks[at]))
            cost_s = float(timeline.recompute_s[blocks[at]].sum())
            items.append(_Item(self._price(cost_s, own, mean_s), 0, _NONE, blocks[at]))
        return sorted(items, key=lambda item: item.price)

    # ---- replays ------------------------------------------------------------------------------------------------

    def _assigned(self, items: Sequence[_Item]) -> Assignment:
        assignment = self._timeline.kept
        for item in items:
            assignment.placements[item.storages] = item.place
            assignment.recomputed[item.passes] = True
        return assignment

    def _replay(self, items: Sequence[_Item]) -> Outcome:
        """Replay these, and remember the outcome if it is the best."""
        found = replay(self._timeline, self._assigned(items))
        if self._rank(found) < self._rank(self._best):
            self._best = found
        return found

    def _rank(self, outcome: Outcome) -> Rank:
        return rank(outcome.cost, self._limits, self._timeline.trace.step_s)

    def _is_within(self, outcome: Outcome) -> bool:
        return not is_outside(self._rank(outcome))

    def _bisect(self, most: int, outcome: Callable[[int], Outcome]) -> int:
        """Return the least count up to ``most`` that fits a budget; without one the most that there is time for."""
        if self._is_within(outcome(0)) == self._has_budget:
            return 0
        if self._is_within(outcome(most)) != self._has_budget:
            return most
        few, many = 0, most
        while many - few > max(1, most * RESOLUTION):
            middle = (few + many) // 2
            few, many = (middle, many) if self._is_within(outcome(middle)) != self._has_budget else (few, middle)
        return many if self._has_budget else few


def _fitting(rows: Sequence[Ints], nbytes: Ints, bound_bytes: float) -> list[Ints]:
    """Return the rows, in order, that fit a bound together with those before them."""
    fitting: list[Ints] = []
    for row in rows:
        row_bytes = int(nbytes[row].sum())
        if row_bytes <= bound_bytes:
            bound_bytes -= row_bytes
            fitting.append(row)
    return fitting
