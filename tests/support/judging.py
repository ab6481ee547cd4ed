"""The order of predictions that the planners' contract demands, written without the planner's own code."""

from __future__ import annotations

from ds_tba.plan.plan import Limits, Prediction
from ds_tba.plan.trace import Trace

GRACE_S = 2e-9


def is_allowed(found: Prediction, limits: Limits) -> bool:
    is_spared = found.written_bytes <= limits.write_limit_bytes_per_step
    budget_bytes = limits.activation_budget_bytes  # for which the limit of wear gives way
    return found.host_bytes <= limits.host_budget_bytes and (is_spared or budget_bytes is not None)


def is_no_worse(ours: Prediction, theirs: Prediction, limits: Limits, trace: Trace, grace_s: float = GRACE_S) -> bool:
    """In the sense of the contract, told again without the planner's own ranking."""
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
