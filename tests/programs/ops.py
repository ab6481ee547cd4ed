"""The ops that chains are made of (``chains.py``): a table for each kind, with the weight of each op in a draw."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from support.awkward import Read, function
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

FEW = 32  # elements that may be zero by chance in a first step, in which a change by a factor is not seen
MAX_SQUARE = 256  # columns, of a weight that is a square
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]


class Boom(Exception):
    """Raised by the user's code in backward."""


class Chance(random.Random):
    """Draws, also among functions."""

    def one_of(self, *ways: Callable[[], Tensor]) -> Tensor:
        """Go one of these ways."""
        return self.choice(ways)()

    def value(self, of: dict[str, Any]) -> Any:
        return self.choice([*of.values()])

    def weighed(self, weights: dict[Any, int]) -> Any:
        return self.choices([*weights], [*weights.values()])[0]


class State(nn.Module):
    """Tensors and tables that ops of a chain may use beside the pool."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, frozen: float) -> None:
        super().__init__()
        self.columns = shape[1]

        def parameter(*shape: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter((torch.randn(shape) * scale).to(dtype))

        width = self.columns if self.columns <= MAX_SQUARE else 1
        self.vector, self.full, self.scalar = parameter(self.columns), parameter(*shape), parameter()
        self.square = parameter(width, width, scale=width**-0.5)
        self.zeros, self.ones = nn.Parameter(torch.zeros(self.columns)), nn.Parameter(torch.ones(self.columns))
        self.zero = nn.Parameter(torch.zeros(shape))
        # A row without a gradient.
        self.frozen = nn.Parameter(torch.full((self.columns,), frozen, dtype=dtype), requires_grad=False)
        self.is_late = self.may_reenter = False  # late changes happen in this step; a reentrant checkpoint works
        self.x: Any = None  # the input of the step
        self.calls: Counter[str] = Counter()  # how often hooks and functions of the user were called
        self.carried: dict[int, Tensor] = {}  # what lines have left for their next step, by place
        self.logged: list[tuple[Tensor, Tensor]] = []  # statistics with the tensors that they are of
        self.place = 0  # the line under way
        self.kept: list[Any] = []  # what must live to the end of the forward

    def linear(self, a: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return a product with the square, where that is as wide as the pool."""
        bias = None if bias is None else bias.to(a.dtype)
        return functional.linear(a, self.square.to(a.dtype), bias) if self.columns <= MAX_SQUARE else a


def changed(tensor: Tensor, factor: float = 1.5) -> Tensor:
    """Change a tensor without a record of autograd's, but for its version."""
    with torch.no_grad():
        return tensor.mul_(factor)


Op = Callable[[State, Chance, Tensor, Tensor], Tensor]


# ---- ops of cheap programs -----------------------------------------------------------------------------------------


# All but the last have a rule. What that takes and gives is saved, as of everything else in PyTorch.
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda a: functional.gelu(a, approximate="tanh"),
    "relu": torch.relu,
    "softplus": functional.softplus,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": lambda a: a.clamp(-5, 2).exp(),
    "rsqrt": lambda a: torch.rsqrt(a.abs().clamp_min(0.1)),
    "sin": torch.sin,
    "neg": torch.neg,
    "square": lambda a: a.tanh() ** 2,
    "cube": lambda a: torch.pow(a.sigmoid(), 3),
    "root": lambda a: torch.pow(a.sigmoid(), 0.5),
    "clamp": lambda a: a.clamp(-1, 1.5),
    "clamp_max": lambda a: a.clamp(max=1.0),
    "clamp_min": lambda a: a.clamp_min(-0.5),
    "twice": lambda a: a * 2.0,
    "half": lambda a: a / 2,
    "shifted": lambda a: a + 0.5,
    "from_one": lambda a: 1 - a,
    "copy": torch.clone,
    "log1p": lambda a: a.abs().log1p(),
}
WIDER: dict[str, Callable[[Tensor], Tensor]] = {
    "wide": lambda a: a.float(),
    "doubled": lambda a: a + a,
    "mirrored": lambda a: a + a.flip(0),
    "less_sine": lambda a: a - a.sin(),
    "root_of_part": lambda a: a.sigmoid().sqrt(),
}
# Most of them do not save what they take.
UNSAVING = ("relu", "tanh", "sigmoid", "exp", "neg", "rsqrt", "softplus", *WIDER)


def unsaving(r: Chance, a: Tensor) -> Tensor:
    return (UNARY | WIDER)[r.choice(UNSAVING)](a)


def unary(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    return r.value(UNARY)(a)


def saved(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    """The result of one is saved by the next."""
    inner = r.choice(["copy", "neg", "half", "shifted", *UNARY])
    return UNARY[r.choice(["sin", "silu", "gelu", "square", "relu"])](UNARY[inner](a))


BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / (b.abs() + 1),
    "add": lambda a, b: a + b,
    "sub": lambda a, b: torch.sub(a, b, alpha=2),
    "alpha": lambda a, b: torch.add(a, b, alpha=0.3),
    "fill": lambda a, b: a.masked_fill(b > 1, 0.0),
    "lerp": lambda a, b: torch.lerp(a, b.to(a.dtype), 0.3),
    "glu": lambda a, b: functional.glu(torch.cat([a, b], -1), -1),
    "mulsin": lambda a, b: (a * b).sin(),
    "addsin": lambda a, b: (a + b).sin(),
}


def binary(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    return r.value(BINARY)(a, b)


def weighted(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    return r.one_of(
        lambda: state.linear(a, state.vector),
        lambda: (a + state.vector).sin(),
        lambda: a * state.vector,
        lambda: a * state.scalar,
        lambda: a - functional.silu(state.full),
        lambda: functional.silu(a * state.frozen),
    )


def norm(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    weight, bias = state.vector.to(a.dtype), state.frozen.to(a.dtype)
    shape, eps = (state.columns,), r.choice([1e-5, 1e-6, 0.1])
    wide, centered = a.float(), a - a.mean(-1, keepdim=True)

    def grouped() -> Tensor:
        if a.numel() == 0 or state.columns % 2:
            return functional.softmax(a, -1)
        affine = (weight, r.choice([bias, None, weight, weight]))
        return functional.group_norm(a.view(*a.shape, 1), 2, *affine, eps).view_as(a)

    made = r.one_of(
        lambda: functional.layer_norm(a, shape, weight, bias, eps),
        lambda: functional.layer_norm(a, shape, None, None, eps),
        lambda: functional.rms_norm(a, shape, weight, r.choice([eps, None])),
        lambda: functional.rms_norm(a, shape, None, eps),
        lambda: state.vector * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(a.dtype),
        lambda: centered / (centered.pow(2).mean(-1, keepdim=True) + eps).sqrt() * state.vector + state.frozen,
        lambda: torch.native_layer_norm(a, shape, weight, None, eps)[0],
        grouped,
        grouped,
    )
    return functional.silu(made) if r.random() < 0.5 else made * b


def softmax(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    dtype = r.choice([None, torch.float32])
    made = torch.softmax(a, r.choice([0, 1, -1]), dtype=dtype) if r.random() < 0.8 else torch.log_softmax(a, -1)
    return made * b if r.random() < 0.5 else made.sin() * made


def dropout(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    p = r.choice([0.0, 0.1, 0.5, 1.0])
    made = functional.dropout(a, p) if r.random() < 0.5 else torch.native_dropout(a, p, True)[0]
    return made.sin()


def cast(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    other = a.to(r.choice(DTYPES))
    return (functional.silu(other) * other).to(a.dtype) if r.random() < 0.7 else other.to(a.dtype).sin()


def places(r: Chance, count: int) -> Tensor:
    return torch.tensor([r.randrange(count) for _ in range(count)])


def as_it_is(v: Tensor) -> Tensor:
    return v


def turned(v: Tensor) -> Tensor:
    return v.t()


def summed(v: Tensor) -> Tensor:
    return v.sum(-1, keepdim=True)


# A view of a matrix or a choice of its elements, and the way back to what can be multiplied by the whole.
VIEWS: list[tuple[Callable[[Chance, Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (lambda _, v: v.t(), turned),
    (lambda _, v: v.transpose(0, 1), turned),
    (lambda _, v: v.reshape(-1), torch.mean),
    (lambda _, v: v.t().contiguous(), lambda v: v.t().contiguous()),
    (lambda _, v: v.t().reshape(v.shape), as_it_is),
    (lambda _, v: v.as_strided(v.t().shape, (1, v.shape[1])) if v.is_contiguous() else v.t(), turned),
    (lambda _, v: v.unsqueeze(0), lambda v: v.squeeze(0)),
    (lambda _, v: v[None].squeeze().view_as(v), as_it_is),
    (lambda _, v: v[:, :, None].squeeze(2), as_it_is),
    (lambda _, v: v[:, :1].squeeze(-1), lambda v: v[:, None]),
    (lambda _, v: v[None].permute(2, 1, 0), lambda v: v.permute(2, 1, 0)[0]),
    (lambda _, v: v[None].permute(2, 0, 1), lambda v: v[:, 0].t()),
    (lambda _, v: v[:1].expand_as(v), as_it_is),
    (lambda _, v: v[:, None].expand(-1, 3, -1), lambda v: v.sum(1)),
    (lambda _, v: v[-1], as_it_is),
    (lambda _, v: v.unbind(0)[-1], as_it_is),
    (lambda _, v: v[:, 1::2], summed),
    (lambda _, v: v[..., ::2], summed),
    (lambda _, v: v.split(v.shape[1] // 2 or 1, -1)[-1], summed),
    (lambda r, v: v[places(r, v.shape[0])], as_it_is),
    (lambda r, v: v[:, places(r, v.shape[1])], as_it_is),
    (lambda r, v: v[torch.arange(v.shape[0])[:, None], places(r, v.shape[1])], as_it_is),
    (lambda _, v: v[torch.arange(v.shape[0]) % 2 == 0], lambda v: v.sum(0)),
    (lambda _, v: v.gather(1, torch.zeros(v.shape, dtype=torch.long)), as_it_is),
    (lambda _, v: torch.roll(v, 1, 0).flip(1), as_it_is),
    (lambda _, v: functional.glu(torch.cat([v, v.flip(1)], 1), 1), as_it_is),
]


def viewed(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    """A view between two ops, of which the second saves what it takes, or the third; or several views side by side."""
    save = UNARY[r.choice(["silu", "sin", "square", "sigmoid", "gelu", "relu"])]
    made = r.one_of(lambda: a, lambda: save(a), lambda: a * b)
    if not a.numel():
        return save(made.reshape(-1)).view_as(a) * b
    if r.random() < 0.2:
        half = state.columns // 2 or 1
        several = r.choice([made.split(half, 1), made.chunk(2, -1), (made[:, :half], made[:, half:], made[:, :0])])
        return torch.cat([save(one) * one for one in several], 1) * b
    there, back = r.choice(VIEWS)
    seen = there(r, made)
    before = r.one_of(lambda: seen, lambda: unsaving(r, seen), lambda: unsaving(r, seen).double())
    seen = back(save(before)).to(a.dtype)
    return seen + b if r.random() < 0.2 else seen * b


def attention(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    if not a.numel() or a.shape[0] > 64 or state.columns > MAX_SQUARE:
        return a
    shape = (1, 1, *a.shape)
    q, k = (f.to(a.dtype).view(shape) for f in (a.contiguous(), b.contiguous()))
    made = functional.scaled_dot_product_attention(q.sin(), k, k * q)
    return functional.silu(made.view_as(a)) * a


def save_a_view(a: Tensor, kind: int) -> tuple[Tensor, list[Tensor]]:
    """Save the input, and with it the output, or a view of either, or another tensor with the same values."""
    made = a.sin()
    return made, [a, [a, made, a.t(), a[:1], a.detach(), made.detach(), a.sin()][kind]]


def gradient_of_both(grad: Tensor, read: Read) -> Tensor:
    a, other = read()
    return grad * a.cos() + other.sum() * 0.01


saves = function(save_a_view, gradient_of_both)


def custom(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    return saves(r.value(UNARY)(a), r.randrange(7)) * b


def checkpointed(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
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


def hooked(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    calls = state.calls

    def pack(tensor: Tensor) -> Any:
        calls["pack"] += 1
        return tensor.detach().clone(), tensor.shape

    def unpack(held: Any) -> Tensor:
        calls["unpack"] += 1
        return held[0]

    made = r.value(UNARY)(a)
    with saved_tensors_hooks(pack, unpack):
        made = r.value(UNARY)(made) * b
    return made.sin() * made


def autocast(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", r.choice([torch.bfloat16, torch.float16])):
        made = functional.silu(a)
        if state.columns <= MAX_SQUARE and a.numel():
            made = functional.linear(made.float(), state.square.float()) * b
        made = torch.softmax(made, -1) * functional.gelu(made)
    return made.sin().to(a.dtype)


def detached(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        still = r.value(UNARY)(a) + 1
    return (a * still).sin() + functional.silu(b).detach() * a


def in_place(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    """Before what is changed is saved: nothing raises."""
    kind = r.randrange(11)
    if kind in (5, 6, 7) and a.numel() < FEW:
        return a.sin()
    made = functional.silu(a) if kind < 9 else a.neg()
    if r.random() < 0.5:  # else the op would promote, if it were not in place
        b = b.to(made.dtype)
    half = state.columns // 2

    def made_after(_: object) -> Tensor:
        return made

    ways: tuple[Callable[[], Tensor], ...] = (
        lambda: made.add_(b).sin(),
        lambda: (functional.relu_(made) + b).sin(),
        lambda: functional.silu(made, inplace=True).mul(b).sin(),
        lambda: made.masked_fill_(b > 0, 0.5).sin() * b,
        lambda: made_after(made[:, :half].copy_(b[:, :half])).sin(),
        lambda: changed(made, 0.5).sin() + (made + b).sin(),
        lambda: made_after(made.data.mul_(0.5)).sin(),
        lambda: (made + b + changed(made, 0.5).sin()).cos(),
        lambda: made_after(functional.hardtanh_(made[:1])) * b,
        lambda: functional.elu_(made).mul_(2).sin() * b,
        lambda: (made_after(made.t().sigmoid_()) * b).sin(),
    )
    return ways[kind]()


def complex_(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    z = torch.complex(a.float(), b.float())
    made = [z * z.conj(), z.exp() * 0.1, (z * 2).sin() * z, torch.view_as_complex(torch.view_as_real(z * z)) + z]
    which = r.choice(made)
    return (which.real + which.imag.tanh()).to(a.dtype)


def single(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    """Tensors without dimensions."""
    one = a.mean()
    twice, added = functional.silu(functional.silu(one)), functional.silu(a * state.scalar.sin() + one)
    return r.choice([a * one.sin(), a * twice, added, a * torch.tensor(0.5)])


def empty(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    nothing = r.value(UNARY)(a[:0]).sin() * b[:0]
    return a + nothing.sum()


def from_input(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    x = state.x
    viewed = functional.silu(x.view(-1).view_as(a) * a)
    return r.choice([a * x, (a + x).sin(), (functional.silu(x) * a).sin(), viewed])


def inferred(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    with torch.inference_mode():
        constant = torch.ones(state.columns) * 0.5
    return (a + constant).sin()


def collected(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    gc.collect()
    return a


def observed(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    made = functional.silu(a)
    if made.requires_grad:
        made.register_hook(lambda grad: grad * 2)
    return made.sin()


def late_op(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    return r.value(UNARY)(a).sin() if state.is_late else functional.silu(a).sin()


# ---- surprises of cheap programs: at most one each -------------------------------------------------------------------


def change_saved(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    """Changes a tensor that an op has saved."""
    made = functional.silu(a)
    used, other = made.sin(), made + b
    state.kept.append(used)
    if state.is_late:
        changed(made)
    return [used, other.sin(), used * other, (made + b).sin() + used][r.randrange(4)]


def change_and_save(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    """Changes a tensor that is saved after the change only; another op has used it before."""
    made = functional.silu(a)
    other = made + b
    if state.is_late:
        changed(made)
    used = made.sin()
    state.kept.append(used)
    return other.sin() + used if r.random() < 0.5 else other.sin()


def change_result(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    """An op's output, before it is saved or after."""
    made = a * b
    before = made.sin() if r.random() < 0.5 else a
    if state.is_late:
        changed(made[:1])
    return made.sin() + before


def change_parameter(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    made = a + state.full
    if state.is_late:
        changed(state.full)
    return made.sin()


def change_mask(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    mask = a > 0
    made = torch.where(mask, a, b)
    if state.is_late:
        mask.logical_not_()
    return made.sin()


def change_number(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    """A tensor without dimensions."""
    number = torch.tensor(0.5)
    made = a * number
    if state.is_late:
        number.mul_(3)
    return made.sin()


def fail(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    """The user's hook raises in backward."""
    made = functional.silu(a)
    if state.is_late and made.requires_grad:

        def boom(grad: Tensor) -> None:
            raise Boom

        made.register_hook(boom)
    return made.sin()


# ---- ops of mixed programs -----------------------------------------------------------------------------------------

UNRECORDED = {"late_change", "in_place"}
"""Ops that may change a tensor without a record of autograd's."""


def continued(r: Chance, made: Tensor, other: Tensor) -> Tensor:
    """Return the output of ops that follow one of interest: something saves it, now or two ops later."""
    for _ in range(r.choice([0, 1, 1, 2])):
        made = unsaving(r, made)
    return r.one_of(made.sin, lambda: made * other, lambda: functional.silu(made), lambda: made * made, lambda: made)


def changed_in_place(r: Chance, state: State, made: Tensor, other: Tensor) -> Tensor:
    """Recorded by autograd. The second operands are of any dtype."""
    r.one_of(
        *[lambda: made.add_(r.choice([state.zeros, state.zero, state.zeros.double()]))] * 3,
        *[lambda: made.mul_(r.choice([state.ones, state.ones.double(), state.scalar]))] * 2,
        lambda: made.sub_(state.zeros, alpha=2),
        lambda: made.div_(state.ones),
        lambda: made.add_(other, alpha=0.5),
        lambda: made.mul_(state.ones.detach()).add_(state.zeros),
        lambda: made[:, ::2].add_(state.zeros[::2]),
    )
    return made


def promoted(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    narrow = r.choice([torch.bfloat16, torch.bfloat16, torch.float16, a.dtype])
    made = r.one_of(
        lambda: functional.silu(a.to(narrow)) * b.to(narrow),
        lambda: a.to(narrow) * b.to(narrow),
        lambda: a.to(narrow).sin(),
        lambda: a.to(narrow) + b.to(narrow),
    )
    return continued(r, changed_in_place(r, state, made, b), b).to(a.dtype)


def promoted_by_autocast(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        gate, up = (functional.linear(one, state.square) for one in (a.sin(), b))
        made = changed_in_place(r, state, functional.silu(gate) * up, b)
        return functional.linear(continued(r, made, up), state.square).to(a.dtype)


def outer(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    narrow = a.to(r.choice([torch.bfloat16, torch.float16]))
    made = r.one_of(lambda: narrow.sin() + state.zeros, lambda: narrow * state.ones, lambda: narrow * b + state.zero)
    return continued(r, made, b).to(a.dtype)


Reorder = Callable[[Tensor], Tensor]
LAST = torch.channels_last
# An order of an image's elements, and the way back.
ORDERS: list[tuple[Reorder, Reorder]] = [
    (lambda h: h.contiguous(memory_format=LAST), lambda h: h),
    (lambda h: h.to(memory_format=LAST), lambda h: h),
    (lambda h: h.to(torch.float64, memory_format=LAST), lambda h: h),
    (lambda h: h.clone(memory_format=LAST), lambda h: h),
    (lambda h: h.permute(0, 2, 3, 1).clone(), lambda h: h.permute(0, 3, 1, 2)),
    (lambda h: h.permute(0, 2, 3, 1).contiguous(), lambda h: h.permute(0, 3, 1, 2)),
    (lambda h: h.permute(1, 3, 0, 2).clone(memory_format=torch.contiguous_format), lambda h: h.permute(2, 0, 3, 1)),
    (lambda h: h.transpose(2, 3).double(), lambda h: h.transpose(2, 3)),
    (lambda h: h.contiguous(memory_format=LAST).contiguous(), lambda h: h),
    (lambda h: h.flip(3).contiguous(memory_format=LAST), lambda h: h.flip(3)),
]
# Of which a CPU computes the last elements, behind those that fill its vectors, in another way, or may.
TAILED: list[Callable[[Tensor], Tensor]] = [
    torch.sigmoid,
    torch.sigmoid,
    lambda h: torch.rsqrt(h.bfloat16().abs() + 0.5),
    lambda h: torch.rsqrt(h.abs() + 0.5),
    lambda h: (h.abs() + 0.5).reciprocal(),
    torch.tanh,
    lambda h: functional.softplus(h) + h.relu(),
]


def ordered(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    """Another order of the same elements."""
    there, back = r.choice(ORDERS)
    rows, columns = a.shape
    image = a.reshape(1, rows, 3, columns // 3) if r.random() < 0.5 else a.reshape(rows, 3, columns // 3, 1)
    tailed = r.choice(TAILED)
    image = r.one_of(lambda: functional.silu(image) * image * 2, lambda: image.sin(), lambda: image * 3.0)
    made = tailed(there(image))
    made = r.one_of(lambda: made * made, lambda: made.sin() * made, lambda: made, lambda: functional.silu(made))
    return back(made).to(a.dtype).reshape(rows, columns)


def transposed(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    there = r.choice([lambda h: h.t().contiguous(), lambda h: h.t().clone(), lambda h: h.t().bfloat16()])
    tailed = r.choice(TAILED)
    made = tailed(there(functional.silu(a) * a * 2))
    return (made * made).t().to(a.dtype) * b


def carried(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    """The graph of this step is a part of the next one's."""
    a_still = a.detach()
    made = r.one_of(
        lambda: functional.silu(a_still * state.ones) + state.zeros,
        lambda: (a_still + state.zeros).sigmoid() * state.ones,
        lambda: r.value(UNARY)(a_still * state.ones) - state.zero,
        lambda: a_still.bfloat16() + state.zeros.bfloat16(),
        lambda: (a_still * state.scalar).sin() * state.ones,
        lambda: functional.linear(a_still.float().sin(), state.square) + state.zero,
    )
    before = state.carried.get(state.place)
    state.carried[state.place] = made
    return a if before is None else continued(r, before, b).to(a.dtype) * b


def casted_parameter(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    narrow = torch.bfloat16
    weight = r.choice([state.zeros, state.ones, state.zero, state.full]).to(narrow)
    made = r.one_of(lambda: a.to(narrow).sin() * weight, lambda: functional.silu(weight) * a.to(narrow))
    return continued(r, made, b).to(a.dtype)


def logged(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    """A statistic that is kept, and differentiated a step later."""
    made = r.one_of(lambda: functional.silu(a) * b, lambda: a + b + state.zeros, lambda: a.sin() * b.cos())
    if made.requires_grad:
        state.logged.append((r.choice([made * made, made.sin()]).mean(), made))
    return continued(r, made, b).to(a.dtype)


def late_change(state: State, r: Chance, a: Tensor, b: Tensor) -> Tensor:
    """A change that autograd does not record, before anything has saved what is changed."""
    made = r.one_of(lambda: functional.silu(a) * b, lambda: a * b, lambda: a.sin(), lambda: a + b, lambda: a.float())
    made = made.neg() if made is a else made
    changes: tuple[Callable[[], object], ...] = (
        lambda: made.clamp_(max=0.05 if state.is_late else 1e4),  # in all steps, and of no effect at first
        lambda: made.clamp_(max=0.05),
        lambda: made[:, ::2].mul_(0.5),
        lambda: made.data.masked_fill_(made > 0.05, 0.0),
        lambda: made.data.mul_(1.5),
        lambda: made.data[:1].zero_(),
        lambda: made.data.copy_(made.flip(1) + 0.5),
        lambda: torch.from_numpy(made.detach().float().numpy()).add_(1),  # of the same memory, mostly
    )
    kind = r.randrange(len(changes))
    if kind == 0 or state.is_late:
        with torch.no_grad():
            changes[kind]()
    return continued(r, made, b).to(a.dtype)


# ---- the tables -----------------------------------------------------------------------------------------------------

# Each op with its weight in a draw.
CHEAP: dict[Op, int] = {
    unary: 30, saved: 16, binary: 16, viewed: 14, norm: 8, weighted: 6, dropout: 6, cast: 6, softmax: 4, custom: 4,
    in_place: 4, checkpointed: 3, hooked: 3, autocast: 3, from_input: 3, attention: 2, detached: 2, complex_: 2,
    single: 2, late_op: 2, empty: 1, inferred: 1, collected: 1, observed: 1,
}  # fmt: skip
SURPRISES: tuple[Op, ...] = (
    change_saved, change_and_save, change_result, change_parameter, change_mask, change_number, fail,
)  # fmt: skip
MIXED: dict[Op, int] = {
    unary: 6, saved: 4, binary: 6, weighted: 5, norm: 3, softmax: 1, cast: 3, viewed: 4, autocast: 2, in_place: 2,
    dropout: 1, promoted: 12, ordered: 12, carried: 8, promoted_by_autocast: 6, transposed: 5, outer: 4,
    casted_parameter: 4, logged: 3, late_change: 0,  # the last is drawn once at most
}  # fmt: skip
FUNCTIONS = {op.__name__: op for op in (*CHEAP, *SURPRISES, *MIXED)}
