"""Random trainings under ``activation_budget_bytes``: it holds in every step, or one line has said what gives way.

Each seed draws a training of one model: sizes of storages as against staging and budget, a limit of wear or none, a
host tier or none, rematerialization or none, recomputation or none; lengths that change, micro-steps, several forwards
before a backward, losses that are kept with their graphs. Checked are the gradients, bit by bit, and the counted peak
of every step: recorded ones, planned ones, and those that no plan foresaw.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.doubles import Warnings
from support.stepping import end_step, forward, note_backward, offloader_of
from torch import Tensor, nn

from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.search import adaptive
from programs.kind import Failure, Kind, Outcome

KIB, MIB = 1 << 10, 1 << 20
COLUMNS = 64
# So many of the largest storages may be in use at once, by the frames of forward and by an operation.
HOLDABLE = 9
PLANNER = adaptive
GIVES_WAY = ("cannot be held",)


class Layer(nn.Module):
    """Six storages of rows x ``COLUMNS``, of which two can be made again."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(COLUMNS, COLUMNS)

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x).sin()
        return x + nn.functional.gelu(y * y.tanh())


class Model(nn.Module):
    """Layers of several lengths, each told by its part of the rows.

    Args:
        parts: of the rows of a step, in 64ths.
    """

    def __init__(self, parts: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in parts)
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        loss = x.new_zeros(())
        for layer, part in zip(self.layers, self.parts, strict=True):
            rows = max(1, len(x) * part // 64)
            y = layer(x[:rows])
            x = torch.cat([y, x[rows:]])
            loss = loss + y.square().mean()
        return loss


@dataclass(frozen=True)
class Step:
    """One step of a training.

    Attributes:
        rows: of each forward, for each micro-step.
        keeps: losses that are kept with their graphs from here to the end of the step after.
    """

    rows: tuple[tuple[int, ...], ...]
    keeps: int = 0


@dataclass(frozen=True)
class Program:
    """One draw."""

    seed: int
    parts: tuple[int, ...]
    steps: tuple[Step, ...]
    block: dict[str, Any]

    @property
    def budget_bytes(self) -> int:
        return int(self.block["activation_budget_bytes"])

    @property
    def largest_bytes(self) -> int:
        return 4 * COLUMNS * max(row for step in self.steps for rows in step.rows for row in rows)


def draw(seed: int) -> Program:
    chance = random.Random(seed)
    staging_bytes = MIB * chance.choice([1, 1, 1, 2])
    largest_bytes = int(staging_bytes * chance.choice([0.1, 0.3, 0.6, 1.3, 2.2 if staging_bytes == MIB else 0.9]))
    rows = max(64, largest_bytes // (4 * COLUMNS))
    parts = tuple(chance.choice([64, 64, 32, 16, 4]) for _ in range(chance.randint(2, 5)))
    forwards, micro_steps = chance.choice([1, 1, 1, 2]), chance.choice([1, 1, 2])
    changes = chance.choice(["never", "later", "always"])
    steps = []
    for number in range(chance.randint(9, 14)):
        is_other = changes == "always" or (changes == "later" and number > 6)

        def length(is_other: bool = is_other) -> int:
            return int(rows * chance.choice([0.25, 0.5, 1, 1])) if is_other else rows

        of_step = tuple(tuple(length() for _ in range(forwards)) for _ in range(micro_steps))
        steps.append(Step(of_step, chance.choice([0, 0, 0, 1, 3]) if seed % 4 == 0 else 0))
    ssd: dict[str, Any] = {"rated_endurance_tbw": 1.0, "min_life_days": 10 ** chance.uniform(0, 7)}
    block = {
        "placement": "adaptive",
        "activation_budget_bytes": int(largest_bytes * chance.choice([0.5, 2, 4, 6, 9, 10, 12])),
        "min_tensor_bytes": 4 * KIB,
        "host_budget_bytes": chance.choice([0, 0, 4 * MIB]),
        "rematerialize": chance.random() < 0.5,
        "recompute": chance.random() < 0.3,
        "max_step_overhead": chance.choice([0.0, 0.02, 1000.0]),
        "ssd": ssd if chance.random() < 0.5 else {},
        "io": {"backend": "posix", "staging_bytes": staging_bytes, "swap_file_bytes": 256 * MIB},
    }
    return Program(seed, parts, tuple(steps), block)


@dataclass
class Trained:
    """A training with an offloader.

    Attributes:
        found: losses and gradients.
        peaks: of each step, counted.
        said: warnings, in order.
        plan_bytes: of the last plan, by placement.
    """

    found: list[Tensor]
    peaks: list[int]
    said: list[str]
    plans: int = 0
    moved_bytes: int = 0
    plan_bytes: dict[str, int] = field(default_factory=dict)


def train(program: Program, offloader: ActivationOffloader | None, model: Model) -> Trained:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: list[Tensor] = []
    peaks: list[int] = []
    kept: list[Tensor] = []
    torch.manual_seed(program.seed)
    for step in program.steps:
        for rows in step.rows:
            losses = [forward(model, torch.randn(one, COLUMNS), offloader) for one in rows]
            loss = torch.stack(losses).sum()
            loss.backward()
            found.append(loss.detach())
            del loss, losses
            note_backward(offloader)
        kept.clear()
        kept += [forward(model, torch.randn(step.rows[0][0], COLUMNS), offloader) for _ in range(step.keeps)]
        found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
        end_step(optimizer, offloader)
        if offloader is not None:
            offloader.cache.settle()
            peaks.append(offloader.report().step_peak_saved_bytes)
    return Trained(found, peaks, [])


def made(program: Program) -> Model:
    torch.manual_seed(program.seed)
    return Model(program.parts)


def trained(program: Program, directory: Path) -> Trained:
    """With an offloader."""
    model, said, logger = made(program), Warnings(), logging.getLogger("ds_tba")
    logger.addHandler(said)
    try:
        with closing(offloader_of(directory, model, PLANNER, **program.block)) as offloader:
            outcome = train(program, offloader, model)
    finally:
        logger.removeHandler(said)
    report = offloader.report()
    outcome.said, outcome.plans, outcome.moved_bytes = said.texts, report.plans, report.offloaded_bytes
    outcome.plan_bytes = report.plan["bytes"] if report.plan else {}
    return outcome


def check(program: Program, directory: Path) -> Outcome:
    """Train with and without, and look at the peaks and at what was said."""
    expected = train(program, None, made(program))
    outcome, failures = trained(program, directory), []
    if len(expected.found) != len(outcome.found) or not all(map(torch.equal, expected.found, outcome.found)):
        failures.append(Failure("difference", "of gradients"))
    peak_bytes, budget_bytes = max(outcome.peaks), program.budget_bytes
    excuses = [text for text in outcome.said if any(one in text for one in GIVES_WAY)]
    if peak_bytes > budget_bytes and not excuses:
        failures.append(Failure("budget", f"a peak of {peak_bytes} under {budget_bytes}, and nothing was said"))
    is_holdable = budget_bytes >= HOLDABLE * program.largest_bytes
    # Graphs that are kept hold what never leaves: their inputs, which have no graph, and slices of less than a quarter.
    keeps = [0, *(step.keeps for step in program.steps)]
    alone = [peak for peak, *kept in zip(outcome.peaks, keeps, keeps[1:], strict=False) if not any(kept)]
    if is_holdable and (max(alone, default=0) > budget_bytes or (excuses and not any(keeps))):
        failures.append(Failure("budget", f"{outcome.peaks} under {budget_bytes}: it can be held; {excuses}"))
    wears = [text for text in outcome.said if "ssd.min_life_days" in text]
    if len(wears) > 1:
        failures.append(Failure("said", f"more than once: {wears}"))
    tally = Counter({"held" if peak_bytes <= budget_bytes else "over, and said": 1})
    tally["holdable"] = is_holdable
    tally["plans"] = outcome.plans
    tally["moved"] = outcome.moved_bytes > 0
    tally["wear gave way"] = bool(wears)
    tally["larger than staging"] = program.largest_bytes > program.block["io"]["staging_bytes"]
    return Outcome(failures, tally)


class Budgets(Kind[Program]):
    """Trainings under budgets."""

    def draw(self, seed: int) -> Program:
        return draw(seed)

    def check(self, program: Program) -> Outcome:
        return check(program, Path(self.directory))
