"""The machine's own limits: copies over the bus, the drive through the store, matrix products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ds_tba.config import AioConfig
from ds_tba.errors import BackendUnavailableError
from ds_tba.storage.backends.base import IoBackend
from ds_tba.storage.backends.posix import PosixBackend
from ds_tba.storage.base import Refusal, Ticket
from ds_tba.storage.nvme import Lanes, NvmeStore
from ds_tba.storage.staging import StagingRing
from ds_tba.storage.swap_file import SwapFile
from gpu.budget import OUT_OF_TIME, Deadline
from gpu.device import Device

REPEATS = 5
LANES = Lanes(2, 2)


def rates(nbytes: int, seconds: list[float]) -> dict[str, float]:
    """Median, least and greatest bytes per second."""
    found = [nbytes / one for one in seconds]
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def bus(device: Device, nbytes: int) -> dict[str, Any] | str:
    """Copies between pinned and device memory: out, in, and both at once (bytes of both counted)."""
    if not device.is_cuda:
        return "not run: no CUDA"
    host = [torch.empty(nbytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    there = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def out() -> None:
        with torch.cuda.stream(streams[0]):
            host[0].copy_(there[0], non_blocking=True)

    def back() -> None:
        with torch.cuda.stream(streams[1]):
            there[1].copy_(host[1], non_blocking=True)

    def both() -> None:
        out()
        back()

    result: dict[str, Any] = {"bytes_per_copy": nbytes}
    for name, work, moved in (("out", out, nbytes), ("in", back, nbytes), ("both", both, 2 * nbytes)):
        device.time_s(work)
        result[name] = rates(moved, [device.time_s(work) for _ in range(REPEATS)])
    return result


def matrix_product(device: Device, side: int) -> dict[str, Any]:
    """bf16 products of random square matrices, floating-point operations per second."""
    one, other = (torch.randn(side, side, device=device.torch).bfloat16() for _ in range(2))
    count = 10 if device.is_cuda else 1

    def work() -> None:
        for _ in range(count):
            one @ other

    device.time_s(work)
    return {"side": side, "flops_per_s": rates(2 * side**3 * count, [device.time_s(work) for _ in range(REPEATS)])}


def backends(directory: Path, device: Device) -> dict[str, Callable[[], IoBackend]]:
    """What may move bytes here."""

    def aio() -> IoBackend:
        from ds_tba.storage.backends.aio import AioBackend

        return AioBackend(AioConfig())

    def kvikio() -> IoBackend:
        from ds_tba.storage.backends.kvikio import KvikioBackend

        return KvikioBackend(LANES.write + LANES.read, device.kind)

    return {"posix": PosixBackend, "kvikio": kvikio, "aio": aio}


def drive(
    directory: Path, device: Device, make: Callable[[], IoBackend], request_bytes: int, count: int, deadline: Deadline
) -> dict[str, Any] | str:
    """Device memory to the file and back through the store: first into fresh extents, then into the same again.

    Rates are of the wall clock, copies and checksums included, and of the time in which the drive was busy.
    """
    try:
        backend = make()
    except (BackendUnavailableError, ImportError) as error:
        return f"not run: {error}"
    staging_bytes = 4 * request_bytes
    file = SwapFile(directory, max(count * request_bytes, 8 << 20))
    ring = StagingRing(device.accelerator, backend, staging_bytes)
    store = NvmeStore([file], backend, ring, LANES, "sampled")
    source = torch.randint(0, 256, (request_bytes,), dtype=torch.uint8, device=device.torch)
    result: dict[str, Any] = {"request_bytes": request_bytes, "requests": count, "direct": file.direct}
    try:
        for name in ("fresh", "overwritten"):
            found = _one_pass(store, source, count, device, deadline)
            if found is None:
                result[name] = OUT_OF_TIME
                break
            result[name] = found
    finally:
        store.close()
    return result


def _one_pass(
    store: NvmeStore, source: torch.Tensor, count: int, device: Device, deadline: Deadline
) -> dict[str, float] | None:
    busy = [(meter.nbytes, meter.busy_s) for meter in (store.stats.writes, store.stats.reads)]
    started = time.perf_counter()
    tickets: list[Ticket] = []
    for _ in range(count):
        ticket = store.put(source, wait=True) if deadline.has(0) else Refusal.CLOSED
        if isinstance(ticket, Refusal):
            break
        tickets.append(ticket)
    store.wait_for_writes()
    written = time.perf_counter()
    exact, ahead = deadline.has(0), 0
    for index, ticket in enumerate(tickets):
        while ahead < len(tickets) and store.prefetch(tickets[ahead]):  # type: ignore[arg-type]
            ahead += 1
        data = store.get(ticket, device.torch).data  # type: ignore[arg-type]
        if index in (0, len(tickets) - 1):
            exact = exact and torch.equal(data, source)
        ahead = max(ahead, index + 1)
        if not deadline.has(0):
            break
    device.synchronize()
    read = time.perf_counter()
    for ticket in tickets:
        store.release(ticket)  # type: ignore[arg-type]
    if len(tickets) < count or not deadline.has(0):
        return None
    if not exact:
        raise RuntimeError("what came back from the drive is not what was written")
    nbytes = count * source.numel()
    found = {"write_bytes_per_s": nbytes / (written - started), "read_bytes_per_s": nbytes / (read - written)}
    meters = (store.stats.writes, store.stats.reads)
    for name, meter, (moved, busy_s) in zip(("write", "read"), meters, busy, strict=True):
        if meter.busy_s > busy_s:
            found[f"busy_{name}_bytes_per_s"] = (meter.nbytes - moved) / (meter.busy_s - busy_s)
    return found


def measure(part: dict[str, Any], deadline: Deadline, device: Device, nvme_path: Path, *, tiny: bool) -> None:
    """Part 1."""
    part["pcie"] = bus(device, 4 << 20 if tiny else 1 << 30)
    part["matrix_product"] = matrix_product(device, 256 if tiny else 8192)
    device.give_back(pinned=True)
    part["drive"] = {}
    request_bytes, count = (1 << 20, 16) if tiny else (64 << 20, 24)
    with TemporaryDirectory(dir=nvme_path) as directory:
        for name, make in backends(Path(directory), device).items():
            if not deadline.has(0):
                part["drive"][name] = OUT_OF_TIME
                continue
            share = deadline.share(0.6)
            part["drive"][name] = drive(Path(directory), device, make, request_bytes, count, share)
    device.give_back(pinned=True)


def slowest_drive_rate(part: dict[str, Any]) -> float | None:
    """Bytes per second of the slower direction over posix, to foresee a step's time; None if it is not known."""
    found = part.get("drive", {}).get("posix")
    if not isinstance(found, dict):
        return None
    passes = [found[name] for name in ("overwritten", "fresh") if isinstance(found.get(name), dict)]
    return min(passes[0]["write_bytes_per_s"], passes[0]["read_bytes_per_s"]) if passes else None
