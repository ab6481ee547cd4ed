"""The figures of ``ds_tba plan`` against runs on the CPU, as the documentation has them: models x trainings.

Models are those of transformers, small, and made from their config files. A run is measured by what the offloader
reports of it, and by the peak of all its tensors but parameters and gradients.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import runs
from support.planned import small
from support.replays import fixed
from torch import nn

from ds_tba.cli.plan.dry_run import OpClock, dry_run
from ds_tba.cli.plan.model import Recipe, Subject, loss_of, recipe_of
from ds_tba.cli.plan.rows import FRAGMENTATION, TIGHT, Setup, longest_of
from ds_tba.cli.plan.training import Device, DryRun, Training
from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.core.cache import TensorCache
from ds_tba.core.tensors import mark_owned
from ds_tba.device.accelerator import Accelerator
from ds_tba.offloader import ActivationOffloader
from ds_tba.report import OffloadReport

pytest.importorskip("transformers")
DOCS = runs.ROOT / "docs" / "guides" / "one_gpu.md"
BATCH, SEQUENCE, MIN_BYTES, LORA_RANK = 2, 128, 4096, 4
ROOM_BYTES, STAGING_BYTES = 6 << 20, 1 << 20  # for tensors that come and go; of it, if a drive is used
SAVED_WITHIN, PEAK_WITHIN = 0.02, 0.1
IO = {"backend": "posix", "staging_bytes": STAGING_BYTES}
BLOCK = {"min_tensor_bytes": MIN_BYTES, "rematerialize": False, "io": IO}
OFFLOAD = OffloadConfig.model_validate({**BLOCK, "enabled": False})
DEVICE = Device("made up", 0, 1e12, 1e11, 1e10)
MODELS = {
    name: small(name.partition(",")[0], 3, 512, SEQUENCE, 0.0)  # a CPU's dropout saves more than a GPU's
    for name in ("GPT-2", "Llama, grouped queries", "Qwen3", "Mixtral", "Gemma 2", "BERT")
}


def documented() -> dict[tuple[str, str], list[float]]:
    """KiB of each row of the table."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", DOCS.read_text(), re.M)
    return {(model, training): list(map(float, figures)) for model, training, *figures in rows}


def test_the_table_has_each_model_and_each_way() -> None:
    models, ways = (set(each) for each in zip(*documented(), strict=True))
    assert models == set(MODELS) and len(documented()) == 13
    assert {one for way in ways for one in way.split(", ")} == {"plain", "checkpointing", "LoRA", "all to NVMe", "NVMe"}


def made(directory: Path, config: dict[str, Any], training: str, lora_rank: int | None = None) -> Recipe:
    """As ``ds_tba plan`` makes it, checkpointed as a user has it."""
    (directory / "config.json").write_text(json.dumps(config))
    recipe = recipe_of(str(directory), lora_rank=lora_rank)

    def make(batch: int, sequence: int) -> Subject:
        subject = recipe(batch, sequence)
        if "checkpointing" in training:
            subject.model.gradient_checkpointing_enable({"use_reentrant": False})
            if "LoRA" in training:  # as peft does
                subject.model.enable_input_require_grads()
        return subject

    return make


def estimated(directory: Path, model: str, training: str) -> DryRun:
    make = made(directory, MODELS[model], training, LORA_RANK if "LoRA" in training else None)
    return dry_run(make, BATCH, SEQUENCE, Training({}, OFFLOAD, torch.bfloat16), DEVICE)


def adapted(model: Any) -> nn.Module:
    """By peft itself."""
    peft = pytest.importorskip("peft")
    found: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=LORA_RANK, target_modules="all-linear"))
    return found.to(torch.bfloat16)  # as DeepSpeed does


class TensorMeter(OpClock):
    """Leaves out staging, which is the only memory that no allocator of PyTorch has made."""

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage.resizable():
            super()._see(storage)


def peak_of(subject: Subject, offloader: ActivationOffloader) -> int:
    """The peak of all tensors but parameters and gradients in a micro-step with values."""
    parameters = list(subject.model.parameters())
    for one in parameters:
        one.grad = torch.zeros_like(one) if one.requires_grad else None
    meter = TensorMeter(1.0, 1.0)
    meter.ignore([one.untyped_storage() for each in parameters for one in (each, each.grad) if one is not None])
    with meter:
        with offloader.saving():
            loss = loss_of(subject.model(**subject.inputs))
        loss.backward()  # type: ignore[no-untyped-call]
    return max(one.nbytes for one in meter.temporary(0))


def ran(directory: Path, subject: Subject, training: str) -> tuple[OffloadReport, int]:
    """What a micro-step with values saved, and the peak of all its tensors."""
    subject.model.to(torch.bfloat16)
    if "LoRA" in training:
        subject = Subject(adapted(subject.model), subject.inputs)
    placement = "nvme" if "NVMe" in training else "keep"
    config = OffloadConfig.model_validate({**BLOCK, "placement": placement, "nvme_path": str(directory)})
    with closing(ActivationOffloader(config, AioConfig(), Accelerator())) as offloader:
        peak_bytes = peak_of(subject, offloader)
        return offloader.report(), peak_bytes


@pytest.mark.parametrize(("model", "training"), documented())
def test_what_is_estimated_is_what_a_run_measures(tmp_path: Path, model: str, training: str) -> None:
    found = estimated(tmp_path, model, training)
    torch.manual_seed(0)
    report, peak_bytes = ran(tmp_path, made(tmp_path, MODELS[model], training)(BATCH, SEQUENCE), training)
    assert report.peak_saved_bytes_without > 50 * MIN_BYTES
    saved_bytes = fixed(found.trace).peak_saved_bytes
    assert saved_bytes == pytest.approx(report.peak_saved_bytes_without, rel=SAVED_WITHIN)
    movable_bytes = sum(one.nbytes for one in found.trace.storages if one.is_movable and one.blocks)
    if "NVMe" in training:
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
        subject = made(tmp_path, MODELS[model], "plain")(BATCH, SEQUENCE)
    subject.model.to(torch.bfloat16)
    for module in subject.model.modules():
        mark_owned(module)
    cache = TensorCache([], "cuda", MIN_BYTES)
    with cache.saving():
        output = subject.model(**subject.inputs)
    loss_of(output).backward()  # type: ignore[no-untyped-call]
    saved_bytes = fixed(estimated(tmp_path, model, "plain").trace).peak_saved_bytes
    assert saved_bytes == pytest.approx(cache.stats.saved.peak, rel=SAVED_WITHIN)


# ---- the longest sequence -------------------------------------------------------------------------------------------

# Rows of the plan, and how a run of each is trained.
ROWS = {
    "as it is": "plain", "+ checkpointing": "checkpointing", "offload all": "all to NVMe",
    "+ checkpointing and NVMe": "checkpointing, NVMe",
}  # fmt: skip


class OnCpu(Setup):
    """Without what a GPU's allocator leaves unused."""

    loose_bytes = 0  # type: ignore[assignment]


def setup_for(recipe: Recipe) -> Callable[[int], Setup]:
    """A device with this room, by its memory that the plan takes for tight."""
    training = Training({"optimizer": {"type": "AdamW"}}, OFFLOAD, torch.bfloat16)

    def setup_of(sequence: int) -> Setup:
        setup = OnCpu(dry_run(recipe, 1, sequence, training, DEVICE, (1e12, 1e12)), training, DEVICE, 600.0)
        memory_bytes = int((setup.account.held.nbytes + ROOM_BYTES * (1 + FRAGMENTATION)) / TIGHT)
        return replace(setup, device=DEVICE._replace(memory_bytes=memory_bytes))

    return setup_of


@pytest.mark.parametrize("model", ["GPT-2", "Llama", "Qwen3", "Mixtral", "Phi-3"])
def test_a_run_fits_a_tenth_below_the_longest_and_does_not_a_tenth_above(tmp_path: Path, model: str) -> None:
    """Staging counts in full: a GPU holds what it has read ahead in buffers of its own, where a CPU has it there."""
    config = small(model, 6, 256, 8192, 0.0)
    found = {row.name: sequence for sequence, row in longest_of(setup_for(made(tmp_path, config, "plain")), 128)}
    for name, training in ROWS.items():
        for part, fits in ((0.9, True), (1.1, False)):
            torch.manual_seed(0)
            subject = made(tmp_path, config, training)(1, int(part * found[name]))
            _, peak_bytes = ran(tmp_path, subject, training)
            room_bytes = ROOM_BYTES - (STAGING_BYTES if "NVMe" in training else 0)
            assert (peak_bytes <= room_bytes) is fits, (name, found[name], part, peak_bytes / room_bytes)
