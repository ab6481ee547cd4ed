"""Input and output of the commands: numbers checked as they are read, tables, results."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from typing import Any

from ds_tba.errors import DsTbaError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def size(text: str) -> int:
    """Parse a whole number of 1 or more as people write it: 4096, 32k, 24GB or 24GiB, in powers of 1024.

    Raises:
        argparse.ArgumentTypeError: ``text`` is not one.
    """
    found = _SIZE.fullmatch(text.strip())
    value = float(found[1]) * 1024 ** " kmgt".index(found[2].lower() or " ") if found else 0.0
    if not 1 <= value < math.inf or (value != int(value) and found and not found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1 or more, such as 4096, 32k or 24GB")
    return int(value)


def in_units_of(unit: float) -> Callable[[str], float]:
    """A parser of a finite number above 0, which it multiplies by ``unit``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, in the unit that the option names")
        return value * unit

    return parse


def table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Rows of cells, aligned: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


Make = Callable[[argparse.Namespace], tuple[int, list[str], Any]]


def add_json(parser: Any) -> None:
    """The option of all commands."""
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on the standard output")


def show(command: str, make: Make, options: argparse.Namespace) -> int:
    """Make a result and print its lines, or what they say as JSON; the exit status, which is 2 on an error of the user.

    Args:
        make: returns the exit status, the lines, and what is printed in their place with ``--json``.
    """
    try:
        # What a model or a build prints meanwhile would be in the JSON.
        with redirect_stdout(sys.stderr) if options.json else nullcontext():
            status, lines, found = make(options)
    except DsTbaError as error:
        sys.stderr.write(f"ds_tba {command}: {error}\n")
        return 2
    try:
        sys.stdout.writelines(f"{line}\n" for line in ([json.dumps(found, indent=2)] if options.json else lines))
        sys.stdout.flush()
    except BrokenPipeError:  # the command ends quietly
        raise
    except OSError as error:
        sys.stderr.write(f"ds_tba {command}: the standard output cannot be written: {error.strerror}\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tells of it at exit, too
        return 2
    return status
