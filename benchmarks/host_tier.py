"""Host memory with the drive behind it against host memory alone, where the host has room for all: the step's time.

    python benchmarks/host_tier.py --nvme_path DIR [--minutes 4] [--rounds 60] [--batch 4]

One model in one process: without us, twice (which shows the noise), with host memory of a fixed size, and with what the
machine can spare (``"host_budget_bytes": null``), without a drive and with one behind it. All take turns of two steps,
in a new random order each round. Reported are medians over the rounds of the step's time, and as a ratio to host memory
of a fixed size in the same round. Every step must have the same loss, and the gradients must have the same bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from curves.allocator import hold_freed_memory
from curves.device import Device
from curves.models import Workload
from curves.turns import AGAIN, PLAIN, Contender, Race
from rok import shapes

STEPS_OF_A_TURN = 2
FIXED_BYTES = 4 << 30


def host(name: str, budget_bytes: int | None, **limits: Any) -> Contender:
    """Return a contender that has everything in host memory: no planner is asked."""
    return Contender(name, "keep", {"placement": "host", "host_budget_bytes": budget_bytes, **limits})


FIXED = host("host memory of a fixed size", FIXED_BYTES, nvme_path=None)
CONTENDERS = (
    PLAIN,
    AGAIN,
    FIXED,
    host("host memory that the machine can spare", None, nvme_path=None),
    host("the same, and a drive behind it", None),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nvme_path", required=True, help="an existing directory on the drive")
    parser.add_argument("--minutes", type=float, default=4.0, help="for the rounds; two are run in any case")
    parser.add_argument("--rounds", type=int, default=60, help="at most")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="write the times of every round to this file")
    options = parser.parse_args(argv)
    device = Device(options.device)
    (shape,) = shapes(device, ["GPT"], [options.batch], tiny=False)
    least_bytes = (1 << 20) if device.is_cuda else (256 << 10)
    block = {"nvme_path": options.nvme_path, "min_tensor_bytes": least_bytes, "rematerialize": False}
    with Race(Workload.of(shape, device.torch), device, block) as race:
        race.enter(CONTENDERS)
        taken = race.run(options.rounds, STEPS_OF_A_TURN, time.monotonic() + 60 * options.minutes)
        is_equal = race.proven()[1]
        moved = {name: one.offloader.report() for name, one in race.runners.items() if one.offloader is not None}
    rounds = [{name: statistics.median(step.step_s for step in turn) for name, turn in one.items()} for one in taken]
    print(f"{shape.name} on {device.name}, torch {torch.__version__}, {len(rounds)} rounds")
    print("| way | step s | to host memory of a fixed size | moved to host memory, MB | to the drive, MB |")
    print("|---|---|---|---|---|")
    for name in race.runners:
        ratios = sorted(one[name] / one[FIXED.name] for one in rounds)
        to_host, to_drive = ("", "") if name not in moved else (
            f"{moved[name].host_bytes / 1e6:.0f}", f"{moved[name].written_bytes / 1e6:.0f}"
        )  # fmt: skip
        print(
            f"| {name} | {statistics.median(one[name] for one in rounds):.3f} | {statistics.median(ratios):.3f} "
            f"[{ratios[0]:.2f}-{ratios[-1]:.2f}] | {to_host} | {to_drive} |"
        )
    print(f"losses and gradients equal: {'yes' if is_equal else 'NO'}")
    if options.json:
        options.json.write_text(json.dumps({"shape": vars(shape), "rounds": rounds}, indent=1) + "\n")
    return 0 if is_equal else 1


if __name__ == "__main__":
    hold_freed_memory()
    raise SystemExit(main())
