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
from contextlib import nullcontext
from types import FrameType

import torch
from closes_on_signal import is_in_package
from torch import nn

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.errors import StateError
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.agreement import Alone
from ds_tba.plan.search import adaptive

HUNG_S = 60.0
WIDTH = 64


class Interrupted(Exception):
    pass


def new_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))] * 6
    return nn.Sequential(*(layer for block in layers for layer in block))


def step(model: nn.Module, x: torch.Tensor, offloader: ActivationOffloader | None) -> list[torch.Tensor]:
    with nullcontext() if offloader is None else offloader.saving():
        loss = model(x).square().mean()
    loss.backward()
    if offloader is not None:
        offloader.note_micro_step()
        offloader.note_step()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def main(directory: str, placement: str, seed: str, rounds: str) -> int:
    torch.set_num_threads(1)
    chance, seen, raised = random.Random(int(seed)), [], 0
    config = OffloadConfig(
        nvme_path=directory,
        placement=placement,
        min_tensor_bytes=4096,
        max_step_overhead=1000.0,
        host_budget_bytes=4 << 20 if placement == "host" else 0,
        io={"backend": "posix", "staging_bytes": 1 << 20, "swap_file_bytes": 64 << 20},
    )
    model, x = new_model(), torch.randn(256, WIDTH)
    expected = step(model, x, None)

    def new_offloader() -> ActivationOffloader:
        offloader = ActivationOffloader(config, AioConfig(), CpuAccelerator())
        if placement == "adaptive":
            offloader.watch(model, Alone(), adaptive)
        return offloader

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
