"""Asks for the moved records of one micro-step before backward wants them, those of the last node first.

Sees order alone, and how far it was asked for; cannot see whether bytes are on their way, which is the state of their
record (``saved.py``), nor whether there is room (``residency.py``). The cache changes micro-steps, under its lock.

[Note: Micro-steps] A micro-step has one forward as a rule. Several forwards before the first backward (a contrastive
pair, two outputs in one loss) are one micro-step to a plan: what they save lies in memory together. So is a whole step
of a pipeline, where the forward of one micro-batch comes between the forward and the backward of another
(*interleaved*): what to bring back next may have been saved two forwards ago, and its read can begin while the forward
between runs.

[Note: Reading ahead] It begins with the first unpack, of whatever kind, after forward: each forward has an unpack
hook of its own, so that it is known which micro-step the tensor belongs to. Of all nodes that are ready autograd runs
the one that was made last (``torch/csrc/autograd/engine.cpp``, ``CompareNodeTaskTime``), which unpacks in the order in
which it packed. So a record has the place of the last node that saved it, or something that is made of it. Of
interleaved forwards the earliest comes first. Without a plan reading goes as far as the stores' bounds allow. With a
plan it goes no further than ``prefetch_distance`` says, so that reloaded bytes do not lie in device memory long before
their use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any, Protocol


class Placed(Protocol):
    """A record of a micro-step, with the sequence number of the node for which backward wants it first."""

    node: int


class Phase(Enum):
    """How far a micro-step has come."""

    FORWARD = "more may be saved, so that there is no order yet"
    WAITING = "forward is over, and nothing was unpacked since"
    BACKWARD = "something was unpacked"


class MicroStep:
    """The moved records of one micro-step, in the order in which they were placed."""

    def __init__(self, *, is_interleaved: bool = False) -> None:
        self.is_interleaved = is_interleaved  # see [Note: Micro-steps]
        self.prefetch_distance: Sequence[int] = ()  # see ``Plan.prefetch_distance``; set by each forward
        self.alive = 0  # how many of the tensors and storages that it has saved are alive, moved or not
        self.phase = Phase.FORWARD
        self._records: list[Placed | None] = []
        self._forwards: list[int] = []  # index of the first record of each
        self._order: list[int] = []
        self._position: dict[int, int] = {}
        self._used = 0  # how far backward has come in the order
        self._asked = 0  # how far in the order was asked for

    @property
    def expects_forward(self) -> bool:
        """True if one more forward belongs to it: something that was saved is alive, and nothing was unpacked."""
        return self.is_interleaved or (self.phase is Phase.WAITING and self.alive > 0)

    def begin_forward(self, prefetch_distance: Sequence[int]) -> None:
        self.phase = Phase.FORWARD
        self.prefetch_distance = prefetch_distance
        self._forwards.append(len(self._records))

    def add(self, record: Placed) -> int:
        """Append a record; return its index."""
        self._records.append(record)
        return len(self._records) - 1

    def remove(self, index: int) -> None:
        """Forget a record."""
        self._records[index] = None  # else its bytes would live as long as the micro-step

    def read_ahead(self, ask: Callable[[Any], bool], after: int | None = None) -> None:
        """Ask for the records that backward will want next; see [Note: Reading ahead].

        Args:
            ask: for a record; False where there is no room for it now.
            after: the record that backward wants now.
        """
        if self.phase is Phase.FORWARD:  # more is to come, and backward wants that first
            return
        self.phase = Phase.BACKWARD
        if not self._order or (self.is_interleaved and len(self._order) < len(self._records)):
            self._extend_order()
        if after is not None:
            self._used = max(self._used, self._position.get(after, -1) + 1)
            self._asked = max(self._asked, self._used)
        reach = len(self._order)
        if self._used < len(self.prefetch_distance):
            reach = min(reach, self._used + self.prefetch_distance[self._used])
        while self._asked < reach:
            record = self._records[self._order[self._asked]]
            if record is not None and not ask(record):  # no room now: it is asked for again at the next unpack
                return
            self._asked += 1

    def _extend_order(self) -> None:
        """Give the records that have come since their places in the order."""
        known, count = len(self._order), len(self._records)
        bounds = pairwise([*self._forwards, count] if self.is_interleaved else [0, count])
        new: list[int] = []
        for first, end in bounds:
            new += sorted(range(max(first, known), end), key=self._node_of, reverse=True)
        self._position |= {index: known + place for place, index in enumerate(new)}
        self._order += new

    def _node_of(self, index: int) -> int:
        record = self._records[index]
        return -1 if record is None else record.node
