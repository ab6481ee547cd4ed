"""Offloads to host memory in a control group that has too little: others are killed, ours finishes, bit-equal."""

from __future__ import annotations

from pathlib import Path

import pytest
from control_group import available
from support import runs


@pytest.mark.thorough
@pytest.mark.engine
def test_only_ours_finishes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    if why_not := available():
        pytest.skip(why_not)
    size = ("--layers", "64", "--width", "64", "--rows", "16", "--steps", "2", "--nvme_path", tmp_path)
    output = runs.benchmark("control_group.py", *size)
    assert output.count("killed by the kernel") == 3 and "finishes, losses equal" in output
