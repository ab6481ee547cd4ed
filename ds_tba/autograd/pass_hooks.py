"""Forward hooks that tell of the passes through a module, and leave the module's ``forward`` alone.

Knows ``torch.nn`` only. The hooks belong to one very module: a copy of it, or a pickled one, has hooks that do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Enter = Callable[[tuple[Any, ...], dict[str, Any]], None]


class PassHooks:
    """The hooks on one module.

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
            self._tell(module)


class _Before(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and module is self._module:
            self._tell(args, kwargs)


class _After(_Hook):
    def __call__(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling() and module is self._module:
            self._tell()


def no_hook(*_: Any) -> None:
    """The hook of a copied module: it does nothing."""


def _no_hook_of() -> Callable[..., None]:
    return no_hook
