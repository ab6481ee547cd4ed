"""``ds_tba plan --longest``: the longest sequence that each setting trains on the device.

[Note: Longest] Memory grows with the sequence in a straight line, or faster where attention makes scores. So the line
through two lengths says where the limit is crossed, and one more micro-step there says whether it is. The next line is
through the longest that fits and the shortest that does not, where there are both. Nothing is extrapolated: each answer
is a length that was run on shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

from ds_tba.cli.plan.rows import TIGHT, Row, Setup, fixed_rows, trainings

UNIT = 16  # answers are multiples
NEAR = 0.01  # of the answer: no closer one is sought
MOST = 1 << 24
FURTHER = 16  # times the longest that was tried, at most
_TRIES = 16


class Longest(NamedTuple):
    """The longest sequence of a setting, and the row there; where not even ``UNIT`` tokens fit, 0 and the row of those.

    ``is_most``: it is ``MOST``, and longer ones were not tried.
    """

    sequence: int
    row: Row
    is_most: bool


def longest_of(setup_of: Callable[[int], Setup], first: int) -> list[Longest]:
    """Find the longest sequence of each setting that makes no plan.

    Args:
        setup_of: what a micro-step of a length takes; called once for each length.
        first: a length to begin with.
    """

    @cache
    def rows(sequence: int) -> dict[str, Row]:
        setup = setup_of(sequence)
        found = (
            fixed_rows(setup, training, ending, merged, moves_all=True)
            for ending, training, merged in trainings(setup.training)
        )
        return {row.name: row for each in found for row in each}

    def row(name: str, sequence: int) -> Row:
        return rows(sequence)[name]

    first = min(MOST, max(UNIT, first // UNIT * UNIT))
    limit_bytes = int(TIGHT * (setup_of(first).device.memory_bytes or 0))
    return [_longest(partial(row, name), first, limit_bytes) for name in rows(first)]


def _longest(row: Callable[[int], Row], first: int, limit_bytes: int) -> Longest:
    """See [Note: Longest]."""
    needs: dict[int, int] = {}
    fits, fails, guess = 0, MOST + UNIT, first
    for _ in range(_TRIES):
        needs[guess] = row(guess).need_bytes
        fits, fails = (max(fits, guess), fails) if needs[guess] <= limit_bytes else (fits, min(fails, guess))
        crossing = min(fails - UNIT, max(fits + UNIT, _crossing(needs, limit_bytes)))
        if fails - fits <= UNIT or (fits and crossing - fits <= NEAR * fits):
            break
        guess = crossing
    return Longest(fits, row(fits or UNIT), fits == MOST)


def _crossing(needs: dict[int, int], limit_bytes: int) -> int:
    """Return a length a little below where the line through the two nearest lengths crosses the limit."""
    fitting = sorted(sequence for sequence, need_bytes in needs.items() if need_bytes <= limit_bytes)
    others = sorted(needs.keys() - set(fitting))
    if len(needs) == 1:
        return 2 * fitting[0] if fitting else others[0] // (2 * UNIT) * UNIT
    low, high = (*fitting[-1:], *others[:1]) if fitting and others else tuple(fitting[-2:] or others[:2])
    slope, most = (needs[high] - needs[low]) / (high - low), FURTHER * high
    if slope <= 0:  # something else needs more than a micro-step, as the optimizer's step may
        return most if fitting else UNIT
    found = low + (limit_bytes - needs[low]) / slope
    return int(min(most, found * (1 - NEAR / 4))) // UNIT * UNIT
