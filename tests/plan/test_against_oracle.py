"""Plans against those of the planner of November 2026, which replayed every event (``of_benchmarks/golden.py``)."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import golden
import numpy as np
import planner_scale
import pytest
from golden import Answer
from planners import PLANNERS, planned
from support import traces
from support.traces import uneven_layers

from ds_tba.config import Placement
from ds_tba.plan.plan import Limits, Prediction, is_outside, order_of
from ds_tba.plan.replay import Assignment, Replay, Timeline
from ds_tba.plan.search import adaptive
from ds_tba.plan.trace import Trace

CASES = 24
PEAK_MARGIN = 1.06
TIME_MARGIN = 1.03
REPLAY_MARGIN = 0.02
# For large models: of the step with unlimited memory, and of the peak with everything kept.
OF_IDEAL_MARGIN, PEAK_PART_MARGIN = 0.03, 0.03


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
        **(traces.NO_DRIVE if chance.random() < 0.2 else {}),
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


def asked(*, has_budget: bool) -> list[tuple[Trace, Limits, Answer]]:
    """Return each chain with its limits and the oracle's answer, where its plan was within the limits."""
    answers, goal = golden.answers("chains"), "budget" if has_budget else "overhead"
    found = []
    for seed in range(CASES):
        trace, chance = drawn(seed)
        limits, answer = limits_of(trace, chance, has_budget=has_budget), answers[f"{seed} {goal}"]
        answer.check(trace)
        found += [(trace, limits, answer)] if answer.is_within else []
    assert len(found) > CASES // 2
    return found


@pytest.mark.parametrize(("has_budget", "margin"), [(False, PEAK_MARGIN), (True, TIME_MARGIN)])
def test_plans_are_on_average_within_a_margin_of_the_oracles_and_within_limits_where_these_are(
    has_budget: bool, margin: float
) -> None:
    ratios, errors = [], []
    for trace, limits, theirs in asked(has_budget=has_budget):
        ours = adaptive(trace, limits).prediction
        assert not is_outside(order_of(ours, limits, trace.step_s)), theirs
        of_both = [one.step_s if has_budget else one.peak_saved_bytes for one in (ours, theirs)]
        ratios.append(of_both[0] / of_both[1])
        again = planned("oracle", trace, limits, theirs.assignment(trace)).prediction
        errors += errors_of(again, theirs)
    assert statistics.mean(ratios) <= margin
    assert statistics.mean(errors) <= REPLAY_MARGIN, "near a good plan our replay must not be kinder than the oracle's"


def test_replays_are_on_average_within_a_margin_of_the_oracles() -> None:
    errors, answers = [], golden.answers("replays")
    for seed in range(3 * CASES):
        trace, chance = drawn(seed)
        choices = (Placement.KEEP, Placement.HOST, Placement.NVME, Placement.NVME, Placement.REMATERIALIZE)
        places = np.array([chance.choice(choices) for _ in trace.storages], np.int8)
        again = np.array([chance.random() < 0.2 for _ in trace.blocks], bool)
        answers[str(seed)].check(trace)
        errors += errors_of(Replay(Timeline(trace), Assignment(places, again), None).cost, answers[str(seed)])
    assert statistics.mean(errors) <= REPLAY_MARGIN


def errors_of(ours: Prediction, theirs: Answer) -> list[float]:
    """Return by how much step and peak differ, as fractions of the oracle's."""
    return [abs(ours.step_s / theirs.step_s - 1), abs(ours.peak_saved_bytes / theirs.peak_saved_bytes - 1)]


@pytest.mark.thorough
@pytest.mark.parametrize("rate", [8, 16, 32])
@pytest.mark.parametrize("regime", planner_scale.REGIMES)
@pytest.mark.parametrize("model", planner_scale.SHAPES)
def test_plans_for_large_models_are_near_the_oracles(model: str, regime: planner_scale.Regime, rate: int) -> None:
    trace = planner_scale.model_trace(planner_scale.SHAPES[model], regime, rate * 1e9)
    kept_bytes = PLANNERS["keep"](trace, Limits()).prediction.peak_saved_bytes
    budget = Limits(activation_budget_bytes=int(kept_bytes * planner_scale.BUDGET_FRACTION))
    for goal, limits in {"budget": budget, "overhead": Limits()}.items():
        answer = golden.answers("models")[f"{model}, {regime.name}, {rate} GB/s, {goal}"]
        theirs = planned("oracle", trace, limits, answer.assignment(trace)).prediction
        ours = adaptive(trace, limits).prediction
        assert trace.step_s / ours.step_s > trace.step_s / theirs.step_s - OF_IDEAL_MARGIN
        most_bytes = limits.activation_budget_bytes or theirs.peak_saved_bytes + PEAK_PART_MARGIN * kept_bytes
        assert ours.peak_saved_bytes <= most_bytes


def test_drives_fast_enough_for_all_take_all_but_what_is_used_at_once() -> None:
    """The logits: moving them would fill staging, and keep others."""
    trace = planner_scale.model_trace(planner_scale.SHAPES["Granite-8B"], planner_scale.REGIMES[1], 32e9)
    found = adaptive(trace, Limits())
    assert found.prediction.peak_saved_bytes < 3e9
    assert found.prediction.step_s < 1.02 * trace.step_s
