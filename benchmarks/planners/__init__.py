"""The planners of the papers, and ours beside them, all of one signature: what ``adaptive`` is compared with."""

from __future__ import annotations

from collections.abc import Mapping

from ds_tba.planner.plan import Limits, Plan
from ds_tba.planner.search import Planner, adaptive, keep, planned, recompute
from ds_tba.planner.timeline import Timeline
from ds_tba.planner.trace import Trace
from planners.tba import tba_assignment
from planners.teraio import teraio_assignment


def tba(trace: Trace, limits: Limits) -> Plan:
    """TBA's suffix rule; it knows no limits."""
    timeline = Timeline.of(trace)
    return planned("tba", trace, limits, timeline, tba_assignment(trace, timeline))


def teraio(trace: Trace, limits: Limits) -> Plan:
    """TERAIO's benefit over cost; of the limits it knows the budgets of activations and of host memory."""
    timeline = Timeline.of(trace)
    return planned("teraio", trace, limits, timeline, teraio_assignment(timeline, limits))


PLANNERS: Mapping[str, Planner] = {
    "keep": keep,
    "recompute": recompute,
    "tba": tba,
    "teraio": teraio,
    "adaptive": adaptive,
}
