"""FSDP2, DDP and tensor parallelism with ``ds_tba.Offloader``, on two ranks.

Losses, gradients and parameters are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import fsdp
import pytest
from compare import MIB, row

SECTION = "Loops without DeepSpeed, two ranks"
BUDGET_BYTES = 96 << 10
PASSED_THROUGH = 4 * 4 * 4 * 2  # weight and bias of the norm and two weights, of four blocks, in so many micro-steps


def train(directory: Path, way: str, checkpoints: str, placement: str) -> list[dict[str, Any]]:
    """What each rank returns with the block; without it the same was found."""
    block = {"nvme_path": str(directory), "min_tensor_bytes": 1024, "placement": placement}
    block |= {"io": {"backend": "posix", "staging_bytes": 1 << 20}}
    block |= {"activation_budget_bytes": BUDGET_BYTES} if placement == "adaptive" else {}
    plain, ours = (
        forked.run(fsdp.trained, None, directory, ranks=2, way=way, checkpoints=checkpoints, block=one)
        for one in (None, block)
    )
    assert [one["found"] for one in ours] == [one["found"] for one in plain]
    return ours


def outcome(ranks_found: list[dict[str, Any]]) -> str:
    """Return the words of the table, over all ranks, before the training was resumed and after."""
    reports = [report for found in ranks_found for report in found["reports"]]
    moved, again = (sum(one[key] for one in reports) / MIB for key in ("offloaded_bytes", "rematerialized_bytes"))
    return f"bit-equal, {moved:.1f} MiB moved, {again:.1f} MiB rematerialized; resumed: bit-equal"


@pytest.mark.parametrize(
    ("way", "checkpoints", "placement"),
    [
        row(SECTION, name, *values, decides=True)
        for name, *values in (
            ("FSDP2, nvme", "fsdp", "none", "nvme"),
            ("FSDP2, `checkpoint`, adaptive with a budget", "fsdp", "function", "adaptive"),
            ("FSDP2, parameters stay gathered, adaptive with a budget", "fsdp-kept", "none", "adaptive"),
            ("FSDP2, bf16, adaptive with a budget", "fsdp-bf16", "none", "adaptive"),
            (
                "FSDP2, bf16, parameters stay gathered, `CheckpointWrapper`, adaptive with a budget",
                *("fsdp-bf16-kept", "wrapper", "adaptive"),
            ),
            ("`DistributedDataParallel`, nvme", "ddp", "none", "nvme"),
        )
    ],
)
def test_trainings_are_exact_and_gathered_parameters_stay(
    way: str, checkpoints: str, placement: str, tmp_path: Path, row_says: Callable[[str], None]
) -> None:
    """With two micro-batches a step, and resumed from a checkpoint after half of the steps."""
    ours = train(tmp_path, way, checkpoints, placement)
    for report in (one for rank in ours for one in rank["reports"]):
        assert report["offloaded_bytes"] + report["rematerialized_bytes"] > 0
        assert report["budget_excess_bytes"] == 0
        if checkpoints == "none":
            assert report["peak_saved_bytes_without"] > BUDGET_BYTES  # else it holds by itself
            assert report["passed_through_tensors"] == PASSED_THROUGH
    row_says(outcome(ours))


@pytest.mark.compatible(SECTION, "tensor parallelism of PyTorch, nvme", decides=True)
def test_what_tensor_parallel_layers_save_as_dtensors_stays(tmp_path: Path, row_says: Callable[[str], None]) -> None:
    ours = train(tmp_path, "tp", "none", "nvme")
    for report in (one for rank in ours for one in rank["reports"]):
        assert report["kept_bytes_by_reason"]["tensor subclass"] > 0 and report["offloaded_bytes"] > 0
    row_says(outcome(ours))
