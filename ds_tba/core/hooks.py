"""Autograd calls our saved-tensor hooks, also after a forward, around a checkpoint and in compiled code.

Knows the hooks of this thread, PyTorch's checkpoint and compiler; cannot see what is saved.

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
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._C import DisableTorchFunction as _DisableTorchFunction
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as checkpointing

from ds_tba.core.poison import FORKS
from ds_tba.core.saved import PassedThrough

Pack: TypeAlias = Callable[[torch.Tensor], Any]
Unpack: TypeAlias = Callable[[Any], torch.Tensor]

# ---- torch.compile --------------------------------------------------------------------------------------------------


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


def uncompiled_hooks(pack: Pack, unpack: Unpack) -> saved_tensors_hooks:
    """Saved-tensor hooks that ``torch.compile`` leaves alone."""
    return saved_tensors_hooks(partial(uncompiled, pack), partial(uncompiled, unpack))


class ForwardHooks(saved_tensors_hooks):
    """The hooks of a forward, or of what comes between it and its backward; see [Note: Passing through].

    No tensor subclass and no mode of the user's sees what they do with tensors: without hooks these see nothing of what
    autograd saves, and they may raise for what they do not know.

    Attributes:
        is_over: what is saved from now on is none of ours. What was saved before still comes back.
    """

    def __init__(self, pack: Pack, unpack: Unpack) -> None:
        self._pack, self._unpack = pack, unpack
        self._forks = FORKS.count
        self.is_over = False

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


_CHECKPOINT_HOOK = checkpointing._checkpoint_hook.__qualname__


def innermost_hooks() -> tuple[Pack, Unpack] | None:
    """Return the pack and unpack functions that autograd calls at this point, if any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def is_in_checkpoint() -> bool:
    """Return whether autograd hands what is saved at this point to a non-reentrant checkpoint."""
    hooks = innermost_hooks()
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith(_CHECKPOINT_HOOK)


def is_being_compiled() -> bool:
    """Return whether ``torch.compile`` compiles what this thread calls next; for code that is not traced."""
    before = set_eval_frame(None)
    set_eval_frame(before)
    return before is not None


# ---- selective checkpoints ------------------------------------------------------------------------------------------

_RESPECT = "respect_saved_tensors_hooks"
_CHECKPOINT = "_checkpoint_without_reentrant_generator_impl"  # since PyTorch 2.14
_IN_SCOPE = "_current_user_saved_tensors_hooks"  # likewise


class SelectiveCheckpoints:
    """Stands in the place of PyTorch's function behind ``checkpoint``; see [Note: Selective checkpoints]."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self._checkpoint = checkpoint

    def __call__(self, *args: Any, **options: Any) -> Any:
        hooks, context_fn = getattr(checkpointing, _IN_SCOPE)(), options.get("context_fn")
        is_ours = hooks is not None and getattr(hooks[0], "__func__", None) is ForwardHooks.pack_hook  # else a user's
        is_selective = context_fn not in (None, checkpointing.noop_context_fn)
        if is_ours and is_selective and options.get(_RESPECT) is None:  # what it says stays
            _, recomputation = contexts = options["context_fn"]()
            options["context_fn"] = lambda: contexts  # a second call would make other contexts than those judged here
            options[_RESPECT] = not getattr(recomputation, "allow_cache_entry_mutation", False)  # wants changes
        return self._checkpoint(*args, **options)


def _hear_selective_checkpoints() -> None:
    behind = getattr(checkpointing, _CHECKPOINT, None)
    if behind is not None and hasattr(checkpointing, _IN_SCOPE) and not isinstance(behind, SelectiveCheckpoints):
        setattr(checkpointing, _CHECKPOINT, SelectiveCheckpoints(behind))


@contextmanager
def hooks_of_forward(hooks: ForwardHooks) -> Iterator[None]:
    """Open these hooks for a forward; they also get what selective checkpoints save."""
    _hear_selective_checkpoints()
    try:
        with hooks:
            yield
    except BaseException:
        hooks.end()  # a signal handler may have raised in their own exit
        raise


# ---- hooks that stay open after a forward ---------------------------------------------------------------------------


class OpenHooks(threading.local):
    """The hooks that a thread has kept open last.

    Attributes:
        last: remembered once they are off, too: autograd restores a stack that was changed inside of a backward.
    """

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
