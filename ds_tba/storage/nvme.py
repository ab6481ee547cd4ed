"""The NVMe tier: storages in extents of anonymous swap files, one file per directory.

[Note: The way of a ticket] ``put`` reserves an extent and a staging slot, copies the device bytes into the slot and
queues a write. A write lane writes it and frees the slot. ``prefetch`` queues a read into a new slot, or has bytes
that are still to be written retained in staging when their write ends. ``get`` hands over bytes that are still in
staging (cancelling a write that has not begun), else waits for the read, else queues one that overtakes the others.
``release`` only defers, because finalizers call it; see ``ds_tba/storage/finalizers.py``.

[Note: Degrading] A failed write leaves the bytes in staging, from where they are copied to plain host memory; its path
takes no more tensors. A failed read is tried once more and then raises: those bytes are gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_tba.device.accelerator import Accelerator, Arrival, PendingCopy
from ds_tba.errors import StateError
from ds_tba.storage.backends.base import IoBackend
from ds_tba.storage.bandwidth_probe import BandwidthProbe
from ds_tba.storage.base import Loaded, Refusal, Store, SwapTicket, TicketState
from ds_tba.storage.integrity import Integrity
from ds_tba.storage.space import SLOW_WAIT_S, SwapSpace
from ds_tba.storage.staging import StagingRing, tensor_over
from ds_tba.storage.swap_file import SwapFile
from ds_tba.storage.swap_path import AHEAD, URGENT, Lane, SwapPath
from ds_tba.storage.worker import LaneWork

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0
_CLOSED = "the activation offloader was closed before backward: keep the engine until then"
_S = TicketState


@dataclass(frozen=True, slots=True)
class Lanes:
    """How many lanes each path has."""

    write: int
    read: int


class NvmeStore(Store[SwapTicket]):
    """Storages on NVMe.

    Args:
        files: one swap file per directory, already of their first size; closed with the store.
        backend: moves bytes between staging and the files.
        ring: staging; closed with the store.
        lanes: threads per file.
        integrity: checksum mode.
    """

    def __init__(
        self, files: Sequence[SwapFile], backend: IoBackend, ring: StagingRing, lanes: Lanes, integrity: str
    ) -> None:
        self.ring = ring
        self.paths = [SwapPath(file, backend, lanes.write, lanes.read) for file in files]
        self.space = SwapSpace(self.paths, ring)
        self.stats = self.space.stats
        self._reloader = Reloader(self.space)
        self._integrity = Integrity(integrity, backend.blocks, on_device=backend.stages_on_device)
        try:
            open_lanes(self.paths, backend, lanes, LaneWork(self.space, self._integrity), ring.accelerator)
        except BaseException:
            stop_lanes(self.paths)
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

    def put(self, data: torch.Tensor, *, wait: bool) -> SwapTicket | Refusal:
        space = self.space
        with space.lock:
            space.deferred.act()
            reserved = space.reserve(data.numel(), wait)
            if isinstance(reserved, Refusal):
                reserved.count(self.stats, data.numel())
                return reserved
            slot, path, extent = reserved
            ticket = SwapTicket(data.numel(), self, path, extent, slot, data.device)
            space.writes_under_way += 1
        try:
            copy = self.ring.copies.out(data, self.ring.view(slot))
            if copy is not None:
                ticket.copies.append(copy)
            with space.lock:
                self.stats.offloaded_bytes += ticket.nbytes
        except BaseException:
            with space.lock:
                space.end_write()
                ticket.move(_S.RELEASED)
                space.free(ticket)
            raise
        with space.lock:
            ticket.move(_S.QUEUED)
        path.writes.put(ticket)
        return ticket

    def prefetch(self, ticket: SwapTicket) -> bool:
        with self.space.lock:
            self.space.deferred.act()
            if ticket.state in (_S.QUEUED, _S.WRITING):
                return self.space.read_ahead.retain(ticket)
            if ticket.state is not _S.STORED or self.space.closed:
                return True  # in memory already, or nothing to do
            if not self.space.begin_prefetch(ticket):
                return False
            ticket.move(_S.READ_QUEUED)
        ticket.path.reads.put(ticket, AHEAD)
        return True

    def get(self, ticket: SwapTicket, device: torch.device) -> Loaded:
        return self._reloader.get(ticket, device)

    def release(self, ticket: SwapTicket) -> None:
        self.space.deferred.leave(ticket)

    def settle(self) -> None:
        with self.space.lock:
            self.space.deferred.act()
            self.space.settle_copies()

    def cancel_prefetch(self, ticket: SwapTicket) -> bool:
        with self.space.lock:
            self.space.deferred.act()
            cancelled = self.space.cancel_prefetch(ticket)
        self.space.deferred.act_if_free()
        return cancelled

    def copies_out(self) -> Sequence[PendingCopy]:
        with self.space.lock:
            self.space.deferred.act()
            self.space.settle_copies()
            found = self.ring.copies.under_way
        self.space.deferred.act_if_free()
        return found

    def close(self) -> None:
        with self.space.lock:
            self.space.closed = True
            self.space.deferred.act()
        if not stop_lanes(self.paths):
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


def open_lanes(
    paths: Sequence[SwapPath], backend: IoBackend, lanes: Lanes, work: LaneWork, accelerator: Accelerator
) -> None:
    """Start the lanes of all paths. Every handle comes before any thread: a failure must leave no thread behind."""
    for index, path in enumerate(paths):
        for _ in range(lanes.write):
            handle = backend.open_handle(path.file.fd)
            path.write_lanes.append(Lane(f"ds_tba-write-{index}", path.writes, handle, work.write, accelerator))
        for _ in range(lanes.read):
            handle = backend.open_handle(path.file.fd)
            path.read_lanes.append(Lane(f"ds_tba-read-{index}", path.reads, handle, work.read, accelerator))
    for path in paths:
        for lane in path.write_lanes + path.read_lanes:
            lane.start()


def stop_lanes(paths: Sequence[SwapPath]) -> bool:
    """Let the lanes do what is queued and end; whether all of them did within the time for that."""
    for path in paths:
        path.writes.stop(len(path.write_lanes))
        path.reads.stop(len(path.read_lanes))
    deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
    lanes = [lane for path in paths for lane in path.write_lanes + path.read_lanes]
    ended = [lane.end(max(0.0, deadline_s - time.monotonic())) for lane in lanes]
    return all(ended)


class Reloader:
    """Brings the bytes of tickets back to the device, in the thread of backward: from staging, or from the file.

    Copies to the device run without the lock, so that a lane is never held up by them. The state of the ticket, or its
    ``forwarding``, keeps everybody else from its slot meanwhile.

    Args:
        space: holds the bytes, and the lock.
    """

    def __init__(self, space: SwapSpace) -> None:
        self._space = space
        self._ring = space.ring

    def get(self, ticket: SwapTicket, device: torch.device) -> Loaded:
        """As :meth:`NvmeStore.get`."""
        with self._space.lock:
            self._space.deferred.act()
            self._space.settle_copies()  # backward needs the memory of what forward has finished copying
            state = ticket.state
            if state is _S.QUEUED:
                self._space.read_ahead.end(ticket)
                ticket.move(_S.FORWARDING)  # the lane skips it: the write is cancelled
            elif state is _S.WRITING:
                self._space.read_ahead.end(ticket)
                ticket.forwarding = True  # the lane leaves the slot to this thread
            elif state is _S.RELEASED:
                raise StateError("bytes were asked for after they were given up; this is a bug in ds_tba")
        if state is _S.QUEUED:
            return self._forward_instead_of_write(ticket, device)
        if state is _S.WRITING:
            return self._forward_during_write(ticket, device)
        return self._load(ticket, device)

    def _forward_instead_of_write(self, ticket: SwapTicket, device: torch.device) -> Loaded:
        try:
            arrival = self._lend(ticket) if self._ring.zero_copy else self._copy_staged(ticket, device)
        except BaseException:  # such as no device memory: the script may catch that and go on
            with self._space.lock:
                ticket.move(_S.QUEUED)
            ticket.path.writes.put(ticket)
            raise
        with self._space.lock:
            self._space.stats.forwarded_bytes += ticket.nbytes
            self._space.stats.cancelled_bytes += ticket.nbytes
            self._space.end_write()
            ticket.move(_S.RELEASED)
            self._space.free(ticket)  # not the slot, if that was lent
        return Loaded(arrival, stored=False)

    def _forward_during_write(self, ticket: SwapTicket, device: torch.device) -> Loaded:
        try:
            arrival = self._copy_staged(ticket, device)
        finally:
            with self._space.lock:
                ticket.forwarding = False
                if ticket.state is _S.STORED or ticket.host is not None:
                    self._space.free_slot(ticket)  # the write ended meanwhile and left the slot to us
        with self._space.lock:
            self._space.stats.forwarded_bytes += ticket.nbytes
        return Loaded(arrival, stored=True)

    def _copy_staged(self, ticket: SwapTicket, device: torch.device) -> Arrival:
        staged = self._ring.view(ticket.held_slot)
        arrival = self._ring.copies.into(staged, ticket.nbytes, device, after=ticket.copies)
        ticket.uses.append(arrival.event)  # so that the slot is written again only when the copy has read it
        return arrival

    def _lend(self, ticket: SwapTicket) -> Arrival:
        """The slot itself as the tensor's memory."""
        data = self._ring.lend(ticket.held_slot, ticket.nbytes, self._space.deferred.leave)
        ticket.slot = None
        return Arrival.done(data)

    def _load(self, ticket: SwapTicket, device: torch.device) -> Loaded:
        with self._space.lock:
            started = time.perf_counter()
            self._space.read_ahead.end(ticket)  # from here on it is ours, and cannot be given up
            self._wait_until_loaded(ticket)
            self._space.stats.stall_s += time.perf_counter() - started
            if ticket.error is not None:
                # A new exception each time: one that is kept would keep the frames it passed through.
                raise type(ticket.error)(str(ticket.error)) from ticket.error
        arrival = self._arrival(ticket, device)
        if ticket.state is _S.RESCUED:
            return Loaded(arrival, stored=True)
        with self._space.lock:
            self._space.read_ahead.end(ticket)
            self._space.stats.forwarded_bytes += ticket.nbytes if ticket.was_retained else 0
            ticket.was_retained = False
            ticket.host = ticket.arrival = None
            ticket.move(_S.STORED)
            self._space.free_slot(ticket)
        return Loaded(arrival, stored=True)

    def _arrival(self, ticket: SwapTicket, device: torch.device) -> Arrival:
        if ticket.arrival is not None:
            return ticket.arrival
        if ticket.host is None:
            zero_copy = self._ring.zero_copy and ticket.state is _S.LOADED
            return self._lend(ticket) if zero_copy else self._copy_staged(ticket, device)
        if self._ring.zero_copy and ticket.state is _S.LOADED:
            return Arrival.done(tensor_over(ticket.host, ticket.nbytes))
        arrival = self._ring.copies.into(ticket.host, ticket.nbytes, device)
        arrival.wait()  # that memory may go now
        return arrival

    def _wait_until_loaded(self, ticket: SwapTicket) -> None:
        """Block until the bytes are in memory. Called under the lock, which each wait releases."""
        warned = False
        if ticket.state is _S.STORED:
            ticket.slot = self._ring.slots.allocate(ticket.extent.nbytes)
            if ticket.slot is None:
                ticket.host = self._ring.backing.overflow(ticket.extent.nbytes)
            ticket.move(_S.READ_QUEUED)
        if ticket.state is _S.READ_QUEUED:
            ticket.path.reads.put(ticket, URGENT)
        while ticket.state not in (_S.LOADED, _S.RESCUED, _S.LOST):
            if self._space.closed:
                break
            notified = self._space.changed.wait(SLOW_WAIT_S)
            if not notified and not warned:
                warned = True
                logger.warning("backward has waited %.0f s for a read at %s", SLOW_WAIT_S, ticket.path.file.directory)
        if self._space.closed and ticket.host is None and ticket.arrival is None and ticket.error is None:
            raise StateError(_CLOSED)
