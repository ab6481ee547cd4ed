"""Code that wants a parameter in backward gets the parameter that it saved, with its attributes, and not its values
alone: ZeRO-3 keeps in attributes where the values are, and libraries gather them there (TRL's chunked loss, say).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support import hazards
from support.awkward import Read, function
from support.hazards import Saving, leaf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import next_sequence_number
from ds_tba.device.accelerator import Accelerator
from ds_tba.storage.host import HostStore

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["kept", "moved"])
def cache(request: pytest.FixtureRequest) -> TensorCache:
    stores = [HostStore(Accelerator(), 1 << 22)] if request.param == "moved" else []
    return TensorCache(stores, "cpu", hazards.MIN_BYTES)


moved = pytest.mark.parametrize("cache", ["moved"], indirect=True)
kept = pytest.mark.parametrize("cache", ["kept"], indirect=True)


def test_a_checkpoint_runs_again_with_the_parameter_that_was_saved(cache: TensorCache) -> None:
    """Between what it saves besides. The hazards have a Function that wants its parameter."""

    def product(x: Tensor, power: int, missing: None, weight: Any, other: Tensor) -> Tensor:
        return x @ weight.t() * weight.factor**power + other.tanh().sum()

    def trains(saving: Saving) -> list[Tensor]:
        x, weight = leaf(), nn.Parameter(torch.randn(64, 64))
        weight.factor = 1.5  # type: ignore[attr-defined]
        with saving():
            y = x.sin()
            loss = checkpoint(product, y, 2, None, weight, y.sin(), use_reentrant=False).tanh().sum()
        return hazards.grads_after(loss, x, weight)

    hazards.check(trains, cache)
    assert bool(cache.stores) == any(store.stats.offloaded_bytes > 0 for store in cache.stores)


@moved
def test_a_graph_that_stays_holds_nothing_that_functions_have_read(cache: TensorCache) -> None:
    """With a budget there may be no room for it."""
    sine = function(lambda a: (a.sin(), [a.cos()]), lambda grad, read: grad * read()[0])
    y = x = leaf()
    cache.limit(4 * x.nbytes)
    with cache.saving():
        for _ in range(16):
            y = sine(y)
        loss = y.sum()
    del y
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert cache.stats.resident.now == 0
    assert cache.stats.resident.peak <= 4 * x.nbytes


@kept
def test_what_a_function_has_read_is_freed_before_the_next_one_reads(cache: TensorCache) -> None:
    """Plain autograd frees it there; else backward would hold all bytes that Functions have saved at once."""
    for saving in (nullcontext, cache.saving):
        inputs, alive = list[weakref.ref[torch.UntypedStorage]](), list[int]()

        def square(a: Tensor) -> tuple[Tensor, list[Tensor]]:
            inputs.append(weakref.ref(a.untyped_storage()))  # noqa: B023 - called within the round
            return a * a, [a]

        def gradient(grad: Tensor, read: Read) -> Tensor:
            alive.append(sum(one() is not None for one in inputs))  # noqa: B023
            return grad * 2 * read()[0]

        y = leaf()
        with saving():
            for _ in range(6):
                y = function(square, gradient)(y)
            loss = y.sum()
        del y
        loss.backward()
        assert alive == [6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("case", ["twice", "frozen", "expanded", "inside", "outside"])
def test_a_returned_saved_tensor_gives_grad_memory_that_nobody_else_has(cache: TensorCache, case: str) -> None:
    """In-place changes of ``.grad`` reach no parameter, no activation, no other ``.grad``, and no version counter."""

    def returns_what_it_saved(saving: Saving) -> list[Tensor]:
        once_more = list[Tensor]()  # backward goes through the Function's own graph within it

        def gradients(_: Tensor, read: Read) -> Any:
            if case == "outside":
                return found
            both = read()
            if once_more:
                torch.autograd.grad(once_more.pop(), x, retain_graph=True)
            return both

        x, w = leaf(), leaf()
        with saving():
            a, b = (x, w) if case == "frozen" else (x.sin(), w.sin())
            if case == "expanded":
                a = a[:, :1].expand(64, 64)
            y = function(lambda a, b: (a + b, [a, a if case == "twice" else b]), gradients)(a, b)
            loss = y.cos().sum()
        if case == "frozen":
            w.requires_grad_(False)
        if case == "inside":
            once_more.append(loss)
        if case == "outside":
            found = y.grad_fn.saved_tensors  # type: ignore[union-attr]
        live = (a, b) if case in ("inside", "outside") else ()
        del a, b, y
        loss.backward(retain_graph=case == "inside")
        before = [one.clone() for one in hazards.grads(x, w)]
        for one in hazards.grads(x, w):
            one.mul_(2)
        return [*before, *hazards.grads(x, w), x, w, *live]

    hazards.check(returns_what_it_saved, cache)


@kept
def test_forward_mode_and_reads_that_clear_are_those_of_pytorch(cache: TensorCache) -> None:
    class Tangent(torch.autograd.Function):
        clear_saved_tensors_on_access = True  # where PyTorch knows it

        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            ctx.save_for_forward(a)
            ctx.save_for_backward(a)
            return a.sin()

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return tangent * ctx.saved_tensors[0].cos()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * ctx.saved_tensors[0].cos()

    x = torch.randn(64, 64)
    with torch.autograd.forward_ad.dual_level():
        y = Tangent.apply(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(y).tangent, x.cos())
    x.requires_grad_()
    with cache.saving():
        loss = Tangent.apply(x).sum()
    loss.backward()
    assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]


# ---- attributes of what has a graph ---------------------------------------------------------------------------------


def _marked(a: Tensor) -> tuple[Tensor, list[Tensor]]:
    y = a * 2
    y.scale = 3.0  # type: ignore[attr-defined]
    return y, [y]


# It sets an attribute on the output that it saves.
marks = function(_marked, lambda grad, read: grad * getattr(read()[0], "scale", 1.0))


def test_a_function_finds_no_attributes_on_its_own_output(cache: TensorCache) -> None:
    """Autograd saves an output as a new tensor."""

    def saves_its_output(x: Tensor) -> Iterator[Tensor]:
        yield marks(x).sum()

    hazards.check(saves_its_output, cache)


@kept
def test_a_function_finds_the_attributes_of_what_another_thread_has_made(cache: TensorCache) -> None:
    """Each thread counts its nodes itself, so that the node of another's tensor may have this node's number."""
    made, number = [], next_sequence_number()

    def make() -> None:
        x = leaf()
        while next_sequence_number() < number:
            x * 1
        made.append(marks(x))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert made[0].grad_fn._sequence_nr() == number == next_sequence_number()
    with cache.saving():
        loss = function(lambda a: (a * 2, [a]), lambda grad, read: grad * read()[0].scale)(made[0])
    loss.sum().backward()


@pytest.mark.parametrize("made_by", ["operation", "function"])
def test_a_checkpoint_runs_again_with_the_attributes_of_what_was_made_last(cache: TensorCache, made_by: str) -> None:
    """It saves its arguments outside of all nodes, so that they are nobody's own output."""

    def checkpoints(weight: Tensor) -> Iterator[Tensor]:
        x: Any = torch.ones(64, 64) @ weight
        x = marks(x) if made_by == "function" else x
        x.scale = 0.5
        yield checkpoint(lambda one: torch.sin(one * getattr(one, "scale", 3.0)), x, use_reentrant=False).sum()

    hazards.check(checkpoints, cache)
