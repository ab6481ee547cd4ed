"""A small model trained for 2,000 steps with random shapes and faults: losses must be equal, nothing may leak.

    python benchmarks/soak.py --nvme_path DIR [--steps 2000] [--seed 0] [--json FILE]

Two processes train the same steps under DeepSpeed, one without us, and one with the block and with faults injected into
the handles of its backend. Every ``--segment_steps`` steps a new engine begins, with another block (paths, tiers,
bytes, backend, integrity) and ZeRO-0, -1 or -2. Exit status 0 means that every loss and every gradient is equal bit for
bit, that each error of ours which a fault had made due came and no other, and that memory, threads, files, disk and
objects stay flat. Memory is compared with the run without us at the same step: torch and DeepSpeed grow by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from alternating import add_process_options, in_a_process
from benchmarking import GIB, JSON, MIB, markdown_table, parser_of, write_json
from soaking.faults import KINDS
from soaking.verdicts import Verdict, verdicts_of

VARIANTS = ("plain", "offload")
# What can be broken on purpose, to see that the soak finds it: bits of some reads are flipped where there are no
# checksums; memory, files and graphs leak; checksums are not compared.
SABOTAGE = ("flip", "leak", "deaf")
# For flat memory glibc, MKL and oneDNN keep little for each thread and each shape.
SMALL_AND_QUIET = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "DS_TBA_LOG_LEVEL": "ERROR",
    "MALLOC_ARENA_MAX": "2",
    "MKL_DISABLE_FAST_MM": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
}


def run(variant: str, argv: list[str], directory: Path) -> dict[str, Any]:
    """Run one process in a directory of its own, and return its result."""
    started = time.monotonic()
    found = in_a_process(__file__, variant, [*argv, "--directory", str(directory / variant)], **SMALL_AND_QUIET)
    files = [str(path) for path in (directory / variant).rglob("*") if not path.is_dir()]
    nameless: dict[str, Any] = json.loads(json.dumps(found).replace(str(directory), "DIR"))
    return {**nameless, "elapsed_s": time.monotonic() - started, "files_at_end": files}


def table(runs: dict[str, dict[str, Any]], verdicts: list[Verdict]) -> list[str]:
    """Return the summary, as Markdown."""
    offload = runs["offload"]
    sums, errors = offload["sums"], offload["errors"]
    live = [sample for sample in offload["samples"] if sample["segment"] >= 0]
    rows = [
        ("steps, seconds without us, seconds with", f"{len(offload['steps'])}, {runs['plain']['elapsed_s']:.0f}, "
         f"{offload['elapsed_s']:.0f}"),
        ("engines", str(len(offload["segments"]))),
        *((f"fault: {kind}", str(offload["faults"].get(kind, 0))) for kind in KINDS),
        *((f"raised and recovered from: {name}", str(count)) for name, count in sorted(errors.items())),
        *((name, gib(sums.get(f"{name}_bytes", 0)))
          for name in ("offloaded", "written", "read", "forwarded", "kept", "rescued", "host")),
        ("peak memory at rest, without us and with",
         ", ".join(peak(runs[one]["samples"], "memory_bytes") for one in VARIANTS)),
        ("peak disk", peak(live, "disk_bytes")),
    ]  # fmt: skip
    checks = [(one.check, "held" if one.held else "FAILED", one.found) for one in verdicts]
    return [*markdown_table(("what", "value"), rows), "", *markdown_table(("check", "verdict", "found"), checks)]


def peak(samples: list[dict[str, Any]], key: str) -> str:
    """Return the greatest value of a column."""
    return gib(max((sample[key] for sample in samples), default=0))


def gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        nvme_path=(".", "a directory on the drive; a directory of our own is made in it"),
        steps=2000,
        seed=0,
        segment_steps=(100, "steps of each engine"),
        sample_every=(10, "steps between two looks at memory and the rest"),
        json=JSON,
        directory=(Path, argparse.SUPPRESS),
    )
    parser.add_argument("--sabotage", choices=SABOTAGE, default="", help=argparse.SUPPRESS)
    add_process_options(parser, VARIANTS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if options.variant:
        from soaking import worker

        return worker.main(options)
    with tempfile.TemporaryDirectory(prefix="soak-", dir=options.nvme_path) as directory:
        runs = {variant: run(variant, argv, Path(directory).resolve()) for variant in VARIANTS}
    verdicts = verdicts_of(runs["plain"], runs["offload"], options.steps)
    held = all(one.held for one in verdicts)
    print("\n".join(table(runs, verdicts)))
    print(f"\nthe soak {'held' if held else 'FAILED'}")
    for variant, found in runs.items():
        if found["problem"]:
            print(f"\nthe run {variant} ended early:\n{found['problem']}", file=sys.stderr)
    write_json(options.json, record(options, runs, verdicts))
    return 0 if held else 1


def record(options: argparse.Namespace, runs: dict[str, dict[str, Any]], verdicts: list[Verdict]) -> dict[str, Any]:
    """Return the content of the JSON: the last step only, and the samples between two engines."""
    import deepspeed
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__, "deepspeed": deepspeed.__version__}
    short = {}
    for variant, found in runs.items():
        samples = [sample for sample in found["samples"] if sample["segment"] == -1]
        short[variant] = {**found, "steps": found["steps"][-1:], "samples": samples}
    asked = {key: getattr(options, key) for key in ("steps", "seed", "segment_steps", "sample_every")}
    found = {"held": all(one.held for one in verdicts), "verdicts": [vars(one) for one in verdicts], "runs": short}
    versions |= {"kernel": platform.release(), "cpus": str(os.cpu_count())}
    return {"options": asked, "versions": versions, **found}


if __name__ == "__main__":
    raise SystemExit(main())
