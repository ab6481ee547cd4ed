"""The tensor cache: autograd's pack and unpack (TBA section 3.2), and one record for each saved storage in between.

Answers what becomes of a tensor that autograd saves. Sees autograd, storages and a store's contract; cannot see files,
staging or DeepSpeed, nor the reasons of a policy. ``saved.py`` has the objects that autograd holds, ``residency.py``
moves their bytes and holds them within the budget, ``sites.py`` makes some of them again.

[Note: Records] Every saved tensor becomes a ``SavedView``, the object that autograd holds in its place. Views of one
storage share a ``SavedStorage``, found by the stamps of storage and version counter and by the version: the storage is
written once, and every view is rebuilt from it. A record lives as long as one of its views. Records are shared within
one forward only: bytes that change without a version bump between two forwards (a buffer that numpy refills) are saved
again.

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

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from ds_tba.autograd.originals import keep_originals
from ds_tba.autograd.prefetch import MicroStep, Phase
from ds_tba.autograd.residency import Residency, Transfers
from ds_tba.autograd.saved import (
    NO_INDEX,
    Finalized,
    Freed,
    Hooks,
    Keeper,
    Makeable,
    PassedThrough,
    Recipe,
    RecordState,
    Rematerialization,
    ResidencyGuard,
    SavedCounted,
    SavedStorage,
    SavedView,
    StorageKey,
    nbytes_of,
    unmodified,
)
from ds_tba.autograd.tensors import (
    Eligibility,
    eligibility,
    has_plain_storage,
    held_bytes,
    is_parameter,
    is_under_a_mode,
    uncompiled_hooks,
)
from ds_tba.device.accelerator import Accelerator
from ds_tba.errors import ActivationModifiedError, StateError, StorageError
from ds_tba.storage.base import Always, Choice, Policy, Store, Ticket
from ds_tba.telemetry.stats import CacheStats

# Of storages whose comparison a device has not answered yet.
MAX_UNREAD_BYTES = 256 << 20
# Passed through: they hold no memory of the training device.
_FOREIGN = frozenset({Eligibility.NO_STORAGE, Eligibility.OTHER_DEVICE})


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
    comparison: Any = None


class TensorCache(Keeper):
    """Moves saved tensors into a store during forward and back during backward.

    Args:
        stores: where eligible storages go in a micro-step without a policy of its own, in order of preference; without
            any, everything is kept and measured.
        device: the training device, with its index.
        min_tensor_bytes: storages smaller than this are kept.
        wait_for_staging: wait for room in staging instead of keeping the tensor, likewise.
        accelerator: of that device, where it is asynchronous: streams matter then, and what is read ahead takes device
            memory before backward asks for it.
        released_bytes: without a budget, the bound of the device memory that backward has let go of and the device has
            not: see [Note: The budget].

    Attributes:
        learned_order: of first uses, in the last backward that used all.
        live_records: saved storages that some graph still holds.
        sites: what can be made again; None where nothing is to be.
        looked_at: makes the hooks of a forward from the cache's own, to look at what they do; see ``sample.py``.
    """

    def __init__(
        self,
        stores: Sequence[Store[Any]],
        device: torch.device | str,
        min_tensor_bytes: int,
        *,
        wait_for_staging: bool = False,
        accelerator: Accelerator | None = None,
        released_bytes: int = 256 << 20,
    ) -> None:
        super().__init__()
        self.stats = CacheStats()
        self._stores = tuple(stores)
        self._device = torch.device(device)
        self._accelerator = accelerator
        self._min_tensor_bytes = min_tensor_bytes
        self._default_policy: Policy = Always(stores, wait=wait_for_staging, rematerialize=True)
        self.transfers = Transfers(self.stats, self._stores, self._device)
        self.residency = Residency(self.stats.resident, self.transfers, self, accelerator, released_bytes)
        self.forward = Forward(MicroStep(), self._default_policy)
        self.learned_order: list[int] = []
        self.live_records = 0
        self.sites: Rematerialization | None = None
        self.looked_at: Callable[[Hooks], Hooks] = lambda hooks: hooks
        self._originals = keep_originals()
        # With the record that waits for the answer; without, where the site was proven before.
        self._unread: deque[tuple[SavedStorage | None, Recipe, Any]] = deque()
        self._absent: dict[SavedStorage, None] = {}  # not saved, to be made again

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock, with what finalizers have left before and meanwhile; where it is taken often, by hand."""
        with self.lock:
            self.finalizers.act()
            yield
        self.finalizers.act_if_free()

    # ---- forwards -----------------------------------------------------------------------------------------------

    @contextmanager
    def saving(
        self,
        policy: Policy | None = None,
        around: Callable[[Hooks], Hooks] | None = None,
        lead: Sequence[int] = (),
        *,
        continues: bool = False,
        is_recorded: bool = False,
    ) -> Iterator[None]:
        """A forward: what autograd saves inside goes through the cache.

        Args:
            policy: where it goes.
            around: makes the hooks that autograd calls from ours, which they call.
            lead: see ``Plan.prefetch_distance``.
            continues: the forward belongs to the micro-step of the last one; see [Note: Micro-steps].
            is_recorded: the micro-step is being recorded.
        """
        if not torch.is_grad_enabled():
            yield
            return
        if self.sites is not None:
            self.sites.begin_forward()
        with self._locked():
            step = self.forward.micro_step
            if not (continues or step.is_interleaved):
                step = MicroStep()
                self.stats.micro_steps += 1
            step.begin_forward(lead)
            self.forward = Forward(step, policy or self._default_policy, is_recorded)
        hooks = self.looked_at((self.pack, partial(self.unpack, step)))
        try:
            with uncompiled_hooks(*(hooks if around is None else around(hooks))):
                yield
        finally:
            step.phase = Phase.WAITING

    @contextmanager
    def interleaving(self) -> Iterator[None]:
        """Forwards and backwards of several micro-batches: one micro-step; see [Note: Micro-steps]."""
        with self._locked():
            self.forward.micro_step = MicroStep(is_interleaved=True)
            self.stats.micro_steps += 1
        try:
            yield
        finally:
            self.end_micro_step()

    @property
    def expects_forward(self) -> bool:
        """Whether one more forward belongs to the last micro-step; see [Note: Micro-steps]."""
        with self._locked():
            return self.forward.micro_step.expects_forward

    def end_micro_step(self) -> None:
        """The micro-step is over, whatever is still saved: the next forward begins another.

        Raises:
            RematerializationError: what was made again in earlier steps is no longer what forward makes.
        """
        with self._locked():
            self.forward.micro_step = MicroStep()
        self.read_comparisons(wait=True)
        self._keep_cheaper()
        self.finalizers.act_if_free()

    # ---- pack ---------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> PassedThrough | SavedCounted | SavedView:
        """Autograd's pack hook: the object to hold in place of ``tensor``.

        Raises:
            RematerializationError: what was made again in earlier steps is no longer what forward makes.
        """
        self.stats.packed_tensors += 1
        why = self.eligibility_of(tensor)
        if why is Eligibility.ELIGIBLE:
            return self._save(tensor)
        if why is Eligibility.PARAMETER:
            self.stats.passed_through_tensors += 1
            return PassedThrough(tensor)
        if why in _FOREIGN:
            self.stats.kept_bytes[why.value] += nbytes_of(tensor)
            return PassedThrough(tensor)
        small = why is Eligibility.SMALL
        nbytes = tensor.untyped_storage().nbytes() if small else held_bytes(tensor, self._device)
        counted = SavedCounted(self, tensor, nbytes, why.value)
        if self.sites is not None and why is not Eligibility.OF_GRAPH:
            self.sites.note(tensor, counted)
        return counted

    def eligibility_of(self, tensor: torch.Tensor) -> Eligibility:
        """Whether a tensor may leave device memory."""
        acts = self._stores or self.sites is not None
        if acts and torch._C._len_torch_dispatch_stack() and is_under_a_mode():
            return Eligibility.PARAMETER if is_parameter(tensor) else Eligibility.UNDER_A_MODE
        why = eligibility(tensor, self._device, self._min_tensor_bytes)
        accelerator = self._accelerator
        # Moving the memory of a graph frees nothing, and its next run writes there whoever has saved it.
        if (
            why is Eligibility.ELIGIBLE
            and accelerator is not None
            and (accelerator.is_capturing() or accelerator.is_of_graph(tensor.untyped_storage()))
        ):
            return Eligibility.OF_GRAPH
        return why

    def _save(self, tensor: torch.Tensor) -> SavedView:
        key = StorageKey.of(tensor)
        forward, sites, record = self.forward, self.sites, None
        with self.lock:
            self.finalizers.act()
            choice = forward.policy.choose(key, key.nbytes)
            if key in forward.by_key or (sites is None and not self.residency.may_wait):
                record, offloaded = self._enter(forward, tensor, key, choice, None)
        if record is None:  # something may have to be proven or waited for first
            proof = None
            if sites is not None:
                self.read_comparisons()
                proof = self._prove(sites, tensor, key, choice)  # without the lock: operands load on their own
            self._wait_for_room(key.nbytes)
            with self.lock:
                self.finalizers.act()
                record, offloaded = self._enter(forward, tensor, key, choice, proof)
        self.finalizers.act_if_free()
        view = SavedView(self, record, tensor, offloaded=offloaded)
        # Without the lock: a view that is not listed yet keeps its bytes, even if the record is evicted meanwhile.
        kept_views = record.kept_views  # read once: another thread may evict the record meanwhile
        if not offloaded and kept_views is not None:
            kept_views.append(weakref.ref(view))
        if sites is not None:
            sites.note(tensor, view)
        return view

    def _enter(
        self, forward: Forward, tensor: torch.Tensor, key: StorageKey, choice: Choice, proof: _Proof | None
    ) -> tuple[SavedStorage, bool]:
        """One more view of a storage, which is new unless it has a record; and whether its bytes leave."""
        record = forward.by_key.get(key)
        if record is None:
            record = self._add(forward, tensor, key, choice, proof)
        elif record.state is not RecordState.KEPT:
            self.stats.deduplicated_bytes += nbytes_of(tensor)
        if record.views == record.lent:
            self.stats.saved.enter(key.storage, key.nbytes)
        offloaded = record.state is not RecordState.KEPT
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
            self._leave_out(record, proof.recipe)
            self.residency.share(tensor)
            self.residency.add_moved(record, tensor)
        else:
            record.kept_views = []
            self.residency.add_kept(record, tensor.untyped_storage())
            self._unread.append((record, proof.recipe, proof.comparison))
        forward.by_key[key] = record
        self.live_records += 1
        record.micro_step.saved += 1
        return record

    def _place(self, record: SavedStorage, tensor: torch.Tensor, choice: Choice) -> None:
        """Have a store take a storage, or keep it."""
        taken = self.transfers.offload(tensor, choice)
        if isinstance(taken, Ticket):
            record.ticket = taken
            record.move(RecordState.OFFLOADED)
            record.index = record.micro_step.add(record)
            self.residency.add_moved(record, tensor)
        else:
            self.stats.kept_bytes[taken] += record.nbytes
            record.kept_views = [] if self.residency.is_limited else None
            self.residency.add_kept(record, tensor.untyped_storage())

    def count_kept(self, tensor: torch.Tensor, nbytes: int, reason: str) -> ResidencyGuard:
        """Count a tensor that is kept, without a record, as ``nbytes`` of its storage.

        Args:
            reason: in the report's words; empty for a tensor of ours, which autograd has not saved.
        """
        self._wait_for_room(nbytes)
        with self.lock:
            self.finalizers.act()
            self.residency.make_room(nbytes)
            guard = self.residency.count(tensor.untyped_storage() if has_plain_storage(tensor) else None, nbytes)
            added_bytes = self.stats.saved.enter(guard.stamp, nbytes if reason else 0)
            if reason:
                self.stats.kept_bytes[reason] += added_bytes
        self.finalizers.act_if_free()
        return guard

    # ---- unpack -------------------------------------------------------------------------------------------------

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
            with self._locked():
                micro_step.read_ahead(self.learned_order, self.residency.prefetch)
        return tensor

    def load(self, record: SavedStorage, *, first_time: bool, is_lent: bool) -> torch.Tensor:
        """The bytes of a record on its device (uint8, 1-D), for the calling thread's current stream.

        Args:
            first_time: autograd asks for them through a view that it has not unpacked before.
            is_lent: a recipe asks for them.
        """
        while True:
            # Without the lock: operands are loaded on their own, and streams are waited for.
            recipe, made = record.recipe, None
            if recipe is None:
                self._wait_for_room(self.residency.reloading_bytes(record))
            elif record.reloaded is None:
                made = self._make(record, recipe)
            with self.lock:
                self.finalizers.act()
                if record.recipe is not None and record.reloaded is None and made is None:
                    continue  # evicted meanwhile
                data = self._bring_back(record, made)
                record.pending -= first_time
                if is_lent:
                    self.residency.add_early(record)
                self._evict_if_unpacked(record)  # the record lets go of the memory, and the caller's ``data`` holds it
                record.micro_step.read_ahead(self.learned_order, self.residency.prefetch, after=record.index)
            self.finalizers.act_if_free()
            return data

    def _bring_back(self, record: SavedStorage, made: torch.Tensor | None) -> torch.Tensor:
        """The bytes of a record in device memory, for the calling thread's current stream."""
        reloaded = record.reloaded
        if reloaded is None and made is not None and record.recipe is not None:
            reloaded = self.residency.add_made(record, made)
        elif reloaded is None:
            if record.index != NO_INDEX:
                record.micro_step.use(record.index)
            reloaded = self.residency.reload(record)
        data = reloaded.arrival.join()  # every consumer waits for the copy, each in its own stream
        return unmodified(data, reloaded.version)

    def _evict_if_unpacked(self, record: SavedStorage) -> None:
        """A second backward reads or makes it again instead of holding the memory until then."""
        if record.pending == 0 and record.state in (RecordState.RELOADED, RecordState.MADE):
            self.residency.evict(record)

    # ---- made again ---------------------------------------------------------------------------------------------

    def rematerialize(self, sites: Rematerialization | None) -> None:
        """Make storages again from others in backward instead of saving them, where that is proven; None: never."""
        self.sites = sites

    @contextmanager
    def _making(self, nbytes: int) -> Iterator[None]:
        """Room for what making takes."""
        with self._locked():
            taken_bytes = self.residency.take_scratch(nbytes)
        try:
            yield
        finally:
            with self.lock:
                self.residency.give_scratch(taken_bytes)

    def _make(self, record: SavedStorage, recipe: Recipe) -> torch.Tensor:
        """Make the bytes of a record again."""
        if self.sites is None:
            raise StateError("there is a recipe, and no sites; this is a bug in ds_tba")
        nbytes = record.nbytes + recipe.scratch_bytes
        self._wait_for_room(nbytes)
        with self._making(nbytes):
            return self.sites.make(recipe)

    def _prove(self, sites: Rematerialization, tensor: torch.Tensor, key: StorageKey, choice: Choice) -> _Proof | None:
        """Whether the storage of a tensor can be made again, by a comparison where one is due."""
        if not (choice.rematerialize or self.forward.is_recorded):
            return None
        recipe = sites.recipe(tensor)
        if recipe is None:
            return None
        found = _Proof(Makeable(recipe.site, recipe.depth, recipe.sources))
        was_proven, owes = recipe.site.is_proven, recipe.site.unseen_since is not None
        if not choice.rematerialize or self.residency.is_halved_by(recipe.work_bytes):
            return found
        # Operands that were moved are brought back only for a site that comes again: lengths may not.
        if not (was_proven or owes or recipe.site.visits > 1 or _are_in_memory(recipe)):
            return found
        try:
            recipe = recipe.copied(self)  # of parameters: their owner may change them at any time
        except torch.OutOfMemoryError:
            return found
        with self._locked():  # views of its own: the graph may go, or be used up by another backward
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

    def _compare(self, sites: Rematerialization, recipe: Recipe, tensor: torch.Tensor, nbytes: int) -> Any:
        needed_bytes, operands = 2 * nbytes + recipe.scratch_bytes, set(recipe.records())
        if not self.has_room(needed_bytes + sum(map(_absent_bytes, operands)), operands):
            return None
        try:
            with self._making(needed_bytes):
                return sites.compare(recipe, tensor)
        finally:
            with self.lock:
                self.residency.end_early()

    def _share(self, view: SavedView) -> SavedView:
        """One more view of the same bytes, for a recipe."""
        twin, record = view.twin(), view.record
        record.views += 1
        record.lent += 1
        if not twin.is_offloaded and record.kept_views is not None:
            record.kept_views.append(weakref.ref(twin))
        return twin

    def _leave_out(self, record: SavedStorage, recipe: Recipe) -> None:
        """The bytes of a record are not saved."""
        record.move(RecordState.ABSENT)
        record.recipe = recipe
        self._absent[record] = None
        self.stats.rematerialized_bytes += record.nbytes

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
                is_urgent = wait or kept_bytes > MAX_UNREAD_BYTES or self.residency.is_exceeded_by(kept_bytes)
                if not (is_urgent or self._unread[0][2].is_done):
                    return
                record, recipe, comparison = self._unread.popleft()
            is_equal = self.sites.read(comparison)  # without the lock: it may wait for the device
            if record is not None:
                with self._locked():
                    self._answer(record, recipe, is_equal=is_equal)

    def _answer(self, record: SavedStorage, recipe: Recipe, *, is_equal: bool) -> None:
        """What was kept until its comparison was read need not be, or goes where it would have gone."""
        if record.state is not RecordState.KEPT or record.kept_views is None:
            return  # nobody wants it any more, or the budget had it moved
        if not is_equal:
            self.residency.evict(record)
            return
        holders = record.holders()
        self._leave_out(record, recipe)
        self.residency.end_kept(record)
        for held in [view.held for view in holders if view.held is not None][:1]:
            self.residency.share(held)
        record.let_go(holders)

    def _keep_cheaper(self) -> None:
        """Make what takes less than operands that nobody else wants any more, and keep it; see [Note: Made again]."""
        with self._locked():
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

    # ---- room, for forwards that run again and for ourselves ----------------------------------------------------

    def has_room(self, nbytes: int, pinned: Collection[SavedStorage] = ()) -> bool:
        """Whether so many bytes more fit the budget, once room was made for them.

        Args:
            pinned: storages that stay where they are. Nothing is moved where that would not suffice.
        """
        with self._locked():
            can_have = self.residency.has_room(nbytes, pinned)
        if can_have:
            self._free_room(nbytes, pinned)
            can_have = not self.residency.is_exceeded_by(nbytes)
        self.finalizers.act_if_free()
        return can_have

    def _wait_for_room(self, nbytes: int) -> None:
        """Before ``nbytes`` more are counted: wait for streams that are to make room for them."""
        if self.residency.may_wait:
            self._free_room(nbytes)

    def _free_room(self, nbytes: int, pinned: Collection[SavedStorage] = ()) -> None:
        while True:
            with self.lock:
                self.finalizers.act()
                release = self.residency.free_room(nbytes, pinned)
            if release is None:
                return
            release.wait()  # without the lock, or every other thread's hooks would wait for this device, too

    def count_again(self, tensor: torch.Tensor) -> None:
        """Count a tensor that a forward saves which runs again in backward, until it is free or backward is over."""
        if is_parameter(tensor) or not has_plain_storage(tensor):
            return
        self._wait_for_room(nbytes := held_bytes(tensor, self._device))
        with self._locked():
            self.residency.count_again(tensor.untyped_storage(), nbytes)

    def end_recomputations(self) -> None:
        """Backward is over, or has raised; see :meth:`Residency.end_recomputations`."""
        with self._locked():
            self.residency.end_recomputations()

    def limit_resident(self, nbytes: int | None, name: str = "") -> None:
        """Hold saved tensors in device memory within a budget from now on; see :meth:`Residency.limit`."""
        with self.lock:
            self.residency.limit(nbytes, name)

    # ---- for the offloader and the controller -------------------------------------------------------------------

    def settle(self) -> None:
        """Act on every deferred finalizer, and let go of what finished copies still hold."""
        with self._locked():
            self.residency.releases.settle()
        for store in self._stores:  # under their own locks
            store.settle()
        self.finalizers.act_if_free()

    def forget_order(self) -> None:
        """Forget the order in which backward wanted what was moved: from now on other storages are."""
        with self.lock:
            self.learned_order = []

    # ---- the ends of records ------------------------------------------------------------------------------------

    def _finalize(self, finalized: Finalized) -> None:
        if isinstance(finalized, Freed):
            if finalized.consumers:  # they may be behind the host, so the bytes count until they have come so far
                self.residency.releases.add(*finalized)
            else:
                self.stats.resident.add(-finalized.nbytes)
            return
        if isinstance(finalized, ResidencyGuard):
            self.stats.saved.leave(finalized.stamp)
            self.stats.resident.add(-finalized.leave())
            return
        gone, was_lent, was_pending = finalized
        gone.views -= 1
        gone.lent -= was_lent
        gone.pending -= was_pending and not was_lent
        if gone.views == gone.lent and not was_lent:
            self.stats.saved.leave(gone.key.storage)
        if gone.views == 0:
            self._forget(gone)
        else:
            self._evict_if_unpacked(gone)

    def _forget(self, record: SavedStorage) -> None:
        self.residency.remove(record)
        record.move(RecordState.DROPPED)
        record.reloaded = record.recipe = record.makeable = None
        self._absent.pop(record, None)
        self.live_records -= 1
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
