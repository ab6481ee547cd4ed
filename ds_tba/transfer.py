"""Between device memory and staging: the ring of host memory, and the copies in and out of it.

Knows the accelerator's API (streams, events, pinning) as an object handed in; does not know files, tickets or autograd.
On a synchronous device (the CPU) a copy is done when the call returns and there are no events. On an asynchronous one
both copies are queued on the stream that produced or consumes the tensor, so that they are ordered with it by
construction, and an event says when the host side may touch the staging bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy
import torch

from ds_tba.io.base import IoBackend
from ds_tba.io.memory import huge_page_memory
from ds_tba.spans import Span, SpanAllocator
from ds_tba.tensors import host_view


class Accelerator(Protocol):
    """The part of ``deepspeed.accelerator`` that is used here."""

    def device_name(self) -> str: ...
    def is_synchronized_device(self) -> bool: ...
    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor: ...

    @property
    def Event(self) -> Any: ...  # noqa: N802 - the accelerator's name


class CpuAccelerator:
    """The CPU, for a store without DeepSpeed (tests, benchmarks): synchronous, and nothing to pin."""

    Event: Any = None

    def device_name(self) -> str:
        """As torch names the device."""
        return "cpu"

    def is_synchronized_device(self) -> bool:
        """Every copy is done when its call returns."""
        return True

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor


def pins_memory(accelerator: Accelerator) -> bool:
    """Whether staging is pinned by the accelerator."""
    return not accelerator.is_synchronized_device()


class PendingCopy:
    """A copy-out under way: its event, and the device memory that it reads, held together until it is done.

    Without the memory, the caching allocator could hand it to another stream while the copy still reads it.
    """

    __slots__ = ("_event", "_source")

    def __init__(self, event: Any, source: torch.Tensor) -> None:
        self._event = event
        self._source: torch.Tensor | None = source

    def wait(self) -> None:
        """Block the calling host thread until the copy is done."""
        self._event.synchronize()
        self._source = None


def copy_out(accelerator: Accelerator, data: torch.Tensor, host: torch.Tensor) -> PendingCopy | None:
    """Copy device bytes into host memory; None where that is done at return, as on a synchronous device."""
    _copy(data, host[: data.numel()])
    if accelerator.is_synchronized_device():
        return None
    event = accelerator.Event()
    event.record()
    return PendingCopy(event, data)


def copy_in(accelerator: Accelerator, host: torch.Tensor, nbytes: int, device: torch.device) -> torch.Tensor:
    """``nbytes`` of host bytes as a new device tensor (uint8, 1-D); ``host`` may be reused at return."""
    data = torch.empty(nbytes, dtype=torch.uint8, device=device)
    _copy(host[:nbytes], data)
    if not accelerator.is_synchronized_device():
        event = accelerator.Event()
        event.record()
        event.synchronize()
    return data


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.device.type == target.device.type == "cpu":
        # On one thread: those of Tensor.copy_ would take the cores from the lanes, at the price of a small copy each.
        numpy.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source, non_blocking=True)


class _Loan:
    """Lies on the storage that a slot was lent to, and gives the slot back when that storage is gone."""

    __slots__ = ("_give_back", "_slot")

    def __init__(self, slot: Span, give_back: Callable[[Span], None]) -> None:
        self._slot = slot
        self._give_back = give_back

    def __del__(self) -> None:
        self._give_back(self._slot)


class StagingRing:
    """The only host memory through which bytes pass, bounded by ``staging_bytes``, exact in size.

    Args:
        staging_bytes: its size.
    """

    def __init__(self, accelerator: Accelerator, backend: IoBackend, staging_bytes: int) -> None:
        self._accelerator = accelerator
        self._backend = backend
        self._synchronous = accelerator.is_synchronized_device()
        self.slots = SpanAllocator(staging_bytes, backend.alignment_bytes)
        self._memory: torch.Tensor | None = self._allocate(self.slots.capacity_bytes)
        self._closed_memory: torch.Tensor | None = None
        self._lent = 0

    @property
    def lends(self) -> bool:
        """Whether staging is device memory too, so that a slot can be a tensor's memory and nothing need be copied."""
        return self._synchronous

    def view(self, slot: Span) -> torch.Tensor:
        """The bytes of a slot (uint8, 1-D, aligned)."""
        if self._memory is None:
            raise RuntimeError("the staging ring is closed")
        return self._memory[slot.offset : slot.offset + slot.nbytes]

    def copy_out(self, data: torch.Tensor, slot: Span) -> PendingCopy | None:
        """:func:`copy_out` into a slot."""
        return copy_out(self._accelerator, data, self.view(slot))

    def copy_in(self, host: torch.Tensor, nbytes: int, device: torch.device) -> torch.Tensor:
        """:func:`copy_in`."""
        return copy_in(self._accelerator, host, nbytes, device)

    def lend(self, slot: Span, nbytes: int, give_back: Callable[[Span], None]) -> torch.Tensor:
        """The first ``nbytes`` of a slot as a tensor's own memory: on the CPU a copy would cost as much as the read.

        Args:
            give_back: called with the slot, from a finalizer in any thread, when that tensor's storage is gone; must
                lead to :meth:`returned`.
        """
        data = self.as_tensor(self.view(slot), nbytes)
        data.untyped_storage()._ds_tba_loan = _Loan(slot, give_back)  # type: ignore[attr-defined]
        self._lent += 1
        return data

    @staticmethod
    def as_tensor(host: torch.Tensor, nbytes: int) -> torch.Tensor:
        """The first ``nbytes`` of host memory as a tensor of its own storage (and version counter), not copied."""
        return torch.frombuffer(host_view(host), dtype=torch.uint8)[:nbytes]

    def returned(self) -> None:
        """A lent slot came back."""
        self._lent -= 1
        if self._lent == 0 and self._memory is None:
            self._free()

    def overflow(self, nbytes: int) -> torch.Tensor:
        """Aligned host memory outside the ring, for a read that cannot wait for room in it."""
        return huge_page_memory(self.slots.padded(nbytes), forked=False)

    def close(self) -> None:
        """Give the memory back, or let the return of the last lent slot do so. Idempotent."""
        if self._memory is not None:
            self._closed_memory, self._memory = self._memory, None
            if self._lent == 0:
                self._free()

    def _free(self) -> None:
        memory, self._closed_memory = self._closed_memory, None
        if memory is not None and self._synchronous:
            self._backend.free_staging(memory)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if self._synchronous:
            return self._backend.allocate_staging(nbytes)
        pinned: torch.Tensor = self._accelerator.pin_memory(torch.zeros(nbytes, dtype=torch.uint8))
        return pinned
