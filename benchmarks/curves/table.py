"""The points of a race as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarking import MIB, markdown_table

COLUMNS = ("contender", "step s", "/ plain", "peak MiB", "saved MiB (promised)", "promised step s", "NVMe MiB",
           "recomputed", "plans")  # fmt: skip
SPREAD = "{median:.3f} [{low:.3f}-{high:.3f}]"


def lines(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a row for each point (``points.row``): medians of the rounds, and the middle half of them in brackets."""
    return markdown_table(COLUMNS, map(_row, points))


def _row(point: Mapping[str, Any]) -> tuple[str, ...]:
    plan = point["plan"] or {}
    saved = promised = ""
    if point["plans"]:
        saved = f"{_mib(point['saved_peak_bytes'])} ({_mib(point['promised_peak_bytes'])})"
        promised = f"{point['promised_step_s']:.3f} ({point['step_error']:+.1%})"
    times = (SPREAD.format(**point[key]) for key in ("step_s", "to_plain"))
    moved = _mib(plan.get("bytes", {}).get("nvme", 0)), str(plan.get("recomputed_blocks", 0)), str(point["plans"])
    return (point["name"], *times, _mib(point["peak_bytes"]), saved, promised, *moved)


def _mib(nbytes: float | None) -> str:
    return "not measured" if nbytes is None else f"{nbytes / MIB:.1f}"
