"""What a trace's micro-step saves, where: groups of equal blocks, and what lies outside of them. Pure.

A storage that several blocks save counts in the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ds_tba.planner.trace import OUTSIDE, StorageTrace, Trace

_LAST_NUMBER = re.compile(r"\d+(?!.*\d)")


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring passes through blocks that save as much as each other, or what one module outside of blocks saves.

    Attributes:
        name: the path, with a range of numbers for several.
        count: how many; 0 for what is outside.
        nbytes, movable_bytes: of one of them; the second is what may leave device memory.
        forward_s: of one of them.
        members: indices of the storages of all of them.
    """

    name: str
    count: int
    nbytes: int
    movable_bytes: int
    forward_s: float
    members: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Of all of them."""
        return self.nbytes * max(1, self.count)


def groups_of(trace: Trace) -> list[Group]:
    """What is saved in blocks, in the order of forward; then what is outside, the most bytes first."""
    return [*_blocks(trace), *_outside(trace)]


def owner_of(storage: StorageTrace) -> int | None:
    """The first pass that saves a storage, or OUTSIDE; None where nobody does."""
    return storage.blocks[0] if storage.blocks else None


def _blocks(trace: Trace) -> Iterator[Group]:
    members: list[list[int]] = [[] for _ in trace.blocks]
    for index, storage in enumerate(trace.storages):
        owner = owner_of(storage)
        if owner is not None and owner != OUTSIDE:
            members[owner].append(index)

    def alike(number: int) -> tuple[str, int, int]:
        path = _LAST_NUMBER.sub("*", trace.blocks[number].module)
        return path, _nbytes(trace, members[number]), _movable_bytes(trace, members[number])

    for (_, nbytes, movable_bytes), run in groupby(range(len(trace.blocks)), alike):
        numbers = list(run)
        paths = [trace.blocks[number].module for number in numbers]
        forward_s = sum(trace.blocks[number].forward_s for number in numbers) / len(numbers)
        own = tuple(index for number in numbers for index in members[number])
        yield Group(_range(paths), len(numbers), nbytes, movable_bytes, forward_s, own)


def _outside(trace: Trace) -> list[Group]:
    members: dict[str, list[int]] = {}
    for index, storage in enumerate(trace.storages):
        if owner_of(storage) == OUTSIDE:
            members.setdefault(storage.module, []).append(index)
    groups = [
        Group(module or "the model itself", 0, _nbytes(trace, own), _movable_bytes(trace, own), 0.0, tuple(own))
        for module, own in members.items()
    ]
    return sorted(groups, key=lambda group: -group.nbytes)


def _range(paths: Sequence[str]) -> str:
    """``layers.3 .. layers.5`` as ``layers.3-5``."""
    first, last = paths[0], paths[-1]
    number = _LAST_NUMBER.search(last)
    if first == last or number is None:
        return first
    return _LAST_NUMBER.sub(lambda found: f"{found[0]}-{number[0]}", first)


def _nbytes(trace: Trace, members: Sequence[int]) -> int:
    return sum(trace.storages[index].nbytes for index in members)


def _movable_bytes(trace: Trace, members: Sequence[int]) -> int:
    return sum(trace.storages[index].nbytes for index in members if trace.storages[index].is_movable)
