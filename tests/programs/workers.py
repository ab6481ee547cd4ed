"""Processes that draw and check programs; one ends itself, with the stacks of all threads, when a draw hangs."""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from programs.kind import Kind

LIMIT_S = 60.0  # of a draw
MAX_CHARACTERS = 3000  # of the begin, and of the end, of the stacks of a process that has died


@dataclass(frozen=True)
class Result:
    """The result of one draw.

    Attributes:
        failures: kinds and texts.
        about: the program.
    """

    kind: str
    seed: int
    failures: list[list[str]]
    about: str
    seconds: float = 0.0
    tally: dict[str, int] = field(default_factory=dict)

    @property
    def kinds(self) -> str:
        return " + ".join(sorted({kind for kind, _ in self.failures}))

    def __str__(self) -> str:
        failures = "\n".join(f"  {kind}: {text}" for kind, text in self.failures)
        return (
            f"{self.about}\n{failures}\n  again: PYTHONPATH=tests python -m programs {self.kind} --seed {self.seed} "
            "--draws 1 --repeat 5 --nvme_path DIR"
        )


# ---- in a worker ----------------------------------------------------------------------------------------------------


def work(name: str, kind: Kind[Any], directory: str, limit_s: float) -> None:
    """Draw each seed that a line of the input names; write a line of JSON for each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("ds_tba").propagate = False
    faulthandler.enable()
    gc.collect()
    gc.freeze()
    answers, sys.stdout = sys.stdout, sys.stderr  # nobody else's lines among the answers
    kind.open(directory)
    for line in sys.stdin:
        faulthandler.dump_traceback_later(limit_s, exit=True)
        answers.write(json.dumps(vars(checked(name, kind, int(line)))) + "\n")
        faulthandler.cancel_dump_traceback_later()
        answers.flush()
    kind.close()


def checked(name: str, kind: Kind[Any], seed: int) -> Result:
    """Check one draw, in this process."""
    program, started_s = kind.draw(seed), time.perf_counter()
    outcome = kind.check(program)
    failures = [[one.kind, one.text] for one in outcome.failures]
    return Result(name, seed, failures, program.describe(), time.perf_counter() - started_s, dict(outcome.tally))


# ---- the workers ----------------------------------------------------------------------------------------------------


class Worker:
    """A process that draws, started again when it has died."""

    def __init__(self, name: str, kind: Kind[Any], directory: str, limit_s: float) -> None:
        self._name, self._kind = name, kind
        self._directory, self._limit_s = directory, limit_s
        self._process: subprocess.Popen[str] | None = None
        self._log: Any = None

    def draw(self, seed: int) -> Result:
        """Return the result of a seed; of one that hangs or dies, where it was."""
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
        return Result(self._name, seed, [[kind, f"status {status}\n{shown}"]], self._kind.draw(seed).describe())

    def close(self) -> None:
        """Let the process end."""
        if self._process is not None:
            self._process.stdin.close()  # type: ignore[union-attr]
            self._process.wait()
            self._end()

    def _start(self) -> subprocess.Popen[str]:
        tests = Path(__file__).parents[1]
        paths = [str(tests), str(tests.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        alone = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in _end
        self._process = subprocess.Popen(
            [sys.executable, "-m", "programs", self._name, "--worker", "--nvme_path", self._directory, "--limit_s",
             str(self._limit_s)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env={**os.environ, **alone},
        )  # fmt: skip
        return self._process

    def _end(self) -> str:
        """Return what the process has said beside its answers."""
        self._process = None
        self._log.seek(0)
        text: str = self._log.read()
        self._log.close()
        return text


def run(
    name: str,
    kind: Kind[Any],
    seeds: Iterable[int],
    directory: str,
    jobs: int,
    limit_s: float = LIMIT_S,
    on_result: Callable[[Result], None] = print,
) -> list[Result]:
    """Draw all seeds, several at a time; return the results in the order of the seeds."""
    waiting, results, lock = iter(seeds), [], threading.Lock()

    def next_seed() -> Iterator[int]:
        while True:
            with lock:
                seed = next(waiting, None)
            if seed is None:
                return
            yield seed

    def job() -> None:
        worker = Worker(name, kind, directory, limit_s)
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


def summary(results: list[Result], elapsed_s: float) -> str:
    """Say in a few lines how many draws there were, which seeds failed how, and what was exercised."""
    failed = [result for result in results if result.failures]
    lines = [
        f"{len(results)} draws in {elapsed_s:.0f} s ({sum(one.seconds for one in results):.0f} s of draws); "
        f"{len(failed)} failed"
    ]
    for kinds, count in Counter(result.kinds for result in failed).most_common():
        seeds = sorted({result.seed for result in failed if result.kinds == kinds})
        lines.append(f"  {kinds}: {count}, seeds {', '.join(map(str, seeds))}")
    tally: Counter[str] = sum((Counter(result.tally) for result in results), Counter())
    groups: dict[str, list[str]] = {}
    for key, count in tally.most_common():
        what, _, which = key.partition(": ")
        groups.setdefault(what, []).append(f"{which} {count}".strip())
    return "\n".join([*lines, *(f"  {what}: {', '.join(texts)}" for what, texts in groups.items())])
