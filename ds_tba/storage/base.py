"""What may the tensor cache ask of a tier that holds bytes? The contract of the stores, their tickets, and spans.

Cannot see tensors, graphs or plans: a store gets whole storages as bytes, and gives them back. Spans are slots of
staging, extents of a swap file, and the room of the host tier; a holder of a span gives it back once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import torch

from ds_tba.device.accelerator import PAGE_BYTES, Arrival, PendingCopy
from ds_tba.errors import StateError

ASKED_TOO_LATE = "bytes were asked for after they were given up; this is a bug in ds_tba"


class Refusal(Enum):
    """Why a store cannot take a tensor now; the values are the report's words."""

    STAGING_FULL = "staging full"
    NO_SPACE = "no space in the swap file"
    PATH_FAILED = "path failed"
    HOST_FULL = "no room in host_budget_bytes"
    CLOSED = "store closed"


class Ticket:
    """One storage in a store's care; each store has its own kind."""

    __slots__ = ("nbytes", "store")

    def __init__(self, nbytes: int, store: Issuer[Any]) -> None:
        self.nbytes = nbytes
        self.store = store

    @property
    def load_bytes(self) -> int:
        """Return the bytes of device memory that reloading takes at most, also of what the storage is made of."""
        return self.nbytes


OwnTicket = TypeVar("OwnTicket", bound=Ticket)
AnyStore: TypeAlias = "Store[Any]"  # whose tickets only it can tell apart
AnyIssuer: TypeAlias = "Issuer[Any]"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Bytes on their way back to the device."""

    arrival: Arrival  # the memory, and the copy into it
    stored: bool  # the store still has the bytes, too; if not, ``data`` is the only copy

    @property
    def data(self) -> torch.Tensor:
        """Return the storage (uint8, 1-D, on the device), for the calling thread's current stream."""
        return self.arrival.join()


class Issuer(ABC, Generic[OwnTicket]):
    """Issues tickets, and gives the bytes of a storage back for the one that it issued."""

    @abstractmethod
    def get(self, ticket: OwnTicket, device: torch.device) -> Loaded:
        """Bring the bytes of a ticket to the device.

        One thread at a time asks for those of a ticket, and nobody cancels or releases it meanwhile.

        Raises:
            ActivationLostError: they could not be read back.
            ActivationCorruptionError: what was read is not what was written.
        """

    @abstractmethod
    def release(self, ticket: OwnTicket) -> None:
        """Give the bytes up. Waits for no transfer and no device; any thread may call it, but no finalizer."""

    def settle(self) -> None:
        """Free the memory that finished copies still hold, as :meth:`copies_out` does. Never blocks on the device."""
        self.copies_out()

    @abstractmethod
    def copies_out(self) -> Sequence[PendingCopy]:
        """List the copies out of device memory under way, oldest first, and free the memory of the others.

        Never blocks.
        """


class Store(Issuer[OwnTicket]):
    """Holds the bytes of storages between pack and unpack, in memory or on drives."""

    @abstractmethod
    def put(self, data: torch.Tensor, *, wait: bool, item_bytes: int = 1) -> OwnTicket | Refusal:
        """Take a storage; its device memory may be reused once the producing stream has passed this point.

        Args:
            data: the whole storage (uint8, 1-D, on the device).
            wait: wait for room in staging while writes are draining, instead of refusing. Room in the swap file is
                waited for in any case.
            item_bytes: length of an element, for a store that compresses.
        """

    @abstractmethod
    def prefetch(self, ticket: OwnTicket) -> bool:
        """Start reading a stored ticket, or hold on to one that is still to be written.

        False where the prefetch bound or staging has no room for it now.
        """

    @abstractmethod
    def cancel_prefetch(self, ticket: OwnTicket) -> bool:
        """Cancel a prefetch and free its memory; the store still has the bytes.

        False where there is nothing to cancel now.
        """

    def give_back(self) -> bool:
        """Give memory, threads and disk space back until the next :meth:`put`; False where bytes are in its care."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""


class State(Enum):
    """A state of a :class:`StateMachine`. Enum's own hash is a Python function, which each move would call."""

    __hash__ = object.__hash__


class StateMachine:
    """Something whose ``state`` changes along ``moves`` only."""

    __slots__ = ()
    noun: ClassVar[str]  # what it is, for the error
    moves: ClassVar[Mapping[Any, tuple[Any, ...]]]  # for each state those that may follow
    state: Any

    def move(self, state: State) -> None:
        """Go to ``state``.

        Raises:
            StateError: the move is illegal.
        """
        if state not in self.moves[self.state]:
            raise StateError(f"illegal move of {self.noun} from '{self.state.value}' to '{state.value}'")
        self.state = state


# Where storages go: asked by the cache at each save. Here because who asks and who answers know no other common place.


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision for a storage."""

    stores: tuple[AnyStore, ...]  # which may have it, in order of preference; none means that it is kept
    wait: bool  # for room in staging
    reason: str = ""  # why it is kept, where there is no store
    # Make it again from others in backward, where the cache can; else ``stores`` may have it.
    rematerialize: bool = False


STAYS = Choice((), wait=False, reason="placement keep")
"""The choice of no store: the storage stays where it is."""


class Policy(Protocol):
    """The choices for one micro-step."""

    def choose(self, key: Hashable, nbytes: int) -> Choice:
        """Decide where a storage goes; asked once for each storage of a forward."""
        ...


class Always:
    """The same choice for every storage; what can be rematerialized is not saved, where ``rematerialize`` is set."""

    def __init__(self, stores: Sequence[AnyStore], *, wait: bool, rematerialize: bool = False) -> None:
        self._choice = Choice(tuple(stores), wait, STAYS.reason, rematerialize)

    def choose(self, key: Hashable, nbytes: int) -> Choice:
        return self._choice


# ---- spans ----------------------------------------------------------------------------------------------------------


def padded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Span:
    """A byte range ``[offset, offset + nbytes)``."""

    offset: int
    nbytes: int


class SpanAllocator:
    """First fit by address, neighbours merged on free.

    Lowest address first means that the bytes just given back are the first to be used again: extents that were already
    written are overwritten at twice the rate of fresh ones on thin-provisioned drives, and the used part stays short.
    Every span is of whole pages, which is all that direct I/O moves.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = 0
        self.used_bytes = 0
        self.peak_used_bytes = 0
        # Free ranges as (offset, length), by offset. Each change of it is one statement: the exception of a signal
        # handler comes between two, and a range half changed would be handed out twice.
        self._free: list[tuple[int, int]] = []
        self.grow(capacity_bytes)

    def grow(self, capacity_bytes: int) -> None:
        """Extend the region to ``capacity_bytes``, rounded down to the alignment."""
        capacity_bytes -= capacity_bytes % PAGE_BYTES
        if capacity_bytes > self.capacity_bytes:
            added = Span(self.capacity_bytes, capacity_bytes - self.capacity_bytes)
            self.capacity_bytes = capacity_bytes
            self._insert(added)

    def allocate(self, nbytes: int) -> Span | None:
        """Take a span of at least ``nbytes``; None where no free range is long enough."""
        nbytes = padded(max(nbytes, 1))
        for index, (offset, length) in enumerate(self._free):
            if length >= nbytes:
                self._free[index : index + 1] = [(offset + nbytes, length - nbytes)] if length > nbytes else []
                self.used_bytes += nbytes
                self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)
                return Span(offset, nbytes)
        return None

    def free(self, span: Span) -> None:
        """Give a span back.

        Raises:
            StateError: the span, or a part of it, is free already.
        """
        self._insert(span)
        self.used_bytes -= span.nbytes

    def _insert(self, span: Span) -> None:
        start, end = span.offset, span.offset + span.nbytes
        first = last = bisect_left(self._free, (start, 0))
        previous_end = sum(self._free[first - 1]) if first > 0 else -1
        next_start = self._free[last][0] if last < len(self._free) else self.capacity_bytes + 1
        if previous_end > start or next_start < end or end > self.capacity_bytes:
            raise StateError(f"bytes {start}..{end} were given back twice or never handed out")
        if previous_end == start:
            first -= 1
            start = self._free[first][0]
        if next_start == end:
            end += self._free[last][1]
            last += 1
        self._free[first:last] = [(start, end - start)]
