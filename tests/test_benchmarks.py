"""The benchmarks run, tiny; what they measure is not asserted."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_suite as suite
import pytest
import runs
from gpu.models import Shape


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


PARTS = ["limits", "tests", "step_time", "curve", "trace"]
# What adaptive writes depends on how fast the drive is: it keeps what would have to wait.
OURS = {"ours host": "host_bytes", "ours nvme": "written_bytes", "ours adaptive": "offloaded_bytes"}


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
    assert files == [table, "results.json", "trace_ours_host.json.gz", "trace_ours_nvme.json.gz"]
    text = (tmp_path / "out" / table).read_text()
    assert re.fullmatch(r"bertgptt5_cpu\d+_\d{6}\.md", table)
    assert text.count("equal bit for bit") == 5 and "not run: no CUDA" in text and "Tiny shapes" in text
    assert "Plot: not drawn: no activation peak was measured." in text


def check_gpu_shape(shape: dict[str, Any]) -> None:
    assert shape["status"] == "done" and shape["losses_equal"] is True
    ran = {name: found for one in shape["rounds"] for name, found in one.items()}
    assert set(ran) >= {"keep", "recompute", *OURS}
    assert shape["not_run"] in ({}, {"deepspeed cpu checkpointing": "not run: no CUDA"})
    losses = ran["keep"]["losses"]
    assert len(set(losses)) == len(losses) == 1 + shape["steps"], "SGD did nothing"
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
