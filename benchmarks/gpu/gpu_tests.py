"""Part 2: the tests that need a GPU, in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpu.budget import Deadline, NotRunError
from gpu.device import Device

ROOT = Path(__file__).resolve().parents[2]
TAIL_CHARACTERS = 4000
MAX_WORKERS = 8  # each has a CUDA context of its own
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error|errors|deselected)")


class Tests:
    """One run of pytest that can be ended from elsewhere."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def measure(self, part: dict[str, Any], deadline: Deadline, device: Device, nvme_path: Path, log: Path) -> None:
        """Run them; what pytest says goes to ``log``, its counts to ``part``."""
        if not device.is_cuda:
            raise NotRunError("not run: no CUDA")
        scratch = nvme_path / ".gpu_suite_tests"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-ra", "--tb=short", "--maxfail=20"]
        command += [
            "-p",
            "no:cacheprovider",
            f"--basetemp={scratch}",
            "tests/gpu/test_gpu.py",
            "tests/gpu/test_gpu_engine.py",
        ]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(max(1, min(MAX_WORKERS, (os.cpu_count() or 1) // 2)))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        with log.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
            )  # fmt: skip
            try:
                part["exit_status"] = self._process.wait(timeout=max(0.1, deadline.left_s))
            except subprocess.TimeoutExpired:
                self.end()
                part["exit_status"] = None
        shutil.rmtree(scratch, ignore_errors=True)
        output = log.read_text(encoding="utf-8", errors="replace")
        part["counts"] = counts(output)
        part["tail"] = output[-TAIL_CHARACTERS:]
        if part["exit_status"] is None:
            raise NotRunError("not finished: out of time")
        if part["exit_status"]:
            raise RuntimeError(f"pytest ended with status {part['exit_status']}: see {log.name}")
        if not part["counts"].get("passed"):
            raise RuntimeError(f"not one test ran: see {log.name}")

    def end(self) -> None:
        """Kill it with everything that it started."""
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def counts(output: str) -> dict[str, int]:
    """The numbers of pytest's last line."""
    lines = [line for line in output.splitlines() if re.search(r" in [\d.]+s", line)]
    return {word: int(number) for number, word in _COUNT.findall(lines[-1])} if lines else {}
