"""``ds_tba report``: the page of ``--html``, what it must not load, and the tables of the terminal."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from conftest import Cli

from ds_tba.cli.page import render
from ds_tba.report import SCHEMA, OffloadReport

GIB = 1 << 30
HOSTILE = '</title></style><script>alert(1)</script><img src=x onerror="alert(1)">&\'"\ud800\u202e http://example.com/'


def report(**changed: Any) -> dict[str, Any]:
    """A report of a steady run, as its JSON has it."""
    usual: dict[Any, Any] = {"str": "", "int": 0, "float": 0.0, "list[str]": []}
    start = {"path": "/nvme", "write_bytes_per_s": 4e9, "read_bytes_per_s": 6e9}
    plan = {
        "planner": "adaptive", "bytes": {"keep": GIB, "nvme": 9 * GIB}, "kept_step_s": 2.0, "step_s": 2.02,
        "measured_step_s": 2.05, "peak_saved_bytes": 2 * GIB, "stall_s": 0.01, "written_bytes": 9 * GIB,
        "read_bytes": 8 * GIB,
    }  # fmt: skip
    wear = {
        "path": "/nvme", "device": "nvme0n1", "model": "Fast 9000", "written_bytes": 900 * GIB, "percentage_used": 7,
        "written_bytes_per_day": 42e12, "rated_endurance_tbw": 1200.0, "life_days": 28.6,
    }  # fmt: skip
    holder = {
        "module": "model.layers.*.mlp", "op": "Mul", "tensors": 32, "saved_bytes": 4 * GIB, "resident_bytes": GIB,
        "moved_bytes": 2 * GIB, "again_bytes": GIB,
    }  # fmt: skip
    own = {
        "state": "finished", "placement": "adaptive", "steps": 100, "peak_saved_bytes": 2 * GIB,
        "peak_saved_bytes_without": 10 * GIB, "kept_bytes_by_reason": {"small": 60 * GIB}, "plans": 1,
        "fallbacks_by_reason": {"staging full": 3}, "bandwidth": [{**start, "write_bytes_per_s": 2e9}],
        "bandwidth_at_start": [start], "wear": [wear], "plan": plan,
    }  # fmt: skip
    needed = {one.name: usual[one.type] for one in fields(OffloadReport) if one.default is one.default_factory}
    found = OffloadReport(**needed | own)
    return {**found.to_dict(), "holders": [holder], "timeline_path": "/elsewhere/step.json", **changed}


def page(directory: Path, *reports: dict[str, Any]) -> str:
    """The page about these, as read from files."""
    found = {}
    for number, one in enumerate(reports):
        path = directory / f"report{number}.json"
        path.write_text(json.dumps(one))
        found[str(path)] = OffloadReport.read_json(path)
    return render(found)


SHOWN = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "table", "tr", "th", "td"}


def check_that_nothing_is_loaded(text: str) -> None:
    tags = re.findall(r"<(/?)([^\s>]*)([^>]*)>", text.partition("\n")[2])
    assert {name for _, name, _ in tags} <= SHOWN
    assert {name for _, name, attributes in tags if attributes} == {"html", "meta"}
    assert not re.search(r"url\(|@import|https?:", text.partition("<body>")[0])
    assert "content=\"default-src 'none'; style-src 'unsafe-inline'\"" in text


def row(text: str, name: str) -> list[str]:
    """The cells behind one in the row that begins with it."""
    (found,) = re.findall(f"<tr><td>{re.escape(name)}</td>(.*?)</tr>", text)
    return re.findall("<td>(.*?)</td>", found)


def test_the_page_has_everything_and_loads_nothing(tmp_path: Path) -> None:
    text = page(tmp_path, report())
    check_that_nothing_is_loaded(text)
    assert '<html lang="en">' in text and text.count("<h1>") == 1
    assert "<p>100 steps: activations take 2.00 GiB at the peak instead of 10.00 GiB" in text
    assert row(text, "activations at the peak, with the block") == ["2.00 GiB"]
    assert row(text, "  kept: small") == ["60.00 GiB"] and row(text, "  fallback: staging full") == ["3"]
    assert row(text, "  plan: step") == ["2.02 s (2.05 s measured; 2 s with everything kept)"]
    assert "29 days" in row(text, "wear of /nvme")[0]
    assert row(text, "model.layers.*.mlp") == ["Mul", "", "32", "4.00 GiB", "1.00 GiB", "2.00 GiB", "1.00 GiB"]


def test_names_of_files_and_modules_are_text(tmp_path: Path) -> None:
    hostile = report(
        state=HOSTILE, backend=HOSTILE, paths=[HOSTILE], integrity=HOSTILE, placement=HOSTILE,
        holders=[{"module": HOSTILE, "op": HOSTILE, "saved_bytes": 5, "resident_bytes": 5}],
        kept_bytes_by_reason={HOSTILE: 5}, fallbacks_by_reason={HOSTILE: 5},
        wear=[{**report()["wear"][0], "path": HOSTILE, "device": HOSTILE, "model": HOSTILE}],
        bandwidth=[{"path": HOSTILE}], plan={"planner": HOSTILE, "bytes": {HOSTILE: 5}},
    )  # fmt: skip
    text = page(tmp_path, hostile, hostile)
    check_that_nothing_is_loaded(text)
    assert "&lt;script&gt;" in text and "<script" not in text


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    bare = report(plan=None, plans=0, wear=[], bandwidth=[], bandwidth_at_start=[], holders=[])
    text = page(tmp_path, bare)
    check_that_nothing_is_loaded(text)
    assert "No forward was sampled." in text
    unsaved = page(tmp_path, {**bare, "peak_saved_bytes_without": 0}, bare)
    assert row(unsaved, str(tmp_path / "report0.json"))[4] == "-"


def test_several_reports_are_compared(tmp_path: Path) -> None:
    slow = report(rank=1, plan={"kept_step_s": 2.0, "step_s": 2.4})
    text = page(tmp_path, report(), slow)
    assert row(text, str(tmp_path / "report0.json"))[4:7] == ["-80%", "+2.5%", "42.00"]
    assert row(text, str(tmp_path / "report1.json"))[0] == "1"
    assert row(text, str(tmp_path / "report1.json"))[5] == "+20.0% planned"
    assert text.count("<h2>") == 2 and text.partition("<h2>")[0].count("<tr>") == 3


def test_long_lists_are_cut(tmp_path: Path) -> None:
    holders = [{"module": "m", "op": "o", "saved_bytes": GIB} for _ in range(5000)]
    text = page(tmp_path, report(holders=holders))
    assert len(text) < 20_000 and row(text, "4990 more")[3] == "4990.00 GiB"


def test_the_command_writes_the_page(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "report.json").write_text(json.dumps(report()))
    arguments = ["report", str(tmp_path / "report.json")]
    assert f"{tmp_path / 'out.html'}: " in cli(*arguments, "--html", str(tmp_path / "out.html")).out
    assert (tmp_path / "out.html").read_text().startswith("<!DOCTYPE html>")
    for target, why in (("none/out.html", "No such file or directory"), ("report.json", "give it the ending .html")):
        error = cli(*arguments, "--html", str(tmp_path / target), status=2).err
        assert error.startswith("ds_tba report: --html ") and why in error
    error = cli(*arguments, str(tmp_path / "absent.json"), "--html", str(tmp_path / "new.html"), status=2).err
    assert "is no report of ds_tba" in error and not (tmp_path / "new.html").exists()
    assert json.loads((tmp_path / "report.json").read_text()) == report()


def test_what_another_version_does_not_have_is_left_out(tmp_path: Path, cli: Cli) -> None:
    wear, holder = {**report()["wear"][0], "newer": 1}, {"module": "mlp", "op": "Mul", "newer": 1}
    bare = report(state="\ud800", plan={"reason": ""}, wear=[wear], holders=[holder], newer=[])
    del bare["schema"], bare["refused_sites"]  # as an older one
    (tmp_path / "report.json").write_text(json.dumps(bare))
    out = cli("report", str(tmp_path / "report.json")).out
    assert "42.00 TB a day" in out and "\\ud800" in out  # half a pair, which no terminal takes
    read = OffloadReport.read_json(tmp_path / "report.json")
    assert read.steps == 100 and read.refused_sites == {} and read.schema == SCHEMA


def test_a_script_reads_what_all_reports_have(tmp_path: Path, cli: Cli) -> None:
    for rank in range(2):
        (tmp_path / f"{rank}.json").write_text(json.dumps(report(rank=rank, newer=1)))
    found = json.loads(cli("report", "--json", str(tmp_path / "0.json"), str(tmp_path / "1.json")).out)
    assert [(Path(one["file"]).name, one["rank"]) for one in found] == [("0.json", 0), ("1.json", 1)]
    assert found[0]["refused_sites"] == report().get("refused_sites", {})
    out = cli("report", str(tmp_path / "0.json"), str(tmp_path / "1.json")).out  # as tables they have their names
    assert out.count("state ") == 2 and f" {tmp_path / '1.json'}\n" in out
