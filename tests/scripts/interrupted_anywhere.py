"""Steps that an exception interrupts, at one place after the other of ds_tba; what comes next is exact, or refused.

    python tests/scripts/interrupted_anywhere.py DIRECTORY PLACEMENT FIRST EVERY

A signal handler runs where Python calls a function, or jumps back: an exception is raised as the functions of ds_tba
are called, the FIRST, then each EVERY-th call of a step, each time in a forked process of its own. The program catches
it and trains on. Prints how many went on exactly, how many were refused, and each that did neither.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import torch
from small_training import Interrupted, make, new_model, step

from ds_tba.errors import StateError

HUNG_S = 30.0
TOKENS = 64
EXACT, REFUSED, WRONG, UNSEEN, OTHER = 0, 3, 4, 5, 6


class Interrupter:
    """Raises as the function of ds_tba of that number is called; without one it counts."""

    def __init__(self, at: int | None = None) -> None:
        self.calls, self._at = 0, at

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and str(frame.f_globals.get("__name__")).startswith("ds_tba."):
            self.calls += 1
            if self.calls == self._at:
                sys.setprofile(None)
                raise Interrupted


def outcome(directory: Path, placement: str, at: int, expected: list[torch.Tensor]) -> int:
    """How a training goes on after an interrupt at that call."""
    faulthandler.dump_traceback_later(HUNG_S, exit=True)
    model, x = new_model(), torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(0))
    offloader = make(directory, placement=placement)
    step(model, x, offloader)
    model.zero_grad(set_to_none=True)
    interrupter = Interrupter(at)
    try:
        sys.setprofile(interrupter)
        step(model, x, offloader)
    except Interrupted:
        pass
    finally:
        sys.setprofile(None)
    if interrupter.calls < at:
        return UNSEEN
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        try:
            found = step(model, x, offloader)
        except StateError as error:
            if "in the middle of ds_tba's bookkeeping" in str(error):
                return REFUSED
            sys.stdout.write(f"{error}\n")
            sys.stdout.flush()
            return OTHER
        if not all(map(torch.equal, found, expected)):
            return WRONG
    return EXACT


def main(directory: str, placement: str, first: str, every: str) -> int:
    torch.set_num_threads(1)
    gc.disable()
    model, x = new_model(), torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(0))
    expected = step(model, x, None)
    ends: Counter[str] = Counter()
    at = int(first)
    while True:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os._exit(outcome(Path(directory), placement, at, expected))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == UNSEEN:
            break
        end = {EXACT: "exact", REFUSED: "refused", WRONG: "wrong"}.get(code, f"ended with {code}")
        ends[end] += 1
        if code not in (EXACT, REFUSED):
            sys.stdout.write(f"CALL {at} {end}\n")
        at += int(every)
    sys.stdout.write(f"ENDS exact {ends.pop('exact', 0)} refused {ends.pop('refused', 0)} others {ends.total()}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
