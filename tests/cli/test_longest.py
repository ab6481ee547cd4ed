"""``ds_tba plan --longest`` by hand, and against runs on the CPU: a length 10 % shorter fits, one 10 % longer does not.

A run is measured by the peak of all its tensors but parameters and gradients. The plan's margins are taken off: what it
may use for tensors that come and go is what the run may use. Staging is not measured but counted in full: a GPU holds
what it has read ahead in buffers of its own, where a CPU has it in staging.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Cli
from support.planned import peak_of, small
from support.traces import resources

from ds_tba.cli import main
from ds_tba.cli.plan.dry_run import OpClock, dry_run
from ds_tba.cli.plan.model import Subject, recipe_of
from ds_tba.cli.plan.rows import FRAGMENTATION, NEAR, TIGHT, UNIT, Setup, longest_of
from ds_tba.cli.plan.training import CONTEXT_BYTES, Device, DryRun, Training, brief
from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.device.accelerator import Accelerator
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.trace import BlockTrace, StorageTrace, Trace

MIN_BYTES = 4096
MODELS = {name: small(name, 6, 256, 8192, 0.0) for name in ("GPT-2", "Llama", "Qwen3", "Mixtral", "Phi-3")}
# Whether layers are checkpointed, and whether everything is offloaded.
SETTINGS = {
    "as it is": (False, False),
    "+ checkpointing": (True, False),
    "offload all": (False, True),
    "+ checkpointing and NVMe": (True, True),
}
STAGING_BYTES = 1 << 20
BLOCK = {
    "min_tensor_bytes": MIN_BYTES,
    "rematerialize": False,
    "io": {"backend": "posix", "staging_bytes": STAGING_BYTES},
}
ROOM_BYTES = 6 << 20  # for tensors that come and go
DRIVE = 1e12, 1e12


@pytest.fixture(params=list(MODELS))
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int, int], Subject]:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(MODELS[request.param]))
    return recipe_of(str(tmp_path))


class OnCpu(Setup):
    """Without what a GPU's allocator leaves unused."""

    loose_bytes = 0  # type: ignore[assignment]


def setup_for(recipe: Callable[[int, int], Subject], room_bytes: int) -> Callable[[int], Setup]:
    offload = OffloadConfig.model_validate({**BLOCK, "enabled": False})
    training = Training({"optimizer": {"type": "AdamW"}}, offload, torch.bfloat16)
    device = Device("made up", 0, 1e12, 1e11, 1e10)

    def setup_of(sequence: int) -> Setup:
        setup = OnCpu(dry_run(recipe, 1, sequence, training, device, DRIVE), training, device, 600.0)
        memory_bytes = int((setup.account.held.nbytes + room_bytes * (1 + FRAGMENTATION)) / TIGHT)
        return replace(setup, device=device._replace(memory_bytes=memory_bytes))

    return setup_of


class TensorMeter(OpClock):
    """Leaves out staging, which is the only memory that no allocator of PyTorch has made."""

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage.resizable():
            super()._see(storage)


def test_a_run_fits_a_tenth_below_and_does_not_a_tenth_above(
    recipe: Callable[[int, int], Subject], tmp_path: Path
) -> None:
    found = {row.name: sequence for sequence, row in longest_of(setup_for(recipe, ROOM_BYTES), 128)}
    for name, (is_checkpointed, is_offloaded) in SETTINGS.items():
        for part, fits in ((0.9, True), (1.1, False)):
            torch.manual_seed(0)
            subject = recipe(1, int(part * found[name]))
            subject.model.to(torch.bfloat16)
            if is_checkpointed:
                subject.model.gradient_checkpointing_enable({"use_reentrant": False})
            with offloader_in(tmp_path) if is_offloaded else nullcontext() as offloader:
                peak_bytes = peak_of(subject, offloader, TensorMeter)
            room_bytes = ROOM_BYTES - (STAGING_BYTES if is_offloaded else 0)
            assert (peak_bytes <= room_bytes) is fits, (name, found[name], part, peak_bytes / room_bytes)


def offloader_in(directory: Path) -> AbstractContextManager[ActivationOffloader]:
    config = OffloadConfig.model_validate({**BLOCK, "placement": "nvme", "nvme_path": str(directory)})
    return closing(ActivationOffloader(config, AioConfig(), Accelerator()))


# ---- by hand --------------------------------------------------------------------------------------------------------

TOKEN_BYTES, HEAD_BYTES = 1000, 300
MEMORY_BYTES = (1 << 30) + int(CONTEXT_BYTES / TIGHT)


def made_up(sequence: int, power: int = 1) -> Setup:
    """Four blocks that save bytes for each token, and a head that holds others while it runs."""
    nbytes, storages, blocks = TOKEN_BYTES * sequence**power, [], []
    for number in range(4):
        packed_s, used_s = float(number), 10.0 - 2 * number
        blocks.append(BlockTrace(f"layers.{number}", packed_s, packed_s + 1, used_s, used_s + 2))
        storages.append(StorageTrace(nbytes, "", (number,), packed_s, packed_s, used_s, used_s + 1))
    trace = Trace(tuple(storages), tuple(blocks), resources(), 12.0)
    head_bytes = HEAD_BYTES * sequence**power
    run = DryRun(
        trace=trace,
        temporary=(brief(3.8, 3.9, head_bytes),),
        parameters=10,
        parameter_bytes=20,
        trained=10,
        trained_bytes=20,
    )
    config = {"zero_optimization": {"contiguous_gradients": False}}
    offload = OffloadConfig(enabled=False, rematerialize=False)
    training = Training(config, offload, torch.bfloat16)
    return Setup(run, training, Device("", MEMORY_BYTES, 1e12, 1e12, 1e12), 600.0)


@pytest.mark.parametrize(("first", "power"), [(UNIT, 1), (4096, 1), (1 << 24, 1), (4096, 2)])
def test_the_longest_is_what_a_line_by_hand_says(first: int, power: int) -> None:
    """Also of what grows faster than the sequence."""
    asked: list[int] = []

    def setup_of(sequence: int) -> Setup:
        asked.append(sequence)
        return made_up(sequence, power)

    found = {row.name: (sequence, row) for sequence, row in longest_of(setup_of, first)}
    room_bytes = (TIGHT * MEMORY_BYTES - CONTEXT_BYTES - 16 * 10) / (1 + FRAGMENTATION)
    # The head runs beside all that is saved; without that one block is there while it runs again.
    for name, token_bytes in (("as it is", 4 * TOKEN_BYTES + HEAD_BYTES), ("+ checkpointing", TOKEN_BYTES)):
        longest = (room_bytes / token_bytes) ** (1 / power)
        sequence, row = found[name]
        assert (1 - NEAR) * longest - UNIT <= sequence <= longest
        assert row.need_bytes <= TIGHT * MEMORY_BYTES
    assert len(set(asked)) < 30


def test_where_nothing_fits_that_is_said() -> None:
    def without(sequence: int) -> Setup:
        setup = made_up(sequence)
        return replace(setup, device=setup.device._replace(memory_bytes=100))

    assert {sequence for sequence, _ in longest_of(without, 4096)} == {0}


def test_a_sequence_ends_where_the_positions_of_the_model_do(tmp_path: Path, cli: Cli) -> None:
    """Issue: --longest of BERT, which has 512 positions, ended with status 2."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(small("BERT", 2, 256, 128)))
    found = json.loads(cli("plan", str(tmp_path), "--gpu", "24GB", "--longest", "--json").out)["rows"]
    assert {one["sequence"] for one in found} == {128}


def test_the_command_says_the_longest_of_each_setting(tmp_path: Path, cli: Cli) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["Llama"], "vocab_size": 32000}))
    block = {"placement": "nvme", "nvme_path": "/local_nvme", "min_tensor_bytes": 4096}
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"contiguous_gradients": False},
    }
    (tmp_path / "ds.json").write_text(json.dumps({**config, "activation_nvme_offload": block}))
    rates = ["--drive-tbw", "1", "--write-gbps", "4", "--read-gbps", "4", "--config", str(tmp_path / "ds.json")]
    given = ["plan", str(tmp_path), "--gpu", "1425MB", "--longest", "--seq", "128", *rates]
    plain = json.loads(cli(*given, "--json").out)["rows"]
    aided = json.loads(cli(*given, "--json", "--fused-loss").out)["rows"]
    assert {"as it is", "+ checkpointing", "+ checkpointing and NVMe", "offload all"} <= {one["name"] for one in plain}
    for before, after in zip(plain, aided, strict=True):
        assert before["name"] == after["name"] and 0 < before["sequence"] < after["sequence"]
    text = cli(*given, "--fused-loss").out
    assert f"{aided[0]['sequence']:,}" in text and "fused-loss" in text
    most = max(aided, key=lambda one: one["sequence"])
    assert f"recommended {most['name']!r}: {most['sequence']:,} tokens are the longest" in text
    assert most["life_days"] < 365 and "IT WEARS the drives out" in text
    assert main(["plan", str(tmp_path), "--gpu", "1GB", "--longest", "--seq", "128"]) == 3
