"""Replays of traces under placements, and hypothesis' strategies for both."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from ds_tba.config import Placement
from ds_tba.plan.plan import Prediction
from ds_tba.plan.replay import Assignment, Replay, Timeline
from ds_tba.plan.trace import Trace
from support import traces

K, H, N, M = Placement.KEEP, Placement.HOST, Placement.NVME, Placement.REMATERIALIZE

ANY = settings(derandomize=True, deadline=None, max_examples=300)


def run(
    trace: Trace, *places: Placement, recomputed: tuple[bool, ...] = (), may_wait: bool = True
) -> tuple[Replay, Prediction]:
    again = np.array(recomputed or [False] * len(trace.blocks), bool)
    found = Replay(Timeline(trace), Assignment(np.array(places, np.int8), again), may_wait=may_wait)
    return found, found.cost


def cost(trace: Trace, *places: Placement, recomputed: tuple[bool, ...] = ()) -> Prediction:
    return run(trace, *places, recomputed=recomputed)[1]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Trace, Assignment]:
    trace = draw(traces.traces() | traces.rematerializable())
    places = [draw(st.sampled_from([K, H, N, N, M])) for _ in trace.storages]
    return trace, Assignment(np.array(places, np.int8), np.array([draw(st.booleans()) for _ in trace.blocks], bool))
