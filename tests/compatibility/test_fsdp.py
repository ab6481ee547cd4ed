"""FSDP2, DDP and tensor parallelism with ``ds_tba.Offloader``, on two ranks.

Losses, gradients and parameters are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import forked
import fsdp
import pytest
from compare import MIB, row

SECTION = "Loops without DeepSpeed, two ranks"
BUDGET_BYTES = 96 << 10
PASSED_THROUGH = 4 * 4 * 4 * 2  # weight and bias of the norm and two weights, of four blocks, in so many micro-steps
PLACEMENTS = {"nvme": "nvme", "adaptive": "adaptive with a budget"}
WAYS = [
    ("FSDP2", "fsdp", "none", "nvme"),
    ("FSDP2, `checkpoint`", "fsdp", "function", "adaptive"),
    ("FSDP2, parameters stay gathered", "fsdp-kept", "none", "adaptive"),
    ("FSDP2, bf16", "fsdp-bf16", "none", "adaptive"),
    ("FSDP2, bf16, parameters stay gathered, `CheckpointWrapper`", "fsdp-bf16-kept", "wrapper", "adaptive"),
    ("`DistributedDataParallel`", "ddp", "none", "nvme"),
    ("tensor parallelism of PyTorch", "tp", "none", "nvme"),
]


@pytest.mark.parametrize(
    ("way", "checkpoints", "placement"),
    [row(SECTION, f"{name}, {PLACEMENTS[way[-1]]}", *way, decides=True) for name, *way in WAYS],
)
def test_trainings_are_exact_and_parameters_and_dtensors_stay(
    way: str, checkpoints: str, placement: str, tmp_path: Path, row_says: Callable[[str], None]
) -> None:
    """With two micro-batches a step, and resumed from a checkpoint after half of the steps."""
    block = {"nvme_path": str(tmp_path), "min_tensor_bytes": 1024, "placement": placement}
    block |= {"io": {"backend": "posix", "staging_bytes": 1 << 20}}
    block |= {"activation_budget_bytes": BUDGET_BYTES} if placement == "adaptive" else {}
    plain, ours = (
        forked.run(fsdp.trained, None, tmp_path, ranks=2, way=way, checkpoints=checkpoints, block=one)
        for one in (None, block)
    )
    assert [one["found"] for one in ours] == [one["found"] for one in plain]
    reports = [report for rank in ours for report in rank["reports"]]  # before the training was resumed, and after
    for report in reports:
        assert report["offloaded_bytes"] + report["rematerialized_bytes"] > 0
        assert report["budget_excess_bytes"] == 0
        if way == "tp":
            assert report["kept_bytes_by_reason"]["tensor subclass"] > 0 and report["offloaded_bytes"] > 0
        elif checkpoints == "none":
            assert report["peak_saved_bytes_without"] > BUDGET_BYTES  # else it holds by itself
            assert report["passed_through_tensors"] == PASSED_THROUGH
    moved, again = (sum(one[key] for one in reports) / MIB for key in ("offloaded_bytes", "rematerialized_bytes"))
    row_says(f"bit-equal, {moved:.1f} MiB moved, {again:.1f} MiB rematerialized; resumed: bit-equal")
