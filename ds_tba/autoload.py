"""The entry point that PyTorch calls at the end of ``import torch``: waits for DeepSpeed, and does nothing else.

It imports only the standard library's import machinery. It never raises: an exception here would break
``import torch`` for every program of the environment (``torch/__init__.py``, ``_import_device_backends``). Where a
script ends without an engine that read a block, though there is one in sight, a line at exit says so.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ENGINE_MODULE = "deepspeed.runtime.engine"
CONFIG_MODULE = "deepspeed.runtime.config"


def install() -> None:
    """Hook ``DeepSpeedEngine`` now if DeepSpeed is loaded, else as soon as it is imported. Idempotent."""
    module = sys.modules.get(ENGINE_MODULE)
    if module is not None and hasattr(module, "DeepSpeedEngine"):
        _hook(module)
    elif not any(isinstance(finder, EngineFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, EngineFinder())
        atexit.register(tell_unread)


def tell_unread() -> None:
    """Say at exit that a block in sight was read by nobody; the engine that reads one takes this off the list."""
    try:
        from ds_tba.explain.unread import line

        sys.stderr.write(line(sys.argv, os.environ))
    except Exception:  # noqa: BLE001 - a program that ends well ends well with us, too
        pass


class EngineFinder(MetaPathFinder):
    """Finds only ``deepspeed.runtime.engine``, by asking the other finders, and hooks it once it is executed."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != ENGINE_MODULE:
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            if isinstance(finder, EngineFinder) or find_spec is None:
                continue
            spec: ModuleSpec | None = find_spec(fullname, path, target)
            if spec is not None:
                loader: Any = spec.loader
                with suppress(AttributeError):  # a loader that takes none of ours imports the module, without hooks
                    loader.exec_module = partial(self._execute, loader.exec_module)
                return spec
        return None

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        # Once: a finder that stays would be asked at every import of the program.
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        _hook(module)


def _hook(module: ModuleType) -> None:
    try:
        from ds_tba import engine

        engine.hook_config(sys.modules[CONFIG_MODULE].DeepSpeedConfig)  # the engine's module imports it
        engine.hook(module.DeepSpeedEngine)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with us, DeepSpeed without us must still import
        import warnings

        warnings.warn(
            f"ds_tba could not hook DeepSpeed, so no activation is offloaded: {type(error).__name__}: {error}. "
            "Reinstall ds_tba, or uninstall it.",
            RuntimeWarning,
            stacklevel=2,
        )
