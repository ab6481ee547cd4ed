"""The figures of ``ds_tba plan`` against runs on the CPU, as the documentation has them: models x how they are trained.

Models are those of transformers, small, and made from their config files. A run is measured by what the offloader
reports of it, and by the peak of all its tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import runs
from support.placed import fixed
from support.planned import peak_of, small
from torch import nn

from ds_tba.cli.plan.dry_run import dry_run
from ds_tba.cli.plan.model import Subject, loss_of, recipe_of
from ds_tba.cli.plan.training import Device, DryRun, Training
from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import mark_owned
from ds_tba.device.accelerator import Accelerator
from ds_tba.offloader import ActivationOffloader
from ds_tba.report import OffloadReport

pytest.importorskip("transformers")
DOCS = runs.ROOT / "docs" / "guides" / "one_gpu.md"
BATCH, SEQUENCE, MIN_BYTES = 2, 128, 4096
SAVED_WITHIN, PEAK_WITHIN = 0.02, 0.1
MODELS = {
    name: small(name.partition(",")[0], 3, 512, SEQUENCE, 0.0)  # a CPU's dropout saves more than a GPU's
    for name in ("GPT-2", "Llama, grouped queries", "Qwen3", "Mixtral", "Gemma 2", "BERT")
}


class Way(NamedTuple):
    """How a model is trained."""

    checkpointed: bool = False
    lora_rank: int | None = None
    offloaded: bool = False


WAYS = {
    "plain": Way(),
    "checkpointing": Way(checkpointed=True),
    "LoRA": Way(lora_rank=4),
    "LoRA, checkpointing": Way(checkpointed=True, lora_rank=4),
    "all to NVMe": Way(offloaded=True),
    "checkpointing, NVMe": Way(checkpointed=True, offloaded=True),
}
TABLE = [
    ("GPT-2", "plain"), ("GPT-2", "checkpointing, NVMe"),
    ("Llama, grouped queries", "plain"), ("Llama, grouped queries", "checkpointing"),
    ("Llama, grouped queries", "LoRA"), ("Llama, grouped queries", "LoRA, checkpointing"),
    ("Llama, grouped queries", "all to NVMe"),
    ("Qwen3", "plain"), ("Qwen3", "LoRA"),
    ("Mixtral", "plain"), ("Mixtral", "checkpointing"),
    ("Gemma 2", "plain"),
    ("BERT", "plain"),
]  # fmt: skip


def made(directory: Path, model: str, way: Way, lora_rank: int | None = None) -> Callable[[int, int], Subject]:
    """As ``ds_tba plan`` makes it, checkpointed as a user has it."""
    (directory / "config.json").write_text(json.dumps(MODELS[model]))
    recipe = recipe_of(str(directory), lora_rank=lora_rank)

    def make(batch: int, sequence: int) -> Subject:
        subject = recipe(batch, sequence)
        if way.checkpointed:
            subject.model.gradient_checkpointing_enable({"use_reentrant": False})
            if way.lora_rank is not None:  # as peft does
                subject.model.enable_input_require_grads()
        return subject

    return make


def estimated(directory: Path, model: str, way: Way) -> DryRun:
    offload = OffloadConfig(enabled=False, min_tensor_bytes=MIN_BYTES)
    training = Training({}, offload, torch.bfloat16)
    device = Device("made up", None, 1e12, 1e11, 1e10)
    return dry_run(made(directory, model, way, way.lora_rank), BATCH, SEQUENCE, training, device)


def adapted(model: Any, rank: int) -> nn.Module:
    """By peft itself."""
    peft = pytest.importorskip("peft")
    found: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear"))
    return found.to(torch.bfloat16)  # as DeepSpeed does


def ran(directory: Path, model: str, way: Way) -> tuple[OffloadReport, int]:
    """What a micro-step with values saved, and the peak of all its tensors."""
    torch.manual_seed(0)
    subject = made(directory, model, way)(BATCH, SEQUENCE)
    subject.model.to(torch.bfloat16)
    if way.lora_rank is not None:
        subject = Subject(adapted(subject.model, way.lora_rank), subject.inputs)
    block = {"placement": "nvme" if way.offloaded else "keep", "min_tensor_bytes": MIN_BYTES, "rematerialize": False}
    config = OffloadConfig.model_validate({**block, "nvme_path": str(directory), "io": {"backend": "posix"}})
    with closing(ActivationOffloader(config, AioConfig(), Accelerator())) as offloader:
        peak_bytes = peak_of(subject, offloader)
        return offloader.report(), peak_bytes


@pytest.mark.parametrize(("model", "training"), TABLE)
def test_what_is_estimated_is_what_a_run_measures(tmp_path: Path, model: str, training: str) -> None:
    way = WAYS[training]
    found, (report, peak_bytes) = estimated(tmp_path, model, way), ran(tmp_path, model, way)
    assert report.peak_saved_bytes_without > 50 * MIN_BYTES
    saved_bytes = fixed(found.trace).peak_saved_bytes
    assert saved_bytes == pytest.approx(report.peak_saved_bytes_without, rel=SAVED_WITHIN)
    movable_bytes = sum(one.nbytes for one in found.trace.storages if one.is_movable and one.blocks)
    if way.offloaded:
        assert movable_bytes == pytest.approx(report.offloaded_bytes, rel=SAVED_WITHIN)
        third, fourth = movable_bytes, report.offloaded_bytes
    else:
        beside = replace(found.trace, storages=(*found.trace.storages, *found.temporary))
        kept_bytes = fixed(beside).peak_saved_bytes
        assert kept_bytes == pytest.approx(peak_bytes, rel=PEAK_WITHIN)
        third, fourth = kept_bytes, peak_bytes
    row = [saved_bytes, report.peak_saved_bytes_without, third, fourth]
    assert documented()[model, training] == pytest.approx([nbytes / 1024 for nbytes in row], rel=SAVED_WITHIN)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_estimated_is_what_a_gpu_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, dropout: float
) -> None:
    monkeypatch.setitem(MODELS, model, small(model.partition(",")[0], 3, 512, SEQUENCE, dropout))
    with torch.device("cuda"):
        subject = made(tmp_path, model, Way())(BATCH, SEQUENCE)
    subject.model.to(torch.bfloat16)
    for module in subject.model.modules():
        mark_owned(module)
    cache = TensorCache([], "cuda", MIN_BYTES)
    with cache.saving():
        output = subject.model(**subject.inputs)
    loss_of(output).backward()  # type: ignore[no-untyped-call]
    saved_bytes = fixed(estimated(tmp_path, model, Way()).trace).peak_saved_bytes
    assert saved_bytes == pytest.approx(cache.stats.saved.peak, rel=SAVED_WITHIN)


def documented() -> dict[tuple[str, str], list[float]]:
    """KiB of each row of the table."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", DOCS.read_text(), re.M)
    return {(model, training): list(map(float, figures)) for model, training, *figures in rows}


def test_the_table_has_these_rows() -> None:
    assert list(documented()) == TABLE
