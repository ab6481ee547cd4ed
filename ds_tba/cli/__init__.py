"""The command ``ds_tba`` and its smallest subcommand, ``report``. The others each have ``add_parser``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from ds_tba.cli import doctor, page, plan, tune
from ds_tba.errors import ReportError
from ds_tba.telemetry.holders import lines_of
from ds_tba.telemetry.report import OffloadReport, is_replaceable, write_file


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit status."""
    parser = argparse.ArgumentParser(prog="ds_tba", description="Activations on NVMe for DeepSpeed training.")
    parser.add_argument("--version", action="version", version=f"ds_tba {version('ds_tba')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor.add_parsers(commands)
    plan.add_parsers(commands)
    report = commands.add_parser("report", help="show the JSON at report.path as a table, or as a page with drawings")
    report.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="JSON that report.path named, of each rank or run"
    )
    report.add_argument("--html", type=Path, metavar="PAGE.html", help="write one page about all of them instead")
    report.set_defaults(run=_show_reports)
    tune.add_parser(commands)
    options = parser.parse_args(argv)
    try:
        if options.run is not _show_reports:
            from ds_tba.storage.backends import aio

            aio.import_deepspeed(sys.stderr)
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # as behind "| head": nobody reads on, also not what is flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as of a process that the pipe has ended
    except KeyboardInterrupt:
        return 130
    return status


def _show_reports(options: argparse.Namespace) -> int:
    """Print a table of each, or write the page; 2 if a file is not a report, or the page cannot be written."""
    files, target = options.files, options.html
    try:
        if target is not None:
            if target.suffix not in (".html", ".htm") and is_replaceable(target):  # a report would be lost
                raise ReportError(f"--html {target} is no name of a page: give it the ending .html.")
            text = page.render(files)
            (write_file if is_replaceable(target) else Path.write_text)(target, text)
            sys.stdout.write(f"{target}: {len(text) / 1000:.0f} kB, opens in a browser without a network\n")
            return 0
        reports = [OffloadReport.read_json(file) for file in files]
    except ReportError as error:
        sys.stderr.write(f"ds_tba report: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"ds_tba report: --html {target} cannot be written: {error.strerror}\n")
        return 2
    for file, report in zip(files, reports, strict=True):
        rows = [*([("report", str(file))] if len(files) > 1 else []), ("state", report.state), *report.rows()]
        width = max(len(name) for name, _ in rows)
        sys.stdout.writelines(f"{name:<{width}}  {value}\n" for name, value in rows)
        sys.stdout.writelines(f"{line}\n" for line in lines_of(report.holders, report.holders_step))
    return 0
