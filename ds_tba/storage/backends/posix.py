"""How do bytes reach a file with nothing but the kernel? ``pwritev`` and ``preadv``, of which every error comes back.

Cannot see whether the drive kept what it took.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from typing import Any

import torch

from ds_tba.config import IO_ALIGNMENT_BYTES
from ds_tba.device.memory import host_view, huge_page_memory
from ds_tba.errors import TransferError
from ds_tba.storage.backends.base import IoBackend, IoHandle

_LONGEST_REQUEST_BYTES = 1 << 30  # the kernel moves at most 2 GiB - 4096 in one call


class PosixBackend(IoBackend):
    """The backend without dependencies: one blocking call per transfer, from as many threads as there are lanes."""

    name = "posix"
    alignment_bytes = IO_ALIGNMENT_BYTES
    block_bytes = 1 << 20

    def open_handle(self, fd: int) -> IoHandle:
        return PosixHandle(fd)

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        return huge_page_memory(nbytes, forked=False)


class PosixHandle(IoHandle):
    """Blocking calls on ``fd`` itself."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)

    def write(self, data: torch.Tensor, offset: int) -> None:
        self._move("write", os.pwritev, data, offset)
        if not self._direct:
            os.fdatasync(self._fd)
            self._drop_cache(data, offset)

    def read(self, data: torch.Tensor, offset: int) -> None:
        self._move("read", os.preadv, data, offset)
        if not self._direct:
            self._drop_cache(data, offset)

    def _move(self, verb: str, call: Callable[[int, Any, int], int], data: torch.Tensor, offset: int) -> None:
        view = host_view(data)
        done = 0
        while done < len(view):
            piece = view[done : done + _LONGEST_REQUEST_BYTES]
            try:
                moved = call(self._fd, [piece], offset + done)
            except OSError as error:
                raise TransferError(
                    f"{verb} of {len(piece)} bytes at offset {offset + done} failed: {error.strerror}", error.errno
                ) from error
            if moved <= 0:
                raise TransferError(f"{verb} at offset {offset} was short: {done} of {len(view)} bytes")
            done += moved

    def _drop_cache(self, data: torch.Tensor, offset: int) -> None:
        # Without O_DIRECT the page cache would keep a copy, in the memory that offloading is meant to save.
        os.posix_fadvise(self._fd, offset, data.numel(), os.POSIX_FADV_DONTNEED)
