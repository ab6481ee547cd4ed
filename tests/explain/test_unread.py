"""A block that nobody reads is told of once, at exit, and a program without one is told of nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_tba.explain.unread import line

BLOCK = {"activation_nvme_offload": {"nvme_path": "/local_nvme"}}


def ran(directory: Path, code: str, **variables: str) -> str:
    """The standard error of a script."""
    (directory / "train.py").write_text(code)
    environment = {key: value for key, value in os.environ.items() if key not in ("DS_TBA_BLOCK", "RANK")}
    command = [sys.executable, str(directory / "train.py")]
    done = subprocess.run(
        command, env={**environment, **variables}, capture_output=True, text=True, timeout=120, cwd=directory
    )
    return done.stderr


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
@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("train.py", ("--fsdp_config", "fsdp.json"), "in fsdp.json was read by no DeepSpeed engine"),
        ("train.py", ("fp16.json",), "in fp16.json was read by no DeepSpeed engine"),
        ("train.py", ("--config=ds_config.json",), "in ds_config.json was read by no DeepSpeed engine"),
    ],
)
def test_a_block_in_a_file_that_nobody_reads_is_said(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(directory)
    said = line([name, *arguments], {})
    assert says in said and said.startswith("ds_tba: ") and said.count("\n") == 1


@pytest.mark.usefixtures("without_engine")
def test_a_driver_whose_workers_train_says_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's driver only starts the processes that have the engines."""
    monkeypatch.chdir(directory)
    assert line(["train.py", "ds_config.json"], {})
    monkeypatch.setitem(sys.modules, "ray", sys)
    assert line(["train.py", "ds_config.json"], {}) == ""


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
    assert line([name, *arguments], variables) == ""


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
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    block = json.dumps({"placement": "keep"})
    said = ran(directory, code, DS_TBA_BLOCK=block, DS_ACCELERATOR="cpu", **variables)
    assert "activations are measured, not moved" in said and "read by no DeepSpeed engine" not in said
