"""Which saved bytes are in device memory, and what leaves when others need the room: one account for all of them.

Sees records, stores and streams; cannot see autograd, nor which storages a plan keeps.

[Note: The budget] Counted is the device memory of saved tensors: what is kept, what was moved and is still used by
forward, what was loaded or rematerialized, what recomputations save, and what is being read ahead onto a device. With a
budget, nothing is added before there is room. Room is made by waiting for copies, then by moving what was kept, the
oldest first, because backward wants that last, then by giving up what was read ahead. So a plan that keeps too much
costs time and no memory. Tensors that forward itself holds, that a lane is reading, or that are too small to move, may
exceed the budget: a warning says so once, before they do.

What was reloaded counts until the streams that used it have passed the point at which the host let go of it: before
that the allocator takes new memory for the next reload. Before a reload the host waits for the oldest of these, without
the lock: with a budget until there is room, without one until they are no more than the store's own bound.

[Note: Loads] No lock is held while a store loads bytes, or makes them from others, which are loaded in turn: the record
is LOADING, and another thread that wants it waits for that. An operand of a recipe that backward wants later or not at
all stays for that, as long as there are few.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from ds_tba.core.accounts import CountedMemory, Release
from ds_tba.core.poison import Poisoned
from ds_tba.core.saved import Keeper, Loading, RecordState, SavedStorage, SavedView
from ds_tba.core.tensors import as_uint8, has_plain_storage, held_memory, is_parameter, out_of_modes, unmodified
from ds_tba.device.accelerator import AT_ONCE, Accelerator, Event, PendingCopy, is_out_of_memory
from ds_tba.errors import StateError
from ds_tba.storage.base import AnyIssuer, AnyStore, Choice, Loaded, Refusal, Store, Ticket

logger = logging.getLogger(__name__)


class Residency(Keeper, Poisoned):
    """The saved storages in device memory, within the budget: the part of the cache that moves bytes.

    It changes only under the lock: ``limit``, ``wait_for``, ``give_way``, ``scratch``, ``end_early`` and ``load`` with
    what that calls take it, and all other methods that change anything are called under it. ``may_wait``,
    ``is_exceeded_by`` and ``memory_of`` only read, and are called without it, too.
    """

    def __init__(
        self, stores: Sequence[AnyStore], device: torch.device, accelerator: Accelerator, released_bytes: int
    ) -> None:
        super().__init__(device, accelerator)
        Poisoned.__init__(self)
        self.limit_bytes = math.inf  # the budget; infinite without one
        self.stores = tuple(stores)  # where bytes may go that were kept, in order of preference
        # All whose pending copies hold device memory: the stores, and before them the one that rematerializes.
        self.issuers: tuple[AnyIssuer, ...] = self.stores
        self._setting = ""  # that asks for the limit
        # Without a budget, the bound of what the host has let go of and the device has not.
        self._released_limit_bytes = released_bytes
        self._has_warned = False
        self.largest_bytes = 0  # of the storages that left, and of which any is alive
        # What may leave, oldest first, with an event of the stream that makes the bytes of a kept one.
        self._movable: dict[SavedStorage, Event] = {}
        self._ahead: dict[SavedStorage, AnyStore] = {}  # asked of these stores ahead of backward, oldest first
        self._copied: list[CountedMemory] = []  # memory that copies out may hold, and no record any more
        self._recomputed: list[CountedMemory] = []  # what blocks that ran again have saved in this backward
        self._early: dict[SavedStorage, None] = {}  # oldest first: see add_early()

    # ---- room ---------------------------------------------------------------------------------------------------

    def limit(self, nbytes: int | None, setting: str = "") -> None:
        """Hold saved tensors in device memory within a budget from now on.

        Args:
            nbytes: None for none.
            setting: that asks for it, for a warning where it cannot be held; empty for no warning.
        """
        with self.lock:
            self.limit_bytes = math.inf if nbytes is None else nbytes
            self.is_limited = self.limit_bytes < math.inf
            self._setting = setting

    def is_exceeded_by(self, more_bytes: float) -> bool:
        """Return whether so many bytes more do not fit now."""
        return self._gauge.now + more_bytes > self.limit_bytes

    @property
    def may_wait(self) -> bool:
        """True if anything may have to be waited for, or moved, before more is counted."""
        may_wait = self.is_limited or self._releases.nbytes > 0
        # A capture into a graph, inside of forward, would be spoilt by looking whether the device has done something.
        return may_wait and not self._accelerator.is_capturing()

    def wait_for(self, nbytes: int, pinned: Collection[SavedStorage] = ()) -> bool:
        """Offload, and wait for, what makes room for so many bytes more; return whether they fit now.

        Args:
            pinned: storages that stay where they are.
        """
        while self.may_wait:
            with self.lock:
                self.ends.act()  # what is gone makes room
                release = self.free_room(nbytes, pinned)
            if release is None:
                break
            release.wait()  # without the lock, or every other thread's hooks would wait for this device, too
        return not self.is_exceeded_by(nbytes)

    def give_way(self) -> None:
        """Drop what was read ahead, and wait until the device is done with what was let go of."""
        with self.lock:
            self.ends.act()
            for record in (*self._ahead, *self._early):
                self.evict(record)
            release = self._releases.oldest
        while release is not None:
            release.wait()  # without the lock, or every other thread's hooks would wait for this device, too
            with self.lock:
                self._releases.settle()
                release = self._releases.oldest

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[None]:
        """Have room for what is made and nobody saves; it counts where there is a budget, which holds for it, too."""
        self.wait_for(nbytes)
        with self.lock:
            self.make_room(nbytes)
            counted_bytes = nbytes if self.is_limited else 0
            self._gauge.add(counted_bytes)
        try:
            yield
        finally:
            with self.lock:
                self._gauge.add(-counted_bytes)

    def free_room(self, nbytes: int, pinned: Collection[SavedStorage] = ()) -> Release | PendingCopy | None:
        """Move what can be moved until ``nbytes`` more fit the budget, or will once streams are done with the rest.

        Args:
            pinned: storages that stay where they are.

        Returns:
            What to wait for before this is called again; None where no wait would give more room.
        """
        self._releases.settle()
        copies: list[PendingCopy] = []
        if not self._fits(nbytes, copies):
            copies = self.copies_out()
            # Copies: ends that copies_out() acts on remove records. Of what is read ahead the newest is wanted last.
            for record in (*self._movable, *reversed(list(self._ahead))):
                if self._fits(nbytes, copies):
                    break
                if record not in pinned:  # or an operand would be evicted for what is made of it
                    self.evict(record)
                    copies = self.copies_out()
        is_too_far = self._releases.nbytes > self._released_limit_bytes and not self.is_limited
        if not (is_too_far or self.is_exceeded_by(nbytes)):
            return None
        return copies[0] if copies else self._releases.oldest

    def make_room(self, nbytes: int) -> None:
        """Have ``nbytes`` more fit the budget, as far as that can be done; see [Note: The budget]."""
        if not self.may_wait:
            return
        while (release := self.free_room(nbytes)) is not None:
            release.wait()  # under the lock, where another thread took the room that was waited for without it
        if self.is_exceeded_by(nbytes) and self._setting and not self._has_warned:
            self._has_warned = True  # or each save from now on would say it
            logger.warning(
                "%s %d cannot be held: %d bytes of saved tensors are in device memory, %d more come, and none of them "
                "can be moved now: forward or backward is using them, a drive is reading them, they are smaller than "
                "min_tensor_bytes, excluded by name, or there is no room for them elsewhere (fallbacks in the report). "
                "Training goes on above the budget. A budget larger by %d or more, smaller micro-batches or a smaller "
                "min_tensor_bytes would help",
                self._setting,
                self.limit_bytes,
                self._gauge.now,
                nbytes,
                self._gauge.now + nbytes - self.limit_bytes,
            )

    def _fits(self, nbytes: int, copies: Sequence[PendingCopy]) -> bool:
        """Return whether ``nbytes`` more fit the budget, once these copies are done and streams with what was freed."""
        leaving_bytes = self._releases.nbytes + sum(copy.nbytes for copy in copies)
        return not self.is_exceeded_by(nbytes - leaving_bytes)

    def copies_out(self) -> list[PendingCopy]:
        """List the copies that hold device memory on its way out, oldest first of each store."""
        found = [copy for issuer in self.issuers for copy in issuer.copies_out()]
        self.ends.act()  # of the memory that finished copies have let go of
        under_way = {self.memory_of(copy.storage) for copy in found}
        for memory in self._copied:
            if memory not in under_way:
                self._end_count(memory)
        self._copied = [memory for memory in self._copied if memory in under_way]
        return found

    # ---- records that come and go -------------------------------------------------------------------------------

    def remove(self, record: SavedStorage) -> None:
        """Nobody wants a storage any more; call it before the record is dropped."""
        if record.ticket is not None and not self._accelerator.is_synchronous and record.source() is not None:
            record.memory.users -= 1
            self._copied.append(record.memory)  # a copy out may still hold it: uncounted, it would pass for free
        else:
            self.uncount(record.memory)
        self.end_prefetch(record)
        self._early.pop(record, None)
        self._movable.pop(record, None)

    # ---- what recomputations save -------------------------------------------------------------------------------

    def count_again(self, tensor: torch.Tensor) -> None:
        """Count a tensor that a forward saves which runs again in backward, until it is free or backward is over."""
        if is_parameter(tensor) or not has_plain_storage(tensor):  # a parameter's memory is its owner's
            return
        storage, nbytes = tensor.untyped_storage(), held_memory(tensor, self._device)[1]
        self.wait_for(nbytes)
        with self.lock:
            self.meter.recomputed_bytes += 0 if self.memory_of(storage) else nbytes
            self._recomputed.append(self.count(storage, nbytes))
            self.count_until_free(storage)

    def end_recomputations(self) -> None:
        """Count no longer what backward has saved again: what others still hold of it, a buffer say, is theirs."""
        with self.lock:
            while self._recomputed:
                self.uncount(self._recomputed.pop())

    # ---- ahead of backward ---------------------------------------------------------------------------------------

    def prefetch(self, record: SavedStorage) -> bool:
        """Have a record read ahead, if its bytes are wanted; False where there is no room for it now."""
        ticket, store = record.ticket, None if record.ticket is None else record.ticket.store
        if record.state is not RecordState.AWAY or not record.pending or ticket is None:
            return True  # there, on its way, or wanted by nobody any more
        if not isinstance(store, Store):  # it is made when backward wants it: counted now, it would fill the budget
            return True
        if record in self._ahead or record.living_source() is not None:  # which backward gets
            return True
        if not self._accelerator.is_synchronous:
            self._releases.settle()
            # The largest storage must fit as well: backward may want any other first.
            if self.is_exceeded_by(record.nbytes + self.largest_bytes):
                return False
        if not store.prefetch(ticket):
            return False
        self._ahead[record] = store
        if not self._accelerator.is_synchronous:  # else it is read into staging, which has its own bound
            self._gauge.add(record.nbytes)
        return True

    def end_prefetch(self, record: SavedStorage) -> None:
        """Count a record as asked for ahead no longer, if it was; its store reads on, unless the read was cancelled."""
        if record in self._ahead:
            del self._ahead[record]
            if not self._accelerator.is_synchronous:
                self._gauge.add(-record.nbytes)

    def add_early(self, record: SavedStorage) -> None:
        """Hold a storage that was loaded to make another, and that backward wants for itself later, or not at all.

        It stays for that, but the oldest of them leave that take more than two operands of an op.
        """
        self._early[record] = None
        while sum(one.nbytes for one in self._early) > 2 * self.largest_bytes and len(self._early) > 1:
            self.evict(next(iter(self._early)))

    def end_early(self) -> None:
        """Hold none of what was loaded to make others from it: forward goes on, and backward is far."""
        with self.lock:
            for record in list(self._early):
                self.evict(record)

    def evict_if_unpacked(self, record: SavedStorage) -> None:
        """Release loaded bytes that no view waits for: a second backward loads them again."""
        if record.pending == 0 and record.is_backed:
            self.evict(record)

    # ---- back into device memory --------------------------------------------------------------------------------

    def load(self, view: SavedView) -> torch.Tensor:
        if self.is_forked:
            raise StateError("a forked child has neither the staging nor the lanes of its parent: run forward in it")
        tensor, record = view.in_source(), view.record
        if tensor is not None:
            with self.lock:
                self._use(record, tensor)
                self._note_unpacked(view)
            return tensor
        try:
            return self._load_once(view)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        # The allocator has memory again once streams are done with what the host has let go of (pytorch #189504).
        self.give_way()
        return self._load_once(view)

    def _use(self, record: SavedStorage, tensor: torch.Tensor) -> None:
        """Note that the current stream uses the storage that was saved, which another one may have saved."""
        stream, consumers = self._accelerator.current_stream(), record.memory.consumers
        if stream != record.stream and stream not in consumers:
            self._accelerator.share(tensor, stream)
            consumers.append(stream)

    def _load_once(self, view: SavedView) -> torch.Tensor:
        record = view.record
        arrival = self._loaded(record).arrival
        with self.lock:
            data = arrival.join()  # every consumer waits for the copy, each in its own stream
            unmodified(data, arrival.version)  # an earlier consumer may have written into it
            if view.state.is_lent:  # or each recipe that wants it would read it again
                self.add_early(record)
            self._note_unpacked(view)
        return view.rebuild(data)

    def _loaded(self, record: SavedStorage) -> Loaded:
        """Load a record, if it is not there; see [Note: Loads]."""
        while True:
            is_counted = record.loaded is not None or (record in self._ahead and not self._accelerator.is_synchronous)
            self.wait_for(0 if is_counted else record.nbytes)
            with self.lock:
                if record.loaded is not None:
                    return record.loaded
                loading = record.loading or self.begin_load(record)  # never twice: it would be counted twice
            if loading.thread == threading.get_ident():
                return self._fetch(record, loading)
            with loading.done:  # another thread loads it
                pass

    def _fetch(self, record: SavedStorage, loading: Loading) -> Loaded:
        store, started_s = loading.ticket.store, time.perf_counter()
        try:
            loaded = store.get(loading.ticket, self._device)
        except BaseException:  # another thread would wait for it for ever
            with self.lock:
                self.end_load(record, loading, None)
            raise
        with self.lock:
            if isinstance(store, Store):  # else it was made, and nothing has moved
                self.meter.moving_s += time.perf_counter() - started_s
            self.end_load(record, loading, loaded)
        return loaded

    def _note_unpacked(self, view: SavedView) -> None:
        """Note that backward has had the bytes of a view; release what was loaded, if no other waits for it."""
        record = view.record
        record.pending -= view.state.is_pending
        view.state.is_unpacked = True  # under the lock: two threads may unpack one view, and it was pending once
        self.evict_if_unpacked(record)  # the record lets go of the memory, and the consumer holds it
        if not view.state.is_lent:  # else a comparison in forward may want it
            record.micro_step.read_ahead(self.prefetch, after=record.index)

    def begin_load(self, record: SavedStorage) -> Loading:
        """Have the calling thread load a record, once there is room for its bytes."""
        ticket = record.ticket
        if ticket is None:
            raise StateError(f"a saved storage '{record.state.value}' has no ticket; this is a bug in ds_tba")
        self.end_prefetch(record)  # or its bytes would be counted twice
        loading = Loading(threading.get_ident(), ticket, threading.Lock())
        self.make_room(record.nbytes)
        record.move(RecordState.LOADING)
        loading.done.acquire()
        record.loading = loading
        self._gauge.add(record.nbytes)  # or another thread would take the room meanwhile
        return loading

    def end_load(self, record: SavedStorage, loading: Loading, loaded: Loaded | None) -> None:
        """Hold the bytes of a record that were loaded; None if that has failed."""
        record.loading = None
        self._gauge.add(-record.nbytes)
        record.move(RecordState.AWAY if loaded is None else RecordState.LOADED)
        record.loaded = loaded  # before room is made: a device without memory for that loses no bytes
        loading.done.release()
        if loaded is None:
            return
        storage = loaded.data.untyped_storage()
        is_saved = self.memory_of(storage) is record.memory  # a store may give the very storage that was saved
        memory = record.memory if is_saved else self.count(storage, record.nbytes)
        self.count_until_free(storage)
        # The same list that join() adds to: when the host releases it, it tells which streams may still use the memory.
        memory.consumers = loaded.arrival.consumers
        if self.is_limited:
            self._movable[record] = AT_ONCE

    # ---- out of device memory -----------------------------------------------------------------------------------

    def evict(self, record: SavedStorage) -> None:
        """Hold the bytes of a record no longer, if a store has them or takes them; cancel a read ahead."""
        # First: add_early() evicts until few are left, and another thread may have evicted and prefetched this one.
        self._early.pop(record, None)
        if record in self._ahead:
            if record.ticket is not None and self._ahead[record].cancel_prefetch(record.ticket):
                self.end_prefetch(record)
            return
        kept_at = self._movable.pop(record, AT_ONCE)
        if record.is_backed:
            record.move(RecordState.AWAY)
            record.loaded = None
        elif record.state is RecordState.LOADED or (record.is_kept and not record.is_leaving):
            tensor = self._only_copy(record, kept_at) if record.loaded is not None or record.may_leave else None
            leaves = tensor is not None and self.offload(record, tensor, Choice(self.stores, wait=True))
            if not leaves and self.is_limited:
                self._movable[record] = kept_at  # another time: what fills the stores now may be gone then

    def _only_copy(self, record: SavedStorage, kept_at: Event) -> torch.Tensor | None:
        """Return the bytes of a record for a copy out on the calling thread's current stream; None if there are none.

        Args:
            kept_at: event of the stream that makes the bytes.
        """
        loaded = record.loaded
        if loaded is not None:
            data = loaded.arrival.join()  # the copy out must not begin before the copy in is done
            # What was changed stays: the next unpack raises.
            return data if data._version == loaded.arrival.version else None
        # A store copies after the calling thread's current stream, and the bytes may be made in another one.
        self._accelerator.current_stream().wait_event(kept_at)
        return next((view.held for view in record.holders), None)

    def offload(self, record: SavedStorage, tensor: torch.Tensor, choice: Choice) -> bool:
        """Have the first store that can take the bytes of a record, which are those of a tensor's storage.

        Returns:
            Whether one did; else the record has the last refusal.
        """
        refusal: Refusal | None = None
        with out_of_modes():  # a mode that copies what operations return would leave staging as it was
            data = as_uint8(tensor.untyped_storage())
            for store in choice.stores:
                started_s = time.perf_counter()
                taken = store.put(data, wait=choice.wait, item_bytes=tensor.element_size())
                self.meter.moving_s += time.perf_counter() - started_s
                if isinstance(taken, Ticket):
                    self.give(record, taken)
                    return True
                refusal = taken
        if refusal is None:
            return False
        if not record.refusal:  # once: a budget tries again at each save
            self.meter.fallbacks[refusal.value] += 1
        record.refusal = refusal.value
        return False

    def give(self, record: SavedStorage, ticket: Ticket) -> None:
        """Leave the bytes of a record to the store that issued a ticket."""
        if record.ticket is not None:  # its bytes were handed over, but a part of them may still be there
            record.ticket.store.release(record.ticket)
        is_kept, record.ticket = record.is_kept, ticket
        record.move(RecordState.AWAY)
        record.loaded = None
        self.largest_bytes = max(self.largest_bytes, record.nbytes)
        if is_kept:
            record.release_views()
