"""Methods of one object, replaced on the instance and given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Overrides:
    """Methods of one object replaced by functions that get the method as it was first."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._put: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._active = True

    def put(self, name: str, function: Callable[..., Any]) -> None:
        """Replace a method."""
        method = getattr(self._target, name)
        if name in vars(self._target):
            self._before[name] = method

        def override(*args: Any, **more: Any) -> Any:
            return function(method, *args, **more) if self._active else method(*args, **more)

        self._put[name] = override
        setattr(self._target, name, override)

    def remove(self) -> None:
        """Every method as it was. One that somebody has wrapped since stays, and only hands calls on."""
        self._active = False
        for name, override in self._put.items():
            if vars(self._target).get(name) is not override:
                continue
            if name in self._before:
                setattr(self._target, name, self._before[name])
            else:
                delattr(self._target, name)
