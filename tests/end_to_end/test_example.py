"""The example as the README runs it, small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import runs

from ds_tba.storage.backends import aio

DEMO = runs.ROOT / "examples" / "demo.py"
SMALL = ("--steps", "2", "--width", "128", "--depth", "2", "--sequence", "256", "--batch", "8", "--rows", "the block")
pytestmark = pytest.mark.engine


def demo(directory: Path, *arguments: str) -> tuple[int, str]:
    """Its exit status and what it printed. glibc is to give freed memory back, as under ``make demo``."""
    done = subprocess.run(
        [sys.executable, str(DEMO), *arguments],
        env=runs.environment(MALLOC_MMAP_THRESHOLD_=str(1 << 20)), capture_output=True, text=True, cwd=directory,
        timeout=900,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


CONFIGS = sorted(path.name for path in (runs.ROOT / "ds_configs").glob("*.json"))
# The next test has another one.
IN_BRIEF = {"zero3_nvme_params_activations.json"}


@pytest.mark.parametrize(
    "config",
    [pytest.param(one, marks=() if one in IN_BRIEF else pytest.mark.thorough, id=one) for one in CONFIGS],
)
def test_every_shipped_config_trains(tmp_path: Path, config: str) -> None:
    if "nvme_params" in config and not aio.is_built():
        pytest.skip("DeepSpeed's aio op is not built: make aio")
    where = ("--deepspeed_config", str(runs.ROOT / "ds_configs" / config), "--nvme_path", str(tmp_path))
    status, output = demo(tmp_path, *where, *SMALL, "--memory", "0", "--report", str(tmp_path / "report.json"))
    assert status == 0 and output.count("equal bit for bit") == 2, output
    if config == "zero3_nvme_params.json":
        assert not (tmp_path / "report.json").exists()
        return
    report = json.loads((tmp_path / "report.json").read_text())
    if config in ("rematerialize.json", "zero3_interleaved_update.json"):  # without a drive
        assert report["rematerialized_bytes"] > 0 and report["written_bytes"] == 0
    else:
        assert report["written_bytes"] > 0
    assert "full block is" in output and str(tmp_path / "report.html") in output
    assert (tmp_path / "report.html").exists()


def test_the_process_needs_less_memory(tmp_path: Path) -> None:
    size = ("--width", "128", "--depth", "6", "--sequence", "512", "--batch", "16", "--steps", "5")
    limits = ("--activation_budget_bytes", str(32 << 20), "--staging_bytes", str(32 << 20))
    config = json.loads((runs.ROOT / "ds_configs" / "zero2_activations.json").read_text())
    config["bf16"]["enabled"] = False  # in which many processors are ten times as slow
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    where = ("--deepspeed_config", str(tmp_path / "ds_config.json"), "--nvme_path", str(tmp_path), "--backend", "posix")
    rows = ("--rows", "as it is", "the block", "--memory", "0.8")
    status, output = demo(tmp_path, *where, *size, *limits, *rows)
    assert status == 0 and output.count("equal bit for bit") == 2, output
    (died,) = [line for line in output.splitlines() if "no: memory ran out" in line]
    assert "as it is" in died
