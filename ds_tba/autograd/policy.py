"""Where storages go: asked by the cache at each save."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ds_tba.storage.base import Store


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do with a storage.

    Attributes:
        stores: which may have it, in order of preference; none means that it is kept.
        wait: for room in staging.
        reason: why it is kept, where there is no store.
    """

    stores: tuple[Store[Any], ...]
    wait: bool
    reason: str = ""


class Policy(Protocol):
    """The choices for one micro-step."""

    def choose(self, key: Hashable, nbytes: int) -> Choice:
        """Where the storage goes; asked at every save, also of what has its place already."""
        ...


class Always:
    """The same for every storage."""

    def __init__(self, stores: Sequence[Store[Any]], *, wait: bool, reason: str = "placement keep") -> None:
        self._choice = Choice(tuple(stores), wait, reason)

    def choose(self, key: Hashable, nbytes: int) -> Choice:
        """That one choice."""
        return self._choice
