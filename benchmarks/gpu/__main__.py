"""Everything that only a GPU can tell, in pieces of less than ten minutes: ``make gpu``, ``make gpu REHEARSE=1``.

    python benchmarks/gpu [--pieces NAME ...] [--again] [--minutes 9] [--out DIR] [--nvme_path DIR]
    python benchmarks/gpu --rehearse        # the same on the CPU, tiny, in two minutes: shows that it works

Pieces, in this order: facts of the device; the tests of ``tests/gpu``; step time and peak of the layers of
Llama-3-8B from 4k to 128k tokens, each way to train in turn; the cost of hooks, and the recompute-offload-keep curve;
the optimizer update. What a piece found is written to ``gpu_<date>.json`` at its end, and as a table to
``gpu_<date>.md`` beside it: a run that is interrupted goes on where it was. A piece that is done is skipped
(``--again`` runs it once more); one that failed or ran out of time is a row with its reason, and is tried again. The
exit status is 0 if all pieces named are done.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from gpu.pieces import Piece, pieces  # noqa: E402
from gpu.results import CUT, DONE, FAILED, ROOT, Results, commit, machine, today, write_whole  # noqa: E402
from gpu.table import markdown  # noqa: E402

TAIL_CHARACTERS = 3000
# Less than this is left: a piece is not begun.
LEAST_S = 60.0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, tiny")
    parser.add_argument("--pieces", nargs="+", metavar="NAME", help="only these, or those whose name begins so")
    parser.add_argument("--again", action="store_true", help="also what is done already")
    parser.add_argument("--list", action="store_true", help="say what there is and what is done, and run nothing")
    parser.add_argument("--minutes", type=float, help="for everything: what would begin later is left for the next run")
    parser.add_argument("--out", type=Path, help="directory of the results (default: benchmarks/results)")
    parser.add_argument(
        "--date", default=today(), help="in the name of the results, to go on with those of another day"
    )
    parser.add_argument("--nvme_path", type=Path, help="directory on the drive (default: a temporary one)")
    options = parser.parse_args(argv)
    if options.out is None:
        options.out = ROOT / ".cache" / "gpu" if options.rehearse else ROOT / "benchmarks" / "results"
    return options


def chosen(names: list[str] | None, *, rehearse: bool) -> list[Piece]:
    """The pieces that are asked for; all where none are named."""
    known = pieces(rehearse=rehearse)
    for name in names or ():
        if not any(piece.name.startswith(name) for piece in known):
            raise SystemExit(f"--pieces {name!r}: there are {', '.join(repr(piece.name) for piece in known)}")
    return [piece for piece in known if names is None or any(piece.name.startswith(name) for name in names)]


def run(piece: Piece, results: Results, directory: Path, *, limit_s: float, rehearse: bool) -> None:
    """One piece, in a process and directory of its own; what it found, or why it did not, goes to the results."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=directory, prefix="gpu_") as scratch:
        result = Path(scratch) / "result.json"
        status, output = _ended(piece.command(result, Path(scratch), limit_s), limit_s, rehearse=rehearse)
        state, reason, found = DONE, "", None
        try:
            found = piece.read(result, Path(scratch))
        except (OSError, ValueError) as error:
            state, reason = FAILED, f"no result: {error}"
        if status is None:
            state, reason = CUT, f"ended after {limit_s:.0f} s"
        elif found is None or status not in (0, 1):  # 1 where it ran and something was not as it should be
            state, reason = FAILED, f"exit status {status}"
    where = {"commit": commit(), "machine": machine()}
    told = {} if state == DONE else {"reason": reason, "output": output[-TAIL_CHARACTERS:]}
    took_s = round(time.monotonic() - began_s, 1)
    results.put(piece.name, part=piece.part, state=state, status=status, **told, found=found, took_s=took_s, **where)
    print(f"{piece.name}: {state} in {took_s:.0f} s {reason}", flush=True)
    if told:
        print(output[-TAIL_CHARACTERS:], flush=True)


def _ended(command: list[str], limit_s: float, *, rehearse: bool) -> tuple[int | None, str]:
    """The exit status, None where the limit ended it, and all output. Its children end with it."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    # With this CUDA's matrix products give the same bits in every run.
    variables = {"PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}
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


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    ends_s = time.monotonic() + (options.minutes * 60 if options.minutes else float("inf"))
    kind = "gpu_rehearsal" if options.rehearse else "gpu"
    results = Results(options.out / f"{kind}_{options.date}.json", rehearsal=options.rehearse)
    asked = chosen(options.pieces, rehearse=options.rehearse)
    if options.list:
        for piece in asked:
            print(f"{piece.name}: {results.pieces.get(piece.name, {}).get('state', 'not run')}")
        return 0
    if not options.rehearse and not _has_gpu():
        print(
            "PyTorch finds no CUDA device here; nothing was measured. On the CPU: make gpu REHEARSE=1", file=sys.stderr
        )
        return 2
    # What was never tried comes first: what fails or takes too long here may do so again.
    for piece in sorted(asked, key=lambda piece: piece.name in results.pieces):
        if results.is_done(piece.name) and not options.again:
            print(f"{piece.name}: done before")
            continue
        limit_s = min(piece.limit_s, ends_s - time.monotonic())
        if limit_s < LEAST_S:
            print(f"{piece.name}: not begun, no time is left")
            continue
        run(
            piece, results, options.nvme_path or Path(tempfile.gettempdir()), limit_s=limit_s, rehearse=options.rehearse
        )
        write_whole(results.path.with_suffix(".md"), markdown(results.found))
    print(f"results: {results.path}, table: {results.path.with_suffix('.md')}")
    return 0 if all(results.is_done(piece.name) for piece in asked) else 1


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its piece ends with it
    raise SystemExit(main())
