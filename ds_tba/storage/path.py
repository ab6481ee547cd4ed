"""One directory of ``nvme_path``: its swap file, the lanes that write and read it, and the parts of storages there.

A lane is a thread with an I/O handle of its own. Writes and reads of a file have lanes and a queue each, so that reads
never queue behind writes. A storage is always a list of parts, each of at most a part of staging, so that it fits
whatever its size, spreads over all paths, and its copies, writes and reads overlap with each other. Does not know how
bytes move.
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
from typing import Any, ClassVar, NamedTuple

import torch

from ds_tba.device.accelerator import Accelerator, Event, new_thread
from ds_tba.device.copies import Arrival, Destination, PendingCopy
from ds_tba.errors import StateError, StorageError, TransferError
from ds_tba.stats import KindMeter, PathMeter, readable
from ds_tba.storage.backends.base import IoBackend, IoHandle
from ds_tba.storage.base import StateMachine, Store, Ticket
from ds_tba.storage.staging import Span, SpanAllocator
from ds_tba.storage.swap_file import SwapFile, repair_of

logger = logging.getLogger(__name__)

LANE_CHECK_S = 1.0  # whoever waits for a lane looks as often whether it lives
AGAIN_S = 0.01  # between two tries of a lane, in which memory may come back
_FULL = (errno.ENOSPC, errno.EDQUOT)
# The work of a lane with its handle; called again after an exception, until it returns: see [Note: Lanes do not die].
Task = Callable[[IoHandle], None]
URGENT, AHEAD = 0, 1  # priorities: backward waits for what is urgent


class LaneGroup:
    """The lanes of one kind, and their tasks in order of priority, then of arrival.

    [Note: Lanes do not die] Whoever wants bytes waits for a lane, and memory may run out at any of its lines. So a task
    is called again until it returns, and knows how far it came. A lane that died all the same, as where memory ran out
    in its own care, is started again by whoever gives it work or waits for it (:meth:`revive`).

    Attributes:
        handles: one for each lane, opened by the store, used and closed by its thread.
    """

    def __init__(self) -> None:
        self.handles: list[IoHandle] = []
        self._threads: list[threading.Thread] = []
        self._held: list[Task | None] = []  # by lane; of fixed length, because putting into it takes no memory
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
            # First: a signal handler may raise while start() waits for the thread, which then runs, and has to end.
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread to spare
                self._threads.pop()
                raise

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
            until_s = time.monotonic() + LANE_CHECK_S
            while thread.ident is None and time.monotonic() < until_s:
                time.sleep(AGAIN_S)  # it may have been started by a start() that a signal handler has ended
            if thread.ident is None:
                self._has_ended[number] = True
                self.handles[number].close()
                continue
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
        file: its swap file, grown to its first size; closed by the store.
    """

    def __init__(self, file: SwapFile, backend: IoBackend, write_lanes: int, read_lanes: int) -> None:
        self.file = file
        self.extents = SpanAllocator(file.size_bytes, backend.alignment_bytes)
        self.writes = LaneGroup()
        self.reads = LaneGroup()
        self.meter = PathMeter(write_lanes, read_lanes)
        self.probe_bytes = 0  # written to measure the path
        self.tensor_bytes = self.stored_bytes = 0  # of storages: before the codec, and as the drive has them
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
        """The bytes that this process had the drive write, which count as wear."""
        return self.meter.writes.drive_bytes + self.file.zeroed_bytes

    def busy_s(self, more_bytes: int) -> float:
        """Return the seconds to write and read back the bytes that the path holds, and ``more_bytes``.

        Tensors go where these are least, so that paths hold bytes in proportion to their bandwidth.
        """
        s_per_byte = self.meter.writes.recent.s_per_byte + self.meter.reads.recent.s_per_byte
        return (self.extents.used_bytes + more_bytes) * s_per_byte

    def bandwidth(self) -> dict[str, Any]:
        """Return the row of the report."""
        writes, reads = self.meter.writes, self.meter.reads
        return {
            "path": str(self.file.directory),
            "write_bytes_per_s": writes.recent.bytes_per_s,
            "read_bytes_per_s": reads.recent.bytes_per_s,
            "write_alone_bytes_per_s": writes.alone.bytes_per_s,
            "read_alone_bytes_per_s": reads.alone.bytes_per_s,
            "write_beside_read_bytes_per_s": writes.concurrent.bytes_per_s,
            "read_beside_write_bytes_per_s": reads.concurrent.bytes_per_s,
            "tensor_bytes": self.tensor_bytes,
            "stored_bytes": self.stored_bytes,
            "trial_bytes": self.probe_bytes,
            "failure": self.failure,
        }

    def rates(self) -> tuple[float, float, float, float]:
        """Return the bytes per second of writes, of reads, and of each while the other runs. Call it under the lock.

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
        """Take an extent, growing the file if need be; None where there is no room."""
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
        """Take no more tensors, because a write failed; say so once."""
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


# ---- storages -------------------------------------------------------------------------------------------------------


class PartState(Enum):
    """The place of a part's bytes, and the user of its memory."""

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


_S = PartState
BEFORE_WRITTEN = frozenset({_S.QUEUED, _S.WRITING})
AT_HAND = frozenset({_S.LOADED, _S.RESCUED, _S.LOST})
GIVEN_UP = frozenset({_S.RELEASED, _S.ABANDONED})


class Block(NamedTuple):
    """Bytes of a part that are one transfer.

    Attributes:
        start, nbytes: the place of the bytes in the part.
        offset, stored_bytes: the place in the file of what is stored for them.
        packed_bytes: length of what a codec made of them; 0 where they are stored as they are.
        checksums: of what is stored.
    """

    start: int
    nbytes: int
    offset: int
    stored_bytes: int
    packed_bytes: int = 0
    checksums: tuple[int, ...] = ()

    def within(self, part: torch.Tensor) -> torch.Tensor:
        """Return the place of the bytes in the memory of their part."""
        return part if self.nbytes == part.numel() else part[self.start : self.start + self.nbytes]


class Part(StateMachine):
    """One part of a storage. Changed by its store only, under the store's lock.

    [Note: Who frees a slot] A lane writes from the slot, or reads into it, without the lock; the states WRITING and
    READING say so, and meanwhile nobody else frees it, or the drive would move the bytes of another ticket. A release
    in these states only abandons the part, and the lane frees it at the end. Whether prefetching has come to a part
    is known to ``ReadAhead`` alone.

    Attributes:
        start: offset of its bytes in the storage.
        blocks: the places in the file of what is stored, once it is written.
        copies: copies into the slot; with ``uses``, events of copies out of it: the slot is free after both.
        reader: the task that reads it, while READING: there may be several for one part.
        arrival: the copy into its place on the device, which may be under way.
        host: memory outside of staging: of a read for which there was no slot, or of a failed write.
        error: the reason why its bytes are LOST.
    """

    __slots__ = (
        "arrival", "blocks", "copies", "error", "extent", "host", "nbytes", "path", "reader", "slot", "start",
        "state", "uses",
    )  # fmt: skip

    noun = "a part of a storage"
    moves: ClassVar[Mapping[PartState, tuple[PartState, ...]]] = {
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

    def __init__(self, start: int, nbytes: int, path: SwapPath, extent: Span, slot: Span) -> None:
        self.start = start
        self.nbytes = nbytes
        self.path = path
        self.extent = extent
        self.slot: Span | None = slot
        self.state = PartState.QUEUED
        self.blocks: tuple[Block, ...] = ()
        self.copies: list[PendingCopy] = []
        self.uses: list[Event | None] = []
        self.reader: object = None
        self.arrival: Arrival | None = None
        self.host: torch.Tensor | None = None
        self.error: StorageError | None = None

    @property
    def stored_bytes(self) -> int:
        """The bytes that the drive has of it."""
        return sum(block.stored_bytes for block in self.blocks)

    @property
    def held_slot(self) -> Span:
        """The staging slot; raises a StateError where there is none."""
        if self.slot is None:
            raise StateError(f"a part '{self.state.value}' has no staging slot; this is a bug in ds_tba")
        return self.slot

    @property
    def place(self) -> str:
        """The place of its bytes, for an error."""
        return f"{self.path.file.directory}, offset {self.extent.offset}, {self.extent.nbytes} bytes"


class SwapTicket(Ticket):
    """One storage, as its parts.

    Attributes:
        parts: the parts, in the order of their bytes.
        destination: device memory for the whole storage, from when it is wanted until it is handed over.
        is_loading: a thread is handing it over.
        item_bytes: length of an element.
        is_taken: all of its parts found room, so that it counts as offloaded.
    """

    __slots__ = ("destination", "device", "is_loading", "is_taken", "item_bytes", "parts")

    def __init__(self, nbytes: int, store: Store[SwapTicket], device: torch.device, item_bytes: int) -> None:
        super().__init__(nbytes, store)
        self.device = device
        self.item_bytes = item_bytes
        self.parts: list[Part] = []
        self.destination: Destination | None = None
        self.is_loading = self.is_taken = False

    def place_of(self, part: Part) -> Destination | None:
        """Return the place of a part in the destination, where there is one."""
        destination = self.destination
        return None if destination is None else destination.part(part.start, part.nbytes)

    @property
    def is_given_up(self) -> bool:
        """True if nobody may ask for its bytes any more."""
        return any(part.state in GIVEN_UP and part.arrival is None for part in self.parts)


def spans_of(nbytes: int, part_bytes: int) -> Sequence[tuple[int, int]]:
    """Return the start and the length of each part of ``nbytes``."""
    return [(start, min(part_bytes, nbytes - start)) for start in range(0, nbytes, part_bytes)]
