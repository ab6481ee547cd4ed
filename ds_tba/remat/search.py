"""Finds the steps of a recipe in the graph: what a saved tensor is made of.

Knows graph nodes, rules, and the objects that autograd holds; cannot see what was proven.

[Note: Operands] A node's saved operands are the objects that our pack hook returned for them: they are looked up, never
unpacked, and no hook of the user is called. An operand that the node does not hold may have been saved by another node:
each saved view is noted at the node that made it, in the node's ``metadata``, and lives no longer for that. Else it is
rematerialized in turn, within a bound of steps and of bytes; a node that is wanted twice is one step. A recipe holds
views of its own of what it needs, not the nodes: another backward may free the buffers of a node.

[Note: What is refused] The output of an op is rematerialized only where it is whole, dense and untouched since, and
where all that it is made of is under autograd's eye until backward. So no operand is a parameter, a buffer of a module
or an input of the model, whose owners change them without a version: ZeRO's optimizer in ``engine.step()``, a data
loader. Of a parameter or buffer that the op itself saves, a norm's weight say, a copy is the operand, taken in forward,
if it is small beside what need not be saved for it. No graph of an earlier forward is entered: what was changed in
between, it does not tell. What the graph cannot tell even of this forward, a change through ``tensor.data`` say, only
the comparisons see.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.nn import functional

from ds_tba.core.saved import Held, Keeper, PassedThrough, SavedCounted, SavedView, held_of
from ds_tba.core.tensors import has_plain_storage, is_input, is_owned, is_parameter, node_of
from ds_tba.remat.rules import NoRecipeError, Operand, Output, Rule, Step, constant, is_passing

# Steps of a recipe.
MAX_STEPS = 8
UNSAVED = "an operand that nobody saves"
_NOTE = "ds_tba"
_NORMS: frozenset[CodeType] = frozenset(
    getattr(functional, name).__code__ for name in ("layer_norm", "rms_norm") if hasattr(functional, name)
)


class Search:
    """The steps of one recipe, as they are found.

    Args:
        cache: owner of the saved views that are operands.
        rules: rules by the names of nodes.
        first_node: number of the first node of the forward that runs: no earlier one is entered.

    Attributes:
        steps: ops, each behind those it needs.
    """

    def __init__(self, cache: Keeper, rules: Mapping[str, Rule], first_node: int) -> None:
        self.steps: list[Step] = []
        self._cache = cache
        self._rules = rules
        self._first_node = first_node
        self._entered = 0
        self._found: dict[tuple[int, int], tuple[Node, int]] = {}  # with the node, so that its id stays its own
        self._is_copied: list[bool] = []  # of each step: whether its strides may be others than in forward

    def has(self, node: Node) -> bool:
        """Return whether a node was made in the forward that runs."""
        return bool(node._sequence_nr() >= self._first_node)

    def add(self, node: Node, rule: Rule, number: int) -> int:
        """Return the number of the step that makes the output of a node; the same for the same output."""
        known = self._found.get((id(node), number))
        if known is not None:
            return known[1]
        self._entered += 1  # before those it needs: what is too large is not looked at to its end
        if self._entered > MAX_STEPS:
            raise NoRecipeError("too many steps")
        if not self.has(node):
            raise NoRecipeError("made in an earlier forward")  # no graph tells what was changed in between
        operands = [self._operand(node, one) for one in rule.operands]
        if rule.listed:
            operands += [self._held(saved) for saved in _of_node(node, f"_raw_saved_{rule.listed}")]
        constants = tuple([constant(_of_node(node, f"_saved_{name}")) for name in rule.constants])
        is_copied = any(self._is_copied[one] for one in operands if isinstance(one, int))
        if is_copied and not rule.is_rounded_once(constants):  # other loops, other last bits
            raise NoRecipeError("behind a copy that may have another order of elements")
        if rule.needs_epsilon:
            constants += (_epsilon(node),)
        metadata = node._input_metadata[number]
        output = Output(torch.Size(metadata.shape), metadata.dtype, number)
        self.steps.append(Step(rule, tuple(operands), constants, output))
        self._is_copied.append(is_copied or rule.is_copy)
        self._found[id(node), number] = node, len(self.steps) - 1
        return len(self.steps) - 1

    def _operand(self, node: Node, operand: Operand) -> int | Held | torch.Tensor | None:
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

    def _output(self, node: Node, number: int) -> int | Held | torch.Tensor:
        """Return the output of a node, for another one that has it as input."""
        if type(node).__name__ == "AccumulateGrad":
            is_parameter = isinstance(getattr(node, "variable", None), torch.nn.Parameter)
            raise NoRecipeError("a parameter" if is_parameter else "an input of the model")  # changed without a version
        metadata: Any = node.metadata  # a method by PyTorch's stub, which it is not
        noted = metadata.get((_NOTE, number)) if self.has(node) else None
        view = None if noted is None else noted()
        if view is not None:
            return self._usable(view)
        if is_passing(node):
            passed, number = node.next_functions[0]
            if passed is None:
                raise NoRecipeError(UNSAVED)
            return self._output(passed, number)
        rule = self._rules.get(type(node).__name__)
        if rule is None or (number and not rule.is_view):
            raise NoRecipeError(UNSAVED)
        if rule.result and self.has(node):
            found = self._attribute(node, rule.result)
            if found is not None:
                return found
        if not rule.operands:
            raise NoRecipeError(UNSAVED)
        return self.add(node, rule, number)

    def _attribute(self, node: Node, name: str) -> Held | torch.Tensor | None:
        """Return an operand that a node holds; None where it holds nothing."""
        return self._held(_of_node(node, f"_raw_saved_{name}"))

    def _held(self, saved: Any) -> Held | torch.Tensor | None:
        data = saved.data
        if data is None:
            return None
        if saved.unpack_hook is None:
            if _is_number(data):  # autograd calls no hooks for those
                return data
            raise NoRecipeError("saved without our hooks")
        held = held_of(data)
        if held is None:
            raise NoRecipeError("saved by hooks of the user")
        return self._usable(held)

    def _usable(self, held: Held) -> Held:
        if not isinstance(held, PassedThrough):
            if held.cache is not self._cache:
                raise NoRecipeError("saved by hooks of another engine")  # whose lock guards its records, not ours
            if held.memory.is_of_function:  # which may write into it
                raise NoRecipeError("an operand that a custom Function has saved")
        if not held.is_unmodified:
            raise NoRecipeError("an operand was changed in place")  # the op took what was there before
        tensor = held.held
        if tensor is None:
            return held
        if not has_plain_storage(tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor):
            raise NoRecipeError("an operand that is not dense")
        if is_parameter(tensor) or is_owned(tensor):
            if not tensor.numel() or not tensor.is_contiguous() or not isinstance(held, PassedThrough):
                raise NoRecipeError("a parameter or buffer of a module")  # ZeRO-3 may have freed it
        elif isinstance(held, PassedThrough) and tensor.dim():
            raise NoRecipeError("an operand that is not on the device")
        if is_input(tensor):  # a loader may refill it without a version
            raise NoRecipeError("an input of the model")
        return held


def _of_node(node: Node, name: str) -> Any:
    """Return an attribute of a node. Each PyTorch has its own."""
    try:
        return getattr(node, name)
    except AttributeError:
        raise NoRecipeError(f"{type(node).__name__}, which has no {name} in this PyTorch") from None


def made_by(tensor: torch.Tensor) -> tuple[Node | None, int]:
    """Return the node that made a tensor, and the number of the tensor among its outputs."""
    node, number = tensor.grad_fn, tensor.output_nr
    while node is not None and is_passing(node):
        node, number = node.next_functions[0]
    return node, number


def note(tensor: torch.Tensor, held: SavedView | SavedCounted) -> None:
    """Note at its node that a tensor was saved, for recipes that need it as an operand; see [Note: Operands]."""
    node = node_of(tensor)
    # One that was changed in place may have had other values when the next op took it.
    if node is not None and not tensor._version:
        metadata: Any = node.metadata
        metadata[_NOTE, tensor.output_nr] = weakref.ref(held)  # held here, it would live as long as the node
    # The statistics of a norm, whose node does not hold its epsilon. Only a fused RMS norm's have a gradient.
    is_of_norm = node is None or type(node).__name__ == "FusedRmsNormBackward0"
    if is_of_norm and has_plain_storage(tensor) and tensor.shape[-1:] == (1,):
        held.eps = _epsilon_in_frames()


def _is_number(tensor: torch.Tensor) -> bool:
    """Return whether a tensor without hooks is one that PyTorch has made of a number, which is nobody else's."""
    return not tensor.dim() and not tensor._version and tensor.device.type == "cpu"


def _epsilon_in_frames() -> tuple[float | None] | None:
    """Return the ``eps`` of PyTorch's function of a norm, in a tuple, if one saves its statistics at this moment."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(("ds_tba.", "contextlib")):
        frame = frame.f_back
    return (frame.f_locals["eps"],) if frame is not None and frame.f_code in _NORMS else None


def _epsilon(node: Node) -> float | None:
    name = "result2" if hasattr(node, "_raw_saved_result2") else "result1"
    held = held_of(_of_node(node, f"_raw_saved_{name}").data)
    if not isinstance(held, SavedCounted | SavedView) or held.eps is None:
        raise NoRecipeError("a norm whose eps is not known")
    return held.eps[0]
