"""Offloads to host memory in a control group that has too little: others are killed, ours finishes, bit-equal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from control_group import available
from support import runs


@pytest.mark.thorough
@pytest.mark.engine
def test_only_ours_finishes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    if why_not := available():
        pytest.skip(why_not)
    size = ("--layers", "64", "--width", "64", "--rows", "16", "--steps", "2", "--nvme_path", str(tmp_path))
    program = str(runs.ROOT / "benchmarks" / "control_group.py")
    environment = {**runs.environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, program, *size], env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed by the kernel") == 3 and "finishes, losses equal" in done.stdout
