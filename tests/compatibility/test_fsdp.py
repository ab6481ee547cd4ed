"""FSDP2, DDP and tensor parallelism with ``ds_tba.Offloader``, on two ranks.

Losses, gradients and parameters are the same, bit for bit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compare import MIB, row
from support import ranks, runs

SCRIPT = str(runs.SCRIPTS / "fsdp.py")
SECTION = "Loops without DeepSpeed, two ranks"
PASSED_THROUGH = 4 * 4 * 4 * 2  # weight and bias of the norm and two weights, of four blocks, in so many micro-steps


def train(way: str, checkpoints: str, placement: str, directory: Path) -> list[dict[str, Any]]:
    codes, outputs = ranks.fork(
        ranks.script, SCRIPT, way, checkpoints, placement, str(directory), directory=directory, ranks=2, timeout_s=300
    )
    assert codes == [0, 0], "\n".join(outputs)
    return [json.loads((directory / f"{placement}{rank}.json").read_text()) for rank in range(2)]


def outcome(ranks_found: list[dict[str, Any]]) -> str:
    """Return the words of the table, over all ranks, before the training was resumed and after."""
    reports = [report for found in ranks_found for report in found["reports"]]
    moved, again = (sum(one[key] for one in reports) / MIB for key in ("offloaded_bytes", "rematerialized_bytes"))
    return f"bit-equal, {moved:.1f} MiB moved, {again:.1f} MiB rematerialized; resumed: bit-equal"


def combination(name: str, *values: str) -> Any:
    return row(SECTION, name, *values, decides=True)


@pytest.mark.parametrize(
    ("way", "checkpoints", "placement"),
    [
        combination("FSDP2, nvme", "fsdp", "none", "nvme"),
        combination("FSDP2, `checkpoint`, adaptive with a budget", "fsdp", "function", "adaptive"),
        combination("FSDP2, parameters stay gathered, adaptive with a budget", "fsdp-kept", "none", "adaptive"),
        combination("FSDP2, bf16, adaptive with a budget", "fsdp-bf16", "none", "adaptive"),
        combination(
            "FSDP2, bf16, parameters stay gathered, `CheckpointWrapper`, adaptive with a budget",
            *("fsdp-bf16-kept", "wrapper", "adaptive"),
        ),
        combination("`DistributedDataParallel`, nvme", "ddp", "none", "nvme"),
    ],
)
def test_trainings_are_exact_and_gathered_parameters_stay(
    way: str, checkpoints: str, placement: str, tmp_path: Path, row_says: Callable[[str], None]
) -> None:
    """With two micro-batches a step, and resumed from a checkpoint after half of the steps."""
    plain, ours = (train(way, checkpoints, one, tmp_path) for one in ("plain", placement))
    for expected, found in zip(plain, ours, strict=True):
        assert found["found"] == expected["found"]
        for report in found["reports"]:
            assert report["offloaded_bytes"] + report["rematerialized_bytes"] > 0
            assert report["budget_excess_bytes"] == 0
            if checkpoints == "none":
                assert report["peak_saved_bytes_without"] > found["budget_bytes"]  # else it holds by itself
                assert report["passed_through_tensors"] == PASSED_THROUGH
    row_says(outcome(ours))


@pytest.mark.compatible(SECTION, "tensor parallelism of PyTorch, nvme", decides=True)
def test_what_tensor_parallel_layers_save_as_dtensors_stays(tmp_path: Path, row_says: Callable[[str], None]) -> None:
    plain, ours = (train("tp", "none", one, tmp_path) for one in ("plain", "nvme"))
    for expected, found in zip(plain, ours, strict=True):
        assert found["found"] == expected["found"]
        for report in found["reports"]:
            assert report["kept_bytes_by_reason"]["tensor subclass"] > 0 and report["offloaded_bytes"] > 0
    row_says(outcome(ours))


# A reader of the guide has this code already; the guide shows what is added to it.
GIVEN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

model = Model()
batches = [torch.randn(512, 512) for _ in range(2)]
"""


def test_the_sample_of_the_guide_runs_as_it_stands(tmp_path: Path) -> None:
    """On a directory that is there, in place of the drive that it names."""
    guide = (runs.ROOT / "docs/guides/plain_pytorch.md").read_text()
    (sample,) = re.findall(r"```text\n(.*?)```", guide, re.DOTALL)
    path = tmp_path / "train.py"
    path.write_text(GIVEN + sample.replace("/local_nvme", str(tmp_path)))
    codes, outputs = ranks.fork(ranks.script, str(path), directory=tmp_path, ranks=2, timeout_s=300)
    assert codes == [0, 0], "\n".join(outputs)
    for name in ("report.json", "report.json.rank1"):
        report = json.loads((tmp_path / name).read_text())
        assert report["state"] == "finished" and report["steps"] == 2 and report["offloaded_bytes"] > 0
