"""The planners, all of one signature: ``tba`` and ``teraio`` as published, ``adaptive`` by default.

``adaptive`` replays, on the trace itself, what the others choose, everything kept and every block recomputed, and
beside them what its own search finds; it returns the best by the limits, so that it is never worse than any of them
(what the search gains by writing must be enough to tell).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from benchmarks.planners.tba import tba_assignment
from benchmarks.planners.teraio import teraio_assignment
from ds_tba.plan.limits import Limits
from ds_tba.plan.placement import Assignment, Placement
from ds_tba.plan.simulate import replay
from ds_tba.planner.plan import Plan, is_outside, longest_step_s, make_plan, rank
from ds_tba.planner.search import Found, Search
from ds_tba.planner.timeline import Ints, Timeline
from ds_tba.planner.trace import Trace

Planner = Callable[[Trace, Limits], Plan]

# The search works on groups of neighbours where there are more storages than this.
SEARCHED_GROUPS = 700
# What fits among groups may just not fit in full: these parts of the limits are given away then.
MARGINS = (0.0, 0.02, 0.06)
RELIEF_ROUNDS = 2
# Steps closer than this part of one are equal.
SAME_STEP_PART = 0.02


def keep(trace: Trace, limits: Limits) -> Plan:
    """Everything kept."""
    timeline = Timeline.of(trace)
    return _planned("keep", trace, limits, timeline, timeline.kept)


def recompute(trace: Trace, limits: Limits) -> Plan:
    """Every block recomputed that may be, nothing moved."""
    timeline = Timeline.of(trace)
    return _planned("recompute", trace, limits, timeline, _recompute_all(timeline))


def tba(trace: Trace, limits: Limits) -> Plan:
    """TBA's suffix rule; it knows no limits."""
    timeline = Timeline.of(trace)
    return _planned("tba", trace, limits, timeline, tba_assignment(trace, timeline))


def teraio(trace: Trace, limits: Limits) -> Plan:
    """TERAIO's benefit over cost; of the limits it knows the budgets of activations and of host memory."""
    timeline = Timeline.of(trace)
    return _planned("teraio", trace, limits, timeline, teraio_assignment(timeline, limits))


def adaptive(trace: Trace, limits: Limits) -> Plan:
    """The lowest peak within ``max_step_overhead``, or the least time within ``activation_budget_bytes``.

    With a budget, what the search gains by writing must be more than predictions are good for: else the best of the
    other planners is taken. Deterministic. Keeps within ``host_budget_bytes`` and ``write_limit_bytes_per_step``; where
    no plan fits the budget, the one with the lowest peak.
    """
    timeline = Timeline.of(trace)
    exact = Search(timeline, limits)
    starts = [tba_assignment(trace, timeline), teraio_assignment(timeline, limits)]
    if limits.recompute:
        starts.append(_recompute_all(timeline))
    for assignment in starts:
        exact.replay_both(assignment)
    simple = exact.found
    coarse, group = timeline.grouped(SEARCHED_GROUPS)
    if coarse is timeline:
        exact.run()
    else:
        _search_coarsely(exact, coarse, group, starts)
    exact.replay_both(exact.found[1].assignment)
    _, outcome, cost = _worth_writing(simple, exact.found, limits, timeline.step_s)
    return make_plan("adaptive", timeline, _modules(trace), outcome, cost)


def recompute_and_move(trace: Trace, limits: Limits) -> Plan:
    """Every block recomputed that may be, and all else moved: with it a run may see what recomputing takes."""
    timeline = Timeline.of(trace)
    moved = np.where(timeline.movable & bool(trace.resources.paths), Placement.NVME, Placement.KEEP).astype(np.int8)
    return _planned("rehearsal", trace, limits, timeline, Assignment(moved, timeline.recomputable.copy()))


PLANNERS: Mapping[str, Planner] = {
    "keep": keep,
    "recompute": recompute,
    "tba": tba,
    "teraio": teraio,
    "adaptive": adaptive,
}


def _worth_writing(simple: Found, searched: Found, limits: Limits, kept_step_s: float) -> Found:
    """What the search has found, unless it writes more for a gain of time too small to tell."""
    if limits.activation_budget_bytes is None or is_outside(simple[0]):
        return searched
    gained_s = simple[2].step_s - searched[2].step_s
    is_worth_it = gained_s > SAME_STEP_PART * kept_step_s or searched[2].written_bytes <= simple[2].written_bytes
    return searched if is_worth_it else simple


def _search_coarsely(exact: Search, coarse: Timeline, group: Ints, starts: list[Assignment]) -> None:
    """Search among groups; where the best of them is not within the limits in full, again within narrower ones."""
    firsts = np.flatnonzero(np.diff(group, prepend=-1))
    for margin in MARGINS:
        search = Search(coarse, _narrowed(exact.limits, margin))
        for start in starts:
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


def _planned(name: str, trace: Trace, limits: Limits, timeline: Timeline, assignment: Assignment) -> Plan:
    """With reading ahead just in time, if that is better by the limits than as far as the bounds allow."""
    both = [replay(timeline, assignment, lead=lead) for lead in ((), None)]
    best = min(both, key=lambda tried: rank(tried[1], limits, timeline.step_s))
    return make_plan(name, timeline, _modules(trace), *best)


def _modules(trace: Trace) -> list[str]:
    return [block.module for block in trace.blocks]
