"""The points of a race as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MIB = 1 << 20
HEAD = (
    "| contender | step s | / plain | peak MiB | saved MiB (promised) | promised step s | NVMe MiB | recomputed "
    "| plans |",
    "|---|---|---|---|---|---|---|---|---|",
)


def lines(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a row for each point (``points.row``): medians of the rounds, and the middle half of them in brackets."""
    return [*HEAD, *map(_row, points)]


def _row(point: Mapping[str, Any]) -> str:
    step, ratio, plan = point["step_s"], point["to_plain"], point["plan"] or {}
    saved = promised = ""
    if point["plans"]:
        saved = f"{_mib(point['saved_peak_bytes'])} ({_mib(point['promised_peak_bytes'])})"
        promised = f"{point['promised_step_s']:.3f} ({point['step_error']:+.1%})"
    cells = (
        point["name"],
        f"{step['median']:.3f} [{step['low']:.3f}-{step['high']:.3f}]",
        f"{ratio['median']:.3f} [{ratio['low']:.3f}-{ratio['high']:.3f}]",
        _mib(point["peak_bytes"]),
        saved,
        promised,
        _mib(plan.get("bytes", {}).get("nvme", 0)),
        str(plan.get("recomputed_blocks", 0)),
        str(point["plans"]),
    )
    return f"| {' | '.join(cells)} |"


def _mib(nbytes: float | None) -> str:
    return "not measured" if nbytes is None else f"{nbytes / MIB:.1f}"
