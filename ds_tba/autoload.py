"""The entry point that PyTorch calls at the end of ``import torch``: waits for DeepSpeed, and does nothing else.

It imports only the standard library. It never raises: an exception here would break
``import torch`` for every program of the environment (``torch/__init__.py``, ``_import_device_backends``). Where a
script ends without an engine that read a block, though there is one in sight, a line at exit says so.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ENGINE_MODULE = "deepspeed.runtime.engine"
CONFIG_MODULE = "deepspeed.runtime.config"
VARIABLE = "DS_TBA_BLOCK"
MOST_BYTES = 1 << 20  # of a file that may be a config
_BLOCK = re.compile(r'"activation_nvme_offload"\s*:\s*{([^{}]*)')
_OFF = re.compile(r'"enabled"\s*:\s*false')


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
    with suppress(Exception):  # a program that ends well ends well with us, too
        sys.stderr.write(unread_line(sys.argv, os.environ))


def unread_line(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return what to say at exit, empty where no block is in sight, the script failed, or an engine has one."""
    engine = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", None)
    processes = sys.modules.get("multiprocessing.process")
    is_worker = processes is not None and processes.parent_process() is not None  # of a data loader
    is_hooked = hasattr(getattr(engine, "forward", None), "_ds_tba_hooked")  # by ds_tba/engine.py
    # A launcher, a driver of Ray's workers and a command of ours train nothing, and a script that failed has an error.
    script = argv[0] if argv else ""
    others = ("/deepspeed/launcher/", "/torch/", "/ds_tba/__main__.py")
    is_training = script.endswith(".py") and not any(one in script for one in others) and "ray" not in sys.modules
    is_silent = is_hooked or is_worker or hasattr(sys, "last_value") or environ.get("RANK", "0") not in ("", "0")
    if is_silent or not is_training or {"-h", "--help"} & set(argv):
        return ""
    files = [Path(one.rpartition("=")[2]) for one in argv[1:] if one.endswith(".json")]
    small = [one for one in files if one.is_file() and one.stat().st_size <= MOST_BYTES]
    texts = {str(one): one.read_text(errors="replace") for one in small}
    blocks = {where: found[1] for where, text in texts.items() if (found := _BLOCK.search(text))}
    blocks |= {VARIABLE: environ[VARIABLE]} if environ.get(VARIABLE) else {}
    for where, block in blocks.items():
        if not _OFF.search(block):
            return (
                f"ds_tba: the block in {where} was read by no DeepSpeed engine that trains, so no activation was "
                "offloaded: give it to DeepSpeed (--deepspeed of the Trainer, or deepspeed.initialize).\n"
            )
    return ""


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
