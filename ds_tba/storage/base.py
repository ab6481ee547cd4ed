"""The contract between the tensor cache and a tier that holds bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

import torch

from ds_tba.device.accelerator import Arrival
from ds_tba.errors import StateError


class Refusal(Enum):
    """Why a store cannot take a tensor now; the values are the report's words."""

    STAGING_FULL = "staging full"
    LARGER_THAN_STAGING = "larger than io.staging_bytes"
    NO_SPACE = "no space in the swap file"
    PATH_FAILED = "path failed"
    HOST_FULL = "no room in host_budget_bytes"
    CLOSED = "store closed"


class Ticket:
    """One storage in a store's care; each store has its own kind.

    Attributes:
        passing_bytes: device memory, beside that of the storage, that bringing it back may take.
    """

    __slots__ = ("nbytes", "passing_bytes", "store")

    def __init__(self, nbytes: int, store: Store[Any], passing_bytes: int = 0) -> None:
        self.nbytes = nbytes
        self.store = store
        self.passing_bytes = passing_bytes


OwnTicket = TypeVar("OwnTicket", bound=Ticket)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Bytes on their way back to the device.

    Attributes:
        arrival: the memory, and the copy into it.
        stored: whether the store still has the bytes too; if not, ``data`` is the only copy.
    """

    arrival: Arrival
    stored: bool

    @property
    def data(self) -> torch.Tensor:
        """The storage (uint8, 1-D, on the device), for the calling thread's current stream."""
        return self.arrival.join()


class Store(ABC, Generic[OwnTicket]):
    """Holds the bytes of storages between pack and unpack. A ticket goes back to the store that issued it."""

    @abstractmethod
    def put(self, data: torch.Tensor, *, wait: bool) -> OwnTicket | Refusal:
        """Take a storage; its device memory may be reused once the producing stream has passed this point.

        Args:
            data: the whole storage (uint8, 1-D, on the device).
            wait: wait for room in staging while writes are draining, instead of refusing.
        """

    @abstractmethod
    def prefetch(self, ticket: OwnTicket) -> bool:
        """Start reading a stored ticket, or hold on to one that is still to be written.

        False where the prefetch bound or staging has no room for it now.
        """

    @abstractmethod
    def get(self, ticket: OwnTicket, device: torch.device) -> Loaded:
        """The bytes of a ticket on the device: handed over from memory if a write is unfinished, else read.

        Raises:
            ActivationLostError: they could not be read back.
            ActivationCorruptionError: what was read is not what was written.
        """

    @abstractmethod
    def release(self, ticket: OwnTicket) -> None:
        """Give the bytes up. Never blocks, and may be called from a finalizer in any thread at any point."""

    @abstractmethod
    def settle(self) -> None:
        """Let go of what copies that are done still hold. Never blocks on the device."""

    @abstractmethod
    def cancel_prefetch(self, ticket: OwnTicket) -> bool:
        """Give up what was read ahead, or is about to be, and its memory; the store still has the bytes.

        False where there is nothing to give up now.
        """

    @abstractmethod
    def finish_copies(self) -> None:
        """Block until no copy out of device memory is under way, and let go of that memory."""

    def trim(self) -> None:
        """Give back what memory can be had again, while nothing goes to this store."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""


class StateMachine:
    """Something whose ``state`` changes along ``moves`` only.

    Attributes:
        noun: what it is, for the error.
        moves: for each state those that may follow.
    """

    __slots__ = ()
    noun: ClassVar[str]
    moves: ClassVar[Mapping[Any, tuple[Any, ...]]]
    state: Any

    def move(self, state: Enum) -> None:
        """Go to ``state``.

        Raises:
            StateError: the move is illegal.
        """
        if state not in self.moves[self.state]:
            raise StateError(f"illegal move of {self.noun} from '{self.state.value}' to '{state.value}'")
        self.state = state
