"""Python Functions: which saves are a user's, and ``ctx.saved_tensors`` that returns the very parameters that it saved.

Knows ``torch.autograd.Function`` and PyTorch's checkpoint; cannot see where storages go.

[Note: Functions of the user] A Function that PyTorch and DeepSpeed do not bring may write, without a version, into what
it saves: in forward before it saves it, in backward after it has read it (Liger's kernels do both). So what it saves is
shared with no other save. Autograd packs the tensors when the Function's forward is over, and the hook is not told for
whom. ``ctx.save_for_backward`` is Python, and says which storages come: they do at the same sequence number, because
each node of the graph takes one. If the Function's forward builds a graph of its own meanwhile, what that saves of
these storages counts as the Function's, too.

[Note: Originals] Without hooks, ``ctx.saved_tensors`` returns a saved leaf as the object that was saved. With hooks,
autograd wraps whatever unpack returned in a new tensor (``torch/csrc/autograd/saved_variable.cpp``, ``unpack``). Two
things go wrong then. A backward that returns a saved leaf as a gradient returns a tensor that nobody else refers to, so
``AccumulateGrad`` takes its memory for ``.grad``, and an optimizer that changes ``.grad`` changes the leaf. And code
that looks for attributes of the parameter it saved (ZeRO-3's ``ds_status``, say) does not find them. Therefore
``saved_tensors`` is replaced, on the base class of every Python Function's context, by a descriptor that returns the
original where it was kept; and likewise what a checkpoint hands to the function that it runs again, which PyTorch 2.13
no longer saves in a Function. A tensor with a graph comes back as a new object, with the attributes that it had when it
was saved. Nobody else refers to that object either, so a backward that returns it returns other memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.utils import checkpoint as checkpointing

from ds_tba.core.saved import held_of
from ds_tba.core.tensors import (
    SAVED_BY,
    has_plain_storage,
    is_of_a_users_function,
    next_sequence_number,
    own,
    stamp_of,
)

_SAVED_TENSORS, _OLD_NAME = "saved_tensors", "saved_variables"
_READ = "_ds_tba_read"


class FunctionSaves(threading.local):
    """The last save of each thread by a Function of the user's, told apart from those of operations.

    Attributes:
        storages: stamps of the storages that it saves; see [Note: Functions of the user].
        number: the sequence number at which autograd packs them.
        is_packed: one of them was packed at that number, so that another number is another operation's.
    """

    storages: frozenset[int] = frozenset()
    number = -1
    is_packed = False

    def begin(self, tensors: Iterable[object]) -> None:
        """Note that a Function of the user's saves these tensors."""
        with torch._C.DisableTorchFunction():  # a subclass may raise for what it does not know
            plain = [one for one in tensors if isinstance(one, torch.Tensor) and has_plain_storage(one)]
            self.storages = frozenset(stamp_of(one.untyped_storage()) for one in plain)
        self.number, self.is_packed = next_sequence_number(), False

    def saver_of(self, tensor: torch.Tensor) -> int:
        """Return a number of the Function that saves a tensor now, above 0; 0 if an operation does."""
        if not self.storages or not has_plain_storage(tensor):
            return 0
        number = next_sequence_number()
        if self.is_packed and number != self.number:
            self.storages = frozenset()
            return 0
        is_of_function = stamp_of(tensor.untyped_storage()) in self.storages
        self.is_packed |= is_of_function and number == self.number
        return number + 1 if is_of_function else 0


class SavedTensors:
    """The descriptor in place of ``ctx.saved_tensors``; see [Note: Originals].

    Args:
        builtin: the descriptor of autograd, which unpacks.

    Attributes:
        saves: of Functions in this process.
    """

    def __init__(self, builtin: Any) -> None:
        self._builtin = builtin
        self.saves = FunctionSaves()

    def __get__(self, ctx: Any, owner: type | None = None) -> object:
        if ctx is None:
            return self
        # First: PyTorch may be told to clear them with the read (``clear_saved_tensors_on_access``).
        held = [saved.data for saved in ctx._raw_saved_tensors]
        found = self._builtin.__get__(ctx, owner)
        if not found or len(found) != len(held):  # in forward mode those of ``save_for_forward``, which nobody packs
            return found
        with torch._C.DisableTorchFunction():  # a subclass may raise for what it does not know
            originals = with_originals(found, held)
            read = [weakref.ref(one) for one in originals if isinstance(one, torch.Tensor)]
        vars(ctx).setdefault(_READ, []).extend(read)
        return originals


def keep_originals() -> FunctionSaves:
    """Replace what reads ``ctx.saved_tensors`` in this process, and what saves for Functions; return the saves."""
    present = BackwardCFunction.__dict__.get(_SAVED_TENSORS)
    if not isinstance(present, SavedTensors):  # once for all engines, or ours would be wrapped in ours
        present = SavedTensors(getattr(BackwardCFunction, _SAVED_TENSORS))
        for name in (_SAVED_TENSORS, _OLD_NAME):  # or reads by the other would go around ours
            setattr(BackwardCFunction, name, present)
        for name in ("apply", "apply_boxed"):
            if hasattr(BackwardCFunction, name):
                setattr(BackwardCFunction, name, _returning_own_memory(getattr(BackwardCFunction, name)))
        _hand_to_checkpoints(present.saves)
        _note_saves(present.saves)
    return present.saves


def _returning_own_memory(builtin: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Function's backward that returns none of the tensors that :class:`SavedTensors` gave to it.

    Autograd would take their memory for ``.grad``, if nobody else refers to them; but the tensor that was saved, or
    another read of it, may have it, and they may have the version counter by which in-place changes are noticed.
    """

    @wraps(builtin)
    def apply(self: Any, *gradients: Any) -> Any:
        found = builtin(self, *gradients)
        read = vars(self).get(_READ)  # of any thread, and also what hooks have read
        if not read or torch.is_grad_enabled():  # for a second derivative autograd takes no memory
            return found
        with torch._C.DisableTorchFunction():
            if isinstance(found, tuple):
                return tuple(_own_memory(one, read) for one in found)
            return _own_memory(found, read)

    return apply


def _own_memory(gradient: Any, read: Sequence[weakref.ref[torch.Tensor]]) -> Any:
    is_read = isinstance(gradient, torch.Tensor) and any(one() is gradient for one in read)
    return own(gradient) if is_read else gradient


def _note_saves(saves: FunctionSaves) -> None:
    builtin = FunctionCtx.save_for_backward

    @wraps(builtin)
    def save_for_backward(self: FunctionCtx, *tensors: torch.Tensor) -> None:
        if is_of_a_users_function(type(self)):
            saves.begin(tensors)
            vars(self)[SAVED_BY] = threading.get_ident()
        builtin(self, *tensors)

    FunctionCtx.save_for_backward = save_for_backward  # type: ignore[method-assign]


def _hand_to_checkpoints(saves: FunctionSaves) -> None:
    frame: Any = getattr(checkpointing, "_CheckpointFrame", None)
    get_inputs = getattr(frame, "get_inputs", None)
    if get_inputs is None:
        return

    def originals(self: Any) -> Sequence[object]:
        found = get_inputs(self)
        saved = getattr(self, "saved_args", None)  # PyTorch 2.13 saves them in no Function
        return found if saved is None else with_originals(found, [getattr(one, "data", None) for one in saved])

    frame.get_inputs = originals
    save = getattr(frame, "save_inputs", None)
    if save is not None:

        def save_inputs(self: Any, *args: object) -> None:
            saves.storages = frozenset()  # else what a Function has saved right before would count as its save
            save(self, *args)

        frame.save_inputs = save_inputs


def with_originals(found: Sequence[Any], held: Sequence[object]) -> tuple[Any, ...]:
    """Return saved tensors, with the originals in place of tensors that autograd made around them.

    Args:
        found: returned by autograd; None for an argument that was None, and of a checkpoint also other objects.
        held: what each was packed as, by our hooks or by others.
    """
    return tuple(_original(one, data) for one, data in zip(found, held, strict=True))


def _original(one: Any, data: object) -> Any:
    held = held_of(data)
    if held is None or not isinstance(one, torch.Tensor):
        return one
    kept = held.held
    # A tensor with a graph of its own must keep the edge that autograd gave it.
    if kept is not None and one.grad_fn is None and one.requires_grad == kept.requires_grad:
        one = kept
    if held.attributes:
        vars(one).update({**held.attributes, **vars(one)})  # a wrapper has parts of its own
    return one
