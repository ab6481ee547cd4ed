"""How does a storage come to NVMe and back? The store over anonymous swap files, one per directory.

[Note: The way of a ticket] ``put`` reserves an extent and a staging slot, copies the device bytes into the slot and
queues a write. A write lane writes it and frees the slot. ``prefetch`` queues a read into a new slot, or has bytes that
are still to be written stay in memory when that is done. ``get`` hands over bytes that are still in staging (cancelling
a write that has not begun), else waits for the read, else queues one that overtakes the others. ``release`` only
defers, because finalizers call it; see ``ds_tba/storage/finalizers.py``.

[Note: Pieces] A storage that is larger than a part of staging is cut, so that it fits whatever its size, spreads over
all paths, and its copies, writes and reads overlap with each other.

[Note: Degrading] A failed write leaves the bytes in staging, from where they are copied to plain host memory; its path
takes no more tensors. A failed read is tried once more and then raises: those bytes are gone.

Cannot see which storages are worth moving, nor in which order backward wants them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ds_tba.device.accelerator import Arrival, PendingCopy
from ds_tba.errors import StateError
from ds_tba.storage.backends.base import IoBackend
from ds_tba.storage.bandwidth_probe import BandwidthProbe
from ds_tba.storage.base import Loaded, Refusal, Store, SwapTicket, Ticket, TicketState
from ds_tba.storage.integrity import Integrity
from ds_tba.storage.lanes import URGENT
from ds_tba.storage.space import BEFORE_WRITTEN, SLOW_WAIT_S, SwapSpace
from ds_tba.storage.staging import StagingRing, tensor_over
from ds_tba.storage.swap_file import SwapFile
from ds_tba.storage.swap_path import SwapPath
from ds_tba.storage.worker import LaneWork

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0
PIECE_FRACTION_OF_STAGING = 0.25
_CLOSED = "the activation offloader was closed before backward: keep the engine until then"
_S = TicketState


@dataclass(frozen=True, slots=True)
class Lanes:
    """How many lanes each path has."""

    write: int
    read: int


class PiecesTicket(Ticket):
    """One large storage, as the tickets of its pieces."""

    __slots__ = ("brought_back", "is_stored", "pieces", "whole")

    def __init__(self, nbytes: int, store: NvmeStore, pieces: list[SwapTicket], passing_bytes: int) -> None:
        super().__init__(nbytes, store, passing_bytes)
        self.pieces = pieces
        self.whole: torch.Tensor | None = None  # being put together
        self.brought_back = 0  # pieces in it
        self.is_stored = True

    @property
    def waiting(self) -> list[SwapTicket]:
        """The pieces that are not in ``whole`` yet."""
        return self.pieces[self.brought_back :]


class NvmeStore(Store[SwapTicket | PiecesTicket]):
    """Storages on NVMe.

    Args:
        files: one swap file per directory, already of their first size; closed with the store.
        backend: moves bytes between staging and the files.
        ring: staging; closed with the store.
        lanes: threads per file.
        integrity: checksum mode.

    Attributes:
        largest_whole_bytes: larger storages are cut into pieces.
    """

    def __init__(
        self, files: Sequence[SwapFile], backend: IoBackend, ring: StagingRing, lanes: Lanes, integrity: str
    ) -> None:
        self.ring = ring
        self.paths = [SwapPath(file, backend, lanes.write, lanes.read) for file in files]
        self.space = SwapSpace(self.paths, ring)
        self.stats = self.space.stats
        self._integrity = Integrity(integrity, backend.blocks, on_device=backend.stages_on_device)
        self._work = LaneWork(self.space, self._integrity)
        part = int(ring.slots.capacity_bytes * PIECE_FRACTION_OF_STAGING)
        self._piece_bytes = max(part - part % ring.slots.alignment_bytes, ring.slots.alignment_bytes)
        # Where a slot can be the tensor's memory, putting pieces together is a copy that whole storages do not need.
        self.largest_whole_bytes = ring.slots.capacity_bytes if ring.zero_copy else self._piece_bytes
        self._pieces_lock = threading.Lock()  # of their tickets; taken before the space's, never in a finalizer
        try:
            # Every handle comes before any thread: a failure must leave no thread behind.
            for path in self.paths:
                path.open_lanes(backend, lanes.write, lanes.read)
            for index, path in enumerate(self.paths):
                path.writes.start(f"ds_tba-write-{index}", ring.accelerator)
                path.reads.start(f"ds_tba-read-{index}", ring.accelerator)
        except BaseException:
            self._stop_lanes()
            raise

    def measure(self) -> None:
        """Have the lanes find the rates of all paths, with noise in room that is free; blocks for a moment.

        A path whose file has no room yet is left out. The bytes that this writes count as wear
        (``SwapPath.written_bytes``), not in ``stats``, which are about tensors.

        Raises:
            PathError: a write or a read failed.
        """
        BandwidthProbe(self.space, self._integrity).run([path for path in self.paths if path.failure is None])

    def trim(self) -> None:
        with self.space.lock:
            self.ring.trim()

    # ---- out ----------------------------------------------------------------------------------------------------

    def put(self, data: torch.Tensor, *, wait: bool) -> SwapTicket | PiecesTicket | Refusal:
        return self._put(data, wait) if data.numel() <= self.largest_whole_bytes else self._put_pieces(data, wait)

    def _put(self, data: torch.Tensor, wait: bool) -> SwapTicket | Refusal:
        space = self.space
        with space.deferred:
            reserved = space.reserve(data.numel(), wait)
            if isinstance(reserved, Refusal):
                reserved.count(self.stats, data.numel())
                return reserved
            slot, path, extent = reserved
            ticket = SwapTicket(data.numel(), self, path, extent, slot, data.device)
            space.writes_under_way += 1
        try:
            # Without the lock, which a copy of the host would keep from the lanes; nobody else has the ticket yet.
            copy = self.ring.copies.out(data, self.ring.view(slot))
        except BaseException:
            with space.deferred:
                space.give_up(ticket)
            raise
        if copy is not None:
            ticket.copies.append(copy)
        with space.lock:
            self.stats.offloaded_bytes += ticket.nbytes
        path.writes.put(partial(self._work.write, ticket))
        return ticket

    def _put_pieces(self, data: torch.Tensor, wait: bool) -> PiecesTicket | Refusal:
        slots, nbytes = self.ring.slots, data.numel()
        if not wait and slots.padded(nbytes) > slots.capacity_bytes - slots.used_bytes:
            # It would have to wait for staging: refused before its first pieces are copied for nothing.
            too_large = slots.padded(nbytes) > slots.capacity_bytes
            refusal = Refusal.LARGER_THAN_STAGING if too_large else Refusal.STAGING_FULL
            with self.space.lock:
                refusal.count(self.stats, nbytes)
            return refusal
        pieces: list[SwapTicket] = []
        try:
            for part in torch.split(data, self._piece_bytes):
                piece = self._put(part, wait)
                if isinstance(piece, Refusal):
                    self._release(pieces)
                    return piece
                pieces.append(piece)
        except BaseException:
            self._release(pieces)
            raise
        # On a device that runs behind, every piece is held until the kernels queued before have gone.
        return PiecesTicket(nbytes, self, pieces, min(nbytes, slots.capacity_bytes) if self.ring.zero_copy else nbytes)

    # ---- back ---------------------------------------------------------------------------------------------------

    def prefetch(self, ticket: SwapTicket | PiecesTicket) -> bool:
        if isinstance(ticket, PiecesTicket):
            with self._pieces_lock:
                return all(self.prefetch(piece) for piece in ticket.waiting)
        with self.space.deferred:
            if self.space.closed or ticket in self.space.read_ahead:
                return True
            if ticket.state in BEFORE_WRITTEN:
                return self.space.read_ahead.add_early(ticket)
            if ticket.state is not _S.STORED:
                return True  # in memory already, or nothing to do
            if not self.space.begin_prefetch(ticket):
                return False
        ticket.path.reads.put(partial(self._work.read, ticket))
        return True

    def get(self, ticket: SwapTicket | PiecesTicket, device: torch.device) -> Loaded:
        if isinstance(ticket, PiecesTicket):
            with self._pieces_lock:
                return self._put_together(ticket, device)
        with self.space.deferred:
            self.space.settle_copies()  # backward needs the memory of what forward has finished copying
            if ticket.state not in BEFORE_WRITTEN:
                self._wait_until_loaded(ticket)
            host = ticket.host
            # Under the lock, or a lane might free the slot between its choice and the copy. On a device the copy is
            # only queued; if it raises for want of memory, the ticket is as before, and get may be called again.
            loaded = self._hand_over(ticket, device)
        if host is not None:
            loaded.arrival.wait()  # that memory may go now
        return loaded

    def _hand_over(self, ticket: SwapTicket, device: torch.device) -> Loaded:
        """The bytes of a ticket that is in memory, and what that changes about it."""
        space, state = self.space, ticket.state
        arrival = ticket.arrival or self._bring(ticket, device)
        if state in BEFORE_WRITTEN:
            self.stats.forwarded_bytes += ticket.nbytes
        if state is _S.QUEUED:
            space.give_up(ticket)  # the lane skips it: the write is cancelled
            return Loaded(arrival, stored=False)
        space.read_ahead.end(ticket)
        if state is _S.LOADED:
            ticket.host = ticket.arrival = None
            ticket.move(_S.STORED)
            space.free_slot(ticket)
        return Loaded(arrival, stored=True)

    def _bring(self, ticket: SwapTicket, device: torch.device) -> Arrival:
        """Bytes onto the device from where they are: the slot, or memory beside it."""
        # Nobody else uses the memory of these, so that it can be the tensor's own.
        is_ours = self.ring.zero_copy and ticket.state in (_S.QUEUED, _S.LOADED)
        if ticket.host is not None:
            if is_ours:
                return Arrival.done(tensor_over(ticket.host, ticket.nbytes))
            return self.ring.copies.into(ticket.host, ticket.nbytes, device)
        if not is_ours:
            return self._copy_staged(ticket, device)
        data = self.ring.lend(ticket.held_slot, ticket.nbytes, self.space.deferred.leave)
        ticket.slot = None
        return Arrival.done(data)

    def _copy_staged(self, ticket: SwapTicket, device: torch.device) -> Arrival:
        # After the copies into the slot, or bytes that the device has not written yet would be handed over.
        staged = self.ring.view(ticket.held_slot)
        arrival = self.ring.copies.into(staged, ticket.nbytes, device, after=ticket.copies)
        ticket.uses.append(arrival.event)  # so that the slot is written again only when the copy has read it
        return arrival

    def _wait_until_loaded(self, ticket: SwapTicket) -> None:
        """Block until the bytes are in memory. Called under the lock, which each wait releases."""
        space, started = self.space, time.perf_counter()
        if ticket.state in (_S.RELEASED, _S.ABANDONED):
            raise StateError("bytes were asked for after they were given up; this is a bug in ds_tba")
        space.read_ahead.end(ticket)  # from here on it is ours, and cannot be given up
        warned = False
        if ticket.state is _S.STORED:
            ticket.slot = self.ring.slots.allocate(ticket.extent.nbytes)
            if ticket.slot is None:
                ticket.host = self.ring.overflow(ticket.extent.nbytes)
            ticket.move(_S.READ_QUEUED)
        if ticket.state is _S.READ_QUEUED:
            ticket.path.reads.put(partial(self._work.read, ticket), URGENT)
        while ticket.state not in (_S.LOADED, _S.RESCUED, _S.LOST) and not space.closed:
            notified = space.changed.wait(SLOW_WAIT_S)
            if not notified and not warned:
                warned = True
                logger.warning("backward has waited %.0f s for a read at %s", SLOW_WAIT_S, ticket.path.file.directory)
        if space.closed and ticket.host is None and ticket.arrival is None and ticket.error is None:
            raise StateError(_CLOSED)
        self.stats.stall_s += time.perf_counter() - started
        if ticket.error is not None:
            # A new exception each time: one that is kept would keep the frames it passed through.
            raise type(ticket.error)(str(ticket.error)) from ticket.error

    def _put_together(self, ticket: PiecesTicket, device: torch.device) -> Loaded:
        copies = self.ring.copies
        if ticket.whole is None:
            ticket.whole = copies.allocate(ticket.nbytes, device)
        # A get that fails half-way, for lack of device memory say, may be repeated: the pieces copied so far stay.
        for piece in ticket.waiting:
            for ahead in ticket.waiting:
                if not self.prefetch(ahead):
                    break
            loaded = self.get(piece, device)
            ticket.is_stored = ticket.is_stored and loaded.stored
            offset = ticket.brought_back * self._piece_bytes
            copies.copy(loaded.data, ticket.whole[offset : offset + piece.nbytes])
            ticket.brought_back += 1
        whole, ticket.whole, ticket.brought_back = ticket.whole, None, 0
        return Loaded(copies.arrived(whole), stored=ticket.is_stored)

    # ---- giving up ----------------------------------------------------------------------------------------------

    def release(self, ticket: SwapTicket | PiecesTicket) -> None:
        self._release(ticket.pieces if isinstance(ticket, PiecesTicket) else [ticket])

    def _release(self, tickets: Sequence[SwapTicket]) -> None:
        for ticket in tickets:
            self.space.deferred.leave(ticket)

    def settle(self) -> None:
        with self.space.deferred:
            self.space.settle_copies()

    def cancel_prefetch(self, ticket: SwapTicket | PiecesTicket) -> bool:
        if isinstance(ticket, PiecesTicket):
            with self._pieces_lock:
                cancelled = [self.cancel_prefetch(piece) for piece in ticket.waiting]  # each of them
                return all(cancelled)
        with self.space.deferred:
            return self.space.cancel_prefetch(ticket)

    def copies_out(self) -> Sequence[PendingCopy]:
        with self.space.deferred:
            self.space.settle_copies()
            return self.ring.copies.under_way

    def close(self) -> None:
        with self.space.deferred:
            self.space.closed = True
        if not self._stop_lanes():
            logger.error(
                "an I/O request did not end within %.0f s; its memory is left to process exit", CLOSE_TIMEOUT_S
            )
            return
        try:
            # Copies that are under way read and write the memory that closing the ring frees.
            self.ring.copies.finish()
            self.ring.slots.finish()
        finally:
            for path in self.paths:
                path.file.close()
        self.ring.close()

    def wait_for_writes(self) -> None:
        """Block until no write is queued or under way."""
        with self.space.lock:
            while self.space.writes_under_way and not self.space.closed:
                self.space.changed.wait(SLOW_WAIT_S)

    def _stop_lanes(self) -> bool:
        """Let the lanes do what is queued and end; whether all of them did within the time for that."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        groups = [group for path in self.paths for group in (path.writes, path.reads)]
        for group in groups:
            group.stop()
        ended = [group.end(lambda: deadline_s - time.monotonic()) for group in groups]
        return all(ended)
