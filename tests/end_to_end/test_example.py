"""The example as the README runs it, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs

from ds_tba.storage.backends import aio

EXAMPLE = runs.ROOT / "examples" / "train_gpt.py"
SMALL = ("--steps", "2", "--width", "128", "--depth", "2", "--sequence", "256", "--compare")
pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "config", sorted(path.name for path in (runs.ROOT / "ds_configs").glob("*.json")), ids=lambda name: name
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
    )
    assert result.returncode == 0, result.output
    left = json.loads((tmp_path / "result.json").read_text())
    assert left["equal"] is True and len(left["losses"]) == 2
    if config == "zero3_nvme_params.json":
        assert left["report"] is None
    else:
        assert left["report"]["written_bytes"] > 0
        assert "yes, bit for bit" in result.output and "peak saved, without" in result.output
