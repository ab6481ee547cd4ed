"""Trainings whose SIGUSR1 handler saves a checkpoint and exits, which is what a scheduler's warning asks for.

    python tests/scripts/exits_on_signal.py DIRECTORY RUNS PLACEMENT

PLACEMENT "none" is the control without an offloader. Each run is a forked process, whose signal comes once, at a random
moment of a step; it prints how the process ended, and whether the checkpoint loads. The last line counts the runs that
trained on, because what the handler raised was lost, and those that ended otherwise.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from small_training import make, new_model, step

TRAINED_ON = 3
STEPS_AFTER_SIGNAL = 5
TOKENS = 64


def train(directory: Path, placement: str, delay: float) -> int:
    """Train until the handler ends it; TRAINED_ON where it has not, some steps after it came."""
    model, x = new_model(), torch.randn(TOKENS, 64)
    offloader = None if placement == "none" else make(directory, model, placement=placement)
    seen: list[int] = []

    def on_signal(*_: object) -> None:
        seen.append(1)
        torch.save(model.state_dict(), directory / "checkpoint.pt")
        sys.exit(0)

    signal.signal(signal.SIGUSR1, on_signal)
    times_s = []
    for _ in range(4):
        started_s = time.perf_counter()
        step(model, x, offloader)
        times_s.append(time.perf_counter() - started_s)
    timer = threading.Timer(delay * min(times_s), os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    left = STEPS_AFTER_SIGNAL
    while left:
        step(model, x, offloader)
        left -= bool(seen)
    return TRAINED_ON


def main(directory: str, runs: str, placement: str) -> int:
    torch.set_num_threads(1)
    chance, trained_on, others = random.Random(0), 0, 0
    for number in range(int(runs)):
        own, delay = Path(directory) / f"{placement}{number}", chance.uniform(0.0, 2.0)
        own.mkdir()
        child = os.fork()
        if child == 0:
            return train(own, placement, delay)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        loads = (own / "checkpoint.pt").exists() and bool(torch.load(own / "checkpoint.pt"))
        end = {0: "exited", TRAINED_ON: "trained on"}.get(code, f"ended with {code}")
        sys.stdout.write(f"RUN {number} {end}{'' if loads else ', without a checkpoint'}\n")
        sys.stdout.flush()
        trained_on += code == TRAINED_ON
        others += not loads or code not in (0, TRAINED_ON)
    sys.stdout.write(f"LOST {trained_on} OTHERS {others}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
