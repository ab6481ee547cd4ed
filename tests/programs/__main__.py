"""Draw random programs of a kind, and check each with us and without.

    PYTHONPATH=tests python -m programs KIND [--draws 300] [--seed 0] [--nvme_path DIR]

Each seed draws one program. ``trainings``: random models in random training loops, under random blocks
(``trainings.py``); ``budgets``: trainings under ``activation_budget_bytes`` (``budgets.py``); ``cheap`` and ``mixed``:
chains of ops that rematerialize (``chains.py``). Exit status 1 means that some draw failed; each is printed with its
program and with the command that repeats it. A draw that hangs ends the process with the stacks of all its threads.
Which plans are made depends on the time that things take, so that a failure may need some repetitions (``--repeat``).
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import itertools
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter

import torch

from programs import budgets, chains, running, trainings
from programs.kind import Kind, shown

KINDS = {
    "trainings": Kind(trainings.draw, running.check),
    "budgets": Kind(budgets.draw, budgets.check),
    **chains.KINDS,
}
LIMIT_S = 60.0  # of a draw


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--nvme_path", help="a directory on a drive, not a tmpfs; a temporary one by default")
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--repeat", type=int, default=1, help="times that each seed is drawn")
    parser.add_argument("--limit_s", type=float, default=LIMIT_S, help="of one draw, which then counts as a hang")
    options = parser.parse_args(argv)
    kind = KINDS[options.kind]
    seeds = range(options.seed, options.seed + options.draws)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("ds_tba").propagate = False
    faulthandler.enable()
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory() as own:
        return _check(kind, seeds, options, options.nvme_path or own)


def _check(kind: Kind, seeds: range, options: argparse.Namespace, directory: str) -> int:
    started_s, failed, tally = time.monotonic(), list[int](), Counter[str]()
    for seed in itertools.chain.from_iterable([seed] * options.repeat for seed in seeds):
        print(f"seed {seed}", file=sys.stderr, flush=True)  # before the stacks of one that hangs or dies
        faulthandler.dump_traceback_later(options.limit_s, exit=True)
        program = kind.draw(seed)
        outcome = kind.check(program, directory)
        faulthandler.cancel_dump_traceback_later()
        tally += outcome.tally
        if outcome.failures:
            failed.append(seed)
            print(shown(program, outcome), flush=True)
            print(f"  again: PYTHONPATH=tests python -m programs {options.kind} --seed {seed} --draws 1 --repeat 5")
    print(f"{len(seeds) * options.repeat} draws in {time.monotonic() - started_s:.0f} s; failed: {failed or 'none'}")
    print("; ".join(f"{what}: {count}" for what, count in sorted(tally.items())))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
