"""Passes through blocks: who is told of what, and that a recomputed pass gives every bit that it gives otherwise."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from conftest import StoreFactory
from support.awkward import returns_what_it_saved
from support.models import Mlp, Stack
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ds_tba.core.cache import TensorCache
from ds_tba.core.hooks import ForwardHooks, keep_originals
from ds_tba.errors import ActivationModifiedError, RecomputationError
from ds_tba.recompute import Blocks, digest_of, find_blocks

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH, LENGTH, BATCH, DEPTH = 16, 8, 4, 4
ALL = range(DEPTH)
Backward = Callable[[nn.Module, Tensor], None]


class Layer(Mlp):
    """Attention and MLP, with dropout and with a parameter of its own."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__(WIDTH, dropout)
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.gain
        return super().forward(x + self.attention(h, h, h, need_weights=False)[0])


class Net(Stack):
    """The input of its first block has a graph."""

    def __init__(self, make: Callable[[], nn.Module], depth: int) -> None:
        super().__init__(make, depth)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


class Linear(nn.Module):
    """Has what blocks of one linear layer share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


def around_each(how: Callable[[nn.Module, Tensor], Tensor]) -> type[Net]:
    """Return a net that calls its layers in this way."""

    class Around(Net):
        def call(self, layer: nn.Module, x: Tensor) -> Tensor:
            return how(layer, x)

    return Around


def as_checkpoint(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def backward(model: nn.Module, loss: Tensor) -> None:
    loss.backward()


class Bench:
    """A model of which blocks are recomputed; the twin of it runs without us."""

    def __init__(
        self, make: Callable[[], nn.Module] = Layer, depth: int = DEPTH, net: Callable[..., nn.Module] = Net
    ) -> None:
        torch.manual_seed(3)
        self.model, self.twin = net(make, depth), net(make, depth)
        self.twin.load_state_dict(self.model.state_dict())
        self.blocks = Blocks(find_blocks(self.model, ["layers"]), TensorCache([], "cpu", 1))
        self.choose(range(depth))

    def choose(self, wanted: Sequence[int]) -> None:
        self.blocks.chosen = frozenset(f"layers.{number}" for number in wanted)

    @property
    def recomputed_bytes(self) -> int:
        return self.blocks.cache.stats.recomputed_bytes

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self.blocks.cache.saving(), self.blocks.forward():
            yield

    def micro_step(self, **more: Any) -> dict[str, Tensor]:
        """One step, with the chosen blocks recomputed; at first these are all."""
        found = run(self.model, around=self.forward, **more)
        self.blocks.cache.end_recomputations()
        return found

    def check(self, *, runs_again: bool = True, **more: Any) -> None:
        """One micro-step with, one without: equal in every bit."""
        before = self.recomputed_bytes
        assert_same(self.micro_step(**more), run(self.twin, **more))
        assert (self.recomputed_bytes > before) == runs_again


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if not torch.equal(ours[name], theirs[name])} == set()


def run(
    model: nn.Module,
    seed: int = 7,
    backward: Backward = backward,
    amp: bool = False,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Tensor]:
    """Loss, gradients of input and parameters, buffers, and where the random numbers stand afterwards."""
    torch.manual_seed(seed)
    model.zero_grad()
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    with around(), torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss = model(x)
    backward(model, loss)
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    buffers = {name: one.clone() for name, one in model.named_buffers()}
    return {"loss": loss.detach(), "x": x.grad, **gradients, **buffers, "rng": torch.get_rng_state()}


# ---- exact ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("wanted", [(), (0, 2), ALL], ids=["none", "every second", "all"])
def test_recomputed_passes_are_exact(wanted: Sequence[int], amp: bool) -> None:
    bench = Bench()
    bench.choose(wanted)
    for seed in (1, 2):
        bench.check(seed=seed, amp=amp, runs_again=bool(wanted))


class ReturnsBias(Linear):
    """Leaves adding its bias to a later kernel, as Megatron's layers do."""

    def forward(self, x: Tensor) -> tuple[Tensor, nn.Parameter]:
        return torch.tanh(functional.linear(x, self.linear.weight)), self.linear.bias


class Force(Linear):
    """Takes a gradient in forward, as models of forces do."""

    def forward(self, x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(self.linear(x).pow(2).sum(), x, create_graph=True)
        return x + 0.1 * force


class Later(Linear):
    earlier: Sequence[nn.Module] = ()

    def forward(self, x: Tensor) -> Tensor:
        for one in self.earlier:
            x = x * one(x)
        return self.linear(x).tanh()


class CallsEarlier(Net):
    """Its last layer calls its first, which is a chosen block, too."""

    def forward(self, x: Tensor) -> Tensor:
        self.layers[-1].earlier = [self.layers[0]]
        return super().forward(x)


class TakesForce(Net):
    """Has a backward of its own in forward, and takes the gradient of an energy, through blocks that it checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x).backward()
        h = x
        for layer in self.layers:
            h = as_checkpoint(layer, h)
        energy = h.pow(2).mean()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + force.pow(2).sum()


def twice(model: nn.Module, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def double(model: nn.Module, loss: Tensor) -> None:
    gradients = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    sum(one.pow(2).sum() for one in gradients).backward()


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize(
    ("options", "backward"),
    [
        pytest.param({"depth": 1, "net": around_each(lambda layer, x: layer(layer(layer(x))))}, backward, id="shared"),
        pytest.param({}, twice, id="backward twice"),
        pytest.param({"make": smooth}, double, id="double backward"),
        pytest.param(
            {"make": ReturnsBias, "net": around_each(lambda layer, x: sum(layer(x)))},
            backward,
            id="a parameter beside the output",
        ),
        # The checkpoint runs it again then, before there is an output to compare with.
        pytest.param({"make": Force}, backward, id="a gradient taken in forward"),
        # One that another one calls runs again with that one alone.
        pytest.param({"make": Later, "net": CallsEarlier}, backward, id="a block that calls another"),
        pytest.param({"make": smooth, "net": TakesForce}, backward, id="a backward in the middle of forward"),
    ],
)
def test_a_block_is_exact(options: dict[str, Any], backward: Backward) -> None:
    bench = Bench(**options)
    for seed in (1, 2):
        bench.check(seed=seed, backward=backward)


class Headless(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach()) + x.sum()


@pytest.mark.parametrize(
    ("net", "frozen"),
    [(Net, ["layers.0", "layers.2"]), (Headless, ["first", "layers.0"])],
    ids=["some blocks", "all before"],
)
def test_frozen_blocks(net: type[Net], frozen: list[str]) -> None:
    bench = Bench(net=net)
    for model in (bench.model, bench.twin):
        for path in frozen:
            model.get_submodule(path).requires_grad_(False)
    bench.check()


class Odd(nn.Module):
    """Takes and gives what layers take and give."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = Layer(), nn.Dropout(0.2)

    def forward(
        self, x: Tensor, nothing: None, pair: tuple[Tensor, list[Tensor]], *, mask: Tensor, more: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any], None]:
        pair[1].append(x)  # of the caller's own list in forward, of nobody's in a recomputation
        h = self.inner(self.drop(x)) * mask + pair[0] * more["scale"] + pair[1][0]
        return h, {"aux": (h * 2).mean(), "name": "odd"}, nothing


def test_arguments_of_every_kind() -> None:
    lists: list[list[Tensor]] = []

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        lists.append([x.detach() * 3])
        pair, more = (x.detach() * 2, lists[-1]), {"scale": 0.5, "k": x}
        h, extra, _ = layer(x, None, pair, mask=torch.ones(LENGTH, 1), more=more)
        return h + extra["aux"]

    Bench(Odd, net=around_each(call)).check()
    assert [len(given) for given in lists] == [2] * 2 * DEPTH


# ---- who is told, and what the model is outside of forwards ----------------------------------------------------------


class Squared(nn.Module):
    """Saves two tensors that a checkpoint could take for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * self.right(x)


def test_a_block_that_deepspeed_checkpoints_runs_again_under_its_checkpoint_alone() -> None:
    """DeepSpeed tells the saved tensors of both runs apart by their order alone."""
    Bench(Squared, net=around_each(deepspeed.checkpointing.non_reentrant_checkpoint)).check(runs_again=False)


@pytest.mark.parametrize(
    "made", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_that_is_made_in_the_middle_of_forward_runs_itself(made: Callable[[nn.Module], nn.Module]) -> None:
    bench = Bench()
    with bench.forward():
        other = made(bench.model)
        with torch.no_grad():
            for parameter in (*other.parameters(), *bench.twin.parameters()):
                parameter.mul_(0.5)
        assert_same(run(other), run(bench.twin))
    assert not bench.recomputed_bytes


def test_the_inputs_alone_are_saved_outside_and_freed_in_forward() -> None:
    held: list[Any] = []

    def put(tensor: Tensor) -> Tensor:
        """As a store does, which holds the bytes elsewhere."""
        held.append(weakref.ref(tensor.untyped_storage()))
        return tensor.detach().clone()

    bench = Bench(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), depth=3)
    with ForwardHooks(put, Tensor.clone), bench.blocks.forward():
        loss = bench.model(torch.randn(BATCH, LENGTH, WIDTH))
    assert [one() is None for one in held] == [True] * len(held) and len(held) <= 8
    loss.backward()


@pytest.mark.parametrize("changes", ["the class", "an attribute"])
def test_a_forward_that_is_changed_between_steps_is_run_changed(monkeypatch: pytest.MonkeyPatch, changes: str) -> None:
    """Libraries patch the layers of a model after its engine was made; the block ran the forward of before that."""
    bench = Bench()
    bench.check()
    own = Layer.forward
    if changes == "the class":
        monkeypatch.setattr(Layer, "forward", lambda self, *args: 2 * own(self, *args))
    else:
        for model in (bench.model, bench.twin):
            model.layers[1].forward = partial(lambda self, *args: 2 * own(self, *args), model.layers[1])
    changed = bench.model.layers[1].forward
    bench.check()
    assert bench.model.layers[1].forward == changed


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


@pytest.mark.parametrize(
    ("make", "net"), [(Overwrites, Net), (AddedTo, around_each(lambda layer, x: x.add_(layer(x))))]
)
def test_an_input_that_is_changed_in_place_raises(make_store: StoreFactory, make: Any, net: type[Net]) -> None:
    bench = Bench(make, net=net)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        bench.micro_step()
    bench.blocks.cache = TensorCache([make_store()], "cpu", 64)
    with pytest.raises(ActivationModifiedError, match="modified by an inplace operation"):
        bench.micro_step()
    bench.choose([])
    bench.check(runs_again=False)


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
            run(bench.model, around=bench.forward)
    bench.choose([])
    bench.check(runs_again=False)


class Late(torch.Tensor):
    """A digest on a device, which answers late."""

    device = torch.device("meta")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_tba.recompute.digest_of", lambda tensor: digest_of(tensor).as_subclass(Late))


def switched(bench: Bench) -> Tensor:
    """The loss of a model whose adapters are others when its blocks run again."""
    for layer in bench.model.layers:
        layer.active = "policy"
    with bench.forward():
        loss: Tensor = bench.model(torch.randn(BATCH, LENGTH, WIDTH))
    for layer in bench.model.layers:
        layer.active = "reference"
    return loss


@pytest.mark.usefixtures("late")
def test_on_a_device_the_backward_that_is_wrong_raises_and_no_other() -> None:
    """Not one inside of it, which is right, nor a later one where it has ended in another error."""
    bench, right = Bench(Adapters), Bench()
    with right.forward():
        right_loss = right.model(torch.randn(BATCH, LENGTH, WIDTH))

    def raises(_: Tensor) -> None:
        raise ValueError

    loss = switched(bench)
    # Behind the blocks that have run again by then.
    bench.model.layers[0].up.weight.register_hook(lambda _: right_loss.backward())
    with pytest.raises(RecomputationError, match=r"the output of the block 'layers\.\d' differs"):
        loss.backward()
    assert right.recomputed_bytes and all(one.grad is not None for one in right.model.layers.parameters())
    bench = Bench(Adapters)
    hook = bench.model.layers[0].up.weight.register_hook(raises)
    with pytest.raises(ValueError):
        switched(bench).backward()
    hook.remove()
    bench.micro_step()


@pytest.mark.parametrize("digests", ["late", ""])
def test_who_looks_at_saved_tensors_has_the_error_at_once(request: pytest.FixtureRequest, digests: str) -> None:
    if digests:
        request.getfixturevalue(digests)
    nodes, seen = [switched(Bench(Adapters)).grad_fn], set[Any]()
    with pytest.raises(RecomputationError, match=r"the output of the block 'layers\.\d' differs"):
        while nodes:
            node = nodes.pop()
            seen.add(node)
            nodes += [one for one, _ in node.next_functions if one not in {None, *seen}]
            for name in dir(node):
                if name.startswith("_saved_"):
                    getattr(node, name)


@pytest.mark.parametrize("name", ["up.weight", "up.bias", "gain"])
def test_a_parameter_that_is_changed_between_forward_and_backward_raises(name: str) -> None:
    def change(model: Any, loss: Tensor) -> None:
        with torch.no_grad():
            model.layers[2].get_parameter(name).add_(1)
        loss.backward()

    with pytest.raises((ActivationModifiedError, RecomputationError), match=r"block 'layers\.2'|an inplace operation"):
        Bench().micro_step(backward=change)


class ReturnsParameter(nn.Module):
    """Its Function returns the saved parameter as a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * returns_what_it_saved(self.weight, self.other)


def test_a_function_that_returns_a_parameter_it_saved_gives_no_grad_its_memory() -> None:
    keep_originals()
    bench = Bench(ReturnsParameter)
    bench.check()
    for layer in bench.model.layers:
        assert layer.weight.grad.data_ptr() != layer.other.data_ptr()


@pytest.mark.parametrize("how", ["equal", "one byte", "two rows trade places"])
def test_digests_tell_outputs_apart(how: str) -> None:
    first = torch.randn(64, 1025).to(torch.bfloat16)
    again = first.clone()
    if how == "one byte":
        again.view(torch.uint8)[3, 77] ^= 1
    elif how == "two rows trade places":
        again[[5, 6]] = first[[6, 5]]
    assert torch.equal(digest_of(first), digest_of(again)) == (how == "equal")


class Longer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x).tanh()
        runs_again = torch._C._current_graph_task_id() != -1
        return x.tanh().tanh() if runs_again else x


def test_other_tensors_in_a_recomputation_raise_an_error_of_ours() -> None:
    with pytest.raises(RecomputationError, match=r"PyTorch cannot recompute the block 'layers\.3': .*the others in"):
        Bench(Longer).micro_step()


class Returns(Linear):
    def __init__(self, returns: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.returns = returns

    def forward(self, x: Tensor) -> Any:
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
def test_an_output_that_is_no_plain_tensor_is_refused_with_the_repair(returns: Callable[[Tensor], Any]) -> None:
    with pytest.raises(RecomputationError, match=r"'layers.0'.* cannot be compared .* Leave it out by naming"):
        Bench(lambda: Returns(returns)).micro_step()


def test_buffers_are_what_any_checkpoint_makes_of_them() -> None:
    """A batch norm counts its runs in them."""
    bench = Bench(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH), nn.ReLU()))
    bench.twin.call = as_checkpoint
    bench.check()


# ---- hooks ----------------------------------------------------------------------------------------------------------


def test_hooks_of_a_block_run_once() -> None:
    """Run again on what it made of the arguments, this one would scale them twice."""
    bench = Bench()
    calls: list[str] = []
    for layer in (*bench.model.layers, *bench.twin.layers):
        layer.register_forward_pre_hook(lambda *_: calls.append("before"))
        layer.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        layer.register_forward_hook(lambda _, __, out: calls.append("after") or out * 3)
        layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    bench.check()
    assert sorted(calls) == sorted(["before", "after", "backward"] * 2 * DEPTH)


class Gathered(nn.Module):
    """Its parameter comes and goes with its hooks, as ZeRO-3 makes it, in memory that is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def gather(self) -> None:
        """Begin to."""
        full = self.weight.detach().clone()

        def come(*_: Any) -> None:
            self.weight.data = full.clone()

        def go(*_: Any) -> None:
            self.weight.data.fill_(torch.nan)
            self.weight.data = torch.empty(0)

        self.register_forward_pre_hook(come)
        self.register_forward_hook(go)
        self.register_full_backward_pre_hook(come)


def test_parameters_that_come_and_go_with_hooks() -> None:
    """What the recomputation saw of a parameter is not there any more when backward uses it."""
    bench = Bench(lambda: nn.Sequential(Gathered(), nn.Tanh(), Gathered(), nn.Tanh()))
    for layer in bench.model.layers:
        layer[0].gather()
        layer[2].gather()
    for wanted in ([], ALL):
        bench.choose(wanted)
        bench.check(runs_again=bool(wanted))


# ---- compiled -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_blocks_compiled_one_by_one(backend: str) -> None:
    torch._dynamo.reset()
    bench = Bench(lambda: torch.compile(Layer(dropout=0.0), backend=backend))
    for wanted in ([], ALL, ALL):
        bench.choose(wanted)
        bench.check(runs_again=bool(wanted))
