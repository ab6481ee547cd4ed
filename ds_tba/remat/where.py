"""Where in the program is this? The module that runs, and the calls inside it, read from the stack of the thread.

Knows modules and frames; cannot see tensors. No module has a hook for that: code that ``torch.compile`` has compiled
would be compiled again.
"""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any

from torch import nn

_OURS = (__name__.partition(".")[0] + ".", "contextlib")
_CALL = nn.Module._wrapped_call_impl.__code__


def position_in_code() -> int:
    """A hash of where the caller's thread is: the innermost module that runs, and the calls inside it; 0 outside."""
    path: list[Any] = []
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _CALL:
        if not str(frame.f_globals.get("__name__")).startswith(_OURS):  # of which there are more in a recorded step
            path.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return 0 if frame is None else hash((*path, id(frame.f_locals["self"])))


class RunningModule:
    """Tells which module of a model runs. It reads the call stack: no module has a hook for that.

    Args:
        paths: for each module (by ``id``) its path in the model.
    """

    def __init__(self, paths: dict[int, str]) -> None:
        self._paths = dict(paths)

    def watch(self, model: nn.Module) -> None:
        """Know the modules of a model from now on."""
        self._paths |= {id(module): path for path, module in model.named_modules()}

    def path(self) -> str:
        """Return the path of the innermost module that the caller's thread runs; empty outside of all."""
        frame = inspect.currentframe()
        while frame is not None:
            path = self.path_of(frame)
            if path is not None:
                return path
            frame = frame.f_back
        return ""

    def path_of(self, frame: FrameType) -> str | None:
        """Return the path of the module that a frame calls; None where it calls none."""
        return self._paths.get(id(frame.f_locals["self"])) if frame.f_code is _CALL else None
