"""The tensor cache: autograd's pack and unpack (TBA section 3.2), and one record for each saved storage in between.

Answers what becomes of a tensor that autograd saves. Sees autograd, storages and a store's contract; cannot see files,
staging or DeepSpeed, nor the reasons of a policy. ``saved.py`` has the objects that autograd holds, ``residency.py``
moves their bytes and holds them within the budget. A ``TensorStore`` may rematerialize some of them.

[Note: Records] Every saved tensor becomes a ``SavedView``, the object that autograd holds in its place. Views of one
storage share a ``SavedStorage``, found by the stamps of storage and version counter and by the version: the storage is
written once, and every view is rebuilt from it. A record lives as long as one of its views. Records are shared within
one forward only, and once the bytes have left, with a view that is saved later only where they are still the same
(``fingerprint.py``): bytes that change without a version (a buffer that numpy or a collective refills) are saved again.
A device answers late; until then the later view keeps its bytes.

[Note: Saves] A save holds the cache's lock while a store takes the bytes, also while that waits for staging or for a
swap file to grow. So another thread that saves or loads waits, too.

[Note: Loads] No lock is held while a store loads bytes, or makes them from others, which are loaded in turn: the
record is LOADING, and another thread that wants it waits for that. What is loaded for what a store makes, and wanted by
backward later or not at all, stays for that, as long as there are few.

[Note: Order of locks] The cache's lock is taken before a store's, never after. But a finalizer may run inside a store's
critical section, take the cache's lock if that is free, and give a ticket back. So ``Store.release`` waits for no lock,
and defers itself in turn.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from ds_tba.core.eligibility import Eligibility, Gate, is_under_a_mode, out_of_modes
from ds_tba.core.fingerprint import Doubts
from ds_tba.core.functions import Functions
from ds_tba.core.hooks import hooks_of_forward, uncompiled_hooks, unseen
from ds_tba.core.operations import Operations
from ds_tba.core.originals import Unpacked, keep_originals
from ds_tba.core.prefetch import MicroStep, Phase
from ds_tba.core.residency import Residency
from ds_tba.core.saved import (
    NO_INDEX,
    CountedGone,
    CountedMemory,
    Finalized,
    Held,
    Hooks,
    Keeper,
    Loading,
    Operation,
    Origin,
    PassedThrough,
    RecordState,
    SavedCounted,
    SavedExcluded,
    SavedStorage,
    SavedView,
    StorageKey,
    TensorStore,
    ViewGone,
    nbytes_of,
    unmodified,
)
from ds_tba.core.tensors import (
    components_of,
    has_graph,
    has_plain_storage,
    held_bytes,
    is_complete,
    is_parameter,
    is_read_by_an_extension,
)
from ds_tba.device.accelerator import Accelerator
from ds_tba.device.memory import is_out_of_memory
from ds_tba.errors import StateError
from ds_tba.stats import CacheStats
from ds_tba.storage.base import Always, AnyStore, Choice, Loaded, Policy, Ticket

Taken = tuple[Origin | None, Ticket | None]
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


class HooksObserver(Protocol):
    """Looks at what the hooks of a forward do."""

    def around(self, hooks: Hooks) -> Hooks:
        """Return hooks that call these."""


class TensorCache(Keeper):
    """Moves saved tensors into a store during forward and back during backward.

    Args:
        stores: where eligible storages go in a micro-step without a policy of its own, in order of preference; without
            any, everything is kept and measured.
        device: the training device, with its index.
        min_tensor_bytes: storages smaller than this are kept.
        wait_for_staging: wait for room in staging instead of keeping the tensor, in a micro-step without a policy.
        accelerator: of that device, where it is asynchronous: streams matter then, and what is read ahead takes device
            memory before backward asks for it.
        released_bytes: without a budget, the bound of the device memory that backward has let go of and the device has
            not: see [Note: The budget].

    Attributes:
        learned_order: of first uses, in the last backward that used all.
        rematerialization: the store that is asked before all others; None where nothing is rematerialized.
    """

    room: Residency

    def __init__(
        self,
        stores: Sequence[AnyStore],
        device: torch.device | str,
        min_tensor_bytes: int,
        *,
        wait_for_staging: bool = False,
        accelerator: Accelerator | None = None,
        released_bytes: int = 256 << 20,
    ) -> None:
        super().__init__()
        self._stats = CacheStats()
        self.stores = tuple(stores)
        self._device = torch.device(device)
        self._accelerator = accelerator
        self._pid = os.getpid()
        self.gate = Gate(self._device, min_tensor_bytes, accelerator)
        self._default_policy: Policy = Always(stores, wait=wait_for_staging, rematerialize=True)
        self._doubts = Doubts(self.finalizers, accelerator)
        self.room = Residency(self._stats, self.stores, self._doubts, self, accelerator, released_bytes)
        self.forward = Forward(MicroStep(), self._default_policy)
        self.learned_order: list[int] = []
        self._live_records = 0
        self.rematerialization: TensorStore[Any] | None = None
        self._observers: list[HooksObserver] = []
        self._originals = keep_originals()
        self._functions = Functions(self, accelerator)
        self._operations = Operations(accelerator, self._originals)
        self._recomputed: list[CountedMemory] = []  # what blocks that ran again have saved in this backward

    @property
    def stats(self) -> CacheStats:
        """The figures as they are now, without what is gone."""
        self.finalizers.act_if_free()
        return self._stats

    @property
    def live_records(self) -> int:
        """Saved storages that some graph still holds."""
        self.finalizers.act_if_free()
        return self._live_records

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
        """Open a forward: what autograd saves inside goes through the cache.

        Args:
            policy: where it goes.
            around: makes the hooks that autograd calls from ours, which they call.
            lead: see ``Plan.prefetch_distance``.
            continues: the forward belongs to the micro-step of the last one; see [Note: Micro-steps].
            is_recorded: the micro-step is being recorded.
        """
        if not torch.is_grad_enabled():  # an evaluation pass must not end the micro-step before its backward
            yield
            return
        if self.rematerialization is not None:
            self.rematerialization.begin_forward()
        with self.finalizers, self.finalizers.lock:
            step = self.forward.micro_step
            if not (continues or step.is_interleaved):
                step = MicroStep(self.learned_order)
                self._stats.micro_steps += 1
            step.begin_forward(lead)
            self.forward = Forward(step, policy or self._default_policy, is_recorded)  # finds no record of earlier ones
        try:
            with hooks_of_forward(self._hooks(step, around)):
                yield
            self._end_operations()
        except BaseException:  # the thread may never save anything again, and what it has in use stay for ever
            self._end_operations(stays=True)
            raise
        finally:
            step.phase = Phase.WAITING  # also after an error: a backward of what was saved would read nothing ahead

    def after_forward(self, around: Callable[[Hooks], Hooks] | None = None) -> saved_tensors_hooks | None:
        """Return hooks for what is saved between the last forward and its backward; None where that is not known.

        Nothing is shared with the forward: who comes after it may have changed bytes that no version tells of.
        """
        with self.finalizers, self.finalizers.lock:
            step = self.forward.micro_step
            if step.is_interleaved or not step.expects_forward:
                return None
            self.forward = replace(self.forward, by_key={})
        if self.rematerialization is not None:
            self.rematerialization.begin_forward()
        return self._hooks(step, around)

    def _hooks(self, step: MicroStep[SavedStorage], around: Callable[[Hooks], Hooks] | None) -> saved_tensors_hooks:
        hooks: Hooks = (self.pack, partial(self.unpack, step))
        for observer in self._observers:
            hooks = observer.around(hooks)
        pack, unpack = hooks if around is None else around(hooks)
        return uncompiled_hooks(partial(unseen, pack), partial(unseen, unpack))

    @contextmanager
    def interleaving(self) -> Iterator[None]:
        """Make one micro-step of the forwards and backwards of several micro-batches; see [Note: Micro-steps]."""
        with self.finalizers, self.finalizers.lock:
            self.forward.micro_step = MicroStep(self.learned_order, is_interleaved=True)
            self._stats.micro_steps += 1
        try:
            yield
        finally:
            self.end_micro_step()

    @property
    def expects_forward(self) -> bool:
        """True if one more forward belongs to the last micro-step; see [Note: Micro-steps]."""
        with self.finalizers, self.finalizers.lock:
            return self.forward.micro_step.expects_forward

    def end_micro_step(self) -> None:
        """End the micro-step, whatever is still saved: the next forward begins another.

        Raises:
            RematerializationError: what was rematerialized in earlier steps is no longer what forward makes.
        """
        with self.finalizers, self.finalizers.lock:
            self.forward.micro_step = MicroStep()
        self._doubts.read(wait=True)
        if self.rematerialization is not None:
            self.rematerialization.end_micro_step()

    # ---- pack ---------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Held:
        """Return the object to hold in place of ``tensor``: autograd's pack hook.

        Raises:
            RematerializationError: what was rematerialized in earlier steps is no longer what forward makes.
        """
        self._stats.packed_tensors += 1
        if self._operations.held_back and not self._is_capturing:
            self._end_operations(self._operations.present())
        why, excluded_by = self._judged(tensor), ""
        if why is Eligibility.ELIGIBLE:
            excluded_by = self.gate.excluded_by()
            if not excluded_by:
                return self._save(tensor)
        if why is Eligibility.PARAMETER:
            self._stats.passed_through_tensors += 1
            return PassedThrough(tensor)
        if why in _FOREIGN:
            self._stats.kept_bytes[why.value] += nbytes_of(tensor)
            return PassedThrough(tensor)
        if excluded_by:
            counted: SavedCounted = SavedExcluded(self, tensor, tensor.untyped_storage().nbytes(), excluded_by)
        else:
            small = why is Eligibility.SMALL
            nbytes = tensor.untyped_storage().nbytes() if small else held_bytes(tensor, self._device)
            counted = SavedCounted(self, tensor, nbytes, why.value)
        if self.rematerialization is not None and why is not Eligibility.OF_GRAPH:  # a replay overwrites it
            self.rematerialization.note(tensor, counted)
        return counted

    def eligibility_of(self, tensor: torch.Tensor) -> Eligibility:
        """Return whether a tensor that is saved now may leave device memory."""
        why = self._judged(tensor)
        return Eligibility.EXCLUDED if why is Eligibility.ELIGIBLE and self.gate.excluded_by() else why

    def _judged(self, tensor: torch.Tensor) -> Eligibility:
        return self.gate.judge(tensor, acts=bool(self.room.watched), casts_stay=not self.room.is_limited)

    def _save(self, tensor: torch.Tensor) -> SavedView:
        key = StorageKey.of(tensor)
        forward, first = self.forward, self.rematerialization
        if self._doubts.waiting:
            self._doubts.read()
        view: SavedView | None = None
        with self.finalizers, self.finalizers.lock:
            choice = forward.policy.choose(key, key.nbytes)
            if key in forward.by_key or (first is None and not self.room.may_wait):
                view = self._enter(forward, tensor, key, choice)
        if view is None:  # something may have to be proven or waited for first
            taken: Taken = None, None
            if first is not None:
                first.settle()
                if choice.rematerialize or forward.is_recorded:
                    taken = first.take(tensor, is_wanted=choice.rematerialize)
            self.room.wait_for(key.nbytes)
            with self.finalizers, self.finalizers.lock:
                view = self._enter(forward, tensor, key, choice, taken)
        if self._accelerator is not None:
            # Autograd would have held it for longer than this stream uses it, which need not be the one that made it.
            self._accelerator.share(tensor, self._accelerator.current_stream())
        if first is not None:
            first.note(tensor, view)
        return view

    def _enter(
        self, forward: Forward, tensor: torch.Tensor, key: StorageKey, choice: Choice, taken: Taken = (None, None)
    ) -> SavedView:
        """Enter one more view of a storage, which is new unless it has a record with the same bytes.

        A view that a device has yet to compare keeps its bytes until then.

        Args:
            taken: how it could be rematerialized, and the ticket if it was taken for that.
        """
        record, answer, (origin, ticket) = forward.by_key.get(key), None, taken
        if record is not None and record.operation is not None:
            operation = self._operations.present()
            # Saves of one operation have the same bytes: nothing runs in between.
            if record.fingerprint is not None and record.operation != operation:
                answer = record.fingerprint.compared(tensor, self._accelerator, self._doubts.answers)
                if answer.is_done:
                    record, answer = record if answer.read() else None, None
            if record is not None and answer is None:  # else what this operation saves next would pass for equal
                record.operation = operation
        if record is None:
            record = self._add(forward, tensor, key, choice, ticket)
            record.origin = origin
        else:
            if ticket is not None:  # another thread has saved it meanwhile
                ticket.store.release(ticket)
            self._stats.deduplicated_bytes += 0 if record.is_kept or answer is not None else nbytes_of(tensor)
        if record.views == record.lent:
            self._stats.saved.add(record.memory.save(key.nbytes))
        offloaded = not record.is_kept and answer is None
        record.views += 1
        record.pending += offloaded
        # Under the lock: an interrupt between the count and the view whose end takes it back would leave it for ever.
        view = SavedView(self, record, tensor, offloaded=offloaded)
        if answer is not None:
            self._doubts.add(view, answer)
        return view

    def _add(
        self, forward: Forward, tensor: torch.Tensor, key: StorageKey, choice: Choice, ticket: Ticket | None
    ) -> SavedStorage:
        """Add the record of a storage at its version, which goes where it was chosen to go, unless it was taken."""
        storage = tensor.untyped_storage()
        record = SavedStorage(key, forward.micro_step, self.room.count(storage, key.nbytes))
        if not (choice.stores or ticket is not None or self.room.is_limited):
            self._stats.kept_bytes[choice.reason] += key.nbytes  # it never leaves
        else:
            self.room.count_until_free(storage)
            record.operation = self._operations.present()
            record.is_complete = is_complete(tensor)
            record.source = None if has_graph(tensor) else weakref.ref(storage)  # held, it would never be free
            if ticket is not None:
                self.room.give(record, ticket, tensor)
            elif not self._operations.hold(record, record.operation, tensor, choice):
                self._place(record, tensor, choice)
        forward.by_key[key] = record
        self._live_records += 1
        record.micro_step.saved += 1
        return record

    def _place(self, record: SavedStorage, tensor: torch.Tensor | None, choice: Choice) -> None:
        """Have a store take the bytes of a record, or keep them.

        Args:
            tensor: that holds the bytes; None if no view does any more, or they are to stay.
        """
        reason = choice.reason if tensor is None else self.room.offload(record, tensor, choice)
        if record.is_kept:
            self._stats.kept_bytes[reason] += record.nbytes
            self.room.add_kept(record)
        else:
            record.index = record.micro_step.add(record)

    @property
    def _is_capturing(self) -> bool:
        """True if a CUDA graph is being captured, which no copy and no event may come into."""
        return self._accelerator is not None and self._accelerator.is_capturing()

    def _end_operations(self, present: Operation | None = None, *, stays: bool = False) -> None:
        """Have leave what operations of this thread have saved that are over.

        Args:
            present: the operation that saves now; without one all are over.
            stays: what they have saved stays in memory, because forward has failed: nobody will want most of it.
        """
        if not self._operations.are_over(present):
            return
        with self.finalizers, self.finalizers.lock:
            for record, choice, *_ in self._operations.ended():
                self._place(record, None if stays else next((view.held for view in record.holders), None), choice)

    def count_kept(self, user: SavedCounted, tensor: torch.Tensor, nbytes: int, reason: str) -> CountedMemory:
        if self.room.may_wait:
            self.room.wait_for(nbytes)
        with self.finalizers, self.finalizers.lock:
            holders = [tensor] if has_plain_storage(tensor) else components_of(tensor)[:1]
            memory = self.room.count(holders[0].untyped_storage() if holders else None, nbytes)
            added_bytes = memory.save(nbytes if reason else 0)
            self._stats.saved.add(added_bytes)
            if reason:
                self._stats.kept_bytes[reason] += added_bytes
            self.finalizers.watch(user, CountedGone(memory))
        return memory

    # ---- unpack -------------------------------------------------------------------------------------------------

    def unpack(self, micro_step: MicroStep[SavedStorage], held: Held) -> torch.Tensor:
        """Return the tensor for which ``held`` stands: autograd's unpack hook.

        Raises:
            ActivationModifiedError: it was modified in place after it was saved.
            ActivationLostError: its bytes could not be read back.
            ActivationCorruptionError: the bytes read back are not the bytes written.
        """
        if torch.is_inference_mode_enabled():  # what is made there has no version, and autograd saves tensors that have
            with torch.inference_mode(False):
                return self.unpack(micro_step, held)
        if torch._C._len_torch_dispatch_stack() and is_under_a_mode():
            with out_of_modes():  # what a mode makes of our copies would go into gradients
                return self.unpack(micro_step, held)
        if self._operations.held_back and not self._is_capturing:
            self._end_operations()
        reading = self._originals.begin_unpack()
        self.finalizers.act_if_free()  # what is gone makes room for what comes; nothing else may take the lock here
        # First of all: backward waits for this read, and for no read ahead.
        if isinstance(held, PassedThrough):
            tensor = held.restore()
        elif reading is not None and reading.memory is not None:
            if self.rematerialization is not None and held.memory.is_operand:
                # Comparisons hold operands, and backward may be about to update one that no recipe needs any longer.
                self.rematerialization.wait_for_answers()
                self.finalizers.act_if_free()
            tensor = self._functions.hand_out(held, reading.memory)
        else:
            tensor = held.restore()
            if is_read_by_an_extension():
                tensor = self._functions.own(held, tensor)
        if reading is not None:
            reading.tensors.append(Unpacked(tensor, tensor is held.held, held.attributes))
        if micro_step.phase is Phase.WAITING:
            with self.finalizers, self.finalizers.lock:
                micro_step.read_ahead(self.room.prefetch)
        return tensor

    def load(self, view: SavedView) -> torch.Tensor:
        if os.getpid() != self._pid:
            raise StateError("a forked child has neither the staging nor the lanes of its parent: run forward in it")
        try:
            return self._load_once(view)
        except RuntimeError as error:
            if self._accelerator is None or not is_out_of_memory(error):
                raise
        # The allocator has memory again once streams are done with what the host has let go of (pytorch #189504).
        self.room.give_way()
        return self._load_once(view)

    def _load_once(self, view: SavedView) -> torch.Tensor:
        record = view.record
        arrival = self._loaded(record).arrival
        with self.finalizers, self.finalizers.lock:
            data = arrival.join()  # every consumer waits for the copy, each in its own stream
            unmodified(data, arrival.version)  # an earlier consumer may have written into it
            if view.is_lent:  # or each recipe that wants it would read it again
                self.room.add_early(record)
            self.room.note_unpacked(view)
            record.micro_step.read_ahead(self.room.prefetch, after=record.index)
        return data

    def _loaded(self, record: SavedStorage) -> Loaded:
        """Load a record, if it is not there; see [Note: Loads]."""
        try:
            while True:
                self.room.wait_for(self.room.loading_bytes(record))
                with self.finalizers, self.finalizers.lock:
                    if record.loaded is not None:
                        return record.loaded
                    loading = record.loading or self.room.begin_load(record)  # never twice: it would be counted twice
                if loading.thread == threading.get_ident():
                    return self._fetch(record, loading)
                with loading.done:  # another thread loads it
                    pass
        except BaseException as error:  # an interrupt between two critical sections leaves it LOADING for ever
            self.finalizers.note_exception(error)
            raise

    def _fetch(self, record: SavedStorage, loading: Loading) -> Loaded:
        store, started_s = loading.ticket.store, time.perf_counter()
        try:
            loaded = store.get(loading.ticket, self._device)
        except BaseException:  # another thread would wait for it for ever
            with self.finalizers, self.finalizers.lock:
                self.room.end_load(record, loading, None)
            raise
        with self.finalizers, self.finalizers.lock:
            if store.keeps_bytes:
                self._stats.moving_s += time.perf_counter() - started_s
            self.room.end_load(record, loading, loaded)
        return loaded

    # ---- for what is rematerialized -----------------------------------------------------------------------------

    def rematerialize(self, store: TensorStore[Any] | None) -> None:
        """Ask a store that knows what storages are made of before those that keep their bytes; None: none."""
        self.rematerialization = store
        self.room.watched = self.stores if store is None else (store, *self.stores)

    def hold(self, record: SavedStorage, *, leaves: bool = False) -> bool:
        is_wanted = is_held = False
        try:
            with self.finalizers, self.finalizers.lock:
                is_wanted = record.state is not RecordState.DROPPED
                if is_wanted:  # one user more, or it might be dropped meanwhile
                    record.count_lent()
            if is_wanted:
                self._loaded(record)
        finally:
            if is_wanted:
                with self.finalizers, self.finalizers.lock:
                    if record.loaded is not None:
                        is_held, record.loaded = True, replace(record.loaded, stored=False)
                    self.finalize(ViewGone(record, is_away=True, is_lent=True))
                    if leaves and record.state is RecordState.LOADED:
                        self.room.evict(record)
        return is_held

    # ---- room, for forwards that run again and for ourselves ----------------------------------------------------

    def count_again(self, tensor: torch.Tensor) -> None:
        """Count a tensor that a forward saves which runs again in backward, until it is free or backward is over."""
        if is_parameter(tensor) or not has_plain_storage(tensor):  # a parameter's memory is its owner's
            return
        self.room.wait_for(nbytes := held_bytes(tensor, self._device))
        with self.finalizers, self.finalizers.lock:
            self._stats.recomputed_bytes += 0 if self.room.memory_of(tensor.untyped_storage()) else nbytes
            self._recomputed.append(self.room.count(tensor.untyped_storage(), nbytes))
            self.room.count_until_free(tensor.untyped_storage())

    def end_recomputations(self) -> None:
        """Count no longer what backward has saved again: what others still hold of it, a buffer say, is theirs."""
        with self.finalizers, self.finalizers.lock:
            while self._recomputed:
                self.room.uncount(self._recomputed.pop())

    # ---- for the offloader and the controller -------------------------------------------------------------------

    def observe(self, observer: HooksObserver) -> None:
        """Have an observer make the hooks of each forward from now on from those that there are."""
        self._observers.append(observer)

    def refuse_broken(self) -> None:
        """Refuse to go on where an exception has left records or a store half changed.

        Raises:
            StateError: one has; see [Note: Broken] in ``finalizers.py``.
        """
        self.finalizers.refuse_broken()
        for store in self.room.watched:
            store.refuse_broken()

    def settle(self) -> None:
        """Act on every deferred finalizer, and let go of what finished copies still hold."""
        with self.finalizers, self.finalizers.lock:
            self.room.releases.settle()
        for store in self.stores:  # under their own locks
            store.settle()
        self.finalizers.act_if_free()

    def forget_order(self) -> None:
        """Forget the order in which backward wanted what was moved: from now on other storages are."""
        with self.finalizers, self.finalizers.lock:
            self.learned_order = []

    # ---- the ends of records ------------------------------------------------------------------------------------

    def finalize(self, gone: Finalized) -> None:
        if isinstance(gone, CountedMemory):
            self.room.free(gone)
            return
        if isinstance(gone, CountedGone):
            gone.memory.lent -= gone.is_lent
            self._stats.saved.add(0 if gone.is_lent else -gone.memory.unsave())
            self.room.uncount(gone.memory)
            return
        record = gone.record
        record.views -= 1
        record.lent -= gone.is_lent
        record.memory.lent -= gone.is_lent
        record.pending -= gone.is_pending
        if record.views == record.lent and not gone.is_lent:  # autograd would hold it no longer, whatever recipes do
            self._stats.saved.add(-record.memory.unsave())
        if record.views == 0:
            self._forget(record)
        else:
            self.room.evict_if_unpacked(record)

    def _forget(self, record: SavedStorage) -> None:
        self.room.remove(record)
        record.move(RecordState.DROPPED)
        record.loaded = record.origin = None  # a sample or a recording that holds the record would hold its bytes
        self._live_records -= 1
        if self.forward.by_key.get(record.key) is record:
            del self.forward.by_key[record.key]  # a later save would share bytes that are given up
        if record.ticket is not None:
            record.ticket.store.release(record.ticket)  # see [Note: Order of locks]
        record.micro_step.saved -= 1
        if record.index != NO_INDEX:
            self.learned_order = record.micro_step.remove(record.index) or self.learned_order  # a part teaches none
