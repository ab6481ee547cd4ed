from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import traces

from ds_tba.plan.trace import Trace
from ds_tba.stats import write_limit_bytes_per_step


@given(traces.traces() | traces.rematerializable())
@example(traces.pipeline(4, 2))
@settings(derandomize=True, deadline=None)
def test_a_trace_comes_back_from_its_text(trace: Trace) -> None:
    assert traces.read(trace.to_json()) == trace


def test_the_wear_limit_is_the_rating_spread_over_the_life() -> None:
    # 864 TB over 1000 days are 10 MB a second.
    assert write_limit_bytes_per_step(864.0, 1000.0, 2.0) == pytest.approx(20e6)
    assert write_limit_bytes_per_step(864.0, None, 2.0) == float("inf")


@given(traces.traces() | traces.rematerializable(), st.floats(0.01, 10.0), st.sampled_from([1.0, 1.5, 2.0]))
@settings(derandomize=True, deadline=None)
def test_a_longer_trace_of_larger_storages_is_the_same_otherwise(trace: Trace, time: float, size: float) -> None:
    found = trace.scaled(time, size)
    assert found.step_s == pytest.approx(time * trace.step_s)
    for one, before in zip(found.storages, trace.storages, strict=True):
        assert before.nbytes * size <= one.nbytes < before.nbytes * size + 1 and one.sources == before.sources
        took_s = None if before.rematerialize_s is None else before.rematerialize_s * time
        assert one.rematerialize_s == (None if took_s is None else pytest.approx(took_s))
