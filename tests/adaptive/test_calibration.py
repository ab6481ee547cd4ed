"""What recomputing and moving take of a step: found from steps that differ in both, however odd some of them are."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_tba.adaptive.calibration import (
    MAX_RECOMPUTE_FACTOR,
    MAX_RESIDUAL_FRACTION,
    MAX_STEPS,
    MIN_RECOMPUTE_FACTOR,
    RECOMPUTE_ERROR,
    Calibration,
    Fit,
    Observation,
)

MIB = 1 << 20
ALL_BYTES, ALL_FORWARD = 100 * MIB, 0.3
BEFORE = (1e-9, 1e-9)


@dataclass(frozen=True)
class Truth:
    """A machine on which steps cost exactly this."""

    kept_s: float = 1.0
    factor: float = 0.8
    s_per_byte: float = 2e-9

    def step(self, fraction: float, moved_bytes: int, more_s: float = 0.0) -> Observation:
        time_s = self.kept_s * (1 + self.factor * fraction) + self.s_per_byte * moved_bytes
        return Observation(time_s + more_s, fraction, moved_bytes)


def observed(truth: Truth, plans: list[tuple[float, int]], noise_s: float = 0.0) -> Calibration:
    """The recording, which moves all, and some steps under each plan."""
    chance, found = random.Random(3), Calibration()
    found.begin(truth.step(0.0, ALL_BYTES))
    for plan in plans:
        found.begin_plan()
        for _ in range(MAX_STEPS):
            found.add(truth.step(*plan, chance.uniform(-noise_s, noise_s)))
    return found


def fit(calibration: Calibration) -> Fit:
    return calibration.fit(*BEFORE)


VARIED = [(0.0, 0), (ALL_FORWARD, 0), (ALL_FORWARD / 2, ALL_BYTES // 2)]


def test_a_recording_alone_leaves_what_was_assumed() -> None:
    found = fit(observed(Truth(s_per_byte=BEFORE[0]), []))
    assert (found.kept_s, found.recompute_factor) == (pytest.approx(1.0), pytest.approx(1.0))
    assert (found.compute_s_per_byte, found.compute_error_s_per_byte) == (pytest.approx(1e-9), pytest.approx(1e-9))
    assert found.recompute_error == pytest.approx(RECOMPUTE_ERROR, rel=0.15)


@pytest.mark.parametrize("noise_s", [0.0, 0.02])
def test_plans_that_differ_show_what_each_costs(noise_s: float) -> None:
    truth = Truth()
    found = fit(observed(truth, VARIED, noise_s))
    assert found.kept_s == pytest.approx(truth.kept_s, rel=0.05)
    assert found.recompute_factor == pytest.approx(truth.factor, rel=0.15)
    assert found.compute_s_per_byte == pytest.approx(truth.s_per_byte, rel=0.25)
    assert found.recompute_error < RECOMPUTE_ERROR / 2 and found.compute_error_s_per_byte < BEFORE[1] / 2


def test_a_few_odd_steps_change_nothing() -> None:
    calibration, truth = observed(Truth(), VARIED), Truth()
    before = fit(calibration)
    for _ in range(MAX_STEPS // 2 - 1):
        calibration.add(truth.step(*VARIED[-1], more_s=5.0))
    assert fit(calibration).kept_s == pytest.approx(before.kept_s, rel=0.01)


def test_what_a_machine_takes_now_is_known_whatever_the_values_are() -> None:
    """Where the plan is, the fit is right, though one plan alone does not tell what of it is what."""
    truth = Truth(factor=1.5, s_per_byte=6e-9)
    plan = (ALL_FORWARD, ALL_BYTES // 2)
    found = fit(observed(truth, [plan]))
    assert found.time_s(truth.step(*plan)) == pytest.approx(truth.step(*plan).time_s, rel=0.05)


@pytest.mark.parametrize("factor", [0.2, 1.3, 10.0])
def test_a_machine_that_has_changed_is_known_as_it_is_now(factor: float) -> None:
    calibration = observed(Truth(), VARIED)
    changed, plan = Truth(factor * 1.0, 0.8, factor * 2e-9), (ALL_FORWARD / 3, ALL_BYTES // 3)
    calibration.begin_plan()
    for _ in range(MAX_STEPS):
        calibration.add(changed.step(*plan))
    now = changed.step(*plan)
    assert fit(calibration).time_s(now) == pytest.approx(now.time_s, rel=1.01 * MAX_RESIDUAL_FRACTION)


def test_waits_that_nobody_foresaw_are_feared_for_a_while_after_they_are_gone() -> None:
    slow = Calibration()
    slow.begin(Truth().step(0.0, ALL_BYTES))
    slow.begin_plan()
    for _ in range(MAX_STEPS):
        slow.add(replace(Truth().step(0.0, ALL_BYTES // 2), unforeseen_wait_s=0.5))
    s_per_byte = 0.5 / (ALL_BYTES // 2)
    assert (fit(slow).wait_s_per_byte, fit(slow).feared_wait_s_per_byte) == pytest.approx((s_per_byte, s_per_byte))
    slow.begin_plan()
    for looks in range(4):
        slow.add(Truth().step(0.0, 0))
        found = fit(slow)
        assert found.wait_s_per_byte == 0.0
        assert found.feared_wait_s_per_byte == pytest.approx(s_per_byte / 2**looks)
        slow.age()


def test_what_is_old_is_forgotten_so_that_it_is_tried_again() -> None:
    calibration = observed(Truth(s_per_byte=5e-9), [(0.0, ALL_BYTES // 2), (0.0, 0)])
    before = fit(calibration)
    for _ in range(6):
        calibration.age()
        for _ in range(MAX_STEPS):
            calibration.add(Truth().step(0.0, 0))
    found = fit(calibration)
    assert found.compute_s_per_byte < before.compute_s_per_byte
    assert found.compute_error_s_per_byte > before.compute_error_s_per_byte
    assert found.kept_s == pytest.approx(1.0, rel=0.01)  # the steps of now count as before


def test_a_new_trace_begins_anew() -> None:
    calibration = observed(Truth(), VARIED)
    calibration.begin(Observation(7.0, 0.0, 0), recompute_factor=2.0)
    found = fit(calibration)
    assert (found.kept_s, found.recompute_factor) == (pytest.approx(7.0), pytest.approx(2.0))


steps = st.builds(
    Observation,
    st.one_of(st.just(0.0), st.floats(1e-4, 1e3)),
    st.sampled_from([0.0, 1e-3, 0.1, 10.0]),
    st.sampled_from([0, 1, MIB, 10**12]),
)


# Rounding made a variance of this one negative.
@example([[Observation(0.0, 0.0, 0)], [Observation(0.0, 0.0, 10**12), Observation(0.0, 10.0, 0)]], 1e-6)
@given(st.lists(st.lists(steps, min_size=1, max_size=10), min_size=1, max_size=12), st.sampled_from([0.0, 1e-12, 1e-6]))
@settings(derandomize=True, deadline=None)
def test_no_steps_make_a_fit_that_cannot_be(groups: list[list[Observation]], s_per_byte: float) -> None:
    calibration = Calibration()
    calibration.begin(groups[0][0])
    for group in groups:
        calibration.begin_plan()
        for step in group:
            calibration.add(step)
        calibration.age()
    found = calibration.fit(s_per_byte, s_per_byte)
    assert 0 < found.kept_s < 1e4
    assert 0.99 * MIN_RECOMPUTE_FACTOR <= found.recompute_factor <= 1.01 * MAX_RECOMPUTE_FACTOR
    assert 0 <= found.compute_s_per_byte < float("inf")
    assert 0 <= found.recompute_error < float("inf") and 0 <= found.compute_error_s_per_byte < float("inf")
