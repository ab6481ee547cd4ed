"""Published figures beside the plan: the page is what the command writes, and no row is far off."""

from __future__ import annotations

import json

import pytest
from published import PAGE, RESULTS, Published, is_far, page, planned_gib, published

TOLD, ROWS = published()
FOUND = json.loads(RESULTS.read_text())
NAMES = [one.name for one in ROWS]


def test_the_page_is_what_the_command_writes() -> None:
    assert PAGE.read_text() == page(FOUND), "run python benchmarks/published.py"
    assert sorted(NAMES) == sorted(FOUND)
    assert [sum(one.options.endswith(quick) for one in ROWS) for quick in QUICK] == [1] * len(QUICK)


@pytest.mark.parametrize("one", ROWS, ids=NAMES)
def test_no_row_is_far_off(one: Published) -> None:
    assert not is_far(one.measured_gib, FOUND[one.name])
    assert one.source in TOLD["sources"]


def test_far_is_more_than_15_percent_either_way() -> None:
    assert [is_far(100, plan) for plan in (84, 86, 114, 116)] == [True, False, False, True]


# Of the fastest rows, one for each of LoRA, a loss on whole logits, Liger's kernels and layers' inputs in host memory.
QUICK = ("--lora 64 --seq 256", "--bits 4 --lora 8 --seq 1024", "--liger --seq 300000", "--liger --seq 650000")


@pytest.mark.parametrize(
    "one",
    [pytest.param(one, marks=() if one.options.endswith(QUICK) else pytest.mark.thorough, id=one.name) for one in ROWS],
)
def test_the_plan_still_says_so(one: Published) -> None:
    pytest.importorskip("transformers")
    assert planned_gib(one) == pytest.approx(FOUND[one.name], rel=0.01)
