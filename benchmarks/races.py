"""Races of ways to train over one model, in one process: step time against peak memory of BERT, GPT and T5.

    python benchmarks/races.py curve --nvme_path DIR --out DIR [--minutes 20] [--device cpu|cuda] [--tiny]
    python benchmarks/races.py drives --nvme_path DIR --out DIR [--overhead 0.2] [--drive_only]
    python benchmarks/races.py host --nvme_path DIR --out DIR [--rounds 60 --steps 2]

The plain model runs twice in each, which shows the noise. All take turns in a new random order each round; reported are
medians over the rounds. One more step of each, from the same parameters and under strictly deterministic kernels, must
give the same loss, gradients and parameters, bit for bit. On a CPU glibc keeps what is freed, as CUDA's allocator does.
Peaks are measured by one meter for all: CUDA's allocator, or on the CPU a count of the bytes of all tensors that are
alive (in one more step, not timed).

``curve``: the planners keep, recompute, tba, teraio and adaptive; adaptive at several limits of ``max_step_overhead``
and at several budgets, those of the others among them, because it is a curve. It holds where adaptive is on or beyond
every other planner's curve, predicted peaks are within 5 % and predicted step times within 15 % of those measured.

``drives``: adaptive on drives of a half, a tenth and a hundredth of this machine's, whose lanes sleep for as long as a
slower drive would have taken; one becomes slower by ten when it has a plan. It holds where no step is longer than
``max_step_overhead`` allows (and the noise), and no peak is above the plain model's.

``host``: host memory of a fixed size, half of what is free, and the same with the drive behind it.

Into ``--out`` go the results and a table, ``curve.json`` and ``curve.md``, say. The exit status is 0 if all results are
equal and every claim holds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from benchmarking import MIB, provenance, race_parser, write_json, write_whole
from curves import points, table
from curves.device import Device, hold_freed_memory
from curves.models import Shape, Workload
from curves.points import Point
from curves.throttled import ThrottledBackend
from curves.turns import AGAIN, PLAIN, Contender, Race

MODELS, PAPERS = ("BERT", "GPT", "T5"), ("keep", "recompute", "tba", "teraio")
OVERHEADS = (0.02, 0.1, 0.5)
ENOUGH = 100.0  # an overhead that no plan reaches: a budget decides
SAME_BUDGET = 0.03
PARTS, IN_MID_RUN = (1, 2, 10, 100), 10
FIXED_HOST_BYTES = 4 << 30


def enter_curve(race: Race, options: argparse.Namespace) -> None:
    """Enter those that need to know nothing of the others, then adaptive within what each of the others needs."""
    fixed = [Contender(name, name, {"max_step_overhead": ENOUGH}) for name in PAPERS]
    limited = [Contender(f"adaptive {most:.0%}", "adaptive", {"max_step_overhead": most}) for most in OVERHEADS]
    race.enter([PLAIN, AGAIN, *fixed, *limited])
    race.enter(budgets(race))


def budgets(race: Race) -> list[Contender]:
    """Return adaptive within what each of the others needs, and within half way between recompute and keep."""
    offloaders = {name: race.runners[name].offloader for name in PAPERS}
    needs = {name: one.report().step_peak_saved_bytes for name, one in offloaders.items() if one is not None}
    needs["half way"] = (needs["keep"] + needs["recompute"]) // 2
    chosen: list[Contender] = []
    for name, nbytes in needs.items():
        taken = [one.limits["activation_budget_bytes"] for one in chosen]
        if not any(abs(nbytes - other) <= SAME_BUDGET * other for other in taken):
            limits = {"activation_budget_bytes": nbytes, "max_step_overhead": ENOUGH}
            chosen.append(Contender(f"adaptive in {name}'s", "adaptive", limits))
    return chosen


def judge_curve(found: Sequence[Point], options: argparse.Namespace) -> tuple[str, bool]:
    verdict = points.verdict(found)
    return verdict.line(), verdict.holds


def enter_drives(race: Race, options: argparse.Namespace) -> None:
    """Enter adaptive on each drive, and take steps enough for new plans."""
    limits = {"max_step_overhead": options.overhead, "recompute": not options.drive_only}

    on = partial(Contender, planner="adaptive", limits=limits)
    race.enter([PLAIN, AGAIN, on("drive 1/1", drive=ThrottledBackend())])
    full = race.runners["drive 1/1"].offloader
    (path,) = full.report().bandwidth if full is not None else ()
    rates = path["write_bytes_per_s"], path["read_bytes_per_s"]
    print(f"drive: {rates[0] / 1e9:.2f} GB/s of writes, {rates[1] / 1e9:.2f} of reads", flush=True)
    for part in PARTS[1:]:
        drive = ThrottledBackend()
        drive.throttle(rates[0] / part, rates[1] / part)
        race.enter([on(f"drive 1/{part}", drive=drive)])
    later = ThrottledBackend()
    race.enter([on(f"drive 1/{IN_MID_RUN} in mid-run", drive=later)])
    later.throttle(rates[0] / IN_MID_RUN, rates[1] / IN_MID_RUN)
    for runner in race.runners.values():
        runner.turn(options.settle)


def judge_drives(found: Sequence[Point], options: argparse.Namespace) -> tuple[str, bool]:
    """Return what does not hold, in words, and whether all holds."""
    plain_bytes = found[0].peak_bytes or 0
    step_noise = points.verdict(found).step_noise
    failed = []
    if step_noise > points.MAX_STEP_NOISE:
        failed.append(f"too noisy to tell: the plain model differs from itself by {step_noise:.0%}")
    for one in found:
        noise = max(step_noise, (one.to_plain.high - one.to_plain.low) / 2)
        if one.planner == "adaptive" and one.to_plain.median > 1 + options.overhead + noise:
            failed.append(f"{one.name}: a step takes {one.to_plain.median:.3f} of the plain model's")
        if (one.peak_bytes or 0) > plain_bytes * (1 + points.PEAK_NOISE):
            failed.append(f"{one.name}: a peak of {one.peak_bytes} bytes, and {plain_bytes} without us")
    return "; ".join(failed) or f"within an overhead of {options.overhead} on every drive", not failed


def enter_host(race: Race, options: argparse.Namespace) -> None:
    """Enter those that have everything in host memory; no planner is asked."""
    common = {"placement": "host", "rematerialize": False, "recompute": False, "io": {}}

    def host(name: str, budget_bytes: int | None, **more: Any) -> Contender:
        return Contender(name, "keep", {**common, "host_budget_bytes": budget_bytes, **more})

    race.enter([
        PLAIN, AGAIN,
        host("host memory of a fixed size", FIXED_HOST_BYTES, nvme_path=None),
        host("host memory, half of what is free", None, nvme_path=None),
        host("the same, and a drive behind it", None),
    ])  # fmt: skip


def judge_host(found: Sequence[Point], options: argparse.Namespace) -> tuple[str, bool]:
    noise = points.verdict(found).step_noise
    return f"noise {noise:.1%}", noise <= points.MAX_STEP_NOISE


@dataclass(frozen=True)
class Kind:
    """One kind of race: models and batches on a CPU, who enters, and who judges, in words and whether all holds.

    Attributes:
        staging_bytes: on a CPU, where it is not that of the largest tensors. Less than what is saved: or all of it
            would wait in staging, and nothing would come from the drive.
    """

    models: Sequence[str]
    batches: Sequence[int]
    enter: Callable[[Race, argparse.Namespace], None]
    judge: Callable[[Sequence[Point], argparse.Namespace], tuple[str, bool]]
    staging_bytes: int = 0


KINDS = {
    "curve": Kind(MODELS, (2, 4, 8), enter_curve, judge_curve, 64 * MIB),
    "drives": Kind(("BERT",), (4,), enter_drives, judge_drives),
    "host": Kind(("GPT",), (4,), enter_host, judge_host),
}


def shapes(options: argparse.Namespace, device: Device) -> list[Shape]:
    """Return the shapes to measure: a step takes some tenths of a second, on two CPU cores as on a GPU."""
    kind = KINDS[options.kind]
    sizes, batches = (384, 6, 256, 2048, 64), kind.batches
    if options.tiny:
        sizes, batches = (64, 2, 64, 256, 32), (4,)
    elif device.is_cuda:
        sizes, batches = (8192, 4, 1024, 32768, 128), [2 * batch for batch in kind.batches]
    models = options.models or kind.models
    return [Shape(model, *sizes, batch) for model in models for batch in options.batches or batches]


def block(options: argparse.Namespace, device: Device, shape: Shape) -> dict[str, Any]:
    """Return the keys of the config block that all contenders have in common."""
    staging_bytes = max(4 * MIB, 2 * shape.largest_tensor_bytes)
    if not options.tiny:
        staging_bytes = 256 * MIB if device.is_cuda else KINDS[options.kind].staging_bytes or staging_bytes
    least = 4096 if options.tiny else MIB if device.is_cuda else 256 << 10
    swap_file_bytes = 2 * max(shape.activation_bytes, staging_bytes)
    io = {"backend": options.backend, "staging_bytes": staging_bytes, "swap_file_bytes": swap_file_bytes}
    return {"nvme_path": str(options.nvme_path), "min_tensor_bytes": least, "recompute": True, "io": io}


def measure(shape: Shape, options: argparse.Namespace, device: Device, ends_s: float) -> dict[str, Any]:
    """Measure one model at one batch size."""
    kind = KINDS[options.kind]
    with Race(Workload.of(shape, device.torch), device, block(options, device, shape)) as race:
        kind.enter(race, options)
        found = points.outcome(race, options.rounds, options.steps, ends_s)
        reports = {name: one.offloader.report() for name, one in race.runners.items() if one.offloader is not None}
    verdict, holds = kind.judge(found.points, options)
    verdict = f"{shape.name}: {verdict}{'' if found.are_equal else '; RESULTS DIFFER'}"
    result = {"name": shape.name, "shape": vars(shape), "rounds": found.rounds, "points": [*map(asdict, found.points)]}
    result["moved"] = {name: [one.host_bytes, one.written_bytes] for name, one in reports.items()}
    return {**result, "equal": found.are_equal, "holds": holds, "verdict": verdict}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = race_parser(
        __doc__, backend="posix", tiny=(False, "tiny shapes: shows that it works"),
        overhead=(0.2, "drives: max_step_overhead"), drive_only=(False, "drives: recompute nothing"),
        settle=(25, "drives: steps before the rounds, for new plans"),
    )  # fmt: skip
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--batches", nargs="+", type=int)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    ends_s = time.monotonic() + options.minutes * 60
    options.out.mkdir(parents=True, exist_ok=True)
    device = Device(options.device)
    results: dict[str, Any] = {**provenance(__file__, argv), "device": device.name, "torch": torch.__version__}
    results["shapes"] = []
    todo = shapes(options, device)
    for number, shape in enumerate(todo):
        now_s = time.monotonic()
        share_s = max(0.0, ends_s - now_s) / (len(todo) - number)
        found = measure(shape, options, device, now_s + share_s)
        results["shapes"].append(found)
        print(found["verdict"], f"({found['rounds']} rounds)", flush=True)
        write_json(options.out / f"{options.kind}.json", results)
        write_whole(options.out / f"{options.kind}.md", markdown(results, options.kind))
    return 0 if all(found["holds"] and found["equal"] for found in results["shapes"]) else 1


def markdown(results: dict[str, Any], kind: str) -> str:
    """Return the tables of the results so far."""
    lines = [f"# Races: {kind}", "", "`{command}`, {date}, {device}, torch {torch}.".format(**results), ""]
    lines += ["Each figure is the median of the rounds, with the middle half of them in brackets; ratios are to the"]
    lines += ["plain model in the same round. Peaks are of one step, less parameters, gradients and batch.", ""]
    lines += [f"- {found['verdict']}" for found in results["shapes"]]
    for found in results["shapes"]:
        lines += ["", f"## {found['name']}", "", *table.lines(found["points"])]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    hold_freed_memory()
    raise SystemExit(main())
