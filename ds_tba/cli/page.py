"""The page of ``ds_tba report --html``: the tables of the terminal as HTML, with several reports beside each other.

The page loads nothing and runs nothing. Reports may come from anybody: :func:`_element` alone puts their texts into the
page. It knows the reports only, and cannot ask the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from ds_tba.holders import cells
from ds_tba.report import NOTHING_OFFLOADED, OffloadReport
from ds_tba.stats import readable
from ds_tba.wear import TERABYTE

LITTLE = 0.1  # below this part of the saved bytes the offload does little
DETAILED = 8  # reports with all their tables; more are only compared
MAX_TEXT = 400  # characters
_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 1rem; max-width: 64rem; font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h2 { border-top: 2px solid; margin-top: 2rem; padding-top: .5rem; }
h3 { margin: 1.5rem 0 .3rem; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid; }
td, th, h2, p { unicode-bidi: isolate; }
"""
# Nothing may run or load, whatever a report has.
_HEAD = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Activations on NVMe: report of ds_tba</title>
<style>{_STYLE}</style>
</head>
<body>
"""
_COMPARED = ("report", "rank", "steps", "peak", "without", "change", "step", "TB a day", "stalled", "fallbacks")


def render(reports: Mapping[str, OffloadReport]) -> str:
    """Return the page about reports by their names: a comparison of several, and the tables of the first ones."""
    parts = [_HEAD, _element("h1", "Activations on NVMe: report of ds_tba")]
    if len(reports) > 1:
        parts.append(_table(_COMPARED, [_compared(name, report) for name, report in reports.items()]))
    for name, report in list(reports.items())[:DETAILED]:
        parts += [_element("h2", name), _element("p", verdict(report)), *_details(report)]
    if len(reports) > DETAILED:
        parts.append(_element("p", f"Tables are of the first {DETAILED} reports. To see others, name fewer."))
    page = "\n".join([*parts, "</body>", "</html>", ""])
    return page.encode(errors="replace").decode()  # of surrogate pairs JSON may have a half, and UTF-8 may not


def verdict(report: OffloadReport) -> str:
    """Return whether the offload did anything, and the figures that show it."""
    if NOTHING_OFFLOADED in report.state:
        return f"The offload did nothing: {report.summary()}."
    if report.peak_saved_bytes_without <= 0:
        return "Nothing was saved for backward yet."
    word = "The offload works" if -_change(report) >= LITTLE else "The offload does little"
    return f"{'Nothing was to be moved' if report.placement == 'keep' else word}: {report.summary()}."


def _details(report: OffloadReport) -> Iterator[str]:
    yield _table(("field", "value"), report.rows())
    yield _element("h3", "What holds saved bytes at the end of a forward")
    (head, *rows) = cells(report.held())
    yield _table(head, rows) if report.holders else _element("p", "No forward was sampled.")


def _compared(name: str, report: OffloadReport) -> tuple[str, ...]:
    """Return the row of a report beside others."""
    plan = report.plan or {}
    kept_s, measured_s = plan.get("kept_step_s"), plan.get("measured_step_s")
    step_s = measured_s or plan.get("step_s")
    step = f"{step_s / kept_s - 1:+.1%}{'' if measured_s else ' planned'}" if kept_s and step_s else "-"
    return (
        name,
        str(report.rank),
        str(report.steps),
        readable(report.peak_saved_bytes),
        readable(report.peak_saved_bytes_without),
        f"{_change(report):+.0%}",
        step,
        f"{sum(one.all_bytes_per_day for one in report.path_wear()) / TERABYTE:.2f}",
        f"{report.stall_s:.3g} s",
        str(report.fallbacks),
    )


def _change(report: OffloadReport) -> float:
    """Return by which part the offload changes the peak of saved bytes; below 0 it lowers it."""
    without = report.peak_saved_bytes_without
    return report.peak_saved_bytes / without - 1 if without > 0 else 0.0


# ---- HTML -----------------------------------------------------------------------------------------------------------


def _element(tag: str, text: str) -> str:
    """Return an element with a text, escaped, and without its middle where it is long."""
    shown = text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}…{text[-MAX_TEXT // 2 :]}"
    return f"<{tag}>{escape(shown)}</{tag}>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(_element("th", name) for name in head)]
    lines += ["".join(_element("td", text) for text in row) for row in rows]
    return f"<table>\n{''.join(f'<tr>{line}</tr>{chr(10)}' for line in lines)}</table>"
