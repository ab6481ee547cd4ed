"""The planners of the papers, and ours beside them, all of one signature: what ``adaptive`` is compared with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from oracle.timeline import Timeline as OracleTimeline

from ds_tba.plan.plan import Limits, Plan, rank
from ds_tba.plan.replay import replay
from ds_tba.plan.search import Planner, adaptive, plan_of
from ds_tba.plan.timeline import Assignment, Timeline
from ds_tba.plan.trace import Trace
from planners.tba import tba_assignment
from planners.teraio import teraio_assignment


def planned(name: str, trace: Trace, limits: Limits, assignment: Assignment) -> Plan:
    """The plan of an assignment: prefetching just in time or as far as the bounds allow, whichever is better."""
    timeline = Timeline.of(trace)
    both = [replay(timeline, assignment, distance) for distance in ((), None)]
    return plan_of(name, min(both, key=lambda found: rank(found.cost, limits, timeline.step_s)))


def keep(trace: Trace, limits: Limits) -> Plan:
    """Everything kept."""
    return planned("keep", trace, limits, Timeline.of(trace).kept)


def recompute(trace: Trace, limits: Limits) -> Plan:
    """Every block recomputed that may be, nothing moved."""
    again = np.ones(len(trace.blocks), bool)
    return planned("recompute", trace, limits, Assignment(np.zeros(len(trace.storages), np.int8), again))


def tba(trace: Trace, limits: Limits) -> Plan:
    """TBA's suffix rule; it knows no limits."""
    return planned("tba", trace, limits, tba_assignment(trace))


def teraio(trace: Trace, limits: Limits) -> Plan:
    """TERAIO's benefit over cost; of the limits it knows the budgets of activations and of host memory."""
    return planned("teraio", trace, limits, teraio_assignment(OracleTimeline.of(trace), limits))


PLANNERS: Mapping[str, Planner] = {
    "keep": keep,
    "recompute": recompute,
    "tba": tba,
    "teraio": teraio,
    "adaptive": adaptive,
}
