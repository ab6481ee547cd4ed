"""The training steps of the soak: each is drawn from its number, and done with an engine.

This file knows ``deepspeed``'s engine by its methods only. It does not know offloading: the run without us is the same.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from soaking.model import DEPTH, LONGEST, TWICE_DIFFERENTIABLE, TWISTS, ForwardPlan, InterruptionError, tokens_of

# Few enough for the caches of kernels in torch, one per shape, to fill up in the warm-up.
LENGTHS = (32, 64, 96, 128, 192, 256, LONGEST)
MAX_TOKENS = 1024
MODIFIED = "modified by an inplace operation"


class SoakError(Exception):
    """Something that must happen in both runs did not."""


@dataclass(frozen=True)
class StepPlan:
    """One training step: what it does (a key of :data:`MODES`) and with which forwards."""

    number: int
    mode: str
    forwards: tuple[ForwardPlan, ...]
    seed: int


def plan_of(seed: int, number: int, stage: int) -> StepPlan:
    """Return the plan of step ``number``, the same in every run with this seed and this ZeRO stage."""
    chance = random.Random(f"{seed}/step/{number}")
    modes = [mode for mode in MODES if stage == 0 or mode in WITH_ZERO]
    mode = chance.choice(modes)
    count = 2 if mode == "threads" else chance.randint(2, 4) if mode in SEVERAL_FORWARDS else 1
    forwards = tuple(_forward_plan(chance, mode) for _ in range(count))
    return StepPlan(number, mode, forwards, chance.randrange(1 << 30))


def _forward_plan(chance: random.Random, mode: str) -> ForwardPlan:
    batch = chance.randint(1, 4)
    lengths = [length for length in LENGTHS if batch * length <= MAX_TOKENS]
    twice = mode == "double backward"
    styles = [""] if twice or mode == "mutation" else ["", "", "not reentrant", "reentrant"]
    return ForwardPlan(
        seed=chance.randrange(1 << 30),
        batch=batch,
        sequence=chance.choice(lengths),
        autocast=chance.random() < 0.3,
        dropout=0.0 if mode == "threads" else chance.choice([0.0, 0.1]),  # checkpoints set the process's random state
        twists=tuple(chance.choice(TWICE_DIFFERENTIABLE if twice else list(TWISTS)) for _ in range(DEPTH)),
        checkpoints=tuple(chance.choice(styles) for _ in range(DEPTH)),
        collect=chance.random() < 0.1,
        penalty=twice,
    )


def do(engine: Any, plan: StepPlan) -> list[str]:
    """Run a step up to the optimizer, and return its losses in hex. It may be called again after an error."""
    torch.manual_seed(plan.seed)
    return [loss.hex() for loss in MODES[plan.mode](engine, plan)]


# ---- modes ----------------------------------------------------------------------------------------------------------


def single(engine: Any, plan: StepPlan) -> list[float]:
    loss = _forward(engine, plan.forwards[0])
    engine.backward(loss)
    return [loss.item()]


def accumulation(engine: Any, plan: StepPlan) -> list[float]:
    losses = []
    for forward in plan.forwards:
        loss = _forward(engine, forward)
        engine.backward(loss)
        losses.append(loss.item())
    return losses


def several_forwards(engine: Any, plan: StepPlan) -> list[float]:
    """Run all forwards, then all backwards in another order, the last two as one."""
    losses = [_forward(engine, forward) for forward in plan.forwards]
    values = [loss.item() for loss in losses]
    random.Random(plan.seed).shuffle(losses)
    last = losses.pop() + losses.pop()
    while losses:
        engine.backward(losses.pop())
    engine.backward(last)
    return values


def retained_graph(engine: Any, plan: StepPlan) -> list[float]:
    loss = _forward(engine, plan.forwards[0])
    engine.backward(loss, retain_graph=True)
    if plan.seed % 2:
        gc.collect()
    engine.backward(loss)
    return [loss.item()]


def dropped_graphs(engine: Any, plan: StepPlan) -> list[float]:
    """Drop all forwards but the last without a backward, each in a cycle that the collector finds."""
    values = []
    for forward in plan.forwards[:-1]:
        dropped: list[Any] = [_forward(engine, forward)]
        values.append(dropped[0].item())
        dropped.append(dropped)
        del dropped
    return [*values, *single(engine, replace(plan, forwards=plan.forwards[-1:]))]


def evaluation_between(engine: Any, plan: StepPlan) -> list[float]:
    """Run passes in eval mode between forward and backward: with gradients, without, and in inference mode."""
    loss = _forward(engine, plan.forwards[0])
    engine.module.eval()
    try:
        values = [_forward(engine, plan.forwards[1]).item()]
        with torch.no_grad():
            values.append(_forward(engine, plan.forwards[1]).item())
        with torch.inference_mode():
            values.append(_forward(engine, plan.forwards[-1]).item())
    finally:
        engine.module.train()
    engine.backward(loss)
    return [loss.item(), *values]


def exception(engine: Any, plan: StepPlan) -> list[float]:
    """Raise in forward, between forward and backward, or in backward, as training may; then do the step."""
    # Not in backward under ZeRO, whose own state is then good for no more.
    places = ("forward", "between") if engine.zero_optimization_stage() else ("forward", "between", "backward")
    where = random.Random(plan.seed).choice(places)
    try:
        loss = _forward(engine, replace(plan.forwards[0], raise_in="" if where == "between" else where))
        if where == "between":
            raise InterruptionError(f"between forward and backward, at {loss.item()}")
        engine.backward(loss)
    except InterruptionError:
        pass
    else:
        raise SoakError(f"step {plan.number}: the exception in {where} was lost")
    engine.zero_grad()
    return single(engine, plan)


def mutation(engine: Any, plan: StepPlan) -> list[float]:
    """Change a saved tensor in place before backward: that must raise, in both runs."""
    exposed: list[Tensor] = []
    loss = engine(tokens_of(plan.forwards[0]), plan.forwards[0], exposed)
    with torch.no_grad():
        exposed[plan.seed % len(exposed)].add_(1)
    try:
        engine.backward(loss)
    except RuntimeError as error:
        if MODIFIED not in str(error):
            raise
    else:
        raise SoakError(f"step {plan.number}: a saved tensor was changed in place and backward did not raise")
    del loss, exposed
    engine.zero_grad()
    return single(engine, plan)


def double_backward(engine: Any, plan: StepPlan) -> list[float]:
    return single(engine, plan)  # the model's forward differentiates once, backward a second time


def threads(engine: Any, plan: StepPlan) -> list[float]:
    """Run two backwards at once: a sum of two gradients does not depend on their order."""
    losses = [_forward(engine, forward) for forward in plan.forwards]
    errors: list[BaseException] = []

    def backward(loss: Tensor) -> None:
        try:
            engine.backward(loss)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)

    workers = [threading.Thread(target=backward, args=(loss,)) for loss in losses]
    with engine.no_sync():  # or the first to end would copy all gradients while the other adds to them
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if errors:
        raise errors[0]
    return [loss.item() for loss in losses]


MODES: dict[str, Callable[[Any, StepPlan], list[float]]] = {
    "single": single,
    "accumulation": accumulation,
    "several forwards": several_forwards,
    "retained graph": retained_graph,
    "dropped graphs": dropped_graphs,
    "evaluation between": evaluation_between,
    "exception": exception,
    "mutation": mutation,
    "double backward": double_backward,
    "threads": threads,
}
SEVERAL_FORWARDS = ("accumulation", "several forwards", "dropped graphs", "evaluation between")
# One backward for each step: ZeRO's own state is good for no more without accumulation.
WITH_ZERO = ("single", "dropped graphs", "evaluation between", "exception")
# Every graph that is made is run backward to its end, so that whatever was read is also used.
COMPLETE = ("single", "accumulation", "several forwards", "retained graph", "double backward", "threads")


def _forward(engine: Any, plan: ForwardPlan) -> Tensor:
    loss: Tensor = engine(tokens_of(plan), plan)
    return loss
