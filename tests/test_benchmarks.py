"""The benchmarks run, tiny; what they measure is not asserted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import runs


def benchmark(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(runs.ROOT / "benchmarks" / name), *arguments],
        env=runs.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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


def test_io_roofline(tmp_path: Path) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    size = (
        "--gib",
        "1",
        "--sizes_kib",
        "16384",
        "--rounds",
        "1",
        "--backends",
        "posix",
        "posix-nocopy",
        "--staging_mib",
        "64",
    )
    output = benchmark("io_roofline.py", *size, "--nvme_path", str(tmp_path), "--json", str(tmp_path / "json"))
    assert "| write | 16 MiB |" in output and "| read | all |" in output
    (only,) = json.loads((tmp_path / "json").read_text())["rounds"]
    assert all(rate["bytes_per_s"] > 0 for pairs in only.values() for pair in pairs.values() for rate in pair)
    assert [path.name for path in tmp_path.iterdir()] == ["json"]
