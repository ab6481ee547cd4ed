"""Pinning host memory where it lies, so that a device copies from it and to it by itself.

``torch``'s own pinned memory is rounded up to powers of two, and is new memory: master and moments would have to move.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ds_tba.device.memory import PAGE_BYTES


@dataclass(slots=True)
class PinnedRange:
    """Bytes of one tensor's storage that are pinned; holds the storage, which must not be freed before."""

    storage: torch.UntypedStorage
    address: int
    nbytes: int


class Registry:
    """The host memory that one run has pinned.

    Args:
        register: pins ``(address, nbytes)``; False where that is refused.
        unregister: undoes it.
        limit_bytes: of all that is pinned; None sets none.
    """

    def __init__(
        self, register: Callable[[int, int], bool], unregister: Callable[[int], object], limit_bytes: int | None
    ) -> None:
        self._register = register
        self._unregister = unregister
        self._limit_bytes = limit_bytes
        self._ranges: dict[int, PinnedRange] = {}
        self._refused: dict[int, int] = {}  # tried once
        self._pid = os.getpid()
        self.pinned_bytes = 0

    def pin(self, tensor: torch.Tensor) -> bool:
        """Pin the whole storage of a host tensor, if it is not pinned yet and the limit allows it.

        Returns:
            Whether it is pinned.
        """
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if self.is_pinned(tensor):
            return True
        if address in self._refused:
            return False
        if self._limit_bytes is not None and self.pinned_bytes + nbytes > self._limit_bytes:
            return False
        if self._covers_pages_of_others(address, nbytes):
            return False  # a small array, beside another one: not worth a word
        if not self._register(address, nbytes):
            self._refused[address] = nbytes
            return False
        self._ranges[address] = PinnedRange(storage, address, nbytes)
        self.pinned_bytes += nbytes
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor is pinned, by us or by somebody else."""
        storage = tensor.untyped_storage()
        present = self._ranges.get(storage.data_ptr())
        return (
            (present is not None and present.nbytes == storage.nbytes()) or not storage.nbytes() or tensor.is_pinned()
        )

    @property
    def refused_bytes(self) -> int:
        """Bytes that could not be pinned."""
        return sum(self._refused.values())

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Unpin everything but the storages of these tensors: the others were replaced, as by loading a checkpoint."""
        kept = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for address in [address for address in self._ranges if address not in kept]:
            self._unpin(address)
        self._refused = {address: nbytes for address, nbytes in self._refused.items() if address in kept}

    def close(self) -> None:
        """Unpin everything; not in a forked child, which has neither the pins nor the device."""
        if os.getpid() != self._pid:
            return
        for address in list(self._ranges):
            self._unpin(address)

    def _unpin(self, address: int) -> None:
        self.pinned_bytes -= self._ranges[address].nbytes
        self._unregister(address)
        del self._ranges[address]

    def _covers_pages_of_others(self, address: int, nbytes: int) -> bool:
        """Whether one of the pages is pinned already, for a neighbour: a page cannot be pinned twice."""
        first, last = address // PAGE_BYTES, (address + nbytes - 1) // PAGE_BYTES
        return any(
            one.address // PAGE_BYTES <= last and first <= (one.address + one.nbytes - 1) // PAGE_BYTES
            for one in self._ranges.values()
        )


def cuda_registry(limit_bytes: int | None) -> Registry:
    """For CUDA: ``cudaHostRegister`` and ``cudaHostUnregister``."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(address: int, nbytes: int) -> bool:
        return is_done(runtime.cudaHostRegister(address, nbytes, 0))

    def unregister(address: int) -> None:
        is_done(runtime.cudaHostUnregister(address))

    def is_done(error: Any) -> bool:
        if int(error) == 0:
            return True
        # CUDA keeps the refusal as its last error, and torch raises that after the next kernel, whosever it is.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
        return False

    return Registry(register, unregister, limit_bytes)
