"""The entry point: light, idempotent, harmless. ``test_release.py`` has it from a wheel."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ALONE
from support import runs

from ds_tba.autoload import unread_line


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


# ---- a block that nobody reads --------------------------------------------------------------------------------------

BLOCK = {"activation_nvme_offload": {"nvme_path": "/local_nvme"}}


def ran(directory: Path, code: str, **variables: str) -> str:
    """The standard error of a script."""
    (directory / "train.py").write_text(code)
    return runs.python(directory / "train.py", cwd=directory, **{"RANK": "0", **variables}).stderr


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "ds_config.json").write_text(json.dumps(BLOCK))
    (tmp_path / "fsdp.json").write_text(json.dumps({"fsdp_config": BLOCK}))
    (tmp_path / "off.json").write_text(json.dumps({"activation_nvme_offload": {"enabled": False}}))
    (tmp_path / "other.json").write_text(json.dumps({"_activation_nvme_offload": {"enabled": True}}))
    (tmp_path / "fp16.json").write_text(json.dumps({"fp16": {"enabled": False}, **BLOCK}))
    return tmp_path


@pytest.fixture
def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have built one."""
    monkeypatch.delitem(sys.modules, "deepspeed.runtime.engine", raising=False)


def test_a_block_in_the_environment_without_an_engine_is_said_once(directory: Path) -> None:
    said = ran(directory, "import torch", DS_TBA_BLOCK=json.dumps(BLOCK))
    assert said.count("the block in DS_TBA_BLOCK was read by no DeepSpeed engine") == 1 and "--deepspeed of" in said


@pytest.mark.usefixtures("without_engine")
@pytest.mark.parametrize("arguments", [("--fsdp_config", "fsdp.json"), ("fp16.json",), ("--config=ds_config.json",)])
def test_a_block_in_a_file_that_nobody_reads_is_said(
    directory: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(directory)
    said = unread_line(["train.py", *arguments], {})
    assert f"in {arguments[-1].removeprefix('--config=')} was read by no DeepSpeed engine" in said
    assert said.startswith("ds_tba: ") and said.count("\n") == 1
    monkeypatch.setitem(sys.modules, "ray", sys)  # whose driver only starts the processes that have the engines
    assert unread_line(["train.py", *arguments], {}) == ""


@pytest.mark.usefixtures("without_engine")
@pytest.mark.parametrize(
    ("name", "arguments", "variables"),
    [
        ("train.py", (), {}),
        ("train.py", ("off.json", "other.json", "absent.json"), {}),
        ("train.py", (), {"DS_TBA_BLOCK": '{"enabled": false}'}),
        ("train.py", ("--help",), {"DS_TBA_BLOCK": json.dumps(BLOCK)}),
        ("train.py", (), {"DS_TBA_BLOCK": json.dumps(BLOCK), "RANK": "1"}),
        ("deepspeed", ("train.py", "--deepspeed_config", "ds_config.json"), {}),
        ("/site-packages/ds_tba/__main__.py", ("plan", "m.json", "--config", "ds_config.json"), {}),
        ("accelerate", ("launch", "--deepspeed_config_file", "ds_config.json", "x.py"), {}),
    ],
)
def test_where_no_block_is_in_sight_or_another_process_trains_nothing_is_said(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, arguments: tuple[str, ...], variables: dict[str, str]
) -> None:
    monkeypatch.chdir(directory)
    assert unread_line([name, *arguments], variables) == ""


def test_a_script_that_failed_has_its_error_as_the_last_line(directory: Path) -> None:
    said = ran(directory, "import torch\nraise ValueError('of its own')", DS_TBA_BLOCK=json.dumps(BLOCK))
    assert said.rstrip().endswith("ValueError: of its own")


def test_an_engine_with_the_block_is_enough(directory: Path) -> None:
    code = """
import torch, deepspeed
config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
model = torch.nn.Linear(2, 2)
deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
"""
    said = ran(directory, code, DS_TBA_BLOCK=json.dumps({"placement": "keep"}), **{**ALONE, "MASTER_PORT": "0"})
    assert "activations are measured, not moved" in said and "read by no DeepSpeed engine" not in said
