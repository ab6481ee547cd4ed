"""A listener to the passes through blocks, which has the room for them, too; and the comparison of two runs."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

Event = tuple[str, int]


def number_of(path: str) -> int:
    """The first number in the path of a block."""
    found = re.search(r"\d+", path)
    return int(found[0]) if found else 0


class Listener:
    """Wants the passes through the blocks in ``wanted`` recomputed, and keeps a diary."""

    def __init__(self) -> None:
        self.wanted: set[int] = set()
        self.events: list[Event] = []
        self.inputs: list[list[Tensor]] = []
        self.entered: list[int] = []  # and not left

    def enter(self, path: str, inputs: Sequence[Tensor], obstacle: str) -> int | None:
        self.events.append(("enter", number_of(path)))
        self.entered.append(number_of(path))
        self.inputs.append(list(inputs))
        return number_of(path) if number_of(path) in self.wanted else None

    def leave(self, obstacle: str) -> None:
        self.events.append(("leave", self.entered.pop()))

    def begin_recomputation(self, saved_bytes: int) -> None:
        self.events.append(("recompute", saved_bytes))

    def count_again(self, tensor: Tensor) -> None: ...

    def count(self, what: str) -> int:
        return sum(event == what for event, _ in self.events)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if not torch.equal(ours[name], theirs[name])} == set()
