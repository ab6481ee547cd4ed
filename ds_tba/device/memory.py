"""Host memory as the kernel has it: aligned and in huge pages for direct I/O, and kept from forks.

Huge pages double the rate of direct I/O against 4 KiB pages, measured.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from typing import Any

import torch
import xxhash

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1


def allocator_advice() -> str:
    """Return how to have the allocator of host memory give back what is freed; empty where it does, or is not glibc's.

    glibc keeps freed blocks below a threshold, and raises that to the largest block freed so far, up to 32 MiB
    (mallopt(3), M_MMAP_THRESHOLD): on a CPU the process stays about as large as without offloading.
    """
    if platform.libc_ver()[0] != "glibc" or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return ""
    return "on a CPU set MALLOC_MMAP_THRESHOLD_=65536 in the environment, or glibc keeps much of what offloading frees"


def huge_page_memory(nbytes: int, *, forked: bool = True) -> torch.Tensor:
    """Return ``nbytes`` of private anonymous memory, 2 MiB-aligned, touched once, in huge pages if there are any.

    Python's default for anonymous maps is ``MAP_SHARED``, for which huge pages are often off.

    Args:
        forked: whether forked children see it. Memory of direct I/O must be kept from them (open(2), O_DIRECT): a fork
            in the middle of a request makes it copy-on-write, and the drive's bytes may land in the child's copy.
    """
    region = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(region, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    staging = memory[start : start + nbytes]
    advise_huge_pages(staging)
    if not forked:
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


def can_lock(nbytes: int) -> bool:
    """Try whether this process may lock so much memory (``RLIMIT_MEMLOCK``, ``CAP_IPC_LOCK``); return the answer."""
    libc = ctypes.CDLL(None)
    libc.mlock.argtypes = libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    try:
        region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):  # more than the machine has, or than an address can tell
        return False
    address = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
    locked: bool = libc.mlock(address, nbytes) == 0
    if locked:
        libc.munlock(address, nbytes)
    return locked


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
