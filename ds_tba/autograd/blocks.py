"""The repeated layers of a model: who wants to know is told of each pass through one, and may have it recomputed.

Knows torch only; does not know what is done with the passes, nor why one is to be recomputed.

[Note: What can be recomputed] A forward that runs a second time must neither change anything nor find anything changed.
The passes of the first forward are therefore never recomputed but watched, and so are later ones of another kind (in
training or evaluation, with objects of other classes among the arguments): for tensors of its own that a block changes
(the statistics of batch norm), arguments that it changes or that change before forward is over (``relu_``, a KV cache),
and saved tensors that somebody else takes (a checkpoint of the user's around the block). What is found in two forwards
is the block's obstacle from then on. A count kept in a Python attribute is not seen; it counts the second run too, as
under any checkpoint.

[Note: Compiled models] What ``torch.compile`` compiles runs without us: a model compiled as a whole tells of no pass,
and its code is what it is without us. Blocks that were compiled one by one before they were found (``layers[i] =
torch.compile(layer)``) are told of and recomputed as others are; those compiled in place (``layer.compile()``) are not.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ds_tba.autograd.discovery import named_layers, repeated_layers
from ds_tba.autograd.recompute.checkpoint import (
    CAN_RECOMPUTE,
    Arguments,
    RecomputedPass,
    changed_name,
    innermost_hooks,
    replace_forward,
    restore_forward,
    state_of,
    version_of,
)
from ds_tba.autograd.tensors import VersionWitness
from ds_tba.errors import IncompatibleError

# How deep an object among the arguments is looked into for changes.
_DEPTH = 6

# What autograd calls the backward that runs in this thread when there is none.
_NO_BACKWARD = -1


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A repeated layer.

    Attributes:
        index: in ``Blocks.all``.
        path: of the module in the model, such as ``"model.layers.3"``.
        module: the layer.
    """

    index: int
    path: str
    module: nn.Module


class PassListener(Protocol):
    """Who is told of passes, in the thread in which they run."""

    def enter(self, block: Block, inputs: Sequence[torch.Tensor]) -> Any | None:
        """A pass begins, after the module's pre-forward hooks.

        Args:
            inputs: each tensor among the arguments once, positional ones first, also those in tuples, lists and
                dicts: what a recomputed pass saves instead of all others, in this order.

        Returns:
            Anything but None to have the pass recomputed in backward; :meth:`recompute` gets it. Nothing comes of it
            while ``Blocks.is_recomputable`` is False for the block, nor in passes of a kind not seen before; see
            [Note: What can be recomputed].
        """

    def leave(self, block: Block) -> None:
        """The pass ends, also with an exception."""

    def recompute(self, mark: Any) -> None:
        """Backward begins to run a pass's forward again; ``mark`` is what :meth:`enter` returned."""

    def recomputed(self, mark: Any) -> None:
        """It is done with that, in whatever way."""


def find_blocks(model: nn.Module, paths: Sequence[str] | None) -> list[Block]:
    """The repeated layers of a model.

    Args:
        paths: their paths, or None to find them; a path to a ``ModuleList`` stands for its members.

    Raises:
        ConfigError: a path is not that of a module, or lies inside another.
    """
    layers = repeated_layers(model) if paths is None else named_layers(model, paths)
    return [Block(index, path, module) for index, (path, module) in enumerate(layers.items())]


class Blocks:
    """The blocks of one model, tied to one listener.

    Args:
        blocks: from :func:`find_blocks`.
        listener: is told of each pass inside :meth:`listening`.
    """

    def __init__(self, blocks: Sequence[Block], listener: PassListener) -> None:
        self.all: tuple[Block, ...] = tuple(blocks)
        self._listener = listener
        self._thread = _Thread()
        self._known = [_Known() for _ in self.all]
        self._ties: list[tuple[_Forward, Any]] = []
        # Whether a pass that is to be recomputed and cannot be must end the run: other ranks would wait in backward.
        self.is_strict = False

    def install(self) -> None:
        """Take the place of each block's ``forward``. Nothing else of the model changes."""
        if self._ties:
            return
        for block in self.all:
            forward = _Forward(self, block, block.module.forward)
            self._ties.append((forward, replace_forward(block.module, forward)))

    def uninstall(self) -> None:
        """Give every block its own ``forward`` back, also where backward has yet to recompute it."""
        for forward, before in self._ties:
            forward.is_tied = False
            if forward.block.module.__dict__.get("forward") is forward:  # else another has wrapped us: pass through
                restore_forward(forward.block.module, before)
        self._ties.clear()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The forward of one micro-step: the listener is told of the passes that this thread makes inside.

        Enter it inside the saved-tensor hooks that the passes are to save through: where others are the innermost,
        nothing is recomputed.
        """
        before = self._thread.session
        session = self._thread.session = _Session(innermost_hooks())
        try:
            yield
        finally:
            self._thread.session = before
        session.end()  # what a forward that raised has shown is nothing

    def is_recomputable(self, block: Block) -> bool:
        """Whether passes through the block can be recomputed.

        False before the first forward inside :meth:`listening`, and settled after the second.
        """
        known = self._known[block.index]
        return bool(known.kinds) and known.obstacle is None

    def obstacle(self, block: Block) -> str | None:
        """Why passes through the block are not recomputed, as far as is known."""
        return self._known[block.index].obstacle

    # ---- one pass -----------------------------------------------------------------------------------------------

    def _pass(self, block: Block, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._thread.session
        if session is None or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != _NO_BACKWARD:
            return forward(*args, **kwargs)
        arguments = Arguments(args, kwargs)
        mark = self._listener.enter(block, tuple(arguments.tensors))
        try:
            known = self._known[block.index]
            kind = _kind_of(block.module, arguments)
            if innermost_hooks() != session.hooks:
                known.settle("a checkpoint, or other hooks around it, take its saved tensors")
            if known.is_to_be_watched(kind):
                if mark is not None and self.is_strict:
                    raise IncompatibleError(
                        f"the block {block.path!r} is to be recomputed by every rank, and here it got arguments of a "
                        'kind not seen before, with which that may be wrong: set "recompute": false.'
                    )
                return _watched(block.module, forward, arguments, session.watch(known, kind), args, kwargs)
            if mark is None or known.obstacle is not None:
                return forward(*args, **kwargs)
            return self._recomputed(block, forward, arguments, mark, args, kwargs)
        finally:
            self._listener.leave(block)

    def _recomputed(
        self,
        block: Block,
        forward: Callable[..., Any],
        arguments: Arguments,
        mark: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        one = RecomputedPass(block.path, block.module, forward, arguments, functools.partial(self._again, mark))
        result = one.run(args, kwargs)
        if one.changed is not None:
            self._known[block.index].settle(f"its forward changes its {one.changed!r}")
        return result

    @contextmanager
    def _again(self, mark: Any) -> Iterator[None]:
        try:
            self._listener.recompute(mark)
            yield
        finally:
            self._listener.recomputed(mark)


class _Forward:
    """What stands in a block's place of ``forward``.

    A copy of the module, or a pickled one, gets the forward of its class: ours is tied to this very module.
    """

    def __init__(self, blocks: Blocks, block: Block, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward, updated=())  # whoever inspects the signature sees the module's own
        self._blocks = blocks
        self._forward = forward
        self.block = block
        self.is_tied = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self.is_tied:
            return self._forward(*args, **kwargs)
        return self._blocks._pass(self.block, self._forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._forward, memo)

    def __reduce__(self) -> Any:
        # At unpickling the module has no attribute of its own yet, so this is the method of its class.
        return getattr, (self.block.module, "forward")


# ---- what is known of a block ---------------------------------------------------------------------------------------

_Kind = tuple[bool, frozenset[type]]

# Forwards whose passes are watched where the first one found something: it may have been what a first forward sets up.
_ENOUGH = 2


@dataclass(eq=False)
class _Known:
    """What the passes through one block have shown."""

    kinds: set[_Kind] = field(default_factory=set)
    obstacle: str | None = None if CAN_RECOMPUTE else "PyTorch before 2.8 does not tell whose saved-tensor hooks are on"
    watches: int = 0 if CAN_RECOMPUTE else _ENOUGH

    def is_to_be_watched(self, kind: _Kind) -> bool:
        if self.obstacle is None:
            return kind not in self.kinds
        return self.watches < _ENOUGH

    def learn(self, kinds: set[_Kind], obstacle: str | None) -> None:
        """Take over what one forward has shown."""
        self.kinds |= kinds
        if self.obstacle is None or self.watches < _ENOUGH:
            self.obstacle = obstacle
        self.watches += 1

    def settle(self, obstacle: str) -> None:
        """For good."""
        self.obstacle, self.watches = obstacle, _ENOUGH


@dataclass(eq=False)
class _Watch:
    """What the passes through one block show in one forward of the model."""

    kinds: set[_Kind] = field(default_factory=set)
    inputs: list[VersionWitness] = field(default_factory=list)
    obstacle: str | None = None

    def found(self) -> str | None:
        if self.obstacle is None and any(one.current != one.version for one in self.inputs):
            return "an input of it is changed in place later in the model's forward"
        return self.obstacle


class _Session:
    """One forward of the model in one thread.

    Args:
        hooks: of saved tensors, those outside of all passes.
    """

    def __init__(self, hooks: Any) -> None:
        self.hooks = hooks
        self._watches: dict[_Known, _Watch] = {}

    def watch(self, known: _Known, kind: _Kind) -> _Watch:
        watch = self._watches.setdefault(known, _Watch())
        watch.kinds.add(kind)
        return watch

    def end(self) -> None:
        """Take over what was seen, now that forward can change no input any more."""
        for known, watch in self._watches.items():
            known.learn(watch.kinds, watch.found())


class _Thread(threading.local):
    session: _Session | None = None


def _kind_of(module: nn.Module, arguments: Arguments) -> _Kind:
    return module.training, frozenset(type(one) for one in arguments.others)


def _watched(
    module: nn.Module,
    forward: Callable[..., Any],
    arguments: Arguments,
    watch: _Watch,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A pass that shows whether its forward could run again."""
    state = state_of(module)
    versions = [version_of(one) for one in arguments.tensors]
    others = [_fingerprint(one, _DEPTH) for one in arguments.others]
    result = forward(*args, **kwargs)
    name = changed_name(state, state_of(module))
    if name is not None:
        watch.obstacle = f"its forward changes its {name!r}"
    if [version_of(one) for one in arguments.tensors] != versions:
        watch.obstacle = "its forward changes an input in place"
    for other, before in zip(arguments.others, others, strict=True):
        if _fingerprint(other, _DEPTH) != before:
            watch.obstacle = f"its forward changes its argument of class {type(other).__name__}"
    watch.inputs += [_witness(one) for one in arguments.tensors if _is_plain(one)]
    return result


def _witness(tensor: torch.Tensor) -> VersionWitness:
    return VersionWitness(tensor, torch.empty(0, dtype=tensor.dtype, device=tensor.device))


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_inference()


def _fingerprint(value: Any, depth: int) -> Any:
    """Equal as long as no tensor and no plain value inside is changed or replaced."""
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    if isinstance(value, (list, tuple)):
        return tuple(_fingerprint(one, depth - 1) for one in value) if depth else len(value)
    if isinstance(value, dict):
        return tuple((key, _fingerprint(one, depth - 1)) for key, one in value.items()) if depth else len(value)
    if isinstance(value, (bool, int, float, str)):
        return value
    inside = None if isinstance(value, (nn.Module, type)) else getattr(value, "__dict__", None)
    return id(value), _fingerprint(inside, depth - 1) if isinstance(inside, dict) and depth else None
