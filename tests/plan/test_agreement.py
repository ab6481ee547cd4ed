"""One plan of all ranks: for the slowest of them, with what the budget leaves to choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from planners import PLANNERS
from support.doubles import raising
from support.traces import SIZE, TRACE, one_block, resources, storage

from ds_tba.plan.agreement import Alone, Offer, Planning
from ds_tba.plan.plan import Limits, Plan, Planner
from ds_tba.plan.search import adaptive
from ds_tba.plan.trace import Trace


class Besides(Alone):
    """One of two ranks; what the other offers is made of what this one does."""

    size, where = 2, " of stage 3"

    def __init__(self, other: Callable[[Offer], Offer | None]) -> None:
        self.other = other

    def all_gather(self, value: Any) -> list[Any]:
        return [value, self.other(value)]


def made(planner: Planner, agreement: Alone | None = None, **limits: Any) -> Plan:
    found = Planning(planner, agreement or Alone()).make(TRACE, Limits(**limits))
    assert isinstance(found, Plan)
    return found


def test_the_slowest_rank_counts() -> None:
    slow = replace(resources(), compute_s_per_byte=5e-9, staging_bytes=1000)
    found = made(PLANNERS["recompute"], Besides(lambda offer: replace(offer, resources=slow)))
    assert found.trace.resources == slow and found.recomputed_blocks == (True, True)


def test_the_least_room_and_the_drives_that_may_write_least_count() -> None:
    """Those of another machine may be more worn."""
    room_bytes = made(adaptive).prediction.peak_saved_bytes - 1
    other = Limits(room_bytes=room_bytes, write_limit_bytes_per_step=1000.0)
    found = made(adaptive, Besides(lambda offer: replace(offer, limits=other)), movable_share=0.25)
    assert found.limits.activation_budget_bytes == room_bytes
    assert (found.limits.write_limit_bytes_per_step, found.limits.movable_share) == (1000.0, 0.25)


@pytest.mark.parametrize(
    ("planner", "agreement", "trace", "why"),
    [
        (PLANNERS["keep"], Besides(lambda _: None), TRACE, "rank 1 of stage 3 has no part in one (its log says why)"),
        (PLANNERS["keep"], Alone(), None, "rank 0 has no part in one (its log says why)"),
        (raising(ZeroDivisionError("a bug")), Alone(), TRACE, "rank 0 could not plan (ZeroDivisionError: a bug)"),
    ],
)
def test_what_one_rank_lacks_or_fails_at_delays_the_plan_on_all(
    caplog: pytest.LogCaptureFixture, planner: Planner, agreement: Alone, trace: Trace | None, why: str
) -> None:
    planning = Planning(planner, agreement)
    assert [planning.make(trace, Limits()) for _ in range(2)] == [None, None]
    assert [one.message for one in caplog.records] == [f"no new plan now, because {why}: tried again later"]


@pytest.mark.parametrize(
    ("name", "bound"),
    [("activation_budget_bytes", "activation_budget_bytes"), ("room_bytes", "the free memory of the device")],
)
def test_a_wear_limit_that_gives_way_is_said_once_with_the_bound_and_the_repair(
    caplog: pytest.LogCaptureFixture, name: str, bound: str
) -> None:
    saved = [storage(0.1 * number, 2.9 - 0.1 * number) for number in range(8)]
    trace = one_block(*saved, machine=resources(100 * SIZE, 100 * SIZE))
    limits = Limits(write_limit_bytes_per_step=SIZE / 100, recompute=False, **{name: 4 * SIZE})
    planning = Planning(adaptive, Alone())
    for _ in range(3):
        found = planning.make(trace, limits)
    assert isinstance(found, Plan) and found.prediction.written_bytes > SIZE / 50
    (said,) = [one.message for one in caplog.records if "gives way" in one.message]
    assert said.startswith(f"ssd.min_life_days gives way: {bound} {4 * SIZE} takes") and '"recompute": true' in said
