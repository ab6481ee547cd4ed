"""From a trace and limits to a plan.

[Note: Search strategy] Storages are ordered by the bytes and seconds of memory that they give back for each second of
the resource that they take: of compute, where they are rematerialized or recomputed with their block; of drive and
copies, where they are moved (which takes time by the byte, so that the longest idle goes first). For each order of
what is computed again, bisection finds how much of it the limits call for, while of the rest all that costs no time is
moved: as much as staging has room for at its pack, less what backward would wait for. Then bisection finds how much of
the rest is moved: without a budget as much as there is time for, with one as little as it takes to fit. Of all that
was replayed the best is taken; see ``rank``. No clock is asked, so that every rank would find the same plan.

[Note: Groups] Where there are many storages, neighbours are placed together, and of interleaved forwards that are
alike all are placed alike: what one of them saves lowers no peak. Only the best is replayed in full; if it misses the
limits, the search is repeated within narrower ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from ds_tba.config import Placement
from ds_tba.planner.plan import SAME_TIME_S, Limits, Plan, Rank, is_outside, longest_step_s, rank
from ds_tba.planner.replay import Outcome, replay
from ds_tba.planner.timeline import Assignment, Bools, Floats, Ints, Places, Timeline
from ds_tba.planner.trace import Trace

Planner = Callable[[Trace, Limits], Plan]

SEARCHED_GROUPS = 500
# Of each of several interleaved forwards, however many there are.
MIN_GROUPS_PER_FORWARD = 100
RELIEF_ROUNDS = 4
# Moves are counted as finely as this fraction of all.
MOVES_RESOLUTION = 1 / 64
# Rounding to groups may lose what just fits: these fractions of the limits are given away then.
MARGINS = (0.0, 0.02, 0.06)
# Steps closer than this fraction of one are equal: the drive is not worn for less.
SAME_STEP_FRACTION = 0.02

_KEEP, _HOST, _NVME = int(Placement.KEEP), int(Placement.HOST), int(Placement.NVME)
_REMATERIALIZE = int(Placement.REMATERIALIZE)


def adaptive(trace: Trace, limits: Limits) -> Plan:
    """The lowest peak within ``max_step_overhead``, or the least time within ``activation_budget_bytes``.

    With a budget, writing must gain more time over computing again than predictions can tell. Deterministic. Keeps
    within ``host_budget_bytes`` and ``write_limit_bytes_per_step``, and within ``movable_share`` unless a budget takes
    more; where no plan fits the budget, the plan with the lowest peak.
    """
    timeline = _without_large_blocks(Timeline.of(trace), limits.activation_budget_bytes)
    found = _found(timeline, limits)
    over_budget = limits.activation_budget_bytes is not None and _is_outside(found, limits, timeline)
    if limits.movable_share < 1 and over_budget:
        found = _found(timeline, replace(limits, movable_share=1.0))
    # Of two equal ways, reading as far as the bounds allow comes too late less often than just in time.
    as_far = replay(timeline, found.assignment)
    if rank(as_far.cost, limits, timeline.step_s) <= rank(found.cost, limits, timeline.step_s):
        found = as_far
    return plan_of("adaptive", found)


def plan_of(planner: str, outcome: Outcome) -> Plan:
    """The plan that a replay found."""
    places = np.where(outcome.dropped, int(Placement.RECOMPUTE), outcome.assignment.placements).tolist()
    return Plan(
        planner,
        tuple(map(list(Placement).__getitem__, places)),
        tuple(outcome.assignment.recomputed.tolist()),
        outcome.prefetch_distance,
        outcome.cost,
    )


def _is_outside(outcome: Outcome, limits: Limits, timeline: Timeline) -> bool:
    return is_outside(rank(outcome.cost, limits, timeline.step_s))


def _without_large_blocks(timeline: Timeline, budget_bytes: int | None) -> Timeline:
    """The same, where blocks that alone make more again than a budget are not recomputed if that can be moved.

    What was moved comes back one by one, what is recomputed all at once.
    """
    if budget_bytes is None:
        return timeline
    staying = timeline.dropped_bytes(np.where(timeline.to_nvme, 0, timeline.nbytes))
    is_better_moved = (timeline.dropped_bytes(timeline.nbytes) > budget_bytes) & (staying <= budget_bytes)
    return replace(timeline, recomputable=timeline.recomputable & ~is_better_moved)


def _found(timeline: Timeline, limits: Limits) -> Outcome:
    """The best, replayed in full; see [Note: Groups]."""
    tried = []
    for margin in MARGINS:
        budget_bytes = limits.activation_budget_bytes
        narrowed = replace(
            limits,
            max_step_overhead=limits.max_step_overhead * (1 - margin),
            activation_budget_bytes=None if budget_bytes is None else int(budget_bytes * (1 - margin)),
        )
        search = _Search(timeline, narrowed)
        search.run()
        tried.append(replay(timeline, search.chosen(), None))
        if search.is_exact or not _is_outside(tried[-1], limits, timeline):
            break
    return min(tried, key=lambda one: rank(one.cost, limits, timeline.step_s))


class _Search:
    """See [Note: Search strategy].

    Assignments are of units here: groups of storages, and of alike forwards the storages and blocks of one.

    Attributes:
        is_exact: whether each unit is one storage.
        best: of what was replayed.
        simplest: the best that moves nothing.
    """

    def __init__(self, whole: Timeline, limits: Limits) -> None:
        forwards = whole.alike_forwards()
        self._group = whole.groups(max(SEARCHED_GROUPS, MIN_GROUPS_PER_FORWARD * forwards), forwards)
        self._timeline = timeline = whole.merged(self._group)
        self._forwards = forwards
        self._limits = limits
        units, blocks = len(timeline.nbytes) // forwards, len(timeline.recompute_s) // forwards
        self._unit, self._block = np.tile(np.arange(units), forwards), np.tile(np.arange(blocks), forwards)
        self.is_exact = units == len(whole.nbytes)
        self._nbytes, self._padded = self._mean(timeline.nbytes), self._mean(timeline.padded_bytes)
        self._idle_s = np.maximum(self._mean(timeline.used_s - timeline.left_s), SAME_TIME_S)
        self._by_idle = np.argsort(-self._idle_s, kind="stable")
        self._to_nvme: Bools = timeline.to_nvme[:units]
        self._to_host: Bools = timeline.movable[:units] & (self._nbytes <= limits.host_budget_bytes)
        self.best = self.simplest = replay(timeline, timeline.kept)
        self._seen: dict[bytes, Outcome] = {}
        # Of one forward: the bytes that are moved at most, written, and held by the host if as many are in flight as
        # make the peak.
        self._movable_bytes = limits.movable_share * self._nbytes[timeline.movable[:units]].sum()
        self._write_bytes = limits.write_limit_bytes_per_step / timeline.micro_steps / forwards
        in_flight = max(1.0, self.best.cost.peak_saved_bytes / max(1.0, self._nbytes.sum())) if forwards > 1 else 1.0
        self._host_bytes = limits.host_budget_bytes / in_flight

    def chosen(self) -> Assignment:
        """The best for all storages; one that writes less for about the same time is better."""
        found = self.best
        if self._has_budget and self._is_within(self.simplest):
            gained_s = self.simplest.cost.step_s - self.best.cost.step_s
            is_gain = gained_s > SAME_STEP_FRACTION * self._timeline.step_s
            found = self.best if is_gain else self.simplest
        return Assignment(found.assignment.placements[self._group], found.assignment.recomputed)

    def run(self) -> None:
        """Search."""
        timeline, limits = self._timeline, self._limits
        made = self._cheapest(timeline.rematerializable & limits.rematerialize)
        most = self._affordable(self._mean(timeline.rematerialize_s)[made], 0.0)
        self._grow(most, lambda count: self._again_with(made[:count], made, 0))
        for order in self._block_orders():
            for besides in (made[:0], made[:most]) if most else (made[:0],):
                spent_s = float(self._mean(timeline.rematerialize_s)[besides].sum())
                count = self._affordable(self._mean(timeline.recompute_s)[order], spent_s)
                if count:
                    self._grow(count, partial(self._again_with, besides, order))
        if self.is_exact and not self._has_budget:
            self._trim(self.best)

    # ---- what is computed again ---------------------------------------------------------------------------------

    def _cheapest(self, may: Bools) -> Ints:
        """The units that may be rematerialized, by seconds for each byte and second of memory."""
        price = self._mean(self._timeline.rematerialize_s) / (self._nbytes * self._idle_s)
        which = np.flatnonzero(may[: len(self._nbytes)])
        return which[np.argsort(_rounded(price[which]), kind="stable")]

    def _block_orders(self) -> list[Ints]:
        """Orders in which blocks would be recomputed: the cheapest first, and spread evenly among what is moved."""
        timeline = self._timeline
        blocks = len(self._mean(timeline.recompute_s))
        own = np.flatnonzero(timeline.owner[: len(self._nbytes)] >= 0)
        value = np.bincount(timeline.owner[own], (self._nbytes * self._idle_s)[own], minlength=blocks)[:blocks]
        price = self._mean(timeline.recompute_s) / np.maximum(value, SAME_TIME_S)
        which = np.flatnonzero(timeline.recomputable[:blocks] & self._limits.recompute)
        spread = sorted(which.tolist(), key=lambda number: f"{number:032b}"[::-1])
        return [which[np.argsort(_rounded(price[which]), kind="stable")], np.array(spread, np.int64)]

    def _affordable(self, seconds: Floats, spent_s: float) -> int:
        """Length of the longest prefix whose seconds fit the remaining overhead; all with a budget."""
        if self._has_budget:
            return len(seconds)
        steps = self._timeline.micro_steps * self._forwards
        left_s = longest_step_s(self._limits, self._timeline.step_s) - self._timeline.step_s - spent_s * steps
        return int(np.searchsorted(np.cumsum(seconds) * steps, left_s, "right"))

    def _again_with(self, rematerialized: Ints, blocks: Ints, count: int) -> Assignment:
        """Some units rematerialized, and the first ``count`` of these blocks recomputed."""
        recomputed = np.zeros(len(self._timeline.recompute_s) // self._forwards, bool)
        placements = np.zeros(len(self._nbytes), np.int8)
        placements[rematerialized] = _REMATERIALIZE
        recomputed[blocks[:count]] = True
        return Assignment(placements, recomputed)

    def _grow(self, most: int, again: Callable[[int], Assignment]) -> None:
        """Bisect how much is computed again, with all moved besides that costs no time; then how much is moved."""
        free: dict[int, tuple[Outcome, Ints, Places]] = {}

        def moved(count: int) -> Outcome:
            free[count] = self._free(again(count))
            return free[count][0]

        if self._has_budget:
            self._bisect(most, lambda count: self._replay(again(count)))
        few, many = self._bisect(most, moved)
        counts = {0, few, many}
        if few == many:  # all of it is not enough; where sources must be there, a part of it may leave a lower peak
            counts |= {most * part // 4 for part in range(4)}
        for count in sorted(counts):
            if count not in free:
                moved(count)
            self._spend(again(count), *free[count][1:])

    # ---- what is moved ------------------------------------------------------------------------------------------

    def _free(self, again: Assignment) -> tuple[Outcome, Ints, Places]:
        """Move what costs no time, or no more than there is; the units to move in order, and where each would go."""
        where = np.where(self._to_nvme & (again.placements == _KEEP), _NVME, again.placements).astype(np.int8)
        lifetimes = self._timeline.lifetimes(self._spread(again))
        is_open = (lifetimes.exists & ~lifetimes.dropped)[: len(where)] & (again.placements == _KEEP)
        paced = self._gathered(
            replay(self._timeline, self._spread(Assignment(where, again.recomputed)), may_wait=False)
        )
        where, order = self._capped(is_open & (self._to_nvme | self._to_host), paced == _NVME)
        found = self._replay(self._with(again, where, order[(paced[order] == _NVME) | (where[order] == _HOST)]))
        longest_s = self._timeline.step_s + found.cost.recomputed_s + found.cost.rematerialized_s
        if not self._has_budget:
            longest_s = max(longest_s, longest_step_s(self._limits, self._timeline.step_s))
        found = self._relieved(found, again, longest_s)
        moved = self._gathered(found)[order] != _KEEP
        return found, np.concatenate([order[moved], order[~moved]]), where

    def _capped(self, is_open: Bools, first: Bools) -> tuple[Places, Ints]:
        """Where each of the open units would go within the bounds of host memory, wear and share, in order."""
        order = self._by_idle[is_open[self._by_idle]]
        order = np.concatenate([order[first[order]], order[~first[order]]])
        order = _fitting(order, self._nbytes, self._movable_bytes)
        written = _fitting(order[self._to_nvme[order]], self._padded, self._write_bytes)
        rest = order[~(np.isin(order, written) & first[order]) & self._to_host[order]]
        where = np.zeros(len(self._nbytes), np.int8)
        where[written] = _NVME
        where[_fitting(rest, self._nbytes, self._host_bytes)] = _HOST
        return where, order[where[order] != _KEEP]

    def _relieved(self, found: Outcome, again: Assignment, longest_s: float) -> Outcome:
        """With as many units kept after all as it takes to end a step within ``longest_s``, if that is possible."""
        for _ in range(RELIEF_ROUNDS):
            if found.cost.step_s <= longest_s + SAME_TIME_S:
                break
            found = self._replay(Assignment(self._with_less_moved(found, longest_s), again.recomputed))
        return found

    def _with_less_moved(self, outcome: Outcome, longest_s: float) -> Places:
        """For each stall beyond what is allowed, keep as many of the bytes moved just before it as that time moves."""
        resources, steps = self._timeline.resources, self._timeline.micro_steps * self._forwards
        excess_s = (outcome.cost.step_s - longest_s) / steps
        stalls = np.zeros(len(self._nbytes))
        for storage, seconds in outcome.stalls:
            stalls[self._unit[storage]] += seconds / self._forwards
        placements = self._gathered(outcome)
        rates = {
            _HOST: resources.copy_in_bytes_per_s,
            _NVME: min(resources.read_bytes_per_s, resources.copy_in_bytes_per_s),
        }
        before: list[int] = []
        for unit in dict.fromkeys(self._unit[outcome.order].tolist()):
            if placements[unit] != _KEEP:
                before.append(unit)
            seconds = min(stalls[unit], excess_s)
            excess_s -= seconds
            while seconds > 0 and before:
                kept = before.pop()
                seconds -= self._nbytes[kept] / rates[int(placements[kept])]
                placements[kept] = _KEEP
            if excess_s <= 0:
                break
        return placements

    def _spend(self, again: Assignment, order: Ints, where: Places) -> None:
        self._bisect(len(order), lambda count: self._replay(self._with(again, where, order[:count])), MOVES_RESOLUTION)
        if not self._has_budget:  # the last to be packed are not always the ones to be kept
            everything = self._replay(self._with(again, where, order))
            self._relieved(everything, again, longest_step_s(self._limits, self._timeline.step_s))

    def _trim(self, best: Outcome) -> None:
        """Bisect how little need be moved for the same peak."""
        where = self._gathered(best)
        is_moved = (where == _HOST) | (where == _NVME)
        order = self._by_idle[is_moved[self._by_idle]]
        kept = np.where(is_moved, _KEEP, where).astype(np.int8)
        again = Assignment(kept, best.assignment.recomputed[: len(self._block) // self._forwards])
        few, many = 0, len(order)
        while many - few > 1:
            middle = (few + many) // 2
            found = self._replay(self._with(again, where, order[:middle]))
            if found.cost.peak_saved_bytes > best.cost.peak_saved_bytes:
                few = middle
            else:
                many = middle

    def _with(self, again: Assignment, where: Places, moved: Ints) -> Assignment:
        placements = again.placements.copy()
        placements[moved] = where[moved]
        return Assignment(placements, again.recomputed)

    # ---- replays ------------------------------------------------------------------------------------------------

    @property
    def _has_budget(self) -> bool:
        """Whether step time is minimized within a budget, instead of the peak within an overhead."""
        return self._limits.activation_budget_bytes is not None

    def _is_within(self, outcome: Outcome) -> bool:
        return not is_outside(self._rank(outcome))

    def _rank(self, outcome: Outcome) -> Rank:
        return rank(outcome.cost, self._limits, self._timeline.step_s)

    def _bisect(self, most: int, outcome: Callable[[int], Outcome], resolution: float = 0.0) -> tuple[int, int]:
        """Two neighbouring counts, up to ``most``, between which the limits are just met."""
        few, many = 0, most
        if not self._calls_for_more(outcome(few)) or not most:
            return few, few
        if self._calls_for_more(outcome(many)):
            return many, many
        while many - few > max(1.0, most * resolution):
            middle = (few + many) // 2
            if self._calls_for_more(outcome(middle)):
                few = middle
            else:
                many = middle
        return few, many

    def _calls_for_more(self, outcome: Outcome) -> bool:
        """To be computed again or moved: with a budget until it fits, else as long as there is time."""
        return self._is_within(outcome) != self._has_budget

    def _replay(self, assignment: Assignment) -> Outcome:
        """Replay an assignment of units just in time, and remember the outcome if it is the best."""
        key = assignment.placements.tobytes() + assignment.recomputed.tobytes()
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = replay(self._timeline, self._spread(assignment), None)
            if self._rank(found) < self._rank(self.best):
                self.best = found
            if not found.order and self._rank(found) < self._rank(self.simplest):
                self.simplest = found
        return found

    def _spread(self, assignment: Assignment) -> Assignment:
        return Assignment(assignment.placements[self._unit], assignment.recomputed[self._block])

    def _gathered(self, outcome: Outcome) -> Places:
        """Placements of units: KEEP where most forwards keep them."""
        placements = outcome.assignment.placements.reshape(self._forwards, -1)
        usual = np.max(placements, axis=0)
        return np.where(2 * (placements != _KEEP).sum(axis=0) >= self._forwards, usual, _KEEP).astype(np.int8)

    def _mean(self, column: Floats | Ints) -> Floats:
        """Of each unit over the forwards."""
        return np.asarray(column.reshape(self._forwards, -1).mean(axis=0))


def _fitting(units: Ints, nbytes: Floats, bound_bytes: float) -> Ints:
    """The units, in order, that fit a bound together with those before them."""
    held_bytes, fitting = 0.0, []
    for unit in units.tolist():
        if held_bytes + nbytes[unit] <= bound_bytes:
            held_bytes += nbytes[unit]
            fitting.append(unit)
    return np.array(fitting, np.int64)


def _rounded(price: Floats) -> Floats:
    """Prices that differ by the rounding of times only are equal."""
    return np.array([float(f"{one:.2e}") for one in price.tolist()])
