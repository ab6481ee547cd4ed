"""Input and output of the commands: numbers checked as they are read, and results."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from typing import NamedTuple, TypeAlias

from ds_tba.errors import DsTbaError

# Types without a public name: what ``add_subparsers`` returns, and what has ``add_argument``.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
HasOptions: TypeAlias = "argparse._ActionsContainer"
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


def above_0(text: str) -> float:
    """Parse a finite number above 0.

    Raises:
        argparse.ArgumentTypeError: ``text`` is not one.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, in the unit that the option names")
    return value


class Result(NamedTuple):
    """The result of a command: its exit status, the lines for people, and the object that ``--json`` prints instead."""

    status: int
    lines: list[str]
    found: object


Command: TypeAlias = Callable[[argparse.Namespace], Result]


def add_json(parser: HasOptions) -> None:
    """Add the option that all commands have."""
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on the standard output")


def show(name: str, command: Command, options: argparse.Namespace) -> int:
    """Run a command and print its lines, or its JSON; return the exit status, which is 2 on an error of the user."""
    try:
        # What a model or a build prints meanwhile would be in the JSON.
        with redirect_stdout(sys.stderr) if options.json else nullcontext():
            result = Result(*command(options))
    except DsTbaError as error:
        sys.stderr.write(f"ds_tba {name}: {error}\n")
        return 2
    lines = [json.dumps(result.found, indent=2)] if options.json else result.lines
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return result.status
