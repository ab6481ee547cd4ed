"""The objects that autograd holds in place of saved tensors, the record that views of one storage share, and the
micro-step to which records belong.

Knows tensors and tickets; does not know where storages go. The cache changes records and micro-steps, under its lock.

[Note: Micro-steps] A micro-step has one forward as a rule. Several forwards before the first backward (a contrastive
pair, two outputs in one loss) are one micro-step to a plan: what they save lies in memory together. So is a whole step
of a pipeline, where the forward of one micro-batch comes between the forward and the backward of another
(*interleaved*): what to bring back next may have been saved two forwards ago, and its read can begin while the forward
between runs.

[Note: Reading ahead] It begins with the first unpack, of whatever kind, after forward: each forward has an unpack
hook of its own, so that it is known which micro-step the tensor belongs to. It goes in the order in which an earlier
backward of as many records wanted them, else in reverse; of interleaved forwards the earliest first. Without a plan it
goes as far as the stores' bounds allow. With a plan it goes no further than ``lead`` says, so that reloaded bytes do
not lie in device memory long before their use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from ds_tba.autograd.tensors import Eligibility, Stamp, VersionWitness, ViewSpec, kept, lineage_of, stamp_of
from ds_tba.device.accelerator import Arrival
from ds_tba.errors import ActivationModifiedError
from ds_tba.storage.base import StateMachine, Ticket

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Autograd's pack and unpack."""

NO_INDEX = -1  # of a record that was not moved when it was saved


class Keeper(Protocol):
    """The cache's records, as the objects that autograd holds know them."""

    def load(self, record: SavedStorage, *, first_time: bool) -> torch.Tensor: ...
    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def count_kept(self, tensor: torch.Tensor, nbytes: int, reason: str) -> ResidencyGuard: ...
    def defer(self, finalized: Finalized) -> None: ...


class ObservedCache(Protocol):
    """The cache, as the recorder of a micro-step knows it."""

    def eligibility_of(self, tensor: torch.Tensor) -> Eligibility: ...
    def take_moves(self) -> list[tuple[Any, Any]]: ...


class RecordState(Enum):
    """Where a saved storage is, as the cache sees it."""

    KEPT = "kept in device memory"
    OFFLOADED = "in the store"
    RELOADED = "in device memory again, and in the store"
    FORWARDED = "in device memory again, and nowhere else"
    DROPPED = "given up"


_R = RecordState
_MOVES: dict[RecordState, tuple[RecordState, ...]] = {
    _R.KEPT: (_R.OFFLOADED, _R.DROPPED),
    _R.OFFLOADED: (_R.RELOADED, _R.FORWARDED, _R.DROPPED),
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


class SavedStorage(StateMachine):
    """One storage saved for backward. Changed only under the cache's lock.

    Attributes:
        reloaded: the bytes in device memory again, after they were in a store.
        kept_views: views that hold the bytes; filled only where the cache may have to move them later.
        guard: lies on the storage that was saved, and counts its memory.
        index: in its micro-step.
        views: how many are alive.
        pending: of those, how many have no bytes and were not unpacked yet.
    """

    noun = "a saved storage"
    moves = _MOVES

    __slots__ = ("guard", "index", "kept_views", "key", "micro_step", "pending", "reloaded", "state", "ticket", "views")

    def __init__(self, key: StorageKey, micro_step: MicroStep) -> None:
        self.key = key
        self.state = RecordState.KEPT
        self.ticket: Ticket | None = None
        self.reloaded: Reloaded | None = None
        self.kept_views: list[weakref.ref[SavedView]] = []
        self.guard: weakref.ref[ResidencyGuard] | None = None
        self.micro_step = micro_step
        self.index = NO_INDEX
        self.views = 0
        self.pending = 0

    @property
    def nbytes(self) -> int:
        """Of the storage."""
        return self.key.nbytes


class Reloaded(NamedTuple):
    """The bytes of a record in device memory again.

    Attributes:
        arrival: the memory, and the copy into it.
        version: of that memory's tensor when it came.
    """

    arrival: Arrival
    version: int


class PassedThrough:
    """A parameter, or a view of one, in autograd's hands as it is: its bytes are not ours to keep or move."""

    __slots__ = ("_version", "held")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = -1 if tensor.is_inference() else tensor._version
        # The parameter itself must be held: under ZeRO-3 backward reads what was gathered into it again.
        self.held = kept(tensor)

    def restore(self) -> torch.Tensor:
        """The tensor, if it was not modified since."""
        return self.held if self._version < 0 else unmodified(self.held, self._version)


class SavedCounted:
    """A tensor that is kept and cannot be moved, because it is too small, say; without a record of its own.

    Attributes:
        held: the tensor, or an alias of it.
        nbytes: as many of its bytes as are counted.
        guard: counts them.
    """

    __slots__ = ("_cache", "_version", "guard", "held", "nbytes")

    def __init__(self, cache: Keeper, tensor: torch.Tensor, nbytes: int, reason: str) -> None:
        self._cache = cache
        self._version = -1 if tensor.is_inference() else tensor._version
        self.held = kept(tensor)
        self.nbytes = nbytes
        self.guard = cache.count_kept(tensor, nbytes, reason)

    def restore(self) -> torch.Tensor:
        """The tensor, if it was not modified since."""
        return self.held if self._version < 0 else unmodified(self.held, self._version)

    def __del__(self) -> None:
        guard = getattr(self, "guard", None)
        if guard is not None:  # else __init__ raised before the tensor was counted
            self._cache.defer((guard, self.nbytes))


class SavedView:
    """Held by autograd in place of one saved tensor.

    Attributes:
        held: the tensor, or an alias of it, while its bytes stay in memory; else None. Set to None under the cache's
            lock, and read without it.
    """

    __slots__ = ("__weakref__", "_cache", "_spec", "_witness", "held", "is_unpacked", "record")

    def __init__(self, cache: Keeper, record: SavedStorage, tensor: torch.Tensor, *, offloaded: bool) -> None:
        self.held: torch.Tensor | None = None
        self.is_unpacked = False
        self._cache = cache
        self.record = record
        if offloaded:
            self._spec = ViewSpec.of(tensor)
            self._witness = VersionWitness(tensor, cache.empty_like(tensor))
        else:
            self.held = kept(tensor)

    @property
    def is_offloaded(self) -> bool:
        """Whether a store has its bytes."""
        return self.held is None

    def restore(self) -> torch.Tensor:
        """The saved tensor, if it was not modified since."""
        held = self.held  # read once: another thread may evict the record meanwhile
        if held is not None:
            self.is_unpacked = True
            return unmodified(held, self.record.key.version)
        if self._witness.current != self._witness.version:
            raise _modified(self._spec.shape, self._spec.dtype, self._witness.version, self._witness.current)
        data = self._cache.load(self.record, first_time=not self.is_unpacked)
        self.is_unpacked = True
        return self._spec.rebuild(data)

    def let_go(self) -> None:
        """Hold the bytes no longer: the record's store has them from now on. Called under the cache's lock."""
        if self.held is None:
            return
        self._spec = ViewSpec.of(self.held)
        self._witness = VersionWitness(self.held, self._cache.empty_like(self.held), self.record.key.version)
        # Last: restore() runs without the lock, and goes by the witness as soon as it finds nothing held.
        self.held = None

    def __del__(self) -> None:
        self._cache.defer((self.record, not self.is_unpacked and self.held is None))


class ResidencyGuard:
    """Finalizer that reports when a storage's device memory is freed: it lies on a storage with saved bytes.

    Attributes:
        users: records and tensors that have its memory counted. Changed only under the cache's lock.
    """

    __slots__ = ("__weakref__", "_bytes", "_cache", "users")

    def __init__(self, cache: Keeper) -> None:
        self.users = 0
        self._cache = cache
        # At most one number. The finalizer of the storage takes it without the lock that leave() is called under: one
        # of the two must come first, and pop() of a list is atomic.
        self._bytes: list[int] = []

    def counts_for(self, cache: Keeper) -> bool:
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
        return 0 if self.users else self.take()

    def take(self) -> int:
        """The bytes that are still counted; from now on none. The first caller gets them."""
        try:
            return self._bytes.pop()
        except IndexError:
            return 0

    def __del__(self) -> None:
        self._cache.defer(self.take())


Finalized = tuple[SavedStorage, bool] | tuple[ResidencyGuard, int] | int
"""Told by a finalizer: a view is gone, of this record, and whether it was pending; a tensor is gone of so many bytes
that this guard counts; or so many bytes of device memory are free."""


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


class Phase(Enum):
    """How far a micro-step has come."""

    FORWARD = "more may be saved, so that there is no order yet"
    WAITING = "forward is over, and nothing was unpacked since"
    BACKWARD = "something was unpacked"


class MicroStep:
    """The moved records of one micro-step in pack order. Changed only under the cache's lock.

    Attributes:
        is_interleaved: see [Note: Micro-steps].
        lead: see ``Plan.prefetch_distance``; empty is no limit. To be set before backward.
        saved: records of it that are alive, moved or not.
    """

    def __init__(self, *, is_interleaved: bool = False) -> None:
        self.is_interleaved = is_interleaved
        self.lead: Sequence[int] = ()
        self.saved = 0
        self.phase = Phase.FORWARD
        self._records: list[SavedStorage | None] = []
        self._forwards: list[int] = []  # index of the first record of each
        self._learned: Sequence[int] | None = None  # of an earlier micro-step, as far as that was known in time
        self._order: list[int] = []
        self._position: dict[int, int] = {}
        self._used = 0  # how far backward has come in the order
        self._cursor = 0  # how far reading ahead has come
        self._unpacked: list[int] = []
        self._live = 0

    @property
    def expects_forward(self) -> bool:
        """Whether one more forward belongs to it: something that was saved is alive, and nothing was unpacked."""
        return self.is_interleaved or (self.phase is Phase.WAITING and self.saved > 0)

    def begin_forward(self, lead: Sequence[int] = ()) -> None:
        """A forward begins; ``lead`` is that of the plan."""
        self.phase = Phase.FORWARD
        self.lead = lead
        self._forwards.append(len(self._records))

    def add(self, record: SavedStorage) -> int:
        """Append a record; returns its index."""
        self._records.append(record)
        self._live += 1
        return len(self._records) - 1

    def add_use(self, index: int) -> None:
        """Backward asked for a record's bytes."""
        self._unpacked.append(index)

    def remove(self, index: int) -> list[int] | None:
        """A record is gone; returns, with the last of them, the order of first uses, if every one was used."""
        self._records[index] = None
        self._live -= 1
        if self._live:
            return None
        order = list(dict.fromkeys(self._unpacked))  # a second backward unpacks again
        return order if len(order) == len(self._records) else None

    def read_ahead(
        self, learned: Sequence[int], prefetch: Callable[[SavedStorage], bool], after: int | None = None
    ) -> None:
        """Ask for the records that backward will want next; see [Note: Reading ahead].

        Args:
            learned: the order of an earlier micro-step.
            prefetch: asks for a record; False where there is no room for it now.
            after: the record that backward wants now.
        """
        if self.phase is Phase.FORWARD:
            return
        self.phase = Phase.BACKWARD
        if not self._order or (self.is_interleaved and len(self._order) < len(self._records)):
            self._extend_order(learned)
        if after is not None:
            self._used = max(self._used, self._position.get(after, -1) + 1)
            self._cursor = max(self._cursor, self._used)
        while self._cursor < self._reach:
            ahead = self._records[self._order[self._cursor]]
            wanted = ahead is not None and ahead.reloaded is None and ahead.pending > 0
            if ahead is not None and wanted and not prefetch(ahead):
                return
            self._cursor += 1

    def _extend_order(self, learned: Sequence[int]) -> None:
        """Give the records that have come since their places in the order."""
        known, count = len(self._order), len(self._records)
        if self._learned is None:
            self._learned = learned
        if self.is_interleaved:
            new = [index for index in self._learned if known <= index < count]
            if len(new) < count - known:
                new = self._forward_by_forward(known)
        else:
            new = list(learned) if len(learned) == count else list(range(count - 1, -1, -1))
        self._position |= {index: known + place for place, index in enumerate(new)}
        self._order += new

    def _forward_by_forward(self, known: int) -> list[int]:
        """The records from ``known`` on: those of the earliest forward first, each forward's in reverse."""
        bounds = pairwise([*self._forwards, len(self._records)])
        return [index for first, end in bounds for index in range(end - 1, max(first, known) - 1, -1)]

    @property
    def _reach(self) -> int:
        """How far in the order reading ahead may have come by now."""
        count = len(self._order)
        return min(count, self._used + self.lead[self._used]) if self._used < len(self.lead) else count
