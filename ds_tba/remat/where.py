"""Tells the module that runs, and the calls inside it, from the stack of the thread; and chooses tensors by module.

Knows modules and frames; cannot see tensors. No module has a hook for that: code that ``torch.compile`` has compiled
would be compiled again. Modules inside of such code are called by nobody: it runs as the module that was compiled.
"""

from __future__ import annotations

import difflib
import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from ds_tba.core.tensors import Eligibility

_OURS = (__name__.partition(".")[0] + ".", "contextlib")
_CALL = nn.Module._wrapped_call_impl.__code__


def position_in_code() -> int:
    """Return a hash of the innermost module that the caller's thread runs, and of the calls inside it; 0 outside."""
    path: list[tuple[int, int]] = []
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _CALL:
        if not str(frame.f_globals.get("__name__")).startswith(_OURS):  # of which there are more in a recorded step
            path.append((id(frame.f_code), frame.f_lasti))  # two lines of one module are two sites
        frame = frame.f_back
    return 0 if frame is None else hash((*path, id(frame.f_locals["self"])))  # two modules may run one code


class RunningModule:
    """Tells which module of a model runs. It reads the call stack: no module has a hook for that."""

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}  # by id of the module

    def watch(self, model: nn.Module) -> None:
        """Know the modules of a model from now on."""
        self._paths |= {id(module): path for path, module in model.named_modules()}

    def path(self) -> str:
        """Return the path of the innermost module that the caller's thread runs; empty outside of all."""
        frame = inspect.currentframe()
        while frame is not None:
            path = self._paths.get(id(frame.f_locals["self"])) if frame.f_code is _CALL else None
            if path is not None:
                return path
            frame = frame.f_back
        return ""

    def path_of(self, module: nn.Module) -> str:
        """Return the first path of a module in the model; empty for one that is none of it."""
        return self._paths.get(id(module), "")


class ChosenModules:
    """Says which saved tensors may leave device memory, by the paths of the modules that save them.

    A tensor belongs to the innermost module that runs when it is saved, and to all modules that this one is inside of;
    outside of all, to the model.
    """

    def __init__(self, running: RunningModule, patterns: Mapping[str, Sequence[str]]) -> None:
        self._running = running
        self._patterns = patterns  # the lists of the keys ``only`` and ``except``
        self._reasons: dict[str, str] = {}  # by the first of the paths of a module, which ``running`` knows

    def watch(self, model: nn.Module) -> dict[str, str]:
        """Choose among the modules of a model; return what is wrong with each pattern that matches none of them."""
        paths: defaultdict[nn.Module, list[str]] = defaultdict(list)  # of a module that stands in several places all
        for path, module in model.named_modules(remove_duplicate=False):
            paths[module].append(path)
        self._reasons |= {places[0]: self._judged(places) for places in paths.values()}
        every = [path for places in paths.values() for path in places]
        return {
            pattern: f"{key} has {pattern!r}, which matches no module of the model: the nearest are "
            + ", ".join(difflib.get_close_matches(pattern, every, n=3, cutoff=0))
            for key, patterns in self._patterns.items()
            for pattern in patterns
            if not any(fnmatchcase(path, pattern) for path in every)
        }

    def reason(self) -> str:
        """Return why the tensor that this thread saves now may not leave; empty if it may."""
        return self._reasons.get(self._running.path(), "")

    def excludes_part_of(self, module: nn.Module) -> bool:
        """Return whether any tensor that is saved inside of a module may not leave."""
        return any(self._reasons.get(self._running.path_of(one)) for one in module.modules())

    def _judged(self, places: Sequence[str]) -> str:
        """Return why what a module saves may not leave: the patterns name a module with all that is inside of it."""
        matching = {
            key: [
                one
                for one in patterns
                if any(fnmatchcase(path, one) or fnmatchcase(path, f"{one}.*") for path in places)
            ]
            for key, patterns in self._patterns.items()
        }
        if not matching.get("only", True):
            return f'{Eligibility.EXCLUDED.value}: "only" has {", ".join(self._patterns["only"])}'
        excluding = matching.get("except")
        return f'{Eligibility.EXCLUDED.value}: "except" has {excluding[0]}' if excluding else ""
