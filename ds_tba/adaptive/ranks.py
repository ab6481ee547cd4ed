"""How ranks agree before each of them acts: on when to plan, from which trace, and on the plan.

Knows torch.distributed; does not know plans. A rank that recomputed a block which the others do not would, under
ZeRO-3, ask for parameters that nobody sends it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import distributed


class Agreement(Protocol):
    """The ranks of one training run; every method is called by all of them, in the same order."""

    rank: int
    size: int

    def all_reduce_max(self, value: int) -> int:
        """The highest value that any rank has."""
        ...

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        ...

    def broadcast(self, value: Any, leader: int) -> Any:
        """The value that ``leader`` has."""
        ...


class Alone:
    """One rank."""

    rank = 0
    size = 1

    def all_reduce_max(self, value: int) -> int:
        """That value."""
        return value

    def all_gather(self, value: Any) -> list[Any]:
        """That value."""
        return [value]

    def broadcast(self, value: Any, leader: int) -> Any:
        """That value."""
        return value


class Ranks:
    """All ranks, over a group of their own in host memory: no device waits for it.

    Building one is a collective: every rank of the run does it.
    """

    def __init__(self) -> None:
        self.rank = distributed.get_rank()
        self._group = distributed.new_group(backend="gloo")
        self.size = distributed.get_world_size()

    def all_reduce_max(self, value: int) -> int:
        """The highest value that any rank has."""
        numbers = torch.tensor([value], device="cpu")
        distributed.all_reduce(numbers, distributed.ReduceOp.MAX, group=self._group)
        return int(numbers.item())

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, which must be picklable."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self._group)
        return found

    def broadcast(self, value: Any, leader: int) -> Any:
        """The value that ``leader`` has, which must be picklable."""
        box = [value if self.rank == leader else None]
        distributed.broadcast_object_list(box, src=leader, group=self._group, device=torch.device("cpu"))
        return box[0]
