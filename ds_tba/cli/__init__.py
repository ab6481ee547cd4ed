"""The command ``ds_tba`` and its smallest subcommand, ``report``. The others each have ``add_parser``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from ds_tba.cli import doctor, plan, tune
from ds_tba.errors import ReportError
from ds_tba.telemetry.report import OffloadReport


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit status."""
    parser = argparse.ArgumentParser(prog="ds_tba", description="Activations on NVMe for DeepSpeed training.")
    parser.add_argument("--version", action="version", version=f"ds_tba {version('ds_tba')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor.add_parsers(commands)
    plan.add_parsers(commands)
    report = commands.add_parser("report", help="show the JSON at report.path as a table")
    report.add_argument("file", type=Path, help="the JSON that report.path named")
    report.set_defaults(run=_print_report)
    tune.add_parser(commands)
    options = parser.parse_args(argv)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # as behind "| head": nobody reads on, also not what is flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as of a process that the pipe has ended
    except KeyboardInterrupt:
        return 130
    return status


def _print_report(options: argparse.Namespace) -> int:
    """Print the table; 2 if the file is not a report."""
    try:
        report = OffloadReport.read_json(options.file)
    except ReportError as error:
        sys.stderr.write(f"ds_tba report: {error}\n")
        return 2
    rows = [("state", report.state), *report.rows()]
    width = max(len(name) for name, _ in rows)
    sys.stdout.writelines(f"{name:<{width}}  {value}\n" for name, value in rows)
    sys.stdout.writelines(f"{line}\n" for line in report.holder_lines())
    return 0
