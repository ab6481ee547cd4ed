"""The command ``ds_tba`` and its smallest subcommand, ``report``. The others each have ``add_parser``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path

from ds_tba.cli import doctor, page, plan, tune
from ds_tba.cli.format import Result, add_json, show
from ds_tba.config import SUPPORTED_DEEPSPEED
from ds_tba.errors import ReportError
from ds_tba.report import OffloadReport, is_replaceable, write_file


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return its exit status."""
    parser = _parser()
    _complete(parser)
    options = parser.parse_args([_dashed(one) for one in (sys.argv[1:] if argv is None else argv)])
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names that the terminal has no letters for
    try:
        if options.needs_deepspeed:
            from ds_tba.storage.backends import aio

            aio.import_deepspeed(sys.stderr)
            if "deepspeed" not in sys.modules:
                sys.stderr.write(
                    f'ds_tba: DeepSpeed cannot be imported: pip install "deepspeed{SUPPORTED_DEEPSPEED}"\n'
                )
                return 2
        status: int = options.run(options)
        # Here, or a pipe that nobody reads would be a traceback at exit.
        sys.stdout.flush()
    except BrokenPipeError:  # as behind "| head": nobody reads on, also not what is flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as of a process that the pipe has ended
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_tba", description="Activations on NVMe for DeepSpeed training.")
    parser.set_defaults(needs_deepspeed=True)
    parser.add_argument("--version", action="version", version=f"ds_tba {version('ds_tba')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor.add_parsers(commands)
    plan.add_parsers(commands)
    report = commands.add_parser("report", help="show the JSON at report.path as a table, or as a page")
    report.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="JSON that report.path named, of each rank or run"
    )
    as_what = report.add_mutually_exclusive_group()
    as_what.add_argument("--html", type=Path, metavar="PAGE.html", help="write one page about all of them instead")
    add_json(as_what)
    report.set_defaults(run=partial(show, "report", _reports), needs_deepspeed=False)
    tune.add_parser(commands)
    return parser


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks for completions, and end, where argcomplete is installed."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    with suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(parser)


def _dashed(argument: str) -> str:
    """Return an option as its help has it, also where it is written with underscores, as DeepSpeed's are."""
    name, sign, value = argument.partition("=")
    return f"{name.replace('_', '-')}{sign}{value}" if name.startswith("--") else argument


def _reports(options: argparse.Namespace) -> Result:
    """Return a table of each, or write the page; as JSON a list of what all of them have."""
    reports = {str(file): OffloadReport.read_json(file) for file in options.files}
    if options.html is not None:
        return Result(0, [_write_page(page.render(reports), options.html)], [])
    lines = []
    for name, report in reports.items():
        rows = [*([("report", name)] if len(reports) > 1 else []), *report.rows()]
        width = max(len(row) for row, _ in rows)
        lines += [*(f"{row:<{width}}  {value}" for row, value in rows), *report.holder_lines()]
    return Result(0, lines, [{"file": name, **report.to_dict()} for name, report in reports.items()])


def _write_page(text: str, target: Path) -> str:
    """Write it, and return a line that says so.

    Raises:
        ReportError: the page cannot be written.
    """
    if target.suffix not in (".html", ".htm") and is_replaceable(target):  # a report would be lost
        raise ReportError(f"--html {target} is no name of a page: give it the ending .html.")
    try:
        (write_file if is_replaceable(target) else Path.write_text)(target, text)
    except OSError as error:
        raise ReportError(f"--html {target} cannot be written: {error.strerror}") from error
    return f"{target}: {len(text) / 1000:.0f} kB, opens in a browser without a network"
