from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import traces

from ds_tba.errors import ConfigError, TraceError
from ds_tba.plan.plan import Limits
from ds_tba.plan.trace import BlockTrace, Resources, Trace
from ds_tba.wear import write_limit_bytes_per_step

GOOD = traces.one_block(traces.storage(0.5, 2.0), machine=traces.resources(), inputs=(0,))


@given(traces.traces() | traces.rematerializable())
@settings(derandomize=True, deadline=None)
def test_a_trace_comes_back_from_its_text(trace: Trace) -> None:
    assert traces.read(trace.to_json()) == trace


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"storages": (traces.storage(2.0, 1.0),)}, "storage 0 .* out of order"),
        ({"storages": (traces.storage(0.5, float("nan")),)}, "storage 0 .* out of order"),
        ({"storages": (traces.storage(0.5, 2.0), traces.storage(0.4, 2.0))}, "storage 1 .* out of order"),
        ({"storages": (traces.storage(0.5, 4.0),)}, "storage 0 .* out of order"),
        ({"storages": (replace(traces.storage(0.5, 2.0), nbytes=0),)}, "storage 0 has 0 bytes"),
        ({"storages": (traces.storage(0.5, 2.0, blocks=(1,)),)}, r"names blocks \(1,\): there are 1"),
        (
            {"storages": (replace(traces.storage(0.5, 2.0), sources=(0,)),)},
            r"storage 0 names sources \(0,\): .* before",
        ),
        ({"storages": (replace(traces.storage(0.5, 2.0), sources=(-1,)),)}, r"storage 0 names sources \(-1,\)"),
        ({"storages": (replace(traces.storage(0.5, 2.0), rematerialize_s=-1.0),)}, "storage 0 has rematerialize_s -1"),
        ({"storages": (replace(traces.storage(0.5, 2.0), rematerialize_s=float("nan")),)}, "has rematerialize_s nan"),
        ({"blocks": (BlockTrace("b", 0.0, 1.0, 0.5, 3.0),)}, "block 0 .* out of order"),
        ({"blocks": (BlockTrace("b", 0.0, 1.0, 1.0, 3.0, inputs=(7,)),)}, r"names inputs \(7,\)"),
        ({"resources": traces.resources(write=0.0)}, "must all be above 0"),
        ({"resources": replace(traces.resources(), staging_bytes=0)}, "staging_bytes is 0"),
        ({"resources": replace(traces.resources(), compute_s_per_byte=-1.0)}, "compute_s_per_byte is -1"),
        ({"micro_steps": 0}, "micro_steps is 0"),
        ({"optimizer_s": -1.0}, "rest of the step has times out of order"),
        ({"end_s": float("nan")}, "out of order"),
    ],
)
def test_what_is_not_consistent_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        replace(GOOD, **change)


def test_rates_of_several_paths_add_up() -> None:
    path = traces.resources(write=3.0, read=2.0).paths[0]
    both = Resources((path, path), 1.0, 1.0, 1)
    assert (both.write_bytes_per_s, both.read_bytes_per_s) == (6.0, 4.0)


def test_the_wear_limit_is_the_rating_spread_over_the_life() -> None:
    # 864 TB over 1000 days are 10 MB a second.
    assert write_limit_bytes_per_step(864.0, 1000.0, 2.0) == pytest.approx(20e6)
    assert write_limit_bytes_per_step(None, None, 2.0) == float("inf")
    with pytest.raises(ConfigError, match="rated_endurance_tbw"):
        write_limit_bytes_per_step(None, 1000.0, 2.0)


@pytest.mark.parametrize("name", ["max_step_overhead", "activation_budget_bytes", "host_budget_bytes"])
def test_limits_are_not_negative(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is -1"):
        Limits(**{name: -1})


@given(traces.traces() | traces.rematerializable(), st.floats(0.01, 10.0), st.sampled_from([1.0, 1.5, 2.0]))
@settings(derandomize=True, deadline=None)
def test_a_longer_trace_of_larger_storages_is_the_same_otherwise(trace: Trace, time: float, size: float) -> None:
    found = trace.scaled(time, size)
    assert found.step_s == pytest.approx(time * trace.step_s)
    for one, before in zip(found.storages, trace.storages, strict=True):
        assert before.nbytes * size <= one.nbytes < before.nbytes * size + 1 and one.sources == before.sources
        took_s = None if before.rematerialize_s is None else before.rematerialize_s * time
        assert one.rematerialize_s == (None if took_s is None else pytest.approx(took_s))
