"""The tensor cache: autograd's pack and unpack (TBA section 3.2), and one record for each saved storage in between.

Answers what becomes of a tensor that autograd saves. Sees autograd, storages and a store's contract; cannot see files,
staging or DeepSpeed, nor the reasons of a policy. ``saved.py`` has the objects that autograd holds, ``residency.py``
moves their bytes and holds them within the budget. A ``TensorStore`` may rematerialize some of them.

[Note: Exactness] Three rules keep backward exact where bytes change and no version tells of it:

1. While the storage that was saved lives, it is what backward gets: whoever writes into it gets what plain autograd
   gives.
2. What has no graph (data, masks, rotary tables, a buffer that anybody may refill) stays in its own memory; it leaves
   only if nobody but autograd refers to it. What has a graph is one storage where storage, version counter and version
   are equal. What a custom Function has saved is shared with nobody, and nothing is rematerialized from it.
3. Bytes leave one operation late. Autograd packs what an operation saves before its kernel runs, and a kernel may write
   into that (``rrelu`` into its noise); a Function may have begun a collective for which its caller waits. Both are
   over at the next save with another sequence number, which each node of the graph takes, or when forward is over.

[Note: Records] A saved tensor that may leave becomes a ``SavedView``, which autograd holds in its place. Views
of one storage share a ``SavedStorage``: the storage is written once, and every view is rebuilt from it. A record lives
as long as one of its views. Records are shared within one forward only. What stays until backward (it is small, say, or
the plan keeps it and there is no budget) is counted and has no record.

[Note: Saves] A save holds the lock while a store takes the bytes, also while that waits for staging or for a swap file
to grow. So another thread that saves or loads waits, too.

[Note: Order of locks] The cache's lock is taken before a store's, never after.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ds_tba.core.accounts import CountedGone, MemoryGone, Notice
from ds_tba.core.hooks import ForwardHooks, hooks_of_forward, keep_originals
from ds_tba.core.poison import poisons
from ds_tba.core.prefetch import MicroStep, Phase
from ds_tba.core.residency import Residency
from ds_tba.core.saved import (
    NO_INDEX,
    Around,
    Held,
    Hooks,
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
)
from ds_tba.core.tensors import (
    Eligibility,
    Gate,
    has_graph,
    held_memory,
    is_under_a_mode,
    nbytes_of,
    next_sequence_number,
    out_of_modes,
    own,
)
from ds_tba.device.accelerator import Accelerator, moment
from ds_tba.stats import CacheStats
from ds_tba.storage.base import STAYS, Always, AnyStore, Choice, Policy, Ticket

# Passed through: they hold no memory of the training device.
_FOREIGN = frozenset({Eligibility.NO_STORAGE, Eligibility.OTHER_DEVICE})
# The whole storage counts, also where a view of it is saved.
_WHOLE = frozenset({Eligibility.ELIGIBLE, Eligibility.EXCLUDED, Eligibility.SMALL})


@dataclass(eq=False)
class Forward:
    """The forward under way, or the last one."""

    micro_step: MicroStep
    policy: Policy
    is_recorded: bool = False  # a recorder is around its hooks: every storage that a plan could move gets a record
    # The records of the storages saved in it; those of earlier forwards are found no more, but live on.
    by_key: dict[StorageKey, SavedStorage] = field(default_factory=dict)


class _OfThread(threading.local):
    """The storages that operations of this thread have saved and that have not left: rule 3 of [Note: Exactness]."""

    def __init__(self) -> None:
        self.leaving: deque[SavedStorage] = deque()
        self.number = -1  # the sequence number at which the last of them was saved


class TensorCache(Residency):
    """Moves saved tensors into a store during forward and back during backward.

    Args:
        stores: where eligible storages go in a micro-step without a policy of its own, in order of preference; without
            any, everything is kept and measured.
        wait_for_staging: wait for room in staging instead of keeping the tensor, in a micro-step without a policy.
        released_bytes: without a budget, the bound of the device memory that backward has let go of and the device has
            not: see [Note: The budget].
    """

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
        accelerator = accelerator or Accelerator()
        super().__init__(stores, torch.device(device), accelerator, released_bytes)
        self.gate = Gate(self._device, min_tensor_bytes, accelerator)
        self._default_policy: Policy = Always(stores, wait=wait_for_staging, rematerialize=True)
        self.forward = Forward(MicroStep(), self._default_policy)
        self._live_records = 0
        self.rematerialization: TensorStore[Any] | None = None  # asked before all other stores; None where it is off
        self._observers: list[Around] = []
        self._function_saves = keep_originals()
        self._of_thread = _OfThread()

    @property
    def stats(self) -> CacheStats:
        """The figures as they are now, without what is gone; with it while the lock is taken."""
        if not self.lock.locked():  # this thread may have it, interrupted by the signal handler that asks
            self.act_on_ends()
        return self.meter

    @property
    def live_records(self) -> int:
        """Saved storages that some graph still holds."""
        self.act_on_ends()
        return self._live_records

    @poisons
    def act_on_ends(self) -> None:
        """Act on the ends of views and storages that came since the last save or load."""
        if self.ends.left:
            with self.lock:
                self.ends.act()

    # ---- forwards -----------------------------------------------------------------------------------------------

    @contextmanager
    def saving(
        self,
        policy: Policy | None = None,
        around: Around | None = None,
        prefetch_distance: Sequence[int] = (),
        *,
        continues: bool = False,
    ) -> Iterator[None]:
        """Open a forward: what autograd saves inside goes through the cache.

        Args:
            policy: where it goes.
            around: a recorder's, which makes the hooks that autograd calls from ours; these call ours.
            prefetch_distance: see ``Plan.prefetch_distance``.
            continues: the forward belongs to the micro-step of the last one; see [Note: Micro-steps].
        """
        if not torch.is_grad_enabled():  # an evaluation pass must not end the micro-step before its backward
            yield
            return
        policy, is_recorded = policy or self._default_policy, around is not None
        step = self._begin_forward(policy, prefetch_distance, continues=continues, is_recorded=is_recorded)
        try:
            with hooks_of_forward(self._hooks(step, around)):
                yield
            self._end_operations()  # not after an error: what is wanted all the same leaves with a later save
        finally:
            step.phase = Phase.WAITING  # also after an error: a backward of what was saved would read nothing ahead

    @poisons
    def _begin_forward(
        self, policy: Policy, prefetch_distance: Sequence[int], *, continues: bool, is_recorded: bool
    ) -> MicroStep:
        if self.rematerialization is not None:
            self.rematerialization.begin_forward()
        with self.lock:
            self.ends.act()
            if not self._live_records:  # else storages of a longer batch, long gone, would keep others from being read
                self.largest_bytes = 0
            step = self.forward.micro_step
            if not (continues or step.is_interleaved):
                step = MicroStep()
                self.meter.micro_steps += 1
            step.begin_forward(prefetch_distance)
            self.forward = Forward(step, policy, is_recorded)  # finds no record of earlier ones
        return step

    @poisons
    def after_forward(self, around: Around | None = None) -> ForwardHooks | None:
        """Return hooks for what is saved between the last forward and its backward; None where that is not known.

        Nothing is shared with the forward: who comes after it may have changed bytes that no version tells of.
        """
        with self.lock:
            step = self.forward.micro_step
            if step.is_interleaved or not step.expects_forward:
                return None
            self.forward = replace(self.forward, by_key={})
        if self.rematerialization is not None:
            self.rematerialization.begin_forward()
        return self._hooks(step, around)

    def _hooks(self, step: MicroStep, around: Around | None) -> ForwardHooks:
        hooks: Hooks = (self.pack, partial(self.unpack, step))
        for one in self._observers if around is None else (*self._observers, around):
            hooks = one(hooks)
        return ForwardHooks(*hooks)

    @contextmanager
    def interleaving(self) -> Iterator[None]:
        """Make one micro-step of the forwards and backwards of several micro-batches; see [Note: Micro-steps]."""
        with self.lock:
            self.forward.micro_step = MicroStep(is_interleaved=True)
            self.meter.micro_steps += 1
        try:
            yield
        finally:
            self.end_micro_step()

    @property
    def expects_forward(self) -> bool:
        """True if one more forward belongs to the last micro-step; see [Note: Micro-steps]."""
        self.act_on_ends()
        with self.lock:
            return self.forward.micro_step.expects_forward

    @poisons
    def end_micro_step(self) -> None:
        """End the micro-step, whatever is still saved: the next forward begins another.

        Raises:
            RematerializationError: what was rematerialized in earlier steps is no longer what forward makes.
        """
        if self.is_forked:  # another thread may have had a lock when this child was forked
            return
        with self.lock:
            self.ends.act()
            self.forward.micro_step = MicroStep()
            if not self._accelerator.is_capturing():
                self.copies_out()  # or what the program keeps of each step would count as saved for ever
        if self.rematerialization is not None:
            self.rematerialization.wait_for_answers()

    # ---- pack ---------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Held:
        """Return the object to hold in place of ``tensor``: autograd's pack hook.

        Raises:
            RematerializationError: what was rematerialized in earlier steps is no longer what forward makes.
        """
        try:
            self.meter.packed_tensors += 1
            mine = self._of_thread
            if mine.leaving and mine.number != next_sequence_number() and not self._accelerator.is_capturing():
                self._end_operations()
            why = self.eligibility_of(tensor)
            if why is Eligibility.PARAMETER:
                self.meter.passed_through_tensors += 1
                return PassedThrough(tensor)
            if why in _FOREIGN:
                self.meter.kept_bytes[why.value] += nbytes_of(tensor)
                return PassedThrough(tensor)
            function = self._function_saves.saver_of(tensor)
            if why is Eligibility.ELIGIBLE:
                return self._save(tensor, function)
            reason = self.gate.excluded_by() if why is Eligibility.EXCLUDED else why.value
            return self._keep(tensor, why, reason, function)
        except BaseException as error:
            self.note_exception(error)
            raise

    def eligibility_of(self, tensor: torch.Tensor) -> Eligibility:
        """Return whether a tensor that is saved now may leave device memory."""
        return self.gate.judge(tensor, acts=bool(self.issuers), casts_stay=not self.is_limited)

    def _keep(self, tensor: torch.Tensor, why: Eligibility, reason: str, function: int) -> SavedCounted:
        """Keep a tensor that stays where it is until backward, for a reason in the report's words, without a record."""
        storage: torch.UntypedStorage | None
        if why in _WHOLE:
            storage = tensor.untyped_storage()
            nbytes = storage.nbytes()
        else:
            storage, nbytes = held_memory(tensor, self._device)
        kind, is_of_function = SavedExcluded if why is Eligibility.EXCLUDED else SavedCounted, function > 0
        step = self.forward.micro_step
        counted = kind(self, tensor, storage, nbytes, reason, step, is_of_function=is_of_function)
        if self.rematerialization is not None and why is not Eligibility.OF_GRAPH:  # a replay overwrites it
            self.rematerialization.note(tensor, counted)
        return counted

    def _save(self, tensor: torch.Tensor, function: int) -> SavedView | SavedCounted:
        forward, first = self.forward, self.rematerialization
        if not (self.issuers or forward.is_recorded):  # nothing can leave, and nobody need know the storage again
            return self._keep(tensor, Eligibility.ELIGIBLE, STAYS.reason, function)
        key, choice = StorageKey.of(tensor, function), STAYS
        origin: Origin | None = None
        ticket: Ticket | None = None
        with self.lock:
            if self.ends.left:
                self.ends.act()
            is_new = key not in forward.by_key
            if is_new:
                choice = forward.policy.choose(key, key.nbytes)
        if is_new:
            may_move = choice.stores or self.is_limited or forward.is_recorded
            if not may_move and (first is None or not choice.rematerialize):
                return self._keep(tensor, Eligibility.ELIGIBLE, choice.reason, function)
            if first is not None:
                first.settle()
                if not function and (choice.rematerialize or forward.is_recorded):
                    origin, ticket = first.take(tensor, is_wanted=choice.rematerialize)
            self.wait_for(key.nbytes)
        with self.lock:
            record = forward.by_key.get(key)
            if record is None:
                record = self._add(forward, tensor, key, choice, ticket)
                record.origin = origin
            elif ticket is not None:  # another thread has saved it meanwhile
                ticket.store.release(ticket)
            view = self._add_view(record, tensor)
        if not self._accelerator.is_synchronous:
            # Autograd would have held it for longer than this stream uses it, which need not be the one that made it.
            self._accelerator.share(tensor, self._accelerator.current_stream())
        if first is not None:
            first.note(tensor, view)
        return view

    def _add_view(self, record: SavedStorage, tensor: torch.Tensor) -> SavedView:
        """Enter one more view of a storage."""
        offloaded = not record.is_kept
        if record.views:
            record.node = next_sequence_number()
            self.meter.deduplicated_bytes += nbytes_of(tensor) if offloaded else 0
        if record.views == record.lent:
            self.meter.saved.add(record.memory.save(record.nbytes))
        record.views += 1
        record.pending += offloaded
        return SavedView(self, record, tensor, offloaded=offloaded)

    def _add(
        self, forward: Forward, tensor: torch.Tensor, key: StorageKey, choice: Choice, ticket: Ticket | None = None
    ) -> SavedStorage:
        """Add the record of a storage, which goes where it was chosen to go, unless it is to be rematerialized."""
        storage = tensor.untyped_storage()
        memory = self.count(storage, key.nbytes)
        memory.is_of_function |= key.function > 0
        stream = self._accelerator.current_stream()
        node = next_sequence_number()
        source, is_made = weakref.ref(storage), has_graph(tensor)
        record = SavedStorage(key, forward.micro_step, source, memory, stream, node, is_made, choice=choice)
        self.count_until_free(storage)
        if ticket is not None and self.rematerialization is not None:
            self.rematerialization.admit(record, ticket)
        else:
            self._of_thread.leaving.append(record)
            self._of_thread.number = node
        forward.by_key[key] = record
        self._live_records += 1
        record.micro_step.alive += 1
        return record

    @poisons
    def _end_operations(self) -> None:
        """Have leave what operations of this thread have saved that are over."""
        waiting = self._of_thread.leaving
        if self.is_forked:  # a child that was forked in forward, where another thread may have had the lock
            return
        while waiting:
            with self.lock:
                self.ends.act()
                record = waiting.popleft()
                if record.is_kept:  # else it was dropped meanwhile: nobody wants it any more
                    self.place(record)

    def place(self, record: SavedStorage, ticket: Ticket | None = None) -> None:
        """Have the store that issued a ticket, else a store of the record's choice, take its bytes; or keep them."""
        choice, record.choice = record.choice, STAYS  # no longer leaving: a budget may evict it from now on
        if ticket is not None:
            self.give(record, ticket)
        elif choice.stores and not record.may_leave:
            record.refusal = Eligibility.NO_GRAPH.value
        elif choice.stores and (held := next((view.held for view in record.holders), None)) is not None:
            present = self._accelerator.current_stream()
            if record.stream != present:  # or a copy out may begin before that stream has filled the memory
                present.wait_event(moment(self._accelerator, record.stream))
            self.offload(record, held, choice)
        elif choice.stores:
            record.refusal = "its storage was exchanged"
        if record.is_kept:
            self.meter.kept_bytes[record.refusal or choice.reason] += record.nbytes
            if self.is_limited:  # until the budget wants the room
                self._movable[record] = moment(self._accelerator)
        else:
            record.index = record.micro_step.add(record)

    # ---- unpack -------------------------------------------------------------------------------------------------

    def unpack(self, micro_step: MicroStep, held: Held) -> torch.Tensor:
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
        try:
            if self._of_thread.leaving and not self._accelerator.is_capturing():
                self._end_operations()
            if self.ends.left:
                with self.lock:
                    self.ends.act()  # what is gone makes room for what comes
            # First of all: backward waits for this read, and for no read ahead.
            tensor = held.restore()
            if not isinstance(held, PassedThrough) and held.memory.is_of_function and held.memory.lent:
                tensor = own(tensor)  # or what the Function writes would be the bytes of a recipe's operand
            if micro_step.phase is Phase.WAITING:
                with self.lock:
                    micro_step.read_ahead(self.prefetch)
            return tensor
        except BaseException as error:
            self.note_exception(error)
            raise

    # ---- for what is rematerialized -----------------------------------------------------------------------------

    def rematerialize(self, store: TensorStore[Any] | None) -> None:
        """Ask a store that knows what storages are made of before those that keep their bytes; None: none."""
        self.rematerialization = store
        self.issuers = self.stores if store is None else (store, *self.stores)

    # ---- for the offloader and the controller -------------------------------------------------------------------

    def observe(self, observer: Around) -> None:
        """Have an observer make the hooks of each forward from now on from those that there are."""
        self._observers.append(observer)

    @poisons
    def settle(self) -> None:
        """Act on every end, and let go of what finished copies still hold."""
        with self.lock:
            self._releases.settle()
        for store in self.stores:  # under their own locks
            store.settle()
        self.act_on_ends()

    # ---- the ends of records ------------------------------------------------------------------------------------

    def finalize(self, gone: Notice) -> None:
        if isinstance(gone, CountedGone):
            if gone.micro_step is None:
                gone.memory.lent -= 1
            else:
                gone.micro_step.alive -= 1
                self.meter.saved.add(-gone.memory.unsave())
            self.uncount(gone.memory)
        elif isinstance(gone, MemoryGone):
            self.free(gone.memory)
        elif isinstance(gone, ViewGone):
            self._end_view(gone)

    def _end_view(self, gone: ViewGone) -> None:
        record, is_lent = gone.record, gone.is_lent
        record.pending -= gone.is_pending
        record.views -= 1
        record.lent -= is_lent
        record.memory.lent -= is_lent
        if record.views == record.lent and not is_lent:  # autograd would hold it no longer, whatever recipes do
            self.meter.saved.add(-record.memory.unsave())
        if record.views == 0:
            self._forget(record)
        else:
            self.evict_if_unpacked(record)

    def _forget(self, record: SavedStorage) -> None:
        self.remove(record)
        record.move(RecordState.DROPPED)
        record.loaded = record.origin = None  # a sample or a recording that holds the record would hold its bytes
        self._live_records -= 1
        if self.forward.by_key.get(record.key) is record:
            del self.forward.by_key[record.key]  # a later save would share bytes that are given up
        if record.ticket is not None:
            record.ticket.store.release(record.ticket)
        record.micro_step.alive -= 1
        if record.index != NO_INDEX:
            record.micro_step.remove(record.index)
