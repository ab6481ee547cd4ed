"""What a block must show before it is recomputed: no trace of its forward, and the same bytes when it runs again.

Each block here is trained under a plan that would recompute it, beside its twin without us: every loss, gradient and
random number must be the same, with "recompute" false and true, also in the steps in which blocks are proven.
"""

from __future__ import annotations

import argparse
import enum
import gc
import itertools
import logging
import os
import queue
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from doubles import CpuAccelerator
from planners import PLANNERS
from stepping import end_step, forward, note_backward
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from ds_tba.adaptive.agreement import Alone
from ds_tba.autograd.comparison import difference
from ds_tba.autograd.forward_state import StateReader, UnreadableError
from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.errors import ActivationModifiedError, RecomputationError
from ds_tba.offloader import ActivationOffloader

pytestmark = pytest.mark.usefixtures("one_thread", "needs_recompute")
WIDTH, ROWS, DEPTH, STEPS = 16, 32, 3, 20
Make = Callable[[], nn.Module]


class Plain(nn.Module):
    """Has no state that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))


class Attends(Plain):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).view(1, 2, ROWS // 2, WIDTH)
        return super().forward(functional.scaled_dot_product_attention(h, h, h, dropout_p=0.1).reshape(ROWS, WIDTH))


class Counts(Plain):
    """A number in an attribute."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + self.calls / 100)


class CountsInItsClass(Plain):
    def forward(self, x: Tensor) -> Tensor:
        type(self).calls = getattr(type(self), "calls", 0) + 1
        return super().forward(x) * (1 + type(self).calls % 7 / 100)


class RunningMean(Plain):
    """A tensor in an attribute, replaced in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


class BehindItsBack(Plain):
    """Memory that changes without its version."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.data.mul_(0.5).add_(x.detach().mean(0))
        return super().forward(x + self.seen)


class Memory(Plain):
    """What the last segment left, set between forward and backward by the model, as in Transformer-XL."""

    memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.memory is None else x + self.memory)


class Nested(Plain):
    """State in a plain object, in a dict, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = {"one": [State()]}

    def forward(self, x: Tensor) -> Tensor:
        state = self.tables["one"][0]
        state.array += 1
        return super().forward(x) * (1 + float(state.array[0]) / 100)


@dataclass
class State:
    array: Any = field(default_factory=lambda: numpy.zeros(3))


class OwnGenerator(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.chance = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + torch.rand(WIDTH, generator=self.chance) / 10))


class HiddenGenerator(Plain):
    """Where nobody can look for it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + torch.rand(WIDTH, generator=hidden("generator")) / 10))


class PythonRandom(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random())


class NumpyRandom(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + float(numpy.random.random()))


class OwnNumpyRandom(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.chance = numpy.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + float(self.chance.random()))


class Tracker:
    """Megatron's: states of the default generator by name, put in and taken out again."""

    def __init__(self) -> None:
        self.states: dict[str, Tensor] = {}

    def reset(self) -> None:
        self.states = {"model": torch.Generator().manual_seed(1234).get_state()}

    @contextmanager
    def fork(self) -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self.states["model"])
        try:
            yield
        finally:
            self.states["model"] = torch.get_rng_state()
            torch.set_rng_state(before)


TRACKER = Tracker()


def get_tracker() -> Tracker:
    return TRACKER


class Tracked(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with get_tracker().fork():
            x = self.drop(x)
        return super().forward(x)


class HiddenTracker(Plain):
    """The same, where nobody can look for it."""

    def forward(self, x: Tensor) -> Tensor:
        with hidden("tracker").fork():
            x = self.drop(x)
        return super().forward(x)


def hidden(what: str) -> Any:
    """State that no attribute, closure or global leads to by name."""
    here = vars(os).setdefault("_test_of_ds_tba", {})
    if what not in here:
        here[what] = Tracker() if what == "tracker" else torch.Generator().manual_seed(5)
        if what == "tracker":
            here[what].reset()
    return here[what]


class Forks(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            x = self.drop(x)
        return super().forward(x)


SCALE: ContextVar[float] = ContextVar("SCALE", default=1.0)


class ReadsContext(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * SCALE.get())


class ReadsThread(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * LOCAL.scale)


LOCAL = threading.local()
LOCAL.scale = 1.0


class Given(Plain):
    """Reads an object among its arguments."""

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        return super().forward(x * (1 if given is None else given.scale))


@dataclass
class Arguments:
    scale: float = 1.5


class Reads(Plain):
    """Takes from an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = iter([1 + number / 1000 for number in range(1000)])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.scales)


class Closes(Plain):
    """State in a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = counter()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale()


class Hooked(Plain):
    """A hook inside that notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        seen: list[int] = []
        self.up.register_forward_hook(lambda *_: seen.append(1))


class HooksItsWeight(Plain):
    """Hooks a parameter in each forward, and its input where that has a gradient (the first block's has none)."""

    def forward(self, x: Tensor) -> Tensor:
        for tensor in (self.up.weight, x):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: gradient * 0.9)
        return super().forward(x)


class NotesAtItsWeight(Plain):
    """A number in an attribute of a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.up.weight
        weight.calls = getattr(weight, "calls", 0) + 1
        return super().forward(x) * (1 + weight.calls % 7 / 100)


class RunsBackward(Plain):
    """Adds to a gradient in its forward, by a graph that saves nothing."""

    def forward(self, x: Tensor) -> Tensor:
        self.up.bias.mean().backward()
        return super().forward(x)


class HiddenFactor(Plain):
    """Multiplies by what nobody can look for, of which autograd saves nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + vars(os).get("_test_of_ds_tba", {}).get("number", 0) / 1000)


class HiddenFactorInside(HiddenFactor):
    """The same, in an object that it returns."""

    def forward(self, x: Tensor) -> Any:
        return Holder([{"x": super().forward(x)}])


@dataclass
class Holder:
    inside: Any


class Ticker:
    """What it advances is in a class that is known by its name only."""

    calls = 0


class NamesClass(Plain):
    def forward(self, x: Tensor) -> Tensor:
        Ticker.calls += 1
        return super().forward(x) * (1 + Ticker.calls / 1000)


class Helper:
    def __init__(self, x: Tensor) -> None:
        self.x = x
        Ticker.calls += 1

    def scaled(self) -> Tensor:
        return self.x * (1 + Ticker.calls / 1000)


class MakesObject(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return Helper(super().forward(x)).scaled()


class CountingFunction(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        CountingFunction.calls += 1
        ctx.scale = 1 + CountingFunction.calls / 1000
        return x * float(ctx.scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float(ctx.scale)


class AppliesFunction(Plain):
    def forward(self, x: Tensor) -> Tensor:
        applied: Tensor = CountingFunction.apply(super().forward(x))
        return applied


class Slotted:
    __slots__ = ("__number",)

    def __init__(self) -> None:
        self.__number = 0

    def tick(self) -> int:
        self.__number += 1
        return self.__number


class Indexed:
    """Advances a global in a method that Python calls by itself."""

    def __getitem__(self, key: str) -> float:
        TICKS[key] = TICKS.get(key, 0) + 1
        return 1 + TICKS[key] / 1000


TICKS: dict[str, int] = {}


class Has(Plain):
    """Holds an object and a function of it that gives a number."""

    def __init__(self, held: Any, use: Callable[[Any], float]) -> None:
        super().__init__()
        self.held, self.use = held, use

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.use(self.held) / 1000)


def advance(held: Any) -> float:
    held.number = getattr(held, "number", 0) + 1
    return float(held.number)


def advance_item(held: Any, key: Any = 0) -> float:
    held[key] += 1
    return float(held[key])


def first_to_last(held: Any) -> float:
    key = next(iter(held))
    held.move_to_end(key)
    return float(held[key])


def through_queue(held: Any) -> float:
    number = held.get()
    held.put(number)
    return float(number)


def filled_queue() -> Any:
    made: queue.Queue[int] = queue.Queue()
    for number in range(3):
        made.put(number)
    return made


OWNERS: list[State] = []


def weakly_held() -> Any:
    OWNERS.append(State())
    return weakref.ref(OWNERS[-1])


def of_module(name: str) -> types.ModuleType:
    """A module, and the one that it is in, as if they had been imported."""
    for one in ("user_package", f"user_package.{name}"):
        sys.modules.setdefault(one, types.ModuleType(one))
    module = sys.modules[f"user_package.{name}"]
    setattr(sys.modules["user_package"], name, module)
    module.number = 0  # type: ignore[attr-defined]
    return sys.modules["user_package"]


user_package: Any = of_module("state")
of_module("imported")


class NamesModules(Plain):
    def forward(self, x: Tensor) -> Tensor:
        user_package.state.number += 1
        return super().forward(x) * (1 + user_package.state.number / 1000)


class Imports(Plain):
    def forward(self, x: Tensor) -> Tensor:
        import user_package.imported as imported  # type: ignore[import-not-found]

        imported.number += 1
        return super().forward(x) * (1 + imported.number / 1000)


class Unwilling(dict):  # type: ignore[type-arg]
    """Says nothing about itself."""

    def __len__(self) -> int:
        raise LookupError("no length")

    def items(self) -> Any:
        raise LookupError("no items")

    def __iter__(self) -> Any:
        raise LookupError("no keys")


class Mysterious:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise LookupError("no attributes")


class Words(enum.Enum):
    ONE = 1


def counter() -> Callable[[], float]:
    number = 0

    def count() -> float:
        nonlocal number
        number += 1
        return 1 + number / 1000

    return count


# ---- models ---------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x).square().mean()
        return loss

    def between(self) -> None:
        """What the script does between forward and backward."""


class SetsMemory(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            inside = layer(x)
            layer.memory, x = x.detach(), inside
        loss: Tensor = self.head(x).square().mean()
        return loss


class InContext(Net):
    def forward(self, x: Tensor) -> Tensor:
        token = SCALE.set(1.5)
        try:
            return super().forward(x)
        finally:
            SCALE.reset(token)


class InThread(Net):
    def forward(self, x: Tensor) -> Tensor:
        LOCAL.scale = 1.5
        try:
            return super().forward(x)
        finally:
            LOCAL.scale = 1.0


class InKernels(Net):
    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(x)


class SetsHidden(Net):
    def between(self) -> None:
        here = vars(os).setdefault("_test_of_ds_tba", {})
        here["number"] = here.get("number", 0) + 1


class Unpacks(SetsHidden):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).inside[0]["x"]
        loss: Tensor = self.head(x).square().mean()
        return loss


class HooksEveryModule(Net):
    """A hook of all modules while forward runs, with a number of its own."""

    def forward(self, x: Tensor) -> Tensor:
        calls: list[int] = []

        def scale(module: nn.Module, _: Any, result: Any) -> Any:
            calls.append(1)
            return result * (1 + len(calls) / 1000) if isinstance(module, nn.LayerNorm) else result

        self.hook = register_module_forward_hook(scale)
        loss: Tensor = super().forward(x)
        return loss

    def between(self) -> None:
        self.hook.remove()


class Halves(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is functional.gelu else result


class InMode(Net):
    def forward(self, x: Tensor) -> Tensor:
        with Halves():
            return Net.forward(self, x)


class Gives(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.given = Arguments()
        for layer in self.layers:
            x = layer(x, given=self.given)
        loss: Tensor = self.head(x).square().mean()
        return loss

    def between(self) -> None:
        self.given.scale += 1


class GivesDicts(Net):
    """Containers are taken apart, so that a change of them later is nobody's concern."""

    def forward(self, x: Tensor) -> Tensor:
        self.given = {"scale": 1.5}
        for layer in self.layers:
            x = layer(x, self.given)
        loss: Tensor = self.head(x).square().mean()
        return loss

    def between(self) -> None:
        self.given["scale"] = 2.5


class TakesDicts(Plain):
    def forward(self, x: Tensor, given: dict[str, float]) -> Tensor:
        return super().forward(x * given["scale"])


CHANGES = "its forward changes "
BETWEEN = "between forward and backward"
STATEFUL: dict[str, tuple[Make, type[Net], str]] = {
    "counter": (Counts, Net, CHANGES + "its 'calls'"),
    "counter in the class": (CountsInItsClass, Net, CHANGES + "its 'CountsInItsClass.calls'"),
    "running mean": (RunningMean, Net, CHANGES + "its 'mean'"),
    "behind the version": (BehindItsBack, Net, CHANGES + "its 'seen'"),
    "memory of the last segment": (Memory, SetsMemory, "its 'memory' is changed " + BETWEEN),
    "nested": (Nested, Net, CHANGES + "its 'tables[one][0].array'"),
    "own generator": (OwnGenerator, Net, CHANGES + "its 'chance'"),
    "hidden generator": (HiddenGenerator, Net, "torch.Generator of its own"),
    "Python's random": (PythonRandom, Net, "Python's random"),
    "numpy.random": (NumpyRandom, Net, "numpy.random"),
    "own numpy generator": (OwnNumpyRandom, Net, CHANGES + "its 'chance'"),
    "tracker": (Tracked, Net, CHANGES + "its "),
    "hidden tracker": (HiddenTracker, Net, "sets the state of PyTorch's default"),
    "fork_rng": (Forks, Net, "sets the state of PyTorch's default"),
    "ContextVar": (ReadsContext, InContext, "(a ContextVar)' is changed " + BETWEEN),
    "threading.local": (ReadsThread, InThread, "LOCAL.scale' is changed " + BETWEEN),
    "sdpa_kernel": (Attends, InKernels, "a global setting of PyTorch is changed " + BETWEEN),
    "argument object": (Given, Gives, "argument of class Arguments.scale is changed " + BETWEEN),
    "iterator": (Reads, Net, "an iterator whose place cannot be compared"),
    "hook inside": (Hooked, Net, CHANGES + "its '<lambda>.seen'"),
    "closure": (Closes, Net, CHANGES + "its 'count.number'"),
    "hook on a parameter": (HooksItsWeight, Net, "its forward registers a hook on an input or a parameter"),
    "attribute of a parameter": (NotesAtItsWeight, Net, CHANGES + "its 'up.weight.calls'"),
    "backward in forward": (RunsBackward, Net, "its forward changes a gradient"),
    "hidden factor": (HiddenFactor, SetsHidden, "run again, its forward returned other bytes"),
    "hidden factor inside": (HiddenFactorInside, Unpacks, "run again, its forward returned other bytes"),
    "class by name": (NamesClass, Net, CHANGES + "its 'Ticker.calls'"),
    "object made": (MakesObject, Net, CHANGES + "its 'Ticker.calls'"),
    "Function": (AppliesFunction, Net, CHANGES + "its 'CountingFunction.calls'"),
    "SimpleNamespace": (lambda: Has(types.SimpleNamespace(), advance), Net, CHANGES + "its 'held"),
    "Namespace": (lambda: Has(argparse.Namespace(), advance), Net, CHANGES + "its 'held"),
    "held threading.local": (lambda: Has(threading.local(), advance), Net, CHANGES + "its 'held"),
    "UserDict": (lambda: Has(UserDict({0: 0}), advance_item), Net, CHANGES + "its 'held.data[0]'"),
    "Queue": (lambda: Has(filled_queue(), through_queue), Net, CHANGES + "its 'held."),
    "weak reference": (lambda: Has(weakly_held(), lambda one: advance(one())), Net, CHANGES + "its 'held (a weak"),
    "array of objects": (lambda: Has(numpy.array([0, None]), advance_item), Net, CHANGES + "its 'held[0]'"),
    "bound method": (lambda: Has(random.Random(3).random, lambda one: one()), Net, CHANGES + "its 'held (a method)'"),
    "private slot": (lambda: Has(Slotted(), lambda one: one.tick()), Net, CHANGES + "its 'held._Slotted__number'"),
    "order": (lambda: Has(OrderedDict(a=1, b=2, c=3), first_to_last), Net, CHANGES + "its 'held'"),
    "special method": (lambda: Has(Indexed(), lambda one: one["k"]), Net, CHANGES + "its "),
    "module in a module": (NamesModules, Net, CHANGES + "its 'user_package.state.number'"),
    "import inside": (Imports, Net, CHANGES + "its 'user_package.imported.number'"),
    "hook of every module": (Plain, HooksEveryModule, CHANGES + "its 'scale.calls"),
    "mode": (Plain, InMode, "a global setting of PyTorch is changed " + BETWEEN),
    "SystemRandom": (lambda: Has(random.SystemRandom(), lambda _: 1), Net, "cannot be read (NotImplementedError)"),
    "no attributes": (lambda: Has(Mysterious(), lambda _: 1), Net, "cannot be read (LookupError)"),
    "SimpleQueue": (lambda: Has(queue.SimpleQueue(), lambda _: 1), Net, "shows no content"),
}
PLAIN: dict[str, tuple[Make, type[Net]]] = {
    "MLP with dropout": (Plain, Net),
    "attention": (Attends, Net),
    "torch's own": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32), Net),
    "dict argument": (TakesDicts, GivesDicts),
    "what has no state": (
        lambda: Has(
            [
                Words.ONE,
                logging.getLogger(),
                threading.Lock(),
                torch.add,
                functional.gelu,
                os,
                nn.GELU(),
                nn.GELU,
                int,
                len,
                range(3),
                torch.float32,
            ],
            len,
        ),
        Net,
    ),
    "what says nothing of itself": (lambda: Has(Unwilling(a=1), lambda _: 1), Net),
}


# ---- running them ---------------------------------------------------------------------------------------------------


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., ActivationOffloader]]:
    made = []

    def make(model: nn.Module, **block: Any) -> ActivationOffloader:
        io = {"backend": "posix", "staging_bytes": 4 << 20, "swap_file_bytes": 64 << 20}
        config = {"nvme_path": str(tmp_path), "io": io, "min_tensor_bytes": 1024, "max_step_overhead": 1000.0, **block}
        offloader = ActivationOffloader(OffloadConfig.model_validate(config), AioConfig(), CpuAccelerator())
        # The plan would recompute whatever is proven.
        planner = PLANNERS["recompute"] if config.get("recompute") else PLANNERS["adaptive"]
        offloader.watch(model, Alone(), planner)
        made.append(offloader)
        return offloader

    yield make
    for offloader in made:
        offloader.close()


def begin() -> None:
    """Every random number from its beginning."""
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    TRACKER.reset()
    vars(os).pop("_test_of_ds_tba", None)
    CountsInItsClass.calls = Ticker.calls = CountingFunction.calls = 0
    TICKS.clear()
    of_module("state")
    of_module("imported")


def steps(model: Net, offloader: ActivationOffloader | None, count: int = STEPS) -> Iterator[list[Any]]:
    """Loss, gradients and random states of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(count):
        x = torch.randn(ROWS, WIDTH)
        loss = forward(model, x, offloader)
        model.between()
        loss.backward()
        note_backward(offloader)
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        end_step(optimizer, offloader)
        yield [loss.detach(), *gradients, torch.get_rng_state(), torch.tensor(random.getstate()[1])]


def check(make: Callable[..., ActivationOffloader], block: Make, net: type[Net], **config: Any) -> ActivationOffloader:
    """Train with and without; every bit must be the same."""
    torch.manual_seed(0)
    ours = net(block)
    twin = twin_of(ours, block)
    offloader = make(ours, **config)
    check_steps(ours, offloader, twin)
    return offloader


def twin_of(ours: Net, block: Make) -> Net:
    """Another model of the same kind, blocks and parameters."""
    twin = type(ours)(block)
    twin.load_state_dict(ours.state_dict())
    return twin


def check_steps(ours: Net, offloader: ActivationOffloader, twin: Net, count: int = STEPS) -> list[int]:
    """Train both from the same beginning; every bit must be the same. Bytes recomputed, before and after each step."""
    begin()
    expected = list(steps(twin, None, count))
    begin()
    recomputed = [offloader.report().recomputed_bytes]
    for number, (one, other) in enumerate(zip(steps(ours, offloader, count), expected, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), f"step {number}"
        recomputed.append(offloader.report().recomputed_bytes)
    return recomputed


def test_a_graph_dropped_while_blocks_are_verified_is_gone_after_one_collection(
    make: Callable[..., ActivationOffloader],
) -> None:
    ours = Net(Plain)
    offloader = make(ours, recompute=True)
    running = steps(ours, offloader)
    next(running)  # the blocks are watched
    forward(ours, torch.randn(2 * ROWS, WIDTH), offloader)  # the first passes of the step in which they are verified
    next(running)
    gc.collect()
    offloader.cache.settle()
    assert offloader.cache.live_records == 0


class Scaled(Plain):
    """Reads an attribute that only others change."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def test_a_backward_after_the_step_shows_what_changed_since_its_forward(
    make: Callable[..., ActivationOffloader],
) -> None:
    ours = Net(Scaled)
    offloader = make(ours, recompute=True)
    running = steps(ours, offloader)
    next(running)  # the blocks are watched
    late = forward(ours, torch.randn(ROWS, WIDTH), offloader)
    offloader.note_step()  # the step in which they are verified
    blocks = [one for one in ours.modules() if isinstance(one, Scaled)]
    for block in blocks:
        block.scale = 2.0
    late.sum().backward()
    controller = offloader._controller
    assert controller is not None and controller._blocks is not None
    for block in controller._blocks.all:
        assert "is changed between forward and backward" in (controller._blocks.obstacle(block) or "")


@pytest.mark.parametrize("name", STATEFUL)
def test_under_the_default_block_nothing_runs_twice(make: Callable[..., ActivationOffloader], name: str) -> None:
    block, net, _ = STATEFUL[name]
    report = check(make, block, net).report()
    assert report.plans >= 1 and report.recomputed_bytes == 0 and report.unproven_blocks == []


@pytest.mark.parametrize("name", STATEFUL)
def test_a_block_with_state_is_left_out_with_the_reason(
    make: Callable[..., ActivationOffloader], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    block, net, reason = STATEFUL[name]
    report = check(make, block, net, recompute=True).report()
    assert report.recomputed_bytes == 0 and report.plan is not None and report.plan["recomputed_blocks"] == 0
    assert [one["path"] for one in report.unproven_blocks] == [f"layers.{number}" for number in range(DEPTH)]
    assert all(reason in one["reason"] for one in report.unproven_blocks), report.unproven_blocks
    lines = [record.message for record in caplog.records if "not recomputed" in record.message]
    assert len(lines) == len({one["reason"] for one in report.unproven_blocks})


@pytest.mark.parametrize("name", PLAIN)
def test_a_block_without_state_is_proven_and_recomputed(make: Callable[..., ActivationOffloader], name: str) -> None:
    report = check(make, *PLAIN[name], recompute=True).report()
    assert report.unproven_blocks == []
    assert report.recomputed_bytes > 0 and report.plan is not None and report.plan["recomputed_blocks"] == DEPTH


# ---- what comes up later --------------------------------------------------------------------------------------------


class Later(Plain):
    """Changes what it does when the test says so, by something that is not its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x.tanh().tanh() if "TWICE" in os.environ and torch._C._current_graph_task_id() == -1 else x.tanh()


def under_a_plan(
    make: Callable[..., ActivationOffloader], block: Make, net: type[Net] = Net
) -> tuple[Net, ActivationOffloader]:
    """A model whose blocks are all recomputed."""
    torch.manual_seed(0)
    begin()
    ours = net(block)
    offloader = make(ours, recompute=True)
    list(steps(ours, offloader))
    report = offloader.report()
    assert report.plan is not None and report.plan["recomputed_blocks"] == DEPTH
    return ours, offloader


def test_other_tensors_in_a_recomputation_raise_an_error_of_ours_with_the_repair(
    make: Callable[..., ActivationOffloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, offloader = under_a_plan(make, Later)
    monkeypatch.setenv("TWICE", "1")
    with pytest.raises(RecomputationError, match=r"'layers\.2'.*\"recompute\": false"):
        list(steps(ours, offloader))


@pytest.mark.parametrize("what", ["attribute", "settings", "own number"])
def test_state_that_changes_between_forward_and_backward_raises(
    make: Callable[..., ActivationOffloader], what: str
) -> None:
    ours, offloader = under_a_plan(make, Counted)

    values = itertools.count(2.0)

    def between() -> None:
        if what == "attribute":
            ours.layers[1].scale = next(values)
        elif what == "own number":
            ours.layers[1].norm.eps = next(values)
        else:
            torch.set_float32_matmul_precision("high" if next(values) % 2 else "medium")

    ours.between = between  # type: ignore[method-assign]
    try:
        with pytest.raises(ActivationModifiedError, match='"recompute": false'):
            list(steps(ours, offloader))
    finally:
        torch.set_float32_matmul_precision("highest")


def test_small_tensors_that_change_without_their_version_are_found_in_every_recomputation(
    make: Callable[..., ActivationOffloader],
) -> None:
    ours, offloader = under_a_plan(make, Buffered)
    values = itertools.count(2.0)
    ours.between = lambda: ours.layers[1].scale.numpy().fill(next(values))  # type: ignore[method-assign, operator, union-attr]
    with pytest.raises(ActivationModifiedError, match=r"'layers\.1'.*its 'scale'"):
        list(steps(ours, offloader))  # several: on a busy machine the next one may be recorded, and recomputes nothing


class Buffered(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def test_a_pass_under_another_mode_is_a_kind_of_its_own(make: Callable[..., ActivationOffloader]) -> None:
    ours, offloader = under_a_plan(make, Plain)
    twin = twin_of(ours, Plain)
    for model in (ours, twin):
        model.forward = types.MethodType(InMode.forward, model)  # type: ignore[method-assign]
    before, after = check_steps(ours, offloader, twin, 1)
    assert after == before


class Counted(Plain):
    scale = 1.0
    draws = False

    def forward(self, x: Tensor) -> Tensor:
        if self.draws:
            x = x * (1 + random.random()) * (1 + float(numpy.random.random()))
        return super().forward(x * self.scale)


def test_python_numbers_drawn_only_later_are_drawn_again(make: Callable[..., ActivationOffloader]) -> None:
    ours, offloader = under_a_plan(make, Counted)
    twin = twin_of(ours, Counted)
    for model in (ours, twin):
        for layer in model.layers:
            layer.draws = True
    recomputed = check_steps(ours, offloader, twin, 3)
    assert recomputed[-1] > recomputed[0]


def test_a_kind_of_pass_that_comes_later_is_proven_before_it_is_recomputed(
    make: Callable[..., ActivationOffloader],
) -> None:
    ours, offloader = under_a_plan(make, Plain)
    recomputed = check_steps(ours.eval(), offloader, twin_of(ours, Plain).eval(), 60)
    assert recomputed[0] == recomputed[1]  # it is watched first; when it is tried, the monitor says
    assert recomputed[-1] > recomputed[1] and offloader.report().unproven_blocks == []


class RaisesInBackward(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1:
            raise LookupError("there is nothing here")
        return super().forward(x)


@pytest.mark.parametrize(
    ("block", "reason"),
    [(RaisesInBackward, "raised LookupError: there is nothing here"), (Later, "its forward saved other tensors")],
)
def test_what_fails_in_a_trial_is_survived(
    make: Callable[..., ActivationOffloader], monkeypatch: pytest.MonkeyPatch, block: Make, reason: str
) -> None:
    monkeypatch.setenv("TWICE", "1")
    report = check(make, block, Net, recompute=True).report()
    assert report.recomputed_bytes == 0
    assert [reason in one["reason"] for one in report.unproven_blocks] == [True] * DEPTH


def test_trials_are_nothing_that_the_cache_counts(make: Callable[..., ActivationOffloader]) -> None:
    """But for the inputs of its checkpoint, which are saved as those of a recomputation are."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        ours = Net(Plain)
        offloader = make(ours, recompute=recompute)
        begin()
        list(steps(ours, offloader, 2))
        report = offloader.report()
        found.append((report.packed_tensors, report.peak_saved_bytes_without, report.recomputed_bytes))
        offloader.close()
    (packed, peak_bytes, _), (packed_more, peak_more_bytes, recomputed_bytes) = found
    assert (packed_more - packed, peak_more_bytes, recomputed_bytes) == (DEPTH, peak_bytes, 0)


# ---- two tensors, one state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.complex128, torch.bool])
def test_tensors_are_equal_in_every_bit_or_not_at_all(dtype: torch.dtype) -> None:
    one = torch.randn(4, 6).to(dtype)
    assert difference(one, one.clone()) is None
    assert difference(one.t(), one.clone().t()) is None
    changed = one.clone()
    changed[2, 3] = torch.logical_not(changed[2, 3]) if dtype is torch.bool else changed[2, 3] + 1
    assert difference(one, changed) == "other bytes"
    for other in (one.t(), one[:2], one.clone()[1:], one.double()):
        assert "another form" in str(difference(one, other))


def test_not_a_number_is_itself_and_zero_has_a_sign() -> None:
    one = torch.tensor([float("nan"), 0.0])
    assert difference(one, one.clone()) is None
    assert difference(one, torch.tensor([float("nan"), -0.0])) == "other bytes"


def test_a_state_reads_what_a_forward_refers_to_and_ends() -> None:
    block = Nested()
    block.around = [block]  # a cycle
    reader = StateReader(block, block.forward)
    before = reader.read()
    assert reader.changed_since(before) is None
    block.tables["one"].append(3)
    assert reader.changed_since(before) == "its 'tables[one]'"
    block.many = list(range(30_000))
    with pytest.raises(UnreadableError, match="too many"):
        reader.read()
