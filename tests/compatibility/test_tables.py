"""The generated tables of ``docs/`` name what is tested, and no other, and no row of theirs failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import COMPATIBILITY, REMATERIALIZED, TABLE
from support.tables import CompatibilityTable, faults_in, rows_in

DOCS = Path(__file__).parents[2] / "docs"
FAULTS = DOCS / "evidence/faults.md"
DOCUMENTS = [("evidence/compatibility", COMPATIBILITY), ("guides/rematerialize", REMATERIALIZED)]


@pytest.mark.usefixtures("all_tests")
@pytest.mark.parametrize(("name", "table"), DOCUMENTS)
def test_every_combination_is_in_the_table(
    name: str, table: pytest.StashKey[CompatibilityTable], request: pytest.FixtureRequest
) -> None:
    rows = request.config.stash[table].rows  # in the order of collection; the table is by section
    assert sorted(rows_in(DOCS / f"{name}.md")) == sorted(rows), f"make {Path(name).name} writes it anew"


@pytest.mark.usefixtures("all_tests")
def test_every_fault_has_a_row_and_some_rows_of_every_section_decide(request: pytest.FixtureRequest) -> None:
    assert faults_in(FAULTS) == list(request.config.stash[TABLE].rows), "make reliability writes the table anew"
    deciding, rows = request.config.stash[COMPATIBILITY].deciding, rows_in(DOCS / "evidence/compatibility.md")
    assert len(deciding) >= 48
    assert {section for section, _ in deciding} == {section for section, _ in rows}


def test_no_row_failed() -> None:
    results = [line.rstrip(" |").rpartition(" | ")[2] for line in FAULTS.read_text().splitlines()[8:]]
    assert results and all("failed" not in result for result in results)
    for name, _ in DOCUMENTS:
        rows = rows_in(DOCS / f"{name}.md")
        assert rows and not any("**failed**" in said for said in rows.values())
