"""The example as the README runs it, small."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support import runs

from ds_tba.storage.backends import aio

EXAMPLE = runs.ROOT / "examples" / "train_gpt.py"
SMALL = ("--steps", "2", "--width", "128", "--depth", "2", "--sequence", "256", "--batch", "8", "--compare")
pytestmark = pytest.mark.engine


CONFIGS = sorted(path.name for path in (runs.ROOT / "ds_configs").glob("*.json"))
# The next test has another one.
IN_BRIEF = {"zero3_nvme_params_activations.json"}


@pytest.mark.parametrize(
    "config",
    [pytest.param(one, marks=() if one in IN_BRIEF else pytest.mark.thorough, id=one) for one in CONFIGS],
)
def test_every_shipped_config_trains(tmp_path: Path, config: str) -> None:
    if "nvme_params" in config and not aio.is_built():
        pytest.skip("DeepSpeed's aio op is not built: make aio")
    result = runs.launch(
        None,
        tmp_path,
        *("--deepspeed_config", str(runs.ROOT / "ds_configs" / config), "--nvme_path", str(tmp_path)),
        *("--result", str(tmp_path / "result.json"), *SMALL),
        script=EXAMPLE,
        timeout_s=600,
    )
    assert result.returncode == 0, result.output
    left = json.loads((tmp_path / "result.json").read_text())
    assert left["equal"] is True and len(left["losses"]) == 2
    if config == "zero3_nvme_params.json":
        assert left["report"] is None
    else:
        if config in ("rematerialize.json", "zero3_interleaved_update.json"):  # without a drive
            assert left["report"]["rematerialized_bytes"] > 0 and left["report"]["written_bytes"] == 0
        else:
            assert left["report"]["written_bytes"] > 0
        assert "yes, bit for bit" in result.output and "peak saved, without" in result.output


def test_the_process_needs_less_memory(tmp_path: Path) -> None:
    size = ("--width", "128", "--depth", "6", "--sequence", "512", "--batch", "16", "--steps", "5")
    limits = ("--activation_budget_bytes", str(32 << 20), "--staging_bytes", str(32 << 20))
    config = json.loads((runs.ROOT / "ds_configs" / "zero2_activations.json").read_text())
    config["bf16"]["enabled"] = False  # in which many processors are ten times as slow
    result = runs.launch(
        config,
        tmp_path,
        *("--nvme_path", str(tmp_path), *size, *limits, "--backend", "posix", "--compare"),
        script=EXAMPLE,
        timeout_s=600,
        MALLOC_MMAP_THRESHOLD_=str(1 << 20),
    )
    assert result.returncode == 0, result.output
    words = " ".join(result.output.split())
    assert "With the block, all losses and parameters are equal bit for bit" in words
    found = re.search(r"needs ([\d.]+) GiB at its peak instead of ([\d.]+) GiB", words)
    assert found, words
    with_gib, without_gib = map(float, found.groups())
    assert without_gib - with_gib > 0.2  # 0.4 GiB are saved; the plan keeps and staging takes a 32nd of a GiB each
