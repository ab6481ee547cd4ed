"""Between device memory and staging: the ring, and the copies in and out of it.

Knows the accelerator's API (streams, events, pinning) as an object handed in; does not know files, tickets or autograd.
On a synchronous device (the CPU) a copy is done when the call returns and there are no events. On an asynchronous one
both copies are queued on the stream that produced or consumes the tensor, so that they are ordered with it by
construction, and an event says when the host side may touch the staging bytes.

Staging is host memory, or device memory for a backend that reaches files from there (``IoBackend.stages_on_device``):
then every copy stays on the device, and whatever else a lane computes runs in a stream of its own
(:meth:`StagingRing.beside_compute`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from ds_tba.io.base import IoBackend
from ds_tba.io.memory import aligned_memory, huge_page_memory
from ds_tba.spans import Span, SpanAllocator
from ds_tba.tensors import host_view


class Accelerator(Protocol):
    """The part of ``deepspeed.accelerator`` that is used here."""

    def device_name(self) -> str: ...
    def is_synchronized_device(self) -> bool: ...
    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def stream(self, stream: Any) -> Any: ...

    @property
    def Event(self) -> Any: ...  # noqa: N802 - the accelerator's name

    @property
    def Stream(self) -> Any: ...  # noqa: N802


class CpuAccelerator:
    """The CPU, for a store without DeepSpeed (tests, benchmarks): synchronous, and nothing to pin."""

    Event: Any = None
    Stream: Any = None

    def stream(self, stream: Any) -> Any:
        """A context in which nothing changes."""
        return nullcontext()

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


def copy_out(accelerator: Accelerator, data: torch.Tensor, staged: torch.Tensor) -> PendingCopy | None:
    """Copy device bytes into staging; None where that is done at return, as on a synchronous device."""
    staged[: data.numel()].copy_(data, non_blocking=True)
    if accelerator.is_synchronized_device():
        return None
    event = accelerator.Event()
    event.record()
    return PendingCopy(event, data)


def copy_in(accelerator: Accelerator, staged: torch.Tensor, nbytes: int, device: torch.device) -> torch.Tensor:
    """``nbytes`` of staging as a new device tensor (uint8, 1-D); ``staged`` may be reused at return."""
    data = torch.empty(nbytes, dtype=torch.uint8, device=device)
    data.copy_(staged[:nbytes], non_blocking=True)
    wait_for_stream(accelerator)
    return data


def wait_for_stream(accelerator: Accelerator) -> None:
    """Block until the device has done what this thread's current stream was given so far."""
    if not accelerator.is_synchronized_device():
        event = accelerator.Event()
        event.record()
        event.synchronize()


class _Loan:
    """Lies on the storage that a slot was lent to, and gives the slot back when that storage is gone."""

    __slots__ = ("_give_back", "_slot")

    def __init__(self, slot: Span, give_back: Callable[[Span], None]) -> None:
        self._slot = slot
        self._give_back = give_back

    def __del__(self) -> None:
        self._give_back(self._slot)


class StagingRing:
    """The only memory through which bytes pass, bounded by ``staging_bytes``, exact in size.

    Args:
        backend: says whether that is host memory or device memory.
        staging_bytes: its size.
    """

    def __init__(self, accelerator: Accelerator, backend: IoBackend, staging_bytes: int) -> None:
        self._accelerator = accelerator
        self._backend = backend
        self._synchronous = accelerator.is_synchronized_device()
        self._on_device = backend.stages_on_device
        self._own = threading.local()
        self.slots = SpanAllocator(staging_bytes, backend.alignment_bytes)
        memory = self._allocate(self.slots.capacity_bytes)
        self._device = memory.device
        self._memory: torch.Tensor | None = memory
        self._closed_memory: torch.Tensor | None = None
        self._lent = 0

    @property
    def lends(self) -> bool:
        """Whether a slot can be a tensor's memory, so that nothing need be copied.

        On an asynchronous device it cannot, even where staging is on the device: kernels that still use a tensor when
        its last reference goes would run while the slot is overwritten.
        """
        return self._synchronous

    def view(self, slot: Span) -> torch.Tensor:
        """The bytes of a slot (uint8, 1-D, aligned)."""
        if self._memory is None:
            raise RuntimeError("the staging ring is closed")
        return self._memory[slot.offset : slot.offset + slot.nbytes]

    def copy_out(self, data: torch.Tensor, slot: Span) -> PendingCopy | None:
        """:func:`copy_out` into a slot."""
        return copy_out(self._accelerator, data, self.view(slot))

    def copy_in(self, staged: torch.Tensor, nbytes: int, device: torch.device) -> torch.Tensor:
        """:func:`copy_in`."""
        return copy_in(self._accelerator, staged, nbytes, device)

    def rescue(self, staged: torch.Tensor, nbytes: int) -> torch.Tensor:
        """The first ``nbytes`` of a slot in host memory of their own; in a lane, so inside :meth:`beside_compute`."""
        return staged[:nbytes].to("cpu", copy=True) if self._on_device else staged[:nbytes].clone()

    def beside_compute(self) -> AbstractContextManager[Any]:
        """The context for what a lane computes on the device (checksums, rescues).

        A lane's thread starts with the default stream, where its kernels would stand behind all that the training
        thread has queued.
        """
        if not self._on_device or self._synchronous:
            return nullcontext()
        if not hasattr(self._own, "stream"):
            try:
                self._own.stream = self._accelerator.Stream(device=self._device)
            except RuntimeError:  # a lane must survive anything; without a stream it is only slower
                return nullcontext()
        context: AbstractContextManager[Any] = self._accelerator.stream(self._own.stream)
        return context

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
        """Aligned memory outside the ring, of its kind, for a read that cannot wait for room in it."""
        nbytes = self.slots.padded(nbytes)
        if not self._on_device:
            return huge_page_memory(nbytes, forked=False)
        memory = aligned_memory(nbytes, self._device)
        # The allocator hands out what kernels in this stream may still be using; the drive knows no streams.
        wait_for_stream(self._accelerator)
        return memory

    def close(self) -> None:
        """Give the memory back, or let the return of the last lent slot do so. Idempotent."""
        if self._memory is not None:
            self._closed_memory, self._memory = self._memory, None
            if self._lent == 0:
                self._free()

    def _free(self) -> None:
        memory, self._closed_memory = self._closed_memory, None
        if memory is not None and (self._synchronous or self._on_device):
            self._backend.free_staging(memory)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if self._synchronous or self._on_device:
            memory = self._backend.allocate_staging(nbytes)
            wait_for_stream(self._accelerator)
            return memory
        pinned: torch.Tensor = self._accelerator.pin_memory(torch.zeros(nbytes, dtype=torch.uint8))
        return pinned
