"""What autograd holds in place of a saved tensor, and where the bytes of the storage behind it are.

Sees tensors, tickets and versions; cannot see where storages go, nor why: the cache changes records, under its lock.

[Note: Versions] Autograd does not compare version counters for hooked tensors, so ``restore`` does, for every view,
kept or moved. A kept tensor is held as a detached alias: the tensor itself would close a reference cycle through its
own graph node.

[Note: Lifetimes] A graph holds views, a view its record, a record its ticket, and the ticket of what is rematerialized
holds views of its own (lent) of other records. That is no circle: a ticket never holds a graph. The cache lists
records, and gives them up with their last view, and with them ticket and bytes. A storage that is counted has its
account as an attribute, and records share it: the end of a record tells of the end of a user, the end of the storage of
the end of the memory, in any order.

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, NamedTuple, Protocol

import torch

from ds_tba.core.fingerprint import Fingerprint
from ds_tba.core.prefetch import MicroStep
from ds_tba.core.tensors import (
    OWN_ATTRIBUTES,
    Stamp,
    VersionWitness,
    ViewSpec,
    attributes_of,
    form_of,
    kept,
    lineage_of,
    saves_by_functions,
    stamp_of,
    with_counter_of,
)
from ds_tba.device.accelerator import Accelerator, Stream
from ds_tba.errors import ActivationModifiedError
from ds_tba.stats import CacheStats
from ds_tba.storage.base import Loaded, OwnTicket, StateMachine, Store, Ticket
from ds_tba.storage.finalizers import DeferredFinalizers

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Autograd's pack and unpack."""

CHANGED = "saved again with other bytes"
NO_INDEX = -1  # of a record that was not moved when it was saved


class Keeper(ABC):
    """The cache, as the objects below see it that it has made, and a store that makes storages from others.

    Attributes:
        lock: guards everything that the cache changes. It is not reentrant on purpose: a finalizer that found it free
            in the middle of a critical section of its own thread would change what that section is changing.
        finalizers: deferred until somebody has the lock; see [Note: Finalizers].
        room: for what it keeps and loads.
    """

    room: Room

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.finalizers: DeferredFinalizers[Finalized] = DeferredFinalizers(self.lock, self.finalize)

    @abstractmethod
    def load(self, view: SavedView) -> torch.Tensor:
        """Load the bytes of a view's storage (uint8, 1-D), for the calling thread's current stream.

        Notes at the view that it was unpacked.
        """

    @abstractmethod
    def count_kept(self, user: SavedCounted, tensor: torch.Tensor, nbytes: int, reason: str) -> CountedMemory:
        """Count a tensor that is kept, without a record, as ``nbytes`` of its storage.

        Args:
            user: with whose end it is counted no longer.
            reason: in the report's words; empty for a tensor of ours, which autograd has not saved.
        """

    @abstractmethod
    def finalize(self, gone: Finalized) -> None:
        """Act on one deferred finalizer. Called under the lock."""

    @property
    @abstractmethod
    def stats(self) -> CacheStats:
        """Return its counters."""

    @abstractmethod
    def hold(self, record: SavedStorage, *, leaves: bool = False) -> bool:
        """Hold the bytes of a record as if no store had them, because its store is about to give them up.

        Args:
            leaves: the next store may have them.

        Returns:
            Whether they are held: else nobody wants them any more.
        """


class Room(Protocol):
    """The room for saved bytes in device memory, as those see it that take some of it. ``residency.py`` makes it.

    Attributes:
        limit_bytes: the budget; infinite without one.
    """

    limit_bytes: float

    def wait_for(self, nbytes: int, pinned: Collection[SavedStorage] = ()) -> bool:
        """Offload, and wait for, what makes room for so many bytes more; return whether they fit now.

        Args:
            pinned: storages that stay where they are.
        """

    def scratch(self, nbytes: int) -> AbstractContextManager[None]:
        """Have room for what is made and nobody saves; it counts where there is a budget, which holds for it, too."""

    def copied(self, source: torch.Tensor) -> torch.Tensor:
        """Return a copy of bytes, on the consumer's stream, which may be behind the load of these."""

    def memory_of(self, storage: torch.UntypedStorage | None) -> CountedMemory | None:
        """Return the account of the memory of a storage, if it has one."""

    def note_unpacked(self, view: SavedView) -> None:
        """Note that backward has had the bytes of a view; release what was loaded, if no other waits for it."""

    def end_early(self) -> None:
        """Hold none of what was loaded to make others from it: forward goes on, and backward is far."""


# ---- the records ----------------------------------------------------------------------------------------------------


class RecordState(Enum):
    """The place of the bytes of a saved storage."""

    KEPT = "kept in device memory"
    LEAVING = "kept until the operation that saves them is over"
    AWAY = "left to a store, which has the bytes, still copies them, or makes them again"  # its ticket alone knows
    AHEAD = "left to a store, and asked for ahead of backward"
    LOADING = "on their way into device memory"
    LOADED = "in device memory again"
    DROPPED = "given up"

    __hash__ = object.__hash__  # Enum's is a Python function, which each move would call


_R = RecordState
_MOVES: dict[RecordState, tuple[RecordState, ...]] = {
    _R.KEPT: (_R.LEAVING, _R.AWAY, _R.DROPPED),
    _R.LEAVING: (_R.KEPT, _R.DROPPED),  # not AWAY: its kernel may still write
    _R.AWAY: (_R.AHEAD, _R.LOADING, _R.DROPPED),
    _R.AHEAD: (_R.AWAY, _R.DROPPED),  # not LOADING at once, or its bytes would be counted twice
    _R.LOADING: (_R.AWAY, _R.LOADED, _R.DROPPED),  # dropped, where an interrupt left it so: its graph still ends
    _R.LOADED: (_R.AWAY, _R.DROPPED),
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
        nbytes, saves = storage.nbytes(), saves_by_functions(storage)  # they may write without a version
        return cls(stamp_of(storage), lineage_of(tensor), tensor._version, nbytes, saves)


class Loading(NamedTuple):
    """The bytes of a record on their way into device memory.

    Attributes:
        thread: the one that loads them.
        done: taken until they are there, or have failed to come.
        new_bytes: device memory that is counted for them until then.
        passing_bytes: device memory that they pass through.
    """

    thread: int
    ticket: Ticket
    done: threading.Lock
    new_bytes: int
    passing_bytes: int


class Operation(NamedTuple):
    """An operation that saves tensors; see [Note: Operations under way] in ``operations.py``.

    Attributes:
        node: the number that the next node of the thread's graph takes.
        checkpoints: the number of checkpoints that have saved their arguments in the thread: they make no node.
    """

    thread: int
    node: int
    checkpoints: int


class Origin(Protocol):
    """How a storage could be rematerialized. Holds nothing that it is made of.

    Attributes:
        op: the one that makes it.
        sources: the storages that it is made of.
    """

    @property
    def op(self) -> str: ...

    @property
    def sources(self) -> tuple[StorageKey, ...]: ...

    @property
    def seconds(self) -> float | None:
        """The seconds that making it took when that was measured; None unless it was found equal."""


class SavedStorage(StateMachine):
    """One storage saved for backward. Changed only under the cache's lock.

    Attributes:
        ticket: of the store that has the bytes, or had them until they came back. Once set, it is replaced and never
            taken away, because it is read without the lock, too.
        origin: how it could be rematerialized; None where that is not known.
        loading: the load under way.
        loaded: the bytes, while they are in device memory again.
        kept_views: views that may hold the bytes.
        memory: the account of the storage that was saved.
        is_complete: one operation of PyTorch has made the storage; see ``is_complete`` in ``tensors.py``.
        is_refused: no store took it when it was to leave.
        fingerprint: of the bytes that left; None while they have not.
        source: the storage itself, not held, if what was saved has no graph: a state of the user's may lie there.
        operation: the one that saved it last; None where the bytes never leave.
        index: in its micro-step.
        views: how many are alive.
        lent: of those, how many belong to recipes, not to autograd.
        pending: of autograd's, how many have no bytes and were not unpacked yet.
    """

    noun = "a saved storage"
    moves = _MOVES

    __slots__ = (
        "fingerprint", "index", "is_complete", "is_refused", "kept_views", "key", "lent", "loaded",
        "loading", "memory", "micro_step", "operation", "origin", "pending", "source", "state", "ticket", "views",
    )  # fmt: skip

    def __init__(self, key: StorageKey, micro_step: MicroStep[SavedStorage], memory: CountedMemory) -> None:
        self.key = key
        self.state = RecordState.KEPT
        self.ticket: Ticket | None = None
        self.origin: Origin | None = None
        self.loading: Loading | None = None
        self.loaded: Loaded | None = None
        self.kept_views: list[weakref.ref[SavedView]] = []
        self.is_complete = True
        self.is_refused = False
        self.fingerprint: Fingerprint | None = None
        self.source: weakref.ref[torch.UntypedStorage] | None = None
        self.operation: Operation | None = None
        self.memory = memory
        self.micro_step = micro_step
        self.index = NO_INDEX
        self.views = self.lent = self.pending = 0

    @property
    def nbytes(self) -> int:
        return self.key.nbytes

    @property
    def is_kept(self) -> bool:
        """True if the bytes have never left device memory."""
        return self.state in (RecordState.KEPT, RecordState.LEAVING)

    @property
    def load_bytes(self) -> int:
        """Return the bytes that come into memory where the storage is wanted, all that it passes through included."""
        if self.is_kept or self.loaded is not None or self.ticket is None:
            return 0
        return self.ticket.load_bytes

    @property
    def is_backed(self) -> bool:
        """True if the bytes are loaded, and can be loaded once more."""
        return self.loaded is not None and self.loaded.stored

    def take_fingerprint(self, tensor: torch.Tensor, accelerator: Accelerator | None) -> None:
        """Take the fingerprint of the bytes, which a store has just taken.

        What was changed in place may be a buffer that ``index_put_``, say, fills part by part.
        """
        is_whole = self.key.version > 0 or not self.is_complete
        self.fingerprint = Fingerprint.of(tensor, accelerator, is_whole=is_whole)

    def count_lent(self) -> None:
        """Count one more view, which belongs to a recipe."""
        self.views += 1
        self.lent += 1
        self.memory.lent += 1

    @property
    def holders(self) -> list[SavedView]:
        """The views that hold the bytes; not those whose tensor has another storage now, or a resized one."""
        return [view for one in self.kept_views if (view := one()) is not None and view.holds(self.key)]

    def release_views(self) -> None:
        """Have no view hold the bytes any longer: they are elsewhere, as the state says by now."""
        for view in self.holders:
            self.pending += not (view.is_unpacked or view.is_lent)  # else nobody waits for it: it is not read ahead
            view.release()
        self.kept_views.clear()


# ---- in autograd's hands --------------------------------------------------------------------------------------------


class _Kept:
    """A tensor that stays where it is, and its :func:`~ds_tba.core.tensors.attributes_of`."""

    __slots__ = ("_version", "attributes", "held")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Asked here, too: a call for each kept tensor would be one more of a few dozen.
        self.attributes = None if vars(tensor).keys() <= OWN_ATTRIBUTES else attributes_of(tensor)
        self._version = -1 if tensor.is_inference() else tensor._version  # asking one of inference mode raises
        self.held = kept(tensor)

    def restore(self) -> torch.Tensor:
        """Return the saved tensor, if it was not modified since."""
        return self.held if self._version < 0 else unmodified(self.held, self._version)

    def signature(self) -> tuple[object, ...]:
        """Return the layout of the tensor."""
        return self.held.dtype, self.held.shape, self.held.stride(), type(self).__name__

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
        self.eps: tuple[float | None] | None = None
        self.nbytes = nbytes
        self.memory = cache.count_kept(self, tensor, nbytes, reason)

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor with these bytes, and with the version counter of the one that was saved."""
        return with_counter_of(self.restore(), ViewSpec.of(self.held), storage)

    def is_of(self, cache: Keeper) -> bool:
        return self._cache is cache

    def twin(self) -> SavedCounted:
        """Return one more that holds the same tensor, for a recipe. Call it under the cache's lock."""
        other = copy.copy(self)
        self.memory.users += 1
        self.memory.lent += 1
        self._cache.finalizers.watch(other, CountedGone(self.memory, is_lent=True))
        return other


class SavedExcluded(SavedCounted):
    """A tensor that could be moved, and is kept because of the module that has saved it."""

    __slots__ = ()


class SavedView:
    """Held by autograd in place of one saved tensor with a record.

    Attributes:
        held: the tensor, or an alias of it, while its bytes stay in memory; else None. Set to None under the cache's
            lock, and read without it.
        attributes: see :func:`~ds_tba.core.tensors.attributes_of`.
        eps: see :class:`SavedCounted`.
        state: what its end tells.
    """

    __slots__ = ("__weakref__", "_cache", "_spec", "_witness", "attributes", "eps", "held", "record", "state")

    def __init__(self, cache: Keeper, record: SavedStorage, tensor: torch.Tensor, *, offloaded: bool) -> None:
        self.held: torch.Tensor | None = None
        self.eps: tuple[float | None] | None = None
        self.attributes = None if vars(tensor).keys() <= OWN_ATTRIBUTES else attributes_of(tensor)
        self._cache = cache
        self.record = record
        self.state = ViewGone(record, offloaded, False)
        notice = cache.finalizers.watch(self, self.state)
        if offloaded:
            self._spec, self._witness = ViewSpec.of(tensor), VersionWitness(tensor)  # autograd compares no version
        else:
            self.held = kept(tensor)
            record.kept_views.append(notice)  # or it would hold the bytes when they leave

    @property
    def is_unpacked(self) -> bool:
        """True if backward has had its bytes."""
        return self.state.is_unpacked

    @property
    def is_lent(self) -> bool:
        """True if it belongs to a recipe."""
        return self.state.is_lent

    def holds(self, key: StorageKey) -> bool:
        """Return whether it holds the storage with this key, as it was saved."""
        if self.held is None:
            return False
        storage = self.held.untyped_storage()
        return stamp_of(storage) == key.storage and storage.nbytes() == key.nbytes  # else exchanged, or resized

    @property
    def is_offloaded(self) -> bool:
        """True if its bytes are elsewhere: in a store, or to be made again."""
        return self.held is None

    def restore(self) -> torch.Tensor:
        """Return the saved tensor, if it was not modified since."""
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

    def signature(self) -> tuple[object, ...]:
        """Return the layout of the tensor."""
        spec = self.spec
        return spec.dtype, spec.shape, spec.stride, spec.storage_offset

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

    @property
    def memory(self) -> CountedMemory:
        """The account of the storage that was saved."""
        return self.record.memory

    def twin(self) -> SavedView:
        """Return one more view of the same bytes, for a recipe. Call it under the cache's lock."""
        other = copy.copy(self)
        self.record.count_lent()
        other.state = ViewGone(self.record, self.state.is_away, True)  # or one end would count for both views
        notice = self._cache.finalizers.watch(other, other.state)
        if other.held is not None:
            self.record.kept_views.append(notice)  # likewise
        return other

    def answered(self, *, is_equal: bool) -> None:
        """Hold the bytes no longer, if they are those that left. Called under the cache's lock; see ``Doubts``."""
        record, held, stats = self.record, self.held, self._cache.stats
        is_elsewhere = not record.is_kept and record.state is not RecordState.DROPPED
        if held is None or not (is_equal and is_elsewhere and self.holds(record.key)):
            stats.kept_bytes[CHANGED] += 0 if is_equal else record.nbytes
            return
        stats.deduplicated_bytes += nbytes_of(held)
        record.pending += not self.is_unpacked
        self.release()

    def release(self) -> None:
        """Hold the bytes no longer. Called under the cache's lock."""
        if self.held is not None and self.holds(self.record.key):
            self._spec, self._witness = ViewSpec.of(self.held), VersionWitness(self.held)
            self.state.is_away = True
            # Last: restore() runs without the lock, and goes by the witness as soon as it finds nothing held.
            self.held = None


Held = SavedView | SavedCounted | PassedThrough
"""What autograd holds in place of a saved tensor."""


# ---- a store that sees tensors --------------------------------------------------------------------------------------


class TensorStore(Store[OwnTicket], Generic[OwnTicket]):
    """A store that may do without the bytes of a storage, as it knows what the storage is made of.

    It sees each tensor as autograd saves it, and comes before the stores of bytes.
    """

    keeps_bytes = False

    def refuse_broken(self) -> None:
        """Raise a StateError where an exception has left its bookkeeping half changed."""

    @abstractmethod
    def begin_forward(self) -> None:
        """Begin a forward: nothing that earlier ones saved is what later storages are made of."""

    @abstractmethod
    def take(self, tensor: torch.Tensor, *, is_wanted: bool) -> tuple[Origin | None, OwnTicket | None]:
        """Find what the storage of a tensor that is being saved is made of. Called without the cache's lock.

        Args:
            is_wanted: take the storage, if that is proven to give its bytes.

        Returns:
            The origin, if there is one, and the ticket, if the storage was taken.

        Raises:
            RematerializationError: what was rematerialized in earlier steps is no longer what forward makes.
        """

    @abstractmethod
    def note(self, tensor: torch.Tensor, held: SavedCounted | SavedView) -> None:
        """Note that autograd has saved a tensor, and what it holds in place of that."""

    @abstractmethod
    def wait_for_answers(self) -> None:
        """Read every answer of the device that is due: until then its operands are held.

        Raises:
            RematerializationError: as :meth:`take`.
        """

    @abstractmethod
    def end_micro_step(self) -> None:
        """End a micro-step: as :meth:`wait_for_answers`, and hold what takes less than its operands do."""


# ---- the account of a storage's memory, and finalizers --------------------------------------------------------------


@dataclass(eq=False, slots=True)
class CountedMemory:
    """The account of a storage's device memory in one cache. Changed only under the cache's lock.

    The end of a storage that is watched leaves its account to the finalizers. With consumers the event of the release
    must come after all that the allocator records when the memory goes. It does: the storage's object goes before the
    memory, and nobody acts on that within the finalizer.

    Attributes:
        users: records and tensors that have it counted.
        nbytes: that are counted: of the largest user, since one may have a slice of the storage, another all of it;
            none once the memory is free, or nobody wants it counted.
        savers: records and tensors for which autograd would hold the storage without us, also once the memory is free.
        saved_bytes: of the largest of them.
        consumers: streams that may still use the memory when the host lets go of it.
        lent: how many of the users belong to recipes.
        is_watched: the end of the storage is told, since a user does not hold it.
    """

    users: int = 0
    nbytes: int = 0
    savers: int = 0
    saved_bytes: int = 0
    consumers: list[Stream] = field(default_factory=list)
    lent: int = 0
    is_watched: bool = False

    @property
    def is_operand(self) -> bool:
        """True if a recipe makes another storage from these bytes, so that nobody else may write into them."""
        return self.lent > 0

    def save(self, nbytes: int) -> int:
        """Add a saver; return the bytes that this adds."""
        added_bytes = max(nbytes - self.saved_bytes, 0)  # a slice of it may have been saved before
        self.savers += 1
        self.saved_bytes += added_bytes
        return added_bytes

    def unsave(self) -> int:
        """Take a saver away; return the bytes that go with the last of them."""
        self.savers -= 1
        if self.savers:
            return 0
        nbytes, self.saved_bytes = self.saved_bytes, 0
        return nbytes


class ViewGone:
    """Tells a record the end of one of its views.

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
        """True if it is counted among its record's pending ones."""
        return self.is_away and not (self.is_lent or self.is_unpacked)


class CountedGone(NamedTuple):
    """Tells the end of a tensor without a record that had this memory counted.

    Attributes:
        is_lent: it belongs to a recipe.
    """

    memory: CountedMemory
    is_lent: bool = False


Finalized = ViewGone | CountedGone | CountedMemory
"""Told by the end of a view, of such a tensor, or of a storage, whose memory the host has freed; acted on under the
cache's lock."""


# ---- versions -------------------------------------------------------------------------------------------------------


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def unmodified(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """Return the tensor, if it is at this version.

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
