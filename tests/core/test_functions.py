"""Code that wants a parameter in backward gets the parameter that it saved, with its attributes, and not its values
alone: ZeRO-3 keeps in attributes where the values are, and libraries gather them there (TRL's chunked loss, say).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from support import recomputed_training
from support.awkward import function
from support.recomputed_training import Net, Plain, check
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import next_sequence_number
from ds_tba.device.accelerator import Accelerator
from ds_tba.offloader import ActivationOffloader
from ds_tba.storage.host import HostStore

pytestmark = pytest.mark.usefixtures("one_thread")
make = recomputed_training.make


def factor_of(weight: Any) -> float:
    """What only the parameter has."""
    return float(weight.factor)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, missing: None, weight: Tensor, twice: Tensor) -> Tensor:
        ctx.save_for_backward(x, missing, weight, twice)
        return x @ weight.t() * factor_of(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, missing, weight, twice = ctx.saved_tensors
        if missing is not None or twice is not weight:
            raise ValueError("other tensors than were saved")
        gradient = gradient * factor_of(weight)
        return gradient @ weight, None, gradient.t() @ x, None


class ScaledInTwo(Scaled):
    """The same, with its context set up apart."""

    @staticmethod
    def forward(x: Tensor, missing: None, weight: Tensor, twice: Tensor) -> Tensor:  # type: ignore[override]
        return x @ weight.t() * factor_of(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)


class Wants(Plain):
    function: type[torch.autograd.Function] = Scaled

    def __init__(self) -> None:
        super().__init__()
        self.up.weight.factor = 1.5  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        up = self.function.apply(x, None, self.up.weight, self.up.weight) + self.up.bias  # type: ignore[no-untyped-call]
        return x + self.down(up.tanh())


class WantsInTwo(Wants):
    function = ScaledInTwo


class InCheckpoint(Wants):
    """Hands the parameter to a checkpoint, between what it saves besides."""

    def forward(self, x: Tensor) -> Tensor:
        part = checkpoint(self.part, 2, self.norm(x), None, self.up.weight, x, use_reentrant=False)
        return x + self.down((part + self.up.bias).tanh())

    def part(self, power: int, x: Tensor, missing: None, weight: Tensor, other: Tensor) -> Tensor:
        return x @ weight.t() * factor_of(weight) ** power + other.tanh().sum()


@pytest.mark.parametrize("block", [Wants, WantsInTwo, InCheckpoint])
@pytest.mark.parametrize(
    "config",
    [{}, {"placement": "nvme"}, {"placement": "host", "host_budget_bytes": 4 << 20},
     {"placement": "keep"}],
    ids=["adaptive", "nvme", "host", "keep"],
)  # fmt: skip
def test_the_parameter_is_the_one_that_was_saved(
    make: Callable[..., ActivationOffloader], block: Callable[[], nn.Module], config: dict[str, Any]
) -> None:
    report = check(make, block, Net, **config).report()
    if config.get("placement") != "keep":
        assert report.offloaded_bytes > 0


sine = function(lambda a: (a.sin(), [a.cos()]), lambda grad, read: grad * read()[0])


def test_a_graph_that_stays_holds_nothing_that_functions_have_read() -> None:
    """With a budget there may be no room for it."""
    cache = TensorCache([HostStore(Accelerator(), 1 << 20)], "cpu", 1024)
    x = torch.randn(64, 64, requires_grad=True)
    nbytes, y = x.untyped_storage().nbytes(), x
    cache.limit(4 * nbytes)
    with cache.saving():
        for _ in range(16):
            y = sine(y)
        loss = y.sum()
    del y
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert cache.stats.resident.now == 0
    assert cache.stats.resident.peak <= 4 * nbytes


class Product(torch.autograd.Function):
    """Saves its input, and notes how many inputs are alive when its backward begins."""

    alive: ClassVar[list[int]] = []
    inputs: ClassVar[list[weakref.ref[torch.UntypedStorage]]] = []

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        Product.inputs.append(weakref.ref(a.untyped_storage()))
        return a * a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Product.alive.append(sum(one() is not None for one in Product.inputs))
        (a,) = ctx.saved_tensors
        return grad * 2 * a


def test_what_a_function_has_read_is_freed_before_the_next_one_reads() -> None:
    """Plain autograd frees it there; else backward would hold all bytes that Functions have saved at once."""
    alive = []
    for cache in (None, TensorCache([], "cpu", 1024)):
        Product.alive.clear()
        Product.inputs.clear()
        y = x = torch.rand(64, 64, requires_grad=True)
        with nullcontext() if cache is None else cache.saving():
            for _ in range(6):
                y = Product.apply(y)
            loss = y.sum()
        del y
        loss.backward()
        alive.append(list(Product.alive))
        del loss, x
    assert alive[0] == alive[1] == [6, 5, 4, 3, 2, 1]


def _function(backward: Callable[..., Any], *, twice: bool = False) -> Callable[..., Tensor]:
    """A Function of two tensors that saves them (or the first of them twice), with this backward."""

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, a if twice else b)
            return a + b

    Saves.backward = staticmethod(backward)  # type: ignore[method-assign]
    return Saves.apply


def _both(ctx: Any, _grad: Tensor) -> Any:
    return ctx.saved_tensors


def _through_itself(ctx: Any, grad: Tensor) -> Any:
    a, b = ctx.saved_tensors
    if not hasattr(ctx, "is_inside"):
        ctx.is_inside = True
        torch.autograd.grad(_through_itself.loss, ctx.x, retain_graph=True)  # type: ignore[attr-defined]
    return a, b


def _read_outside(ctx: Any, _grad: Tensor) -> Any:
    return ctx.read


@pytest.mark.parametrize("case", ["twice", "frozen", "expanded", "inside", "outside", "retained"])
@pytest.mark.parametrize("budget", [None, 0], ids=["keep", "host"])
def test_a_returned_saved_tensor_gives_grad_memory_that_nobody_else_has(case: str, budget: int | None) -> None:
    """In-place changes of ``.grad`` reach no parameter, no activation, no other ``.grad``, and no version counter."""

    def run(saving: AbstractContextManager[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        x, w = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
        with saving:
            a, b = x.sin(), w.sin()
            if case == "expanded":
                a = a[:, :1].expand(64, 64)
            if case == "frozen":
                a, b = x, w
            apply = _function({"inside": _through_itself, "outside": _read_outside}.get(case, _both),
                                 twice=case == "twice")  # fmt: skip
            y = apply(a, b)
            node = y.grad_fn
            loss = y.cos().sum() if case != "retained" else y.sum()
        if case == "frozen":
            w.requires_grad_(False)
        if case == "inside":
            node.x, _through_itself.loss = x, loss  # type: ignore[union-attr, attr-defined]
        if case == "outside":
            node.read = node.saved_tensors  # type: ignore[union-attr]
        live = (a, b) if case in ("inside", "outside") else ()
        del a, b, y, node
        for _ in range(3 if case == "retained" else 1):
            loss.backward(retain_graph=case in ("retained", "inside"))
        _through_itself.loss = None  # type: ignore[attr-defined]
        found = [one.grad.clone() for one in (x, w) if one.grad is not None]
        for one in (x, w):
            if one.grad is not None:
                one.grad.mul_(2)
        return [*found, *(one.grad for one in (x, w) if one.grad is not None), x.detach(), w.detach(), *live]

    stores = [] if budget is None else [HostStore(Accelerator(), 1 << 22)]
    plain, ours = run(nullcontext()), run(TensorCache(stores, "cpu", 1024).saving())
    assert len(plain) == len(ours) and all(map(torch.equal, plain, ours))


def test_threads_that_run_one_function_backward_at_once_each_return_own_memory() -> None:
    """Two threads read and return the same saved tensors; no returned gradient has the memory of an activation."""
    meeting = threading.Barrier(2, timeout=60)

    def meet(ctx: Any, _grad: Tensor) -> Any:
        if grads[0] is not None:  # both threads read while the other is in the same backward
            meeting.wait()
        read = ctx.saved_tensors
        if grads[0] is not None:
            meeting.wait()
        return read

    grads: list[Any] = [None]
    x, w = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    with TensorCache([], "cpu", 1024).saving():
        a, b = x.sin(), w.sin()
        loss = _function(meet)(a, b).sum()
    node = loss.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    grads[0], found = (), []

    def run() -> None:
        with torch.no_grad():
            found.extend(node.apply(torch.ones(64, 64)))  # type: ignore[union-attr]

    threads = [threading.Thread(target=run) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    live = {one.untyped_storage().data_ptr() for one in (a, b)}
    assert len(found) == 4 and all(one.untyped_storage().data_ptr() not in live for one in found)


def test_forward_mode_and_reads_that_clear_are_those_of_pytorch() -> None:
    class Tangent(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            ctx.save_for_forward(a)
            ctx.save_for_backward(a)
            return a.sin()

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return tangent * ctx.saved_tensors[0].cos()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (a,) = ctx.saved_tensors
            return grad * a.cos()

    cache = TensorCache([], "cpu", 1024)
    x = torch.randn(64, 64)
    with torch.autograd.forward_ad.dual_level():
        y = Tangent.apply(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(y).tangent, x.cos())
    if hasattr(torch.autograd.Function, "clear_saved_tensors_on_access"):
        Tangent.clear_saved_tensors_on_access = True
    x.requires_grad_()
    with cache.saving():
        loss = Tangent.apply(x).sum()
    loss.backward()
    assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]


def test_what_a_forward_that_fails_has_saved_comes_back() -> None:
    """Its thread may be gone, and whatever it was about to move with it."""
    cache = TensorCache([HostStore(Accelerator(), 1 << 20)], "cpu", 1024)
    x = torch.randn(64, 64, requires_grad=True)

    def fails() -> None:
        with cache.saving():
            kept.append(sine(x).sum())
            raise KeyError

    kept: list[Tensor] = []
    with pytest.raises(KeyError):
        fails()
    kept.pop().backward()
    assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]
    assert cache.live_records == 0 == cache.stats.resident.now


def _marked(a: Tensor) -> tuple[Tensor, list[Tensor]]:
    y = a * 2
    y.scale = 3.0  # type: ignore[attr-defined]
    return y, [y]


# It sets an attribute on the output that it saves.
marks = function(_marked, lambda grad, read: grad * getattr(read()[0], "scale", 1.0))


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_function_finds_no_attributes_on_its_own_output(is_moved: bool) -> None:
    """Autograd saves an output as a new tensor."""
    cache = TensorCache([HostStore(Accelerator(), 1 << 20)] if is_moved else [], "cpu", 1024)
    gradients = []
    for saving in (nullcontext, cache.saving):
        x = torch.ones(64, 64, requires_grad=True)
        with saving():
            loss = marks(x).sum()
        loss.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


scales = function(lambda a: (a * 2, [a]), lambda grad, read: grad * read()[0].scale)


def test_a_function_finds_the_attributes_of_what_another_thread_has_made() -> None:
    """Each thread counts its nodes itself, so that the node of another's tensor may have this node's number."""
    made, number = [], next_sequence_number()

    def make() -> None:
        x = torch.ones(64, 64, requires_grad=True)
        while next_sequence_number() < number:
            x * 1
        made.append(marks(x))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert made[0].grad_fn._sequence_nr() == number == next_sequence_number()
    with TensorCache([], "cpu", 1024).saving():
        loss = scales(made[0])
    loss.sum().backward()


@pytest.mark.parametrize("made_by", ["operation", "function"])
@pytest.mark.parametrize("is_moved", [True, False])
def test_a_checkpoint_runs_again_with_the_attributes_of_what_was_made_last(is_moved: bool, made_by: str) -> None:
    """It saves its arguments outside of all nodes, so that they are nobody's own output."""
    cache = TensorCache([HostStore(Accelerator(), 1 << 20)] if is_moved else [], "cpu", 1024)
    gradients = []
    for saving in (nullcontext, cache.saving):
        weight = torch.full((64, 64), 0.1, requires_grad=True)
        with saving():
            x = torch.ones(64, 64) @ weight
            x = marks(x) if made_by == "function" else x
            x.scale = 0.5
            loss = checkpoint(lambda one: torch.sin(one * getattr(one, "scale", 3.0)), x, use_reentrant=False).sum()
        loss.backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients)
