"""Large storages in pieces, so that they fit staging whatever their size, and spread over all paths.

A storage of more than one piece is put, read ahead and brought back piece by piece, so that its copies, writes and
reads overlap with each other, whatever its size.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from ds_tba.device.accelerator import PendingCopy
from ds_tba.storage.base import Loaded, Refusal, Store, Ticket
from ds_tba.storage.space import SwapSpace

PIECE_FRACTION_OF_STAGING = 0.25


class PiecesTicket(Ticket):
    """One large storage, as the tickets of its pieces."""

    __slots__ = ("brought_back", "is_stored", "pieces", "whole")

    def __init__(self, nbytes: int, store: PiecesStore, pieces: list[Ticket], passing_bytes: int) -> None:
        super().__init__(nbytes, store, passing_bytes)
        self.pieces = pieces
        self.whole: torch.Tensor | None = None  # being put together
        self.brought_back = 0  # pieces in it
        self.is_stored = True


class PiecesStore(Store[PiecesTicket]):
    """Cuts large storages into pieces, and passes all others on to the inner store.

    Args:
        inner: takes the pieces and the other storages; closed with this store.
        space: of the store in which they end up.
    """

    def __init__(self, inner: Store[Any], space: SwapSpace) -> None:
        self._inner = inner
        self._space = space
        self._copies = space.ring.copies
        slots = space.ring.slots
        part = int(slots.capacity_bytes * PIECE_FRACTION_OF_STAGING)
        self._piece_bytes = max(part - part % slots.alignment_bytes, slots.alignment_bytes)
        # Where a slot can be the tensor's memory, putting pieces together is a copy that whole storages do not need.
        self._largest_whole_bytes = slots.capacity_bytes if space.ring.zero_copy else self._piece_bytes
        self._lock = threading.Lock()  # of the tickets; taken before the inner store's, never in a finalizer

    def put(self, data: torch.Tensor, *, wait: bool) -> Ticket | Refusal:  # type: ignore[override]
        """As :meth:`Store.put`; the ticket of a storage that is not cut is the inner store's own."""
        if data.numel() <= self._largest_whole_bytes:
            taken: Ticket | Refusal = self._inner.put(data, wait=wait)
            return taken
        if not wait and (refusal := self._refuse(data.numel())) is not None:
            return refusal
        pieces: list[Ticket] = []
        try:
            for part in torch.split(data, self._piece_bytes):
                piece = self._inner.put(part, wait=wait)
                if isinstance(piece, Refusal):
                    _release(pieces)
                    return piece
                pieces.append(piece)
        except BaseException:
            _release(pieces)
            raise
        # On a device that runs behind, every piece is held until the kernels queued before have gone.
        ring, nbytes = self._space.ring, data.numel()
        return PiecesTicket(nbytes, self, pieces, min(nbytes, ring.slots.capacity_bytes) if ring.zero_copy else nbytes)

    def prefetch(self, ticket: PiecesTicket) -> bool:
        with self._lock:
            return self._prefetch(ticket)

    def get(self, ticket: PiecesTicket, device: torch.device) -> Loaded:
        with self._lock:
            if ticket.whole is None:
                ticket.whole = self._copies.allocate(ticket.nbytes, device)
            # A get that fails half-way, for lack of device memory say, may be repeated: the pieces copied so far stay.
            for piece in ticket.pieces[ticket.brought_back :]:
                self._prefetch(ticket)
                loaded = piece.store.get(piece, device)
                ticket.is_stored = ticket.is_stored and loaded.stored
                offset = ticket.brought_back * self._piece_bytes
                self._copies.copy(loaded.data, ticket.whole[offset : offset + piece.nbytes])
                ticket.brought_back += 1
            whole, ticket.whole, ticket.brought_back = ticket.whole, None, 0
        return Loaded(self._copies.arrived(whole), stored=ticket.is_stored)

    def release(self, ticket: PiecesTicket) -> None:
        _release(ticket.pieces)

    def settle(self) -> None:
        self._inner.settle()

    def cancel_prefetch(self, ticket: PiecesTicket) -> bool:
        with self._lock:
            waiting = ticket.pieces[ticket.brought_back :]
            cancelled = sum(piece.store.cancel_prefetch(piece) for piece in waiting)
        return cancelled == len(waiting)

    def copies_out(self) -> Sequence[PendingCopy]:
        return self._inner.copies_out()

    def trim(self) -> None:
        self._inner.trim()

    def close(self) -> None:
        self._inner.close()

    def _refuse(self, nbytes: int) -> Refusal | None:
        """Refuse a storage that would have to wait for staging, before its first pieces are copied for nothing."""
        slots = self._space.ring.slots
        if slots.padded(nbytes) <= slots.capacity_bytes - slots.used_bytes:
            return None
        with self._space.lock:
            too_large = slots.padded(nbytes) > slots.capacity_bytes
            reason = Refusal.LARGER_THAN_STAGING if too_large else Refusal.STAGING_FULL
            reason.count(self._space.stats, nbytes)
        return reason

    @staticmethod
    def _prefetch(ticket: PiecesTicket) -> bool:
        return all(piece.store.prefetch(piece) for piece in ticket.pieces[ticket.brought_back :])


def _release(pieces: list[Ticket]) -> None:
    for piece in pieces:
        piece.store.release(piece)
