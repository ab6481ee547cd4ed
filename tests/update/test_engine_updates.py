"""Updates under the block, against unmodified DeepSpeed: every bit that a step leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forked
import pytest
import update_programs as programs
from update_programs import CHUNKS, ds_config

BF16 = {"bf16": {"enabled": True}}
WARMUP = {"total_num_steps": 8, "warmup_num_steps": 3, "warmup_max_lr": 2e-2}
SCHEDULE = {"scheduler": {"type": "WarmupDecayLR", "params": WARMUP}}
L2 = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}}}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "fp32": ({}, "one"),
    "bf16": (BF16, "one"),
    "bf16, clipped": ({**BF16, "gradient_clipping": 0.01}, "one"),
    "bf16, accumulated": ({**BF16, "gradient_accumulation_steps": 2}, "decay"),
    "bf16, groups with other betas": ({**BF16, **SCHEDULE}, "betas"),
    "Adam with L2": ({**BF16, **L2}, "decay"),
    "parameters on the host": (
        {**BF16, "gradient_clipping": 0.01, "zero_optimization": {"offload_param": {"device": "cpu"}}}, "decay",
    ),
}  # fmt: skip
SHARES = (0, 0.5, 1, None)


@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_that_of_unmodified_deepspeed(case: str, tmp_path: Path) -> None:
    more, groups = CASES[case]
    blocks = [{**CHUNKS, "device_share": share} for share in SHARES]
    variants = [{"groups": groups}]
    variants += [{"groups": groups, "block": block} for block in blocks]
    variants += [{"groups": groups, "block": block, "late": True} for block in blocks]
    (result,) = forked.run(programs.compare, ds_config(**more), tmp_path, variants=variants)
    stock, *ours = result["variants"]
    assert len({str(step) for step in stock["steps"]}) == len(stock["steps"])
    for variant, found in zip(variants[1:], ours, strict=True):
        assert found["steps"] == stock["steps"], variant
        report, share = found["report"], variant["block"]["device_share"]
        assert report["steps"] == len(stock["steps"]) and not report["stock_steps"] and not report["fallbacks"]
        if share is not None:
            assert abs(report["device_share"] - share) < 0.2
        if share != 0:
            assert report["device_elements"] and report["verified_chunks"]
