from __future__ import annotations

from hypothesis import example, given, settings
from support import traces

from ds_tba.plan.trace import Trace


@given(traces.traces() | traces.rematerializable())
@example(traces.pipeline(4, 2))
@settings(derandomize=True, deadline=None)
def test_a_trace_comes_back_from_its_text(trace: Trace) -> None:
    assert traces.read(trace.to_json()) == trace
