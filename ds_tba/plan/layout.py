"""Which storage of a trace is which in another micro-step of the same model.

[Note: Scopes] A micro-step is cut where passes through blocks begin and end: what lies before the first pass, the first
pass, what lies between it and the second, ... In each scope the storages are known by the order in which they are first
saved *there*, so that a block which is recomputed (and saves its inputs only) shifts nobody else's place.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_tba.planner.trace import Trace


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of a trace's storages.

    Attributes:
        scopes: for each scope the storages in the order in which they were first saved in it; pass ``n`` through a
            block is scope ``2 * n + 1``.
    """

    scopes: tuple[tuple[int, ...], ...]

    def expected(self, scope: int, trace: Trace, recomputed: tuple[bool, ...]) -> tuple[int, ...]:
        """The storages that a scope saves when these blocks are recomputed."""
        if scope >= len(self.scopes):
            return ()
        number = scope // 2
        if scope % 2 and recomputed[number]:
            return trace.blocks[number].inputs
        return self.scopes[scope]
