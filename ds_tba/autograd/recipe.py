"""Recipes: how a saved storage is made again from others, found in the graph while forward builds it.

Knows graph nodes, rules and the objects that autograd holds; does not know where storages go, nor what is proven.

[Note: Operands] A node's saved operands are the objects that our pack hook returned for them: they are looked up, never
unpacked, and no hook of the user is called. An operand that the node does not hold may have been saved by another node:
each saved view is noted at the node that made it, in the node's ``metadata``, and lives no longer for that. Else it is
made again in turn, up to a bound of ops and of bytes. A recipe holds views of its own of what it needs, not the nodes:
another backward may free the buffers of a node.

[Note: What is derived] The output of an op, whole and dense, untouched since. The graph sees changes in place by their
version; those behind its back are seen by the comparison in ``sites.py`` only. Operands that may change or go without
autograd's knowledge are refused: the inputs of the model, which a data loader may refill, and parameters that ZeRO-3
partitions.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn import functional

from ds_tba.autograd.rules import PASSING, RULES, Operand, Output, Rule, constant, is_passing
from ds_tba.autograd.saved import Keeper, PassedThrough, SavedCounted, SavedView
from ds_tba.autograd.tensors import (
    base_of,
    gathered,
    has_plain_storage,
    is_input,
    is_owned,
    is_parameter,
    is_partitioned,
    may_be_released,
)

MAX_OPS = 8
# Bytes of the steps between, relative to the result's.
MAX_BETWEEN_FACTOR = 4
# Recipes whose operands are made again themselves, one behind the other.
MAX_DEPTH = 4
UNSAVED = "an operand that nobody saves"
_NOTE = "ds_tba"
_NORMS: frozenset[CodeType] = frozenset(
    getattr(functional, name).__code__ for name in ("layer_norm", "rms_norm") if hasattr(functional, name)
)

Held = SavedView | SavedCounted | PassedThrough


class NoRecipeError(Exception):
    """A tensor cannot be made again; the text is the reason, in the report's words."""


def is_supported() -> bool:
    """Whether this PyTorch shows what a node holds without unpacking it."""
    saved: Any = getattr(torch._C._autograd, "SavedTensor", None)
    return hasattr(saved, "data") and hasattr(saved, "unpack_hook")


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
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("ds_tba.", "contextlib")):
        frame = frame.f_back
    if frame is not None and frame.f_code in _NORMS:
        held.eps = (frame.f_locals["eps"],)


def _is_rms_norm(node: Any) -> bool:
    return type(node).__name__ == "FusedRmsNormBackward0"  # its factors have a gradient, other norms' have none


@dataclass(frozen=True, slots=True)
class Recipe:
    """An op and its operands.

    Attributes:
        operands: objects that hold tensors, constants of the op, other recipes; None for an operand that is left out.
        constants: numbers of the op.
    """

    rule: Rule
    operands: tuple[Held | torch.Tensor | Recipe | None, ...]
    constants: tuple[Any, ...]
    output: Output

    def make(self) -> torch.Tensor:
        """The output.

        Raises:
            ActivationModifiedError: an operand was modified in place after it was saved.
            ActivationLostError, ActivationCorruptionError: an operand cannot be read back.
        """
        operands = [one if one is None or isinstance(one, torch.Tensor) else _tensor(one) for one in self.operands]
        made = self.rule.make(*operands, *self.constants, self.output)
        taken = {one.untyped_storage().data_ptr() for one in operands if one is not None}
        return made if self.rule.is_view or made.untyped_storage().data_ptr() not in taken else made.clone()

    def held(self) -> Iterator[Held]:
        """What it needs, of its own steps and of those between."""
        for one in self.operands:
            if isinstance(one, Recipe):
                yield from one.held()
            elif isinstance(one, Held):
                yield one

    def steps(self) -> Iterator[Recipe]:
        """The steps between, the last first."""
        for one in self.operands:
            if isinstance(one, Recipe):
                yield one
                yield from one.steps()

    def bound(self, share: Callable[[SavedView], SavedView]) -> Recipe:
        """The same with views of its own."""
        operands = tuple(
            one.bound(share) if isinstance(one, Recipe) else share(one) if isinstance(one, SavedView) else one
            for one in self.operands
        )
        return Recipe(self.rule, operands, self.constants, self.output)

    def signature(self) -> tuple[Any, ...]:
        """Equal for equal work: the ops, the constants, and of all tensors dtype, shape and stride."""
        return (
            self.rule.make,
            self.output,
            self.constants,
            *(one.signature() if isinstance(one, Recipe) else _look(one) for one in self.operands),
        )

    @property
    def between_bytes(self) -> int:
        """Of the steps between, all together."""
        return sum(_nbytes(one.output) for one in self.steps() if not one.rule.is_view)

    @property
    def depth(self) -> int:
        """How many recipes lie behind each other, with this one."""
        behind = [one.record.recipe for one in self.held() if isinstance(one, SavedView)]
        return 1 + max((one.depth for one in behind if one is not None), default=0)


def _tensor(one: Held | Recipe) -> torch.Tensor:
    return one.make() if isinstance(one, Recipe) else one.restore()


def _look(one: Held | torch.Tensor | None) -> Any:
    if one is None:
        return None
    if isinstance(one, torch.Tensor):  # a number, in host memory
        return one.item(), one.dtype
    if isinstance(one, SavedView):
        spec = one.spec
        return spec.dtype, spec.shape, spec.stride, spec.storage_offset
    return one.held.dtype, one.held.shape, one.held.stride(), type(one).__name__


def _nbytes(output: Output) -> int:
    return output.shape.numel() * output.dtype.itemsize


class Finder:
    """Finds recipes.

    Args:
        cache: whose saved views may be operands.
        exclude: ops that no recipe may have.
        may_be_released: whether a parameter may be gone when backward wants it.
    """

    def __init__(
        self,
        cache: Keeper,
        exclude: frozenset[str] = frozenset(),
        may_be_released: Callable[[torch.Tensor], bool] = may_be_released,
    ) -> None:
        self._cache = cache
        self._may_be_released = may_be_released
        self._rules = {name: rule for name, rule in RULES.items() if rule.op not in exclude}
        self._names = PASSING | {name for name, rule in self._rules.items() if rule.operands and not rule.is_view}
        self._parameters: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def begin_forward(self) -> None:
        """Note the versions of the parameters that no op saves, and that recipes have had as operands."""
        alive = [parameter for held, _ in list(self._parameters.values()) if (parameter := held()) is not None]
        self._parameters = {id(one): (weakref.ref(one), one._version) for one in alive}

    def may_find(self, node: Any) -> bool:
        """Whether there is a rule for what a node has made."""
        return type(node).__name__ in self._names

    def find(self, tensor: torch.Tensor) -> Recipe | None:
        """The recipe of the storage of a tensor that is being saved; None where no rule is for the op that made it.

        Raises:
            NoRecipeError: there is a rule, and it cannot be used.
        """
        made = base_of(tensor)
        node, number = _made_by(made)
        rule = None if node is None else self._rules.get(type(node).__name__)
        if rule is None or rule.is_view or not rule.operands or number:
            return None
        if made._version or made.storage_offset() or made.untyped_storage().nbytes() != made.numel() * made.itemsize:
            raise NoRecipeError("changed in place, or a part of its storage")
        recipe = self._recipe(node, rule, 0, MAX_OPS)
        if sum(1 for _ in recipe.steps()) >= MAX_OPS or recipe.between_bytes > MAX_BETWEEN_FACTOR * _nbytes(
            recipe.output
        ):
            raise NoRecipeError("too many steps")
        if recipe.depth > MAX_DEPTH:
            raise NoRecipeError("too many recipes behind each other")
        return recipe

    def _recipe(self, node: Any, rule: Rule, number: int, ops: int) -> Recipe:
        if ops < 1:
            raise NoRecipeError("too many steps")
        operands = [self._operand(node, one, ops - 1) for one in rule.operands]  # first: most are refused here
        if rule.listed:
            operands += [self._held(saved) for saved in getattr(node, f"_raw_saved_{rule.listed}")]
        constants = tuple([constant(node, name) for name in rule.constants])
        if rule.needs_epsilon:
            constants += (_epsilon(node),)
        metadata = node._input_metadata[number]
        return Recipe(rule, tuple(operands), constants, Output(torch.Size(metadata.shape), metadata.dtype, number))

    def _operand(self, node: Any, operand: Operand, ops: int) -> Held | torch.Tensor | Recipe | None:
        if operand.attribute:
            found = self._attribute(node, operand.attribute)
            if found is not None:
                return found
        made_by, number = (None, 0) if operand.edge is None else node.next_functions[operand.edge]
        if made_by is None:
            if operand.is_optional:
                return None
            raise NoRecipeError(UNSAVED)
        return self._output(made_by, number, ops)

    def _output(self, node: Any, number: int, ops: int) -> Held | torch.Tensor | Recipe:
        """The output of a node, for another one that has it as input."""
        noted = node.metadata.get((_NOTE, number))
        view = None if noted is None else noted()
        if view is not None:
            return self._usable(view)
        if is_passing(node):
            passed, number = node.next_functions[0]
            if passed is None:
                raise NoRecipeError(UNSAVED)
            return self._output(passed, number, ops)
        if type(node).__name__ == "AccumulateGrad":
            variable = node.variable
            if not isinstance(variable, torch.nn.Parameter):
                raise NoRecipeError("an input of the model")
            self._check_unmodified(variable)
            return self._usable(PassedThrough(variable))
        rule = self._rules.get(type(node).__name__)
        if rule is None or (number and not rule.is_view):
            raise NoRecipeError(UNSAVED)
        if rule.result:
            found = self._attribute(node, rule.result)
            if found is not None:
                return found
        if not rule.operands:
            raise NoRecipeError(UNSAVED)
        return self._recipe(node, rule, number, ops)

    def _check_unmodified(self, parameter: torch.Tensor) -> None:
        """An op took it that has not saved it: which version that was is known of the begin of this forward only."""
        held, version = self._parameters.get(id(parameter), (None, 0))
        if held is None or held() is not parameter:
            self._parameters[id(parameter)] = (weakref.ref(parameter), parameter._version)
        elif parameter._version != version:
            raise NoRecipeError("an operand was changed in place")

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
        if not held.is_of(self._cache):
            raise NoRecipeError("saved by hooks of another engine")
        if not held.is_unmodified:
            raise NoRecipeError("an operand was changed in place")
        tensor = held.held
        if tensor is None:
            return held
        if not has_plain_storage(tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor):
            raise NoRecipeError("an operand that is not dense")
        if isinstance(held, PassedThrough) and tensor.dim() and not (is_parameter(tensor) or is_owned(tensor)):
            raise NoRecipeError("an operand that is not on the device")
        if self._may_be_released(tensor):
            raise NoRecipeError("a parameter that ZeRO-3 partitions")
        if is_input(tensor):
            raise NoRecipeError("an input of the model")
        return PassedThrough(gathered(tensor)) if is_partitioned(tensor) else held


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
    return torch.result_type(torch.empty((), dtype=narrow), tensor) == narrow


def _epsilon(node: Any) -> Any:
    name = "result2" if hasattr(node, "_raw_saved_result2") else "result1"
    held = getattr(node, f"_raw_saved_{name}").data
    held = held if isinstance(held, Held) else getattr(held, "held", None)
    if not isinstance(held, SavedCounted | SavedView) or held.eps is None:
        raise NoRecipeError("a norm whose eps is not known")
    return held.eps[0]
