"""DeepSpeed's engine on a real device: with the block, losses and parameters bit for bit those without it.

    python -m pytest -m gpu tests/gpu/test_gpu_engine.py

What ``test_training.py`` and ``test_example.py`` run on the CPU, here with the accelerator that DeepSpeed finds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import runs

from ds_tba.storage.backends import aio

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ON_CUDA = {"DS_ACCELERATOR": "cuda", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def launched(*arguments: Any, **options: Any) -> runs.Result:
    result = runs.launch(*arguments, **options, **ON_CUDA)
    assert result.returncode == 0, result.output
    return result


@pytest.mark.parametrize(
    ("backend", "stage", "block"),
    [
        ("posix", 0, {"placement": "nvme"}),
        ("posix", 1, {"placement": "nvme"}),
        ("posix", 2, {}),
        ("posix", 2, {"placement": "host", "host_budget_bytes": 256 << 20}),
        ("kvikio", 2, {}),
        ("aio", 3, {}),
        ("posix", 3, {"placement": "nvme"}),
    ],
    ids=lambda value: value.get("placement", "adaptive") if isinstance(value, dict) else str(value),
)
def test_an_unmodified_script(tmp_path: Path, backend: str, stage: int, block: dict[str, Any]) -> None:
    if (backend == "aio" or stage == 3) and not aio.is_built():
        pytest.skip("DeepSpeed's aio op is not built: make aio")
    if backend == "kvikio":
        pytest.importorskip("kvikio")
    more = {"gradient_accumulation_steps": 2, "bf16": {"enabled": True}} if stage < 2 else {}
    config = runs.nvme_parameters(tmp_path) if stage == 3 else runs.plain_config(stage, **more)
    without = launched(config, tmp_path)
    result = launched(runs.with_block(config, tmp_path, io={"backend": backend}, **block), tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["state"], report["steps"]) == ("finished", 3)
    assert result.outcome == without.outcome and len(without.outcome[0]) == report["micro_steps"]
    # adaptive keeps what would have to wait for the drive.
    assert report["fallbacks"] == 0 or "placement" not in block
    assert report["offloaded_bytes"] > 0 and report["peak_saved_bytes"] < report["peak_saved_bytes_without"]
    if block.get("placement") != "host":
        assert report["backend"] == backend and report["written_bytes"] > 0


@pytest.mark.parametrize("config", ["zero2_activations.json", "zero3_nvme_params_activations.json"])
def test_the_example_with_a_shipped_config(tmp_path: Path, config: str) -> None:
    if "nvme_params" in config and not aio.is_built():
        pytest.skip("DeepSpeed's aio op is not built: make aio")
    launched(
        None,
        tmp_path,
        *("--deepspeed_config", str(runs.ROOT / "ds_configs" / config), "--nvme_path", str(tmp_path), "--compare"),
        *("--steps", "3", "--result", str(tmp_path / "result.json")),
        script=runs.ROOT / "examples" / "train_gpt.py",
    )
    left = json.loads((tmp_path / "result.json").read_text())
    assert left["equal"] is True and left["report"]["written_bytes"] > 0
