"""How people train: Transformers' Trainer, Accelerate, PEFT and TRL, and habits of their own loops.

Under ZeRO-2 all goes to NVMe, under ZeRO-3 a plan says what; where a row has another placement its name says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from compare import PLANNED, RECOMPUTED, SMALL, Way, agrees, row, rows
from forked import Program, run_once
from programs_hf import BLOCK, FINE, accelerated, checkpointing, config_of, dpo, resumed_trainer, sft, trainer
from programs_plain import plain_loop
from support.runs import free_port, python, remove_shared_memory, with_block

pytestmark = pytest.mark.engine

NVME: dict[str, Any] = {"placement": "nvme"}
BLOCKS: dict[int, dict[str, Any]] = {2: NVME, 3: PLANNED}
TRAINER = "Transformers' Trainer"
LOOPS = "DeepSpeed and Accelerate in a loop of one's own"
EVALUATING: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
GROUPED: dict[str, Any] = {"train_sampling_strategy": "group_by_length", "varying_lengths": True}

Trains = partial(Way, config=config_of)
OF_TRAINER = [
    Trains("gradient accumulation", trainer, {"gradient_accumulation_steps": 2}),
    Trains("bf16", trainer, {"bf16": True}),
    Trains("evaluation, and generation of text between steps", trainer, {"generates": True, **EVALUATING}, decides=2),
    Trains("resuming from a checkpoint", resumed_trainer, decides=3),
    Trains("gradient checkpointing, non-reentrant", trainer, checkpointing(False)),
    Trains("gradient checkpointing, reentrant", trainer, checkpointing(True)),
    Trains("gradient checkpointing, non-reentrant, recompute", trainer, {**checkpointing(False), "steps": 14},
           block=RECOMPUTED),
    Trains("gradient checkpointing, reentrant, recompute", trainer, {**checkpointing(True), "steps": 14},
           block=RECOMPUTED, decides=3),
    Trains("lengths that change in every step, grouped by length", trainer, {**GROUPED, "steps": 12}),
    Trains("label smoothing, NEFTune and clipping", trainer, FINE),
    Trains("LoRA", trainer, {"lora": True}),
    Trains("LoRA with gradient checkpointing", trainer, {"lora": True, **checkpointing(False)}),
    Trains("gradient accumulation, 2 ranks", trainer, {"gradient_accumulation_steps": 2}, ranks=2, decides=3),
    Trains("lengths that change in every step, 4 ranks", trainer, {**GROUPED, "steps": 12}, [3], ranks=4),
]  # fmt: skip
OF_LOOPS = [
    Way("`loss.backward()` called by the script", plain_loop, {"own_backward": True, "steps": 8}, decides=3),
    Way("evaluation in inference mode after each step", plain_loop, {"evaluates": True, "steps": 8}),
    Way("anomaly detection", plain_loop, {"detects_anomalies": True, "steps": 8}),
    Trains("Accelerate, a plugin with `hf_ds_config`", accelerated, decides=2),
    Trains("Accelerate, a plugin without a DeepSpeed config", accelerated, {"in_json": False}),
]
OF_TRL = [
    *(
        Trains(f"TRL {name}, {block['placement']}", program, arguments, block=block,
               decides=2 if "packing" in arguments and block is PLANNED else None)
        for name, program, arguments in (
            ("SFTTrainer", sft, {}),
            ("SFTTrainer with packing", sft, {"packing": True}),
            ("DPOTrainer", dpo, {}),
        )
        for block in (NVME, PLANNED)
    ),
    Trains("TRL SFTTrainer, recompute", sft, {"steps": 14}, [3], block=RECOMPUTED),
    Trains("TRL DPOTrainer with LoRA", dpo, {"lora": True}, decides=2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("way", "stage"), [*rows(TRAINER, OF_TRAINER), *rows(LOOPS, OF_LOOPS), *rows("TRL and PEFT", OF_TRL)]
)
def test_way(way: Way, stage: int, tmp_path: Path, row_says: Callable[[str], None]) -> None:
    block = way.block or BLOCKS[stage]
    compared = way.compared(stage, tmp_path, block=block)
    assert len({tuple(result["losses"]) for result in compared.results}) == way.ranks, "ranks trained on the same data"
    if block["placement"] == "adaptive":
        assert all(report["plans"] for report in compared.reports), "no plan was in force"
    row_says(str(compared))


# ---- accelerate launch ----------------------------------------------------------------------------------------------

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
