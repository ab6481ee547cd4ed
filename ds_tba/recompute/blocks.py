"""The repeated layers of a model, which ``recompute`` chooses from. Knows modules only.

[Note: Repeated layers] A repeated layer is a child of a ``ModuleList``, ``Sequential`` or ``ModuleDict`` with at least
one sibling of the same class and shape. A module that keeps layers under numbers as names, as these containers do, is
one, too (a stage of a pipeline).

- The outermost win: modules inside a layer, such as the experts of a mixture, are part of it.
- Stages that differ in shape, each with layers of its own (Swin, ResNet), are no layers; what repeats inside them is.
- A ``Sequential`` is a layer only if nothing repeats inside it.
- Modules with none inside never count if they are of ``torch.nn`` (``Linear``, ``ReLU``, ...) or in a ``Sequential``:
  running one again saves nothing.
- Where nothing repeats, a lone member of a ``ModuleList`` counts: ALBERT calls one layer many times.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

import torch
from torch import nn

from ds_tba.config import BLOCK
from ds_tba.errors import ConfigError

# Containers that nobody calls, and those that hold layers.
_UNCALLED = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_UNCALLED, nn.Sequential)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A repeated layer; ``path`` is that of the module in the model, such as ``"model.layers.3"``."""

    path: str
    module: nn.Module


def named_blocks(blocks: Sequence[Block], patterns: Sequence[str]) -> list[str]:
    """Return the paths of the blocks that a pattern of ``recompute`` names.

    Raises:
        ConfigError: a pattern names none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(one.path, pattern) for one in blocks):
            close = difflib.get_close_matches(pattern, [one.path for one in blocks], n=3, cutoff=0)
            raise ConfigError(
                f'"{BLOCK}.recompute" has {pattern!r}, which matches no repeated layer of the model '
                f"({', '.join(close) or 'none was found: name the layers in blocks'})."
            )
    return [one.path for one in blocks if any(fnmatchcase(one.path, pattern) for pattern in patterns)]


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
