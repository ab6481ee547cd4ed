"""Memory runs out, the program catches that and goes on: nothing of ours is in the way, and gradients are the same."""

from __future__ import annotations

import logging
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Closing
from support import stepping
from support.leftovers import after_a_while, held
from support.models import Stack
from support.stepping import assert_same_steps, end_step, forward, note_backward, offloader_of
from torch import nn

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.device.accelerator import Accelerator
from ds_tba.explain import out_of_memory
from ds_tba.explain.out_of_memory import Failure, memory_of, one_change
from ds_tba.holders import ModelMemory
from ds_tba.offloader import ActivationOffloader

pytestmark = pytest.mark.usefixtures("one_thread")
Make = Callable[..., tuple[Stack, ActivationOffloader]]
STEPS = 6
MORE_THAN_THERE_IS = 1 << 58
# The drive may take next to nothing.
RECOMPUTED = {
    "placement": "adaptive", "activation_budget_bytes": 250_000, "rematerialize": False, "recompute": True,
    "ssd": {"rated_endurance_tbw": 1e-6, "min_life_days": 10_000},
}  # fmt: skip


class Exhausts(torch.autograd.Function):
    """Asks for too much in the phase that its module names."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        ctx.layer = layer
        layer.fail_in("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.layer.fail_in("backward")
        return gradient, None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.fails_in = ""

    def fail_in(self, phase: str) -> None:
        if self.fails_in == phase:
            self.fails_in = ""
            torch.empty(MORE_THAN_THERE_IS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.silu(self.up(self.norm(x)))
        return x + self.down(Exhausts.apply(hidden, self))


def seeded(*, tied: bool = False) -> Stack:
    torch.manual_seed(0)
    model = Stack(Layer, 4)
    if tied:
        model.layers[2].up = model.layers[0].up
        model.layers[3] = model.layers[1]
    return model


@pytest.fixture
def make(tmp_path: Path, closing: Closing) -> Make:
    """A model, and an offloader that watches it."""
    watching = closing(partial(offloader_of, tmp_path, min_tensor_bytes=2048))

    def make(*, tied: bool = False, **block: Any) -> tuple[Stack, ActivationOffloader]:
        model = seeded(tied=tied)
        return model, watching(model, **block)

    return make


def loss_of(model: Stack, offloader: ActivationOffloader | None) -> torch.Tensor:
    return forward(model, torch.randn(8, 16, 32), offloader)


def error_of(offloader: ActivationOffloader | None, run: Callable[[], object]) -> RuntimeError:
    """The error of a run that must fail for want of memory, of which the offloader was told."""
    try:
        run()
    except RuntimeError as error:  # pytest.raises would hold it, and its frames, in a circle
        assert "allocate memory" in str(error)
        if offloader is not None:
            offloader.note_failure(error)
            offloader.note_failure(error)  # as hooks within one another do
        return error
    raise AssertionError("this was to fail")


def train(model: Stack, offloader: ActivationOffloader | None, phase: str) -> list[list[torch.Tensor]]:
    """A program halves a batch which does not fit, and keeps its errors. In each step the first try fails."""
    chance = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, errors = [], []
    for step in range(STEPS):
        x = torch.randn(8, 16, 32, generator=chance)
        model.layers[step % 3].fails_in = phase
        errors.append(error_of(offloader, lambda x=x: forward(model, x, offloader).backward()))  # and all its frames
        optimizer.zero_grad()
        for half in x.chunk(2):
            forward(model, half, offloader).backward()
            note_backward(offloader)
        found.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
        end_step(optimizer, offloader)
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    "block",
    [{"placement": "keep"}, {"placement": "nvme"}, {"placement": "nvme", "rematerialize": False}, {}, RECOMPUTED],
    ids=["keep", "nvme", "nvme, nothing again", "adaptive", "recompute"],
)
def test_a_program_that_tries_again_with_less_has_the_same_gradients(
    make: Make, block: dict[str, Any], phase: str, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected = train(seeded(tied=tied), None, phase)
    model, offloader = make(tied=tied, **block)
    with caplog.at_level(logging.ERROR, logger="ds_tba"):
        found = train(model, offloader, phase)
    assert after_a_while(lambda: held(offloader.cache), 30) == ""
    assert_same_steps(expected, found)
    told = [one.getMessage() for one in caplog.records]
    assert len(told) == STEPS, "once for each error"
    assert all(f"in the {phase}" in one for one in told)


def test_an_error_that_was_told_of_holds_no_tensor(make: Make) -> None:
    """The frames of an error hold all that was saved: with a reference to it the next try would have less memory."""
    model, offloader = make(placement="keep")
    model.layers[3].fails_in = "forward"
    outputs = []
    hook = model.layers[0].up.register_forward_hook(lambda _module, _inputs, out: outputs.append(weakref.ref(out)))
    error_of(offloader, lambda: loss_of(model, offloader))
    hook.remove()
    assert outputs[0]() is None
    assert offloader.cache.stats.resident.now == 0


class Mute(RuntimeError):
    def __str__(self) -> str:
        raise KeyError("no words")


def fail(*_: Any) -> Any:
    raise KeyError("a defect of ours")


@pytest.mark.parametrize(
    ("owner", "name"), [(out_of_memory, "one_change"), (out_of_memory, "failure_of"), (ActivationOffloader, "report")]
)
def test_what_fails_in_telling_hides_nothing(
    make: Make, tmp_path: Path, owner: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, offloader = make(placement="keep", report={"path": str(tmp_path / "report.json")})
    model.layers[3].fails_in = "forward"
    with pytest.raises(RuntimeError, match="allocate memory") as caught:
        try:
            loss_of(model, offloader)
        except RuntimeError as error:
            monkeypatch.setattr(owner, name, fail)
            offloader.note_failure(error)
            raise
    monkeypatch.undo()
    offloader.note_failure(Mute())
    offloader.close()
    assert type(caught.value) is RuntimeError
    assert "fail_in" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert caught.value.__context__ is None


def told(offloader: ActivationOffloader, run: Callable[[], object], caplog: pytest.LogCaptureFixture) -> str:
    """The message of a run that must fail."""
    caplog.clear()
    with caplog.at_level(logging.ERROR, logger="ds_tba"):
        error_of(offloader, run)
    (message,) = (one.getMessage() for one in caplog.records)
    return message


@pytest.mark.parametrize("step", [1, 3, 4])
def test_the_phase_is_told_in_steps_that_are_looked_at_and_in_others(
    make: Make, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, offloader = make(placement="keep")
    stepping.train(model, offloader, (torch.randn(8, 16, 32) for _ in range(step - 1)))
    model.layers[2].fails_in = "forward"
    text = told(offloader, lambda: loss_of(model, offloader), caplog)
    assert f"step {step}, in the forward" in text and "layers.*" in text
    assert ("saved so far in this forward:" in text) == (step != 3)  # which is not looked at


def test_the_optimizers_step_is_named(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, offloader = make(placement="keep")
    loss_of(model, offloader).backward()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    monkeypatch.setattr(torch, "zeros_like", lambda *_, **__: torch.empty(MORE_THAN_THERE_IS))
    assert "in the optimizer step" in told(offloader, optimizer.step, caplog)


def test_a_graph_that_was_retained_survives_a_failure(make: Make) -> None:
    model, offloader = make(placement="nvme")
    loss, parameters = loss_of(model, offloader), list(model.parameters())
    expected = torch.autograd.grad(loss, parameters, retain_graph=True)
    model.layers[1].fails_in = "backward"
    error_of(offloader, lambda: torch.autograd.grad(loss, parameters, retain_graph=True))
    found = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_what_earlier_steps_left_is_told(make: Make) -> None:
    model, offloader = make(placement="keep")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    for _ in range(3):
        kept.append(loss_of(model, offloader))
        kept[-1].backward(retain_graph=True)
        note_backward(offloader)
        end_step(optimizer, offloader)
    assert "most is of earlier steps, whose loss or output the program still holds" in offloader.explain()
    kept.clear()
    assert "earlier steps" not in offloader.explain()


GIB = 1 << 30
STEP = Failure("optimizer step")


@pytest.mark.parametrize(
    ("block", "held", "failure", "helps"),
    [
        ({}, {}, Failure(), '{"activation_nvme_offload": {"placement": "adaptive", "activation_b'),
        ({"activation_budget_bytes": 1 << 28}, {}, Failure(), f'"activation_budget_bytes": {1 << 27}'),
        ({"placement": "keep", "nvme_path": None}, {}, Failure(), '{"nvme_path": "/local_nvme", "placem'),
        ({"placement": "nvme"}, {}, Failure(), "gradient checkpointing, a smaller batch or a shorter seq"),
        ({}, {}, Failure("forward", 2 * GIB), "give that line less at a time: scaled_dot_product_attention"),
        ({}, {}, STEP, 'stage 2 or 3 with "offload_optimizer": {"device": "cpu"}'),
        ({}, {"parameters": GIB, "optimizer states": 2 * GIB}, Failure(), "offload_optimizer"),
        ({}, {"parameters": 2 * GIB, "optimizer states": 0}, Failure(), "offload_param"),
    ],
)
def test_one_change_helps(block: dict[str, Any], held: dict[str, int], failure: Failure, helps: str) -> None:
    config = OffloadConfig.model_validate({"nvme_path": "/x", **block})
    assert helps in one_change(config, ModelMemory(held), GIB, failure)


def test_who_asks_without_a_model_is_told_of_the_steps_from_then_on(closing: Closing) -> None:
    config = OffloadConfig(placement="keep", min_tensor_bytes=1)
    one: ActivationOffloader = closing(ActivationOffloader)(config, AioConfig(), Accelerator())
    x = torch.ones(64, requires_grad=True)
    assert "rank 0, step 1." in one.explain() and "hold 0 B" in one.explain() and one.report().holders == []
    with one.saving():
        x.exp().sum().backward()
    one.note_step()
    assert "test_out_of_memory.py" in one.explain() and "rank 0, step 2." in one.explain()
    memory = ModelMemory({"parameters": 3 << 20, "optimizer states": 5 << 20})
    one.watch(nn.Linear(1, 1), meter=lambda: memory)  # where somebody counts the model, it is told, too
    assert "parameters 3.00 MiB, optimizer states 5.00 MiB" in one.explain()


# ---- what a model holds ---------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


def test_parameters_gradients_and_states_count_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    found = memory_of(model, SimpleNamespace(optimizer=optimizer, grad_buffers=[torch.zeros(16)]), CPU)
    assert (found.always["parameters"], found.always["gradients"]) == (256, 256 + 64)
    assert 512 <= found.always["optimizer states"] < 600  # two moments, and a number of steps
    assert memory_of(nn.Linear(8, 8, bias=False), None, CPU).nbytes == 256
    assert memory_of(model, optimizer, torch.device("cuda")).nbytes == 0
