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

[Note: Copies] Hooks and our ``forward`` are for one very module. A deep copy of it, or a pickled one, has hooks that do
nothing and the forward of its class; a shallow copy shares ours, which tell for which module they are called.

[Note: Compiled models] Code that ``torch.compile`` compiles runs without us: a model compiled as a whole tells of no
pass, and its code is the same with us and without. Blocks that were compiled one by one before they were found
(``layers[i] = torch.compile(layer)``) are told of and recomputed as others are. Those compiled in place
(``layer.compile()``), or inside of a model whose graph breaks, are told of where nothing is to be recomputed, and never
recomputed.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from ds_tba.autograd.recompute import (
    CAN_RECOMPUTE,
    Arguments,
    Check,
    RecomputedPass,
    innermost_hooks,
    replace_forward,
    restore_forward,
)
from ds_tba.autograd.saved import Hooks
from ds_tba.autograd.tensors import is_being_compiled, uncompiled
from ds_tba.config import BLOCK
from ds_tba.errors import ConfigError

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
_CACHE = (
    "it fills a cache of keys and values among its arguments, which a second run would fill twice: train with "
    "use_cache=False (model.config.use_cache = False)"
)
_UNSEEN = (
    "no pass through it was seen, with gradients, in the engine's forward. If torch.compile compiles what it is part "
    "of, compile the blocks one by one instead, before deepspeed.initialize (layers[i] = torch.compile(layers[i])); if "
    "a checkpoint around it runs its forward again already, turn that off to have plans choose"
)

# Autograd's number of the backward in this thread when there is none.
_NO_BACKWARD = -1
# Attributes of a bound method that inspect and torch.jit ask for.
_OF_METHODS = frozenset({"__code__", "__defaults__", "__func__", "__globals__", "__kwdefaults__", "__self__"})

# Containers that nobody calls, and those that hold layers.
_UNCALLED = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_UNCALLED, nn.Sequential)


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
    """Told of passes, in the thread in which they run."""

    def enter(self, block: Block, inputs: Sequence[torch.Tensor]) -> Any | None:
        """A pass begins, after the module's pre-forward hooks.

        Args:
            inputs: each tensor among the arguments once, positional ones first, also those in tuples, lists and
                dicts. A recomputed pass saves these, in this order, and no other tensors.

        Returns:
            Any token but None to have the pass recomputed in backward; :meth:`recompute` gets the token. It has no
            effect on a block that is left out.
        """

    def leave(self, block: Block) -> None:
        """The pass ends, also with an exception."""

    def recompute(self, token: Any) -> None:
        """Backward begins to run a pass's forward again; ``token`` is what :meth:`enter` returned."""


class Blocks:
    """The blocks of one model, tied to one listener.

    Args:
        blocks: from :func:`find_blocks`.
        listener: is told of each pass inside :meth:`listening`.
        may_recompute: whether a pass may be recomputed. Without that nobody's ``forward`` is replaced.
        count: called with each tensor that a recomputation saves.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        listener: PassListener,
        *,
        may_recompute: bool = True,
        count: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.all: tuple[Block, ...] = tuple(blocks)
        self.may_recompute = may_recompute
        self._listener = listener
        self._count = count
        self._thread = _Thread()
        self._checks = [Check() for _ in self.all]
        self._seen: set[str] = set()
        self._why: dict[str, str] = {} if CAN_RECOMPUTE else dict.fromkeys((one.path for one in self.all), OLD_PYTORCH)
        self._told: set[str] = set()
        self._forwards: list[tuple[_Forward, Any]] = []
        self._hooks: list[Any] = []

    def install(self) -> None:
        """Be told of passes: by forward hooks, or in the place of each block's ``forward`` if it may run again."""
        if self._forwards or self._hooks:
            return
        for block in self.all:
            if self.may_recompute:
                forward = _Forward(self, block, block.module.forward)
                self._forwards.append((forward, replace_forward(block.module, forward)))
                continue
            enter = _PassHook(functools.partial(_enter, self, block), block.module)
            leave = _PassHook(functools.partial(_leave, self, block), block.module)
            self._hooks += [
                block.module.register_forward_pre_hook(enter, with_kwargs=True),
                block.module.register_forward_hook(leave, always_call=True),
            ]

    def uninstall(self) -> None:
        """Give every block its own ``forward`` back, also where backward has yet to recompute it."""
        for forward, before in self._forwards:
            forward.is_tied = False
            if forward.block.module.__dict__.get("forward") is forward:  # else another has wrapped us: pass through
                restore_forward(forward.block.module, before)
        self._forwards.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

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
            self._thread.session = before  # None, or that of a forward around this one
            for block in reversed(session.inside):  # of passes that an interrupt has ended, without hooks after them
                self._listener.leave(block)

    def is_recomputable(self, block: Block) -> bool:
        """Whether passes through the block may be recomputed, as far as passes have shown."""
        return self.may_recompute and block.path not in self._why

    def left_out(self) -> dict[str, str]:
        """Why passes through blocks are not recomputed, by path of the block."""
        if not self.may_recompute:
            return {}
        paths = (block.path for block in self.all)
        return {path: self._why.get(path, _UNSEEN) for path in paths if path in self._why or path not in self._seen}

    def note_saves(self, block: Block, *, has_saved: bool) -> None:
        """Whether a pass through the block saved anything that is none of its inputs."""
        if not has_saved:
            self._why.setdefault(block.path, _SAVES_NOTHING)
        elif self._why.get(block.path) == _SAVES_NOTHING:
            del self._why[block.path]

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

    def run(self, block: Block, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A pass through a block: recomputed in backward, or plain.

        Args:
            forward: the block's own.
        """
        session = self._session
        if session is None:
            return forward(*args, **kwargs)
        arguments = Arguments(args, kwargs)
        self._seen.add(block.path)
        if innermost_hooks() != session.hooks:
            self._why.setdefault(block.path, _HOOKS_AROUND)
        elif any("cache" in type(one).__name__.lower() for one in arguments.others):
            self._why.setdefault(block.path, _CACHE)
        token = self._listener.enter(block, tuple(arguments.tensors))
        try:
            if token is None or not self.is_recomputable(block):
                return forward(*args, **kwargs)
            begin = functools.partial(self._listener.recompute, token)
            check = self._checks[block.index]
            recomputed = RecomputedPass(block.path, block.module, forward, arguments, check, begin, self._count)
            return recomputed.run(args, kwargs)
        finally:
            self._listener.leave(block)

    @property
    def _session(self) -> _Session | None:
        """The session to which passes of this thread belong now, if any."""
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != _NO_BACKWARD:
            return None
        return self._thread.session


@dataclass(slots=True)
class _Session:
    """One forward of the model in one thread.

    Attributes:
        hooks: the saved-tensor hooks outside of all passes.
        inside: blocks whose hooks have told of the beginning of a pass, and not of its end.
    """

    hooks: Hooks | None
    inside: list[Block] = field(default_factory=list)


class _Thread(threading.local):  # forwards of several threads may interleave, each in a session of its own
    session: _Session | None = None


def _enter(blocks: Blocks, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    session = blocks._session
    if session is not None:
        session.inside.append(block)
        blocks._listener.enter(block, tuple(Arguments(args, kwargs).tensors))


def _leave(blocks: Blocks, block: Block, _args: Any, _output: Any) -> None:
    session = blocks._thread.session
    if session is not None and session.inside and session.inside[-1] is block:
        session.inside.pop()
        blocks._listener.leave(block)


class _PassHook:
    """A forward hook, before or after, that tells of the passes through one module; see [Note: Copies]."""

    def __init__(self, tell: Callable[[Any, Any], None], module: nn.Module | None) -> None:
        self._tell = tell
        self._module = module

    def __call__(self, module: nn.Module, args: Any, kwargs_or_output: Any) -> None:
        if not torch.compiler.is_compiling() and module is self._module:
            uncompiled(self._tell, args, kwargs_or_output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return no_hook

    def __reduce__(self) -> Any:
        return functools.partial, (no_hook,)


def no_hook(*_: Any) -> None:
    """Stands in a copied module for the hook of the original."""


class _Forward:
    """Stands in the place of a block's ``forward``; see [Note: Copies]."""

    def __init__(self, blocks: Blocks, block: Block, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward, updated=())  # whoever inspects the signature sees the module's own
        self._blocks = blocks
        self._forward = forward
        self._is_of_class = "forward" not in block.module.__dict__
        self.block = block
        self.is_tied = True

    def __getattr__(self, name: str) -> Any:
        if name in _OF_METHODS:  # whoever inspects the block's forward finds that of its class
            return getattr(self._own(self.block.module), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._own(self.block.module)(*args, **kwargs)
        module: Any = sys._getframe(1).f_locals.get("self")  # of nn.Module's call: the module that is called
        if not (isinstance(module, nn.Module) and module.__dict__.get("forward") is self):  # no shallow copy either
            module = self.block.module
        if is_being_compiled():
            return uncompiled(self._own, module)(*args, **kwargs)
        forward = self._own(module)
        if module is not self.block.module or not self.is_tied:
            return forward(*args, **kwargs)
        return self._blocks.run(self.block, forward, args, kwargs)

    def _own(self, module: nn.Module) -> Callable[..., Any]:
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
FRAMES = (_Forward.__call__, _PassHook.__call__)

# ---- the layers of a model ------------------------------------------------------------------------------------------


def find_blocks(model: nn.Module, paths: Sequence[str] | None) -> list[Block]:
    """The repeated layers of a model.

    Args:
        paths: their paths, or None to find them; a path to a ``ModuleList`` stands for its members.

    Raises:
        ConfigError: a path is not that of a module, or lies inside another.
    """
    layers = repeated_layers(model) if paths is None else named_layers(model, paths)
    return [Block(index, path, module) for index, (path, module) in enumerate(layers.items())]


def repeated_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated layers of a model by path, in the order of the model; see [Note: Repeated layers].

    A module that stands in several places has its first path. Empty where nothing is found.
    """
    return dict(_search(model, "", set(), _CONTAINERS, 2)) or dict(_search(model, "", set(), _UNCALLED, 1))


def named_layers(model: nn.Module, paths: Sequence[str]) -> dict[str, nn.Module]:
    """The modules at ``paths``, each module once; a ``ModuleList`` or ``ModuleDict``, which is never called, stands for
    its members.

    Raises:
        ConfigError: a path is not that of a module, or one module holds another.
    """
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
        if id(child) in seen:
            continue
        at = f"{path}.{name}" if path else name
        if type(child) not in repeated:
            yield from _search(child, at, seen, containers, least)
            continue
        inside = list(_search(child, at, seen, containers, least)) if isinstance(child, nn.Sequential) else []
        seen.update(id(one) for one in child.modules())
        yield from inside or [(at, child)]


def _repeated(container: nn.Module, least: int) -> set[type[nn.Module]]:
    """The classes with at least so many members that look alike."""
    of_class: defaultdict[type[nn.Module], list[nn.Module]] = defaultdict(list)
    in_sequential = isinstance(container, nn.Sequential)
    for member in container._modules.values():
        if member is None or isinstance(member, _UNCALLED):
            continue
        if member._modules or not (in_sequential or type(member).__module__.startswith("torch.nn.")):
            of_class[type(member)].append(member)
    return {kind for kind, alike in of_class.items() if len(alike) >= least and (least == 1 or _look_alike(alike))}


def _look_alike(members: Sequence[nn.Module]) -> bool:
    """Whether two neighbours have half of their parameters in common, by name and shape.

    Not all: the first layer of T5 has a table that the others lack, the first of a ResNet stage a wider input.
    """
    shapes = [_shapes(member) for member in members]
    return any(2 * len(one & other) >= max(len(one), len(other)) for one, other in pairwise(shapes))


def _shapes(module: nn.Module) -> set[tuple[str, torch.Size]]:
    # ZeRO-3 has taken the parameters apart; it leaves the shape that each had beside it.
    return {(name, getattr(one, "ds_shape", one.shape)) for name, one in module.named_parameters()}


def _called(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
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
