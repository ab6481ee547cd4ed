"""The saved storages of a cache, and what becomes of each of them.

Knows the objects that autograd holds; does not know how a forward is opened. ``budget.py`` moves the bytes, and holds
those in device memory within their budget; ``sites.py`` says what can be made again.

[Note: Records] Every saved tensor becomes a ``SavedView``, the object that autograd holds in its place. Views of one
storage share a ``SavedStorage``, found by the stamps of storage and version counter and by the version: the storage is
written once, and every view is rebuilt from it. A record lives as long as one of its views. Records are shared within
one forward only: bytes that change without a version bump between two forwards (a buffer that numpy refills) are saved
again.

[Note: Versions] Autograd does not compare version counters for hooked tensors, so unpack does, for every view, kept or
offloaded. A kept tensor is held as a detached alias: the tensor itself would close a reference cycle through its own
graph node.

[Note: Finalizers] A view's ``__del__`` may run anywhere: in any thread, and also while its own thread holds the lock,
because every allocation inside a critical section may start the garbage collector. So it neither waits for the lock nor
takes it twice; it defers itself (``ds_tba/storage/finalizers.py``). Whoever takes the lock acts on deferred finalizers
first, so that their memory is free, and after letting go of it acts on those that found the lock taken.

[Note: Order of locks] The cache's lock is taken before a store's, never after: stores do not know the cache. But a
finalizer may run inside a store's critical section, take the cache's lock if that is free, and give a ticket back. So
``Store.release`` waits for no lock, and defers itself in turn.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

import torch

from ds_tba.autograd.budget import Residency, Transfers
from ds_tba.autograd.prefetch import MicroStep, Phase
from ds_tba.autograd.saved import (
    NO_INDEX,
    Finalized,
    Origin,
    PassedThrough,
    RecordState,
    Reloaded,
    Rematerialization,
    ResidencyGuard,
    SavedCounted,
    SavedStorage,
    SavedView,
    StorageKey,
    nbytes_of,
    unmodified,
)
from ds_tba.autograd.tensors import has_plain_storage, keep_originals
from ds_tba.device.accelerator import Accelerator
from ds_tba.errors import StateError
from ds_tba.storage.base import Choice, Policy, Ticket
from ds_tba.storage.finalizers import DeferredFinalizers
from ds_tba.telemetry.stats import CacheStats


@dataclass(eq=False)
class Forward:
    """The forward under way, or the last one.

    Attributes:
        proves: see :meth:`TensorCache.saving`.
        by_key: records of the storages saved in it; those of earlier forwards are found no more, but live on.
    """

    micro_step: MicroStep[SavedStorage]
    policy: Policy
    proves: bool = False
    by_key: dict[StorageKey, SavedStorage] = field(default_factory=dict)


class Records:
    """The saved storages, from the first view of each to the end of its last.

    Attributes:
        lock: of everything that the cache changes; not reentrant.
        finalizers: deferred until somebody has the lock; see [Note: Finalizers].
        learned_order: of first uses, in the last backward that used all.
        live: records that some graph still holds.
        sites: what can be made again; None where nothing is to be.
    """

    def __init__(
        self, stats: CacheStats, policy: Policy, transfers: Transfers, accelerator: Accelerator | None
    ) -> None:
        self.lock = threading.Lock()
        self.finalizers: DeferredFinalizers[Finalized] = DeferredFinalizers(self.lock, self._act_on)
        self.residency = Residency(stats.resident, transfers, self.finalizers.act, self, accelerator)
        self.forward = Forward(MicroStep(), policy)
        self.learned_order: list[int] = []
        self.live = 0
        self.sites: Rematerialization | None = None
        self._stats = stats
        self._transfers = transfers
        self._empties: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._originals = keep_originals()

    def save(self, tensor: torch.Tensor) -> SavedView:
        """The object to hold in place of an eligible tensor."""
        key, origin = StorageKey.of(tensor), None
        if self.sites is not None and key not in self.forward.by_key:
            origin = self.sites.origin(tensor)
        with self.lock:
            self.finalizers.act()
            record = self._record(tensor, key, origin)
            offloaded = record.state is not RecordState.KEPT
            record.views += 1
            record.pending += offloaded
        self.finalizers.act_if_free()
        view = SavedView(self, record, tensor, offloaded=offloaded)
        # Without the lock: a view that is not listed yet keeps its bytes, even if the record is evicted meanwhile.
        if not offloaded and self.residency.budget.is_set:
            record.kept_views.append(weakref.ref(view))
        if self.sites is not None:
            self.sites.note(tensor, view)
        return view

    def unpack(
        self, micro_step: MicroStep[SavedStorage], held: PassedThrough | SavedCounted | SavedView
    ) -> torch.Tensor:
        """Autograd's unpack hook: the tensor for which ``held`` stands.

        Raises:
            ActivationModifiedError: it was modified in place after it was saved.
            ActivationLostError: its bytes could not be read back.
            ActivationCorruptionError: the bytes read back are not the bytes written.
        """
        tensor = held.restore()  # first of all: backward waits for this read, and for no read ahead
        self._originals.add(tensor, tensor is held.held)
        if isinstance(held, SavedView) and held.record.trial is not None:
            self._try(held, tensor)
        if micro_step.phase is Phase.WAITING:
            with self.lock:
                self.finalizers.act()
                micro_step.read_ahead(self.learned_order, self.residency.prefetch)
            self.finalizers.act_if_free()
        return tensor

    # ---- for the objects that autograd holds --------------------------------------------------------------------

    def load(self, record: SavedStorage, *, first_time: bool) -> torch.Tensor:
        """The bytes of a record on its device (uint8, 1-D), for the calling thread's current stream."""
        data = None
        while data is None:
            # Without the lock: the operands are loaded on their own.
            made = self._make(record) if record.recipe is not None and record.reloaded is None else None
            data = self._load(record, made, first_time=first_time)
        self.finalizers.act_if_free()
        return data

    def _load(self, record: SavedStorage, made: torch.Tensor | None, *, first_time: bool) -> torch.Tensor | None:
        """As :meth:`load`; None where the bytes are to be made first, as they were evicted meanwhile."""
        with self.lock:
            self.finalizers.act()
            reloaded = record.reloaded or self._reload(record, made)
            if reloaded is None:
                return None
            data = reloaded.arrival.join()  # every consumer waits for the copy, each in its own stream
            unmodified(data, reloaded.version)
            if first_time:
                record.pending -= 1
            self._evict_if_unpacked(record)  # the record lets go of the memory, and the caller's ``data`` holds it
            record.micro_step.read_ahead(self.learned_order, self.residency.prefetch, after=record.index)
        return data

    def _make(self, record: SavedStorage) -> torch.Tensor:
        """Make the bytes of a record again."""
        recipe = record.recipe
        if recipe is None or self.sites is None:
            raise StateError("there is no recipe; this is a bug in ds_tba")
        nbytes = record.nbytes + recipe.scratch_bytes
        with self.lock:
            self.finalizers.act()
            taken_bytes = self.residency.take_scratch(nbytes)
        try:
            return self.sites.make(recipe)
        finally:
            with self.lock:
                self.residency.give_scratch(taken_bytes)

    def _try(self, held: SavedView, tensor: torch.Tensor) -> None:
        """Make the bytes of a record again, which were saved, and compare; ``tensor`` was unpacked."""
        record = held.record
        with self.lock:
            self.finalizers.act()
            trial, record.trial = record.trial, None
            if trial is None or self.sites is None:
                return
            nbytes = 2 * record.nbytes + trial.scratch_bytes
            # Its operands count whether they are in memory or not: room for one may be made by evicting another.
            operand_bytes = sum(one.nbytes for one in set(trial.records()))
            if not self.residency.has_room(nbytes + operand_bytes):
                return
            taken_bytes = self.residency.take_scratch(nbytes)
        try:
            with self._transfers.as_one_move():
                self.sites.compare(trial, tensor, held.spec.storage_offset)
        finally:
            with self.lock:
                self.residency.give_scratch(taken_bytes)

    def count_kept(self, tensor: torch.Tensor, nbytes: int, reason: str) -> ResidencyGuard:
        """Count a tensor that is kept, without a record, as ``nbytes`` of its storage."""
        with self.lock:
            self.finalizers.act()
            self.residency.make_room(nbytes)
            guard = self.residency.count(tensor.untyped_storage() if has_plain_storage(tensor) else None, nbytes)
            self._stats.kept_bytes[reason] += self._stats.saved.enter(guard.stamp, nbytes)
        self.finalizers.act_if_free()
        return guard

    def defer(self, finalized: Finalized) -> None:
        """Have a finalizer's work done by whoever holds the lock next. Never blocks; see [Note: Finalizers]."""
        self.finalizers.leave(finalized)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An empty tensor of the same dtype and device, for version witnesses."""
        key = (tensor.dtype, tensor.device)
        empty = self._empties.get(key)
        if empty is None:
            empty = self._empties[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty

    # ---- under the lock -----------------------------------------------------------------------------------------

    def _record(self, tensor: torch.Tensor, key: StorageKey, origin: Origin | None) -> SavedStorage:
        """The record of a tensor's storage at its present version, made and offloaded at first sight."""
        forward = self.forward
        choice = forward.policy.choose(key, key.nbytes)
        record = forward.by_key.get(key)
        if record is not None:
            if record.state is not RecordState.KEPT:
                self._stats.deduplicated_bytes += nbytes_of(tensor)
            return record
        self.residency.make_room(key.nbytes)
        record = SavedStorage(key, forward.micro_step)
        is_proven = origin is not None and origin.site.is_proven
        if origin is not None and is_proven and choice.rematerialize and not forward.proves:
            record.recipe = origin.bound(self._share)
            record.state = RecordState.ABSENT
            self._stats.rematerialized_bytes += record.nbytes
            self.residency.add_moved(record, tensor.untyped_storage())
        else:
            if origin is not None and (forward.proves or not is_proven):
                record.trial = origin.bound(self._share)
            self._place(record, tensor, choice)
        forward.by_key[key] = record
        self.live += 1
        record.micro_step.saved += 1
        self._stats.saved.enter(key.storage, record.nbytes)
        return record

    def _place(self, record: SavedStorage, tensor: torch.Tensor, choice: Choice) -> None:
        """Have a store take a storage, or keep it."""
        taken = self._transfers.offload(tensor, choice)
        if isinstance(taken, Ticket):
            record.ticket = taken
            record.state = RecordState.OFFLOADED
            record.index = record.micro_step.add(record)
            self.residency.add_moved(record, tensor.untyped_storage())
        else:
            self._stats.kept_bytes[taken] += record.nbytes
            self.residency.add_kept(record, tensor.untyped_storage())

    def _share(self, view: SavedView) -> SavedView:
        """One more view of the same bytes, for a recipe."""
        twin, record = view.twin(), view.record
        record.views += 1
        record.pending += twin.is_offloaded
        if not twin.is_offloaded and self.residency.budget.is_set:
            record.kept_views.append(weakref.ref(twin))
        return twin

    def _reload(self, record: SavedStorage, made: torch.Tensor | None) -> Reloaded | None:
        if record.recipe is not None:
            return None if made is None else self.residency.add_made(record, made)
        if record.index != NO_INDEX:
            record.micro_step.add_use(record.index)
        return self.residency.reload(record)

    def _evict_if_unpacked(self, record: SavedStorage) -> None:
        """A second backward reads or makes it again instead of holding the memory until then."""
        if record.pending == 0 and record.state in (RecordState.RELOADED, RecordState.MADE):
            self.residency.evict(record)

    def _act_on(self, finalized: Finalized) -> None:
        if isinstance(finalized, int):
            self._stats.resident.add(-finalized)
            return
        if isinstance(finalized, ResidencyGuard):
            self._stats.saved.leave(finalized.stamp)
            self._stats.resident.add(-finalized.leave())
            return
        gone, was_pending = finalized
        gone.views -= 1
        gone.pending -= was_pending
        if gone.views == 0:
            self._forget(gone)
        else:
            self._evict_if_unpacked(gone)

    def _forget(self, record: SavedStorage) -> None:
        self.residency.remove(record)
        record.move(RecordState.DROPPED)
        record.reloaded = record.recipe = record.trial = None
        self._stats.saved.leave(record.key.storage)
        self.live -= 1
        if self.forward.by_key.get(record.key) is record:
            del self.forward.by_key[record.key]
        if record.ticket is not None:
            record.ticket.store.release(record.ticket)  # see [Note: Order of locks]
        record.micro_step.saved -= 1
        if record.index != NO_INDEX:
            self.learned_order = record.micro_step.remove(record.index) or self.learned_order
