"""A plan's choices, storage by storage, also where a micro-step is not the one that was planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from support.traces import SIZE, TRACE

from ds_tba.config import Placement
from ds_tba.plan.controller import ByPlan
from ds_tba.plan.feedback import OptimizerStep
from ds_tba.plan.plan import Limits, Plan, Prediction
from ds_tba.storage.base import Store

KEEP, HOST, NVME, RECOMPUTE, REMATERIALIZE = Placement
TO_NVME, TO_HOST = ("nvme", "host"), ("host", "nvme")  # what one has no room for may go to the other


def by_plan(
    *placements: Placement, recomputed: tuple[bool, bool] = (False, False), step: OptimizerStep | None = None
) -> ByPlan:
    plan = Plan("test", TRACE, Limits(), placements, recomputed, (), cast("Any", None))
    stores = {place: cast("Store[Any]", place.word) for place in (NVME, HOST)}
    return ByPlan(plan, stores, step or OptimizerStep(None))


def chosen(policy: ByPlan, *keys: str, nbytes: int = SIZE) -> list[tuple[Any, ...]]:
    return [policy.choose(key, nbytes).stores for key in keys]


def test_each_storage_goes_where_the_plan_says() -> None:
    policy = by_plan(NVME, KEEP, HOST, NVME, KEEP)
    # x1 and x2 have their places already when they come again.
    assert chosen(policy, "x0", "x1", "x2", "x1", "x2", "x3", "x4") == [TO_NVME, (), TO_HOST, (), TO_HOST, TO_NVME, ()]
    assert (policy._step.unknown_saves, policy._step.drift_bytes) == (0, 0)


def test_a_recomputed_block_saves_its_inputs_and_shifts_nobody() -> None:
    policy = by_plan(NVME, RECOMPUTE, HOST, NVME, KEEP, recomputed=(True, False))
    # Storage 1 is made again; 2 is an input of the other block.
    assert chosen(policy, "x0", "x0", "x2", "x3", "x4") == [TO_NVME, TO_NVME, TO_HOST, TO_NVME, ()]
    policy.end()
    assert policy._step == OptimizerStep(None)


def test_all_passes_of_a_block_run_again_together() -> None:
    trace = replace(TRACE, blocks=tuple(replace(one, module="a") for one in TRACE.blocks))
    places = NVME, RECOMPUTE, HOST, RECOMPUTE, KEEP
    plan = Plan("test", trace, Limits(), places, (True, True), (), cast("Any", None))
    assert plan.recomputed == {"a"} and plan.expected == (0, 2, 4)


def test_what_the_plan_expects_and_nobody_saves_is_missed() -> None:
    policy = by_plan(NVME, KEEP, HOST, NVME, KEEP)
    chosen(policy, "x0", "x1")
    policy.end()
    assert policy._step.missed_bytes == policy._step.drift_bytes == 3 * SIZE
    assert policy._step.unknown_saves == 0


def test_other_sizes_are_followed_and_counted_and_of_micro_steps_the_one_that_grew_most() -> None:
    step = OptimizerStep(None)
    for nbytes in (2 * SIZE, SIZE):
        policy = by_plan(NVME, KEEP, HOST, NVME, KEEP, step=step)
        assert chosen(policy, "x0", nbytes=nbytes) == [TO_NVME]
        assert step.unknown_saves == 0 and (step.drift_bytes == SIZE or nbytes == SIZE)
        policy.end()
    assert step.growth == 1.0


def test_what_the_plan_does_not_know_goes_where_there_is_room_without_waiting() -> None:
    policy = by_plan(NVME, KEEP, KEEP, KEEP, NVME)
    choices = [policy.choose(key, SIZE) for key in ("x0", "x1", "x2", "x3", "x4", "new")]
    assert [choice.wait for choice in choices] == [True, False, False, False, True, False]
    assert choices[-1].stores == TO_NVME and policy._step.unknown_saves == 1


def test_what_is_made_again_may_be_moved_where_it_cannot_be_and_nothing_else_is_made_again() -> None:
    policy = by_plan(REMATERIALIZE, KEEP, HOST, NVME, KEEP)
    choices = [policy.choose(key, SIZE) for key in ("x0", "x0", "x1", "x2", "x3", "x4", "new")]
    assert [one.rematerialize for one in choices] == [True, True, *[False] * 4, True]  # the second is the first
    assert [choices[at].stores for at in (0, 2, -1)] == [TO_NVME, (), TO_NVME]
    assert choices[0].wait and policy._step.unknown_saves == 1


def test_without_any_store_storages_are_made_again_all_the_same() -> None:
    trace = replace(TRACE, storages=TRACE.storages[:1], blocks=())
    plan = Plan("test", trace, Limits(), (REMATERIALIZE,), (), (), cast("Any", None))
    policy, keys = ByPlan(plan, {}, OptimizerStep(None)), ("x", "new")
    assert [(one.rematerialize, one.stores) for one in (policy.choose(key, SIZE) for key in keys)] == [(True, ())] * 2


def costly(*places: Placement, **seconds: float) -> Plan:
    prediction = Prediction(9 * SIZE, 3.0, 0.0, 0.0, 0, 0, 0, 0, 0)
    return Plan("test", TRACE, Limits(), places, (False, False), (), replace(prediction, **seconds))


def test_what_is_made_again_shows_in_the_report_and_is_no_move() -> None:
    found = costly(REMATERIALIZE, NVME, KEEP, KEEP, KEEP, stall_s=0.5, rematerialized_s=0.5)
    assert dict(found.bytes_by_placement) == {KEEP: 3 * SIZE, NVME: SIZE, REMATERIALIZE: SIZE}
    assert "rematerialize 4 MiB" in found.describe("")
    summary = found.summary()
    assert (summary["bytes"]["rematerialize"], summary["rematerialized_s"]) == (SIZE, 0.5)
    assert found.identity != costly(KEEP, NVME, KEEP, KEEP, KEEP, stall_s=0.5, rematerialized_s=0.5).identity
