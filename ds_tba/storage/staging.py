"""What lies between device memory and files, and which bytes of it are free? The staging ring.

Staging is host memory, or device memory for a backend that reaches files from there (``IoBackend.stages_on_device``):
then every copy stays on the device. Does not know files, tickets or autograd.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from ds_tba.config import IO_ALIGNMENT_BYTES, MIN_STAGING_BYTES, OffloadConfig
from ds_tba.device.accelerator import AT_ONCE, PAGE_BYTES, Accelerator, Event, aligned_memory, huge_page_memory
from ds_tba.errors import ConfigError, StateError
from ds_tba.storage.backends import IoBackend
from ds_tba.storage.base import Span, SpanAllocator

# Bounds of the buffer of a lane that compresses: a codec gains nothing by a longer one, and all take a part of staging.
BUFFER_BYTES = 4 << 20
BUFFERS_FRACTION = 0.25
# Bounds of staging for a GPU where the config has null: MIN_STAGING_BYTES and this; and its fraction of the host memory
# that is available to the rank, and its size on a CPU: there it is of the memory that offloading is to free.
MAX_STAGING_BYTES = 1 << 30
STAGING_FRACTION = 1 / 16
CPU_STAGING_BYTES = 128 << 20
CLOSED = "the activation offloader was closed before backward: keep the engine, or the Offloader's with, until then"


class CopySafeAllocator(SpanAllocator):
    """Spans of memory that copies may still use when they are freed. Changed only under the store's lock.

    Such a span is free once its copies are done, which :meth:`settle` looks for: the host never waits for the device
    to free memory, and no copy reads or writes a span that was handed out again.
    """

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._in_copies: deque[tuple[list[Event], Span]] = deque()

    def free_after(self, events: Iterable[Event], span: Span) -> None:
        """Free a span when these events are done, at once where there is nothing to wait for.

        Asks no event: a finalizer may run while its thread captures a graph, which a query would spoil.
        """
        under_way = [event for event in events if event is not AT_ONCE]
        if under_way:
            self._in_copies.append((under_way, span))
        else:
            self.free(span)

    def settle(self) -> None:
        """Free the spans whose copies are done. Never blocks."""
        for _ in range(len(self._in_copies)):  # turned round, so that an event that cannot be asked loses none
            events, span = self._in_copies[0]
            if all(event.query() for event in events):  # else a copy would use what is handed out again
                self._in_copies.popleft()
                self.free(span)
            else:
                self._in_copies.rotate(-1)

    @property
    def has_spans_in_copies(self) -> bool:
        """True if :meth:`settle` will free a span later."""
        return bool(self._in_copies)


def lanes_of(config: OffloadConfig) -> int:
    """Return the number of lanes of all paths."""
    return (config.io.write_lanes + config.io.read_lanes) * len(config.nvme_paths)


def lane_buffer_bytes(staging_bytes: int, lanes: int) -> int:
    """Return the length of the buffer of each lane that compresses."""
    nbytes = min(BUFFER_BYTES, int(staging_bytes * BUFFERS_FRACTION) // max(lanes, 1))
    return max(nbytes - nbytes % IO_ALIGNMENT_BYTES, IO_ALIGNMENT_BYTES)


def slots_bytes_of(config: OffloadConfig) -> int:
    """Return the bytes of staging for tensors: all but the buffers of lanes that compress."""
    if config.io.compression is None:
        return config.io.ring_bytes
    lanes = lanes_of(config)
    return config.io.ring_bytes - lanes * lane_buffer_bytes(config.io.ring_bytes, lanes)


def with_staging(config: OffloadConfig, host_bytes: float, *, is_host: bool) -> OffloadConfig:
    """Return the config with ``io.staging_bytes`` derived, where it is null, from the host memory that this rank has.

    Forward saves in bursts, which staging buffers while the drives write; a tensor that finds no room in staging is
    kept. Staging stays small on a CPU (``is_host``), whose own memory it takes, and with GPUDirect Storage, where it is
    device memory; also without a plan, where its size bounds what is read ahead onto the device. The size is a power of
    two, because PyTorch would round it up to one when it pins.
    """
    if config.io.staging_bytes is not None:
        return config
    is_small = config.io.backend in ("gds", "kvikio") or config.placement != "adaptive"
    most_bytes = MIN_STAGING_BYTES if is_small else MAX_STAGING_BYTES
    nbytes = 1 << (int(max(min(most_bytes, host_bytes * STAGING_FRACTION), MIN_STAGING_BYTES)).bit_length() - 1)
    nbytes = CPU_STAGING_BYTES if is_host else nbytes
    return config.model_copy(update={"io": config.io.model_copy(update={"staging_bytes": nbytes})})


class StagingRing:
    """The memory through which parts reach files, ``staging_bytes`` long and exact in size, from :meth:`open` on.

    Only an urgent read without room takes memory beside it.

    Raises:
        ConfigError: pinned memory begins in the middle of a page.
    """

    def __init__(self, accelerator: Accelerator, backend: IoBackend, staging_bytes: int, lanes: int = 0) -> None:
        self.accelerator = accelerator
        # Allocates the memory in huge pages or on the device, where it is not pinned by the accelerator.
        self._backend = backend
        self._on_device = backend.stages_on_device
        self._is_pinned = not (accelerator.is_synchronous or self._on_device)
        buffer_bytes = lane_buffer_bytes(staging_bytes, lanes)
        self.slots = CopySafeAllocator(staging_bytes - lanes * buffer_bytes)  # changed under the store's lock
        first = self.slots.capacity_bytes
        # Of the lanes that need one of their own, for :meth:`view`: they are at the end of this memory and in no slot.
        self.buffers = [Span(first + number * buffer_bytes, buffer_bytes) for number in range(lanes)]
        self._memory: torch.Tensor | None = None
        if self._is_pinned and accelerator.pinned(PAGE_BYTES).data_ptr() % PAGE_BYTES:
            raise ConfigError(  # no drive takes such memory, and a fork would share it
                "pinned memory begins in the middle of a page, as with pinned_use_cuda_host_register:True in "
                "PYTORCH_CUDA_ALLOC_CONF: take that out."
            )

    def view(self, slot: Span | None) -> torch.Tensor:
        """Return the bytes of a slot (uint8, 1-D, aligned).

        Raises:
            StateError: it was given back.
        """
        if self._memory is None or slot is None:
            raise StateError(CLOSED)
        return self._memory[slot.offset : slot.offset + slot.nbytes]

    def overflow(self, nbytes: int) -> torch.Tensor:
        """Take memory outside the ring, of its kind, for a read that cannot wait for room in it."""
        if not self._on_device:
            return huge_page_memory(nbytes)
        memory = aligned_memory(nbytes, self.accelerator.device())
        # The allocator hands out what kernels in this stream may still be using; the drive knows no streams.
        self.accelerator.current_stream().synchronize()
        return memory

    def open(self) -> None:
        """Take the memory, unless it is taken.

        Raises:
            RuntimeError, MemoryError, OSError, BackendUnavailableError: it cannot be had.
        """
        if self._memory is not None:
            return
        nbytes = self.slots.capacity_bytes + sum(buffer.nbytes for buffer in self.buffers)
        if self._is_pinned:
            self._memory = self.accelerator.pinned(nbytes).zero_()
            return
        self._memory = self._backend.allocate_staging(nbytes)
        self.accelerator.current_stream().synchronize()  # zeroing on the device must not overwrite the first tensor

    def close(self) -> None:
        """Give the memory back until :meth:`open`; no slot is in use. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None and not self._is_pinned:
            self._backend.free_staging(memory)
