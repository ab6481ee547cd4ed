"""Measure what only a GPU can tell, the most important first: ``make gpu``, ``make gpu REHEARSE=1``.

    python benchmarks/gpu [--minutes 8] [--pieces NAME ...] [--again] [--out DIR] [--nvme_path DIR]
    python benchmarks/gpu --rehearse        # the eight minutes on the CPU, tiny: shows that they work

In the first eight minutes: probe (card, links, pinning, drive), smoke (losses and gradients of every placement, bit for
bit), headline (four layers of Llama-3-8B at 16k tokens, each way to train in turn), hooks (their cost), and update (the
optimizer's). With more minutes also: the tests of ``tests/gpu``, the headline from 4k to 128k tokens, the
recompute-offload-keep curve, others' offloaders, larger updates; a rehearsal with ``--minutes`` has these, too.

``gpu_<date>.json`` has what each piece found. A piece writes ``gpu_<date>.running.json`` as soon as it knows something,
so that nothing is lost with the machine. ``gpu_<date>.md`` is the table, ``.log`` all output. Run again, it goes on:
what is done is skipped (``--again`` runs it once more); what failed or ran out of time is a row with its reason, and is
tried again after the others. The exit status is 0 if all pieces that were to run are done.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from alternating import has_gpu  # noqa: E402
from benchmarking import parser_of, today, write_whole  # noqa: E402

from gpu.pieces import Piece, pieces  # noqa: E402
from gpu.results import CUT, DONE, FAILED, ROOT, Results  # noqa: E402
from gpu.table import markdown  # noqa: E402

MINUTES = 8.0
# Of a piece's output: what is printed, and what goes to the log.
TAIL_CHARACTERS, LOG_CHARACTERS = 3000, 500_000
# Until the table is written.
END_S = 5.0
BUILD = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        rehearse=(False, "on the CPU, tiny"),
        minutes=(float, f"for everything (default: {MINUTES:g}, in a rehearsal what it takes)"),
        again=(False, "also what is done already"),
        list=(False, "say what there is and what is done, and run nothing"),
        out=(Path, "directory of the results (default: benchmarks/results)"),
        date=(today(), "in the name of the results, to go on with those of another day"),
        nvme_path=(Path, "directory on the drive (default: a temporary one)"),
    )
    parser.add_argument("--pieces", nargs="+", metavar="NAME", help="only these, or those whose name begins so")
    options = parser.parse_args(argv)
    options.out = options.out or ROOT.joinpath(*((".cache", "gpu") if options.rehearse else ("benchmarks", "results")))
    return options


def chosen(names: list[str] | None, *, rehearse: bool) -> list[Piece]:
    """Return the pieces that are asked for, all where none are named."""
    known = pieces(rehearse=rehearse)
    for name in names or ():
        if not any(piece.name.startswith(name) for piece in known):
            raise SystemExit(f"--pieces {name!r}: there are {', '.join(repr(piece.name) for piece in known)}")
    return [piece for piece in known if names is None or any(piece.name.startswith(name) for name in names)]


class Build:
    """DeepSpeed's CPUAdam, which the update needs, compiled while other pieces run that are not timed.

    Args:
        directory: directory for the op; None where it is built elsewhere, or not at all.
    """

    def __init__(self, directory: Path | None, program: str = BUILD) -> None:
        self._directory, self._program = directory, program
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The environment in which the op is found."""
        return {} if self._directory is None else {"TORCH_EXTENSIONS_DIR": str(self._directory)}

    def allow(self, piece: Piece) -> None:
        """Go on building beside a piece whose figures that does not disturb, else stand still."""
        if self._directory is None or piece.name not in ("smoke", "headline", "hooks", "update"):
            return
        if self._process is None and piece.name == "smoke":
            command = ["nice", sys.executable, "-c", self._program]
            environment = {**os.environ, **self.variables}
            self._process = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._signal(signal.SIGCONT if piece.name in ("smoke", "update") else signal.SIGSTOP)

    def end(self) -> None:
        """End the build; its directory is removed with whatever is half built."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)


def run(
    piece: Piece, results: Results, directory: Path, *, limit_s: float, rehearse: bool, build: Build | None = None
) -> None:
    """Run one piece in a process and directory of its own, and put what it found, or the reason, into the results."""
    began_s = time.monotonic()
    build = build or Build(None)
    build.allow(piece)
    results.begin(piece.name, part=piece.part)
    with tempfile.TemporaryDirectory(dir=directory, prefix="gpu_") as scratch:
        command = piece.command(results.running, Path(scratch), limit_s)
        status, output = _ended(command, limit_s, rehearse=rehearse, **build.variables)
        state, reason, found = DONE, "", None
        with suppress(OSError, ValueError, ElementTree.ParseError):
            found = piece.read(results.running, Path(scratch))
        told = found if isinstance(found, dict) else {}
        if status is None:
            state, reason = CUT, f"ended after {limit_s:.0f} s"
        elif found is None or status not in (0, 1):  # 1 where it ran and something was not as it should be
            state, reason = FAILED, f"exit status {status}"
        elif told.get("failed"):
            state, reason = FAILED, "; ".join(told["failed"])
        elif told.get("untried"):
            state, reason = CUT, f"no time for {len(told['untried'])}"
    why = {} if state == DONE else {"reason": reason, "output": output[-TAIL_CHARACTERS:]}
    took_s = round(time.monotonic() - began_s, 1)
    with results.log.open("a", encoding="utf-8") as log:
        log.write(f"==== {piece.name}: {state} {reason}\n{output[-LOG_CHARACTERS:]}\n")
    results.put(piece.name, part=piece.part, state=state, status=status, **why, found=found, took_s=took_s)
    print(f"{piece.name}: {state} in {took_s:.0f} s {reason}", flush=True)
    print(why.get("output", ""), end="", flush=True)


def _ended(command: list[str], limit_s: float, *, rehearse: bool, **more: str) -> tuple[int | None, str]:
    """Return the exit status, None where the limit ended it, and all output. Its children end with it."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    # With this CUDA's matrix products give the same bits in every run.
    variables = {"PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1", **more}
    if rehearse:
        variables |= {"DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return status, output.read()


@contextmanager
def _building(asked: list[Piece], directory: Path, *, rehearse: bool) -> Iterator[Build]:
    """Yield the build of a run; it builds nothing where the user has a place for DeepSpeed's ops or none is needed."""
    is_needed = not rehearse and "TORCH_EXTENSIONS_DIR" not in os.environ
    is_needed &= {"smoke", "update"} <= {piece.name for piece in asked}
    with tempfile.TemporaryDirectory(dir=directory, prefix="gpu_ops_") as ops:
        build = Build(Path(ops) if is_needed else None)
        try:
            yield build
        finally:
            build.end()


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    is_short = options.rehearse and options.minutes is None and options.pieces is None
    minutes = options.minutes or (float("inf") if options.rehearse else MINUTES)
    ends_s = time.monotonic() + minutes * 60 - END_S
    kind = "gpu_rehearsal" if options.rehearse else "gpu"
    results = Results(options.out / f"{kind}_{options.date}.json", rehearsal=options.rehearse)
    asked = [piece for piece in chosen(options.pieces, rehearse=options.rehearse) if piece.is_quick or not is_short]
    if options.list:
        print(*(f"{one.name}: {results.pieces.get(one.name, {}).get('state', 'not run')}" for one in asked), sep="\n")
        return 0
    if not options.rehearse and not has_gpu():
        what = "PyTorch finds no CUDA device here; nothing was measured. On the CPU: make gpu REHEARSE=1"
        print(what, file=sys.stderr)
        return 2
    todo = [piece for piece in asked if options.again or not results.is_done(piece.name)]
    todo.sort(key=lambda piece: piece.name in results.pieces)  # or what takes too long would take it again first
    print(*(f"{piece.name}: done before\n" for piece in asked if piece not in todo), sep="", end="")
    directory = options.nvme_path or Path(tempfile.gettempdir())
    with _building(todo, directory, rehearse=options.rehearse) as build:
        left = _run_all(todo, results, directory, ends_s, options.rehearse, build)
    print(f"results: {results.path}, table: {results.path.with_suffix('.md')}")
    # Beyond the eight minutes nothing was promised.
    missing = [piece for piece in left if piece.is_quick or options.pieces]
    return 0 if not missing and all(results.is_done(piece.name) for piece in asked if piece not in left) else 1


def _run_all(
    todo: list[Piece], results: Results, directory: Path, ends_s: float, rehearse: bool, build: Build
) -> list[Piece]:
    """Run one after the other; return those for which no time was left."""
    left = []
    for piece in todo:
        limit_s = min(piece.limit_s, ends_s - time.monotonic())
        if limit_s < piece.least_s:
            print(f"{piece.name}: not begun, no time is left")
            left.append(piece)
            continue
        run(piece, results, directory, limit_s=limit_s, rehearse=rehearse, build=build)
        write_whole(results.path.with_suffix(".md"), markdown(results.found))
    return left


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its piece ends with it
    raise SystemExit(main())
