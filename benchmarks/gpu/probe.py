"""Facts of the machine that the code relies on: the card, its links, pinning, the file system and the drive.

Host memory is pinned in place, as ``ds_tba/update/pinning.py`` does it. Without CUDA nothing is pinned and the CPU is
the device: that shows only that this program works. The update's bits and forked children are tested in ``tests/gpu``.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402
from curves.device import Device  # noqa: E402

from ds_tba.device.accelerator import available_bytes  # noqa: E402
from ds_tba.device.memory import (  # noqa: E402
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    advise_huge_pages,
    host_view,
    huge_page_memory,
)
from ds_tba.update.pinning import CudaDriver, Registry  # noqa: E402
from gpu.results import piece_parser, write_whole  # noqa: E402

GIB = 1 << 30
ROUNDS = 5


class NoDriver:
    """Pins nothing, on the CPU, and says that it did."""

    def register(self, address: int, nbytes: int) -> bool:
        return True

    def unregister(self, address: int) -> None:
        pass


class Bench:
    """A device, and host memory that it copies from by itself.

    Args:
        kind: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, kind: str) -> None:
        self.device = Device(kind)
        self.registry = Registry(CudaDriver() if self.device.is_cuda else NoDriver(), None)

    def host(self, nbytes: int) -> torch.Tensor:
        """Return host memory of whole pages, touched: a copy must not reach beyond what is pinned."""
        memory = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, device="cpu").fill_(1)
        start = -memory.data_ptr() % PAGE_BYTES
        return memory[start : start + nbytes]

    def time(self, act: Callable[[], object]) -> float:
        """Return the seconds until the device is done with it; the median of some, after one that does not count."""
        found = []
        for _ in range(1 + ROUNDS):
            self.device.synchronize()
            began_s = time.perf_counter()
            act()
            self.device.synchronize()
            found.append(time.perf_counter() - began_s)
        return statistics.median(found[1:])


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

    for name, make in {"registered": registered, "torch's": of_torch}.items():
        to, source = make(), make()

        def copy(*ways: bool, to: torch.Tensor = to, source: torch.Tensor = source) -> None:
            for is_out in ways:
                target, data = (to, down) if is_out else (up, source)
                if not streams:
                    target.copy_(data)
                    continue
                with torch.cuda.stream(streams[is_out]):
                    target.copy_(data, non_blocking=True)

        ways = {"out": (True,), "in": (False,), "both": (True, False)}
        found[name] = {
            way: len(flags) * nbytes / bench.time(lambda flags=flags: copy(*flags)) / 1e9 for way, flags in ways.items()
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
        began_s = time.perf_counter()
        memory.fill_(1)
        touched_s = time.perf_counter()
        is_pinned = bench.registry.pin(memory)
        pinned_s = time.perf_counter()
        bench.registry.keep([])
        undone_s = time.perf_counter()
        rates = {"touched": touched_s - began_s, "pinned": pinned_s - touched_s, "unpinned": undone_s - pinned_s}
        found[name] = {"is_pinned": is_pinned} | {key: nbytes / took_s / 1e9 for key, took_s in rates.items()}
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


def counting(bench: Bench) -> dict[str, Any]:
    """Return what one look at the allocator's counts costs: recorded steps take one for each saved tensor."""
    return {"us": 1e6 * bench.time(bench.device.counts)}


def drive(directory: Path, nbytes: int) -> dict[str, Any]:
    """Return the file system's kind, whether it takes files without a name, and GB/s past the page cache."""
    found: dict[str, Any] = {"file system": _output("df", "--output=fstype,avail", str(directory))}
    flags = os.O_TMPFILE | os.O_RDWR | os.O_DIRECT
    try:
        fd = os.open(directory, flags)
    except OSError as error:
        return found | {"O_TMPFILE with O_DIRECT": _line(error)}
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
        return _line(error)
    return " ".join(done.stdout.split())


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"[:300]


def main(argv: list[str] | None = None) -> int:
    options = piece_parser(__doc__).parse_args(argv)
    bench = Bench(options.device)
    small = 1 << 22
    found: dict[str, Any] = {"device": bench.device.name}
    facts: dict[str, Callable[[], dict[str, Any]]] = {
        "card": card,
        "drive": lambda: drive(options.nvme_path, small if options.tiny else 2 * GIB),
        "copies": lambda: duplex(bench, small if options.tiny else GIB // 2),
        "pinning": lambda: pinning(bench, small if options.tiny else GIB),
        "counts of the allocator": lambda: counting(bench),
    }
    for name, act in facts.items():
        try:
            found[name] = act()
        except (RuntimeError, OSError) as error:  # the other facts are facts all the same
            found[name] = {"failed": _line(error)}
        write_whole(options.result, json.dumps(found))
        print(f"{name}: {found[name]}", flush=True)
    return 1 if any("failed" in one for one in found.values() if isinstance(one, dict)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
