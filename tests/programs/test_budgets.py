"""``activation_budget_bytes`` in random trainings; see ``budgets.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.doubles import ScriptedBackend, fails

from ds_tba.core.residency import Residency
from ds_tba.storage.tiers import Selection
from programs.budgets import KIB, MIB, check, draw, run, step
from programs.kind import Kind, check_all
from programs.running import Ours
from programs.trainings import Program

DRAWS = 6
# The first is a part of every run of the tests, the others of ``make test-all``.
CHUNKS = [0, *(pytest.param(chunk, marks=pytest.mark.thorough) for chunk in range(1, 12))]
ROWS_OF_A_MIB = 4 * KIB

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_budget_holds_or_what_gives_way_is_said(chunk: int, tmp_path: Path) -> None:
    tally = check_all(Kind(draw, check), chunk, DRAWS, tmp_path)
    print(dict(tally))
    # Else it would prove nothing.
    assert tally["moved"] > DRAWS / 2 and tally["holdable"] > DRAWS / 4 and tally["plans"] > DRAWS / 2


def training(budget_mib: float, **more: Any) -> Program:
    """Ten steps that save storages of 1.5 MiB each, which are larger than staging; two layers of six."""
    steps = (step(((int(1.5 * ROWS_OF_A_MIB),),)),) * 10
    common = {"lengths": (64, 64), "steps": steps, "budget_bytes": int(budget_mib * MIB)}
    return Program(1, **{**common, **more})


def checked(program: Program, directory: Path) -> Ours:
    outcome, side = run(program, str(directory))
    assert not outcome.failures, outcome.failures
    assert max(side.peaks) <= program.budget_bytes and outcome.tally["plans"] > 0, side.peaks
    return side


def said(side: Ours, text: str) -> list[str]:
    return [one for one in side.warnings.texts if text in one]


def plan_bytes(side: Ours) -> dict[str, int]:
    return side.offloader.report().plan["bytes"]


WORN = {"rated_endurance_tbw": 1.0, "min_life_days": 36500.0}


def test_a_wear_limit_gives_way_to_the_budget_with_one_line(tmp_path: Path) -> None:
    """And what is larger than staging goes in pieces."""
    side = checked(training(12, ssd=WORN), tmp_path)
    (told,) = said(side, "ssd.min_life_days")
    assert told.startswith("ssd.min_life_days gives way: activation_budget_bytes 12582912 takes ")
    assert not said(side, "no plan fits")
    assert plan_bytes(side).get("nvme", 0) > 0


def test_where_a_budget_fits_without_writes_no_wear_limit_gives_way(tmp_path: Path) -> None:
    side = checked(training(64, ssd=WORN), tmp_path)
    assert not said(side, "min_life_days") and "nvme" not in plan_bytes(side)


def test_a_plan_that_is_wrong_about_the_lowest_peak_lifts_no_budget(tmp_path: Path) -> None:
    """One that takes all moves for vain, whatever they would do."""
    side = checked(training(12, planner="keep"), tmp_path)
    assert said(side, "no plan fits") and list(plan_bytes(side)) == ["keep"]


def test_kept_graphs_of_storages_larger_than_half_of_staging_fit_the_budget(tmp_path: Path) -> None:
    """What backward used lay in staging, and nothing else could leave. Four inputs, which have no graph, stay."""
    steps = (step(((5 * ROWS_OF_A_MIB // 4,),), keeps=3),) * 10
    checked(training(7 + 4, staging_bytes=2 * MIB, rematerialize=True, steps=steps), tmp_path)


def test_a_drive_that_fails_under_a_budget_is_said_before_the_budget_is_exceeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    selected = Selection(ScriptedBackend(fails("write", first=60)), "the test's")
    monkeypatch.setattr("ds_tba.storage.tiers.select_backend", lambda *_, **__: selected)
    outcome, _ = run(training(12), str(tmp_path))
    assert not outcome.failures and outcome.tally["over, and said"] == 1


def test_a_budget_that_is_lifted_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residency, "limit", lambda *_: None)
    outcome, _ = run(training(12, planner="keep"), str(tmp_path))
    assert "budget" in outcome.kinds
