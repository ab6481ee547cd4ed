"""Frameworks that take a DeepSpeed JSON: their unchanged training with the block in it, each in its own environment.

``make frameworks`` makes the environments, which are too large for that of development: ``.cache/frameworks/NAME``, or
in the folder that ``DS_TBA_FRAMEWORKS`` names. A framework that is not there is skipped by its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from compare import PLANNED, SMALL, Compared, agrees, row
from support.runs import OPTIMIZER, ROOT, SCRIPTS, environment, with_block

pytestmark = pytest.mark.engine

SECTION = "Frameworks"
PLACES = Path(os.environ.get("DS_TBA_FRAMEWORKS", ROOT / ".cache/frameworks"))
STEPS = 8
NVME: dict[str, Any] = {"placement": "nvme"}


@dataclass(frozen=True)
class Framework:
    """An environment with a framework in it."""

    name: str

    @property
    def programs(self) -> Path:
        """Return the folder of its programs, or skip the test."""
        folder = PLACES / self.name / "bin"
        if not (folder / "python").exists():
            pytest.skip(f"{self.name} is not installed: make frameworks")
        return folder

    def run(self, program: str, *arguments: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program of it."""
        folder = self.programs
        own = {
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, SCRIPTS / "frameworks"))),
            "TORCH_EXTENSIONS_DIR": str(folder.parent / "torch_extensions"),  # each compiles its own
        }
        return subprocess.run(
            [str(folder / program), *map(str, arguments)], env=environment(**{**own, **variables}), cwd=cwd,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
        )  # fmt: skip


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True  # to compare what a trainer saves
    return {"train_micro_batch_size_per_gpu": 16, "zero_optimization": zero, **more}


def off_and_on(train: Callable[[Path, bool], list[dict[str, Any]]], directory: Path, steps: int = STEPS) -> Compared:
    """Train without us and with us, each in a place of its own, and compare."""
    outcomes, reports = [], []
    for is_on in (False, True):
        place = directory / ("on" if is_on else "off")
        place.mkdir()
        outcomes.append(train(place, is_on))
        reports.append([json.loads(path.read_text()) for path in sorted(place.glob("report.json*"))])
    assert not reports[0] and len(reports[1]) == len(outcomes[1])
    assert all(report["steps"] == steps for report in reports[1]), "a report is not complete"
    ours = [one | {"report": report} for one, report in zip(outcomes[1], reports[1], strict=True)]
    return agrees(outcomes[0], ours)


def compared(
    train: Callable[[Path, Path], list[dict[str, Any]]], config: dict[str, Any], block: dict[str, Any], directory: Path
) -> str:
    """Train with the block switched off and on; return what the row says."""

    def with_json(place: Path, is_on: bool) -> list[dict[str, Any]]:
        path = place / "ds_config.json"
        path.write_text(json.dumps(with_block(config, place, **{**SMALL, **block, "enabled": is_on})))
        return train(path, place)

    return str(off_and_on(with_json, directory))


def by_script(framework: Framework, script: str, *way: str) -> Callable[[Path | str, Path], list[dict[str, Any]]]:
    """Return a training by a script of ``tests/scripts/frameworks``."""

    def train(source: Path | str, place: Path) -> list[dict[str, Any]]:
        done = framework.run(
            "python", SCRIPTS / "frameworks" / script, *way, source, place / "result", cwd=place,
            RAY_USAGE_STATS_ENABLED="0", RAY_TRAIN_ENABLE_STATE_TRACKING="0",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-8000:]
        assert "was read by no DeepSpeed engine" not in done.stdout
        return [json.loads(one.read_text()) for one in sorted(place.glob("result?"))]

    return train


# ---- Lightning ------------------------------------------------------------------------------------------------------

LIGHTNING = Framework("lightning")


@pytest.mark.parametrize(
    ("stage", "block"),
    [
        row(SECTION, "Lightning, `DeepSpeedStrategy(config=...)`, ZeRO-2, adaptive", 2, PLANNED, decides=True),
        row(SECTION, "Lightning, `DeepSpeedStrategy(config=...)`, ZeRO-2, nvme", 2, NVME),
        row(SECTION, "Lightning, `DeepSpeedStrategy(config=...)`, ZeRO-3, nvme", 3, NVME),
    ],
)
def test_lightning(stage: int, block: dict[str, Any], tmp_path: Path, row_says: Callable[[str], None]) -> None:
    train = by_script(LIGHTNING, "with_lightning.py", "deepspeed")
    row_says(compared(train, config_of(stage), block, tmp_path))


@pytest.mark.compatible(
    SECTION, "Lightning with FSDP2 (`ModelParallelStrategy`), 2 ranks, `ds_tba.Offloader`, nvme", decides=True
)
def test_the_recipe_of_lightning_without_deepspeed(tmp_path: Path, row_says: Callable[[str], None]) -> None:
    """The class is the page's own code; two micro-batches a step."""
    train = by_script(LIGHTNING, "with_lightning.py", "fsdp2")
    page = ROOT / "docs/guides/frameworks.md"
    found = off_and_on(lambda place, is_on: train(page if is_on else "-", place), tmp_path, STEPS // 2)
    assert [report["micro_steps"] for report in found.reports] == [STEPS] * 2
    row_says(str(found))


# ---- Ray Train ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "block"),
    [
        row(SECTION, "Ray Train's `TorchTrainer`, 2 workers, ZeRO-2, adaptive", 2, PLANNED, decides=True),
        row(SECTION, "Ray Train's `TorchTrainer`, 2 workers, ZeRO-3, nvme", 3, NVME),
    ],
)
def test_ray(stage: int, block: dict[str, Any], tmp_path: Path, row_says: Callable[[str], None]) -> None:
    train = by_script(Framework("ray"), "with_ray.py")
    row_says(compared(train, config_of(stage, optimizer=OPTIMIZER), block, tmp_path))


# ---- a command line over Transformers' Trainer, as those of ms-swift and Axolotl are --------------------------------

AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"), "auto")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A Llama of three layers with a tokenizer, and texts."""
    import torch
    from programs_hf import sentences, tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    words.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **shape)).save_pretrained(tmp_path / "model")
    texts = sentences(128)
    pairs = list(zip(texts[::2], texts[1::2], strict=True))
    said = [{"instruction": question, "input": "", "output": answer} for question, answer in pairs]
    (tmp_path / "tiny.json").write_text(json.dumps(said))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "tiny.json"}}))
    return tmp_path


def saved(folder: Path) -> list[dict[str, Any]]:
    """Return the losses that the Trainer logged, and a digest of the model that it saved."""
    (state,) = folder.rglob("trainer_state.json")
    (model,) = {hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("model.safetensors")}
    losses = [entry["loss"] for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]
    assert len(losses) == STEPS
    return [{"losses": losses, "parameters": model}]


@pytest.mark.parametrize(
    ("stage", "block"),
    [
        row(SECTION, "LLaMA-Factory, SFT, ZeRO-2, adaptive", 2, PLANNED, decides=True),
        row(SECTION, "LLaMA-Factory, SFT, ZeRO-3, nvme", 3, NVME),
    ],
)
def test_llama_factory(
    stage: int, block: dict[str, Any], tiny: Path, tmp_path: Path, row_says: Callable[[str], None]
) -> None:
    def train(config: Path, place: Path) -> list[dict[str, Any]]:
        settings = {
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "learning_rate": 1e-3,
            "max_steps": STEPS, "logging_steps": 1, "report_to": "none", "seed": 3,
            "model_name_or_path": str(tiny / "model"), "stage": "sft", "do_train": True,
            "finetuning_type": "full", "deepspeed": str(config), "dataset_dir": str(tiny), "dataset": "tiny",
            "template": "default", "cutoff_len": 64, "output_dir": str(place / "out"), "save_strategy": "no",
            "disable_gradient_checkpointing": True,
        }  # fmt: skip
        (place / "train.yaml").write_text(json.dumps(settings))  # which is YAML, too
        done = Framework("llamafactory").run(
            "llamafactory-cli", "train", place / "train.yaml", cwd=place, FORCE_TORCHRUN="1", NPROC_PER_NODE="1"
        )
        assert done.returncode == 0, done.stdout[-8000:]
        return saved(place / "out")

    row_says(compared(train, {**config_of(stage), **AUTO}, block, tmp_path))
