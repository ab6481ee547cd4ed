"""The benchmarks run, tiny; what they measure is not asserted, except that the soak holds, and sees what is broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gpu_suite as suite
import pytest
import runs
from gpu.measure import WARM_UP_STEPS
from gpu.models import Shape
from soaking.meters import disk_bytes, slope
from soaking.verdicts import memory

MIB = 1 << 20


def benchmark(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(runs.ROOT / "benchmarks" / name), *arguments],
        env=runs.environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def soak(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of a short soak, which leaves nothing behind but that JSON."""
    target = tmp_path / "json"
    size = ("--steps", "25", "--segment_steps", "5", "--sample_every", "5")
    command = [sys.executable, str(runs.ROOT / "benchmarks" / "soak.py"), *size, *arguments]
    done = subprocess.run(
        [*command, "--nvme_path", str(tmp_path), "--json", str(target)],
        env=runs.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert target.exists(), done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["json"]
    return done.returncode, json.loads(target.read_text())


def failed(result: dict[str, Any]) -> set[str]:
    return {one["check"] for one in result["verdicts"] if not one["held"]}


@pytest.mark.engine
def test_soak(tmp_path: Path) -> None:
    status, result = soak(tmp_path)
    assert not failed(result), [one for one in result["verdicts"] if not one["held"]]
    assert status == 0 and result["held"]
    offload = result["runs"]["offload"]
    assert offload["sums"]["written_bytes"] and offload["faults"] and not result["runs"]["plain"]["sums"]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("sabotage", "checks"),
    [
        ("flip", {"losses, gradients, parameters equal"}),
        ("deaf", {"all steps done, errors as due"}),
        (
            "leak",
            {
                "memory at rest",
                "open files at rest",
                "objects of ours at rest",
                "records, staging and extents given back between steps",
            },
        ),
    ],
)
def test_a_broken_soak_fails(tmp_path: Path, sabotage: str, checks: set[str]) -> None:
    status, result = soak(tmp_path, "--sabotage", sabotage)
    assert status == 1 and not result["held"]
    assert checks <= failed(result)


def test_a_slope_is_that_within_the_groups() -> None:
    assert slope([(0, 5.0, "a"), (1, 7.0, "a"), (2, 9.0, "a"), (10, 1.0, "b"), (12, 5.0, "b")]) == pytest.approx(2.0)
    assert slope([(3, 1.0, "a")]) == 0.0


@pytest.mark.parametrize(("mib_per_step", "held"), [(0.0, True), (0.01, True), (0.03, False)])
def test_memory_is_held_against_the_run_without_us(mib_per_step: float, held: bool) -> None:
    def samples(growth: float) -> dict[str, Any]:
        steps = range(100, 2001, 100)
        return {"samples": [{"step": step, "segment": -1, "memory_bytes": int(growth * step)} for step in steps]}

    plain = samples(0.02 * MIB)
    verdict = memory("memory at rest", plain, samples((0.02 + mib_per_step) * MIB), 2000, at_rest=True)
    assert verdict.held == held, verdict.found
    assert not memory("memory at rest", plain, {"samples": []}, 2000, at_rest=True).held


def test_files_without_a_name_count_as_disk(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with tempfile.TemporaryFile(dir=tmp_path / "in") as file:
        os.posix_fallocate(file.fileno(), 0, MIB)
        assert disk_bytes(tmp_path / "in") == MIB
        assert disk_bytes(tmp_path / "i") == 0
    assert disk_bytes(tmp_path / "in") == 0


def test_hook_cost(tmp_path: Path) -> None:
    arguments = (
        "--rounds",
        "1",
        "--counts",
        "10",
        "50",
        "--nvme_path",
        str(tmp_path),
        "--json",
        str(tmp_path / "json"),
    )
    output = benchmark("hook_cost.py", *arguments)
    rows = json.loads((tmp_path / "json").read_text())["rows"]
    assert [(row["kind"], row["tensors"]) for row in rows] == [
        (kind, count) for kind in ("passed through", "kept", "offloaded") for count in (10, 50)
    ]
    assert output.count("offloaded") == 2 and all(row["pack_us"] > 0 for row in rows)


def test_planner_scale(tmp_path: Path) -> None:
    small = ("--rounds", "1", "--counts", "1000", "--models", "Granite-8B")
    output = benchmark("planner_scale.py", *small, "--json", str(tmp_path / "json"))
    found = json.loads((tmp_path / "json").read_text())
    assert [row["planner"] for row in found["planning_times"]] == ["recompute", "tba", "teraio", "adaptive"] * 2
    assert [row["gb_per_s"] for row in found["fractions"]] == [8, 16, 32] * 2
    assert output.count("| Granite-8B |") == 6
    for row in found["fractions"]:
        assert row["adaptive"]["peak_part"] <= 0.25 and 0 < row["adaptive"]["of_ideal"] <= 1


@pytest.mark.engine
def test_step_time(tmp_path: Path) -> None:
    size = ("--width", "64", "--depth", "2", "--sequence", "128", "--batch", "2")
    short = ("--rounds", "1", "--steps", "1", "--warmup", "1", "--staging_mib", "16", "--nvme_path", str(tmp_path))
    output = benchmark("step_time.py", *size, *short, "--json", str(tmp_path / "json"))
    assert "losses of all variants and rounds equal: yes" in output
    assert [line.split("|")[1].strip() for line in output.splitlines() if line.startswith("| ")][1:] == [
        "keep", "nvme", "recompute", "save_on_cpu",
    ]  # fmt: skip
    (only,) = json.loads((tmp_path / "json").read_text())["rounds"]
    assert only["nvme"]["report"]["steps"] == 2


PARTS = ["limits", "tests", "step_time", "curve", "trace"]
# What adaptive writes depends on how fast the drive is: it keeps what would have to wait.
OURS = {"ours host": "host_bytes", "ours nvme": "written_bytes"}
PLANNED = {"ours adaptive", "ours adaptive, host", "ours adaptive, budget"}


def test_gpu_suite(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    options = ("--tiny", "--device", "cpu", "--minutes", "6")
    benchmark("gpu_suite.py", *options, "--nvme_path", str(tmp_path / "nvme"), "--out", str(tmp_path / "out"))
    assert list((tmp_path / "nvme").iterdir()) == []
    parts = json.loads((tmp_path / "out" / "results.json").read_text())["parts"]
    assert list(parts) == PARTS
    assert [parts[name]["status"] for name in PARTS] == ["done", "not run: no CUDA", "done", "done", "done"]
    assert parts["limits"]["pcie"] == "not run: no CUDA"
    rates = parts["limits"]["drive"]["posix"]
    assert all(rate > 0 for name in ("fresh", "overwritten") for rate in rates[name].values())
    shapes = [shape for name in ("step_time", "curve") for shape in parts[name]["shapes"].values()]
    assert [shape["shape"]["model"] for shape in shapes] == ["GPT", "BERT", "T5", "BERT", "BERT"]
    for shape in shapes:
        check_gpu_shape(shape)
    assert [len(shape["rounds"]) for shape in shapes] == [2, 2, 2, 1, 1]
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    (table,) = [name for name in files if name.endswith(".md")]
    assert files == [table, "results.json", "trace_ours_adaptive_host.json.gz", "trace_ours_host.json.gz"]
    text = (tmp_path / "out" / table).read_text()
    assert re.fullmatch(r"bertgptt5_cpu\d+_\d{6}\.md", table)
    assert text.count("equal bit for bit") == 5 and "not run: no CUDA" in text and "Tiny shapes" in text
    assert "Plot: not drawn: no activation peak was measured." in text


def check_gpu_shape(shape: dict[str, Any]) -> None:
    assert shape["status"] == "done" and shape["losses_equal"] is True
    ran = {name: found for one in shape["rounds"] for name, found in one.items()}
    assert set(ran) >= {"keep", "recompute", *OURS}
    assert all(row["plan"] is not None for name, row in shape["summary"].items() if name in PLANNED)
    assert shape["not_run"] in ({}, {"deepspeed cpu checkpointing": "not run: no CUDA"})
    losses = ran["keep"]["losses"]
    assert len(set(losses)) == len(losses) == WARM_UP_STEPS + shape["steps"], "SGD did nothing"
    estimate = Shape(**shape["shape"]).activation_bytes
    for name, row in shape["summary"].items():
        assert row["step_s"]["median"] > 0 and row["flops_per_s"] > 0
        assert row["activation_peak_bytes"] is None, "nobody counts the CPU's memory"
        if name in OURS:
            assert row["per_step"][OURS[name]] > 0
            assert row["peak_saved_bytes"]["median"] < row["peak_saved_bytes_without"]["median"] < estimate
            assert row["peak_saved_bytes_without"]["median"] > 0.4 * estimate
    assert shape["summary"]["ours host"]["per_step"]["host_bytes"] > 0.4 * estimate


def test_gpu_suite_says_what_it_had_no_time_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "SHARES", dict.fromkeys(PARTS, 0.0) | {"limits": 1e-4})  # 58 ms
    (tmp_path / "nvme").mkdir()
    options = ["--tiny", "--device", "cpu", "--nvme_path", str(tmp_path / "nvme"), "--out", str(tmp_path / "out")]
    assert suite.main([*options, "--minutes", "10"]) == 1
    parts = json.loads((tmp_path / "out" / "results.json").read_text())["parts"]
    assert parts["limits"]["drive"] == dict.fromkeys(("posix", "kvikio", "aio"), "not run: out of time")
    assert [parts[name]["status"] for name in PARTS[1:]] == ["not run: out of time"] * 4
    text = next((tmp_path / "out").glob("*.md")).read_text()
    assert all(f"| {name} | not run: out of time |" in text for name in PARTS[1:])


def test_gpu_suite_leaves_out_what_it_is_told_to(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    options = ["--tiny", "--device", "cpu", "--nvme_path", str(tmp_path / "nvme"), "--out", str(tmp_path / "out")]
    for name in PARTS[2:]:
        options += ["--skip", name]
    assert suite.main([*options, "--minutes", "10"]) == 0
    parts = json.loads((tmp_path / "out" / "results.json").read_text())["parts"]
    assert [parts[name]["status"] for name in PARTS] == ["done", "not run: no CUDA", *[suite.LEFT_OUT] * 3]
