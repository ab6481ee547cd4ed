"""The repeated layers of a model: a listener is told of each pass through one, and may have the pass recomputed.

Knows torch only; does not know how the listener uses the passes, nor why one is to be recomputed.

[Note: Repeated layers] A repeated layer is a child of a ``ModuleList``, ``Sequential`` or ``ModuleDict`` with at least
one sibling of the same class and shape. A module that keeps layers under numbers as names, as these containers do, is
one, too (a stage of a pipeline).

- The outermost win: modules inside a layer, such as the experts of a mixture, are part of it.
- Stages that differ in shape, each with layers of its own (Swin, ResNet), are no layers; what repeats inside them is.
- A ``Sequential`` is a layer only if nothing repeats inside it.
- Modules with none inside never count if they are of ``torch.nn`` (``Linear``, ``ReLU``, ...) or in a ``Sequential``:
  running one again saves nothing.
- Where nothing repeats, a lone member of a ``ModuleList`` counts: ALBERT calls one layer many times.

[Note: In the place of forward] While the model's forward runs, ours stands in the place of the ``forward`` of each
block that a plan recomputes, and of all blocks where a micro-step is recorded; outside of that the model is the user's,
to copy, inspect or change. In between, a copy runs itself, be it deep, shallow or pickled, and whoever wraps ours keeps
it: from then on it stays where it is, and passes through outside of forwards.

[Note: Compiled models] Code that ``torch.compile`` compiles runs without us: a model compiled as a whole tells of no
pass, and its code is the same with us and without. Blocks that were compiled one by one before they were found
(``layers[i] = torch.compile(layer)``) are told of and recomputed as others are. Those compiled in place
(``layer.compile()``), or inside of a model whose graph breaks, are told of never.
"""

from __future__ import annotations

import difflib
import functools
import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from types import CodeType, MethodType
from typing import NamedTuple, Protocol

import torch
from torch import nn

from ds_tba.config import BLOCK
from ds_tba.core.hooks import (
    SHOWS_HOOKS,
    innermost_hooks,
    is_being_compiled,
    selective_checkpoints_seen,
    skip_frames,
)
from ds_tba.core.saved import Hooks
from ds_tba.errors import ConfigError
from ds_tba.recompute.passes import Arguments, Block, ForwardMethod, Recomputations, RecomputedPass, replaced_forward

logger = logging.getLogger(__name__)

# Why passes through a block are not recomputed, each with the way out.
OLD_PYTORCH = f"recomputing needs PyTorch 2.8, and this is {torch.__version__}: update PyTorch"
_HOOKS_AROUND = (
    "saved-tensor hooks around it, such as a checkpoint's, take its saved tensors: turn those off to have plans choose"
)
_SAVES_NOTHING = (
    "its forward saves nothing but its inputs, so recomputing it would free nothing: if the model checkpoints its "
    "layers itself (gradient_checkpointing), turn that off to have plans choose"
)
_SELECTIVE = (
    "a selective checkpoint inside keeps what its policy names, which recomputing would not free: turn that off to "
    "have plans choose"
)
_CACHE = (
    "it fills a cache of keys and values among its arguments, which a second run would fill twice: train with "
    "use_cache=False (model.config.use_cache = False)"
)
_TRANSFORMED = (
    "it runs inside of a transform of torch.func (vmap), outside of which its forward cannot run again: call it without"
)
_REPLACED = (
    "its parameters are replaced for the call (torch.func.functional_call), and a second run would find its own: have "
    "the model call it as a module"
)
_EXCLUDED = (
    '"only" or "except" keeps tensors that are saved in it, which recomputing would free: have them keep none of it to '
    "have plans choose"
)
_UNSEEN = (
    "no pass through it was seen, with gradients, in the engine's forward. If torch.compile compiles what it is part "
    "of, compile the blocks one by one instead, before deepspeed.initialize (layers[i] = torch.compile(layers[i])); if "
    "a checkpoint around it runs its forward again already, turn that off to have plans choose"
)

_NOT_ASKED = '"recompute" is false'

# Autograd's number of the backward in this thread when there is none.
_NO_BACKWARD = -1

# Containers that nobody calls, and those that hold layers.
_UNCALLED = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_UNCALLED, nn.Sequential)


class PassListener(Protocol):
    """Told of passes, in the thread in which they run."""

    def enter(self, path: str, inputs: Sequence[torch.Tensor], obstacle: str) -> int | None:
        """Note that a pass begins, after the module's pre-forward hooks.

        Args:
            path: of the block.
            inputs: each tensor among the arguments once, positional ones first, also those in tuples, lists and
                dicts. A recomputed pass saves these, in this order, and no other tensors.
            obstacle: why the pass may not be recomputed; empty if it may.

        Returns:
            The bytes that the pass would save, to have it recomputed in backward.
        """

    def leave(self, obstacle: str) -> bool | None:
        """Note that the pass ends, also with an exception; return whether it saved anything that is none of its inputs.

        Args:
            obstacle: also by what the pass has shown.
        """


class Blocks:
    """The blocks of one model.

    Args:
        blocks: from :func:`find_blocks`.
        cache: counts what passes save that run again.
        may_recompute: whether a pass may be recomputed.
        excluded: paths of the blocks in which the config keeps tensors by name.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        cache: Recomputations,
        *,
        may_recompute: bool = True,
        excluded: Collection[str] = (),
    ) -> None:
        self.all: tuple[Block, ...] = tuple(blocks)
        self.may_recompute = may_recompute
        self._cache = cache
        self._thread = _Thread()
        self._compared: set[str] = set()  # paths of blocks whose first recomputation gave the same output
        self._is_watched = False  # by now
        self._seen: set[str] = set()
        self._why: dict[str, str] = dict.fromkeys(excluded, _EXCLUDED)
        if not SHOWS_HOOKS:
            self._why = dict.fromkeys((one.path for one in self.all), OLD_PYTORCH)
        self._told: set[str] = set()
        self._forwards = [_Forward(self, block) for block in self.all]
        self._lock = threading.Lock()
        self._forwards_under_way = 0  # in all threads
        self._attached = ExitStack()

    @contextmanager
    def listening(self, listener: PassListener, paths: Collection[str] | None = None) -> Iterator[None]:
        """Open the forward of one micro-step, in which a listener is told of passes that this thread makes.

        It may have them recomputed. Enter this inside the saved-tensor hooks that the passes are to save through: where
        others are the innermost, nothing is recomputed.

        Args:
            paths: of the blocks; None for all.
        """
        skip_frames(_FRAMES)
        with self._lock:
            self._forwards_under_way += 1
            if self._forwards_under_way == 1:
                for one in self._forwards:
                    if paths is None or one.block.path in paths:
                        self._attached.enter_context(one.in_place())
        thread = self._thread
        before = thread.session  # of a forward around this one
        thread.session, self._is_watched = _Session(innermost_hooks(), listener), True
        try:
            yield
        finally:
            thread.session = before  # or the rest of the forward around this one would be told to nobody
            with self._lock:
                self._forwards_under_way -= 1
                if self._forwards_under_way == 0:
                    self._attached.close()

    def _obstacle(self, block: Block) -> str:
        """Return why passes through the block may not be recomputed, as far as passes have shown; empty if they may."""
        return self._why.get(block.path, "") if self.may_recompute else _NOT_ASKED

    def left_out(self) -> dict[str, str]:
        """Return why passes through blocks are not recomputed, by path of the block."""
        if not self.may_recompute or not self._is_watched:
            return {}
        paths = (block.path for block in self.all)
        return {path: self._why.get(path, _UNSEEN) for path in paths if path in self._why or path not in self._seen}

    def warn_left_out(self) -> None:
        """Log one line for each new reason."""
        of_reason: defaultdict[str, list[str]] = defaultdict(list)
        for path, reason in self.left_out().items():
            of_reason[reason].append(path)
        for reason, paths in of_reason.items():
            if reason not in self._told:
                self._told.add(reason)
                others = f" and {len(paths) - 1} more blocks are" if len(paths) > 1 else " is"
                logger.warning("%s%s not recomputed: %s", paths[0], others, reason)

    def run(self, block: Block, forward: ForwardMethod, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run a pass through a block: recomputed in backward, or plain.

        Args:
            forward: the block's own.
        """
        in_backward = torch._C._current_graph_task_id() != _NO_BACKWARD
        session = self._thread.session
        # A pass in a backward is of another micro-step, and one without gradients saves nothing.
        if session is None or not torch.is_grad_enabled() or in_backward:
            return forward(*args, **kwargs)
        arguments, selective = Arguments(args, kwargs), selective_checkpoints_seen()
        self._look(block, arguments, session.hooks)
        saved_bytes = session.listener.enter(block.path, tuple(arguments.tensors), self._obstacle(block))
        try:
            if saved_bytes is not None and not all(isinstance(one, nn.Parameter) for one in block.module.parameters()):
                self._why.setdefault(block.path, _REPLACED)
            if saved_bytes is None or self._obstacle(block):
                return forward(*args, **kwargs)
            recomputed = RecomputedPass(block, forward, arguments, self._compared, self._cache)
            return recomputed.run(args, kwargs, saved_bytes)
        finally:
            if selective_checkpoints_seen() > selective:
                self._why.setdefault(block.path, _SELECTIVE)
            has_saved = session.listener.leave(self._obstacle(block))
            if has_saved is False:
                self._why.setdefault(block.path, _SAVES_NOTHING)
            elif has_saved and self._why.get(block.path) == _SAVES_NOTHING:
                del self._why[block.path]

    def _look(self, block: Block, arguments: Arguments, hooks: Hooks | None) -> None:
        """Look for what a pass that begins shows to be in the way of recomputing it."""
        self._seen.add(block.path)
        if innermost_hooks() != hooks:
            self._why.setdefault(block.path, _HOOKS_AROUND)
        elif torch._C._functorch.peek_interpreter_stack() is not None:
            self._why.setdefault(block.path, _TRANSFORMED)
        elif any("cache" in type(one).__name__.lower() for one in arguments.others):
            self._why.setdefault(block.path, _CACHE)


class _Session(NamedTuple):
    """The forward of one micro-step; ``hooks`` are the saved-tensor hooks outside of all passes."""

    hooks: Hooks | None
    listener: PassListener


class _Thread(threading.local):  # forwards of several threads may alternate, each in a session of its own
    def __init__(self) -> None:
        self.session: _Session | None = None


class _Forward:
    """Stands in the place of a block's ``forward``; see [Note: In the place of forward].

    One object for all forwards: compiled code is compiled again for another.
    """

    def __init__(self, blocks: Blocks, block: Block) -> None:
        self._own: ForwardMethod = block.module.forward
        functools.update_wrapper(self, self._own, updated=())  # whoever inspects the signature sees the module's own
        self.block = block
        self._blocks = blocks
        self._is_wrapped = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        module = self.block.module
        if self._is_wrapped:
            yield
            return
        if module.forward != self._own:  # it may have another by now, and so may its class
            self._own = module.forward
        with replaced_forward(module, self):
            yield
            self._is_wrapped = module.__dict__.get("forward") is not self

    def __call__(self, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling() or is_being_compiled():  # its code is the same without us
            return self._own(*args, **kwargs)
        called = _module_called()
        if called is not None and called is not self.block.module and self._is_in_copy(called):
            return type(called).forward(called, *args, **kwargs)
        return self._blocks.run(self.block, self._own, args, kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        return _itself, (self._own,)  # in a deep copy, and in a pickle

    def _is_in_copy(self, called: nn.Module) -> bool:
        """Return whether a module has this object because it is a shallow copy of the block, with its own parameters.

        A module that was given the forward of the block runs that.
        """
        module, own = self.block.module, self._own
        is_of_class = isinstance(own, MethodType) and own.__func__ is type(module).forward
        return (
            is_of_class and type(called) is type(module) and all(called is not one.module for one in self._blocks.all)
        )


def _itself(forward: ForwardMethod) -> ForwardMethod:
    return forward


# Code of the frames in which a module calls its forward: with hooks it is a function inside.
_CALL = nn.Module._call_impl.__code__
_CALLERS = frozenset((_CALL, *(one for one in _CALL.co_consts if isinstance(one, CodeType))))


def _module_called() -> nn.Module | None:
    """Return the module that calls the forward whose code calls this; None if something else does."""
    frame = sys._getframe(2)
    return frame.f_locals.get("self") if frame.f_code in _CALLERS else None


# Frames that ``torch.compile`` is to leave alone: see :func:`ds_tba.core.hooks.skip_frames`.
_FRAMES = (_Forward.__call__,)

# ---- the layers of a model ------------------------------------------------------------------------------------------


def find_blocks(model: nn.Module, paths: Sequence[str] | None) -> list[Block]:
    """Return the repeated layers of a model, in its order; see [Note: Repeated layers].

    A module that stands in several places has its first path.

    Args:
        paths: their paths, or None to find them; a path to a ``ModuleList`` stands for its members.

    Raises:
        ConfigError: a path is not that of a module, or lies inside another.
    """
    if paths is not None:
        layers = _named(model, paths)
    else:
        layers = dict(_search(model, "", set(), _CONTAINERS, 2)) or dict(_search(model, "", set(), _UNCALLED, 1))
    return [Block(path, module) for path, module in layers.items()]


def _named(model: nn.Module, paths: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules at these paths, each once."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, nn.Module] = {}
    for path in paths:
        if not path or path not in modules:
            raise ConfigError(_unknown(path, modules))
        for at, module in _called(path, modules[path]):
            if not any(module is other for other in found.values()):
                found[at] = module
    _refuse_nested(found)
    return found


def _search(
    module: nn.Module, path: str, seen: set[int], containers: tuple[type[nn.Module], ...], least: int
) -> Iterator[tuple[str, nn.Module]]:
    seen.add(id(module))
    children = {name: child for name, child in module._modules.items() if child is not None}
    is_container = isinstance(module, containers) or any(name.isdigit() for name in children)
    repeated = _repeated(module, least) if is_container else set()
    for name, child in children.items():
        if id(child) in seen:  # ALBERT's one layer is called from many places, and is one block
            continue
        at = f"{path}.{name}" if path else name
        if type(child) not in repeated:
            yield from _search(child, at, seen, containers, least)
            continue
        inside = list(_search(child, at, seen, containers, least)) if isinstance(child, nn.Sequential) else []
        seen.update(id(one) for one in child.modules())
        yield from inside or [(at, child)]


def _repeated(container: nn.Module, least: int) -> set[type[nn.Module]]:
    """Return the classes with at least so many members that look alike."""
    of_class: defaultdict[type[nn.Module], list[nn.Module]] = defaultdict(list)
    in_sequential = isinstance(container, nn.Sequential)
    for member in container._modules.values():
        if member is None or isinstance(member, _UNCALLED):
            continue
        if member._modules or not (in_sequential or type(member).__module__.startswith("torch.nn.")):
            of_class[type(member)].append(member)
    return {kind for kind, alike in of_class.items() if len(alike) >= least and (least == 1 or _look_alike(alike))}


def _look_alike(members: Sequence[nn.Module]) -> bool:
    """Return whether two neighbours have half of their parameters in common, by name and shape.

    Not all: the first layer of T5 has a table that the others lack, the first of a ResNet stage a wider input.
    """
    shapes = [_shapes(member) for member in members]
    return any(2 * len(one & other) >= max(len(one), len(other)) for one, other in pairwise(shapes))


def _shapes(module: nn.Module) -> set[tuple[str, torch.Size]]:
    # ZeRO-3 has taken the parameters apart; it leaves the shape that each had beside it.
    return {(name, getattr(one, "ds_shape", one.shape)) for name, one in module.named_parameters()}


def _called(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module, or its members where nobody calls the container itself."""
    if not isinstance(module, _UNCALLED):
        yield path, module
        return
    for name, child in module._modules.items():
        if child is not None:
            yield from _called(f"{path}.{name}", child)


def _unknown(path: str, modules: Mapping[str, nn.Module]) -> str:
    close = difflib.get_close_matches(path, [name for name in modules if name], n=3, cutoff=0.6)
    repair = f"did you mean {', '.join(close)}?" if close else "model.named_modules() has the paths."
    return f'"{BLOCK}.blocks" names {path!r}: it must be the path of a module of the model; {repair}'


def _refuse_nested(found: Mapping[str, nn.Module]) -> None:
    at = {id(module): path for path, module in found.items()}
    for path, module in found.items():
        for inner in module.modules():
            if inner is not module and id(inner) in at:
                raise ConfigError(
                    f'"{BLOCK}.blocks" names {path!r} and {at[id(inner)]!r}, which is inside it: blocks may not hold '
                    "each other; take one of the two out."
                )
