"""The search of the adaptive planner: assignments are replayed, the best by the limits is remembered.

[Note: Search strategy] Where few assignments are possible, all are replayed. Else several sets of recomputed blocks
are tried. For each set, everything goes to NVMe as far as staging has room at its pack. Storages for which backward
waits longer than the limits allow are kept after all. Between this fast assignment and one with everything moved,
bisection finds the fraction that is just allowed. The remaining replays are spent on changing runs of neighbours, long
runs first. Every replay prefetches just in time. The work is bounded by replayed storages, not by a clock, so that
every rank finds the same plan.

[Note: Rematerialization] Where storages can be made again from others, all that is done once without that, and then
once more with it, so that it never makes a plan worse. The second time the sets of rematerialized storages are tried
before those of recomputed blocks, and besides these: the cheapest storages first, by seconds for each byte and second
of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ds_tba.config import Placement
from ds_tba.plan.plan import Limits, Plan
from ds_tba.plan.trace import Trace
from oracle.plan import (
    SAME_TIME_S,
    Candidates,
    Outcome,
    Rank,
    is_outside,
    longest_step_s,
    make_plan,
    rank,
)
from oracle.simulator import replay
from oracle.timeline import Assignment, Bools, Floats, Ints, OneForward, Timeline
from oracle.transfer import Pacing

REPLAYED_STORAGES = 100_000
MIN_REPLAYS = 60
MAX_REPLAYS = 1500
ENUMERATED = 600
RELIEF_ROUNDS = 4
BISECTIONS = 5
# So many sets of rematerialized storages at most, each with those before it.
REMATERIALIZED_SETS = 1 << BISECTIONS

_KEEP, _HOST, _NVME = int(Placement.KEEP), int(Placement.HOST), int(Placement.NVME)
_REMATERIALIZE = int(Placement.REMATERIALIZE)


class Replays:
    """The assignments replayed so far, the best of them, and how many more may be replayed.

    Args:
        whole: what is replayed.
        one: assignments are for this one forward of the whole, and all forwards get them.

    Attributes:
        timeline: what assignments are for.
        best: the best so far, at first everything kept.
    """

    def __init__(self, whole: Timeline, limits: Limits, one: OneForward | None = None) -> None:
        self.timeline = whole if one is None else one.timeline
        self.limits = limits
        self._whole = whole
        self._one = one
        self.best = self._play(self.timeline.kept)
        self._best_rank = self.rank(self.best)
        self._left = self._most = min(MAX_REPLAYS, max(MIN_REPLAYS, REPLAYED_STORAGES // max(1, len(whole.storages))))
        self._seen: dict[bytes, Outcome] = {}
        self._pacing = Pacing(limits.host_budget_bytes, limits.write_limit_bytes_per_step / whole.micro_steps)

    @property
    def is_over(self) -> bool:
        """Whether no more replays are left."""
        return self._left <= 0

    @property
    def has_budget(self) -> bool:
        """Whether step time is minimized within a budget, instead of the peak within an overhead."""
        return self.limits.activation_budget_bytes is not None

    @property
    def longest_step_s(self) -> float:
        """The step that ``max_step_overhead`` allows."""
        return longest_step_s(self.limits, self.timeline.step_s)

    def allow_more(self) -> None:
        """Another search begins, with as many replays as the first."""
        self._left = self._most

    def rank(self, outcome: Outcome) -> Rank:
        """By the limits: the lower the better."""
        return rank(outcome.cost, self.limits, self.timeline.step_s)

    def is_within(self, outcome: Outcome) -> bool:
        """Whether an outcome is within the limits."""
        return not is_outside(self.rank(outcome))

    def replay(self, assignment: Assignment) -> Outcome:
        """Replay an assignment, and remember the outcome if it is the best."""
        key = assignment.placements.tobytes() + assignment.recomputed.tobytes()
        found = self._seen.get(key)
        if found is None:
            self._left -= 1
            found = self._seen[key] = self._replay(assignment, None)
        return found

    def replay_both(self, assignment: Assignment) -> None:
        """Replay an assignment with prefetching just in time, and as far as the bounds allow.

        Of equals the latter is better: it is less likely to come too late.
        """
        for distance in (None, ()):
            self._replay(assignment, distance)

    def paced(self, assignment: Assignment) -> Assignment:
        """As much of an assignment as needs no waiting for staging."""
        self._left -= 1
        return self._play(assignment, self._pacing).assignment

    def relieve(self, assignment: Assignment, longest_s: float, rounds: int = RELIEF_ROUNDS) -> Outcome:
        """Keep as many of the moved storages as needed to end a step within ``longest_s``, if that is possible."""
        found = self.replay(assignment)
        for _ in range(rounds):
            if found.cost.step_s <= longest_s or not found.stalls or self.is_over:
                break
            found = self.replay(_with_less_moved(self.timeline, found, longest_s))
        return found

    def _play(
        self, assignment: Assignment, pacing: Pacing | None = None, distance: tuple[int, ...] | None = ()
    ) -> Outcome:
        if self._one is None:
            return replay(self._whole, assignment, pacing, distance)
        return replay(self._whole, self._one.spread(assignment), pacing, distance).gathered(self._one)

    def _replay(self, assignment: Assignment, distance: tuple[int, ...] | None) -> Outcome:
        found = self._play(assignment, distance=distance)
        ranked = self.rank(found)
        if ranked < self._best_rank or (ranked == self._best_rank and not found.prefetch_distance):
            self.best, self._best_rank = found, ranked
        return found


class Search:
    """See [Note: Search strategy].

    Args:
        timeline: that is searched.
        replays: of the same, also where there nothing can be rematerialized.
    """

    def __init__(self, timeline: Timeline, replays: Replays) -> None:
        self._replays = replays
        self._timeline = timeline
        self._candidates = Candidates(timeline, replays.limits)
        self._starts: list[Outcome] = []

    def run(self) -> None:
        """Search."""
        if self._candidates.count() <= ENUMERATED:
            for assignment in self._candidates.all():
                self._replays.replay_both(assignment)
            return
        again: list[int] = []
        if self._candidates.may_rematerialize.any():
            sets = self._rematerialized_sets()
            self._search_sets(len(sets) - 1, lambda count: self._candidates.everything([], sets[count]))
            again = sets[-1]
        for order in _block_orders(self._timeline, self._candidates.may_recompute):
            if order or not again:
                self._search_recomputed(order, again)
        # Climb from the best, then from the other starting points while there are replays left.
        self._climb(self._replays.best)
        for start in sorted(self._starts, key=self._replays.rank):
            self._climb(start)

    # ---- recomputed blocks, and what is moved besides -----------------------------------------------------------

    def _search_recomputed(self, order: list[int], rematerialized: list[int]) -> None:
        """Try how many blocks of an order to recompute."""
        spent_s = self._timeline.storages.rematerialize_s[rematerialized].sum()
        most = self._most(self._timeline.blocks.recompute_s[order], float(spent_s))
        self._search_sets(most, lambda count: self._candidates.everything(order[:count], rematerialized))

    def _rematerialized_sets(self) -> list[list[int]]:
        """None, the cheapest few, ..., as many as there is time for."""
        order = _rematerialization_order(self._timeline, self._candidates.may_rematerialize)
        most = self._most(self._timeline.storages.rematerialize_s[order], 0.0)
        counts = np.linspace(0, most, REMATERIALIZED_SETS + 1).astype(int).tolist()
        return [order[:count] for count in dict.fromkeys(counts)]

    def _search_sets(self, most: int, everything: Callable[[int], Assignment]) -> None:
        """Bisect which of growing sets to compute again; then spend what the limits leave.

        Args:
            most: number of the largest set; that of the empty one is 0.
            everything: all moved besides such a set.
        """
        replays = self._replays
        few, many = 0, most
        fast = {few: self._move(everything(few))}
        if many > few and replays.is_within(fast[few]) != replays.has_budget:
            fast[many] = self._move(everything(many))
            while many - few > 1 and not replays.is_over:
                middle = (few + many) // 2
                fast[middle] = self._move(everything(middle))
                if replays.is_within(fast[middle]) != replays.has_budget:
                    few = middle
                else:
                    many = middle
        for count in dict.fromkeys((few, many, 0)):
            if count in fast and not replays.is_over:
                self._blend(fast[count], everything(count))

    def _most(self, seconds: Floats, spent_s: float) -> int:
        """How many there is time for, of what takes so many seconds each in a micro-step."""
        replays, timeline = self._replays, self._timeline
        if replays.has_budget:
            return len(seconds)
        left_s = replays.longest_step_s - timeline.step_s - spent_s * timeline.micro_steps
        return int(np.searchsorted(np.cumsum(seconds) * timeline.micro_steps, left_s, "right"))

    def _move(self, everything: Assignment) -> Outcome:
        """Move what can be moved besides what is computed again; the best of what is fast."""
        fast = self._fast(everything)
        if self._replays.limits.host_budget_bytes:
            fast = min(fast, self._fast(self._candidates.late_to_host(everything)), key=self._replays.rank)
        self._starts.append(fast)
        return fast

    def _fast(self, moved: Assignment) -> Outcome:
        """As much of an assignment as waits no longer than the limits allow; with a budget, as waits not at all."""
        replays, timeline = self._replays, self._timeline
        paced = replays.paced(moved)
        recomputing_s = float(timeline.blocks.recompute_s[moved.recomputed].sum()) * timeline.micro_steps
        again_s = recomputing_s + replays.replay(paced).cost.rematerialized_s
        found = replays.relieve(paced, timeline.step_s + again_s)
        if replays.has_budget:
            return found
        return min(found, replays.relieve(paced, replays.longest_step_s), key=replays.rank)

    def _blend(self, fast: Outcome, full: Assignment) -> None:
        """Of what only ``full`` moves, move the part that the limits just allow, early packs first, then late ones."""
        if self._replays.has_budget and self._replays.is_within(fast):
            return  # to move more takes time, and less is not needed
        placements = fast.assignment.placements
        different = np.flatnonzero(placements != full.placements)
        for order in (different, different[::-1]):
            self._bisect(placements, full, order)

    def _bisect(self, placements: npt.NDArray[np.int8], full: Assignment, order: Ints) -> None:
        """Find how many storages of an order to place as ``full`` does, so that the limits are just met."""
        low, high = 0, len(order) + 1
        for _ in range(BISECTIONS):
            if high - low <= 1 or self._replays.is_over:
                return
            middle = (low + high) // 2
            blended = placements.copy()
            blended[order[:middle]] = full.placements[order[:middle]]
            found = self._replays.replay(Assignment(blended, full.recomputed))
            if self._replays.is_within(found) != self._replays.has_budget:
                low = middle
            else:
                high = middle

    # ---- neighbours ---------------------------------------------------------------------------------------------

    def _climb(self, start: Outcome) -> None:
        """Change runs of neighbours until nothing helps or no replays are left."""
        best, height, improved = start, self._replays.rank(start), True
        while improved:
            improved = False
            for change in self._candidates.changes():
                if self._replays.is_over:
                    return
                found = self._replays.replay(change(best.assignment))
                if self._replays.rank(found) < height:
                    best, height, improved = found, self._replays.rank(found), True


def _block_orders(timeline: Timeline, may_recompute: Bools) -> list[list[int]]:
    """Orders in which blocks would be recomputed: from the first on, spread evenly, the cheapest first."""
    blocks = [int(number) for number in np.flatnonzero(may_recompute)]
    if not blocks:
        return [[]]
    storages = timeline.storages
    own = storages.owner >= 0
    nbytes = np.bincount(storages.owner[own], storages.nbytes[own], minlength=len(timeline.blocks))
    price_s = timeline.blocks.recompute_s / np.maximum(nbytes, 1)
    spread = sorted(blocks, key=lambda number: (_reversed_bits(number), number))
    cheapest = sorted(blocks, key=lambda number: (float(f"{price_s[number]:.2e}"), number))
    orders: list[list[int]] = []
    for order in (blocks, spread, cheapest):
        if order not in orders:
            orders.append(order)
    return orders


def _rematerialization_order(timeline: Timeline, may_rematerialize: Bools) -> list[int]:
    """The storages that may be made again from others, the cheapest first."""
    storages = timeline.storages
    idle_s = np.maximum(storages.first_backward_use_s - storages.last_forward_use_s, SAME_TIME_S)
    price_s = storages.rematerialize_s / (storages.nbytes * idle_s)
    which = np.flatnonzero(may_rematerialize).tolist()
    return sorted(which, key=lambda index: (float(f"{price_s[index]:.2e}"), index))


def _reversed_bits(number: int) -> int:
    return int(f"{number:032b}"[::-1], 2)


def _with_less_moved(timeline: Timeline, outcome: Outcome, longest_s: float) -> Assignment:
    """For each stall beyond what is allowed, keep as many of the bytes moved just before it as that time moves."""
    excess_s = (outcome.cost.step_s - longest_s) / timeline.micro_steps
    stalls: dict[int, float] = {}
    for storage, seconds in outcome.stalls:
        stalls[storage] = stalls.get(storage, 0.0) + seconds
    placements = outcome.assignment.placements.copy()
    resources = timeline.resources
    rates = {
        _HOST: resources.copy_in_bytes_per_s,
        _NVME: min(resources.read_bytes_per_s, resources.copy_in_bytes_per_s),
    }
    before: list[int] = []
    for storage in outcome.order:
        if placements[storage] != _KEEP:
            before.append(storage)
        seconds = min(stalls.get(storage, 0.0), excess_s)
        excess_s -= seconds
        while seconds > 0 and before:
            kept = before.pop()
            seconds -= float(timeline.storages.nbytes[kept]) / rates[int(placements[kept])]
            placements[kept] = _KEEP
        if excess_s <= 0:
            break
    return Assignment(placements, outcome.assignment.recomputed)


# The search works on groups of neighbours where there are more storages than this.
SEARCHED_GROUPS = 700
# Rounding to groups may lose what just fits: these fractions of the limits are given away then.
MARGINS = (0.0, 0.02, 0.06)
FULL_RELIEF_ROUNDS = 2
# Steps closer than this fraction of one are equal.
SAME_STEP_FRACTION = 0.02


def adaptive(trace: Trace, limits: Limits) -> Plan:
    """The lowest peak within ``max_step_overhead``, or the least time within ``activation_budget_bytes``.

    With a budget, writing must gain more time over recomputing than predictions can tell. Deterministic. Keeps within
    ``host_budget_bytes`` and ``write_limit_bytes_per_step``; where no plan fits the budget, the plan with the lowest
    peak. A block that alone makes more again than the budget is moved instead, where that is possible: what was moved
    comes back one by one.
    """
    timeline = Timeline.of(trace).recomputing_within(limits.activation_budget_bytes)
    exact = Replays(timeline, limits)
    start = _recompute_all(timeline) if limits.recompute else timeline.kept
    exact.replay_both(start)
    simple = exact.best
    _search(timeline.without_rematerialization(), exact, start)
    if limits.rematerialize and timeline.storages.rematerializable.any():  # see [Note: Rematerialization]
        simple = min(simple, _rematerialize_only(exact), key=exact.rank)
        exact.allow_more()
        _search(timeline, exact, start)
    exact.replay_both(exact.best.assignment)
    chosen = exact.best if _is_worth_writing(simple, exact) else simple
    return make_plan("oracle", chosen)


def _search(timeline: Timeline, exact: Replays, start: Assignment) -> None:
    """Search for all forwards of a timeline at once, storage by storage, or in groups, whichever it takes."""
    one = timeline.one_forward()
    coarse, group = timeline.grouped(SEARCHED_GROUPS)
    if one is not None:
        exact.replay(_found_for_one(exact, one))
    elif coarse is timeline:
        Search(timeline, exact).run()
    else:
        _search_coarsely(exact, coarse, group, start)


def _rematerialize_only(exact: Replays) -> Outcome:
    """The best where nothing is moved: as many as there is time for, with a budget as few as it takes."""
    timeline = exact.timeline
    order = _rematerialization_order(timeline, timeline.storages.rematerializable)
    found: list[Outcome] = []
    few, many = -1, len(order) + 1
    while many - few > 1:
        middle = (few + many) // 2
        kept = timeline.kept
        kept.placements[order[:middle]] = _REMATERIALIZE
        found.append(exact.replay(kept))
        if exact.is_within(found[-1]) != exact.has_budget:
            few = middle
        else:
            many = middle
    return min(found, key=exact.rank)


def _is_worth_writing(simple: Outcome, exact: Replays) -> bool:
    """Whether the best that was found is to be taken, which may write more for a gain of time too small to tell."""
    if not exact.has_budget or not exact.is_within(simple):
        return True
    gained_s = simple.cost.step_s - exact.best.cost.step_s
    is_gain = gained_s > SAME_STEP_FRACTION * exact.timeline.step_s
    return is_gain or exact.best.cost.written_bytes <= simple.cost.written_bytes


def _found_for_one(exact: Replays, one: OneForward) -> Assignment:
    """The best assignment that is the same for all forwards: what it saves in one of them only lowers no peak."""
    grouped = one.grouped(SEARCHED_GROUPS)
    replays = Replays(exact.timeline, exact.limits, grouped)
    if exact.limits.recompute:
        replays.replay(_recompute_all(grouped.timeline))
    Search(grouped.timeline, replays).run()
    return grouped.spread(replays.best.assignment)


def _search_coarsely(exact: Replays, coarse: Timeline, group: Ints, start: Assignment) -> None:
    """Search among groups; where the best of them is not within the limits in full, again within narrower ones."""
    firsts = np.flatnonzero(np.diff(group, prepend=-1))
    for margin in MARGINS:
        replays = Replays(coarse, _narrowed(exact.limits, margin))
        replays.replay(Assignment(start.placements[firsts], start.recomputed))
        Search(coarse, replays).run()
        found = replays.best.assignment
        longest_s = replays.best.cost.step_s if exact.has_budget else exact.longest_step_s
        full = Assignment(found.placements[group], found.recomputed)
        if exact.is_within(exact.relieve(full, longest_s, FULL_RELIEF_ROUNDS)):
            return


def _narrowed(limits: Limits, margin: float) -> Limits:
    budget_bytes = limits.activation_budget_bytes
    return replace(
        limits,
        max_step_overhead=limits.max_step_overhead * (1 - margin),
        activation_budget_bytes=None if budget_bytes is None else int(budget_bytes * (1 - margin)),
    )


def _recompute_all(timeline: Timeline) -> Assignment:
    return Assignment(timeline.kept.placements, timeline.blocks.recomputable.copy())
