"""The machine that will train: GPUs by name, and the rates of device and drives: given, measured or documented.

FLOP/s are what training sustains in matrix products, about two fifths of what data sheets say.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ds_tba.cli.format import size
from ds_tba.cli.tune import probe
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
CPU = Gpu(0, 0.2, 0.2, 20, 10)
LAUNCH_S = 10e-6  # of one operation in eager mode, from Python
WRITE_BYTES_PER_S, READ_BYTES_PER_S = 4.2e9, 7.1e9  # of the data sheet of one PCIe 4.0 drive of a data center
# A drive's rate of writes, and of reads, while both run: this part of its rate alone.
CONCURRENT_FRACTION = 0.6


class Device(NamedTuple):
    """The training device: rates per second, seconds to launch an operation, and where the rates are from."""

    flops: float
    memory_bytes: float
    copy_bytes: float
    launch_s: float
    source: str


def gpu_of(text: str) -> tuple[str, int]:
    """A GPU of the table and its memory in bytes, from a name ("RTX 4090") or a size ("24GB", in GiB without a unit).

    Raises:
        ConfigError: ``text`` is neither.
    """

    def plain(name: str) -> str:
        return re.sub(r"nvidia|geforce|rtx|[^a-z0-9]", "", name.lower())

    for name, gpu in GPUS.items():
        if plain(name) == plain(text):
            return name, int(gpu.memory_gib * 2**30)
    try:
        memory_bytes = size(f"{text}GiB" if text.replace(".", "").isdigit() else text)
    except ArgumentTypeError:
        raise ConfigError(f"--gpu {text!r} must be a size such as 24GB, or one of {', '.join(GPUS)}") from None
    return min(GPUS, key=lambda name: abs(GPUS[name].memory_gib - memory_bytes / 2**30)), memory_bytes


def device_of(device: str, gpu: str, dtype: torch.dtype, given: Sequence[float | None]) -> Device:
    """The training device, with the table's rates where none are given.

    Args:
        given: the first three of :class:`Device`, where the user gave them.
    """
    found, source = (CPU, "of a small CPU") if device == "cpu" else (GPUS[gpu], f"of one {gpu}")
    flops = found.tflops if dtype.itemsize == 2 else found.tflops_32_bit
    rates = [1e12 * flops, 1e9 * found.memory_gbps, 1e9 * found.copy_gbps]
    if any(given):
        source = f"{source}, but those that were given" if None in given else "as given"
    flops, memory_bytes, copy_bytes = (one or rate for one, rate in zip(given, rates, strict=True))
    return Device(flops, memory_bytes, copy_bytes, 0.0 if device == "cpu" else LAUNCH_S, source)


def drives_of(
    write: float | None, read: float | None, config: OffloadConfig, aio: AioConfig
) -> tuple[tuple[PathRates, ...], str]:
    """Their rates and where these are from: given, else measured if the config names directories that are here."""
    paths: tuple[PathRates, ...] = ()
    source = "of the data sheet of one PCIe 4.0 drive"
    if config.nvme_paths and None in (write, read):
        try:
            backend = select_backend(config, aio, zero_uses_nvme=False, pinned=False).backend
            lanes = Lanes(config.io.write_lanes, config.io.read_lanes)
            paths, written_bytes = probe(config.nvme_paths, backend, lanes, config.io.integrity)
            source = f"measured here at {', '.join(config.nvme_paths)}, which wrote {written_bytes / 1e6:.0f} MB"
        except (ConfigError, BackendUnavailableError) as error:
            source += f" (nvme_path cannot be measured here: {error})"
    if paths and write is None and read is None:
        return paths, source
    given = {"write": write, "read": read}
    documented = {"write": WRITE_BYTES_PER_S, "read": READ_BYTES_PER_S}
    rates = [
        one or sum(getattr(path, f"{kind}_bytes_per_s") for path in paths) or documented[kind]
        for kind, one in given.items()
    ]
    named = " and ".join(kind for kind, one in given.items() if one)
    if named:
        source = f"{named} as given{'' if write and read else f', else {source}'}"
    both = [CONCURRENT_FRACTION * rate for rate in rates]
    return (PathRates(*rates, *both),), f"{source}; {CONCURRENT_FRACTION} of each while both run"
