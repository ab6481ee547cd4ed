"""Between device memory and files: the staging ring. Does not know files, tickets or autograd.

Staging is host memory, or device memory for a backend that reaches files from there (``IoBackend.stages_on_device``):
then every copy stays on the device, and whatever else a lane computes runs in a stream of its own
(:meth:`StagingRing.beside_compute`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ds_tba.device.accelerator import Accelerator, Copies
from ds_tba.device.memory import aligned_memory, give_pages_back, host_view, huge_page_memory
from ds_tba.storage.allocator import Span, SpanAllocator
from ds_tba.storage.backends.base import IoBackend


def wait_for_stream(accelerator: Accelerator) -> None:
    """Block until the device has done what this thread's current stream was given so far."""
    if not accelerator.is_synchronized_device():
        event = accelerator.new_event()
        event.record(accelerator.current_stream())
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
        self.copies = Copies(accelerator)
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

    def fill(self, slot: Span, data: torch.Tensor) -> None:
        """Put host bytes into a slot, there at return."""
        self.view(slot).copy_(data)
        if self._on_device:
            wait_for_stream(self._accelerator)

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
                self._own.stream = self._accelerator.new_stream()
            except RuntimeError:  # a lane must survive anything; without a stream it is only slower
                return nullcontext()
        return self._accelerator.on(self._own.stream)

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

    def trim(self) -> None:
        """Give the memory's pages back until they are touched again; no slot may be in use.

        On a CPU only: elsewhere staging is pinned, or on the device.
        """
        if self._memory is not None and self._synchronous and not self._on_device:
            give_pages_back(self._memory)

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
        pinned: torch.Tensor = self._accelerator.pin_memory(torch.zeros(nbytes, dtype=torch.uint8, device="cpu"))
        return pinned


# How fast bytes go between device memory and staging, and back.


COPY_BYTES = 16 << 20  # about the size of a storage
TIMES = 5


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Of one copy at a time, in bytes per second."""

    out_bytes_per_s: float
    in_bytes_per_s: float


def measure_copies(
    accelerator: Accelerator, staged: torch.Tensor, clock: Callable[[], float] = time.perf_counter
) -> CopyRates:
    """The best of a few copies each way, done as the stores do them; takes some tens of milliseconds.

    Args:
        staged: staging memory of the size to be copied; overwritten.
        clock: seconds.
    """
    device = accelerator.device()
    data = accelerator.allocate(staged.numel(), device)
    accelerator.copy(staged, data)  # or the first copy out would find pages that nobody has touched
    wait_for_stream(accelerator)
    copies = Copies(accelerator)

    def copy_out() -> None:
        copies.out(data, staged)
        copies.finish()

    def copy_in() -> None:
        copies.into(staged, staged.numel(), device).wait()

    out_s, in_s = _best_s(copy_out, clock), _best_s(copy_in, clock)
    return CopyRates(staged.numel() / out_s, staged.numel() / in_s)


def _best_s(copy: Callable[[], None], clock: Callable[[], float]) -> float:
    took: list[float] = []
    for _ in range(TIMES):
        started_s = clock()
        copy()
        took.append(clock() - started_s)
    return min(took)
