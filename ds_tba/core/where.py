"""Which module of the model runs? Read from the call stack: no module has a hook for that."""

from __future__ import annotations

import inspect
from types import FrameType

from torch import nn

MODULE_CALL = nn.Module._wrapped_call_impl.__code__


class RunningModule:
    """Names the module of a model that runs.

    Args:
        paths: for each module (by ``id``) its path in the model.
    """

    def __init__(self, paths: dict[int, str]) -> None:
        self._paths = dict(paths)

    def watch(self, model: nn.Module) -> None:
        """Know the modules of a model from now on."""
        self._paths |= {id(module): path for path, module in model.named_modules()}

    def path(self) -> str:
        """Return the path of the innermost module of the model that this thread runs; empty outside of all."""
        frame = inspect.currentframe()
        while frame is not None:
            path = self.path_of(frame)
            if path is not None:
                return path
            frame = frame.f_back
        return ""

    def path_of(self, frame: FrameType) -> str | None:
        """Return the path of the module that a frame calls; None where it calls none of the model's."""
        return self._paths.get(id(frame.f_locals["self"])) if frame.f_code is MODULE_CALL else None
