"""``docs/compatibility.md`` names the combinations that are tested, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from compatibility_table import rows_in
from conftest import COMPATIBILITY

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
TESTS = Path(__file__).parents[1]


def test_every_combination_is_in_the_table(request: pytest.FixtureRequest) -> None:
    if any(Path(argument).resolve() != TESTS for argument in request.config.args):
        pytest.skip("only a part of the tests was collected")
    rows = request.config.stash[COMPATIBILITY].rows  # in the order of collection; the table is by section
    assert sorted(rows_in(DOCUMENT)) == sorted(rows), "make compatibility writes it anew"


def test_no_row_failed() -> None:
    rows = rows_in(DOCUMENT)
    assert rows and "**failed**" not in rows.values()
