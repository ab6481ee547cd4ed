"""What ``ctx.saved_tensors`` returns while our hooks are on: the very tensors that a Function saved, where it can.

Sees what our unpack hooks return in this thread; cannot see what becomes of a tensor afterwards.

[Note: Originals] Without hooks, ``ctx.saved_tensors`` returns a saved leaf as the object that was saved. With hooks,
autograd wraps whatever unpack returned in a new tensor (``torch/csrc/autograd/saved_variable.cpp``, ``unpack``). Two
things go wrong then. A backward that returns a saved leaf as a gradient returns a tensor that nobody else refers to, so
``AccumulateGrad`` takes its memory for ``.grad``, and an optimizer that changes ``.grad`` changes the leaf. And code
that looks for attributes of the parameter it saved (ZeRO-3's ``ds_status``, say) does not find them. Therefore
``saved_tensors`` is replaced, on the base class of every Python Function's context, by a descriptor that returns the
original wherever unpack returned the original; and likewise what a checkpoint hands to the function that it runs again,
which PyTorch 2.13 no longer saves in a Function. A tensor with a graph comes back as a new object, and gets the
attributes that it had when it was saved.

[Note: Memory of gradients] ``AccumulateGrad`` takes the memory of a gradient that nobody else refers to. Without hooks
autograd itself refers to what a Function has saved, so that a backward that returns it has a copy made. With hooks the
tensor around it is new. So the backward that runs refers to what a Function of the user's has read in its thread until
it unpacks for another node there, or for longer where autograd still has it as a gradient. Nor may autograd add a
second gradient to it in place, which would count as a change of the saved tensor. A callback of the backward's holds
it, which autograd drops with the backward, also where that raises. A graph that stays holds none of it: with a budget
there may be no room.

[Note: Functions of the user] A Function that PyTorch and DeepSpeed do not bring may write, without a version, into what
it saves: in forward before it saves it, in backward after it has read it (Liger's kernels do both). So each storage
counts how often such a Function has saved it, and the unpack hook is told when such a Function reads.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.utils import checkpoint as checkpointing

from ds_tba.core.tensors import (
    has_plain_storage,
    is_of_a_compiled_graph,
    is_of_a_users_function,
    note_save_by_function,
)
from ds_tba.device.copies import Arrival

_SAVED_TENSORS, _OLD_NAME = "saved_tensors", "saved_variables"
_COMPILED_SAVE = "_ds_tba_compiled_save"


class Unpacked(NamedTuple):
    """A tensor that an unpack hook has returned.

    Attributes:
        is_held: it was held since it was saved, and not made for this unpack.
        attributes: see :func:`~ds_tba.core.tensors.attributes_of`.
    """

    tensor: torch.Tensor
    is_held: bool
    attributes: Mapping[str, object] | None = None


OwnMemory = dict[object, Arrival]
"""The memory of what one node reads, by what it was saved in: it is one for all reads, as without hooks."""


class Reading:
    """A read of saved tensors by Python code that is under way.

    Attributes:
        memory: of what the node reads, if that is one of [Note: Functions of the user]; None if it is another.
        tensors: those that unpack hooks have returned for it so far.
    """

    __slots__ = ("memory", "tensors")

    def __init__(self, memory: OwnMemory | None) -> None:
        self.memory = memory
        self.tensors: list[Unpacked] = []


class _LastRead:
    """The tensors that Functions of the user's have read in a thread; see [Note: Memory of gradients].

    Attributes:
        reader: tells the node that has read last from others; None where that was forgotten.
        memory: of what it has read.
        tensors: what it has read, and what of the reads before is a gradient that is under way.
    """

    __slots__ = ("__weakref__", "memory", "reader", "tensors")

    def __init__(self) -> None:
        self.reader: tuple[int, int] | None = None
        self.memory: OwnMemory = {}
        self.tensors: list[torch.Tensor] = []

    def __call__(self) -> None:
        """Do nothing at the end of the backward, whose callback this is."""

    def forget(self, reader: tuple[int, int] | None = None) -> None:
        """Refer no longer to what another node has read, but for gradients."""
        if reader is None or reader != self.reader:
            self.memory = {}
            # A tensor to which autograd refers, too, is a gradient.
            self.tensors = [one for one in self.tensors if one._use_count() > 1]  # type: ignore[attr-defined]
        self.reader = reader


class _OfThread(threading.local):
    """Reads and saves of tensors by Python code in this thread.

    Attributes:
        reading: the innermost one; None while there is none.
        last: what was read last, by autograd's number of the backward that holds that.
        compiled: marks the storages that the compiled graph saves which has run last.
        checkpoints: how many have saved their arguments, which makes no node.
    """

    reading: Reading | None = None
    compiled: object = None
    checkpoints = 0

    def __init__(self) -> None:
        self.last: dict[int, weakref.ref[_LastRead]] = {}


class SavedTensors:
    """The descriptor in place of ``ctx.saved_tensors``. See [Note: Originals].

    Args:
        builtin: the descriptor of autograd, which unpacks.
    """

    def __init__(self, builtin: Any) -> None:
        self._builtin = builtin
        self._of_thread = _OfThread()

    def __get__(self, ctx: Any, owner: type | None = None) -> object:
        if ctx is None:
            return self
        is_users = is_of_a_users_function(type(ctx))
        return self.read(partial(self._builtin.__get__, ctx, owner), ctx if is_users else None)

    def read(self, unpack: Callable[[], Sequence[object]], ctx: Any = None) -> Sequence[object]:
        """Return what ``unpack`` returns, with the originals among it.

        Args:
            ctx: the context of one of [Note: Functions of the user]; else None.
        """
        last = None if ctx is None else self._begin_read(ctx)
        reading = Reading(None if ctx is None else {} if last is None else last.memory)
        state = self._of_thread
        outer, state.reading = state.reading, reading
        try:
            found = unpack()
        finally:
            state.reading = outer
        if ctx is None and not any(one.is_held or one.attributes for one in reading.tensors):
            return found
        with torch._C.DisableTorchFunction():  # a subclass may raise for what it does not know
            originals = with_originals(found, reading.tensors)
        if last is not None:
            held = {id(one.tensor) for one in reading.tensors if one.is_held}  # their holders and owners refer to them
            last.tensors += [one for one in originals if isinstance(one, torch.Tensor) and id(one) not in held]
        return originals

    def _begin_read(self, ctx: Any) -> _LastRead | None:
        """Return what refers to what a node reads; None outside of a backward: nobody takes the memory of gradients."""
        backward, of_thread = torch._C._current_graph_task_id(), self._of_thread.last
        if backward < 0:
            return None
        found = of_thread.get(backward)
        last = None if found is None else found()
        if last is None:
            last = _LastRead()
            torch.autograd.Variable._execution_engine.queue_callback(last)  # goes with the backward, however it ends
            for ended in [number for number, one in of_thread.items() if one() is None]:
                del of_thread[ended]  # numbers do not come again, and would pile up
            of_thread[backward] = weakref.ref(last)
        last.forget((id(ctx), ctx._sequence_nr()))  # an id alone may be another node's by now
        return last

    def begin_unpack(self) -> Reading | None:
        """Return the reading of this thread that wants a tensor; None if a node in C++ does.

        What a Function of the user's has read is referred to no longer, unless that wants the tensor.
        """
        state = self._of_thread
        reading = state.reading
        if state.last and (reading is None or reading.memory is None):
            found = state.last.get(torch._C._current_graph_task_id())
            last = None if found is None else found()
            if last is not None:
                last.forget()  # or a graph that stays would hold what was read
        return reading

    def note_compiled(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Note the storages that a compiled graph of this thread saves now; none where another Function saves."""
        self._of_thread.compiled = mark = object()
        for storage in storages:  # a mark: to refer to them would hold them until another graph runs
            setattr(storage, _COMPILED_SAVE, mark)

    def is_of_compiled(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the compiled graph of this thread that has run last saves a storage: it was filled by then."""
        mark = getattr(storage, _COMPILED_SAVE, None)
        return mark is not None and mark is self._of_thread.compiled

    @property
    def reading(self) -> Reading | None:
        """The innermost reading of this thread."""
        return self._of_thread.reading

    @property
    def checkpoints(self) -> int:
        """The number of checkpoints that have saved their arguments in this thread."""
        return self._of_thread.checkpoints

    def note_checkpoint(self) -> None:
        """Note that a checkpoint of this thread saves its arguments."""
        self._of_thread.checkpoints += 1


def keep_originals() -> SavedTensors:
    """Replace what reads ``ctx.saved_tensors`` in this process, once, and what saves for Functions and checkpoints."""
    present = BackwardCFunction.__dict__.get(_SAVED_TENSORS)
    if not isinstance(present, SavedTensors):  # once for all engines, or ours would be wrapped in ours
        present = SavedTensors(getattr(BackwardCFunction, _SAVED_TENSORS))
        setattr(BackwardCFunction, _SAVED_TENSORS, present)
        setattr(BackwardCFunction, _OLD_NAME, property(_by_old_name))  # or reads by it would go around ours
        _hand_to_checkpoints(present)
        _count_saves(present)
    return present


def _by_old_name(ctx: Any) -> object:
    """Return ``ctx.saved_tensors`` for ``ctx.saved_variables``, which PyTorch still has; with the warning of that."""
    warnings.warn("'saved_variables' is deprecated; use 'saved_tensors'", DeprecationWarning, stacklevel=2)
    return ctx.saved_tensors


def _count_saves(saved_tensors: SavedTensors) -> None:
    """Have each storage count its saves by [Note: Functions of the user]: they all call ``ctx.save_for_backward``."""
    builtin = FunctionCtx.save_for_backward

    @wraps(builtin)
    def save_for_backward(self: FunctionCtx, *tensors: torch.Tensor) -> None:
        is_compiled, is_users = is_of_a_compiled_graph(type(self)), is_of_a_users_function(type(self))
        if is_compiled or is_users:
            with torch._C.DisableTorchFunction():
                plain = [one for one in tensors if isinstance(one, torch.Tensor) and has_plain_storage(one)]
                storages = {id(one.untyped_storage()): one.untyped_storage() for one in plain}
            saved_tensors.note_compiled(list(storages.values()) if is_compiled else ())
            for storage in storages.values() if is_users else ():
                note_save_by_function(storage)
        builtin(self, *tensors)

    FunctionCtx.save_for_backward = save_for_backward  # type: ignore[method-assign]


def _hand_to_checkpoints(saved_tensors: SavedTensors) -> None:
    frame: Any = getattr(checkpointing, "_CheckpointFrame", None)
    get_inputs, save_inputs = getattr(frame, "get_inputs", None), getattr(frame, "save_inputs", None)
    if get_inputs is not None:

        def originals(self: object) -> Sequence[object]:
            return saved_tensors.read(partial(get_inputs, self))

        frame.get_inputs = originals  # PyTorch 2.13 saves them in no Function
    if save_inputs is not None:

        def noted(self: object, *args: object) -> None:
            saved_tensors.note_checkpoint()  # no node counts it: its save would pass for the last one's
            save_inputs(self, *args)

        frame.save_inputs = noted


def with_originals(found: Sequence[Any], unpacked: Sequence[Unpacked]) -> tuple[Any, ...]:
    """Return the saved tensors of a context, with the originals in place of tensors that autograd made around them.

    Args:
        found: returned by autograd; None for an argument that was None, and of a checkpoint also other objects.
        unpacked: returned by our hooks meanwhile, in the same order; fewer, where others' hooks had some of them.
    """
    waiting = list(unpacked)
    originals = []
    for one in found:
        # Some are passed over, sparse ones say: who waited for those would find no original behind them.
        is_tensor = isinstance(one, torch.Tensor)
        place = next((n for n, other in enumerate(waiting) if is_tensor and _is_around(one, other.tensor)), None)
        if place is not None:
            tensor, is_held, attributes = waiting[place]
            del waiting[: place + 1]
            # A tensor with a graph of its own must keep the edge that autograd gave it.
            one = tensor if is_held and one.grad_fn is None and one.requires_grad == tensor.requires_grad else one
            if attributes:
                vars(one).update({**attributes, **vars(one)})  # a wrapper has parts of its own
        originals.append(one)
    return tuple(originals)


def _is_around(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    if one.dtype != other.dtype or not one.layout == other.layout == torch.strided:  # a sparse one has no address
        return False
    if one.is_nested or other.is_nested or one.shape != other.shape or one._is_zerotensor():
        return False
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
