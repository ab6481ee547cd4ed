"""What a device does when: memory, streams, events, and the copies between it and the host, in streams of their own.

Knows one device of one rank. Cannot see what is saved, nor who else takes the device's memory.

[Note: Ordering] A copy out waits, on the device, for what its tensor's stream was given so far, and the tensor is
held until the copy is done: freed earlier, its memory could go to the next tensor of that stream while it is read. A
copy in waits for the point at which its memory was allocated, because kernels that were queued before may use it for
its former tenant; the stream that consumes the bytes waits for the copy. The host waits for neither.

[Note: Pools] A caching allocator keeps a pool for each stream, and a block of one pool is no use to another. Therefore
the thread that asks for bytes allocates their memory, on its own current stream (:meth:`Copies.room`): what comes back
takes the blocks that training itself has freed. On the stream of the copies it would take as much memory again, and a
device that is sized by its budget would give back and take blocks all the time. The allocator is told of any other
stream that reads the bytes (``record_stream``); memory that nobody wants before its copy is done is held until then
(:meth:`Copies.drop`).

[Note: Room] Saved tensors may take what is left of a device beside the peak of everything else in a step: gradients,
logits, buckets, optimizer states. Free memory after the optimizer step says too little: gradients and logits are gone
by then. So everything else is sampled at the ends of steps, and at every hook while micro-steps are recorded. Between
two samples the accelerator's own peak tells whether there was more.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

logger = logging.getLogger(__name__)

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Of each version of control groups: where they are mounted, who rules memory, and the files of a group.
_VERSIONS = (
    ("", "", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
# Part of a device's memory that is left to temporaries, fragmentation and other libraries, where no budget is set.
TEMPORARY_FRACTION = 0.1
# Pinned at a time for answers of the device: a page, which is the least that can be.
ANSWERS_BYTES = 4096
CUDA_DRIVER = "libcuda.so.1"
RELAXED_CAPTURE = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Clock(Protocol):
    """Time as the stream of kernels sees it: marks, and the seconds between two."""

    def mark(self) -> Any: ...
    def elapsed_s(self, earlier: Any, later: Any) -> float: ...


class HostClock:
    """Time of the host, whose calls wait for their kernels."""

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_s(self, earlier: float, later: float) -> float:
        return later - earlier


class StreamClock:
    """Events with timing on the calling thread's current stream of the device of that index."""

    def __init__(self, api: Any, index: int) -> None:
        self._api = api
        self._index = index

    def mark(self) -> Any:
        event = self._api.Event(enable_timing=True)
        event.record(self._api.current_stream(self._index))
        return event

    def elapsed_s(self, earlier: Any, later: Any) -> float:
        """Blocks the host until the device has passed both."""
        later.synchronize()
        earlier.synchronize()
        return earlier.elapsed_time(later) / 1000.0


class MemoryLevels(NamedTuple):
    """A device's memory at one time.

    Attributes:
        in_use_bytes: that nothing new can have: of tensors, and of what was dropped while another stream uses it.
        peak_in_use_bytes: the most of that since the peak was last reset.
        reserved_bytes: that the allocator has taken from the device.
        allocation_retries: how often the allocator gave everything unused back, because the device was full.
    """

    in_use_bytes: int
    peak_in_use_bytes: int
    reserved_bytes: int
    allocation_retries: int


def available_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Memory that can be taken without swapping, by all processes together that share it.

    That is ``MemAvailable`` of proc(5), or what is left to a control group (cgroups(7)) that this process is in, as
    containers and batch systems have them; 0 where a limit is exceeded.
    """
    meminfo = (proc / "meminfo").read_text(encoding="ascii")
    machine_bytes = int(meminfo.partition("MemAvailable:")[2].split()[0]) * 1024
    return max(0, min([machine_bytes, *_left_bytes(proc, groups)]))


def _left_bytes(proc: Path, groups: Path) -> list[int]:
    """Bytes left to each limited group, from this process's own up. Its cached pages count as free."""
    memberships: list[list[str]] = []  # hierarchy, controllers, path
    with _if_present():
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
        memberships = [line.split(":", 2) for line in lines]
    found = []
    for mount, controller, limit, held, cached in _VERSIONS:
        root = groups / mount
        own = root / next((path.lstrip("/") for _, ruled, path in memberships if controller in ruled.split(",")), "")
        for group in [own, *own.parents]:
            if group.is_relative_to(root):
                with _if_present(), suppress(ValueError):  # "max": no limit
                    limit_bytes, held_bytes = (int((group / one).read_text(encoding="ascii")) for one in (limit, held))
                    stat = (group / "memory.stat").read_text(encoding="ascii").split()
                    cached_bytes = int(dict(zip(stat[::2], stat[1::2], strict=True)).get(cached, 0))
                    found.append(limit_bytes - held_bytes + cached_bytes)
    return found


@contextmanager
def _if_present() -> Iterator[None]:
    """Pass over files that a kernel may be without, or a sandbox may hide; want of a descriptor is no such case."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise


class HostMemoryUse:
    """Memory of the machine and of this process."""

    def free_bytes(self) -> float:
        """Memory that can be taken without swapping, less a part as on a device; all processes share it."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps much of what was freed
        if trim is not None:
            trim(0)
        return (1 - TEMPORARY_FRACTION) * available_bytes()

    def levels(self) -> MemoryLevels:
        """Resident memory of this process, and the most that ever was (``VmRSS`` and ``VmHWM`` of proc(5))."""
        status = (PROC / "self/status").read_text(encoding="ascii", errors="replace")
        now, peak = (int(status.partition(key)[2].split()[0]) * 1024 for key in ("VmRSS:", "VmHWM:"))
        return MemoryLevels(now, peak, now, 0)


class DeviceMemoryUse:
    """Memory of the device of that index, as its driver and its allocator count it."""

    def __init__(self, api: Any, index: int) -> None:
        self._api = api
        self._index = index

    def free_bytes(self) -> float:
        """Bytes left to the device and the allocator, less a part for what is made and dropped between activations.

        Of the device's own, whatever holds the rest: other pools and processes, other libraries, contexts.
        """
        # Without nvidia-ml-py, DeepSpeed's available_memory() is the total less what this process has allocated.
        ask = getattr(getattr(torch, self._api.device_name(), None), "mem_get_info", None)
        free_bytes: int = self._api.available_memory(self._index) if ask is None else ask(self._index)[0]
        levels = self.levels()
        free_bytes += max(0, levels.reserved_bytes - levels.in_use_bytes)
        total_bytes: int = self._api.total_memory(self._index)
        return max(0.0, free_bytes - TEMPORARY_FRACTION * total_bytes)

    def levels(self) -> MemoryLevels:
        api, index = self._api, self._index
        counts: dict[str, int] = api.memory_stats(index) or {}

        def in_use(when: str, ask: Callable[[int], int]) -> int:
            # "active" also has what record_stream() holds; not every allocator counts it.
            allocated = counts.get(f"allocated_bytes.all.{when}")
            # Asked only where the counts lack it: PyTorch takes all of them anew to answer that, in each hook.
            return max(counts.get(f"active_bytes.all.{when}", 0), ask(index) if allocated is None else allocated)

        return MemoryLevels(
            in_use("current", api.memory_allocated),
            in_use("peak", api.max_memory_allocated),
            counts.get("reserved_bytes.all.current", 0),
            counts.get("num_alloc_retries", 0),
        )


MemoryUse = HostMemoryUse | DeviceMemoryUse


class MemoryMeter:
    """The most device memory that everything but saved tensors held at once; see [Note: Room].

    Args:
        memory: of the device.
        resident_bytes: the part of that which saved tensors hold.
    """

    def __init__(self, memory: MemoryUse, resident_bytes: Callable[[], int]) -> None:
        self._memory = memory
        self._now_resident_bytes = resident_bytes
        self._resident_before_bytes = 0
        self._peak_bytes = math.inf  # at the last sample; before the first there is nothing to compare with
        self._retries: float | None = None  # at the first sample; infinite once there was a warning
        self._most_bytes = 0

    def sample(self) -> float:
        """Take the level of now, and the peak since the last sample; by how much everything else has been above it."""
        resident_bytes = self._now_resident_bytes()
        try:
            levels = self._memory.levels()
        except OSError:  # /proc cannot be read while no file descriptor is free: the samples before count
            return 0.0
        peak_bytes, others_bytes = levels.peak_in_use_bytes, levels.in_use_bytes - resident_bytes
        if peak_bytes > self._peak_bytes:
            # How much of that peak was ours is not known. Take the lower of our two levels: that errs on the safe side.
            others_bytes = max(others_bytes, peak_bytes - min(self._resident_before_bytes, resident_bytes))
        self._most_bytes = max(self._most_bytes, others_bytes)
        self._resident_before_bytes, self._peak_bytes = resident_bytes, peak_bytes
        if self._retries is None:
            self._retries = levels.allocation_retries
        elif levels.allocation_retries > self._retries:
            logger.warning(
                "the device was full %d times, and its allocator gave back all that it kept in reserve (%d bytes in "
                "use, %d reserved): such steps are slow, and an allocation may fail yet. A smaller "
                "activation_budget_bytes, smaller micro-batches or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
                "would help",
                levels.allocation_retries - self._retries,
                levels.in_use_bytes,
                levels.reserved_bytes,
            )
            self._retries = math.inf
        return max(0, self._most_bytes - (levels.in_use_bytes - resident_bytes))

    def room_bytes(self) -> float:
        """The bytes that saved tensors may hold; see [Note: Room]."""
        free_bytes = self._memory.free_bytes()
        others_bytes = self._memory.levels().in_use_bytes - self._now_resident_bytes()
        return max(0.0, free_bytes - max(0, self._most_bytes - others_bytes))


class Accelerator:
    """The operations of a device that offloading needs, as they are where nothing is asynchronous.

    Streams and events are those of torch; None where the device has none. Memory is uint8, 1-D.
    """

    clock: Clock = HostClock()
    memory: MemoryUse = HostMemoryUse()

    def device(self) -> torch.device:
        """This rank's device, with its index where it has one."""
        return torch.device("cpu")

    def enter_thread(self) -> None:
        """Make it the current device of the calling thread, which is one of ours."""

    def is_synchronized_device(self) -> bool:
        """Whether every call is done when it returns: there are neither streams nor events, and nothing to pin."""
        return True

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return False

    def is_of_graph(self, storage: torch.UntypedStorage) -> bool:
        """Whether device memory belongs to a graph, which uses it again whoever lets go of it."""
        return False

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return new host memory that the device copies from and to while the host goes on."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def give_pinned_back(self) -> None:
        """Give pinned memory that nobody uses back to the system, where its allocator would keep it."""

    def new_stream(self) -> Any:
        """A stream of the device."""
        return None

    def current_stream(self) -> Any:
        """The calling thread's stream."""
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """The context in which ``stream`` is current, and with it its device."""
        return nullcontext()

    def new_event(self) -> Any:
        """An event without timing."""
        return None

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory of the current stream's pool."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue a copy of bytes on the current stream."""
        target.copy_(source, non_blocking=True)

    def launch(self, kernel: Callable[..., object], *tensors: torch.Tensor) -> None:
        """Queue ops on tensors on the current stream."""
        kernel(*tensors)

    def share(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell the allocator that ``stream`` uses a tensor which another stream allocated."""


class CpuAccelerator(Accelerator):
    """The CPU, whose copies leave the cores to the lanes."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy bytes, on one thread.

        Those of ``Tensor.copy_`` would take the cores from the lanes, and cost a small copy more than they save it.

        Raises:
            TypeError: one of them is not host memory, or they differ in size.
        """
        nbytes = source.numel()
        if (source.device.type, target.device.type, target.numel()) != ("cpu", "cpu", nbytes):
            raise TypeError(f"{nbytes} bytes on {source.device} do not fit {target.numel()} bytes on {target.device}")
        # Not through NumPy: a tensor that it has seen can never be resized again, and the source is the user's.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)


class DeviceAccelerator(Accelerator):
    """An asynchronous device behind DeepSpeed's accelerator API: the one that is current now.

    A new thread's current device is the first, whatever the rank, so that streams are asked for by its index.

    Args:
        api: what ``deepspeed.accelerator.get_accelerator()`` returns.
    """

    def __init__(self, api: Any) -> None:
        self._api = api
        self._index = api.current_device()
        self.clock = StreamClock(api, self._index)
        self.memory = DeviceMemoryUse(api, self._index)

    def device(self) -> torch.device:
        return torch.device(self._api.device_name(), self._index)

    def enter_thread(self) -> None:
        self._api.set_device(self._index)

    def is_synchronized_device(self) -> bool:
        return False

    def is_capturing(self) -> bool:
        return bool(self._api.is_current_stream_capturing())

    def pinned(self, nbytes: int) -> torch.Tensor:
        return self._api.pin_memory(super().pinned(nbytes))

    def new_stream(self) -> Any:
        return self._api.Stream(device=self._index)

    def current_stream(self) -> Any:
        return self._api.current_stream(self._index)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self._api.stream(stream)

    def new_event(self) -> Any:
        return self._api.Event()

    def share(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)


class CudaAccelerator(DeviceAccelerator):
    """A CUDA device (or one of ROCm, which torch gives the same name)."""

    def enter_thread(self) -> None:
        """Likewise. What the thread asks of events spoils no capture of another thread.

        While any thread captures a graph in the global mode, which is torch's, ``cudaEventQuery`` and others fail in
        all threads of that mode, and the capture with them (CUDA driver API, cuThreadExchangeStreamCaptureMode).
        """
        super().enter_thread()
        if torch.version.cuda is not None:
            try:
                exchange = ctypes.CDLL(CUDA_DRIVER).cuThreadExchangeStreamCaptureMode
            except (OSError, AttributeError):  # a thread without it works, but for captures elsewhere
                logger.debug("%s has no cuThreadExchangeStreamCaptureMode", CUDA_DRIVER)
            else:
                exchange(ctypes.byref(ctypes.c_int(RELAXED_CAPTURE)))

    def is_of_graph(self, storage: torch.UntypedStorage) -> bool:
        """Whether ``torch.compile(mode="reduce-overhead")`` has the memory in its pool (``cudagraph_trees.py``)."""
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        with suppress(AssertionError):  # of older PyTorch, in a thread that has never run such a graph
            manager = None if trees is None else trees.get_manager(self._index, create_if_none_exists=False)
            return manager is not None and storage._cdata in manager.live_cudagraph_pool_storages_in_curr_execution()
        return False

    def pinned(self, nbytes: int) -> torch.Tensor:
        """By torch: with ``DS_PIN_MEMORY_BACKEND=native`` DeepSpeed locks pages, CUDA does not know, copies block."""
        # Pinned as it is made: pinning a tensor that is there would take as much memory again, and copy it.
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def give_pinned_back(self) -> None:
        empty_cache = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
        if empty_cache is not None:
            empty_cache()
            return
        with suppress(AttributeError):  # without this name, too, it stays pinned to the end of the process
            torch._C._host_emptyCache()

    def new_event(self) -> Any:
        """Whoever waits for it sleeps, and leaves the core to others."""
        return self._api.Event(blocking=True)


def adapted(api: Any) -> Accelerator:
    if api.is_synchronized_device():
        return CpuAccelerator()
    return CudaAccelerator(api) if api.device_name() == "cuda" else DeviceAccelerator(api)


def new_thread(accelerator: Accelerator, run: Callable[[], None], name: str) -> threading.Thread:
    """A thread of ours, not yet started; left on the first device, it would open a context there (half a GiB)."""

    def on_device() -> None:
        accelerator.enter_thread()
        run()

    # Not a subclass: what Python itself keeps in a Thread differs from version to version.
    # A daemon: interpreter exit must reach our own atexit hook, which stops the lanes in order.
    return threading.Thread(target=on_device, name=name, daemon=True)


def moment(accelerator: Accelerator) -> Any:
    """An event of the calling thread's current stream; None where everything is done at once."""
    if accelerator.is_synchronized_device():
        return None
    event = accelerator.new_event()
    event.record(accelerator.current_stream())
    return event


class PinnedAnswers:
    """Small pinned tensors into which a device writes what the host will read, cut from one block at a time.

    Pinning waits for the device, and takes a page, however little is asked for. A block is nobody's any more once its
    last tensor is gone; then the allocator gives it out again, after the copies into it.
    """

    def __init__(self, accelerator: Accelerator, elements: int, dtype: torch.dtype) -> None:
        self._accelerator = accelerator
        self._elements = elements
        self._dtype = dtype
        self._left: deque[torch.Tensor] = deque()

    def take(self) -> torch.Tensor:
        """Return one that nobody else has."""
        while True:
            with suppress(IndexError):  # another thread may have taken the last one
                return self._left.pop()
            block = self._accelerator.pinned(ANSWERS_BYTES).view(self._dtype)
            last = block.numel() - self._elements
            self._left.extend(block[at : at + self._elements] for at in range(0, last + 1, self._elements))


# ---- copies ---------------------------------------------------------------------------------------------------------


class PendingCopy:
    """A copy out of device memory under way. Holds that memory until the copy is done: see [Note: Ordering]."""

    __slots__ = ("_source", "event", "nbytes")

    def __init__(self, event: Any, source: torch.Tensor) -> None:
        self.event = event
        self.nbytes = source.numel()
        self._source: torch.Tensor | None = source

    def is_done(self) -> bool:
        """If so, lets the memory go. Never blocks."""
        if self._source is not None and self.event.query():
            self._source = None
        return self._source is None

    def wait(self) -> None:
        """Block the calling host thread until the copy is done."""
        if self._source is not None:
            self.event.synchronize()
            self._source = None


class Release(NamedTuple):
    """Device memory that the host has let go of, and events of the streams that may still use it."""

    nbytes: int
    events: list[Any]

    def is_passed(self) -> bool:
        return all(event.query() for event in self.events)

    def wait(self) -> None:
        """Block the calling host thread until the streams have come so far."""
        for event in self.events:
            event.synchronize()


class Releases:
    """Device memory that the host has let go of, oldest first, until the allocator can hand it out again.

    The host runs far ahead of a device. Memory that another stream uses than the one it was allocated on is free only
    when that stream has come so far; new memory would be taken for whatever is reloaded until then. Changed only under
    one lock. ``passed`` is told how many bytes are free.
    """

    def __init__(self, accelerator: Accelerator | None, passed: Callable[[int], None]) -> None:
        self.nbytes = 0
        self._accelerator = accelerator
        self._passed = passed
        self._pending: deque[Release] = deque()

    @property
    def oldest(self) -> Release | None:
        return self._pending[0] if self._pending else None

    def add(self, nbytes: int, streams: Iterable[Any]) -> None:
        """The host has let go of memory that these streams use."""
        accelerator = self._accelerator
        if accelerator is None or accelerator.is_capturing():  # an event of a capture says nothing of the device
            self._passed(nbytes)
            return
        events = []
        for stream in streams:
            events.append(accelerator.new_event())
            events[-1].record(stream)
        self._pending.append(Release(nbytes, events))
        self.nbytes += nbytes

    def settle(self) -> None:
        """Report what is free by now. Never blocks."""
        while self._pending and self._pending[0].is_passed():
            nbytes = self._pending.popleft().nbytes
            self.nbytes -= nbytes
            self._passed(nbytes)


class Arrival:
    """Device memory into which a copy is under way.

    Args:
        event: done with the copy; None where that was done at once.
        owner: the stream that the memory was allocated on.

    Attributes:
        consumers: streams that use the memory beside that one.
    """

    __slots__ = ("_accelerator", "_data", "_owner", "consumers", "event")

    def __init__(self, accelerator: Accelerator | None, data: torch.Tensor, event: Any, owner: Any = None) -> None:
        self._accelerator = accelerator
        self._data = data
        self._owner = owner
        self.event = event
        self.consumers: list[Any] = []

    @classmethod
    def done(cls, data: torch.Tensor) -> Arrival:
        """Memory that holds its bytes already."""
        return cls(None, data, None)

    @property
    def is_done(self) -> bool:
        """Whether the device has made the copy. Never blocks."""
        return self.event is None or bool(self.event.query())

    def join(self) -> torch.Tensor:
        """The memory (uint8, 1-D), for the calling thread's current stream, which waits for the copy."""
        if self.event is not None and self._accelerator is not None:
            consumer = self._accelerator.current_stream()
            consumer.wait_event(self.event)
            # Else the allocator would give the memory away while the consumer still reads it.
            if consumer not in (self._owner, *self.consumers):  # not "!=": no stream of torch is unequal to None
                self._accelerator.share(self._data, consumer)
                self.consumers.append(consumer)
        return self._data

    def wait(self) -> None:
        """Block the calling host thread until the copy is done."""
        if self.event is not None:
            self.event.synchronize()


class Destination(NamedTuple):
    """New device memory for bytes that come back. See [Note: Pools].

    Attributes:
        data: the memory (uint8, 1-D).
        allocated: event right after the allocation; None where everything is done at once.
        stream: the stream that it was allocated on.
    """

    data: torch.Tensor
    allocated: Any
    stream: Any


class Copies:
    """The copies between one store and the device. See [Note: Ordering]."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._out_stream = accelerator.new_stream()
        self._in_stream = accelerator.new_stream()
        self._pending: deque[PendingCopy] = deque()
        self._dropped: list[Arrival] = []
        self.is_full = False  # no device memory, so that none is asked for ahead of need until somebody has got some

    def out(self, data: torch.Tensor, target: torch.Tensor) -> PendingCopy | None:
        """Copy device bytes to the beginning of ``target``; None where that is done at return."""
        accelerator = self._accelerator
        target = target[: data.numel()]
        if accelerator.is_synchronized_device():
            accelerator.copy(data, target)
            return None
        produced = moment(accelerator)
        with accelerator.on(self._out_stream):
            # Else it would read what kernels that are queued have not made yet.
            self._out_stream.wait_event(produced)
            accelerator.copy(data, target)
            copied = moment(accelerator)
        pending = PendingCopy(copied, data)
        self._pending.append(pending)
        return pending

    def room(self, nbytes: int, device: torch.device) -> Destination:
        """Allocate memory for bytes that come back, on the calling thread's current stream; see [Note: Pools].

        Raises:
            RuntimeError, MemoryError: the device has none now.
        """
        accelerator = self._accelerator
        try:
            data = accelerator.allocate(nbytes, device)
        except (RuntimeError, MemoryError):
            self.is_full = True  # the allocator has given back all that it kept, which is not to come each time
            raise
        self.is_full = False
        # Here and not where the copy is queued: the event would stand behind whatever the stream was given since.
        return Destination(data, moment(accelerator), accelerator.current_stream())

    def into(self, source: torch.Tensor, destination: Destination, after: Iterable[PendingCopy] = ()) -> Arrival:
        """Copy as many bytes of ``source`` as the destination has room for.

        Args:
            after: copies that fill ``source``.
        """
        accelerator, data = self._accelerator, destination.data
        source = source[: data.numel()]
        if accelerator.is_synchronized_device():
            accelerator.copy(source, data)
            return Arrival.done(data)
        with accelerator.on(self._in_stream):
            # Else kernels that are queued for the former tenant of the memory would write over the bytes.
            self._in_stream.wait_event(destination.allocated)
            for copy in after:  # else it would read a slot that is not filled yet
                self._in_stream.wait_event(copy.event)
            try:
                accelerator.copy(source, data)
                event = moment(accelerator)
            except BaseException:
                self._in_stream.synchronize()  # a copy that nobody knows of may be under way into memory about to go
                raise
        return Arrival(accelerator, data, event, destination.stream)

    def drop(self, arrival: Arrival) -> None:
        """Hold memory that nobody wants any more until the copy into it is done, or it would hit the next tenant.

        Call it under the store's lock.
        """
        # A finalizer may run while its thread captures a graph, which a question to an event would spoil.
        if self._accelerator.is_capturing() or not arrival.is_done:
            self._dropped.append(arrival)

    def arrived(self, destination: Destination) -> Arrival:
        """Device memory for any stream, which this thread's current stream has filled."""
        return Arrival(self._accelerator, destination.data, moment(self._accelerator), destination.stream)

    def settle(self) -> None:
        """Free the device memory of copies that are done. Never blocks. Call it under the store's lock."""
        while self._pending and self._pending[0].is_done():
            self._pending.popleft()
        self._dropped = [arrival for arrival in self._dropped if not arrival.is_done]

    def finish(self) -> None:
        """Block until nothing of a store that is closed is copied any more. Call it under the store's lock."""
        self.hold_at_most(0)
        while self._dropped:
            self._dropped.pop().wait()

    def hold_at_most(self, nbytes: int) -> None:
        """Block until copies out hold no more device bytes than that. Call it under the store's lock."""
        self.settle()
        while sum(copy.nbytes for copy in self.under_way) > nbytes:
            self._pending.popleft().wait()

    def drain(self) -> None:
        """Block until every copy out is done, also one that failed after it was queued."""
        if self._out_stream is not None:
            self._out_stream.synchronize()

    @property
    def under_way(self) -> list[PendingCopy]:
        """Copies out, oldest first, as far as :meth:`settle` knows."""
        return list(self._pending)
