"""The NVMe tier: storages in extents of anonymous swap files, one file per directory.

[Note: The way of a ticket] ``put`` reserves an extent and a staging slot, copies the device bytes into the slot and
queues a write. A write lane writes it and frees the slot. ``prefetch`` queues a read into a new slot; ``get`` hands
over what is still in staging (cancelling a write that has not begun), else waits for the read, else queues one that
overtakes the others. ``release`` only leaves a note, because it is called by finalizers, which may run inside any
critical section of any thread; whoever next takes the lock acts on it.

[Note: Degrading] A failed write leaves the bytes in staging, from where they are copied to plain host memory; its path
takes no more tensors. A failed read is tried once more and then raises: those bytes are gone.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from ds_tba.errors import ActivationLostError, StateError, StorageError
from ds_tba.io.base import IoBackend, IoHandle
from ds_tba.spans import Span
from ds_tba.store.base import Loaded, Refusal, Store
from ds_tba.store.integrity import Integrity
from ds_tba.store.lanes import AHEAD, URGENT, Lane
from ds_tba.store.swap_file import SwapFile
from ds_tba.store.swap_path import SwapPath
from ds_tba.store.ticket import SwapTicket, TicketState
from ds_tba.telemetry.stats import StoreStats
from ds_tba.transfer import StagingRing

logger = logging.getLogger(__name__)

PREFETCH_PART_OF_STAGING = 0.5
SLOW_WAIT_S = 30.0
CLOSE_TIMEOUT_S = 60.0
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
        self.stats = StoreStats()
        self.ring = ring
        self._integrity = Integrity(integrity, backend.blocks, on_device=backend.stages_on_device)
        # Not reentrant on purpose: see release().
        self._changed = threading.Condition(threading.Lock())
        self._released: queue.SimpleQueue[SwapTicket | Span] = queue.SimpleQueue()
        self._prefetched_bytes = 0
        self._writes_under_way = 0
        self._closed = False
        self.paths = [SwapPath(file, backend) for file in files]
        # Every handle before any thread: a handle that cannot be had must leave no thread behind.
        handles = [
            ([backend.open_handle(file.fd) for _ in range(lanes.write)],
             [backend.open_handle(file.fd) for _ in range(lanes.read)])
            for file in files
        ]  # fmt: skip
        for index, (path, (write, read)) in enumerate(zip(self.paths, handles, strict=True)):
            path.write_lanes = [Lane(f"ds_tba-write-{index}", path.writes, one, self._write) for one in write]
            path.read_lanes = [Lane(f"ds_tba-read-{index}", path.reads, one, self._read) for one in read]

    # ---- the contract -------------------------------------------------------------------------------------------

    def put(self, data: torch.Tensor, *, wait: bool) -> SwapTicket | Refusal:
        nbytes = data.numel()
        with self._changed:
            self._act_on_releases()
            reserved = self._reserve(nbytes, wait)
            if isinstance(reserved, Refusal):
                self.stats.fallbacks[reserved.value] += 1
                return reserved
            ticket = reserved
            self._writes_under_way += 1
            ticket.path.queued_bytes += ticket.extent.nbytes
        try:
            ticket.copy = self.ring.copy_out(data, _slot(ticket))
        except BaseException:
            with self._changed:
                self._write_is_over(ticket)
                ticket.move(_S.RELEASED)
                self._free(ticket)
            raise
        with self._changed:
            ticket.move(_S.QUEUED)
            self.stats.offloaded_bytes += nbytes
        ticket.path.writes.put(ticket)
        return ticket

    def prefetch(self, ticket: SwapTicket) -> bool:
        with self._changed:
            self._act_on_releases()
            if ticket.state is not _S.STORED or self._closed:
                return True  # in memory already, or nothing to do
            if not self._may_prefetch(ticket.extent.nbytes):
                return False
            slot = self.ring.slots.allocate(ticket.extent.nbytes)
            if slot is None:
                return False
            ticket.slot = slot
            ticket.prefetched = True
            self._prefetched_bytes += ticket.extent.nbytes
            ticket.move(_S.READ_QUEUED)
        ticket.path.reads.put(ticket, AHEAD)
        return True

    def get(self, ticket: SwapTicket, device: torch.device) -> Loaded:
        with self._changed:
            self._act_on_releases()
            state = ticket.state
            if state is _S.QUEUED:
                ticket.move(_S.FORWARDING)  # the lane skips it: the write is cancelled
            elif state is _S.WRITING:
                ticket.forwarding = True
            elif state is _S.RELEASED:
                raise StateError("bytes were asked for after they were given up; this is a bug in ds_tba")
        if state is _S.QUEUED:
            return self._forward_instead_of_write(ticket, device)
        if state is _S.WRITING:
            return self._forward_beside_write(ticket, device)
        return self._load(ticket, device)

    def release(self, ticket: SwapTicket) -> None:
        self._note(ticket)

    def take_back(self, slot: Span) -> None:
        """A lent slot is free again; callable from finalizers, as :meth:`release`."""
        self._note(slot)

    def _note(self, released: SwapTicket | Span) -> None:
        self._released.put(released)
        self._act_if_free()

    def _act_if_free(self) -> None:
        # A finalizer may run while this very thread holds the lock: then acquire() fails, and the holder looks again
        # once it has let go.
        while not self._released.empty() and self._changed.acquire(blocking=False):
            try:
                self._act_on_releases()
            finally:
                self._changed.release()

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._act_on_releases()
        stopped = True
        for path in self.paths:
            path.writes.stop(len(path.write_lanes))
            path.reads.stop(len(path.read_lanes))
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for path in self.paths:
            for lane in path.write_lanes + path.read_lanes:
                lane.join(max(0.0, deadline - time.monotonic()))
                stopped = stopped and not lane.is_alive()
        if not stopped:
            logger.error(
                "an I/O request did not end within %.0f s; its memory is left to process exit", CLOSE_TIMEOUT_S
            )
            return
        for path in self.paths:
            path.file.close()
        self.ring.close()

    # ---- under the lock -----------------------------------------------------------------------------------------

    def _reserve(self, nbytes: int, wait: bool) -> SwapTicket | Refusal:
        """An extent and a slot for ``nbytes``."""
        if self._closed:
            return Refusal.CLOSED
        if self.ring.slots.padded(nbytes) > self.ring.slots.capacity_bytes:
            return Refusal.LARGER_THAN_STAGING
        slot = self.ring.slots.allocate(nbytes)
        if slot is None and wait:
            slot = self._wait_for_slot(nbytes)
        if slot is None:
            return Refusal.STAGING_FULL
        working = [path for path in self.paths if path.failure is None]
        for path in sorted(working, key=lambda path: path.queued_bytes):
            extent = path.reserve(nbytes)
            if extent is not None:
                return SwapTicket(nbytes, self, path, extent, slot)
        self.ring.slots.free(slot)
        return Refusal.NO_SPACE if working else Refusal.PATH_FAILED

    def _may_prefetch(self, nbytes: int) -> bool:
        """Reads ahead leave half of staging to writes, while there are any; one tensor may always be read ahead."""
        if not self._writes_under_way or not self._prefetched_bytes:
            return True
        return self._prefetched_bytes + nbytes <= self.ring.slots.capacity_bytes * PREFETCH_PART_OF_STAGING

    def _wait_for_slot(self, nbytes: int) -> Span | None:
        started = time.perf_counter()
        slot = None
        # Only writes are waited for: what reads hold is freed by the thread that would be waiting here.
        while slot is None and self._writes_under_way > 0 and not self._closed:
            self._changed.wait(SLOW_WAIT_S)
            self._act_on_releases()
            if not self._closed:
                slot = self.ring.slots.allocate(nbytes)
        self.stats.stall_s += time.perf_counter() - started
        return slot

    def _act_on_releases(self) -> None:
        while True:
            try:
                ticket = self._released.get_nowait()
            except queue.Empty:
                return
            if isinstance(ticket, Span):
                self.ring.slots.free(ticket)
                self.ring.returned()
                self._changed.notify_all()
                continue
            ticket.released = True
            copying = ticket.state is _S.QUEUED and ticket.copy is not None
            if ticket.state not in (_S.STAGING, _S.FORWARDING, _S.WRITING, _S.READING, _S.RELEASED) and not copying:
                self._give_up(ticket)
            # else: a copy or a lane is using the bytes, and whoever ends that gives them up

    def _give_up(self, ticket: SwapTicket) -> None:
        if ticket.state is _S.QUEUED:
            self.stats.cancelled_bytes += ticket.nbytes
            self._write_is_over(ticket)
        self._end_prefetch(ticket)
        ticket.move(_S.RELEASED)
        ticket.host = None
        self._free(ticket)

    def _free(self, ticket: SwapTicket) -> None:
        self._free_slot(ticket)
        ticket.path.extents.free(ticket.extent)

    def _free_slot(self, ticket: SwapTicket) -> None:
        slot, ticket.slot = ticket.slot, None
        if slot is not None:
            self.ring.slots.free(slot)
            self._changed.notify_all()

    def _write_is_over(self, ticket: SwapTicket) -> None:
        self._writes_under_way -= 1
        ticket.path.queued_bytes -= ticket.extent.nbytes
        self._changed.notify_all()

    def _end_prefetch(self, ticket: SwapTicket) -> None:
        if ticket.prefetched:
            ticket.prefetched = False
            self._prefetched_bytes -= ticket.extent.nbytes

    # ---- handing over -------------------------------------------------------------------------------------------

    def _forward_instead_of_write(self, ticket: SwapTicket, device: torch.device) -> Loaded:
        try:
            data = (
                self.ring.lend(_slot(ticket), ticket.nbytes, self.take_back)
                if self.ring.lends
                else self._copy_staged(ticket, device)
            )
        except BaseException:  # such as no device memory: the script may catch that and go on
            with self._changed:
                ticket.move(_S.QUEUED)
            ticket.path.writes.put(ticket)
            raise
        with self._changed:
            self.stats.forwarded_bytes += ticket.nbytes
            self.stats.cancelled_bytes += ticket.nbytes
            self._write_is_over(ticket)
            ticket.move(_S.RELEASED)
            if self.ring.lends:
                ticket.slot = None
            self._free(ticket)
        return Loaded(data, stored=False)

    def _forward_beside_write(self, ticket: SwapTicket, device: torch.device) -> Loaded:
        try:
            data = self._copy_staged(ticket, device)
        finally:
            with self._changed:
                ticket.forwarding = False
                if ticket.state is _S.STORED or ticket.host is not None:
                    self._free_slot(ticket)  # the write ended meanwhile and left the slot to us
        with self._changed:
            self.stats.forwarded_bytes += ticket.nbytes
        return Loaded(data, stored=True)

    def _copy_staged(self, ticket: SwapTicket, device: torch.device) -> torch.Tensor:
        if ticket.copy is not None:
            ticket.copy.wait()
        return self.ring.copy_in(self.ring.view(_slot(ticket)), ticket.nbytes, device)

    def _load(self, ticket: SwapTicket, device: torch.device) -> Loaded:
        with self._changed:
            started = time.perf_counter()
            self._wait_until_loaded(ticket)
            self.stats.stall_s += time.perf_counter() - started
            if ticket.error is not None:
                # A new exception each time: one that is kept would keep the frames it passed through.
                raise type(ticket.error)(str(ticket.error)) from ticket.error
        lent = self.ring.lends and ticket.state is _S.LOADED and ticket.slot is not None
        if lent:
            data = self.ring.lend(_slot(ticket), ticket.nbytes, self.take_back)
        elif self.ring.lends and ticket.state is _S.LOADED and ticket.host is not None:
            data = self.ring.as_tensor(ticket.host, ticket.nbytes)
        else:
            source = ticket.host if ticket.host is not None else self.ring.view(_slot(ticket))
            data = self.ring.copy_in(source, ticket.nbytes, device)
        if ticket.state is _S.RESCUED:
            return Loaded(data, stored=True)
        with self._changed:
            self._end_prefetch(ticket)
            ticket.host = None
            ticket.move(_S.STORED)
            if lent:
                ticket.slot = None
            self._free_slot(ticket)
        return Loaded(data, stored=True)

    def _wait_until_loaded(self, ticket: SwapTicket) -> None:
        warned = False
        if ticket.state is _S.STORED:
            ticket.slot = self.ring.slots.allocate(ticket.extent.nbytes)
            if ticket.slot is None:
                ticket.host = self.ring.overflow(ticket.extent.nbytes)
            ticket.move(_S.READ_QUEUED)
        if ticket.state is _S.READ_QUEUED:
            ticket.path.reads.put(ticket, URGENT)
        while ticket.state not in (_S.LOADED, _S.RESCUED, _S.LOST):
            if self._closed:
                break
            notified = self._changed.wait(SLOW_WAIT_S)
            if not notified and not warned:
                warned = True
                logger.warning("backward has waited %.0f s for a read at %s", SLOW_WAIT_S, ticket.path.file.directory)
        if self._closed and ticket.host is None and ticket.error is None:
            raise StateError("the activation offloader was closed before backward: keep the engine until then")

    # ---- in the lanes -------------------------------------------------------------------------------------------

    def _write(self, ticket: SwapTicket, handle: IoHandle) -> None:
        with self.ring.beside_compute():
            self._write_queued(ticket, handle)
        self._act_if_free()

    def _write_queued(self, ticket: SwapTicket, handle: IoHandle) -> None:
        with self._changed:
            if ticket.state is not _S.QUEUED:
                return  # cancelled
            ticket.move(_S.WRITING)
            wanted = not ticket.released  # else it was given up while the device was still copying into the slot
            broken = ticket.path.failure is not None
            self.stats.writes.start()
        try:
            if ticket.copy is not None:
                ticket.copy.wait()
        except Exception as error:  # noqa: BLE001 - the copy out failed, so staging does not hold the bytes
            self._end_without_bytes(ticket, ActivationLostError(f"an activation could not leave the device: {error}"))
            return
        if not wanted:
            self._end_without_bytes(ticket, None)
            return
        staged = self.ring.view(_slot(ticket))
        failure: Exception | None = None
        try:
            if not broken:
                ticket.checksums = self._integrity.digest(staged)
                handle.write(staged, ticket.extent.offset)
        except Exception as error:  # noqa: BLE001 - a lane must survive anything, or backward would wait for ever
            failure = error
        if failure is None and not broken:
            self._end_write(ticket)
        else:
            self._rescue(ticket, staged, failure)

    def _end_without_bytes(self, ticket: SwapTicket, error: StorageError | None) -> None:
        with self._changed:
            self.stats.writes.stop(0)
            self._write_is_over(ticket)
            ticket.error = error
            ticket.move(_S.LOST)
            if ticket.released:
                self.stats.cancelled_bytes += ticket.nbytes
                self._give_up(ticket)

    def _end_write(self, ticket: SwapTicket) -> None:
        with self._changed:
            self.stats.writes.stop(ticket.extent.nbytes)
            ticket.path.written_bytes += ticket.extent.nbytes
            self._write_is_over(ticket)
            ticket.move(_S.STORED)
            if not ticket.forwarding:
                self._free_slot(ticket)
            if ticket.released:
                self._give_up(ticket)
            self._act_on_releases()

    def _rescue(self, ticket: SwapTicket, staged: torch.Tensor, failure: Exception | None) -> None:
        """Keep in host memory what cannot be written, or in its slot where there is no host memory left."""
        host: torch.Tensor | None = None
        with suppress(MemoryError, RuntimeError):
            host = self.ring.rescue(staged, ticket.nbytes)
        with self._changed:
            self.stats.writes.stop(0)
            self._write_is_over(ticket)
            ticket.move(_S.RESCUED)
            ticket.host = host
            self._note_rescue(ticket, failure)
            if host is not None and not ticket.forwarding:
                self._free_slot(ticket)
            if ticket.released:
                self._give_up(ticket)
            self._act_on_releases()

    def _note_rescue(self, ticket: SwapTicket, failure: Exception | None) -> None:
        self.stats.rescued_bytes += ticket.nbytes
        self.stats.fallbacks[Refusal.PATH_FAILED.value] += 1
        if failure is not None:
            ticket.path.fail(failure)

    def _read(self, ticket: SwapTicket, handle: IoHandle) -> None:
        with self.ring.beside_compute():
            self._read_queued(ticket, handle)
        self._act_if_free()

    def _read_queued(self, ticket: SwapTicket, handle: IoHandle) -> None:
        with self._changed:
            if ticket.state is not _S.READ_QUEUED:
                return  # given up, or read by an urgent request
            ticket.move(_S.READING)
            self.stats.reads.start()
        target = ticket.host if ticket.host is not None else self.ring.view(_slot(ticket))
        failure = ticket.path.read_checked(ticket, target, handle, self._integrity)
        with self._changed:
            self.stats.reads.stop(ticket.extent.nbytes if failure is None else 0)
            ticket.error = failure
            ticket.move(_S.LOADED if failure is None else _S.LOST)
            if failure is not None:
                self._end_prefetch(ticket)
                self._free_slot(ticket)
            if ticket.released:
                self._give_up(ticket)
            self._act_on_releases()
            self._changed.notify_all()


def _slot(ticket: SwapTicket) -> Span:
    if ticket.slot is None:
        raise StateError(f"a ticket '{ticket.state.value}' has no staging slot; this is a bug in ds_tba")
    return ticket.slot
