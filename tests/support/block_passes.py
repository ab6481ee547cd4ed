"""A listener to the passes through blocks, and the comparison of two runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_tba.recompute.passes import Block

Event = tuple[str, int]


class Listener:
    """Wants the passes through the blocks in ``wanted`` recomputed, and keeps a diary."""

    def __init__(self) -> None:
        self.wanted: set[int] = set()
        self.events: list[Event] = []
        self.inputs: list[list[Tensor]] = []

    def enter(self, block: Block, inputs: Sequence[Tensor]) -> int | None:
        self.events.append(("enter", block.index))
        self.inputs.append(list(inputs))
        return block.index if block.index in self.wanted else None

    def leave(self, block: Block) -> None:
        self.events.append(("leave", block.index))

    def recompute(self, saved_bytes: int) -> None:
        self.events.append(("recompute", saved_bytes))

    def save_again(self, tensor: Tensor) -> None: ...

    def count(self, what: str) -> int:
        return sum(event == what for event, _ in self.events)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if not torch.equal(ours[name], theirs[name])} == set()
