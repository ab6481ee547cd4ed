"""A fuzz of what rematerialization delivers: each tensor that backward gets, held against the one that was saved.

    PYTHONPATH=tests python tests/fuzz_mixed.py [--draws 1000] [--seed 0] [--shrink]

A site may be equal in one step and unequal in another: *mixed*. Each seed draws a program that is apt to be: ops in
place whose second operand has a wider dtype, other orders of the same elements, parameters that begin at 0 and 1 and
move, graphs carried from one forward into the next, an update between two backwards of one forward, statistics that are
kept, and changes that autograd does not record and that begin in a late step. Around the cache's hooks, a copy of each
tensor is taken as it is saved, and compared as it is wanted again, in all steps; nothing of the cache's insides is
known. The same program runs without the cache too: losses, gradients and errors must be the same. Exit status 1 means
that some draw failed; each is printed with the command that repeats it.

[Note: Found later] What is equal at first, and is changed later without a record of autograd's, may be found by checks
in turn only. Such programs may get wrong tensors for a while if they end with ``RematerializationError`` then: they run
on for as long as all checks take to come again. They may also raise ``ActivationModifiedError`` in the very step in
which the first tensor was wrong: no parameter has moved by it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from fuzz_rematerialize import OPS, UNARY, Line, State, Stores, bits, kind_of
from torch import Tensor
from torch.nn import functional

from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import mark_inputs, mark_owned
from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.errors import DsTbaError
from ds_tba.remat.sites import Sites
from ds_tba.remat.store import RematStore

LIMIT_S = 60.0  # of a draw
STEPS = 8
PATIENCE = 64 + 8  # steps from the first late one on, within which all that is checked in turn was checked
LEARNING_RATE = 0.05
# Columns in threes, for images; numbers of elements that leave a few behind a CPU's vectors.
SHAPES = [(1, 33), (3, 21), (5, 33), (7, 9), (11, 3), (23, 33), (2, 129), (17, 15)]
SHAPE_WEIGHTS = [4, 4, 6, 4, 2, 3, 3, 4]


@dataclass
class Mixed(State):
    """What ops may use beside the pool.

    Attributes:
        zeros, ones: parameters that begin so, of a row.
        zero: likewise, of the whole shape.
        place: of the line under way.
        carried: what lines have left for their next step, by place.
        logged: statistics with the tensors that they are of.
    """

    zeros: Tensor = field(default_factory=Tensor)
    ones: Tensor = field(default_factory=Tensor)
    zero: Tensor = field(default_factory=Tensor)
    place: int = 0
    carried: dict[int, Tensor] = field(default_factory=dict)
    logged: list[tuple[Tensor, Tensor]] = field(default_factory=list)


Op = Callable[[Any, random.Random, Tensor, Tensor], Tensor]
KNOWN = {
    "unary": 6, "saved": 4, "binary": 6, "weighted": 5, "norm": 3, "softmax": 1, "cast": 3, "viewed": 4, "autocast": 2,
    "in_place": 2, "dropout": 1,
}  # fmt: skip
MIXED: dict[str, Op] = {name: OPS[name] for name in KNOWN}
WEIGHTS = dict(KNOWN)
UNRECORDED = {"late_change", "in_place"}
"""Ops that may change a tensor without a record of autograd's."""


def op(weight: int) -> Callable[[Op], Op]:
    def add(function: Op) -> Op:
        MIXED[function.__name__] = function
        WEIGHTS[function.__name__] = weight
        return function

    return add


def nothing(state: Mixed, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """In place of an op, in smaller programs."""
    return a


AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": lambda a: a.clamp(-2, 2).exp(),
    "neg": lambda a: -a,
    "wide": lambda a: a.float(),
    "twice": lambda a: a + a,
    "rsqrt": lambda a: torch.rsqrt(a.abs() + 0.5),
    "softplus": functional.softplus,
    "sin": torch.sin,
}
"""Most of them do not save what they take."""
SAVING: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a.sin(),
    lambda a, b: a * b,
    lambda a, b: functional.silu(a),
    lambda a, b: a * a,
    lambda a, b: a,
]


def continued(r: random.Random, made: Tensor, other: Tensor) -> Tensor:
    """What follows an op that is of interest: something that saves, now or two ops later."""
    for _ in range(r.choice([0, 1, 1, 2])):
        made = AFTER[r.choice(list(AFTER))](made)
    return r.choice(SAVING)(made, other)


def changed_in_place(r: random.Random, state: Mixed, made: Tensor, other: Tensor) -> Tensor:
    """Recorded by autograd. The second operands are of any dtype."""
    kind = r.randrange(10)
    if kind < 3:
        made += r.choice([state.zeros, state.zero, state.zeros.double()])
    elif kind < 5:
        made.mul_(r.choice([state.ones, state.ones.double(), state.scalar]))
    elif kind == 5:
        made.sub_(state.zeros, alpha=2)
    elif kind == 6:
        made.div_(state.ones)
    elif kind == 7:
        made.add_(other, alpha=0.5)
    elif kind == 8:
        made.mul_(state.ones.detach()).add_(state.zeros)
    else:
        made[:, ::2] += state.zeros[::2]
    return made


@op(weight=12)
def promoted(state: Mixed, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """In place, where the second operand has a wider dtype."""
    narrow = r.choice([torch.bfloat16, torch.bfloat16, torch.float16, a.dtype])
    made = r.choice(
        [
            lambda: functional.silu(a.to(narrow)) * b.to(narrow),
            lambda: a.to(narrow) * b.to(narrow),
            lambda: a.to(narrow).sin(),
            lambda: a.to(narrow) + b.to(narrow),
        ]
    )()
    return continued(r, changed_in_place(r, state, made, b), b).to(a.dtype)


@op(weight=6)
def promoted_by_autocast(state: Mixed, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        gate, up = (functional.linear(one, state.square) for one in (a.sin(), b))
        made = changed_in_place(r, state, functional.silu(gate) * up, b)
        return functional.linear(continued(r, made, up), state.square).to(a.dtype)


@op(weight=4)
def outer(state: Mixed, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """Sums and products of several dtypes, not in place."""
    narrow = a.to(r.choice([torch.bfloat16, torch.float16]))
    made = r.choice(
        [lambda: narrow.sin() + state.zeros, lambda: narrow * state.ones, lambda: narrow * b + state.zero]
    )()
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


@op(weight=12)
def ordered(state: Mixed, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """Another order of the same elements."""
    there, back = r.choice(ORDERS)
    rows, columns = a.shape
    image = a.reshape(1, rows, 3, columns // 3) if r.random() < 0.5 else a.reshape(rows, 3, columns // 3, 1)
    tailed = r.choice(TAILED)
    image = r.choice([lambda: functional.silu(image) * image * 2, lambda: image.sin(), lambda: image * 3.0])()
    made = tailed(there(image))
    made = r.choice([lambda: made * made, lambda: made.sin() * made, lambda: made, lambda: functional.silu(made)])()
    return back(made).to(a.dtype).reshape(rows, columns)


@op(weight=5)
def transposed(state: Mixed, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    there = r.choice([lambda h: h.t().contiguous(), lambda h: h.t().clone(), lambda h: h.t().bfloat16()])
    tailed = r.choice(TAILED)
    made = tailed(there(functional.silu(a) * a * 2))
    return (made * made).t().to(a.dtype) * b


@op(weight=8)
def carried(state: Mixed, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """The graph of this step is a part of the next one's."""
    a_still = a.detach()
    made = r.choice(
        [
            lambda: functional.silu(a_still * state.ones) + state.zeros,
            lambda: (a_still + state.zeros).sigmoid() * state.ones,
            lambda: UNARY[r.choice(list(UNARY))](a_still * state.ones) - state.zero,
            lambda: a_still.bfloat16() + state.zeros.bfloat16(),
            lambda: (a_still * state.scalar).sin() * state.ones,
            lambda: functional.linear(a_still.float().sin(), state.square) + state.zero,
        ]
    )()
    before = state.carried.get(state.place)
    state.carried[state.place] = made
    return a if before is None else continued(r, before, b).to(a.dtype) * b


@op(weight=4)
def casted_parameter(state: Mixed, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """Copies of parameters, as autocast makes them."""
    narrow = torch.bfloat16
    weight = r.choice([state.zeros, state.ones, state.zero, state.full]).to(narrow)
    made = r.choice([lambda: a.to(narrow).sin() * weight, lambda: functional.silu(weight) * a.to(narrow)])()
    return continued(r, made, b).to(a.dtype)


@op(weight=3)
def logged(state: Mixed, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """A statistic that is kept, and differentiated a step later."""
    made = r.choice([lambda: functional.silu(a) * b, lambda: a + b + state.zeros, lambda: a.sin() * b.cos()])()
    if made.requires_grad:
        state.logged.append((r.choice([made * made, made.sin()]).mean(), made))
    return continued(r, made, b)


@op(weight=0)  # drawn once at most
def late_change(state: Mixed, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    """A change that autograd does not record, before anything has saved what is changed."""
    made = r.choice(
        [lambda: functional.silu(a) * b, lambda: a * b, lambda: a.sin(), lambda: a + b, lambda: a.float()]
    )()
    made = made.neg() if made is a else made
    kind = r.randrange(8)
    with torch.no_grad():
        if kind == 0:  # in all steps, and of no effect at first
            made.clamp_(max=0.05 if state.is_late else 1e4)
        elif state.is_late and kind == 1:
            made.clamp_(max=0.05)
        elif state.is_late and kind == 2:
            made[:, ::2].mul_(0.5)
    if state.is_late:
        if kind == 3:
            made.data.masked_fill_(made.data > 0.05, 0.0)
        elif kind == 4:
            made.data.mul_(1.5)
        elif kind == 5:
            made.data[:1].zero_()
        elif kind == 6:
            made.data.copy_(made.data.flip(1) + 0.5)
        elif kind == 7 and made.dtype == torch.float32:
            made.detach().numpy()[...] += 1
    return continued(r, made, b).to(a.dtype)


# ---- a program ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A draw.

    Attributes:
        late: the first step with an unrecorded change, if there is one.
        losses: of two losses, the places of what they sum.
        backward: of both losses at once, or one by one, or with an update between.
        updates: "data" changes parameters without a version, as ZeRO does; "versions" as optimizers do.
        stores: "nvme", "host"; none to keep.
    """

    seed: int
    shape: tuple[int, int]
    dtype: torch.dtype
    lines: tuple[Line, ...]
    losses: tuple[tuple[int, ...], tuple[int, ...]]
    late: int
    backward: str
    updates: str
    stores: tuple[str, ...]
    min_bytes: int

    @property
    def may_be_found_later(self) -> bool:
        """See [Note: Found later]."""
        return any(line.name in UNRECORDED for line in self.lines)

    def describe(self) -> str:
        ops = "\n".join(
            f"    {place + FIRST}: {line.name}[{line.seed}]({line.first}, {line.second})"
            for place, line in enumerate(self.lines)
        )
        return (
            f"seed {self.seed}: {self.shape} {self.dtype}, backward {self.backward!r}, updates {self.updates!r}, late "
            f"{self.late}, stores {self.stores}, min_bytes {self.min_bytes}, losses {self.losses}\n{ops}"
        )


BACKWARDS = ["at once", "one by one", "step between"]
FIRST = 4  # tensors of the pool before the first line


def draw(seed: int) -> Program:
    r = random.Random(f"mixed {seed}")
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    count = r.randint(2, 8)
    when = r.randrange(count) if r.random() < 0.15 else None
    lines = []
    for place in range(count):
        name = "late_change" if place == when else r.choices(names, weights)[0]
        size = place + FIRST
        first, second = (size - 1 - min(int(r.expovariate(0.5)), size - 1) for _ in range(2))
        lines.append(Line(name, r.randrange(1 << 30), first, second))
    last = count + FIRST - 1
    backward = r.choices(BACKWARDS, [2, 1, 1])[0]
    return Program(
        seed=seed,
        shape=r.choices(SHAPES, SHAPE_WEIGHTS)[0],
        dtype=r.choices([torch.float32, torch.bfloat16], [4, 1])[0],
        lines=tuple(lines),
        losses=((last, r.randrange(last + 1)), (last, r.randrange(last + 1))),
        late=r.randint(2, 5),
        backward=backward,
        updates="data" if backward == "step between" else r.choice(["data", "versions"]),
        stores=r.choice([()] * 7 + [("nvme",), ("host", "nvme")]),
        min_bytes=r.choice([1, 1, 64]),
    )


def smaller(program: Program) -> Iterator[Program]:
    """Programs with an op less, or without something else."""
    for place, line in reversed(list(enumerate(program.lines))):
        if line.name != "nothing":
            lines = list(program.lines)
            lines[place] = Line("nothing", 0, line.first, line.second)
            yield replace(program, lines=tuple(lines))
    changes: tuple[dict[str, Any], ...] = (
        {"backward": "at once"}, {"backward": "one by one"}, {"stores": ()}, {"min_bytes": 1}, {"dtype": torch.float32},
    )  # fmt: skip
    for change in changes:
        fewer = replace(program, **change)
        is_less = "backward" not in change or BACKWARDS.index(fewer.backward) < BACKWARDS.index(program.backward)
        if fewer != program and is_less:
            yield fewer


# ---- running one ----------------------------------------------------------------------------------------------------

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    integers = INTEGERS[one.dtype.itemsize]
    return torch.equal(one.view(integers), other.view(integers))


@dataclass
class Saved:
    """A tensor as it was saved.

    Attributes:
        still: shares its memory: what autograd would return.
        number: among those of its forward.
    """

    copy: Tensor
    still: Tensor
    node: str
    step: int
    number: int


@dataclass
class Watch:
    """Looks at what goes through a cache's hooks.

    Attributes:
        wrong: what came back with other bits, in words.
        outcomes: of each tensor that was made again, whether it was right, over all steps.
    """

    saved: dict[int, Saved] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    outcomes: dict[tuple[int, str], set[bool]] = field(default_factory=dict)
    step: int = 0
    number: int = 0
    packed: int = 0
    made_again: int = 0

    def around(self, hooks: Any) -> Any:
        """Hooks around those of the cache, which return the same objects."""
        pack, unpack = hooks

        def watched_pack(tensor: Tensor) -> Any:
            held = pack(tensor)
            node = type(tensor.grad_fn).__name__
            still = tensor.detach()
            # An object that went before may have had the same number.
            self.saved[id(held)] = Saved(still.clone(), still, node, self.step, self.number)
            self.number += 1
            self.packed += 1
            return held

        def watched_unpack(held: Any) -> Tensor:
            tensor: Tensor = unpack(held)
            self.look(self.saved[id(held)], tensor.detach())
            return tensor

        return watched_pack, watched_unpack

    def look(self, saved: Saved, found: Tensor) -> None:
        is_other = found.data_ptr() != saved.still.data_ptr()
        # Changed since by the user, without a record: autograd would return what it is now.
        is_right = not is_other or same_bits(found, saved.copy) or same_bits(found, saved.still)
        self.made_again += is_other
        if is_other:
            self.outcomes.setdefault((saved.number, saved.node), set()).add(is_right)
        if not is_right:
            look = f"{saved.node} {tuple(saved.copy.shape)} {saved.copy.dtype}"
            self.wrong.append(f"step {self.step}: tensor {saved.number} of step {saved.step}, {look}")

    @property
    def mixed(self) -> Iterator[str]:
        """Sites that were right in one step and wrong in another."""
        return (node for (_, node), outcome in self.outcomes.items() if len(outcome) == 2)


class Run:
    """A program in some steps.

    Attributes:
        results: of each step, losses and gradients.
        error: with which it ended; None where it did not.
    """

    def __init__(self, program: Program, cache: TensorCache | None = None) -> None:
        rows, columns = program.shape
        self.program, self.cache, self.watch = program, cache, Watch()
        self._generator = torch.Generator().manual_seed(program.seed)
        torch.manual_seed(program.seed)  # of dropout

        def values(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=self._generator)

        self.vector, self.full, self.scalar = values(columns), values(rows, columns), values(())
        self.square = values(columns, columns) / columns**0.5
        self.zeros, self.ones, self.zero = torch.zeros(columns), torch.ones(columns), torch.zeros(rows, columns)
        self.frozen = values(columns)
        names = ("vector", "full", "scalar", "square", "zeros", "ones", "zero")
        for name in names:
            setattr(self, name, torch.nn.Parameter(getattr(self, name)))
        self.parameters: list[Tensor] = [getattr(self, name) for name in names]
        self._owner = torch.nn.ParameterList(self.parameters)
        self.results: list[list[Any]] = []
        self.error: Exception | None = None
        self._carried: dict[int, Tensor] = {}
        self._logged: list[tuple[Tensor, Tensor]] = []
        self._calls: Counter[str] = Counter()

    def run(self, steps: range) -> None:
        for step in steps:
            if self.error is not None:
                return
            self.watch.step, self.watch.number = step, 0
            self.results.append([])
            try:
                self._step(step, self.results[-1])
            except Exception as error:  # noqa: BLE001 - whatever it is, it must come in both
                self.error = error

    def _step(self, step: int, result: list[Any]) -> None:
        x = torch.randn(*self.program.shape, generator=self._generator).to(self.program.dtype)
        mark_inputs(x)
        mark_owned(self._owner)
        logged, self._logged = self._logged, []
        with contextlib.nullcontext() if self.cache is None else self.cache.saving(around=self.watch.around):
            one, two = self._model(step, x)
        result += [bits(one), bits(two)]
        if self.program.backward == "at once":
            (one + two).backward()
        else:
            one.backward(retain_graph=True)
            if self.program.backward == "step between":
                self._update(result)
            two.backward()
        for statistic, made in logged:
            result.append(bits(torch.autograd.grad(statistic, [made])[0]))
        self._update(result)

    def _model(self, step: int, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = self.program.shape
        state = Mixed(
            step, step >= self.program.late, self.vector, self.square, self.full, self.scalar, self.frozen, x, rows,
            columns, self._calls, False, [], self.zeros, self.ones, self.zero, 0, self._carried, self._logged,
        )  # fmt: skip
        pool = [self.full * x, (self.full + self.zeros).to(x.dtype), torch.tanh(x * self.vector), x * self.ones]
        for place, line in enumerate(self.program.lines):
            state.place = place
            function = MIXED.get(line.name, nothing)
            pool.append(function(state, random.Random(line.seed), pool[line.first], pool[line.second]))
        one, two = (
            sum((pool[index].float() * (0.3 + 0.1 * place)).mean() for place, index in enumerate(loss))
            for loss in self.program.losses
        )
        assert isinstance(one, Tensor) and isinstance(two, Tensor)
        return one + self.full.sum() * 0, two + self.full.sum() * 0

    def _update(self, result: list[Any]) -> None:
        """As optimizers do. What is not finite moves nothing."""
        for one in self.parameters:
            if one.grad is None:
                result.append(None)
                continue
            result.append(bits(one.grad))
            change = one.grad.nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1) * LEARNING_RATE
            with torch.no_grad():
                (one if self.program.updates == "versions" else one.data).sub_(change)
            one.grad = None


@dataclass
class Tally:
    """What was exercised.

    Attributes:
        made_again: tensors that came back in another memory.
        mixed: sites that were right in one step and wrong in another, by node.
        found_later: programs that ended with an error after wrong tensors.
    """

    draws: int = 0
    packed: int = 0
    made_again: int = 0
    found_later: int = 0
    ops: Counter[str] = field(default_factory=Counter)
    mixed: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        counters = (("mixed", self.mixed), ("refused", self.refused), ("errors", self.errors), ("ops", self.ops))
        return "\n".join(
            [
                f"{self.draws} draws, {self.packed} tensors packed, {self.made_again} came back in other memory, "
                f"{self.found_later} programs found later",
                *(f"  {name}: {dict(counter.most_common())}" for name, counter in counters),
            ]
        )


def check(program: Program, stores: Stores, tally: Tally) -> list[str]:
    """Run a program in both ways; what is wrong."""
    plain = Run(program)
    plain.run(range(STEPS))
    cache = TensorCache(stores.named(program.stores), "cpu", program.min_bytes, wait_for_staging=True)
    sites = Sites(cache, CpuAccelerator())
    cache.rematerialize(RematStore(cache, sites))
    ours = Run(program, cache)
    ours.run(range(STEPS))
    watch = ours.watch
    is_wrong = bool(watch.wrong)
    if is_wrong and program.may_be_found_later:
        ours.run(range(STEPS, program.late + PATIENCE))
    tally.draws += 1
    tally.packed += watch.packed
    tally.made_again += watch.made_again
    tally.mixed += Counter(watch.mixed)
    tally.refused += Counter(sites.summary()["refused_sites"])
    tally.ops += Counter(line.name for line in program.lines)
    for error in (plain.error, ours.error):
        if error is not None:
            tally.errors[kind_of(error) if error is plain.error else type(error).__name__] += 1
    if program.may_be_found_later and isinstance(ours.error, DsTbaError) and is_allowed(ours.error, watch):
        tally.found_later += is_wrong
        return []
    return watch.wrong[:3] or list(differences(plain, ours))


def is_allowed(error: DsTbaError, watch: Watch) -> bool:
    """See [Note: Found later]."""
    name = type(error).__name__
    in_this_step = all(look.startswith(f"step {watch.step}:") for look in watch.wrong)
    return name == "RematerializationError" or (name == "ActivationModifiedError" and in_this_step)


def differences(plain: Run, ours: Run) -> Iterator[str]:
    for step, (expected, found) in enumerate(zip(plain.results, ours.results, strict=False)):
        if expected != found:
            places = [
                place for place, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b
            ] or "one ends early"
            yield f"step {step}: losses or gradients differ ({places}), and all tensors came back right"
            break
    errors = [None if run.error is None else kind_of(run.error) for run in (plain, ours)]
    if errors[0] != errors[1] or (errors[0] and len(plain.results) != len(ours.results)):
        yield f"step {len(ours.results) - 1}: {errors[1]} instead of {errors[0]}"


# ---- the command ----------------------------------------------------------------------------------------------------


def shrink(program: Program, stores: Stores) -> Program:
    """A smaller program that fails as well."""
    while True:
        for fewer in smaller(program):
            if check(fewer, stores, Tally()):
                program = fewer
                break
        else:
            return program


def again(seed: int) -> str:
    return f"again: PYTHONPATH=tests python tests/fuzz_mixed.py --draws 1 --seed {seed} --shrink"


@contextlib.contextmanager
def drawing(directory: str | None = None) -> Iterator[Stores]:
    """What all draws of a process share."""
    with tempfile.TemporaryDirectory(dir=directory) as own, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stores = Stores(own)
        try:
            yield stores
        finally:
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
            if failures:
                failed.append(seed)
                if options.shrink:
                    program = shrink(program, stores)
                    failures = check(program, stores, Tally())
                text = "\n".join(f"  {one}" for one in failures)
                print(f"{program.describe()}\n{text}\n  {again(seed)}", flush=True)
            faulthandler.cancel_dump_traceback_later()
            if len(failed) >= options.stop:
                break
    print(f"{tally}\n{tally.draws} draws in {time.monotonic() - started_s:.0f} s; failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
