"""Memory runs out in training: the user's error stays, and what filled the memory is told beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support import runs

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("phase", "start"), [("forward", runs.run), ("backward", runs.launch)], ids=["forward", "backward"]
)
def test_what_filled_the_memory_is_told_and_the_error_stays(
    tmp_path: Path, phase: str, start: Callable[..., runs.Result]
) -> None:
    """In a process that is forked, and in one of the launcher's."""
    config = runs.with_block(runs.plain_config(train_batch_size=4), tmp_path, placement="nvme", min_tensor_bytes=4096)
    result = start(config, tmp_path, "--phase", phase, script=runs.SCRIPTS / "out_of_memory.py")
    assert result.returncode != 0
    assert "can't allocate memory" in result.output
    told = result.output[result.output.index("memory ran out") :]
    assert result.output.count("memory ran out") == 1
    assert f"in the {phase}, 384.00 MiB more did not fit" in told
    assert "layers.*.down" in told
    assert "saved tensors hold" in told
    report = json.loads((tmp_path / "report.json").read_text())
    assert any(one["module"] == "layers.*.down" for one in report["holders"])
