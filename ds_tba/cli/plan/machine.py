"""The machine that will train: a table of GPUs, and the rates of device and drives, each with its source.

A rate is given by the user, measured here, or documented. FLOP/s are what training sustains in matrix products, about
two fifths of what data sheets say; the second figure is for TF32 or FP32 products.
"""

from __future__ import annotations

import re
import time
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ds_tba.cli.format import size
from ds_tba.cli.tune import Measured, probe
from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.errors import BackendUnavailableError, ConfigError
from ds_tba.planner.trace import PathRates
from ds_tba.storage.backends.select import select_backend
from ds_tba.storage.nvme import Lanes


class Gpu(NamedTuple):
    """GiB of memory; TFLOP/s of 16-bit and of 32-bit products; GB/s of its memory, and of each way to the host."""

    memory_gib: float
    tflops: float
    tflops_32_bit: float
    memory_gbps: float
    copy_gbps: float


# Of several with the memory that is asked for, the first is taken.
GPUS = {
    "H100": Gpu(80, 400, 50, 3350, 50),
    "H200": Gpu(141, 400, 50, 4800, 50),
    "B200": Gpu(180, 800, 70, 8000, 50),
    "A100": Gpu(80, 190, 60, 2000, 25),
    "A100-40": Gpu(40, 190, 60, 1555, 25),
    "L40S": Gpu(48, 150, 40, 864, 25),
    "A6000": Gpu(48, 80, 30, 768, 25),
    "RTX 5090": Gpu(32, 120, 50, 1790, 50),
    "RTX 4090": Gpu(24, 100, 45, 1008, 25),
    "RTX 3090": Gpu(24, 45, 20, 936, 25),
    "A10": Gpu(24, 60, 15, 600, 25),
    "V100": Gpu(32, 60, 12, 900, 12),
    "T4": Gpu(16, 25, 6, 320, 12),
}
LAUNCH_S = 10e-6  # of one operation in eager mode, from Python
WRITE_BYTES_PER_S, READ_BYTES_PER_S = 4.2e9, 7.1e9  # of the data sheet of one PCIe 4.0 drive of a data center
# A drive's rate of writes, and of reads, while both run: this part of its rate alone.
CONCURRENT_FRACTION = 0.6


@dataclass(frozen=True, slots=True)
class GivenRates:
    """The rates that the user gave, all per second; None where they are to be found."""

    flops: float | None = None
    memory_bytes: float | None = None
    copy_bytes: float | None = None
    write_bytes: float | None = None
    read_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """The training device: rates per second, seconds to launch an operation, and where the rates are from."""

    flops: float
    memory_bytes: float
    copy_bytes: float
    launch_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Drives:
    """The rates of the drives, and their source."""

    paths: tuple[PathRates, ...]
    source: str


def gpu_of(text: str) -> tuple[str, int]:
    """A GPU of the table and its memory in bytes, from a name ("RTX 4090") or a size ("24GB").

    Raises:
        ConfigError: ``text`` is neither.
    """

    def plain(name: str) -> str:
        return re.sub(r"nvidia|geforce|rtx|[^a-z0-9]", "", name.lower())

    for name, gpu in GPUS.items():
        if plain(name) == plain(text):
            return name, int(gpu.memory_gib * 2**30)
    try:
        memory_bytes = size(f"{text}GiB" if text.replace(".", "").isdigit() else text)  # --gpu-memory 24
    except ArgumentTypeError:
        raise ConfigError(f"--gpu {text!r} must be a size such as 24GB, or one of {', '.join(GPUS)}") from None
    return min(GPUS, key=lambda name: abs(GPUS[name].memory_gib - memory_bytes / 2**30)), memory_bytes


def device_of(device: str, gpu: str, dtype: torch.dtype, given: GivenRates) -> Device:
    """The training device's rates; those not given are measured on a CPU, and the table's for CUDA."""
    found = GPUS[gpu]
    documented = (found.tflops if dtype.itemsize == 2 else found.tflops_32_bit, found.memory_gbps, found.copy_gbps)
    units, source, launch_s = (1e12, 1e9, 1e9), f"of one {gpu}", LAUNCH_S
    rates = [rate * unit for rate, unit in zip(documented, units, strict=True)]
    wanted = (given.flops, given.memory_bytes, given.copy_bytes)
    if device == "cpu":
        launch_s, source = 0.0, "measured here"
        if None in wanted:
            a, block = torch.ones(1024, 1024, dtype=dtype), torch.ones(1 << 26, dtype=torch.uint8)
            copied = torch.empty_like(block)
            copies = block.nbytes / _least_s(lambda: copied.copy_(block))
            rates = [2 * 1024**3 / _least_s(lambda: torch.mm(a, a)), 2 * copies, copies]
    rates = [rate if one is None else one for rate, one in zip(rates, wanted, strict=True)]
    if None not in wanted:
        source = "as given"
    elif any(wanted):
        source += ", but those that were given"
    flops, memory_bytes, copy_bytes = rates
    return Device(flops, memory_bytes, copy_bytes, launch_s, source)


def _least_s(work: Callable[[], object]) -> float:
    """The shortest of a few runs after a first one that does not count."""
    times = []
    for _ in range(4):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def drives_of(given: GivenRates, config: OffloadConfig, aio: AioConfig) -> Drives:
    """As given; else measured, if the config names directories of this machine; else as documented."""
    measured, why = None, "no nvme_path is named"
    if config.nvme_paths and None in (given.write_bytes, given.read_bytes):
        where = ", ".join(config.nvme_paths)
        try:
            measured, why = _measured(config, aio), f"measured here at {where}"
        except (ConfigError, BackendUnavailableError) as error:
            why = f"nvme_path cannot be measured here: {error}"
    if measured is not None and given.write_bytes is None and given.read_bytes is None:
        return Drives(measured.paths, f"{why}, which wrote {measured.written_bytes / 1e6:.0f} MB")
    rates, sources = [], []
    for kind, one, documented in (
        ("write", given.write_bytes, WRITE_BYTES_PER_S), ("read", given.read_bytes, READ_BYTES_PER_S)
    ):  # fmt: skip
        if one is not None:
            rate, source = one, "as given"
        elif measured is not None:
            rate, source = sum(getattr(path, f"{kind}_bytes_per_s") for path in measured.paths), why
        else:
            rate, source = documented, f"of the data sheet of one PCIe 4.0 drive ({why})"
        rates.append(rate)
        sources.append(f"{kind} {source}")
    both = [CONCURRENT_FRACTION * rate for rate in rates]
    return Drives((PathRates(*rates, *both),), f"{', '.join(sources)}; {CONCURRENT_FRACTION} of each while both run")


def _measured(config: OffloadConfig, aio: AioConfig) -> Measured:
    backend = select_backend(config, aio, zero_uses_nvme=False, pinned=False).backend
    lanes = Lanes(config.io.write_lanes, config.io.read_lanes)
    return probe(config.nvme_paths, backend, lanes, config.io.integrity)
