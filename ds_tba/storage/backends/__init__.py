"""How do bytes reach a file? What a lane may ask of a way from staging to a file and back, and the plain way.

The other ways have a file each. Does not know tickets; a request that was lost below the backend is not seen here, but
by ``integrity.py``.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from ds_tba.device.accelerator import host_view, huge_page_memory
from ds_tba.errors import TransferError


class IoHandle(ABC):
    """One thread's way into one file. Calls block, release the GIL, and either move every byte or raise."""

    @abstractmethod
    def write(self, data: torch.Tensor, offset: int) -> None:
        """Write ``data`` (uint8, 1-D, where staging is, aligned, a multiple of the alignment) at byte ``offset``.

        Raises:
            TransferError: the request failed or was short, as far as the backend can see.
        """

    @abstractmethod
    def read(self, data: torch.Tensor, offset: int) -> None:
        """Fill ``data`` (as for :meth:`write`) from byte ``offset``.

        Raises:
            TransferError: the request failed or was short, as far as the backend can see.
        """

    def read_plainly(self, data: torch.Tensor, offset: int) -> None:
        """:meth:`read` into any memory of staging's kind, in the way that tells most about the reason of a failure.

        Raises:
            TransferError: as for :meth:`read`.
        """
        self.read(data, offset)

    def close(self) -> None:  # noqa: B027 - most handles hold nothing
        """Give back what the handle holds, not the file."""


class IoBackend(ABC):
    """A family of handles, and the staging memory that suits them.

    Attributes:
        block_bytes: a transfer reaches the drive in blocks as long, of which each may fail alone.
        stages_on_device: staging is the accelerator's memory, from which this backend reaches the file without host
            memory in between.
    """

    name: str
    block_bytes: int
    stages_on_device: bool = False

    @abstractmethod
    def open_handle(self, fd: int) -> IoHandle:
        """Open a handle on a file descriptor, for the calling thread's own use."""

    @abstractmethod
    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        """Take memory (uint8, 1-D, 4096-aligned, zeroed) that this backend moves at its best rate.

        Host memory, or the accelerator's where ``stages_on_device``; zeroing that may still be under way at return.

        Raises:
            BackendUnavailableError: it cannot be had or registered.
        """

    def free_staging(self, staging: torch.Tensor) -> None:  # noqa: B027 - most memory is freed with its tensor
        """Give back what :meth:`allocate_staging` returned."""


class PosixBackend(IoBackend):
    """Nothing but the kernel: one blocking ``pwritev`` or ``preadv`` per transfer, of which every error comes back."""

    name = "posix"
    block_bytes = 1 << 20

    def open_handle(self, fd: int) -> IoHandle:
        return PosixHandle(fd)

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        return huge_page_memory(nbytes)


class PosixHandle(IoHandle):
    """Blocking calls on ``fd`` itself."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: torch.Tensor, offset: int) -> None:
        self._move("write", os.pwritev, data, offset)

    def read(self, data: torch.Tensor, offset: int) -> None:
        self._move("read", os.preadv, data, offset)

    def _move(self, verb: str, call: Callable[[int, Any, int], int], data: torch.Tensor, offset: int) -> None:
        view = host_view(data)
        done = 0
        while done < len(view):
            try:
                moved = call(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise TransferError(
                    f"{verb} of {len(view) - done} bytes at offset {offset + done} failed: {error.strerror}"
                ) from error
            if moved <= 0:
                raise TransferError(f"{verb} at offset {offset} was short: {done} of {len(view)} bytes")
            done += moved
