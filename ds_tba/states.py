"""A state machine that refuses illegal moves."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

from ds_tba.errors import StateError


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
