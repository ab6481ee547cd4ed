"""``ds_tba report FILE``: a report's JSON as lines to read."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ds_tba.telemetry.report import OffloadReport


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("report", help="show the JSON at report.path as a table")
    parser.add_argument("file", type=Path, help="the JSON that report.path named")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table; 2 if the file is not a report."""
    try:
        report = OffloadReport(**json.loads(options.file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        sys.stderr.write(f"ds_tba report: {options.file} is not a report that this version wrote: {error}\n")
        return 2
    rows = [("state", report.state), *report.rows()]
    width = max(len(name) for name, _ in rows)
    sys.stdout.writelines(f"{name:<{width}}  {value}\n" for name, value in rows)
    return 0
