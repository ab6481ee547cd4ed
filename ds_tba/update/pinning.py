"""Host memory that is pinned in place, so that a device copies from it and to it by itself.

``torch``'s own pinned memory is new memory, rounded up to powers of two: master and moments would have to be copied.

[Note: Pins and forks] After a fork private pages are the parent's and the child's, until one of them writes: then a
page that is pinned is copied for the child at once, or, under older kernels and drivers, the parent's writes go to
another page than the device's, which reads old bytes. So pinned pages are kept out of forked children. A page that
an array shares is never pinned: a child may need what else is there, such as the records of ``malloc``.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import SupportsInt

import torch

from ds_tba.device.accelerator import PAGE_BYTES, keep_from_children, show_to_children


class Registry:
    """The host memory that one run has pinned: whole pages, which forked children do not have."""

    def __init__(self, driver: CudaDriver, limit_bytes: int | None) -> None:
        self._driver = driver
        self._limit_bytes = limit_bytes  # of ``pinned_bytes``; None sets none
        # Whole pages by the address of their storage. The views hold it: pinned memory must not be freed.
        self._pages: dict[int, torch.Tensor] = {}
        self._refused: dict[int, int] = {}  # bytes by address: a driver that refuses takes its time for it
        self._pid = os.getpid()
        self.pinned_bytes = 0

    def pin(self, tensor: torch.Tensor) -> bool:
        """Pin the whole pages of a host tensor's storage, if the limit allows it; return whether they are pinned."""
        if self.is_pinned(tensor):
            return True
        storage = tensor.untyped_storage()
        address, pages = storage.data_ptr(), _whole_pages(storage)
        if address in self._refused or not pages.nbytes:
            return False
        if self._limit_bytes is not None and self.pinned_bytes + pages.nbytes > self._limit_bytes:
            return False
        # Kept from children before it is pinned: another thread may fork at any time.
        if not keep_from_children(pages) or not self._driver.register(pages.data_ptr(), pages.nbytes):
            show_to_children(pages)
            self._refused[address] = pages.nbytes
            return False
        self._pages[address] = pages
        self.pinned_bytes += pages.nbytes
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a host tensor is pinned, in its whole pages by us or by somebody else."""
        storage = tensor.untyped_storage()
        present = self._pages.get(storage.data_ptr())
        is_ours = present is not None and present.untyped_storage().nbytes() == storage.nbytes()
        return is_ours or not storage.nbytes() or tensor.is_pinned()

    @property
    def refused_bytes(self) -> int:
        """Bytes that could not be pinned."""
        return sum(self._refused.values())

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Unpin everything but the storages of these tensors. A checkpoint that was loaded has replaced the others."""
        kept = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for address in [address for address in self._pages if address not in kept]:
            self._unpin(address)
        self._refused = {address: nbytes for address, nbytes in self._refused.items() if address in kept}

    def close(self) -> None:
        """Unpin everything, but not in a forked child, which has neither the pins nor the pages nor the device."""
        if os.getpid() != self._pid:
            # Never freed there, or malloc would hand out memory that does not exist.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pages))
            return
        for address in list(self._pages):
            self._unpin(address)

    def _unpin(self, address: int) -> None:
        pages = self._pages[address]
        self._driver.unregister(pages.data_ptr())
        show_to_children(pages)  # before malloc has it again
        self.pinned_bytes -= pages.nbytes
        del self._pages[address]


def _whole_pages(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of a storage that lie in pages of its own."""
    start = -storage.data_ptr() % PAGE_BYTES
    nbytes = max(0, storage.nbytes() - start) // PAGE_BYTES * PAGE_BYTES
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)[start : start + nbytes]


class CudaDriver:
    """The calls of CUDA that pin host memory in place: ``cudaHostRegister`` and ``cudaHostUnregister``."""

    def __init__(self) -> None:
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(self, address: int, nbytes: int) -> bool:
        """Pin memory; False if the driver refuses it."""
        return self._is_done(self._runtime.cudaHostRegister(address, nbytes, 0))

    def unregister(self, address: int) -> None:
        """Unpin memory that was pinned at this address."""
        self._is_done(self._runtime.cudaHostUnregister(address))

    @staticmethod
    def _is_done(error: SupportsInt) -> bool:
        if int(error) == 0:
            return True
        # CUDA keeps the refusal as its last error, and torch would raise that after the next kernel, whosever it is.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
        return False
