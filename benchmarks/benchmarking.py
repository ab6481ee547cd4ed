"""Options, tables, ratios and result files, alike in all benchmarks. It knows nothing of torch."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

MIB, GIB = 1 << 20, 1 << 30
JSON = (Path, "write every measurement to this file")
Found = Mapping[str, Any]


def parser_of(doc: str | None, **options: object) -> argparse.ArgumentParser:
    """Return a parser with a docstring's first line as description, and options (:func:`add_options`)."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    add_options(parser, **options)
    return parser


def add_options(parser: argparse.ArgumentParser, **options: object) -> None:
    """Add an option for each name, from its default or from a pair of that and its help.

    A default of False makes a flag. A type in place of a default makes an option that is None unless it is given.
    """
    for name, told in options.items():
        default, words = told if isinstance(told, tuple) else (told, None)
        if default is False:
            parser.add_argument(f"--{name}", action="store_true", help=words)
        elif isinstance(default, type):
            parser.add_argument(f"--{name}", type=default, help=words)
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default, help=words)


def race_parser(doc: str | None, **more: object) -> argparse.ArgumentParser:
    """Return a parser of the options that say where a race runs, for how long, and where its results go."""
    parser = parser_of(
        doc, minutes=(20.0, "for everything; two rounds are run in any case"), rounds=(15, "at most"),
        steps=(3, "of each turn"), device=("cpu", "cpu or cuda"), **more,
    )  # fmt: skip
    parser.add_argument("--nvme_path", type=Path, required=True, help="an existing directory on the drive")
    parser.add_argument("--out", type=Path, required=True, help="directory for the results, made if need be")
    return parser


def provenance(program: str, argv: Sequence[str] | None) -> dict[str, str]:
    """Return the command and its date, for a file of results."""
    command = ["python", f"benchmarks/{Path(program).name}", *(sys.argv[1:] if argv is None else argv)]
    return {"command": " ".join(command), "date": today()}


def today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


def first_line(error: BaseException) -> str:
    """Return an error's kind and the first line of its text."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:300]


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def median(rounds: Sequence[Found], name: str, value: Callable[[Any], float]) -> float:
    """Return the median over the rounds of one variant's figure."""
    return statistics.median(value(one[name]) for one in rounds)


def ratios(rounds: Sequence[Found], name: str, value: Callable[[Any], float], to: str = "keep") -> list[float]:
    """Return the ratios of one variant's figure to that of another in the same round, sorted."""
    return sorted(value(one[name]) / value(one[to]) for one in rounds)


def ranged(values: Sequence[float], digits: int = 3) -> str:
    """Return the median of sorted values and their range."""
    return f"{statistics.median(values):.{digits}f} [{values[0]:.2f}-{values[-1]:.2f}]"


def write_json(path: Path | None, found: object) -> None:
    """Write results, where there is a path for them; what is no JSON, as paths in options, as text."""
    if path is not None:
        write_whole(path, json.dumps(found, indent=1, default=str) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write all of the text or none: the file has its old text if the process ends meanwhile."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
