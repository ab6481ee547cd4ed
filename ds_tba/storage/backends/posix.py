"""How do bytes reach a file with nothing but the kernel? ``pwritev`` and ``preadv``, of which every error comes back.

Cannot see whether the drive kept what it took.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from ds_tba.device.memory import host_view, huge_page_memory
from ds_tba.errors import TransferError
from ds_tba.storage.backends.base import IoBackend, IoHandle


class PosixBackend(IoBackend):
    """The backend without dependencies: one blocking call per transfer, from as many threads as there are lanes."""

    name = "posix"
    block_bytes = 1 << 20

    def open_handle(self, fd: int) -> IoHandle:
        return PosixHandle(fd)

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        return huge_page_memory(nbytes, forked=False)


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
                    f"{verb} of {len(view) - done} bytes at offset {offset + done} failed: {error.strerror}",
                    error.errno,
                ) from error
            if moved <= 0:
                raise TransferError(f"{verb} at offset {offset} was short: {done} of {len(view)} bytes")
            done += moved
