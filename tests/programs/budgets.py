"""Random trainings under ``activation_budget_bytes``: it holds in every step, or one line has said what gives way.

Each seed draws a training (``trainings.py``) of one model: sizes of storages as against staging and budget, a limit of
wear or none, a host tier or none, rematerialization or none, recomputation or none; lengths that change, micro-steps,
several forwards before a backward, losses that are kept with their graphs. Checked are, beside all that ``running.py``
compares, the counted peak of every step: recorded ones, planned ones, and those that no plan foresaw.
"""

from __future__ import annotations

import random

from programs import running
from programs.kind import Failure, Outcome
from programs.running import GIVES_WAY, Ours
from programs.trainings import Program, Step

KIB, MIB = 1 << 10, 1 << 20
COLUMNS = 64  # the usual width of a program
# The frames of forward and an operation may use so many of the largest storages at once. Of each further forward before
# a backward one more stays: its input, which has no graph.
HOLDABLE = 9


def step(forwards: tuple[tuple[int, ...], ...], keeps: int = 0) -> Step:
    return Step("lengths", forwards[0][0], forwards=forwards, keeps=keeps)


def largest_bytes(program: Program) -> int:
    return 4 * COLUMNS * max(rows for step in program.steps for forwards in step.forwards for rows in forwards)


def draw(seed: int) -> Program:
    chance = random.Random(seed)
    staging_bytes = MIB * chance.choice([1, 1, 1, 2])
    largest_bytes = int(staging_bytes * chance.choice([0.1, 0.3, 0.6, 1.3, 2.2 if staging_bytes == MIB else 0.9]))
    rows = max(64, largest_bytes // (4 * COLUMNS))
    lengths = tuple(chance.choice([64, 64, 32, 16, 4]) for _ in range(chance.randint(2, 5)))
    forwards, micro_steps = chance.choice([1, 1, 1, 2]), chance.choice([1, 1, 2])
    changes = chance.choice(["never", "later", "always"])
    steps = []
    for number in range(chance.randint(9, 14)):
        is_other = changes == "always" or (changes == "later" and number > 6)

        def length(is_other: bool = is_other) -> int:
            return int(rows * chance.choice([0.25, 0.5, 1, 1])) if is_other else rows

        of_step = tuple(tuple(length() for _ in range(forwards)) for _ in range(micro_steps))
        steps.append(step(of_step, chance.choice([0, 0, 0, 1, 3]) if seed % 4 == 0 else 0))
    ssd = {"rated_endurance_tbw": 1.0, "min_life_days": 10 ** chance.uniform(0, 7)}
    return Program(
        seed=seed,
        lengths=lengths,
        steps=tuple(steps),
        staging_bytes=staging_bytes,
        budget_bytes=int(largest_bytes * chance.choice([0.5, 2, 4, 6, 9, 10, 12])),
        host_bytes=chance.choice([0, 0, 4 * MIB]),
        rematerialize=chance.random() < 0.5,
        recompute=chance.random() < 0.3,
        max_step_overhead=chance.choice([0.0, 0.02, 1000.0]),
        ssd=ssd if chance.random() < 0.5 else {},
    )


def check(program: Program, directory: str) -> Outcome:
    """Train with and without, and look at the peaks and at what was said."""
    return run(program, directory)[0]


def run(program: Program, directory: str) -> tuple[Outcome, Ours]:
    """Return what is wrong, and the side with us."""
    outcome, side = running.run(program, directory)
    peak_bytes, budget_bytes = max(side.peaks), program.budget_bytes or 0
    excuses = [text for text in side.warnings.texts if GIVES_WAY in text]
    forwards = max(len(lengths) for step in program.steps for lengths in step.forwards)
    is_holdable = budget_bytes >= (HOLDABLE + forwards - 1) * largest_bytes(program)
    # Graphs that are kept hold what never leaves: their inputs, which have no graph, and slices of less than a quarter.
    keeps = [0, *(step.keeps for step in program.steps)]
    alone = [peak for peak, *kept in zip(side.peaks, keeps, keeps[1:], strict=False) if not any(kept)]
    if is_holdable and (max(alone, default=0) > budget_bytes or (excuses and not any(keeps))):
        text = f"{side.peaks} under {budget_bytes}: it can be held; {excuses}"
        outcome.failures.append(Failure("budget", text))
    wears = [text for text in side.warnings.texts if "ssd.min_life_days" in text]
    if len(wears) > 1:
        outcome.failures.append(Failure("said", f"more than once: {wears}"))
    outcome.tally["held" if peak_bytes <= budget_bytes else "over, and said"] += 1
    outcome.tally["holdable"] = is_holdable
    outcome.tally["moved"] = side.offloader.report().offloaded_bytes > 0
    outcome.tally["wear gave way"] = bool(wears)
    outcome.tally["larger than staging"] = largest_bytes(program) > program.staging_bytes
    return outcome, side
