"""What autograd holds in place of a saved tensor, and where the bytes of the storage behind it are.

Sees tensors, tickets and versions; cannot see where storages go, nor why: the cache changes records, under its lock.
A store that sees these objects, too, has its contract here.

[Note: Versions] Autograd does not compare version counters for hooked tensors, so ``restore`` does, for every view,
kept or moved. A kept tensor is held as a detached alias: the tensor itself would close a reference cycle through its
own graph node.

[Note: Lifetimes] A graph holds views, a view its record, a record its ticket, and the ticket of what is rematerialized
holds views of its own (lent) of other records. That is no circle: a ticket never holds a graph. The cache lists
records, and gives them up with their last view, and with them ticket and bytes. A storage that is counted has its
account as an attribute, and records share it: the end of a record tells of the end of a user, the end of the storage of
the end of the memory, in any order (``accounts.py``).
"""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol

import torch

from ds_tba.core.accounts import Accounts, CountedMemory, Notice
from ds_tba.core.prefetch import MicroStep
from ds_tba.core.tensors import (
    Stamp,
    ViewSpec,
    attributes_of,
    base_of,
    counter_of,
    kept,
    next_sequence_number,
    stamp_of,
    unmodified,
    with_counter_of,
)
from ds_tba.device.accelerator import Stream
from ds_tba.storage.base import STAYS, Choice, Issuer, Loaded, OwnTicket, State, StateMachine, Ticket

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Autograd's pack and unpack."""
Around = Callable[[Hooks], Hooks]
"""Makes hooks that call others."""

NO_INDEX = -1  # of a record that was not moved when it was saved


class Keeper(Accounts):
    """The cache, as the objects below see it that it has made."""

    @abstractmethod
    def load(self, view: SavedView) -> torch.Tensor:
        """Return the tensor of a view that holds no bytes, for the calling thread's current stream.

        Notes at the view that it was unpacked.
        """


# ---- the records ----------------------------------------------------------------------------------------------------


class RecordState(State):
    """The place of the bytes of a saved storage."""

    KEPT = "kept in device memory"
    AWAY = "left to a store, which has the bytes, still copies them, or makes them again"  # its ticket alone knows
    LOADING = "on their way into device memory"
    LOADED = "in device memory again"
    DROPPED = "given up"


_R = RecordState
_MOVES: dict[RecordState, tuple[RecordState, ...]] = {
    _R.KEPT: (_R.AWAY, _R.DROPPED),
    _R.AWAY: (_R.LOADING, _R.DROPPED),
    _R.LOADING: (_R.AWAY, _R.LOADED, _R.DROPPED),  # dropped, where an interrupt left it so: its graph still ends
    _R.LOADED: (_R.AWAY, _R.DROPPED),
    _R.DROPPED: (),
}


class StorageKey(NamedTuple):
    """The identity of what was saved: saved tensors with equal keys are one storage."""

    storage: Stamp
    # The stamp of the version counter, which a tensor shares with its base and the base's other views. It is not the
    # storage's: the chunks of ``unsafe_chunk`` (which PyTorch's own LSTM and GRU cells change in place), and ``x`` and
    # ``x.data``, share bytes and count apart. Tensors that share a counter otherwise (``detach``) count as different
    # here, which costs a second write and is never wrong.
    lineage: Stamp
    version: int  # of the counter when the tensor was saved
    nbytes: int  # of the storage
    # The number of the custom Function that has saved it, with whom no other save shares it; 0 if none has.
    function: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor, function: int = 0) -> StorageKey:
        storage = tensor.untyped_storage()
        return cls(stamp_of(storage), stamp_of(base_of(tensor)), tensor._version, storage.nbytes(), function)


class Loading(NamedTuple):
    """The bytes of a record on their way into device memory."""

    thread: int  # the one that loads them
    ticket: Ticket
    done: threading.Lock  # taken until they are there, or have failed to come


class Origin(Protocol):
    """How a storage could be rematerialized. Holds nothing that it is made of."""

    @property
    def sources(self) -> tuple[StorageKey, ...]: ...  # that it is made of

    @property
    def seconds(self) -> float | None: ...  # that making it took when that was measured; None unless it was found equal


@dataclass(eq=False, slots=True)
class SavedStorage(StateMachine):
    """One storage saved for backward. Changed only under the cache's lock."""

    noun = "a saved storage"
    moves = _MOVES

    key: StorageKey
    micro_step: MicroStep
    source: weakref.ref[torch.UntypedStorage]  # not held: while it lives, it is what backward gets
    memory: CountedMemory  # the account of the storage that was saved
    stream: Stream  # that saved it
    node: int  # the sequence number of the node that saved it last, or something that is made of it
    has_graph: bool = True  # a node has made the tensor that was saved first; else it may leave only if nobody has it
    state: RecordState = RecordState.KEPT
    # Where it goes as soon as the operation that saves it is over, and its comparison, if any, is answered.
    choice: Choice = STAYS
    # The ticket of the store that has the bytes, or had them until they came back. Once set, it is replaced and never
    # taken away, because it is read without the lock, too.
    ticket: Ticket | None = None
    origin: Origin | None = None  # how it could be rematerialized; None where that is not known
    loading: Loading | None = None
    loaded: Loaded | None = None  # the bytes, while they are in device memory again
    kept_views: list[ViewGone] = field(default_factory=list)  # tell the ends of the views that may hold the bytes
    refusal: str = ""  # in the report's words, why it has stayed although it was to leave; empty if it has not
    index: int = NO_INDEX  # in its micro-step
    views: int = 0  # how many are alive
    lent: int = 0  # of the views, how many belong to recipes, not to autograd
    pending: int = 0  # of autograd's views, how many have no bytes and were not unpacked yet

    @property
    def nbytes(self) -> int:
        return self.key.nbytes

    @property
    def is_leaving(self) -> bool:
        """True if it leaves as soon as the operation that saves it is over."""
        return bool(self.choice.stores)

    @property
    def is_kept(self) -> bool:
        """True if the bytes have never left device memory."""
        return self.state is RecordState.KEPT

    @property
    def may_leave(self) -> bool:
        """True if nobody can write into the bytes without a version once they have left.

        What has no graph may be a buffer that anybody refills; it is none if the views of this record have it alone.
        """
        if self.has_graph:
            return True
        source, held = self.source(), Counter(id(view.held) for view in self.holders)
        if source is None or not held:
            return False
        # The storage is held by these tensors and by ``source``.
        is_alone = torch._C._storage_Use_Count(source._cdata) == len(held) + 1
        return is_alone and all(view.is_held_by(held[id(view.held)]) for view in self.holders)

    @property
    def load_bytes(self) -> int:
        """Return the bytes of device memory that loading the storage takes; 0 while they are there."""
        if self.is_kept or self.loaded is not None or self.ticket is None:
            return 0
        return self.ticket.load_bytes

    @property
    def is_backed(self) -> bool:
        """True if the bytes are loaded, and can be loaded once more."""
        return self.loaded is not None and self.loaded.stored

    def living_source(self) -> torch.UntypedStorage | None:
        """Return the storage that was saved, if it still lives with its bytes."""
        storage = self.source()
        return storage if storage is not None and storage.nbytes() == self.key.nbytes else None  # else it was resized

    @property
    def holders(self) -> list[SavedView]:
        """The views that hold the bytes; not those whose tensor has another storage now, or a resized one."""
        return [view for one in self.kept_views if (view := one()) is not None and view.holds(self.key)]

    def release_views(self) -> None:
        """Have no view hold the bytes any longer: they are elsewhere, as the state says by now."""
        for view in self.holders:
            view.release()
            self.pending += view.state.is_pending  # else nobody waits for it: it is not read ahead
        self.kept_views.clear()


# ---- in autograd's hands --------------------------------------------------------------------------------------------


class _Kept:
    """A tensor that stays where it is, and its :func:`~ds_tba.core.tensors.attributes_of`."""

    __slots__ = ("_version", "attributes", "held")

    def __init__(self, tensor: torch.Tensor, *, is_of_function: bool = False) -> None:
        # Most have none, and a call for each kept tensor would be one more of a few dozen.
        self.attributes = attributes_of(tensor, is_of_function=is_of_function) if vars(tensor) else None
        self._version = tensor._version
        self.held = kept(tensor)

    def restore(self) -> torch.Tensor:
        """Return the saved tensor, if it was not modified since."""
        return unmodified(self.held, self._version)

    @property
    def is_unmodified(self) -> bool:
        return self.held._version == self._version


class PassedThrough(_Kept):
    """A tensor in autograd's hands as it is, of a parameter as a rule: its bytes are not ours to keep or move.

    The parameter itself is held: under ZeRO-3 backward reads what was gathered into it again.
    """

    __slots__ = ()

    def signature(self) -> tuple[object, ...]:
        """Return the layout of the tensor, which no activation has."""
        return self.held.dtype, self.held.shape, self.held.stride(), type(self).__name__


class SavedCounted(_Kept):
    """A tensor that stays where it is until backward, without a record of its own: ``cache.py``, [Note: Records]."""

    __slots__ = ("__weakref__", "cache", "eps", "memory", "nbytes")

    def __init__(
        self,
        cache: Keeper,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage | None,
        nbytes: int,
        reason: str,
        micro_step: MicroStep | None,
        *,
        is_of_function: bool = False,
    ) -> None:
        super().__init__(tensor, is_of_function=is_of_function)
        self.cache = cache
        self.eps: tuple[float | None] | None = None  # of the norm of which it is a statistic, in a tuple; else None
        self.nbytes = nbytes  # as many of its bytes as are counted
        self.memory = cache.count_kept(self, storage, nbytes, reason, micro_step)
        self.memory.is_of_function |= is_of_function

    def signature(self) -> ViewSpec:
        """Return the layout of the tensor, the same as if it were to leave: a plan may have it stay from now on."""
        return ViewSpec.of(self.held)

    def twin(self) -> SavedCounted:
        """Return one more that holds the same tensor, for a recipe. Call it under the cache's lock."""
        other = copy.copy(self)
        self.memory.users += 1
        self.cache.watch_user(other, self.memory, None)
        return other


class SavedExcluded(SavedCounted):
    """A tensor that could be moved, and is kept because of the module that has saved it."""

    __slots__ = ()


class SavedView:
    """Held by autograd in place of one saved tensor with a record."""

    __slots__ = ("__weakref__", "_counter", "_spec", "attributes", "cache", "eps", "held", "record", "state")

    def __init__(self, cache: Keeper, record: SavedStorage, tensor: torch.Tensor, *, offloaded: bool) -> None:
        # The tensor, or an alias of it, while its bytes stay in memory; else None. Set to None under the cache's lock,
        # and read without it.
        self.held: torch.Tensor | None = None
        self.eps: tuple[float | None] | None = None  # see :class:`SavedCounted`
        self.attributes = attributes_of(tensor, is_of_function=record.key.function > 0) if vars(tensor) else None
        self.cache = cache
        self.record = record
        self.state = cache.ends.watch(ViewGone(self, cache.ends.tell).of(record, is_away=offloaded, is_lent=False))
        if offloaded:
            self._spec, self._counter = ViewSpec.of(tensor), counter_of(tensor)  # autograd compares no version
        else:
            self.held = kept(tensor)
            record.kept_views.append(self.state)  # or it would hold the bytes when they leave

    def is_held_by(self, views: int) -> bool:
        """Return whether nothing but so many views refers to the tensor that this one holds."""
        held_by_others = self.held is None or self.held._use_count() > 1  # type: ignore[attr-defined]
        return not held_by_others and sys.getrefcount(self.held) <= views + 1  # and the call that asks

    def in_source(self) -> torch.Tensor | None:
        """Return the tensor in the storage that was saved, with its version counter; None if that is gone."""
        storage = self.record.living_source()
        return None if storage is None else with_counter_of(self._counter, self._spec, storage)

    def rebuild(self, data: torch.Tensor) -> torch.Tensor:
        """Return the tensor over other bytes of its storage (uint8, 1-D)."""
        if self.record.key.function:  # whose changes in place are to count for all who have saved the tensor
            return with_counter_of(self._counter, self._spec, data.untyped_storage())
        return self._spec.rebuild(data)

    def holds(self, key: StorageKey) -> bool:
        """Return whether it holds the storage with this key, as it was saved."""
        if self.held is None:
            return False
        storage = self.held.untyped_storage()
        return stamp_of(storage) == key.storage and storage.nbytes() == key.nbytes  # else exchanged, or resized

    def restore(self) -> torch.Tensor:
        """Return the saved tensor, if it was not modified since."""
        held = self.held  # read once: another thread may evict the record meanwhile
        if held is not None:
            self.state.is_unpacked = True
            return unmodified(held, self.record.key.version)
        unmodified(self._counter, self.record.key.version, self._spec)
        return self.cache.load(self)

    def signature(self) -> ViewSpec:
        """Return the layout of the tensor: its place in its storage."""
        held = self.held
        return self._spec if held is None else ViewSpec.of(held)

    @property
    def is_unmodified(self) -> bool:
        held = self.held
        return (self._counter if held is None else held)._version == self.record.key.version

    @property
    def memory(self) -> CountedMemory:
        """The account of the storage that was saved."""
        return self.record.memory

    def twin(self) -> SavedView:
        """Return one more view of the same bytes, for a recipe. Call it under the cache's lock."""
        other = copy.copy(self)
        record = self.record
        record.views += 1
        record.lent += 1
        record.memory.lent += 1
        record.node = next_sequence_number()  # backward wants it for what is made of it
        gone = ViewGone(other, self.cache.ends.tell).of(record, is_away=self.state.is_away, is_lent=True)
        other.state = self.cache.ends.watch(gone)
        if other.held is not None:
            record.kept_views.append(other.state)  # or it would hold the bytes when they leave
        return other

    def release(self) -> None:
        """Hold the bytes no longer. Called under the cache's lock."""
        if self.held is not None and self.holds(self.record.key):
            self._spec, self._counter = ViewSpec.of(self.held), counter_of(self.held)
            self.state.is_away = True
            # Last: restore() runs without the lock, and goes by the counter as soon as it finds nothing held.
            self.held = None


Held = SavedView | SavedCounted | PassedThrough
"""What autograd holds in place of a saved tensor."""


def held_of(data: object) -> Held | None:
    """Return what our pack hook returned, from what autograd holds; None where that is of other hooks."""
    held = data if isinstance(data, Held) else getattr(data, "held", None)  # a recorder wraps what our hook returns
    return held if isinstance(held, Held) else None


# ---- a store that sees tensors ---------------------------------------------------------------------------------------


class TensorStore(Issuer[OwnTicket], Generic[OwnTicket]):
    """A store that may do without the bytes of a storage, as it knows what the storage is made of.

    It sees each tensor as autograd saves it, and comes before the stores of bytes.
    """

    @abstractmethod
    def begin_forward(self) -> None:
        """Begin a forward: nothing that earlier ones saved is what later storages are made of."""

    @abstractmethod
    def take(self, tensor: torch.Tensor, *, is_wanted: bool) -> tuple[Origin | None, OwnTicket | None]:
        """Find what the storage of a tensor that is being saved is made of. Called without the cache's lock.

        Args:
            is_wanted: take the storage, if that is proven to give its bytes.

        Returns:
            The origin, if there is one, and a ticket for :meth:`admit`, if the storage is taken.

        Raises:
            RematerializationError: what was rematerialized in earlier steps is no longer what forward makes.
        """

    @abstractmethod
    def admit(self, record: SavedStorage, ticket: OwnTicket) -> None:
        """Have a ticket of :meth:`take` placed for the record of its storage, as soon as its bytes may go.

        Called under the cache's lock.
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


# ---- the ends of views ---------------------------------------------------------------------------------------------


class ViewGone(Notice):
    """Tells a record the end of one of its views."""

    __slots__ = ("is_away", "is_lent", "is_unpacked", "record")

    record: SavedStorage
    is_away: bool  # the view holds no bytes
    is_lent: bool  # it belongs to a recipe
    is_unpacked: bool  # backward has had its bytes

    def of(self, record: SavedStorage, *, is_away: bool, is_lent: bool) -> ViewGone:
        """Return this notice, of a view of a record."""
        self.record, self.is_away, self.is_lent, self.is_unpacked = record, is_away, is_lent, False
        return self

    @property
    def is_pending(self) -> bool:
        """True if it is counted among its record's pending ones."""
        return self.is_away and not (self.is_lent or self.is_unpacked)
