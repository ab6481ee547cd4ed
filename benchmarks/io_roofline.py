"""How close the store comes to the drive: fio and each backend in turn, on the same file system, as ratios to fio.

    python benchmarks/io_roofline.py --nvme_path /local_nvme [--rounds 6] [--gib 4] [--json FILE]

The bytes go through the whole store: staging, lanes, sampled integrity. fio (Debian package ``fio``) issues
requests of the same size at the same depth: one synchronous O_DIRECT request in each of as many jobs as there are
lanes, from huge pages. Files are overwritten, not fresh. Every round runs all variants in a new random order; reported
are medians over the rounds of each variant's rate over fio's in the same round, and CPU seconds (user and system) per
GiB.

``BACKEND-nocopy`` leaves out the copy from the tensor into staging: a GPU's copy engine does it, and here the CPU, out
of the memory bandwidth that the drive's transfers need too. It shows what the store costs beside that copy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_tba.config import AioConfig
from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.storage.backends import aio
from ds_tba.storage.backends.base import IoBackend
from ds_tba.storage.backends.posix import PosixBackend
from ds_tba.storage.base import Refusal, Ticket
from ds_tba.storage.nvme import Lanes, NvmeStore
from ds_tba.storage.staging import StagingRing
from ds_tba.storage.swap_file import SwapFile

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")


@dataclass(frozen=True)
class Rate:
    """One direction of one variant in one round."""

    bytes_per_s: float
    cpu_s_per_gib: float


def make_backend(name: str) -> IoBackend:
    return PosixBackend() if name.startswith("posix") else aio.AioBackend(AioConfig(queue_depth=32))


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class StagingFilledElsewhere(StagingRing):
    """Staging without the copy into it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.copies.out = lambda data, target: None  # type: ignore[method-assign]


class StoreVariant:
    """Our store over one backend, kept open over all rounds so that its extents are overwritten."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        backend = make_backend(name)
        make_ring = StagingFilledElsewhere if name.endswith("-nocopy") else StagingRing
        ring = make_ring(CpuAccelerator(), backend, options.staging_mib * MIB)
        file = SwapFile(Path(options.nvme_path), options.gib * GIB)
        self.nvme = NvmeStore([file], backend, ring, Lanes(options.lanes, options.lanes), "sampled")
        self.total = options.gib * GIB

    def run(self, sizes: list[int]) -> dict[int, tuple[Rate, Rate]]:
        """(write, read) for every request size."""
        return {size: self._run_size(size, self.total // len(sizes)) for size in sizes}

    def _run_size(self, size: int, nbytes: int) -> tuple[Rate, Rate]:
        source = torch.arange(size // 8, dtype=torch.int64).view(torch.uint8)
        count = nbytes // size
        cpu, started = cpu_s(), time.perf_counter()
        tickets = [self._put(source) for _ in range(count)]
        self.nvme.wait_for_writes()
        written, cpu_written = time.perf_counter(), cpu_s()
        ahead = 0
        for index, ticket in enumerate(tickets):
            while ahead < count and tickets[ahead].store.prefetch(tickets[ahead]):
                ahead += 1
            ticket.store.get(ticket, torch.device("cpu"))
            ahead = max(ahead, index + 1)
        read, cpu_read = time.perf_counter(), cpu_s()
        for ticket in tickets:
            ticket.store.release(ticket)
        gib = nbytes / GIB
        return (
            Rate(nbytes / (written - started), (cpu_written - cpu) / gib),
            Rate(nbytes / (read - written), (cpu_read - cpu_written) / gib),
        )

    def _put(self, source: torch.Tensor) -> Ticket:
        ticket = self.nvme.put(source, wait=True)
        if isinstance(ticket, Refusal):
            raise SystemExit(f"the store refused {source.numel()} bytes: {ticket.value}")
        return ticket

    def close(self) -> None:
        self.nvme.close()


class FioVariant:
    """fio on a file of the same size in the same directory."""

    def __init__(self, options: argparse.Namespace, huge: bool) -> None:
        self.lanes, self.huge, self.total = options.lanes, huge, options.gib * GIB
        self.directory = Path(tempfile.mkdtemp(prefix="fio-", dir=options.nvme_path))

    def run(self, sizes: list[int]) -> dict[int, tuple[Rate, Rate]]:
        result = {}
        for size in sizes:
            nbytes = self.total // len(sizes)
            result[size] = (self._job("write", size, nbytes), self._job("read", size, nbytes))
        return result

    def _job(self, direction: str, size: int, nbytes: int) -> Rate:
        command = ["fio", "--name=roofline", f"--directory={self.directory}", "--filename_format=file.$jobnum"]
        command += [f"--rw={direction}", f"--bs={size}", f"--size={nbytes // self.lanes}", f"--numjobs={self.lanes}"]
        command += ["--ioengine=psync", "--direct=1", "--overwrite=1", "--group_reporting", "--output-format=json"]
        command += ["--mem=mmaphuge"] if self.huge else ["--iomem_align=2097152"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        moved, runtime_s = job[direction]["io_bytes"], job[direction]["runtime"] / 1000
        cpu_share = (job["usr_cpu"] + job["sys_cpu"]) / 100
        return Rate(moved / runtime_s, cpu_share * runtime_s * self.lanes / (moved / GIB))

    def close(self) -> None:
        shutil.rmtree(self.directory)


@contextmanager
def huge_pages(needed_bytes: int) -> Any:
    """Reserve huge pages for fio where that is allowed; whether it was."""
    before = HUGE_PAGES.read_text()
    pages = -(-needed_bytes // (2 * MIB)) + 8
    try:
        HUGE_PAGES.write_text(str(pages))
    except OSError:
        yield False
        return
    try:
        yield int(HUGE_PAGES.read_text()) >= pages
    finally:
        HUGE_PAGES.write_text(before)


def overall(rates: dict[int, tuple[Rate, Rate]], direction: int) -> float:
    """Bytes per second over all request sizes, which carry equal bytes."""
    return len(rates) / sum(1 / pair[direction].bytes_per_s for pair in rates.values())


def request(size: int) -> str:
    if not size:
        return "all"
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def print_table(rounds: list[dict[str, dict[int, tuple[Rate, Rate]]]], variants: list[str], sizes: list[int]) -> None:
    print("| direction | request | " + " | ".join(f"{name} GB/s" for name in variants) + " | "
          + " | ".join(f"{name} / fio" for name in variants[1:]) + " | "
          + " | ".join(f"{name} CPU s/GiB" for name in variants) + " |")  # fmt: skip
    print("|" + "---|" * (2 + 3 * len(variants) - 1))
    for direction, verb in enumerate(("write", "read")):
        for size in [*sizes, 0]:
            values = defaultdict(list)
            for one in rounds:
                for name in variants:
                    found = one[name]
                    rate = found[size][direction].bytes_per_s if size else overall(found, direction)
                    values[name, "rate"].append(rate)
                    cpu = [found[key][direction].cpu_s_per_gib for key in ([size] if size else sizes)]
                    values[name, "cpu"].append(statistics.mean(cpu))
            ratios = []
            for name in variants[1:]:
                each = [a / b for a, b in zip(values[name, "rate"], values["fio", "rate"], strict=True)]
                ratios.append(f"{statistics.median(each):.2f} [{min(each):.2f}-{max(each):.2f}]")
            cells = [f"{statistics.median(values[name, 'rate']) / 1e9:.2f}" for name in variants] + ratios
            cells += [f"{statistics.median(values[name, 'cpu']):.3f}" for name in variants]
            print(f"| {verb} | {request(size)} | " + " | ".join(cells) + " |")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nvme_path", default=".")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--gib", type=int, default=4, help="bytes per variant and round, in GiB, over all request sizes"
    )
    parser.add_argument("--sizes_kib", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--staging_mib", type=int, default=256)
    names = ["aio", "posix", "aio-nocopy", "posix-nocopy"]
    parser.add_argument("--backends", nargs="+", default=names, choices=names)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if shutil.which("fio") is None:
        print("fio is not installed: apt-get install fio")
        return 2
    sizes = [size * KIB for size in options.sizes_kib]
    variants = ["fio", *options.backends]
    rounds = []
    with huge_pages(max(sizes) * options.lanes) as huge:
        running: dict[str, Any] = {"fio": FioVariant(options, huge)}
        running |= {name: StoreVariant(name, options) for name in options.backends}
        print(f"fio with {'huge pages' if huge else '4 KiB pages: ratios flatter us'}, {os.cpu_count()} cores")
        try:
            for number in range(options.rounds + 1):
                found = {name: running[name].run(sizes) for name in random.sample(variants, len(variants))}
                if number:  # the first round only makes the files
                    rounds.append(found)
        finally:
            for variant in running.values():
                variant.close()
    print_table(rounds, variants, sizes)
    if options.json:
        plain = [{n: {s: [vars(r) for r in pair] for s, pair in f.items()} for n, f in one.items()} for one in rounds]
        options.json.write_text(json.dumps({"huge_pages": huge, "rounds": plain}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
