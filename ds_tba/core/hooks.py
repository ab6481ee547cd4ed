"""PyTorch calls these: saved-tensor hooks, and what saves and reads for Python Functions and for checkpoints.

Knows the hooks of this thread, ``torch.autograd.Function``, checkpoints and the compiler; cannot see where storages go.

[Note: Passing through] Our hooks may be on a thread's stack where they have no business: in a child that was forked
inside of a forward, and after a step that was given up, where a program keeps the exception and with it the engine.
There they pass every tensor through, as parameters are, so that the child and other models train as without us.

[Note: Kept hooks] PyTorch's hooks are a stack of each thread, and whoever ends takes the innermost off. With
``until_backward`` ours stay on it after a forward. They go on it where nobody else's are, and come off only while they
are the innermost: no others are ever taken off in their place.

[Note: Compiled code] ``torch.compile`` traces the hooks of modules as parts of what it compiles: there ours do nothing,
and are no reason to compile again. But Python calls the hooks of a module that is compiled in place
(``layer.compile()``), and all hooks after a break of the graph, and the compiler is on there: it would compile each
frame of ours for itself. So the frames that Python enters first are skipped, and what they call runs with the compiler
off.

[Note: Selective checkpoints] What a policy has a selective checkpoint save lies in a store of the checkpoint's, outside
of the graph. Since 2.14 PyTorch hands it to the saved-tensor hooks around the checkpoint, where the call says so
(``respect_saved_tensors_hooks``); where it says nothing it warns, later versions raise, and then it is the default
(pytorch #191236). The call is a user's or a library's, so we say it for them where our hooks are the ones in scope.
PyTorch has no switch for that: the function behind ``checkpoint`` is replaced at the first forward, by one that does
nothing else. What the call says itself stays. ``allow_cache_entry_mutation`` wants what was saved as it is *later*, so
that it stays with the checkpoint.

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

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch._C import DisableTorchFunction as _DisableTorchFunction
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as checkpointing

from ds_tba.core.poison import FORKS
from ds_tba.core.saved import PassedThrough, held_of
from ds_tba.core.tensors import SAVED_BY, has_plain_storage, is_of_a_users_function, next_sequence_number, own, stamp_of

Pack: TypeAlias = Callable[[torch.Tensor], Any]
Unpack: TypeAlias = Callable[[Any], torch.Tensor]

# ---- torch.compile -------------------------------------------------------------------------------------------------


def compilations() -> int:
    """Return how much ``torch.compile`` has compiled in this process so far; 0 where nobody has imported it.

    Counts everything that it times: frames, backwards (compiled when they first run), kernels and their tuning.
    """
    times: dict[str, list[float]] = getattr(sys.modules.get("torch._dynamo.utils"), "compilation_time_metrics", {})
    return sum(map(len, list(times.values())))  # a list: another thread may compile meanwhile


def skip_frames(functions: Iterable[Any]) -> None:
    """Have Python run these functions, which ``torch.compile`` would compile; see [Note: Compiled code].

    To be called before each forward: the compiler may be imported at any time, and is not by us.
    """
    skip_code = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip_code is not None:
        ours = (uncompiled, is_being_compiled, SelectiveCheckpoints.__call__)
        for function in (*ours, ForwardHooks.pack_hook, ForwardHooks.unpack_hook, *functions):
            skip_code(function.__code__)


def uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with the compiler off in this thread."""
    before = set_eval_frame(None)
    try:
        return function(*args)
    finally:
        set_eval_frame(before)


class ForwardHooks(saved_tensors_hooks):
    """The hooks of a forward, or of what comes between it and its backward; see [Note: Passing through].

    No tensor subclass and no mode of the user's sees what they do with tensors: without hooks these see nothing of what
    autograd saves, and they may raise for what they do not know.
    """

    def __init__(self, pack: Pack, unpack: Unpack) -> None:
        self._pack, self._unpack = pack, unpack
        self._forks = FORKS.count
        self.is_over = False  # if so, what is saved is none of ours; what was saved before still comes back

    # Methods, where PyTorch's class has attributes: one that is bound to this object would hold it in a circle.
    def pack_hook(self, tensor: torch.Tensor) -> Any:
        with _DisableTorchFunction():
            before = set_eval_frame(None)  # first of all: the compiler would compile whatever is called
            try:
                is_foreign = self.is_over or FORKS.count != self._forks
                return PassedThrough(tensor) if is_foreign else self._pack(tensor)
            finally:
                set_eval_frame(before)

    def unpack_hook(self, held: Any) -> torch.Tensor:
        with _DisableTorchFunction():
            before = set_eval_frame(None)
            try:
                is_foreign = type(held) is PassedThrough and (self.is_over or FORKS.count != self._forks)
                return held.restore() if is_foreign else self._unpack(held)
            finally:
                set_eval_frame(before)

    def end(self) -> None:
        """Have them pass everything through from now on, and take them off this thread's stack if they are on top."""
        self.is_over = True
        if innermost_hooks() == (self.pack_hook, self.unpack_hook):  # never others in their place
            self.__exit__()


NO_BACKWARD = -1  # PyTorch's number of the backward in this thread when there is none


def innermost_hooks() -> tuple[Pack, Unpack] | None:
    """Return the pack and unpack functions that autograd calls at this point, if any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def in_backward() -> bool:
    """Return whether a backward runs in this thread."""
    return torch._C._current_graph_task_id() != NO_BACKWARD


def saves_through_ours() -> bool:
    """Return whether this is in no backward, and autograd hands what is saved here to our hooks, not to others."""
    return are_ours(innermost_hooks()) and not in_backward()


def are_ours(hooks: tuple[Pack, Unpack] | None) -> bool:
    """Return whether hooks are ours; else they are a user's, or a checkpoint's."""
    return hooks is not None and getattr(hooks[0], "__func__", None) is ForwardHooks.pack_hook


def is_being_compiled() -> bool:
    """Return whether ``torch.compile`` compiles what this thread calls next; for code that is not traced."""
    before = set_eval_frame(None)
    set_eval_frame(before)
    return before is not None


# ---- selective checkpoints -----------------------------------------------------------------------------------------

_RESPECT = "respect_saved_tensors_hooks"
_CHECKPOINT = "_checkpoint_without_reentrant_generator_impl"  # since PyTorch 2.14
_IN_SCOPE = "_current_user_saved_tensors_hooks"  # likewise


class SelectiveCheckpoints:
    """Stands in the place of PyTorch's function behind ``checkpoint``; see [Note: Selective checkpoints]."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self._checkpoint = checkpoint

    def __call__(self, *args: Any, **options: Any) -> Any:
        hooks, context_fn = getattr(checkpointing, _IN_SCOPE)(), options.get("context_fn")
        is_selective = context_fn not in (None, checkpointing.noop_context_fn)
        if are_ours(hooks) and is_selective and options.get(_RESPECT) is None:  # what it says stays
            _, recomputation = contexts = options["context_fn"]()
            options["context_fn"] = lambda: contexts  # a second call would make other contexts than those judged here
            options[_RESPECT] = not getattr(recomputation, "allow_cache_entry_mutation", False)  # wants changes
        return self._checkpoint(*args, **options)


@contextmanager
def hooks_of_forward(hooks: ForwardHooks) -> Iterator[None]:
    """Open these hooks for a forward; they also get what selective checkpoints save."""
    behind = getattr(checkpointing, _CHECKPOINT, None)
    if behind is not None and hasattr(checkpointing, _IN_SCOPE) and not isinstance(behind, SelectiveCheckpoints):
        setattr(checkpointing, _CHECKPOINT, SelectiveCheckpoints(behind))
    try:
        with hooks:
            yield
    except BaseException:
        hooks.end()  # a signal handler may have raised in their own exit
        raise


# ---- hooks that stay open after a forward --------------------------------------------------------------------------


class OpenHooks(threading.local):
    """The hooks that a thread has kept open last."""

    # Remembered once they are off, too: autograd restores a stack that was changed inside of a backward.
    last: ForwardHooks | None = None

    def open(self, hooks: ForwardHooks) -> None:
        """Put hooks on the stack, to stay there."""
        self.last = hooks  # before they are there: a signal handler may raise in between
        hooks.__enter__()

    def close(self) -> None:
        """End the last hooks. Where hooks of others are inside of them, a later call takes them off."""
        if self.last is not None:
            self.last.end()


OPEN_HOOKS = OpenHooks()


# ---- Python Functions -----------------------------------------------------------------------------------------------

_SAVED_TENSORS, _OLD_NAME = "saved_tensors", "saved_variables"
_READ = "_ds_tba_read"


class FunctionSaves(threading.local):
    """The last save of each thread by a Function of the user's, told apart from those of operations."""

    storages: frozenset[int] = frozenset()  # stamps of those that it saves; see [Note: Functions of the user]
    number = -1  # the sequence number at which autograd packs them
    is_packed = False  # one of them was packed at that number, so that another number is another operation's

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
    """The descriptor in place of ``ctx.saved_tensors``; see [Note: Originals]."""

    def __init__(self, builtin: Any) -> None:
        self._builtin = builtin  # the descriptor of autograd, which unpacks
        self.saves = FunctionSaves()  # of Functions in this process

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
