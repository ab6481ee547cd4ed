"""The answers of the planner of November 2026, with which today's planner is compared.

That planner replayed every event of a micro-step and tried every neighbour of a plan, in 2,197 lines:
``benchmarks/oracle`` up to commit dd747bb. At that commit ``oracle.search.adaptive`` and ``oracle.simulator.replay``
were asked once, and ``benchmarks/results/oracle_202611.json`` has their answers. A question's name says what draws its
input: for ``chains`` and ``replays`` the seed in ``tests/plan/test_against_oracle.py``, for ``models`` a trace of
``planner_scale.py``. Each answer has the digest of its input. Where that differs, the generator has changed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ds_tba.config import Placement
from ds_tba.plan.replay import Assignment
from ds_tba.plan.trace import Trace

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "oracle_202611.json"
LETTERS = {"K": Placement.KEEP, "H": Placement.HOST, "N": Placement.NVME, "M": Placement.REMATERIALIZE}


class Answer(NamedTuple):
    """One answer of the oracle."""

    trace: str  # digest of the input
    step_s: float  # of the plan, or of the replay, as are the bytes
    peak_saved_bytes: int
    written_bytes: int
    host_bytes: int
    is_within: bool = True  # the plan is within its limits; True for a replay
    placements: str = ""  # of the storages in runs, such as ``12N 3K``; empty for a replay
    recomputed: str = ""  # of the blocks, ``R`` for a recomputed one; empty for a replay

    def assignment(self, trace: Trace) -> Assignment:
        """Return the choice of the oracle's plan; see :meth:`check`."""
        self.check(trace)
        places = [LETTERS[letter] for letter in _letters(self.placements)]
        return Assignment(np.array(places, np.int8), np.array([one == "R" for one in _letters(self.recomputed)], bool))

    def check(self, trace: Trace) -> None:
        """Refuse a trace other than the one that the oracle was asked about."""
        if digest(trace) != self.trace:
            raise ValueError(
                f"the trace's digest is {digest(trace)} and the oracle answered for {self.trace}: its generator has "
                f"changed; restore it, or take the answer out of {FILE.name}"
            )


def answers(kind: str) -> dict[str, Answer]:
    """Return all answers of a kind (``chains``, ``replays`` or ``models``) by the name of the question."""
    found = json.loads(FILE.read_text(encoding="utf-8"))[kind]
    return {name: Answer(**row) for name, row in found.items()}


def digest(trace: Trace) -> str:
    """Return a digest of a trace's bytes, times and rates, to nine digits: what a machine rounds otherwise is alike."""
    machine = trace.resources
    times = [(one.pack_s, one.last_forward_use_s, one.first_backward_use_s, one.freed_s) for one in trace.storages]
    numbers = [one for row in times for one in row]
    numbers += [trace.end_s, machine.compute_s_per_byte, machine.staging_bytes]
    numbers += [rate for rate in (machine.write_bytes_per_s, machine.read_bytes_per_s) if rate]
    numbers += [one.nbytes for one in trace.storages] + [one.rematerialize_s or 0.0 for one in trace.storages]
    return hashlib.sha256(" ".join(f"{one:.9g}" for one in numbers).encode()).hexdigest()[:12]


def _letters(runs: str) -> str:
    """Spell runs out: ``2N 1K`` is ``NNK``."""
    return "".join(int(run[:-1]) * run[-1] for run in runs.split())
