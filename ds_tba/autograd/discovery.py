"""The repeated layers of a model, told from its structure alone; and hooks that tell of the passes through a module.

Knows ``torch.nn``; does not know any model, class name or framework.

[Note: Repeated layers] A repeated layer is a child of a ``ModuleList``, ``Sequential`` or ``ModuleDict`` with at least
one sibling of the same class and shape. A module that keeps layers under numbers as names, as these containers do, is
one, too (a stage of a pipeline).

- The outermost win: modules inside a layer, such as the experts of a mixture, are part of it.
- Stages that differ in shape, each with layers of its own (Swin, ResNet), are no layers; what repeats inside them is.
- A ``Sequential`` is a layer only if nothing repeats inside it.
- Modules with none inside never count if they are of ``torch.nn`` (``Linear``, ``ReLU``, ...) or in a ``Sequential``:
  running one again saves nothing.
- Where nothing repeats, a lone member of a ``ModuleList`` counts: ALBERT calls one layer many times.

[Note: Copies] Hooks are for one very module. A deep copy of the module, or a pickled one, has hooks that do nothing; a
shallow copy shares the hooks, which compare the module that is called.
"""

from __future__ import annotations

import difflib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ds_tba.autograd.tensors import uncompiled
from ds_tba.config import BLOCK
from ds_tba.errors import ConfigError

# Containers that nobody calls, and those that hold layers.
_UNCALLED = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_UNCALLED, nn.Sequential)


_OURS = (__name__.partition(".")[0] + ".", "contextlib")
_CALL = nn.Module._wrapped_call_impl.__code__


def place_in_code() -> int:
    """A hash of where the caller's thread is: the innermost module that runs, and the calls inside it; 0 outside."""
    path: list[Any] = []
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _CALL:
        if not str(frame.f_globals.get("__name__")).startswith(_OURS):  # of which there are more in a recorded step
            path.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return 0 if frame is None else hash((*path, id(frame.f_locals["self"])))


class RunningModule:
    """Which module of a model runs, read from the call stack: no module has a hook for that.

    Args:
        paths: for each module (by ``id``) its path in the model.
    """

    def __init__(self, paths: dict[int, str]) -> None:
        self._paths = paths

    def path(self) -> str:
        """Of the innermost module of the model that the caller's thread runs; empty outside of all."""
        frame = inspect.currentframe()
        while frame is not None:
            path = self._paths.get(id(frame.f_locals["self"])) if frame.f_code is _CALL else None
            if path is not None:
                return path
            frame = frame.f_back
        return ""


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


# ---- pass hooks -----------------------------------------------------------------------------------------------------

Enter = Callable[[tuple[Any, ...], dict[str, Any]], None]


class PassHooks:
    """Forward hooks that tell of the passes through one module, and leave its ``forward`` alone.

    Args:
        module: tells of its passes until :meth:`remove`.
        enter: called with the arguments, after the pre-forward hooks that are there already.
        leave: called when the pass is over, also with an exception.
    """

    def __init__(self, module: nn.Module, enter: Enter, leave: Callable[[], None]) -> None:
        self._handles = [
            module.register_forward_pre_hook(_Before(enter, module), with_kwargs=True),
            module.register_forward_hook(_After(leave, module), always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


class _Hook:
    """See [Note: Copies]."""

    def __init__(self, tell: Callable[..., None], module: nn.Module | None = None) -> None:
        self._tell = tell
        self._module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return no_hook

    def __reduce__(self) -> Any:
        return _no_hook_of, ()


class CallHook(_Hook):
    """A forward pre-hook that tells which module is called: the one it is on, or a shallow copy, which shares it."""

    def __call__(self, module: nn.Module, _args: Any) -> None:
        if not torch.compiler.is_compiling():
            uncompiled(self._tell, module)


class _Before(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and module is self._module:
            uncompiled(self._tell, args, kwargs)


class _After(_Hook):
    def __call__(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling() and module is self._module:
            uncompiled(self._tell)


def no_hook(*_: Any) -> None:
    """Stands in a copied module for the hook of the original."""


def _no_hook_of() -> Callable[..., None]:
    return no_hook


# For :func:`ds_tba.autograd.tensors.skip_frames`.
HOOK_FRAMES = (CallHook.__call__, _Before.__call__, _After.__call__)
