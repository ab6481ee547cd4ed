"""The ops whose outputs can be rematerialized from what autograd saves anyway, a line for each.

Knows PyTorch's graph nodes (``torch/csrc/autograd/generated``; their saved attributes follow from
``tools/autograd/derivatives.yaml``); does not know the cache.

[Note: Rules] A rule is found by the name of the node that made a tensor. The ``n``-th operand is the node's ``n``-th
input: the node may hold it as an attribute, another node may have saved it, or a rule can rematerialize it.
Numbers that a node does not hold (of ``x + 1``, say) are not known, so that there is no rule for such an op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional

Make = Callable[..., Tensor]


class Output(NamedTuple):
    """The output of a node, as it was in forward."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to rematerialize the output of one op."""

    op: str  # name in the config and in reports
    # The attributes under which the node may hold its inputs, one for each; empty if it holds none. An input that the
    # op can do without ends in ``?``.
    operands: tuple[str, ...]
    make: Make  # returns the output, from the operands and the constants
    # Attributes of the node; for ``eps``, which no node of a norm holds, see ``recipe.py``.
    constants: tuple[str, ...] = ()
    result: str = ""  # attribute under which the node may hold its own output
    is_view: bool = False  # the output shares its operand's memory, so that it is a step between others only
    listed: str = ""  # attribute under which the node holds a list of more operands
    is_copy: bool = False  # each element is copied or cast, to where the graph does not tell
    from_output: bool = False  # ``make`` takes the :class:`Output`, too, last of all


class NoRecipeError(Exception):
    """A tensor cannot be rematerialized; the text is the reason, in the report's words."""


def _rule(op: str, operands: str, make: Make, constants: str = "", result: str = "", **more: Any) -> Rule:
    """Return a rule; ``-`` stands for an operand that the node does not hold."""
    found = ("" if name == "-" else name for name in operands.split())
    return Rule(op, tuple(found), make, tuple(constants.split()), result, **more)


def _reshaped(tensor: Tensor, output: Output) -> Tensor:
    return tensor.reshape(output.shape)


def _cast(tensor: Tensor, output: Output) -> Tensor:
    return tensor.to(output.dtype)


def _native_dropout(tensor: Tensor, mask: Tensor, p: float) -> Tensor:
    scale = 0.0 if p == 1 else 1 / (1 - p)  # all is dropped, and 1 / 0 raises
    if tensor.device.type == "cpu":  # whose forward rounds the scale, and whose backward does not
        return tensor * (mask.to(tensor.dtype) * scale)
    return torch.ops.aten.native_dropout_backward(tensor, mask, scale)


def _layer_norm(a: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], eps: float) -> Tensor:
    return torch.native_layer_norm(a, shape, weight, bias, eps)[0]


def _rms_norm(a: Tensor, weight: Tensor | None, shape: Sequence[int], eps: float | None) -> Tensor:
    return torch.ops.aten._fused_rms_norm(a, shape, weight, eps)[0]  # functional's is other ops on a CPU


def _softmax(tensor: Tensor, dim: int, output: Output) -> Tensor:
    return torch.softmax(tensor, dim, dtype=None if output.dtype == tensor.dtype else output.dtype)  # cast inside


def _index(tensor: Tensor, *indices: Tensor | None) -> Tensor:
    return torch.ops.aten.index(tensor, list(indices))


_view = partial(_rule, "view", "-", is_view=True)

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
    "SoftplusBackward0": _rule("softplus", "self", functional.softplus, "beta threshold"),
    "GluBackward0": _rule("glu", "self", functional.glu, "dim"),
    "SigmoidBackward0": _rule("sigmoid", "-", torch.sigmoid, result="result"),
    "TanhBackward0": _rule("tanh", "-", torch.tanh, result="result"),
    # Other functions of one tensor.
    "ExpBackward0": _rule("exp", "-", torch.exp, result="result"),
    "RsqrtBackward0": _rule("rsqrt", "-", torch.rsqrt, result="result"),
    "SinBackward0": _rule("sin", "self", torch.sin),
    "NegBackward0": _rule("neg", "-", torch.neg),
    "PowBackward0": _rule("pow", "self", torch.pow, "exponent"),
    "ClampMinBackward0": _rule("clamp", "self", torch.clamp_min, "min"),
    "ClampBackward1": _rule("clamp", "self", torch.clamp, "min max"),
    # Norms, softmax, dropout, casts, copies.
    "NativeLayerNormBackward0": _rule("layer_norm", "input weight? bias?", _layer_norm, "normalized_shape eps"),
    "FusedRmsNormBackward0": _rule("rms_norm", "input weight?", _rms_norm, "normalized_shape eps"),
    "SoftmaxBackward0": _rule("softmax", "-", _softmax, "dim", "result", from_output=True),
    "NativeDropoutBackward0": _rule("dropout", "- result1", _native_dropout, "p"),
    "IndexBackward0": _rule("index", "-", _index, listed="indices", is_copy=True),
    "ToCopyBackward0": _rule("cast", "-", _cast, is_copy=True, from_output=True),
    "CloneBackward0": _rule("copy", "-", Tensor.contiguous, is_copy=True),
    "UnsafeViewBackward0": _rule("copy", "-", _reshaped, is_copy=True, from_output=True),
    # What lies between: views, and ops that hold their own output.
    **{
        kind: _view(_reshaped, from_output=True)
        for kind in ("ViewBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1")
    },
    "TBackward0": _view(torch.t),
    "TransposeBackward0": _view(torch.transpose, "dim0 dim1"),
    "PermuteBackward0": _view(torch.permute, "dims"),
    **{
        f"ScaledDotProduct{kind}Backward0": _rule("attention", "", torch.clone, result="output")  # never made
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
