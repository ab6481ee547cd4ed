"""The results for people: Markdown, and the curve of throughput against activation peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

GIB = 1 << 30
STEP_COLUMNS = (
    "variant", "rounds", "step s", "step / keep", "TFLOP/s", "activation peak GiB", "peak / keep",
    "saved peak GiB (without)", "moved per step GiB (host, written, read)",
)  # fmt: skip
EQUAL = {True: "equal bit for bit", False: "NOT EQUAL", None: "not compared, for there is one run only"}


def markdown(results: dict[str, Any]) -> str:
    """The whole report; what did not run is named with its reason."""
    machine, parts = results["machine"], results["parts"]
    lines = [f"# BERT, GPT and T5 on {machine['device']}, {results['date']}", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += [f"- ours, {name}: {value}" for name, value in results.get("sizes", {}).items()]
    lines += [f"- command: `{results['command']}`", ""]
    if results["tiny"]:
        lines += ["**Tiny shapes: this run shows that the suite works. Its times say nothing.**", ""]
    lines += ["| part | status | seconds |", "|---|---|---|"]
    lines += [f"| {name} | {part['status']} | {part['duration_s']:.1f} |" for name, part in parts.items()]
    lines += ["", *limits(parts.get("limits", {})), *tests(parts.get("tests", {}))]
    lines += [
        "## Step time and activation peak", "",
        "A step is forward, backward and plain SGD on all parameters, in bf16, without dropout; warm-up is excluded. "
        "The variants take turns in one process, from the same parameters: first in the order of the table, then in a "
        "new random order each round. Cells are "
        "medians over the rounds [least-greatest]; ratios are to keep in the same round. The activation peak is the "
        "most device memory allocated in the measured steps less parameters and gradients, which stay allocated. "
        "\"Saved peak\" is the offloader's own count of the bytes that saved tensors held, and had nothing been "
        "offloaded.", "",
    ]  # fmt: skip
    lines += shapes(parts.get("step_time", {}))
    lines += ["## Throughput against activation peak (recompute, offload, keep)", "", "One run each.", ""]
    lines += shapes(parts.get("curve", {}))
    lines += [f"Plot: {results['plot']}.", "", "## Traces", ""]
    lines += traces(parts.get("trace", {}))
    return "\n".join(lines) + "\n"


def limits(part: dict[str, Any]) -> list[str]:
    lines = ["## The machine's own limits", ""]
    pcie = part.get("pcie", "not run")
    if isinstance(pcie, dict):
        for name in ("out", "in", "both"):
            lines.append(f"- pinned copies, {name}: {_spread(pcie[name], 1e9)} GB/s")
    else:
        lines.append(f"- pinned copies: {pcie}")
    product = part.get("matrix_product")
    if product:
        lines.append(f"- bf16 product of side {product['side']}: {_spread(product['flops_per_s'], 1e12)} TFLOP/s")
    for name, found in part.get("drive", {}).items():
        if isinstance(found, str):
            lines.append(f"- drive over {name}: {found}")
            continue
        direct = "" if found["direct"] else " (no O_DIRECT here: through the page cache)"
        size = f"{found['requests']} x {found['request_bytes'] / (1 << 20):.0f} MiB"
        for which in ("fresh", "overwritten"):
            one = found.get(which, "not run")
            text = one if isinstance(one, str) else ", ".join(f"{_words(k)} {v / 1e9:.2f} GB/s" for k, v in one.items())
            lines.append(f"- drive over {name}{direct}, {size}, {which}: {text}")
    return [*lines, ""]


def tests(part: dict[str, Any]) -> list[str]:
    return ["## Tests on the GPU", "", f"{part.get('status', 'not run')}: {part.get('counts', {})}", ""]


def shapes(part: dict[str, Any]) -> list[str]:
    """A table for each shape."""
    lines = [f"Kernels: {part['kernels']}.", ""] if "kernels" in part else [str(part.get("status", "not run")), ""]
    for name, found in part.get("shapes", {}).items():
        lines += [f"### {name}", ""]
        if found["status"] != "done":
            lines += [found["status"], ""]
            continue
        lines += [_cells(*STEP_COLUMNS), "|---" * len(STEP_COLUMNS) + "|"]
        lines += [_row(variant, row) for variant, row in found["summary"].items()]
        lines += [_cells(variant, reason) for variant, reason in found["not_run"].items()]
        lines += ["", *plans(found["summary"])]
        lines += ["", f"Losses of all variants and rounds: {EQUAL[found['losses_equal']]}.", ""]
    return lines


def plans(summary: dict[str, dict[str, Any]]) -> list[str]:
    """What each plan chose and promised."""
    lines = []
    for variant, row in summary.items():
        plan = row.get("plan")
        if plan is None:
            continue
        where = ", ".join(f"{place} {nbytes / GIB:.3g} GiB" for place, nbytes in plan["bytes"].items())
        lines.append(
            f"- {variant}: {where}; promised {plan['step_s']:.4g} s (keep {plan['kept_step_s']:.4g} s) and a saved "
            f"peak of {plan['peak_saved_bytes'] / GIB:.4g} GiB"
        )
    return lines


def traces(part: dict[str, Any]) -> list[str]:
    lines = [] if "traces" in part else [str(part.get("status", "not run"))]
    for variant, found in part.get("traces", {}).items():
        text = found if isinstance(found, str) else f"{found['file']}, overlap: {found['overlap']}"
        lines.append(f"- {variant}: {text}")
    return lines


def _row(variant: str, row: dict[str, Any]) -> str:
    saved = moved = ""
    if row["per_step"] is not None:
        with_us, without = row["peak_saved_bytes"], row["peak_saved_bytes_without"]
        saved = f"{_spread(with_us, GIB)} ({_spread(without, GIB)})"
        moved = ", ".join(f"{row['per_step'][k] / GIB:.4g}" for k in ("host_bytes", "written_bytes", "read_bytes"))
    return _cells(
        variant,
        str(row["rounds"]),
        _spread(row["step_s"], 1),
        _spread(row["step_to_keep"], 1),
        f"{row['flops_per_s'] / 1e12:.4g}",
        _spread(row["activation_peak_bytes"], GIB),
        _spread(row["peak_to_keep"], 1),
        saved,
        moved,
    )


def _cells(*cells: str) -> str:
    return "| " + " | ".join([*cells, *[""] * (len(STEP_COLUMNS) - len(cells))]) + " |"


def _words(name: str) -> str:
    return name.removesuffix("_bytes_per_s").replace("_", " ")


def _spread(value: dict[str, float] | None, unit: float) -> str:
    if value is None:
        return "not measured"
    return f"{value['median'] / unit:.4g} [{value['min'] / unit:.4g}-{value['max'] / unit:.4g}]"


def plot(results: dict[str, Any], path: Path) -> str:
    """Draw the curve; the file's name, or why there is none."""
    points = curve_points(results["parts"].get("curve", {}))
    if not points:
        return "not drawn: no activation peak was measured"
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "not drawn: matplotlib is not installed"
    figure = Figure(figsize=(7, 5))
    axes = figure.subplots()
    for variant, line in points.items():
        axes.plot([x for x, _, _ in line], [y for _, y, _ in line], marker="o", label=variant)
        for x, y, batch in line:
            axes.annotate(str(batch), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
    axes.set_xlabel("activation peak, GiB")
    axes.set_ylabel("model throughput, TFLOP/s")
    axes.set_title(f"{results['machine']['device']}; numbers are batch sizes")
    axes.legend()
    figure.savefig(path, dpi=120)
    return path.name


def curve_points(part: dict[str, Any]) -> dict[str, list[tuple[float, float, int]]]:
    """For each variant (peak in GiB, TFLOP/s, batch), in order of batch."""
    points: dict[str, list[tuple[float, float, int]]] = {}
    for found in part.get("shapes", {}).values():
        for variant, row in found.get("summary", {}).items():
            if row["activation_peak_bytes"] is not None:
                peak = row["activation_peak_bytes"]["median"] / GIB
                points.setdefault(variant, []).append((peak, row["flops_per_s"] / 1e12, found["shape"]["batch"]))
    return points
