"""The NVMe store's ticket: where the bytes of one storage are, as a state machine."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from ds_tba.errors import StateError, StorageError
from ds_tba.spans import Span
from ds_tba.store.base import Store, Ticket
from ds_tba.transfer import PendingCopy


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


class SwapTicket(Ticket):
    """One storage in the NVMe store's care. Only that store changes it, under its lock."""

    __slots__ = (
        "checksums",
        "copy",
        "error",
        "extent",
        "forwarding",
        "host",
        "path",
        "prefetched",
        "released",
        "slot",
        "state",
    )

    def __init__(self, nbytes: int, store: Store[SwapTicket], path: Any, extent: Span, slot: Span) -> None:
        super().__init__(nbytes, store)
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
