"""Everything that is to be measured on a machine with a GPU, in one command that ends in time and needs no network.

    python benchmarks/gpu_suite.py --nvme_path DIR --out DIR [--minutes 9] [--skip PART] [--tiny] [--device cpu|cuda]

In this order, each part with its share of the time (what one leaves over goes to the next; what does not fit is named
as not run): the machine's own limits; ``pytest -m gpu``; step time and activation peak of BERT, GPT and T5 with each
way to treat activations; throughput against activation peak; traces of one step. Into ``--out`` go ``results.json``,
``bertgptt5_<gpu>_<yyyymm>.md``, ``curve.png``, ``gpu_tests.log`` and ``trace_ours_*.json.gz`` (open them at
https://ui.perfetto.dev). ``--tiny --device cpu`` runs all of it with tiny shapes on any machine.

Needed on the machine: Python 3.10 or newer with torch for its CUDA, numpy, packaging, pytest, hypothesis, pydantic 2.7
and xxhash 4.1; matplotlib for the plot; kvikio and DeepSpeed only for what goes by their names. ds_tba itself is taken
from this repository. Where there is no network, fetch what is missing as wheels on a machine that has one, for the
Python version and platform of the other:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d wheels \\
        pydantic==2.14.3 pydantic-core==2.50.4 annotated-types typing-inspection typing-extensions xxhash==4.1.0

(Each pydantic wants one pydantic-core.) Then there, from the repository's root:

    python3 -m pip install --no-index --no-deps --target /tmp/site wheels/*.whl
    mkdir -p /local_nvme && PYTHONPATH=/tmp/site python3 benchmarks/gpu_suite.py --nvme_path /local_nvme --out results

The exit status is 0 only if every part was done, nothing failed and no loss differed; 4 if time was up in mid-part.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

STARTED_S = time.monotonic()  # importing torch takes its time too
# Read when CUDA's matrix library starts; deterministic algorithms need it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from gpu import gpu_tests, limits, plan, trace, write  # noqa: E402
from gpu.budget import Deadline, NotRunError, Suite  # noqa: E402
from gpu.device import Device, free_host_bytes  # noqa: E402
from gpu.measure import FAILED  # noqa: E402
from gpu.variants import Sizes, Variants  # noqa: E402

LEFT_OUT = "not run: left out (--skip)"
SHARES = {"limits": 0.05, "tests": 0.25, "step_time": 0.40, "curve": 0.24, "trace": 0.06}


def machine(device: Device, nvme_path: Path) -> dict[str, Any]:
    """What it ran on."""
    return {
        "device": device.name,
        "device_memory_bytes": device.total_bytes,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "available_host_bytes": free_host_bytes(),
        "free_disk_bytes": shutil.disk_usage(nvme_path).free,
        "accelerator": type(device.api).__name__ if device.api is not None else "none",
    }


class Output:
    """The directory of results.

    Args:
        options: of the command line.
    """

    def __init__(self, out: Path, device: Device) -> None:
        self.directory = out
        month = datetime.now(timezone.utc).strftime("%Y%m")
        self.table = out / f"bertgptt5_{device.slug}_{month}.md"

    def keep(self, results: dict[str, Any]) -> None:
        """Write what there is so far."""
        results["plot"] = write.plot(results, self.directory / "curve.png")
        text = json.dumps(results, indent=1)
        (self.directory / "results.json").write_text(text, encoding="utf-8")
        self.table.write_text(write.markdown(json.loads(text)), encoding="utf-8")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nvme_path", type=Path, required=True, help="an existing directory on the drive")
    parser.add_argument("--out", type=Path, required=True, help="directory for the results, made if need be")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--skip", action="append", default=[], choices=tuple(SHARES), help="leave a part out")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: shows that the suite works")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--batch", type=int, help="instead of the largest that device and drive allow")
    parser.add_argument("--min_tensor_bytes", type=int, help="as in the config block")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None, started_s: float | None = None) -> int:
    options = parse(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device: --tiny --device cpu shows that the suite works")
        return 2
    if not options.nvme_path.is_dir():
        print(f"--nvme_path {options.nvme_path} is not a directory: make it first")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    device = Device(options.device)
    suite = Suite(options.minutes, Output(options.out, device).keep, started_s)
    suite.results |= {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": " ".join(["python benchmarks/gpu_suite.py", *(sys.argv[1:] if argv is None else argv)]),
        "tiny": options.tiny,
        "machine": machine(device, options.nvme_path),
    }
    try:
        measure(suite, device, options)
    finally:
        suite.end()
    return 0 if good(suite.results, device) else 1


def measure(suite: Suite, device: Device, options: argparse.Namespace) -> None:
    """All parts."""
    nvme_path, out, tiny = options.nvme_path, options.out, options.tiny

    def run(name: str, work: Callable[[dict[str, Any], Deadline], None]) -> dict[str, Any]:
        if name in options.skip:
            return suite.run(name, 0.0, left_out)
        remaining = sum(share for part, share in SHARES.items() if part not in options.skip)
        return suite.run(name, SHARES[name] * sum(SHARES.values()) / (remaining or 1.0), work)

    found = run("limits", lambda part, end: limits.measure(part, end, device, nvme_path, tiny=tiny))
    rate = limits.slowest_drive_rate(found)
    tests = gpu_tests.Tests()
    suite.at_end(tests.end)
    run("tests", lambda part, end: tests.measure(part, end, device, nvme_path, out / "gpu_tests.log"))
    todo = plan.make_plan(device, rate, options.batch, tiny=tiny)
    least = options.min_tensor_bytes or (4096 if tiny else 1 << 20)
    free_disk_bytes = 256 << 20 if tiny else shutil.disk_usage(nvme_path).free
    sizes = Sizes.for_shapes(todo.all, free_host_bytes(), free_disk_bytes, least)
    suite.results["sizes"] = vars(sizes)
    variants = Variants(device, nvme_path, sizes)
    try:
        bench = plan.Bench(todo, variants, device, rate)
        run("step_time", bench.step_time)
        run("curve", bench.curve)
        run("trace", lambda part, end: trace.measure(part, end, todo.steps[0], variants, device, out))
    finally:
        variants.close()


def left_out(part: dict[str, Any], deadline: Deadline) -> None:
    """Instead of a part.

    Raises:
        NotRunError: always.
    """
    raise NotRunError(LEFT_OUT)


def without_tests(name: str, device: Device) -> bool:
    """Whether a part is that of the tests, on a device that has none."""
    return name == "tests" and not device.is_cuda


def good(results: dict[str, Any], device: Device) -> bool:
    """Whether every part was done (those that need a GPU: where there is one) but those left out, nothing failed and
    no loss differed."""
    parts = results["parts"]
    done = all(part["status"] in ("done", LEFT_OUT) or without_tests(name, device) for name, part in parts.items())
    shapes = [shape for name in ("step_time", "curve") for shape in parts[name].get("shapes", {}).values()]
    failed = any(reason.startswith(FAILED) for shape in shapes for reason in shape.get("not_run", {}).values())
    return done and not failed and not any(shape.get("losses_equal") is False for shape in shapes)


if __name__ == "__main__":
    raise SystemExit(main(started_s=STARTED_S))
