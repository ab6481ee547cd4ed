"""The entry point: light, idempotent, harmless. ``test_release.py`` has it from a wheel."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import runs


def test_it_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'pydantic', 'deepspeed', 'numpy'}"
    done = runs.python("-c", f"import sys, ds_tba, ds_tba.autoload; print(sorted({heavy} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


def test_torch_registers_it_and_deepspeed_is_hooked() -> None:
    code = """
import sys, torch
from ds_tba.autoload import EngineFinder
assert sum(isinstance(finder, EngineFinder) for finder in sys.meta_path) == 1
assert "ds_tba.engine" not in sys.modules
import ds_tba
ds_tba.autoload.install()
assert sum(isinstance(finder, EngineFinder) for finder in sys.meta_path) == 1
import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
assert not any(isinstance(finder, EngineFinder) for finder in sys.meta_path)
once = DeepSpeedEngine.__init__
assert once._ds_tba_hooked and not once.__wrapped__.__dict__
ds_tba.autoload.install()
assert DeepSpeedEngine.__init__ is once
assert not hasattr(DeepSpeedEngine.forward, "_ds_tba_hooked"), "forward is hooked only once a config has the block"
print("good")
"""
    done = runs.python("-c", code)
    assert done.stdout.endswith("good\n"), done.stderr


def test_an_import_after_deepspeed_hooks_at_once() -> None:
    code = """
import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
assert not hasattr(DeepSpeedEngine.__init__, "_ds_tba_hooked")
import ds_tba
assert DeepSpeedEngine.__init__._ds_tba_hooked
print("good")
"""
    done = runs.python("-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.endswith("good\n"), done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "engine",
        *(pytest.param(one, marks=pytest.mark.thorough) for one in ("config", "errors", "core/cache", "offloader")),
    ],
)
def test_a_broken_ds_tba_stops_neither_torch_nor_deepspeed(tmp_path: Path, module: str) -> None:
    shutil.copytree(runs.ROOT / "ds_tba", tmp_path / "ds_tba", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "ds_tba" / f"{module}.py").write_text("raise ZeroDivisionError('broken')\n")
    done = runs.python("-c", "import torch, deepspeed; print('good')", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stdout.endswith("good\n"), done.stderr
    assert "ds_tba could not hook DeepSpeed" in done.stderr and "broken" in done.stderr
