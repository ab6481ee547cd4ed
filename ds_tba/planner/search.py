"""The search of the adaptive planner: assignments are replayed, the best by the limits is remembered.

[Note: The way of the search] Few assignments are tried where all can be. Else, for several sets of recomputed blocks,
everything goes to NVMe as far as staging has room at its pack, then what makes backward wait longer than the limits
allow is kept after all; between such a fast assignment and one with everything moved, the share that is just allowed
is found by halving. What is left of the work is spent on changing runs of neighbours, long runs first. All of it with
reading ahead just in time. The amount of work is bounded by replayed storages, not by a clock, so that every rank finds
the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from ds_tba.config import Placement
from ds_tba.planner.plan import Limits, Outcome, Plan, Prediction, Rank, is_outside, longest_step_s, make_plan, rank
from ds_tba.planner.simulator import Pacing, replay
from ds_tba.planner.timeline import Assignment, Bools, Ints, Timeline
from ds_tba.planner.trace import Trace

REPLAYED_STORAGES = 100_000
MIN_REPLAYS = 60
MAX_REPLAYS = 1500
ENUMERATED = 600
RELIEF_ROUNDS = 4
HALVINGS = 5
MAX_STORAGES_FOR_PAIRS = 16

Tried = tuple[Outcome, Prediction]
Found = tuple[Rank, Outcome, Prediction]
_KEEP, _HOST, _NVME = int(Placement.KEEP), int(Placement.HOST), int(Placement.NVME)


class Search:
    """The best assignment of a timeline found so far.

    Attributes:
        found: the best so far, at first everything kept: its rank, what happens, its cost.
    """

    def __init__(self, timeline: Timeline, limits: Limits) -> None:
        self.timeline = timeline
        self.limits = limits
        kept = replay(timeline, timeline.kept)
        self.found: Found = (rank(kept[1], limits, timeline.step_s), *kept)
        self._left = min(MAX_REPLAYS, max(MIN_REPLAYS, REPLAYED_STORAGES // max(1, timeline.storages)))
        self._starts: list[Tried] = []
        self._seen: dict[bytes, Tried] = {}
        self._may_recompute: Bools = timeline.recomputable & limits.recompute
        self._to_nvme = timeline.can_go_to_nvme()
        self._to_host = timeline.movable & (timeline.nbytes <= limits.host_budget_bytes)
        self._pacing = Pacing(limits.host_budget_bytes, limits.write_limit_bytes_per_step / timeline.micro_steps)

    # ---- one ----------------------------------------------------------------------------------------------------

    def replay(self, assignment: Assignment) -> Tried:
        """Replay an assignment, and remember it if it is the best."""
        key = assignment.placements.tobytes() + assignment.recomputed.tobytes()
        tried = self._seen.get(key)
        if tried is None:
            self._left -= 1
            tried = self._seen[key] = self._replay(assignment, None)
        return tried

    def replay_both(self, assignment: Assignment) -> None:
        """Replay an assignment with reading ahead just in time, and as far as the bounds allow.

        Of equals the latter is better: it is less likely to come too late.
        """
        for lead in (None, ()):
            self._replay(assignment, lead)

    def _replay(self, assignment: Assignment, lead: tuple[int, ...] | None) -> Tried:
        tried = replay(self.timeline, assignment, lead=lead)
        found = self._rank(tried)
        if found < self.found[0] or (found == self.found[0] and not tried[0].lead):
            self.found = (found, *tried)
        return tried

    def is_over(self) -> bool:
        """Whether the work is done that may be done."""
        return self._left <= 0

    def is_within(self, cost: Prediction) -> bool:
        """Whether a cost is within the limits."""
        return not is_outside(rank(cost, self.limits, self.timeline.step_s))

    def relieve(self, assignment: Assignment, most_s: float, rounds: int = RELIEF_ROUNDS) -> Tried:
        """Keep of what is moved as much as it takes to end a step within ``most_s``, if that can be had so."""
        tried = self.replay(assignment)
        for _ in range(rounds):
            if tried[1].step_s <= most_s or not tried[0].stalls or self.is_over():
                break
            tried = self.replay(_with_less_moved(self.timeline, tried, most_s))
        return tried

    # ---- many ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Search."""
        if self._combinations() <= ENUMERATED:
            self._left = ENUMERATED
            for assignment in self._all():
                self.replay_both(assignment)
            return
        for order in self._block_orders():
            self._search_recomputed(order)
        self._polish()

    def _options(self) -> list[list[int]]:
        return [
            [_KEEP] + [_HOST] * bool(host) + [_NVME] * bool(nvme)
            for host, nvme in zip(self._to_host, self._to_nvme, strict=True)
        ]

    def _combinations(self) -> float:
        logarithm = sum(math.log(len(options)) for options in self._options())
        logarithm += float(self._may_recompute.sum()) * math.log(2)
        return math.exp(min(logarithm, 100.0))

    def _all(self) -> Iterator[Assignment]:
        """Every assignment there is."""
        choices = self._options() + [[0, 1] if may else [0] for may in self._may_recompute]
        count = self.timeline.storages
        for number in range(math.prod(map(len, choices))):
            digits = []
            for options in choices:
                number, digit = divmod(number, len(options))
                digits.append(options[digit])
            yield Assignment(np.array(digits[:count], np.int8), np.array(digits[count:], bool))

    # ---- recomputed blocks, and what is moved beside them -------------------------------------------------------

    def _block_orders(self) -> list[list[int]]:
        """Orders in which blocks would be recomputed: from the first on, spread evenly, the cheapest first."""
        blocks = [int(number) for number in np.flatnonzero(self._may_recompute)]
        if not blocks:
            return [[]]
        own = self.timeline.owner >= 0
        nbytes = np.bincount(self.timeline.owner[own], self.timeline.nbytes[own], minlength=self.timeline.blocks)
        price_s = self.timeline.recompute_s / np.maximum(nbytes, 1)
        spread = sorted(blocks, key=lambda number: (_reversed_bits(number), number))
        cheapest = sorted(blocks, key=lambda number: (float(f"{price_s[number]:.2e}"), number))
        orders: list[list[int]] = []
        for order in (blocks, spread, cheapest):
            if order not in orders:
                orders.append(order)
        return orders

    def _search_recomputed(self, order: list[int]) -> None:
        """Find how many blocks of an order to recompute, by halving; then spend what the limits leave."""
        few, many = 0, self._most_recomputed(order)
        is_timed = self.limits.activation_budget_bytes is None
        fast = {few: self._move_beside(order[:few])}
        if many > few and self.is_within(fast[few][1]) == is_timed:
            fast[many] = self._move_beside(order[:many])
            while many - few > 1 and not self.is_over():
                middle = (few + many) // 2
                fast[middle] = self._move_beside(order[:middle])
                if self.is_within(fast[middle][1]) == is_timed:
                    few = middle
                else:
                    many = middle
        for count in dict.fromkeys((few, many, 0)):
            if count in fast and not self.is_over():
                self._between(fast[count], self._everything(order[:count]))

    def _most_recomputed(self, order: list[int]) -> int:
        """How many blocks of an order there is time for."""
        if self.limits.activation_budget_bytes is not None:
            return len(order)
        took_s = np.cumsum(self.timeline.recompute_s[order]) * self.timeline.micro_steps
        return int(
            np.searchsorted(took_s, longest_step_s(self.limits, self.timeline.step_s) - self.timeline.step_s, "right")
        )

    def _everything(self, recomputed: list[int]) -> Assignment:
        """These blocks recomputed, all else moved to NVMe."""
        again = np.zeros(self.timeline.blocks, bool)
        again[recomputed] = True
        return Assignment(np.where(self._to_nvme, _NVME, _KEEP).astype(np.int8), again)

    def _move_beside(self, recomputed: list[int]) -> Tried:
        """Move what can be moved while these blocks are recomputed; the best of what is fast."""
        everything = self._everything(recomputed)
        fast = self._fast(everything)
        if self.limits.host_budget_bytes:
            fast = min(fast, self._fast(self._late_to_host(everything)), key=self._rank)
        self._starts.append(fast)
        return fast

    def _fast(self, wanted: Assignment) -> Tried:
        """Of what is wanted so much that nothing waits beyond the limits; with a budget, that nothing waits at all."""
        paced = replay(self.timeline, wanted, self._pacing)[0].assignment
        self._left -= 1
        kept_s = self.timeline.step_s
        recomputing_s = float(self.timeline.recompute_s[wanted.recomputed].sum()) * self.timeline.micro_steps
        tried = self.relieve(paced, kept_s + recomputing_s)
        if self.limits.activation_budget_bytes is None:
            return min(tried, self.relieve(paced, longest_step_s(self.limits, kept_s)), key=self._rank)
        return tried

    def _rank(self, tried: Tried) -> Rank:
        return rank(tried[1], self.limits, self.timeline.step_s)

    def _between(self, fast: Tried, full: Assignment) -> None:
        """Of what only ``full`` moves, move the share that the limits just allow, early packs first, then late ones."""
        different = np.flatnonzero(fast[0].assignment.placements != full.placements)
        if self.limits.activation_budget_bytes is not None and self.is_within(fast[1]):
            return  # to move more takes time, and less is not needed
        for order in (different, different[::-1]):
            self._halve(lambda count, order=order: self._blend(fast, full, order[:count]), len(order))  # type: ignore[misc]

    def _blend(self, fast: Tried, full: Assignment, changed: Ints) -> Assignment:
        placements = fast[0].assignment.placements.copy()
        placements[changed] = full.placements[changed]
        return Assignment(placements, full.recomputed)

    def _halve(self, make: Callable[[int], Assignment], most: int) -> None:
        """Find the count between none and ``most`` at which the limits are just met."""
        low, high = 0, most + 1
        for _ in range(HALVINGS):
            if high - low <= 1 or self.is_over():
                return
            middle = (low + high) // 2
            within = self.is_within(self.replay(make(middle))[1])
            if within == (self.limits.activation_budget_bytes is None):
                low = middle
            else:
                high = middle

    def _late_to_host(self, wanted: Assignment) -> Assignment:
        """Fill the host budget with what is packed last: it comes back first, when the drive has least time."""
        placements = wanted.placements.copy()
        existence = self.timeline.existence(wanted.recomputed)
        candidates = np.flatnonzero(self._to_host & existence.exists & ~existence.dropped)[::-1]
        held = np.cumsum(self.timeline.nbytes[candidates])
        placements[candidates[held <= self.limits.host_budget_bytes]] = _HOST
        return Assignment(placements, wanted.recomputed)

    # ---- neighbours ---------------------------------------------------------------------------------------------

    def _polish(self) -> None:
        """Climb from the best, then from the other starting points while there is work left."""
        self._climb((self.found[1], self.found[2]))
        for start in sorted(self._starts, key=self._rank):
            self._climb(start)

    def _climb(self, start: Tried) -> None:
        """Change runs of neighbours until nothing helps or the work is done."""
        at, height, improved = start, self._rank(start), True
        while improved:
            improved = False
            for change in self._changes():
                if self.is_over():
                    return
                tried = self.replay(change(at[0].assignment))
                if self._rank(tried) < height:
                    at, height, improved = tried, self._rank(tried), True

    def _changes(self) -> Iterator[Callable[[Assignment], Assignment]]:
        storages, blocks = self.timeline.storages, self.timeline.blocks
        for start, end in _runs(blocks):
            for again in (True, False):
                yield lambda old, a=start, b=end, again=again: self._with_blocks(old, a, b, again)  # type: ignore[misc]
            yield lambda old, a=start, b=end: self._with_blocks_moved(old, a, b)  # type: ignore[misc]
        for start, end in _runs(storages):
            for place in self._places():
                yield lambda old, a=start, b=end, place=place: self._with_run(old, a, b, place)  # type: ignore[misc]
        if storages <= MAX_STORAGES_FOR_PAIRS:
            yield from self._pairs()

    def _pairs(self) -> Iterator[Callable[[Assignment], Assignment]]:
        """Two storages at once, as one in another's stead."""
        storages, places = self.timeline.storages, self._places()
        for one in range(storages):
            for other in range(one):
                for place in places:
                    for instead in places:
                        yield lambda old, x=(one, place), y=(other, instead): self._with_run(  # type: ignore[misc]
                            self._with_run(old, x[0], x[0] + 1, x[1]), y[0], y[0] + 1, y[1]
                        )

    def _places(self) -> list[int]:
        return [_NVME] * bool(self._to_nvme.any()) + [_HOST] * bool(self._to_host.any()) + [_KEEP]

    def _with_run(self, old: Assignment, start: int, end: int, place: int) -> Assignment:
        placements = old.placements.copy()
        allowed = {_KEEP: self.timeline.movable, _HOST: self._to_host, _NVME: self._to_nvme}[place][start:end]
        placements[start:end][allowed] = place
        return Assignment(placements, old.recomputed)

    def _with_blocks(self, old: Assignment, start: int, end: int, again: bool) -> Assignment:
        recomputed = old.recomputed.copy()
        recomputed[start:end] = again & self._may_recompute[start:end]
        return Assignment(old.placements, recomputed)

    def _with_blocks_moved(self, old: Assignment, start: int, end: int) -> Assignment:
        """Blocks not recomputed, and what they save moved instead: each of the two alone may make it worse."""
        new = self._with_blocks(old, start, end, False)
        placements = old.placements.copy()
        placements[(self.timeline.owner >= start) & (self.timeline.owner < end) & self._to_nvme] = _NVME
        return Assignment(placements, new.recomputed)


def _runs(count: int) -> Iterator[tuple[int, int]]:
    """Halves of the whole, quarters, ..., single ones."""
    size = count
    while size >= 1:
        yield from ((start, min(start + size, count)) for start in range(0, count, size))
        if size == 1:
            return
        size = -(-size // 2)


def _reversed_bits(number: int) -> int:
    return int(f"{number:032b}"[::-1], 2)


def _with_less_moved(timeline: Timeline, tried: Tried, most_s: float) -> Assignment:
    """For each stall beyond what is allowed, keep as many of the bytes moved just before it as that time moves."""
    outcome, cost = tried
    excess_s = (cost.step_s - most_s) / timeline.micro_steps
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
            seconds -= float(timeline.nbytes[kept]) / rates[int(placements[kept])]
            placements[kept] = _KEEP
        if excess_s <= 0:
            break
    return Assignment(placements, outcome.assignment.recomputed)


# Planners, all of one signature: from a trace and limits to a plan. ``adaptive`` is the one of the runtime.
#
# ``benchmarks/planners/`` has those of the papers, and a test holds ``adaptive`` against them.


Planner = Callable[[Trace, Limits], Plan]

# The search works on groups of neighbours where there are more storages than this.
SEARCHED_GROUPS = 700
# What fits among groups may just not fit in full: these parts of the limits are given away then.
MARGINS = (0.0, 0.02, 0.06)
RELIEF_ROUNDS = 2
# Steps closer than this part of one are equal.
SAME_STEP_FRACTION = 0.02


def keep(trace: Trace, limits: Limits) -> Plan:
    """Everything kept."""
    timeline = Timeline.of(trace)
    return planned("keep", trace, limits, timeline, timeline.kept)


def recompute(trace: Trace, limits: Limits) -> Plan:
    """Every block recomputed that may be, nothing moved."""
    timeline = Timeline.of(trace)
    return planned("recompute", trace, limits, timeline, _recompute_all(timeline))


def adaptive(trace: Trace, limits: Limits) -> Plan:
    """The lowest peak within ``max_step_overhead``, or the least time within ``activation_budget_bytes``.

    With a budget, what writing gains over recomputing must be more than predictions are good for. Deterministic. Keeps
    within ``host_budget_bytes`` and ``write_limit_bytes_per_step``; where no plan fits the budget, the one with the
    lowest peak.
    """
    timeline = Timeline.of(trace)
    exact = Search(timeline, limits)
    start = _recompute_all(timeline) if limits.recompute else timeline.kept
    exact.replay_both(start)
    simple = exact.found
    coarse, group = timeline.grouped(SEARCHED_GROUPS)
    if coarse is timeline:
        exact.run()
    else:
        _search_coarsely(exact, coarse, group, start)
    exact.replay_both(exact.found[1].assignment)
    _, outcome, cost = _worth_writing(simple, exact.found, limits, timeline.step_s)
    return make_plan("adaptive", timeline, _modules(trace), outcome, cost)


def _worth_writing(simple: Found, searched: Found, limits: Limits, kept_step_s: float) -> Found:
    """What the search has found, unless it writes more for a gain of time too small to tell."""
    if limits.activation_budget_bytes is None or is_outside(simple[0]):
        return searched
    gained_s = simple[2].step_s - searched[2].step_s
    is_worth_it = gained_s > SAME_STEP_FRACTION * kept_step_s or searched[2].written_bytes <= simple[2].written_bytes
    return searched if is_worth_it else simple


def _search_coarsely(exact: Search, coarse: Timeline, group: Ints, start: Assignment) -> None:
    """Search among groups; where the best of them is not within the limits in full, again within narrower ones."""
    firsts = np.flatnonzero(np.diff(group, prepend=-1))
    for margin in MARGINS:
        search = Search(coarse, _narrowed(exact.limits, margin))
        search.replay(Assignment(start.placements[firsts], start.recomputed))
        search.run()
        _, outcome, cost = search.found
        found = outcome.assignment
        is_timed = exact.limits.activation_budget_bytes is None
        most_s = longest_step_s(exact.limits, exact.timeline.step_s) if is_timed else cost.step_s
        full = exact.relieve(Assignment(found.placements[group], found.recomputed), most_s, RELIEF_ROUNDS)
        if exact.is_within(full[1]):
            return


def _narrowed(limits: Limits, margin: float) -> Limits:
    budget_bytes = limits.activation_budget_bytes
    return replace(
        limits,
        max_step_overhead=limits.max_step_overhead * (1 - margin),
        activation_budget_bytes=None if budget_bytes is None else int(budget_bytes * (1 - margin)),
    )


def _recompute_all(timeline: Timeline) -> Assignment:
    return Assignment(timeline.kept.placements, timeline.recomputable.copy())


def planned(name: str, trace: Trace, limits: Limits, timeline: Timeline, assignment: Assignment) -> Plan:
    """The plan of an assignment: reading ahead just in time or as far as the bounds allow, what is better."""
    both = [replay(timeline, assignment, lead=lead) for lead in ((), None)]
    best = min(both, key=lambda tried: rank(tried[1], limits, timeline.step_s))
    return make_plan(name, timeline, _modules(trace), *best)


def _modules(trace: Trace) -> list[str]:
    return [block.module for block in trace.blocks]
