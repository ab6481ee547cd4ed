"""A training whose signal handler raises at random moments, which it catches; later steps are exact or refused.

    python tests/scripts/trains_on_after_signal.py DIRECTORY PLACEMENT SEED ROUNDS

Prints how many signals came in the middle of ds_tba, how many anywhere, and how often the next step was refused, so
that a new offloader went on. A run that hangs prints where.
"""

from __future__ import annotations

import faulthandler
import random
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import torch
from small_training import WIDTH, Interrupted, is_in_package, make, new_model, step

from ds_tba.errors import StateError
from ds_tba.offloader import ActivationOffloader

HUNG_S = 60.0


def main(directory: str, placement: str, seed: str, rounds: str) -> int:
    torch.set_num_threads(1)
    chance, seen, raised = random.Random(int(seed)), [], 0
    model, x = new_model(), torch.randn(256, WIDTH)
    expected = step(model, x, None)

    def new_offloader() -> ActivationOffloader:
        watched = model if placement == "adaptive" else None
        return make(Path(directory), watched, placement=placement, max_step_overhead=1000.0)

    offloader, refused = new_offloader(), 0

    def on_signal(_signum: int, frame: FrameType | None) -> None:
        seen.append(is_in_package(frame))
        raise Interrupted

    signal.signal(signal.SIGALRM, on_signal)
    for _ in range(2):  # how long a step takes, on this machine and now
        started_s = time.perf_counter()
        step(model, x, offloader)
        latest_s = time.perf_counter() - started_s
        model.zero_grad(set_to_none=True)
    for number in range(int(rounds)):
        faulthandler.dump_traceback_later(HUNG_S, exit=True)
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0001, latest_s))
                step(model, x, offloader)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            raised += 1
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            try:
                found = step(model, x, offloader)
            except StateError as error:
                if "in the middle of ds_tba's bookkeeping" not in str(error):
                    raise
                refused += 1
                offloader.close()
                offloader = new_offloader()
                continue
            if not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
                sys.stdout.write(f"WRONG after {number + 1} rounds\n")
                return 1
        model.zero_grad(set_to_none=True)
    faulthandler.cancel_dump_traceback_later()
    offloader.close()
    sys.stdout.write(f"EXACT {sum(seen)} {raised} {refused}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
