"""The tensor cache: autograd's pack and unpack (TBA section 3.2), with one record for each saved storage.

Knows autograd, storages and a store's contract; does not know DeepSpeed, files or staging. ``budget.py`` holds what
is in device memory within its bound.

[Note: Records] Every saved tensor becomes a ``SavedView``, the object that autograd holds in its place. Views of one
storage share a ``SavedStorage``, found by the stamps of storage and version counter and by the version: the storage is
written once, and every view is rebuilt from it. A record lives as long as one of its views. Records are shared within
one forward only: bytes that change without a version bump between two forwards (a buffer that numpy refills) are saved
again.

[Note: Versions] Autograd does not compare version counters for hooked tensors, so unpack does, for every view, kept or
offloaded. A kept tensor is held as a detached alias: the tensor itself would close a reference cycle through its own
graph node.

[Note: Finalizers] A view's ``__del__`` may run anywhere, also in the middle of our own critical sections, so it only
leaves a note (``ds_tba/storage/finalizers.py``).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ds_tba.autograd.budget import Resident
from ds_tba.autograd.saved import (
    NO_INDEX,
    Hooks,
    MicroStep,
    PassedThrough,
    RecordState,
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
    keep_originals,
    storage_bytes,
)
from ds_tba.device.accelerator import Accelerator, Arrival, Clock
from ds_tba.errors import StateError
from ds_tba.storage.base import Always, Choice, Policy, Refusal, Store, Ticket
from ds_tba.storage.finalizers import DeferredFinalizers
from ds_tba.telemetry.stats import CacheStats

# Passed through: they hold no memory of the training device.
_FOREIGN = frozenset({Eligibility.NO_STORAGE, Eligibility.OTHER_DEVICE})

# What a finalizer leaves: a view of a record is gone (and was it pending), a small tensor of so many bytes is gone, or
# so many reloaded bytes are free again (as a negative number).
_Note = tuple[SavedStorage, bool] | tuple[ResidencyGuard, int] | int


class TensorCache:
    """Moves saved tensors into a store during forward and back during backward.

    Args:
        stores: where eligible storages go in a micro-step without a policy of its own, in order of preference; without
            any, everything is kept and measured.
        device: the training device, with its index.
        min_tensor_bytes: storages smaller than this are kept.
        wait_for_staging: wait for room in staging instead of keeping the tensor, likewise.
        accelerator: of that device, where it is asynchronous: streams matter then, and what is read ahead takes device
            memory before backward asks for it.
    """

    def __init__(
        self,
        stores: Sequence[Store[Any]],
        device: torch.device | str,
        min_tensor_bytes: int,
        *,
        wait_for_staging: bool = False,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.stats = CacheStats()
        self._stores = tuple(stores)
        self._device = torch.device(device)
        self._min_tensor_bytes = min_tensor_bytes
        self._originals = keep_originals()
        self._usual_policy: Policy = Always(stores, wait=wait_for_staging)
        self._policy: Policy = self._usual_policy
        self._lock = threading.Lock()
        self._records: dict[StorageKey, SavedStorage] = {}  # of this forward
        self._live_records = 0
        self._notes: DeferredFinalizers[_Note] = DeferredFinalizers(self._lock, self._act_on)
        self._empties: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._micro_step = MicroStep()
        self._recomputed_bytes = 0
        self._clock: Clock | None = None
        self._moves: list[tuple[Any, Any]] = []
        self._learned: list[int] = []  # the order of first uses in the last backward that used all
        self._resident = Resident(self.stats.resident, self._stores, self._put, self._notes.act, self, accelerator)

    # ---- the contract with autograd -----------------------------------------------------------------------------

    @contextmanager
    def saving(
        self,
        policy: Policy | None = None,
        around: Callable[[Hooks], Hooks] | None = None,
        lead: Sequence[int] = (),
        *,
        continues: bool = False,
    ) -> Iterator[None]:
        """A forward: what autograd saves inside goes through the cache.

        Args:
            policy: where it goes.
            around: makes the hooks that autograd calls from ours, which they call.
            lead: see ``Plan.prefetch_lead``.
            continues: it belongs to the micro-step of the last forward; see [Note: Micro-steps].
        """
        if not torch.is_grad_enabled():
            yield
            return
        with self._lock:
            self._notes.act()
            if not continues:
                self._micro_step = MicroStep()
                self.stats.micro_steps += 1
            step = self._micro_step
            step.begin_forward()
            step.lead = lead
            self._records = {}
            self._policy = policy or self._usual_policy
        hooks: Hooks = (self.pack, partial(self._unpack, step))
        try:
            with saved_tensors_hooks(*(hooks if around is None else around(hooks))):
                yield
        finally:
            step.end_forward()

    @property
    def is_waiting_for_backward(self) -> bool:
        """Whether what the last forward saved is alive, and nothing of it was unpacked."""
        with self._lock:
            self._notes.act()
            return self._micro_step.is_waiting

    def end_micro_step(self) -> None:
        """The micro-step is over, whatever is still saved: the next forward begins another."""
        with self._lock:
            self._notes.act()
            self._micro_step = MicroStep()
        self._notes.act_if_free()

    def pack(self, tensor: torch.Tensor) -> PassedThrough | SavedCounted | SavedView:
        """Autograd's pack hook: the object to hold in place of ``tensor``."""
        self.stats.packed_tensors += 1
        why = self.eligibility_of(tensor)
        if why is Eligibility.PARAMETER:
            self.stats.passed_through_tensors += 1
            return PassedThrough(tensor)
        if why in _FOREIGN:
            self.stats.kept_bytes[why.value] += nbytes_of(tensor)
            return PassedThrough(tensor)
        if why is not Eligibility.ELIGIBLE:
            small = why is Eligibility.SMALL
            nbytes = tensor.untyped_storage().nbytes() if small else held_bytes(tensor, self._device)
            return SavedCounted(self, tensor, nbytes, why.value)
        with self._lock:
            self._notes.act()
            record = self._record(tensor)
            offloaded = record.state is not RecordState.KEPT
            record.views += 1
            record.pending += offloaded
        self._notes.act_if_free()
        view = SavedView(self, record, tensor, offloaded=offloaded)
        if not offloaded and self._resident.is_bounded:
            record.kept_views.append(weakref.ref(view))
        return view

    @staticmethod
    def unpack(held: PassedThrough | SavedCounted | SavedView) -> torch.Tensor:
        """Autograd's unpack hook: the tensor for which ``held`` stands.

        Raises:
            ActivationModifiedError: it was modified in place after it was saved.
            ActivationLostError: its bytes could not be read back.
            ActivationCorruptionError: the bytes read back are not the bytes written.
        """
        return held.restore()

    def eligibility_of(self, tensor: torch.Tensor) -> Eligibility:
        """Whether a tensor may leave device memory."""
        if self._stores and torch._C._len_torch_dispatch_stack() and is_under_a_mode():
            return Eligibility.PARAMETER if is_parameter(tensor) else Eligibility.UNDER_A_MODE
        return eligibility(tensor, self._device, self._min_tensor_bytes)

    def _unpack(self, step: MicroStep, held: PassedThrough | SavedCounted | SavedView) -> torch.Tensor:
        """As :meth:`unpack`, for what was saved in ``step``."""
        tensor = held.restore()  # first of all: what is waited for goes before what is read ahead
        self._originals.note(tensor, is_held=tensor is held.held)
        if step.is_asleep:
            with self._lock:
                self._notes.act()
                self._read_ahead(step)
            self._notes.act_if_free()
        return tensor

    # ---- for the views ------------------------------------------------------------------------------------------

    def load(self, record: SavedStorage, *, first_time: bool) -> torch.Tensor:
        """The bytes of a record on its device (uint8, 1-D), for the calling thread's current stream."""
        with self._lock:
            self._notes.act()
            arrival = record.arrival or self._reload(record)
            data = arrival.join()  # every consumer waits for the copy, each in its own stream
            unmodified(data, record.data_version)
            if first_time:
                record.pending -= 1
            self._let_go_if_unpacked(record)
            if record.micro_step is not None:
                self._read_ahead(record.micro_step, after=record.index)
        self._notes.act_if_free()
        return data

    def count_kept(self, tensor: torch.Tensor, nbytes: int, reason: str) -> ResidencyGuard:
        """Count a tensor that is kept, without a record, as ``nbytes`` of its storage."""
        with self._lock:
            self._notes.act()
            self._resident.make_room(nbytes)
            self.stats.kept_bytes[reason] += nbytes
            self.stats.saved.add(nbytes)
            present = self._resident.count(tensor.untyped_storage() if has_plain_storage(tensor) else None, nbytes)
        self._notes.act_if_free()
        return present

    def kept_freed(self, present: ResidencyGuard, nbytes: int) -> None:
        """Note that a tensor without a record is gone. Safe in a finalizer; see [Note: Finalizers]."""
        self._notes.leave((present, nbytes))

    def drop(self, record: SavedStorage, *, pending: bool) -> None:
        """Note that a view of a record is gone. Safe in a finalizer; see [Note: Finalizers]."""
        self._notes.leave((record, pending))

    def freed(self, nbytes: int) -> None:
        """Note that the memory of what the store has is free. Safe in a finalizer; see [Note: Finalizers]."""
        self._notes.leave(-nbytes)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An empty tensor of the same dtype and device, for version witnesses."""
        key = (tensor.dtype, tensor.device)
        empty = self._empties.get(key)
        if empty is None:
            empty = self._empties[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty

    # ---- for the offloader --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Act on every note that finalizers have left, and let go of what copies that are done still hold."""
        with self._lock:
            self._notes.act()
        for store in self._stores:
            store.settle()
        self._notes.act_if_free()

    def time_moves(self, clock: Clock | None) -> None:
        """Mark when storages are moved and come back (:meth:`take_moves` must be called now and then), or no longer."""
        self._clock = clock

    def take_moves(self) -> list[tuple[Any, Any]]:
        """Marks before and after each move since the last time."""
        with self._lock:
            moves, self._moves = self._moves, []
        return moves

    def forget_order(self) -> None:
        """Forget in which order backward wanted what was moved: from now on other storages are."""
        with self._lock:
            self._learned = []

    def note_recomputation(self, nbytes: int) -> None:
        """Count what a block's recomputation holds from now on, in place of what another's did."""
        with self._lock:
            self._notes.act()
            self.stats.resident.add(-self._recomputed_bytes)
            self._recomputed_bytes = 0
            self._resident.make_room(nbytes)
            self.stats.resident.add(nbytes)
            self._recomputed_bytes = nbytes
        self._notes.act_if_free()

    def limit_resident(self, nbytes: int | None, name: str = "") -> None:
        """Hold saved tensors in device memory within a bound from now on; see :meth:`Resident.limit`."""
        with self._lock:
            self._resident.limit(nbytes, name)

    @property
    def live_records(self) -> int:
        """Saved storages that some graph still holds."""
        return self._live_records

    # ---- under the lock -----------------------------------------------------------------------------------------

    def _record(self, tensor: torch.Tensor) -> SavedStorage:
        """The record of a tensor's storage at its present version, made and offloaded at first sight."""
        key = StorageKey.of(tensor)
        choice = self._policy.choose(key, key.nbytes)
        record = self._records.get(key)
        if record is not None:
            if record.state is not RecordState.KEPT:
                self.stats.deduplicated_bytes += nbytes_of(tensor)
            return record
        self._resident.make_room(key.nbytes)
        record = SavedStorage(key, tensor.device)
        self._place(record, tensor, choice)
        self._records[key] = record
        self._live_records += 1
        record.micro_step = self._micro_step
        record.micro_step.saved += 1
        self.stats.saved.add(record.nbytes)
        return record

    def _place(self, record: SavedStorage, tensor: torch.Tensor, choice: Choice) -> None:
        reason = choice.reason
        for store in choice.stores:
            taken = self._put(store, tensor, wait=choice.wait)
            if isinstance(taken, Ticket):
                record.ticket = taken
                record.state = RecordState.OFFLOADED
                record.index = self._micro_step.add(record)
                self._resident.add_moved(record, tensor.untyped_storage())
                return
            reason = taken.value
        self.stats.kept_bytes[reason] += record.nbytes
        self._resident.add_kept(record, tensor.untyped_storage())

    def _put(self, store: Store[Any], tensor: torch.Tensor, *, wait: bool = True) -> Ticket | Refusal:
        with self._timed():
            taken: Ticket | Refusal = store.put(storage_bytes(tensor), wait=wait)
        return taken

    def _reload(self, record: SavedStorage) -> Arrival:
        if record.ticket is None:
            raise StateError(f"a saved storage '{record.state.value}' has no ticket; this is a bug in ds_tba")
        with self._resident.bringing_back(record, record.ticket), self._timed():
            loaded = record.ticket.store.get(record.ticket, record.device)
            record.move(RecordState.RELOADED if loaded.stored else RecordState.FORWARDED)
            record.arrival = loaded.arrival
            data = loaded.arrival.join()
        record.data_version = data._version
        self._resident.add_reloaded(record, data)
        if record.micro_step is not None and record.index != NO_INDEX:
            record.micro_step.note_reload(record.index)
        return loaded.arrival

    def _read_ahead(self, step: MicroStep, after: int | None = None) -> None:
        step.read_ahead(self._learned, self._resident.prefetch, after)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        clock, started_s = self._clock, time.perf_counter()
        before = None if clock is None else clock.mark()
        yield
        self.stats.moving_s += time.perf_counter() - started_s
        if clock is not None:
            self._moves.append((before, clock.mark()))

    def _let_go_if_unpacked(self, record: SavedStorage) -> None:
        """A second backward reads again instead of holding the memory until then."""
        if record.pending == 0 and record.state is RecordState.RELOADED:
            self._resident.let_go(record)

    def _act_on(self, note: _Note) -> None:
        if isinstance(note, int):
            self.stats.resident.add(note)
            return
        record, count = note
        if isinstance(record, ResidencyGuard):
            self.stats.saved.add(-count)
            self.stats.resident.add(-record.leave())
            return
        record.views -= 1
        record.pending -= count
        if record.views == 0:
            self._forget(record)
        else:
            self._let_go_if_unpacked(record)

    def _forget(self, record: SavedStorage) -> None:
        self._resident.remove(record)
        record.move(RecordState.DROPPED)
        record.arrival = None
        self.stats.saved.add(-record.nbytes)
        self._live_records -= 1
        if self._records.get(record.key) is record:
            del self._records[record.key]
        if record.ticket is not None:
            record.ticket.store.release(record.ticket)
        step, record.micro_step = record.micro_step, None
        if step is not None:
            step.saved -= 1
            if record.index != NO_INDEX:
                self._learned = step.remove(record.index) or self._learned
