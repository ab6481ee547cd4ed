"""Forwards whose graphs are garbage, with the collector at work in every thread: ends, or is ended as hung.

    python tests/scripts/garbage_in_lanes.py DIRECTORY SECONDS

A graph in a reference cycle is freed wherever the collector happens to run, which with thresholds so low is mostly in
a lane, under the store's lock.
"""

from __future__ import annotations

import faulthandler
import gc
import sys
import time
from collections import Counter
from threading import current_thread

import torch

from ds_tba.config import AioConfig, OffloadConfig, Placement
from ds_tba.core.cache import TensorCache
from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.storage.tiers import Tiers

SIDE = 64
ROWS = (16, 64, 300, 2000)  # storages of 4 KiB to 500 KiB


class Cycle:
    """Holds a graph, and itself."""

    def __init__(self, graph: torch.Tensor, freed_in: Counter[str]) -> None:
        self.graph = graph
        self.freed_in = freed_in
        self.itself = self

    def __del__(self) -> None:
        self.freed_in["lanes" if current_thread().name.startswith("ds_tba-") else "others"] += 1


def forward(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(4):
        y = (y * 1.01).sin()
    return y.sum()


def gradient(x: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(forward(x), x)
    return found


def main(directory: str, seconds: float) -> int:
    faulthandler.dump_traceback_later(seconds + 30, exit=True)
    config = OffloadConfig(
        nvme_path=directory,
        placement="nvme",
        min_tensor_bytes=4096,
        io={"backend": "posix", "staging_bytes": 2 << 20, "swap_file_bytes": 64 << 20},
    )
    tiers = Tiers(config, AioConfig(), CpuAccelerator(), zero_paths=(), rank=0, ranks_on_node=1)
    cache = TensorCache([tiers.by_placement[Placement.NVME]], "cpu", 4096, wait_for_staging=True)
    inputs = [torch.randn(rows, SIDE, requires_grad=True) for rows in ROWS]
    expected = [gradient(x) for x in inputs]
    freed_in: Counter[str] = Counter()
    gc.set_threshold(1, 1, 1)
    until, wrong, number = time.monotonic() + seconds, 0, 0
    while time.monotonic() < until:
        x = inputs[number % len(inputs)]
        gc.disable()
        for _ in range(3):
            with cache.saving():
                Cycle(forward(x), freed_in)
        gc.enable()
        time.sleep(0.002)  # lanes are the ones that make objects now
        with cache.saving():
            loss = forward(x)
        (found,) = torch.autograd.grad(loss, x)
        wrong += not torch.equal(found, expected[number % len(inputs)])
        del loss
        number += 1
    gc.set_threshold(700)
    gc.collect()
    cache.settle()
    tiers.close()
    sys.stdout.write(f"GARBAGE {number} steps, {wrong} of them wrong, {freed_in['lanes']} graphs freed in lanes\n")
    return int(wrong > 0 or cache.live_records > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], float(sys.argv[2])))
