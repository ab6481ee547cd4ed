"""Programs in the shape of public reports: steps that are given up, forks in forward, calls past the engine."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

import torch
from programs_deepspeed import LAYERS, WORDS, Net, ended, loop, started, texts, train_on
from torch import Tensor, nn


class Scores(Net):
    """Returns its scores: the loss is computed outside."""

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.hidden(text))


def packed_tensors(offloader: Any) -> int:
    return 0 if offloader is None else offloader.report().packed_tensors


def trained_after_a_step_that_failed(config: dict[str, Any], steps: int = 4) -> dict[str, Any]:
    """The loss outside of the model raises. The program holds the exception, and tries again with a new engine."""
    first: Any = started(config, Scores)
    batches, before = texts(0), getattr(first, "activation_offloader", None)
    try:
        scores = first(next(batches))
        raise ValueError(f"a loss of the scores {scores.exp().sum().item()} is no number")
    except ValueError as error:
        sys.last_value = error  # as a notebook does
    del first, scores
    seen, engine, other = packed_tensors(before), started(config, Scores), nn.Linear(WORDS, WORDS)

    def loss_of() -> Tensor:
        text = next(batches)
        scores = engine(text)
        return other(scores).exp().mean() + nn.functional.cross_entropy(scores.flatten(0, 1), text.flatten())

    losses = loop(engine, loss_of, steps)
    return ended(engine, losses, seen=packed_tensors(before) - seen)


class Forking(nn.Module):
    """A block in whose forward a child is forked, which trains a model of its own and answers with its loss."""

    def __init__(self, answers: list[float], how: str) -> None:
        super().__init__()
        self.answers, self.how = answers, how
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(writing, json.dumps(self.graded()).encode())
                if self.how == "unwinds":  # through the model's forward and the engine's
                    sys.exit(0)
            finally:
                if sys.exc_info()[0] is not SystemExit:
                    os._exit(sys.exc_info()[0] is not None)
        os.close(writing)
        with os.fdopen(reading) as answer:
            self.answers.append(json.loads(answer.read() or "-1"))
        self.answers.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return self.layer(x)

    def graded(self) -> float:
        torch.manual_seed(5)
        judge = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 1))
        optimizer = torch.optim.SGD(judge.parameters(), 0.1)
        for _ in range(3):
            loss = judge(torch.randn(128, 64)).exp().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()


def trained_with_forks(config: dict[str, Any], steps: int = 4, how: str = "exits") -> dict[str, Any]:
    """Rewards that a forked process grades, in the middle of the model's forward.

    Args:
        how: the child ``exits`` where it is, or ``unwinds`` all that called it.
    """
    torch.set_num_threads(1)
    answers: list[float] = []

    def build() -> Net:
        net = Net()
        net.blocks.insert(LAYERS // 2, Forking(answers, how))
        return net

    engine = started(config, build)
    try:
        losses = train_on(engine, texts(0), steps)
    except SystemExit:  # a child
        os._exit(0)
    return ended(engine, [*losses, *answers])


def trained_with_mutations(config: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    engine = started(config, Net)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        return ended(engine, train_on(engine, texts(0), steps))


def trained_past_the_engine(config: dict[str, Any], steps: int = 3, how: str = "module") -> dict[str, Any]:
    """Nothing of ours sees what autograd saves. The script has logging of its own, which shows warnings.

    Args:
        how: the script calls ``engine.module``; the engine runs under ``no_grad``, and the head alone is trained; or
            the ``engine`` is called as it should be.
    """
    logging.basicConfig()
    engine, batches = started(config, Scores), texts(0)

    def loss_of() -> Tensor:
        text = next(batches)
        with torch.set_grad_enabled(how != "no_grad"):
            scores = (engine.module if how == "module" else engine)(text)
        if how == "no_grad":
            scores = scores + engine.module.head.weight.mean()
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), text.flatten())

    offloader = getattr(engine, "activation_offloader", None)
    result = ended(engine, loop(engine, loss_of, steps))
    report = None if offloader is None else offloader.report()
    return result if report is None else {**result, "summary": report.summary(), "ended": report.state}
