"""The pieces of ``benchmarks/gpu_suite.py`` that a run without a GPU does not reach, or not to the end."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
from gpu import gpu_tests, plan, trace, write
from gpu.budget import Deadline, NotRunError, Suite
from gpu.device import Device
from gpu.limits import slowest_drive_rate
from gpu.measure import OUT_OF_MEMORY, Workload, attempt, losses_equal, summary
from gpu.models import Shape, build
from gpu.variants import Sizes, Variants

GIB = 1 << 30
H200: Any = SimpleNamespace(is_cuda=True, total_bytes=139 * GIB)
TINY = Shape("T5", 64, 2, 64, 512, 32, 2)


def test_time_that_is_left_over_goes_to_the_next_part_and_none_may_be_left() -> None:
    kept: list[dict[str, Any]] = []
    suite = Suite(10.0, lambda results: kept.append(json.loads(json.dumps(results))))
    left: list[float] = []
    for number in range(2):
        suite.run(f"part {number}", 0.25, lambda part, deadline: left.append(deadline.left_s))
    assert 100 < left[0] <= 145 and 200 < left[1] <= 290  # of the usable 580 s
    suite.started_s -= 600
    ran: list[int] = []
    part = suite.run("late", 0.5, lambda part, deadline: ran.append(1))
    suite.end()
    assert part["status"] == "not run: out of time" and not ran
    assert len(kept) == 4 and "duration_s" in kept[-1]


def test_a_part_that_fails_keeps_what_it_had_and_the_next_one_runs() -> None:
    def fails(part: dict[str, Any], deadline: Deadline) -> None:
        part["rate"] = 5
        raise ValueError("no such thing")

    suite = Suite(10.0, lambda results: None)
    part = suite.run("one", 0.5, fails)
    assert part["rate"] == 5 and part["status"] == "failed: ValueError: no such thing" and "fails" in part["traceback"]
    assert suite.run("two", 0.5, lambda part, deadline: None)["status"] == "done"
    suite.end()


def test_a_part_that_never_ends_is_cut_and_what_there_is_was_written(tmp_path: Path) -> None:
    program = f"""
import json, pathlib, sys, threading
sys.path[:0] = [{str(runs.ROOT / "benchmarks")!r}, {str(runs.ROOT)!r}]
from gpu.budget import Suite
suite = Suite(0.05, lambda results: pathlib.Path({str(tmp_path / "results")!r}).write_text(json.dumps(results)))
suite.at_end(lambda: pathlib.Path({str(tmp_path / "ended")!r}).touch())
suite.run("first", 0.5, lambda part, deadline: part.update(rate=7))
suite.run("hangs", 0.5, lambda part, deadline: threading.Event().wait())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 4, done.stderr
    results = json.loads((tmp_path / "results").read_text())
    assert results["cut"] and results["parts"]["first"]["rate"] == 7 and (tmp_path / "ended").exists()
    assert results["parts"]["hangs"]["status"] == "not finished: out of time"


def test_the_plan_covers_sizes_and_models_first_and_fits_device_and_drive() -> None:
    todo = plan.make_plan(H200, None, None, tiny=False)
    first = todo.steps[:3]
    assert {(shape.hidden, shape.layers) for shape in first} == {(8192, 4), (12288, 3), (16384, 2)}
    assert {shape.model for shape in first} == {"BERT", "GPT", "T5"} and len({one.name for one in todo.steps}) == 9
    assert all(shape.batch == 16 and shape.sequence == 1024 for shape in todo.steps)
    slow = plan.make_plan(H200, 2e9, None, tiny=False)
    assert all(1 <= shape.batch < 16 and plan.nvme_in_time(shape, 2e9) for shape in slow.steps)
    assert all(shape.batch == 3 for shape in plan.make_plan(H200, 2e9, 3, tiny=False).steps)
    small: Any = SimpleNamespace(total_bytes=40 * GIB)
    assert {one.batch for one in plan.make_plan(small, None, None, tiny=False).steps} <= {1, 2, 4, 8}
    assert [shape.batch for shape in todo.curve] == [4, 8, 16, 32]


def test_a_drive_that_is_too_slow_leaves_out_ours_nvme_only(tmp_path: Path) -> None:
    device = Device("cpu")
    variants = Variants(device, tmp_path, Sizes.for_shapes([TINY], 4 * GIB, 256 << 20, 4096))
    bench = plan.Bench(plan.Plan([], [TINY], 1, 1), variants, device, 1000.0)
    part: dict[str, Any] = {}
    bench.curve(part, Deadline.after(300))
    variants.close()
    found = part["shapes"][TINY.name]
    assert found["not_run"] == {"ours nvme": "not run: the drive needs more than 8 s for a step"}
    assert set(found["summary"]) == {*plan.ROK_VARIANTS} - {"ours nvme"} and found["losses_equal"]
    plans = {variant: row["plan"] for variant, row in found["summary"].items() if row["plan"] is not None}
    assert set(plans) == {"ours adaptive, host", "ours adaptive, budget"}
    assert any(line.startswith("- ours adaptive, host: ") for line in write.plans(found["summary"]))


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_what_the_device_refuses_of_the_kernels_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    tried: list[bool] = []
    step = Workload.step

    def probed(self: Workload, *arguments: Any) -> torch.Tensor:
        tried.append(torch.are_deterministic_algorithms_enabled())
        if len(tried) <= refused:
            raise RuntimeError("no deterministic\n implementation")
        return step(self, *arguments)

    monkeypatch.setattr(Workload, "step", probed)
    part: dict[str, Any] = {}
    device: Any = SimpleNamespace(is_cuda=True, torch=torch.device("cpu"), synchronize=lambda: None)
    with plan.kernels(device, part):
        assert torch.are_deterministic_algorithms_enabled() == (refused == 0)
    assert not torch.are_deterministic_algorithms_enabled() and tried == [True, False, False][: refused + 1]
    assert part["kernels"].startswith(plan.KERNELS[refused][2])
    assert part["kernels"].count("(no deterministic implementation)") == refused


def test_sizes_keep_to_what_the_machine_has() -> None:
    todo = plan.make_plan(H200, None, None, tiny=False)
    sizes = Sizes.for_shapes(todo.all, 120 * GIB, 60 * GIB, 1 << 20)
    assert sizes.host_bytes == 30 * GIB and 2 * sizes.swap_file_bytes < 60 * GIB
    staging = [sizes.staging_bytes(shape) for shape in todo.all]
    assert max(staging) <= GIB
    assert all(one >= min(GIB, 1.5 * shape.largest_tensor_bytes) for one, shape in zip(staging, todo.all, strict=True))


def test_floating_point_operations_are_those_of_the_products() -> None:
    model, _ = build(Shape("GPT", 64, 3, 32, 512, 32, 2), torch.device("cpu"))
    weights, tokens = 3 * 12 * 64 * 64 + 64 * 512, 2 * 32
    assert model.flops == 6 * tokens * weights + 3 * 12 * tokens * 32 * 64


def test_what_a_variant_cannot_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("cpu")
    variants = Variants(device, tmp_path / "missing", Sizes.for_shapes([TINY], 4 * GIB, 256 << 20, 4096))
    workload: Any = SimpleNamespace(shape=TINY, model=None)

    def tried(variant: str, seconds: float = 60) -> str:
        found = attempt(workload, variant, variants, device, Deadline.after(seconds), 1)
        assert isinstance(found, str)
        return found

    assert tried("ours nvme").startswith("not run: ") and "missing" in tried("ours nvme")
    assert tried("deepspeed cpu checkpointing") == "not run: no CUDA"
    assert tried("keep", -1) == "not run: out of time"
    assert tried("keep").startswith("failed: AttributeError")

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("gpu.measure.run", no_memory)
    assert tried("keep") == OUT_OF_MEMORY


def test_losses_that_differ_or_are_no_numbers_are_not_equal() -> None:
    def rounds(*losses: float) -> list[dict[str, Any]]:
        return [{"keep": {"losses": [loss.hex()]}} for loss in losses]

    assert losses_equal(rounds(1.0, 1.0)) is True and losses_equal(rounds(1.0)) is None
    assert losses_equal(rounds(1.0, 1.0000000000000002)) is False
    assert losses_equal(rounds(float("nan"), float("nan"))) is False


def measured(step_s: float, peak_bytes: int) -> dict[str, Any]:
    gauges = dict.fromkeys(("reserved_peak_bytes", "peak_saved_bytes", "peak_saved_bytes_without"))
    return {"step_s": [step_s], "activation_peak_bytes": peak_bytes, "per_step": None, "plan": None, **gauges}


def curve() -> dict[str, Any]:
    found: dict[str, Any] = {"flops_per_step": 10**12, "status": "done", "not_run": {}, "losses_equal": True}
    found |= {"shape": {"batch": 4}, "rounds": [{"recompute": measured(3.0, GIB), "keep": measured(2.0, 4 * GIB)}] * 2}
    found["rounds"].append({"keep": measured(4.0, 4 * GIB), "recompute": measured(5.0, 2 * GIB)})
    return found | {"summary": summary(found)}


def test_ratios_are_to_keep_in_the_same_round() -> None:
    rows = summary(curve())
    assert list(rows) == ["keep", "recompute"]
    assert rows["recompute"]["step_to_keep"] == {"median": 1.5, "min": 1.25, "max": 1.5}
    assert rows["recompute"]["peak_to_keep"] == {"median": 0.25, "min": 0.25, "max": 0.5}
    assert rows["keep"]["flops_per_s"] == 10**12 / 2.0


def test_the_curve_is_drawn_where_peaks_were_measured(tmp_path: Path) -> None:
    results = {"parts": {"curve": {"shapes": {"one": curve()}}}, "machine": {"device": "H200"}}
    assert write.curve_points(results["parts"]["curve"])["keep"] == [(4.0, 0.5, 4)]
    said = write.plot(results, tmp_path / "curve.png")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert said == "not drawn: matplotlib is not installed"
    else:
        assert said == "curve.png" and (tmp_path / said).read_bytes().startswith(b"\x89PNG")


def test_overlap_is_the_time_of_copies_beside_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def event(cat: str, name: str, start: float, end: float) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start}

    events = [
        event("kernel", "gemm", 0, 4e6),
        event("kernel", "gelu", 3e6, 6e6),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 5e6, 8e6),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 9e6),
        event("cpu_op", "aten::mm", 0, 9e6),
        {"ph": "M", "name": "process_name"},
    ]
    assert trace.overlap(events) == {"kernel_s": 6.0, "copy_s": 3.0, "copy_beside_kernel_s": 1.0}
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert trace.described(path, H200)["file"] == path.name
    monkeypatch.setattr(trace, "LARGEST_FILE_BYTES", 10)
    assert trace.described(path, H200)["file"].startswith("not kept") and not path.exists()


def test_the_slower_direction_of_what_was_measured_last_counts() -> None:
    passes: dict[str, Any] = {"fresh": {"write_bytes_per_s": 1.0, "read_bytes_per_s": 2.0}, "overwritten": "not run"}
    assert slowest_drive_rate({"drive": {"posix": passes}}) == 1.0
    passes["overwritten"] = {"write_bytes_per_s": 9.0, "read_bytes_per_s": 4.0}
    assert slowest_drive_rate({"drive": {"posix": passes}}) == 4.0
    assert slowest_drive_rate({}) is None and slowest_drive_rate({"drive": {"posix": "not run"}}) is None


def test_tests_that_all_skip_are_no_success(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("here they run")
    part: dict[str, Any] = {}
    with pytest.raises(RuntimeError, match="not one test ran"):
        gpu_tests.Tests().measure(part, Deadline.after(240), H200, tmp_path, tmp_path / "log")
    assert part["counts"]["skipped"] > 100 and part["exit_status"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_tests_that_take_too_long_are_killed(tmp_path: Path) -> None:
    tests, part = gpu_tests.Tests(), {}
    with pytest.raises(NotRunError, match="out of time"):
        tests.measure(part, Deadline.after(0.2), H200, tmp_path, tmp_path / "log")
    assert part["exit_status"] is None and tests._process is not None and tests._process.returncode == -9


@pytest.mark.engine
def test_deepspeeds_checkpointing_gives_the_same_losses() -> None:
    """Its host memory needs an accelerator; how it is called does not."""
    program = f"""
import sys
sys.path[:0] = [{str(runs.ROOT / "benchmarks")!r}, {str(runs.ROOT)!r}]
from gpu.device import Device
from gpu.measure import Workload
from gpu.models import Shape
from gpu.variants import Way, deepspeed_call, plain
call = deepspeed_call("gloo", in_host_memory=False)
workload = Workload.of(Shape("GPT", 64, 3, 64, 512, 32, 2), Device("cpu"))
losses = []
for one in (plain, call):
    workload.model.reset()
    losses.append([workload.step(Way(call=one)).item() for _ in range(3)])
assert losses[0] == losses[1] and len(set(losses[0])) == 3, losses
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=runs.environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 or runs.EXIT_ABORT in done.stderr, done.stderr
