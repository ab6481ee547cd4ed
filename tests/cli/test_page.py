"""``ds_tba report --html``: what the page says, what it must not load, and what it leaves out."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ds_tba.cli import main
from ds_tba.cli.page import DETAILED, MAX_PAGE_BYTES, MAX_ROWS, REMEDIES, Found, read_timeline, render, view
from ds_tba.errors import ReportError
from ds_tba.report import OffloadReport
from ds_tba.storage.base import Refusal

GIB = 1 << 30
HOSTILE = '</title></style><script>alert(1)</script><img src=x onerror="alert(1)">&\'"\ud800\u202e http://example.com/'
TRACKS = ["forward", "backward", "optimizer", "copies", "writes", "reads", "stalls", "made again"]
TITLES = [
    "What to change", "Saved bytes over one step", "When things happen in one step", "What holds saved bytes",
    "Rates of the drives", "The plan, promised and found", "Life of the drives",
    "What stays in device memory, and why",
]  # fmt: skip


def report(**changed: Any) -> dict[str, Any]:
    """A report of a steady run, as its JSON has it."""
    rates = {"write_alone": 4e9, "read_alone": 6e9, "write_beside_read": 2e9, "read_beside_write": 3e9}
    start = {"path": "/nvme", **{f"{name}_bytes_per_s": rate for name, rate in rates.items()}}
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
    found = OffloadReport(
        state="finished", rank=0, backend="aio", backend_reason="", paths=["/nvme"], placement="adaptive",
        integrity="sampled", steps=100, micro_steps=100, packed_tensors=1, passed_through_tensors=0,
        offloaded_bytes=900 * GIB, written_bytes=900 * GIB, read_bytes=800 * GIB, forwarded_bytes=0, cancelled_bytes=0,
        deduplicated_bytes=0, kept_bytes=100 * GIB, host_bytes=0, recomputed_bytes=0, peak_staging_bytes=GIB,
        swap_file_bytes=GIB, peak_saved_bytes=2 * GIB, peak_saved_bytes_without=10 * GIB, budget_excess_bytes=0,
        fallbacks=3, write_bytes_per_s=4e9, read_bytes_per_s=5e9, stall_s=1.0, kept_bytes_by_reason={"small": 60 * GIB},
        fallbacks_by_reason={"staging full": 3}, bandwidth=[{**start, "write_alone_bytes_per_s": 2e9}],
        bandwidth_at_start=[start], wear=[wear], plan=plan, plans=1,
        blocks_left_out=[{"path": "model.layers.0", "reason": "fills a cache"}],
    )  # fmt: skip
    return {**found.to_dict(), "holders": [holder], "timeline_path": "/elsewhere/step.json", **changed}


def timeline(events: int = 200) -> dict[str, Any]:
    """A step of a second, in Chrome's format: one span of each kind of compute, and ``events`` of the others."""
    found: list[dict[str, Any]] = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "compute"}}]
    names = {"copy": "copy out", "write": "write", "read": "read", "stall": "wait for a read", "again": "make again"}

    def span(name: str, cat: str, at: float, dur: float, nbytes: int = 0) -> None:
        times = {"ts": 1.7e15 + at * 1e6, "dur": dur * 1e6}
        found.append({"name": name, "cat": cat, "ph": "X", "pid": 0, "tid": 0, "args": {"bytes": nbytes}, **times})

    for name, at, dur in (("forward", 0.0, 0.4), ("backward", 0.4, 0.5), ("optimizer", 0.9, 0.1)):
        span(name, "compute", at, dur)
    for number in range(events):
        at = number / events
        span(*list({name: cat for cat, name in names.items()}.items())[number % 5], at, 0.7 / events, 1 << 20)
        without = int(8 * GIB * math.sin(math.pi * at))
        args = {"resident": min(without, GIB), "without": without}
        found.append({"ph": "C", "name": "saved bytes", "ts": 1.7e15 + at * 1e6, "pid": 0, "args": args})
    return {"traceEvents": found, "otherData": {"step": 16, "rank": 0, "budget_bytes": 3 * GIB}}


def page(directory: Path, *reports: dict[str, Any], step: Any = None) -> str:
    """The page about these; ``step`` is the timeline beside them."""
    (directory / "step.json").write_text(json.dumps(timeline() if step is None else step))
    paths = [directory / f"report{number}.json" for number in range(len(reports))]
    for path, found in zip(paths, reports, strict=True):
        path.write_text(json.dumps(found))
    return render(paths)


class Elements(HTMLParser):
    """Tags, attributes and texts of a page; each tag is closed where it must be."""

    VOID = ("meta", "wbr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def check_that_nothing_is_loaded(text: str) -> None:
    found = Elements(text)
    assert not {"script", "link", "img", "iframe", "object", "base", "image", "use", "form"} & set(found.tags)
    for tag, name, value in found.attributes:
        assert name not in ("src", "style", "action", "data", "srcset") and not name.startswith("on"), (tag, name)
        assert not name.endswith("href") or value.startswith("#")
    (style,) = re.findall("<style>(.*?)</style>", text, re.DOTALL)
    assert "url(" not in style and "@import" not in style and "http" not in style
    policy = next(value for _, name, value in found.attributes if name == "content" and "default-src" in value)
    assert "default-src 'none'" in policy and "unsafe" not in policy


def section(text: str, title: str) -> str:
    assert text.count(f"<h3>{title}</h3>") == 1
    return text.partition(f"<h3>{title}</h3>")[2].partition("<h3>")[0]


def test_the_page_has_everything_and_loads_nothing(tmp_path: Path) -> None:
    text = page(tmp_path, report())
    check_that_nothing_is_loaded(text)
    assert (
        "The offload works: 2.00 GiB of saved tensors at the peak instead of 10.00 GiB (-80%), a step took 2.5% "
        "longer than estimated with everything kept, 42.00 TB written a day." in text
    )
    assert re.findall("<h3>(.*?)</h3>", text) == TITLES
    assert [one for one in re.findall("<div>(.*?)<small>", text) if one in TRACKS] == TRACKS
    levels = section(text, TITLES[1])
    assert "activation_budget_bytes, 3.00 GiB" in levels and '<line class="budget" x2="1000' in levels
    assert "in device memory, up to 1.00 GiB" in levels and "Step 16 of rank 0." in levels
    assert section(text, TITLES[3]).count("<wbr>") and "50 %" in section(text, TITLES[4])
    assert "2.05 s" in section(text, TITLES[5]) and "29 days" in section(text, TITLES[6])
    for advice in ("io.staging_bytes", "ssd.min_life_days"):
        assert advice in section(text, TITLES[0])


def test_a_plan_s_figure_is_not_told_as_a_measured_one() -> None:
    planned = {"kept_step_s": 2.0, "step_s": 2.4, "measured_step_s": None}
    verdict = view("report", Found(report(plan=planned)), Found({}), "").verdict
    assert "by the plan, not measured yet, a step takes 20.0% longer than with everything kept" in verdict
    measured = view("report", Found(report(plan={**planned, "measured_step_s": 3.0})), Found({}), "")
    assert "a step took 50.0% longer than estimated" in measured.verdict
    assert any("Steps take 25.0% longer than planned" in one for one in measured.advice)


def test_headings_headers_and_drawings_have_their_names(tmp_path: Path) -> None:
    text = page(tmp_path, report(), report(rank=1))
    found = Elements(text)
    assert '<html lang="en">' in text and found.tags.count("h1") == 1 and found.tags.count("title") > 1
    assert found.tags.count("caption") == found.tags.count("table") == found.tags.count("thead")
    assert {value for tag, name, value in found.attributes if tag == "th" and name == "scope"} == {"row", "col"}
    for drawing in re.findall("<svg([^>]*)>(.{9})", text, re.DOTALL):
        assert "aria-hidden" in drawing[0] or drawing[1].strip().startswith("<title>")


def test_names_of_files_and_modules_are_text(tmp_path: Path) -> None:
    hostile = report(
        state=HOSTILE, backend=HOSTILE, paths=[HOSTILE], integrity=HOSTILE, placement=HOSTILE,
        holders=[{"module": HOSTILE, "op": HOSTILE, "saved_bytes": 5, "resident_bytes": 5}],
        kept_bytes_by_reason={HOSTILE: 5}, fallbacks_by_reason={HOSTILE: 5},
        blocks_left_out=[{"path": HOSTILE, "reason": HOSTILE}],
        wear=[{"path": HOSTILE, "device": HOSTILE, "model": HOSTILE, "percentage_used": 7}],
        bandwidth=[{"path": HOSTILE}], plan={"planner": HOSTILE, "bytes": {HOSTILE: 5}},
    )  # fmt: skip
    step = timeline()
    for one in step["traceEvents"]:
        one["name"] = HOSTILE if one.get("cat") else one["name"]
    step["otherData"] = {"step": HOSTILE, "rank": HOSTILE, "budget_bytes": HOSTILE}
    text = page(tmp_path, hostile, hostile, step=step)
    check_that_nothing_is_loaded(text)
    assert "&lt;script&gt;" in text and "<script" not in text
    assert "traceEvents" not in text  # no data in it but what is shown


def test_twenty_thousand_events_fit(tmp_path: Path) -> None:
    text = page(tmp_path, *[report()] * DETAILED, step=timeline(5_000))
    assert len(text.encode()) < MAX_PAGE_BYTES
    check_that_nothing_is_loaded(text)
    step = timeline(20_000)
    one = page(tmp_path, report(), step=step)
    assert len(one.encode()) < MAX_PAGE_BYTES / 2 and "140 ms in 4000, 3.91 GiB" in one  # sums are of all spans
    for number, event in enumerate(step["traceEvents"]):
        event["name"] = "<" * 500 if event["ph"] == "X" else event["name"]
        event["dur"] = 10 * number  # wide ones over one another
    assert len(page(tmp_path, report(), step=step).encode()) < MAX_PAGE_BYTES


def test_short_spans_are_merged_and_long_ones_stay() -> None:
    events = [
        {"ph": "X", "cat": "write", "name": "write", "ts": at, "dur": 1, "args": {"bytes": 10}} for at in range(50)
    ]
    events += [{"ph": "X", "cat": "write", "name": "write", "ts": at, "dur": 4000, "args": {}} for at in (4000, 6000)]
    events += [{"ph": "X", "cat": "compute", "name": f"part {one}", "ts": 0, "dur": 10_000} for one in range(9)]
    step = view("report", Found(report()), Found({"traceEvents": events}), "").step
    assert step is not None and not step.lines
    _, name, note, marks = step.tracks[-1]
    assert (name, note) == ("writes", "8.05 ms in 52, 500 B") and [one.x for one in marks] == [0.0, 400.0, 600.0]
    assert marks[0].title(step.length_s) == "write (50 times): 50 µs, 500 B" and marks[0].opacity == 0.75
    assert [name for _, name, *_ in step.tracks[:-1]] == ["part 0", "part 1", "part 2", "part 3", "other compute"]
    apart = [{"ph": "X", "cat": "read", "name": "read", "ts": at, "dur": 1} for at in range(0, 10_000, 5)]
    step = view("report", Found(report()), Found({"traceEvents": apart}), "").step
    assert step is not None and [(one.count, one.opacity) for one in step.tracks[0][3]] == [
        (2000, pytest.approx(0.2, abs=1e-3))
    ]


def test_levels_keep_their_peaks() -> None:
    levels = [(at, 100 if at == 5001 else 1, 50) for at in range(10_000)]
    events = [
        {"ph": "C", "name": "saved bytes", "ts": at, "args": {"resident": a, "without": b}} for at, a, b in levels
    ]
    step = view("report", Found(report()), Found({"traceEvents": events}), "").step
    assert step is not None and "V0.0V198.0" in step.lines["resident"] and step.ticks == ["100 B", "50 B", "0"]
    assert len(step.lines["resident"]) < 12_000 and step.budget_y is None


def test_what_is_missing_leaves_its_section_out_and_says_how_to_get_it(tmp_path: Path) -> None:
    needed = {
        name: value for name, value in report().items()
        if name not in ("plan", "plans", "wear", "bandwidth", "bandwidth_at_start", "holders", "timeline_path",
                        "kept_bytes_by_reason", "fallbacks_by_reason", "blocks_left_out", "schema")
    }  # fmt: skip
    text = page(tmp_path, needed)
    check_that_nothing_is_loaded(text)
    assert re.findall("<h3>(.*?)</h3>", text) == TITLES
    assert "the cost in step time is not known without a plan" in text
    for title, sentence in zip(
        TITLES[1:],
        ["timeline_path", "needs the timeline", "newer version", "nvme_path", "4th step", "No drive", "counts nothing"],
        strict=True,
    ):
        assert "<svg" not in section(text, title) and sentence in section(text, title)
    assert "does little" in page(tmp_path, {**needed, "peak_saved_bytes": 10 * GIB})
    assert "Nothing was to be moved" in page(tmp_path, {**needed, "placement": "keep"})
    assert "Nothing was saved" in page(tmp_path, {**needed, "peak_saved_bytes_without": 0})


@pytest.mark.parametrize("value", [None, "text", [1, None], {"a": {}}, -1, math.nan, 10**400])
def test_values_of_another_kind_are_taken_for_missing(tmp_path: Path, value: Any) -> None:
    step = timeline(10)
    for one in step["traceEvents"][5:]:
        one["ts"] = one["args"] = one["cat"] = value
    values = report(unknown=value, bandwidth=[dict.fromkeys(report()["bandwidth"][0], value)])
    check_that_nothing_is_loaded(page(tmp_path, values, step={**step, "otherData": value}))
    for other in ({"traceEvents": value}, [value]):
        assert "train again to have another" in page(tmp_path, values, step=other)
    shown = view("report", Found(dict.fromkeys(report(), value)), Found({"traceEvents": value}), "")
    assert "Nothing was saved" in shown.verdict and shown.advice and "train again" in shown.why_not


def test_a_timeline_is_looked_for_where_it_was_and_beside_the_report(tmp_path: Path) -> None:
    def found(named: str) -> tuple[bool, str]:
        timeline, why_not = read_timeline(Found({"timeline_path": named}), tmp_path)
        return bool(timeline), why_not

    assert found("/elsewhere/step.json") == (
        False, "The timeline /elsewhere/step.json is not here: copy it beside the report, and make this page again.",
    )  # fmt: skip
    (tmp_path / "step.json").write_text("[1")
    assert "cannot be read" in found("/elsewhere/step.json")[1]
    (tmp_path / "step.json").write_text(json.dumps(timeline()))
    assert found("/elsewhere/step.json") == (True, "") == found(str(tmp_path / "step.json"))
    assert "is not here" in found("/dev/zero")[1] and "is not here" in found("..")[1]
    assert found("\0")[1] and found("x" * 10_000)[1] and '"timeline_path"' in found("")[1]


def test_several_reports_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = report(rank=1, plan={"kept_step_s": 2.0, "step_s": 2.4}, timeline_path=None)
    text = page(tmp_path, report(), slow)
    comparison = text.partition("<details")[0]
    assert comparison.count('scope="row"') == 2 and "+20.0 % planned" in comparison and "+2.5 %" in comparison
    assert text.count('<details name="run" open>') == 1 and text.count("<details") == 2
    many = page(tmp_path, *[report(timeline_path=None)] * (DETAILED + 3))
    assert many.count("<details") == DETAILED and f"first {DETAILED} reports" in many
    assert many.partition("<details")[0].count('scope="row"') == DETAILED + 3
    monkeypatch.setattr("ds_tba.cli.page.MAX_PAGE_BYTES", len(many) - 1)
    with pytest.raises(ReportError, match=f"{DETAILED + 3} reports are more than a page can show"):
        page(tmp_path, *[report(timeline_path=None)] * (DETAILED + 3))


def test_long_lists_and_names_are_cut(tmp_path: Path) -> None:
    holders = [{"module": "m" * 5000, "op": "o", "saved_bytes": GIB} for _ in range(5000)]
    reasons = {f"{number} {'r' * 1000}": 1 for number in range(5000)}
    blocks = [{"path": "b" * 5000, "reason": "r"}] * 5000
    text = page(tmp_path, report(holders=holders, kept_bytes_by_reason=reasons, blocks_left_out=blocks))
    assert len(text) < 200_000 and f"{5000 - MAX_ROWS} more rows hold {5000 - MAX_ROWS}.00 GiB together" in text


def test_each_refusal_of_a_store_has_its_remedy() -> None:
    assert {one.value for one in Refusal} - {"store closed"} <= REMEDIES.keys()


@pytest.mark.parametrize(
    ("changed", "advice"),
    [
        ({"budget_excess_bytes": GIB}, "activation_budget_bytes was exceeded by 1.00 GiB"),
        ({"kept_bytes_by_reason": {"small": 1000 * GIB}}, "min_tensor_bytes"),
        ({"kept_bytes_by_reason": {"plan": 1000 * GIB}}, "max_step_overhead"),
        ({"kept_bytes_by_reason": {"placement keep": 5000 * GIB}}, '"placement": "adaptive"'),
        ({"plan": {"step_s": 2.0, "measured_step_s": 2.5}}, "enabled: false"),
        ({"plan": {"step_s": 2.0, "measured_step_s": 2.0}, "stall_s": 30.0}, "wait for the drive"),
        ({"wear": [{"written_bytes_per_day": 1e12}]}, "ssd.rated_endurance_tbw"),
        ({"device_memory": {"allocation_retries": 2}}, "expandable_segments"),
        ({"fallbacks_by_reason": {}, "wear": []}, "Nothing stands out"),
    ],
)
def test_advice_names_keys(changed: dict[str, Any], advice: str) -> None:
    assert any(advice in one for one in view("report", Found(report(**changed)), Found({}), "").advice)


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_text(json.dumps(report()))
    arguments = ["report", str(tmp_path / "report.json")]
    assert main([*arguments, "--html", str(tmp_path / "out.html")]) == 0
    assert f"{tmp_path / 'out.html'}: " in capsys.readouterr().out
    assert (tmp_path / "out.html").read_text().startswith("<!DOCTYPE html>")
    for target, why in (
        ("none/out.html", "No such file or directory"),
        (".", "Is a directory"),
        ("report.json", "give it the ending .html"),
    ):
        assert main([*arguments, "--html", str(tmp_path / target)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("ds_tba report: --html ") and why in error
    assert main([*arguments, str(tmp_path / "absent.json"), "--html", str(tmp_path / "new.html")]) == 2
    assert "cannot be read" in capsys.readouterr().err and not (tmp_path / "new.html").exists()
    assert json.loads((tmp_path / "report.json").read_text()) == report()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"steps": "ten"}, '"steps" is "ten", and should be a valid integer'),
        ({"stall_s": None}, '"stall_s" is null, and should be a valid number'),
        ({"paths": "/local_nvme"}, '"paths" is "/local_nvme", and should be a valid list'),
        ({"paths": [1]}, '"paths.0" is 1, and should be a valid string'),
        ({"offloaded_bytes": 1.5}, '"offloaded_bytes" is 1.5, and should be a valid integer'),
        ({"offloaded_bytes": 10**400}, '"offloaded_bytes" is Infinity, and should be a valid integer'),
        ({"kept_bytes_by_reason": {"small": []}}, '"kept_bytes_by_reason.small" is [], and should be a valid integer'),
        ({"plan": 3}, '"plan" is 3, and should be a valid dictionary'),
        ({"plan": {"bytes": {"nvme": "1"}}}, '"plan.bytes.nvme" is "1", and should be a valid integer'),
        ({"plan": {"step_s": [1.0], "kept_step_s": 1.0}}, '"plan.step_s" is [1.0], and should be a valid number'),
        ({"wear": [{}, {"written_bytes_per_day": "x" * 99}]}, '"wear.1.written_bytes_per_day" is "xxxxx'),
        ({"holders": [{"module": None}]}, '"holders.0.module" is null, and should be a valid string'),
        ({"holders": {"module": "m"}}, '"holders" is {"module": "m"}, and should be a valid list'),
        ({"blocks_left_out": [{"path": "p", "reason": 1}]}, '"blocks_left_out.0.reason" is 1, and should be'),
    ],
)
@pytest.mark.parametrize("way", [(), ("--json",), ("--html", "out.html")], ids=["table", "json", "page"])
def test_a_value_of_another_type_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], says: str, way: tuple[str, ...]
) -> None:
    (tmp_path / "report.json").write_text(json.dumps(report(**changed)))
    assert main(["report", str(tmp_path / "report.json"), *way]) == 2
    told = capsys.readouterr()
    assert f"{tmp_path / 'report.json'} is no report of ds_tba: {says}" in told.err and not told.out
    assert told.err.endswith(": name the file of report.path.\n") and not Path("out.html").exists()


@pytest.mark.parametrize("text", ["[" * 100_000, "\0", "{", ""], ids=["deep", "zero", "cut", "empty"])
def test_what_is_no_json_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    assert main(["report", str(tmp_path / "report.json")]) == 2
    assert "is no JSON" in capsys.readouterr().err


def test_what_another_version_does_not_have_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = report(
        state="\ud800",
        plan={"reason": ""},
        wear=[{"new": 1}],
        holders=[{"saved_bytes": 5}],
        blocks_left_out=[{}],
        newer=[],
    )
    (tmp_path / "report.json").write_text(json.dumps(bare))
    assert main(["report", str(tmp_path / "report.json")]) == 0
    out = capsys.readouterr().out
    assert "unknown drive: 0.00 TB a day" in out and "\\ud800" in out  # half a pair, which no terminal takes


def test_a_script_reads_what_all_reports_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        (tmp_path / f"{rank}.json").write_text(json.dumps(report(rank=rank, newer=1)))
    assert main(["report", "--json", str(tmp_path / "0.json"), str(tmp_path / "1.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(Path(one["file"]).name, one["rank"]) for one in found] == [("0.json", 0), ("1.json", 1)]
    assert found[0]["refused_sites"] == report().get("refused_sites", {})


def test_tables_of_several_reports_have_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        (tmp_path / f"{rank}.json").write_text(json.dumps(report(rank=rank)))
    assert main(["report", str(tmp_path / "0.json"), str(tmp_path / "1.json")]) == 0
    out = capsys.readouterr().out
    assert out.count("state ") == 2 and f" {tmp_path / '1.json'}\n" in out
