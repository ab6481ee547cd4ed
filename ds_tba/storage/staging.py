"""What lies between device memory and files? The staging ring, and which bytes of a bounded region are free.

Staging is host memory, or device memory for a backend that reaches files from there (``IoBackend.stages_on_device``):
then every copy stays on the device, and the other device work of a lane runs in a stream of its own
(:meth:`StagingRing.lane_stream`). Ranges (:class:`SpanAllocator`) are also the extents of a swap file and the room of
the host tier. Does not know files, tickets or autograd; a holder of a range gives it back once.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from ds_tba.device.accelerator import Accelerator, Event
from ds_tba.device.copies import Copies
from ds_tba.device.memory import PAGE_BYTES, aligned_memory, give_pages_back, host_view, huge_page_memory
from ds_tba.errors import ConfigError, StateError
from ds_tba.storage.backends.base import IoBackend

CLOSED = "the activation offloader was closed before backward: keep the engine, or the Offloader's with, until then"
COPY_BYTES = 16 << 20  # about the size of a storage
TIMES = 5
BUFFER_BYTES = 4 << 20  # of a lane: a codec gains nothing by more
BUFFERS_FRACTION = 0.25  # part of staging that lanes' buffers take at most
LENT_FRACTION = 0.5  # part of staging that may be tensors' memory at once


@dataclass(frozen=True, slots=True)
class Span:
    """A byte range ``[offset, offset + nbytes)``."""

    offset: int
    nbytes: int


class SpanAllocator:
    """First fit by address, neighbours merged on free.

    Lowest address first means that the bytes just given back are the first to be used again: extents that were already
    written are overwritten at twice the rate of fresh ones on thin-provisioned drives, and the used part stays short.

    Args:
        alignment_bytes: every span starts at, and is as long as, a multiple of this.
    """

    def __init__(self, capacity_bytes: int, alignment_bytes: int) -> None:
        self.alignment_bytes = alignment_bytes
        self.capacity_bytes = 0
        self.used_bytes = 0
        self.peak_used_bytes = 0
        # Free ranges as (offset, length), by offset. Each change of it is one statement: the exception of a signal
        # handler comes between two, and a range half changed would be handed out twice.
        self._free: list[tuple[int, int]] = []
        self.grow(capacity_bytes)

    def grow(self, capacity_bytes: int) -> None:
        """Extend the region to ``capacity_bytes``, rounded down to the alignment."""
        capacity_bytes -= capacity_bytes % self.alignment_bytes
        if capacity_bytes > self.capacity_bytes:
            added = Span(self.capacity_bytes, capacity_bytes - self.capacity_bytes)
            self.capacity_bytes = capacity_bytes
            self._insert(added)

    def padded(self, nbytes: int) -> int:
        """Return ``nbytes`` rounded up to the alignment."""
        return -(-nbytes // self.alignment_bytes) * self.alignment_bytes

    @property
    def is_unused(self) -> bool:
        """True if all of the region is free, by the ranges: an exception may have interrupted the counting."""
        return self._free == [(0, self.capacity_bytes)]

    def allocate(self, nbytes: int) -> Span | None:
        """Take a span of at least ``nbytes``; None where no free range is long enough."""
        nbytes = self.padded(max(nbytes, 1))
        for index, (offset, length) in enumerate(self._free):
            if length >= nbytes:
                self._free[index : index + 1] = [(offset + nbytes, length - nbytes)] if length > nbytes else []
                self.used_bytes += nbytes
                self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)
                return Span(offset, nbytes)
        return None

    def free(self, span: Span) -> None:
        """Give a span back.

        Raises:
            StateError: the span, or a part of it, is free already.
        """
        self._insert(span)
        self.used_bytes -= span.nbytes

    def _insert(self, span: Span) -> None:
        start, end = span.offset, span.offset + span.nbytes
        first = last = bisect_left(self._free, (start, 0))
        previous_end = sum(self._free[first - 1]) if first > 0 else -1
        next_start = self._free[last][0] if last < len(self._free) else self.capacity_bytes + 1
        if previous_end > start or next_start < end or end > self.capacity_bytes:
            raise StateError(f"bytes {start}..{end} were given back twice or never handed out")
        if previous_end == start:
            first -= 1
            start = self._free[first][0]
        if next_start == end:
            end += self._free[last][1]
            last += 1
        self._free[first:last] = [(start, end - start)]


class CopySafeAllocator(SpanAllocator):
    """Spans of memory that copies may still use when they are freed. Changed only under the store's lock.

    Such a span is free once its copies are done, which :meth:`settle` looks for: the host never waits for the device
    to free memory, and no copy reads or writes a span that was handed out again.
    """

    def __init__(self, capacity_bytes: int, alignment_bytes: int) -> None:
        super().__init__(capacity_bytes, alignment_bytes)
        self._in_copies: deque[tuple[list[Event], Span]] = deque()

    def free_after(self, events: Iterable[Event | None], span: Span) -> None:
        """Free a span when these events are done, at once where there are none. None stands for an event that is done.

        Asks no event: a finalizer may run while its thread captures a graph, which a query would spoil.
        """
        under_way = [event for event in events if event is not None]
        if under_way:
            self._in_copies.append((under_way, span))
        else:
            self.free(span)

    def settle(self) -> None:
        """Free the spans whose copies are done. Never blocks."""
        for _ in range(len(self._in_copies)):  # turned round, so that an event that cannot be asked loses none
            events, span = self._in_copies[0]
            if all(event.query() for event in events):
                self._in_copies.popleft()
                self.free(span)
            else:
                self._in_copies.rotate(-1)

    def finish(self) -> None:
        """Block until no copy uses a span that was freed."""
        for events, _ in self._in_copies:
            for event in events:
                event.synchronize()

    @property
    def has_spans_in_copies(self) -> bool:
        """True if :meth:`settle` will free a span later."""
        return bool(self._in_copies)


# ---- the ring ----


def wait_for_stream(accelerator: Accelerator) -> None:
    """Block until the device has done what this thread's current stream was given so far."""
    accelerator.current_stream().synchronize()


class Loan:
    """Lies on a storage that has a slot as its memory; its end tells that the slot is free.

    Attributes:
        slot: None until it is lent.
    """

    __slots__ = ("slot",)

    def __init__(self) -> None:
        self.slot: Span | None = None


class _Lent:
    """Lies on the storage."""

    __slots__ = ("__weakref__",)


class Watch(Protocol):
    """Has a loan acted on when an object is gone."""

    def __call__(self, watched: object, item: Loan) -> object: ...


class StagingRing:
    """The only memory through which bytes pass, bounded by ``staging_bytes``, exact in size.

    Args:
        backend: says whether that is host memory (huge pages, or pinned) or device memory.
        lanes: how many need a buffer of their own, which are at the end of this memory and in no slot.

    Attributes:
        accelerator: as given.
        buffers: of the lanes, for :meth:`view`.
        zero_copy: whether a slot can be a tensor's memory, so that nothing need be copied. On an asynchronous device it
            cannot, even where staging is on the device: kernels that still use a tensor when its last reference goes
            would run while the slot is overwritten.
        slots: changed under the store's lock.
    """

    def __init__(self, accelerator: Accelerator, backend: IoBackend, staging_bytes: int, lanes: int = 0) -> None:
        self.accelerator = accelerator
        self._backend = backend
        self._on_device = backend.stages_on_device
        self.zero_copy = accelerator.is_synchronized_device()
        self._is_pinned = not (self.zero_copy or self._on_device)
        self.copies = Copies(accelerator)
        buffer_bytes = lane_buffer_bytes(staging_bytes, lanes, backend.alignment_bytes) if lanes else 0
        self.slots = CopySafeAllocator(staging_bytes - lanes * buffer_bytes, backend.alignment_bytes)
        first = self.slots.capacity_bytes
        self.buffers = [Span(first + number * buffer_bytes, buffer_bytes) for number in range(lanes)]
        self._memory: torch.Tensor | None = self._allocate()
        self._closed_memory: torch.Tensor | None = None
        self._loans = self._lent_bytes = 0
        self._streams = threading.local()

    def view(self, slot: Span) -> torch.Tensor:
        """Return the bytes of a slot (uint8, 1-D, aligned)."""
        if self._memory is None:
            raise StateError(CLOSED)
        return self._memory[slot.offset : slot.offset + slot.nbytes]

    def fill(self, slot: Span, data: torch.Tensor) -> None:
        """Put host bytes into a slot, there at return."""
        self.view(slot).copy_(data)
        if self._on_device:
            wait_for_stream(self.accelerator)

    def rescue(self, staged: torch.Tensor, nbytes: int) -> torch.Tensor:
        """Copy the first ``nbytes`` of a slot to host memory of their own; in a lane, inside :meth:`lane_stream`."""
        return staged[:nbytes].to("cpu", copy=True) if self._on_device else staged[:nbytes].clone()

    def overflow(self, nbytes: int) -> torch.Tensor:
        """Take memory outside the ring, of its kind, for a read that cannot wait for room in it."""
        if not self._on_device:
            return huge_page_memory(nbytes, forked=False)
        memory = aligned_memory(nbytes, self.accelerator.device())
        # The allocator hands out what kernels in this stream may still be using; the drive knows no streams.
        wait_for_stream(self.accelerator)
        return memory

    def lane_stream(self) -> AbstractContextManager[object]:
        """Return the context for a lane's work on the device (checksums, rescues): a stream of the calling thread.

        A lane's thread starts with the default stream, where its kernels would stand behind all that the training
        thread has queued.
        """
        if not self._on_device or self.zero_copy:
            return nullcontext()
        if not hasattr(self._streams, "own"):
            try:
                self._streams.own = self.accelerator.new_stream()
            except RuntimeError:  # a lane must survive anything; without a stream it is only slower
                return nullcontext()
        return self.accelerator.on(self._streams.own)

    def may_lend(self, slot: Span) -> bool:
        """Return whether enough of staging stays beside loans: else nothing could leave, and no budget be held."""
        return self._lent_bytes + slot.nbytes <= LENT_FRACTION * self.slots.capacity_bytes

    def lend(self, slot: Span, nbytes: int, watch: Watch) -> tuple[torch.Tensor, Loan]:
        """Make the first ``nbytes`` of a slot a tensor's own memory: on the CPU a copy would cost as much as the read.

        Args:
            watch: is given the loan, whose slot the caller sets, and an object that goes with the tensor's storage;
                must lead to :meth:`end_loan`.
        """
        data, lent, loan = tensor_over(self.view(slot), nbytes), _Lent(), Loan()
        watch(lent, loan)
        data.untyped_storage()._ds_tba_loan = lent  # type: ignore[attr-defined]
        self._loans += 1  # one too many never frees memory that is lent
        self._lent_bytes += slot.nbytes
        return data, loan

    def end_loan(self, slot: Span) -> None:
        """Free a slot that was lent. The last one of a closed ring frees the memory too."""
        self.slots.free(slot)
        self._loans -= 1
        self._lent_bytes -= slot.nbytes
        self._free_if_unused()

    @property
    def is_lent(self) -> bool:
        """True if a tensor has a slot as its memory."""
        return self._loans > 0

    def trim(self) -> None:
        """Give the memory's pages back until they are touched again, if no slot is in use.

        Pinned memory and that of a device stay as they are.
        """
        if self._memory is not None and self.slots.is_unused and not self._is_pinned and not self._on_device:
            give_pages_back(self._memory)

    def rest(self) -> None:
        """Give the memory back until :meth:`wake`; no slot is in use."""
        self._closed_memory, self._memory = self._memory, None
        self._free_if_unused()

    def wake(self) -> None:
        """Take the memory again."""
        self._memory = self._allocate()

    def close(self) -> None:
        """Give the memory back, or let the end of the last loan do so. Idempotent."""
        if self._memory is not None:
            self._closed_memory, self._memory = self._memory, None
            self._free_if_unused()

    def _allocate(self) -> torch.Tensor:
        nbytes = self.slots.capacity_bytes + sum(buffer.nbytes for buffer in self.buffers)
        if self._is_pinned:
            pinned = self.accelerator.pinned(nbytes).zero_()
            if pinned.data_ptr() % PAGE_BYTES:  # no drive takes it, and a fork would share it
                why = "as with pinned_use_cuda_host_register:True in PYTORCH_CUDA_ALLOC_CONF: take that out"
                raise ConfigError(f"pinned memory begins in the middle of a page, {why}.")
            return pinned
        memory = self._backend.allocate_staging(nbytes)
        wait_for_stream(self.accelerator)  # zeroing on the device must not overwrite the first tensor
        return memory

    def _free_if_unused(self) -> None:
        if self._closed_memory is not None and self._loans == 0:
            memory, self._closed_memory = self._closed_memory, None
            if not self._is_pinned:
                self._backend.free_staging(memory)


def lane_buffer_bytes(staging_bytes: int, lanes: int, alignment_bytes: int) -> int:
    """Return the length of a lane's buffer: all of them together take a part of staging only."""
    nbytes = min(BUFFER_BYTES, int(staging_bytes * BUFFERS_FRACTION) // lanes)
    return max(nbytes - nbytes % alignment_bytes, alignment_bytes)


def tensor_over(host: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return the first ``nbytes`` of host memory as a tensor of its own storage (and version counter), not copied."""
    return torch.frombuffer(host_view(host), dtype=torch.uint8)[:nbytes]


@dataclass(frozen=True, slots=True)
class CopyRates:
    """The rates of one copy at a time, in bytes per second."""

    out_bytes_per_s: float
    in_bytes_per_s: float


def measure_copies(
    accelerator: Accelerator, copies: Copies, staged: torch.Tensor, clock: Callable[[], float] = time.perf_counter
) -> CopyRates:
    """Return the best of a few copies each way, done as the stores do them; takes some tens of milliseconds.

    Args:
        copies: theirs, which no store uses.
        staged: staging memory of the size to be copied; overwritten.
    """
    device = accelerator.device()
    data = accelerator.allocate(staged.numel(), device)
    accelerator.copy(staged, data)  # or the first copy out would find pages that nobody has touched
    wait_for_stream(accelerator)

    def copy_out() -> None:
        copies.out(data, staged)
        copies.hold_at_most(0)

    def copy_in() -> None:
        copies.into(staged, copies.room(staged.numel(), device)).wait()

    def best_s(copy: Callable[[], None]) -> float:
        took: list[float] = []
        for _ in range(TIMES):
            started_s = clock()
            copy()
            took.append(clock() - started_s)
        return min(took)

    out_s, in_s = best_s(copy_out), best_s(copy_in)
    return CopyRates(staged.numel() / out_s, staged.numel() / in_s)
