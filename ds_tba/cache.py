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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from ds_tba.errors import ActivationModifiedError, StateError
from ds_tba.notes import FinalizerNotes
from ds_tba.states import StateMachine
from ds_tba.store.base import Store, Ticket
from ds_tba.telemetry.stats import CacheStats
from ds_tba.tensors import (
    Eligibility,
    Stamp,
    VersionWitness,
    ViewSpec,
    eligibility,
    kept,
    lineage_of,
    stamp_of,
    storage_bytes,
)

# Kept as they are, outside the records: they have no plain storage, or none on the training device.
_UNTRACKED = frozenset({Eligibility.SUBCLASS, Eligibility.NOT_DENSE, Eligibility.NO_STORAGE, Eligibility.OTHER_DEVICE})


class RecordState(Enum):
    """Where a saved storage is, as the cache sees it."""

    KEPT = "kept in device memory"
    OFFLOADED = "in the store"
    RELOADED = "in device memory again, and in the store"
    FORWARDED = "in device memory again, and nowhere else"
    DROPPED = "given up"


_R = RecordState
_MOVES: dict[RecordState, tuple[RecordState, ...]] = {
    _R.KEPT: (_R.DROPPED,),
    _R.OFFLOADED: (_R.RELOADED, _R.FORWARDED, _R.DROPPED),
    _R.RELOADED: (_R.OFFLOADED, _R.DROPPED),
    _R.FORWARDED: (_R.DROPPED,),
    _R.DROPPED: (),
}


class StorageKey(NamedTuple):
    """Two saved tensors with equal keys have the same bytes."""

    storage: Stamp
    lineage: Stamp
    version: int
    nbytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageKey:
        storage = tensor.untyped_storage()
        return cls(stamp_of(storage), lineage_of(tensor), tensor._version, storage.nbytes())


class MicroStep:
    """The offloaded records of one forward in pack order, and how far prefetching has come in its backward."""

    def __init__(self) -> None:
        self.records: list[SavedStorage | None] = []
        self.order: list[int] = []
        self.position: dict[int, int] = {}
        self.cursor = 0
        self.unpacked: list[int] = []
        self.live = 0

    def add(self, record: SavedStorage) -> int:
        """Append a record; its index."""
        self.records.append(record)
        self.live += 1
        return len(self.records) - 1


class SavedStorage(StateMachine):
    """One storage saved for backward. Changed only under the cache's lock."""

    noun = "a saved storage"
    moves = _MOVES

    __slots__ = ("data", "data_version", "device", "index", "key", "micro_step", "nbytes", "pending", "state", "ticket",
                 "views")  # fmt: skip

    def __init__(self, key: StorageKey, device: torch.device) -> None:
        self.key = key
        self.nbytes = key.nbytes
        self.device = device
        self.state = RecordState.KEPT
        self.ticket: Ticket | None = None
        self.data: torch.Tensor | None = None
        self.data_version = 0
        self.micro_step: MicroStep | None = None
        self.index = 0
        self.views = 0  # alive
        self.pending = 0  # alive and not yet unpacked


class PassedThrough:
    """A parameter, or a view of one, in autograd's hands as it is: its bytes are not ours to keep or move."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = -1 if tensor.is_inference() else tensor._version
        # The parameter itself must be held: under ZeRO-3 backward reads what was gathered into it again.
        self._tensor = kept(tensor)

    def restore(self) -> torch.Tensor:
        """The tensor, if it was not modified since."""
        return self._tensor if self._version < 0 else _unmodified(self._tensor, self._version)


class SavedSmall:
    """A tensor too small to move, kept; without a record, because most saved tensors are of this kind."""

    __slots__ = ("_alias", "_cache", "_nbytes", "_version")

    def __init__(self, cache: TensorCache, tensor: torch.Tensor) -> None:
        self._cache = cache
        self._version = tensor._version
        self._alias = kept(tensor)
        self._nbytes = tensor.untyped_storage().nbytes()
        cache.count_small(self._nbytes)

    def restore(self) -> torch.Tensor:
        """The tensor, if it was not modified since."""
        return _unmodified(self._alias, self._version)

    def __del__(self) -> None:
        self._cache.small_freed(self._nbytes)


class SavedView:
    """What autograd holds in place of one saved tensor."""

    __slots__ = ("_alias", "_cache", "_spec", "_unpacked", "_witness", "record")

    def __init__(self, cache: TensorCache, record: SavedStorage, tensor: torch.Tensor, *, offloaded: bool) -> None:
        self._cache = cache
        self.record = record
        self._unpacked = False
        self._alias = None if offloaded else kept(tensor)
        self._spec = ViewSpec.of(tensor) if offloaded else None
        self._witness = VersionWitness(tensor, cache.empty_like(tensor)) if offloaded else None

    def restore(self) -> torch.Tensor:
        """The saved tensor, if it was not modified since."""
        if self._alias is not None:
            return _unmodified(self._alias, self.record.key.version)
        if self._witness is None or self._spec is None:
            raise StateError("a saved view has neither bytes nor a way to them; this is a bug in ds_tba")
        if self._witness.current != self._witness.version:
            raise _modified(self._spec.shape, self._spec.dtype, self._witness.version, self._witness.current)
        data = self._cache.load(self.record, first_time=not self._unpacked)
        self._unpacked = True
        return self._spec.rebuild(data)

    def __del__(self) -> None:
        self._cache.drop(self.record, pending=not self._unpacked and self._alias is None)


# What a finalizer leaves: a view of a record is gone (and was it pending), a small tensor of so many bytes is gone, or
# so many reloaded bytes are free again (as a negative number).
_Note = tuple[SavedStorage, bool] | tuple[None, int] | int


class _Reloaded:
    """Lies on a storage that was brought back, and tells when its memory is free again."""

    __slots__ = ("_cache", "_nbytes")

    def __init__(self, cache: TensorCache, nbytes: int) -> None:
        self._cache = cache
        self._nbytes = nbytes

    def __del__(self) -> None:
        self._cache.freed(self._nbytes)


class TensorCache:
    """Moves saved tensors into a store during forward and back during backward.

    Args:
        stores: where eligible storages go, in order of preference; without any, everything is kept and measured.
        device_type: the training device, such as ``"cuda"``.
        min_tensor_bytes: storages smaller than this are kept.
        wait_for_staging: wait for room in staging instead of keeping the tensor.
    """

    def __init__(
        self, stores: Sequence[Store[Any]], device_type: str, min_tensor_bytes: int, *, wait_for_staging: bool = False
    ) -> None:
        self.stats = CacheStats()
        self._stores = tuple(stores)
        self._device_type = device_type
        self._min_tensor_bytes = min_tensor_bytes
        self._wait = wait_for_staging
        self._lock = threading.Lock()
        self._records: dict[StorageKey, SavedStorage] = {}
        self._notes: FinalizerNotes[_Note] = FinalizerNotes(self._lock, self._act_on)
        self._empties: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._micro_step = MicroStep()
        self._learned: tuple[int, list[int]] = (0, [])
        self._hooks = (self.pack, self.unpack)

    # ---- the contract with autograd -----------------------------------------------------------------------------

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The forward of one micro-step: what autograd saves inside goes through the cache."""
        if not torch.is_grad_enabled():
            yield
            return
        with self._lock:
            self._notes.act()
            self._micro_step = MicroStep()
            self.stats.micro_steps += 1
        with saved_tensors_hooks(*self._hooks):
            yield

    def pack(self, tensor: torch.Tensor) -> PassedThrough | SavedSmall | SavedView:
        """Autograd's pack hook: the object to hold in place of ``tensor``."""
        self.stats.packed_tensors += 1
        why = eligibility(tensor, self._device_type, self._min_tensor_bytes)
        if why is Eligibility.PARAMETER:
            self.stats.passed_through_tensors += 1
            return PassedThrough(tensor)
        if why in _UNTRACKED:
            self.stats.kept_bytes[why.value] += _nbytes(tensor)
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

    # ---- for the views ------------------------------------------------------------------------------------------

    def load(self, record: SavedStorage, *, first_time: bool) -> torch.Tensor:
        """The bytes of a record on its device (uint8, 1-D)."""
        with self._lock:
            self._notes.act()
            data = record.data if record.data is not None else self._reload(record)
            _unmodified(data, record.data_version)
            if first_time:
                record.pending -= 1
            self._let_go_if_unpacked(record)
            self._prefetch_after(record)
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
        """Note that reloaded memory is free again. Safe in a finalizer; see [Note: Finalizers]."""
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

    @property
    def live_records(self) -> int:
        """Saved storages that some graph still holds."""
        return len(self._records)

    # ---- under the lock -----------------------------------------------------------------------------------------

    def _record(self, tensor: torch.Tensor, why: Eligibility) -> SavedStorage:
        """The record of a tensor's storage at its present version, made and offloaded at first sight."""
        key = StorageKey.of(tensor)
        record = self._records.get(key)
        if record is not None:
            if record.state is not RecordState.KEPT:
                self.stats.deduplicated_bytes += _nbytes(tensor)
            return record
        record = SavedStorage(key, tensor.device)
        self._place(record, tensor, why)
        self._records[key] = record
        self.stats.saved.add(record.nbytes)
        return record

    def _place(self, record: SavedStorage, tensor: torch.Tensor, why: Eligibility) -> None:
        reason = why.value
        if why is Eligibility.ELIGIBLE:
            reason = "placement keep"
            for store in self._stores:
                taken = store.put(storage_bytes(tensor), wait=self._wait)
                if isinstance(taken, Ticket):
                    record.ticket = taken
                    record.state = RecordState.OFFLOADED
                    record.micro_step = self._micro_step
                    record.index = self._micro_step.add(record)
                    return
                reason = taken.value
        self.stats.kept_bytes[reason] += record.nbytes
        self.stats.resident.add(record.nbytes)

    def _reload(self, record: SavedStorage) -> torch.Tensor:
        if record.ticket is None:
            raise StateError(f"a saved storage '{record.state.value}' has no ticket; this is a bug in ds_tba")
        loaded = record.ticket.store.get(record.ticket, record.device)
        record.move(RecordState.RELOADED if loaded.stored else RecordState.FORWARDED)
        data = record.data = loaded.data
        record.data_version = data._version
        self.stats.resident.add(record.nbytes)
        data.untyped_storage()._ds_tba_reloaded = _Reloaded(self, record.nbytes)  # type: ignore[attr-defined]
        if record.micro_step is not None:
            record.micro_step.unpacked.append(record.index)
        return data

    @staticmethod
    def _let_go_if_unpacked(record: SavedStorage) -> None:
        """A second backward reads again instead of holding the memory until then."""
        if record.pending == 0 and record.state is RecordState.RELOADED:
            record.move(RecordState.OFFLOADED)
            record.data = None

    def _prefetch_after(self, record: SavedStorage) -> None:
        """Start reading what backward will want next: [Note: Records] in the order learned, or in reverse."""
        step = record.micro_step
        if step is None:
            return
        if not step.order:
            learned_for, order = self._learned
            count = len(step.records)
            step.order = order if learned_for == count else list(range(count - 1, -1, -1))
            step.position = {index: place for place, index in enumerate(step.order)}
        step.cursor = max(step.cursor, step.position.get(record.index, 0) + 1)
        while step.cursor < len(step.order):
            ahead = step.records[step.order[step.cursor]]
            wanted = ahead is not None and ahead.data is None and ahead.pending > 0
            ticket = ahead.ticket if ahead is not None and wanted else None
            if ticket is not None and not ticket.store.prefetch(ticket):
                return
            step.cursor += 1

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
        if record.state is RecordState.KEPT:
            self.stats.resident.add(-record.nbytes)
        record.move(RecordState.DROPPED)
        record.data = None
        self.stats.saved.add(-record.nbytes)
        if self._records.get(record.key) is record:
            del self._records[record.key]
        if record.ticket is not None:
            record.ticket.store.release(record.ticket)
        step, record.micro_step = record.micro_step, None
        if step is not None:
            step.records[record.index] = None
            step.live -= 1
            if step.live == 0 and len(step.unpacked) == len(step.records):
                self._learned = (len(step.records), step.unpacked)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _unmodified(tensor: torch.Tensor, version: int) -> torch.Tensor:
    if tensor._version != version:
        raise _modified(tensor.shape, tensor.dtype, version, tensor._version)
    return tensor


def _modified(shape: torch.Size, dtype: torch.dtype, saved: int, now: int) -> ActivationModifiedError:
    return ActivationModifiedError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a tensor of shape {list(shape)} and {dtype} is at version {now}; expected version {saved} instead. "
        "Hint: find the operation with torch.autograd.set_detect_anomaly(True)."
    )
