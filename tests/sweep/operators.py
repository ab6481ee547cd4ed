"""Programs from PyTorch's own database of operators and modules, each run without us and with us, compared bit for bit.

The database (``torch.testing._internal``) has sample inputs for every operator. A *subject* is one operator or module,
a *draw* one of its inputs, and a *shape* the program around it; see :data:`SHAPES`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from support.doubles import Accelerator, wait_for_writes
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves, tree_map

from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import mark_owned
from ds_tba.remat.sites import Sites
from ds_tba.remat.store import RematStore
from ds_tba.storage.nvme import NvmeStore

DTYPES = (torch.float32, torch.bfloat16, torch.complex64)
SHAPES = ("alone", "chain", "in place", "autocast")
PLACEMENTS = ("nvme", "keep")
# Draws of a subject in one dtype: the first, the last, and as many between them. Some operators have a thousand.
DRAWS = 5
# In CI one of so many names runs: the first of the sorted list, and every thirtieth behind it.
STRIDE = 30
SEED = 20261126

Saving = Callable[[], AbstractContextManager[Any]]
Call = Callable[..., Any]
Forward = Callable[[], tuple[Any, list[Tensor]]]
Result = list[Tensor] | type[Exception]


@dataclass(frozen=True)
class Subject:
    """An operator or a module of the database."""

    name: str  # in PyTorch's words, with the variant
    info: Any  # an ``OpInfo`` or a ``ModuleInfo``
    is_module: bool

    def dtypes(self) -> list[torch.dtype]:
        """Return those of :data:`DTYPES` in which the subject has a gradient on a CPU."""
        have = self.info.dtypes if self.is_module else self.info.supported_backward_dtypes("cpu")
        return [dtype for dtype in DTYPES if dtype in have]

    def shapes(self, dtype: torch.dtype) -> list[str]:
        """Return those of :data:`SHAPES` that exist for the subject."""
        without = set() if dtype is torch.float32 else {"autocast"}
        if self.is_module or self.info.get_inplace() is None:
            without.add("in place")
        return [shape for shape in SHAPES if shape not in without]

    def draws(self, dtype: torch.dtype) -> list[Any]:
        """Return some of the inputs that the database has: always the same ones."""
        torch.manual_seed(SEED)
        if not self.is_module:
            return _spread(list(self.info.sample_inputs("cpu", dtype, requires_grad=True)))
        found, options = [], {"device": "cpu", "dtype": dtype, "requires_grad": True}
        for training in (True, False) if self.info.train_and_eval_differ else (True,):
            made = self.info.module_inputs_func(self.info, training=training, **options)
            found += [(one, training) for one in _spread(list(made))]
        return found


def _spread(found: list[Any]) -> list[Any]:
    if len(found) <= DRAWS:
        return found
    return [found[index * (len(found) - 1) // (DRAWS - 1)] for index in range(DRAWS)]


@lru_cache
def subjects() -> dict[str, Subject]:
    """Return every operator and module that is differentiable in one of :data:`DTYPES`, sorted by name."""
    found = [
        Subject(one.name + ("." + one.variant_test_name if one.variant_test_name else ""), one, False)
        for one in op_db
        if one.supports_autograd
    ]
    found += [Subject(one.name, one, True) for one in module_db]
    names = Counter(one.name for one in found)
    assert max(names.values()) == 1, names.most_common(3)
    return {one.name: one for one in sorted(found, key=lambda one: one.name) if one.dtypes()}


def part_of_names(part: int, parts: int, *, in_ci: bool) -> list[str]:
    """Return one of so many parts of the thirtieth that CI runs, or of the others; together the parts are all."""
    chosen = [name for number, name in enumerate(subjects()) if (number % STRIDE == 0) == in_ci]
    return chosen[part::parts]


@dataclass(frozen=True)
class Program:
    """One draw of a subject in one shape."""

    subject: Subject
    dtype: torch.dtype
    number: int  # place of the draw among the subject's
    draw: Any
    shape: str

    @property
    def where(self) -> str:
        """The dtype and the shape."""
        return f"{str(self.dtype).removeprefix('torch.')}, {self.shape}"

    def __str__(self) -> str:
        return f"{self.subject.name}, draw {self.number}, {self.where}"

    def forward(self) -> Forward:
        """Return the forward; its leaves are new, and the same each time."""
        torch.manual_seed(SEED)
        call, values, leaves = (self._module if self.subject.is_module else self._operator)()
        if self.shape == "alone":
            return lambda: (call(*values), leaves)
        one = torch.ones((), requires_grad=True)

        def forward() -> tuple[Any, list[Tensor]]:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.shape == "autocast"):
                # Products with one: the same values, which the graph can make again.
                made = call(*tree_map(lambda value: value * one.to(value.dtype) if _is_leaf(value) else value, values))
                return tree_map(_through_rules, made), leaves

        return forward

    def _module(self) -> tuple[Call, tuple[Any, ...], list[Tensor]]:
        module_input, training = self.draw
        made, given = module_input.constructor_input, module_input.forward_input
        module: nn.Module = self.subject.info.module_cls(*made.args, **made.kwargs).to("cpu", self.dtype)
        mark_owned(module.train(training))
        for one in module.modules():
            one.register_forward_pre_hook(lambda module, _: mark_owned(module))
        values, leaves = _copied((given.args, given.kwargs))
        return lambda args, kwargs: module(*args, **kwargs), values, [*leaves, *module.parameters(), *module.buffers()]

    def _operator(self) -> tuple[Call, tuple[Any, ...], list[Tensor]]:
        info, draw = self.subject.info, self.draw
        run = info.get_inplace() if self.shape == "in place" else info.op
        values, leaves = _copied((draw.input, draw.args, draw.kwargs))
        return lambda x, args, kwargs: draw.output_process_fn_grad(run(x, *args, **kwargs)), values, leaves


def programs(subject: Subject) -> Iterator[Program]:
    """Yield the programs of a subject in all of its dtypes and shapes."""
    for dtype in subject.dtypes():
        for number, draw in enumerate(subject.draws(dtype)):
            for shape in subject.shapes(dtype):
                if not (shape == "in place" and draw.broadcasts_input):
                    yield Program(subject, dtype, number, draw, shape)


# ---- one run --------------------------------------------------------------------------------------------------------


def _copied(values: Any) -> tuple[Any, list[Tensor]]:
    """Copies of a draw's tensors, each tensor once, and those of them that are leaves."""
    made: dict[int, Tensor] = {}
    leaves: list[Tensor] = []

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = _copy_of(value)
            if value.requires_grad:
                leaves.append(made[id(value)].requires_grad_())
        return made[id(value)]

    return tree_map(copy, values), leaves


def _copy_of(tensor: Tensor) -> Tensor:
    """The same bytes at the same offset and strides."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or type(tensor) is not Tensor:
        return tensor.clone()
    storage = tensor.untyped_storage().clone()
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.layout is torch.strided


def _through_rules(made: Any) -> Any:
    """Return what operators make of an output for which there are rules, so that storages are left out."""
    if not (isinstance(made, Tensor) and made.requires_grad and made.layout is torch.strided) or made.is_nested:
        return made
    square = made * made
    if made.is_complex():
        return torch.tanh(torch.sigmoid(square) * made) * square
    gated = functional.gelu(functional.silu(made) * square)
    if made.dim() and made.numel():
        gated = functional.layer_norm(gated, gated.shape[-1:])
    return torch.exp(torch.tanh(gated * made)) * torch.softmax(gated, -1)


def run(forward: Forward, saving: Saving, store: NvmeStore | None = None) -> Result:
    """Return outputs and gradients, or the type of the error that the program has raised.

    Args:
        store: whose writes end before backward.
    """
    torch.manual_seed(SEED)
    try:
        with saving():
            made, leaves = forward()
        outputs = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        differentiable = [one for one in outputs if one.requires_grad]
        kept = [_snapshot(one) for one in outputs]
        if store is not None:
            wait_for_writes(store)
        del made, outputs
        torch.autograd.backward(differentiable, [_cotangent(one) for one in differentiable])
    except Exception as error:  # noqa: BLE001 - whatever an operator raises
        return type(error)
    grads = [one.grad if one.grad is not None else torch.zeros(0) for one in leaves]
    return kept + [_snapshot(one) for one in grads] + [one.detach() for one in leaves if not one.requires_grad]


def _snapshot(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return _copy_of(tensor.resolve_conj().resolve_neg())


def _cotangent(output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    if output.layout is not torch.strided or output.is_nested:
        return torch.ones_like(output)
    return torch.randn(output.shape, generator=generator, dtype=torch.float32).to(output.dtype)


def difference(expected: Result, found: Result) -> str:
    """Return where two runs differ first; empty where each bit is the same. NaN is equal to NaN, whatever its bits."""
    if isinstance(expected, type) or isinstance(found, type):
        other, one = (result.__name__ if isinstance(result, type) else "no error" for result in (found, expected))
        return "" if expected is found else f"{other} instead of {one}"
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        reason = _tensors_differ(a, b)
        if reason:
            return f"tensor {number} of {len(expected)}: {reason}"
    return ""


def _tensors_differ(a: Tensor, b: Tensor) -> str:
    for what in ("layout", "dtype", "shape"):
        if getattr(a, what) != getattr(b, what):
            return f"{what} {getattr(b, what)} instead of {getattr(a, what)}"
    if a.is_nested:
        parts = zip(a.unbind(), b.unbind(), strict=True)
        return next(filter(None, (_tensors_differ(one, other) for one, other in parts)), "")
    if a.layout is not torch.strided:
        return _tensors_differ(a.to_dense(), b.to_dense())
    if a.stride() != b.stride():
        return f"strides {b.stride()} instead of {a.stride()}"
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    same = (a == b) & (a.signbit() == b.signbit())
    if a.is_floating_point():
        same |= a.isnan() & b.isnan()
    count = int((~same).sum())
    if not count:
        return ""
    return f"{count} of {a.numel()} elements, largest error {float((a.double() - b.double()).abs().max())}"


# ---- many runs ------------------------------------------------------------------------------------------------------


class Sweep:
    """Runs subjects, with a store for placement ``nvme``, and counts.

    Attributes:
        counts: of runs, as "dtype, shape, placement", and of those that ``raised``, without us and with us; of the
            ``operators`` and ``modules`` compared; of bytes that went to the drive (``moved``) or were rematerialized.
        unsteady: programs that differ from one plain run to the next, by subject.
        differences: a line for each run that differs.
    """

    def __init__(self, store: NvmeStore) -> None:
        self.store = store
        self.counts, self.unsteady = Counter[str](), Counter[str]()
        self.differences: list[str] = []

    def over(self, names: Iterable[str]) -> None:
        """Run every draw of these subjects in every dtype, shape and placement."""
        for name in names:
            subject = subjects()[name]
            compared = [self._compare(program) for program in programs(subject)]
            self.counts["modules" if subject.is_module else "operators"] += any(compared)

    def _compare(self, program: Program) -> bool:
        """Return whether the program was compared."""
        expected = run(program.forward(), nullcontext)
        is_steady = not difference(expected, run(program.forward(), nullcontext))
        for placement in PLACEMENTS if is_steady else ():
            reason = difference(expected, self._with_us(program, placement))
            if reason and _is_unsteady(program, expected):
                is_steady = False
                break
            self.counts[f"{program.where}, {placement}"] += 1
            self.counts["raised"] += isinstance(expected, type)
            if reason:
                self.differences.append(f"{program}, {placement}: {reason}")
        self.unsteady[program.subject.name] += not is_steady
        return is_steady

    def _with_us(self, program: Program, placement: str) -> Result:
        store, is_alone = self.store, program.shape == "alone"
        cache = TensorCache([store] if placement == "nvme" else [], "cpu", 1, wait_for_staging=True)
        # Alone, everything eligible goes to the drive; else what can be made again stays away from it.
        if not is_alone or placement == "keep":
            cache.rematerialize(RematStore(cache, Sites(cache, Accelerator())))
        before = store.stats.offloaded_bytes
        # In half of the draws backward reads from the drive, in the others it may come before the write has ended.
        reads = placement == "nvme" and (is_alone or program.number % 2 == 0)
        result = run(program.forward(), cache.saving, store if reads else None)
        try:
            cache.end_micro_step()
        except Exception as error:  # noqa: BLE001 - told as a difference
            return type(error)
        self.counts["moved"] += store.stats.offloaded_bytes - before
        self.counts["rematerialized"] += cache.stats.rematerialized_bytes
        return result


def _is_unsteady(program: Program, expected: Result) -> bool:
    """Return whether plain runs differ where memory lies elsewhere; some kernels of LAPACK ask for that."""
    held = []
    for size in range(1, 9):
        held.append([torch.empty(size * 17 + place) for place in range(4)])
        if difference(expected, run(program.forward(), nullcontext)):
            return True
    return False
