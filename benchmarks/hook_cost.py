"""Microseconds that pack + unpack cost the training thread, per saved tensor, from 10 to 10,000 tensors.

    python benchmarks/hook_cost.py [--rounds 7] [--json FILE]

Three kinds: a parameter (passed through), a small tensor (kept), and an offloaded one of 16 KiB, whose figure contains
its copies to and from staging, and for unpack the time for which the read behind prefetch is waited. The counts take
turns within a round; medians over the rounds, and each count's ratio to that of 10 tensors.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from alternating import rounds_of

from ds_tba.autograd.cache import TensorCache
from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.storage.backends.posix import PosixBackend
from ds_tba.storage.nvme import Lanes, NvmeStore
from ds_tba.storage.staging import StagingRing
from ds_tba.storage.swap_file import SwapFile

COUNTS = (10, 100, 1000, 10_000)
ELEMENTS = 4096  # 16 KiB of float32
STAGING_BYTES = 256 << 20
Maker = Callable[[], torch.Tensor]
KINDS: dict[str, Maker] = {
    "passed through": lambda: torch.nn.Parameter(torch.zeros(ELEMENTS)),
    "kept": lambda: torch.zeros(16),
    "offloaded": lambda: torch.zeros(ELEMENTS),
}


def measure(cache: TensorCache, store: NvmeStore, make: Maker, count: int) -> tuple[float, float]:
    """Microseconds per tensor of pack and of unpack, for ``count`` tensors saved and given back in reverse."""
    tensors = [make() for _ in range(count)]
    with cache.saving():
        # The very hooks that autograd would call, by hand.
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
        started = time.perf_counter()
        held = [pack(tensor) for tensor in tensors]
        packed = time.perf_counter()
    store.wait_for_writes()
    unpacking = time.perf_counter()
    while held:
        unpack(held.pop())
    done = time.perf_counter()
    return (packed - started) / count * 1e6, (done - unpacking) / count * 1e6


def take_turn(cache: TensorCache, store: NvmeStore, make: Maker, count: int) -> tuple[float, float]:
    """Medians of as many measurements as make one of 1000 tensors together, up to 50."""
    gc.collect()
    runs = [measure(cache, store, make, count) for _ in range(max(1, min(50, 1000 // count)))]
    pack, unpack = (statistics.median(column) for column in zip(*runs, strict=True))
    return pack, unpack


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--nvme_path", default=".")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    costs: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=options.nvme_path) as directory:
        backend = PosixBackend()
        ring = StagingRing(CpuAccelerator(), backend, STAGING_BYTES)
        store = NvmeStore([SwapFile(Path(directory), 1 << 30)], backend, ring, Lanes(2, 2), "sampled")
        cache = TensorCache([store], "cpu", ELEMENTS)
        for kind, make in KINDS.items():
            measure(cache, store, make, max(options.counts))  # warm up: pages, extents, the allocator
            turn = partial(take_turn, cache, store, make)
            for found in rounds_of(options.counts, turn, options.rounds):
                for count, cost in found.items():
                    costs[kind, count].append(cost)
        store.close()
    rows = []
    print(f"{'kind':<16}{'tensors':>9}{'pack us':>10}{'unpack us':>11}{'sum us':>9}{'to fewest':>11}")
    for kind in KINDS:
        first = None
        for count in options.counts:
            pack, unpack = (statistics.median(column) for column in zip(*costs[kind, count], strict=True))
            first = first or pack + unpack
            rows.append({"kind": kind, "tensors": count, "pack_us": pack, "unpack_us": unpack})
            print(
                f"{kind:<16}{count:>9}{pack:>10.2f}{unpack:>11.2f}{pack + unpack:>9.2f}{(pack + unpack) / first:>11.2f}"
            )
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "python": sys.version, "rows": rows}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
