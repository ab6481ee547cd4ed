"""Code that wants a parameter in backward gets the parameter that it saved, with its attributes, and not its values
alone: ZeRO-3 keeps in attributes where the values are, and libraries gather them there (TRL's chunked loss, say).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from support import recomputed_training
from support.recomputed_training import Net, Plain, check
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_tba.core.cache import TensorCache
from ds_tba.device.accelerator import CpuAccelerator
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


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a.cos())
        return a.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (cosine,) = ctx.saved_tensors
        return grad * cosine


def test_a_graph_that_stays_holds_nothing_that_functions_have_read() -> None:
    """With a budget there may be no room for it."""
    cache = TensorCache([HostStore(CpuAccelerator(), 1 << 20)], "cpu", 1024)
    x = torch.randn(64, 64, requires_grad=True)
    nbytes, y = x.untyped_storage().nbytes(), x
    cache.limit(4 * nbytes)
    with cache.saving():
        for _ in range(16):
            y = Sine.apply(y)
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
    """As without hooks: else the peak of backward would be that of everything that Functions have saved."""
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


def test_a_forward_that_fails_leaves_nothing_in_use() -> None:
    """Its thread may be gone, and whatever it was about to move with it."""
    cache = TensorCache([HostStore(CpuAccelerator(), 1 << 20)], "cpu", 1024)
    x = torch.randn(64, 64, requires_grad=True)

    def fails() -> None:
        with cache.saving():
            kept.append(Sine.apply(x).sum())
            raise KeyError

    kept: list[Tensor] = []
    with pytest.raises(KeyError):
        fails()
    assert not cache._of_thread.leaving
    kept.pop().backward()
    assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]
    assert cache.live_records == 0 == cache.stats.resident.now


class Marks(torch.autograd.Function):
    """Sets an attribute on the output that it saves."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        y = a * 2
        y.scale = 3.0  # type: ignore[attr-defined]
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * getattr(y, "scale", 1.0)


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_function_finds_no_attributes_on_its_own_output(is_moved: bool) -> None:
    """Autograd saves an output as a new tensor."""
    cache = TensorCache([HostStore(CpuAccelerator(), 1 << 20)] if is_moved else [], "cpu", 1024)
    gradients = []
    for saving in (nullcontext, cache.saving):
        x = torch.ones(64, 64, requires_grad=True)
        with saving():
            loss = Marks.apply(x).sum()
        loss.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
