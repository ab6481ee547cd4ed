"""Passes through blocks: who is told of what, and that a recomputed pass gives every bit that it gives otherwise."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import StoreFactory
from support.awkward import returns_what_it_saved
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ds_tba.core.cache import TensorCache
from ds_tba.core.hooks import ForwardHooks, keep_originals
from ds_tba.errors import ActivationModifiedError, RecomputationError
from ds_tba.recompute import Blocks, digest_of, find_blocks

pytestmark = pytest.mark.usefixtures("one_thread")
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


class Memory:
    """Counts what is saved again, and in how many passes."""

    def __init__(self) -> None:
        self.saved: list[Tensor] = []

    def count_again(self, tensor: Tensor) -> None:
        self.saved.append(tensor.detach())

    def end_recomputations(self) -> None: ...


class Diary:
    """Is told of passes."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    @contextmanager
    def passing(self, path: str, inputs: Sequence[Tensor]) -> Iterator[None]:
        self.events.append((path, len(inputs)))
        yield
        self.events.append(("left", 0))


class Bench:
    """A model of which blocks are recomputed; the twin of it runs without us."""

    def __init__(
        self, make: Callable[[], nn.Module] = Layer, depth: int = 4, net: Callable[..., nn.Module] = Net
    ) -> None:
        torch.manual_seed(3)
        self.model = net(make, depth)
        self.twin = copy.deepcopy(self.model)
        self.memory, self.cache = Memory(), TensorCache([], "cpu", 1)
        found = find_blocks(self.model, ["layers"])
        self.paths, self.blocks = [*found], Blocks(found, self.memory)
        self.passes = 0

    def micro_step(
        self, *wanted: int, seed: int = 7, around: Callable[[], AbstractContextManager[Any]] = nullcontext, **more: Any
    ) -> Any:
        """One step, with the blocks in ``wanted`` recomputed."""
        self.blocks.chosen = frozenset(self.paths[number] for number in wanted)
        found = run(self.model, seed, around=lambda: self.forward(around), **more)
        self.blocks.end_backward()
        return found

    @contextmanager
    def forward(
        self, around: Callable[[], AbstractContextManager[Any]] = nullcontext, listener: Any = None
    ) -> Iterator[None]:
        with self.cache.saving(), around(), self.blocks.forward(listener):
            yield

    def check(self, *wanted: int, **more: Any) -> None:
        """One micro-step with, one without: equal in every bit."""
        ours = self.micro_step(*wanted, **more)
        more.pop("around", None)
        assert_same(ours, run(self.twin, **{"seed": 7, **more}))

    def saved_again(self) -> int:
        """How many tensors were saved again since the last call."""
        found, self.memory.saved = len(self.memory.saved), []
        return found


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if not torch.equal(ours[name], theirs[name])} == set()


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


# ---- exact ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("wanted", [(), (0, 2), (0, 1, 2, 3)], ids=["none", "every second", "all"])
def test_recomputed_passes_are_exact(wanted: tuple[int, ...], amp: bool) -> None:
    bench = Bench()
    for seed in (1, 2):
        bench.check(*wanted, seed=seed, amp=amp)
    assert bool(bench.saved_again()) == bool(wanted)


# ---- who is told, and what the model is outside of forwards ----------------------------------------------------------


def test_a_block_that_the_model_checkpoints_runs_again_under_its_checkpoint_alone() -> None:
    bench = Bench(net=around_each(as_checkpoint))
    bench.check(0, 1, 2, 3)
    assert bench.saved_again() == 0


class Squared(nn.Module):
    """Saves two tensors that a checkpoint could take for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * self.right(x)


def test_a_block_under_deepspeeds_own_checkpoint_runs_as_it_does_without_us() -> None:
    """DeepSpeed tells the saved tensors of both runs apart by their order alone."""
    import deepspeed

    bench = Bench(Squared, net=around_each(deepspeed.checkpointing.non_reentrant_checkpoint))
    bench.check(0, 1, 2, 3)
    assert bench.saved_again() == 0


class Recursive(Linear):
    """Calls itself, and with that the forward that is in its place."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self.linear(x).tanh()
        return x if depth == 0 else x * self(x, depth - 1)


class CallsEarlier(Net):
    """Its last layer calls its first, which is a chosen block, too."""

    def forward(self, x: Tensor) -> Tensor:
        self.layers[-1].earlier = [self.layers[0]]
        return super().forward(x)


class Later(Linear):
    earlier: Sequence[nn.Module] = ()

    def forward(self, x: Tensor) -> Tensor:
        for one in self.earlier:
            x = x * one(x)
        return self.linear(x).tanh()


@pytest.mark.parametrize(("make", "net"), [(Recursive, Net), (Later, CallsEarlier)])
def test_a_block_that_another_one_calls_runs_again_with_that_one_alone(make: Any, net: type[Net]) -> None:
    bench = Bench(make, net=net)
    bench.check(0, 1, 2, 3)
    assert bench.saved_again()


class TakesForce(Net):
    """Takes the gradient of its energy in forward, through blocks that it checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False)
        energy = h.pow(2).mean()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + force.pow(2).sum()


class TakesStep(TakesForce):
    """Has a backward of its own in forward."""

    def forward(self, x: Tensor) -> Tensor:
        Net.forward(self, x).backward()
        return super().forward(x)


@pytest.mark.parametrize("net", [TakesForce, TakesStep])
def test_a_backward_in_the_middle_of_forward_runs_blocks_under_the_models_checkpoint(net: type[Net]) -> None:
    bench = Bench(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)), net=net)
    for seed in (1, 2):
        bench.check(0, 1, 2, 3, seed=seed)


def test_in_a_recorded_forward_all_passes_are_told_of_and_none_is_recomputed() -> None:
    bench, diary = Bench(depth=2), Diary()
    bench.blocks.chosen = frozenset({"layers.1"})
    with torch.no_grad(), bench.forward(listener=diary.passing):
        bench.model(torch.ones(1, LENGTH, WIDTH))
    with bench.forward(listener=diary.passing):
        loss = bench.model(torch.ones(1, LENGTH, WIDTH))
    loss.backward()
    assert diary.events == [("layers.0", 1), ("left", 0), ("layers.1", 1), ("left", 0)] and not bench.saved_again()


def test_other_threads_are_not_listened_to() -> None:
    bench, diary = Bench(), Diary()
    with bench.forward(listener=diary.passing):
        other = threading.Thread(target=run, args=(bench.model, 1))
        other.start()
        other.join()
    assert diary.events == []


@pytest.mark.parametrize("made", ["deepcopy", "pickle"])
def test_a_copy_that_is_made_in_the_middle_of_forward_runs_itself(made: str) -> None:
    bench = Bench()
    bench.blocks.chosen = frozenset({"layers.0", "layers.1"})
    with bench.forward():
        other = copy.deepcopy(bench.model) if made == "deepcopy" else pickle.loads(pickle.dumps(bench.model))
        with torch.no_grad():
            for parameter in (*other.parameters(), *bench.twin.parameters()):
                parameter.mul_(0.5)
        assert_same(run(other, 5), run(bench.twin, 5))
    assert not bench.saved_again()


def test_the_inputs_alone_are_saved_outside_and_freed_in_forward() -> None:
    class Ends(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).relu()

    held: list[Any] = []

    class Put:
        """Stands for a store: holds the bytes elsewhere."""

        def __init__(self, tensor: Tensor) -> None:
            self.copy = tensor.detach().clone()
            held.append(weakref.ref(tensor.untyped_storage()))

    bench = Bench(Ends, depth=3, net=around_each(lambda layer, x: layer(x)))
    bench.blocks.chosen = frozenset({"layers.0", "layers.1", "layers.2"})
    with ForwardHooks(Put, lambda put: put.copy), bench.blocks.forward():
        loss = bench.model(torch.randn(BATCH, LENGTH, WIDTH))
    assert [one() is None for one in held] == [True] * len(held) and len(held) <= 8
    loss.backward()


def test_who_wraps_the_forward_of_a_block_is_run_with_it() -> None:
    bench = Bench()
    layer, calls = bench.model.layers[0], []
    own = layer.forward
    theirs = layer.forward = lambda x: (calls.append(1), own(x))[1]
    bench.check(0)
    assert layer.forward is theirs and len(calls) == 2


@pytest.mark.parametrize("changes", ["the class", "an attribute"])
def test_a_forward_that_is_changed_between_steps_is_run_changed(monkeypatch: pytest.MonkeyPatch, changes: str) -> None:
    """Libraries patch the layers of a model after its engine was made; the block ran the forward of before that."""
    bench = Bench()
    bench.check(0, 1, 2, 3)
    kind = type(bench.model.layers[0])
    own = kind.forward
    if changes == "the class":
        monkeypatch.setattr(kind, "forward", lambda self, *args: 2 * own(self, *args))
    else:
        for model in (bench.model, bench.twin):
            model.layers[1].forward = partial(lambda self, *args: 2 * own(self, *args), model.layers[1])
    bench.check(0, 1, 2, 3)
    assert bench.saved_again()


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
    bench = Bench(Odd, net=OddNet)
    bench.check(0, 1, 2, 3)
    assert bench.saved_again()
    assert [len(given) for given in bench.model.lists] == [2] * 4


class Force(Linear):
    """Takes a gradient in forward, as models of forces do."""

    def forward(self, x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(self.linear(x).pow(2).sum(), x, create_graph=True)
        return x + 0.1 * force


# ---- autograd -------------------------------------------------------------------------------------------------------


def test_double_backward() -> None:
    def double(loss: Tensor) -> None:
        leaves = [*bench.model.parameters()] if which[0] else [*bench.twin.parameters()]
        which[0] = False
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        sum(one.pow(2).sum() for one in gradients).backward()

    which = [True]
    bench = Bench(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)))
    bench.check(0, 1, 2, 3, backward=double)
    assert bench.saved_again()


class Shared(Net):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layers[0](x)
        return x.pow(2).mean()


class Headless(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach()) + x.sum()


@pytest.mark.parametrize("frozen", ["some blocks", "all before"])
def test_frozen_blocks(frozen: str) -> None:
    bench = Bench(net=Headless if frozen == "all before" else Net)
    for model in (bench.model, bench.twin):
        parts = model.layers[::2] if frozen == "some blocks" else [model.first, model.layers[0]]
        for part in parts:
            part.requires_grad_(False)
    bench.check(0, 1, 2, 3)
    assert bench.saved_again()


def twice(loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


class ReturnsBias(Linear):
    """Leaves adding its bias to a later kernel, as Megatron's layers do."""

    def forward(self, x: Tensor) -> tuple[Tensor, nn.Parameter]:
        return torch.tanh(torch.nn.functional.linear(x, self.linear.weight)), self.linear.bias


@pytest.mark.parametrize(
    ("bench", "more"),
    [
        (lambda: Bench(depth=1, net=Shared), {}),
        (Bench, {"backward": twice}),
        (lambda: Bench(ReturnsBias, net=around_each(lambda layer, x: sum(layer(x)))), {}),
        (lambda: Bench(Force), {}),  # the checkpoint runs it again then, before there is an output to compare with
    ],
    ids=["a shared block", "backward twice", "a parameter beside the output", "a gradient taken in forward"],
)
def test_a_block_is_exact(bench: Callable[[], Bench], more: dict[str, Any]) -> None:
    made = bench()
    made.check(*range(len(made.paths)), **more)
    assert made.saved_again()


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
    bench = Bench(make, net=net)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        bench.micro_step(0, 1, 2, 3)
    with pytest.raises(ActivationModifiedError, match="modified by an inplace operation"):
        bench.micro_step(0, 1, 2, 3, around=TensorCache([make_store()], "cpu", 64).saving)
    bench.check()


class Scaled(Layer):
    """Reads an attribute that others change."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Offset(Scaled):
    """Has another output only, and saves the same."""

    def forward(self, x: Tensor) -> Tensor:
        return Layer.forward(self, x) + self.scale


class Adapters(Layer):
    """Layers as PEFT has them: an attribute says which adapter is added."""

    active = "policy"

    def __init__(self) -> None:
        super().__init__()
        make = {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("policy", "reference")}
        self.adapters = nn.ModuleDict(make)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.adapters[self.active](x)


class TwoTowers(Net):
    """A trunk that runs twice before one backward, each time with another adapter."""

    def forward(self, x: Tensor) -> Tensor:
        losses = []
        for active in ("reference", "policy"):
            for layer in self.layers:
                layer.active = active
            losses.append(super().forward(x))
        return losses[1] - 0.5 * losses[0]


def test_a_trunk_that_runs_twice_with_another_adapter_raises_in_every_backward() -> None:
    """Its last pass runs again with the adapter that is still active, and is equal."""
    bench = Bench(Adapters, net=TwoTowers)
    for _ in range(3):
        with pytest.raises(RecomputationError, match=r"the output of the block 'layers\.3' differs .*\"recompute\""):
            bench.micro_step(0, 1, 2, 3)
    bench.check()


@pytest.mark.parametrize("make", [Scaled, Offset, Adapters], ids=["in what is saved", "in the output", "an adapter"])
def test_a_switch_between_forward_and_backward_raises(make: Callable[[], nn.Module]) -> None:
    bench = Bench(make)

    def backward(loss: Tensor) -> None:
        bench.model.layers[1].scale, bench.model.layers[1].active = 2.0, "reference"
        loss.backward()

    with pytest.raises(RecomputationError, match=r"output of the block 'layers\.1' differs .*naming the others"):
        bench.micro_step(0, 1, 2, 3, backward=backward)


@pytest.mark.parametrize("name", ["up.weight", "up.bias", "gain"])
def test_a_parameter_that_is_changed_between_forward_and_backward_raises(name: str) -> None:
    bench = Bench()

    def backward(loss: Tensor) -> None:
        with torch.no_grad():
            bench.model.layers[2].get_parameter(name).add_(1)
        loss.backward()

    with pytest.raises((ActivationModifiedError, RecomputationError), match=r"block 'layers\.2'|an inplace operation"):
        bench.micro_step(0, 1, 2, 3, backward=backward)


def test_a_function_that_returns_a_parameter_it_saved_gives_no_grad_its_memory() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))
            self.other = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * returns_what_it_saved(self.weight, self.other)

    keep_originals()
    bench = Bench(Returns)
    bench.check(0, 1, 2, 3)
    for layer in bench.model.layers:
        assert layer.weight.grad.data_ptr() != layer.other.data_ptr()


def test_parameters_that_are_replaced_for_the_call_raise() -> None:
    def with_others(layer: nn.Module, x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {name: 2 * one for name, one in layer.named_parameters()}, (x,))

    bench = Bench(net=around_each(with_others))
    with pytest.raises(RecomputationError, match=r"'layers\.3'"):
        bench.micro_step(0, 1, 2, 3)


@pytest.mark.parametrize("how", ["equal", "one byte", "two rows trade places"])
def test_digests_tell_outputs_apart(how: str) -> None:
    first = torch.randn(64, 1025).to(torch.bfloat16)
    again = first.clone()
    if how == "one byte":
        again.view(torch.uint8)[3, 77] ^= 1
    elif how == "two rows trade places":
        again[[5, 6]] = first[[6, 5]]
    assert torch.equal(digest_of(first), digest_of(again)) == (how == "equal")


def runs_again() -> bool:
    return torch._C._current_graph_task_id() != -1


class Longer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x).tanh()
        return x.tanh().tanh() if runs_again() else x


class Wider(Layer):
    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.float64 if runs_again() else torch.float32
        x = super().forward(x)
        return x + 0 * x.to(dtype).tanh().to(torch.float32)  # the same output, whatever a processor's tanh rounds


@pytest.mark.parametrize("make", [Longer, Wider])
def test_other_tensors_in_a_recomputation_raise_an_error_of_ours(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(RecomputationError, match=r"PyTorch cannot recompute the block 'layers\.3': .*the others in"):
        Bench(make).micro_step(0, 1, 2, 3)


def test_an_error_in_a_recomputation_reaches_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Layer):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            if "BROKEN" in os.environ:
                raise ArithmeticError("in forward")
            return x.tanh()

    bench = Bench(Fails)
    bench.blocks.chosen = frozenset({"layers.1"})
    with bench.forward():
        loss = bench.model(torch.ones(1, LENGTH, WIDTH))
    monkeypatch.setenv("BROKEN", "1")
    with pytest.raises(ArithmeticError):
        loss.backward()
    monkeypatch.delenv("BROKEN")
    bench.check(1)


class Returns(Linear):
    def __init__(self, returns: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.returns = returns

    def forward(self, x: Tensor) -> Tensor:
        return self.returns(self.linear(x))


@pytest.mark.parametrize(
    "returns",
    [
        lambda y: torch.nested.as_nested_tensor(list(y.unbind()), layout=torch.jagged),
        Tensor.to_sparse,
        lambda y: torch.quantize_per_tensor(y.detach(), 0.1, 0, torch.qint8),
        lambda y: SimpleNamespace(y=y),
    ],
    ids=["jagged", "sparse", "quantized", "an object of the user's"],
)
def test_an_output_that_is_no_plain_tensor_is_refused_with_the_repair(returns: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RecomputationError, match=r"'layers.0'.* cannot be compared .* Leave it out by naming"):
        Bench(lambda: Returns(returns)).check(0)


def test_buffers_are_what_any_checkpoint_makes_of_them() -> None:
    """A batch norm counts its runs in them."""
    bench = Bench(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH), nn.ReLU()))
    bench.twin.forward = around_each(as_checkpoint).forward.__get__(bench.twin)
    bench.check(0, 1, 2, 3)
    assert bench.saved_again()


# ---- hooks ----------------------------------------------------------------------------------------------------------


def test_hooks_of_a_block_run_once() -> None:
    """Run again on what it made of the arguments, this one would scale them twice."""
    bench = Bench()
    calls: list[str] = []
    for model in (bench.model, bench.twin):
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda *_: calls.append("before"))
            layer.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
            layer.register_forward_hook(lambda _, __, out: calls.append("after") or out * 3)
            layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    bench.check(0, 1, 2, 3)
    assert bench.saved_again()
    assert sorted(calls) == sorted(["before", "after", "backward"] * 8)


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


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_parameters_that_come_and_go_with_hooks() -> None:
    """What the recomputation saw of a parameter is not there any more when backward uses it."""
    bench = Bench(lambda: nn.Sequential(Scale(), nn.Tanh(), Scale(), nn.Tanh()))
    for layer in bench.model.layers:
        gather(layer[0]), gather(layer[2])
    bench.check()
    bench.check(0, 1, 2, 3)
    assert bench.saved_again()


# ---- compiled and through stores ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_blocks_compiled_one_by_one(backend: str) -> None:
    torch._dynamo.reset()
    bench = Bench(lambda: Layer(dropout=0.0))
    for one in (bench.model, bench.twin):
        for index in range(4):
            one.layers[index] = torch.compile(one.layers[index], backend=backend)
    bench.blocks = Blocks(find_blocks(bench.model, ["layers"]), bench.memory)
    for wanted in ((), (0, 1, 2, 3), (0, 1, 2, 3)):
        bench.check(*wanted)
    assert bench.saved_again()


def test_what_is_given_back_while_a_pass_is_recomputed_is_what_was_saved(make_store: StoreFactory) -> None:
    """Every block, several micro-steps in flight, through a store: the inputs come back from the file."""
    store = make_store()
    cache = TensorCache([store], "cpu", 1024, wait_for_staging=True)
    bench = Bench()
    bench.blocks.chosen = frozenset(bench.paths)
    outcome = []
    for model in (bench.model, bench.twin):
        model.zero_grad()
        losses = []
        for seed in range(3):
            torch.manual_seed(seed)
            with bench.forward(cache.saving) if model is bench.model else nullcontext():
                losses.append(model(torch.randn(BATCH, LENGTH, WIDTH)))
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
        outcome.append({name: one.grad for name, one in model.named_parameters()})
    assert_same(outcome[0], outcome[1])
    assert bench.saved_again() and store.stats.offloaded_bytes > 0
