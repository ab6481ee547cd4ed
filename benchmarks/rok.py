"""The recompute-offload-keep curve: throughput against peak memory of BERT, GPT and T5 under every planner.

    python benchmarks/rok.py --nvme_path DIR --out DIR [--minutes 20] [--device cpu|cuda] [--tiny]

At each model and batch size, in one process and over one model: the plain model (twice, which shows the noise), and the
model under the planners keep, recompute, tba, teraio and adaptive; adaptive at several limits of ``max_step_overhead``
and at several budgets, those of the others among them, because it is a curve. All take turns in a new random order each
round; reported are medians over the rounds. One more step of each, from the same parameters and under strictly
deterministic kernels, must give the same loss, gradients and parameters, bit for bit. On a CPU glibc keeps what is
freed, as CUDA's allocator does.

Peaks are measured by one meter for all: CUDA's allocator, or on the CPU a count of the bytes of all tensors that are
alive (in one more step, not timed). Into ``--out`` go ``rok.json`` and ``rok.md``, its tables. The exit status is 0 if
for every model and batch adaptive is on or beyond every other planner's curve, predicted peaks are within 5 % and
predicted step times within 15 % of those measured, and all results are equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from curves import points, table  # noqa: E402
from curves.allocator import hold_freed_memory  # noqa: E402
from curves.device import Device  # noqa: E402
from curves.models import Shape, Workload  # noqa: E402
from curves.turns import AGAIN, PLAIN, Contender, Race, add_race_options  # noqa: E402

MODELS = ("BERT", "GPT", "T5")
OVERHEADS = (0.02, 0.1, 0.5)
ENOUGH = 100.0  # an overhead that no plan reaches: a budget decides
SAME_BUDGET = 0.03


def shapes(device: Device, models: list[str], batches: list[int] | None, *, tiny: bool) -> list[Shape]:
    """Return the shapes to measure: a step takes some tenths of a second, on two CPU cores as on a GPU."""
    if tiny:
        sizes, usual = (64, 2, 64, 256, 32), [4]
    elif device.is_cuda:
        sizes, usual = (8192, 4, 1024, 32768, 128), [4, 8, 16]
    else:
        sizes, usual = (384, 6, 256, 2048, 64), [2, 4, 8]
    return [Shape(model, *sizes, batch) for model in models for batch in batches or usual]


def block(options: argparse.Namespace, device: Device, shape: Shape) -> dict[str, Any]:
    """Return the keys of the config block that all contenders have in common."""
    # Less than what is saved: or all of it would wait in staging, and nothing would come from the drive.
    usual_bytes = 256 << 20 if device.is_cuda else 64 << 20
    staging_bytes = max(4 << 20, 2 * shape.largest_tensor_bytes) if options.tiny else usual_bytes
    least = 4096 if options.tiny else 1 << 20 if device.is_cuda else 256 << 10
    swap_file_bytes = 2 * max(shape.activation_bytes, staging_bytes)
    io = {"backend": options.backend, "staging_bytes": staging_bytes, "swap_file_bytes": swap_file_bytes}
    return {"nvme_path": str(options.nvme_path), "min_tensor_bytes": least, "recompute": True, "io": io}


def contenders() -> list[Contender]:
    """Return the contenders that need to know nothing of the others."""
    fixed = [Contender(name, name, {"max_step_overhead": ENOUGH}) for name in ("keep", "recompute", "tba", "teraio")]
    limited = [Contender(f"adaptive {most:.0%}", "adaptive", {"max_step_overhead": most}) for most in OVERHEADS]
    return [PLAIN, AGAIN, *fixed, *limited]


def budgets(race: Race) -> list[Contender]:
    """Return adaptive within what each of the others needs, and within half way between recompute and keep."""
    needs = {name: _saved_peak_bytes(race, name) for name in ("keep", "recompute", "tba", "teraio")}
    needs["half way"] = (needs["keep"] + needs["recompute"]) // 2
    chosen: list[Contender] = []
    for name, nbytes in needs.items():
        taken = [one.limits["activation_budget_bytes"] for one in chosen]
        if not any(abs(nbytes - other) <= SAME_BUDGET * other for other in taken):
            limits = {"activation_budget_bytes": nbytes, "max_step_overhead": ENOUGH}
            chosen.append(Contender(f"adaptive in {name}'s", "adaptive", limits))
    return chosen


def _saved_peak_bytes(race: Race, name: str) -> int:
    offloader = race.runners[name].offloader
    if offloader is None:
        raise RuntimeError(f"{name} runs without us: it has no peak of its own")
    return offloader.report().step_peak_saved_bytes


def measure(shape: Shape, options: argparse.Namespace, device: Device, ends_s: float) -> dict[str, Any]:
    """Measure one model at one batch size."""
    with Race(Workload.of(shape, device.torch), device, block(options, device, shape)) as race:
        race.enter(contenders())
        race.enter(budgets(race))
        found = points.outcome(race, options.rounds, options.steps, ends_s)
    verdict = points.verdict(found.points)
    return {
        "name": shape.name,
        "shape": vars(shape),
        "rounds": found.rounds,
        "points": [points.row(one) for one in found.points],
        "equal": found.are_equal,
        "holds": verdict.holds,
        "verdict": verdict.line(shape.name),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_race_options(parser)
    parser.add_argument("--backend", default="posix")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: shows that it works")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    ends_s = time.monotonic() + options.minutes * 60
    options.out.mkdir(parents=True, exist_ok=True)
    device = Device(options.device)
    results: dict[str, Any] = {
        "command": " ".join(["python benchmarks/rok.py", *(sys.argv[1:] if argv is None else argv)]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": device.name,
        "torch": torch.__version__,
        "shapes": [],
    }
    todo = shapes(device, list(options.models), options.batches, tiny=options.tiny)
    for number, shape in enumerate(todo):
        now_s = time.monotonic()
        share_s = max(0.0, ends_s - now_s) / (len(todo) - number)
        found = measure(shape, options, device, now_s + share_s)
        results["shapes"].append(found)
        print(found["verdict"], "" if found["equal"] else "; RESULTS DIFFER", f"({found['rounds']} rounds)", flush=True)
        keep(results, options.out)
    return 0 if all(found["holds"] and found["equal"] for found in results["shapes"]) else 1


def keep(results: dict[str, Any], out: Path) -> None:
    """Write the results so far."""
    (out / "rok.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    lines = [
        "# Recompute, offload, keep",
        "",
        f"`{results['command']}`, {results['date']}, {results['device']}, torch {results['torch']}.",
        "",
        "Each figure is the median of the rounds, with the middle half of them in brackets; ratios are to the plain",
        "model in the same round. Peaks are of one step, less parameters, gradients and batch.",
        "",
        *(f"- {found['verdict']}" for found in results["shapes"]),
    ]
    for found in results["shapes"]:
        lines += ["", f"## {found['name']}", "", *table.lines(found["points"])]
    (out / "rok.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    hold_freed_memory()
    raise SystemExit(main())
