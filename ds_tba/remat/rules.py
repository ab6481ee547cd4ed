"""The ops whose outputs can be rematerialized from what autograd saves anyway, a line for each.

Knows PyTorch's graph nodes (``torch/csrc/autograd/generated``; their saved attributes follow from
``tools/autograd/derivatives.yaml``); does not know the cache.

[Note: Rules] A rule is found by the name of the node that made a tensor. The ``n``-th operand is the node's ``n``-th
input: the node may hold it as an attribute, another node may have saved it, or a rule can rematerialize it.
Numbers that a node does not hold (of ``x + 1``, say) are not known, so that there is no rule for such an op.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch.autograd.graph import Node
from torch.nn import functional

from ds_tba.errors import StateError

Make = Callable[..., torch.Tensor]


class Output(NamedTuple):
    """An output of a node, as it was in forward.

    Attributes:
        number: place among the node's outputs.
    """

    shape: torch.Size
    dtype: torch.dtype
    number: int


class Operand(NamedTuple):
    """An operand of an op.

    Attributes:
        attribute: name under which the node may hold it; empty if it holds none.
        edge: number of the node's input; None if that is not differentiable.
        is_optional: True if the op can do without it.
    """

    attribute: str
    edge: int | None
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to rematerialize the output of one op.

    Attributes:
        op: name in the config and in reports.
        make: returns the output, from the operands and the constants.
        constants: attributes of the node.
        result: attribute under which the node may hold its own output.
        is_view: True if the output shares its operand's memory, so that it is a step between others only.
        listed: attribute under which the node holds a list of more operands.
        needs_epsilon: True if the last constant is the ``eps`` of a norm; see ``search.py``.
        is_copy: True if the graph does not tell the strides of the output.
        from_output: True if ``make`` takes the :class:`Output`, too, last of all.
    """

    op: str
    operands: tuple[Operand, ...]
    make: Make
    constants: tuple[str, ...] = ()
    result: str = ""
    is_view: bool = False
    listed: str = ""
    needs_epsilon: bool = False
    is_copy: bool = False
    from_output: bool = False

    def is_rounded_once(self, constants: tuple[object, ...]) -> bool:
        """Return whether each element has the same bits wherever it lies in memory: one operation rounds it at most."""
        has_factor = self.op in ("add", "sub") and constants != (1,)  # which some loops fuse, and others do not
        return self.is_view or (self.op in _ROUNDED_ONCE and not has_factor)


class NoRecipeError(Exception):
    """A tensor cannot be rematerialized; the text is the reason, in the report's words."""


class Saved(Protocol):
    """The object that autograd holds in place of a saved tensor."""

    def signature(self) -> tuple[object, ...]:
        """Return the layout of the tensor."""


class Step(NamedTuple):
    """An op and its operands.

    Attributes:
        operands: numbers of earlier steps, objects that hold tensors, constants of the op; None for an operand that is
            left out.
        constants: numbers of the op.
    """

    rule: Rule
    operands: tuple[int | Saved | torch.Tensor | None, ...]
    constants: tuple[object, ...]
    output: Output

    @property
    def nbytes(self) -> int:
        """Return the bytes of the output (0 for a view)."""
        return 0 if self.rule.is_view else self.output.shape.numel() * self.output.dtype.itemsize

    def run(self, operands: list[torch.Tensor | None]) -> torch.Tensor:
        """Return the output.

        Raises:
            NoRecipeError: it has another shape or dtype than in forward, as that of an op in place may have.
        """
        values = (*operands, *self.constants, *((self.output,) if self.rule.from_output else ()))
        made = self.rule.make(*values)
        if made.shape != self.output.shape or made.dtype != self.output.dtype:  # ``x.mul_(y)`` does not promote
            raise NoRecipeError("made again it has another shape or dtype")
        return made

    def signature(self) -> tuple[object, ...]:
        """Return what is equal for equal work: the op, its constants, and of all tensors dtype, shape and stride."""
        return (self.rule.op, self.rule.make, self.output, self.constants, *(_look(one) for one in self.operands))


def _look(one: int | Saved | torch.Tensor | None) -> object:
    if one is None or isinstance(one, int):
        return one
    if isinstance(one, torch.Tensor):  # a number, in host memory
        return one.item(), one.dtype
    return one.signature()


_ROUNDED_ONCE = frozenset(  # in any loop the same bits; see [Note: Order of elements]
    {"mul", "div", "add", "sub", "relu", "neg", "index", "cast", "copy"}
)


def _rule(op: str, operands: str, make: Make, constants: str = "", result: str = "") -> Rule:
    """Return a rule; ``-`` stands for an operand that the node does not hold."""
    found = tuple(Operand("" if name == "-" else name, edge) for edge, name in enumerate(operands.split()))
    return Rule(op, found, make, tuple(constants.split()), result)


def _view(make: Make, constants: str = "", *, from_output: bool = False) -> Rule:
    return Rule("view", (Operand("", 0),), make, tuple(constants.split()), is_view=True, from_output=from_output)


def _reshaped(tensor: torch.Tensor, output: Output) -> torch.Tensor:
    return tensor.reshape(output.shape)


def _expanded(tensor: torch.Tensor, output: Output) -> torch.Tensor:
    return tensor.expand(output.shape)


def _split(tensor: torch.Tensor, nelements: int, dim: int, output: Output) -> torch.Tensor:
    return tensor.split(nelements, dim)[output.number]  # type: ignore[no-untyped-call]


def _unbound(tensor: torch.Tensor, dim: int, output: Output) -> torch.Tensor:
    return tensor.unbind(dim)[output.number]


def _cast(tensor: torch.Tensor, output: Output) -> torch.Tensor:
    return tensor.to(output.dtype)


def _native_dropout(tensor: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    scale = 0.0 if p == 1 else 1 / (1 - p)  # all is dropped, and 1 / 0 raises
    if tensor.device.type == "cpu":  # whose forward rounds the scale, and whose backward does not
        return tensor * (mask.to(tensor.dtype) * scale)
    return torch.ops.aten.native_dropout_backward(tensor, mask, scale)


def _layer_norm(
    tensor: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: tuple[int, ...],
    eps: float,
) -> torch.Tensor:
    return torch.native_layer_norm(tensor, shape, weight, bias, eps)[0]


def _rms_norm(
    tensor: torch.Tensor, weight: torch.Tensor | None, shape: tuple[int, ...], eps: float | None
) -> torch.Tensor:
    return torch.ops.aten._fused_rms_norm(tensor, shape, weight, eps)[0]  # functional's is other ops on a CPU


def _softmax(tensor: torch.Tensor, dim: int, output: Output) -> torch.Tensor:
    return torch.softmax(tensor, dim, dtype=None if output.dtype == tensor.dtype else output.dtype)  # cast inside


def _index(tensor: torch.Tensor, *indices: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.aten.index(tensor, list(indices))


def _not_made() -> torch.Tensor:
    raise StateError("its own result is held, or nothing; this is a bug in ds_tba")


_ONE = (Operand("", 0),)
_NORM = (Operand("input", 0), Operand("weight", 1, True), Operand("bias", 2, True))

RULES: dict[str, Rule] = {
    # Products and sums of tensors. A number that multiplies or divides is held by the node, one that is added is not.
    "MulBackward0": _rule("mul", "self other", torch.mul),
    "DivBackward0": _rule("div", "self other", torch.div),
    "AddBackward0": _rule("add", "- -", lambda a, b, alpha: torch.add(a, b, alpha=alpha), "alpha"),
    "SubBackward0": _rule("sub", "- -", lambda a, b, alpha: torch.sub(a, b, alpha=alpha), "alpha"),
    # Activation functions.
    "SiluBackward0": _rule("silu", "self", functional.silu),
    "GeluBackward0": _rule("gelu", "self", lambda a, how: functional.gelu(a, approximate=how), "approximate"),
    "ReluBackward0": _rule("relu", "-", torch.relu, result="result"),
    "LeakyReluBackward0": _rule("leaky_relu", "self", functional.leaky_relu, "negative_slope"),
    "EluBackward0": _rule("elu", "self", torch.ops.aten.elu, "alpha scale input_scale"),
    "HardtanhBackward0": _rule("hardtanh", "self", functional.hardtanh, "min_val max_val"),
    "HardswishBackward0": _rule("hardswish", "self", functional.hardswish),
    "HardsigmoidBackward0": _rule("hardsigmoid", "self", functional.hardsigmoid),
    "SoftplusBackward0": _rule("softplus", "self", functional.softplus, "beta threshold"),
    "MishBackward0": _rule("mish", "self", functional.mish),
    "GluBackward0": _rule("glu", "self", functional.glu, "dim"),
    "SigmoidBackward0": _rule("sigmoid", "-", torch.sigmoid, result="result"),
    "TanhBackward0": _rule("tanh", "-", torch.tanh, result="result"),
    # Other functions of one tensor.
    "ExpBackward0": _rule("exp", "-", torch.exp, result="result"),
    "RsqrtBackward0": _rule("rsqrt", "-", torch.rsqrt, result="result"),
    "SinBackward0": _rule("sin", "self", torch.sin),
    "ErfBackward0": _rule("erf", "self", torch.erf),
    "NegBackward0": _rule("neg", "-", torch.neg),
    "PowBackward0": _rule("pow", "self", torch.pow, "exponent"),
    "ClampMinBackward0": _rule("clamp", "self", torch.clamp_min, "min"),
    "ClampBackward1": _rule("clamp", "self", torch.clamp, "min max"),
    # Norms, softmax, dropout, casts, copies.
    "NativeLayerNormBackward0": Rule(
        "layer_norm", _NORM, _layer_norm, ("normalized_shape",), needs_epsilon=True
    ),
    "FusedRmsNormBackward0": Rule("rms_norm", _NORM[:2], _rms_norm, ("normalized_shape",), needs_epsilon=True),
    "SoftmaxBackward0": Rule("softmax", _ONE, _softmax, ("dim",), "result", from_output=True),
    "NativeDropoutBackward0": Rule(
        "dropout", (Operand("", 0), Operand("result1", None)), _native_dropout, ("p",)
    ),
    "IndexBackward0": Rule("index", _ONE, _index, listed="indices"),
    "ToCopyBackward0": Rule("cast", _ONE, _cast, is_copy=True, from_output=True),
    "CloneBackward0": Rule("copy", _ONE, torch.Tensor.contiguous, is_copy=True),
    "UnsafeViewBackward0": Rule("copy", _ONE, _reshaped, from_output=True),
    # What lies between: views, and ops that hold their own output.
    **{
        kind: _view(_reshaped, from_output=True)
        for kind in ("ViewBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1")
    },
    "ExpandBackward0": _view(_expanded, from_output=True),
    "TBackward0": _view(torch.t),
    "TransposeBackward0": _view(torch.transpose, "dim0 dim1"),
    "PermuteBackward0": _view(torch.permute, "dims"),
    "SelectBackward0": _view(torch.select, "dim index"),
    "SliceBackward0": _view(torch.ops.aten.slice, "dim start end step"),
    "SplitBackward0": _view(_split, "split_size dim", from_output=True),
    "UnbindBackward0": _view(_unbound, "dim", from_output=True),
    **{
        f"ScaledDotProduct{kind}Backward0": Rule("attention", (), _not_made, result="output")
        for kind in ("FlashAttention", "EfficientAttention", "CudnnAttention", "FlashAttentionForCpu")
    },
}  # fmt: skip

# Nodes of Functions that return what they get, so that backward passes by: deepspeed/runtime/zero/parameter_offload.py
PASSING = frozenset({"PreBackwardFunctionForModuleBackward", "PostBackwardFunctionModuleBackward"})

OPS = frozenset(rule.op for rule in RULES.values() if not rule.is_view and rule.operands)
"""The names that the config may leave out."""


def is_passing(node: Node) -> bool:
    """Return whether the output of a node is its input."""
    return type(node).__name__ in PASSING and getattr(type(node), "_forward_cls", Node).__module__.startswith(
        "deepspeed."
    )


_SIGNED = 1 << 63  # a dimension from the end would be an index beyond all


def constant(value: object) -> object:
    """Return a constant of a node. Negative dimensions come as unsigned numbers of 64 bits."""
    if isinstance(value, tuple):
        return tuple(constant(one) for one in value)
    return value - 2 * _SIGNED if isinstance(value, int) and value >= _SIGNED else value
