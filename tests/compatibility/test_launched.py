"""Transformers' Trainer and a loop of one's own under ``accelerate launch``, on two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from compare import PLANNED, SMALL, agrees, row
from forked import Program, run_once
from programs_hf import BLOCK, accelerated, config_of, trainer
from support.runs import free_port, python, remove_shared_memory, with_block

pytestmark = pytest.mark.engine

TRAINER, LOOPS = "Transformers' Trainer", "DeepSpeed and Accelerate in a loop of one's own"
LAUNCH = "`accelerate launch`"
LAUNCHED = {"distributed_type": "DEEPSPEED", "num_machines": 1, "num_processes": 2, "use_cpu": False}


def launched(
    directory: Path, deepspeed_settings: dict[str, Any], *arguments: str, **variables: str
) -> list[dict[str, Any]]:
    """Return what each rank returns under ``accelerate launch`` with a config file."""
    directory.mkdir()
    config, port = directory / "accelerate.yaml", free_port()
    config.write_text(yaml.safe_dump({**LAUNCHED, "main_process_port": port, "deepspeed_config": deepspeed_settings}))
    script = Path(__file__).with_name("programs_hf.py")
    launcher = ("-m", "accelerate.commands.launch", "--config_file", config, script, directory / "result")
    done = python(*launcher, *arguments, cwd=directory, timeout_s=900, **variables)
    remove_shared_memory(port)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads((directory / f"result{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("way", "program"),
    [
        row(TRAINER, f"{LAUNCH} with a DeepSpeed config in a file, ZeRO-3, 2 ranks", "trainer", trainer, decides=True),
        row(LOOPS, f"{LAUNCH} with a DeepSpeed config in a file, ZeRO-3, 2 ranks", "loop", accelerated),
    ],
)
def test_launched_with_a_file(way: str, program: Program, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    """The run without the block is of ranks that are forked; it has the same losses as under the launcher."""
    plain = run_once(program, config_of(3), tmp_path / "plain", ranks=2)
    path = tmp_path / "block.json"
    path.write_text(json.dumps(with_block(config_of(3), tmp_path, **{**SMALL, **PLANNED})))
    settings = {"deepspeed_config_file": str(path), "zero3_init_flag": True}
    row_says(str(agrees(plain, launched(tmp_path / "block", settings, way))))


@pytest.mark.parametrize(
    "in_script",
    [
        row(LOOPS, f"{LAUNCH} without a DeepSpeed config, ZeRO-2, 2 ranks", True),
        row(LOOPS, f"{LAUNCH} without a DeepSpeed config, the block in `DS_TBA_BLOCK`, ZeRO-2, 2 ranks", False),
    ],
)
def test_launched_without_a_file(in_script: bool, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    block = json.dumps(with_block({}, tmp_path, placement="nvme", **SMALL)[BLOCK])
    arguments, variables = ([block], {}) if in_script else ([], {"DS_TBA_BLOCK": block})
    plain = launched(tmp_path / "plain", {"zero_stage": 2}, "loop")
    row_says(str(agrees(plain, launched(tmp_path / "block", {"zero_stage": 2}, "loop", *arguments, **variables))))
