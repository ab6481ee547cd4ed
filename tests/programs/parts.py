"""The parts of the models of random trainings: small networks, each with a habit that has cost a gradient before.

A part maps (rows, width) to (rows, width). Those in ``STATEFUL`` do something else when their forward runs a second
time. Everything is small, and finite over some thirty steps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy
import torch
import torch.autograd.forward_ad
from support.awkward import Read, function, lstm_cell, returns_what_it_saved
from support.late_device import LateDevice
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from programs.ops import FUNCTIONS, Chance, State

KERNEL_S = 0.002  # that a late kernel takes to begin
CAPACITY = 128  # rows of the longest batch
# What those that are left out do (count calls, change tensors without a record) has parts and checks of its own.
OPS = (
    "unary", "saved", "binary", "weighted", "norm", "softmax", "dropout", "cast", "viewed", "attention", "custom",
    "autocast", "detached", "complex_", "single", "empty", "inferred", "observed",
)  # fmt: skip


class Part(nn.Module):
    """One piece; its output is of the size of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


def part(**own: Callable[[int], Any]) -> Callable[[Callable[[Any, Tensor], Tensor]], type[Part]]:
    """A decorator: a part from its forward, with attributes of its own, each made for the width."""

    def of_forward(forward: Callable[[Any, Tensor], Tensor]) -> type[Part]:
        def __init__(self: Part, width: int) -> None:
            Part.__init__(self, width)
            for name, make in own.items():
                setattr(self, name, make(width))

        made = {"__init__": __init__, "forward": forward, "__doc__": forward.__doc__}
        return type(forward.__name__, (Part,), made)

    return of_forward


def linear(inputs: int = 1, outputs: int = 1) -> Callable[[int], nn.Module]:
    """Return what makes a layer of so many widths."""
    return lambda width: nn.Linear(inputs * width, outputs * width)


# ---- what networks are usually made of ------------------------------------------------------------------------------


@part(up=linear(1, 2), down=linear(2, 1))
def Mlp(self: Any, x: Tensor) -> Tensor:
    return self.down(functional.gelu(self.up(x)))


@part(up=linear(1, 2), down=linear(2, 1))
def ReluMlp(self: Any, x: Tensor) -> Tensor:
    return self.down(torch.relu_(self.up(x)))


@part(mlp=Mlp)
def Dropout(self: Any, x: Tensor) -> Tensor:
    return functional.dropout(self.mlp(x), 0.2)


@part(qkv=linear(1, 3), out=linear())
def Attention(self: Any, x: Tensor) -> Tensor:
    """Two sequences and heads of 16."""
    heads = self.qkv(x).view(2, x.shape[0] // 2, 3, self.width // 16, 16).permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(*heads.unbind(0))
    return self.out(mixed.transpose(1, 2).reshape(x.shape))


@part(norm=nn.LayerNorm)
def Norm(self: Any, x: Tensor) -> Tensor:
    return self.norm(x)


@part(conv=lambda width: nn.Conv1d(width, width, 3, padding=1))
def Conv(self: Any, x: Tensor) -> Tensor:
    return self.conv(x.t().unsqueeze(0)).squeeze(0).t()


@part(norm=nn.BatchNorm1d)
def BatchNorm(self: Any, x: Tensor) -> Tensor:
    """Statistics in buffers, changed in forward."""
    return self.norm(x)


@part(weight=lambda width: nn.Parameter(torch.randn(width, width) / width**0.5))
def Tied(self: Any, x: Tensor) -> Tensor:
    """One weight and its transpose."""
    return functional.linear(torch.tanh(functional.linear(x, self.weight)), self.weight.t())


class Ops(Part):
    """Three ops of the random chains, in a row; which ones the seed says."""

    def __init__(self, width: int, seed: int = 0) -> None:
        super().__init__(width)
        self.seed, self.state = seed, State((1, width), torch.float32, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        chance, pool = Chance(self.seed), [x, x * self.state.vector]
        for _ in range(3):
            first, second = chance.sample(pool, 2)
            pool.append(FUNCTIONS[chance.choice(OPS)](self.state, chance, first, second))
        return torch.tanh(pool[-1].to(x.dtype))


# ---- in place, and views --------------------------------------------------------------------------------------------


@part()
def InPlace(_: Any, x: Tensor) -> Tensor:
    """Fresh tensors changed before they are saved."""
    h = x * 1.1
    h.add_(0.1).mul_(0.9)
    return torch.relu_(h) * h.sigmoid()


@part()
def ChangesInput(_: Any, x: Tensor) -> Tensor:
    return x.mul_(0.9).sin()


@part(all=linear(1, 4))
def Gates(self: Any, x: Tensor) -> Tensor:
    return lstm_cell(self.all(x), x)


# ---- kinds of tensors -----------------------------------------------------------------------------------------------


@part()
def SliceFirst(_: Any, x: Tensor) -> Tensor:
    """Saves a small slice of an activation before all of it."""
    h = x * 1.1
    return h[:1] * h[:1] + h.sin()


@part(weight=lambda width: nn.Parameter(torch.ones(width)))
def ForwardAd(self: Any, x: Tensor) -> Tensor:
    """A derivative in forward mode, whose rules save zero tensors, which have no storage."""
    ad = torch.autograd.forward_ad
    with ad.dual_level():
        h = ad.make_dual(x * 1.0, torch.ones_like(x)) * (x.sigmoid() * self.weight)
        both = ad.unpack_dual(h.sin())
        return both.primal + 0.5 * both.tangent * self.weight


@part(linear=linear())
def Nested(self: Any, x: Tensor) -> Tensor:
    several = torch.nested.as_nested_tensor([x[: x.shape[0] // 4], x[x.shape[0] // 4 :]])
    h = self.linear(several).relu()
    return torch.cat((h * h * 0.5).unbind())


# ---- functions of the user's own ------------------------------------------------------------------------------------


_doubles = function(lambda a: (a * a, [a.clone()]), lambda grad, read: read()[0].mul_(2).mul_(grad))


@part()
def ReusesBuffer(_: Any, x: Tensor) -> Tensor:
    """A function whose backward changes what it unpacks."""
    return _doubles(x * 0.7)


def rows(width: int, scale: float = 0.01) -> Tensor:
    return torch.randn(CAPACITY, width) * scale


def returning(name: str, held: Callable[[int], Any]) -> type[Part]:
    """A part with a backward that returns what it saved: what the part holds, or has made for it."""

    def forward(self: Any, x: Tensor) -> Tensor:
        constant = self.held if isinstance(self.held, Tensor) else self.held()
        return x + 0.01 * returns_what_it_saved(self.weight, constant).tanh()

    forward.__name__ = name
    return part(weight=lambda width: nn.Parameter(rows(width, 0.1)), held=held)(forward)


ReturnsLeaf = returning("ReturnsLeaf", rows)  # a constant of the module, not registered
ReturnsParameter = returning("ReturnsParameter", lambda width: nn.Parameter(rows(width)))
ReturnsBuffer = returning("ReturnsBuffer", lambda width: nn.Buffer(rows(width)))
ReturnsFresh = returning("ReturnsFresh", lambda width: lambda: torch.full((CAPACITY, width), 0.01))


# ---- more than one stream -------------------------------------------------------------------------------------------

_playing: LateDevice | None = None
_streams: list[Any] = []


@contextmanager
def playing(device: LateDevice | None) -> Iterator[None]:
    """Parts with streams of their own run them on this device; without one, on the host."""
    global _playing
    _playing = device
    _streams[:] = [] if device is None else [device.new_stream() for _ in range(2)]
    try:
        yield
    finally:
        _playing = None
        _streams.clear()


def on_stream(number: int) -> AbstractContextManager[Any]:
    return nullcontext() if _playing is None else _playing.on(_streams[number])


def _read_late(holder: list[Tensor]) -> Tensor:
    """The values as a kernel of the current stream sees them, which runs after the host has let go of the tensor."""
    tensor = holder.pop()
    if _playing is None:
        return tensor.detach().clone()  # the bytes that a kernel reads have no graph
    bytes_of = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    found = torch.empty(bytes_of.numel(), dtype=torch.uint8)
    dtype, view = tensor.dtype, (tensor.shape, tensor.stride(), tensor.storage_offset())
    _playing.launch(lambda memory: (time.sleep(KERNEL_S), found.copy_(memory)), bytes_of)
    del tensor, bytes_of
    _playing.current_stream().synchronize()
    return found.view(dtype).as_strided(*view).clone()


def _written_late(source: Tensor) -> Tensor:
    """The same values, which a kernel on a stream has yet to write."""
    if _playing is None:
        return source.detach().clone(memory_format=torch.contiguous_format)  # as below: sums depend on strides
    wanted = source.contiguous().view(torch.uint8).flatten().clone()
    _playing.launch(lambda: time.sleep(KERNEL_S))
    return _playing.filled(wanted).view(source.dtype).view(source.shape)


def _reading_late(number: int, saved: Callable[[Tensor], Tensor] = lambda a: a) -> Callable[..., Tensor]:
    """A Function whose backward unpacks and reads what it saved while a stream of its own is the current one."""

    def gradient(grad: Tensor, read: Read) -> Tensor:
        with on_stream(number):
            seen = _read_late([*read()])
        return seen * grad

    return function(lambda a: (a * a * 0.5, [saved(a)]), gradient)


_reads_late = [_reading_late(number) for number in range(2)]
_writes_late = _reading_late(1, _written_late)


@part()
def TwoStreams(_: Any, x: Tensor) -> Tensor:
    """One saved storage that two streams of backward read."""
    h = x * 1.1
    return _reads_late[0](h) + _reads_late[1](h)


@part()
def SecondStream(_: Any, x: Tensor) -> Tensor:
    """One saved storage that the usual stream reads first, or last, and another one too."""
    h = x * 1.1
    return h.sin() + _reads_late[0](h) + h.cos() * h


@part()
def LateWriter(_: Any, x: Tensor) -> Tensor:
    """Forward makes on another stream what it saves."""
    with on_stream(1):
        return _writes_late(x)


# ---- what is not the same the second time ---------------------------------------------------------------------------


@part(count=lambda _: 0)
def Counter(self: Any, x: Tensor) -> Tensor:
    """A count in a Python attribute."""
    self.count += 1
    return x.sin() * (1 + 0.1 * (self.count % 7))


@part(mean=torch.zeros)
def RunningMean(self: Any, x: Tensor) -> Tensor:
    """A statistic in a plain attribute, replaced by every forward."""
    self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
    return (x - self.mean).sin() * (1 + self.mean)


@part(memory=lambda width: torch.zeros(1, width))
def Memory(self: Any, x: Tensor) -> Tensor:
    """The last segment, held in an attribute as in Transformer-XL."""
    h = x.sin() * (1 + 0.3 * self.memory.mean(0))
    self.memory = x.detach()
    return h


_tracked: dict[str, Tensor] = {}


@part()
def Tracker(_: Any, x: Tensor) -> Tensor:
    """Random states in a global dict, swapped in and out as in Megatron."""
    before = torch.get_rng_state()
    torch.set_rng_state(_tracked["model-parallel"])
    h = functional.dropout(x.sin(), 0.2)
    _tracked["model-parallel"] = torch.get_rng_state()
    torch.set_rng_state(before)
    return h


@part()
def HooksInput(_: Any, x: Tensor) -> Tensor:
    """Scales the gradient of its input."""
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.5)
    return x.sin()


@part(bias=lambda width: nn.Parameter(torch.zeros(width)))
def RunsBackward(self: Any, x: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        self.bias.mean().backward()
    return x.sin() + self.bias


# ---- the model ------------------------------------------------------------------------------------------------------

USUAL = (Mlp, ReluMlp, Dropout, Attention, Norm, Conv, BatchNorm, Tied)
CHANGES = (InPlace, ChangesInput, Gates, SliceFirst)
KINDS = (ForwardAd, Nested)
OF_USERS = (ReusesBuffer, ReturnsLeaf, ReturnsParameter, ReturnsBuffer, ReturnsFresh)
STREAMS = (TwoStreams, SecondStream, LateWriter)
STATEFUL = (Counter, RunningMean, Memory, Tracker, HooksInput, RunsBackward)
PARTS: dict[str, Callable[..., Part]] = {
    kind.__name__: kind for kind in (Ops, *USUAL, *CHANGES, *KINDS, *OF_USERS, *STREAMS, *STATEFUL)
}


def make_part(name: str, width: int) -> tuple[Part, str]:
    """A part by name; after a slash its seed, after a colon the checkpoint of the user's around it."""
    name, _, around = name.partition(":")
    kind, _, seed = name.partition("/")
    return PARTS[kind](width, *map(int, seed.split())), around


class Block(nn.Module):
    def __init__(self, names: tuple[str, ...], width: int) -> None:
        super().__init__()
        made, self.around = zip(*(make_part(name, width) for name in names), strict=True)
        self.parts = nn.ModuleList(made)
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for part, around in zip(self.parts, self.around, strict=True):
            h = checkpoint(part, h, use_reentrant=around == "reentrant") if around else part(h)
        return x + 0.5 * torch.tanh(self.last(h))


class Failure(Exception):
    """Raised in the middle of a forward, on demand."""


class Net(nn.Module):
    """Stem, blocks, head; returns the loss."""

    def __init__(self, stem: str, blocks: tuple[tuple[str, ...], ...], width: int, tokens: int) -> None:
        super().__init__()
        self.stem = nn.Embedding(tokens, width) if stem == "embedding" else nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(names, width) for names in blocks)
        self.head = nn.Linear(width, 4)
        # Which tensor to hold in ``tapped``: 0 for the stem's output, n for that of the n-th block.
        self.tap: int | None = None
        self.tapped: Tensor | None = None
        self.fails = False  # raise before the head

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate([self.stem, *self.blocks]):
            x = layer(x)
            if number == self.tap:
                self.tapped = x
        if self.fails:
            raise Failure("in forward")
        return self.head(x).square().mean()


@part(line=linear())
def Layer(self: Any, x: Tensor) -> Tensor:
    """Six storages of rows x width, of which two can be made again."""
    y = self.line(x).sin()
    return x + functional.gelu(y * y.tanh())


class Lengths(nn.Module):
    """Layers of several lengths, each told by its part of the rows, in 64ths; returns the loss."""

    def __init__(self, lengths: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in lengths)
        self.lengths = lengths

    def forward(self, x: Tensor) -> Tensor:
        loss = x.new_zeros(())
        for layer, length in zip(self.layers, self.lengths, strict=True):
            rows = max(1, len(x) * length // 64)
            y = layer(x[:rows])
            x = torch.cat([y, x[rows:]])
            loss = loss + y.square().mean()
        return loss


def reset_states(seed: int) -> None:
    """Every random state there is, and those of the tracker."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    _tracked["model-parallel"] = torch.Generator().manual_seed(seed + 1).get_state()


def states() -> dict[str, Any]:
    """The same, to be compared."""
    return {
        "torch's generator": torch.get_rng_state(),
        "Python's generator": random.getstate(),
        "numpy's generator": repr(numpy.random.get_state()),
        "the tracker": _tracked["model-parallel"],
    }
