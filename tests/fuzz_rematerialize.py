"""A fuzz of rematerialization: random programs of cheap ops, with us and without.

    PYTHONPATH=tests python tests/fuzz_rematerialize.py [--draws 1000] [--seed 0] [--shrink]

Each seed draws a program: a list of ops over a pool of tensors, a way of backward, stores, a budget, and sometimes a
surprise that comes in a late step only. It runs for some steps as it is and through a cache that rematerializes. Every
loss and gradient must have the same bits, and every error must come in both or in none; nothing may be left behind.
Exit status 1 means that some draw failed; each is printed with the command that repeats it, and with ``--shrink`` as a
smaller program that fails as well.

[Note: Late changes] An operand that is changed in place in a late step, after its site was proven, may raise
``ActivationModifiedError`` where autograd would not have asked for it. Draws with such a surprise may do so in that
step. What no op has saved, and is changed under ``no_grad`` or through ``data`` in late steps only, nobody can see: it
is not drawn.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import random
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import mark_inputs, storage_bytes
from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.remat.recipe import Recipe
from ds_tba.remat.rules import RULES
from ds_tba.remat.sites import Sites
from ds_tba.remat.store import RematStore
from ds_tba.storage.backends.posix import PosixBackend
from ds_tba.storage.base import Choice, Store
from ds_tba.storage.host import HostStore
from ds_tba.storage.nvme import Lanes, NvmeStore
from ds_tba.storage.staging import StagingRing
from ds_tba.storage.swap_file import SwapFile

LIMIT_S = 60.0  # of a draw
GRAIN = 1 << 15  # elements that one thread of a CPU takes
STEPS = 5
FEW = 32  # elements that may be zero by chance in a first step, in which a change by a factor is not seen
LATE = 3  # the first step with a surprise
MAX_SQUARE = 256  # columns, of a weight that is a square
SHAPES = [
    (3, 17), (17, 3), (1, 1), (4, 8), (8, 64), (1, 4099), (3, 1366), (33, 128), (4099, 1), (12, 36), (0, 5), (2, 40000),
]  # fmt: skip
SHAPE_WEIGHTS = [6, 6, 3, 8, 10, 2, 2, 6, 1, 8, 2, 2]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
DTYPE_WEIGHTS = [6, 4, 1, 1]

# ---- what programs are made of --------------------------------------------------------------------------------------


class Boom(Exception):
    """Raised by the user's code in backward."""


@dataclass
class State:
    """What ops of a program may use beside the pool.

    Attributes:
        calls: of hooks and functions of the user.
        kept: what must live as long as the graph.
    """

    step: int
    is_late: bool
    vector: Tensor
    square: Tensor
    full: Tensor
    scalar: Tensor
    frozen: Tensor
    x: Tensor
    rows: int
    columns: int
    calls: Counter[str]
    may_reenter: bool
    kept: list[Any] = field(default_factory=list)


Op = Callable[[State, random.Random, Tensor, Tensor], Tensor]
OPS: dict[str, Op] = {}
WEIGHTS: dict[str, int] = {}


def op(weight: int = 2) -> Callable[[Op], Op]:
    def add(function: Op) -> Op:
        OPS[function.__name__] = function
        WEIGHTS[function.__name__] = weight
        return function

    return add


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda a: functional.gelu(a, approximate="tanh"),
    "relu": torch.relu,
    "leaky_relu": lambda a: functional.leaky_relu(a, 0.1),
    "elu": functional.elu,
    "selu": functional.selu,
    "hardtanh": functional.hardtanh,
    "relu6": functional.relu6,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "softplus": functional.softplus,
    "mish": functional.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": lambda a: a.clamp(-5, 2).exp(),
    "sqrt": lambda a: (a.abs() * 0.5).sqrt(),
    "rsqrt": lambda a: torch.rsqrt(a.abs().clamp_min(0.1)),
    "reciprocal": lambda a: a.abs().clamp_min(0.5).reciprocal(),
    "log": lambda a: a.abs().clamp_min(0.1).log(),
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "abs": torch.abs,
    "neg": torch.neg,
    "square": lambda a: a.tanh() ** 2,
    "cube": lambda a: torch.pow(a.sigmoid(), 3),
    "root": lambda a: torch.pow(a.sigmoid(), 0.5),
    "clamp": lambda a: a.clamp(-1, 1.5),
    "clamp_max": lambda a: a.clamp(max=1.0),
    "clamp_min": lambda a: a.clamp_min(-0.5),
    "log_sigmoid": functional.logsigmoid,
    "atan": torch.atan,
    "expm1": lambda a: a.tanh().expm1(),
    "log1p": lambda a: a.abs().log1p(),
    "softsign": functional.softsign,
    "twice": lambda a: a * 2.0,
    "half": lambda a: a / 2,
    "shifted": lambda a: a + 0.5,
    "from_one": lambda a: 1 - a,
    "copy": torch.clone,
    "nan_to_num": torch.nan_to_num,
}


@op(weight=30)
def unary(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return UNARY[r.choice(list(UNARY))](a)


@op(weight=16)
def saved(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """The result of one is saved by the next."""
    return UNARY[r.choice(["sin", "silu", "mish", "square", "erf"])](UNARY[r.choice(list(UNARY))](a))


@op(weight=16)
def binary(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    kind = r.choice(
        [
            "mul",
            "div",
            "add",
            "sub",
            "alpha",
            "maximum",
            "minimum",
            "where",
            "fill",
            "lerp",
            "addcmul",
            "glu",
            "mulsin",
            "addsin",
        ]
    )
    if kind == "mul":
        return a * b
    if kind == "div":
        return a / (b.abs() + 1)
    if kind == "add":
        return a + b
    if kind == "sub":
        return torch.sub(a, b, alpha=2)
    if kind == "alpha":
        return torch.add(a, b, alpha=0.3)
    if kind == "maximum":
        return torch.maximum(a, b)
    if kind == "minimum":
        return torch.minimum(a, b)
    if kind == "where":
        return torch.where(a > 0, a, b)
    if kind == "fill":
        return a.masked_fill(b > 1, 0.0)
    if kind == "lerp":
        return torch.lerp(a, b.to(a.dtype), 0.3)
    if kind == "addcmul":
        return torch.addcmul(a, b.to(a.dtype), a, value=0.5)
    if kind == "mulsin":
        return (a * b).sin()
    if kind == "addsin":
        return (a + b).sin()
    return functional.glu(torch.cat([a, b], -1), -1)


@op(weight=6)
def weighted(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    kind = r.randrange(6)
    if kind == 0 and state.columns <= MAX_SQUARE:
        return functional.linear(a, state.square.to(a.dtype), state.vector.to(a.dtype))
    if kind == 1:
        return (a + state.vector).sin()
    if kind == 2:
        return a * state.vector
    if kind == 3:
        return a * state.scalar
    if kind == 4:
        return a - functional.silu(state.full)
    return functional.silu(a * state.frozen)


@op(weight=8)
def norm(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    weight, bias = state.vector.to(a.dtype), state.frozen.to(a.dtype)
    shape, eps = (state.columns,), r.choice([1e-5, 1e-6, 0.1])
    kind = r.randrange(9)
    if kind == 0:
        made = functional.layer_norm(a, shape, weight, bias, eps)
    elif kind == 1:
        made = functional.layer_norm(a, shape, None, None, eps)
    elif kind == 2:
        made = functional.rms_norm(a, shape, weight, r.choice([eps, None]))
    elif kind == 3:
        made = functional.rms_norm(a, shape, None, eps)
    elif kind == 4:
        wide = a.float()
        made = state.vector * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(a.dtype)
    elif kind == 5:
        centered = a - a.mean(-1, keepdim=True)
        made = centered / (centered.pow(2).mean(-1, keepdim=True) + eps).sqrt() * state.vector + state.frozen
    elif kind == 6:
        made = torch.native_layer_norm(a, shape, weight, None, eps)[0]
    elif state.rows * state.columns and state.columns % 2 == 0:
        affine = (weight, r.choice([bias, None, weight, weight]))
        made = functional.group_norm(a.view(state.rows, state.columns, 1), 2, *affine, eps).view_as(a)
    else:
        made = functional.softmax(a, -1)
    return functional.silu(made) if r.random() < 0.5 else made * b


@op(weight=4)
def softmax(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    dtype = r.choice([None, torch.float32])
    made = torch.softmax(a, r.choice([0, 1, -1]), dtype=dtype) if r.random() < 0.8 else torch.log_softmax(a, -1)
    return made * b if r.random() < 0.5 else made.sin() * made


@op(weight=6)
def dropout(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    p = r.choice([0.0, 0.1, 0.5, 1.0])
    made = functional.dropout(a, p) if r.random() < 0.5 else torch.native_dropout(a, p, True)[0]
    return made.sin()


@op(weight=6)
def cast(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    other = a.to(r.choice(DTYPES))
    return (functional.silu(other) * other).to(a.dtype) if r.random() < 0.7 else other.to(a.dtype).sin()


@op(weight=14)
def viewed(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    f = UNARY[r.choice(["silu", "sin", "square", "sigmoid", "gelu", "relu"])]
    rows, columns = a.shape
    g = {
        "exp": lambda v: v.clamp(-2, 2).exp(), "relu": torch.relu, "tanh": torch.tanh, "add": lambda v: v + v.flip(0),
        "sub": lambda v: v - v.sin(), "cast": lambda v: v.double(), "sqrt": lambda v: v.sigmoid().sqrt(),
        "neg": torch.neg,
    }[r.choice(["exp", "relu", "tanh", "add", "sub", "cast", "sqrt", "neg"])]  # fmt: skip
    kind = r.randrange(32)
    if kind >= 20:
        return between(r, f, g, a, b)
    if kind == 0:
        return f(f(a).t()).t() * b
    if kind == 1:
        return f(a.reshape(-1)).view(rows, columns)
    if kind == 2:
        k = columns // 2
        first, second = a[:, :k], a[:, k:]
        return torch.cat([f(first), first.new_zeros(0), f(second) * 2], 1) if k else f(a)
    if kind == 3 and rows:
        return f(a[:1].expand(rows, columns)) * f(b)
    if kind == 4:
        return f(f(a).unsqueeze(0) * b).squeeze(0)
    if kind == 5:
        return f(a.t().contiguous()).t().contiguous() * b
    if kind == 6:
        return f(a.t().reshape(rows, columns)) * a
    if kind == 7 and rows:
        return f(a.select(0, -1)) * f(b)
    if kind == 8 and columns > 1:
        return torch.cat([f(piece) * piece for piece in a.split(columns // 2, 1)], 1)
    if kind == 9 and columns % 2 == 0 and columns:
        left, right = f(a).chunk(2, -1)
        return torch.cat([f(left) * right, f(right)], -1)
    if kind == 10 and 0 < rows < 40:
        return torch.stack([f(f(row)) for row in a.unbind(0)])
    if kind == 11:
        return f(f(a)[None].permute(2, 1, 0) * 2).permute(2, 1, 0)[0]
    if kind == 12 and rows:
        index = torch.tensor([r.randrange(rows) for _ in range(rows)])
        return f(f(a)[index]) * b
    if kind == 13 and rows and columns:
        index = torch.tensor([r.randrange(columns) for _ in range(columns)])
        return f(a[:, index]) * f(b)[torch.arange(rows)[:, None], index]
    if kind == 14:
        return f(torch.roll(a, 1, 0)) * torch.flip(b, (1,))
    if kind == 15 and rows:
        mask = torch.arange(rows) % 2 == 0
        made = f(f(a)[mask]).sum(0)
        return made * a
    if kind == 16:
        return f(f(a).view(rows, 1, columns).expand(rows, 3, columns) * b[:, None]).sum(1)
    if kind == 17:
        return f(f(a).as_strided((columns, rows), (1, columns))).t() if a.is_contiguous() else f(a)
    if kind == 18 and rows and columns:
        return f(f(a).gather(1, torch.zeros(rows, columns, dtype=torch.long))) * b
    return f(f(a)[..., ::2]).sum(-1, keepdim=True) * b


def between(r: random.Random, f: Any, g: Any, a: Tensor, b: Tensor) -> Tensor:
    """Views between ops of which the first saves its input and the second does not."""
    rows, columns = a.shape
    made = f(a) if r.random() < 0.7 else a * b
    kind = r.randrange(14)
    if kind == 0:
        return f(g(made.t())).t() + b
    if kind == 1:
        return f(g(made.transpose(0, 1))).t() + b
    if kind == 2:
        return f(g(made.reshape(-1))).reshape(rows, columns) * b
    if kind == 3:
        return f(g(made[None])).squeeze().view_as(a) * b
    if kind == 4 and rows:
        return f(g(made[:1].expand(rows, columns))) * b
    if kind == 5:
        return f(g(made[None].permute(2, 0, 1)))[:, 0].t() * b
    if kind == 6 and rows:
        return f(g(made[-1])) * b
    if kind == 7 and columns > 1:
        return f(g(made[:, 1::2])).sum(1, keepdim=True) * b
    if kind == 8 and columns > 1:
        return f(g(made.split(columns // 2, -1)[-1])).sum(1, keepdim=True) * b
    if kind == 9 and rows:
        return f(g(made.unbind(0)[-1])) * b
    if kind == 10 and columns:
        return f(g(made[:, :, None].squeeze(2))) + f(g(made[:, :1].squeeze(-1)))[:, None]
    if kind == 11:
        return f(g(made.t().reshape(rows, columns))) * b
    if kind == 12:
        return f(g(made[None].squeeze(0) if r.random() < 0.5 else made[None].squeeze().view_as(a))) * b
    return f(g(functional.glu(torch.cat([made, b], 1), 1))) * a


@op()
def attention(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    if not a.numel() or state.rows > 64 or state.columns > MAX_SQUARE:
        return a
    shape = (1, 1, state.rows, state.columns)
    q, k = (f.to(a.dtype).view(shape) for f in (a.contiguous(), b.contiguous()))
    made = functional.scaled_dot_product_attention(q.sin(), k, k * q)
    return functional.silu(made.view_as(a)) * a


class Saves(Function):
    """Saves its input, its output, or views of them."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, kind: int) -> Tensor:
        made = a.sin()
        views = [a, made, a.t(), a[:1], a.detach(), made.detach(), a.sin()]
        ctx.save_for_backward(a, views[kind])
        ctx.kind = kind
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, other = ctx.saved_tensors
        return grads[0] * a.cos() + other.sum() * 0.01, None


@op(weight=4)
def custom(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    made: Tensor = Saves.apply(UNARY[r.choice(list(UNARY))](a), r.randrange(7))
    return made * b


@op(weight=3)
def checkpointed(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    names = [r.choice(list(UNARY)) for _ in range(3)]
    calls, is_alone = state.calls, state.may_reenter  # not the state: that would close a cycle through the graph

    def block(a: Tensor, b: Tensor) -> Tensor:
        calls["block"] += 1
        for name in names:
            a = UNARY[name](a)
            if is_alone:  # else threads may take random numbers meanwhile
                a = functional.dropout(a, 0.1)
        return a * b

    made: Tensor = checkpoint(block, functional.silu(a), b, use_reentrant=state.may_reenter and r.random() < 0.5)
    return made.sin()


@op(weight=3)
def hooked(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    calls = state.calls

    def pack(tensor: Tensor) -> Any:
        calls["pack"] += 1
        return tensor.detach().clone(), tensor.shape

    def unpack(held: Any) -> Tensor:
        calls["unpack"] += 1
        found: Tensor = held[0]
        return found

    made = UNARY[r.choice(list(UNARY))](a)
    with saved_tensors_hooks(pack, unpack):
        made = UNARY[r.choice(list(UNARY))](made) * b
    return made.sin() * made


@op(weight=3)
def autocast(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", r.choice([torch.bfloat16, torch.float16])):
        made = functional.silu(a)
        if state.columns <= MAX_SQUARE and state.rows:
            made = functional.linear(made.float(), state.square.float()) * b
        made = torch.softmax(made, -1) * functional.gelu(made)
    return made.sin().to(a.dtype)


@op()
def detached(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        still = UNARY[r.choice(list(UNARY))](a) + 1
    return (a * still).sin() + functional.silu(b).detach() * a


@op(weight=4)
def in_place(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """Before what is changed is saved: nothing raises."""
    kind = r.randrange(11)
    if kind in (5, 6, 7) and a.numel() < FEW:
        return a.sin()
    made = functional.silu(a) if kind < 9 else a.neg()
    if r.random() < 0.5:  # else the op would promote, if it were not in place
        b = b.to(made.dtype)
    if kind == 0:
        return made.add_(b).sin()
    if kind == 1:
        return (functional.relu_(made) + b).sin()
    if kind == 2:
        return functional.silu(made, inplace=True).mul(b).sin()
    if kind == 3:
        return made.masked_fill_(b > 0, 0.5).sin() * b
    if kind == 4:
        made[:, : state.columns // 2].copy_(b[:, : state.columns // 2])
        return made.sin()
    if kind == 5:
        with torch.no_grad():
            made.mul_(0.5)
        return made.sin() + (made + b).sin()
    if kind == 6:
        made.data.mul_(0.5)
        return made.sin()
    if kind == 7:
        other = made + b
        with torch.no_grad():
            made.mul_(0.5)
        return (made.sin() + other).cos()
    if kind == 8:
        functional.hardtanh_(made[:1])
        return made * b
    if kind == 9:
        return functional.elu_(made).mul_(2).sin() * b
    made.t().sigmoid_()
    return (made * b).sin()


@op()
def complex_(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    z = torch.complex(a.float(), b.float())
    made = [z * z.conj(), z.exp() * 0.1, (z * 2).sin() * z, torch.view_as_complex(torch.view_as_real(z * z)) + z]
    which = made[r.randrange(4)]
    return (which.real + which.imag.tanh()).to(a.dtype)


@op()
def single(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """Tensors without dimensions."""
    one = a.mean()
    return [
        a * one.sin(),
        a * functional.silu(functional.silu(one)),
        functional.silu(a * state.scalar.sin() + one),
        a * torch.tensor(0.5),
    ][r.randrange(4)]


@op(weight=1)
def empty(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    nothing = UNARY[r.choice(list(UNARY))](a[:0]).sin() * b[:0]
    return a + nothing.sum()


@op(weight=3)
def from_input(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    made = [
        a * state.x,
        (a + state.x).sin(),
        (functional.silu(state.x) * a).sin(),
        functional.silu(state.x.view(-1).view_as(a) * a),
    ]
    return made[r.randrange(4)]


@op(weight=1)
def inferred(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    with torch.inference_mode():
        constant = torch.ones(state.columns) * 0.5
    return (a + constant).sin()


@op(weight=1)
def collected(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    gc.collect()
    return a


@op(weight=1)
def observed(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    made = functional.silu(a)
    if made.requires_grad:
        made.register_hook(lambda grad: grad * 2)
    return made.sin()


@op(weight=2)
def late_op(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return UNARY[r.choice(list(UNARY))](a).sin() if state.is_late else functional.silu(a).sin()


# ---- surprises: at most one a program -------------------------------------------------------------------------------

SURPRISES: dict[str, Op] = {}


def surprise(function: Op) -> Op:
    SURPRISES[function.__name__] = function
    return function


@surprise
def change_saved(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """What an op has saved."""
    made = functional.silu(a)
    used, other = made.sin(), made + b
    state.kept.append(used)
    if state.is_late:
        with torch.no_grad():
            made.mul_(1.5)
    return [used, other.sin(), used * other, (made + b).sin() + used][r.randrange(4)]


@surprise
def change_and_save(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """What is saved after the change only; another op has used it before."""
    made = functional.silu(a)
    other = made + b
    if state.is_late:
        with torch.no_grad():
            made.mul_(1.5)
    used = made.sin()
    state.kept.append(used)
    return other.sin() + used if r.random() < 0.5 else other.sin()


@surprise
def change_result(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """An op's output, before it is saved or after."""
    made = a * b
    before = made.sin() if r.random() < 0.5 else a
    if state.is_late:
        with torch.no_grad():
            made[:1].mul_(1.5)
    return made.sin() + before


@surprise
def change_parameter(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    made = a + state.full
    if state.is_late:
        with torch.no_grad():
            state.full.mul_(1.5)
    return made.sin()


@surprise
def change_mask(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    mask = a > 0
    made = torch.where(mask, a, b)
    if state.is_late:
        mask.logical_not_()
    return made.sin()


@surprise
def change_number(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """A tensor without dimensions."""
    number = torch.tensor(0.5)
    made = a * number
    if state.is_late:
        number.mul_(3)
    return made.sin()


@surprise
def fail(state: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """The user's hook raises in backward."""
    made = functional.silu(a)
    if state.is_late and made.requires_grad:

        def boom(grad: Tensor) -> None:
            raise Boom

        made.register_hook(boom)
    return made.sin()


# ---- a program ------------------------------------------------------------------------------------------------------

BACKWARDS = [
    "plain", "plain", "plain", "retained", "two losses", "of a part", "inputs", "double", "double inside", "dropped",
    "two forwards", "threads", "again", "other threads", "other thread", "accumulated",
]  # fmt: skip
WHOLE = {"plain", "retained", "two losses", "dropped", "two forwards", "other threads", "accumulated"}
"""In which a reentrant checkpoint works."""


@dataclass(frozen=True)
class Line:
    """One op, with the places of its arguments in the pool."""

    name: str
    seed: int
    first: int
    second: int


@dataclass(frozen=True)
class Program:
    """A draw.

    Attributes:
        losses: of two losses, the places of what they sum.
        stores: "nvme", "host"; none to keep.
        budget_bytes: of saved tensors; None for none.
        refills: the input is refilled behind autograd's back between forwards.
    """

    seed: int
    shape: tuple[int, int]
    dtype: torch.dtype
    lines: tuple[Line, ...]
    losses: tuple[tuple[int, ...], tuple[int, ...]]
    backward: str
    stores: tuple[str, ...]
    min_bytes: int
    budget_bytes: int | None
    mixes: bool
    threads: int
    refills: bool
    freezes: bool

    @property
    def may_raise_more(self) -> bool:
        """See [Note: Late changes]."""
        return any(line.name.startswith("change_") for line in self.lines)

    @property
    def may_reenter(self) -> bool:
        """A reentrant checkpoint works, and PyTorch leaves nothing of it behind, as it does after errors."""
        names = {line.name for line in self.lines}
        return self.backward in WHOLE and not names & set(SURPRISES)

    def describe(self) -> str:
        ops = "\n".join(
            f"    {place + 3}: {line.name}[{line.seed}]({line.first}, {line.second})"
            for place, line in enumerate(self.lines)
        )
        return (
            f"seed {self.seed}: {self.shape} {self.dtype}, backward {self.backward!r}, stores {self.stores}, "
            f"min_bytes {self.min_bytes}, budget {self.budget_bytes}, mixes {self.mixes}, threads {self.threads}, "
            f"refills {self.refills}, freezes {self.freezes}, losses {self.losses}\n{ops}"
        )


def draw(seed: int) -> Program:
    r = random.Random(seed)
    lines: list[Line] = []
    names = list(OPS)
    weights = [WEIGHTS[name] for name in names]
    late = r.choice(list(SURPRISES)) if r.random() < 0.4 else ""
    count = r.randint(2, 14)
    when = r.randrange(count)
    for place in range(count):
        name = late if late and place == when else r.choices(names, weights)[0]
        size = place + 3
        first, second = (size - 1 - min(int(r.expovariate(0.5)), size - 1) for _ in range(2))
        lines.append(Line(name, r.randrange(1 << 30), first, second))
    last = count + 2
    some = tuple({r.randrange(last + 1) for _ in range(2)})
    stores = r.choice([(), (), (), ("nvme",), ("host",), ("nvme", "host"), ("host", "nvme")])
    shape = r.choices(SHAPES, SHAPE_WEIGHTS)[0]
    return Program(
        seed=seed,
        shape=shape,
        dtype=r.choices(DTYPES, DTYPE_WEIGHTS)[0],
        lines=tuple(lines),
        losses=((last, *some), (r.randrange(last + 1),)),
        backward=r.choice(BACKWARDS),
        stores=stores,
        min_bytes=r.choice([1, 1, 64, 1024]),
        budget_bytes=r.choice([None, None, 0, 1 << 12, 1 << 15]),
        mixes=r.random() < 0.4,
        threads=r.choice([1, 2, 3]) if shape[0] * shape[1] > GRAIN else 1,
        refills=r.random() < 0.3 and not stores,
        freezes=r.random() < 0.3,
    )


def smaller(program: Program) -> Iterator[Program]:
    """Programs with a line less, or without something else."""
    for place in reversed(range(len(program.lines))):
        gone = place + 3

        def moved(index: int, first: int, gone: int = gone) -> int:
            return first if index == gone else index - (index > gone)

        first = program.lines[place].first
        lines = tuple(
            replace(line, first=moved(line.first, first), second=moved(line.second, first))
            for number, line in enumerate(program.lines)
            if number != place
        )
        one, two = (tuple(moved(index, first) for index in loss) for loss in program.losses)
        yield replace(program, lines=lines, losses=(one, two))
    for changes in (
        {"backward": "plain"}, {"stores": ()}, {"budget_bytes": None}, {"mixes": False}, {"threads": 1},
        {"refills": False}, {"freezes": False}, {"shape": (4, 8)}, {"dtype": torch.float32}, {"min_bytes": 1},
    ):  # fmt: skip
        fewer = replace(program, **changes)  # type: ignore[arg-type]
        if fewer != program:
            yield fewer
    for number in (0, 1):
        if len(program.losses[number]) > 1:
            for index in range(len(program.losses[number])):
                losses = list(program.losses)
                losses[number] = tuple(one for place, one in enumerate(losses[number]) if place != index)
                yield replace(program, losses=tuple(losses))  # type: ignore[arg-type]


# ---- running one ----------------------------------------------------------------------------------------------------

Result = list[Any]


class Drawn:
    """A policy that draws anew for each storage."""

    def __init__(self, stores: Sequence[Store[Any]], seed: int) -> None:
        self._stores, self._random = tuple(stores), random.Random(seed)

    def choose(self, key: Any, nbytes: int) -> Choice:
        stores = tuple(self._random.sample(self._stores, self._random.randint(0, len(self._stores))))
        return Choice(stores, True, "drawn", self._random.random() < 0.8)


class Run:
    """The steps of a program, through a cache or without."""

    def __init__(self, program: Program, cache: TensorCache | None, stores: Sequence[Store[Any]] = ()) -> None:
        self.program = program
        self.cache = cache
        self.calls: Counter[str] = Counter()
        self.results: list[Result] = []
        self._stores = stores
        rows, columns = program.shape
        generator = torch.Generator().manual_seed(program.seed)

        def parameter(*shape: int, scale: float = 1.0) -> torch.nn.Parameter:
            values = torch.randn(shape, generator=generator) * scale
            return torch.nn.Parameter(values.to(program.dtype))

        width = columns if columns <= MAX_SQUARE else 1
        self.vector, self.full, self.scalar = parameter(columns), parameter(rows, columns), parameter()
        self.square = parameter(width, width, scale=width**-0.5)
        self.parameters = [self.vector, self.full, self.scalar, self.square]
        frozen = torch.zeros if program.freezes else torch.ones
        self.frozen = torch.nn.Parameter(frozen(columns, dtype=program.dtype), requires_grad=False)
        self._numbers = numpy.zeros((rows, columns), dtype=numpy.float32)
        self._generator = generator

    def run(self) -> None:
        """In a thread of its own: what an error in backward left in the thread's queue goes with the thread."""
        worker = threading.Thread(target=self._run)
        worker.start()
        worker.join()

    def _run(self) -> None:
        torch.set_num_threads(self.program.threads)
        for step in range(STEPS):
            torch.manual_seed(step)
            if step == LATE:
                with torch.no_grad():
                    self.frozen.add_(0.5)
            result: Result = []
            self.results.append(result)
            try:
                getattr(self, "_" + self.program.backward.replace(" ", "_"))(step, result)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must come in both
                result.append(kind_of(error))
                del error
            with torch.no_grad():
                for one in self.parameters:
                    if one.grad is not None:
                        one.add_(one.grad.nan_to_num(0, 0, 0).clamp(-1, 1), alpha=-0.1)
            self._zero()

    # ---- ways of backward -------------------------------------------------------------------------------------------

    def _plain(self, step: int, result: Result) -> None:
        first, _ = self._forward(step, result)
        first.backward()
        self._note(result)

    def _accumulated(self, step: int, result: Result) -> None:
        for _ in range(2):
            self._plain(step, result)

    def _retained(self, step: int, result: Result) -> None:
        first, _ = self._forward(step, result)
        first.backward(retain_graph=True)
        self._note(result)
        first.backward()
        self._note(result)

    def _two_losses(self, step: int, result: Result) -> None:
        first, second = self._forward(step, result)
        first.backward(retain_graph=True)
        self._note(result)
        second.backward()
        self._note(result)

    def _again(self, step: int, result: Result) -> None:
        """A second backward of a graph that was freed, or of what it shares with another."""
        first, second = self._forward(step, result)
        first.backward()
        self._note(result)
        if step % 2:
            second.backward()
            self._note(result)

    def _of_a_part(self, step: int, result: Result) -> None:
        first, second = self._forward(step, result)
        result.append(
            [bits(one) for one in torch.autograd.grad(first, [self.vector], retain_graph=True, allow_unused=True)]
        )
        result.append([bits(one) for one in torch.autograd.grad(second, [self.full], allow_unused=True)])
        first.backward()
        self._note(result)

    def _inputs(self, step: int, result: Result) -> None:
        first, _ = self._forward(step, result)
        first.backward(inputs=[self.vector, self.full], retain_graph=True)
        self._note(result)
        first.backward(inputs=[self.scalar])
        self._note(result)

    def _double(self, step: int, result: Result) -> None:
        first, _ = self._forward(step, result)
        self._second_order(first, result)

    def _double_inside(self, step: int, result: Result) -> None:
        with self._saving(step):
            first, _ = self._forward(step, result, opens=False)
            self._second_order(first, result)

    def _second_order(self, loss: Tensor, result: Result) -> None:
        parameters = self.parameters
        grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        result.append([bits(one) for one in grads])
        total = sum((one.float() ** 2).sum() for one in grads if one is not None and one.requires_grad)
        if isinstance(total, Tensor):
            total.backward()
            self._note(result)

    def _dropped(self, step: int, result: Result) -> None:
        self._forward(step, result)
        if step % 2:
            self._plain(step, result)

    def _two_forwards(self, step: int, result: Result) -> None:
        one, _ = self._forward(step, result)
        two, _ = self._forward(step, result)
        for loss in (two, one) if step % 2 else (one, two):
            loss.backward()
            self._note(result)

    def _threads(self, step: int, result: Result) -> None:
        """Backwards of several graphs at once."""
        losses = [self._forward(step, result)[0] for _ in range(3)]
        found: list[Any] = [None] * len(losses)

        def backward(place: int) -> None:
            try:
                grads = torch.autograd.grad(losses[place], self.parameters, allow_unused=True)
                found[place] = [bits(one) for one in grads]
            except Exception as error:  # noqa: BLE001 - whatever it is, it must come in both
                found[place] = kind_of(error)

        workers = [threading.Thread(target=backward, args=(place,)) for place in range(len(losses))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        result += found

    def _other_thread(self, step: int, result: Result) -> None:
        """Two losses over one trunk, in two threads at once."""
        first, second = self._forward(step, result)
        found: list[Any] = [None, None]

        def backward(place: int) -> None:
            try:
                loss = (first, second)[place]
                grads = torch.autograd.grad(loss, self.parameters, allow_unused=True, retain_graph=True)
                found[place] = [bits(one) for one in grads]
            except Exception as error:  # noqa: BLE001 - whatever it is, it must come in both
                found[place] = kind_of(error)

        workers = [threading.Thread(target=backward, args=(place,)) for place in (0, 1)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        result += found

    def _other_threads(self, step: int, result: Result) -> None:
        first, _ = self._forward(step, result)
        present = torch.get_num_threads()
        torch.set_num_threads(3 - min(present, 2))
        try:
            first.backward()
        finally:
            torch.set_num_threads(present)
        self._note(result)

    # ---- parts of a step --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        if self.cache is None:
            yield
            return
        policy = Drawn(self._stores, self.program.seed + step) if self.program.mixes else None
        with self.cache.saving(policy):
            yield

    def _forward(self, step: int, result: Result, *, opens: bool = True) -> tuple[Tensor, Tensor]:
        x = self._input()
        mark_inputs(x)
        with self._saving(step) if opens else contextlib.nullcontext():
            losses = self._model(step, x)
        result.append([bits(loss) for loss in losses])
        return losses

    def _input(self) -> Tensor:
        values = torch.randn(*self.program.shape, generator=self._generator)
        if not self.program.refills:
            return values.to(self.program.dtype)
        self._numbers[...] = values.numpy()
        return torch.from_numpy(self._numbers)

    def _model(self, step: int, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = self.program.shape
        state = State(step, step == LATE, self.vector, self.square, self.full, self.scalar, self.frozen, x, rows,
                      columns, self.calls, self.program.may_reenter)  # fmt: skip
        pool = [self.full * x, (self.full + self.vector).to(self.program.dtype), torch.tanh(x * self.vector)]
        for line in self.program.lines:
            function = OPS.get(line.name) or SURPRISES[line.name]
            made = function(state, random.Random(line.seed), pool[line.first], pool[line.second])
            pool.append(made)
        coefficients = [0.3 + 0.1 * place for place in range(8)]
        one, two = (
            sum((pool[index].float() * coefficients[place]).mean() for place, index in enumerate(loss))
            for loss in self.program.losses
        )
        assert isinstance(one, Tensor) and isinstance(two, Tensor)
        one = one + sum(parameter.float().sum() * 0 for parameter in self.parameters)
        two = two + self.full.float().sum() * 0
        return one, two

    def _note(self, result: Result) -> None:
        result.append([bits(one.grad) for one in self.parameters])

    def _zero(self) -> None:
        for one in self.parameters:
            one.grad = None


ERRORS = {"boom", "modified", "freed", "no derivative"}


def bits(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    still = tensor.detach().clone(memory_format=torch.contiguous_format)
    return str(tensor.dtype), tuple(tensor.shape), storage_bytes(still).numpy().tobytes()


def kind_of(error: BaseException) -> str:
    """The same for the same situation."""
    text = str(error)
    if isinstance(error, Boom):
        return "boom"
    if "modified by an inplace operation" in text:
        return "modified"
    if "backward through the graph a second time" in text or "after they have already been freed" in text:
        return "freed"
    if text.startswith("derivative for"):
        return "no derivative"
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


# ---- comparing ------------------------------------------------------------------------------------------------------

NAMES = {rule.make: name for name, rule in RULES.items()}


@dataclass
class Tally:
    """What was exercised.

    Attributes:
        nbytes: made again, by op.
        rules: how often each was used once its site was proven.
    """

    draws: int = 0
    nbytes: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    proven: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    finite: int = 0

    def __str__(self) -> str:
        def lines(counter: Counter[str]) -> str:
            return "\n".join(f"    {count:>12} {name}" for name, count in counter.most_common())

        missing = sorted(set(NAMES.values()) - set(self.rules) - NEVER_MADE)
        return (
            f"{self.draws} draws, {self.finite} with finite losses only\n  bytes made again:\n{lines(self.nbytes)}\n"
            f"  rules used: {len(self.rules)} of {len(USABLE)}, not {', '.join(missing) or 'left out any'}\n"
            f"  sites proven:\n{lines(self.proven)}\n  refused:\n{lines(self.refused)}\n"
            f"  errors, in both:\n{lines(self.errors)}"
        )


# Its own result is held; and an op that a CPU's rms_norm is not made of.
NEVER_MADE = {name for name, rule in RULES.items() if not rule.operands} | {"FusedRmsNormBackward0"}
USABLE = set(RULES) - NEVER_MADE


class CountingSites(Sites):
    """Counts what is made."""

    def __init__(self, cache: Any, accelerator: Any, tally: Tally) -> None:
        super().__init__(cache, accelerator)
        self._tally = tally

    def make(self, recipe: Recipe) -> Tensor:
        made = super().make(recipe)
        self._tally.nbytes[recipe.site.op] += made.numel()
        for one in recipe.steps:
            self._tally.rules[NAMES[one.rule.make]] += 1
        return made


class Stores:
    """One store of each kind, for all draws."""

    def __init__(self, directory: str) -> None:
        backend = PosixBackend()
        file = SwapFile(Path(directory), 64 << 20)
        ring = StagingRing(CpuAccelerator(), backend, 16 << 20)
        self.nvme = NvmeStore([file], backend, ring, Lanes(1, 1), "full")
        self.host = HostStore(CpuAccelerator(), 16 << 20)

    def named(self, names: Sequence[str]) -> list[Store[Any]]:
        return [getattr(self, name) for name in names]

    def held(self) -> dict[str, int]:
        self.nvme.settle()
        self.host.settle()
        return {
            "bytes of staging": self.nvme.ring.slots.used_bytes,
            "bytes of extents": sum(path.extents.used_bytes for path in self.nvme.paths),
            "bytes of the host": sum(segment.spans.used_bytes for segment in self.host._segments),
        }

    def close(self) -> None:
        self.nvme.close()
        self.host.close()


@dataclass(frozen=True)
class Failure:
    kind: str
    text: str


def check(program: Program, stores: Stores, tally: Tally) -> list[Failure]:
    """Run a program in both ways; what is wrong."""
    present = torch.get_num_threads()
    torch.set_num_threads(program.threads)
    try:
        return _check(program, stores, tally)
    finally:
        torch.set_num_threads(present)


def _check(program: Program, stores: Stores, tally: Tally) -> list[Failure]:
    plain = Run(program, None)
    plain.run()
    used = stores.named(program.stores)
    cache = TensorCache(used, "cpu", program.min_bytes, wait_for_staging=True)
    sites = CountingSites(cache, CpuAccelerator(), tally)
    cache.rematerialize(RematStore(cache, sites))
    cache.limit_resident(program.budget_bytes)
    ours = Run(program, cache, used)
    ours.run()
    failures = list(_differences(program, plain, ours))
    for name, count in ours.calls.items():
        if count > plain.calls[name]:
            failures.append(Failure("calls", f"{name}: {count} instead of {plain.calls[name]}"))
    failures += [
        Failure("program", one)
        for result in plain.results
        for one in result
        if isinstance(one, str) and one not in ERRORS
    ]
    tally.draws += 1
    summary = sites.summary()
    tally.proven += Counter(summary["rematerialized_sites"])
    tally.refused += Counter(summary["refused_sites"])
    tally.errors += Counter(one for result in plain.results for one in result if isinstance(one, str))
    tally.finite += not any(is_infinite(one) for result in plain.results for one in result)
    del plain, ours
    gc.collect()
    left = settled(lambda: left_in(cache, stores))
    return failures + ([Failure("left", left)] if left else [])


def left_in(cache: TensorCache, stores: Stores) -> str:
    """What is still held or counted."""
    cache.settle()
    held = {
        "records": cache.live_records,
        "bytes resident in the count": cache.stats.resident.now,
        "bytes saved in the count": cache.stats.saved.now,
        **stores.held(),
    }
    return ", ".join(f"{count} {name}" for name, count in held.items() if count)


def settled(look: Callable[[], str]) -> str:
    """What is left once all that is under way is done: writes, and the ends of threads."""
    end_s = time.monotonic() + 1
    while True:
        text = look()
        if not text or time.monotonic() > end_s:
            return text
        time.sleep(0.001)


def is_infinite(result: Any) -> bool:
    if not isinstance(result, list) or result[0] is None or result[0][0] != "torch.float32" or result[0][1]:
        return False
    return not numpy.isfinite(numpy.frombuffer(result[0][2], dtype=numpy.float32)).all()


def _differences(program: Program, plain: Run, ours: Run) -> Iterator[Failure]:
    names = ["vector", "full", "scalar", "square"]
    for step, (expected, found) in enumerate(zip(plain.results, ours.results, strict=True)):
        if expected == found:
            continue
        place = next(
            (one for one, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
            min(len(expected), len(found)),
        )
        a, b = ((some[place : place + 1] or ["nothing"])[0] for some in (expected, found))
        if b == "modified" and a != b and step == LATE and program.may_raise_more:
            return  # what comes after is not comparable: the parameters are others
        if isinstance(a, str) or isinstance(b, str):
            a, b = (one if isinstance(one, str) else "no error" for one in (a, b))
            yield Failure("error", f"step {step}, {place}: {b} instead of {a}")
        else:
            where = [name for name, one, two in zip(names, a, b, strict=False) if one != two]
            yield Failure("difference", f"step {step}, {place} of {len(expected)}: {where}")
        return


# ---- the command ----------------------------------------------------------------------------------------------------


def shrink(program: Program, stores: Stores, kinds: set[str]) -> Program:
    """A smaller program that fails in one of the same ways."""
    while True:
        for fewer in smaller(program):
            if kinds & {one.kind for one in check(fewer, stores, Tally())}:
                program = fewer
                break
        else:
            return program


WARM_UP = Program(
    seed=0, shape=(4, 8), dtype=torch.float32, lines=tuple(Line("checkpointed", seed, 0, 1) for seed in range(4)),
    losses=((6,), (5,)), backward="plain", stores=(), min_bytes=1, budget_bytes=None, mixes=False, threads=1,
    refills=False, freezes=False,
)  # fmt: skip


@contextlib.contextmanager
def drawing(directory: str | None = None) -> Iterator[Stores]:
    """What all draws of a process share; the collector leaves alone what is there before."""
    with tempfile.TemporaryDirectory(dir=directory) as own, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stores = Stores(own)
        check(WARM_UP, stores, Tally())  # torch imports some modules late
        gc.collect()
        gc.freeze()
        try:
            yield stores
        finally:
            gc.unfreeze()
            stores.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--nvme_path", help="a directory on a drive; a temporary one by default")
    parser.add_argument("--describe", action="store_true", help="print the programs, and run none")
    parser.add_argument("--shrink", action="store_true", help="make each program that fails smaller")
    parser.add_argument("--stop", type=int, default=20, help="after so many failures")
    options = parser.parse_args(argv)
    seeds = range(options.seed, options.seed + options.draws)
    if options.describe:
        print("\n".join(draw(seed).describe() for seed in seeds))
        return 0
    torch.set_num_threads(1)
    faulthandler.enable()
    failed, tally, started_s = [], Tally(), time.monotonic()
    with drawing(options.nvme_path) as stores:
        for seed in seeds:
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            program = draw(seed)
            failures = check(program, stores, tally)
            faulthandler.cancel_dump_traceback_later()
            if not failures:
                continue
            failed.append(seed)
            if options.shrink:
                program = shrink(program, stores, {one.kind for one in failures})
                failures += check(program, stores, Tally())
            text = "\n".join(f"  {one.kind}: {one.text}" for one in failures)
            print(
                f"{program.describe()}\n{text}\n  again: PYTHONPATH=tests python tests/fuzz_rematerialize.py "
                f"--draws 1 --seed {seed} --shrink",
                flush=True,
            )
            if len(failed) >= options.stop:
                break
    print(f"{tally}\n{tally.draws} draws in {time.monotonic() - started_s:.0f} s; failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
