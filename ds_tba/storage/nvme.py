"""How does a storage come to NVMe and back? The store over anonymous swap files, one per directory.

[Note: The way of a part] ``put`` cuts a storage into parts. For each it reserves an extent and a staging slot, copies
the device bytes into the slot and queues a write. A write lane writes the part and frees the slot. ``prefetch``
allocates device memory for the storage and queues reads into new slots, from where a read lane queues the copy to the
device; bytes that are still to be written are copied at once. On the CPU bytes ahead of need stay in staging.
``get`` hands over bytes that are still in staging (cancelling a write that has not begun), waits for reads under way,
and queues others that overtake those which nobody waits for.

[Note: Open] Staging, disk space, I/O handles and lanes are there from the first ``put`` on, and until
``give_back``, after which the next ``put`` takes them again. The first handles and the first disk space are taken when
the store is made: what is wrong with a directory or a backend is found before training.

Cannot see which storages are worth moving, nor in which order backward wants them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from ds_tba.config import IO_ALIGNMENT_BYTES
from ds_tba.device.accelerator import THREAD_PREFIX, PendingCopy
from ds_tba.device.copies import Destination
from ds_tba.errors import ActivationLostError, DsTbaError, StateError
from ds_tba.storage.backends import IoBackend
from ds_tba.storage.base import ASKED_TOO_LATE, Loaded, Refusal, Span, Store, padded
from ds_tba.storage.integrity import Codec, Integrity, PieceIo
from ds_tba.storage.path import LANE_CHECK_S, URGENT, SwapFile, SwapPath
from ds_tba.storage.space import BEFORE_WRITTEN, GIVEN_UP, OVER, Ahead, Part, PartState, SwapSpace, SwapTicket
from ds_tba.storage.staging import CLOSED, StagingRing

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0
IDLE_LIMIT_S = 1.0  # for writes and reads under way whose bytes nobody wants any more
COPYING_LIMIT_S = 5.0  # a copy into staging takes less, unless closing has interrupted the thread that copies
COPY_POLL_S = 0.001
SLOW_WAIT_S = 30.0  # for a drive, before that is told
SLOW_AGAIN_S = 60.0  # from one such warning to the next
PART_FRACTION_OF_STAGING = 0.25
_NOT_OPENED = "what is needed cannot be opened"
_S = PartState


@dataclass(frozen=True, slots=True)
class Lanes:
    """The number of lanes of each path."""

    write: int
    read: int


class NvmeStore(SwapSpace, Store[SwapTicket]):
    """Storages on NVMe: the half that the cache asks, and that waits; ``SwapSpace`` is the other one.

    Args:
        files: one swap file per directory; closed with the store.
        ring: staging; closed with the store.
        codec: compresses in the lanes, for each of which the ring has a buffer.
    """

    def __init__(
        self,
        files: Sequence[SwapFile],
        backend: IoBackend,
        ring: StagingRing,
        lanes: Lanes,
        integrity: str,
        codec: Codec | None = None,
    ) -> None:
        checksums = Integrity(integrity, backend.block_bytes, on_device=backend.stages_on_device)
        paths = [SwapPath(file, lanes.write, lanes.read) for file in files]
        super().__init__(paths, ring, PieceIo(checksums, codec))
        part_bytes = int(ring.slots.capacity_bytes * PART_FRACTION_OF_STAGING)
        # The length of each part of a storage but the last.
        self.part_bytes = max(part_bytes - part_bytes % IO_ALIGNMENT_BYTES, IO_ALIGNMENT_BYTES)
        self._backend = backend
        # Held while handles and threads come or go, which waits for the lanes; the first to be taken of the two locks.
        self._opening = threading.Lock()
        self.closed = self.is_open = False  # closed for good; open with staging, handles and lanes: see [Note: Open]
        self._quiet_until_s = -math.inf  # about drives that do not answer
        try:
            for path in paths:
                path.open(backend, ring.slots.capacity_bytes)
        except BaseException:
            self._end()
            raise

    # ---- out ----------------------------------------------------------------------------------------------------

    def put(self, data: torch.Tensor, *, wait: bool, item_bytes: int = 1) -> SwapTicket | Refusal:
        if self.working and not (self.is_open or self.closed):
            self.open()
        ticket = SwapTicket(data.numel(), self, data.device, item_bytes)
        try:
            for start in range(0, data.numel(), self.part_bytes):
                part_data = data[start : start + self.part_bytes]
                part = self._reserve(ticket, start, part_data.numel(), wait)
                if isinstance(part, Refusal):
                    self.release(ticket)  # or the parts before would take room that nobody gives back
                    return part
                # Without the lock, which a copy of the host would keep from the lanes; nobody else has the ticket yet.
                part.copy = self.copies.out(part_data, self.ring.view(part.slot))
                part.path.writes.put(partial(self._write, ticket, part))
            with self.lock:
                ticket.is_taken = True
                self.stats.offloaded_bytes += ticket.nbytes
        except BaseException:  # a signal handler may raise here, too
            self.copies.drain()  # one that nobody knows of may be under way into the slot
            self.release(ticket)
            raise
        return ticket

    def _reserve(self, ticket: SwapTicket, start: int, nbytes: int, wait: bool) -> Part | Refusal:
        """Give a storage its next part, with a slot and an extent."""
        while True:
            with self.lock:
                part = self._find_room(ticket, start, nbytes, wait)
            if not isinstance(part, SwapPath):
                return part
            part.grow(nbytes)  # without the lock, or lanes and backward would wait for a drive that hangs

    def _find_room(self, ticket: SwapTicket, start: int, nbytes: int, wait: bool) -> Part | Refusal | SwapPath:
        """Take a slot and an extent for a part, or name the path whose file has to grow for it.

        Called under the lock, which each wait releases.
        """
        if not (self.is_open and self.working):
            return self._refusal(Refusal.CLOSED)
        self.settle_copies()  # or slots whose copies are done would pass for taken
        slots = self.ring.slots
        is_first = not ticket.parts and ticket.nbytes > self.part_bytes
        if not wait and is_first and padded(ticket.nbytes) > slots.capacity_bytes - slots.used_bytes:
            return Refusal.STAGING_FULL  # else its first parts would be copied for nothing
        slot = slots.allocate(nbytes) or self._wait_for_slot(nbytes, wait)
        if slot is None:
            return self._refusal(Refusal.STAGING_FULL)
        # The path that would be done first: with equal shares the slowest would end every step alone.
        for path in sorted(self.working, key=lambda path: path.busy_s(nbytes)):
            path.extents.grow(path.file.size_bytes)
            extent = path.extents.allocate(nbytes)
            if extent is not None:
                part = Part(start, nbytes, path, extent, slot)
                ticket.parts.append(part)  # from here on releasing the ticket frees slot and extent
                self.writes.add(part)
                return part
            if not path.full:
                slots.free(slot)
                return path
        slots.free(slot)
        return self._refusal(Refusal.NO_SPACE)

    def _refusal(self, where_open: Refusal) -> Refusal:
        """Return the reason of a refusal, which after a wait may be another: the store was closed meanwhile."""
        if self.closed:
            return Refusal.CLOSED
        if not self.working:
            return Refusal.PATH_FAILED
        return where_open if self.is_open else Refusal.CLOSED  # it was given back

    def _wait_for_slot(self, nbytes: int, wait: bool) -> Span | None:
        """Take a slot once there is one: while writes drain, or without ``wait`` while the device is behind the host.

        The host queues kernels far ahead of the device. It may wait for tensors that do not exist yet: that keeps
        nobody from working, and says nothing about the drive. Slots of parts that were read ahead would be freed by
        the thread that would be waiting here, and are given up.
        """
        started = time.perf_counter()
        slots, copies = self.ring.slots, self.copies
        slot = None
        while slot is None and self.is_open and self.working:
            # Nobody notifies of copies that are done: they are polled. All other slots come with a notification.
            # Without ``wait`` nobody waits for writes: what finds no room stays on the device.
            if copies.under_way or (wait and (self.writes or slots.has_spans_in_copies)):
                self.changed.wait(COPY_POLL_S if copies.under_way or slots.has_spans_in_copies else LANE_CHECK_S)
            elif not (wait and self._give_up_read_ahead()):
                break
            self._tell_if_slow("forward", self.writes or self.read_ahead.newest_first(), started)
            self.settle_copies()
            slot = slots.allocate(nbytes) if self.is_open else None  # else a put would copy into staging that is gone
        self.stats.stall_s += time.perf_counter() - started
        return slot

    def _give_up_read_ahead(self) -> bool:
        """Give up the newest read ahead, or wait for one that is under way; False if there is neither."""
        parts = self.read_ahead.newest_first()
        if parts and not any(self.cancel_read_ahead(part) for part in parts):
            self.changed.wait(LANE_CHECK_S)
        return bool(parts)

    # ---- back ---------------------------------------------------------------------------------------------------

    def prefetch(self, ticket: SwapTicket) -> bool:
        copies = self.copies
        with self.lock:
            if not (self.is_open and self.left(ticket.parts)):
                return True  # in memory or on its way already, or nothing to do
            if self.ring.accelerator.is_synchronous:  # then they stay in staging until backward wants them
                self.begin(ticket, ticket.parts)
                return not self.left(ticket.parts)
            is_new = ticket.destination is None
            if is_new:
                with suppress(RuntimeError, MemoryError):
                    ticket.destination = None if copies.is_full else copies.allocate(ticket.nbytes, ticket.device)
                if ticket.destination is None:
                    return False
            has_begun = self.begin(ticket, ticket.parts)
            if is_new and not has_begun:
                ticket.destination = None
            return has_begun  # it has memory, which counts from here on, and the other parts follow

    def get(self, ticket: SwapTicket, device: torch.device) -> Loaded:
        with self.lock:
            self.settle_copies()  # backward needs the memory of what forward has finished copying
            if any(part.state in GIVEN_UP and part.arrival is None for part in ticket.parts):
                raise StateError(ASKED_TOO_LATE)
            loaded = self._load(ticket, device)
            self.changed.notify_all()
        # Here: if the caller never did, the memory could go to the next tenant while it is still copied into.
        loaded.arrival.join()
        return loaded

    def _load(self, ticket: SwapTicket, device: torch.device) -> Loaded:
        """Bring all parts of a storage to the device. If it raises, parts that came stay, and it may be repeated."""
        if ticket.destination is None:
            ticket.destination = self.copies.allocate(ticket.nbytes, device)
        for index, part in enumerate(ticket.parts):
            if part.arrival is not None and part.state in (_S.STORED, _S.RELEASED):
                continue  # handed over before something failed
            self.begin(ticket, [one for one in ticket.parts[index + 1 :] if one.state is _S.STORED])
            self._wait_until_over(ticket, part)
            place = ticket.destination.part(part.start, part.nbytes)
            if part.host is not None:
                self._copy_from_beside_staging(part, place)
            elif part.arrival is None:
                part.arrival = self.copy_in(part, place)
            self._hand_over(part)
        arrivals = [part.arrival for part in ticket.parts if part.arrival is not None]
        arrival = self.copies.whole(ticket.destination, arrivals)
        for part in ticket.parts:
            part.arrival = None
        ticket.destination = None
        return Loaded(arrival, stored=all(part.state is not _S.RELEASED for part in ticket.parts))

    def _copy_from_beside_staging(self, part: Part, place: Destination) -> None:
        """Copy a part to the device, and wait until the memory that it is copied from may go."""
        self.lock.release()  # or lanes would wait for a device that is behind; nobody else is at this part
        try:
            arrival = self.copy_in(part, place)
            arrival.wait()  # the memory beside staging may go now
        finally:
            self.lock.acquire()
        part.arrival = arrival

    def _hand_over(self, part: Part) -> None:
        """Free what a part held that is handed over: cancel a write that has not begun, free the slot of a read."""
        if part.state in BEFORE_WRITTEN:
            self.stats.forwarded_bytes += part.nbytes
        if part.state is _S.QUEUED:
            self.stats.cancelled_bytes += part.nbytes
            self.give_up(part)  # the lane skips it: the write is cancelled
            return
        self.read_ahead.end(part)
        if part.state is _S.LOADED:
            part.host = None
            part.move(_S.STORED)
            self.free_slot(part)

    def _wait_until_over(self, ticket: SwapTicket, part: Part) -> None:
        """Block until the bytes of a part are in memory; raise its error if they are lost.

        Called under the lock, which each wait releases.
        """
        # What is still to be written is in staging, unless a lane has failed, maybe at the copy into it.
        if part.error is None and (self.lane_error or part.state not in BEFORE_WRITTEN):
            started = time.perf_counter()
            if self.read_ahead.end(part) is Ahead.STAYED:  # from here on it is ours, and cannot be given up
                self.stats.forwarded_bytes += part.nbytes
            if part.state is _S.STORED and not self.closed:
                self._begin_urgent_read(part)
            if part.state is _S.READ_QUEUED:
                self.queue_read(ticket, part, URGENT)
            while part.state not in OVER | GIVEN_UP and part.error is None and not (self.closed or self.lane_error):
                self.changed.wait(LANE_CHECK_S)
                self._tell_if_slow("backward", [part], started)
            if part.state in GIVEN_UP:
                raise StateError(ASKED_TOO_LATE)
            if part.state not in OVER and part.error is None:
                if self.closed:
                    raise StateError(CLOSED)
                raise ActivationLostError(
                    f"{part.place}: the activation was lost: a lane failed ({self.lane_error!r}). Resume from the last "
                    "checkpoint."
                )
            self.stats.stall_s += time.perf_counter() - started
        if part.error is not None:
            # A new exception each time: one that is kept would keep the frames it passed through.
            raise type(part.error)(str(part.error)) from part.error

    def _begin_urgent_read(self, part: Part) -> None:
        """Take memory to read a stored part that backward waits for: a slot, or where there is none, beside staging.

        A slot that only copies use is waited for: the device makes them whatever the host does.
        """
        slots, nbytes = self.ring.slots, part.extent.nbytes
        part.slot = slots.allocate(nbytes)
        while part.slot is None and slots.has_spans_in_copies and not self.closed:
            self.changed.wait(COPY_POLL_S)
            self.settle_copies()
            part.slot = slots.allocate(nbytes)
        if part.slot is None:
            part.host = self.ring.overflow(nbytes)
        part.move(_S.READ_QUEUED)

    def _tell_if_slow(self, who: str, parts: Iterable[Part], started_s: float) -> None:
        """Warn now and then of drives that a thread of the user's waits for: one that hangs looks like a slow model."""
        now_s = time.perf_counter()
        if now_s < max(started_s + SLOW_WAIT_S, self._quiet_until_s):
            return
        directories = sorted({str(part.path.file.directory) for part in parts})
        if not directories:
            return
        self._quiet_until_s = now_s + SLOW_AGAIN_S
        logger.warning(
            "%s has waited %.0f s for the drive of %s, and waits on. Look whether it reports errors (dmesg, smartctl); "
            "if it does not answer again, end the run and name another directory in nvme_path",
            who,
            now_s - started_s,
            ", ".join(directories),
        )

    # ---- giving up ----------------------------------------------------------------------------------------------

    def release(self, ticket: SwapTicket) -> None:
        with self.lock:
            for part in ticket.parts:
                if part.state in (_S.WRITING, _S.READING):  # see [Note: Who frees a slot]
                    self.read_ahead.end(part)  # or its bytes would count against the bound for ever
                    part.move(_S.ABANDONED)
                    continue
                if part.state is not _S.ABANDONED:
                    self.drop_arrival(part)
                if part.state not in GIVEN_UP:
                    self.stats.cancelled_bytes += part.nbytes if part.state is _S.QUEUED and ticket.is_taken else 0
                    self.give_up(part)
            ticket.destination = None
            self.changed.notify_all()

    def cancel_prefetch(self, ticket: SwapTicket) -> bool:
        with self.lock:
            ahead = [part for part in ticket.parts if part in self.read_ahead]
            # A get that failed half-way has handed bytes over, and nothing else has them.
            if any(part.state in (_S.READING, _S.RELEASED) for part in ticket.parts):
                return False
            if not ahead and ticket.destination is None:
                return False
            for part in ahead:
                self.cancel_read_ahead(part)
            for part in ticket.parts:  # those of failed writes
                self.drop_arrival(part)
            ticket.destination = None
            self.changed.notify_all()  # whoever waits for a slot may get this one
            return True

    def copies_out(self) -> Sequence[PendingCopy]:
        with self.lock:
            self.settle_copies()
            return self.copies.under_way

    # ---- beginning and ending -----------------------------------------------------------------------------------

    def open(self) -> None:
        """Take staging, disk space, handles and lanes, unless they are taken; see [Note: Open].

        A path that cannot be opened again fails alone. Whatever else cannot be had fails all: training goes on without.
        """
        with self._opening:
            if self.is_open or self.closed:
                return
            try:
                for path in self.working:  # before any thread: a failure must leave none behind
                    try:
                        path.open(self._backend, self.ring.slots.capacity_bytes)
                    except (OSError, DsTbaError) as error:
                        if len(self.working) == 1:
                            raise
                        path.fail(_NOT_OPENED, error)
                self.ring.open()
                handles = [one for path in self.paths for one in path.writes.handles + path.reads.handles]
                self.io.buffers = dict(zip(handles, map(self.ring.view, self.ring.buffers), strict=False))
                for index, path in enumerate(self.paths):
                    path.writes.start(f"{THREAD_PREFIX}write-{index}", self.ring.accelerator)
                    path.reads.start(f"{THREAD_PREFIX}read-{index}", self.ring.accelerator)
                with self.lock:
                    self.is_open = not self.closed
            except BaseException as error:
                self._end()
                if not isinstance(error, (OSError, RuntimeError, MemoryError, DsTbaError)):
                    raise
                for path in self.working:
                    path.fail(_NOT_OPENED, error)

    def give_back(self) -> bool:
        with self._opening:
            with self.lock:
                deadline_s = time.monotonic() + IDLE_LIMIT_S
                while not (self.closed or self.is_idle) and time.monotonic() < deadline_s:
                    self.changed.wait(COPY_POLL_S)  # lanes may be at work on what was given up
                if self.closed or not self.is_idle:
                    return self.closed
                self.is_open = False
            if not self._end():
                self.closed = True  # what a lane that hangs uses stays
        return True

    def close(self) -> None:
        with self.lock:
            self.closed, self.is_open = True, False
            self.changed.notify_all()
            deadline_s = time.monotonic() + COPYING_LIMIT_S
            # Else staging would go under a put that copies.
            while any(part.copy is None for part in self.writes) and time.monotonic() < deadline_s:
                self.changed.wait(COPY_POLL_S)
        with self._opening:
            self._end()

    def _end(self) -> bool:
        """Have the lanes do what is queued and end, then free staging and disk space; False where a lane hangs."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        groups = [group for path in self.paths for group in (path.writes, path.reads)]
        for group in groups:  # all of them first: they end at the same time
            group.stop()
        ended = [group.end(deadline_s) for group in groups]
        if not all(ended):
            logger.error(
                "an I/O request did not end within %.0f s; its memory is left to process exit", CLOSE_TIMEOUT_S
            )
            return False
        try:
            with self.lock:
                # Copies that are under way read and write the memory that closing the ring frees.
                self.copies.finish()
                self.io.buffers = {}
                self.ring.close()
        finally:  # without the lock: a drive may hang in giving the space back
            for path in self.paths:
                path.file.close()
        return True
