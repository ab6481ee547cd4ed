"""The rates of the machine that will train, each with its source, and a clock that runs at these rates.

A rate is given by the user, measured here, or documented: for one GPU of the H100 class, and one PCIe 4.0 drive of a
data center.

[Note: The roofline] An operation takes as long as its FLOPs at the rate that matrix products reach, or as its inputs
and outputs at the rate of device memory, whichever is longer. Left out: launching kernels, fusing several into one, and
communication between ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ds_tba.device.accelerator import Copies, CpuAccelerator
from ds_tba.device.memory import huge_page_memory
from ds_tba.planner.trace import PathRates
from ds_tba.storage.staging import COPY_BYTES, measure_copies

# Sustained in training, of a data sheet's 989 TFLOP/s (dense, bf16); the second for TF32 or FP32 products.
DOCUMENTED_FLOPS_16_BIT_PER_S = 400e12
DOCUMENTED_FLOPS_32_BIT_PER_S = 50e12
DOCUMENTED_MEMORY_BYTES_PER_S = 3.35e12
DOCUMENTED_COPY_BYTES_PER_S = 50e9
DOCUMENTED_WRITE_BYTES_PER_S = 4.2e9
DOCUMENTED_READ_BYTES_PER_S = 7.1e9
# A drive's rate of writes, and of reads, while both run: this part of its rate alone.
CONCURRENT_FRACTION = 0.6

_aten = torch.ops.aten
_TRIES = 3
_PRODUCT_SIZE = 1024


@dataclass(frozen=True, slots=True)
class GivenRates:
    """The rates that the user gave, all per second; None where they are to be found."""

    flops: float | None = None
    memory_bytes: float | None = None
    copy_bytes: float | None = None
    write_bytes: float | None = None
    read_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """A rate per second and its source."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Compute:
    """The training device's rates: FLOPs, bytes of its memory, bytes copied to and from the host."""

    flops: Figure
    memory: Figure
    copy: Figure


@dataclass(frozen=True, slots=True)
class Drives:
    """The rates of the drives, their source, and the bytes written to measure them."""

    paths: tuple[PathRates, ...]
    source: str
    written_bytes: int = 0


def compute_of(device: str, dtype: torch.dtype, given: GivenRates) -> Compute:
    """The training device's rates; those not given are measured on a CPU, and documented for CUDA."""
    is_cpu = device == "cpu"
    documented = DOCUMENTED_FLOPS_32_BIT_PER_S if dtype.itemsize > 2 else DOCUMENTED_FLOPS_16_BIT_PER_S
    return Compute(
        _figure(given.flops, is_cpu, lambda: _measured_flops_per_s(dtype), documented),
        _figure(given.memory_bytes, is_cpu, lambda: 2 * _measured_copy_bytes_per_s(), DOCUMENTED_MEMORY_BYTES_PER_S),
        _figure(given.copy_bytes, is_cpu, _measured_copy_bytes_per_s, DOCUMENTED_COPY_BYTES_PER_S),
    )


def drives_of(write_bytes_per_s: float | None, read_bytes_per_s: float | None) -> Drives:
    """All drives as one path, whose rates are given or documented."""
    write = DOCUMENTED_WRITE_BYTES_PER_S if write_bytes_per_s is None else write_bytes_per_s
    read = DOCUMENTED_READ_BYTES_PER_S if read_bytes_per_s is None else read_bytes_per_s
    sources = [
        f"{what} {'as given' if given is not None else 'of the data sheet of one PCIe 4.0 drive'}"
        for what, given in (("write", write_bytes_per_s), ("read", read_bytes_per_s))
    ]
    rates = PathRates(write, read, CONCURRENT_FRACTION * write, CONCURRENT_FRACTION * read)
    return Drives((rates,), f"{', '.join(sources)}, {CONCURRENT_FRACTION} of each while both run")


def _figure(given: float | None, is_cpu: bool, measure: Callable[[], float], documented: float) -> Figure:
    if given is None and is_cpu:
        return Figure(measure(), "measured here")
    return Figure(documented, "as documented for an H100") if given is None else Figure(given, "as given")


def _measured_flops_per_s(dtype: torch.dtype) -> float:
    a = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=dtype)
    return 2.0 * _PRODUCT_SIZE**3 / _least_s(lambda: torch.mm(a, a))


def _measured_copy_bytes_per_s() -> float:
    cpu = CpuAccelerator()
    return measure_copies(cpu, Copies(cpu), huge_page_memory(COPY_BYTES)).out_bytes_per_s


def _least_s(work: Callable[[], object]) -> float:
    """The shortest of a few runs after a first one that does not count."""
    times = []
    for _ in range(1 + _TRIES):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times[1:])


# ---- the clock ------------------------------------------------------------------------------------------------------


class OpClock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The time that the operations run inside would take on the device; see [Note: The roofline].

    Args:
        flops_per_s: rate of matrix products and attention.
        memory_bytes_per_s: rate of device memory.

    Attributes:
        now_s: seconds of all operations so far.
        last_operation: name of the last one, which may have failed.
    """

    observes_only = True  # to the cache: what is saved is as in a run without it

    def __init__(self, flops_per_s: float, memory_bytes_per_s: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_s = 0.0
        self.last_operation = ""
        self._flops_per_s = flops_per_s
        self._memory_bytes_per_s = memory_bytes_per_s

    def mark(self) -> float:
        """The time now, in seconds."""
        return self.now_s

    def elapsed_s(self, earlier: float, later: float) -> float:
        """Seconds between two marks."""
        return later - earlier

    def moving_s(self, nbytes: int) -> float:
        """Seconds that operations take which read and write so many bytes."""
        return nbytes / self._memory_bytes_per_s

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.last_operation = str(func)
        result = func(*args, **(kwargs or {}))
        if not _moves_nothing(func):
            flops_s = _flops(func, args, kwargs or {}, result) / self._flops_per_s
            self.now_s += max(flops_s, _moved_bytes(args, kwargs, result) / self._memory_bytes_per_s)
        return result


def _moves_nothing(func: Any) -> bool:
    """Whether an operation returns a view, or memory that is not initialized."""
    if func._schema.name.startswith(("aten::empty", "aten::new_empty")):
        return True
    aliases = [one.alias_info for one in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _moved_bytes(*values: Any) -> int:
    """Bytes of the tensors among arguments and results, each counted once."""
    tensors = {id(one): one for one in tree_leaves(values) if isinstance(one, torch.Tensor)}
    return sum(one.numel() * one.element_size() for one in tensors.values())


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> float:
    packet = func.overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    special = _UNREGISTERED.get(func._schema.name)
    return special(args, result) if special else 0.0


def _cpu_attention(args: tuple[Any, ...], result: Any) -> float:
    return float(flop_registry[_aten._scaled_dot_product_flash_attention](*args[:3], out_val=result))


def _cpu_attention_backward(args: tuple[Any, ...], result: Any) -> float:
    return float(flop_registry[_aten._scaled_dot_product_flash_attention_backward](*args[:4], out_val=result))


def _grouped_product(args: tuple[Any, ...], result: Any) -> float:
    """Each row of the first tensor is multiplied with one matrix of the second."""
    return 2.0 * float(args[0].numel()) * float(args[1].shape[-1])


# Operations for which torch's registry has no FLOPs.
_UNREGISTERED: Mapping[str, Callable[[tuple[Any, ...], Any], float]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_attention_backward,
    "aten::_grouped_mm": _grouped_product,
}
