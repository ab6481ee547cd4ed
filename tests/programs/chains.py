"""Chains of ops over a pool of tensors, through a cache that rematerializes and without: two kinds of them.

Every loss and gradient must have the same bits, every error must come in both, and nothing may be left behind. A kind
is what a draw chooses from (:data:`CHOICES`).

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
in turn only. Such programs may get wrong gradients for a while if a step ends with ``RematerializationError``
then: they run on for as long as all checks take to come again. They may also raise ``ActivationModifiedError`` in the
very step that is the first with another result: no parameter has moved by it.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch._dynamo  # which optimizers and checkpoints import late: it is no part of a draw
from support.leftovers import after_a_while, held
from torch import Tensor

from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import mark_inputs, mark_owned
from ds_tba.device.accelerator import Accelerator
from ds_tba.remat.recipe import Recipe
from ds_tba.remat.rules import RULES
from ds_tba.remat.sites import Sites
from ds_tba.remat.store import RematStore
from ds_tba.storage.backends import PosixBackend
from ds_tba.storage.base import Choice, Store
from ds_tba.storage.host import HostStore
from ds_tba.storage.nvme import Lanes, NvmeStore
from ds_tba.storage.path import SwapFile
from ds_tba.storage.staging import StagingRing
from programs.kind import Failure, Kind, Outcome, named
from programs.ops import CHEAP, DTYPES, FUNCTIONS, MIXED, SURPRISES, UNRECORDED, Chance, Op, State
from programs.running import Plain, Tape, Training, kind_of
from programs.trainings import Step

GRAIN = 1 << 15  # elements that one thread of a CPU takes
SETTLE_S = 1.0
STEPS_AFTER = 3  # the first late one
PATIENCE = 64 + 8  # steps from the first late one on, within which all that is checked in turn was checked
LEARNING_RATE = 0.1
WHOLE = {"usual", "retain", "both", "dropped", "several"}
"""Kinds of steps in which a reentrant checkpoint works, but where a graph was freed."""
ERRORS = {"Boom", "modified", "freed", "no derivative"}
"""Kinds of errors with which a step of a program may end."""


# ---- a program ------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """One op, with the places of its arguments in the pool."""

    name: str
    seed: int
    first: int
    second: int


@dataclass(frozen=True)
class Choices:
    """The options from which a kind of chains is drawn, each with its weight."""

    table: dict[Op, int]
    first: int  # tensors of the pool before the first line
    longest: int
    specials: tuple[str, ...]  # ops that at most one line has, in so many of the draws
    special_part: float
    shapes: dict[tuple[int, int], int]
    dtypes: dict[torch.dtype, int]
    steps: dict[Step, int]
    stores: dict[tuple[str, ...], int]
    budgets: dict[int | None, int]
    mixed_part: float  # of the draws, in which a policy draws stores and rematerialization for each storage
    least_bytes: tuple[int, ...] = (1, 1, 64)


CHOICES = {
    "cheap": Choices(
        table=CHEAP,
        first=3,
        longest=14,
        specials=tuple(op.__name__ for op in SURPRISES),
        special_part=0.4,
        shapes={(3, 17): 6, (17, 3): 6, (1, 1): 3, (4, 8): 8, (8, 64): 10, (1, 4099): 2, (3, 1366): 2, (33, 128): 6,
                (4099, 1): 1, (12, 36): 8, (0, 5): 2, (2, 40000): 2},
        dtypes=dict(zip(DTYPES, (6, 4, 1, 1), strict=True)),
        steps={
            Step("usual"): 3,
            **dict.fromkeys(map(Step, ("retain", "of_a_part", "threads", "other_thread")), 1),
            Step("both", how="in turn"): 1, Step("both", how="again"): 1,
            Step("usual", micro_steps=2): 1, Step("inputs", how="backward"): 1, Step("double", how="outside"): 1,
            Step("double", how="inside"): 1, Step("dropped", how="at once"): 1,
            Step("several", micro_steps=2, how="reversed"): 1,
        },
        stores={(): 3, ("nvme",): 1, ("host",): 1, ("nvme", "host"): 1, ("host", "nvme"): 1},
        budgets={None: 2, 0: 1, 1 << 12: 1, 1 << 15: 1},
        mixed_part=0.4,
        least_bytes=(1, 1, 64, 1024),
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
        steps={Step("both", how="at once"): 2, Step("both", how="in turn"): 1, Step("both", how="step between"): 1},
        stores={(): 7, ("nvme",): 1, ("host", "nvme"): 1},
        budgets={None: 8, 1 << 12: 1, 1 << 15: 1},
        mixed_part=0.1,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Chain:
    """A draw."""

    kind: str
    seed: int
    shape: tuple[int, int]
    dtype: torch.dtype
    lines: tuple[Line, ...]
    losses: tuple[tuple[int, ...], tuple[int, ...]]  # of two losses, the places of what they sum
    step: Step
    stores: tuple[str, ...]
    min_bytes: int
    budget_bytes: int | None
    mixes: bool  # a policy draws stores and rematerialization for each storage
    threads: int
    batches: str  # where they are one buffer, that is refilled behind autograd's back between forwards
    freezes: bool  # a row of operands is 0 until the late step
    late: int  # the first step with late changes, and for a cheap program the only one
    updates: str  # "data" changes parameters without a version, as ZeRO does; "versions" as optimizers do
    set_to_none: ClassVar[bool] = True
    input_grad: ClassVar[bool] = False

    @property
    def width(self) -> int:
        return self.shape[1]

    @property
    def is_mixed(self) -> bool:
        return self.kind == "mixed"

    @property
    def steps(self) -> list[Step]:
        return [self.step] * (self.late + STEPS_AFTER)

    def is_late(self, step: int) -> bool:
        return step >= self.late if self.is_mixed else step == self.late

    @property
    def may_raise_more(self) -> bool:
        """See [Note: Late changes]."""
        return any(line.name.startswith("change_") for line in self.lines)

    @property
    def may_be_found_later(self) -> bool:
        """See [Note: Found later]."""
        changes_nothing_at_first = self.is_mixed or self.freezes  # what a change multiplies is 0 until the late step
        return changes_nothing_at_first and any(line.name in UNRECORDED for line in self.lines)

    @property
    def may_reenter(self) -> bool:
        """A reentrant checkpoint works, and PyTorch leaves nothing of it behind, as it does after errors."""
        names = {line.name for line in self.lines}
        return (
            self.step.kind in WHOLE and self.step.how != "again" and not names.intersection(CHOICES["cheap"].specials)
        )


def draw(kind: str, seed: int) -> Chain:
    r, choices = Chance(f"{kind} {seed}"), CHOICES[kind]
    count = r.randint(2, choices.longest)
    special = {r.randrange(count): r.choice(choices.specials)} if r.random() < choices.special_part else {}
    lines = []
    for place in range(count):
        name = special.get(place) or r.weighed(choices.table).__name__
        last = place + choices.first - 1
        operands = (last - min(int(r.expovariate(0.5)), last) for _ in range(2))
        lines.append(Line(name, r.randrange(1 << 30), *operands))
    last = count + choices.first - 1
    first, second = {last, r.randrange(last + 1)}, {r.randrange(last + 1), *r.choice([(), (last,)])}
    shape, stores, step = map(r.weighed, (choices.shapes, choices.stores, choices.steps))
    return Chain(
        kind=kind,
        seed=seed,
        shape=shape,
        dtype=r.weighed(choices.dtypes),
        lines=tuple(lines),
        losses=(tuple(first), tuple(second)),
        step=replace(step, rows=shape[0]),
        stores=stores,
        min_bytes=r.choice(choices.least_bytes),
        budget_bytes=r.weighed(choices.budgets),
        mixes=r.random() < choices.mixed_part,
        threads=r.choice([1, 2, 3]) if shape[0] * shape[1] > GRAIN else 1,
        batches="numpy" if kind == "cheap" and r.random() < 0.3 and not stores else "fresh",
        freezes=r.random() < 0.3,
        late=r.randint(2, 4),
        updates="data" if step.how == "step between" else r.choice(["data", "versions"]),
    )


# ---- running one ----------------------------------------------------------------------------------------------------


class Drawn:
    def __init__(self, stores: Sequence[Store[Any]], seed: int) -> None:
        self._stores, self._random = tuple(stores), random.Random(seed)

    def choose(self, key: Any, nbytes: int) -> Choice:
        stores = tuple(self._random.sample(self._stores, self._random.randint(0, len(self._stores))))
        return Choice(stores, True, "drawn", self._random.random() < 0.8)


class Net(State):
    """Runs a program's lines; returns the first of its losses."""

    def __init__(self, program: Chain) -> None:
        dtype = torch.float32 if program.is_mixed else program.dtype
        super().__init__(program.shape, dtype, 0.0 if program.freezes else 1.0)
        self.program, self.may_reenter = program, program.may_reenter

    def forward(self, x: Tensor) -> Tensor:
        return self.losses(x)[0]

    def losses(self, x: Tensor) -> tuple[Tensor, Tensor]:
        program, self.x = self.program, x
        pool = [self.full * x, (self.full + self.vector).to(program.dtype), torch.tanh(x * self.vector)]
        if program.is_mixed:
            pool[1:] = [(self.full + self.zeros).to(x.dtype), torch.tanh(x * self.vector), x * self.ones]
        for place, line in enumerate(program.lines):
            self.place = place
            made = FUNCTIONS[line.name](self, Chance(line.seed), pool[line.first], pool[line.second])
            pool.append(made)
        one, two = (
            sum((pool[index].float() * (0.3 + 0.1 * place)).mean() for place, index in enumerate(loss))
            for loss in program.losses
        )
        assert isinstance(one, Tensor) and isinstance(two, Tensor)
        one = one + sum(parameter.float().sum() * 0 for parameter in self.parameters())
        self.x, self.kept = None, []
        return one, two + self.full.float().sum() * 0


class Clamped:
    """Moves parameters as optimizers do. What is not finite moves nothing."""

    def __init__(self, parameters: Iterable[Tensor], *, has_versions: bool) -> None:
        self._parameters, self._has_versions = list(parameters), has_versions

    def step(self) -> None:
        for one in self._parameters:
            if one.grad is not None:
                change = one.grad.nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1) * LEARNING_RATE
                with torch.no_grad():
                    (one if self._has_versions else one.data).sub_(change)

    def zero_grad(self, **_: Any) -> None:
        for one in self._parameters:
            one.grad = None


class Course(Training):
    """A chain's steps: the ways of backward that ``running.py`` does not have.

    They run in one thread of their own: what an error in backward left in the thread's queue goes with the thread.
    """

    @property
    def calls(self) -> Counter[str]:
        return self._net.calls

    def _new_net(self) -> Net:
        self._thread = ThreadPoolExecutor(1)
        return Net(self._program)

    def _new_optimizer(self) -> Clamped:
        return Clamped(self._net.parameters(), has_versions=self._program.updates == "versions")

    def go_on(self, steps: Iterable[Step]) -> None:
        self._thread.submit(super().go_on, steps).result()

    def _do(self, step: Step, number: int) -> None:
        torch.set_num_threads(self._program.threads)
        torch.manual_seed(number)
        self._net.is_late = self._program.is_late(number)
        if number == self._program.late:
            with torch.no_grad():
                self._net.frozen.add_(0.5)
        logged, self._net.logged = self._net.logged, []
        super()._do(step, number)
        for statistic, made in logged:
            self._tape.note("statistic", torch.autograd.grad(statistic, [made])[0])

    def _fresh(self, rows: int) -> Tensor:
        return torch.randn(rows, self._program.width, generator=self._data).to(self._program.dtype)

    def _wanted(self, pick: int) -> list[Tensor]:
        return [self._net.vector, self._net.full]

    def _note_states(self) -> None:
        torch.manual_seed(0)  # how many random numbers threads have taken is a matter of luck
        super()._note_states()

    def _both(self, step: Step) -> tuple[Tensor, Tensor]:
        batch = self._batch(step.rows)
        with self._side.saving(batch):
            losses: tuple[Tensor, Tensor] = self._net.losses(batch)
        for loss in losses:
            self._tape.note("loss", loss)
        return losses

    def both(self, step: Step, number: int) -> None:
        """Two losses of one forward: backwards at once, or in turn, also while the parameters move in between.

        "again" is a second backward of what a graph that was freed shares with another.
        """
        first, second = self._both(step)
        if step.how == "at once":
            self._backward(first + second)
            return
        self._backward(first, retain_graph=step.how != "again")
        self._note_grads()
        if step.how == "step between":
            self._optimizer.step()
            self._optimizer.zero_grad()
        if step.how != "again" or number % 2:
            self._backward(second)

    def of_a_part(self, step: Step, number: int) -> None:
        first, second = self._both(step)
        self._note_all(torch.autograd.grad(first, [self._net.vector], retain_graph=True, allow_unused=True))
        self._note_all(torch.autograd.grad(second, [self._net.full], allow_unused=True))
        self._backward(first)

    def threads(self, step: Step, number: int) -> None:
        """Backwards of several graphs at once."""
        self._at_the_same_time([self._forward(self._batch(step.rows)) for _ in range(3)])

    def other_thread(self, step: Step, number: int) -> None:
        """Two losses over one trunk, in two threads at once."""
        self._at_the_same_time(self._both(step), retain_graph=True)

    def _at_the_same_time(self, losses: Sequence[Tensor], **options: Any) -> None:
        wanted = [one for one in self._net.parameters() if one.requires_grad]

        def gradients(loss: Tensor) -> tuple[Any, ...]:
            try:
                return torch.autograd.grad(loss, wanted, allow_unused=True, **options)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must come in both
                return (kind_of(error),)

        with ThreadPoolExecutor(len(losses)) as threads:
            for one in threads.map(gradients, losses):
                self._note_all(one)

    def _note_all(self, found: Iterable[Any]) -> None:
        for one in found:
            self._tape.note("raises" if isinstance(one, str) else "autograd.grad", one)


class Cached(Plain):
    def __init__(self, program: Chain, cache: TensorCache, stores: Sequence[Store[Any]]) -> None:
        self._program, self._cache, self._stores = program, cache, stores
        self._net, self._forwards = torch.nn.Module(), 0

    def watch(self, net: torch.nn.Module) -> None:
        self._net = net

    def saving(self, *inputs: Tensor) -> AbstractContextManager[Any]:
        mark_inputs(inputs)
        mark_owned(self._net)
        program = self._program
        policy = Drawn(self._stores, program.seed + self._forwards) if program.mixes else None
        self._forwards += 1
        return self._cache.saving(policy=policy)


# ---- comparing ------------------------------------------------------------------------------------------------------

NAMES = {id(rule): name for name, rule in RULES.items()}
# Its own result is held; and an op that a CPU's rms_norm is not made of.
NEVER_MADE = {name for name, rule in RULES.items() if not rule.operands} | {"FusedRmsNormBackward0"}
USABLE = set(RULES) - NEVER_MADE


class CountingSites(Sites):
    def __init__(self, cache: TensorCache, tally: Counter[str]) -> None:
        super().__init__(cache, Accelerator())
        self._tally = tally

    def make(self, recipe: Recipe) -> Tensor:
        made = super().make(recipe)
        self._tally[f"bytes: {recipe.site.op}"] += made.numel()
        for one in recipe.steps:
            self._tally[f"rule: {NAMES[id(one.rule)]}"] += 1
        return made


def _nvme(directory: str) -> NvmeStore:
    backend = PosixBackend()
    ring = StagingRing(Accelerator(), backend, 16 << 20)
    return NvmeStore([SwapFile(Path(directory), 64 << 20)], backend, ring, Lanes(1, 1), "full")


def check(program: Chain, directory: str) -> Outcome:
    """Run a program without us and with us, over stores of its own; return what is wrong."""
    threads = torch.get_num_threads()
    with contextlib.ExitStack() as last:
        last.callback(torch.set_num_threads, threads)
        stores = [last.enter_context(contextlib.closing(MAKE[name](directory))) for name in program.stores]
        return _compare(program, stores)


def _compare(program: Chain, stores: list[Store[Any]]) -> Outcome:
    tally: Counter[str] = Counter()
    plain, found = Tape(), Tape()
    reference = Course(program, Plain(), plain)
    reference.run()
    cache = TensorCache(stores, "cpu", program.min_bytes, wait_for_staging=True)
    sites = CountingSites(cache, tally)
    cache.rematerialize(RematStore(cache, sites))
    cache.limit(program.budget_bytes)
    ours = Course(program, Cached(program, cache, stores), found)
    ours.run()
    failures = list(failures_of(program, plain, found))
    if program.may_be_found_later and plain.different(found):
        ours.go_on([program.step] * PATIENCE)
        tally["found later"] = is_found(plain, found)
        failures = [] if tally["found later"] else failures
    more_calls = ours.calls - reference.calls
    failures += [Failure("calls", f"more than without us: {more_calls}")] if more_calls else []
    summary = sites.summary()
    tally += named("proven", Counter(summary["rematerialized_sites"]))
    tally += named("refused", Counter(summary["refused_sites"])) + named("op", (line.name for line in program.lines))
    tally += named("error", errors_in(plain))
    tally["finite"] += plain.is_finite
    tally["made again"] = cache.stats.rematerialized_bytes > 0
    del reference, ours
    left = after_a_while(lambda: held(cache), SETTLE_S)
    return Outcome(failures + ([Failure("left", left)] if left else []), tally)


MAKE: dict[str, Callable[[str], Any]] = {"nvme": _nvme, "host": lambda _: HostStore(Accelerator(), 16 << 20)}
KINDS = {kind: Kind(partial(draw, kind), check) for kind in CHOICES}


def errors_in(tape: Tape) -> list[str]:
    return [what for _, label, what in tape.entries if label == "raises"]


def is_found(plain: Tape, found: Tape) -> bool:
    """Return whether a program may differ so; see [Note: Found later]."""
    first = plain.different(found)[0]
    of_step = (found.entries[first][0], "raises", "modified")
    ends = any(text.startswith("RematerializationError") for place, text in found.messages.items() if place >= first)
    return ends or of_step in found.entries[first:]


def failures_of(program: Chain, plain: Tape, found: Tape) -> Iterator[Failure]:
    different = plain.different(found)
    late = (program.late, "raises", "modified")
    # After such an error parameters differ, so later observations cannot be compared.
    if different and not (program.may_raise_more and found.entries[different[0] : different[0] + 1] == [late]):
        yield Failure("difference", str(plain.difference(found)))
    if not ERRORS.issuperset(errors_in(plain)):
        yield Failure("program", str(plain.messages))
