"""How does a storage come to NVMe and back? The store over anonymous swap files, one per directory.

[Note: The way of a ticket] ``put`` reserves an extent and a staging slot, copies the device bytes into the slot and
queues a write. A write lane writes it and frees the slot. ``prefetch`` allocates device memory and queues a read into
a new slot, from where a read lane queues the copy to the device; bytes that are still to be written are copied at once,
or stay in memory where a slot can be a tensor's. ``get`` hands over bytes that are still in staging (cancelling a write
that has not begun), else waits for the read, else queues one that overtakes the others. ``release`` only defers,
because finalizers call it; see ``ds_tba/storage/finalizers.py``.

[Note: Pieces] A storage that is larger than a part of staging is cut, so that it fits whatever its size, spreads over
all paths, and its copies, writes and reads overlap with each other.

[Note: Degrading] A failed write leaves the bytes in staging, from where they are copied to plain host memory; its path
takes no more tensors. A failed read is tried once more and then raises: those bytes are gone. A lane survives whatever
a transfer raises, or backward would wait for ever; the ticket carries the error.

[Note: Again] Memory may also run out between the lines of a lane. Then its task is called again (``space.py``, [Note:
Lanes do not die]), with what it knows in a :class:`_Work`. A transfer is made again: the same bytes between the same
places. What ends it under the lock can be done twice, up to the change of the ticket's state; a slot that is to be
freed after that may stay with its ticket, until that is used again or given up. Spans are taken from tickets before
they are freed: an exception between the two loses room until the end, where a second try could give it to two
tickets. After ``MOST_TRIES`` the bytes of a write stay where they are, and those of a read are lost by name.

Cannot see which storages are worth moving, nor in which order backward wants them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from ds_tba.device.accelerator import Arrival, Destination, PendingCopy, new_thread
from ds_tba.device.memory import is_out_of_memory
from ds_tba.errors import ActivationCorruptionError, ActivationLostError, StateError, StorageError, TransferError
from ds_tba.stats import Kind, Transfer
from ds_tba.storage.backends.base import IoBackend, IoHandle
from ds_tba.storage.base import Loaded, Refusal, Store, Ticket
from ds_tba.storage.integrity import Integrity
from ds_tba.storage.space import (
    AT_HAND,
    BEFORE_WRITTEN,
    COPY_POLL_S,
    GIVEN_UP,
    LANE_CHECK_S,
    SLOW_WAIT_S,
    URGENT,
    SwapPath,
    SwapSpace,
    SwapTicket,
    TicketState,
)
from ds_tba.storage.staging import CLOSED, StagingRing, tensor_over, wait_for_stream
from ds_tba.storage.swap_file import SwapFile

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0
RESTING_LIMIT_S = 1.0  # for writes and reads under way whose bytes nobody wants any more
COPYING_LIMIT_S = 5.0  # a copy into staging takes less, unless closing has interrupted the thread that copies
PIECE_FRACTION_OF_STAGING = 0.25
MOST_TRIES = 3  # of a transfer by a lane in which something fails that is not the drive
LAST_TRY = 50  # of what ends it
_S = TicketState


@dataclass(frozen=True, slots=True)
class Lanes:
    """How many lanes each path has."""

    write: int
    read: int


class _Work:
    """What a lane knows of its ticket, from one try to the next.

    Attributes:
        is_done: the transfer has ended, well or not.
        is_written: the file has the bytes.
        failure: of the drive, for which its path takes no more tensors.
        error: for which the bytes must not be used.
        host: the bytes in host memory.
    """

    __slots__ = ("error", "failure", "host", "is_done", "is_written", "ticket", "transfer", "tries")

    def __init__(self, ticket: SwapTicket) -> None:
        self.ticket = ticket
        self.tries = 0
        self.transfer: Transfer | None = None  # under way, for the meter
        self.is_done = self.is_written = False
        self.failure: Exception | None = None
        self.error: StorageError | None = None
        self.host: torch.Tensor | None = None


class PiecesTicket(Ticket):
    """One large storage, as the tickets of its pieces."""

    __slots__ = ("brought_back", "is_stored", "pieces", "whole")

    def __init__(self, nbytes: int, store: NvmeStore, pieces: list[SwapTicket], passing_bytes: int) -> None:
        super().__init__(nbytes, store, passing_bytes)
        self.pieces = pieces
        self.whole: Destination | None = None  # being put together
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
        integrity: takes and compares the checksums.
    """

    def __init__(
        self, files: Sequence[SwapFile], backend: IoBackend, ring: StagingRing, lanes: Lanes, integrity: str
    ) -> None:
        self.ring = ring
        self.paths = [SwapPath(file, backend, lanes.write, lanes.read) for file in files]
        self.space = SwapSpace(self.paths, ring)
        self.stats = self.space.stats
        self.integrity = Integrity(integrity, backend.blocks, on_device=backend.stages_on_device)
        part = int(ring.slots.capacity_bytes * PIECE_FRACTION_OF_STAGING)
        self._piece_bytes = max(part - part % ring.slots.alignment_bytes, ring.slots.alignment_bytes)
        # Where a slot can be the tensor's memory, putting pieces together is a copy that whole storages do not need.
        self.largest_whole_bytes = ring.slots.capacity_bytes if ring.zero_copy else self._piece_bytes
        self._pieces_lock = threading.Lock()  # of their tickets; taken before the space's, never in a finalizer
        self._backend, self._lanes = backend, lanes
        self._start_lanes()

    def _start_lanes(self) -> None:
        lanes, ring = self._lanes, self.ring
        try:
            # Every handle comes before any thread: a failure must leave no thread behind.
            for path in self.paths:
                for group, count in ((path.writes, lanes.write), (path.reads, lanes.read)):
                    for _ in range(count):
                        group.handles.append(self._backend.open_handle(path.file.fd))
            for index, path in enumerate(self.paths):
                path.writes.start(f"ds_tba-write-{index}", ring.accelerator)
                path.reads.start(f"ds_tba-read-{index}", ring.accelerator)
        except BaseException:
            self._stop_lanes()
            raise

    def trim(self) -> None:
        with self.space.lock:
            self.ring.trim()

    def rest(self) -> bool:
        space = self.space
        with space.deferred, space.deferred.lock:
            if space.closed or space.resting:
                return space.resting
            deadline_s = time.monotonic() + RESTING_LIMIT_S
            while not (space.is_idle or self.ring.is_lent) and time.monotonic() < deadline_s:
                space.changed.wait(COPY_POLL_S)  # lanes may be at work on what was given up
                space.deferred.act()
            space.resting = space.is_idle
            if not space.resting:
                return False
        if self._stop_lanes():  # else a lane hangs: what it uses stays, and closing will tell of it
            self._give_back()
        return True

    def _check_lanes_ended(self) -> None:
        if any(path.writes.handles or path.reads.handles for path in self.paths):
            raise RuntimeError("a lane of the activation offloader hangs in a request to its drive (dmesg)")

    def _give_back(self) -> None:
        with self.space.lock:
            for path in self.paths:
                path.rest()
            self.ring.rest()

    def wake(self) -> None:
        with self.space.lock:
            is_wanted = self.space.resting and not self.space.closed
        if not is_wanted:
            return
        self._check_lanes_ended()
        try:
            for path in self.paths:
                path.wake(self.ring.slots.capacity_bytes)
            self.ring.wake()
            self._start_lanes()
        except BaseException:
            self._give_back()
            raise
        with self.space.lock:
            self.space.resting = False
            is_closed = self.space.closed
        if is_closed:  # by another thread, which knew nothing of these lanes
            self.close()

    # ---- out ----------------------------------------------------------------------------------------------------

    def put(self, data: torch.Tensor, *, wait: bool) -> SwapTicket | PiecesTicket | Refusal:
        if data.numel() > self.largest_whole_bytes:
            return self._put_pieces(data, wait)
        has_pieces = wait and data.numel() > self._piece_bytes
        taken = self._put(data, wait, is_last=not has_pieces)
        # Slots that are lent to tensors come back when backward is done with them, and no wait here makes that so.
        return self._put_pieces(data, wait) if has_pieces and taken is Refusal.STAGING_FULL else taken

    def _put(self, data: torch.Tensor, wait: bool, *, is_last: bool = True) -> SwapTicket | Refusal:
        space, ticket = self.space, None
        try:
            with space.deferred, space.deferred.lock:
                reserved = space.reserve(data.numel(), wait)
                if isinstance(reserved, Refusal):
                    if is_last or reserved is not Refusal.STAGING_FULL:
                        reserved.count(self.stats, data.numel())
                    return reserved
                slot, path, extent = reserved
                ticket = SwapTicket(data.numel(), self, path, extent, slot, data.device)
                space.writes.add(ticket)
                space.copying.add(ticket)
            # Without the lock, which a copy of the host would keep from the lanes; nobody else has the ticket yet.
            copy = self.ring.copies.out(data, self.ring.view(slot))
            if copy is not None:
                ticket.copies.append(copy)
            with space.lock:
                self.stats.offloaded_bytes += ticket.nbytes
                path.writes.put(partial(self._write, _Work(ticket)))
                space.copying.discard(ticket)
        except BaseException:  # of a signal handler, too: whoever waits for a slot waits for this write
            if ticket is not None:
                try:
                    self.ring.copies.drain()  # one that nobody knows of may be under way into the slot
                finally:
                    space.copying.discard(ticket)
                    space.deferred.leave(ticket)
            raise
        return ticket

    def _put_pieces(self, data: torch.Tensor, wait: bool) -> PiecesTicket | Refusal:
        slots, nbytes = self.ring.slots, data.numel()
        with self.space.deferred, self.space.deferred.lock:
            self.space.settle_copies()
            if not wait and slots.padded(nbytes) > slots.capacity_bytes - slots.used_bytes:
                # It would have to wait for staging: refused before its first pieces are copied for nothing.
                too_large = slots.padded(nbytes) > slots.capacity_bytes
                refusal = Refusal.LARGER_THAN_STAGING if too_large else Refusal.STAGING_FULL
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
        with self.space.deferred, self.space.deferred.lock:
            if self.space.closed or ticket in self.space.read_ahead:
                return True
            if ticket.state in BEFORE_WRITTEN:
                return self.space.bring_ahead(ticket)
            if ticket.state is not _S.STORED:
                return True  # in memory already, or nothing to do
            if not self.space.begin_prefetch(ticket):
                return False
        ticket.path.reads.put(partial(self._read, _Work(ticket)))
        return True

    def get(self, ticket: SwapTicket | PiecesTicket, device: torch.device) -> Loaded:
        if isinstance(ticket, PiecesTicket):
            with self._pieces_lock:
                return self._put_together(ticket, device)
        with self.space.deferred, self.space.deferred.lock:
            self.space.settle_copies()  # backward needs the memory of what forward has finished copying
            if ticket.state not in BEFORE_WRITTEN:
                self._wait_until_loaded(ticket)
            host, is_staged = ticket.host, ticket.state is not _S.RESCUED
            # Under the lock, or a lane might free the slot between its choice and the copy. On a device the copy is
            # only queued; if it raises for want of memory, the ticket is as before, and get may be called again.
            loaded = self._hand_over(ticket, device)
        # Here: if the caller never did, the memory could go to the next tenant while it is still copied into.
        loaded.arrival.join()
        if host is not None or not is_staged:
            loaded.arrival.wait()  # the memory that it is copied from may go now
        return loaded

    def _hand_over(self, ticket: SwapTicket, device: torch.device) -> Loaded:
        """The bytes of a ticket that is in memory, and what that changes about it."""
        space, state = self.space, ticket.state
        arrival = ticket.arrival or self._bring(ticket, device)
        ticket.arrival = ticket.destination = None  # the caller's from here on
        if state in BEFORE_WRITTEN:
            self.stats.forwarded_bytes += ticket.nbytes
        if state is _S.QUEUED:
            space.give_up(ticket)  # the lane skips it: the write is cancelled
            return Loaded(arrival, stored=False)
        space.read_ahead.end(ticket)
        if state is _S.LOADED:
            ticket.host = None
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
            return self.ring.copies.into(ticket.host, self._room(ticket, device))
        if is_ours and self.ring.may_lend(ticket.held_slot):
            data, loan = self.ring.lend(ticket.held_slot, ticket.nbytes, self.space.deferred.watch)
            loan.slot, ticket.slot = ticket.slot, None  # at once: two owners would give it back twice
            return Arrival.done(data)
        return self.space.copy_in(ticket, self.ring.view(ticket.held_slot), self._room(ticket, device))

    def _room(self, ticket: SwapTicket, device: torch.device) -> Destination:
        return ticket.destination or self.ring.copies.room(ticket.nbytes, device)

    def _wait_until_loaded(self, ticket: SwapTicket) -> None:
        """Block until the bytes are in memory. Called under the lock, which each wait releases."""
        space, started = self.space, time.perf_counter()
        if space.read_ahead.end(ticket):  # from here on it is ours, and cannot be given up
            self.stats.forwarded_bytes += ticket.nbytes
        warned = False
        if space.closed and ticket.state in (_S.STORED, _S.READ_QUEUED):
            raise StateError(CLOSED)
        if ticket.state is _S.STORED:
            space.begin_urgent_read(ticket)
        if ticket.state is _S.READ_QUEUED:
            ticket.path.reads.put(partial(self._read, _Work(ticket)), URGENT)
        while ticket.state not in AT_HAND | GIVEN_UP and not space.closed:
            space.changed.wait(LANE_CHECK_S)
            is_slow = time.perf_counter() - started > SLOW_WAIT_S
            if not ticket.path.reads.revive() and is_slow:
                raise ActivationLostError(
                    f"{ticket.path.file.directory}, offset {ticket.extent.offset}: the activation cannot be read back, "
                    "because the threads that read died and cannot be started again: look for what takes the memory of "
                    "this machine, and resume from the last checkpoint."
                )
            if is_slow and not warned:
                warned = True
                logger.warning("backward has waited %.0f s for a read at %s", SLOW_WAIT_S, ticket.path.file.directory)
        if ticket.state in GIVEN_UP:
            raise StateError("bytes were asked for after they were given up; this is a bug in ds_tba")
        has_nothing = ticket.host is None and ticket.arrival is None and ticket.error is None
        if ticket.state not in AT_HAND or (space.closed and has_nothing):
            raise StateError(CLOSED)
        self.stats.stall_s += time.perf_counter() - started
        if ticket.error is not None:
            # A new exception each time: one that is kept would keep the frames it passed through.
            raise type(ticket.error)(str(ticket.error)) from ticket.error

    def _put_together(self, ticket: PiecesTicket, device: torch.device) -> Loaded:
        accelerator = self.ring.accelerator
        if ticket.whole is None:
            ticket.whole = self.ring.copies.room(ticket.nbytes, device)
        # A get that fails half-way, for lack of device memory say, may be repeated: the pieces copied so far stay.
        try:
            for piece in ticket.waiting:
                all(map(self.prefetch, ticket.waiting))  # as far as there is room
                loaded = self.get(piece, device)
                ticket.is_stored = ticket.is_stored and loaded.stored
                offset = ticket.brought_back * self._piece_bytes
                accelerator.copy(loaded.data, ticket.whole.data[offset : offset + piece.nbytes])
                ticket.brought_back += 1
        except BaseException:
            wait_for_stream(accelerator)  # the repeated one may be on another stream
            raise
        whole, ticket.whole, ticket.brought_back = ticket.whole, None, 0
        return Loaded(self.ring.copies.arrived(whole), stored=ticket.is_stored)

    # ---- giving up ----------------------------------------------------------------------------------------------

    def release(self, ticket: SwapTicket | PiecesTicket) -> None:
        self._release(ticket.pieces if isinstance(ticket, PiecesTicket) else [ticket])

    def _release(self, tickets: Sequence[SwapTicket]) -> None:
        for ticket in tickets:
            self.space.deferred.leave(ticket)

    def settle(self) -> None:
        with self.space.deferred, self.space.deferred.lock:
            self.space.settle_copies()

    def cancel_prefetch(self, ticket: SwapTicket | PiecesTicket) -> bool:
        if isinstance(ticket, PiecesTicket):
            with self._pieces_lock:
                cancelled = [self.cancel_prefetch(piece) for piece in ticket.waiting]  # each of them
                return all(cancelled)
        with self.space.deferred, self.space.deferred.lock:
            return self.space.cancel_prefetch(ticket)

    def copies_out(self) -> Sequence[PendingCopy]:
        with self.space.deferred, self.space.deferred.lock:
            self.space.settle_copies()
            return self.ring.copies.under_way

    def close(self) -> None:
        with self.space.deferred, self.space.deferred.lock:
            self.space.closed = True
            self.space.changed.notify_all()
            deadline_s = time.monotonic() + COPYING_LIMIT_S
            while self.space.copying and time.monotonic() < deadline_s:
                self.space.changed.wait(COPY_POLL_S)
        if not self._stop_lanes():
            logger.error(
                "an I/O request did not end within %.0f s; its memory is left to process exit", CLOSE_TIMEOUT_S
            )
            return
        with self.space.deferred, self.space.deferred.lock:
            try:
                # Copies that are under way read and write the memory that closing the ring frees.
                self.ring.copies.finish()
                self.ring.slots.finish()
            finally:
                for path in self.paths:
                    path.file.close()
            self.ring.close()
        if self.ring.is_lent:  # its memory goes with the last tensor, and nobody else takes the lock any more
            follow = partial(self.space.deferred.follow, lambda: self.ring.is_lent)
            new_thread(self.ring.accelerator, follow, "ds_tba-loans").start()

    def _stop_lanes(self) -> bool:
        """Let the lanes do what is queued and end; whether all of them did within the time for that."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        groups = [group for path in self.paths for group in (path.writes, path.reads)]
        for group in groups:
            group.stop()
        ended = [group.end(lambda: deadline_s - time.monotonic()) for group in groups]
        return all(ended)

    # ---- in a lane -------------------------------------------------------------------------------------------------

    def _write(self, work: _Work, handle: IoHandle) -> None:
        """Write a queued ticket, unless its write was cancelled; keep its bytes in memory if they cannot be written."""
        ticket, space = work.ticket, self.space
        work.tries += 1
        if work.tries > LAST_TRY:
            self._give_up_work(work)
            return
        with space.deferred, space.deferred.lock:
            if ticket.state is _S.QUEUED:
                ticket.move(_S.WRITING)
            elif ticket.state not in (_S.WRITING, _S.ABANDONED):
                return  # cancelled, or ended by a try before; nobody else writes this ticket
            has_failed = ticket.path.failure is not None
        if not work.is_done and work.tries <= MOST_TRIES:
            with self.ring.lane_stream():
                self._write_staged(work, handle, has_failed=has_failed)
            work.is_done = True
        self._end_write(work)

    def _write_staged(self, work: _Work, handle: IoHandle, *, has_failed: bool) -> None:
        ticket = work.ticket
        if ticket.slot is None:  # lent to a tensor that the caller never got
            work.error = ActivationLostError("a signal handler raised while backward took an activation")
            return
        try:
            for copy in ticket.copies:
                copy.wait()  # else other bytes would be written
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the copy out failed, so staging does not hold the bytes
            work.error = ActivationLostError(f"an activation could not leave the device: {error}")
            return
        staged = self.ring.view(ticket.slot)
        if not has_failed:
            self._write_out(work, staged, handle)
        if not work.is_written:
            with suppress(MemoryError, RuntimeError):
                work.host = self.ring.rescue(staged, ticket.nbytes)

    def _write_out(self, work: _Work, staged: torch.Tensor, handle: IoHandle) -> None:
        """Write the staged bytes; see [Note: Degrading]."""
        ticket = work.ticket
        if work.transfer is None:
            with self.space.lock:  # here, because the copy before was not the drive's time
                work.transfer = ticket.path.meter.start(Kind.WRITE, ticket.extent.nbytes)
        try:
            ticket.checksums = self.integrity.digest(staged)
            handle.write(staged, ticket.extent.offset)
            work.is_written = True
        except Exception as error:
            if is_out_of_memory(error):
                raise  # it says nothing of the drive: see [Note: Again]
            work.failure = error
        with self.space.lock:
            self._stop_transfer(work, moved=work.is_written)

    def _stop_transfer(self, work: _Work, *, moved: bool) -> None:
        transfer, work.transfer = work.transfer, None
        if transfer is not None:
            work.ticket.path.meter.stop(transfer, moved=moved)

    def _end_write(self, work: _Work) -> None:
        """Say what became of a write: the bytes are in the file, in memory, or lost. See [Note: Again]."""
        ticket, space = work.ticket, self.space
        with space.deferred, space.deferred.lock:
            self._stop_transfer(work, moved=work.is_written)
            if ticket.state not in (_S.WRITING, _S.ABANDONED):
                return
            space.end_write(ticket)
            if work.error is not None:
                space.read_ahead.end(ticket)
                space.drop_ahead(ticket)
                ticket.error = work.error
                if not space.end_work(ticket, _S.LOST):
                    self.stats.cancelled_bytes += ticket.nbytes
            elif work.is_written:
                stays = space.read_ahead.end_write(ticket)
                space.end_work(ticket, _S.LOADED if stays else _S.STORED)
                if not stays or ticket.arrival is not None:
                    space.free_slot(ticket)
                self.stats.written_bytes += ticket.extent.nbytes
            else:
                space.read_ahead.end(ticket)
                space.drop_ahead(ticket)
                ticket.host = work.host  # else they stay in the slot
                if work.failure is not None:
                    ticket.path.fail(work.failure)
                space.end_work(ticket, _S.RESCUED)
                if work.host is not None:
                    space.free_slot(ticket)
                self.stats.rescued_bytes += ticket.nbytes
                Refusal.PATH_FAILED.count(self.stats, ticket.nbytes)
            space.settle_copies()

    def _give_up_work(self, work: _Work) -> None:
        """End what a bug keeps from ending, so that nobody waits for it."""
        ticket, space = work.ticket, self.space
        logger.error("a lane cannot end its work with a part '%s'; this is a bug in ds_tba", ticket.state.value)
        with space.lock:
            if ticket.state is not _S.RELEASED:
                ticket.error = ActivationLostError("a lane could not end its work; this is a bug in ds_tba")
                ticket.state = _S.LOST
            space.end_write(ticket)

    def _read(self, work: _Work, handle: IoHandle) -> None:
        """Read a ticket into its slot, unless its read was cancelled or done by an urgent request."""
        ticket, space = work.ticket, self.space
        work.tries += 1
        with space.deferred, space.deferred.lock:
            if ticket.state is _S.READ_QUEUED:
                ticket.reader = work
                ticket.move(_S.READING)
            elif ticket.reader is not work or ticket.state not in (_S.READING, _S.ABANDONED):
                return
            if work.transfer is None and not work.is_done:
                work.transfer = ticket.path.meter.start(Kind.READ, ticket.extent.nbytes)
        if work.tries > LAST_TRY:
            self._give_up_work(work)
            return
        if not work.is_done and work.tries <= MOST_TRIES:
            with self.ring.lane_stream():
                self._read_staged(work, handle)
        self._end_read(work)

    def _read_staged(self, work: _Work, handle: IoHandle) -> None:
        ticket = work.ticket
        target = ticket.host if ticket.host is not None else self.ring.view(ticket.held_slot)
        work.error = self._read_checked(ticket, target, handle)
        work.is_done = True
        with self.space.lock:  # before the copy onto the device, which is not the drive's time
            self._stop_transfer(work, moved=work.error is None)
        if work.error is None and ticket.destination is not None and ticket.state is not _S.ABANDONED:
            with suppress(RuntimeError, MemoryError):  # else backward copies it when it wants it
                ticket.arrival = self.space.copy_in(ticket, target, ticket.destination)
                ticket.destination = None

    def _end_read(self, work: _Work) -> None:
        """Say what became of a read: the bytes are in memory, or lost. See [Note: Again]."""
        ticket, space = work.ticket, self.space
        if not work.is_done and work.error is None:
            work.error = ActivationLostError(
                f"{_place(ticket)}: the activation was not read back: memory ran out in {MOST_TRIES} tries (the log "
                "has each). Look for what takes the memory of this machine, and resume from the last checkpoint."
            )
        with space.deferred, space.deferred.lock:
            self._stop_transfer(work, moved=False)
            if ticket.reader is not work or ticket.state not in (_S.READING, _S.ABANDONED):
                return
            ticket.error = work.error
            if work.error is not None:
                space.read_ahead.end(ticket)
                space.drop_ahead(ticket)
            space.end_work(ticket, _S.LOADED if work.error is None else _S.LOST)
            if work.error is not None or ticket.arrival is not None:
                ticket.host = None
                space.free_slot(ticket)
            self.stats.read_bytes += ticket.extent.nbytes if work.error is None else 0
            ticket.reader = None
            space.settle_copies()

    def _read_checked(self, ticket: SwapTicket, target: torch.Tensor, handle: IoHandle) -> StorageError | None:
        """Read a ticket's bytes into ``target``, and once more if that failed or brought other bytes.

        DeepSpeed's op tells no error of a read. Returns the error for which the bytes must not be used, if there is
        one.
        """
        offset, where = ticket.extent.offset, _place(ticket)
        try:
            try:
                handle.read(target, offset)
                mismatch = self.integrity.compare(target, ticket.checksums)
                why = None if mismatch is None else "bytes read back are not the bytes written"
            except TransferError as error:
                why = str(error)
            if why is None:
                return None
            logger.warning("%s: %s; trying once more", where, why)
            handle.read_again(target, offset)
            mismatch = self.integrity.compare(target, ticket.checksums)
        except Exception as error:
            if is_out_of_memory(error):
                raise  # as above
            lost = ActivationLostError(
                f"{where}: the activation cannot be read back ({error}). Stop, check the drive (dmesg, smartctl), and "
                "resume from the last checkpoint."
            )
            lost.__cause__ = error
            return lost
        if mismatch is None:
            return None
        return ActivationCorruptionError(
            f"{where}: bytes read back are not the bytes written: {mismatch.nbytes} bytes at file offset "
            f"{offset + mismatch.offset} have checksum {mismatch.found:#018x}, expected {mismatch.expected:#018x}. A "
            "write was lost, short or stale: check the drive (dmesg, smartctl), and resume from the last checkpoint."
        )


def _place(ticket: SwapTicket) -> str:
    """Name the bytes of a ticket, for an error."""
    return f"{ticket.path.file.directory}, offset {ticket.extent.offset}, {ticket.extent.nbytes} bytes"
