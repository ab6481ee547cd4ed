"""Draw random programs of a kind, and check each with us and without.

    PYTHONPATH=tests python -m programs KIND [--draws 300] [--seed 0] [--jobs 2] [--nvme_path DIR] [--shrink]

Each seed draws one program. ``trainings``: random models in random training loops, under random blocks
(``trainings.py``); ``budgets``: trainings under ``activation_budget_bytes`` (``budgets.py``); ``cheap`` and ``mixed``:
chains of ops that rematerialize (``chains.py``). Exit status 1 means that some draw failed; each is printed with its
program and with the command that repeats it. Which plans are made depends on the time that things take, so that a
failure may need some repetitions (``--repeat``).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time

import torch

from programs.budgets import Budgets
from programs.chains import CheapChains, MixedChains
from programs.kind import Kind, shrink
from programs.running import Trainings
from programs.workers import LIMIT_S, Result, run, summary, work

KINDS: dict[str, type[Kind]] = {  # type: ignore[type-arg]
    "trainings": Trainings,
    "budgets": Budgets,
    "cheap": CheapChains,
    "mixed": MixedChains,
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--nvme_path", help="a directory on a drive, not a tmpfs; a temporary one by default")
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--repeat", type=int, default=1, help="times that each seed is drawn")
    parser.add_argument("--limit_s", type=float, default=LIMIT_S, help="of one draw, which then counts as a hang")
    parser.add_argument("--describe", action="store_true", help="print the programs, and run none")
    parser.add_argument("--shrink", action="store_true", help="make the program of --seed smaller as long as it fails")
    parser.add_argument("--failure", default="", help="the kind of failure that --shrink looks for, such as difference")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    kind = KINDS[options.kind]()
    seeds = range(options.seed, options.seed + options.draws)
    if options.describe:
        print("\n".join(kind.draw(seed).describe() for seed in seeds))
        return 0
    with tempfile.TemporaryDirectory() as own:
        directory = options.nvme_path or own
        if options.worker:
            work(options.kind, kind, directory, options.limit_s)
            return 0
        if options.shrink:
            return _shrink(kind, directory, options)
        started_s = time.monotonic()
        again = itertools.chain.from_iterable([seed] * options.repeat for seed in seeds)
        results = run(options.kind, kind, again, directory, options.jobs, options.limit_s, _tell)
    print(summary(results, time.monotonic() - started_s))
    return int(any(result.failures for result in results))


def _shrink(kind: Kind, directory: str, options: argparse.Namespace) -> int:  # type: ignore[type-arg]
    """Print a smaller program that fails as the seed's does, in this process: a hang stays one."""
    torch.set_num_threads(1)
    kind.open(directory)
    program = kind.draw(options.seed)
    kinds = {one for _ in range(options.repeat) for one in kind.check(program).kinds}
    program = shrink(kind, program, {options.failure} if options.failure else kinds, options.repeat)
    print(program.describe(), *kind.check(program).failures, sep="\n  ")
    kind.close()
    return int(bool(kinds))


def _tell(result: Result) -> None:
    if result.failures:
        print(result, flush=True)


if __name__ == "__main__":
    sys.exit(main())
