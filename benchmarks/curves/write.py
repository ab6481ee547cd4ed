"""The curve as CSV, as a Markdown table and as a picture."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MIB = 1 << 20
COLUMNS = (
    "model", "hidden", "layers", "sequence", "batch", "name", "planner", "limits", "rounds", "step_s", "step_s_low",
    "step_s_high", "to_plain", "to_plain_low", "to_plain_high", "tokens_per_s", "peak_bytes", "saved_peak_bytes",
    "promised_peak_bytes", "promised_step_s", "step_error", "peak_error", "trace_error", "cost_error", "nvme_bytes",
    "recomputed_blocks", "plans",
)  # fmt: skip
STYLES = {
    "plain": "ks",
    "plain again": "kx",
    "keep": "kd",
    "recompute": "bv",
    "tba": "g^",
    "teraio": "m<",
    "adaptive": "ro",
}


def rows(shapes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One for each point."""
    return [_row(found["shape"], point) for found in shapes for point in found["points"]]


def _row(shape: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    plan = point["plan"] or {}
    step, ratio = point["step_s"], point["to_plain"]
    computed = {
        "limits": " ".join(f"{key}={value}" for key, value in point["limits"].items()),
        "step_s": step["median"],
        "step_s_low": step["low"],
        "step_s_high": step["high"],
        "to_plain": ratio["median"],
        "to_plain_low": ratio["low"],
        "to_plain_high": ratio["high"],
        "tokens_per_s": shape["batch"] * shape["sequence"] / step["median"],
        "nvme_bytes": plan.get("bytes", {}).get("nvme", 0),
        "recomputed_blocks": plan.get("recomputed_blocks", 0),
    }
    found = {**shape, **point, **computed}
    return {name: found[name] for name in COLUMNS}


def write_csv(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(found)


def markdown(results: Mapping[str, Any]) -> str:
    """Everything, for people."""
    lines = [
        "# Recompute, offload, keep",
        "",
        f"`{results['command']}`, {results['date']}, {results['device']}, torch {results['torch']}.",
        "",
    ]
    lines += [
        "Each figure is the median of the rounds, with the middle half of them in brackets; ratios are to the plain",
        "model in the same round. Peaks are of one step, less parameters, gradients and batch.",
        "",
    ]
    lines += [f"- {found['verdict']}" for found in results["shapes"]]
    for found in results["shapes"]:
        lines += ["", f"## {found['name']}", "", *_table(found)]
    return "\n".join([*lines, ""])


def _table(found: Mapping[str, Any]) -> list[str]:
    lines = [
        "| contender | step s | / plain | peak MiB | saved MiB (promised) | promised step s | NVMe MiB | recomputed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in rows([found]):
        saved = f"{_mib(one['saved_peak_bytes'])} ({_mib(one['promised_peak_bytes'])})" if one["plans"] else ""
        promised = f"{one['promised_step_s']:.3f} ({one['step_error']:+.1%})" if one["plans"] else ""
        lines.append(
            f"| {one['name']} | {one['step_s']:.3f} [{one['step_s_low']:.3f}-{one['step_s_high']:.3f}] | "
            f"{one['to_plain']:.3f} [{one['to_plain_low']:.3f}-{one['to_plain_high']:.3f}] | "
            f"{_mib(one['peak_bytes'])} | {saved} | {promised} | {_mib(one['nvme_bytes'])} | "
            f"{one['recomputed_blocks']} |"
        )
    return lines


def _mib(nbytes: float | None) -> str:
    return "not measured" if nbytes is None else f"{nbytes / MIB:.1f}"


def plot(shapes: Sequence[Mapping[str, Any]], path: Path) -> str:
    """Draw it; the file's name, or why there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "not drawn: matplotlib is not installed"
    models = list(dict.fromkeys(found["shape"]["model"] for found in shapes))
    figure = Figure(figsize=(6 * len(models), 5), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        for found in shapes:
            if found["shape"]["model"] == model:
                _draw(axes, rows([found]), first=found is next(one for one in shapes if one["shape"]["model"] == model))
        axes.set_title(f"{model}; lines are batch sizes")
        axes.set_xlabel("peak of a step, MiB")
        axes.set_ylabel("tokens per second")
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    return path.name


def _draw(axes: Any, found: Sequence[Mapping[str, Any]], *, first: bool) -> None:
    """One batch: adaptive as a line, the others as points."""
    for planner, style in STYLES.items():
        mine = sorted(
            (one["peak_bytes"] / MIB, one["tokens_per_s"])
            for one in found
            if one["peak_bytes"] is not None
            and (one["name"] if one["planner"] == "plain" else one["planner"]) == planner
        )
        if not mine:
            continue
        line = style + ("-" if planner == "adaptive" else "")
        axes.plot([x for x, _ in mine], [y for _, y in mine], line, label=planner if first else None, markersize=5)
        if planner == "plain":
            axes.annotate(f"batch {found[0]['batch']}", mine[0], textcoords="offset points", xytext=(4, 4), fontsize=7)
