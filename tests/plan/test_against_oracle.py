"""Plans against those of the planner of November 2026, which replayed every event: judged by its replay, on average."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
from oracle.plan import is_outside, rank
from oracle.search import adaptive as oracle_adaptive
from oracle.simulator import replay as oracle_replay
from oracle.simulator import simulate as judge
from oracle.timeline import Assignment as OracleAssignment
from oracle.timeline import Timeline as OracleTimeline
from support import traces
from support.traces import uneven_layers

from ds_tba.config import Placement
from ds_tba.plan.plan import Limits
from ds_tba.plan.replay import replay
from ds_tba.plan.search import adaptive
from ds_tba.plan.timeline import Assignment, Timeline
from ds_tba.plan.trace import Trace

CASES = 24
PEAK_MARGIN = 1.06
TIME_MARGIN = 1.03
REPLAY_MARGIN = 0.02


def drawn(seed: int) -> tuple[Trace, random.Random]:
    """A chain of blocks of differing sizes, with sites or without, on a machine of any kind."""
    chance = random.Random(seed)
    rate = chance.choice([0.1, 0.3, 0.6, 1.0, 2.0, 5.0])
    trace = uneven_layers(seed, chance.randint(3, 12), chance.randint(2, 5), chance.choice([1.0, 1.5, 2.0]), rate)
    if chance.random() < 0.4:
        seconds = chance.choice([0.001, 0.01, 0.1])
        storages = tuple(
            replace(one, rematerialize_s=seconds * one.nbytes / traces.SIZE, sources=(index - 1,))
            if index and chance.random() < 0.4
            else one
            for index, one in enumerate(trace.storages)
        )
        trace = replace(trace, storages=storages)
    machine = replace(
        trace.resources,
        paths=() if chance.random() < 0.2 else trace.resources.paths,
        is_synchronous=chance.random() < 0.2,
        compute_s_per_byte=chance.choice([0.0, 0.0, 0.05]) * trace.end_s / trace.saved_bytes,
    )
    return replace(trace, resources=machine), chance


def limits_of(trace: Trace, chance: random.Random, *, has_budget: bool) -> Limits:
    total = trace.saved_bytes
    return Limits(
        chance.choice([0.02, 0.05, 0.2]),
        chance.choice([total // 4, total // 2]) if has_budget else None,
        chance.choice([0, 0, total // 8]),
        chance.choice([traces.UNLIMITED, traces.UNLIMITED, total / 3]),
        chance.random() < 0.6,
    )


@pytest.mark.long
@pytest.mark.parametrize(("has_budget", "margin"), [(False, PEAK_MARGIN), (True, TIME_MARGIN)])
def test_plans_are_on_average_within_a_margin_of_the_oracles_and_within_limits_where_these_are(
    has_budget: bool, margin: float
) -> None:
    ratios = []
    for seed in range(CASES):
        trace, chance = drawn(seed)
        limits = limits_of(trace, chance, has_budget=has_budget)
        theirs, ours = oracle_adaptive(trace, limits).prediction, judge(trace, adaptive(trace, limits))
        if is_outside(rank(theirs, limits, trace.step_s)):
            continue
        assert not is_outside(rank(ours, limits, trace.step_s)), seed
        of_both = [one.step_s if has_budget else one.peak_saved_bytes for one in (ours, theirs)]
        ratios.append(of_both[0] / of_both[1])
    assert len(ratios) > CASES // 2
    assert statistics.mean(ratios) <= margin


def test_replays_are_on_average_within_a_margin_of_the_oracles() -> None:
    errors = []
    for seed in range(3 * CASES):
        trace, chance = drawn(seed)
        choices = (Placement.KEEP, Placement.HOST, Placement.NVME, Placement.NVME, Placement.REMATERIALIZE)
        places = np.array([chance.choice(choices) for _ in trace.storages], np.int8)
        again = np.array([chance.random() < 0.2 for _ in trace.blocks], bool)
        ours = replay(Timeline.of(trace), Assignment(places, again), None).cost
        theirs = oracle_replay(OracleTimeline.of(trace), OracleAssignment(places, again), None, None).cost
        errors.append(abs(ours.step_s / theirs.step_s - 1))
        errors.append(abs(ours.peak_saved_bytes / theirs.peak_saved_bytes - 1))
    assert statistics.mean(errors) <= REPLAY_MARGIN
