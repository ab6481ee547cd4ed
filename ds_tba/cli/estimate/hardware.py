"""What the machine that will train can do: as given, as measured here, or as data sheets have it; each with its source.

The documented figures are for one GPU of the H100 class and one PCIe 4.0 drive of a data center.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ds_tba.cli.estimate.subject import Training
from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.device.memory import huge_page_memory
from ds_tba.planner.trace import PathRates, Resources
from ds_tba.storage.staging import COPY_BYTES, measure_copies

# Sustained in training, of a data sheet's 989 (dense, bf16); and of TF32 or FP32 products.
DOCUMENTED_FLOPS_16_BIT_PER_S = 400e12
DOCUMENTED_FLOPS_32_BIT_PER_S = 50e12
DOCUMENTED_MEMORY_BYTES_PER_S = 3.35e12
DOCUMENTED_COPY_BYTES_PER_S = 50e9
DOCUMENTED_WRITE_BYTES_PER_S = 4.2e9
DOCUMENTED_READ_BYTES_PER_S = 7.1e9
# Of its rate alone, what a drive has left for writes and for reads where both run.
BESIDE_FRACTION = 0.6

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
    beside = f"{BESIDE_FRACTION} of each while both run"
    return (PathRates(write, read, BESIDE_FRACTION * write, BESIDE_FRACTION * read),), f"{', '.join(sources)}, {beside}"


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


# A clock that tells how long the operations seen so far would have taken on a device.
#
# [Note: The roofline] An operation takes as long as its FLOPs at the rate that matrix products reach, or as its inputs
# and outputs at the rate of device memory, whichever is more. Left out: the launch of kernels, the fusion of several,
# and what the operations between ranks take.


_aten = torch.ops.aten


class OpClock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seconds of the operations that ran inside.

    Args:
        flops_per_s: what matrix products and attention reach.
        memory_bytes_per_s: of device memory.

    Attributes:
        now_s: so far.
        last_operation: the name of the last one, which may have failed.
    """

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
    """Whether an operation returns a view, or memory that nobody has written."""
    if func._schema.name.startswith(("aten::empty", "aten::new_empty")):
        return True
    aliases = [one.alias_info for one in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _moved_bytes(*values: Any) -> int:
    """Of the tensors among arguments and results, each once."""
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
    """Each row of the first is multiplied with one matrix of the second."""
    return 2.0 * float(args[0].numel()) * float(args[1].shape[-1])


# What torch counts no FLOPs for.
_UNREGISTERED: Mapping[str, Callable[[tuple[Any, ...], Any], float]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_attention_backward,
    "aten::_grouped_mm": _grouped_product,
}


# What a rank needs of device memory: parameters, gradients, states, saved tensors, and what operations hold besides.
#
# Left out: fragments of the allocator, the buffers of collectives, and what ZeRO-3 gathers.


# From which stage on ZeRO divides them by the number of ranks.
_DIVIDED_FROM_STAGE = {"states": 1, "gradients": 2, "parameters": 3}


class PeakMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of the storages that operations read or make inside, alive at once, as an allocator counts them.

    Takes time at every operation: for a step that is not timed. What is read back into a slot of staging lies in host
    memory on a CPU too; it counts with its storage, as it would in device memory.

    Args:
        ignored: storages that were there before.
        beside_bytes: what is not to count, now: such as what autograd's saved tensors hold. Without them there are left
            inputs, buffers, logits, their gradients and those of activations.

    Attributes:
        peak_bytes: the most at once.
        observes_only: activations go where they go without the meter; see ``ds_tba.autograd.tensors.is_under_a_mode``.
    """

    observes_only = True

    def __init__(self, ignored: Iterable[torch.UntypedStorage], beside_bytes: Callable[[], int] = lambda: 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._beside_bytes = beside_bytes
        self._now_bytes = 0
        self._freed: deque[tuple[int, int]] = deque()  # finalizers run anywhere, and only leave a note
        self._ignored = list(ignored)
        self._seen: dict[int, weakref.ref[torch.UntypedStorage] | None] = {id(one): None for one in self._ignored}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        while self._freed:
            key, nbytes = self._freed.popleft()
            del self._seen[key]
            self._now_bytes -= nbytes
        for one in tree_leaves((args, kwargs, result)):
            if isinstance(one, torch.Tensor):
                self._see(one.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self._now_bytes - self._beside_bytes())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()
        if key not in self._seen:
            self._seen[key] = weakref.ref(storage, lambda _: self._freed.append((key, nbytes)))
            self._now_bytes += nbytes


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """Bytes of one rank, without saved tensors.

    Attributes:
        states_bytes: of the optimizer; None where it is not known.
        temporary_bytes: of what operations hold beside saved tensors; see :class:`PeakMeter`.
    """

    parameter_bytes: int
    gradient_bytes: int
    states_bytes: int | None
    temporary_bytes: int

    @classmethod
    def of(
        cls, training: Training, parameters: int, parameter_bytes: int, temporary_bytes: int, ranks: int
    ) -> DeviceNeed:
        """What a config makes of so many parameters.

        Args:
            ranks: that ZeRO divides among.
        """

        def held(what: str, nbytes: int) -> int:
            return -(-nbytes // ranks) if training.zero_stage >= _DIVIDED_FROM_STAGE[what] else nbytes

        states_bytes: int | None = None
        if training.offloads_optimizer:
            states_bytes = 0
        elif training.state_bytes is not None:
            states_bytes = held("states", parameters * training.state_bytes)
        return cls(
            0 if training.offloads_parameters else held("parameters", parameter_bytes),
            held("gradients", parameter_bytes),
            states_bytes,
            temporary_bytes,
        )

    def with_saved(self, saved_bytes: int) -> int:
        """All of it, with so many bytes of saved tensors at their peak."""
        return (
            saved_bytes + self.parameter_bytes + self.gradient_bytes + (self.states_bytes or 0) + self.temporary_bytes
        )
