"""What autograd holds in place of saved tensors, and the record that views of one storage share.

Knows tensors and tickets; does not know where storages go. The cache changes records, under its lock.
"""

from __future__ import annotations

import weakref
from enum import Enum
from typing import NamedTuple, Protocol

import torch

from ds_tba.autograd.micro_step import MicroStep
from ds_tba.autograd.tensors import Stamp, VersionWitness, ViewSpec, kept, lineage_of, stamp_of
from ds_tba.errors import ActivationModifiedError, StateError
from ds_tba.states import StateMachine
from ds_tba.storage.base import Ticket


class Keeper(Protocol):
    """The cache, as what autograd holds knows it."""

    def load(self, record: SavedStorage, *, first_time: bool) -> torch.Tensor: ...
    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def count_small(self, nbytes: int) -> None: ...
    def small_freed(self, nbytes: int) -> None: ...
    def drop(self, record: SavedStorage, *, pending: bool) -> None: ...
    def freed(self, nbytes: int) -> None: ...


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


class SavedStorage(StateMachine):
    """One storage saved for backward. Changed only under the cache's lock."""

    noun = "a saved storage"
    moves = _MOVES

    __slots__ = ("data", "data_version", "device", "index", "key", "micro_step", "nbytes", "pending", "present",
                 "state", "ticket", "views")  # fmt: skip

    def __init__(self, key: StorageKey, device: torch.device) -> None:
        self.key = key
        self.nbytes = key.nbytes
        self.device = device
        self.state = RecordState.KEPT
        self.ticket: Ticket | None = None
        self.data: torch.Tensor | None = None
        self.data_version = 0
        self.present: weakref.ref[Present] | None = None  # what lies on the storage that was saved
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
        return self._tensor if self._version < 0 else unmodified(self._tensor, self._version)


class SavedSmall:
    """A tensor too small to move, kept; without a record, because most saved tensors are of this kind."""

    __slots__ = ("_alias", "_cache", "_nbytes", "_version")

    def __init__(self, cache: Keeper, tensor: torch.Tensor) -> None:
        self._cache = cache
        self._version = tensor._version
        self._alias = kept(tensor)
        self._nbytes = tensor.untyped_storage().nbytes()
        cache.count_small(self._nbytes)

    def restore(self) -> torch.Tensor:
        """The tensor, if it was not modified since."""
        return unmodified(self._alias, self._version)

    def __del__(self) -> None:
        self._cache.small_freed(self._nbytes)


class SavedView:
    """What autograd holds in place of one saved tensor."""

    __slots__ = ("_alias", "_cache", "_spec", "_unpacked", "_witness", "record")

    def __init__(self, cache: Keeper, record: SavedStorage, tensor: torch.Tensor, *, offloaded: bool) -> None:
        self._cache = cache
        self.record = record
        self._unpacked = False
        self._alias = None if offloaded else kept(tensor)
        self._spec = ViewSpec.of(tensor) if offloaded else None
        self._witness = VersionWitness(tensor, cache.empty_like(tensor)) if offloaded else None

    @property
    def is_offloaded(self) -> bool:
        """Whether the store has its bytes."""
        return self._alias is None

    def restore(self) -> torch.Tensor:
        """The saved tensor, if it was not modified since."""
        if self._alias is not None:
            return unmodified(self._alias, self.record.key.version)
        if self._witness is None or self._spec is None:
            raise StateError("a saved view has neither bytes nor a way to them; this is a bug in ds_tba")
        if self._witness.current != self._witness.version:
            raise _modified(self._spec.shape, self._spec.dtype, self._witness.version, self._witness.current)
        data = self._cache.load(self.record, first_time=not self._unpacked)
        self._unpacked = True
        return self._spec.rebuild(data)

    def __del__(self) -> None:
        self._cache.drop(self.record, pending=not self._unpacked and self._alias is None)


class Present:
    """Lies on a storage that the store has, or that came back from it, and tells when its memory is free."""

    __slots__ = ("__weakref__", "_bytes", "_cache")

    def __init__(self, cache: Keeper, nbytes: int) -> None:
        self._cache = cache
        self._bytes = [nbytes]

    def take(self) -> int:
        """The bytes that are still counted; from now on none. Whoever comes first gets them."""
        try:
            return self._bytes.pop()
        except IndexError:
            return 0

    def __del__(self) -> None:
        self._cache.freed(self.take())


def nbytes_of(tensor: torch.Tensor) -> int:
    """Of its elements."""
    return tensor.numel() * tensor.element_size()


def unmodified(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """The tensor, if it is at this version.

    Raises:
        ActivationModifiedError: it is not.
    """
    if tensor._version != version:
        raise _modified(tensor.shape, tensor.dtype, version, tensor._version)
    return tensor


def _modified(shape: torch.Size, dtype: torch.dtype, saved: int, now: int) -> ActivationModifiedError:
    return ActivationModifiedError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a tensor of shape {list(shape)} and {dtype} is at version {now}; expected version {saved} instead. "
        "Hint: find the operation with torch.autograd.set_detect_anomaly(True)."
    )
