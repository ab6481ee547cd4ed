"""The tensor cache: autograd's pack and unpack (TBA section 3.2), with one record for each saved storage.

Knows autograd, storages and a store's contract; does not know DeepSpeed, files or staging.

[Note: Records] Every saved tensor becomes a ``SavedView``, the object that autograd holds in its place. Views of one
storage share a ``SavedStorage``, found by the stamps of storage and version counter and by the version: the storage is
written once, and every view is rebuilt from it. A record lives as long as one of its views.

[Note: Versions] Autograd does not compare version counters for hooked tensors, so unpack does, for every view, kept or
offloaded. A kept tensor is held as a detached alias: the tensor itself would close a reference cycle through its own
graph node.

[Note: Finalizers] A view's ``__del__`` may run anywhere, also in the middle of our own critical sections, so it only
leaves a note (``ds_tba/notes.py``).
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

from ds_tba.adaptive.policy import Always, Choice, Policy
from ds_tba.autograd.micro_step import MicroStep
from ds_tba.autograd.saved import (
    PassedThrough,
    Present,
    RecordState,
    SavedSmall,
    SavedStorage,
    SavedView,
    StorageKey,
    nbytes_of,
    unmodified,
)
from ds_tba.autograd.tensors import Eligibility, eligibility, storage_bytes
from ds_tba.device.accelerator import Clock
from ds_tba.errors import StateError
from ds_tba.storage.base import Store, Ticket
from ds_tba.storage.finalizers import FinalizerNotes
from ds_tba.telemetry.stats import CacheStats

_PRESENT = "_ds_tba_present"

# Kept as they are, outside the records: they have no plain storage, or none on the training device.
_UNTRACKED = frozenset({Eligibility.SUBCLASS, Eligibility.NOT_DENSE, Eligibility.NO_STORAGE, Eligibility.OTHER_DEVICE})

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


# What a finalizer leaves: a view of a record is gone (and was it pending), a small tensor of so many bytes is gone, or
# so many reloaded bytes are free again (as a negative number).
_Note = tuple[SavedStorage, bool] | tuple[None, int] | int


class TensorCache:
    """Moves saved tensors into a store during forward and back during backward.

    Args:
        stores: where eligible storages go in a micro-step without a policy of its own, in order of preference; without
            any, everything is kept and measured.
        device_type: the training device, such as ``"cuda"``.
        min_tensor_bytes: storages smaller than this are kept.
        wait_for_staging: wait for room in staging instead of keeping the tensor, likewise.
    """

    def __init__(
        self, stores: Sequence[Store[Any]], device_type: str, min_tensor_bytes: int, *, wait_for_staging: bool = False
    ) -> None:
        self.stats = CacheStats()
        self._stores = tuple(stores)
        self._device_type = device_type
        self._min_tensor_bytes = min_tensor_bytes
        self._usual_policy: Policy = Always(stores, wait=wait_for_staging)
        self._policy: Policy = self._usual_policy
        self._lock = threading.Lock()
        self._records: dict[StorageKey, SavedStorage] = {}
        self._notes: FinalizerNotes[_Note] = FinalizerNotes(self._lock, self._act_on)
        self._empties: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._micro_step = MicroStep()
        self._recomputed_bytes = 0
        self._clock: Clock | None = None
        self._moves: list[tuple[Any, Any]] = []
        self._learned: list[int] = []  # the order of first uses in the last backward that used all

    # ---- the contract with autograd -----------------------------------------------------------------------------

    @contextmanager
    def saving(
        self,
        policy: Policy | None = None,
        around: Callable[[Hooks], Hooks] | None = None,
        lead: Sequence[int] = (),
    ) -> Iterator[None]:
        """The forward of one micro-step: what autograd saves inside goes through the cache.

        Args:
            policy: where it goes.
            around: makes the hooks that autograd calls from ours, which they call.
            lead: see ``Plan.prefetch_lead``.
        """
        if not torch.is_grad_enabled():
            yield
            return
        with self._lock:
            self._notes.act()
            step = self._micro_step = MicroStep()
            step.lead = lead
            self._policy = policy or self._usual_policy
            self.stats.micro_steps += 1
        hooks: Hooks = (self.pack, partial(self._unpack, step))
        try:
            with saved_tensors_hooks(*(hooks if around is None else around(hooks))):
                yield
        finally:
            step.end_forward()

    def pack(self, tensor: torch.Tensor) -> PassedThrough | SavedSmall | SavedView:
        """Autograd's pack hook: the object to hold in place of ``tensor``."""
        self.stats.packed_tensors += 1
        why = self.eligibility_of(tensor)
        if why is Eligibility.PARAMETER:
            self.stats.passed_through_tensors += 1
            return PassedThrough(tensor)
        if why in _UNTRACKED:
            self.stats.kept_bytes[why.value] += nbytes_of(tensor)
            return PassedThrough(tensor)
        if why is Eligibility.SMALL:
            return SavedSmall(self, tensor)
        with self._lock:
            self._notes.act()
            record = self._record(tensor, why)
            offloaded = record.state is not RecordState.KEPT
            record.views += 1
            record.pending += offloaded
        self._notes.act_if_free()
        return SavedView(self, record, tensor, offloaded=offloaded)

    @staticmethod
    def unpack(held: PassedThrough | SavedSmall | SavedView) -> torch.Tensor:
        """Autograd's unpack hook: the tensor for which ``held`` stands.

        Raises:
            ActivationModifiedError: it was modified in place after it was saved.
            ActivationLostError: its bytes could not be read back.
            ActivationCorruptionError: the bytes read back are not the bytes written.
        """
        return held.restore()

    def eligibility_of(self, tensor: torch.Tensor) -> Eligibility:
        """Whether a tensor may leave device memory."""
        return eligibility(tensor, self._device_type, self._min_tensor_bytes)

    def _unpack(self, step: MicroStep, held: PassedThrough | SavedSmall | SavedView) -> torch.Tensor:
        """As :meth:`unpack`, for what was saved in ``step``."""
        tensor = held.restore()  # first of all: what is waited for goes before what is read ahead
        if step.is_asleep:
            with self._lock:
                self._notes.act()
                step.read_ahead(self._learned)
            self._notes.act_if_free()
        return tensor

    # ---- for the views ------------------------------------------------------------------------------------------

    def load(self, record: SavedStorage, *, first_time: bool) -> torch.Tensor:
        """The bytes of a record on its device (uint8, 1-D)."""
        with self._lock:
            self._notes.act()
            data = record.data if record.data is not None else self._reload(record)
            unmodified(data, record.data_version)
            if first_time:
                record.pending -= 1
            self._let_go_if_unpacked(record)
            if record.micro_step is not None:
                record.micro_step.read_ahead(self._learned, after=record.index)
        self._notes.act_if_free()
        return data

    def count_small(self, nbytes: int) -> None:
        """Count a small tensor that is kept."""
        with self._lock:
            self._notes.act()
            self.stats.kept_bytes[Eligibility.SMALL.value] += nbytes
            self.stats.saved.add(nbytes)
            self.stats.resident.add(nbytes)

    def small_freed(self, nbytes: int) -> None:
        """Note that a small tensor is gone. Safe in a finalizer; see [Note: Finalizers]."""
        self._notes.leave((None, nbytes))

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
            self.stats.resident.add(nbytes - self._recomputed_bytes)
            self._recomputed_bytes = nbytes
        self._notes.act_if_free()

    @property
    def live_records(self) -> int:
        """Saved storages that some graph still holds."""
        return len(self._records)

    # ---- under the lock -----------------------------------------------------------------------------------------

    def _record(self, tensor: torch.Tensor, why: Eligibility) -> SavedStorage:
        """The record of a tensor's storage at its present version, made and offloaded at first sight."""
        key = StorageKey.of(tensor)
        choice = self._policy.choose(key, key.nbytes)
        record = self._records.get(key)
        if record is not None:
            if record.state is not RecordState.KEPT:
                self.stats.deduplicated_bytes += nbytes_of(tensor)
            return record
        record = SavedStorage(key, tensor.device)
        self._place(record, tensor, why, choice)
        self._records[key] = record
        self.stats.saved.add(record.nbytes)
        return record

    def _place(self, record: SavedStorage, tensor: torch.Tensor, why: Eligibility, choice: Choice) -> None:
        reason = why.value
        if why is Eligibility.ELIGIBLE:
            reason = choice.reason
            for store in choice.stores:
                with self._timed():
                    taken = store.put(storage_bytes(tensor), wait=choice.wait)
                if isinstance(taken, Ticket):
                    record.ticket = taken
                    record.state = RecordState.OFFLOADED
                    record.micro_step = self._micro_step
                    record.index = self._micro_step.add(record)
                    record.present = self._count_until_freed(tensor.untyped_storage(), record.nbytes)
                    return
                reason = taken.value
        self.stats.kept_bytes[reason] += record.nbytes
        self.stats.resident.add(record.nbytes)

    def _reload(self, record: SavedStorage) -> torch.Tensor:
        if record.ticket is None:
            raise StateError(f"a saved storage '{record.state.value}' has no ticket; this is a bug in ds_tba")
        with self._timed():
            loaded = record.ticket.store.get(record.ticket, record.device)
            record.move(RecordState.RELOADED if loaded.stored else RecordState.FORWARDED)
            data = record.data = loaded.data
        record.data_version = data._version
        self._count_until_freed(data.untyped_storage(), record.nbytes)
        if record.micro_step is not None:
            record.micro_step.note_reload(record.index)
        return data

    @contextmanager
    def _timed(self) -> Iterator[None]:
        clock, started_s = self._clock, time.perf_counter()
        before = None if clock is None else clock.mark()
        yield
        self.stats.moving_s += time.perf_counter() - started_s
        if clock is not None:
            self._moves.append((before, clock.mark()))

    def _count_until_freed(self, storage: torch.UntypedStorage, nbytes: int) -> weakref.ref[Present]:
        present: Present | None = getattr(storage, _PRESENT, None)
        if present is None:
            present = Present(self, nbytes)
            setattr(storage, _PRESENT, present)
            self.stats.resident.add(nbytes)
        return weakref.ref(present)

    @staticmethod
    def _let_go_if_unpacked(record: SavedStorage) -> None:
        """A second backward reads again instead of holding the memory until then."""
        if record.pending == 0 and record.state is RecordState.RELOADED:
            record.move(RecordState.OFFLOADED)
            record.data = None

    def _act_on(self, note: _Note) -> None:
        if isinstance(note, int):
            self.stats.resident.add(note)
            return
        record, count = note
        if record is None:
            self.stats.saved.add(-count)
            self.stats.resident.add(-count)
            return
        record.views -= 1
        record.pending -= count
        if record.views == 0:
            self._forget(record)
        else:
            self._let_go_if_unpacked(record)

    def _forget(self, record: SavedStorage) -> None:
        present = record.present() if record.present is not None else None
        if record.state is RecordState.KEPT:
            self.stats.resident.add(-record.nbytes)
        elif present is not None:  # the user's own still, but no longer saved
            self.stats.resident.add(-present.take())
        record.move(RecordState.DROPPED)
        record.data = None
        self.stats.saved.add(-record.nbytes)
        if self._records.get(record.key) is record:
            del self._records[record.key]
        if record.ticket is not None:
            record.ticket.store.release(record.ticket)
        step, record.micro_step = record.micro_step, None
        if step is not None:
            self._learned = step.remove(record.index) or self._learned
