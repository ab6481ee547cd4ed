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

[Note: Made again] What can be made again is compared before its bytes are let go of (``sites.py``). A device answers
late; until then the record keeps its bytes, beside ``MAX_UNREAD_BYTES`` of others at most: then the host waits for the
oldest. An operand that a recipe brings back before backward wants it for itself stays for that, as long as the recipe
lives, and as long as there are few. What a graph that outlives backward still needs, and no operand is wanted for
anything else, is made once and kept, where that takes less than its operands do.

[Note: Order of locks] The cache's lock is taken before a store's, never after: stores do not know the cache. But a
finalizer may run inside a store's critical section, take the cache's lock if that is free, and give a ticket back. So
``Store.release`` waits for no lock, and defers itself in turn.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ds_tba.autograd.budget import Residency, Transfers
from ds_tba.autograd.prefetch import MicroStep, Phase
from ds_tba.autograd.saved import (
    NO_INDEX,
    Comparison,
    Finalized,
    Freed,
    Makeable,
    PassedThrough,
    Recipe,
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
from ds_tba.errors import ActivationModifiedError, StateError, StorageError
from ds_tba.storage.base import Choice, Policy, Ticket
from ds_tba.storage.finalizers import DeferredFinalizers
from ds_tba.telemetry.stats import CacheStats

# Of storages whose comparison a device has not answered yet.
MAX_UNREAD_BYTES = 256 << 20


@dataclass(eq=False)
class Forward:
    """The forward under way, or the last one.

    Attributes:
        is_recorded: see :meth:`TensorCache.saving`.
        by_key: records of the storages saved in it; those of earlier forwards are found no more, but live on.
    """

    micro_step: MicroStep[SavedStorage]
    policy: Policy
    is_recorded: bool = False
    by_key: dict[StorageKey, SavedStorage] = field(default_factory=dict)


class _Proof(NamedTuple):
    """What is known of how a storage that is being saved can be made again.

    Attributes:
        recipe: with views of its own; None where the storage is to be saved.
        comparison: that must be read before it need not be saved; None where that is certain.
    """

    found: Makeable
    recipe: Recipe | None = None
    comparison: Comparison | None = None


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
        self,
        stats: CacheStats,
        policy: Policy,
        transfers: Transfers,
        accelerator: Accelerator | None,
        released_bytes: int,
    ) -> None:
        self.lock = threading.Lock()
        self.finalizers: DeferredFinalizers[Finalized] = DeferredFinalizers(self.lock, self._act_on)
        self.residency = Residency(stats.resident, transfers, self.finalizers.act, self, accelerator, released_bytes)
        self.forward = Forward(MicroStep(), policy)
        self.learned_order: list[int] = []
        self.live = 0
        self.sites: Rematerialization | None = None
        self._stats = stats
        self._transfers = transfers
        self._empties: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._originals = keep_originals()
        # With the record that waits for the answer; without, where the site was proven before.
        self._unread: deque[tuple[SavedStorage | None, Recipe, Comparison]] = deque()
        self._absent: dict[SavedStorage, None] = {}  # not saved, to be made again
        self._orphans: set[SavedStorage] = set()  # operands that autograd itself has let go of lately

    def save(self, tensor: torch.Tensor) -> SavedView:
        """The object to hold in place of an eligible tensor.

        Raises:
            RematerializationError: what was made again in earlier steps is no longer what forward makes.
        """
        key = StorageKey.of(tensor)
        with self.lock:
            self.finalizers.act()
            forward = self.forward
            choice, record = forward.policy.choose(key, key.nbytes), forward.by_key.get(key)
            entered = None
            if record is not None or (self.sites is None and not self.residency.may_wait):
                entered = self._enter(forward, tensor, key, choice, None)
        if entered is None:  # something may have to be proven or waited for first
            proof = None
            if self.sites is not None:
                self.read_comparisons()
                proof = self._prove(self.sites, tensor, key, choice)  # without the lock: operands load on their own
            self.wait_for_room(key.nbytes)
            with self.lock:
                entered = self._enter(forward, tensor, key, choice, proof)
        record, offloaded = entered
        self.finalizers.act_if_free()
        view = SavedView(self, record, tensor, offloaded=offloaded)
        # Without the lock: a view that is not listed yet keeps its bytes, even if the record is evicted meanwhile.
        kept_views = record.kept_views  # read once: another thread may evict the record meanwhile
        if not offloaded and kept_views is not None:
            kept_views.append(weakref.ref(view))
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
        if micro_step.phase is Phase.WAITING:
            with self.lock:
                self.finalizers.act()
                micro_step.read_ahead(self.learned_order, self.residency.prefetch)
            self.finalizers.act_if_free()
        return tensor

    def load(self, record: SavedStorage, *, first_time: bool, is_lent: bool) -> torch.Tensor:
        """The bytes of a record on its device (uint8, 1-D), for the calling thread's current stream.

        Args:
            first_time: autograd asks for them through a view that it has not unpacked before.
            is_lent: a recipe asks for them.
        """
        data = None
        while data is None:
            # Without the lock: the operands are loaded on their own.
            recipe = record.recipe
            made = self._make(record, recipe) if recipe is not None and record.reloaded is None else None
            if recipe is None:
                self.wait_for_room(self.residency.reloading_bytes(record))
            data = self._load(record, made, first_time=first_time, is_lent=is_lent)
        self.finalizers.act_if_free()
        return data

    def _load(
        self, record: SavedStorage, made: torch.Tensor | None, *, first_time: bool, is_lent: bool
    ) -> torch.Tensor | None:
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
            if is_lent:
                self.residency.add_early(record)
            self._evict_if_unpacked(record)  # the record lets go of the memory, and the caller's ``data`` holds it
            record.micro_step.read_ahead(self.learned_order, self.residency.prefetch, after=record.index)
        return data

    # ---- made again ---------------------------------------------------------------------------------------------

    def _make(self, record: SavedStorage, recipe: Recipe) -> torch.Tensor:
        """Make the bytes of a record again."""
        if self.sites is None:
            raise StateError("there is a recipe, and no sites; this is a bug in ds_tba")
        self.wait_for_room(record.nbytes + recipe.scratch_bytes)
        with self.lock:
            self.finalizers.act()
            taken_bytes = self.residency.take_scratch(record.nbytes + recipe.scratch_bytes)
        try:
            with self._as_one_move():
                return self.sites.make(recipe)
        finally:
            with self.lock:
                self.residency.give_scratch(taken_bytes)

    def _prove(self, sites: Rematerialization, tensor: torch.Tensor, key: StorageKey, choice: Choice) -> _Proof | None:
        """Whether the storage of a tensor can be made again, by a comparison where one is due."""
        if not (choice.rematerialize or self.forward.is_recorded):
            return None
        recipe = sites.recipe(tensor)
        if recipe is None:
            return None
        found = _Proof(Makeable(recipe.site, recipe.depth, recipe.sources))
        was_proven, owes = recipe.site.is_proven, recipe.site.unseen_since is not None
        if not choice.rematerialize or self.residency.budget.is_halved_by(recipe.work_bytes):
            return found
        # Operands that were moved are brought back only for a site that comes again: lengths may not.
        if not (was_proven or owes or recipe.site.visits > 1 or _are_in_memory(recipe)):
            return found
        try:
            recipe = recipe.copied(self)
        except torch.OutOfMemoryError:
            return found
        with self.lock:
            self.finalizers.act()
            recipe = recipe.bound(self._share)
        if not recipe.site.is_due:
            sites.left_out(recipe)
            return found._replace(recipe=recipe)
        comparison = self._compare(sites, recipe, tensor, key.nbytes)
        if comparison is None:  # refused, or no room to compare: what is due and unseen is saved
            return found
        if comparison.is_done:
            is_equal = sites.read(comparison)
            return found._replace(recipe=recipe) if is_equal and (was_proven or not owes) else found
        if was_proven or owes:
            with self.lock:
                self._unread.append((None, recipe, comparison))
            if not was_proven:
                return found
            sites.left_out(recipe)
            comparison = None
        return found._replace(recipe=recipe, comparison=comparison)

    def _compare(
        self, sites: Rematerialization, recipe: Recipe, tensor: torch.Tensor, nbytes: int
    ) -> Comparison | None:
        needed_bytes, operands = 2 * nbytes + recipe.scratch_bytes, set(recipe.records())
        absent_bytes = sum(_absent_bytes(one) for one in operands)
        if not self.has_room(needed_bytes + absent_bytes, operands):
            return None
        with self.lock:
            self.finalizers.act()
            taken_bytes = self.residency.take_scratch(needed_bytes)
        try:
            with self._as_one_move():
                return sites.compare(recipe, tensor)
        finally:
            with self.lock:
                self.residency.give_scratch(taken_bytes)
                self.residency.end_early()

    def has_room(self, nbytes: int, pinned: Collection[SavedStorage] = ()) -> bool:
        """Whether so many bytes more fit the budget, once room was made for them.

        Args:
            pinned: storages that stay where they are. Nothing is moved where that would not suffice.
        """
        with self.lock:
            self.finalizers.act()
            can_have = self.residency.has_room(nbytes, pinned)
        if can_have:
            self._wait_for_room(nbytes, pinned)
            can_have = not self.residency.budget.is_exceeded_by(nbytes)
        self.finalizers.act_if_free()
        return can_have

    def wait_for_room(self, nbytes: int) -> None:
        """Before ``nbytes`` more are counted: wait for streams that are to make room for them, without the lock."""
        if self.residency.may_wait:
            self._wait_for_room(nbytes)

    def _wait_for_room(self, nbytes: int, pinned: Collection[SavedStorage] = ()) -> None:
        while True:
            with self.lock:
                self.finalizers.act()
                release = self.residency.free_room(nbytes, pinned)
            if release is None:
                return
            release.wait()

    @contextmanager
    def _as_one_move(self) -> Iterator[None]:
        """While a micro-step is recorded: what making takes is not a part of its hooks' time."""
        if not self.forward.is_recorded:
            yield
            return
        with self._transfers.as_one_move():
            yield

    def read_comparisons(self, *, wait: bool = False) -> None:
        """Let go of the bytes of what a device has found equal by now.

        Args:
            wait: for all of them.

        Raises:
            RematerializationError: what was made again in earlier steps is no longer what forward makes.
        """
        while self._unread and self.sites is not None:
            with self.lock:
                if not self._unread:  # another thread has read it
                    return
                kept_bytes = sum(one.nbytes for one, _, _ in self._unread if one and one.state is RecordState.KEPT)
                is_urgent = wait or kept_bytes > MAX_UNREAD_BYTES or self.residency.budget.is_exceeded_by(kept_bytes)
                if not (is_urgent or self._unread[0][2].is_done):
                    return
                record, recipe, comparison = self._unread.popleft()
            is_equal = self.sites.read(comparison)
            if record is not None:
                with self.lock:
                    self.finalizers.act()
                    self._answer(record, recipe, is_equal=is_equal)

    def _answer(self, record: SavedStorage, recipe: Recipe, *, is_equal: bool) -> None:
        """What was kept until its comparison was read need not be, or goes where it would have gone."""
        if record.state is not RecordState.KEPT or record.kept_views is None:
            return  # nobody wants it any more, or the budget had it moved
        if not is_equal:
            self.residency.evict(record)
            return
        views = [view for reference in record.kept_views if (view := reference()) is not None]
        for held in [view.held for view in views if view.held is not None][:1]:
            self.residency.share(held)
        record.move(RecordState.ABSENT)
        self._leave_out(record, recipe)
        self.residency.end_kept(record)
        record.pending = sum(not (view.is_unpacked or view.is_lent) for view in views)
        for view in views:
            view.let_go()

    def keep_cheaper(self) -> None:
        """Make what takes less than operands that nobody else wants any more, and keep it; see [Note: Made again]."""
        with self.lock:
            self.finalizers.act()
            if not self._orphans:
                return
            self._orphans.clear()
            found = [(one, one.recipe) for one in self._absent if one.recipe is not None and _takes_more(one)]
        for record, recipe in found:
            try:
                data = self._make(record, recipe) if record.reloaded is None else None
            # Raised again where backward wants it; or there will be room another time.
            except (ActivationModifiedError, StorageError, RuntimeError):
                continue
            with self.lock:
                if data is not None and record.state is RecordState.ABSENT:
                    self.residency.add_made(record, data)
                if record.state is RecordState.MADE:
                    record.move(RecordState.FORWARDED)
                    record.recipe = None
                    del self._absent[record]

    # ---- for the objects that autograd holds --------------------------------------------------------------------

    def count_kept(self, tensor: torch.Tensor, nbytes: int, reason: str) -> ResidencyGuard:
        """Count a tensor that is kept, without a record, as ``nbytes`` of its storage.

        Args:
            reason: in the report's words; empty for a tensor of ours, which autograd has not saved.
        """
        self.wait_for_room(nbytes)
        with self.lock:
            self.finalizers.act()
            self.residency.make_room(nbytes)
            guard = self.residency.count(tensor.untyped_storage() if has_plain_storage(tensor) else None, nbytes)
            added_bytes = self._stats.saved.enter(guard.stamp, nbytes if reason else 0)
            if reason:
                self._stats.kept_bytes[reason] += added_bytes
        self.finalizers.act_if_free()
        return guard

    def defer(self, finalized: Finalized) -> None:
        """Have a finalizer's work done by whoever holds the lock next. Never blocks; see [Note: Finalizers]."""
        # The event of a release must come after all that the allocator records when the memory goes.
        self.finalizers.leave(finalized, acts=not isinstance(finalized, Freed))

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An empty tensor of the same dtype and device, for version witnesses."""
        key = (tensor.dtype, tensor.device)
        empty = self._empties.get(key)
        if empty is None:
            empty = self._empties[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty

    # ---- under the lock -----------------------------------------------------------------------------------------

    def _enter(
        self, forward: Forward, tensor: torch.Tensor, key: StorageKey, choice: Choice, proof: _Proof | None
    ) -> tuple[SavedStorage, bool]:
        """One more view of a storage, which is new unless it has a record; and whether its bytes leave."""
        record = forward.by_key.get(key)
        if record is None:
            record = self._add(forward, tensor, key, choice, proof)
        elif record.state is not RecordState.KEPT:
            self._stats.deduplicated_bytes += nbytes_of(tensor)
        offloaded = record.state is not RecordState.KEPT
        if record.views == record.lent:
            self._stats.saved.enter(key.storage, key.nbytes)
        record.views += 1
        record.pending += offloaded
        return record, offloaded

    def _add(
        self, forward: Forward, tensor: torch.Tensor, key: StorageKey, choice: Choice, proof: _Proof | None
    ) -> SavedStorage:
        """The record of a storage at its present version, which goes where it was proven and chosen to go."""
        self.residency.make_room(key.nbytes)
        record = SavedStorage(key, forward.micro_step)
        if proof is not None:
            record.makeable = proof.found
        if proof is None or proof.recipe is None:
            self._place(record, tensor, choice)
        elif proof.comparison is None:
            record.state = RecordState.ABSENT
            self._leave_out(record, proof.recipe)
            self.residency.share(tensor)
            self.residency.add_moved(record, tensor.untyped_storage())
        else:
            record.kept_views = []
            self.residency.add_kept(record, tensor.untyped_storage())
            self._unread.append((record, proof.recipe, proof.comparison))
        forward.by_key[key] = record
        self.live += 1
        record.micro_step.saved += 1
        return record

    def _leave_out(self, record: SavedStorage, recipe: Recipe) -> None:
        """The bytes of a record are not saved."""
        record.recipe = recipe
        record.kept_views = None
        self._absent[record] = None
        self._stats.rematerialized_bytes += record.nbytes

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
            record.kept_views = [] if self.residency.budget.is_set else None
            self.residency.add_kept(record, tensor.untyped_storage())

    def _share(self, view: SavedView) -> SavedView:
        """One more view of the same bytes, for a recipe."""
        twin, record = view.twin(), view.record
        record.views += 1
        record.lent += 1
        if not twin.is_offloaded and record.kept_views is not None:
            record.kept_views.append(weakref.ref(twin))
        return twin

    def _reload(self, record: SavedStorage, made: torch.Tensor | None) -> Reloaded | None:
        if record.recipe is not None:
            return None if made is None else self.residency.add_made(record, made)
        if record.index != NO_INDEX and record.micro_step.phase is not Phase.FORWARD:
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
        if isinstance(finalized, Freed):
            self.residency.releases.add(*finalized)
            return
        gone, was_lent, was_pending = finalized
        gone.views -= 1
        gone.lent -= was_lent
        gone.pending -= was_pending and not was_lent
        if gone.views == gone.lent and not was_lent:
            self._stats.saved.leave(gone.key.storage)
            if gone.views:
                self._orphans.add(gone)
        if gone.views == 0:
            self._forget(gone)
        else:
            self._evict_if_unpacked(gone)

    def _forget(self, record: SavedStorage) -> None:
        self.residency.remove(record)
        record.move(RecordState.DROPPED)
        record.reloaded = record.recipe = record.makeable = None
        self._absent.pop(record, None)
        self._orphans.discard(record)
        self.live -= 1
        if self.forward.by_key.get(record.key) is record:
            del self.forward.by_key[record.key]
        if record.ticket is not None:
            record.ticket.store.release(record.ticket)  # see [Note: Order of locks]
        record.micro_step.saved -= 1
        if record.index != NO_INDEX:
            self.learned_order = record.micro_step.remove(record.index) or self.learned_order


def _are_in_memory(recipe: Recipe) -> bool:
    """Whether nothing must be brought back to make a storage."""
    return all(
        one.reloaded is not None or (one.ticket is None and (one.recipe is None or _are_in_memory(one.recipe)))
        for one in recipe.records()
    )


def _absent_bytes(operand: SavedStorage) -> int:
    """That come into memory where an operand is wanted."""
    if operand.reloaded is not None:
        return 0
    if operand.recipe is not None:
        return operand.recipe.work_bytes
    return 0 if operand.ticket is None else operand.nbytes + operand.ticket.passing_bytes


def _takes_more(record: SavedStorage) -> bool:
    """Whether what only recipes hold for a record takes more than the record would, beside what is there already."""
    only_lent = {one for one in _sources(record) if one.views == one.lent and not (one.ticket and not one.reloaded)}
    return sum(one.nbytes for one in only_lent) > (record.nbytes if record.reloaded is None else 0)


def _sources(record: SavedStorage) -> Iterator[SavedStorage]:
    """The storages with bytes of their own that a record is made of."""
    for one in record.recipe.records() if record.recipe is not None else ():
        yield from _sources(one) if one.recipe is not None else (one,)
