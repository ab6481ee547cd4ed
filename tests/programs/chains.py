"""Chains of ops over a pool of tensors, through a cache that rematerializes and without: two kinds of them.

Every loss and gradient must have the same bits, every error must come in both, and nothing may be left behind. A kind
is what a draw chooses from (:data:`KINDS`).

``cheap``: cheap ops in any order, many ways of backward, and sometimes a surprise in one late step.

``mixed``: what makes a site equal in one step and unequal in another. Ops in place whose second operand has a wider
dtype, other orders of the same elements, parameters that begin at 0 and 1 and move, graphs carried from one forward
into the next, an update between two backwards of one forward, statistics that are kept, and changes without a record of
autograd's that begin in a late step.

[Note: Late changes] An operand that is changed in place in a late step, after its site was proven, may raise
``ActivationModifiedError`` where autograd would not have asked for it: cheap programs with a surprise may do so in that
step. What no op has saved, and is changed under ``no_grad`` or through ``data`` in late steps only, nobody can see
there: it is drawn in mixed programs only.

[Note: Found later] What is equal at first, and is changed later without a record of autograd's, may be found by checks
in turn only. Such mixed programs may get wrong gradients for a while if a step ends with ``RematerializationError``
then: they run on for as long as all checks take to come again. They may also raise ``ActivationModifiedError`` in the
very step that is the first with another result: no parameter has moved by it.
"""

from __future__ import annotations

import contextlib
import gc
import random
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from support.leftovers import after_a_while, held
from torch import Tensor

from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import mark_inputs, mark_owned, whole_storage
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
from programs.kind import Failure, Kind, Outcome, named
from programs.ops import CHEAP, DTYPES, FUNCTIONS, MAX_SQUARE, MIXED, SURPRISES, UNRECORDED, Boom, State, Table

GRAIN = 1 << 15  # elements that one thread of a CPU takes
SETTLE_S = 1.0
STEPS_AFTER = 3  # the first late one
PATIENCE = 64 + 8  # steps from the first late one on, within which all that is checked in turn was checked
LEARNING_RATE = 0.1
WHOLE = {"plain", "retained", "two losses", "dropped", "two forwards", "other threads", "accumulated"}
"""Ways of backward in which a reentrant checkpoint works."""
ERRORS = {"boom", "modified", "freed", "no derivative"}
"""Those that a program may end a step with."""


# ---- a program ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One op, with the places of its arguments in the pool."""

    name: str
    seed: int
    first: int
    second: int


@dataclass(frozen=True)
class Choices:
    """What a kind of chains is drawn from, with weights.

    Attributes:
        first: tensors of the pool before the first line.
        longest: lines.
        specials: ops that at most one line has, in ``special_part`` of the draws.
    """

    table: Table
    first: int
    longest: int
    specials: tuple[str, ...]
    special_part: float
    shapes: dict[tuple[int, int], int]
    dtypes: dict[torch.dtype, int]
    backwards: dict[str, int]
    stores: dict[tuple[str, ...], int]


KINDS = {
    "cheap": Choices(
        table=CHEAP,
        first=3,
        longest=14,
        specials=tuple(SURPRISES.ops),
        special_part=0.4,
        shapes={(3, 17): 6, (17, 3): 6, (1, 1): 3, (4, 8): 8, (8, 64): 10, (1, 4099): 2, (3, 1366): 2, (33, 128): 6,
                (4099, 1): 1, (12, 36): 8, (0, 5): 2, (2, 40000): 2},
        dtypes=dict(zip(DTYPES, (6, 4, 1, 1), strict=True)),
        backwards={"plain": 3, **dict.fromkeys(
            ("retained", "two losses", "of a part", "inputs", "double", "double inside", "dropped", "two forwards",
             "threads", "again", "other threads", "other thread", "accumulated"), 1)},
        stores={(): 3, ("nvme",): 1, ("host",): 1, ("nvme", "host"): 1, ("host", "nvme"): 1},
    ),
    "mixed": Choices(
        table=MIXED,
        first=4,
        longest=8,
        specials=("late_change",),
        special_part=0.15,
        # Columns in threes, for images; numbers of elements that leave a few behind a CPU's vectors.
        shapes={(1, 33): 4, (3, 21): 4, (5, 33): 6, (7, 9): 4, (11, 3): 2, (23, 33): 3, (2, 129): 3, (17, 15): 4},
        dtypes={torch.float32: 4, torch.bfloat16: 1},
        backwards={"at once": 2, "two losses": 1, "step between": 1},
        stores={(): 7, ("nvme",): 1, ("host", "nvme"): 1},
    ),
}  # fmt: skip


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
    late: int = 3
    updates: str = "versions"

    @property
    def is_mixed(self) -> bool:
        return self.kind == "mixed"

    @property
    def steps(self) -> int:
        return self.late + STEPS_AFTER

    def is_late(self, step: int) -> bool:
        return step >= self.late if self.is_mixed else step == self.late

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
            f"    {place}: {line.name}[{line.seed}]({line.first}, {line.second})"
            for place, line in enumerate(self.lines, KINDS[self.kind].first)
        )
        return f"{self.kind} program of seed {self.seed}: {settings}\n{ops}"


def draw(kind: str, seed: int) -> Chain:
    """The program of a seed: always the same one."""
    r, choices = random.Random(f"{kind} {seed}"), KINDS[kind]
    count = r.randint(2, choices.longest)
    special = {r.randrange(count): r.choice(choices.specials)} if r.random() < choices.special_part else {}
    lines = _lines(r, choices.table, count, choices.first, special)
    last = count + choices.first - 1
    first, second = {last, r.randrange(last + 1)}, {r.randrange(last + 1), *r.choice([(), (last,)])}
    shape, stores, backward = (_weighed(r, one) for one in (choices.shapes, choices.stores, choices.backwards))
    return Chain(
        kind=kind,
        seed=seed,
        shape=shape,
        dtype=_weighed(r, choices.dtypes),
        lines=lines,
        losses=(tuple(first), tuple(second)),
        backward=backward,
        stores=stores,
        min_bytes=r.choice([1, 1, 64, 1024]),
        budget_bytes=r.choice([None, None, 0, 1 << 12, 1 << 15]),
        mixes=r.random() < 0.4,
        threads=r.choice([1, 2, 3]) if shape[0] * shape[1] > GRAIN else 1,
        refills=kind == "cheap" and r.random() < 0.3 and not stores,
        freezes=r.random() < 0.3,
        late=r.randint(2, 4),
        updates="data" if backward == "step between" else r.choice(["data", "versions"]),
    )


def _weighed(r: random.Random, weights: dict[Any, int]) -> Any:
    return r.choices([*weights], [*weights.values()])[0]


def _lines(r: random.Random, table: Table, count: int, size: int, special: dict[int, str]) -> tuple[Line, ...]:
    """Draw so many lines over a pool of ``size`` tensors, with ops of a name at special places."""
    lines = []
    for place in range(count):
        name = special.get(place) or table.choose(r)
        last = place + size - 1
        first, second = (last - min(int(r.expovariate(0.5)), last) for _ in range(2))
        lines.append(Line(name, r.randrange(1 << 30), first, second))
    return tuple(lines)


# ---- running one ----------------------------------------------------------------------------------------------------

Result = list[Any]
PARAMETERS = ("vector", "full", "scalar", "square", "zeros", "ones", "zero")


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
    """

    def __init__(self, program: Chain, cache: TensorCache | None = None, stores: Sequence[Store[Any]] = ()) -> None:
        self.program, self.cache = program, cache
        self.calls: Counter[str] = Counter()
        self.results: list[Result] = []
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
        self.parameters = [getattr(self, name) for name in PARAMETERS]
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
            torch.manual_seed(step)
            if step == self.program.late:
                with torch.no_grad():
                    self.frozen.add_(0.5)
            self.results.append([])
            logged, self._logged = self._logged, []
            try:
                self._step(step, self.results[-1], logged)
                self._update()
            except Exception as error:  # noqa: BLE001 - whatever it is, it must come in both
                self.results[-1].append(kind_of(error))
                del error
            for one in self.parameters:  # how far a backward comes that fails is nobody's business
                one.grad = None

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

    def _other_threads(self, step: int, result: Result) -> None:
        """Another number of torch's threads in backward."""
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
        with self.cache.saving(policy=policy):
            yield

    def _forward(self, step: int, result: Result, *, opens: bool = True) -> tuple[Tensor, Tensor]:
        x = self._input()
        mark_inputs(x)
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
        is_late = program.is_late(step)
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
        one = one + sum(parameter.float().sum() * 0 for parameter in self.parameters)
        return one, two + self.full.float().sum() * 0

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
    """Chains of a kind, over stores that all of them share."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(partial(draw, kind), self._check)

    def open(self, directory: str) -> None:
        super().open(directory)
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

    def _check(self, program: Chain, _directory: str) -> Outcome:
        present = torch.get_num_threads()
        torch.set_num_threads(program.threads)
        try:
            return self._compare(program)
        finally:
            torch.set_num_threads(present)

    def _compare(self, program: Chain) -> Outcome:
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
        failures = list(failures_of(program, plain, ours))
        if failures and program.may_be_found_later:
            ours.run(range(program.steps, program.late + PATIENCE))
            tally["found later"] = is_found(plain, ours)
            failures = [] if tally["found later"] else failures
        tally += counted(program, plain, sites)
        tally["made again"] = cache.stats.rematerialized_bytes > 0
        del plain, ours
        left = after_a_while(lambda: held(cache, self.stores.nvme, self.stores.host), SETTLE_S)
        return Outcome(failures + ([Failure("left", left)] if left else []), tally)


WARM_UP = Chain(
    "cheap",
    0,
    (4, 8),
    torch.float32,
    tuple(Line("checkpointed", seed, 0, 1) for seed in range(4)),
    ((6,), (5,)),
    "plain",
)


def counted(program: Chain, plain: Run, sites: Sites) -> Counter[str]:
    """Return what was exercised."""
    summary = sites.summary()
    tally = named("proven", Counter(summary["rematerialized_sites"]))
    tally += named("refused", Counter(summary["refused_sites"])) + named("op", (line.name for line in program.lines))
    tally += named("error", errors_in(plain.results))
    tally["finite"] += not any(is_infinite(one) for result in plain.results for one in result)
    return tally


def errors_in(results: Iterable[Result]) -> list[str]:
    return [one for result in results for one in result if isinstance(one, str)]


def is_found(plain: Run, ours: Run) -> bool:
    """Return whether a program may differ so; see [Note: Found later]."""
    pairs = enumerate(zip(plain.results, ours.results, strict=False))
    first = next((step for step, (one, other) in pairs if one != other), len(plain.results))
    later = errors_in(ours.results[first:])
    return "modified" in errors_in(ours.results[first : first + 1]) or any(
        one.startswith("RematerializationError") for one in later
    )


def failures_of(program: Chain, plain: Run, ours: Run) -> Iterator[Failure]:
    """Yield what is wrong."""
    yield from _differences(program, plain, ours)
    for name, count in ours.calls.items():
        if count > plain.calls[name]:
            yield Failure("calls", f"{name}: {count} instead of {plain.calls[name]}")
    yield from (Failure("program", one) for one in errors_in(plain.results) if one not in ERRORS)


def _differences(program: Chain, plain: Run, ours: Run) -> Iterator[Failure]:
    for step, (expected, found) in enumerate(zip(plain.results, ours.results, strict=False)):
        if expected == found:
            continue
        pairs = enumerate(zip(expected, found, strict=False))
        place = next((one for one, (a, b) in pairs if a != b), min(len(expected), len(found)))
        a, b = ((some[place : place + 1] or ["nothing"])[0] for some in (expected, found))
        if b == "modified" and a != b and step == program.late and program.may_raise_more:
            return  # what comes after is not comparable: the parameters are others
        if isinstance(a, str) or isinstance(b, str):
            a, b = (one if isinstance(one, str) else "no error" for one in (a, b))
            yield Failure("error", f"step {step}, {place}: {b} instead of {a}")
        else:
            where = [name for name, one, two in zip(PARAMETERS, a, b, strict=False) if one != two]
            yield Failure("difference", f"step {step}, {place} of {len(expected)}: {where}")
        return


def is_infinite(result: Any) -> bool:
    if not isinstance(result, list) or result[0] is None or result[0][0] != "torch.float32" or result[0][1]:
        return False
    return not numpy.isfinite(numpy.frombuffer(result[0][2], dtype=numpy.float32)).all()
