"""A fuzz of exactness and of bounds: random models in random training loops, with us and without.

    PYTHONPATH=tests python tests/fuzz.py --nvme_path DIR [--draws 1000] [--seed 0] [--jobs 2] [--shrink]

Each seed draws a program (``fuzz_programs.py``): a model of parts with a history (``fuzz_parts.py``), a course of steps
and a block of ``ds_config.json``. ``fuzz_training.py`` runs it as it is and with an offloader, and compares every loss,
gradient, parameter and state bit by bit, and every error; and it looks at what the bounds are, and at what is left.
Exit status 1 means that some draw failed; each is printed with its program and with the command that repeats it. Which
plans are made depends on the time that things take, so that a failure may need some repetitions (``--repeat``).

Draws run in processes of their own, each of which ends itself, with the stacks of all threads, when a draw hangs.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 60.0  # of a draw
ALONE = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
MAX_CHARACTERS = 3000  # of the begin, and of the end, of the stacks of a process that has died


@dataclass(frozen=True)
class Result:
    """Of one draw.

    Attributes:
        failures: kinds and texts.
        about: the program.
    """

    seed: int
    failures: list[list[str]]
    about: str
    seconds: float = 0.0
    errors: int = 0
    plans: int = 0
    is_finite: bool = True

    @property
    def kinds(self) -> str:
        return " + ".join(sorted({kind for kind, _ in self.failures}))

    def __str__(self) -> str:
        failures = "\n".join(f"  {kind}: {text}" for kind, text in self.failures)
        return (
            f"{self.about}\n{failures}\n  again: PYTHONPATH=tests python tests/fuzz.py --seed {self.seed} --draws 1 "
            "--repeat 5 --nvme_path DIR"
        )


# ---- in a worker ----------------------------------------------------------------------------------------------------


def check(seed: int, directory: str) -> Result:
    """One draw, in this process."""
    from support.fuzz_programs import draw
    from support.fuzz_training import check as check_program

    program = draw(seed)
    outcome = check_program(program, directory)
    failures = [[one.kind, one.text] for one in outcome.failures]
    return Result(seed, failures, program.describe(), outcome.seconds, outcome.errors, outcome.plans,
                  outcome.is_finite)  # fmt: skip


def work(directory: str, limit_s: float) -> None:
    """Draw each seed that a line of the input names; a line of JSON for each."""
    import gc
    import logging
    import warnings

    import torch
    from support import fuzz_training  # noqa: F401 - before the garbage collector is told to leave alone what is there

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("ds_tba").propagate = False
    faulthandler.enable()
    gc.collect()
    gc.freeze()
    answers, sys.stdout = sys.stdout, sys.stderr  # nobody else's lines among the answers
    for line in sys.stdin:
        faulthandler.dump_traceback_later(limit_s, exit=True)
        result = check(int(line), directory)
        faulthandler.cancel_dump_traceback_later()
        answers.write(json.dumps(vars(result)) + "\n")
        answers.flush()


# ---- the workers ----------------------------------------------------------------------------------------------------


class Worker:
    """A process that draws, started again when it has died."""

    def __init__(self, directory: str, limit_s: float) -> None:
        self._directory = directory
        self._limit_s = limit_s
        self._process: subprocess.Popen[str] | None = None
        self._log: Any = None

    def draw(self, seed: int) -> Result:
        """The result of a seed; of one that hangs or dies, where it was."""
        process = self._process or self._start()
        try:
            process.stdin.write(f"{seed}\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            line = process.stdout.readline()  # type: ignore[union-attr]
        except BrokenPipeError:
            line = ""
        if line:
            return Result(**json.loads(line))
        status = process.wait()
        text = self._end()
        kind = "hang" if "Timeout (" in text else "died"
        shown = text if len(text) < 2 * MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}\n...{text[-MAX_CHARACTERS:]}"
        return Result(seed, [[kind, f"status {status}\n{shown}"]], self._about(seed))

    def close(self) -> None:
        """Let the process end."""
        if self._process is not None:
            self._process.stdin.close()  # type: ignore[union-attr]
            self._process.wait()
            self._end()

    def _start(self) -> subprocess.Popen[str]:
        here = Path(__file__).parent
        paths = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in _end
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", "--nvme_path", self._directory, "--limit_s", str(self._limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        return self._process

    def _end(self) -> str:
        """What the process has said beside its answers."""
        self._process = None
        self._log.seek(0)
        text: str = self._log.read()
        self._log.close()
        return text

    @staticmethod
    def _about(seed: int) -> str:
        from support.fuzz_programs import draw

        return draw(seed).describe()


def run(
    seeds: Iterable[int],
    directory: str,
    jobs: int,
    limit_s: float = LIMIT_S,
    on_result: Callable[[Result], None] = print,
) -> list[Result]:
    """Draw all seeds, several at a time; the results in the order of the seeds."""
    waiting, results, lock = iter(seeds), [], threading.Lock()

    def next_seed() -> Iterator[int]:
        while True:
            with lock:
                seed = next(waiting, None)
            if seed is None:
                return
            yield seed

    def job() -> None:
        worker = Worker(directory, limit_s)
        for seed in next_seed():
            result = worker.draw(seed)
            with lock:
                results.append(result)
                on_result(result)
        worker.close()

    threads = [threading.Thread(target=job) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(results, key=lambda result: result.seed)


# ---- making smaller -------------------------------------------------------------------------------------------------


def shrink(seed: int, directory: str, tries: int, kind: str) -> str:
    """A smaller program that fails as the seed's does, in this process: a hang stays one.

    Args:
        tries: runs of each program.
        kind: of failure; empty for those of the seed.
    """
    from support.fuzz_programs import draw, smaller
    from support.fuzz_training import check as check_program

    def kinds(program: Any) -> set[str]:
        return {one.kind for _ in range(tries) for one in check_program(program, directory).failures}

    program = draw(seed)
    wanted = {kind} if kind else kinds(program)
    while wanted:
        for fewer in smaller(program):
            if kinds(fewer) & wanted:
                program = fewer
                break
        else:
            break
    failures = check_program(program, directory).failures
    return program.describe() + "".join(f"\n  {one.kind}: {one.text}" for one in failures)


# ---- the program ----------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--nvme_path", required=True, help="a directory on a drive; not a tmpfs")
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--repeat", type=int, default=1, help="times that each seed is drawn")
    parser.add_argument("--limit_s", type=float, default=LIMIT_S, help="of one draw, which then counts as a hang")
    parser.add_argument("--describe", action="store_true", help="print the programs, and run none")
    parser.add_argument("--shrink", action="store_true", help="make the program of --seed smaller as long as it fails")
    parser.add_argument("--kind", default="", help="of failure that --shrink looks for, such as difference")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.worker:
        work(options.nvme_path, options.limit_s)
        return 0
    seeds = range(options.seed, options.seed + options.draws)
    if options.describe:
        from support.fuzz_programs import draw

        print("\n".join(draw(seed).describe() for seed in seeds))
        return 0
    if options.shrink:
        import torch

        torch.set_num_threads(1)
        print(shrink(options.seed, options.nvme_path, options.repeat, options.kind))
        return 0
    started_s = time.monotonic()
    again = itertools.chain.from_iterable([seed] * options.repeat for seed in seeds)
    results = run(again, options.nvme_path, options.jobs, options.limit_s, _tell)
    failed = [result for result in results if result.failures]
    print(summary(results, time.monotonic() - started_s))
    return 1 if failed else 0


def _tell(result: Result) -> None:
    if result.failures:
        print(result, flush=True)


def summary(results: list[Result], elapsed_s: float) -> str:
    """In a few lines: how many draws, and which seeds failed how."""
    failed = [result for result in results if result.failures]
    by_kind = Counter(result.kinds for result in failed)
    lines = [
        f"{len(results)} draws in {elapsed_s:.0f} s ({sum(one.seconds for one in results):.0f} s of draws), with "
        f"{sum(one.plans for one in results)} plans and {sum(one.errors for one in results)} steps that must fail; "
        f"{sum(not one.is_finite for one in results)} not finite; {len(failed)} failed"
    ]
    for kinds, count in by_kind.most_common():
        seeds = sorted({result.seed for result in failed if result.kinds == kinds})
        lines.append(f"  {kinds}: {count}, seeds {', '.join(map(str, seeds))}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
