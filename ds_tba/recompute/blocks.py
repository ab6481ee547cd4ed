"""The repeated layers of a model, which ``recompute`` chooses from. Knows modules only.

[Note: Repeated layers] A repeated layer is a child of a ``ModuleList``, ``Sequential`` or ``ModuleDict`` with at least
one sibling of the same class and shape. A module that keeps layers under numbers as names, as these containers do, is
one, too (a stage of a pipeline).

- The outermost win: modules inside a layer, such as the experts of a mixture, are part of it.
- Stages that differ in shape, each with layers of its own (Swin, ResNet), are no layers; what repeats inside them is.
- A ``Sequential`` is a layer only if nothing repeats inside it.
- Modules with none inside never count if they are of ``torch.nn`` (``Linear``, ``ReLU``, ...) or in a ``Sequential``:
  running one again saves nothing.
- A lone layer that is called many times (ALBERT's) has to be named.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise

import torch
from torch import nn

from ds_tba.config import BLOCK
from ds_tba.errors import ConfigError

# Containers that nobody calls, and those that hold layers.
_UNCALLED = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_UNCALLED, nn.Sequential)


def find_blocks(model: nn.Module, patterns: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the repeated layers of a model by their paths, in its order; see [Note: Repeated layers].

    A module that stands in several places has its first path.

    Args:
        patterns: of their paths, or None to find them; of modules inside of each other the outermost win.

    Raises:
        ConfigError: a pattern names no module.
    """
    if patterns is None:
        return dict(_search(model, "", set()))
    every = model.named_modules(remove_duplicate=False)
    modules = {path: module for path, module in every if path and not isinstance(module, _UNCALLED)}
    found: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()
    for path in matching([*modules], patterns, "blocks", "module"):
        if modules[path] not in seen:
            found[path] = modules[path]
            seen.update(modules[path].modules())
    return found


def matching(paths: Sequence[str], patterns: Sequence[str], key: str, noun: str) -> list[str]:
    """Return the paths that the patterns of a key name; the path of a container names its members.

    Args:
        noun: for what a path is one of, in the error.

    Raises:
        ConfigError: a pattern names none.
    """
    named = {
        one: {path for path in paths if fnmatchcase(path, one) or fnmatchcase(path, f"{one}.*")} for one in patterns
    }
    for pattern, its_paths in named.items():
        if not its_paths:
            close = ", ".join(difflib.get_close_matches(pattern, paths, n=3, cutoff=0))
            raise ConfigError(
                f'"{BLOCK}.{key}" has {pattern!r}, which matches no {noun} of the model: '
                + (f"the nearest are {close}." if close else "none was found, so name the layers in blocks.")
            )
    return [path for path in paths if any(path in its_paths for its_paths in named.values())]


def _search(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers inside of a module that were not seen before: one may be called from many places."""
    seen.add(module)
    repeated = _repeated(module)
    for name, child in module.named_children():
        if child in seen:
            continue
        at, is_layer = f"{path}.{name}" if path else name, type(child) in repeated
        inside = [] if is_layer and not isinstance(child, nn.Sequential) else [*_search(child, at, seen)]
        seen.update(child.modules())
        yield from inside or ([(at, child)] if is_layer else [])


def _repeated(container: nn.Module) -> set[type[nn.Module]]:
    """Return the classes of which two neighbours have half of their parameters in common, by name and shape.

    Not all: the first layer of T5 has a table that the others lack, the first of a ResNet stage a wider input.
    """
    members = container._modules
    if not (isinstance(container, _CONTAINERS) or any(name.isdigit() for name in members)):
        return set()
    shapes: defaultdict[type[nn.Module], list[set[tuple[str, torch.Size]]]] = defaultdict(list)
    for member in members.values():
        is_small = not getattr(member, "_modules", None) and (
            isinstance(container, nn.Sequential) or type(member).__module__.startswith("torch.nn.")
        )
        if member is not None and not is_small and not isinstance(member, _UNCALLED):
            # ZeRO-3 has taken the parameters apart; it leaves the shape that each had beside it.
            of_member = {(name, getattr(one, "ds_shape", one.shape)) for name, one in member.named_parameters()}
            shapes[type(member)].append(of_member)
    return {
        kind
        for kind, alike in shapes.items()
        if any(2 * len(one & other) >= max(len(one), len(other)) for one, other in pairwise(alike))
    }
