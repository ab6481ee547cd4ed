"""Trainings that a signal interrupts, each in a forked process of its own, which tells where it hangs.

    python tests/scripts/signals.py closes DIRECTORY RUNS
    python tests/scripts/signals.py anywhere DIRECTORY FIRST EVERY PLACEMENT

closes: at a random moment a handler closes the offloader and exits, raises or returns. Each run prints its end, how
long that took and whether the signal came in the middle of ds_tba, and the state in its report.
anywhere: a signal handler runs where Python calls a function, or jumps back. So an exception is raised as a function of
ds_tba is called, the FIRST, then each EVERY-th call of a step that follows a plan if there is one; the program catches
it and trains on. The last line counts the runs that went on exactly, that were refused, and that did neither, such as
those in which the exception was lost.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from ds_tba import offloader as offloading
from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.device.accelerator import Accelerator
from ds_tba.errors import StateError
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.agreement import Alone

WIDTH, TOKENS = 64, 64
HUNG_S = 30.0
LATEST_S = 0.15
HANDLER_LIMIT_S = 2.0  # instead of a minute, or the runs would mostly wait
STEPS_TO_A_PLAN = 5
EXACT, LOST, REFUSED, WRONG, UNSEEN, OTHER = 0, 3, 4, 5, 6, 7
ENDS = {EXACT: "exact", LOST: "lost", REFUSED: "refused", WRONG: "wrong"}


class Interrupted(BaseException):
    """Raised by the user's handler, for the training loop to catch, as Ctrl-C and ``sys.exit`` do."""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def forked(run: Callable[[], int]) -> int:
    """Return the exit status of a run in a process of its own, negative for the signal that ended it."""
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(HUNG_S, exit=True)
        sys.exit(run())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def is_in_package(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("ds_tba."):
            return True
        frame = frame.f_back
    return False


def make(directory: Path, watched: nn.Module | None = None, **block: Any) -> ActivationOffloader:
    """Return an offloader with little staging, which makes plans of a model that is given."""
    io = {"backend": "posix", "staging_bytes": 1 << 20, "swap_file_bytes": 64 << 20}
    host_bytes = 4 << 20 if block["placement"] == "host" else 0
    more = {"nvme_path": str(directory), "io": io, "min_tensor_bytes": 4096, "host_budget_bytes": host_bytes}
    offloader = ActivationOffloader(OffloadConfig.model_validate(more | block), AioConfig(), Accelerator())
    if watched is not None:
        offloader.watch(watched, Alone())
    return offloader


def new_model() -> tuple[nn.Module, torch.Tensor]:
    """Return a model and a batch, the same ones each time."""
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))] * 6
    return nn.Sequential(*(layer for block in layers for layer in block)), torch.randn(TOKENS, WIDTH)


def step(model: nn.Module, x: torch.Tensor, offloader: ActivationOffloader | None) -> list[torch.Tensor]:
    with nullcontext() if offloader is None else offloader.saving():
        loss = model(x).square().mean()
    loss.backward()
    if offloader is not None:
        offloader.note_micro_step()
        offloader.note_step()
    found = [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    model.zero_grad(set_to_none=True)
    return found


def closes(directory: Path, report: Path, chance: random.Random) -> int:
    placement, end = chance.choice(("nvme", "nvme", "nvme", "host")), chance.choice(("exit", "return", "raise"))
    (model, x), offloader = new_model(), make(directory, placement=placement, report={"path": str(report)})
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
    signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.001, LATEST_S))
    try:
        while not seen:
            step(model, x, offloader)
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
        say(f"RUN {' '.join(seen)} {report.name}")
    return 0


def each_that_closes(directory: Path, runs: str) -> None:
    offloading.CLOSE_LIMIT_S = HANDLER_LIMIT_S
    for number in range(int(runs)):
        report = directory / f"report{number}.json"
        code = forked(lambda report=report, number=number: closes(directory, report, random.Random(number)))
        say(f"END {number} {code} {json.loads(report.read_text())['state'] if report.exists() else 'no report'}")


class Interrupter:
    """Raises as the function of ds_tba of that number is called."""

    def __init__(self, at: int) -> None:
        self.calls, self._at = 0, at

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and str(frame.f_globals.get("__name__")).startswith("ds_tba."):
            self.calls += 1
            if self.calls == self._at:
                sys.setprofile(None)
                raise Interrupted


def interrupted(directory: Path, placement: str, at: int, expected: list[torch.Tensor]) -> int:
    """How a training goes on after an interrupt at that call."""
    is_planned = placement == "adaptive"
    model, x = new_model()
    offloader = make(directory, model if is_planned else None, placement=placement, max_step_overhead=1000.0)
    for _ in range(STEPS_TO_A_PLAN if is_planned else 1):
        step(model, x, offloader)
    interrupter, is_lost = Interrupter(at), False
    try:
        sys.setprofile(interrupter)
        step(model, x, offloader)
        is_lost = True
    except Interrupted:
        pass
    finally:
        sys.setprofile(None)
    if interrupter.calls < at:
        return UNSEEN
    if is_lost:
        return LOST
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        try:
            found = step(model, x, offloader)
        except StateError as error:
            if "in the middle of ds_tba's bookkeeping" in str(error):
                return REFUSED
            say(str(error))
            return OTHER
        if not all(map(torch.equal, found, expected)):
            return WRONG
    return EXACT


def each_call(directory: Path, first: str, every: str, placement: str) -> None:
    gc.disable()
    expected, ends, at = step(*new_model(), None), Counter[str](), int(first)
    while (code := forked(lambda at=at: os._exit(interrupted(directory, placement, at, expected)))) != UNSEEN:
        end = ENDS.get(code, f"ended with {code}")
        ends[end] += 1
        if code not in (EXACT, REFUSED):
            say(f"CALL {at} {end}")
        at += int(every)
    say(f"ENDS exact {ends.pop('exact', 0)} refused {ends.pop('refused', 0)} others {ends.total()}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # or each fork goes through all that was imported at its end: half of its time
    how, where, *more = sys.argv[1:]
    {"closes": each_that_closes, "anywhere": each_call}[how](Path(where), *more)
