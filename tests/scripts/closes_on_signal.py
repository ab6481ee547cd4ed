"""Trainings that a signal ends at random moments: its handler closes the offloader and exits, or only closes it.

    python tests/scripts/closes_on_signal.py DIRECTORY RUNS

Each run is a forked process, and prints one line: its end, how long that took, whether the signal came in the middle of
ds_tba, and the state in its report. A run that hangs prints where.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import torch
from small_training import Interrupted, is_in_package, make

from ds_tba import offloader as offloading
from ds_tba.errors import StateError
from ds_tba.offloader import ActivationOffloader

LATEST_S = 0.15
HUNG_S = 20.0
HANDLER_LIMIT_S = 2.0  # instead of a minute, or the runs would mostly wait
ENDS = ("exit", "return", "raise")


def step(offloader: ActivationOffloader, x: torch.Tensor) -> None:
    with offloader.saving():
        y = x
        for _ in range(10):
            y = (y * 1.01).sin()
        loss = y.sum()
    loss.backward()
    offloader.note_step()


def train(directory: Path, report: Path, chance: random.Random) -> None:
    placement, end = chance.choice(("nvme", "nvme", "nvme", "host")), chance.choice(ENDS)
    offloader = make(directory, placement=placement, report={"path": str(report)})
    seen: list[str] = []

    def on_signal(_signum: int, frame: FrameType | None) -> None:
        started_s = time.monotonic()
        offloader.close()
        inside = "inside" if is_in_package(frame) else "outside"
        seen.append(f"{end} {time.monotonic() - started_s:.2f} {inside}")
        if end == "exit":
            sys.exit(0)
        if end == "raise":
            raise Interrupted

    signal.signal(signal.SIGALRM, on_signal)
    x = torch.randn(16, 64, requires_grad=True)
    signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.001, LATEST_S))
    try:
        while not seen:
            step(offloader, x)
    except Interrupted as raised:
        offloader.close()  # while the exception, and with it every frame it passed, is alive
        del raised
    except (StateError, RuntimeError):
        # A handler that returns has closed what the step goes on with. So has one whose exception Python ignored,
        # because it came in the middle of a finalizer.
        if not seen:
            raise
    finally:
        if end != "exit":
            offloader.close()
        sys.stdout.write(f"RUN {' '.join(seen)} {report.name}\n")
        sys.stdout.flush()


def main(directory: str, runs: str) -> int:
    torch.set_num_threads(1)
    offloading.CLOSE_LIMIT_S = HANDLER_LIMIT_S
    for number in range(int(runs)):
        report = Path(directory) / f"report{number}.json"
        child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(HUNG_S, exit=True)
            train(Path(directory), report, random.Random(number))
            return 0
        _, status = os.waitpid(child, 0)
        state = json.loads(report.read_text())["state"] if report.exists() else "no report"
        sys.stdout.write(f"END {number} {os.waitstatus_to_exitcode(status)} {state}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2]))
