"""The same training several ways, in memory that is too small for the plainest: who lives, in what time, exactly equal?

    python examples/demo.py --deepspeed_config ds_configs/zero3_nvme_params_activations.json --nvme_path /local_nvme

First ``train_gpt.py`` runs without a limit and without our block, which tells what results are right and what memory a
run wants. Then it runs in a part of that memory: as it is; with torch.utils.checkpoint; with rematerialization alone,
which needs no drive; with the block. Each run is a fresh process of the stock ``deepspeed`` launcher. On a GPU its
allocator holds the limit. Otherwise a run watches its resident bytes, and ends as one that the kernel has killed. Exit
status: 0 if the run with the block lived and all that lived have the same losses and parameters, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

HERE = Path(__file__).resolve().parent
GIB = 1 << 30
LEVELS = " ▁▂▃▄▅▆▇█"
REFERENCE, BLOCK = "as it is, no limit", "the block"
ROWS = {
    "as it is": ["--without_block"],
    "torch checkpointing": ["--without_block", "--recompute"],
    "rematerialize alone": ["--placement", "keep"],
    BLOCK: [],
}


@dataclass
class Outcome:
    """How a run ended, and what it left: losses, parameters_sha256, step_s, peak_memory_bytes, step_memory_bytes."""

    name: str
    status: int
    result: dict[str, Any]
    output: str

    @property
    def answers(self) -> Any:
        """What must be the same in all runs."""
        return self.result.get("losses"), self.result.get("parameters_sha256")


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("", 0))
        return int(opened.getsockname()[1])


def run(name: str, ranks: int, arguments: list[str], console: Console) -> Outcome:
    """Train in a process of its own, which is quiet unless it fails."""
    deepspeed = shutil.which("deepspeed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "deepspeed"
    with tempfile.TemporaryDirectory() as directory, console.status(f"{name} ..."):
        result = Path(directory) / "result.json"
        command = [deepspeed, "--quiet", "--num_gpus", str(ranks), "--master_port", str(free_port())]
        command += [str(HERE / "train_gpt.py"), *arguments, "--deterministic", "--result", str(result)]
        started = time.perf_counter()
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        found = json.loads(result.read_text()) if result.exists() else {}
    word = "done" if found else "memory ran out" if is_out_of_memory(ended.returncode) else "failed"
    console.print(f"{name}: {word} after {time.perf_counter() - started:.0f} s")
    return Outcome(name, ended.returncode, found, ended.stdout)


def is_out_of_memory(status: int) -> bool:
    """By the exit status: of a process that the kernel or the limit ended, as the launcher tells it."""
    return status in (137, 247, -9)


def outcome_table(reference: Outcome, outcomes: list[Outcome], limit_bytes: int) -> Table:
    """One row for each run."""
    table = Table("", "lived", "peak memory", "s per step", "to no limit", "losses and parameters")
    table.title = f"the same training, in memory of {gib(limit_bytes)}" if limit_bytes else "the same training"
    for one in [reference, *outcomes]:
        if not one.result:
            table.add_row(one.name, "[red]no: memory ran out[/red]", f"> {gib(limit_bytes)}", "", "", "")
            continue
        ratio = one.result["step_s"] / reference.result["step_s"]
        equal = "equal bit for bit" if one.answers == reference.answers else "[red]NOT equal[/red]"
        peak, step = gib(one.result["peak_memory_bytes"]), f"{one.result['step_s']:.2f}"
        table.add_row(one.name, "yes", peak, step, f"{ratio:.2f}", equal)
    return table


def picture(outcomes: list[Outcome]) -> list[str]:
    """Memory over the last step of each run that lived, from nothing to the most of all, left to right."""
    lived = [one for one in outcomes if one.result]
    top = max(max(one.result["step_memory_bytes"], default=0) for one in lived) or 1
    width = max(len(one.name) for one in lived)
    rows = []
    for one in lived:
        levels = [round(nbytes / top * (len(LEVELS) - 1)) for nbytes in one.result["step_memory_bytes"]]
        rows.append(f"{one.name:<{width}} {''.join(LEVELS[level] for level in levels)}")
    return [*rows, f"{'':<{width}} one step, from its start to its end; a full block is {gib(top)}"]


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def write_page(report: str, console: Console) -> None:
    """The block's report as a page with drawings, beside it."""
    page = Path(report).with_suffix(".html")
    command = [sys.executable, "-m", "ds_tba", "report", report, "--html", str(page)]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0:
        console.print(f"What the block did in this run, with drawings: {page}", soft_wrap=True)


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="All other options are those of train_gpt.py, for every run.",
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--ranks", type=int, default=1, help="processes of each run")
    parser.add_argument(
        "--memory", type=float, default=0.6, help="the limit, as a part of what a run without it takes; 0: no limit"
    )
    parser.add_argument("--report", help="write the report of the block's run to this file, and a page beside it")
    return parser.parse_known_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run them all; 0 if the block's run lived and no run that lived has other results."""
    options, rest = parse(argv)
    console = Console(width=118)
    reference = run(REFERENCE, options.ranks, [*rest, "--without_block"], console)
    outcomes: list[Outcome] = []
    limit_bytes = int(options.memory * reference.result.get("peak_memory_bytes", 0))
    for name in options.rows if reference.result else []:
        more = [*ROWS[name], "--memory_limit_bytes", str(limit_bytes)]
        if name == BLOCK and options.report:
            more += ["--report", options.report]
        outcomes.append(run(name, options.ranks, [*rest, *more], console))
    for one in [reference, *outcomes]:
        if not one.result and not is_out_of_memory(one.status):
            console.print(escape(one.output))
            console.print(f"[red]{one.name} failed, with exit status {one.status}: its output is above")
            return 1
    if not reference.result:
        console.print(escape(reference.output))
        console.print("[red]this machine has too little memory for this size, even without a limit")
        return 1
    console.print(outcome_table(reference, outcomes, limit_bytes))
    console.print("\n".join(picture([reference, *outcomes])), highlight=False)
    if options.report and any(one.name == BLOCK and one.result for one in outcomes):
        write_page(options.report, console)
    lived = [one for one in outcomes if one.result]
    good = BLOCK not in options.rows or any(one.name == BLOCK for one in lived)
    return 0 if good and all(one.answers == reference.answers for one in lived) else 1


if __name__ == "__main__":
    raise SystemExit(main())
