"""Facts of the machine that the code relies on: the card, its links, pinning, the file system and the drive.

``--long`` measures the update's bits and forks in place of these. Host memory is pinned in place, as
``ds_tba/update/pinning.py`` does it. Without CUDA nothing is pinned and the CPU is the device: that shows only that
this program works.
"""

from __future__ import annotations

import argparse
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
from ds_tba.update import formula  # noqa: E402
from ds_tba.update.pinning import CudaDriver, Registry  # noqa: E402
from gpu.results import write_whole  # noqa: E402

GIB = 1 << 30
ROUNDS = 5
# Of one call of the device's formula, as chunks of the update have.
CHUNK_ELEMENTS = 1 << 22
TRIAL_ID = -2


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


def bits(bench: Bench, elements: int) -> dict[str, Any]:
    """Count the elements of three updates that differ in a bit from DeepSpeed's CPUAdam.

    Where that does not build, they are compared with the same formula on the host.
    """
    device, generator = bench.device.torch, torch.Generator().manual_seed(7)
    hyper = formula.Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)

    def numbers(magnitude: int) -> torch.Tensor:
        exponents = torch.randn(elements, generator=generator).mul_(2).sub_(magnitude)
        return torch.randn(elements, generator=generator) * 10**exponents

    host = [numbers(0), numbers(3), numbers(6).square_()]
    ours = [one.to(device, copy=True) for one in host]
    op, why = _cpu_adam()
    found: dict[str, Any] = {
        "elements": elements,
        "against": "DeepSpeed's CPUAdam" if op else "the formula on the host",
    }
    if op is None:
        found["why"] = why
    else:
        op.create_adam(TRIAL_ID, hyper.lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay, True, False)
        found["exact, as the update finds out"] = formula.is_exact(op, device, adamw=True)
    powers, scratch = formula.Powers(hyper.beta1, hyper.beta2), torch.empty_like(ours[0])
    for step in (1, 2, 3):
        gradient, scalars = numbers(4), powers.scalars(step, hyper)
        on_device = gradient.to(device, copy=True)
        for start in range(0, elements, CHUNK_ELEMENTS):
            piece = slice(start, start + CHUNK_ELEMENTS)
            formula.update_(*(one[piece] for one in ours), on_device[piece], scratch[piece], scalars)
        if op is None:
            formula.update_(*host, gradient, torch.empty_like(gradient), scalars)
        else:
            formula.HostAdam(op, TRIAL_ID).update(step, hyper, host[0], gradient, host[1], host[2])
    if op is not None:
        op.destroy_adam(TRIAL_ID)
    names = ("parameters", "first moments", "second moments")
    found["differ"] = {
        name: int((one.cpu().view(torch.int32) != other.view(torch.int32)).sum())
        for name, one, other in zip(names, ours, host, strict=True)
    }
    low = ours[0].bfloat16().cpu().view(torch.int16)
    found["differ"]["parameters in bf16"] = int((low != host[0].bfloat16().view(torch.int16)).sum())
    return found


def _cpu_adam() -> tuple[Any, str]:
    """Return DeepSpeed's op, or why there is none."""
    try:
        from deepspeed.ops.op_builder import CPUAdamBuilder

        return CPUAdamBuilder().load(), ""
    except (ImportError, RuntimeError, OSError, ValueError, AttributeError) as error:  # no compiler, another CUDA
        return None, _line(error)


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


def forks(bench: Bench, nbytes: int) -> dict[str, Any]:
    """Return whether the device reads what the host wrote to pinned memory while a forked child is there.

    Memory is pinned as the package does it, and with the child having the pages, too, as DeepSpeed and others leave it.
    """
    found = {"as the package pins": _fork(bench, nbytes, bench.registry)}
    if bench.device.is_cuda:
        found["pages shared with the child"] = _fork(bench, nbytes, _Shared())
    return found


class _Shared:
    """Pins without keeping the pages out of children."""

    def pin(self, memory: torch.Tensor) -> bool:
        self._address = memory.data_ptr()
        runtime: Any = torch.cuda.cudart()
        return int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0

    def keep(self, _: list[torch.Tensor]) -> None:
        torch.cuda.cudart().cudaHostUnregister(self._address)


def _fork(bench: Bench, nbytes: int, pins: Any) -> dict[str, Any]:
    memory = bench.host(nbytes)
    if not pins.pin(memory):
        return {"pinned": False}
    there = torch.zeros(nbytes, dtype=torch.uint8, device=bench.device.torch)
    bench.device.synchronize()
    ready, end = os.pipe(), os.pipe()
    began_s = time.perf_counter()
    child = os.fork()
    if child == 0:  # nothing of torch: a forked child must not use the device
        os.write(ready[1], b"x")
        os.read(end[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    forked_s = time.perf_counter()
    memory.fill_(2)
    written_s = time.perf_counter()
    there.copy_(memory, non_blocking=True)
    bench.device.synchronize()
    old = int((there != 2).sum())
    there.fill_(3)
    memory.copy_(there)
    bench.device.synchronize()
    lost = int((memory != 3).sum())
    os.write(end[1], b"x")
    os.waitpid(child, 0)
    for descriptor in (*ready, *end):
        os.close(descriptor)
    pins.keep([])
    times = {"fork_s": forked_s - began_s, "write_s": written_s - forked_s}
    return {"pinned": True, "old bytes that the device read": old, "bytes that the host missed": lost, **times}


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--nvme_path", type=Path, default=Path())
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args(argv)
    bench = Bench(options.device)
    small = 1 << 22
    found: dict[str, Any] = {"device": bench.device.name}
    quick: dict[str, Callable[[], dict[str, Any]]] = {
        "card": card,
        "drive": lambda: drive(options.nvme_path, small if options.tiny else 2 * GIB),
        "copies": lambda: duplex(bench, small if options.tiny else GIB // 2),
        "pinning": lambda: pinning(bench, small if options.tiny else GIB),
        "counts of the allocator": lambda: counting(bench),
    }
    in_minutes: dict[str, Callable[[], dict[str, Any]]] = {
        "bits": lambda: bits(bench, (1 << 16) if options.tiny else 1 << 24),
        "forks": lambda: forks(bench, small if options.tiny else GIB // 4),
    }
    for name, act in (in_minutes if options.long else quick).items():
        try:
            found[name] = act()
        except (RuntimeError, OSError) as error:  # the other facts are facts all the same
            found[name] = {"failed": _line(error)}
        write_whole(options.result, json.dumps(found))
        print(f"{name}: {found[name]}", flush=True)
    return 1 if any("failed" in one for one in found.values() if isinstance(one, dict)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
