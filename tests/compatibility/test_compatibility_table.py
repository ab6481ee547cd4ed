"""The tables in ``evidence/compatibility.md`` and ``guides/rematerialize.md`` of ``docs/`` name what is tested."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import COMPATIBILITY, REMATERIALIZED
from covering import COVERING
from support.compatibility_table import CompatibilityTable, rows_in

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENTS = [("evidence/compatibility", COMPATIBILITY), ("guides/rematerialize", REMATERIALIZED)]
TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(("name", "table"), DOCUMENTS)
def test_every_combination_is_in_the_table(
    name: str, table: pytest.StashKey[CompatibilityTable], request: pytest.FixtureRequest
) -> None:
    if any(Path(argument).resolve() != TESTS for argument in request.config.args):
        pytest.skip("only a part of the tests was collected")
    rows = request.config.stash[table].rows  # in the order of collection; the table is by section
    assert sorted(rows_in(DOCS / f"{name}.md")) == sorted(rows), f"make {Path(name).name} writes it anew"


@pytest.mark.parametrize("name", [name for name, _ in DOCUMENTS])
def test_no_row_failed(name: str) -> None:
    rows = rows_in(DOCS / f"{name}.md")
    assert rows and not any("**failed**" in said for said in rows.values())


def test_the_rows_of_every_change_are_there() -> None:
    named = {(section, row) for section, rows in COVERING.items() for row in rows}
    assert named <= set(rows_in(DOCS / "evidence/compatibility.md"))
    assert set(COVERING) == {section for section, _ in rows_in(DOCS / "evidence/compatibility.md")}


def test_rows_that_differ_in_the_stage_alone_share_a_line_and_are_read_as_many(tmp_path: Path) -> None:
    table = CompatibilityTable()
    said = {
        ("Models", "GPT-2, ZeRO-2, 2 ranks"): "bit-equal, 6.8 MiB moved, 3.8 MiB rematerialized in 6 steps",
        ("Models", "GPT-2, ZeRO-3, 2 ranks"): "bit-equal, 6.9 MiB moved, 0.0 MiB rematerialized in 6 steps",
        ("Models", "from ZeRO-1 to ZeRO-2"): "bit-equal, 64 KiB moved; resumed: bit-equal, 2.0 MiB moved in 4 steps",
        ("Models", "ViT, ZeRO-1"): "nvme: bit-equal, 1.0 MiB moved; adaptive: bit-equal, 0.0 MiB moved in 4 steps",
        ("Others", "blocks, ZeRO-3"): "bit-equal, 0.3 MiB moved in 4 steps; 3 blocks are not recomputed: a reason",
        ("Others", "blocks, ZeRO-1"): "refused: a message, 3 MiB long",
        ("Others", "T5, ZeRO-2"): "**failed**",
    }
    table.rows = dict(said)
    table.write(tmp_path / "page.md", "torch 2")
    text = (tmp_path / "page.md").read_text()
    assert "| GPT-2, ZeRO-2, -3, 2 ranks | bit-equal | 6.8 to 6.9 | 0.0 to 3.8 |  |" in text
    assert "| from ZeRO-1 to ZeRO-2 | bit-equal, also when resumed | 0.06 to 2.0 |  |  |" in text
    assert "| ViT, ZeRO-1 | bit-equal | 0.0 to 1.0 |  |  |" in text
    assert "| blocks, ZeRO-3 | bit-equal; 3 blocks are not recomputed | 0.3 |  |  |" in text
    assert "7 combinations: 5 bit-equal, 1 refused, 1 failed." in text
    assert "| [Others](#others) | 3 | 1 | 1 |" in text
    assert set(rows_in(tmp_path / "page.md")) == set(said)
    assert rows_in(tmp_path / "page.md")["Others", "T5, ZeRO-2"].startswith("**failed**")
