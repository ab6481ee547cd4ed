"""Chains of ops over a pool of tensors, through a cache that rematerializes and without: two kinds of them.

``cheap``: cheap ops in any order, many ways of backward, stores, a budget, and sometimes a surprise in one late step.
Every loss and gradient must have the same bits, every error must come in both, and nothing may be left behind.

``mixed``: what makes a site equal in one step and unequal in another. Ops in place whose second operand has a wider
dtype, other orders of the same elements, parameters that begin at 0 and 1 and move, graphs carried from one forward
into the next, an update between two backwards of one forward, statistics that are kept, and changes without a record of
autograd's that begin in a late step. Around the cache's hooks a copy of each tensor is taken as it is saved, and
compared as it is wanted again; nothing of the cache's insides is known.

[Note: Late changes] An operand that is changed in place in a late step, after its site was proven, may raise
``ActivationModifiedError`` where autograd would not have asked for it: cheap programs with a surprise may do so in that
step. What no op has saved, and is changed under ``no_grad`` or through ``data`` in late steps only, nobody can see
there: it is drawn in mixed programs only.

[Note: Found later] What is equal at first, and is changed later without a record of autograd's, may be found by checks
in turn only. Such mixed programs may get wrong tensors for a while if they end with ``RematerializationError`` then:
they run on for as long as all checks take to come again. They may also raise ``ActivationModifiedError`` in the very
step in which the first tensor was wrong: no parameter has moved by it.
"""

from __future__ import annotations

import contextlib
import gc
import random
import tempfile
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy
import torch
from support.leftovers import after_a_while, held
from torch import Tensor

from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import mark_inputs, mark_owned, whole_storage
from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.errors import DsTbaError
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
from programs.kind import Failure, Kind, Outcome, named
from programs.ops import CHEAP, DTYPES, FUNCTIONS, MAX_SQUARE, MIXED, SURPRISES, UNRECORDED, Boom, State, Table

GRAIN = 1 << 15  # elements that one thread of a CPU takes
LATE = 3  # the step of a cheap program with a surprise
SETTLE_S = 1.0
PATIENCE = 64 + 8  # steps from the first late one on, within which all that is checked in turn was checked
LEARNING_RATE = 0.1
DTYPE_WEIGHTS = [6, 4, 1, 1]
SHAPES = [
    (3, 17), (17, 3), (1, 1), (4, 8), (8, 64), (1, 4099), (3, 1366), (33, 128), (4099, 1), (12, 36), (0, 5), (2, 40000),
]  # fmt: skip
SHAPE_WEIGHTS = [6, 6, 3, 8, 10, 2, 2, 6, 1, 8, 2, 2]
# Columns in threes, for images; numbers of elements that leave a few behind a CPU's vectors.
MIXED_SHAPES = [(1, 33), (3, 21), (5, 33), (7, 9), (11, 3), (23, 33), (2, 129), (17, 15)]
MIXED_SHAPE_WEIGHTS = [4, 4, 6, 4, 2, 3, 3, 4]
BACKWARDS = [
    "plain", "plain", "plain", "retained", "two losses", "of a part", "inputs", "double", "double inside", "dropped",
    "two forwards", "threads", "again", "plain", "other thread", "accumulated",
]  # fmt: skip
MIXED_BACKWARDS = ["at once", "two losses", "step between"]
WHOLE = {"plain", "retained", "two losses", "dropped", "two forwards", "accumulated"}
"""Ways of backward in which a reentrant checkpoint works."""
ERRORS = {"boom", "modified", "freed", "no derivative"}
"""Those that a cheap program may end a step with."""


# ---- a program ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One op, with the places of its arguments in the pool."""

    name: str
    seed: int
    first: int
    second: int


@dataclass(frozen=True)
class Chain:
    """A draw.

    Attributes:
        kind: "cheap" or "mixed".
        losses: of two losses, the places of what they sum.
        stores: "nvme", "host"; none to keep.
        budget_bytes: of saved tensors; None for none.
        mixes: a policy draws stores and rematerialization for each storage.
        threads: of torch.
        refills: the input is refilled behind autograd's back between forwards.
        freezes: a row of operands is 0 until the late step.
        late: the first step with late changes, and for a cheap program the only one.
        updates: "data" changes parameters without a version, as ZeRO does; "versions" as optimizers do.
    """

    kind: str
    seed: int
    shape: tuple[int, int]
    dtype: torch.dtype
    lines: tuple[Line, ...]
    losses: tuple[tuple[int, ...], tuple[int, ...]]
    backward: str
    stores: tuple[str, ...] = ()
    min_bytes: int = 1
    budget_bytes: int | None = None
    mixes: bool = False
    threads: int = 1
    refills: bool = False
    freezes: bool = False
    late: int = LATE
    updates: str = "versions"

    @property
    def is_mixed(self) -> bool:
        return self.kind == "mixed"

    @property
    def first(self) -> int:
        """Tensors of the pool before the first line."""
        return 4 if self.is_mixed else 3

    @property
    def steps(self) -> int:
        return 8 if self.is_mixed else 5

    @property
    def may_raise_more(self) -> bool:
        """See [Note: Late changes]."""
        return any(line.name.startswith("change_") for line in self.lines)

    @property
    def may_be_found_later(self) -> bool:
        """See [Note: Found later]."""
        return self.is_mixed and any(line.name in UNRECORDED for line in self.lines)

    @property
    def may_reenter(self) -> bool:
        """A reentrant checkpoint works, and PyTorch leaves nothing of it behind, as it does after errors."""
        names = {line.name for line in self.lines}
        return self.backward in WHOLE and not names & set(SURPRISES.ops)

    def __str__(self) -> str:
        shown = (one.name for one in fields(self) if one.name not in ("kind", "seed", "lines"))
        settings = ", ".join(f"{name} {getattr(self, name)!r}" for name in shown)
        ops = "\n".join(
            f"    {place + self.first}: {line.name}[{line.seed}]({line.first}, {line.second})"
            for place, line in enumerate(self.lines)
        )
        return f"{self.kind} program of seed {self.seed}: {settings}\n{ops}"


def draw_cheap(seed: int) -> Chain:
    r = random.Random(seed)
    late = r.choice(list(SURPRISES.ops)) if r.random() < 0.4 else ""
    count = r.randint(2, 14)
    when = r.randrange(count)
    lines = _lines(r, CHEAP, count, 3, {when: late} if late else {})
    last = count + 2
    some = tuple({r.randrange(last + 1) for _ in range(2)})
    stores = r.choice([(), (), (), ("nvme",), ("host",), ("nvme", "host"), ("host", "nvme")])
    shape = r.choices(SHAPES, SHAPE_WEIGHTS)[0]
    return Chain(
        kind="cheap",
        seed=seed,
        shape=shape,
        dtype=r.choices(DTYPES, DTYPE_WEIGHTS)[0],
        lines=lines,
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


def draw_mixed(seed: int) -> Chain:
    r = random.Random(f"mixed {seed}")
    count = r.randint(2, 8)
    special = {r.randrange(count): "late_change"} if r.random() < 0.15 else {}
    lines = _lines(r, MIXED, count, 4, special)
    last = count + 3
    backward = r.choices(MIXED_BACKWARDS, [2, 1, 1])[0]
    return Chain(
        kind="mixed",
        seed=seed,
        shape=r.choices(MIXED_SHAPES, MIXED_SHAPE_WEIGHTS)[0],
        dtype=r.choices([torch.float32, torch.bfloat16], [4, 1])[0],
        lines=lines,
        losses=((last, r.randrange(last + 1)), (last, r.randrange(last + 1))),
        late=r.randint(2, 5),
        backward=backward,
        updates="data" if backward == "step between" else r.choice(["data", "versions"]),
        stores=r.choice([()] * 7 + [("nvme",), ("host", "nvme")]),
        min_bytes=r.choice([1, 1, 64]),
    )


def _lines(r: random.Random, table: Table, count: int, size: int, special: dict[int, str]) -> tuple[Line, ...]:
    """Draw so many lines over a pool of ``size`` tensors, with ops of a name at special places."""
    lines = []
    for place in range(count):
        name = special.get(place) or table.choose(r)
        last = place + size - 1
        first, second = (last - min(int(r.expovariate(0.5)), last) for _ in range(2))
        lines.append(Line(name, r.randrange(1 << 30), first, second))
    return tuple(lines)


# ---- what backward gets ---------------------------------------------------------------------------------------------

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
        memory: of the tensor, while it lives: what autograd would return. Not held, or nothing would leave.
        number: among those of its forward.
    """

    copy: Tensor
    memory: weakref.ref[torch.UntypedStorage]
    node: str
    step: int
    number: int


@dataclass
class Watch:
    """Looks at what goes through a cache's hooks.

    Attributes:
        wrong: what was returned with other bits, in words.
        outcomes: of each tensor that was rematerialized, whether it was right, over all steps.
        made_again: tensors that were returned in another memory.
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
            # An object that went before may have had the same number.
            node = type(tensor.grad_fn).__name__
            self.saved[id(held)] = Saved(
                tensor.detach().clone(), weakref.ref(tensor.untyped_storage()), node, self.step, self.number
            )
            self.number += 1
            self.packed += 1
            return held

        def watched_unpack(held: Any) -> Tensor:
            tensor: Tensor = unpack(held)
            self.look(self.saved[id(held)], tensor.detach())
            return tensor

        return watched_pack, watched_unpack

    def look(self, saved: Saved, found: Tensor) -> None:
        # The memory itself may have been changed since, without a record: autograd would return what it is now.
        is_other = saved.memory() is not found.untyped_storage()
        is_right = not is_other or same_bits(found, saved.copy)
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

    def allows(self, error: Exception | None) -> bool:
        """Return whether a program may end so; see [Note: Found later]."""
        name = type(error).__name__
        in_this_step = all(look.startswith(f"step {self.step}:") for look in self.wrong)
        is_ours = isinstance(error, DsTbaError)
        return is_ours and (name == "RematerializationError" or (name == "ActivationModifiedError" and in_this_step))


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
    """The steps of a program, through a cache or without.

    Attributes:
        results: of each step, losses, gradients and errors.
        error: with which a mixed program ended.
    """

    def __init__(self, program: Chain, cache: TensorCache | None = None, stores: Sequence[Store[Any]] = ()) -> None:
        self.program, self.cache, self.watch = program, cache, Watch()
        self.calls: Counter[str] = Counter()
        self.results: list[Result] = []
        self.error: Exception | None = None
        self._stores = stores
        self._generator = torch.Generator().manual_seed(program.seed)
        self._numbers = numpy.zeros(program.shape, dtype=numpy.float32)
        self._carried: dict[int, Tensor] = {}
        self._logged: list[tuple[Tensor, Tensor]] = []
        self._make_parameters()

    def _make_parameters(self) -> None:
        program, (rows, columns) = self.program, self.program.shape
        dtype = torch.float32 if program.is_mixed else program.dtype

        def parameter(*shape: int, scale: float = 1.0) -> torch.nn.Parameter:
            return torch.nn.Parameter((torch.randn(shape, generator=self._generator) * scale).to(dtype))

        width = columns if columns <= MAX_SQUARE else 1
        self.vector, self.full, self.scalar = parameter(columns), parameter(rows, columns), parameter()
        self.square = parameter(width, width, scale=width**-0.5)
        self.zeros, self.ones, self.zero = (
            torch.nn.Parameter(made) for made in (torch.zeros(columns), torch.ones(columns), torch.zeros(rows, columns))
        )
        self.parameters = [self.vector, self.full, self.scalar, self.square]
        if program.is_mixed:
            self.parameters += [self.zeros, self.ones, self.zero]
            self.frozen = torch.randn(columns, generator=self._generator)
        else:
            filled = torch.zeros if program.freezes else torch.ones
            self.frozen = torch.nn.Parameter(filled(columns, dtype=dtype), requires_grad=False)
        self._owner = torch.nn.ParameterList(self.parameters)

    def run(self, steps: range) -> None:
        """Run in a thread of its own: what an error in backward left in the thread's queue goes with the thread."""
        worker = threading.Thread(target=self._run, args=(steps,))
        worker.start()
        worker.join()

    def _run(self, steps: range) -> None:
        torch.set_num_threads(self.program.threads)
        for step in steps:
            if self.error is not None:
                return
            torch.manual_seed(step)
            self.watch.step, self.watch.number = step, 0
            if step == self.program.late and not self.program.is_mixed:
                with torch.no_grad():
                    self.frozen.add_(0.5)
            self.results.append([])
            logged, self._logged = self._logged, []
            try:
                self._step(step, self.results[-1], logged)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must come in both
                self.results[-1].append(kind_of(error))
                self.error = error if self.program.is_mixed else None
                del error
            self._update()

    def _step(self, step: int, result: Result, logged: list[tuple[Tensor, Tensor]]) -> None:
        getattr(self, "_" + self.program.backward.replace(" ", "_"))(step, result)
        for statistic, made in logged:
            result.append(bits(torch.autograd.grad(statistic, [made])[0]))

    # ---- ways of backward -------------------------------------------------------------------------------------------

    def _plain(self, step: int, result: Result) -> None:
        first, _ = self._forward(step, result)
        self._backward(first, result)

    def _at_once(self, step: int, result: Result) -> None:
        first, second = self._forward(step, result)
        self._backward(first + second, result)

    def _accumulated(self, step: int, result: Result) -> None:
        for _ in range(2):
            self._plain(step, result)

    def _retained(self, step: int, result: Result) -> None:
        first, _ = self._forward(step, result)
        self._backward(first, result, retain_graph=True)
        self._backward(first, result)

    def _two_losses(self, step: int, result: Result) -> None:
        first, second = self._forward(step, result)
        self._backward(first, result, retain_graph=True)
        self._backward(second, result)

    def _step_between(self, step: int, result: Result) -> None:
        """The parameters move between two backwards of one forward."""
        first, second = self._forward(step, result)
        self._backward(first, result, retain_graph=True)
        self._update()
        self._backward(second, result)

    def _again(self, step: int, result: Result) -> None:
        """A second backward of a graph that was freed, or of what it shares with another."""
        first, second = self._forward(step, result)
        self._backward(first, result)
        if step % 2:
            self._backward(second, result)

    def _of_a_part(self, step: int, result: Result) -> None:
        first, second = self._forward(step, result)
        result.append(self._grads(first, [self.vector], retain_graph=True))
        result.append(self._grads(second, [self.full]))
        self._backward(first, result)

    def _inputs(self, step: int, result: Result) -> None:
        first, _ = self._forward(step, result)
        self._backward(first, result, inputs=[self.vector, self.full], retain_graph=True)
        self._backward(first, result, inputs=[self.scalar])

    def _double(self, step: int, result: Result) -> None:
        first, _ = self._forward(step, result)
        self._second_order(first, result)

    def _double_inside(self, step: int, result: Result) -> None:
        with self._saving(step):
            first, _ = self._forward(step, result, opens=False)
            self._second_order(first, result)

    def _second_order(self, loss: Tensor, result: Result) -> None:
        grads = torch.autograd.grad(loss, self.parameters, create_graph=True, allow_unused=True)
        result.append([bits(one) for one in grads])
        total = sum((one.float() ** 2).sum() for one in grads if one is not None and one.requires_grad)
        if isinstance(total, Tensor):
            self._backward(total, result)

    def _dropped(self, step: int, result: Result) -> None:
        self._forward(step, result)
        if step % 2:
            self._plain(step, result)

    def _two_forwards(self, step: int, result: Result) -> None:
        one, _ = self._forward(step, result)
        two, _ = self._forward(step, result)
        for loss in (two, one) if step % 2 else (one, two):
            self._backward(loss, result)

    def _threads(self, step: int, result: Result) -> None:
        """Backwards of several graphs at once."""
        result += self._at_the_same_time([self._forward(step, result)[0] for _ in range(3)])

    def _other_thread(self, step: int, result: Result) -> None:
        """Two losses over one trunk, in two threads at once."""
        result += self._at_the_same_time(self._forward(step, result), retain_graph=True)

    def _at_the_same_time(self, losses: Sequence[Tensor], **options: Any) -> list[Any]:
        found: list[Any] = [None] * len(losses)

        def backward(place: int) -> None:
            try:
                found[place] = self._grads(losses[place], self.parameters, **options)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must come in both
                found[place] = kind_of(error)

        workers = [threading.Thread(target=backward, args=(place,)) for place in range(len(losses))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return found

    # ---- parts of a step --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        if self.cache is None:
            yield
            return
        policy = Drawn(self._stores, self.program.seed + step) if self.program.mixes else None
        with self.cache.saving(policy=policy, around=self.watch.around if self.program.is_mixed else None):
            yield

    def _forward(self, step: int, result: Result, *, opens: bool = True) -> tuple[Tensor, Tensor]:
        x = self._input()
        mark_inputs(x)
        if self.program.is_mixed:
            mark_owned(self._owner)
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
        program = self.program
        is_late = step >= program.late if program.is_mixed else step == program.late
        state = State(
            step, is_late, self.vector, self.square, self.full, self.scalar, self.zeros, self.ones, self.zero,
            self.frozen, x, self.calls, program.may_reenter, self._carried, self._logged,
        )  # fmt: skip
        pool = [self.full * x, (self.full + self.vector).to(program.dtype), torch.tanh(x * self.vector)]
        if program.is_mixed:
            pool[1:] = [(self.full + self.zeros).to(x.dtype), torch.tanh(x * self.vector), x * self.ones]
        for place, line in enumerate(program.lines):
            state.place = place
            made = FUNCTIONS[line.name](state, random.Random(line.seed), pool[line.first], pool[line.second])
            pool.append(made)
        one, two = (
            sum((pool[index].float() * (0.3 + 0.1 * place)).mean() for place, index in enumerate(loss))
            for loss in program.losses
        )
        assert isinstance(one, Tensor) and isinstance(two, Tensor)
        if not program.is_mixed:
            one = one + sum(parameter.float().sum() * 0 for parameter in self.parameters)
        return one + self.full.float().sum() * 0, two + self.full.float().sum() * 0

    def _backward(self, loss: Tensor, result: Result, **options: Any) -> None:
        loss.backward(**options)
        self._note(result)

    def _grads(self, loss: Tensor, wanted: Sequence[Tensor], **options: Any) -> list[Any]:
        return [bits(one) for one in torch.autograd.grad(loss, wanted, allow_unused=True, **options)]

    def _note(self, result: Result) -> None:
        result.append([bits(one.grad) for one in self.parameters])

    def _update(self) -> None:
        """Move the parameters as optimizers do. What is not finite moves nothing."""
        for one in self.parameters:
            if one.grad is not None:
                change = one.grad.nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1) * LEARNING_RATE
                with torch.no_grad():
                    (one if self.program.updates == "versions" else one.data).sub_(change)
                one.grad = None


def bits(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    still = tensor.detach().clone(memory_format=torch.contiguous_format)
    return str(tensor.dtype), tuple(tensor.shape), whole_storage(still).numpy().tobytes()


def kind_of(error: BaseException) -> str:
    """Return the same words for the same situation."""
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

NAMES = {id(rule): name for name, rule in RULES.items()}
# Its own result is held; and an op that a CPU's rms_norm is not made of.
NEVER_MADE = {name for name, rule in RULES.items() if not rule.operands} | {"FusedRmsNormBackward0"}
USABLE = set(RULES) - NEVER_MADE


class CountingSites(Sites):
    """Counts what is rematerialized."""

    def __init__(self, cache: TensorCache, tally: Counter[str]) -> None:
        super().__init__(cache, CpuAccelerator())
        self._tally = tally

    def make(self, recipe: Recipe) -> Tensor:
        made = super().make(recipe)
        self._tally[f"bytes: {recipe.site.op}"] += made.numel()
        for one in recipe.steps:
            self._tally[f"rule: {NAMES[id(one.rule)]}"] += 1
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

    def close(self) -> None:
        self.nvme.close()
        self.host.close()


class Chains(Kind[Chain]):
    """Chains over stores that all of them share."""

    def open(self, directory: str) -> None:
        self._left = contextlib.ExitStack()
        self._left.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        self.stores = Stores(self._left.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        self._left.callback(self.stores.close)
        self.check(WARM_UP)  # torch imports some modules late
        gc.collect()
        gc.freeze()
        self._left.callback(gc.unfreeze)

    def close(self) -> None:
        self._left.close()

    def check(self, program: Chain) -> Outcome:
        present = torch.get_num_threads()
        torch.set_num_threads(program.threads)
        try:
            return self._check(program)
        finally:
            torch.set_num_threads(present)

    def _check(self, program: Chain) -> Outcome:
        tally: Counter[str] = Counter()
        plain = Run(program)
        plain.run(range(program.steps))
        used = self.stores.named(program.stores)
        cache = TensorCache(used, "cpu", program.min_bytes, wait_for_staging=True)
        sites = CountingSites(cache, tally)
        cache.rematerialize(RematStore(cache, sites))
        cache.limit(program.budget_bytes)
        ours = Run(program, cache, used)
        ours.run(range(program.steps))
        is_wrong = bool(ours.watch.wrong)
        if is_wrong and program.may_be_found_later:
            ours.run(range(program.steps, program.late + PATIENCE))
        tally += counted(program, plain, ours, sites)
        if program.may_be_found_later and ours.watch.allows(ours.error):
            tally["found later"] += is_wrong
            failures = []
        else:
            failures = list(failures_of(program, plain, ours))
        del plain, ours
        left = after_a_while(lambda: held(cache, self.stores.nvme, self.stores.host), SETTLE_S)
        return Outcome(failures + ([Failure("left", left)] if left else []), tally)


class CheapChains(Chains):
    def draw(self, seed: int) -> Chain:
        return draw_cheap(seed)


class MixedChains(Chains):
    def draw(self, seed: int) -> Chain:
        return draw_mixed(seed)


WARM_UP = Chain(
    "cheap",
    0,
    (4, 8),
    torch.float32,
    tuple(Line("checkpointed", seed, 0, 1) for seed in range(4)),
    ((6,), (5,)),
    "plain",
)


def counted(program: Chain, plain: Run, ours: Run, sites: Sites) -> Counter[str]:
    """Return what was exercised."""
    summary, watch = sites.summary(), ours.watch
    tally = named("proven", Counter(summary["rematerialized_sites"]))
    tally += named("refused", Counter(summary["refused_sites"])) + named("op", (line.name for line in program.lines))
    tally += named("mixed", watch.mixed)
    tally += named("error", (one for result in plain.results for one in result if isinstance(one, str)))
    tally["packed"] += watch.packed
    tally["made again"] += watch.made_again
    tally["finite"] += not any(is_infinite(one) for result in plain.results for one in result)
    return tally


def failures_of(program: Chain, plain: Run, ours: Run) -> Iterator[Failure]:
    """Yield what is wrong."""
    if ours.watch.wrong:
        yield from (Failure("tensor", text) for text in ours.watch.wrong[:3])
        return
    yield from _differences(program, plain, ours)
    for name, count in ours.calls.items():
        if count > plain.calls[name]:
            yield Failure("calls", f"{name}: {count} instead of {plain.calls[name]}")
    for one in () if program.is_mixed else (one for result in plain.results for one in result):
        if isinstance(one, str) and one not in ERRORS:
            yield Failure("program", one)


def _differences(program: Chain, plain: Run, ours: Run) -> Iterator[Failure]:
    names = ["vector", "full", "scalar", "square", "zeros", "ones", "zero"]
    for step, (expected, found) in enumerate(zip(plain.results, ours.results, strict=False)):
        if expected == found:
            continue
        pairs = enumerate(zip(expected, found, strict=False))
        place = next((one for one, (a, b) in pairs if a != b), min(len(expected), len(found)))
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


def is_infinite(result: Any) -> bool:
    if not isinstance(result, list) or result[0] is None or result[0][0] != "torch.float32" or result[0][1]:
        return False
    return not numpy.isfinite(numpy.frombuffer(result[0][2], dtype=numpy.float32)).all()
