"""One micro-step as the cache sees it: what its forwards moved, and how far reading ahead has come in its backward.

[Note: Micro-steps] A micro-step has one forward as a rule. Several forwards before the first backward (a contrastive
pair, two outputs in one loss) are one micro-step to a plan: what they save lies in memory together.

[Note: Reading ahead] It begins with the first unpack, of whatever kind, after forward: each forward has an unpack hook
of its own, so that it is known which micro-step it belongs to. It goes in the order in which an earlier backward of as
many records wanted them, else in reverse. Without a plan it goes as far as the stores' bounds allow. With a plan it
goes no further than ``lead`` says, so that what is reloaded does not lie in device memory long before its use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ds_tba.device.accelerator import Arrival
from ds_tba.storage.base import Ticket


class Moved(Protocol):
    """A saved storage that is in a store."""

    ticket: Ticket | None
    arrival: Arrival | None
    nbytes: int
    pending: int


class MicroStep:
    """The moved records of one micro-step in pack order. Changed only under the cache's lock.

    Attributes:
        lead: see ``Plan.prefetch_lead``; empty is no limit. To be set before backward.
        saved: records of it that are alive, moved or not.
        is_forward: more may be packed, so that there is no order yet.
        is_asleep: forward is over, and nothing was unpacked since.
    """

    def __init__(self) -> None:
        self.lead: Sequence[int] = ()
        self.saved = 0
        self.is_forward = True
        self.is_asleep = False
        self._records: list[Moved | None] = []
        self._order: Sequence[int] = ()
        self._position: dict[int, int] = {}
        self._used = 0  # how far backward has come in the order
        self._cursor = 0  # how far reading ahead has
        self._unpacked: list[int] = []
        self._live = 0

    def begin_forward(self) -> None:
        """A forward begins: the first, or one more before backward."""
        self.is_forward, self.is_asleep = True, False

    def end_forward(self) -> None:
        """Nothing more will be packed in this forward: reading ahead may begin."""
        self.is_forward, self.is_asleep = False, True

    @property
    def is_waiting(self) -> bool:
        """Whether backward is yet to come: something that was saved is alive, and nothing was unpacked."""
        return self.is_asleep and self.saved > 0

    def add(self, record: Moved) -> int:
        """Append a record; its index."""
        self._records.append(record)
        self._live += 1
        return len(self._records) - 1

    def note_reload(self, index: int) -> None:
        """A record's bytes were asked for."""
        self._unpacked.append(index)

    def remove(self, index: int) -> list[int] | None:
        """A record is gone; with the last of them the order of first uses, if every one was used."""
        self._records[index] = None
        self._live -= 1
        if self._live:
            return None
        order = list(dict.fromkeys(self._unpacked))  # a second backward unpacks again
        return order if len(order) == len(self._records) else None

    def read_ahead(self, learned: Sequence[int], prefetch: Callable[[Moved], bool], after: int | None = None) -> None:
        """Ask for what backward will want next; see [Note: Reading ahead].

        Args:
            learned: the order of an earlier micro-step.
            prefetch: asks for a record; False where there is no room for it now.
            after: the record that backward wants now.
        """
        if self.is_forward:
            return
        self.is_asleep = False
        if not self._order:
            count = len(self._records)
            self._order = learned if len(learned) == count else range(count - 1, -1, -1)
            self._position = {index: place for place, index in enumerate(self._order)}
        if after is not None:
            self._used = max(self._used, self._position.get(after, -1) + 1)
            self._cursor = max(self._cursor, self._used)
        while self._cursor < self._reach:
            ahead = self._records[self._order[self._cursor]]
            wanted = ahead is not None and ahead.arrival is None and ahead.pending > 0
            if ahead is not None and wanted and not prefetch(ahead):
                return
            self._cursor += 1

    @property
    def _reach(self) -> int:
        """How far in the order reading ahead may have come by now."""
        count = len(self._order)
        return min(count, self._used + self.lead[self._used]) if self._used < len(self.lead) else count
