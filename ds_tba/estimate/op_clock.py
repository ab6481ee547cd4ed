"""A clock that tells how long the operations seen so far would have taken on a device.

[Note: The roofline] An operation takes as long as its FLOPs at the rate that matrix products reach, or as its inputs
and outputs at the rate of device memory, whichever is more. Left out: the launch of kernels, the fusion of several, and
what the operations between ranks take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten


class OpClock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seconds of the operations that ran inside.

    Args:
        flops_per_s: what matrix products and attention reach.
        memory_bytes_per_s: of device memory.

    Attributes:
        now_s: so far.
        last_operation: the name of the last one, which may have failed.
    """

    def __init__(self, flops_per_s: float, memory_bytes_per_s: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_s = 0.0
        self.last_operation = ""
        self._flops_per_s = flops_per_s
        self._memory_bytes_per_s = memory_bytes_per_s

    def mark(self) -> float:
        """The time now, in seconds."""
        return self.now_s

    def elapsed_s(self, earlier: float, later: float) -> float:
        """Seconds between two marks."""
        return later - earlier

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.last_operation = str(func)
        result = func(*args, **(kwargs or {}))
        if not _moves_nothing(func):
            flops_s = _flops(func, args, kwargs or {}, result) / self._flops_per_s
            self.now_s += max(flops_s, _moved_bytes(args, kwargs, result) / self._memory_bytes_per_s)
        return result


def _moves_nothing(func: Any) -> bool:
    """Whether an operation returns a view, or memory that nobody has written."""
    if func._schema.name.startswith(("aten::empty", "aten::new_empty")):
        return True
    aliases = [one.alias_info for one in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _moved_bytes(*values: Any) -> int:
    """Of the tensors among arguments and results, each once."""
    tensors = {id(one): one for one in tree_leaves(values) if isinstance(one, torch.Tensor)}
    return sum(one.numel() * one.element_size() for one in tensors.values())


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> float:
    packet = func.overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    special = _UNREGISTERED.get(func._schema.name)
    return special(args, result) if special else 0.0


def _cpu_attention(args: tuple[Any, ...], result: Any) -> float:
    return float(flop_registry[_aten._scaled_dot_product_flash_attention](*args[:3], out_val=result))


def _cpu_attention_backward(args: tuple[Any, ...], result: Any) -> float:
    return float(flop_registry[_aten._scaled_dot_product_flash_attention_backward](*args[:4], out_val=result))


def _grouped_product(args: tuple[Any, ...], result: Any) -> float:
    """Each row of the first is multiplied with one matrix of the second."""
    return 2.0 * float(args[0].numel()) * float(args[1].shape[-1])


# What torch counts no FLOPs for.
_UNREGISTERED: Mapping[str, Callable[[tuple[Any, ...], Any], float]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_attention_backward,
    "aten::_grouped_mm": _grouped_product,
}
