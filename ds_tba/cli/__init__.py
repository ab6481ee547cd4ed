"""The command ``ds_tba``: one module per subcommand, each with ``add_parser`` and ``run(options) -> int``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ds_tba.cli import doctor, report, tune
from ds_tba.cli.estimate import text as estimate


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit status."""
    parser = argparse.ArgumentParser(prog="ds_tba", description="Activations on NVMe for DeepSpeed training.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (doctor, estimate, report, tune):
        command.add_parser(commands)
    options = parser.parse_args(argv)
    status: int = options.run(options)
    return status
