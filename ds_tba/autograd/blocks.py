"""The repeated layers of a model: a listener is told of each pass through one, and may have the pass recomputed.

Knows torch only; does not know how the listener uses the passes, nor why one is to be recomputed.

[Note: Recomputable passes] A forward that runs a second time must neither change anything nor find anything changed.
So a pass of a kind not seen before (in training or evaluation, with objects of other classes among the arguments) is
never recomputed but watched, and a kind that left no trace is verified before a plan relies on it: see ``proof.py``. A
trace found in two forwards is the block's obstacle from then on. Saved-tensor hooks of others (a checkpoint of the
user's around the block) are another obstacle. Every recomputation looks again whether the state is that of forward.

[Note: Compiled models] Code that ``torch.compile`` compiles runs without us: a model compiled as a whole tells of no
pass, and its code is the same with us and without. Blocks that were compiled one by one before they were found
(``layers[i] = torch.compile(layer)``) are told of and recomputed as others are. Those compiled in place
(``layer.compile()``), or inside of a model whose graph breaks, are told of where nothing is to be recomputed, and never
recomputed.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ds_tba.autograd.checkpoint import (
    Account,
    Arguments,
    Conditions,
    RecomputedPass,
    counting,
    innermost_hooks,
    replace_forward,
    restore_forward,
)
from ds_tba.autograd.comparison import is_compiled
from ds_tba.autograd.discovery import (
    HOOK_FRAMES,
    CallHook,
    PassHooks,
    named_layers,
    repeated_layers,
)
from ds_tba.autograd.forward_state import StateReader, UnreadableError
from ds_tba.autograd.proof import Evidence, Kind, VerifiedPass, Watch, kind_of, name_of, watched
from ds_tba.autograd.tensors import is_being_compiled, uncompiled
from ds_tba.errors import IncompatibleError

_HOOKS_AROUND = (
    "saved-tensor hooks around it, such as a checkpoint's, take its saved tensors: turn those off to have plans choose"
)
_CHECKPOINT_AROUND = "a checkpoint around it runs its forward again already: turn that off to have plans choose"
_COMPILED = (
    "it is part of what torch.compile compiles, where no pass is seen: compile the blocks one by one instead, before "
    "deepspeed.initialize (layers[i] = torch.compile(layers[i]))"
)
_UNSEEN = "no pass through it was seen, with gradients, in the engine's forward"

# Autograd's number of the backward in this thread when there is none.
_NO_BACKWARD = -1
# Attributes of a bound method that inspect and torch.jit ask for.
_OF_METHODS = frozenset({"__code__", "__defaults__", "__func__", "__globals__", "__kwdefaults__", "__self__"})


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A repeated layer.

    Attributes:
        index: in ``Blocks.all``.
        path: of the module in the model, such as ``"model.layers.3"``.
        module: the layer.
        around: the modules that it is in, from the model down; weak, because DeepSpeed's hooks on the model hold its
            engine, which must be collected when the script drops it.
    """

    index: int
    path: str
    module: nn.Module
    around: tuple[weakref.ref[nn.Module], ...] = ()


class PassListener(Protocol):
    """Told of passes, in the thread in which they run."""

    def enter(self, block: Block, inputs: Sequence[torch.Tensor]) -> Any | None:
        """A pass begins, after the module's pre-forward hooks.

        Args:
            inputs: each tensor among the arguments once, positional ones first, also those in tuples, lists and
                dicts. A recomputed pass saves these, in this order, and no other tensors.

        Returns:
            Any token but None to have the pass recomputed in backward; :meth:`recompute` gets the token. It has no
            effect in passes of a kind that is not proven; see [Note: Recomputable passes].
        """

    def leave(self, block: Block) -> None:
        """The pass ends, also with an exception."""

    def recompute(self, token: Any) -> None:
        """Backward begins to run a pass's forward again; ``token`` is what :meth:`enter` returned."""

    def recomputed(self, token: Any) -> None:
        """The forward that ran again is over, also with an exception."""


def find_blocks(model: nn.Module, paths: Sequence[str] | None) -> list[Block]:
    """The repeated layers of a model.

    Args:
        paths: their paths, or None to find them; a path to a ``ModuleList`` stands for its members.

    Raises:
        ConfigError: a path is not that of a module, or lies inside another.
    """
    layers = repeated_layers(model) if paths is None else named_layers(model, paths)
    return [Block(index, path, module, _around(model, path)) for index, (path, module) in enumerate(layers.items())]


def _around(model: nn.Module, path: str) -> tuple[weakref.ref[nn.Module], ...]:
    names = path.split(".")
    return tuple(weakref.ref(model.get_submodule(".".join(names[:depth]))) for depth in range(len(names)))


class Blocks:
    """The blocks of one model, tied to one listener.

    Args:
        blocks: from :func:`find_blocks`.
        listener: is told of each pass inside :meth:`listening`.
        is_watching: whether passes are watched. Without that none is ever recomputed.
        account: counts what passes hold that run again.

    Attributes:
        to_verify: paths of the blocks whose passes are verified from now on, each kind once in a step. Every rank has
            the same: under ZeRO-3 a second run gathers parameters.
        is_strict: whether a pass that is to run again and cannot must end the run: other ranks would wait in backward.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        listener: PassListener,
        *,
        is_watching: bool = True,
        account: Account | None = None,
    ) -> None:
        self.all: tuple[Block, ...] = tuple(blocks)
        self.is_watching = is_watching
        self.to_verify: frozenset[str] = frozenset()
        self.is_strict = False
        self._listener = listener
        self._account = account
        self._thread = _Thread()
        self._known = [Evidence(StateReader(block.module, block.module.forward)) for block in self.all]
        self._ties: list[tuple[_Forward, Any]] = []
        self._hooks: list[PassHooks] = []

    def install(self) -> None:
        """Be told of passes: by forward hooks, or in the place of each block's ``forward`` if it may run again."""
        if self._ties or self._hooks:
            return
        if not self.is_watching:
            self._hooks = [
                PassHooks(block.module, functools.partial(_enter, self, block), functools.partial(_leave, self, block))
                for block in self.all
            ]
            return
        for block in self.all:
            forward = _Forward(self, block, block.module.forward)
            self._ties.append((forward, replace_forward(block.module, forward)))

    def uninstall(self) -> None:
        """Give every block its own ``forward`` back, also where backward has yet to recompute it."""
        for forward, before in self._ties:
            forward.untie()
            if forward.block.module.__dict__.get("forward") is forward:  # else another has wrapped us: pass through
                restore_forward(forward.block.module, before)
        self._ties.clear()
        for hooks in self._hooks:
            hooks.remove()
        self._hooks.clear()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The forward of one micro-step: the listener is told of the passes that this thread makes inside.

        Enter it inside the saved-tensor hooks that the passes are to save through: where others are the innermost,
        nothing is recomputed.
        """
        before = self._thread.session
        session = self._thread.session = _Session(self, innermost_hooks())
        try:
            yield
        finally:
            self._thread.session = before  # None, or that of a forward around this one
            for block in reversed(session.inside):  # of passes that an interrupt has ended, without hooks after them
                self._listener.leave(block)
        session.end()  # not after a forward that raised: it shows nothing

    def leaves_no_trace(self, block: Block) -> bool:
        """Whether passes through the block were watched, and nothing stands in the way of recomputing them."""
        known = self._known[block.index]
        return bool(known.traceless) and known.obstacle is None

    def is_proven(self, block: Block) -> bool:
        """Whether passes through the block can be recomputed, as far as passes have come and been verified."""
        known = self._known[block.index]
        return bool(known.proven) and known.obstacle is None

    @property
    def unproven(self) -> frozenset[str]:
        """Paths of the blocks that may not be recomputed."""
        return frozenset(block.path for block in self.all if not self.is_proven(block))

    def unverified(self, block: Block) -> frozenset[str]:
        """The kinds of its passes that left no trace and are not verified, by names that are equal on all ranks."""
        return frozenset(name_of(kind) for kind in self._known[block.index].unverified)

    def obstacle(self, block: Block) -> str | None:
        """Why passes through the block are not recomputed, as far as is known."""
        return self._known[block.index].obstacle

    def is_settled(self, block: Block) -> bool:
        """Whether there is an obstacle for good."""
        return self._known[block.index].is_settled

    def unseen(self, block: Block) -> str | None:
        """Why no pass through the block was watched so far; None if any was."""
        known = self._known[block.index]
        if known.traceless or known.obstacle is not None:
            return None
        around = (reference() for reference in block.around)
        if any(module is not None and is_compiled(module) for module in (*around, block.module)):
            return _COMPILED
        return _UNSEEN

    def settle(self, block: Block, obstacle: str) -> None:
        """Never recompute passes through the block."""
        self._known[block.index].settle(obstacle)

    def end_verifications(self) -> None:
        """A step is over, and with it the comparisons of the passes that were verified in it."""
        for known in self._known:
            known.end_verifications()

    @property
    def _session(self) -> _Session | None:
        """The session to which passes of this thread belong now, if any."""
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != _NO_BACKWARD:
            return None
        return self._thread.session


def _enter(blocks: Blocks, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    session = blocks._session
    if session is not None:
        session.inside.append(block)
        blocks._listener.enter(block, tuple(Arguments(args, kwargs).tensors))


def _leave(blocks: Blocks, block: Block) -> None:
    session = blocks._thread.session
    if session is not None and session.inside and session.inside[-1] is block:
        session.inside.pop()
        blocks._listener.leave(block)


class _Forward:
    """Stands in the place of a block's ``forward``.

    A deep copy of the module, or a pickled one, gets the forward of its class: ours is tied to this very module. A
    shallow copy has ours, too, and shares the hooks: one of them tells for which module the forward is called.
    """

    def __init__(self, blocks: Blocks, block: Block, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward, updated=())  # whoever inspects the signature sees the module's own
        self._blocks = blocks
        self._forward = forward
        self._is_of_class = "forward" not in block.module.__dict__
        self._calls = threading.local()
        self._hook = block.module.register_forward_pre_hook(CallHook(self._remember_call))
        self.block = block
        self.is_tied = True

    def untie(self) -> None:
        """Do nothing from now on but call the module's own forward."""
        self.is_tied = False
        self._hook.remove()

    def __getattr__(self, name: str) -> Any:
        if name in _OF_METHODS:  # whoever inspects the block's forward finds that of its class
            return getattr(self._current(self.block.module), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._calls.__dict__.pop("module", self.block.module)
        if torch.compiler.is_compiling():
            return self._current(module)(*args, **kwargs)
        if is_being_compiled():
            return uncompiled(self._current, module)(*args, **kwargs)
        forward = self._current(module)
        if module is not self.block.module or not self.is_tied:
            return forward(*args, **kwargs)
        if forward != self._forward:  # another forward was proven than the one that runs now
            self._blocks.settle(self.block, "the forward of its class was replaced")
        session = self._blocks._session
        if session is not None:
            return session.run(self.block, forward, args, kwargs)
        if torch._C._current_graph_task_id() != _NO_BACKWARD and self._blocks.unseen(self.block) is not None:
            self._blocks.settle(self.block, _CHECKPOINT_AROUND)  # in forward it ran without gradients
        return forward(*args, **kwargs)

    def _remember_call(self, module: nn.Module) -> None:
        self._calls.module = module

    def _current(self, module: nn.Module) -> Callable[..., Any]:
        """The own forward of the block's module, or of a copy of it; its class may have another by now."""
        if not self._is_of_class:
            return self._forward
        found: Any = inspect.getattr_static(type(module), "forward")
        method: Callable[..., Any] = found.__get__(module, type(module)) if hasattr(found, "__get__") else found
        return method

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._forward, memo)

    def __reduce__(self) -> Any:
        # At unpickling the module has no attribute of its own yet, so this is the method of its class.
        return getattr, (self.block.module, "forward")


# For :func:`ds_tba.autograd.tensors.skip_frames`.
FRAMES = (_Forward.__call__, *HOOK_FRAMES)

# ---- one forward of the model ---------------------------------------------------------------------------------------


class _Session:
    """One forward of the model in one thread.

    Args:
        hooks: the saved-tensor hooks outside of all passes.

    Attributes:
        inside: blocks whose hooks have told of the beginning of a pass, and not of its end.
    """

    def __init__(self, blocks: Blocks, hooks: Any) -> None:
        self._blocks = blocks
        self._hooks = hooks
        self._watches: dict[Evidence, list[Watch]] = {}
        self.inside: list[Block] = []

    def run(self, block: Block, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A pass through a block: recomputed later, verified, watched or plain.

        Args:
            forward: the block's own.
        """
        arguments, known = Arguments(args, kwargs), self._blocks._known[block.index]
        token = self._blocks._listener.enter(block, tuple(arguments.tensors))
        try:
            if known.is_settled:
                return forward(*args, **kwargs)
            if innermost_hooks() != self._hooks:
                known.settle(_HOOKS_AROUND)
                return forward(*args, **kwargs)
            kind = kind_of(block.module, arguments)
            is_recomputed = token is not None and kind in known.proven and known.obstacle is None
            if token is not None and not is_recomputed:
                self._deviates(block, "it got arguments of a kind not seen before, with which that may be wrong")
            if is_recomputed or (block.path in self._blocks.to_verify and known.is_to_be_verified(kind)):
                token = token if is_recomputed else None
                return self._repeated(block, forward, arguments, kind, token, args, kwargs)
            if known.is_to_be_watched(kind):
                return watched(self._watch(known, arguments, kind), forward, arguments, args, kwargs)
            return forward(*args, **kwargs)
        finally:
            self._blocks._listener.leave(block)

    def _repeated(
        self,
        block: Block,
        forward: Callable[..., Any],
        arguments: Arguments,
        kind: Kind,
        token: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A pass whose forward runs again in backward: a recomputed one with a token, else a verified one."""
        known, is_strict = self._blocks._known[block.index], self._blocks.is_strict
        try:
            conditions = Conditions(block.module, known.reader, arguments.others)
        except UnreadableError as error:
            known.settle(f"it refers to {error}")
            self._deviates(block, f"it refers to {error}")
            return forward(*args, **kwargs)
        the_pass = block.path, block.module, forward, arguments, conditions
        if token is None:
            watch, account = self._watch(known, arguments, kind), self._blocks._account
            verified = VerifiedPass(*the_pass, watch, known, account, is_strict=is_strict)
            known.begin_verification(kind, verified)
            return verified.run(args, kwargs)
        recomputed = RecomputedPass(*the_pass, functools.partial(_recomputing, self._blocks, token))
        result = recomputed.run(args, kwargs)
        if recomputed.changed is not None:
            known.settle(f"its forward changes {recomputed.changed}")
        return result

    def _deviates(self, block: Block, why: str) -> None:
        """The pass is not recomputed, though it was to be."""
        if self._blocks.is_strict:
            raise IncompatibleError(
                f'the block {block.path!r} is to be recomputed by every rank, and here {why}: set "recompute": false.'
            )

    def _watch(self, known: Evidence, arguments: Arguments, kind: Kind) -> Watch:
        watch = Watch(known, arguments, kind)
        self._watches.setdefault(known, []).append(watch)
        return watch

    def end(self) -> None:
        """Take over what was watched, now that forward can change no input any more."""
        for known, watches in self._watches.items():
            for watch in watches:
                watch.end_forward()
            known.learn(watches)


@contextmanager
def _recomputing(blocks: Blocks, token: Any) -> Iterator[None]:
    """Tell the listener of a forward that runs again.

    No method of the session: the graph holds this until backward, and must not hold the session's watches with it.
    """
    try:
        blocks._listener.recompute(token)
        with counting(blocks._account):
            yield
    finally:
        blocks._listener.recomputed(token)


class _Thread(threading.local):  # forwards of several threads may interleave, each in a session of its own
    session: _Session | None = None
