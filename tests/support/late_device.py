"""An asynchronous device in CPU memory, as hostile as the ordering rules of streams allow.

Every stream is a thread that runs what it was given in order, each piece after a random pause, so that streams run late
and out of step with each other. Memory comes from an allocator as CUDA's caching one, with a pool for each stream: what
the host frees belongs at once to the next tenant of the stream it was allocated on, who fills it with poison, unless
the memory was shared with other streams: then after what these were given so far, and until then its pool is without
it. What a pool has taken it keeps. A missing wait, a source dropped early or a slot reused early shows as wrong bytes.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ds_tba.device.accelerator import Accelerator, huge_page_memory

POISON = 0xDB
LONGEST_PAUSE_S = 0.003
TIMEOUT_S = 60.0


class LateEvent:
    """Done when the stream on which it was recorded has come so far."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._reached: threading.Event | None = None

    def record(self, stream: Any = None) -> None:
        self._reached = threading.Event()
        (stream or self._device.current_stream()).run(self._reached.set)

    def query(self) -> bool:
        return self._reached is None or self._reached.is_set()

    def synchronize(self) -> None:
        if self._reached is not None and not self._reached.wait(TIMEOUT_S):
            raise TimeoutError("an event never came")


class _Stream:
    """What CUDA's are to operators: `torch.Stream`, their base, says that nothing is unequal to None."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return other is not None and self is not other

    __hash__ = object.__hash__


class LateStream(_Stream):
    """A queue of work and the thread that does it, late."""

    def __init__(self, device: LateDevice) -> None:
        # Before each piece; a test may have one stream later than the others.
        self.longest_pause_s = device.longest_pause_s
        self._chance = random.Random(len(device.streams))
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="late-stream", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], object]) -> None:
        """Do ``work`` after everything before it."""
        self._work.put(work)

    def wait_event(self, event: LateEvent) -> None:
        self.run(event.synchronize)

    def synchronize(self) -> None:
        reached = threading.Event()
        self.run(reached.set)
        if self._thread.is_alive() and not reached.wait(TIMEOUT_S):  # else it has ended, with all its work
            raise TimeoutError("a stream never came to an end")

    def end(self) -> None:
        self._work.put(None)
        self._thread.join(TIMEOUT_S)

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            time.sleep(self._chance.random() * self.longest_pause_s)
            work()
            del work


class HostStream(_Stream):
    """The stream of kernels that are done when their call returns, as those of the CPU are."""

    def run(self, work: Callable[[], object]) -> None:
        work()

    def wait_event(self, event: LateEvent) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        """Nothing is under way."""


class LaggingStream(HostStream):
    """Likewise; but what is copied to the host on it, and what its events say, comes late."""

    def __init__(self, device: LateDevice) -> None:
        self._late = LateStream(device)
        device.streams.append(self._late)

    def run(self, work: Callable[[], object]) -> None:
        self._late.run(work)

    def synchronize(self) -> None:
        self._late.synchronize()


class LateDevice(Accelerator):
    """The accelerator.

    Args:
        late_answers: whether the host hears late of kernels, which are done when their call returns: real autograd can
            run on the device, and what is asked of it is answered when the host has gone on.
        late_compute: whether kernels run late too (:meth:`launch`); else the stream that is current by default is the
            host, so that real autograd can run on the device.
        watch_freed: whether memory that was let go is kept for :meth:`is_freed_memory_written`.
    """

    is_synchronous = False

    def __init__(
        self,
        *,
        late_compute: bool = False,
        late_answers: bool = False,
        longest_pause_s: float = LONGEST_PAUSE_S,
        watch_freed: bool = False,
    ) -> None:
        self.longest_pause_s = longest_pause_s
        self.streams: list[LateStream] = []
        self._local = threading.local()
        host = LaggingStream(self) if late_answers else HostStream()
        self._default: Any = self.new_stream() if late_compute else host
        self.allocated_bytes = 0
        self.peak_held_bytes = 0
        self.reserved_bytes: dict[Any, int] = {}  # by stream, what its pool has taken from the device
        # An entry for each block, with its stream: finalizers change it, where no lock may be taken.
        self._held: dict[object, tuple[Any, int]] = {}
        self.copies_under_way: list[object] = []
        self.freed: list[torch.Tensor] | None = [] if watch_freed else None

    # ---- as an accelerator --------------------------------------------------------------------------------------

    def pinned(self, nbytes: int) -> torch.Tensor:
        return huge_page_memory(nbytes)

    def new_stream(self) -> Any:
        stream = LateStream(self)
        self.streams.append(stream)
        return stream

    def new_event(self) -> Any:
        return LateEvent(self)

    def current_stream(self) -> Any:
        return getattr(self._local, "stream", self._default)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        memory = bytearray(nbytes)
        bytes_of = torch.frombuffer(memory, dtype=torch.uint8)
        owner = self.current_stream()
        # Kernels of a host's stream do not wait for what runs late.
        (HostStream() if isinstance(owner, HostStream) else owner).run(lambda: bytes_of.fill_(POISON))
        self.allocated_bytes += nbytes
        block = object()
        self._held[block] = owner, nbytes
        self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes)
        in_pool = sum(nbytes for one, nbytes in list(self._held.values()) if one is owner)
        self.reserved_bytes[owner] = max(self.reserved_bytes.get(owner, 0), in_pool)
        data = torch.frombuffer(memory, dtype=torch.uint8)
        # The tenant's storage is watched, not its memory, which lives on in the hands of the next.
        data.untyped_storage()._tenant = _Tenant(self, block, bytes_of, owner)  # type: ignore[attr-defined]
        return data

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        from_bytes, to_bytes = _memory_of(source), _memory_of(target)
        self.copies_under_way.append(copy := object())

        def work() -> None:
            to_bytes.copy_(from_bytes)
            self.copies_under_way.remove(copy)

        is_on_device = hasattr(target.untyped_storage(), "_tenant")
        if isinstance(self.current_stream(), LaggingStream) and is_on_device:
            work()  # a kernel, which the next operator comes after
        else:
            self.current_stream().run(work)

    def share(self, tensor: torch.Tensor, stream: Any) -> None:
        tenant = getattr(tensor.untyped_storage(), "_tenant", None)
        if tenant is not None and stream is not tenant.owner:  # None: memory that autograd took from the host
            tenant.sharers.append(stream)

    def free(self, tenant: _Tenant) -> None:
        """The last sharer to come so far gives the block back to its pool; without any, the host does at once."""
        block, owner, memory = tenant.block, tenant.owner, tenant.memory
        sharers = tenant.sharers or [HostStream()]
        left = list(range(len(sharers)))
        self.allocated_bytes -= memory.numel()

        def leave() -> None:
            if left.pop() == 0:
                del self._held[block]
                owner.run(lambda: memory.fill_(POISON))
                if self.freed is not None:
                    self.freed.append(memory)

        for stream in sharers:
            stream.run(leave)

    # ---- for tests ----------------------------------------------------------------------------------------------

    def launch(self, kernel: Callable[..., object], *tensors: torch.Tensor) -> None:
        """Run a kernel on the current stream; as on a real device, it has the addresses of the tensors and no more."""
        memory = [_memory_of(tensor) for tensor in tensors]
        self.current_stream().run(lambda: kernel(*memory))

    def filled(self, wanted: torch.Tensor) -> torch.Tensor:
        """Return memory into which a kernel writes these bytes."""
        data = self.allocate(wanted.numel(), torch.device("cpu"))
        self.launch(lambda to: to.copy_(wanted), data)
        return data

    @property
    def held_bytes(self) -> int:
        """Memory that no new tenant can have: of tensors that are alive, and of those that sharers still use."""
        return sum(nbytes for _, nbytes in list(self._held.values()))

    def synchronize(self) -> None:
        for stream in 2 * self.streams:  # what is given back, another stream may fill
            stream.synchronize()

    def is_freed_memory_written(self) -> bool:
        """Whether somebody else than the next tenant has written to memory that was let go."""
        self.synchronize()
        return any(bool((memory != POISON).any()) for memory in self.freed or [])

    def end(self) -> None:
        for stream in self.streams:
            stream.end()


class _Tenant:
    """Lies on a storage; when that is gone, the next tenant of its memory moves in."""

    def __init__(self, device: LateDevice, block: object, memory: torch.Tensor, owner: Any) -> None:
        self.block = block
        self.memory = memory
        self.owner = owner
        self.sharers: list[Any] = []
        self._device = device

    def __del__(self) -> None:
        self._device.free(self)


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor without a hold on its storage: an address and a type are all that a device knows."""
    tenant = getattr(tensor.untyped_storage(), "_tenant", None)
    if tenant is None:
        return tensor  # host memory, whose life is not the device's business
    start = tensor.storage_offset() * tensor.element_size()
    return tenant.memory[start : start + tensor.nbytes].view(tensor.dtype)
