"""The command ``ds_tba``: the options of ``plan`` and ``report``; the others each have ``add_parser``.

Imports no torch: what needs it is imported where its command runs, or help would wait for it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path

from ds_tba.cli import doctor, page
from ds_tba.cli.format import Commands, Result, above_0, add_json, show, size
from ds_tba.config import SUPPORTED_DEEPSPEED
from ds_tba.errors import ReportError
from ds_tba.report import OffloadReport, write_file

_PLAN = """\
Runs one forward and backward of the model on PyTorch's meta device (shapes without values), through the cache and the
recorder of a real run. Prints for each setting whether it fits the GPU, the time of a step and the wear of the drives;
recommends one, and prints what to paste into ds_config.json. If nothing fits: what fills the GPU, and exit status 3.
With --longest: the longest sequence that each setting trains on the GPU.
"""
_MODELS = """\
MODEL is the config.json, folder or name of a Hugging Face model on this machine; inputs are made up.

example:
    ds_tba plan Llama-3.1-8B/config.json --gpu 24GB --seq 32k --lora 16
    ds_tba plan Llama-3.1-8B/config.json --gpu 80GB --longest --fused-loss --config ds_config.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return its exit status."""
    parser = command_parser()
    options = parser.parse_args(argv)
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


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_tba", description="Activations on NVMe for DeepSpeed training.")
    parser.set_defaults(needs_deepspeed=True)
    parser.add_argument("--version", action="version", version=f"ds_tba {version('ds_tba')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor.add_parsers(commands)
    _add_plan(commands)
    report = commands.add_parser("report", help="show the JSON at report.path as a table, or as a page")
    report.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="JSON that report.path named, of each rank or run"
    )
    as_what = report.add_mutually_exclusive_group()
    as_what.add_argument("--html", type=Path, metavar="PAGE.html", help="write one page about all of them instead")
    add_json(as_what)
    report.set_defaults(run=partial(show, "report", _reports), needs_deepspeed=False)
    return parser


def _add_plan(commands: Commands) -> None:
    parser = commands.add_parser("plan", help="say what fits the GPU, and what to set", description=_PLAN)
    parser.epilog, parser.formatter_class = _MODELS, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("model", metavar="MODEL", help="see below")
    add("--seq", type=size, help="tokens of a sequence, such as 32k; needed without --longest")
    add("--longest", action="store_true", help="say the longest sequence of each setting on --gpu")
    add("--batch", type=size, help="sequences per micro-step and rank (default: the config's, else 1)")
    add("--gpu", help='its memory or name: 24GB, "RTX 4090"')
    add("--ranks", type=size, help="ranks that ZeRO divides among (default: the GPUs of the node)")
    add("--gpus-per-node", type=size, default=1, help="GPUs that share drives and memory of a node (default: 1)")
    add("--lora", type=size, metavar="RANK", help="train adapters of this rank on all linear layers, not the model")
    add(
        "--lora-targets", metavar="NAMES", help="names of the layers with adapters: q_proj,v_proj (default: all linear)"
    )
    add("--bits", type=int, choices=(4, 8), help="of frozen weights (bitsandbytes), whatever config.json says")
    add("--liger", action="store_true", help="norms, SwiGLU and the loss are fused (Liger's; near to Unsloth's)")
    add("--fused-loss", action="store_true", help="the loss never makes all logits (Liger's, TRL's, DeepSpeed's)")
    add("--tiled-mlp", action="store_true", help="MLPs run on pieces of the sequence (DeepSpeed's TiledMLP)")
    add("--sequence-parallel", type=size, metavar="N", help="ranks that divide a sequence's tokens (Ulysses, context)")
    add("--host-memory", type=size, help="free memory of a node, for layers' inputs (default: this machine's)")
    add("--config", type=Path, help="ds_config.json (default: bf16, AdamW, ZeRO stage 2)")
    add("--nvme-path", action="append", help="a directory on a drive (default: the config's; may be repeated)")
    add("--drive-tbw", type=above_0, help="terabytes that the drives of a node are rated for, together")
    add("--write-gbps", type=above_0, help="GB/s of writes to all drives of a node (default: 4.2)")
    add("--read-gbps", type=above_0, help="GB/s of reads of them (default: 7.1)")
    add_json(parser)
    parser.set_defaults(run=partial(show, "plan", _plan))


def _plan(options: argparse.Namespace) -> Result:
    from ds_tba.cli.plan import planned

    return planned(options)


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
    if target.suffix not in (".html", ".htm"):  # a report would be lost
        raise ReportError(f"--html {target} is no name of a page: give it the ending .html.")
    try:
        write_file(target, text)
    except OSError as error:
        raise ReportError(f"--html {target} cannot be written: {error.strerror}") from error
    return f"{target}: {len(text) / 1000:.0f} kB, opens in a browser without a network"
