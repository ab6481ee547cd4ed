"""Memory runs out in training: the user's error stays, and what filled the memory is told beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_program_that_goes_on_with_less_ends_where_it_ends_without_us(tmp_path: Path, phase: str) -> None:
    def run(config: dict[str, Any]) -> runs.Result:
        return runs.run(config, tmp_path, "--phase", phase, "--retry", script=runs.SCRIPTS / "out_of_memory.py")

    plain = runs.plain_config(train_batch_size=4)
    expected = run(plain)
    found = run(runs.with_block(plain, tmp_path, placement="nvme", min_tensor_bytes=4096))
    assert expected.returncode == found.returncode == 0, found.output
    assert found.lines("PARAMETERS") == expected.lines("PARAMETERS") != []
    assert found.output.count("memory ran out") == 4
