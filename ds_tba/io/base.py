"""The contract between the store and a way of moving bytes between host memory and a file."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class IoHandle(ABC):
    """One thread's way into one file. Calls block, release the GIL, and either move every byte or raise."""

    @abstractmethod
    def write(self, data: torch.Tensor, offset: int) -> None:
        """Write ``data`` (uint8, 1-D, on the host, aligned, a multiple of the alignment) at byte ``offset``.

        Raises:
            TransferError: the request failed or was short, as far as the backend can see.
        """

    @abstractmethod
    def read(self, data: torch.Tensor, offset: int) -> None:
        """Fill ``data`` (as for :meth:`write`) from byte ``offset``.

        Raises:
            TransferError: the request failed or was short, as far as the backend can see.
        """

    def read_again(self, data: torch.Tensor, offset: int) -> None:
        """:meth:`read` for bytes that failed to come or came wrong, in the way that tells most about the reason.

        Raises:
            TransferError: as for :meth:`read`.
        """
        self.read(data, offset)

    def close(self) -> None:  # noqa: B027 - most handles hold nothing
        """Give back what the handle holds, not the file."""


class IoBackend(ABC):
    """A family of handles, and the staging memory that suits them."""

    name: str
    alignment_bytes: int
    block_bytes: int

    @abstractmethod
    def open_handle(self, fd: int) -> IoHandle:
        """A handle for the calling thread's own use on an open file descriptor."""

    @abstractmethod
    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        """Host memory (uint8, 1-D, 4096-aligned, touched) that this backend moves at its best rate."""

    def free_staging(self, staging: torch.Tensor) -> None:  # noqa: B027 - most memory is freed with its tensor
        """Give back what :meth:`allocate_staging` returned."""

    def blocks(self, nbytes: int) -> list[tuple[int, int]]:
        """The (start, end) ranges in which a transfer of ``nbytes`` reaches the drive; each may fail alone."""
        return [(start, min(start + self.block_bytes, nbytes)) for start in range(0, nbytes, self.block_bytes)]
