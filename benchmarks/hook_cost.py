"""Microseconds that pack + unpack cost the training thread, per saved tensor, from 10 to 10,000 tensors.

    python benchmarks/hook_cost.py [--rounds 7] [--device cpu|cuda] [--json FILE]

A parameter is passed through. The other tensors have 16 KiB each. Outputs of an op are kept, without rematerialization
and with it (there is no rule for the op, or there is one but nobody saves an operand). An output is rematerialized: its
figure contains the op itself (SiLU). An output is offloaded: its figure contains the copies to and from staging, and
unpack's contains the wait for the read. Kinds and counts take turns within a round. Printed are medians over the
rounds, each count's ratio to that of 10 tensors, and the ratio to tensors kept without rematerialization.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from alternating import rounds_of
from benchmarking import JSON, markdown_table, parser_of, write_json
from curves.device import Device
from torch.nn import functional

from ds_tba.core.cache import TensorCache
from ds_tba.remat.sites import Sites
from ds_tba.remat.store import RematStore
from ds_tba.storage.backends import PosixBackend
from ds_tba.storage.nvme import Lanes, NvmeStore
from ds_tba.storage.path import SwapFile
from ds_tba.storage.staging import StagingRing

COUNTS = (10, 100, 1000, 10_000)
ELEMENTS = 4096  # 16 KiB of float32
STAGING_BYTES = 256 << 20


class Kind(NamedTuple):
    """One kind of saved tensors: how one is made, in forward, from a parameter, and what may happen to it."""

    make: Callable[[torch.Tensor], torch.Tensor]
    offloads: bool = False
    rematerializes: bool = False


KEPT = "kept"
KINDS = {
    "passed through": Kind(lambda weight: torch.nn.Parameter(weight.detach().clone())),
    "kept, small": Kind(lambda weight: weight.new_zeros(16)),
    # Only the same op could rematerialize its output; nobody saves the operands of a sum; SiLU saves its input itself.
    KEPT: Kind(lambda weight: weight.cumsum(0)),
    "kept, no rule": Kind(lambda weight: weight.cumsum(0), rematerializes=True),
    "kept, refused": Kind(lambda weight: weight.cumsum(0) + weight.cumsum(0), rematerializes=True),
    "rematerialized": Kind(lambda weight: functional.silu(weight.cumsum(0)), rematerializes=True),
    "offloaded": Kind(lambda weight: weight.cumsum(0), offloads=True),  # what has no graph stays
}
Cost = tuple[float, float]


class Meter:
    """Measures one kind, with a cache of its own."""

    def __init__(self, kind: Kind, store: NvmeStore, device: Device) -> None:
        self._kind, self._store, self._device = kind, store, device
        accelerator = device.accelerator if device.is_cuda else None
        tiers = [store] if kind.offloads else []
        self.cache = TensorCache(tiers, device.torch, ELEMENTS, accelerator=accelerator)
        if kind.rematerializes:
            self.cache.rematerialize(RematStore(self.cache, Sites(self.cache, device.accelerator)))
        self._weight = torch.nn.Parameter(torch.randn(ELEMENTS, device=device.torch))
        self.measure(1)  # what is to be made again is proven

    def measure(self, count: int) -> Cost:
        """Return microseconds per tensor of pack and of unpack, for ``count`` tensors unpacked in reverse."""
        held, packing_s = [], 0.0
        with self.cache.saving():
            # The very hooks that autograd would call, by hand.
            pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
            for _ in range(count):
                tensor = self._kind.make(self._weight)  # an operation each, in whose order backward reads ahead
                started = time.perf_counter()
                held.append(pack(tensor))
                packing_s += time.perf_counter() - started
            del tensor  # or backward would get the storage itself
            started = time.perf_counter()
        packing_s += time.perf_counter() - started  # the last operation's tensor leaves when forward is over
        with self._store.lock:
            while self._store.writes:
                self._store.changed.wait(1.0)
        self._device.synchronize()
        unpacking = time.perf_counter()
        while held:
            unpack(held.pop())
        done = time.perf_counter()
        return packing_s / count * 1e6, (done - unpacking) / count * 1e6


def take_turn(meters: dict[str, Meter], turn: tuple[str, int]) -> Cost:
    """Return the medians of measurements of 1000 tensors together, up to 50 measurements."""
    name, count = turn
    gc.collect()
    runs = [meters[name].measure(count) for _ in range(max(1, min(50, 1000 // count)))]
    pack, unpack = (statistics.median(column) for column in zip(*runs, strict=True))
    return pack, unpack


def to_kept(costs: dict[tuple[str, int], list[Cost]], kind: str, count: int) -> float:
    """Return the median, over the rounds, of the ratio to tensors that are kept without rematerialization."""
    ratios = [sum(one) / sum(kept) for one, kept in zip(costs[kind, count], costs[KEPT, count], strict=True)]
    return statistics.median(ratios)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, rounds=7, nvme_path=".", device=("cpu", "cpu or cuda"), json=JSON)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    options = parser.parse_args(argv)
    device = Device(options.device)
    costs: dict[tuple[str, int], list[Cost]] = defaultdict(list)
    turns = [(kind, count) for kind in KINDS for count in options.counts]
    with tempfile.TemporaryDirectory(dir=options.nvme_path) as directory:
        backend = PosixBackend()
        ring = StagingRing(device.accelerator, backend, STAGING_BYTES)
        store = NvmeStore([SwapFile(Path(directory), 1 << 30)], backend, ring, Lanes(2, 2), "sampled")
        meters = {name: Meter(kind, store, device) for name, kind in KINDS.items()}
        for meter in meters.values():
            meter.measure(max(options.counts))  # warm up: pages, extents, the allocator
        for found in rounds_of(turns, partial(take_turn, meters), options.rounds):
            for turn, cost in found.items():
                costs[turn].append(cost)
        store.close()
    kinds = list(KINDS)
    if not meters["rematerialized"].cache.stats.rematerialized_bytes:
        print("nothing was rematerialized: this PyTorch does not show what its graph holds")
        kinds.remove("rematerialized")
    rows, cells = [], []
    for kind in kinds:
        first = None
        for count in options.counts:
            pack, unpack = (statistics.median(column) for column in zip(*costs[kind, count], strict=True))
            first, ratio = first or pack + unpack, to_kept(costs, kind, count)
            rows.append({"kind": kind, "tensors": count, "pack_us": pack, "unpack_us": unpack, "to_kept": ratio})
            figures = (pack, unpack, pack + unpack, (pack + unpack) / first, ratio)
            cells.append((kind, count, *(f"{one:.2f}" for one in figures)))
    columns = ("saved tensors", "how many", "pack us", "unpack us", "sum us", "to fewest", "to kept")
    print("\n".join(markdown_table(columns, cells)))
    write_json(options.json, {"torch": torch.__version__, "python": sys.version, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
