"""Train a sequence in memory that is too small for it, three ways, and show which of them lives and is exactly equal.

    python examples/demo.py --deepspeed_config ds_configs/zero3_nvme_params_activations.json --nvme_path /local_nvme

First ``train_gpt.py`` runs without a limit and without the block. That run gives the right results and the memory that
the training needs. Then it runs in a part of that memory: as it is, with torch.utils.checkpoint, and with the block.

Each run is a fresh process; the stock ``deepspeed`` launcher starts the block's, and all where there are several ranks.
Before the limit holds, a run trains two shorter lengths: the slope of its peak over the length gives the longest
sequence that it could train in that memory. On a GPU the allocator holds the limit. Otherwise a run watches its
resident bytes, and ends as if the kernel had killed it.

Exit status: 0 if the run with the block lived and all runs that lived have the same losses and parameters, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
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
MIB = 1 << 20
LEVELS = " ▁▂▃▄▅▆▇█"
REFERENCE, PLAIN, CHECKPOINTING, BLOCK = "as it is, no limit", "as it is", "torch checkpointing", "the block"
FIRST_START = "a tiny model, for which DeepSpeed compiles its communication op at its first run"
TINY = ["--without_block", "--width", "64", "--depth", "1", "--sequence", "64", "--also_lengths"]
ROWS = {
    PLAIN: ["--without_block"],
    CHECKPOINTING: ["--without_block", "--recompute"],
    BLOCK: [],
}


@dataclass
class Outcome:
    """How a run ended, and what it left.

    Attributes:
        result: the JSON of train_gpt.py; empty where the run died.
        lengths: what the shorter lengths took; there also where the run died later.
    """

    name: str
    status: int
    result: dict[str, Any]
    lengths: list[dict[str, Any]]
    output: str

    @property
    def answers(self) -> Any:
        """Return the results that must be the same in all runs."""
        return self.result.get("losses"), self.result.get("parameters_sha256")

    def longest(self, limit_bytes: int) -> float | None:
        """Return the tokens at which the line through the measured peaks reaches the limit."""
        measured = [*self.lengths, self.result] if self.result else self.lengths
        points = [(one["sequence"], one["peak_memory_bytes"]) for one in measured]
        if len(points) < 2:
            return None
        slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
        return (limit_bytes - intercept) / slope if slope > 0 else None


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("", 0))
        return int(opened.getsockname()[1])


def run(name: str, ranks: int, arguments: list[str], console: Console) -> Outcome:
    """Train in a process of its own, which is quiet unless it fails."""
    port, environment = str(free_port()), dict(os.environ)
    if ranks > 1 or name == BLOCK:
        deepspeed = shutil.which("deepspeed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "deepspeed"
        command = [deepspeed, "--quiet", "--num_gpus", str(ranks), "--master_port", port]
    else:  # without the launcher, which takes seconds to import DeepSpeed once more
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable]
    console.print(f"{name}: starts ...")
    with tempfile.TemporaryDirectory() as directory:
        result, lengths = Path(directory) / "result.json", Path(directory) / "lengths.json"
        command += [str(HERE / "train_gpt.py"), *arguments, "--deterministic"]
        command += ["--result", str(result), "--lengths", str(lengths)]
        started = time.perf_counter()
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        found, shorter = (json.loads(one.read_text()) if one.exists() else None for one in (result, lengths))
    word = "done" if found else "memory ran out" if is_out_of_memory(ended.returncode) else "failed"
    console.print(f"{name}: {word} after {time.perf_counter() - started:.0f} s")
    return Outcome(name, ended.returncode, found or {}, shorter or [], ended.stdout)


def is_out_of_memory(status: int) -> bool:
    """Return whether the kernel or the limit ended a process, judged by the exit status that the launcher returns."""
    return status in (137, 247, -9)


def outcome_table(reference: Outcome, outcomes: list[Outcome], limit_bytes: int) -> Table:
    """Return the table: one row for each run."""
    timed = reference.lengths[-1] if reference.lengths else None
    headers = ["", "lived", "peak", "longest*", "losses and parameters"]
    if timed:
        headers.insert(4, f"s per step at {timed['sequence']:,}")
    table = Table(*headers)
    table.title = f"the same training, in memory of {mib(limit_bytes)}" if limit_bytes else "the same training"
    if limit_bytes and timed:
        table.caption = (
            "* tokens of a sequence, where the line through the peaks at two lengths or more reaches that memory"
        )
    for one in [reference, *outcomes]:
        equal = "equal bit for bit" if one.answers == reference.answers else "[red]NOT equal[/red]"
        longest = one.longest(limit_bytes) if limit_bytes and one is not reference else None
        cells = [
            one.name,
            "yes" if one.result else "[red]no: memory ran out[/red]",
            mib(one.result["peak_memory_bytes"]) if one.result else f"> {mib(limit_bytes)}",
            "" if longest is None else f"{longest:,.0f}",
            equal if one.result else "",
        ]
        if timed:
            cells.insert(4, f"{one.lengths[-1]['step_s']:.2f}" if one.lengths else "")
        table.add_row(*cells)
    return table


def summary(outcomes: list[Outcome], limit_bytes: int) -> str:
    """Return the result in one sentence; empty if a row is missing that it needs."""
    found = {one.name: one for one in outcomes}
    if not limit_bytes or set(found) != set(ROWS) or not found[BLOCK].result:
        return ""
    plain, checkpointing, block = (found[name].longest(limit_bytes) for name in ROWS)
    if plain is None or checkpointing is None or block is None or min(plain, checkpointing) <= 0:
        return ""
    seconds = found[BLOCK].lengths[-1]["step_s"] / found[CHECKPOINTING].lengths[-1]["step_s"]
    return (
        f"In {mib(limit_bytes)} this model trains sequences of {block:,.0f} tokens with the block, "
        f"{checkpointing:,.0f} with torch checkpointing, {plain:,.0f} as it is: {block / checkpointing:.1f} x "
        f"and {block / plain:.0f} x. At {found[BLOCK].lengths[-1]['sequence']:,} tokens the "
        f"block's step takes {seconds:.2f} x the time of checkpointing's, and every result is equal bit for bit."
    )


def picture(outcomes: list[Outcome]) -> list[str]:
    """Return lines that draw the memory over the last step of each run that lived, on one scale."""
    lived = [one for one in outcomes if one.result]
    top = max(max(one.result["step_memory_bytes"], default=0) for one in lived) or 1
    width = max(len(one.name) for one in lived)
    rows = []
    for one in lived:
        levels = [round(nbytes / top * (len(LEVELS) - 1)) for nbytes in one.result["step_memory_bytes"]]
        rows.append(f"{one.name:<{width}} {''.join(LEVELS[level] for level in levels)}")
    return [*rows, f"{'':<{width}} one step, from its start to its end; a full block is {mib(top)}"]


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.0f} MiB"


def write_page(report: str, console: Console) -> None:
    """Write the block's report as a page beside it."""
    page = Path(report).with_suffix(".html")
    command = [sys.executable, "-m", "ds_tba", "report", report, "--html", str(page)]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0:
        console.print(f"What the block did in this run: {page}", soft_wrap=True)


def limit_of(result: dict[str, Any], part: float) -> int:
    """Return the limit: the bytes held before a step, and a part of the bytes that a step added; 0 for none."""
    held: int = result["held_memory_bytes"]
    return held + int(part * (result["peak_memory_bytes"] - held)) if part else 0


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="All other options are those of train_gpt.py, for every run.",
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--ranks", type=int, default=1, help="processes of each run")
    parser.add_argument(
        "--memory",
        type=float,
        default=0.08,
        help="the limit: what a process holds before a step, and this part of what a step adds; 0: no limit",
    )
    parser.add_argument("--report", help="write the report of the block's run to this file, and a page beside it")
    return parser.parse_known_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run them all; return 0 if the block's run lived and no run that lived has other results."""
    options, rest = parse(argv)
    console = Console(width=118)
    run(FIRST_START, options.ranks, [*rest, *TINY], console)  # or the first run would hold what a compiler leaves
    reference = run(REFERENCE, options.ranks, [*rest, "--without_block"], console)
    outcomes: list[Outcome] = []
    limit_bytes = limit_of(reference.result, options.memory) if reference.result else 0
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
    if all(one.answers == reference.answers for one in lived):
        console.print(summary(outcomes, limit_bytes), highlight=False, soft_wrap=True)
    good = BLOCK not in options.rows or any(one.name == BLOCK for one in lived)
    return 0 if good and all(one.answers == reference.answers for one in lived) else 1


if __name__ == "__main__":
    raise SystemExit(main())
