"""Recipes: how a saved storage is made again from others, found in the graph while forward builds it.

Knows graph nodes, rules and the objects that autograd holds; does not know where storages go, nor what is proven.

[Note: Operands] A node's saved operands are the objects that our pack hook returned for them: they are looked up, never
unpacked, and no hook of the user is called. An operand that the node does not hold may have been saved by another node:
each saved view is noted at the node that made it, in the node's ``metadata``, and lives no longer for that. Else it is
made again in turn, within a bound of steps and of bytes; a node that is wanted twice is one step. A recipe holds views
of its own of what it needs, not the nodes: another backward may free the buffers of a node.

[Note: What is refused] The output of an op is made again only where it is whole, dense and untouched since, and where
all that it is made of is under autograd's eye until backward. So no operand is a parameter, a buffer of a module or an
input of the model, whose owners change them without a version: ZeRO's optimizer in ``engine.step()``, a data loader.
Of a parameter or buffer that the op itself saves, a norm's weight say, a copy is the operand, taken in forward, if it
is small beside what need not be saved for it. No graph of an earlier forward is entered: what was changed in between,
it does not tell. What the graph cannot tell even of this forward, a change through ``tensor.data`` say, only the
comparisons in ``sites.py`` see.

[Note: Order of elements] The vector loop of a CPU's kernel and the scalar loop behind it may round differently, so the
last bits of an element may depend on its place in memory. Steps get their operands in the strides of forward, and give
their results in the same, but for copies and casts: the graph does not tell into which memory format. Behind one of
those only such ops are made again whose results are rounded once, wherever an element lies.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, TypeGuard

import torch
from torch.nn import functional

from ds_tba.autograd.rules import PASSING, RULES, Operand, Output, Rule, constant, is_passing
from ds_tba.autograd.saved import Keeper, PassedThrough, SavedCounted, SavedView, nbytes_of
from ds_tba.autograd.tensors import base_of, has_plain_storage, is_input, is_owned, is_parameter
from ds_tba.device.accelerator import Clock

MAX_OPS = 8
# Bytes of the steps between, relative to the result's.
MAX_BETWEEN_FACTOR = 4
# Recipes whose operands are made again themselves, one behind the other.
MAX_DEPTH = 4
# Copies of parameters take no larger part of the result's bytes, each.
MAX_COPIED_PART = 1 / 16
UNSAVED = "an operand that nobody saves"
_NOTE = "ds_tba"
_NORMS: frozenset[CodeType] = frozenset(
    getattr(functional, name).__code__ for name in ("layer_norm", "rms_norm") if hasattr(functional, name)
)

Held = SavedView | SavedCounted | PassedThrough


class NoRecipeError(Exception):
    """A tensor cannot be made again; the text is the reason, in the report's words."""


def is_supported() -> bool:
    """Whether this PyTorch shows what a node holds without unpacking it, and when a node was made."""
    saved: Any = getattr(torch._C._autograd, "SavedTensor", None)
    return hasattr(saved, "data") and hasattr(saved, "unpack_hook") and hasattr(torch.autograd, "_get_sequence_nr")


def note(tensor: torch.Tensor, held: SavedView | SavedCounted) -> None:
    """A tensor was saved: what recipes may want to know of it later."""
    if isinstance(held, SavedView):
        note_view(tensor, held)
    note_epsilon(tensor, held)


def note_view(tensor: torch.Tensor, view: SavedView) -> None:
    """Note at the node that made a tensor that the tensor is saved; see [Note: Operands].

    One that was changed in place may have had other values when the next op took it.
    """
    node: Any = tensor.grad_fn
    if node is not None and not tensor._version:
        node.metadata[_NOTE, tensor.output_nr] = weakref.ref(view)


def note_epsilon(tensor: torch.Tensor, held: SavedView | SavedCounted) -> None:
    """Note the ``eps`` of a norm, which its node does not hold, at the statistics that it saves.

    They are saved while PyTorch's own function runs, in whose frame it is.
    """
    if not has_plain_storage(tensor) or tensor.shape[-1:] != (1,):
        return
    if tensor.grad_fn is not None and not _is_rms_norm(tensor.grad_fn):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(("ds_tba.", "contextlib")):
        frame = frame.f_back
    if frame is not None and frame.f_code in _NORMS:
        held.eps = (frame.f_locals["eps"],)


def _is_rms_norm(node: Any) -> bool:
    return type(node).__name__ == "FusedRmsNormBackward0"  # its factors have a gradient, other norms' have none


@dataclass(frozen=True, slots=True)
class Step:
    """An op and its operands.

    Attributes:
        operands: numbers of earlier steps, objects that hold tensors, constants of the op; None for an operand that is
            left out.
        constants: numbers of the op.
    """

    rule: Rule
    operands: tuple[int | Held | torch.Tensor | None, ...]
    constants: tuple[Any, ...]
    output: Output

    @property
    def nbytes(self) -> int:
        """That it takes; a view takes none."""
        return 0 if self.rule.is_view else self.output.shape.numel() * self.output.dtype.itemsize

    def run(self, operands: list[torch.Tensor | None]) -> torch.Tensor:
        """The output.

        Raises:
            NoRecipeError: it has another shape or dtype than in forward, as that of an op in place may have.
        """
        made = self.rule.make(*operands, *self.constants, self.output)
        if made.shape != self.output.shape or made.dtype != self.output.dtype:
            raise NoRecipeError("made again it has another shape or dtype")
        return made


@dataclass(frozen=True, slots=True)
class Recipe:
    """The steps that make a storage again, each behind those it needs; the last gives the storage itself."""

    steps: tuple[Step, ...]

    @property
    def rule(self) -> Rule:
        """Of the last step."""
        return self.steps[-1].rule

    def make(
        self, restore: Callable[[Held], torch.Tensor], clock: Clock | None, marks: list[tuple[Any, Any]]
    ) -> torch.Tensor:
        """The output of the last step.

        Args:
            restore: gives the tensor that is held; asked for those of one step at a time.
            clock: None where nothing is timed.
            marks: where marks of the clock around each step are added, without what ``restore`` takes.

        Raises:
            NoRecipeError: as :meth:`Step.run`.
        """
        last_use = {one: place for place, step in enumerate(self.steps) for one in step.operands if type(one) is int}
        made: dict[int, torch.Tensor] = {}
        for place, step in enumerate(self.steps):
            operands = [
                made[one] if isinstance(one, int) else restore(one) if isinstance(one, Held) else one
                for one in step.operands
            ]
            before = None if clock is None else clock.mark()
            result = made[place] = step.run(operands)
            taken = {one.untyped_storage().data_ptr() for one in operands if one is not None}
            if place == len(self.steps) - 1 and result.untyped_storage().data_ptr() in taken:
                result = result.clone()
            if clock is not None:
                marks.append((before, clock.mark()))
            for one in [one for one in made if last_use.get(one, len(self.steps)) <= place]:
                del made[one]
        return result

    def held(self) -> Iterator[Held]:
        """What it needs, each once."""
        seen: set[int] = set()
        for step in self.steps:
            for one in step.operands:
                if isinstance(one, Held) and id(one) not in seen:
                    seen.add(id(one))
                    yield one

    def bound(self, share: Callable[[SavedView], SavedView]) -> Recipe:
        """The same with views of its own."""
        return self._replaced({id(one): share(one) for one in self.held() if isinstance(one, SavedView)})

    def copied(self, cache: Keeper) -> Recipe:
        """The same with copies of its own of parameters and buffers, as they are now."""
        copies = {}
        for one in self.held():
            if _is_of_a_module(one):
                with torch.no_grad():
                    copy = one.held.detach().clone()
                copies[id(one)] = SavedCounted(cache, copy, nbytes_of(copy), "")
        return self._replaced(copies) if copies else self

    def _replaced(self, own: Mapping[int, Held]) -> Recipe:
        return Recipe(
            tuple(
                Step(step.rule, tuple(own.get(id(one), one) for one in step.operands), step.constants, step.output)
                for step in self.steps
            )
        )

    def signature(self) -> tuple[Any, ...]:
        """Equal for equal work: the ops, the constants, and of all tensors dtype, shape and stride."""
        return tuple(
            (step.rule.make, step.output, step.constants, *(_look(one) for one in step.operands)) for step in self.steps
        )

    @property
    def between_bytes(self) -> int:
        """Of the steps before the last, all together."""
        return sum(step.nbytes for step in self.steps[:-1])


def _look(one: int | Held | torch.Tensor | None) -> Any:
    if one is None or isinstance(one, int):
        return one
    if isinstance(one, torch.Tensor):  # a number, in host memory
        return one.item(), one.dtype
    if isinstance(one, SavedView):
        spec = one.spec
        return spec.dtype, spec.shape, spec.stride, spec.storage_offset
    return one.held.dtype, one.held.shape, one.held.stride(), type(one).__name__


class Finder:
    """Finds recipes.

    Args:
        cache: whose saved views may be operands.
        exclude: ops that no recipe may have.
    """

    def __init__(self, cache: Keeper, exclude: frozenset[str] = frozenset()) -> None:
        self.cache = cache
        self.rules = {name: rule for name, rule in RULES.items() if rule.op not in exclude}
        self._names = PASSING | {name for name, rule in self.rules.items() if rule.operands and not rule.is_view}
        self._thread: threading.Thread | None = None
        self._has_other_threads = False
        self._first_node: float = 0

    def begin_forward(self) -> None:
        """From here on nodes are of this forward; see [Note: What is refused]."""
        counter = getattr(torch.autograd, "_get_sequence_nr", None)
        self._first_node = 0 if counter is None else counter()
        self._thread = self._thread or threading.current_thread()
        # Each thread counts its nodes itself: with a second one, nobody knows any more which came first.
        self._has_other_threads |= threading.current_thread() != self._thread

    def may_find(self, node: Any) -> bool:
        """Whether there is a rule for what a node has made."""
        return type(node).__name__ in self._names

    def is_of_this_forward(self, node: Any) -> bool:
        """Whether a node was made since :meth:`begin_forward`."""
        return bool(node._sequence_nr() >= self._first_node)

    def find(self, tensor: torch.Tensor) -> Recipe | None:
        """The recipe of the storage of a tensor that is being saved; None where no rule is for the op that made it.

        Raises:
            NoRecipeError: there is a rule, and it cannot be used.
        """
        made = base_of(tensor)
        node, number = _made_by(made)
        rule = None if node is None else self.rules.get(type(node).__name__)
        if rule is None or rule.is_view or not rule.operands or number:
            return None
        if self._has_other_threads or threading.current_thread() != (self._thread or threading.current_thread()):
            raise NoRecipeError("forwards run in several threads")
        if made._version or made.storage_offset() or made.untyped_storage().nbytes() != made.numel() * made.itemsize:
            raise NoRecipeError("changed in place, or a part of its storage")
        search = _Search(self)
        search.add(node, rule, 0)
        recipe = Recipe(tuple(search.steps))
        for one in recipe.held():
            if _is_of_a_module(one) and nbytes_of(one.held) > MAX_COPIED_PART * recipe.steps[-1].nbytes:
                raise NoRecipeError("a parameter or buffer of a module")
        if recipe.between_bytes > MAX_BETWEEN_FACTOR * recipe.steps[-1].nbytes:
            raise NoRecipeError("too many steps")
        return recipe


class _Search:
    """The steps of one recipe, as they are found.

    Attributes:
        steps: each behind those it needs.
    """

    def __init__(self, finder: Finder) -> None:
        self.steps: list[Step] = []
        self._finder = finder
        self._entered = 0
        self._found: dict[tuple[int, int], tuple[Any, int]] = {}  # with the node, so that its id stays its own
        self._is_copied: list[bool] = []  # of each step: whether its strides may be others than in forward

    def add(self, node: Any, rule: Rule, number: int) -> int:
        """The number of the step that makes the output of a node; the same for the same output."""
        known = self._found.get((id(node), number))
        if known is not None:
            return known[1]
        self._entered += 1  # before those it needs: what is too large is not looked at to its end
        if self._entered > MAX_OPS:
            raise NoRecipeError("too many steps")
        if not self._finder.is_of_this_forward(node):
            raise NoRecipeError("made in an earlier forward")
        operands = [self._operand(node, one) for one in rule.operands]
        if rule.listed:
            operands += [self._held(saved) for saved in getattr(node, f"_raw_saved_{rule.listed}")]
        constants = tuple([constant(node, name) for name in rule.constants])
        is_copied = any(self._is_copied[one] for one in operands if isinstance(one, int))
        if is_copied and not rule.is_rounded_once(constants):
            raise NoRecipeError("behind a copy that may have another order of elements")
        if rule.needs_epsilon:
            constants += (_epsilon(node),)
        metadata = node._input_metadata[number]
        output = Output(torch.Size(metadata.shape), metadata.dtype, number)
        self.steps.append(Step(rule, tuple(operands), constants, output))
        self._is_copied.append(is_copied or rule.is_copy)
        self._found[id(node), number] = node, len(self.steps) - 1
        return len(self.steps) - 1

    def _operand(self, node: Any, operand: Operand) -> int | Held | torch.Tensor | None:
        if operand.attribute:
            found = self._attribute(node, operand.attribute)
            if found is not None:
                return found
        made_by, number = (None, 0) if operand.edge is None else node.next_functions[operand.edge]
        if made_by is None:
            if operand.is_optional:
                return None
            raise NoRecipeError(UNSAVED)
        return self._output(made_by, number)

    def _output(self, node: Any, number: int) -> int | Held | torch.Tensor:
        """The output of a node, for another one that has it as input."""
        if type(node).__name__ == "AccumulateGrad":
            is_parameter = isinstance(node.variable, torch.nn.Parameter)
            raise NoRecipeError("a parameter" if is_parameter else "an input of the model")
        noted = node.metadata.get((_NOTE, number)) if self._finder.is_of_this_forward(node) else None
        view = None if noted is None else noted()
        if view is not None:
            return self._usable(view)
        if is_passing(node):
            passed, number = node.next_functions[0]
            if passed is None:
                raise NoRecipeError(UNSAVED)
            return self._output(passed, number)
        rule = self._finder.rules.get(type(node).__name__)
        if rule is None or (number and not rule.is_view):
            raise NoRecipeError(UNSAVED)
        if rule.result and self._finder.is_of_this_forward(node):
            found = self._attribute(node, rule.result)
            if found is not None:
                return found
        if not rule.operands:
            raise NoRecipeError(UNSAVED)
        return self.add(node, rule, number)

    def _attribute(self, node: Any, name: str) -> Held | torch.Tensor | None:
        """What a node holds; None where it holds nothing."""
        return self._held(getattr(node, f"_raw_saved_{name}"))

    def _held(self, saved: Any) -> Held | torch.Tensor | None:
        data = saved.data
        if data is None:
            return None
        if saved.unpack_hook is None:
            if _is_number(data):  # autograd calls no hooks for those
                number: torch.Tensor = data
                return number
            raise NoRecipeError("saved without our hooks")
        held = data if isinstance(data, Held) else getattr(data, "held", None)
        if not isinstance(held, Held):
            raise NoRecipeError("saved by hooks of the user")
        return self._usable(held)

    def _usable(self, held: Held) -> Held:
        if not held.is_of(self._finder.cache):
            raise NoRecipeError("saved by hooks of another engine")
        if not held.is_unmodified:
            raise NoRecipeError("an operand was changed in place")
        tensor = held.held
        if tensor is None:
            return held
        if not has_plain_storage(tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor):
            raise NoRecipeError("an operand that is not dense")
        if is_parameter(tensor) or is_owned(tensor):
            if not tensor.numel() or not tensor.is_contiguous() or not isinstance(held, PassedThrough):
                raise NoRecipeError("a parameter or buffer of a module")  # ZeRO-3 may have let go of it
        elif isinstance(held, PassedThrough) and tensor.dim():
            raise NoRecipeError("an operand that is not on the device")
        if is_input(tensor):
            raise NoRecipeError("an input of the model")
        return held


def _is_of_a_module(held: Held) -> TypeGuard[PassedThrough]:
    """Whether it is a parameter or buffer, whose owner may change it at any time."""
    return isinstance(held, PassedThrough) and (is_parameter(held.held) or is_owned(held.held))


def _made_by(tensor: torch.Tensor) -> tuple[Any, int]:
    """The node that made a tensor, and the number of the tensor among its outputs."""
    node, number = tensor.grad_fn, tensor.output_nr
    while node is not None and is_passing(node):
        node, number = node.next_functions[0]
    return node, number


_NARROW = {torch.float64: torch.float32, torch.int64: torch.int32, torch.complex128: torch.complex64}


def _is_number(tensor: torch.Tensor) -> bool:
    """Whether PyTorch has made a tensor of a number, which is nobody else's and yields to the dtype of any tensor."""
    narrow = _NARROW.get(tensor.dtype)
    if tensor.dim() or tensor._version or tensor.device.type != "cpu" or narrow is None:
        return False
    return torch.result_type(torch.empty((), dtype=narrow, device="cpu"), tensor) == narrow


def _epsilon(node: Any) -> Any:
    name = "result2" if hasattr(node, "_raw_saved_result2") else "result1"
    held = getattr(node, f"_raw_saved_{name}").data
    held = held if isinstance(held, Held) else getattr(held, "held", None)
    if not isinstance(held, SavedCounted | SavedView) or held.eps is None:
        raise NoRecipeError("a norm whose eps is not known")
    return held.eps[0]
