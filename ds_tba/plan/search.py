"""From a trace and limits to a plan.

[Note: Search strategy] Storages are ordered by the bytes and seconds of memory that they give back for each second of
what they take: of compute, where they are rematerialized or recomputed with their block; of drive and copies, where
they are moved. That takes time by the byte, so that the longest idle goes first: of those that wait for nothing, then
of the others (and, without a budget, of all in a second try). For each order of what is computed again, bisection finds
how much of it the limits call for beside the moves that wait for nothing. Then bisection finds how much is moved:
without a budget as much as there is time for, with one as little as it takes to fit. Of all that was replayed the best
is taken; see ``order_of``. No clock is asked, so that every rank would find the same plan. The budget is held where
storages are placed, and the time is measured: a plan need not be the best to the per cent.

[Note: Alike forwards] Of interleaved forwards that are alike all are placed alike: what one of them saves lowers no
peak.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np

from ds_tba.config import Placement
from ds_tba.plan.plan import SAME_TIME_S, Limits, Order, Plan, is_outside, order_of
from ds_tba.plan.replay import HOST, KEEP, NVME, Assignment, Bools, Floats, Int8s, Ints, Replay, Timeline
from ds_tba.plan.trace import Trace

# Steps closer than this fraction of one are equal: the drive is not worn for less.
SAME_STEP_FRACTION = 0.02


def adaptive(trace: Trace, limits: Limits) -> Plan:
    """Return the lowest peak within ``max_step_overhead``, or the least time within ``activation_budget_bytes``.

    With a budget, writing must gain more time over computing again than predictions can tell. Deterministic. Keeps
    within ``host_budget_bytes``, and within ``movable_share`` and ``write_limit_bytes_per_step`` unless a budget takes
    more; where no plan fits the budget, the plan with the lowest peak.
    """
    timeline = Timeline(trace)
    found = _Search(timeline, limits).best()
    budget_bytes = limits.activation_budget_bytes
    # A share that steps have lowered may not keep a budget from fitting.
    if limits.movable_share < 1 and budget_bytes is not None and found.cost.peak_saved_bytes > budget_bytes:
        found = _Search(timeline, replace(limits, movable_share=1.0)).best()
    # Reading as far as the bounds allow comes too late less often than just in time: of two equal ways it is taken.
    as_far = Replay(timeline, found.assignment)
    if order_of(as_far.cost, limits, trace.step_s) <= order_of(found.cost, limits, trace.step_s):
        found = as_far
    return plan_of("adaptive", trace, limits, found)


def plan_of(planner: str, trace: Trace, limits: Limits, found: Replay) -> Plan:
    """Return the plan that a replay found."""
    places = tuple(map(Placement, np.where(found.dropped, Placement.RECOMPUTE, found.assignment.placements).tolist()))
    recomputed = tuple(found.assignment.recomputed.tolist())
    return Plan(planner, trace, limits, places, recomputed, found.prefetch_distance, found.cost)


class _Search:
    """See [Note: Search strategy].

    Assignments are of units here: the storages and blocks of one of the forwards that are alike, or of the only one.
    """

    def __init__(self, timeline: Timeline, limits: Limits) -> None:
        self._timeline = timeline
        self._forwards = forwards = timeline.alike_forwards()
        units, blocks = len(timeline.nbytes) // forwards, len(timeline.recompute_s) // forwards
        modules = [block.module for block in timeline.trace.blocks[:blocks]]
        self._module = np.unique(modules, return_inverse=True)[1]
        self._unit, self._block = np.tile(np.arange(units), forwards), np.tile(np.arange(blocks), forwards)
        self._limits = limits
        # Step time is minimized within a budget, instead of the peak within an overhead.
        self._has_budget = limits.activation_budget_bytes is not None
        self._nbytes, self._padded = self._mean(timeline.nbytes), self._mean(timeline.padded_bytes)
        self._idle_s = np.maximum(self._mean(timeline.used_s - timeline.left_s), SAME_TIME_S)
        self._to_nvme: Bools = timeline.to_nvme[:units]
        self._to_host: Bools = timeline.movable[:units] & (self._nbytes <= limits.host_budget_bytes)
        # The best of what was replayed, and of what moves nothing.
        self._best = self._simplest = Replay(timeline, timeline.kept)
        self._seen: dict[bytes, bool] = {}
        # The most bytes of one forward that are offloaded, written, and held by the host (as many are in flight as make
        # the peak).
        self._movable_bytes = limits.movable_share * self._nbytes[timeline.movable[:units]].sum()
        self._write_bytes = limits.write_limit_bytes_per_step / timeline.trace.micro_steps / forwards
        in_flight = max(1.0, self._best.cost.peak_saved_bytes / max(1.0, self._nbytes.sum())) if forwards > 1 else 1.0
        self._host_bytes = limits.host_budget_bytes / in_flight

    def best(self) -> Replay:
        """Return the best; one that writes less for about the same time is better."""
        timeline = self._timeline
        blocks = self._blocks()
        seconds = self._mean(timeline.rematerialize_s)  # not a number: cannot be rematerialized
        made = np.flatnonzero(~np.isnan(seconds) & self._limits.rematerialize)
        made = _cheapest(made, seconds / (self._nbytes * self._idle_s))
        most = self._grow(made, lambda some: self._again(some, blocks[:0]))
        for besides in (made[:0], made[:most]) if most else (made[:0],):
            self._grow(blocks, partial(self._again, besides))
        if self._has_budget and not is_outside(self._order(self._simplest)):
            # Predictions cannot tell a gain as small as that, and drives wear for it.
            gained_s = self._simplest.cost.step_s - self._best.cost.step_s
            return self._best if gained_s > SAME_STEP_FRACTION * timeline.trace.step_s else self._simplest
        return self._best

    # ---- what is computed again ---------------------------------------------------------------------------------

    def _blocks(self) -> Ints:
        """Return the blocks that may be recomputed, by seconds for each byte; equal ones spread over the model."""
        timeline, recompute_s = self._timeline, self._mean(self._timeline.recompute_s)
        blocks = len(recompute_s)
        own = np.flatnonzero(timeline.owner[: len(self._nbytes)] >= 0)
        dropped_bytes = np.bincount(timeline.owner[own], self._nbytes[own], minlength=blocks)[:blocks]
        which = np.flatnonzero(timeline.recomputable[:blocks] & self._limits.recompute).tolist()
        spread = sorted(which, key=lambda number: f"{number:032b}"[::-1])  # neighbours are far apart
        return _cheapest(np.array(spread, np.int64), recompute_s / np.maximum(dropped_bytes, 1))

    def _again(self, units: Ints, blocks: Ints) -> Assignment:
        """Return these units rematerialized, and these blocks recomputed."""
        placements = np.zeros(len(self._nbytes), np.int8)
        placements[units] = Placement.REMATERIALIZE
        # A module that runs more than once in a forward runs again in all its passes, or in none.
        return Assignment(placements, np.isin(self._module, self._module[blocks]))

    def _grow(self, which: Ints, again: Callable[[Ints], Assignment]) -> int:
        """Bisect how many are computed again, beside what costs no time to move; then how much is moved."""
        moves = cache(lambda count: self._moves(again(which[:count])))
        alone, _ = self._bisect(len(which), lambda count: self._is_within(again(which[:count]), which[:0], 0))
        few, many = self._bisect(len(which), lambda count: self._is_within(*moves(count)))
        # Where sources must be there, a part of it may leave a lower peak than all.
        for count in sorted({few, alone, *(many * part // 4 for part in range(5))}):
            moved, order, free = moves(count)
            self._is_within(moved, order, free)
            # By idle time alone, too: what waits for nothing may be what makes all others wait for staging.
            by_idle = order[np.argsort(-self._idle_s[order], kind="stable")]
            for one in (order,) if self._has_budget else (order, by_idle):
                self._bisect(len(one), partial(self._is_within, moved, one))
        return many

    # ---- what is moved ------------------------------------------------------------------------------------------

    def _moves(self, again: Assignment) -> tuple[Assignment, Ints, int]:
        """Return all moves, the units that move in the order of offloading, and how many of them for nothing.

        Host memory, wear and the share bound what is moved.
        """
        where = np.where(self._to_nvme & (again.placements == KEEP), NVME, again.placements).astype(np.int8)
        paced = Replay(self._timeline, self._spread(where, again.recomputed), may_wait=False)
        is_open = (paced.exists & ~paced.dropped)[: len(where)] & (again.placements == KEEP)
        has_room = self._mean(paced.assignment.placements == NVME) >= 0.5
        is_free = has_room & ~np.isin(np.arange(len(where)), self._unit[[storage for storage, _ in paced.stalls]])
        order = np.lexsort((-self._idle_s, ~has_room, ~is_free))
        order = order[(is_open & (self._to_nvme | self._to_host))[order]]
        order = _fitting(order, self._nbytes, self._movable_bytes)
        written = _fitting(order[self._to_nvme[order]], self._padded, self._write_bytes)
        hosted = order[self._to_host[order]]
        if self._nbytes[hosted].sum() > self._host_bytes:  # else nothing need wait for the drive, or wear it
            rest = hosted[~(np.isin(hosted, written) & has_room[hosted])]
            hosted = _fitting(rest, self._nbytes, self._host_bytes)
        where = again.placements.copy()
        where[written], where[hosted] = NVME, HOST
        # Free ones first, and last what the drives are to be spared, if the budget can do without.
        rank_of = np.where(is_free | (where == HOST), 0, 1)
        if self._has_budget:
            worn = order[self._to_nvme[order] & (where[order] == KEEP)]
            where[worn], rank_of[worn] = NVME, 2
        order = order[where[order] != KEEP]
        order = order[np.argsort(rank_of[order], kind="stable")]
        return Assignment(where, again.recomputed), order, int((rank_of[order] == 0).sum())

    # ---- replays ------------------------------------------------------------------------------------------------

    def _bisect(self, most: int, is_within: Callable[[int], bool]) -> tuple[int, int]:
        """Return two neighbouring counts, up to ``most``, between which the limits are just met.

        More is called for until a budget is met; without one as long as there is time.
        """
        few, many = 0, most
        if is_within(few) == self._has_budget:
            return few, few
        if is_within(many) != self._has_budget:
            return many, many
        while many - few > 1:
            middle = (few + many) // 2
            few, many = (middle, many) if is_within(middle) != self._has_budget else (few, middle)
        return few, many

    def _is_within(self, moved: Assignment, order: Ints, count: int) -> bool:
        """Replay moves just in time, but only the first in an order, and remember them if they are the best."""
        placements = moved.placements.copy()
        placements[order[count:]] = KEEP
        key = placements.tobytes() + moved.recomputed.tobytes()
        if key not in self._seen:
            found = Replay(self._timeline, self._spread(placements, moved.recomputed), None)
            rank = self._order(found)
            self._seen[key] = not is_outside(rank)
            if rank < self._order(self._best):
                self._best = found
            if not found.cost.written_bytes and rank < self._order(self._simplest):
                self._simplest = found
        return self._seen[key]

    def _order(self, found: Replay) -> Order:
        return order_of(found.cost, self._limits, self._timeline.trace.step_s)

    def _spread(self, placements: Int8s, recomputed: Bools) -> Assignment:
        return Assignment(placements[self._unit], recomputed[self._block])

    def _mean(self, column: Floats | Ints | Bools) -> Floats:
        """Return the mean of each unit over the forwards."""
        return np.asarray(column.reshape(self._forwards, -1).mean(axis=0))


def _fitting(units: Ints, nbytes: Floats, bound_bytes: float) -> Ints:
    """Return the units, in order, that fit a bound together with those before them."""
    held_bytes, fitting = 0.0, []
    for unit in units.tolist():
        if held_bytes + nbytes[unit] <= bound_bytes:
            held_bytes += nbytes[unit]
            fitting.append(unit)
    return np.array(fitting, np.int64)


def _cheapest(which: Ints, price: Floats) -> Ints:
    """Sort by price, where prices are equal that differ by the rounding of times only."""
    rounded = np.array([float(f"{one:.2e}") for one in price[which].tolist()])
    return which[np.argsort(rounded, kind="stable")]
