"""The tables in ``evidence/compatibility.md`` and ``guides/rematerialize.md`` of ``docs/`` name what is tested."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import COMPATIBILITY, REMATERIALIZED
from support.compatibility_table import CompatibilityTable, rows_in

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENTS = [("evidence/compatibility", COMPATIBILITY), ("guides/rematerialize", REMATERIALIZED)]


@pytest.mark.usefixtures("all_tests")
@pytest.mark.parametrize(("name", "table"), DOCUMENTS)
def test_every_combination_is_in_the_table(
    name: str, table: pytest.StashKey[CompatibilityTable], request: pytest.FixtureRequest
) -> None:
    rows = request.config.stash[table].rows  # in the order of collection; the table is by section
    assert sorted(rows_in(DOCS / f"{name}.md")) == sorted(rows), f"make {Path(name).name} writes it anew"


@pytest.mark.parametrize("name", [name for name, _ in DOCUMENTS])
def test_no_row_failed(name: str) -> None:
    rows = rows_in(DOCS / f"{name}.md")
    assert rows and not any("**failed**" in said for said in rows.values())


@pytest.mark.usefixtures("all_tests")
def test_some_rows_of_every_section_decide_whether_a_change_lands(request: pytest.FixtureRequest) -> None:
    deciding = request.config.stash[COMPATIBILITY].deciding
    assert len(deciding) >= 48
    assert {section for section, _ in deciding} == {
        section for section, _ in rows_in(DOCS / "evidence/compatibility.md")
    }
