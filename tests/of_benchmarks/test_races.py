"""Races: what they are measured with, what is claimed of them, and that each kind runs, tiny."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import races
import torch
from curves.device import Device
from curves.models import Shape, Workload
from curves.points import PEAK_ERROR, PEAK_NOISE, STEP_ERROR, Point, Spread, point, verdict
from curves.turns import AGAIN, PLAIN, Contender, Runner, StepTaken, parameters_of, strict

MIB = 1 << 20


def made(name: str, planner: str, ratio: float, peak: int, noise: float = 0.0, **more: Any) -> Point:
    step = Spread(ratio, ratio - noise, ratio + noise)
    turns_s = (ratio - noise, ratio, ratio + noise)
    base = Point(name, planner, {}, 3, turns_s, step, step, peak, None, None, None, 0.0, 0.0, None, 1)
    return replace(base, **more)


BASE = [made("plain", "plain", 1.0, 100), made(AGAIN.name, "plain", 1.005, 100)]


def test_adaptive_must_be_as_small_and_as_fast_as_each_other_point_with_one_of_its_own() -> None:
    others = [made("tba", "tba", 1.1, 40), made("recompute", "recompute", 1.3, 20)]
    near = [made("a", "adaptive", 1.0, 101), made("b", "adaptive", 1.09, 41), made("c", "adaptive", 1.31, 20)]
    found = verdict([*BASE, *others, *near])
    assert found.beaten == [] and found.holds
    assert "adaptive on or beyond every other curve: yes" in found.line()
    hooked = verdict([*BASE, *others, *near, made("keep", "keep", 1.04, 100)])
    assert hooked.holds and "the hooks alone: +4.0% of the plain step" in hooked.line()
    slow = [near[0], near[1], made("c", "adaptive", 1.4, 20)]
    assert verdict([*BASE, *others, *slow]).beaten == ["recompute"]
    large = [near[0], made("b", "adaptive", 1.09, int(40 + 100 * PEAK_NOISE) + 1), near[2]]
    found = verdict([*BASE, *others, *large])
    assert found.beaten == ["tba"] and not found.holds and "NO: not beyond tba" in found.line()


def test_noise_is_what_the_same_model_differs_by() -> None:
    other, mine = made("tba", "tba", 1.0, 40), made("a", "adaptive", 1.08, 40)
    assert verdict([*BASE, other, mine]).beaten == ["tba"]
    noisy = verdict([BASE[0], made(AGAIN.name, "plain", 1.09, 100), other, mine])
    assert noisy.beaten == [] and noisy.holds
    found = verdict([BASE[0], made(AGAIN.name, "plain", 1.2, 100), other, mine])
    assert not found.holds and "TOO NOISY TO TELL" in found.line()
    assert verdict([*BASE, made("tba", "tba", 1.0, 40, noise=0.2), mine]).beaten == []


def test_contenders_under_equal_plans_show_the_noise_too() -> None:
    plan = {"bytes": {"keep": 5, "recompute": 7}, "recomputed_blocks": 2, "written_bytes": 0, "step_s": 1.0}
    other, mine = made("recompute", "recompute", 1.0, 40, plan=plan), made("a", "adaptive", 1.04, 40)
    assert verdict([*BASE, other, mine]).beaten == ["recompute"]
    found = verdict([*BASE, other, replace(mine, plan={**plan, "step_s": 1.1})])
    assert found.beaten == [] and found.step_noise == pytest.approx(0.04)
    for more in ({"bytes": {"keep": 12}}, {"recomputed_blocks": 1}, {"written_bytes": 1}):
        assert verdict([*BASE, other, replace(mine, plan={**plan, **more})]).beaten == ["recompute"]
    assert verdict([*BASE, other, replace(mine, plan=plan, peak_bytes=39)]).beaten == ["recompute"]


def test_turns_are_compared_with_those_of_the_same_round() -> None:
    slow_twice = (1.0, 2.0, 2.0, 1.0, 1.0)
    other = made("tba", "tba", 1.0, 40, turns_s=slow_twice)
    mine = made("a", "adaptive", 1.0, 40, turns_s=tuple(1.01 * s for s in slow_twice))
    assert verdict([*BASE, other, mine]).beaten == []
    assert verdict([*BASE, other, replace(mine, turns_s=tuple(1.03 * s for s in slow_twice))]).beaten == ["tba"]


@pytest.mark.parametrize(("what", "bound"), [("peak_error", PEAK_ERROR), ("step_error", STEP_ERROR)])
def test_predictions_must_be_near(what: str, bound: float) -> None:
    good = made("a", "adaptive", 1.0, 100, **{what: -0.99 * bound})
    assert verdict([*BASE, good]).holds
    bad = verdict([*BASE, good, made("b", "adaptive", 1.0, 100, **{what: 1.01 * bound})])
    assert not bad.holds and "NOT within" in bad.line() and ": b)" in bad.line()


def test_a_point_compares_each_turn_with_the_plain_model_of_its_round() -> None:
    def plan(kept_s: float) -> dict[str, Any]:
        return {"step_s": 1.2 * kept_s, "kept_step_s": kept_s, "peak_saved_bytes": 90}

    def turns(s: float) -> dict[str, list[StepTaken]]:
        one = StepTaken(1.1 * s, plan(s), 1, None, 100)
        recorded = StepTaken(9.0, plan(s), 1, None, 5, is_recorded=True)
        return {"plain": [StepTaken(s, None, 0, None)] * 3, "tba": [one, recorded, one, recorded, one]}

    rounds = [turns(s) for s in (1.0, 2.0, 4.0)]
    found = point(Contender("tba", "tba"), rounds, 77)
    assert found.to_plain.median == pytest.approx(1.1) and found.step_s.median == pytest.approx(2.2)
    assert found.step_error == pytest.approx(1.2 / 1.1 - 1) and found.peak_error == pytest.approx(-0.1)
    assert (found.peak_bytes, found.saved_peak_bytes, found.promised_peak_bytes) == (77, 100, 90)
    assert point(PLAIN, rounds, 7).step_error is None


@pytest.fixture
def plain(tmp_path: Path) -> tuple[Workload, Runner]:
    workload = Workload.of(Shape("GPT", 32, 1, 16, 32, 16, 2), torch.device("cpu"))
    return workload, Runner(PLAIN, workload, Device("cpu"), {})


def test_one_strict_step_proves_that_two_train_alike(plain: tuple[Workload, Runner]) -> None:
    workload, runner = plain
    start = parameters_of(workload)
    expected = runner.proof(start)
    assert not all(torch.equal(one, two) for one, two in zip(workload.parameters, start, strict=True)), "a rate of 0"
    runner.step()
    assert runner.proof(start) == expected  # from the same parameters, whatever was trained meanwhile
    gradients = [workload.parameters[-1].register_hook(lambda gradient: gradient * 1.5)]
    assert runner.proof(start) != expected
    gradients.pop().remove()
    start[0][0, 0] += 1  # a token that the batch has, or not: the new parameters differ
    assert runner.proof(start) != expected


def test_the_strict_step_is_strict_and_the_others_are_not(plain: tuple[Workload, Runner]) -> None:
    workload, runner = plain
    found: list[tuple[bool, bool]] = []
    questions = torch.are_deterministic_algorithms_enabled, torch.is_deterministic_algorithms_warn_only_enabled
    workload.model.register_forward_hook(lambda *_: found.append(tuple(ask() for ask in questions)))
    runner.step()
    runner.proof(parameters_of(workload))
    runner.step()
    assert found == [(False, False), (True, False), (False, False)]
    with strict(), strict():
        pass
    assert not torch.are_deterministic_algorithms_enabled()


def raced(directory: Path, kind: str, *options: str) -> dict[str, Any]:
    """Run a race of a tiny model, and return what its file has of it."""
    (directory / "nvme").mkdir()
    out = directory / "out"
    short = ["--tiny", "--rounds", "2", "--steps", "2", "--minutes", "1", "--nvme_path", str(directory / "nvme")]
    races.main([kind, *short, *options, "--out", str(out)])
    assert list((directory / "nvme").iterdir()) == []
    (shape,) = json.loads((out / f"{kind}.json").read_text())["shapes"]
    assert shape["equal"] and shape["rounds"] == 2
    assert f"## {shape['name']}" in (out / f"{kind}.md").read_text()
    return {**shape, "names": [one["name"] for one in shape["points"]]}


@pytest.mark.thorough
def test_slower_drives_tiny(tmp_path: Path) -> None:
    names = raced(tmp_path, "drives", "--settle", "4", "--overhead", "100")["names"]
    assert names == ["plain", AGAIN.name, *(f"drive 1/{part}" for part in races.PARTS), "drive 1/10 in mid-run"]


@pytest.mark.long
def test_host_memory_tiny(tmp_path: Path) -> None:
    shape = raced(tmp_path, "host")
    assert shape["names"][:2] == ["plain", AGAIN.name] and len(shape["names"]) == 5
    assert all(to_host > 0 for to_host, _ in shape["moved"].values())


def test_a_slower_drive_may_cost_what_is_allowed_and_no_more() -> None:
    ours = [made("drive 1/1", "adaptive", 1.11, 90), made("drive 1/2", "adaptive", 1.2, 90)]
    options = argparse.Namespace(overhead=0.1)
    found, holds = races.judge_drives([*BASE, *ours], options)
    assert found == "drive 1/2: a step takes 1.200 of the plain model's" and not holds
    assert races.judge_drives([*BASE, ours[0]], options) == ("within an overhead of 0.1 on every drive", True)
    noisy = [BASE[0], made(AGAIN.name, "plain", 1.3, 100)]
    assert races.judge_drives(noisy, options)[0].startswith("too noisy to tell")
    found, holds = races.judge_drives([*BASE, replace(ours[0], peak_bytes=103)], options)
    assert found.startswith("drive 1/1: a peak of 103 bytes") and not holds
