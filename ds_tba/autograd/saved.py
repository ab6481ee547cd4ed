"""What autograd holds in place of a saved tensor, and where the bytes of the storage behind it are.

Sees tensors, tickets and versions; cannot see where storages go, nor why: the cache changes records, under its lock.

[Note: Versions] Autograd does not compare version counters for hooked tensors, so ``restore`` does, for every view,
kept or moved. A kept tensor is held as a detached alias: the tensor itself would close a reference cycle through its
own graph node.

[Note: Finalizers] A view's ``__del__`` may run anywhere: in any thread, and also while its own thread holds the lock,
because every allocation inside a critical section may start the garbage collector. So it neither waits for the lock nor
takes it twice; it defers itself (``ds_tba/storage/finalizers.py``). Whoever takes the lock acts on deferred finalizers
first, so that their memory is free, and after letting go of it acts on those that found the lock taken.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch

from ds_tba.autograd.prefetch import MicroStep
from ds_tba.autograd.tensors import Stamp, VersionWitness, ViewSpec, kept, lineage_of, stamp_of
from ds_tba.device.accelerator import Arrival
from ds_tba.errors import ActivationModifiedError
from ds_tba.storage.base import StateMachine, Ticket
from ds_tba.storage.finalizers import DeferredFinalizers

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Autograd's pack and unpack."""

NO_INDEX = -1  # of a record that was not moved when it was saved


class Keeper(ABC):
    """What the objects below hold of the cache that made them.

    Attributes:
        lock: of everything that the cache changes. Not reentrant on purpose: a finalizer that found it free in the
            middle of a critical section of its own thread would change what that section is changing.
        finalizers: deferred until somebody has the lock; see [Note: Finalizers].
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.finalizers: DeferredFinalizers[Finalized] = DeferredFinalizers(self.lock, self._finalize)

    @abstractmethod
    def load(self, record: SavedStorage, *, first_time: bool, is_lent: bool) -> torch.Tensor: ...
    @abstractmethod
    def count_kept(self, tensor: torch.Tensor, nbytes: int, reason: str) -> ResidencyGuard: ...
    @abstractmethod
    def _finalize(self, finalized: Finalized) -> None: ...


# ---- the records ----------------------------------------------------------------------------------------------------


class RecordState(Enum):
    """Where a saved storage is, as the cache sees it."""

    KEPT = "kept in device memory"
    OFFLOADED = "in the store"
    AHEAD = "in the store, and asked for ahead of backward"
    ABSENT = "to be made again"
    MADE = "made again, in device memory"
    RELOADED = "in device memory again, and in the store"
    FORWARDED = "in device memory again, and nowhere else"
    DROPPED = "given up"


_R = RecordState
_MOVES: dict[RecordState, tuple[RecordState, ...]] = {
    _R.KEPT: (_R.OFFLOADED, _R.ABSENT, _R.DROPPED),
    _R.ABSENT: (_R.MADE, _R.DROPPED),
    _R.MADE: (_R.ABSENT, _R.FORWARDED, _R.DROPPED),
    _R.OFFLOADED: (_R.AHEAD, _R.RELOADED, _R.FORWARDED, _R.DROPPED),
    _R.AHEAD: (_R.OFFLOADED, _R.DROPPED),
    _R.RELOADED: (_R.OFFLOADED, _R.DROPPED),
    _R.FORWARDED: (_R.OFFLOADED, _R.DROPPED),
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


class Reloaded(NamedTuple):
    """The bytes of a record in device memory again: the copy into it, and the version of its tensor when it came."""

    arrival: Arrival
    version: int


class SavedStorage(StateMachine):
    """One storage saved for backward. Changed only under the cache's lock.

    Attributes:
        reloaded: the bytes in device memory again, after they were in a store or made again.
        makeable: how it could be made again, if it can.
        recipe: how it is made again, where its bytes are not saved.
        kept_views: views that hold the bytes; None where the cache never has to let go of them.
        guard: lies on the storage that was saved, and counts its memory.
        index: in its micro-step.
        views: how many are alive.
        lent: of those, how many belong to recipes, not to autograd.
        pending: of autograd's, how many have no bytes and were not unpacked yet.
    """

    noun = "a saved storage"
    moves = _MOVES

    __slots__ = (
        "guard", "index", "kept_views", "key", "lent", "makeable", "micro_step", "pending", "recipe", "reloaded",
        "state", "ticket", "views",
    )  # fmt: skip

    def __init__(self, key: StorageKey, micro_step: MicroStep[SavedStorage]) -> None:
        self.key = key
        self.state = RecordState.KEPT
        self.ticket: Ticket | None = None
        self.makeable: Makeable | None = None
        self.recipe: Recipe | None = None
        self.reloaded: Reloaded | None = None
        self.kept_views: list[weakref.ref[SavedView]] | None = None
        self.guard: weakref.ref[ResidencyGuard] | None = None
        self.micro_step = micro_step
        self.index = NO_INDEX
        self.views = 0
        self.lent = 0
        self.pending = 0

    @property
    def nbytes(self) -> int:
        return self.key.nbytes

    def holders(self) -> list[SavedView]:
        """The views that hold the bytes, where the cache may have to let go of them."""
        return [view for reference in self.kept_views or () if (view := reference()) is not None]

    def let_go(self, holders: Sequence[SavedView]) -> None:
        """Have the bytes held no longer: they are elsewhere, as the state says by now."""
        self.pending = sum(not (view.is_unpacked or view.is_lent) for view in holders)
        self.kept_views = None
        for view in holders:
            view.let_go()


# ---- how a storage is made again: what the cache asks of ``sites.py``, or of the dry run of an estimate --------------


class Site(Protocol):
    """The op of a forward that makes a storage; its attributes are described in ``sites.py``."""

    @property
    def is_proven(self) -> bool: ...
    @property
    def is_due(self) -> bool: ...
    @property
    def visits(self) -> int: ...
    @property
    def unseen_since(self) -> int | None: ...
    @property
    def seconds(self) -> float | None: ...


class Recipe(Protocol):
    """How a storage is made again, as its record knows it; its attributes are described in ``sites.py``."""

    @property
    def site(self) -> Site: ...
    @property
    def depth(self) -> int: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def work_bytes(self) -> int: ...
    @property
    def sources(self) -> tuple[StorageKey, ...]: ...
    def records(self) -> Iterator[SavedStorage]: ...
    def copied(self, cache: Keeper) -> Recipe: ...
    def bound(self, share: Callable[[SavedView], SavedView]) -> Recipe: ...


class Makeable(NamedTuple):
    """How a storage could be made again; holds nothing that it is made of. See :class:`Recipe`."""

    site: Site
    depth: int
    sources: tuple[StorageKey, ...]


class Rematerialization(Protocol):
    """What can be made again in backward instead of being saved. ``compare`` returns a comparison for ``read``."""

    def recipe(self, tensor: torch.Tensor) -> Recipe | None: ...
    def note(self, tensor: torch.Tensor, held: SavedView | SavedCounted) -> None: ...
    def make(self, recipe: Any) -> torch.Tensor: ...
    def compare(self, recipe: Any, tensor: torch.Tensor) -> Any: ...
    def read(self, comparison: Any) -> bool: ...
    def left_out(self, recipe: Any) -> None: ...
    def begin_forward(self) -> None: ...


# ---- in autograd's hands --------------------------------------------------------------------------------------------


class _Kept:
    """A tensor that stays where it is."""

    __slots__ = ("_version", "held")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = -1 if tensor.is_inference() else tensor._version
        self.held = kept(tensor)

    def restore(self) -> torch.Tensor:
        """The tensor, if it was not modified since."""
        return self.held if self._version < 0 else unmodified(self.held, self._version)

    @property
    def is_unmodified(self) -> bool:
        return self._version < 0 or self.held._version == self._version


class PassedThrough(_Kept):
    """A parameter, or a view of one, in autograd's hands as it is: its bytes are not ours to keep or move.

    The parameter itself is held: under ZeRO-3 backward reads what was gathered into it again.
    """

    __slots__ = ()

    def is_of(self, cache: Keeper) -> bool:
        return True  # no cache has a record of it


class SavedCounted(_Kept):
    """A tensor that is kept and cannot be moved, because it is too small, say; without a record of its own.

    Attributes:
        held: the tensor, or an alias of it.
        nbytes: as many of its bytes as are counted.
        guard: counts them.
        eps: of the norm of which it is a statistic, in a tuple; else None.
    """

    __slots__ = ("_cache", "eps", "guard", "nbytes")

    def __init__(self, cache: Keeper, tensor: torch.Tensor, nbytes: int, reason: str) -> None:
        super().__init__(tensor)
        self._cache = cache
        self.eps: tuple[Any] | None = None
        self.nbytes = nbytes
        self.guard = cache.count_kept(tensor, nbytes, reason)

    def is_of(self, cache: Keeper) -> bool:
        return self._cache is cache

    def __del__(self) -> None:
        guard = getattr(self, "guard", None)
        if guard is not None:  # else __init__ raised before the tensor was counted
            self._cache.finalizers.leave(guard)


class SavedView:
    """Held by autograd in place of one saved tensor with a record.

    Attributes:
        held: the tensor, or an alias of it, while its bytes stay in memory; else None. Set to None under the cache's
            lock, and read without it.
        eps: see :class:`SavedCounted`.
        is_lent: it belongs to a recipe.
    """

    __slots__ = ("__weakref__", "_cache", "_spec", "_witness", "eps", "held", "is_lent", "is_unpacked", "record")

    def __init__(self, cache: Keeper, record: SavedStorage, tensor: torch.Tensor, *, offloaded: bool) -> None:
        self.held: torch.Tensor | None = None
        self.eps: tuple[Any] | None = None
        self.is_unpacked = self.is_lent = False
        self._cache = cache
        self.record = record
        if offloaded:
            self._spec = ViewSpec.of(tensor)
            self._witness = VersionWitness(tensor)
        else:
            self.held = kept(tensor)

    @property
    def is_offloaded(self) -> bool:
        """Whether its bytes are elsewhere: in a store, or to be made again."""
        return self.held is None

    def restore(self) -> torch.Tensor:
        """The saved tensor, if it was not modified since."""
        held = self.held  # read once: another thread may evict the record meanwhile
        if held is not None:
            self.is_unpacked = True
            return unmodified(held, self.record.key.version)
        if self._witness.current != self._witness.version:
            raise _modified(self._spec.shape, self._spec.dtype, self._witness.version, self._witness.current)
        first_time = not (self.is_unpacked or self.is_lent)
        data = self._cache.load(self.record, first_time=first_time, is_lent=self.is_lent)
        self.is_unpacked = True
        return self._spec.rebuild(data)

    @property
    def spec(self) -> ViewSpec:
        """Its place in its storage."""
        held = self.held
        return self._spec if held is None else ViewSpec.of(held)

    @property
    def is_unmodified(self) -> bool:
        held = self.held
        if held is not None:
            return held._version == self.record.key.version
        return self._witness.current == self._witness.version

    def is_of(self, cache: Keeper) -> bool:
        return self._cache is cache

    def twin(self) -> SavedView:
        """Another view of the same bytes, for a recipe. Called under the cache's lock, which counts it."""
        other = SavedView.__new__(SavedView)
        other.held, other.eps, other.is_unpacked, other.is_lent = self.held, self.eps, False, True
        other._cache, other.record = self._cache, self.record
        if other.held is None:
            other._spec, other._witness = self._spec, self._witness
        return other

    def let_go(self) -> None:
        """Hold the bytes no longer. Called under the cache's lock."""
        if self.held is None:
            return
        self._spec = ViewSpec.of(self.held)
        self._witness = VersionWitness(self.held, self.record.key.version)
        # Last: restore() runs without the lock, and goes by the witness as soon as it finds nothing held.
        self.held = None

    def __del__(self) -> None:
        self._cache.finalizers.leave((self.record, self.is_lent, not self.is_unpacked and self.held is None))


# ---- finalizers -----------------------------------------------------------------------------------------------------


class ResidencyGuard:
    """Finalizer that reports when a storage's device memory is freed: it lies on a storage with saved bytes.

    Attributes:
        stamp: of the storage.
        users: records and tensors that have its memory counted. Changed only under the cache's lock.
        consumers: streams that may still use the memory when the host lets go of it.
    """

    __slots__ = ("__weakref__", "_bytes", "_cache", "consumers", "stamp", "users")

    def __init__(self, cache: Keeper, stamp: Stamp) -> None:
        self.stamp = stamp
        self.users = 0
        self.consumers: Sequence[Any] = ()
        self._cache = cache
        # At most one number. The finalizer of the storage takes it without the lock that leave() is called under: one
        # of the two must come first, or the bytes would be taken off twice; and pop() of a list is atomic.
        self._bytes: list[int] = []

    def is_of(self, cache: Keeper) -> bool:
        """Whether this cache is told: a storage that two engines save has a guard for each of them."""
        return self._cache is cache

    def count(self, nbytes: int) -> int:
        """Have at least ``nbytes`` counted, for one user more; returns how many bytes that adds.

        The largest user counts: one may have a slice of the storage, another all of it.
        """
        self.users += 1
        if not self._bytes:
            self._bytes.append(nbytes)
            return nbytes
        added_bytes = max(nbytes - self._bytes[0], 0)
        self._bytes[0] += added_bytes
        return added_bytes

    def leave(self) -> int:
        """A user is gone; returns the bytes that need not be counted any more, which go with the last user."""
        self.users -= 1
        return 0 if self.users else self._take()

    def _take(self) -> int:
        """The bytes that are still counted; from now on none. The first caller gets them."""
        try:
            return self._bytes.pop()
        except IndexError:
            return 0

    def __del__(self) -> None:
        # With consumers nobody acts on it now: the event of its release must come after all that the allocator records
        # when the memory goes, which is when this has returned. Else the bytes would be free on paper too early.
        self._cache.finalizers.leave(Freed(self._take(), self.consumers), acts=not self.consumers)


class Freed(NamedTuple):
    """The host has let go of so many bytes of device memory, and these streams may still use them."""

    nbytes: int
    consumers: Sequence[Any]


Finalized = tuple[SavedStorage, bool, bool] | ResidencyGuard | Freed
"""Told by a finalizer: a view is gone, of this record, lent to a recipe or not, and else pending or not; or a
tensor is gone that this guard counts; or device memory is free, or will be."""


# ---- versions -------------------------------------------------------------------------------------------------------


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
