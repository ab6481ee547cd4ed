"""Replays of traces under placements, hypothesis' strategies for both, and the order of predictions."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from ds_tba.cli.plan.rows import assign
from ds_tba.config import Placement
from ds_tba.plan.plan import Limits, Prediction
from ds_tba.plan.replay import Assignment, Replay, Timeline
from ds_tba.plan.trace import Trace
from support import traces

K, H, N, M = Placement.KEEP, Placement.HOST, Placement.NVME, Placement.REMATERIALIZE

ANY = settings(derandomize=True, deadline=None, max_examples=300)
GRACE_S = 2e-9


def run(
    trace: Trace, *places: Placement, recomputed: tuple[bool, ...] = (), may_wait: bool = True
) -> tuple[Replay, Prediction]:
    again = np.array(recomputed or [False] * len(trace.blocks), bool)
    found = Replay(Timeline(trace), Assignment(np.array(places, np.int8), again), may_wait=may_wait)
    return found, found.cost


def cost(trace: Trace, *places: Placement, recomputed: tuple[bool, ...] = ()) -> Prediction:
    return run(trace, *places, recomputed=recomputed)[1]


def fixed(trace: Trace, placement: Placement = Placement.KEEP, *, recompute: bool = False) -> Prediction:
    """The cost where everything that it is possible for has this placement, as the rows of ``ds_tba plan`` have it."""
    return Replay(*assign(trace, placement, recompute=recompute)).cost


@st.composite
def cases(draw: st.DrawFn) -> tuple[Trace, Assignment]:
    trace = draw(traces.traces() | traces.rematerializable())
    places = [draw(st.sampled_from([K, H, N, N, M])) for _ in trace.storages]
    return trace, Assignment(np.array(places, np.int8), np.array([draw(st.booleans()) for _ in trace.blocks], bool))


def is_allowed(found: Prediction, limits: Limits) -> bool:
    is_spared = found.written_bytes <= limits.write_limit_bytes_per_step
    budget_bytes = limits.activation_budget_bytes  # for which the limit of wear gives way
    return found.host_bytes <= limits.host_budget_bytes and (is_spared or budget_bytes is not None)


def is_no_worse(ours: Prediction, theirs: Prediction, limits: Limits, trace: Trace, grace_s: float = GRACE_S) -> bool:
    """In the order that the planners' contract demands, written without the planner's own code."""
    budget = limits.activation_budget_bytes
    longest_s = trace.step_s * (1 + limits.max_step_overhead) + GRACE_S
    if not is_allowed(ours, limits):
        return False
    if not is_allowed(theirs, limits):
        return True
    if budget is None:
        if theirs.step_s > longest_s:
            return True
        figures = (ours.peak_saved_bytes, ours.step_s), (theirs.peak_saved_bytes, theirs.step_s + grace_s)
        return ours.step_s <= longest_s and figures[0] <= figures[1]
    if theirs.peak_saved_bytes > budget:
        return ours.peak_saved_bytes <= theirs.peak_saved_bytes
    return ours.peak_saved_bytes <= budget and ours.step_s <= theirs.step_s + grace_s
