"""``docs/evidence/faults.md`` names the faults that are tested, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import TABLE
from support.fault_table import faults_in

DOCUMENT = Path(__file__).parents[2] / "docs" / "evidence" / "faults.md"


@pytest.mark.usefixtures("all_tests")
def test_every_fault_is_in_the_table(request: pytest.FixtureRequest) -> None:
    table = request.config.stash[TABLE]
    assert faults_in(DOCUMENT) == list(table.rows), "make reliability writes the table anew"


def test_every_row_was_run_and_passed() -> None:
    results = [line.rstrip(" |").rpartition(" | ")[2] for line in DOCUMENT.read_text().splitlines()[8:]]
    assert results and all("failed" not in result for result in results)
