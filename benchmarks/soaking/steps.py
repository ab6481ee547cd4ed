"""The training steps of the soak: each is drawn from its number, and done with an engine.

The model is a plain one, and the ways to use a graph are those that decide how long saved tensors live. Programs that
are hard to save exactly are drawn by ``tests/programs``. This file knows ``deepspeed``'s engine by its methods only. It
does not know offloading: the run without us is the same.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from curves.models import Shape, Transformer
from torch import Tensor

# Few enough for the caches of kernels in torch, one per shape, to fill up in the warm-up.
LENGTHS = (32, 64, 96, 128, 192, 256, 512)
MAX_TOKENS = 1024
SHAPE = Shape("GPT", hidden=128, layers=3, sequence=max(LENGTHS), vocabulary=256, head=64, batch=4)


class SoakError(Exception):
    """Something that must happen in both runs did not."""


class InterruptionError(Exception):
    """Raised by the training itself, in forward, between forward and backward, or in backward."""


@dataclass(frozen=True)
class Batch:
    """The input of one forward."""

    seed: int
    rows: int
    sequence: int

    def tokens(self) -> Tensor:
        """Return its token numbers."""
        chance = torch.Generator().manual_seed(self.seed)
        return torch.randint(0, SHAPE.vocabulary, (self.rows, self.sequence), generator=chance)


@dataclass(frozen=True)
class StepPlan:
    """One training step: its mode (a key of :data:`MODES`) and the batches of its forwards."""

    number: int
    mode: str
    batches: tuple[Batch, ...]
    seed: int


def model() -> Transformer:
    """Return the model, with the same parameters each time."""
    torch.manual_seed(1)
    return Transformer(SHAPE)


def plan_of(seed: int, number: int, stage: int) -> StepPlan:
    """Return the plan of step ``number``, the same in every run with this seed and this ZeRO stage."""
    chance = random.Random(f"{seed}/step/{number}")
    mode = chance.choice([mode for mode in MODES if stage == 0 or mode in WITH_ZERO])
    count = chance.randint(2, 4) if mode in SEVERAL_FORWARDS else 1
    return StepPlan(number, mode, tuple(_batch(chance) for _ in range(count)), chance.randrange(1 << 30))


def _batch(chance: random.Random) -> Batch:
    rows = chance.randint(1, SHAPE.batch)
    lengths = [length for length in LENGTHS if rows * length <= MAX_TOKENS]
    return Batch(chance.randrange(1 << 30), rows, chance.choice(lengths))


def do(engine: Any, plan: StepPlan) -> list[str]:
    """Run a step up to the optimizer, and return its losses in hex. It may be called again after an error."""
    return [loss.hex() for loss in MODES[plan.mode](engine, plan)]


def forward(engine: Any, batch: Batch) -> Tensor:
    """Return the loss of a batch."""
    tokens = batch.tokens()
    loss: Tensor = engine(tokens, tokens)
    return loss


def accumulation(engine: Any, plan: StepPlan) -> list[float]:
    losses = []
    for batch in plan.batches:
        loss = forward(engine, batch)
        engine.backward(loss)
        losses.append(loss.item())
    return losses


def several_forwards(engine: Any, plan: StepPlan) -> list[float]:
    """Run all forwards, then all backwards in another order, the last two as one."""
    losses = [forward(engine, batch) for batch in plan.batches]
    values = [loss.item() for loss in losses]
    random.Random(plan.seed).shuffle(losses)
    last = losses.pop() + losses.pop()
    while losses:
        engine.backward(losses.pop())
    engine.backward(last)
    return values


def retained_graph(engine: Any, plan: StepPlan) -> list[float]:
    loss = forward(engine, plan.batches[0])
    engine.backward(loss, retain_graph=True)
    if plan.seed % 2:
        gc.collect()
    engine.backward(loss)
    return [loss.item()]


def dropped_graphs(engine: Any, plan: StepPlan) -> list[float]:
    """Drop all forwards but the last without a backward, each in a cycle that the collector finds."""
    values = []
    for batch in plan.batches[:-1]:
        dropped: list[Any] = [forward(engine, batch)]
        values.append(dropped[0].item())
        dropped.append(dropped)
        del dropped
    return [*values, *accumulation(engine, replace(plan, batches=plan.batches[-1:]))]


def exception(engine: Any, plan: StepPlan) -> list[float]:
    """Raise in forward, between forward and backward, or in backward, as training may; then do the step."""
    # Not in backward under ZeRO, whose own state is then good for no more.
    places = ("forward", "between") if engine.zero_optimization_stage() else ("forward", "between", "backward")
    where = random.Random(plan.seed).choice(places)

    def raises(_: Any, __: Any, output: Tensor) -> None:
        if where == "forward":
            _interrupt(output)
        if where == "backward":
            output.register_hook(_interrupt)

    hook = engine.module.blocks[1].register_forward_hook(raises)
    try:
        loss = forward(engine, plan.batches[0])
        if where == "between":
            _interrupt(loss)
        engine.backward(loss)
    except InterruptionError:
        pass
    else:
        raise SoakError(f"step {plan.number}: the exception in {where} was lost")
    finally:
        hook.remove()
    engine.zero_grad()
    return accumulation(engine, plan)


def _interrupt(tensor: Tensor) -> None:
    raise InterruptionError(f"at a tensor of {tensor.numel()} elements")


MODES: dict[str, Callable[[Any, StepPlan], list[float]]] = {
    "single": accumulation,
    "accumulation": accumulation,
    "several forwards": several_forwards,
    "retained graph": retained_graph,
    "dropped graphs": dropped_graphs,
    "exception": exception,
}
SEVERAL_FORWARDS = ("accumulation", "several forwards", "dropped graphs")
# One backward for each step: ZeRO's own state is good for no more without accumulation.
WITH_ZERO = ("single", "dropped graphs", "exception")
# Every graph that is made is run backward to its end, so that whatever was read is also used.
COMPLETE = ("single", "accumulation", "several forwards", "retained graph")
