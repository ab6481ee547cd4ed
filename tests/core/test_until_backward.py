"""A loss outside of the model's forward, with ``until_backward``: served, exact, and the hooks of others left alone."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from conftest import Closing
from support.stepping import end_step, forward, note_backward, offloader_of
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from ds_tba.core.hooks import innermost_hooks
from ds_tba.offloader import ActivationOffloader

Make = Callable[..., ActivationOffloader]
WORDS = 512
PLACEMENTS: list[dict[str, Any]] = [
    {"placement": "nvme"},
    {"placement": "host", "host_budget_bytes": 8 << 20},
    {"placement": "adaptive", "max_step_overhead": 1000.0},
    {"placement": "adaptive", "activation_budget_bytes": 512 << 10, "recompute": True},
]


@pytest.fixture
def make(tmp_path: Path, closing: Closing) -> Iterator[Make]:
    yield closing(partial(offloader_of, tmp_path, min_tensor_bytes=4096, until_backward=True, placement="nvme"))
    assert innermost_hooks() is None


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)], nn.Linear(32, WORDS))


def engine_forward(model: nn.Module, x: Tensor, offloader: ActivationOffloader | None) -> Tensor:
    """What the engine's does."""
    logits = forward(model, x, offloader)
    if offloader is not None:
        offloader.keep_saving()
    return logits


def engine_backward(loss: Tensor, offloader: ActivationOffloader | None) -> None:
    if offloader is not None:
        offloader.stop_saving()
    loss.backward()
    note_backward(offloader)


def begun(make: Make, **block: Any) -> tuple[nn.Module, ActivationOffloader, Tensor]:
    """A model with its offloader, and the logits of a first forward."""
    model = model_of()
    offloader = make(model, **block)
    return model, offloader, engine_forward(model, torch.randn(4, 16, 32), offloader)


def takes_nothing(offloader: ActivationOffloader) -> bool:
    """Whether a training of somebody else's is exact, and none of what it saves comes to this one."""
    meter, x = offloader.cache.meter, torch.ones(1 << 16, requires_grad=True)
    packed = meter.packed_tensors
    x.exp().sum().backward()
    return torch.equal(x.grad, x.detach().exp()) and meter.packed_tensors == packed  # type: ignore[arg-type]


def preference_loss(logits: Tensor, words: Tensor) -> Tensor:
    """As that of DPO: chosen and rejected halves, each token's log-probability."""
    chosen, rejected = (logits / 0.7).log_softmax(-1).gather(-1, words[..., None]).sum((1, 2)).chunk(2)
    return -nn.functional.logsigmoid(chosen - rejected).mean()


def train(offloader_for: Callable[[nn.Module], ActivationOffloader | None], steps: int = 7) -> list[bytes]:
    model = model_of()
    reference, optimizer = model_of().requires_grad_(False), torch.optim.SGD(model.parameters(), 0.1)
    offloader = offloader_for(model)
    chance, found = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        for micro_batch in range(2):
            x = torch.randn(4, 16, 32, generator=chance)
            words = torch.randint(WORDS, (4, 16), generator=chance)
            logits = engine_forward(model, x, offloader)
            with torch.set_grad_enabled(micro_batch > 0):  # an evaluation, then a second forward before one backward
                beside = engine_forward(model, x, offloader) - reference(x)
            loss = preference_loss(logits, words) + (logits - beside).square().mean()
            engine_backward(loss, offloader)
            found.append(loss.detach().numpy().tobytes())
        end_step(optimizer, offloader)
    return [*found, *(one.detach().numpy().tobytes() for one in model.parameters())]


@pytest.mark.parametrize("block", PLACEMENTS, ids=lambda block: f"{block['placement']}{len(block)}")
def test_a_loss_on_the_logits_moves_and_trains_alike(make: Make, block: dict[str, Any]) -> None:
    made: list[ActivationOffloader] = []

    def watched(model: nn.Module) -> ActivationOffloader:
        made.append(make(model, **block))
        return made[-1]

    assert train(watched) == train(lambda _: None)
    logits_bytes = 4 * 16 * WORDS * 4
    report = made[0].report()
    moved = report.offloaded_bytes + report.rematerialized_bytes
    # In each micro-step one at least, of which forward saves none; as many as it takes, where there is a budget.
    assert moved > (0 if "activation_budget_bytes" in block else 14) * logits_bytes
    assert any("test_until_backward.py" in one["module"] for one in report.holders)


def test_without_the_key_nothing_stays_open(make: Make) -> None:
    begun(make, until_backward=False)
    assert innermost_hooks() is None


class Others(saved_tensors_hooks):
    """Hooks of the user's."""

    def __init__(self) -> None:
        self.packed = list[Tensor]()
        super().__init__(lambda tensor: self.packed.append(tensor) or tensor, lambda tensor: tensor)  # type: ignore[func-returns-value]

    def are_innermost(self) -> bool:
        return innermost_hooks() == (self.pack_hook, self.unpack_hook)


def test_hooks_of_others_around_the_forward_stay_the_innermost(make: Make) -> None:
    others = Others()
    with others:
        _, offloader, logits = begun(make)
        assert others.are_innermost()
    assert innermost_hooks() is None
    engine_backward(logits.exp().sum(), offloader)


def test_hooks_of_others_inside_of_ours_are_never_taken_off(make: Make) -> None:
    others, (model, offloader, logits) = Others(), begun(make)
    with others:
        engine_backward(logits.exp().sum(), offloader)
        again = engine_forward(model, torch.randn(4, 16, 32), offloader)
        assert others.are_innermost()
        engine_backward(again.exp().sum(), offloader)
        assert others.are_innermost()
    assert len(others.packed) == 2  # of the losses
    offloader.stop_saving()
    assert innermost_hooks() is None


def test_an_error_in_the_loss_and_a_forward_without_backward(make: Make) -> None:
    model, offloader, logits = begun(make)
    with pytest.raises(ZeroDivisionError):
        logits.exp().sum() / (1 // 0)
    del logits
    for _ in range(3):
        engine_forward(model, torch.randn(4, 16, 32), offloader)
    engine_backward(engine_forward(model, torch.randn(4, 16, 32), offloader).exp().sum(), offloader)
    gc.collect()
    assert offloader.cache.live_records == 0


def test_a_stop_inside_of_a_backward_does_not_stay_undone(make: Make) -> None:
    """Autograd restores a thread's hooks when a backward is over."""
    _, offloader, logits = begun(make)
    logits.register_hook(lambda _: offloader.stop_saving())
    logits.exp().sum().backward()
    offloader.stop_saving()
    assert innermost_hooks() is None


def test_the_next_forward_of_any_engine_ends_what_another_saves(make: Make) -> None:
    one, other = model_of(), model_of()
    first, second = make(one), make(other)
    made = engine_forward(one, torch.randn(4, 16, 32), first)
    with Others():  # which keep the first one's on the stack
        judged = engine_forward(other, torch.randn(4, 16, 32), second)
    assert takes_nothing(first)
    engine_backward(judged.mean(), second)
    engine_backward(made.mean(), first)


@pytest.mark.parametrize("end", [ActivationOffloader.close, ActivationOffloader.close_soon])
def test_hooks_that_a_closed_engine_left_in_other_threads_take_nothing_and_go_with_the_next_forward(
    make: Make, end: Callable[[ActivationOffloader], None]
) -> None:
    _, first, _ = begun(make)
    closing = threading.Thread(target=end, args=(first,))
    closing.start()
    closing.join()
    assert takes_nothing(first)
    _, second, logits = begun(make)
    moved_bytes = second.report().offloaded_bytes
    engine_backward(logits.exp().sum(), second)
    assert second.report().offloaded_bytes > moved_bytes


def test_each_thread_has_its_own(make: Make) -> None:
    problems: list[str] = []
    model, offloader, logits = begun(make, rematerialize=False)

    def work() -> None:
        if innermost_hooks() is not None:
            problems.append("hooks in a thread that made no forward")
        for _ in range(3):
            engine_backward(engine_forward(model, torch.randn(4, 16, 32), offloader).exp().mean(), offloader)
        engine_forward(model, torch.randn(4, 16, 32), offloader)  # and the thread ends

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems and innermost_hooks() is not None
    engine_backward(logits.exp().mean(), offloader)


def test_closed_or_collected_with_hooks_open(make: Make) -> None:
    model, offloader, logits = begun(make)
    offloader.close()
    with save_on_cpu():
        logits.exp()
    assert takes_nothing(offloader)
    offloader.stop_saving()
    assert innermost_hooks() is None
    engine_forward(model, torch.randn(4, 16, 32), offloader)
    assert innermost_hooks() is None


@pytest.mark.usefixtures("one_thread")
def test_hooks_of_ours_take_nothing_in_a_forked_child(make: Make) -> None:
    _, offloader, logits = begun(make)
    child = os.fork()
    if not child:
        os._exit(0 if takes_nothing(offloader) else 1)
    assert os.waitpid(child, 0) == (child, 0)
    engine_backward(logits.exp().sum(), offloader)


def test_the_holders_of_a_penalty_on_gradients_are_told_once(make: Make) -> None:
    _, offloader, logits = begun(make, rematerialize=False)
    out = logits
    for _ in range(20):
        out = out.sin()
    gradient = torch.autograd.grad(out.sum(), logits, create_graph=True)[0]  # unpacks and packs in turn
    engine_backward(gradient.square().mean(), offloader)
    offloader.note_step()
    rows = [(one["module"], one["op"]) for one in offloader.report().holders]
    assert len(rows) == len(set(rows)) and sum(one["tensors"] for one in offloader.report().holders) > 40


@pytest.mark.parametrize("event", ["call", "line", "return"])
@pytest.mark.parametrize("function", [saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__])
def test_an_interrupt_as_hooks_go_on_or_off_leaves_none_there(make: Make, function: Any, event: str) -> None:
    """A signal handler may raise before or after each line of them."""
    model = model_of()
    offloader = make(model, until_backward=False)

    def trace(frame: FrameType, happened: str, _: object) -> Any:
        if frame.f_code is function.__code__ and happened == event:
            raise KeyboardInterrupt  # which ends the tracing
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            forward(model, torch.randn(4, 16, 32), offloader)
    finally:
        sys.settrace(before)
    assert innermost_hooks() is None
    offloader.close()
    assert train(lambda model: make(model, until_backward=False)) == train(lambda _: None)
