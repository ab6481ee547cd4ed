"""Where is there room for a storage, who holds it, and who works there?

Tickets, the directories of ``nvme_path`` with their lanes, staging slots and extents, and the lock of all. A lane is a
thread with an I/O handle of its own. Writes and reads of a swap file have lanes and a queue each, so that reads never
queue behind writes. Does not know how bytes move: ``nvme.py`` has the ways of a ticket.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, ClassVar

import torch

from ds_tba.config import PREFETCH_FRACTION_OF_STAGING
from ds_tba.device.accelerator import Accelerator, Arrival, Destination, PendingCopy, new_thread
from ds_tba.errors import StateError, StorageError, TransferError
from ds_tba.stats import KindMeter, PathMeter, StoreStats, readable
from ds_tba.storage.backends.base import IoBackend, IoHandle
from ds_tba.storage.base import Refusal, StateMachine, Store, Ticket
from ds_tba.storage.finalizers import DeferredFinalizers
from ds_tba.storage.staging import Loan, Span, SpanAllocator, StagingRing
from ds_tba.storage.swap_file import SwapFile, repair_of

logger = logging.getLogger(__name__)

SLOW_WAIT_S = 30.0
COPY_POLL_S = 0.001
_FULL = (errno.ENOSPC, errno.EDQUOT)
LANE_CHECK_S = 1.0  # whoever waits for a lane looks as often whether it lives
AGAIN_S = 0.01  # between two tries of a lane, in which memory may come back
# What a lane does with its handle; called again after an exception, until it returns; see [Note: Lanes do not die].
Task = Callable[[IoHandle], None]
URGENT, AHEAD = 0, 1  # its priority: backward waits for what is urgent


# ---- tickets ----


class TicketState(Enum):
    """Where the bytes of a ticket are, and who uses its memory."""

    QUEUED = "in staging, write not started"
    WRITING = "in staging, write under way"
    STORED = "in the swap file"
    READ_QUEUED = "in the swap file, read not started"
    READING = "read under way"
    LOADED = "in staging or on the device, and in the swap file"
    RESCUED = "in host memory or staging, because a write failed"
    LOST = "nowhere"
    ABANDONED = "given up while a lane uses its memory"
    RELEASED = "given up"


_S = TicketState
BEFORE_WRITTEN = frozenset({_S.QUEUED, _S.WRITING})
AT_HAND = frozenset({_S.LOADED, _S.RESCUED, _S.LOST})
GIVEN_UP = frozenset({_S.RELEASED, _S.ABANDONED})


class SwapTicket(Ticket, StateMachine):
    """One storage in the NVMe store's care. Only that store changes it, under its lock.

    [Note: Who frees a slot] A lane writes from the slot, or reads into it, without the lock; the states WRITING and
    READING say so, and meanwhile nobody else frees it, or the drive would move the bytes of another ticket. A release
    in these states only abandons the ticket, and the lane frees it at the end. Whether prefetching has come to a ticket
    is known to ``ReadAhead`` alone.

    Attributes:
        copies: into the slot, and ``uses``: events of copies out of it. The slot is free after both.
        reader: the task that reads it, while READING: there may be several for one ticket.
        destination: device memory that was allocated to read it ahead, until the copy into it is queued.
        arrival: the copy on the device, which may be under way, if it was made ahead.
        host: memory outside of staging: of a read for which there was no slot, or of a failed write.
    """

    __slots__ = (
        "arrival", "checksums", "copies", "destination", "device", "error", "extent", "host", "path", "reader", "slot",
        "state", "uses",
    )  # fmt: skip

    noun = "a ticket"
    moves: ClassVar[Mapping[TicketState, tuple[TicketState, ...]]] = {
        _S.QUEUED: (_S.WRITING, _S.RELEASED),
        _S.WRITING: (_S.STORED, _S.LOADED, _S.RESCUED, _S.LOST, _S.ABANDONED),
        _S.STORED: (_S.READ_QUEUED, _S.RELEASED),
        _S.READ_QUEUED: (_S.READING, _S.STORED, _S.RELEASED),
        _S.READING: (_S.LOADED, _S.LOST, _S.ABANDONED),
        _S.LOADED: (_S.STORED, _S.RELEASED),
        _S.RESCUED: (_S.RELEASED,),
        _S.LOST: (_S.RELEASED,),
        _S.ABANDONED: (_S.RELEASED,),
        _S.RELEASED: (),
    }

    def __init__(
        self, nbytes: int, store: Store[Any], path: SwapPath, extent: Span, slot: Span, device: torch.device
    ) -> None:
        super().__init__(nbytes, store)
        self.device = device
        self.path = path
        self.extent = extent
        self.slot: Span | None = slot
        self.state = TicketState.QUEUED
        self.checksums: tuple[int, ...] = ()
        self.copies: list[PendingCopy] = []
        self.uses: list[Any] = []
        self.reader: object = None
        self.destination: Destination | None = None
        self.arrival: Arrival | None = None
        self.host: torch.Tensor | None = None
        self.error: StorageError | None = None

    @property
    def held_slot(self) -> Span:
        """The staging slot; raises a StateError where there is none."""
        if self.slot is None:
            raise StateError(f"a ticket '{self.state.value}' has no staging slot; this is a bug in ds_tba")
        return self.slot


# ---- directories and their lanes ----


class LaneGroup:
    """The lanes of one kind, and their tasks in order of priority, then of arrival.

    [Note: Lanes do not die] Whoever wants bytes waits for a lane, and memory may run out at any of its lines. So a task
    is called again until it returns, and knows how far it came. A lane that died all the same, as where memory ran out
    in its own care, is started again by whoever gives it work or waits for it (:meth:`revive`).

    Attributes:
        handles: of each lane, opened by the store, used and closed by its thread.
    """

    def __init__(self) -> None:
        self.handles: list[IoHandle] = []
        self._threads: list[threading.Thread] = []
        self._held: list[Task | None] = []  # by each lane; a list of fixed length, in which putting takes no memory
        self._has_ended: list[bool] = []
        self._name = ""
        self._accelerator: Accelerator | None = None  # until they were started
        # The one queue whose lock no signal handler's exception leaves taken; see finalizers.py [Note: Interrupts].
        self._tasks: tuple[queue.SimpleQueue[Task], queue.SimpleQueue[Task]] = queue.SimpleQueue(), queue.SimpleQueue()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each task, or more; and to end a lane
        self._is_stopping = False
        self._reviving = threading.Lock()
        self._process = os.getpid()

    def clear(self) -> None:
        """Forget lanes that have ended."""
        self.handles.clear()
        self._threads.clear()
        self._held.clear()
        self._has_ended.clear()
        self._wakes = queue.SimpleQueue()  # without those that nobody has taken
        self._is_stopping = False

    def start(self, name: str, accelerator: Accelerator) -> None:
        """Start a thread for each handle, on the accelerator's device."""
        self._held = [None] * len(self.handles)
        self._has_ended = [False] * len(self.handles)
        self._name, self._accelerator = name, accelerator
        for number in range(len(self.handles)):
            thread = new_thread(accelerator, partial(self._run, number), name)
            thread.start()
            self._threads.append(thread)

    def put(self, task: Task, priority: int = AHEAD) -> None:
        """Queue a task: ``URGENT`` for bytes that backward waits for, ``AHEAD`` for all else."""
        try:
            self._tasks[priority].put(task)
        finally:  # a task that no lane is woken for would be waited for without end
            self._wakes.put(None)
        self.revive()

    def revive(self) -> bool:
        """Start lanes that have died again; False where one is dead and cannot be started."""
        accelerator = self._accelerator
        if accelerator is None or self._is_stopping or os.getpid() != self._process:  # a forked child has no lanes
            return True
        if not self._dead():
            return True
        with self._reviving, suppress(MemoryError, RuntimeError):  # no thread can be started: tried again later
            for number in self._dead() if not self._is_stopping else ():
                thread = new_thread(accelerator, partial(self._run, number), self._name)
                thread.start()
                self._threads[number] = thread
                self._wakes.put(None)  # the one that it may have taken
                logger.error("a lane (%s) died, and was started again", self._name)
        return not self._dead()

    def _dead(self) -> list[int]:
        # Not by is_alive(), which takes a thread for dead from then on if a signal handler's exception comes in it.
        present = threading.enumerate()
        return [number for number, thread in enumerate(self._threads) if thread not in present]

    def stop(self) -> None:
        """Let the lanes end once the tasks before are done."""
        with self._reviving:  # else a lane started just now would do a task beside whoever ends it
            self._is_stopping = True
        for _ in self._threads:
            self._wakes.put(None)

    def end(self, seconds_left: Callable[[], float]) -> bool:
        """Wait until the lanes have ended, and close the handles; False where one did not in the time for that."""
        for handle in self.handles[len(self._threads) :]:
            handle.close()  # its thread never started
        del self.handles[len(self._threads) :]
        for number, thread in enumerate(self._threads):
            thread.join(max(0.0, seconds_left()))
            if not thread.is_alive() and not self._has_ended[number]:  # it died; here is what it has left
                self._wakes.put(None)
                self._run(number)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, number: int) -> None:
        while not self._has_ended[number]:
            try:
                self._has_ended[number] = self._serve(number)
            except Exception as error:  # noqa: BLE001 - see [Note: Lanes do not die]
                self._wakes.put(None)  # the one that it may have taken
                with suppress(Exception):
                    logger.warning("a lane failed at its own work (%s: %s), and goes on", type(error).__name__, error)
                time.sleep(AGAIN_S)
        self.handles[number].close()

    def _serve(self, number: int) -> bool:
        """Do a task, the one before if that did not return; True once there is none and the lane is to end."""
        held = self._held
        if held[number] is None:
            self._wakes.get()
            for tasks in self._tasks:
                try:
                    held[number] = tasks.get_nowait()
                    break
                except queue.Empty:
                    continue
        task = held[number]
        if task is None:
            return self._is_stopping
        task(self.handles[number])
        held[number] = None  # and no local, or an idle lane would keep the last ticket alive
        return False


class SwapPath:
    """The file, extents, queues and rates of one directory.

    Changed only under the store's lock, except the queues, which have their own.

    Args:
        file: of its first size; closed by the store.
    """

    def __init__(self, file: SwapFile, backend: IoBackend, write_lanes: int, read_lanes: int) -> None:
        self.file = file
        self.extents = SpanAllocator(file.size_bytes, backend.alignment_bytes)
        self.writes = LaneGroup()
        self.reads = LaneGroup()
        self.meter = PathMeter(write_lanes, read_lanes)
        self.probe_bytes = 0  # written to measure the path
        self.failure: str | None = None
        self.full = False
        self._is_limit_said = False

    def rest(self) -> None:
        """Give the disk space back until :meth:`wake`; no extent is in use."""
        self.writes.clear()
        self.reads.clear()
        self.file.shrink()
        self.extents = SpanAllocator(0, self.extents.alignment_bytes)
        self.full = False

    def wake(self, least_bytes: int) -> None:
        """Take the first disk space again."""
        self.file.reserve_first(min(least_bytes, self.file.limit_bytes))
        self.extents.grow(self.file.size_bytes)

    @property
    def written_bytes(self) -> int:
        """Bytes that this process had the drive write: they count as wear."""
        return self.meter.writes.moved_bytes + self.file.zeroed_bytes

    def busy_s(self, more_bytes: int) -> float:
        """Seconds to write and read back the bytes that the path holds, and ``more_bytes``.

        Tensors go where this is least, so that paths hold bytes in proportion to their bandwidth.
        """
        s_per_byte = self.meter.writes.recent.s_per_byte + self.meter.reads.recent.s_per_byte
        return (self.extents.used_bytes + more_bytes) * s_per_byte

    def bandwidth(self) -> dict[str, Any]:
        """For the report."""
        writes, reads = self.meter.writes, self.meter.reads
        return {
            "path": str(self.file.directory),
            "write_bytes_per_s": writes.recent.bytes_per_s,
            "read_bytes_per_s": reads.recent.bytes_per_s,
            "write_alone_bytes_per_s": writes.alone.bytes_per_s,
            "read_alone_bytes_per_s": reads.alone.bytes_per_s,
            "write_beside_read_bytes_per_s": writes.concurrent.bytes_per_s,
            "read_beside_write_bytes_per_s": reads.concurrent.bytes_per_s,
            "trial_bytes": self.probe_bytes,
            "failure": self.failure,
        }

    def rates(self) -> tuple[float, float, float, float]:
        """Bytes per second of writes, of reads, and of each while the other runs. Call it under the lock.

        Raises:
            StateError: one kind was never measured.
        """
        write, concurrent_write = self._rates_of(self.meter.writes)
        read, concurrent_read = self._rates_of(self.meter.reads)
        return write, read, concurrent_write, concurrent_read

    def _rates_of(self, kind: KindMeter) -> tuple[float, float]:
        alone = kind.alone if kind.alone.is_known else kind.concurrent
        if not alone.is_known:
            raise StateError(f"{self.file.directory} was not measured before its rates were asked for; this is a bug")
        # A rate without recent transfers stays as it was, but neither kind is faster while the other runs.
        return alone.bytes_per_s, min(kind.concurrent.bytes_per_s or alone.bytes_per_s, alone.bytes_per_s)

    def reserve(self, nbytes: int) -> Span | None:
        """An extent, growing the file if it must; None where there is no room."""
        extent = self.extents.allocate(nbytes)
        if extent is None and not self.full and self._grow(self.extents.padded(nbytes)):
            extent = self.extents.allocate(nbytes)
        return extent

    def _grow(self, nbytes: int) -> bool:
        try:
            grown = self.file.grow(nbytes)
        except OSError as error:
            self.full = True
            logger.warning(
                "%s: the swap file cannot grow beyond %d bytes (%s); what does not fit stays in memory. %s",
                self.file.directory,
                self.file.size_bytes,
                error.strerror,
                repair_of(error, self.file.directory),
            )
            return False
        self.extents.grow(self.file.size_bytes)
        if not grown and not self._is_limit_said:
            self._is_limit_said = True
            logger.warning(
                "%s: the swap file has reached its limit of %s; what does not fit stays in memory. %s",
                self.file.directory,
                readable(self.file.limit_bytes),
                "Raise io.swap_file_bytes to what one step saves"
                if self.file.is_limit_set
                else "That is 90 % of what was free on the drive, shared by the ranks: free space there",
            )
        return grown

    def fail(self, failure: Exception) -> None:
        """Take no more tensors, because a write failed. Said once."""
        if self.failure is not None:
            return
        self.failure = str(failure)
        full = isinstance(failure, TransferError) and failure.errno in _FULL
        logger.warning(
            "%s: %s (%s); from here on activations stay in memory instead",
            self.file.directory,
            "the drive is full" if full else "a write failed",
            failure,
        )


# ---- room ----


class ReadAhead:
    """The tickets that prefetching has come to, and the bytes that they take: nobody else knows this of a ticket.

    Most are read ahead. *Early* ones were still to be written when prefetching came: their bytes stay in memory when
    the write ends, and from then on count as read ahead, although they never left.

    Args:
        capacity_bytes: of staging, which bounds all of it. Bytes that were read ahead on an asynchronous device wait in
            device memory, and count until backward takes them.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self.prefetched_bytes = 0
        self.early_bytes = 0
        self._prefetched: dict[SwapTicket, bool] = {}  # in the order in which they were asked for: was it early?
        self._early: set[SwapTicket] = set()

    def __contains__(self, ticket: SwapTicket) -> bool:
        return ticket in self._prefetched or ticket in self._early

    def has_room(self, nbytes: int, *, beside_writes: bool) -> bool:
        """Whether ``nbytes`` more may be read; the first always may; beside writes, less."""
        ahead_bytes = self.prefetched_bytes + nbytes
        bound_bytes = self._capacity_bytes * (PREFETCH_FRACTION_OF_STAGING if beside_writes else 1)
        fits = ahead_bytes <= bound_bytes and ahead_bytes + self.early_bytes <= self._capacity_bytes
        return fits or not self.prefetched_bytes

    def add(self, ticket: SwapTicket, *, was_early: bool = False) -> None:
        """The ticket is read ahead from here on."""
        self.prefetched_bytes += ticket.extent.nbytes
        self._prefetched[ticket] = was_early

    def add_early(self, ticket: SwapTicket) -> bool:
        """Add a ticket that is still to be written; False where the bound has no room.

        It has a slot, so that the part left to writes does not matter. If it did, bytes that are being written when
        backward begins would hold up the reads behind them.
        """
        nbytes = ticket.extent.nbytes
        if self.prefetched_bytes + self.early_bytes + nbytes > self._capacity_bytes:
            return False
        self.early_bytes += nbytes
        self._early.add(ticket)
        return True

    def end_write(self, ticket: SwapTicket) -> bool:
        """The write of a ticket has ended; returns whether its bytes stay in memory, because prefetching came first."""
        if ticket in self._early:
            self.end(ticket)
            self.add(ticket, was_early=True)
        return ticket in self._prefetched

    def end(self, ticket: SwapTicket) -> bool:
        """The ticket is not ahead any more, if it was; returns whether its bytes never left memory."""
        if ticket in self._early:
            self._early.remove(ticket)
            self.early_bytes -= ticket.extent.nbytes
            return False
        was_early = self._prefetched.pop(ticket, None)
        if was_early is not None:
            self.prefetched_bytes -= ticket.extent.nbytes
        return bool(was_early)

    def newest_first(self) -> list[SwapTicket]:
        """The tickets that are read ahead; backward needs the newest last."""
        return list(reversed(self._prefetched))


class SwapSpace:
    """Slots of the staging ring and extents of the swap files.

    Attributes:
        lock: over all of it, the tickets included. Held for bookkeeping and for what is only queued on a device, never
            for I/O: the lanes need it at both ends of a transfer.
        deferred: what finalizers left to the holders of the lock; see ``finalizers.py``.
        changed: notified whenever a ticket moves on, or a slot or write ends.
        writes: the tickets whose writes are under way or to come; whoever waits for a slot may count on them.
        resting: between :meth:`NvmeStore.rest` and :meth:`NvmeStore.wake`.
        copying: tickets whose bytes are being copied into staging by a put.
    """

    def __init__(self, paths: Sequence[SwapPath], ring: StagingRing) -> None:
        self.stats = StoreStats()
        self.paths = paths
        self.ring = ring
        self.lock = threading.Lock()  # not reentrant on purpose: see finalizers.py
        self.changed = threading.Condition(self.lock)
        self.deferred: DeferredFinalizers[SwapTicket | Loan] = DeferredFinalizers(self.lock, self._finalize)
        self.read_ahead = ReadAhead(ring.slots.capacity_bytes)
        self.writes: set[SwapTicket] = set()
        self.copying: set[SwapTicket] = set()
        self.closed = self.resting = False

    @property
    def is_idle(self) -> bool:
        """Whether no bytes are in its care, nor on their way."""
        self.settle_copies()
        is_unused = self.ring.slots.is_unused and all(path.extents.is_unused for path in self.paths)
        return is_unused and not (
            self.writes_under_way or self.copying or self.ring.is_lent or self.ring.copies.under_way
        )

    @property
    def writes_under_way(self) -> int:
        """How many writes are under way or to come."""
        return len(self.writes)

    def revive_lanes(self) -> bool:
        """Start lanes that have died again, as whoever waits for one does; False where one cannot be started."""
        are_alive = [group.revive() for path in self.paths for group in (path.writes, path.reads)]
        return all(are_alive)

    # ---- taking -------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, wait: bool) -> tuple[Span, SwapPath, Span] | Refusal:
        """A slot, a path and an extent on it for ``nbytes``."""
        if self.closed or self.resting:
            return Refusal.CLOSED
        self.settle_copies()
        slot = self.ring.slots.allocate(nbytes) or self._wait_for_slot(nbytes, wait)
        if slot is None:
            return Refusal.STAGING_FULL
        working = [path for path in self.paths if path.failure is None]
        for path in sorted(working, key=lambda path: path.busy_s(nbytes)):
            extent = path.reserve(nbytes)
            if extent is not None:
                return slot, path, extent
        self.ring.slots.free(slot)
        return Refusal.NO_SPACE if working else Refusal.PATH_FAILED

    def begin_prefetch(self, ticket: SwapTicket) -> bool:
        """Take a slot, and device memory, to read a ticket ahead; False where one of them has no room for it."""
        self.settle_copies()
        if not self.read_ahead.has_room(ticket.extent.nbytes, beside_writes=self.writes_under_way > 0):
            return False
        self.free_slot(ticket)  # of a write whose end was interrupted
        ticket.slot = self.ring.slots.allocate(ticket.extent.nbytes)
        if ticket.slot is None:
            return False
        if not self.ring.zero_copy:
            ticket.destination = self._room_ahead(ticket)
            if ticket.destination is None:
                self.free_slot(ticket)
                return False
        self.read_ahead.add(ticket)
        ticket.move(_S.READ_QUEUED)
        return True

    def _room_ahead(self, ticket: SwapTicket) -> Destination | None:
        """Device memory for bytes that backward will want, from the thread that asks for them ahead; None without."""
        copies = self.ring.copies
        try:
            return None if copies.is_full else copies.room(ticket.nbytes, ticket.device)
        except (RuntimeError, MemoryError):
            return None

    def bring_ahead(self, ticket: SwapTicket) -> bool:
        """Keep at hand what is still to be written: in its slot, or by a copy on the device; False without room.

        The slot of a copy is free with the end of its write, for what backward wants next.
        """
        if not self.read_ahead.add_early(ticket):
            return False
        if self.ring.zero_copy:
            return True
        destination = self._room_ahead(ticket)
        if destination is not None:
            with suppress(RuntimeError, MemoryError):
                ticket.arrival = self.copy_in(ticket, self.ring.view(ticket.held_slot), destination)
        if ticket.arrival is None:
            self.read_ahead.end(ticket)
        return ticket.arrival is not None

    def copy_in(self, ticket: SwapTicket, staged: torch.Tensor, destination: Destination) -> Arrival:
        """Queue the copy of a ticket's staged bytes to the device."""
        # After the copies into the slot, or bytes that the device has not written yet would be handed over.
        arrival = self.ring.copies.into(staged, destination, after=ticket.copies)
        ticket.uses.append(arrival.event)  # so that the slot is written again only when the copy has read it
        return arrival

    def drop_ahead(self, ticket: SwapTicket) -> None:
        """Let go of memory into which a ticket's bytes were to come, or have come."""
        arrival, ticket.arrival = ticket.arrival, None
        ticket.host = ticket.destination = None
        if arrival is not None:
            self.ring.copies.drop(arrival)

    def cancel_prefetch(self, ticket: SwapTicket) -> bool:
        """Give up bytes that are ahead, or are about to be; False where there is nothing to give up now."""
        if ticket not in self.read_ahead or ticket.state is _S.READING:
            return False
        self.read_ahead.end(ticket)
        self.drop_ahead(ticket)
        if ticket.state not in BEFORE_WRITTEN:  # else the slot is freed when the write ends
            ticket.move(_S.STORED)
            self.free_slot(ticket)
        return True

    def _wait_for_slot(self, nbytes: int, wait: bool) -> Span | None:
        """A slot, once there is one: while writes drain, or without ``wait`` while the device is behind the host.

        The host queues kernels far ahead of the device. It may wait for tensors that do not exist yet: that keeps
        nobody from working, and says nothing about the drive. Slots of tickets that were read ahead would be freed by
        the thread that would be waiting here, so these are given up.
        """
        started = time.perf_counter()
        slots, copies = self.ring.slots, self.ring.copies
        slot = None
        while slot is None and not (self.closed or self.resting):
            # Nobody notifies of copies that are done, so they are polled. All other slots come with a notification.
            if copies.under_way or (wait and (self.writes_under_way > 0 or slots.has_spans_in_copies)):
                self.changed.wait(COPY_POLL_S if copies.under_way or slots.has_spans_in_copies else LANE_CHECK_S)
                if not self.revive_lanes() and time.perf_counter() - started > SLOW_WAIT_S:
                    break  # nobody writes any more: it stays in memory
            elif not (wait and self._give_up_read_ahead()):
                break
            self.deferred.act()
            self.settle_copies()
            if not (self.closed or self.resting):  # the lanes have ended since
                slot = slots.allocate(nbytes)
        self.stats.stall_s += time.perf_counter() - started
        return slot

    def begin_urgent_read(self, ticket: SwapTicket) -> None:
        """Take memory to read a stored ticket that backward waits for: a slot, or where there is none, beside staging.

        A slot that only copies use is waited for: the device makes them whatever the host does.
        """
        slots, nbytes = self.ring.slots, ticket.extent.nbytes
        self.free_slot(ticket)  # of a write whose end was interrupted
        slot = slots.allocate(nbytes)
        while slot is None and slots.has_spans_in_copies and ticket.state is _S.STORED and not self.closed:
            self.changed.wait(COPY_POLL_S)
            self.settle_copies()
            slot = slots.allocate(nbytes)
        if ticket.state is not _S.STORED or self.closed:  # another thread has come first
            if slot is not None:
                slots.free(slot)
            return
        ticket.slot = slot
        if slot is None:
            ticket.host = self.ring.overflow(nbytes)
        ticket.move(_S.READ_QUEUED)

    def _give_up_read_ahead(self) -> bool:
        """Give up the newest read ahead, or wait for one that is under way; False if there is neither."""
        tickets = self.read_ahead.newest_first()
        if tickets and not any(self.cancel_prefetch(ticket) for ticket in tickets):
            self.changed.wait(LANE_CHECK_S)
            self.revive_lanes()
        return bool(tickets)

    # ---- giving back --------------------------------------------------------------------------------------------

    def end_write(self, ticket: SwapTicket) -> None:
        """The write of a ticket has ended, or will not be. May be said twice."""
        self.writes.discard(ticket)
        self.changed.notify_all()

    def free_slot(self, ticket: SwapTicket) -> None:
        """Give back the slot of a ticket, if it has one, once no copy uses it."""
        slot, ticket.slot = ticket.slot, None
        if slot is None:
            return
        # Else the next tensor's copy or read would overwrite bytes that the device has still to take.
        events = [copy.event for copy in ticket.copies] + ticket.uses
        ticket.copies, ticket.uses = [], []
        self.ring.slots.free_after(events, slot)
        self.changed.notify_all()

    def settle_copies(self) -> None:
        """Give back the device memory and the slots that copies used, where these are done."""
        self.ring.copies.settle()
        self.ring.slots.settle()

    def end_work(self, ticket: SwapTicket, state: TicketState) -> bool:
        """The lane that used a ticket's memory has ended; False where the ticket was given up meanwhile."""
        self.changed.notify_all()
        if ticket.state is _S.ABANDONED:
            self.give_up(ticket)
            return False
        ticket.move(state)
        return True

    def give_up(self, ticket: SwapTicket) -> None:
        """Release a ticket whose memory no lane uses. A write that has not begun is cancelled."""
        if ticket.state is _S.QUEUED:
            self.stats.cancelled_bytes += ticket.nbytes
            self.end_write(ticket)
        self.read_ahead.end(ticket)
        ticket.move(_S.RELEASED)
        self.drop_ahead(ticket)
        self.free_slot(ticket)
        ticket.path.extents.free(ticket.extent)

    def _finalize(self, released: SwapTicket | Loan) -> None:
        """Act on a released ticket, or on a lent slot whose tensor is gone."""
        if isinstance(released, Loan):
            if released.slot is not None:  # else a signal handler raised before it was lent
                self.ring.end_loan(released.slot)
            self.changed.notify_all()
        elif released.state in (_S.WRITING, _S.READING):  # see [Note: Who frees a slot]
            self.read_ahead.end(released)
            released.move(_S.ABANDONED)
        elif released.state not in (_S.ABANDONED, _S.RELEASED):
            self.give_up(released)
