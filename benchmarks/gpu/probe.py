"""Facts of the machine that the code relies on: the card, its links, pinning, the file system and the drive.

Host memory is pinned in place, as ``ds_tba/update/pinning.py`` does it. Without CUDA nothing is pinned and the CPU is
the device: that shows only that this program works. The update's bits and forked children are tested in ``tests/gpu``.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import time
import timeit
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from benchmarking import GIB, first_line, write_json
from curves.device import Device

from ds_tba.device.accelerator import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    advise_huge_pages,
    available_bytes,
    host_view,
    huge_page_memory,
)
from ds_tba.update.pinning import CudaDriver, Registry
from gpu.results import piece_parser

ROUNDS = 5


class Bench:
    """A device, and host memory that it copies from by itself; on a CPU nothing is pinned, and said to be."""

    def __init__(self, kind: str) -> None:
        self.device = Device(kind)
        self.registry = Registry(CudaDriver() if self.device.is_cuda else mock.Mock(), None)

    def host(self, nbytes: int) -> torch.Tensor:
        """Return host memory of whole pages, touched: a copy must not reach beyond what is pinned."""
        memory = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, device="cpu").fill_(1)
        start = -memory.data_ptr() % PAGE_BYTES
        return memory[start : start + nbytes]

    def time(self, act: Callable[[], object]) -> float:
        """Return the seconds until the device is done with it; the median of some, after one that does not count."""

        def acted() -> None:
            act()
            self.device.synchronize()

        acted()
        return statistics.median(timeit.repeat(acted, number=1, repeat=ROUNDS))


def duplex(bench: Bench, nbytes: int) -> dict[str, Any]:
    """Return GB/s out, in and both at once, from memory that was pinned in place and from torch's own."""
    is_cuda, found = bench.device.is_cuda, {}
    streams = [torch.cuda.Stream(), torch.cuda.Stream()] if is_cuda else []
    down, up = (torch.ones(nbytes, dtype=torch.uint8, device=bench.device.torch) for _ in range(2))

    def registered() -> torch.Tensor:
        memory = bench.host(nbytes)
        if not bench.registry.pin(memory):
            raise SystemExit(f"cudaHostRegister refuses {nbytes} bytes: no fact of registered memory can be had")
        return memory

    def of_torch() -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_cuda)

    def copy(host: Sequence[torch.Tensor], ways: Sequence[bool]) -> None:
        for is_out in ways:
            target, data = (host[0], down) if is_out else (up, host[1])
            with torch.cuda.stream(streams[is_out]) if streams else nullcontext():
                target.copy_(data, non_blocking=is_cuda)

    for name, make in {"registered": registered, "torch's": of_torch}.items():
        host = make(), make()
        found[name] = {
            way: len(flags) * nbytes / bench.time(partial(copy, host, flags)) / 1e9
            for way, flags in {"out": (True,), "in": (False,), "both": (True, False)}.items()
        }
        bench.registry.keep([])
        found[name]["both / (out + in)"] = found[name]["both"] / (found[name]["out"] + found[name]["in"])
    return {"bytes": nbytes, "GB/s": found}


def pinning(bench: Bench, nbytes: int) -> dict[str, Any]:
    """Return GB/s of pinning memory that is touched, in small pages and in huge ones, and of touching it."""
    found: dict[str, Any] = {"bytes": nbytes}
    for name, huge in (("small pages", False), ("huge pages", True)):
        memory = torch.empty(nbytes + HUGE_PAGE_BYTES, dtype=torch.uint8, device="cpu")
        if huge:
            advise_huge_pages(memory)
        times_s = [time.perf_counter()]
        memory.fill_(1)
        times_s.append(time.perf_counter())
        is_pinned = bool(bench.registry.pin(memory))
        times_s.append(time.perf_counter())
        bench.registry.keep([])
        times_s.append(time.perf_counter())
        rates = (nbytes / (end_s - began_s) / 1e9 for began_s, end_s in pairwise(times_s))
        found[name] = {"is_pinned": is_pinned, **dict(zip(("touched", "pinned", "unpinned"), rates, strict=True))}
        del memory
    return found


def card() -> dict[str, Any]:
    """Return what driver and kernel say of card and machine, and which names this PyTorch has."""
    import ds_tba

    asked = "name,memory.total,driver_version,pcie.link.gen.current,pcie.link.width.current"
    return {
        "nvidia-smi": _output("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"),
        "MemAvailable GiB": available_bytes() / GIB,
        "memlock": str(resource.getrlimit(resource.RLIMIT_MEMLOCK)),
        "open files": str(resource.getrlimit(resource.RLIMIT_NOFILE)),
        "torch.accelerator.empty_host_cache": hasattr(torch.accelerator, "empty_host_cache"),
        "torch._C._host_emptyCache": hasattr(torch._C, "_host_emptyCache"),
        "ds_tba": ds_tba.__version__,
    }


def drive(directory: Path, nbytes: int) -> dict[str, Any]:
    """Return the file system's kind, whether it takes files without a name, and GB/s past the page cache."""
    found: dict[str, Any] = {"file system": _output("df", "--output=fstype,avail", str(directory))}
    flags = os.O_TMPFILE | os.O_RDWR | os.O_DIRECT
    try:
        fd = os.open(directory, flags)
    except OSError as error:
        return found | {"O_TMPFILE with O_DIRECT": first_line(error)}
    block = huge_page_memory(4 << 20)
    block.random_(255)
    data = host_view(block)
    try:
        for name, move in (("write GB/s", os.pwritev), ("read GB/s", os.preadv)):
            began_s = time.perf_counter()
            for offset in range(0, nbytes, len(data)):
                move(fd, [data], offset)
            found[name] = nbytes / (time.perf_counter() - began_s) / 1e9
    finally:
        os.close(fd)
    return found | {"O_TMPFILE with O_DIRECT": True}


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return first_line(error)
    return " ".join(done.stdout.split())


def main(argv: list[str] | None = None) -> int:
    options = piece_parser(__doc__).parse_args(argv)
    bench = Bench(options.device)
    small = 4 << 20
    found: dict[str, Any] = {"device": bench.device.name}
    facts: dict[str, Callable[[], dict[str, Any]]] = {
        "card": card,
        "drive": lambda: drive(options.nvme_path, small if options.tiny else 2 * GIB),
        "copies": lambda: duplex(bench, small if options.tiny else GIB // 2),
        "pinning": lambda: pinning(bench, small if options.tiny else GIB),
        # Recorded steps look at these for each saved tensor.
        "counts of the allocator": lambda: {"us": 1e6 * bench.time(bench.device.counts)},
    }
    for name, act in facts.items():
        try:
            found[name] = act()
        except (RuntimeError, OSError) as error:  # the other facts are facts all the same
            found[name] = {"failed": first_line(error)}
        write_json(options.result, found)
        print(f"{name}: {found[name]}", flush=True)
    return 1 if any("failed" in one for one in found.values() if isinstance(one, dict)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
