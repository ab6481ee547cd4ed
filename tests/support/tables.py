"""The tables of ``docs/`` that are made from tests: ``evidence/compatibility.md``, ``guides/rematerialize.md``, faults.

A test of a row carries ``@pytest.mark.compatible(section, row)`` or ``@pytest.mark.rematerialized(section, row)`` and
tells how it went with the fixture ``row_says``: the cells after the first. A test of a fault carries
``@pytest.mark.fault(fault, by=..., outcome=...)`` and hands what a user would read in that case to the fixture
``user_sees``; its table is ``evidence/faults.md``. ``pytest -m compatible
--compatibility=docs/evidence/compatibility.md`` (``make compatibility``, ``make rematerialize``, ``make reliability``)
writes a table; ``test_tables.py`` checks that those in the repository name the very tests that exist.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

COMBINATIONS_HEAD = """# What it works with

**{answer}** [When not to use it](../when_not.md) lists cases that no row covers.

| section | combinations | bit-equal | refused |
|---|---|---|---|
{summary}
- *Bit-equal*: every loss and every final parameter is the same, bit for bit, as in the same run without the block.
- *Offloaded* is what went to NVMe or host memory in all steps of the run. *Rematerialized* and *recomputed* is what
  backward computed again instead. Rows that differ only in the ZeRO stage share a line, with the least and the most.
- *nvme*, *adaptive*, *host* and *keep* are placements. A row that names two of them is two runs.
- *Refused* is followed by the message that a user reads. [Recomputing](../concepts/recompute.md#which-blocks) explains
  why blocks are not recomputed.

`make compatibility` generates this page from the tests of each row; do not edit. Versions: {versions}.
"""
SECTION = """
{level} {section}

| {titles} |
|{rule}
"""
COLUMNS = "what | outcome | MiB offloaded | MiB rematerialized | MiB recomputed"
KINDS = ("moved", "rematerialized", "recomputed")  # the columns' words in outcomes
# The stage that rows of one line differ in.
STAGE = re.compile(r"(?<=ZeRO-)\d(?:, -\d)*(?=,|$)")
FIGURE = re.compile(r",? ?([\d.]+) ([KM])iB (moved|rematerialized|recomputed)")
EQUAL, MEASURED = "bit-equal", "measured by their memory alone"
OUTCOMES = (EQUAL, MEASURED, "refused", "not run on this machine", "failed")
STEPS = re.compile(r" in \d+ steps(?=[,;]|$)")
# What lies between these lines of a document is generated.
BEGIN, END = "<!-- generated: do not edit -->\n", "<!-- end of what is generated -->\n"


class CompatibilityTable:
    """The rows of one test session, in the order of collection.

    Args:
        marker: of the tests.
        titles: of the columns.
        is_part: the table is a part of a document that is written by hand.
    """

    def __init__(self, marker: str = "compatible", titles: str = COLUMNS, *, is_part: bool = False) -> None:
        self.rows: dict[tuple[str, str], str] = {}
        self.deciding: list[tuple[str, str]] = []  # those that are run before a change lands
        self._marker, self._titles, self._is_part = marker, titles, is_part

    def collect(self, items: Iterable[pytest.Item]) -> None:
        for item in items:
            for marker in item.iter_markers(self._marker):
                if row_of(marker) in self.rows:
                    raise pytest.UsageError(f"two tests make the row {row_of(marker)}")
                self.rows[row_of(marker)] = "**not run on this machine**"
                self.deciding += [row_of(marker)] if marker.kwargs.get("decides") else []

    def say(self, item: pytest.Item, outcome: str) -> None:
        for marker in item.iter_markers(self._marker):
            self.rows[row_of(marker)] = normalised(outcome)

    def note(self, item: pytest.Item, result: str) -> None:
        for marker in item.iter_markers(self._marker):
            if result == "failed":
                self.rows[row_of(marker)] = "**failed**"

    def write(self, path: Path, versions: str) -> None:
        """Write the rows of this session as a page, or as the generated part of one."""
        sections: dict[str, dict[str, str]] = {}
        for (section, row), said in self.rows.items():
            sections.setdefault(section, {})[row] = said
        level = "###" if self._is_part else "##"
        rule = "---|" * (1 + self._titles.count("|"))
        tables = ""
        for section, rows in sections.items():
            lines = [f"| {row} | {said} |\n" for row, said in rows.items()] if self._is_part else joined(rows)
            tables += SECTION.format(level=level, section=section, titles=self._titles, rule=rule) + "".join(lines)
        text = head(sections, versions) + tables
        if self._is_part:
            before, _, rest = path.read_text().partition(BEGIN)
            text = f"{before}{BEGIN}\nVersions: {versions}.\n{tables}\n{END}{rest.partition(END)[2]}"
        path.write_text(text)


def head(sections: Mapping[str, Mapping[str, str]], versions: str) -> str:
    """Return the answers that a reader looks for first: how many combinations are bit-equal, and which are refused."""
    summary, totals = "", Counter[str]()
    for section, rows in sections.items():
        counts = Counter(next((one for one in OUTCOMES if one in said), MEASURED) for said in rows.values())
        totals += counts
        slug = re.sub(r"[^\w -]", "", section).lower().replace(" ", "-")
        summary += f"| [{section}](#{slug}) | {len(rows)} | {counts[EQUAL]} | {counts['refused']} |\n"
    counted = ", ".join(f"{totals[one]} {one}" for one in OUTCOMES if totals[one])
    answer = f"{sum(totals.values())} combinations: {counted}."
    return COMBINATIONS_HEAD.format(answer=answer, summary=summary, versions=versions)


def joined(rows: Mapping[str, str]) -> list[str]:
    """Return a section's lines: rows with the same outcome that differ only in the ZeRO stage share one."""
    lines: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        has_one_stage = len(STAGE.findall(row)) == 1
        lines.setdefault((STAGE.sub("{}", row) if has_one_stage else row, told(rows[row])), []).append(row)
    text = []
    for (name, outcome), many in lines.items():
        stages = ", -".join(STAGE.findall(row)[0] for row in many) if "{}" in name else ""
        figures = " | ".join(span([rows[row] for row in many], kind) for kind in KINDS)
        row = name.replace("{}", stages)
        text.append(f"| {row} | {outcome} | {figures} |\n")
    return text


def told(said: str) -> str:
    """Return an outcome without its figures and reasons, which other columns and pages have."""
    said = re.sub(r"(blocks are not recomputed): .*", r"\1", said)
    parts = [STEPS.sub("", FIGURE.sub("", part)).strip(" ,") for part in said.split("; ")]
    if {part.rpartition(": ")[2] for part in parts} == {EQUAL}:
        return f"{EQUAL}, also when resumed" if f"resumed: {EQUAL}" in parts else EQUAL
    return "; ".join(parts)


def span(many: Iterable[str], kind: str) -> str:
    """Return the least and the most MiB of a kind in some outcomes; empty if no outcome has that kind."""
    figures = [figure for said in many for figure in FIGURE.findall(said)]
    found = [float(figure) / (1024 if unit == "K" else 1) for figure, unit, one in figures if one == kind]
    if not found:
        return ""
    least, most = (f"{one:.2f}" if 0 < one < 0.1 else f"{one:.1f}" for one in (min(found), max(found)))
    return least if least == most else f"{least} to {most}"


def covering(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Some of these tests: each function, and each value of each parameter, is in one of them at least."""
    values = {item: _values(item) for item in items}
    missing: set[object] = set().union(*values.values())
    chosen = set()
    while missing:
        best = max(values, key=lambda item: len(values[item] & missing))
        chosen.add(best)
        missing -= values[best]
    return chosen


def _values(item: pytest.Item) -> set[object]:
    function = item.nodeid.partition("[")[0]
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return {function}
    return {function, *((name, str(value)) for name, value in item.callspec.params.items())}


def row_of(marker: pytest.Mark) -> tuple[str, str]:
    section, row = marker.args
    return section, row


def rows_in(path: Path) -> dict[tuple[str, str], str]:
    """Return what a written table says of each row; a line of several ZeRO stages is a row for each."""
    rows, section = {}, ""
    text = path.read_text()
    for line in text.partition(BEGIN)[2 if BEGIN in text else 0].partition(END)[0].splitlines():
        if line.startswith("##"):
            section = line.lstrip("# ")
        elif section and line.startswith("| ") and not line.startswith(("| what |", "| model |")):
            row, outcome = re.split(r"(?<!\\) \| ", line[2:].removesuffix(" |"), maxsplit=1)
            stages = STAGE.findall(row)
            for stage in stages[0].split(", -") if len(stages) == 1 else [""]:
                rows[section, STAGE.sub(stage, row) if stage else row] = outcome
    return rows


# ---- faults ----------------------------------------------------------------------------------------------------------

FAULTS_HEAD = """# What happens when something breaks

Generated by `make reliability`; do not edit. A test injects each fault, and its run wrote the row. "Outcome" is what
the test asserts. "You see" is the message of that run, shortened, with `PATH` in place of paths. "Far end" means the
device behind a loop device; "answering" means that the system call was made to return that error.

| fault | injected by | outcome | you see | run |
|---|---|---|---|---|
"""
LONGEST_MESSAGE = 300


@dataclass
class Row:
    """One fault, over all the tests that share its marker."""

    fault: str
    by: str
    outcome: str
    seen: str = ""
    results: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        results = list(self.results.values())
        counts = {word: results.count(word) for word in ("passed", "failed", "skipped")}
        told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        told = "**not run on this machine**" if set(results) == {"skipped"} else told
        cells = (self.fault, self.by, self.outcome, self.seen, told)
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |\n"


class FaultTable:
    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def collect(self, items: Iterable[pytest.Item]) -> None:
        for item in items:
            for marker in item.iter_markers("fault"):
                fault, by, outcome = marker.args[0], marker.kwargs["by"], marker.kwargs["outcome"]
                row = self.rows.setdefault(fault, Row(fault, by, outcome))
                if (row.by, row.outcome) != (by, outcome):
                    raise pytest.UsageError(f"two tests tell different things about the fault {fault!r}")

    def see(self, item: pytest.Item, message: str) -> None:
        for marker in item.iter_markers("fault"):
            self.rows[marker.args[0]].seen = normalised(message)

    def note(self, item: pytest.Item, outcome: str) -> None:
        for marker in item.iter_markers("fault"):
            self.rows[marker.args[0]].results[item.nodeid] = outcome

    def write(self, path: Path, _versions: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(FAULTS_HEAD + "".join(row.line() for row in self.rows.values()))


def normalised(message: str) -> str:
    """A message without what differs from run to run and machine to machine."""
    text = re.sub(r"(/[\w.\-~+]+){2,}", "PATH", " ".join(message.split()))
    return text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE].rsplit(" ", 1)[0] + " ..."


def faults_in(path: Path) -> list[str]:
    """The first cell of every row of a written table."""
    rows = [line for line in path.read_text().splitlines() if line.startswith("| ")][1:]
    return [re.split(r"(?<!\\) \| ", row[2:])[0].replace("\\|", "|") for row in rows]
