"""The page of ``ds_tba report --html``: the tables of the terminal as HTML, with several reports beside each other.

The page loads nothing and runs nothing. Reports may come from anybody: :func:`_element` alone puts their texts into the
page. It knows the reports only, and cannot ask the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from ds_tba.report import OffloadReport, cells
from ds_tba.stats import TERABYTE, readable

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
    """Return the page about reports by their names: a comparison of several, and the tables of each."""
    parts = [_HEAD, _element("h1", "Activations on NVMe: report of ds_tba")]
    if len(reports) > 1:
        parts.append(_table(_COMPARED, [_compared(name, report) for name, report in reports.items()]))
    for name, report in reports.items():
        parts += [_element("h2", name), _element("p", report.summary()), _table(("field", "value"), report.rows())]
        parts.append(_element("h3", "What holds saved bytes at the end of a forward"))
        (head, *rows) = cells(report.held())
        parts.append(_table(head, rows) if rows else _element("p", "No forward was sampled."))
    page = "\n".join([*parts, "</body>", "</html>", ""])
    return page.encode(errors="replace").decode()  # of surrogate pairs JSON may have a half, and UTF-8 may not


def _compared(name: str, report: OffloadReport) -> tuple[str, ...]:
    """Return the row of a report beside others."""
    plan, without_bytes = report.plan or {}, report.peak_saved_bytes_without
    kept_s, measured_s = plan.get("kept_step_s"), plan.get("measured_step_s")
    step_s = measured_s or plan.get("step_s")
    step = f"{step_s / kept_s - 1:+.1%}{'' if measured_s else ' planned'}" if kept_s and step_s else "-"
    return (
        name,
        str(report.rank),
        str(report.steps),
        readable(report.peak_saved_bytes),
        readable(without_bytes),
        f"{report.peak_saved_bytes / without_bytes - 1:+.0%}" if without_bytes > 0 else "-",
        step,
        f"{sum(one.all_bytes_per_day for one in report.path_wear()) / TERABYTE:.2f}",
        f"{report.stall_s:.3g} s",
        str(report.fallbacks),
    )


# ---- HTML -----------------------------------------------------------------------------------------------------------


def _element(tag: str, text: str) -> str:
    """Return an element with a text, escaped."""
    return f"<{tag}>{escape(text)}</{tag}>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(_element("th", name) for name in head)]
    lines += ["".join(_element("td", text) for text in row) for row in rows]
    return f"<table>\n{''.join(f'<tr>{line}</tr>{chr(10)}' for line in lines)}</table>"
