"""Saved tensors: their identity, rebuilding and versions, whose memory they have, and which may leave the device.

Knows tensors, ``torch.autograd.Function``, the device and the user's modes; does not know the cache.

[Note: Stamps] Identity is a stamp on the *untyped storage* (not an address, which the allocator reuses; TBA section
3.3) plus the view's offset, shape, stride and dtype. PyTorch keeps the Python object of a storage alive as long as the
storage, so an attribute on it lives and dies with the bytes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import NamedTuple

import torch
from torch.autograd.graph import Node
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from ds_tba.device.accelerator import Accelerator
from ds_tba.errors import ActivationModifiedError

STAMP = "_ds_tba_stamp"  # of storages and tensors
OWNED = "_ds_tba_owned"
SAVED_BY = "_ds_tba_thread"  # of the nodes of a user's Functions that save
_INPUT = "_ds_tba_input"
COMPILED = "torch._functorch._aot_autograd"
# Packages whose Functions write into nothing that they save; but for custom operators, whose kernels are a user's, and
# for what ``vmap`` makes of a user's Function.
_TRUSTED, _OF_USERS = ("torch.", "deepspeed."), ("torch._library.", "torch._functorch.autograd_function.")

# The generation of one storage or version counter, never issued twice in a process. A plain number, because it lies in
# the __dict__ of users' tensors, which torch.save writes and torch.load reads with weights_only.
Stamp = int
_stamps = itertools.count()


class ViewSpec(NamedTuple):
    """Everything that turns the bytes of a storage back into one view of it."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    storage_offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ViewSpec:
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def rebuild(self, data: torch.Tensor) -> torch.Tensor:
        """Return the view of ``data`` (uint8, 1-D, as long as the original storage).

        A true view, so that a backward that changes what it unpacked bumps the version counter of all of them.
        """
        whole = data[: data.numel() // self.dtype.itemsize * self.dtype.itemsize]  # an odd rest fits no element
        return whole.view(self.dtype).as_strided(self.shape, self.stride, self.storage_offset)


def stamp_of(owner: torch.UntypedStorage | torch.Tensor) -> Stamp:
    """Return the stamp of a storage, or of a tensor's version counter, issued at first sight; see [Note: Stamps]."""
    stamp: Stamp | None = getattr(owner, STAMP, None)
    if stamp is None:
        stamp = next(_stamps)
        setattr(owner, STAMP, stamp)  # an address would be another storage's later
    return stamp


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that another is a view of; itself if it is no view."""
    return tensor if tensor._base is None else tensor._base


# Returns the number that the next node of this thread's graph takes.
next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


def is_of_a_users_function(context: type) -> bool:
    """Return whether a class of a node or context is of a Function that neither PyTorch nor DeepSpeed brings."""
    if not issubclass(context, torch.autograd.function.BackwardCFunction):
        return False
    module = getattr(context, "_forward_cls", context).__module__ + "."  # or torchvision would pass for torch
    return not module.startswith(_TRUSTED) or module.startswith(_OF_USERS)


def as_uint8(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of a storage as uint8, 1-D, sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def mark_owned(module: torch.nn.Module) -> None:
    """Mark the storages that a module's parameters and buffers have right now as theirs.

    ZeRO-3 gathers parameters into new storage for every use, so this is called again before each forward of the module.
    """
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and type(tensor) in (torch.nn.Parameter, torch.Tensor):
            setattr(tensor.untyped_storage(), OWNED, True)


def mark_all_owned(model: torch.nn.Module) -> None:
    """Mark as :func:`mark_owned` does for every module of a model; before each forward, or what replaced a parameter
    meanwhile would be taken for an activation.
    """
    for module in model.modules():
        mark_owned(module)


def is_owned(tensor: torch.Tensor) -> bool:
    """Return whether :func:`mark_owned` has marked the storage of a tensor."""
    return getattr(tensor.untyped_storage(), OWNED, False)


def mark_inputs(values: object) -> None:
    """Mark the storages of the tensors among a forward's arguments: whoever made them may refill them."""
    for value in tree_leaves(values):
        if type(value) is torch.Tensor and has_plain_storage(value):
            setattr(value.untyped_storage(), _INPUT, True)


def is_input(tensor: torch.Tensor) -> bool:
    """Return whether :func:`mark_inputs` has marked the storage of a tensor."""
    return has_plain_storage(tensor) and getattr(tensor.untyped_storage(), _INPUT, False)


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter or a view of one (Linear saves the transpose of its weight)."""
    if isinstance(tensor, torch.nn.Parameter):
        return True
    base = tensor._base
    return base is not None and isinstance(base, torch.nn.Parameter)


def has_plain_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a dense view of a storage of its own kind."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def held_memory(tensor: torch.Tensor, device: torch.device) -> tuple[torch.UntypedStorage | None, int]:
    """Return the storage that a kept tensor holds, the first of several or None, and its bytes of device memory.

    A view of a part of a storage holds that part, as a slice of the user's data set does. A view that was computed from
    parameters holds all of the storage: nobody but autograd has the rest.
    """
    is_plain = has_plain_storage(tensor)
    storages = [part.untyped_storage() for part in ([tensor] if is_plain else components_of(tensor))]
    nbytes = sum(one.nbytes() for one in storages) if storages else nbytes_of(tensor)
    if is_plain and not tensor.requires_grad:
        nbytes = min(nbytes, max(span_bytes(tensor), 1))
    return storages[0] if storages else None, nbytes if tensor.device == device else 0


_BY_ROW, _BY_COLUMN = ("values", "crow_indices", "col_indices"), ("values", "ccol_indices", "row_indices")
# By layout, the names of the tensors inside, or of the methods that return them; none of libraries' own layouts.
_INSIDE = {
    torch.jagged: ("_values", "_offsets", "_lengths"), torch.sparse_coo: ("_values", "_indices"),
    torch.sparse_csr: _BY_ROW, torch.sparse_bsr: _BY_ROW, torch.sparse_csc: _BY_COLUMN, torch.sparse_bsc: _BY_COLUMN,
}  # fmt: skip


def components_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold the memory of a sparse or jagged tensor, the largest first; none of any other."""
    layout = tensor.layout
    if layout is torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return []
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        found = [getattr(tensor, name, None) for name in _INSIDE.get(layout, ())]
        if layout is not torch.jagged:
            found = [inside() for inside in found if inside is not None]
    plain = [one for one in found if isinstance(one, torch.Tensor) and has_plain_storage(one)]
    return sorted(plain, key=lambda one: one.untyped_storage().nbytes(), reverse=True)


def form_of(one: torch.Tensor | ViewSpec) -> str:
    """Return shape and dtype for people; nested tensors of strided layout have no shape; subclasses are not asked."""
    with torch._C.DisableTorchFunctionSubclass():
        has_none = isinstance(one, torch.Tensor) and one.is_nested and one.layout is torch.strided
        shape = "nested" if has_none else str(list(one.shape))
        return f"{shape} {str(one.dtype).removeprefix('torch.')}"


def span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of storage between the first and the last element of a view, both included."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 0:
            return 0
        last += (size - 1) * stride
    return (last + 1) * tensor.element_size()


def node_of(tensor: torch.Tensor) -> Node | None:
    """Return the node that has made a tensor; None if there is none, or where autograd does not tell it.

    [Note: Stale views] Autograd raises where it is asked for the node of a view that a Function's forward has made of a
    tensor before it changed that in place. Without hooks that comes to light if backward reads the view.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def has_graph(tensor: torch.Tensor) -> bool:
    """Return whether a node has made a tensor, also where autograd does not tell which: see [Note: Stale views]."""
    try:
        return tensor.grad_fn is not None
    except RuntimeError:
        return True


def attributes_of(tensor: torch.Tensor, *, is_of_function: bool) -> Mapping[str, object] | None:
    """Return the Python attributes of a tensor with a graph, as they are now; None where the user has set none.

    Args:
        is_of_function: a custom Function saves it, which finds none on its own output: autograd saves that as a new
            tensor, without any.
    """
    attributes = vars(tensor)
    if attributes.keys() <= {STAMP} or not has_graph(tensor):
        return None
    node = node_of(tensor)
    is_of_this_thread = getattr(node, SAVED_BY, None) == threading.get_ident()  # each counts its nodes itself
    if is_of_function and node is not None and is_of_this_thread and node._sequence_nr() == next_sequence_number() - 1:
        return None
    # A copy, or an attribute that is set later could refer to the node that saves the tensor, and close a cycle. Our
    # stamp is left out: a tensor with a version counter of its own would pass for a view of this one.
    return {name: value for name, value in attributes.items() if name != STAMP}


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return the object to hold for a tensor that stays in memory.

    A tensor with a ``grad_fn`` may be the output of the very node that saves it: holding it would close a cycle, so a
    detached alias is held. Any other is held itself: of an alias nobody else refers to, autograd would take the memory
    for ``.grad`` when a backward returns what it saved, and add into the user's tensor from then on.
    """
    try:
        return tensor if tensor.grad_fn is None else tensor.detach()
    except RuntimeError:  # see [Note: Stale views]
        return tensor.detach()


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without bytes that has the version counter of another, and sees its in-place changes.

    Autograd compares the version counter only for tensors it holds itself, not for what a pack hook returned
    (``torch/csrc/autograd/saved_variable.cpp``, ``unpack``). A detached alias shares the counter; its data is then
    replaced by nothing, which leaves the counter in place.
    """
    key = torch._C.DispatchKey.ADInplaceOrView
    if torch._C._dispatch_tls_is_dispatch_key_excluded(key):
        # Beneath autograd, where a selective checkpoint saves, an alias would have a counter of its own.
        with torch._C._SetExcludeDispatchKeyGuard(key, False):
            alias = tensor.detach()
    else:
        alias = tensor.detach()
    alias.data = tensor.new_empty(0)  # or it would keep the memory
    return alias


def own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, in memory of its own and in the same layout."""
    if not has_plain_storage(tensor) or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()  # its mark is not in its bytes
    return ViewSpec.of(tensor).rebuild(as_uint8(tensor.untyped_storage()).clone())


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def unmodified(tensor: torch.Tensor, version: int, spec: ViewSpec | None = None) -> torch.Tensor:
    """Return the tensor, if it is at this version.

    Args:
        spec: of the tensor whose version counter this is.

    Raises:
        ActivationModifiedError: it is not, in autograd's words.
    """
    if tensor._version != version:
        raise ActivationModifiedError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of {form_of(spec or tensor)} is at version {tensor._version}; expected version {version} "
            "instead. Hint: find the operation with torch.autograd.set_detect_anomaly(True)."
        )
    return tensor


def with_counter_of(tensor: torch.Tensor, spec: ViewSpec, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the view ``spec`` of a storage, with the version counter of a tensor of the same dtype."""
    again = tensor.detach()
    again.data = spec.rebuild(as_uint8(storage))
    return again


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def integers_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same bits as numbers that are equal only to themselves."""
    tensor = tensor.detach().resolve_conj().resolve_neg()  # marks are not in the bits
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


# ---- which may leave ------------------------------------------------------------------------------------------------

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
    """Says which saved tensors of a cache may leave device memory."""

    def __init__(self, device: torch.device, min_tensor_bytes: int, accelerator: Accelerator) -> None:
        self._device = device  # the training device, with its index; a tensor elsewhere costs none of its memory
        self._min_tensor_bytes = min_tensor_bytes  # smaller storages are kept
        self._accelerator = accelerator
        # Tells why the tensor that this thread saves now may not leave, by more than a tensor shows; empty if it may.
        # Such tensors are kept as they are, neither offloaded nor rematerialized.
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
