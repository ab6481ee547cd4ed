"""Saved storages in device memory: how many bytes they hold there, and the bound on that.

Knows records and stores; does not know autograd, nor which storages a plan keeps.

[Note: The bound] Counted is the device memory of saved tensors: what is kept, what was moved and is still used by
forward, what was reloaded, and what is being read ahead onto a device. With a bound, nothing is added before there is
room. Room is made by waiting for copies, then by moving what was kept, the oldest first, because backward wants that
last, then by giving up what was read ahead. So a plan that keeps too much costs time and no memory. What forward itself
holds and what is too small to move cannot be helped: that is said once, before it is added.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ds_tba.autograd.saved import Keeper, Moved, RecordState, ResidencyGuard, SavedStorage
from ds_tba.device.accelerator import Accelerator, MemoryUse, moment
from ds_tba.errors import StateError
from ds_tba.storage.base import Refusal, Store, Ticket
from ds_tba.telemetry.stats import Gauge

logger = logging.getLogger(__name__)

_PRESENT = "_ds_tba_present"

Put = Callable[[Store[Any], torch.Tensor], Ticket | Refusal]


class Resident:
    """What saved storages hold of the device's memory. Changed only under the cache's lock.

    Args:
        gauge: their bytes.
        stores: where they can go, in order of preference.
        put: has a store take a tensor's storage, waiting for room in staging.
        settle: acts on what finalizers have left.
        keeper: told when memory is free.
        accelerator: of the device, where that is asynchronous.
    """

    def __init__(
        self,
        gauge: Gauge,
        stores: Sequence[Store[Any]],
        put: Put,
        settle: Callable[[], None],
        keeper: Keeper,
        accelerator: Accelerator | None,
    ) -> None:
        self._gauge = gauge
        self._stores = stores
        self._put = put
        self._settle = settle
        self._keeper = keeper
        self._device = accelerator
        self._bound_bytes = math.inf
        self._bound_name = ""
        self._has_said_over = False
        self._largest_bytes = 0
        self._movable: dict[SavedStorage, None] = {}  # oldest first
        self._ahead: dict[Moved, None] = {}

    @property
    def is_bounded(self) -> bool:
        """Whether there is a bound."""
        return self._bound_bytes < math.inf

    def limit(self, nbytes: int | None, name: str) -> None:
        """Set the bound.

        Args:
            nbytes: None for none.
            name: of the setting that asks for it, for a message where it cannot be held; empty says nothing.
        """
        self._bound_bytes = math.inf if nbytes is None else nbytes
        self._bound_name = name

    # ---- what is counted ----------------------------------------------------------------------------------------

    def add_kept(self, record: SavedStorage, storage: torch.UntypedStorage) -> None:
        """A storage stays where it is."""
        record.present = weakref.ref(self.count(storage, record.nbytes))
        if self.is_bounded:
            self._movable[record] = None
            record.kept_at = None if self._device is None else moment(self._device)

    def add_moved(self, record: SavedStorage, storage: torch.UntypedStorage) -> None:
        """A store has a storage; its memory counts until its last user lets go of it."""
        self._largest_bytes = max(self._largest_bytes, record.nbytes)
        record.present = weakref.ref(self.count(storage, record.nbytes))

    def add_reloaded(self, record: SavedStorage, data: torch.Tensor) -> None:
        """A storage is back in device memory."""
        self.count(data.untyped_storage(), record.nbytes)
        if self.is_bounded:
            self._movable[record] = None

    def count(self, storage: torch.UntypedStorage | None, nbytes: int) -> ResidencyGuard:
        """Count the memory of a storage for one user (more), until it is free or no user wants it counted.

        Without a storage, until nobody has what this returns.
        """
        presents: list[ResidencyGuard] = getattr(storage, _PRESENT, [])
        present = next((one for one in presents if one.counts_for(self._keeper)), None)
        if present is None:
            present = ResidencyGuard(self._keeper)
            if storage is not None:
                setattr(storage, _PRESENT, [*presents, present])
        self._gauge.add(present.count(nbytes))
        return present

    def let_go(self, record: SavedStorage) -> None:
        """Hold no longer in memory what a store has."""
        record.move(RecordState.OFFLOADED)
        record.arrival = None
        self._movable.pop(record, None)

    def remove(self, record: SavedStorage) -> None:
        """Nobody wants a storage any more; call it before the record is dropped."""
        present = record.present() if record.present is not None else None
        if present is not None:  # else the memory is free already
            self._gauge.add(-present.leave())
        self.end_prefetch(record)
        self._movable.pop(record, None)

    def prefetch(self, record: Moved) -> bool:
        """Have a record read ahead; False where there is no room for it now."""
        if record.ticket is None or record in self._ahead:
            return True
        if self._device is None:
            return record.ticket.store.prefetch(record.ticket)
        if self.is_bounded and record.ticket.passing_bytes:
            return True  # it is read ahead part by part when it is wanted
        # The largest storage must fit as well: backward may want any other first.
        if self._is_over(record.nbytes + self._largest_bytes) or not record.ticket.store.prefetch(record.ticket):
            return False
        self._ahead[record] = None
        self._gauge.add(record.nbytes)
        return True

    def end_prefetch(self, record: Moved) -> None:
        """A record is no longer being read ahead."""
        if record in self._ahead:
            del self._ahead[record]
            self._gauge.add(-record.nbytes)

    # ---- the bound ----------------------------------------------------------------------------------------------

    @contextmanager
    def bringing_back(self, record: SavedStorage, ticket: Ticket) -> Iterator[None]:
        """While the bytes of a record come back: there is room for them, and for what they pass through."""
        self.end_prefetch(record)
        passing_bytes = 0 if self._device is None else ticket.passing_bytes
        self.make_room(record.nbytes + passing_bytes)
        self._gauge.add(passing_bytes)
        try:
            yield
        finally:
            self._gauge.add(-passing_bytes)

    def make_room(self, nbytes: int) -> None:
        """Have ``nbytes`` more fit the bound, as far as that can be done; see [Note: The bound]."""
        if not self._is_over(nbytes):
            return
        self._finish_copies()
        for record in list(self._movable):
            if not self._is_over(nbytes):
                return
            self._move_out(record)
            self._finish_copies()
        for ahead in reversed(list(self._ahead)):
            if not self._is_over(nbytes):
                return
            if ahead.ticket is not None and ahead.ticket.store.cancel_prefetch(ahead.ticket):
                self.end_prefetch(ahead)
        if self._is_over(nbytes):
            self._say_over(nbytes)

    def _is_over(self, more_bytes: int) -> bool:
        return self._gauge.now + more_bytes > self._bound_bytes

    def _finish_copies(self) -> None:
        """Wait for copies that hold device memory on its way out."""
        for store in self._stores:
            store.finish_copies()
        self._settle()

    def _move_out(self, record: SavedStorage) -> None:
        """Have a store take what is in device memory, if one does."""
        self._movable.pop(record, None)
        if record.state is RecordState.RELOADED:
            self.let_go(record)
        elif record.state is RecordState.FORWARDED:
            self._move_forwarded(record)
        elif record.state is RecordState.KEPT:
            self._move_kept(record)

    def _move_kept(self, record: SavedStorage) -> None:
        views = [view for reference in record.kept_views if (view := reference()) is not None]
        held = next((view.held for view in views if view.held is not None), None)
        if held is None:
            return
        if self._device is not None and record.kept_at is not None:  # it may have been saved on another stream
            self._device.current_stream().wait_event(record.kept_at)
        if not self._take(record, held):
            return
        self._largest_bytes = max(self._largest_bytes, record.nbytes)
        record.pending = sum(not view.is_unpacked for view in views)
        record.kept_views.clear()
        for view in views:
            view.let_go()

    def _move_forwarded(self, record: SavedStorage) -> None:
        if record.arrival is None:
            raise StateError("what was forwarded is not in memory; this is a bug in ds_tba")
        data = record.arrival.join()
        if data._version == record.data_version and self._take(record, data):  # else the next unpack raises
            record.arrival = None

    def _take(self, record: SavedStorage, tensor: torch.Tensor) -> bool:
        for store in self._stores:
            taken = self._put(store, tensor)
            if isinstance(taken, Ticket):
                if record.ticket is not None:  # its bytes were handed over, but a part of them may still be there
                    record.ticket.store.release(record.ticket)
                record.ticket = taken
                record.move(RecordState.OFFLOADED)
                return True
        return False

    def _say_over(self, nbytes: int) -> None:
        if not self._bound_name or self._has_said_over:
            return
        self._has_said_over = True
        logger.warning(
            "%s %d cannot be held: %d bytes of saved tensors are in device memory, %d more come, and none of them can "
            "be moved now: forward or backward is using them, or they are smaller than min_tensor_bytes. Training goes "
            "on above the budget. A budget larger by %d or more, smaller micro-batches or a smaller min_tensor_bytes "
            "would help",
            self._bound_name,
            self._bound_bytes,
            self._gauge.now,
            nbytes,
            self._gauge.now + nbytes - self._bound_bytes,
        )


# Device memory beside saved tensors: gradients, logits, buckets, optimizer states.
#
# Knows an accelerator and how much saved tensors hold; does not know where they are.
#
# [Note: Room] Saved tensors may take what is left of a device beside the peak of everything else in a step. What is
# free after the optimizer step says too little: gradients and logits are gone by then. So everything else is sampled
# at the ends of steps, and at every hook while micro-steps are recorded. Between two samples the accelerator's own
# peak tells whether there was more.


class MemoryMeter:
    """The most device memory that everything but saved tensors held at once.

    Args:
        memory: of the device.
        resident: what saved tensors hold of that.
    """

    def __init__(self, memory: MemoryUse, resident: Gauge) -> None:
        self._memory = memory
        self._resident = resident
        self._resident_before_bytes = 0
        self._peak_bytes: int | None = None
        self.most_bytes = 0

    def sample(self) -> None:
        """Look at this moment, and at what came between the last sample and this one."""
        resident_bytes = self._resident.now
        peak_bytes = self._memory.peak_in_use_bytes()
        others_bytes = self._memory.in_use_bytes() - resident_bytes
        if self._peak_bytes is not None and peak_bytes > self._peak_bytes:
            # Nobody knows how much was ours then. The less, the more was others': that is the safe side.
            others_bytes = max(others_bytes, peak_bytes - min(self._resident_before_bytes, resident_bytes))
        self.most_bytes = max(self.most_bytes, others_bytes)
        self._resident_before_bytes, self._peak_bytes = resident_bytes, peak_bytes

    def room_bytes(self) -> float:
        """What saved tensors may hold; see [Note: Room]."""
        free_bytes = self._memory.free_bytes()
        others_bytes = self._memory.in_use_bytes() - self._resident.now
        return max(0.0, free_bytes - max(0, self.most_bytes - others_bytes))
