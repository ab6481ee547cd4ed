"""The contract between the tensor cache and a tier that holds bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ds_tba.errors import StateError, StorageError
from ds_tba.spans import Span
from ds_tba.transfer import PendingCopy


class Refusal(Enum):
    """Why a store cannot take a tensor now; the values are the report's words."""

    STAGING_FULL = "staging full"
    LARGER_THAN_STAGING = "larger than io.staging_bytes"
    NO_SPACE = "no space in the swap file"
    PATH_FAILED = "path failed"
    CLOSED = "store closed"


class TicketState(Enum):
    """Where the bytes of a ticket are."""

    STAGING = "being copied into staging"
    QUEUED = "in staging, write not started"
    FORWARDING = "in staging, being handed over instead of written"
    WRITING = "in staging, write under way"
    STORED = "in the swap file"
    READ_QUEUED = "in the swap file, read not started"
    READING = "read under way"
    LOADED = "in staging, read done"
    RESCUED = "in host memory or staging, because a write failed"
    LOST = "nowhere"
    RELEASED = "given up"


_S = TicketState
_MOVES: dict[TicketState, tuple[TicketState, ...]] = {
    _S.STAGING: (_S.QUEUED, _S.RELEASED),
    _S.QUEUED: (_S.WRITING, _S.FORWARDING, _S.RELEASED),
    _S.FORWARDING: (_S.QUEUED, _S.RELEASED),
    _S.WRITING: (_S.STORED, _S.RESCUED, _S.LOST),
    _S.STORED: (_S.READ_QUEUED, _S.RELEASED),
    _S.READ_QUEUED: (_S.READING, _S.STORED, _S.RELEASED),
    _S.READING: (_S.LOADED, _S.LOST),
    _S.LOADED: (_S.STORED, _S.RELEASED),
    _S.RESCUED: (_S.RELEASED,),
    _S.LOST: (_S.RELEASED,),
    _S.RELEASED: (),
}


class Ticket:
    """One storage in a store's care. Only the store changes it, under its lock."""

    __slots__ = (
        "checksums",
        "copy",
        "error",
        "extent",
        "forwarding",
        "host",
        "nbytes",
        "path",
        "prefetched",
        "released",
        "slot",
        "state",
    )

    def __init__(self, nbytes: int, path: Any, extent: Span, slot: Span) -> None:
        self.nbytes = nbytes
        self.path = path
        self.extent = extent
        self.slot: Span | None = slot
        self.state = TicketState.STAGING
        self.checksums: tuple[int, ...] = ()
        self.copy: PendingCopy | None = None
        self.host: torch.Tensor | None = None
        self.error: StorageError | None = None
        self.forwarding = False
        self.prefetched = False
        self.released = False

    def move(self, state: TicketState) -> None:
        """Go to ``state``.

        Raises:
            StateError: the move is illegal.
        """
        if state not in _MOVES[self.state]:
            raise StateError(f"illegal move of a ticket from '{self.state.value}' to '{state.value}'")
        self.state = state


@dataclass(frozen=True, slots=True)
class Loaded:
    """Bytes back on the device.

    Attributes:
        data: the storage (uint8, 1-D, on the device).
        stored: whether the store still has them too; if not, ``data`` is the only copy.
    """

    data: torch.Tensor
    stored: bool


class Store(ABC):
    """Holds the bytes of storages between pack and unpack."""

    @abstractmethod
    def put(self, data: torch.Tensor, *, wait: bool) -> Ticket | Refusal:
        """Take a storage; its device memory may be reused once the producing stream has passed this point.

        Args:
            data: the whole storage (uint8, 1-D, on the device).
            wait: wait for room in staging while writes are draining, instead of refusing.
        """

    @abstractmethod
    def prefetch(self, ticket: Ticket) -> bool:
        """Start reading a stored ticket; False where the prefetch bound or staging has no room for it now."""

    @abstractmethod
    def get(self, ticket: Ticket, device: torch.device) -> Loaded:
        """The bytes of a ticket on the device: handed over from memory if a write is unfinished, else read.

        Raises:
            ActivationLostError: they could not be read back.
            ActivationCorruptionError: what was read is not what was written.
        """

    @abstractmethod
    def release(self, ticket: Ticket) -> None:
        """Give the bytes up. Never blocks, and may be called from a finalizer in any thread at any point."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""
