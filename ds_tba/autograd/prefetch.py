"""The moved records of one micro-step, and the order in which they are brought back.

Knows records as far as it must: whether their bytes are wanted. The cache changes micro-steps, under its lock.

[Note: Micro-steps] A micro-step has one forward as a rule. Several forwards before the first backward (a contrastive
pair, two outputs in one loss) are one micro-step to a plan: what they save lies in memory together. So is a whole step
of a pipeline, where the forward of one micro-batch comes between the forward and the backward of another
(*interleaved*): what to bring back next may have been saved two forwards ago, and its read can begin while the forward
between runs.

[Note: Reading ahead] It begins with the first unpack, of whatever kind, after forward: each forward has an unpack
hook of its own, so that it is known which micro-step the tensor belongs to. It goes in the order in which an earlier
backward of as many records wanted them, else in reverse; of interleaved forwards the earliest first. Without a plan it
goes as far as the stores' bounds allow. With a plan it goes no further than ``lead`` says, so that reloaded bytes do
not lie in device memory long before their use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar


class Prefetchable(Protocol):
    """A record of a saved storage.

    Attributes:
        reloaded: its bytes in device memory again.
        pending: how many of its views have no bytes and were not unpacked yet.
    """

    reloaded: Any
    pending: int


class Phase(Enum):
    """How far a micro-step has come."""

    FORWARD = "more may be saved, so that there is no order yet"
    WAITING = "forward is over, and nothing was unpacked since"
    BACKWARD = "something was unpacked"


Record = TypeVar("Record", bound=Prefetchable)


class MicroStep(Generic[Record]):
    """The moved records of one micro-step in pack order. Changed only under the cache's lock.

    Attributes:
        is_interleaved: see [Note: Micro-steps].
        lead: see ``Plan.prefetch_distance``; empty is no limit. To be set before backward.
        saved: records of it that are alive, moved or not.
    """

    def __init__(self, *, is_interleaved: bool = False) -> None:
        self.is_interleaved = is_interleaved
        self.lead: Sequence[int] = ()
        self.saved = 0
        self.phase = Phase.FORWARD
        self._records: list[Record | None] = []
        self._forwards: list[int] = []  # index of the first record of each
        self._learned: Sequence[int] | None = None  # of an earlier micro-step, as far as that was known in time
        self._order: list[int] = []
        self._position: dict[int, int] = {}
        self._used = 0  # how far backward has come in the order
        self._cursor = 0  # how far reading ahead has come
        self._unpacked: list[int] = []
        self._live = 0

    @property
    def expects_forward(self) -> bool:
        """Whether one more forward belongs to it: something that was saved is alive, and nothing was unpacked."""
        return self.is_interleaved or (self.phase is Phase.WAITING and self.saved > 0)

    def begin_forward(self, lead: Sequence[int] = ()) -> None:
        """A forward begins; ``lead`` is that of the plan."""
        self.phase = Phase.FORWARD
        self.lead = lead
        self._forwards.append(len(self._records))

    def add(self, record: Record) -> int:
        """Append a record; returns its index."""
        self._records.append(record)
        self._live += 1
        return len(self._records) - 1

    def add_use(self, index: int) -> None:
        """Backward asked for a record's bytes."""
        self._unpacked.append(index)

    def remove(self, index: int) -> list[int] | None:
        """A record is gone; returns, with the last of them, the order of first uses, if every one was used."""
        self._records[index] = None
        self._live -= 1
        if self._live:
            return None
        order = list(dict.fromkeys(self._unpacked))  # a second backward unpacks again
        return order if len(order) == len(self._records) else None

    def read_ahead(self, learned: Sequence[int], prefetch: Callable[[Record], bool], after: int | None = None) -> None:
        """Ask for the records that backward will want next; see [Note: Reading ahead].

        Args:
            learned: the order of an earlier micro-step.
            prefetch: asks for a record; False where there is no room for it now.
            after: the record that backward wants now.
        """
        if self.phase is Phase.FORWARD:
            return
        self.phase = Phase.BACKWARD
        if not self._order or (self.is_interleaved and len(self._order) < len(self._records)):
            self._extend_order(learned)
        if after is not None:
            self._used = max(self._used, self._position.get(after, -1) + 1)
            self._cursor = max(self._cursor, self._used)
        while self._cursor < self._reach:
            ahead = self._records[self._order[self._cursor]]
            wanted = ahead is not None and ahead.reloaded is None and ahead.pending > 0
            if ahead is not None and wanted and not prefetch(ahead):
                return
            self._cursor += 1

    def _extend_order(self, learned: Sequence[int]) -> None:
        """Give the records that have come since their places in the order."""
        known, count = len(self._order), len(self._records)
        if self._learned is None:
            self._learned = learned
        if self.is_interleaved:
            new = [index for index in self._learned if known <= index < count]
            if len(new) < count - known:
                new = self._forward_by_forward(known)
        else:
            new = list(learned) if len(learned) == count else list(range(count - 1, -1, -1))
        self._position |= {index: known + place for place, index in enumerate(new)}
        self._order += new

    def _forward_by_forward(self, known: int) -> list[int]:
        """The records from ``known`` on: those of the earliest forward first, each forward's in reverse."""
        bounds = pairwise([*self._forwards, len(self._records)])
        return [index for first, end in bounds for index in range(end - 1, max(first, known) - 1, -1)]

    @property
    def _reach(self) -> int:
        """How far in the order reading ahead may have come by now."""
        count = len(self._order)
        return min(count, self._used + self.lead[self._used]) if self._used < len(self.lead) else count
