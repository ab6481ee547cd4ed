"""FSDP2, DDP and tensor parallelism with ``ds_tba.Offloader``, on two ranks.

Losses, gradients and parameters are the same, bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import ranks, runs

SCRIPT = str(runs.SCRIPTS / "fsdp.py")
PASSED_THROUGH = 4 * 4 * 4 * 2  # weight and bias of the norm and two weights, of four blocks, in so many micro-steps


def train(way: str, checkpoints: str, placement: str, directory: Path) -> list[dict[str, Any]]:
    codes, outputs = ranks.fork(
        ranks.script, SCRIPT, way, checkpoints, placement, str(directory), directory=directory, ranks=2, timeout_s=300
    )
    assert codes == [0, 0], "\n".join(outputs)
    return [json.loads((directory / f"{placement}{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("way", "checkpoints", "placement"),
    [
        ("ddp", "none", "nvme"),
        ("fsdp", "none", "nvme"),
        ("fsdp", "function", "adaptive"),
        ("fsdp-kept", "none", "adaptive"),
        pytest.param("fsdp-bf16", "none", "adaptive", marks=pytest.mark.thorough),  # the next has it, too
        ("fsdp-bf16-kept", "wrapper", "adaptive"),
    ],
)
def test_trainings_are_exact_and_gathered_parameters_stay(
    way: str, checkpoints: str, placement: str, tmp_path: Path
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


def test_what_tensor_parallel_layers_save_as_dtensors_stays(tmp_path: Path) -> None:
    plain, ours = (train("tp", "none", one, tmp_path) for one in ("plain", "nvme"))
    for expected, found in zip(plain, ours, strict=True):
        assert found["found"] == expected["found"]
        for report in found["reports"]:
            assert report["kept_bytes_by_reason"]["tensor subclass"] > 0 and report["offloaded_bytes"] > 0
