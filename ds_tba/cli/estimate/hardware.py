"""What the machine that will train can do: as given, as measured here, or as data sheets have it; each with its source.

The documented figures are for one GPU of the H100 class and one PCIe 4.0 drive of a data center.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.device.memory import huge_page_memory
from ds_tba.planner.trace import PathRates, Resources
from ds_tba.profile.copies import COPY_BYTES, measure_copies

# Sustained in training, of a data sheet's 989 (dense, bf16); and of TF32 or FP32 products.
DOCUMENTED_FLOPS_16_BIT_PER_S = 400e12
DOCUMENTED_FLOPS_32_BIT_PER_S = 50e12
DOCUMENTED_MEMORY_BYTES_PER_S = 3.35e12
DOCUMENTED_COPY_BYTES_PER_S = 50e9
DOCUMENTED_WRITE_BYTES_PER_S = 4.2e9
DOCUMENTED_READ_BYTES_PER_S = 7.1e9
# Of its rate alone, what a drive has left for writes and for reads where both run.
BESIDE_PART = 0.6

_TRIES = 3
_PRODUCT_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Figure:
    """A rate per second, and where it is from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Compute:
    """The training device: FLOPs, bytes of its memory, bytes to and from the host; all per second."""

    flops: Figure
    memory: Figure
    copy: Figure


def compute_of(
    device: str,
    dtype: torch.dtype,
    flops_per_s: float | None,
    memory_bytes_per_s: float | None,
    copy_bytes_per_s: float | None,
) -> Compute:
    """The training device's rates; what is None is measured on a CPU, and documented for CUDA."""
    is_cpu = device == "cpu"
    documented = DOCUMENTED_FLOPS_32_BIT_PER_S if dtype.itemsize > 2 else DOCUMENTED_FLOPS_16_BIT_PER_S
    return Compute(
        _figure(flops_per_s, is_cpu, lambda: _measured_flops_per_s(dtype), documented),
        _figure(memory_bytes_per_s, is_cpu, lambda: 2 * _measured_copy_bytes_per_s(), DOCUMENTED_MEMORY_BYTES_PER_S),
        _figure(copy_bytes_per_s, is_cpu, _measured_copy_bytes_per_s, DOCUMENTED_COPY_BYTES_PER_S),
    )


def drive_of(write_bytes_per_s: float | None, read_bytes_per_s: float | None) -> tuple[tuple[PathRates, ...], str]:
    """The rates of all drives together where they were not measured, and where they are from."""
    sources = []
    for what, given in (("write", write_bytes_per_s), ("read", read_bytes_per_s)):
        sources.append(f"{what} {'as given' if given is not None else 'of the data sheet of one PCIe 4.0 drive'}")
    write = DOCUMENTED_WRITE_BYTES_PER_S if write_bytes_per_s is None else write_bytes_per_s
    read = DOCUMENTED_READ_BYTES_PER_S if read_bytes_per_s is None else read_bytes_per_s
    beside = f"{BESIDE_PART} of each while both run"
    return (PathRates(write, read, BESIDE_PART * write, BESIDE_PART * read),), f"{', '.join(sources)}, {beside}"


def resources_of(paths: Sequence[PathRates], compute: Compute, staging_bytes: int, device: str) -> Resources:
    """As a trace wants them."""
    copy = compute.copy.value
    return Resources(tuple(paths), copy, copy, staging_bytes, is_synchronous=device == "cpu")


def _figure(given: float | None, is_cpu: bool, measure: Callable[[], float], documented: float) -> Figure:
    if given is not None:
        return Figure(given, "as given")
    return Figure(measure(), "measured here") if is_cpu else Figure(documented, "as documented for an H100")


def _measured_flops_per_s(dtype: torch.dtype) -> float:
    a = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=dtype)
    return 2.0 * _PRODUCT_SIZE**3 / _least_s(lambda: torch.mm(a, a))


def _measured_copy_bytes_per_s() -> float:
    return measure_copies(CpuAccelerator(), huge_page_memory(COPY_BYTES)).out_bytes_per_s


def _least_s(work: Callable[[], object]) -> float:
    """The least of a few times, the first left out."""
    times = []
    for _ in range(1 + _TRIES):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times[1:])
