"""The planners of the papers and ours, all of one signature."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ds_tba.plan.plan import Limits, Plan, Planner, order_of
from ds_tba.plan.replay import Assignment, Replay, Timeline
from ds_tba.plan.search import adaptive, plan_of
from ds_tba.plan.trace import Trace
from planners.tba import tba_assignment
from planners.teraio import teraio_assignment


def planned(name: str, trace: Trace, limits: Limits, assignment: Assignment) -> Plan:
    """Return the plan of an assignment; it prefetches just in time or as far as allowed, whichever is better."""
    timeline = Timeline(trace)
    both = [Replay(timeline, assignment, distance) for distance in ((), None)]
    return plan_of(
        name, trace, limits, min(both, key=lambda found: order_of(found.cost, limits, timeline.trace.step_s))
    )


def keep(trace: Trace, limits: Limits) -> Plan:
    """Keep everything."""
    return planned("keep", trace, limits, Timeline(trace).kept)


def recompute(trace: Trace, limits: Limits) -> Plan:
    """Recompute every block that may be, and offload nothing."""
    again = np.ones(len(trace.blocks), bool)
    return planned("recompute", trace, limits, Assignment(np.zeros(len(trace.storages), np.int8), again))


def tba(trace: Trace, limits: Limits) -> Plan:
    """Follow TBA's suffix rule, which knows no limits."""
    return planned("tba", trace, limits, tba_assignment(trace))


def teraio(trace: Trace, limits: Limits) -> Plan:
    """Follow TERAIO's benefit over cost, whose only limits are the budgets of activations and of host memory."""
    return planned("teraio", trace, limits, teraio_assignment(Timeline(trace), limits))


PLANNERS: Mapping[str, Planner] = {
    "keep": keep,
    "recompute": recompute,
    "tba": tba,
    "teraio": teraio,
    "adaptive": adaptive,
}
