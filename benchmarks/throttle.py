"""Step time and peak on drives of a half, a tenth and a hundredth of this machine's, from the start and in mid-run.

    python benchmarks/throttle.py --nvme_path DIR [--json FILE] [--overhead 0.2] [--drive_only] [--model BERT] [--tiny]

Lanes sleep for as long as a slower drive would have taken. On each drive the model trains under ``adaptive`` with
``max_step_overhead``; one drive becomes slower by ten when it has a plan. After steps enough for new plans all take
turns with the plain model, which runs twice to show the noise. The exit status is 0 if no median step is longer than
what is allowed (and the noise), no peak is above the plain model's, and all results are equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from curves import points, table  # noqa: E402
from curves.allocator import hold_freed_memory  # noqa: E402
from curves.device import Device  # noqa: E402
from curves.models import Shape, Workload  # noqa: E402
from curves.throttled import ThrottledBackend  # noqa: E402
from curves.turns import AGAIN, PLAIN, Contender, Race  # noqa: E402

PARTS = (1, 2, 10, 100)
IN_MID_RUN = 10
MIB = 1 << 20


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nvme_path", type=Path, required=True, help="an existing directory on the drive")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", choices=("BERT", "GPT", "T5"), default="BERT")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--overhead", type=float, default=0.2, help="max_step_overhead")
    parser.add_argument("--drive_only", action="store_true", help="recompute nothing: what is not moved is kept")
    parser.add_argument("--minutes", type=float, default=3.0, help="for the rounds; two are run in any case")
    parser.add_argument("--rounds", type=int, default=15, help="at most")
    parser.add_argument("--steps", type=int, default=3, help="of each turn")
    parser.add_argument("--settle", type=int, default=25, help="steps before the rounds, for new plans")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: shows that it works")
    return parser.parse_args(argv)


def contender(name: str, options: argparse.Namespace, drive: ThrottledBackend) -> Contender:
    """Return adaptive on a drive."""
    limits = {"max_step_overhead": options.overhead, "recompute": not options.drive_only}
    return Contender(name, "adaptive", limits, drive)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all drives."""
    device = Device("cpu")
    sizes = (64, 2, 64, 256, 32) if options.tiny else (384, 6, 256, 2048, 64)
    shape = Shape(options.model, *sizes, options.batch)
    staging_bytes = max(4 * MIB, 2 * shape.largest_tensor_bytes)
    io = {"staging_bytes": staging_bytes, "swap_file_bytes": 2 * max(shape.activation_bytes, staging_bytes)}
    block = {"nvme_path": str(options.nvme_path), "min_tensor_bytes": 4096 if options.tiny else 256 << 10, "io": io}
    drives = {part: ThrottledBackend() for part in PARTS}
    with Race(Workload.of(shape, device.torch), device, block) as race:
        race.enter([PLAIN, AGAIN, contender("drive 1/1", options, drives[1])])
        full = race.runners["drive 1/1"].offloader
        (path,) = full.report().bandwidth if full is not None else ()
        rates = path["write_alone_bytes_per_s"], path["read_alone_bytes_per_s"]
        for part in PARTS[1:]:
            drives[part].throttle(rates[0] / part, rates[1] / part)
            race.enter([contender(f"drive 1/{part}", options, drives[part])])
        later = ThrottledBackend()
        race.enter([contender(f"drive 1/{IN_MID_RUN} in mid-run", options, later)])
        later.throttle(rates[0] / IN_MID_RUN, rates[1] / IN_MID_RUN)
        for runner in race.runners.values():
            runner.turn(options.settle)
        found = points.outcome(race, options.rounds, options.steps, time.monotonic() + options.minutes * 60)
    return {
        "shape": shape.name,
        "overhead": options.overhead,
        "drive_only": options.drive_only,
        "rates": rates,
        "rounds": found.rounds,
        "noise": points.verdict(found.points).step_noise,
        "points": [points.row(one) for one in found.points],
        "equal": found.are_equal,
    }


def failures(found: dict[str, Any]) -> list[str]:
    """Return what does not hold, in words."""
    plain_bytes = found["points"][0]["peak_bytes"]
    failed = [] if found["equal"] else ["losses or gradients differ"]
    if found["noise"] > points.MAX_STEP_NOISE:
        failed.append(f"too noisy to tell: the plain model differs from itself by {found['noise']:.0%}")
    for one in found["points"]:
        noise = max(found["noise"], (one["to_plain"]["high"] - one["to_plain"]["low"]) / 2)
        if one["planner"] == "adaptive" and one["to_plain"]["median"] > 1 + found["overhead"] + noise:
            failed.append(f"{one['name']}: a step takes {one['to_plain']['median']:.3f} of the plain model's")
        if one["peak_bytes"] > plain_bytes * (1 + points.PEAK_NOISE):
            failed.append(f"{one['name']}: a peak of {one['peak_bytes']} bytes, and {plain_bytes} without us")
    return failed


def head(found: dict[str, Any]) -> str:
    """Return the line above the table."""
    write, read = (rate / 1e9 for rate in found["rates"])
    return (
        f"{found['shape']}, max_step_overhead {found['overhead']}{', nothing recomputed' * found['drive_only']}, "
        f"drive {write:.2f} GB/s of writes and {read:.2f} of "
        f"reads, {found['rounds']} rounds, noise {found['noise']:.1%}"
    )


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    found = measure(options)
    print("\n".join([head(found), "", *table.lines(found["points"])]))
    failed = failures(found)
    print("\n".join(failed) or "within what is allowed on every drive")
    if options.json:
        options.json.write_text(json.dumps(found | {"failures": failed}, indent=1), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    hold_freed_memory()
    raise SystemExit(main())
