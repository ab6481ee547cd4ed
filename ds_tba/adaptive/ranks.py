"""How ranks agree before each of them acts: on when to plan, from which trace, and on the plan.

Knows torch.distributed; does not know plans. A rank that recomputed a block which the others do not would, under
ZeRO-3, ask for parameters that nobody sends it. The stages of a pipeline run other layers and need no common plan: only
the ranks of one stage agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import distributed


class Agreement(Protocol):
    """The ranks that decide together; every method is called by all of them, in the same order.

    Attributes:
        rank: of this process among them.
        where: for the log, which ranks these are, after a space; empty for all ranks of the run.
    """

    rank: int
    size: int
    where: str

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
    where = ""

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
    """Ranks over a group of their own in host memory: no device waits for it.

    Building one is a collective: every rank of the run does it.

    Args:
        group: of gloo, which has this rank; by default of all ranks.
        where: see :class:`Agreement`.
    """

    def __init__(self, group: Any = None, where: str = "") -> None:
        self._group = distributed.new_group(backend="gloo") if group is None else group
        self.rank = distributed.get_rank(self._group)
        self.size = distributed.get_world_size(self._group)
        self.where = where

    @classmethod
    def of_part(cls, parts: Sequence[Sequence[int]], noun: str) -> Ranks:
        """The ranks of the part of the run that has this rank. A collective of all ranks of the run.

        Args:
            parts: the ranks of each; together all ranks, each in one part.
            noun: what a part is, for the log.
        """
        groups = [distributed.new_group(list(part), backend="gloo") for part in parts]
        number = next(number for number, part in enumerate(parts) if distributed.get_rank() in part)
        return cls(groups[number], f" of {noun} {number}")

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
        source = distributed.get_global_rank(self._group, leader)
        distributed.broadcast_object_list(box, src=source, group=self._group, device=torch.device("cpu"))
        return box[0]
