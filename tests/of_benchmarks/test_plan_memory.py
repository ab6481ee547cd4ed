"""The benchmark of the plan's memory: its arithmetic, and that it runs, tiny."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plan_memory import SETTINGS, slope, table
from support import runs


def test_memory_per_token_is_the_slope_between_the_first_length_and_the_last() -> None:
    assert slope([1024, 1536, 3072], [5 << 20, 0, 11 << 20]) == 3.0


def test_the_table_divides_plan_by_run() -> None:
    plan = {name: [0, 1024 * 1024 * number] for number, name in enumerate(SETTINGS, 1)}
    run = {name: [0, 2 * 1024 * 1024] for name in SETTINGS}
    lines = table({"Llama": {"plan": plan, "run": run}}, [0, 1024])
    assert lines[2:] == [
        "| Llama | as it is | 1.00 | 2.00 | 0.50 |",
        "| Llama | checkpointing | 2.00 | 2.00 | 1.00 |",
        "| Llama | offload all | 3.00 | 2.00 | 1.50 |",
        "| Llama | checkpointing and NVMe | 4.00 | 2.00 | 2.00 |",
    ]


@pytest.mark.thorough
@pytest.mark.engine
def test_plan_memory_tiny(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    small = ("--models", "Llama", "--layers", "2", "--lengths", "64", "128")
    runs.benchmark("plan_memory.py", *small, "--nvme_path", tmp_path, "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())["bytes"]["Llama"]
    for name in SETTINGS:
        assert all(nbytes > 0 for kind in ("plan", "run") for nbytes in found[kind][name])
