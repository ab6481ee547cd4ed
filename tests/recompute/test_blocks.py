"""Passes through blocks: who is told of what, and that a recomputed pass gives every bit that it gives otherwise."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from conftest import StoreFactory
from support.block_passes import Listener, assert_same
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ds_tba.core.cache import TensorCache
from ds_tba.errors import ActivationModifiedError, RecomputationError
from ds_tba.recompute.blocks import Blocks, find_blocks

pytestmark = pytest.mark.usefixtures("one_thread", "needs_recompute")
WIDTH, LENGTH, BATCH = 16, 8, 4


class Layer(nn.Module):
    """Attention and MLP, with dropout and with a parameter of its own."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(width))
        self.attention = nn.MultiheadAttention(width, 2, dropout, batch_first=True)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x * self.gain)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(self.drop(functional.gelu(self.up(x))))


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Layer, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.float().pow(2).mean()


class Linear(nn.Module):
    """Has what blocks of one linear layer share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


def around_each(how: Callable[[nn.Module, Tensor], Tensor]) -> type[Net]:
    """Return a net that calls its layers in this way."""

    class Around(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = how(layer, x)
            return x.pow(2).mean()

    return Around


def as_checkpoint(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def reentrantly(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


class Bench:
    """A model with its blocks installed; the twin of it runs without us."""

    def __init__(self, make: Callable[[], nn.Module], depth: int = 4, net: Callable[..., nn.Module] = Net) -> None:
        torch.manual_seed(3)
        self.model = net(make, depth)
        self.twin = copy.deepcopy(self.model)
        self.listener = Listener()
        self.blocks = Blocks(find_blocks(self.model, None), self.listener)

    def micro_step(
        self, *wanted: int, seed: int = 7, around: Callable[[], AbstractContextManager[Any]] = nullcontext, **more: Any
    ) -> Any:
        """One step, with the passes through the blocks in ``wanted`` recomputed."""
        self.listener.wanted = set(wanted)
        return run(self.model, seed, around=lambda: self.listening(around), **more)

    @contextmanager
    def listening(self, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Iterator[None]:
        with around(), self.blocks.listening(self.listener):
            yield

    def check(self, *wanted: int, **more: Any) -> None:
        """One micro-step with, one without: equal in every bit."""
        ours = self.micro_step(*wanted, **more)
        more.pop("around", None)
        assert_same(ours, run(self.twin, **{"seed": 7, **more}))


def run(
    model: nn.Module,
    seed: int,
    backward: Callable[[Tensor], None] = Tensor.backward,
    amp: bool = False,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Tensor]:
    """Loss, gradients of input and parameters, buffers, and where the random numbers stand afterwards."""
    torch.manual_seed(seed)
    model.zero_grad()
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    with around(), torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss = model(x)
    backward(loss)
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    buffers = {name: one.clone() for name, one in model.named_buffers()}
    return {"loss": loss.detach(), "x": x.grad, **gradients, **buffers, "rng": torch.get_rng_state()}


def settled(make: Callable[[], nn.Module] = Layer, **more: Any) -> Bench:
    """A bench after a step."""
    bench = Bench(make, **more)
    bench.check()
    bench.listener.events.clear()
    return bench


# ---- exact ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("wanted", [(), (0, 2), (0, 1, 2, 3)], ids=["none", "every second", "all"])
def test_recomputed_passes_are_exact(wanted: tuple[int, ...], dropout: float, amp: bool) -> None:
    bench = settled(lambda: Layer(dropout=dropout))
    for seed in (1, 2):
        bench.check(*wanted, seed=seed, amp=amp)
    assert bench.listener.count("enter") == bench.listener.count("leave") == 2 * 4
    assert bench.listener.count("recompute") == 2 * len(wanted)


# ---- what the cache sees --------------------------------------------------------------------------------------------


class Watched(TensorCache):
    """Notes every tensor that autograd saves through it."""

    packed: list[Tensor]

    def pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage().nbytes():  # older PyTorch's checkpoint saves an empty tensor beside the inputs
            self.packed.append(tensor.detach())
        return super().pack(tensor)


def storages(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.untyped_storage()._cdata for tensor in tensors]


@pytest.mark.parametrize("wanted", [(0, 1, 2, 3), (1, 3)], ids=["all", "every second"])
def test_the_cache_sees_the_inputs_of_a_recomputed_pass_and_nothing_inside(
    make_store: StoreFactory, wanted: tuple[int, ...]
) -> None:
    store = make_store()
    cache = Watched([store], "cpu", 1024, wait_for_staging=True)
    cache.packed = []
    bench = Bench(Layer)
    seen: dict[int, tuple[int, int]] = {}

    class Between(Listener):
        def enter(self, path: str, inputs: Sequence[Tensor], obstacle: str) -> int | None:
            self.first = len(cache.packed)
            self.own = storages(inputs)
            return super().enter(path, inputs, obstacle)

        def leave(self, obstacle: str) -> None:
            packed = storages(cache.packed[self.first :])
            seen[self.entered[-1]] = (len(packed), packed == self.own)
            super().leave(obstacle)

    bench.listener = bench.blocks._cache = Between()
    for step in range(3):
        before = store.stats.offloaded_bytes
        bench.check(*(wanted if step else ()), around=cache.saving)
        offloaded_bytes = store.stats.offloaded_bytes - before
        if step == 0:
            all_bytes, many = offloaded_bytes, seen[0][0]
    assert many > 10
    for index in range(4):
        assert seen[index] == ((1, True) if index in wanted else (many, False))
    assert 0 < offloaded_bytes < all_bytes
    assert bench.listener.count("recompute") == 2 * len(wanted)


# ---- who is told ----------------------------------------------------------------------------------------------------


def test_the_order_of_events() -> None:
    bench = settled(depth=2)
    bench.check(1)
    passes = [("enter", 0), ("leave", 0), ("enter", 1), ("leave", 1)]
    assert bench.listener.events == [*passes, ("recompute", 1)]


def test_nobody_is_told_outside_listening_and_without_gradients() -> None:
    bench = settled()
    bench.listener.wanted = {0, 1, 2, 3}
    run(bench.model, 1)
    with bench.blocks.listening(bench.listener), torch.no_grad():
        bench.model(torch.ones(1, LENGTH, WIDTH))
    assert bench.listener.events == []


def test_other_threads_are_not_listened_to() -> None:
    bench = settled()
    with bench.blocks.listening(bench.listener):
        other = threading.Thread(target=run, args=(bench.model, 1))
        other.start()
        other.join()
    assert bench.listener.events == []


def test_a_backward_inside_tells_of_no_pass() -> None:
    """Of what a checkpoint of the user's runs again, too, though a gradient is wanted there."""

    bench = settled(net=around_each(reentrantly))
    bench.listener.wanted = {0, 1, 2, 3}
    with bench.blocks.listening(bench.listener):
        ours = run(bench.model, 7)
    assert_same(ours, run(bench.twin, 7))
    assert bench.listener.events == []


def test_a_backward_in_the_middle_of_forward_tells_of_no_pass() -> None:
    class Penalty(Net):
        def forward(self, x: Tensor) -> Tensor:
            loss = super().forward(x)
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            return loss + gradient.pow(2).sum()

    bench = Bench(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), depth=3, net=Penalty)
    for _ in range(3):
        bench.listener.events.clear()
        bench.check(0, 1, 2)
    assert bench.listener.count("enter") == bench.listener.count("leave") == 3
    assert bench.listener.count("recompute") >= 3


def test_a_forward_that_raises_is_left() -> None:
    class Fails(Layer):
        broken = False

        def forward(self, x: Tensor) -> Tensor:
            if self.broken:
                raise ArithmeticError("in forward")
            return super().forward(x)

    bench = settled(Fails)
    bench.model.layers[1].broken = True
    for wanted in ((), (1,)):
        bench.listener.events.clear()
        with pytest.raises(ArithmeticError):
            bench.micro_step(*wanted)
        assert bench.listener.events[-2:] == [("enter", 1), ("leave", 1)]
    bench.model.layers[1].broken = False
    bench.check(1)


def test_an_error_in_a_recomputation_reaches_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Layer):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            if "BROKEN" in os.environ:
                raise ArithmeticError("in forward")
            return x.tanh()

    bench = settled(Fails)
    bench.listener.wanted = {1}
    with bench.blocks.listening(bench.listener):
        loss = bench.model(torch.ones(1, LENGTH, WIDTH))
    monkeypatch.setenv("BROKEN", "1")
    with pytest.raises(ArithmeticError):
        loss.backward()
    assert bench.listener.events[-1] == ("recompute", 1)
    monkeypatch.delenv("BROKEN")
    bench.check(1)


# ---- the model is left as it was found ------------------------------------------------------------------------------


def test_a_forward_leaves_the_model_as_it_was() -> None:
    model = Net()
    own = model.layers[2].forward
    model.layers[2].forward = own  # an attribute of its own
    before = [dict(module.__dict__) for module in model.modules()]
    listener = Listener()
    blocks = Blocks(find_blocks(model, None), listener)
    for _ in range(2):
        with blocks.listening(listener):
            first = model.layers[0].forward
            with blocks.listening(listener):
                assert model.layers[0].forward is first and first.__name__ == "forward"
            assert model.layers[0].forward is first
        assert [dict(module.__dict__) for module in model.modules()] == before
        assert model.layers[2].__dict__["forward"] is own


def test_who_wraps_the_forward_of_a_block_is_run_with_it() -> None:
    bench = settled()
    layer, calls = bench.model.layers[0], []
    own = layer.forward
    theirs = layer.forward = lambda x: (calls.append(1), own(x))[1]
    bench.check(0)
    assert layer.forward is theirs and len(calls) == bench.listener.count("recompute") + 1 == 2


def test_who_wraps_a_block_in_the_middle_of_forward_is_run_with_it() -> None:
    bench = settled()
    layer, calls = bench.model.layers[0], []
    with bench.blocks.listening(bench.listener):
        ours = layer.forward
        theirs = layer.forward = lambda x: (calls.append(1), ours(x))[1]
    for _ in range(2):
        bench.check(0)
    assert layer.forward is theirs and len(calls) == 2 and bench.listener.count("recompute") == 2


@pytest.mark.parametrize("made", ["deepcopy", "pickle"])
def test_a_copy_that_is_made_in_the_middle_of_forward_runs_itself(made: str) -> None:
    bench = settled()
    with bench.blocks.listening(bench.listener):
        other = copy.deepcopy(bench.model) if made == "deepcopy" else pickle.loads(pickle.dumps(bench.model))
        with torch.no_grad():
            for parameter in (*other.parameters(), *bench.twin.parameters()):
                parameter.mul_(0.5)
        assert_same(run(other, 5), run(bench.twin, 5))
    assert bench.listener.events == []


def replica(module: nn.Module) -> nn.Module:
    return module._replicate_for_data_parallel()  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_hooked", [False, True])
@pytest.mark.parametrize("copied", [copy.copy, replica])
def test_a_shallow_copy_of_a_block_that_is_made_in_forward_runs_its_own_parameters(
    copied: Callable[[nn.Module], nn.Module], is_hooked: bool
) -> None:
    """As ``DataParallel`` makes its replicas: of a copied ``__dict__``."""

    class Doubling(Net):
        def forward(self, x: Tensor) -> Tensor:
            other = copied(self.layers[1])
            other._parameters = {"gain": nn.Parameter(self.layers[1].gain.detach() * 2)}  # type: ignore[operator]
            return super().forward(other(x))

    bench = Bench(Layer, net=Doubling)
    if is_hooked:  # torch calls forward from another frame then
        for model in (bench.model, bench.twin):
            model.layers[1].register_forward_hook(lambda *_: None)  # type: ignore[operator, union-attr, index]
    bench.check()
    bench.check(0, 1, 2, 3)
    assert bench.listener.count("enter") == 8


@pytest.mark.parametrize("taker", ["layer", "other"])
def test_a_module_that_is_given_the_forward_of_a_block_runs_that(taker: str) -> None:
    class Giving(Net):
        def forward(self, x: Tensor) -> Tensor:
            module = self.layers[2] if taker == "layer" else nn.Linear(WIDTH, WIDTH)
            before = module.__dict__.get("forward")
            module.forward = self.layers[1].forward
            x = module(x)
            if before is None:
                del module.forward
            else:
                module.forward = before
            return super().forward(x)

    bench = Bench(Layer, net=Giving)
    bench.check()
    bench.check(0, 1, 2, 3)


def test_a_pass_with_other_parameters_is_not_recomputed() -> None:
    def with_others(layer: nn.Module, x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {name: 2 * one for name, one in layer.named_parameters()}, (x,))

    bench = Bench(Layer, net=around_each(with_others))
    bench.check()
    bench.check(0, 1, 2, 3)
    assert bench.listener.count("recompute") == 0
    assert all("functional_call" in why for why in bench.blocks.left_out().values())


def test_a_pass_inside_of_vmap_is_not_recomputed() -> None:
    mapped = around_each(lambda layer, x: torch.func.vmap(layer)(x))
    bench = Bench(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)), net=mapped)
    bench.check()
    bench.check(0, 1, 2, 3)
    assert bench.listener.count("recompute") == 0
    assert all("torch.func" in why for why in bench.blocks.left_out().values()) and len(bench.blocks.left_out()) == 4


# ---- arguments and results ------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Takes and gives what layers take and give."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = Layer(), nn.Dropout(0.2)

    def forward(
        self,
        x: Tensor,
        nothing: None,
        pair: tuple[Tensor, list[Tensor]],
        *,
        mask: Tensor,
        more: dict[str, Any],
        seen: list[int],
    ) -> tuple[Tensor, dict[str, Any], None]:
        seen.append(1)
        pair[1].append(x)  # of the caller's own list in forward, of nobody's in a recomputation
        h = self.inner(self.drop(x)) * mask + pair[0] * more["scale"] + pair[1][0]
        return h, {"aux": (h * 2).mean(), "name": "odd"}, nothing


class OddNet(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(depth))
        self.seen: list[int] = []
        self.lists: list[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        mask, fixed, loss = torch.ones(LENGTH, 1), x.detach() * 2, x.new_zeros(())
        for layer in self.layers:
            given = [fixed.clone()]
            x, extra, _ = layer(x, None, (fixed, given), mask=mask, more={"scale": 0.5, "k": x}, seen=self.seen)
            self.lists.append(given)
            loss = loss + extra["aux"]
        return loss + x.pow(2).mean()


def test_arguments_of_every_kind() -> None:
    bench = settled(Odd, net=OddNet)
    bench.check(0, 1, 2, 3)
    assert bench.listener.count("recompute") == 4
    assert [len(given) for given in bench.model.lists] == [2] * 8
    shapes = [tensor.shape for tensor in bench.listener.inputs[-1]]
    assert shapes == [*[(BATCH, LENGTH, WIDTH)] * 3, (LENGTH, 1)]


def test_a_tensor_that_is_passed_twice_is_one_tensor_again() -> None:
    class Same(Linear):
        def forward(self, query: Tensor, *, key: Tensor) -> Tensor:
            return self.linear(query * key) if query is key else query * key

    bench = settled(Same, net=around_each(lambda layer, x: layer(x, key=x)))
    bench.check(0, 1, 2, 3)
    assert bench.listener.count("recompute") == 4 and len(bench.listener.inputs[-1]) == 1


def test_inputs_are_not_held_by_anybody_but_autograd() -> None:
    class Ends(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).relu()

    held: list[Any] = []

    class Put:
        """Stands for a store: holds the bytes elsewhere."""

        def __init__(self, tensor: Tensor) -> None:
            self.copy = tensor.detach().clone()

    class Weak(Listener):
        def enter(self, path: str, inputs: Sequence[Tensor], obstacle: str) -> int | None:
            held.extend(weakref.ref(one.untyped_storage()) for one in inputs)
            return super().enter(path, [], obstacle)

    bench = settled(Ends, depth=3)
    bench.listener = bench.blocks._cache = Weak()
    bench.listener.wanted = {0, 1, 2}
    elsewhere = torch.autograd.graph.saved_tensors_hooks(Put, lambda put: put.copy)
    with elsewhere, bench.blocks.listening(bench.listener):
        loss = bench.model(torch.randn(BATCH, LENGTH, WIDTH))
    assert len(held) == 3 and [one() for one in held] == [None] * 3
    loss.backward()


# ---- autograd -------------------------------------------------------------------------------------------------------


def test_backward_twice_through_one_graph() -> None:
    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    bench = settled()
    bench.check(0, 1, 2, 3, backward=twice)
    assert bench.listener.count("recompute") == 8


def test_double_backward() -> None:
    def double(loss: Tensor) -> None:
        leaves = [*bench.model.parameters()] if which[0] else [*bench.twin.parameters()]
        which[0] = False
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        sum(one.pow(2).sum() for one in gradients).backward()

    which = [True]
    bench = settled(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)))
    bench.check(0, 1, 2, 3, backward=double)
    assert bench.listener.count("recompute") >= 4


def test_one_pass_that_the_user_takes_is_enough() -> None:
    bench = settled(net=around_each(lambda layer, x: as_checkpoint(layer, layer(x))))
    assert bench.blocks.left_out().keys() == {block.path for block in bench.blocks.all}
    bench.check(0, 1, 2, 3)
    assert bench.listener.count("recompute") == 0


def test_frozen_blocks() -> None:
    bench = settled()
    for layer in (*bench.model.layers[::2], *bench.twin.layers[::2]):
        layer.requires_grad_(False)
    bench.check(0, 1, 2, 3)
    assert bench.listener.count("recompute") == 4


def test_a_block_through_which_no_gradient_flows() -> None:
    class Headless(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.detach()) + x.sum()

    bench = settled(net=Headless)
    for model in (bench.model, bench.twin):
        model.first.requires_grad_(False)
        model.layers[0].requires_grad_(False)
    bench.check(0, 1, 2, 3)
    assert bench.listener.count("recompute") == 3


def test_one_block_in_many_passes() -> None:
    class Shared(Net):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.layers[0](x)
            return x.pow(2).mean()

    bench = settled(depth=1, net=Shared)
    bench.check(0)
    assert bench.listener.count("enter") == bench.listener.count("recompute") == 3


# ---- what a second run may not meet ---------------------------------------------------------------------------------


class Overwrites(Linear):
    """Its own input, by which autograd needs nothing of it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(0.5))


class AddedTo(nn.Module):
    """Lets its input be changed after it: it saves none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.bias).sin()


class Adds(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            h = layer(x)
            x += h
        return x.sum()


@pytest.mark.parametrize(("make", "net"), [(Overwrites, Net), (AddedTo, Adds)])
def test_an_input_that_is_changed_in_place_raises(make_store: StoreFactory, make: Any, net: Any) -> None:
    bench = settled(make, net=net)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        bench.micro_step(0, 1, 2, 3)
    with pytest.raises(ActivationModifiedError, match="modified by an inplace operation"):
        bench.micro_step(0, 1, 2, 3, around=TensorCache([make_store()], "cpu", 64).saving)
    bench.check()


@pytest.mark.parametrize("name", ["up.weight", "up.bias", "gain"])
def test_a_parameter_that_is_changed_in_place_raises(name: str) -> None:
    """Also one of which plain autograd has saved a view, or nothing."""
    bench = settled()
    bench.check(0, 1, 2, 3)

    def backward(loss: Tensor) -> None:
        with torch.no_grad():
            bench.model.layers[2].get_parameter(name).add_(1)
        loss.backward()

    with pytest.raises(ActivationModifiedError, match=r"a parameter of the block 'layers.2' was modified"):
        bench.micro_step(0, 1, 2, 3, backward=backward)


class Scaled(Layer):
    """Reads an attribute that others change."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Offset(Scaled):
    """Has another output only, and saves the same."""

    def forward(self, x: Tensor) -> Tensor:
        return Layer.forward(self, x) + self.scale


@pytest.mark.parametrize("make", [Scaled, Offset], ids=["among what is saved", "in the output alone"])
def test_the_first_recomputation_of_a_block_is_compared(make: Callable[[], nn.Module]) -> None:
    bench = settled(make)

    def backward(loss: Tensor) -> None:
        bench.model.layers[1].scale = 2.0
        loss.backward()

    with pytest.raises(RecomputationError, match=r"'layers\.1' returned other bytes .*\"blocks\", or .*\"recompute\""):
        bench.micro_step(0, 1, 2, 3, backward=backward)
    bench.model.layers[1].scale = 1.0
    bench.check(0, 1, 2, 3)


def test_later_recomputations_are_as_under_any_checkpoint() -> None:
    """Nothing looks at their bytes, which costs nothing."""
    bench = settled(Scaled)
    bench.check(0, 1, 2, 3)

    def backward(loss: Tensor) -> None:
        for model in (bench.model, bench.twin):
            model.layers[1].scale = 2.0
        loss.backward()
        for model in (bench.model, bench.twin):
            model.layers[1].scale = 1.0

    bench.twin.forward = around_each(as_checkpoint).forward.__get__(bench.twin)
    bench.check(0, 1, 2, 3, backward=backward)


def runs_again() -> bool:
    return torch._C._current_graph_task_id() != -1


class Longer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x).tanh()
        return x.tanh().tanh() if runs_again() else x


class Shorter(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x).tanh()
        return x if runs_again() else x.tanh().tanh()


class Wider(Layer):
    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.float64 if runs_again() else torch.float32
        return super().forward(x).to(dtype).tanh().to(torch.float32)


@pytest.mark.parametrize("make", [Longer, Shorter, Wider])
def test_other_tensors_in_a_recomputation_raise_an_error_of_ours_with_the_repair(make: Callable[[], nn.Module]) -> None:
    bench = settled(make)
    told = r"'layers\.3' (saved|returned) other .*\"blocks\", or .*\"recompute\""
    with pytest.raises(RecomputationError, match=told):
        bench.micro_step(0, 1, 2, 3)


def test_buffers_are_what_any_checkpoint_makes_of_them() -> None:
    """A batch norm counts its runs in them."""
    bench = settled(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH), nn.ReLU()))
    bench.twin.forward = around_each(as_checkpoint).forward.__get__(bench.twin)
    bench.check(0, 1, 2, 3)
    assert bench.listener.count("recompute") == 4


# ---- hooks ----------------------------------------------------------------------------------------------------------


def test_hooks_of_a_block_run_once() -> None:
    """Run again on what it made of the arguments, this one would scale them twice."""
    bench = settled()
    calls: list[str] = []
    for model in (bench.model, bench.twin):
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda *_: calls.append("before"))
            layer.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
            layer.register_forward_hook(lambda _, __, out: calls.append("after") or out * 3)
            layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    bench.check(0, 1, 2, 3)
    assert bench.listener.count("recompute") == 4
    assert sorted(calls) == sorted(["before", "after", "backward"] * 8)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_forward_runs_again_to_its_end_where_hooks_wait_for_it(monkeypatch: pytest.MonkeyPatch, hooked: bool) -> None:
    monkeypatch.setenv("ENDED", "")  # a place that is none of the block's state

    def ended(*_: Any) -> None:
        os.environ["ENDED"] += "x"

    bench = Bench(Layer)
    for layer in bench.model.layers:
        if hooked:
            layer.down.register_forward_hook(ended)
        else:
            plain = layer.down.forward
            layer.down.forward = lambda x, plain=plain: (plain(x), ended())[0]
    for checked in (True, False):  # the first recomputation of a block is compared, and so runs to its end
        os.environ["ENDED"] = ""
        bench.check(0, 1, 2, 3)
        # A linear layer is not run once its input is there.
        assert len(os.environ["ENDED"]) == (8 if hooked or checked else 4)
    assert bench.listener.count("recompute") == 8


def gather(module: nn.Module) -> None:
    """Make a module's own parameters come and go with its hooks, as ZeRO-3 does, in memory that is used again."""
    full = {name: one.detach().clone() for name, one in module.named_parameters(recurse=False)}

    def come(*_: Any) -> None:
        for name, one in module.named_parameters(recurse=False):
            one.data = full[name].clone()

    def go(*_: Any) -> None:
        for one in module.parameters(recurse=False):
            one.data.fill_(torch.nan)
            one.data = torch.empty(0)

    module.register_forward_pre_hook(come)
    module.register_forward_hook(go)
    module.register_full_backward_pre_hook(come)


class Shifted(nn.Module):
    """Needs its own parameter in forward, and not in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.linear = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear((x + self.shift).tanh()).tanh()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_parameters_that_come_and_go_with_hooks() -> None:
    """What the recomputation saw of a parameter is not there any more when backward uses it."""
    bench = settled(lambda: nn.Sequential(Scale(), nn.Tanh(), Scale(), nn.Tanh()))
    for layer in bench.model.layers:
        gather(layer[0]), gather(layer[2])
    bench.check()
    bench.check(0, 1, 2, 3)
    assert bench.listener.count("recompute") == 4


def test_parameters_of_a_block_that_are_not_there_come_with_its_hooks() -> None:
    """Backward did not come by the block's outputs, or its hooks do nothing in backward."""
    bench = settled(Shifted)
    gathered = []
    for layer in bench.model.layers:
        full = layer.shift.detach().clone()

        def come(module: nn.Module, args: Any, full: Tensor = full) -> Any:
            gathered.append(1)
            module.shift.data = full.clone()
            return (args[0] * 1.5,)

        def go(module: nn.Module, *_: Any) -> None:
            module.shift.data = torch.empty(0)

        layer.register_forward_pre_hook(come)
        layer.register_forward_hook(go)
    for layer in bench.twin.layers:
        layer.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
    gradients: list[list[Tensor]] = []
    for model, wanted in ((bench.model, (0, 1, 2, 3)), (bench.twin, ())):
        others = [one for name, one in model.named_parameters() if "shift" not in name]
        bench.listener.wanted = set(wanted)
        torch.manual_seed(7)
        with bench.listening():
            loss = model(torch.randn(BATCH, LENGTH, WIDTH))
        gradients.append([*torch.autograd.grad(loss, others)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*gradients, strict=True))
    assert bench.listener.count("recompute") == 4 and len(gathered) == 8


# ---- compiled -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_blocks_compiled_one_by_one(backend: str) -> None:
    torch._dynamo.reset()
    model = Net(lambda: Layer(dropout=0.0))
    twin = copy.deepcopy(model)
    for one in (model, twin):
        for index in range(4):
            one.layers[index] = torch.compile(one.layers[index], backend=backend)
    listener = Listener()
    blocks = Blocks(find_blocks(model, None), listener)
    for wanted in ((), (), (0, 1, 2, 3)):
        listener.wanted = set(wanted)
        with blocks.listening(listener):
            ours = run(model, 7)
        assert_same(ours, run(twin, 7))
    assert listener.count("enter") == 12 and listener.count("recompute") == 4


def test_what_is_given_back_while_a_pass_is_recomputed_is_what_was_saved(make_store: StoreFactory) -> None:
    """Every block, several micro-steps in flight, through a store: the inputs come back from the file."""
    store = make_store()
    cache = TensorCache([store], "cpu", 1024, wait_for_staging=True)
    bench = settled()
    bench.listener.wanted = {0, 1, 2, 3}
    outcome = []
    for model in (bench.model, bench.twin):
        model.zero_grad()
        losses = []
        for seed in range(3):
            torch.manual_seed(seed)
            with bench.listening(cache.saving) if model is bench.model else nullcontext():
                losses.append(model(torch.randn(BATCH, LENGTH, WIDTH)))
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
        outcome.append({name: one.grad for name, one in model.named_parameters()})
    assert_same(outcome[0], outcome[1])
    assert bench.listener.count("recompute") == 12
    assert store.stats.offloaded_bytes > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_the_users_inside_a_block(reentrant: bool) -> None:
    class Checkpointed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            wide = checkpoint(lambda h: self.drop(functional.gelu(self.up(h))), x, use_reentrant=reentrant)
            return super().forward(x + wide[..., :WIDTH])

    bench = settled(Checkpointed)
    bench.check(0, 1, 2, 3)
    bench.check(0, 2, seed=2)
    assert bench.listener.count("recompute") == 6


def test_a_reentrant_checkpoint_around_a_block_runs_it_plainly() -> None:
    bench = settled(net=around_each(reentrantly))
    bench.check(0, 1, 2, 3)
    assert bench.listener.events == []
