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

[Note: Operations under way] Autograd packs what an operation saves before its kernel runs, and a kernel may write into
that (``rrelu`` into its noise). So a storage that no finished operation has made leaves only when the operation that
saves it is over: at the next save with another sequence number, which each node of the graph takes, or when forward
is over. On a device the host has then also told the stream to wait for what a Function began on another one.

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
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from ds_tba.core.fingerprint import Answer
from ds_tba.core.hooks import hooks_of_forward, uncompiled_hooks, unseen
from ds_tba.core.originals import OwnMemory, Unpacked, keep_originals
from ds_tba.core.prefetch import MicroStep, Phase
from ds_tba.core.residency import Residency
from ds_tba.core.saved import (
    NO_INDEX,
    CountedGone,
    CountedMemory,
    Finalized,
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
    Eligibility,
    ViewSpec,
    components_of,
    eligibility,
    has_graph,
    has_plain_storage,
    held_bytes,
    is_complete,
    is_parameter,
    is_read_by_an_extension,
    is_under_a_mode,
    next_sequence_number,
    out_of_modes,
    span_bytes,
    storage_bytes,
)
from ds_tba.device.accelerator import Accelerator, PinnedAnswers, moment
from ds_tba.device.copies import Arrival
from ds_tba.device.memory import is_out_of_memory
from ds_tba.errors import StateError
from ds_tba.stats import CacheStats
from ds_tba.storage.base import Always, Choice, Loaded, Policy, Store, Ticket

CHANGED = "saved again with other bytes"
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


class Exclusion(Protocol):
    """Says which saved tensors may not leave device memory, by more than a tensor shows."""

    def reason(self) -> str:
        """Return why the tensor that this thread saves now may not leave; empty if it may."""
        ...


class _Taken(NamedTuple):
    """A storage before it is entered: its origin, and its ticket if a store has taken it."""

    origin: Origin | None = None
    ticket: Ticket | None = None


_NOT_TAKEN = _Taken()


class _InUse(NamedTuple):
    """A storage that leaves once the operation that saves it is over.

    Attributes:
        operation: see :class:`SavedStorage`; of the thread alone.
        stream: that saved it; None where everything is done at once.
    """

    record: SavedStorage
    choice: Choice
    operation: Operation
    stream: Any


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
        self._stats = CacheStats()
        self.stores = tuple(stores)
        self._device = torch.device(device)
        self._accelerator = accelerator
        self._pid = os.getpid()
        self._min_tensor_bytes = min_tensor_bytes
        self._default_policy: Policy = Always(stores, wait=wait_for_staging, rematerialize=True)
        self.residency = Residency(self._stats, self.stores, self._device, self, accelerator, released_bytes)
        self.forward = Forward(MicroStep(), self._default_policy)
        self.learned_order: list[int] = []
        self._live_records = 0
        self.rematerialization: TensorStore[Any] | None = None
        self._observers: list[HooksObserver] = []
        self._exclusion: Exclusion | None = None
        self._originals = keep_originals()
        self._in_use: dict[int, deque[_InUse]] = {}  # by thread
        self._answers = None if accelerator is None else PinnedAnswers(accelerator, 1, torch.bool)
        self._doubted: deque[tuple[weakref.ref[SavedView], Answer]] = deque()
        self._recomputed: list[CountedMemory] = []  # what blocks that ran again have saved in this backward

    @property
    def limit_bytes(self) -> float:
        return self.residency.limit_bytes

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
        if not torch.is_grad_enabled():
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
            self.forward = Forward(step, policy or self._default_policy, is_recorded)
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
        self._read_doubts(wait=True)
        if self.rematerialization is not None:
            self.rematerialization.end_micro_step()

    # ---- pack ---------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> PassedThrough | SavedCounted | SavedView:
        """Return the object to hold in place of ``tensor``: autograd's pack hook.

        Raises:
            RematerializationError: what was rematerialized in earlier steps is no longer what forward makes.
        """
        self._stats.packed_tensors += 1
        if self._in_use and not self._is_capturing:
            self._end_operations(self._operation())
        why, excluded_by = self._eligibility_by_tensor(tensor), ""
        if why is Eligibility.ELIGIBLE:
            excluded_by = self._excluded_by()
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
        if self.rematerialization is not None and why is not Eligibility.OF_GRAPH:
            self.rematerialization.note(tensor, counted)
        return counted

    def eligibility_of(self, tensor: torch.Tensor) -> Eligibility:
        """Return whether a tensor that is saved now may leave device memory."""
        why = self._eligibility_by_tensor(tensor)
        return Eligibility.EXCLUDED if why is Eligibility.ELIGIBLE and self._excluded_by() else why

    def _excluded_by(self) -> str:
        return "" if self._exclusion is None else self._exclusion.reason()

    def _eligibility_by_tensor(self, tensor: torch.Tensor) -> Eligibility:
        """Return whether a tensor may leave device memory, whichever module saves it."""
        acts = self.stores or self.rematerialization is not None
        if acts and torch._C._len_torch_dispatch_stack() and is_under_a_mode():
            return Eligibility.PARAMETER if is_parameter(tensor) else Eligibility.UNDER_A_MODE
        casts_stay, accelerator = not self.residency.is_limited, self._accelerator
        why = eligibility(tensor, self._device, self._min_tensor_bytes, casts_stay=casts_stay)
        if why is not Eligibility.ELIGIBLE:
            return why
        # Moving the memory of a graph frees nothing, and its next run writes there whoever has saved it.
        if accelerator is not None and (
            accelerator.is_capturing() or accelerator.is_of_graph(tensor.untyped_storage())
        ):
            return Eligibility.OF_GRAPH
        return why

    def _save(self, tensor: torch.Tensor) -> SavedView:
        key = StorageKey.of(tensor)
        forward, first = self.forward, self.rematerialization
        if self._doubted:
            self._read_doubts()
        view: SavedView | None = None
        with self.finalizers, self.finalizers.lock:
            choice = forward.policy.choose(key, key.nbytes)
            if key in forward.by_key or (first is None and not self.residency.may_wait):
                view = self._enter(forward, tensor, key, choice, _NOT_TAKEN)
        if view is None:  # something may have to be proven or waited for first
            taken = _NOT_TAKEN
            if first is not None:
                first.settle()
                if choice.rematerialize or forward.is_recorded:
                    taken = _Taken(*first.take(tensor, is_wanted=choice.rematerialize))
            self.wait_for_room(key.nbytes)
            with self.finalizers, self.finalizers.lock:
                view = self._enter(forward, tensor, key, choice, taken)
        if self._accelerator is not None:
            # Autograd would have held it for longer than this stream uses it, which need not be the one that made it.
            self._accelerator.share(tensor, self._accelerator.current_stream())
        if first is not None:
            first.note(tensor, view)
        return view

    def _enter(
        self, forward: Forward, tensor: torch.Tensor, key: StorageKey, choice: Choice, taken: _Taken
    ) -> SavedView:
        """Enter one more view of a storage, which is new unless it has a record with the same bytes.

        A view that a device has yet to compare keeps its bytes until then.
        """
        record, answer = forward.by_key.get(key), None
        if record is not None and record.operation is not None:
            operation = self._operation()
            # Saves of one operation have the same bytes: nothing runs in between.
            if record.fingerprint is not None and record.operation != operation:
                answer = record.fingerprint.compared(tensor, self._accelerator, self._answers)
                if answer.is_done:
                    record, answer = record if answer.read() else None, None
            if record is not None and answer is None:  # else what this operation saves next would pass for equal
                record.operation = operation
        if record is None:
            record = self._add(forward, tensor, key, choice, taken)
        else:
            if taken.ticket is not None:  # another thread has saved it meanwhile
                taken.ticket.store.release(taken.ticket)
            self._stats.deduplicated_bytes += 0 if record.is_kept or answer is not None else nbytes_of(tensor)
        if record.views == record.lent:
            self._stats.saved.add(record.memory.save(key.nbytes))
        offloaded = not record.is_kept and answer is None
        record.views += 1
        record.pending += offloaded
        # Under the lock: an interrupt between the count and the view whose end takes it back would leave it for ever.
        view = SavedView(self, record, tensor, offloaded=offloaded)
        if answer is not None:
            self._doubted.append((weakref.ref(view), answer))
        return view

    def _add(
        self, forward: Forward, tensor: torch.Tensor, key: StorageKey, choice: Choice, taken: _Taken
    ) -> SavedStorage:
        """Add the record of a storage at its version, which goes where it was chosen to go, unless it was taken."""
        storage = tensor.untyped_storage()
        record = SavedStorage(key, forward.micro_step, self.residency.count(storage, key.nbytes))
        record.origin = taken.origin
        if not (choice.stores or taken.ticket is not None or self.residency.is_limited):
            self._stats.kept_bytes[choice.reason] += key.nbytes  # it never leaves
        else:
            self.residency.count_until_free(storage)
            record.operation, record.is_complete = self._operation(), is_complete(tensor)
            record.source = None if has_graph(tensor) else weakref.ref(storage)
            if taken.ticket is not None:
                self.residency.give(record, taken.ticket, tensor)
            elif self._is_over(record, tensor):
                self._place(record, tensor, choice)
            else:
                stream = None if self._accelerator is None else self._accelerator.current_stream()
                self._in_use.setdefault(record.operation.thread, deque()).append(
                    _InUse(record, choice, record.operation, stream)
                )
                if choice.stores:
                    record.move(RecordState.LEAVING)
        forward.by_key[key] = record
        self._live_records += 1
        record.micro_step.saved += 1
        return record

    def _place(self, record: SavedStorage, tensor: torch.Tensor | None, choice: Choice) -> None:
        """Have a store take the bytes of a record, or keep them.

        Args:
            tensor: that holds the bytes; None if no view does any more, or they are to stay.
        """
        reason = choice.reason if tensor is None else self.residency.offload(record, tensor, choice)
        if record.is_kept:
            self._stats.kept_bytes[reason] += record.nbytes
            self.residency.add_kept(record)
        else:
            record.index = record.micro_step.add(record)

    def _operation(self) -> Operation:
        """Return what tells the operation that saves now from later ones."""
        return Operation(threading.get_ident(), next_sequence_number(), self._originals.checkpoints)

    @property
    def _is_capturing(self) -> bool:
        """True if a CUDA graph is being captured, which no copy and no event may come into."""
        return self._accelerator is not None and self._accelerator.is_capturing()

    def _is_over(self, record: SavedStorage, tensor: torch.Tensor) -> bool:
        """Return whether whatever fills the storage that is being saved has filled it."""
        return record.is_complete or self._originals.is_of_compiled(tensor.untyped_storage())

    def _end_operations(self, present: Operation | None = None, *, stays: bool = False) -> None:
        """Have leave what operations of this thread have saved that are over; see [Note: Operations under way].

        Args:
            present: the operation that saves now; without one all are over.
            stays: what they have saved stays in memory, because forward has failed: nobody will want most of it.
        """
        thread = threading.get_ident()
        in_use = self._in_use.get(thread)
        if not in_use or in_use[-1].operation == present:
            return
        with self.finalizers, self.finalizers.lock:
            while in_use:
                self._end_use(in_use.popleft(), stays=stays)
            del self._in_use[thread]

    def _end_use(self, one: _InUse, *, stays: bool) -> None:
        record = one.record
        if not record.is_kept:  # nobody wants it any more
            return
        if record.state is RecordState.LEAVING:  # not yet, where an interrupt came before that
            record.move(RecordState.KEPT)
        if self._accelerator is not None and one.stream != self._accelerator.current_stream():
            event = self._accelerator.new_event()
            event.record(one.stream)  # else the copy may begin before that stream has filled it
            self._accelerator.current_stream().wait_event(event)
        self._place(record, None if stays else next((view.held for view in record.holders), None), one.choice)

    def count_kept(self, user: SavedCounted, tensor: torch.Tensor, nbytes: int, reason: str) -> CountedMemory:
        if self.residency.may_wait:
            self.wait_for_room(nbytes)
        with self.finalizers, self.finalizers.lock:
            holders = [tensor] if has_plain_storage(tensor) else components_of(tensor)[:1]
            memory = self.residency.count(holders[0].untyped_storage() if holders else None, nbytes)
            added_bytes = memory.save(nbytes if reason else 0)
            self._stats.saved.add(added_bytes)
            if reason:
                self._stats.kept_bytes[reason] += added_bytes
            self.finalizers.watch(user, CountedGone(memory))
        return memory

    # ---- unpack -------------------------------------------------------------------------------------------------

    def unpack(
        self, micro_step: MicroStep[SavedStorage], held: PassedThrough | SavedCounted | SavedView
    ) -> torch.Tensor:
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
        if self._in_use and not self._is_capturing:
            self._end_operations()
        reading = self._originals.begin_unpack()
        self.finalizers.act_if_free()  # what is gone makes room for what comes; nothing else may take the lock here
        # First of all: backward waits for this read, and for no read ahead.
        if isinstance(held, PassedThrough):
            tensor = held.restore()
        elif reading is not None and reading.memory is not None:
            tensor = self._hand_out(held, reading.memory)
        else:
            tensor = held.restore()
            if is_read_by_an_extension():
                tensor = self._own(held, tensor)
        if reading is not None:
            reading.tensors.append(Unpacked(tensor, tensor is held.held))
        if micro_step.phase is Phase.WAITING:
            with self.finalizers, self.finalizers.lock:
                micro_step.read_ahead(self.residency.prefetch)
        return tensor

    def _hand_out(self, held: SavedCounted | SavedView, memory: OwnMemory) -> torch.Tensor:
        """Return a saved tensor to a Function of the user's, which may write into it without a version.

        It has one memory for all its reads, as without hooks, and shares it with no recipe, nor with bytes that others
        will read: what it returns may become ``.grad``, and be written into. A write with a version counts for the
        tensor that was saved, so that whoever else has saved it raises, as without hooks. A tensor without a graph that
        the user still has may be a state that backward updates, a running mean say: it is that memory.

        Args:
            memory: of what the node has read before.
        """
        owner = held.record if isinstance(held, SavedView) else held.memory
        if owner.is_operand and self.rematerialization is not None:
            # Comparisons hold operands, and backward may be about to update one that no recipe needs any longer.
            self.rematerialization.wait_for_answers()
            self.finalizers.act_if_free()
        if held.held is not None and not owner.is_operand:
            tensor = held.restore()
            if isinstance(held, SavedView) and held.holds(held.record.key):  # it may be moved between two reads
                memory[owner] = Arrival.done(storage_bytes(tensor))
            return tensor
        known = memory.get(owner)
        # A read on another stream waits, or it would see what the copy there has not written yet.
        storage = None if known is None else known.join().untyped_storage()
        if storage is None and isinstance(held, SavedView):
            storage = self._source_of(held.record)
        if storage is not None:
            tensor = held.over(storage)
            if isinstance(held, SavedView):
                with self.finalizers, self.finalizers.lock:
                    self._note_unpacked(held)
            return tensor
        tensor = held.restore()
        if not _is_its_bytes(tensor):
            return tensor.clone()
        data = storage_bytes(tensor)
        if _others_read(owner):
            data = self._copied(data)
        memory[owner] = self._arrival(data)
        return held.over(data.untyped_storage())

    def _arrival(self, data: torch.Tensor) -> Arrival:
        """Return bytes that come on the calling thread's current stream, for its other streams."""
        accelerator = self._accelerator
        if accelerator is None:
            return Arrival.done(data)
        arrival = Arrival(accelerator, data, moment(accelerator), accelerator.current_stream())
        counted = self.residency.memory_of(data.untyped_storage())
        if counted is not None:
            arrival.consumers = counted.consumers
        return arrival

    def _source_of(self, record: SavedStorage) -> torch.UntypedStorage | None:
        """Return the storage that was saved, if it is moved and the user has it all the same."""
        storage = None if record.is_kept or record.source is None else record.source()
        if storage is None or storage.nbytes() != record.nbytes or record.ticket is None:
            return None
        for copy in record.ticket.store.copies_out():  # else one that is under way would take what backward writes
            copy.wait()
        return storage

    def _own(self, held: SavedCounted | SavedView, tensor: torch.Tensor) -> torch.Tensor:
        """Return a saved tensor to a Function in C++, in memory of its own and with a version of its own.

        It, too, may write into that without a version, and what it returns may become ``.grad``, or be added to in
        place: nobody else refers to the tensor that autograd makes of ours. Nothing tells whether it reads once more,
        so that each read has another memory.
        """
        owner = held.record if isinstance(held, SavedView) else held.memory
        if held.held is None and not _others_read(owner):
            return tensor
        if not _is_its_bytes(tensor):
            return tensor.detach().clone()
        spec = ViewSpec.of(tensor)
        start = spec.storage_offset * tensor.element_size()
        own = self._copied(storage_bytes(tensor)[start : start + span_bytes(tensor)])
        return spec._replace(storage_offset=0).rebuild(own)

    def _copied(self, source: torch.Tensor) -> torch.Tensor:
        """Return a copy of bytes, on the consumer's stream, which may be behind the load of these."""
        nbytes, device = source.numel(), self._accelerator
        self.wait_for_room(nbytes)
        if device is None:
            copy = source.clone()
        else:
            copy = device.allocate(nbytes, self._device)
            device.copy(source, copy)
        with self.finalizers, self.finalizers.lock:
            self.residency.count(copy.untyped_storage(), nbytes)
            self.residency.count_until_free(copy.untyped_storage())
        return copy

    def _note_unpacked(self, view: SavedView) -> None:
        record = view.record
        if view.held is None:
            record.pending -= not (view.is_unpacked or view.is_lent)
        view.state.is_unpacked = True  # under the lock: two threads may unpack one view, and it was pending once
        self._evict_if_unpacked(record)  # the record lets go of the memory, and the consumer holds it

    def load(self, view: SavedView) -> torch.Tensor:
        if os.getpid() != self._pid:
            raise StateError("a forked child has neither the staging nor the lanes of its parent: run forward in it")
        try:
            return self._load_once(view)
        except RuntimeError as error:
            if self._accelerator is None or not is_out_of_memory(error):
                raise
        # The allocator has memory again once streams are done with what the host has let go of (pytorch #189504).
        self._give_way()
        return self._load_once(view)

    def _give_way(self) -> None:
        """Drop what was read ahead, and wait until the device is done with what was let go of."""
        with self.finalizers, self.finalizers.lock:
            self.residency.drop_ahead()
            release = self.residency.releases.oldest
        while release is not None:
            release.wait()  # without the lock, or every other thread's hooks would wait for this device, too
            with self.finalizers, self.finalizers.lock:
                self.residency.releases.settle()
                release = self.residency.releases.oldest

    def _load_once(self, view: SavedView) -> torch.Tensor:
        record = view.record
        arrival = self._loaded(record).arrival
        with self.finalizers, self.finalizers.lock:
            data = arrival.join()  # every consumer waits for the copy, each in its own stream
            unmodified(data, arrival.version)  # an earlier consumer may have written into it
            if view.is_lent:
                self.residency.add_early(record)
            self._note_unpacked(view)
            record.micro_step.read_ahead(self.residency.prefetch, after=record.index)
        return data

    def _loaded(self, record: SavedStorage) -> Loaded:
        """Load a record, if it is not there; see [Note: Loads]."""
        try:
            while True:
                self.wait_for_room(self.residency.loading_bytes(record))
                with self.finalizers, self.finalizers.lock:
                    if record.loaded is not None:
                        return record.loaded
                    loading = record.loading or self.residency.begin_load(record)
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
                self.residency.end_load(record, loading, None)
            raise
        with self.finalizers, self.finalizers.lock:
            if store.keeps_bytes:
                self._stats.moving_s += time.perf_counter() - started_s
            self.residency.end_load(record, loading, loaded)
        return loaded

    def _evict_if_unpacked(self, record: SavedStorage) -> None:
        """Release loaded bytes that no view waits for: a second backward loads them again."""
        if record.pending == 0 and record.is_backed:
            self.residency.evict(record)

    # ---- for what is rematerialized -----------------------------------------------------------------------------

    def rematerialize(self, store: TensorStore[Any] | None) -> None:
        """Ask a store that knows what storages are made of before those that keep their bytes; None: none."""
        self.rematerialization = store
        self.residency.watched = self.stores if store is None else (store, *self.stores)

    def lend(self, held: SavedView | SavedCounted) -> SavedView | SavedCounted:
        twin = held.twin()
        if isinstance(held, SavedView):
            self._count_lent(held.record)
        else:
            held.memory.users += 1
            held.memory.lent += 1
        return twin

    def _count_lent(self, record: SavedStorage) -> None:
        record.views += 1
        record.lent += 1
        record.memory.lent += 1

    def hold(self, record: SavedStorage, *, leaves: bool = False) -> bool:
        is_wanted = is_held = False
        try:
            with self.finalizers, self.finalizers.lock:
                is_wanted = record.state is not RecordState.DROPPED
                if is_wanted:  # one user more, or it might be dropped meanwhile
                    self._count_lent(record)
            if is_wanted:
                self._loaded(record)
        finally:
            if is_wanted:
                is_held = self._end_hold(record, leaves=leaves)
        return is_held

    def _end_hold(self, record: SavedStorage, *, leaves: bool) -> bool:
        with self.finalizers, self.finalizers.lock:
            is_held = record.loaded is not None
            if record.loaded is not None:
                record.loaded = replace(record.loaded, stored=False)
            self.finalize(ViewGone(record, is_away=True, is_lent=True))
            if leaves and record.state is RecordState.LOADED:
                self.residency.evict(record)
        return is_held

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[None]:
        self.wait_for_room(nbytes)
        counted_bytes = 0
        try:
            with self.finalizers, self.finalizers.lock:
                self.residency.make_room(nbytes)
                counted_bytes = nbytes if self.residency.is_limited else 0
                self._stats.resident.add(counted_bytes)
            yield
        finally:
            with self.finalizers, self.finalizers.lock:
                self._stats.resident.add(-counted_bytes)

    def end_early(self) -> None:
        with self.finalizers, self.finalizers.lock:
            self.residency.end_early()

    def _read_doubts(self, *, wait: bool = False) -> None:
        """Act on what a device has answered of storages that were saved again."""
        while self._doubted and not self._is_capturing:
            with self.finalizers, self.finalizers.lock:
                if not self._doubted or not (wait or self._doubted[0][1].is_done):
                    return
                reference, answer = self._doubted.popleft()
            self._share_if_equal(reference, answer)  # without the lock: it may wait for the device

    def _share_if_equal(self, reference: weakref.ref[SavedView], answer: Answer) -> None:
        """Have a view that was saved later keep its bytes no longer, where they are those of its record."""
        view, is_equal = reference(), answer.read()
        if view is None:
            return
        with self.finalizers, self.finalizers.lock:
            record, held = view.record, view.held
            is_elsewhere = not record.is_kept and record.state is not RecordState.DROPPED
            if held is None or not (is_equal and is_elsewhere and view.holds(record.key)):
                self._stats.kept_bytes[CHANGED] += 0 if is_equal else record.nbytes
                return
            self._stats.deduplicated_bytes += nbytes_of(held)
            record.pending += not view.is_unpacked
            view.let_go()

    # ---- room, for forwards that run again and for ourselves ----------------------------------------------------

    def wait_for_room(self, nbytes: int, pinned: Collection[SavedStorage] = ()) -> bool:
        if self._doubted and self.residency.is_exceeded_by(nbytes):
            self._read_doubts(wait=True)  # they keep bytes that the budget cannot move
        while self.residency.may_wait:
            with self.finalizers, self.finalizers.lock:
                release = self.residency.free_room(nbytes, pinned)
            if release is None:
                break
            release.wait()  # without the lock, or every other thread's hooks would wait for this device, too
        return not self.residency.is_exceeded_by(nbytes)

    def count_again(self, tensor: torch.Tensor) -> None:
        """Count a tensor that a forward saves which runs again in backward, until it is free or backward is over."""
        if is_parameter(tensor) or not has_plain_storage(tensor):
            return
        self.wait_for_room(nbytes := held_bytes(tensor, self._device))
        with self.finalizers, self.finalizers.lock:
            self._recomputed.append(self.residency.count(tensor.untyped_storage(), nbytes))
            self.residency.count_until_free(tensor.untyped_storage())

    def end_recomputations(self) -> None:
        """Count no longer what backward has saved again: what others still hold of it, a buffer say, is theirs."""
        with self.finalizers, self.finalizers.lock:
            while self._recomputed:
                self.residency.leave(self._recomputed.pop())

    def limit_resident(self, nbytes: int | None, name: str = "") -> None:
        """Hold saved tensors in device memory within a budget from now on; see :meth:`Residency.limit`."""
        with self.finalizers, self.finalizers.lock:
            self.residency.limit(nbytes, name)

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
        for store in self.residency.watched:
            store.refuse_broken()

    def exclude(self, exclusion: Exclusion) -> None:
        """Keep what is excluded as it is from now on: it is neither offloaded nor rematerialized."""
        self._exclusion = exclusion

    def settle(self) -> None:
        """Act on every deferred finalizer, and let go of what finished copies still hold."""
        with self.finalizers, self.finalizers.lock:
            self.residency.releases.settle()
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
            self.residency.free(gone)
            return
        if isinstance(gone, CountedGone):
            gone.memory.lent -= gone.is_lent
            self._stats.saved.add(0 if gone.is_lent else -gone.memory.unsave())
            self.residency.leave(gone.memory)
            return
        record = gone.record
        record.views -= 1
        record.lent -= gone.is_lent
        record.memory.lent -= gone.is_lent
        record.pending -= gone.is_pending
        if record.views == record.lent and not gone.is_lent:
            self._stats.saved.add(-record.memory.unsave())
        if record.views == 0:
            self._forget(record)
        else:
            self._evict_if_unpacked(record)

    def _forget(self, record: SavedStorage) -> None:
        self.residency.remove(record)
        record.move(RecordState.DROPPED)
        record.loaded = record.origin = None  # a sample or a recording that holds the record would hold its bytes
        self._live_records -= 1
        if self.forward.by_key.get(record.key) is record:
            del self.forward.by_key[record.key]  # a later save would share bytes that are given up
        if record.ticket is not None:
            record.ticket.store.release(record.ticket)  # see [Note: Order of locks]
        record.micro_step.saved -= 1
        if record.index != NO_INDEX:
            self.learned_order = record.micro_step.remove(record.index) or self.learned_order


def _is_its_bytes(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a storage of its own, and no mark that the bytes there do not have."""
    return has_plain_storage(tensor) and not tensor.is_conj() and not tensor.is_neg()


def _others_read(owner: SavedStorage | CountedMemory) -> bool:
    """Return whether bytes that backward has just got are what another tensor is made of, or another reader's, too."""
    return owner.is_operand or (isinstance(owner, SavedStorage) and owner.loaded is not None)
