"""Numbers on the command line, checked as they are read."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence


def count(text: str) -> int:
    """A whole number of 1 or more.

    Raises:
        argparse.ArgumentTypeError: it is not.
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: it must be a whole number of 1 or more")
    return value


def above_0(text: str) -> float:
    """A finite number above 0.

    Raises:
        argparse.ArgumentTypeError: it is not.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: it must be a number above 0, in the unit that the option names")
    return value


def table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Rows of cells, aligned: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()
