"""The benchmark of the plan's memory: its arithmetic, and that it runs, tiny."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plan_memory import SETTINGS, slope
from support import runs


def test_memory_per_token_is_the_slope_between_the_first_length_and_the_last() -> None:
    assert slope([1024, 1536, 3072], [5 << 20, 0, 11 << 20]) == 3.0


@pytest.mark.thorough
@pytest.mark.engine
def test_plan_memory_tiny(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    small = ("--models", "Llama", "--layers", "2", "--lengths", "64", "128")
    runs.benchmark("plan_memory.py", *small, "--nvme_path", tmp_path, "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())["bytes"]["Llama"]
    for name in SETTINGS:
        assert all(nbytes > 0 for kind in ("plan", "run") for nbytes in found[kind][name])
