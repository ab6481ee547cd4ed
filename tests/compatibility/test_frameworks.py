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
Train = Callable[[Path | str, Path], list[dict[str, Any]]]  # with this config or page, in this place


def run_in(framework: str, program: str, *arguments: object, cwd: Path, **variables: str) -> str:
    """Run a program of a framework's environment; return what it printed."""
    folder = PLACES / framework / "bin"
    if not (folder / "python").exists():
        pytest.skip(f"{framework} is not installed: make frameworks")
    own = {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, SCRIPTS / "frameworks"))),
        "TORCH_EXTENSIONS_DIR": str(folder.parent / "torch_extensions"),  # each compiles its own
    }
    done = subprocess.run(
        [str(folder / program), *map(str, arguments)], env=environment(**own, **variables), cwd=cwd,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


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


def by_script(framework: str, *way: str) -> Train:
    """Return a training by the framework's script of ``tests/scripts/frameworks``."""

    def train(source: Path | str, place: Path) -> list[dict[str, Any]]:
        script = SCRIPTS / f"frameworks/with_{framework}.py"
        quiet = dict.fromkeys(("RAY_USAGE_STATS_ENABLED", "RAY_TRAIN_ENABLE_STATE_TRACKING"), "0")
        printed = run_in(framework, "python", script, *way, source, place / "result", cwd=place, **quiet)
        assert "was read by no DeepSpeed engine" not in printed
        return [json.loads(one.read_text()) for one in sorted(place.glob("result?"))]

    return train


def write_tiny(folder: Path) -> None:
    """Write a Llama of three layers with a tokenizer, and texts."""
    import torch
    from programs_hf import sentences, tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    words.save_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **shape)).save_pretrained(folder / "model")
    texts = sentences(128)
    pairs = zip(texts[::2], texts[1::2], strict=True)
    said = [{"instruction": question, "input": "", "output": answer} for question, answer in pairs]
    (folder / "tiny.json").write_text(json.dumps(said))
    (folder / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "tiny.json"}}))


def by_llama_factory(config: Path | str, place: Path) -> list[dict[str, Any]]:
    """A command line over Transformers' Trainer, as those of ms-swift and Axolotl are.

    Returns:
        The losses that the Trainer logged, and a digest of the model that it saved.
    """
    write_tiny(place)
    settings = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "learning_rate": 1e-3,
        "max_steps": STEPS, "logging_steps": 1, "report_to": "none", "seed": 3,
        "model_name_or_path": str(place / "model"), "stage": "sft", "do_train": True,
        "finetuning_type": "full", "deepspeed": str(config), "dataset_dir": str(place), "dataset": "tiny",
        "template": "default", "cutoff_len": 64, "output_dir": str(place / "out"), "save_strategy": "no",
        "disable_gradient_checkpointing": True,
    }  # fmt: skip
    (place / "train.yaml").write_text(json.dumps(settings))  # which is YAML, too
    own = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "1"}
    run_in("llamafactory", "llamafactory-cli", "train", place / "train.yaml", cwd=place, **own)
    (state,) = (place / "out").rglob("trainer_state.json")
    (model,) = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (place / "out").rglob("model.safetensors")}
    losses = [entry["loss"] for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]
    assert len(losses) == STEPS
    return [{"losses": losses, "parameters": model}]


AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"), "auto")
LIGHTNING = ("Lightning, `DeepSpeedStrategy(config=...)`", by_script("lightning", "deepspeed"), {})
RAY = ("Ray Train's `TorchTrainer`, 2 workers", by_script("ray"), {"optimizer": OPTIMIZER})
LLAMA_FACTORY = ("LLaMA-Factory, SFT", by_llama_factory, AUTO)


@pytest.mark.parametrize(
    ("train", "config", "block"),
    [
        row(SECTION, f"{name}, ZeRO-{stage}, {block['placement']}", train, config_of(stage, **more), block,
            decides=block is PLANNED)
        for (name, train, more), stage, block in (
            (LIGHTNING, 2, PLANNED), (LIGHTNING, 2, NVME), (LIGHTNING, 3, NVME), (RAY, 2, PLANNED), (RAY, 3, NVME),
            (LLAMA_FACTORY, 2, PLANNED), (LLAMA_FACTORY, 3, NVME),
        )
    ],
)  # fmt: skip
def test_a_framework_that_takes_a_json(
    train: Train, config: dict[str, Any], block: dict[str, Any], tmp_path: Path, row_says: Callable[[str], None]
) -> None:
    def with_json(place: Path, is_on: bool) -> list[dict[str, Any]]:
        path = place / "ds_config.json"
        path.write_text(json.dumps(with_block(config, place, **{**SMALL, **block, "enabled": is_on})))
        return train(path, place)

    row_says(str(off_and_on(with_json, tmp_path)))


@pytest.mark.compatible(
    SECTION, "Lightning with FSDP2 (`ModelParallelStrategy`), 2 ranks, `ds_tba.Offloader`, nvme", decides=True
)
def test_the_recipe_of_lightning_without_deepspeed(tmp_path: Path, row_says: Callable[[str], None]) -> None:
    """The class is the page's own code; two micro-batches a step."""
    train, page = by_script("lightning", "fsdp2"), ROOT / "docs/guides/frameworks.md"
    found = off_and_on(lambda place, is_on: train(page if is_on else "-", place), tmp_path, STEPS // 2)
    assert [report["micro_steps"] for report in found.reports] == [STEPS] * 2
    row_says(str(found))
