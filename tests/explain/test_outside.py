"""A loss outside of the engine's forward that saves more than forward does is said once, with its bytes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stepping import end_step, forward, note_backward, offloader_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ds_tba.core.hooks import SHOWS_HOOKS
from ds_tba.explain import outside
from ds_tba.remat.rules import is_supported

WORDS, KIB = 512, 1 << 10
LOGITS_KIB = 4 * 16 * WORDS * 4 // KIB
needs_raw = pytest.mark.skipif(not is_supported(), reason="this PyTorch does not show what nodes hold")
Loss = Callable[[Tensor], Tensor]


class Head(nn.Module):
    """Logits, or their loss where one is given."""

    def __init__(self, loss: Loss | None = None, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.loss, self.checkpointed = nn.Linear(32, 32), nn.Linear(32, WORDS), loss, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        body: Callable[..., Any] = self.body
        hidden = checkpoint(body, x, use_reentrant=False) if self.checkpointed else body(x)
        logits: Tensor = self.head(hidden)
        return logits if self.loss is None else self.loss(logits)


def mean_loss(logits: Tensor) -> Tensor:
    return cross_entropy(logits.view(-1, WORDS), torch.zeros(64, dtype=torch.int64))


def said(
    directory: Path, caplog: pytest.LogCaptureFixture, model: nn.Module, loss: Loss, steps: int = 4, **block: Any
) -> list[str]:
    """What is logged of a loss outside of forward."""
    offloader = offloader_of(directory, model, **{"placement": "keep", "min_tensor_bytes": 4096, **block})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with caplog.at_level(logging.WARNING, logger="ds_tba"):
        for _ in range(steps):
            result = forward(model, torch.randn(4, 16, 32, requires_grad=True), offloader)
            offloader.keep_saving()
            value = loss(result)
            offloader.stop_saving()
            offloader.look_outside(((value,), {}))
            value.backward()
            note_backward(offloader)
            end_step(optimizer, offloader)
    offloader.close()
    return [one.getMessage() for one in caplog.records if "outside of the engine's forward" in one.getMessage()]


@pytest.fixture(autouse=True)
def _every_size_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "LEAST_BYTES", 64 * KIB)


@needs_raw
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("placement", ["keep", "nvme"])
def test_a_loss_on_the_logits_is_said_once_with_its_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, placement: str, checkpointed: bool
) -> None:
    model = Head(checkpointed=checkpointed)
    (line,) = said(tmp_path, caplog, model, mean_loss, placement=placement)
    # The log-softmax, which its node and that of the loss hold, counts once; the labels are 512 bytes.
    assert f"what it saves, {LOGITS_KIB}.50 KiB, stays in memory and is not counted" in line
    assert '"until_backward": true in "activation_nvme_offload"' in line


@pytest.mark.parametrize(
    ("model", "loss", "block"),
    [
        (Head(mean_loss), lambda loss: loss, {}),
        (Head(mean_loss), lambda loss: loss / 2 + loss.square(), {}),
        (Head(), lambda logits: logits.sum(-1).square().mean(), {}),
        pytest.param(
            Head(), mean_loss, {"until_backward": True}, marks=pytest.mark.skipif(not SHOWS_HOOKS, reason="PyTorch 2.8")
        ),
    ],
    ids=["in the model", "scaled outside", "saves little", "until_backward"],
)
def test_nothing_is_said_where_forward_saves_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model: nn.Module, loss: Loss, block: dict[str, Any]
) -> None:
    assert said(tmp_path, caplog, model, loss, **block) == []


@needs_raw
def test_a_loss_that_saves_less_than_forward_is_not_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Head(lambda logits: logits.exp().sin().tanh())
    assert said(tmp_path, caplog, model, lambda found: found.square().mean()) == []


@needs_raw
def test_a_graph_that_a_backward_has_freed_is_looked_at_without_an_error(tmp_path: Path) -> None:
    model = Head()
    offloader = offloader_of(tmp_path, model, placement="keep", min_tensor_bytes=4096)
    loss = mean_loss(forward(model, torch.randn(4, 16, 32), offloader))
    loss.backward()
    offloader.look_outside(loss)
    offloader.close()


@needs_raw
def test_the_engine_says_it(tmp_path: Path) -> None:
    block = {"placement": "keep"}
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "activation_nvme_offload": block,
    }
    code = f"""
import json, torch, deepspeed
model = torch.nn.Linear(32, 65536)
config = json.loads({json.dumps(config)!r})
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(2):
    loss = torch.nn.functional.cross_entropy(engine(torch.randn(8, 32)), torch.zeros(8, dtype=torch.int64))
    engine.backward(loss)
    engine.step()
"""
    (tmp_path / "train.py").write_text(code)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py")],
        env={**os.environ, "DS_ACCELERATOR": "cpu", **variables},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("what it saves, 2.00 MiB, stays in memory") == 1
