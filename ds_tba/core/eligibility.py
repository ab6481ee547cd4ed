"""Which saved tensors may leave device memory, and if not why.

Knows tensors, the device and the user's modes; does not know the cache, nor where storages go.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum

import torch
from torch.autograd.graph import Node
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from ds_tba.core.tensors import COMPILED, OWNED, is_parameter, span_bytes
from ds_tba.device.accelerator import Accelerator

# A view that spans less than this fraction of its storage is kept: writing the storage would move many bytes for few,
# as with a batch that is a slice of the whole data set.
MIN_SPAN_FRACTION = 0.25


class Eligibility(Enum):
    """Whether a saved tensor may leave device memory, and if not why; the values are the report's words."""

    ELIGIBLE = "eligible"
    PARAMETER = "parameter"
    SMALL = "small"
    SPARSE_VIEW = "small part of its storage"
    NOT_DENSE = "not dense"
    SUBCLASS = "tensor subclass"
    OTHER_DEVICE = "not on the training device"
    NO_STORAGE = "no storage"
    UNDER_A_MODE = "under a dispatch mode of the user"
    OF_GRAPH = "of a CUDA graph"
    CAST_OF_PARAMETER = "a parameter in another dtype"
    NO_GRAPH = "no graph, and in use elsewhere"
    EXCLUDED = "excluded by name"

    __hash__ = object.__hash__  # Enum's is a Python function, which each saved tensor would call


class Gate:
    """Says which saved tensors of a cache may leave device memory.

    Args:
        device: the training device, with its index; a tensor elsewhere costs none of its memory.
        min_tensor_bytes: storages smaller than this are kept.
        accelerator: of that device.

    Attributes:
        excluded_by: tells why the tensor that this thread saves now may not leave, by more than a tensor shows; empty
            if it may. Who sets it has such tensors kept as they are, neither offloaded nor rematerialized.
    """

    def __init__(self, device: torch.device, min_tensor_bytes: int, accelerator: Accelerator) -> None:
        self._device = device
        self._min_tensor_bytes = min_tensor_bytes
        self._accelerator = accelerator
        self.excluded_by: Callable[[], str] = lambda: ""
        with torch.inference_mode(False), out_of_modes():
            self._plain_keys = torch._C._dispatch_keys(torch.empty(0, device=device))

    def judge(self, tensor: torch.Tensor, *, acts: bool, casts_stay: bool) -> Eligibility:
        """Return whether a tensor that is saved now may leave device memory.

        Args:
            acts: something is done with the tensors that may.
            casts_stay: parameters in another dtype are kept; with a budget the plan says what leaves.
        """
        kind = type(tensor)
        if kind is torch.nn.Parameter:
            return Eligibility.PARAMETER
        if acts and torch._C._len_torch_dispatch_stack() and is_under_a_mode():  # which would see our copies
            return Eligibility.PARAMETER if is_parameter(tensor) else Eligibility.UNDER_A_MODE
        if kind is not torch.Tensor:  # a subclass may raise for functions that it does not know
            return Eligibility.PARAMETER if is_parameter(tensor) else Eligibility.SUBCLASS
        base = tensor._base  # called for every saved tensor: the usual ones are told without the costly checks
        if base is not None and isinstance(base, torch.nn.Parameter):
            return Eligibility.PARAMETER
        if tensor.device != self._device:  # also one of the same type: its memory is not what runs out
            return Eligibility.OTHER_DEVICE
        if torch._C._dispatch_keys(tensor) != self._plain_keys:
            return _why_not_plain(tensor)
        storage = tensor.untyped_storage()
        if getattr(storage, OWNED, False):  # ZeRO-3 gathers parameters into storages of plain tensors
            return Eligibility.PARAMETER
        nbytes = storage.nbytes()
        if nbytes == 0:
            return Eligibility.NO_STORAGE
        if nbytes < self._min_tensor_bytes:
            return Eligibility.SMALL
        if span_bytes(tensor) < MIN_SPAN_FRACTION * nbytes:
            return Eligibility.SPARSE_VIEW
        node = (tensor if base is None else base).grad_fn if casts_stay else None
        if node is not None and type(node).__name__ == "ToCopyBackward0" and _is_of_parameter(node):
            return Eligibility.CAST_OF_PARAMETER
        # Moving the memory of a graph frees nothing, and its next run writes there whoever has saved it.
        accelerator = self._accelerator
        if accelerator.is_capturing() or accelerator.is_of_graph(storage):
            return Eligibility.OF_GRAPH
        return Eligibility.EXCLUDED if self.excluded_by() else Eligibility.ELIGIBLE


def _why_not_plain(tensor: torch.Tensor) -> Eligibility:
    """Return why a tensor that PyTorch dispatches in another way than one of plain numbers may not leave."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # of vmap, whose storage cannot be had
        return Eligibility.SUBCLASS
    if tensor._is_zerotensor():  # forward-mode AD's zeros: the storage claims bytes, and there is no memory
        return Eligibility.NO_STORAGE
    # Sparse, nested or quantized: bytes alone do not tell it. Of inference mode: it has no version. Conjugated or
    # negated: the bytes lack that mark.
    return Eligibility.NOT_DENSE


def _is_of_parameter(node: Node) -> bool:
    """Return whether a cast, which has made a tensor or its base, is one of a parameter to another dtype.

    Autocast makes one for each parameter, and holds it until it exits: offloading it frees nothing in forward, and
    writes as many bytes as the model has in every micro-step. (Whether autocast is on cannot be asked while an op
    saves.)
    """
    return isinstance(getattr(node.next_functions[0][0], "variable", None), torch.nn.Parameter)


def is_under_a_mode() -> bool:
    """Return whether a ``TorchDispatchMode`` would see what we do with a tensor now, and may not understand it.

    Compiled code runs under a mode of its own, which looks at custom operators only. A mode that changes and records
    nothing, and is to see what a run without it does, says so with the attribute ``observes_only``.
    """
    return not all(
        type(mode).__module__.startswith(COMPILED) or getattr(mode, "observes_only", False)
        for mode in _get_current_dispatch_mode_stack()
    )


def out_of_modes() -> AbstractContextManager[object]:
    """Return the context of what no ``TorchDispatchMode`` is to see or change, but for those that only observe."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() and is_under_a_mode() else nullcontext()
