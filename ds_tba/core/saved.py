"""What autograd holds in place of a saved tensor, and where the bytes of the storage behind it are.

Sees tensors, tickets and versions; cannot see where storages go, nor why: the cache changes records, under its lock.

[Note: Versions] Autograd does not compare version counters for hooked tensors, so ``restore`` does, for every view,
kept or moved. A kept tensor is held as a detached alias: the tensor itself would close a reference cycle through its
own graph node.

[Note: Lifetimes] A graph holds views, a view its record, a record its recipe, and a recipe views of its own (lent) of
other records. That is no circle: a recipe never holds a graph. The cache lists records, and gives them up with their
last view, and with them ticket, recipe and bytes. On a storage that is counted lies a guard. Record and guard share the
account of its memory: the one tells of the end of a user, the other of the end of the memory, in any order.

[Note: Finalizers] A view may go anywhere: in any thread, and also while its own thread holds the lock, because every
allocation inside a critical section may start the garbage collector; and a signal handler may raise there. So nothing
of ours runs then: its end is put into a queue (``ds_tba/storage/finalizers.py``). Entering ``with finalizers,
finalizers.lock`` first acts on the ends in the queue, so that their memory is free, and leaving it on those that came
meanwhile. So do unpacking, which may wait for no lock otherwise, and whoever asks for figures.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from ds_tba.core.fingerprint import Fingerprint
from ds_tba.core.prefetch import MicroStep
from ds_tba.core.tensors import (
    Stamp,
    VersionWitness,
    ViewSpec,
    form_of,
    kept,
    lineage_of,
    saves_by_functions,
    stamp_of,
    with_counter_of,
)
from ds_tba.device.accelerator import Accelerator, Arrival
from ds_tba.errors import ActivationModifiedError
from ds_tba.storage.base import StateMachine, Ticket
from ds_tba.storage.finalizers import DeferredFinalizers

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Autograd's pack and unpack."""

NO_INDEX = -1  # of a record that was not moved when it was saved


class Keeper:
    """What the objects below hold of the cache that made them.

    Args:
        load: brings back the bytes of a view's storage (uint8, 1-D), for the calling thread's current stream, and notes
            at the view that it was unpacked.
        count_kept: counts the memory of a tensor without a record, as so many bytes and for a reason.
        finalize: acts on one deferred finalizer.

    Attributes:
        lock: of everything that the cache changes. Not reentrant on purpose: a finalizer that found it free in the
            middle of a critical section of its own thread would change what that section is changing.
        finalizers: deferred until somebody has the lock; see [Note: Finalizers].
    """

    def __init__(
        self,
        load: Callable[[SavedView], torch.Tensor],
        count_kept: Callable[[torch.Tensor, int, str], CountedMemory],
        finalize: Callable[[Finalized], None],
    ) -> None:
        self.lock = threading.Lock()
        self.finalizers: DeferredFinalizers[Finalized] = DeferredFinalizers(self.lock, finalize)
        self.load = load
        self.count_kept = count_kept


# ---- the records ----------------------------------------------------------------------------------------------------


class RecordState(Enum):
    """Where the bytes of a saved storage are. Those that are away are in a store, or a recipe makes them again."""

    KEPT = "kept in device memory"
    AWAY = "in a store, or to be made again"
    AHEAD = "in the store, and asked for ahead of backward"
    BACK = "in device memory again"
    DROPPED = "given up"


_R = RecordState
_MOVES: dict[RecordState, tuple[RecordState, ...]] = {
    _R.KEPT: (_R.AWAY, _R.DROPPED),
    _R.AWAY: (_R.AHEAD, _R.BACK, _R.DROPPED),
    _R.AHEAD: (_R.AWAY, _R.DROPPED),
    _R.BACK: (_R.AWAY, _R.DROPPED),
    _R.DROPPED: (),
}


class StorageKey(NamedTuple):
    """Saved tensors with other keys are never one; with equal keys they are one unless their fingerprints differ.

    Attributes:
        storage: the stamp of the storage.
        lineage: the stamp of the version counter.
        version: the version counter when the tensor was saved.
        nbytes: bytes of the storage.
        saves_by_functions: how often Functions of the user's have saved the storage; see ``originals.py``.
    """

    storage: Stamp
    lineage: Stamp
    version: int
    nbytes: int
    saves_by_functions: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageKey:
        storage = tensor.untyped_storage()
        nbytes, saves = storage.nbytes(), saves_by_functions(storage)
        return cls(stamp_of(storage), lineage_of(tensor), tensor._version, nbytes, saves)


class Reloaded(NamedTuple):
    """The bytes of a record in device memory again.

    Attributes:
        arrival: the memory, and the copy into it.
        version: of its tensor when it came.
        is_only: whether neither a store nor a recipe has these bytes any more.
    """

    arrival: Arrival
    version: int
    is_only: bool


class Operation(NamedTuple):
    """An operation that saves tensors; see [Note: Operations under way] in ``cache.py``.

    Attributes:
        node: the number that the next node of the thread's graph takes.
        checkpoints: the number of checkpoints that have saved their arguments in the thread: they make no node.
    """

    thread: int
    node: int
    checkpoints: int


class Makeable(NamedTuple):
    """How a storage could be made again; holds nothing that it is made of.

    Attributes:
        site: of ``sites.py``, which imports this file.
        depth: how many storages lie behind each other that can be made one from the other.
        sources: the storages that it is made of.
    """

    site: Any
    depth: int
    sources: tuple[StorageKey, ...]


class SavedStorage(StateMachine):
    """One storage saved for backward. Changed only under the cache's lock.

    Attributes:
        ticket: of the store that has the bytes, or had them until they came back. Once set, it is replaced and never
            taken away, because it is read without the lock, too.
        recipe: that makes the bytes again, where they are not saved: of ``sites.py``, which imports this file.
        makeable: how they could be made again, if they can.
        reloaded: the bytes, while they are back.
        kept_views: views that may hold the bytes.
        memory: the account of the storage that was saved.
        is_complete: one operation of PyTorch has made the storage; see ``is_complete`` in ``tensors.py``.
        is_in_use: the operation that saves the storage may not be over, so that the bytes do not leave.
        is_leaving: they leave once it is over, if a store takes them.
        fingerprint: of the bytes that left; None while they have not.
        handed_out: the memory that the last read by a Function of the user's got, while anybody holds it.
        operation: the one that saved it last.
        index: in its micro-step.
        views: how many are alive.
        lent: of those, how many belong to recipes, not to autograd.
        pending: of autograd's, how many have no bytes and were not unpacked yet.
    """

    noun = "a saved storage"
    moves = _MOVES

    __slots__ = (
        "fingerprint", "handed_out", "index", "is_complete", "is_in_use", "is_leaving", "kept_views", "key", "lent",
        "makeable", "memory", "micro_step", "operation", "pending", "recipe", "reloaded", "state", "ticket", "views",
    )  # fmt: skip

    def __init__(self, key: StorageKey, micro_step: MicroStep[SavedStorage]) -> None:
        self.key = key
        self.state = RecordState.KEPT
        self.ticket: Ticket | None = None
        self.recipe: Any = None
        self.makeable: Makeable | None = None
        self.reloaded: Reloaded | None = None
        self.kept_views: list[weakref.ref[SavedView]] = []
        self.is_complete = True
        self.is_in_use = self.is_leaving = False
        self.fingerprint: Fingerprint | None = None
        self.handed_out: weakref.ref[torch.UntypedStorage] | None = None
        self.operation: Operation | None = None
        self.memory = CountedMemory()  # until it is counted
        self.micro_step = micro_step
        self.index = NO_INDEX
        self.views = self.lent = self.pending = 0

    @property
    def nbytes(self) -> int:
        return self.key.nbytes

    @property
    def is_in_memory(self) -> bool:
        """Whether nothing must be brought back before the bytes are used."""
        return self.state in (RecordState.KEPT, RecordState.BACK)

    @property
    def is_backed(self) -> bool:
        """Whether the bytes are back, and can be brought back once more."""
        return self.reloaded is not None and not self.reloaded.is_only

    @property
    def is_operand(self) -> bool:
        """Whether a recipe makes another storage from these bytes, so that nobody else may write into them."""
        return self.lent > 0 or self.memory.is_operand

    def left(self, tensor: torch.Tensor, accelerator: Accelerator | None) -> None:
        """Note the fingerprint of the bytes, which are about to leave."""
        self.fingerprint = Fingerprint.of(tensor, accelerator, is_whole=not self.is_complete)

    @property
    def holders(self) -> list[SavedView]:
        """The views that hold the bytes; not those whose tensor has another storage now, or a resized one."""
        return [view for one in self.kept_views if (view := one()) is not None and view.holds(self.key)]

    def let_go(self) -> None:
        """Have no view hold the bytes any longer: they are elsewhere, as the state says by now."""
        for view in self.holders:
            self.pending += not (view.is_unpacked or view.is_lent)
            view.let_go()
        self.kept_views.clear()


# ---- in autograd's hands --------------------------------------------------------------------------------------------


class _Kept:
    """A tensor that stays where it is.

    Attributes:
        handed: see :class:`SavedView`.
    """

    __slots__ = ("_version", "handed", "held")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.handed: torch.Tensor | None = None
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
        memory: the account that they are counted in.
        eps: of the norm of which it is a statistic, in a tuple; else None.
    """

    __slots__ = ("__weakref__", "_cache", "eps", "memory", "nbytes")

    def __init__(self, cache: Keeper, tensor: torch.Tensor, nbytes: int, reason: str) -> None:
        super().__init__(tensor)
        self._cache = cache
        self.eps: tuple[Any] | None = None
        self.nbytes = nbytes
        self.memory = cache.count_kept(tensor, nbytes, reason)
        cache.finalizers.watch(self, MemoryGone(self.memory, is_free=False))

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor with these bytes, and with the version counter of the one that was saved."""
        return with_counter_of(self.restore(), ViewSpec.of(self.held), storage)

    def is_of(self, cache: Keeper) -> bool:
        return self._cache is cache


class SavedView:
    """Held by autograd in place of one saved tensor with a record.

    Attributes:
        held: the tensor, or an alias of it, while its bytes stay in memory; else None. Set to None under the cache's
            lock, and read without it.
        eps: see :class:`SavedCounted`.
        handed: what a Function of the user's has read last; see [Note: Memory of gradients] in ``originals.py``.
        state: what its end tells.
    """

    __slots__ = ("__weakref__", "_cache", "_spec", "_witness", "eps", "handed", "held", "record", "state")

    def __init__(self, cache: Keeper, record: SavedStorage, tensor: torch.Tensor, *, offloaded: bool) -> None:
        self.held: torch.Tensor | None = None
        self.handed: torch.Tensor | None = None
        self.eps: tuple[Any] | None = None
        self._cache = cache
        self.record = record
        self.state = ViewGone(record, offloaded, False)
        cache.finalizers.watch(self, self.state)
        if offloaded:
            self._spec, self._witness = ViewSpec.of(tensor), VersionWitness(tensor)
        else:
            self.held = kept(tensor)

    @property
    def is_unpacked(self) -> bool:
        """Whether backward has had its bytes."""
        return self.state.is_unpacked

    @property
    def is_lent(self) -> bool:
        """Whether it belongs to a recipe."""
        return self.state.is_lent

    def holds(self, key: StorageKey) -> bool:
        """Whether it holds the storage with this key, as it was saved."""
        if self.held is None:
            return False
        storage = self.held.untyped_storage()
        return stamp_of(storage) == key.storage and storage.nbytes() == key.nbytes

    @property
    def is_offloaded(self) -> bool:
        """Whether its bytes are elsewhere: in a store, or to be made again."""
        return self.held is None

    def restore(self) -> torch.Tensor:
        """The saved tensor, if it was not modified since."""
        held = self.held  # read once: another thread may evict the record meanwhile
        if held is not None:
            self.state.is_unpacked = True
            return unmodified(held, self.record.key.version)
        self.check()
        return self._spec.rebuild(self._cache.load(self))

    def check(self) -> None:
        """Check that the tensor was not modified since it was saved.

        Raises:
            ActivationModifiedError: it was.
        """
        if not self.is_unmodified:
            held = self.held
            version = self._witness.version if held is None else held._version
            raise _modified(self.spec.form, self.record.key.version, version)

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor with these bytes, and with the version counter of the one that was saved.

        Raises:
            ActivationModifiedError: as :meth:`check`.
        """
        self.check()
        held = self.held
        return with_counter_of(self._witness.alias if held is None else held, self.spec, storage)

    @property
    def spec(self) -> ViewSpec:
        """Its place in its storage."""
        held = self.held
        return self._spec if held is None else ViewSpec.of(held)

    @property
    def is_unmodified(self) -> bool:
        held = self.held
        return (self._witness.version if held is None else held._version) == self.record.key.version

    def is_of(self, cache: Keeper) -> bool:
        return self._cache is cache

    def twin(self) -> SavedView:
        """Another view of the same bytes, for a recipe. Called under the cache's lock, which counts it."""
        other = copy.copy(self)
        other.handed = None
        other.state = ViewGone(self.record, self.state.is_away, True)
        self._cache.finalizers.watch(other, other.state)
        return other

    def let_go(self) -> None:
        """Hold the bytes no longer. Called under the cache's lock."""
        if self.held is not None and self.holds(self.record.key):
            self._spec, self._witness = ViewSpec.of(self.held), VersionWitness(self.held)
            self.state.is_away = True
            # Last: restore() runs without the lock, and goes by the witness as soon as it finds nothing held.
            self.held = None


# ---- the account of a storage's memory, and finalizers --------------------------------------------------------------


@dataclass(eq=False)
class CountedMemory:
    """The device memory of one storage, as one cache counts it. Changed only under the cache's lock.

    Attributes:
        users: records and tensors that have it counted.
        nbytes: that are counted: of the largest user, since one may have a slice of the storage, another all of it;
            none once the memory is free, or nobody wants it counted.
        savers: records and tensors for which autograd would hold the storage without us, also once the memory is free.
        saved_bytes: of the largest of them.
        consumers: streams that may still use the memory when the host lets go of it.
        is_operand: a recipe makes another storage from a tensor in this memory.
        handed_out: the memory that the last read by a Function of the user's got of tensors without a record, while
            anybody holds it.
    """

    users: int = 0
    nbytes: int = 0
    savers: int = 0
    saved_bytes: int = 0
    consumers: Sequence[Any] = ()
    is_operand: bool = False
    handed_out: weakref.ref[torch.UntypedStorage] | None = None

    def save(self, nbytes: int) -> int:
        """One saver more; returns the bytes that this adds."""
        added_bytes = max(nbytes - self.saved_bytes, 0)
        self.savers += 1
        self.saved_bytes += added_bytes
        return added_bytes

    def unsave(self) -> int:
        """A saver is gone; returns the bytes that go with the last of them."""
        self.savers -= 1
        if self.savers:
            return 0
        nbytes, self.saved_bytes = self.saved_bytes, 0
        return nbytes


class ResidencyGuard:
    """Lies on a storage, so that its end tells that counted memory is free.

    A storage that two engines save has one for each of them. With consumers the event of the release must come after
    all that the allocator records when the memory goes. It does: this goes before the memory, and nobody acts on that
    within the finalizer.
    """

    __slots__ = ("__weakref__", "_cache", "memory")

    def __init__(self, cache: Keeper, memory: CountedMemory) -> None:
        self._cache = cache
        self.memory = memory
        cache.finalizers.watch(self, MemoryGone(memory, is_free=True))

    def is_of(self, cache: Keeper) -> bool:
        return self._cache is cache


class ViewGone:
    """What the end of a view tells its record.

    Attributes:
        is_away: the view holds no bytes.
        is_lent: it belongs to a recipe.
        is_unpacked: backward has had its bytes.
    """

    __slots__ = ("is_away", "is_lent", "is_unpacked", "record")

    def __init__(self, record: SavedStorage, is_away: bool, is_lent: bool) -> None:
        self.record = record
        self.is_away = is_away
        self.is_lent = is_lent
        self.is_unpacked = False

    @property
    def is_pending(self) -> bool:
        """Whether it is counted among its record's pending ones."""
        return self.is_away and not (self.is_lent or self.is_unpacked)


class MemoryGone(NamedTuple):
    """The host has let go of this memory, which consumers may still use; or only a tensor is gone that had it counted.

    The first where it ``is_free``.
    """

    memory: CountedMemory
    is_free: bool


Finalized = ViewGone | MemoryGone
"""Told by the end of an object; acted on under the cache's lock."""


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
        raise _modified(form_of(tensor), version, tensor._version)
    return tensor


def _modified(form: str, saved: int, now: int) -> ActivationModifiedError:
    return ActivationModifiedError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a tensor of {form} is at version {now}; expected version {saved} instead. "
        "Hint: find the operation with torch.autograd.set_detect_anomaly(True)."
    )
