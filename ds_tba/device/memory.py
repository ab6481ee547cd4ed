"""Memory for direct I/O: aligned, and on the host in huge pages, measured to double its rate against 4 KiB pages."""

from __future__ import annotations

import ctypes
import mmap

import torch

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1


def huge_page_memory(nbytes: int, *, forked: bool = True) -> torch.Tensor:
    """``nbytes`` of private anonymous memory, 2 MiB-aligned, in huge pages where the kernel has them, touched once.

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
    """``nbytes`` of a device's memory, zeroed, starting at a page: caching allocators align to 512 bytes only."""
    memory = torch.zeros(nbytes + PAGE_BYTES, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % PAGE_BYTES
    return memory[start : start + nbytes]


def keep_from_children(memory: torch.Tensor) -> None:
    """Keep page-aligned memory, of whole pages, out of forked children.

    Memory that goes back to ``malloc`` needs :func:`show_to_children` first: whatever is put there next must exist in a
    child, or the child dies of it.
    """
    _madvise(memory, mmap.MADV_DONTFORK)


def show_to_children(memory: torch.Tensor) -> None:
    """Undo :func:`keep_from_children`."""
    _madvise(memory, mmap.MADV_DOFORK)


def _madvise(memory: torch.Tensor, advice: int) -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(memory.data_ptr(), memory.numel(), advice)


def advise_huge_pages(memory: torch.Tensor, *, collapse: bool = False) -> None:
    """Ask for huge pages behind the 2 MiB-aligned part of ``memory``; a kernel that refuses costs speed only.

    Args:
        collapse: also replace the small pages that are there already (memory that was touched or locked).
    """
    start = memory.data_ptr()
    aligned = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    nbytes = (start + memory.numel() - aligned) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if nbytes <= 0:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(aligned, nbytes, _MADV_HUGEPAGE)
    if collapse:
        madvise(aligned, nbytes, _MADV_COLLAPSE)


def can_lock(nbytes: int) -> bool:
    """Whether this process may lock ``nbytes`` of memory (``RLIMIT_MEMLOCK``, ``CAP_IPC_LOCK``), by trying it."""
    libc = ctypes.CDLL(None)
    libc.mlock.argtypes = libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
    locked: bool = libc.mlock(address, nbytes) == 0
    if locked:
        libc.munlock(address, nbytes)
    return locked
