"""The device of one rank: its streams and events, its memory and the host's, and threads on it.

Cannot see what is saved, nor who else takes the device's memory.

[Note: Room] Saved tensors may take what is left of a device beside the peak of everything else in a step: gradients,
logits, buckets, optimizer states. Free memory after the optimizer step says too little: gradients and logits are gone
by then. So everything else is sampled at the ends of steps, and at every hook while micro-steps are recorded. Between
two samples the accelerator's own peak tells whether there was more.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import xxhash

KINDS = ("cpu", "cuda")  # of devices that are served, by torch's names
THREAD_PREFIX = "ds_tba-"  # of the names of our threads
PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# For each version of control groups: where they are mounted, who rules memory, and the files of a group.
_VERSIONS = (
    ("", "", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
# Part of a device's memory that is left to temporaries, fragmentation and other libraries, where no budget is set.
TEMPORARY_FRACTION = 0.1
PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1


# ---- streams --------------------------------------------------------------------------------------------------------


class Event(Protocol):
    """A point in the work of a stream."""

    def record(self, stream: Stream) -> None:
        """Stand for what the stream was given so far."""

    def query(self) -> bool:
        """Return whether the device has come so far. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Block the calling host thread until the device has come so far."""


class Stream(Protocol):
    """Work that a device does in order."""

    def wait_event(self, event: Event) -> None:
        """Have what the stream is given from here on wait for the event. Never blocks the host."""

    def synchronize(self) -> None:
        """Block the calling host thread until the device has done what the stream was given so far."""


class AtOnce:
    """The one stream, and every event, of a synchronous device, whose calls are done when they return."""

    def query(self) -> bool:
        return True

    def _pass(self, *_: object) -> None:
        """There is nothing to wait for."""

    record = wait_event = synchronize = _pass


AT_ONCE = AtOnce()


# ---- memory ---------------------------------------------------------------------------------------------------------


class MemoryLevels(NamedTuple):
    """A device's memory at one time."""

    in_use_bytes: int  # that nothing new can have: of tensors, and of what was freed while another stream uses it
    peak_in_use_bytes: int  # the most of them since the peak was last reset
    reserved_bytes: int  # that the allocator has taken from the device
    allocation_retries: int  # how often the device was full, and the allocator gave all unused bytes back


def available_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Return the memory that can be taken without swapping, by all processes together that share it.

    It is ``MemAvailable`` of proc(5), or what is left to a control group (cgroups(7)) that this process is in, as
    containers and batch systems have them; 0 where a limit is exceeded.
    """
    meminfo = (proc / "meminfo").read_text(encoding="ascii")
    machine_bytes = int(meminfo.partition("MemAvailable:")[2].split()[0]) * 1024
    return max(0, min([machine_bytes, *_left_bytes(proc, groups)]))


def _left_bytes(proc: Path, groups: Path) -> list[int]:
    """Return the bytes left to each limited group, from this process's own up. Its cached pages count as free."""
    memberships: list[list[str]] = []  # hierarchy, controllers, path
    with suppress(OSError):  # a kernel may be without these files, or a sandbox may hide them
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
        memberships = [line.split(":", 2) for line in lines]
    found = []
    for mount, controller, limit, held, cached in _VERSIONS:
        root = groups / mount
        own = root / next((path.lstrip("/") for _, ruled, path in memberships if controller in ruled.split(",")), "")
        for group in [own, *own.parents]:
            if group.is_relative_to(root):
                with suppress(OSError, ValueError):  # "max": no limit
                    limit_bytes, held_bytes = (int((group / one).read_text(encoding="ascii")) for one in (limit, held))
                    stat = (group / "memory.stat").read_text(encoding="ascii").split()
                    cached_bytes = int(dict(zip(stat[::2], stat[1::2], strict=True)).get(cached, 0))
                    found.append(limit_bytes - held_bytes + cached_bytes)
    return found


class MemoryMeter:
    """The most device memory that everything but saved tensors held at once; see [Note: Room]."""

    def __init__(self, accelerator: Accelerator, resident_bytes: Callable[[], int]) -> None:
        self._accelerator = accelerator
        self._now_resident_bytes = resident_bytes  # tells how much of the device's memory saved tensors hold
        self._resident_before_bytes = 0
        self._peak_bytes = math.inf  # at the last sample; before the first there is nothing to compare with
        self._most_bytes = 0

    def sample(self) -> None:
        """Take the level of now, and the peak since the last sample."""
        resident_bytes = self._now_resident_bytes()
        try:
            levels = self._accelerator.levels()
        except OSError:  # /proc cannot be read while no file descriptor is free: the samples before count
            return
        peak_bytes, others_bytes = levels.peak_in_use_bytes, levels.in_use_bytes - resident_bytes
        if peak_bytes > self._peak_bytes:
            # How much of that peak was ours is not known. Take the lower of our two levels: that errs on the safe side.
            others_bytes = max(others_bytes, peak_bytes - min(self._resident_before_bytes, resident_bytes))
        self._most_bytes = max(self._most_bytes, others_bytes)
        self._resident_before_bytes, self._peak_bytes = resident_bytes, peak_bytes

    def room_bytes(self) -> float:
        """Return the bytes that saved tensors may hold; see [Note: Room]."""
        free_bytes = self._accelerator.free_bytes()
        others_bytes = self._accelerator.levels().in_use_bytes - self._now_resident_bytes()
        return max(0.0, free_bytes - max(0, self._most_bytes - others_bytes))


# ---- memory of the host, as the kernel has it -----------------------------------------------------------------------
# Aligned and in huge pages for direct I/O, whose rate these double against 4 KiB pages, measured; and kept from forks.


def huge_page_memory(nbytes: int) -> torch.Tensor:
    """Return ``nbytes`` of private anonymous memory, 2 MiB-aligned, touched once, in huge pages if there are any.

    Python's default for anonymous maps is ``MAP_SHARED``, for which huge pages are often off. Forked children do not
    see it, as memory of direct I/O must not be seen (open(2), O_DIRECT): a fork in the middle of a request makes it
    copy-on-write, and the drive's bytes may land in the child's copy.
    """
    region = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(region, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    staging = memory[start : start + nbytes]
    advise_huge_pages(staging)
    keep_from_children(staging)
    return staging.zero_()


def aligned_memory(nbytes: int, device: torch.device | str) -> torch.Tensor:
    """Return zeroed memory of a device that starts at a page: caching allocators align to 512 bytes only."""
    memory = torch.zeros(nbytes + PAGE_BYTES, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % PAGE_BYTES
    return memory[start : start + nbytes]


def keep_from_children(memory: torch.Tensor) -> bool:
    """Keep page-aligned memory, of whole pages, out of forked children; False where the kernel refuses.

    Memory that goes back to ``malloc`` needs :func:`show_to_children` first: whatever is put there next must exist in a
    child, or the child dies of it.
    """
    return _madvise(memory, mmap.MADV_DONTFORK) == 0


def show_to_children(memory: torch.Tensor) -> None:
    """Undo :func:`keep_from_children`."""
    _madvise(memory, mmap.MADV_DOFORK)


def _madvise(memory: torch.Tensor, advice: int) -> int:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return int(madvise(memory.data_ptr(), memory.numel(), advice))


def advise_huge_pages(memory: torch.Tensor, *, collapse: bool = False) -> None:
    """Ask for huge pages behind the 2 MiB-aligned part of ``memory``; a kernel that refuses costs speed only.

    Args:
        collapse: also replace the small pages that are there already (memory that was touched or locked).
    """
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    nbytes = max(0, memory.numel() - start) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE) if collapse else (_MADV_HUGEPAGE,):
        if nbytes:
            _madvise(memory[start : start + nbytes], advice)


def digest_of(data: torch.Tensor) -> int:
    """Return XXH3 of a contiguous host tensor (uint8), and leave it resizable, unlike what NumPy has seen."""
    size = data.numel()
    return xxhash.xxh3_64_intdigest((ctypes.c_char * size).from_address(data.data_ptr()) if size else b"")


def host_view(data: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous host tensor (uint8), sharing its memory."""
    array: Any = data.numpy()
    return memoryview(array)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out: of a device, of the CPU's allocator, or of Python."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # RuntimeErrors: of c10/core/impl/alloc_cpu.cpp the first two, of drivers and their libraries the others.
    texts = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


# ---- the device -----------------------------------------------------------------------------------------------------


class Accelerator:
    """The operations of a device that offloading needs, here of a CPU's, which is synchronous.

    Its streams and events are all ``AT_ONCE``, so that whoever records, waits or shares writes it once for every
    device. Those of an asynchronous device are torch's. Memory is uint8, 1-D.
    """

    # Every call is done when it returns, and its memory is the host's: for the few places where that changes more than
    # a wait.
    is_synchronous = True

    def device(self) -> torch.device:
        """Return this rank's device, with its index where it has one."""
        return torch.device("cpu")

    def enter_thread(self) -> None:
        """Make it the current device of the calling thread, which is one of ours."""

    def mark(self) -> Any:
        """Mark the present in the current stream."""
        return time.perf_counter()

    def elapsed_s(self, earlier: Any, later: Any) -> float:
        """Return the seconds between two marks. Blocks the host until the device has passed both."""
        return float(later - earlier)

    def free_bytes(self) -> float:
        """Return the memory that activations may take, less a part for temporaries between them.

        On a CPU it is what can be taken without swapping, which all processes share.
        """
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps much of what was freed
        if trim is not None:
            trim(0)
        return (1 - TEMPORARY_FRACTION) * available_bytes()

    def levels(self) -> MemoryLevels:
        """Return the levels of its memory, on a CPU the resident memory of this process and its peak, by proc(5)."""
        status = (PROC / "self/status").read_text(encoding="ascii", errors="replace")
        now, peak = (int(status.partition(key)[2].split()[0]) * 1024 for key in ("VmRSS:", "VmHWM:"))
        return MemoryLevels(now, peak, now, 0)

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph."""
        return False

    def is_of_graph(self, storage: torch.UntypedStorage) -> bool:
        """Return whether device memory belongs to a graph, which uses it again whoever frees it."""
        return False

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return new host memory that the device copies from and to while the host goes on."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def give_pinned_back(self) -> None:
        """Give pinned memory that nobody uses back to the system, where its allocator would keep it."""

    def new_stream(self) -> Stream:
        """Return a new stream of the device."""
        return AT_ONCE

    def current_stream(self) -> Stream:
        """Return the calling thread's stream."""
        return AT_ONCE

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Return the context in which ``stream`` is current, and with it its device."""
        return nullcontext()

    def new_event(self) -> Event:
        """Return an event without timing."""
        return AT_ONCE

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return memory of the current stream's pool."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue a copy of bytes on the current stream; on a CPU copy them, on one thread.

        Those of ``Tensor.copy_`` would take the cores from the lanes, and cost a small copy more than they save it.

        Raises:
            TypeError: one of them is not host memory, or they differ in size.
        """
        nbytes = source.numel()
        if (source.device.type, target.device.type, target.numel()) != ("cpu", "cpu", nbytes):
            raise TypeError(f"{nbytes} bytes on {source.device} do not fit {target.numel()} bytes on {target.device}")
        # Not through NumPy: a tensor that it has seen can never be resized again, and the source is the user's.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)

    def launch(self, kernel: Callable[..., object], *tensors: torch.Tensor) -> None:
        """Queue ops on tensors on the current stream."""
        kernel(*tensors)

    def share(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Tell the allocator that ``stream`` uses a tensor which another stream allocated."""


class CudaAccelerator(Accelerator):
    """The CUDA device (or ROCm's, which torch gives the same name) that is current now.

    A new thread's current device is the first, whatever the rank, so that streams are asked for by its index.
    """

    is_synchronous = False

    def __init__(self) -> None:
        self._module: Any = torch.get_device_module("cuda")
        self._index: int = self._module.current_device()

    def device(self) -> torch.device:
        return torch.device("cuda", self._index)

    def enter_thread(self) -> None:
        self._module.set_device(self._index)

    def mark(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self.current_stream())
        return event

    def elapsed_s(self, earlier: Any, later: Any) -> float:
        later.synchronize()
        earlier.synchronize()
        return float(earlier.elapsed_time(later)) / 1000.0

    def free_bytes(self) -> float:
        """Return what is left to the device and the allocator, less a part for temporaries between activations.

        Blocks that the allocator keeps count as free: saved tensors take theirs from the pools of training's own
        streams, whatever brings them back (``copies.py``, [Note: Pools]).
        """
        free_bytes, total_bytes = self._module.mem_get_info(self._index)
        levels = self.levels()
        free_bytes += max(0, levels.reserved_bytes - levels.in_use_bytes)
        return max(0.0, free_bytes - TEMPORARY_FRACTION * total_bytes)

    def levels(self) -> MemoryLevels:
        counts: dict[str, int] = self._module.memory_stats(self._index) or {}

        def most(when: str) -> int:  # "active" also has what record_stream() holds; not every allocator counts it
            return max(counts.get(f"{kind}_bytes.all.{when}", 0) for kind in ("active", "allocated"))

        reserved_bytes = counts.get("reserved_bytes.all.current", 0)
        return MemoryLevels(most("current"), most("peak"), reserved_bytes, counts.get("num_alloc_retries", 0))

    def is_capturing(self) -> bool:
        return bool(self._module.is_current_stream_capturing())

    def is_of_graph(self, storage: torch.UntypedStorage) -> bool:
        """Return whether ``torch.compile(mode="reduce-overhead")`` has it in its pool (``cudagraph_trees.py``)."""
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        with suppress(AssertionError):  # of older PyTorch, in a thread that has never run such a graph
            manager = None if trees is None else trees.get_manager(self._index, create_if_none_exists=False)
            return manager is not None and storage._cdata in manager.live_cudagraph_pool_storages_in_curr_execution()
        return False

    def pinned(self, nbytes: int) -> torch.Tensor:
        # Pinned as it is made: pinning a tensor that is there would take as much memory again, and copy it. And by
        # torch: of what DeepSpeed pins under DS_PIN_MEMORY_BACKEND=native CUDA does not know, so that copies block.
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def give_pinned_back(self) -> None:
        with suppress(AttributeError):  # a PyTorch without it keeps the memory pinned to the end of the process
            torch._C._host_emptyCache()

    def new_stream(self) -> Stream:
        return self._module.Stream(device=self._index)

    def current_stream(self) -> Stream:
        return self._module.current_stream(self._index)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return self._module.stream(stream)

    def new_event(self) -> Event:
        """Return an event whose waiters sleep, and leave the core to others."""
        return self._module.Event(blocking=True)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def share(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)  # type: ignore[arg-type]  # it is one of torch's here


def accelerator_of(kind: str) -> Accelerator:
    """Return the accelerator of the current device of a kind, by torch's name for it; one of ``KINDS``."""
    return Accelerator() if kind == "cpu" else CudaAccelerator()


def new_thread(accelerator: Accelerator, run: Callable[[], None], name: str) -> threading.Thread:
    """Make a thread of ours, not yet started. It runs on the accelerator's device, in a stream of its own there."""

    def on_device() -> None:
        with ExitStack() as entered:
            with suppress(Exception):  # a device that is broken keeps no thread from its work, nor from its end
                accelerator.enter_thread()  # left on the first device, it would open a context there (half a GiB)
                # In the default stream its kernels would stand behind all that the training thread has queued.
                entered.enter_context(accelerator.on(accelerator.new_stream()))
            run()

    # Not a subclass: what Python itself keeps in a Thread differs from version to version.
    # A daemon: interpreter exit must reach our own atexit hook, which stops the lanes in order.
    return threading.Thread(target=on_device, name=name, daemon=True)


def moment(accelerator: Accelerator, stream: Stream | None = None) -> Event:
    """Record an event on a stream, if not another one the calling thread's current one."""
    event = accelerator.new_event()
    event.record(accelerator.current_stream() if stream is None else stream)
    return event


# ---- memory that is being copied ------------------------------------------------------------------------------------


class PendingCopy:
    """A copy out of device memory."""

    __slots__ = ("event", "nbytes", "storage")

    def __init__(self, event: Event, source: torch.Tensor) -> None:
        self.event = event
        self.nbytes = source.numel()
        # Held until the copy is done, or the allocator would give the memory away (``copies.py``).
        self.storage: torch.UntypedStorage | None = None if event is AT_ONCE else source.untyped_storage()

    def free_if_done(self) -> bool:
        """Free the memory if the copy is done; return whether it is. Never blocks."""
        if self.storage is not None and self.event.query():  # else it would go while it is still copied
            self.storage = None
        return self.storage is None

    def wait(self) -> None:
        """Block the calling host thread until the copy is done."""
        if self.storage is not None:
            self.event.synchronize()
            self.storage = None


class Arrival:
    """Device memory into which a copy is under way."""

    __slots__ = ("_accelerator", "_data", "_owner", "consumers", "event", "version")

    def __init__(self, accelerator: Accelerator, data: torch.Tensor, event: Event, owner: Stream) -> None:
        self._accelerator = accelerator
        self._data = data
        self._owner = owner  # the stream that the memory was allocated on
        self.event = event  # done with the copy
        self.consumers: list[Stream] = []  # streams that use the memory beside its owner
        # The host has queued the copy by now. Memory of the user's inference mode, for a measurement, has no version.
        self.version = -1 if data.is_inference() else data._version  # of the memory once its bytes are there

    def join(self) -> torch.Tensor:
        """Return the memory (uint8, 1-D) for the calling thread's current stream, which waits for the copy."""
        consumer = self._accelerator.current_stream()
        consumer.wait_event(self.event)  # or its kernels would read bytes that have not come yet
        # Else the allocator would give the memory away while the consumer still reads it.
        if consumer not in (self._owner, *self.consumers):
            self._accelerator.share(self._data, consumer)
            self.consumers.append(consumer)
        return self._data

    def wait(self) -> None:
        """Block the calling host thread until the copy is done."""
        self.event.synchronize()
