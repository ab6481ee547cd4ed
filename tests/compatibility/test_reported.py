"""Programs of public reports, each with and without the block: what is given up, forked, or called past the engine.

``docs/evidence/reports.md`` has a row for each report, and names its test or its hazard.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import PLANNED, compare
from conftest import StoreFactory
from programs_deepspeed import LAYERS, WORDS, Net, ended, loop, started, texts, train_on
from support.awkward import Read, function
from support.models import Mlp, Stack
from support.runs import ROOT, plain_config
from torch import Tensor, nn

from ds_tba import Offloader
from ds_tba.core.cache import TensorCache
from ds_tba.errors import IncompatibleError

CONFIG = plain_config(0, train_micro_batch_size_per_gpu=2)
UNTIL_BACKWARD: dict[str, Any] = {"until_backward": True, "rematerialize": False}


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


@pytest.mark.engine
def test_a_step_that_was_given_up_takes_nothing_of_the_next_engine_s(tmp_path: Path) -> None:
    longer, shorter = (
        compare(
            trained_after_a_step_that_failed, CONFIG, tmp_path / str(steps), block=UNTIL_BACKWARD, steps=steps
        ).results[0]
        for steps in (4, 3)
    )
    assert longer["seen"] == shorter["seen"] == 0
    per_step = longer["report"]["packed_tensors"] - shorter["report"]["packed_tensors"]
    assert per_step * 4 == longer["report"]["packed_tensors"]  # the first step saves as much as the others


def graded() -> float:
    """Train a model of the child's own; its loss."""
    torch.manual_seed(5)
    judge = Stack(lambda: Mlp(64), 2)
    optimizer = torch.optim.SGD(judge.parameters(), 0.1)
    for _ in range(3):
        loss = judge(torch.randn(128, 64))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


class Forking(nn.Module):
    """A block in whose forward a child is forked, which answers with a grade."""

    def __init__(self, answers: list[float], how: str) -> None:
        super().__init__()
        self.answers, self.how = answers, how
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        child, answer = os.fork(), Path("answer")
        if not child:
            status = 1
            try:
                answer.write_text(graded().hex())
                status = 0
            finally:
                if status or self.how == "exits":
                    os._exit(status)
            sys.exit()  # through the model's forward and the engine's
        self.answers.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        self.answers.append(float.fromhex(answer.read_text()))
        answer.unlink()
        return self.layer(x)


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


@pytest.mark.engine
@pytest.mark.parametrize("how", ["exits", "unwinds"])
@pytest.mark.parametrize(
    "block",
    [
        {},
        PLANNED,
        pytest.param({"placement": "adaptive", "activation_budget_bytes": 100_000}, marks=pytest.mark.thorough),
        pytest.param({"placement": "keep"}, marks=pytest.mark.thorough),
        {"placement": "host", "host_budget_bytes": 8 << 20},
    ],
    ids=lambda block: "-".join(f"{value}" for value in block.values()) or "nvme",
)
def test_a_child_forked_in_forward_trains_and_its_parent_goes_on(
    tmp_path: Path, block: dict[str, Any], how: str
) -> None:
    moves = block.get("placement") != "keep"
    compare(trained_with_forks, CONFIG, tmp_path, block=block, must_move=moves, how=how)


def test_mutations_that_pytorch_allows_are_refused_by_name() -> None:
    with (
        Offloader(placement="keep") as offloader,
        torch.autograd.graph.allow_mutation_on_saved_tensors(),
        pytest.raises(IncompatibleError, match=r"saved_tensors clones.*take forward out of that"),
        offloader.saving(),
    ):
        pass


def trained_past_the_engine(config: dict[str, Any], steps: int = 3, *, calls_module: bool) -> dict[str, Any]:
    """Where the script calls ``engine.module`` nothing of ours sees what autograd saves.

    The script has logging of its own, which shows warnings.
    """
    logging.basicConfig()
    engine, batches = started(config, Scores), texts(0)

    def loss_of() -> Tensor:
        text = next(batches)
        scores = (engine.module if calls_module else engine)(text)
        return nn.functional.cross_entropy(scores.flatten(0, 1), text.flatten())

    return ended(engine, loop(engine, loss_of, steps))


@pytest.mark.engine
@pytest.mark.parametrize(("calls_module", "block"), [(True, PLANNED), (False, {})], ids=["module", "engine"])
def test_where_nothing_is_offloaded_the_log_and_the_report_say_so(
    tmp_path: Path, calls_module: bool, block: dict[str, Any]
) -> None:
    """Beside logging of the script's own, with warnings alone: each line once."""
    compared = compare(
        trained_past_the_engine, CONFIG, tmp_path, block=block, must_move=not calls_module, calls_module=calls_module
    )
    (found,) = compared.results
    said = found["output"].splitlines()
    lines = [line for line in said if "nothing was offloaded in step" in line]
    why = "Call engine(x), not engine.module(x) or a copy or wrapper of it"
    assert [why in line and line.startswith("WARNING:ds_tba:nothing was") for line in lines] == [True] * calls_module
    assert sum("activations go to" in line for line in said) == 1
    ending = ": nothing was offloaded" if calls_module else ""
    assert found["report"]["state"] == f"running{ending}"
    assert json.loads((tmp_path / "nvme" / "report.json").read_text())["state"] == f"finished{ending}"
    last = "rank 0: nothing was offloaded, 3 steps: " if calls_module else "rank 0: 3 steps: "
    assert sum(last in line for line in said) == 1


def test_torchtune_2456_a_function_that_wants_its_tensor_on_the_cpu(make_store: StoreFactory) -> None:
    seen: list[Tensor] = []

    def gradient(grad: Tensor, read: Read) -> Tensor:
        seen.extend(read())
        return grad * 2

    store, x = make_store(), torch.randn(64, 64, requires_grad=True)
    with TensorCache([store], "meta", 1).saving():
        loss = function(lambda x: (x * 2, [x]), gradient)(x).sum()
    loss.backward()
    assert seen[0].device.type == "cpu" and seen[0].data_ptr() == x.data_ptr()
    assert store.stats.offloaded_bytes == 0


PAGE = ROOT / "docs" / "evidence" / "reports.md"
ROW = re.compile(
    r"^\| \[(?P<repository>[^ \]]+) #(?P<number>\d+)\]\((?P<url>[^)]+)\) \|.*\| (?P<tests>[^|]+) \|$", re.M
)
TEST = re.compile(r"\[`(?P<name>\w+)`\]\(\.\./\.\./(?P<path>tests/[\w/]+\.py)\)")


def test_each_row_names_a_test_that_exists() -> None:
    rows = list(ROW.finditer(PAGE.read_text()))
    assert len(rows) == sum(line.startswith("| [") for line in PAGE.read_text().splitlines())
    assert len({(row["repository"], row["number"]) for row in rows}) == len(rows) >= 30
    for row in rows:
        assert row["url"].endswith(f"/{row['number']}") and f"/{row['repository'].split('/')[0]}/" in row["url"]
        tests = list(TEST.finditer(row["tests"]))
        assert tests, row[0]
        for test in tests:
            assert f"def {test['name']}(" in (ROOT / test["path"]).read_text(), row[0]
