"""The NVMe store's ticket: where the bytes of one storage are, as a state machine."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from ds_tba.device.accelerator import Arrival, PendingCopy
from ds_tba.errors import StateError, StorageError
from ds_tba.storage.allocator import Span
from ds_tba.storage.base import StateMachine, Store, Ticket


class TicketState(Enum):
    """Where the bytes of a ticket are."""

    STAGING = "being copied into staging"
    QUEUED = "in staging, write not started"
    FORWARDING = "in staging, being handed over instead of written"
    WRITING = "in staging, write under way"
    RETURNING = "in the swap file, and on its way from staging to the device"
    STORED = "in the swap file"
    READ_QUEUED = "in the swap file, read not started"
    READING = "read under way"
    LOADED = "in staging or on the device, and in the swap file"
    RESCUED = "in host memory or staging, because a write failed"
    LOST = "nowhere"
    RELEASED = "given up"


_S = TicketState
_MOVES: dict[TicketState, tuple[TicketState, ...]] = {
    _S.STAGING: (_S.QUEUED, _S.RELEASED),
    _S.QUEUED: (_S.WRITING, _S.FORWARDING, _S.RELEASED),
    _S.FORWARDING: (_S.QUEUED, _S.RELEASED),
    _S.WRITING: (_S.STORED, _S.LOADED, _S.RETURNING, _S.RESCUED, _S.LOST),
    _S.RETURNING: (_S.LOADED,),
    _S.STORED: (_S.READ_QUEUED, _S.RELEASED),
    _S.READ_QUEUED: (_S.READING, _S.STORED, _S.RELEASED),
    _S.READING: (_S.LOADED, _S.LOST),
    _S.LOADED: (_S.STORED, _S.RELEASED),
    _S.RESCUED: (_S.RELEASED,),
    _S.LOST: (_S.RELEASED,),
    _S.RELEASED: (),
}


class SwapTicket(Ticket, StateMachine):
    """One storage in the NVMe store's care. Only that store changes it, under its lock."""

    __slots__ = (
        "arrival",
        "checksums",
        "copies",
        "device",
        "error",
        "extent",
        "forwarding",
        "host",
        "path",
        "prefetched",
        "released",
        "slot",
        "state",
        "stayed",
        "uses",
        "wanted",
    )

    noun = "a ticket"
    moves = _MOVES

    def __init__(
        self, nbytes: int, store: Store[SwapTicket], path: Any, extent: Span, slot: Span, device: torch.device
    ) -> None:
        super().__init__(nbytes, store)
        self.device = device
        self.path = path
        self.extent = extent
        self.slot: Span | None = slot
        self.state = TicketState.STAGING
        self.checksums: tuple[int, ...] = ()
        self.copies: list[PendingCopy] = []  # into the slot
        self.uses: list[Any] = []  # events of copies out of the slot
        self.arrival: Arrival | None = None  # what was read ahead, on the device
        self.host: torch.Tensor | None = None
        self.error: StorageError | None = None
        self.forwarding = False
        self.wanted = False  # read ahead was asked for while it was still to be written
        self.stayed = False  # since its write: nothing was read
        self.prefetched = False
        self.released = False

    def wait_for_copies(self) -> None:
        """Block until the device has written its bytes into the slot."""
        for copy in self.copies:
            copy.wait()

    @property
    def held_slot(self) -> Span:
        """The staging slot.

        Raises:
            StateError: there is none in this state.
        """
        if self.slot is None:
            raise StateError(f"a ticket '{self.state.value}' has no staging slot; this is a bug in ds_tba")
        return self.slot
