"""The capacity benchmark: its arithmetic, and that it runs, tiny."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from account import live_at_peak
from capacity import MIB, between, line, longest
from support import runs

PEAKS = {1024: 600.0 * MIB, 2048: 700.0 * MIB, 4096: 900.0 * MIB}
LENGTHS = [{"sequence": sequence, "peak_bytes": peak} for sequence, peak in PEAKS.items()]


@pytest.mark.parametrize("more", [[], [(8192, math.inf)], [(512, 600 * MIB)]], ids=["", "out of memory", "a floor"])
def test_memory_per_token_is_the_slope_and_what_else_is_the_peak_does_not_flatten_it(more: list[Any]) -> None:
    lengths = [*LENGTHS, *({"sequence": sequence, "peak_bytes": peak} for sequence, peak in more)]
    assert line(lengths) == pytest.approx((100 * MIB / 1024, 500 * MIB))


def test_the_longest_says_whether_a_longer_one_was_tried() -> None:
    assert math.isnan(line(LENGTHS[:1])[0])
    assert longest(LENGTHS, 800 * MIB) == "2,048"
    assert longest(LENGTHS, 1000 * MIB) == "more than 4,096; by the slope 5,100"
    assert longest(LENGTHS[:1], 1000 * MIB) == "more than 1,024"
    assert longest(LENGTHS, 100 * MIB) == "0"


@pytest.mark.parametrize(
    ("fails_bytes", "expected"),
    [(900 * MIB, 3072), (math.inf, 3072), (100_000 * MIB, 2112), (800.1 * MIB, 4032)],
    ids=["on the line", "out of memory", "not below the next", "not above the one before"],
)
def test_between(fails_bytes: float, expected: int) -> None:
    assert between({2048: 700.0 * MIB, 4096: fails_bytes}, 2048, 4096, 800 * MIB) == expected


def test_an_account_has_the_memory_of_the_peak_by_who_made_it() -> None:
    layer = torch.nn.Linear(256, 1024, bias=False)
    inputs = torch.ones(256, 256)

    def step() -> None:
        torch.zeros(MIB, dtype=torch.uint8)  # gone before the peak
        layer(inputs).sin().sum().backward()

    pieces = {key: count for key, count in live_at_peak(step).items() if key[-1] == MIB}
    in_backward = {("SinBackward0", "aten::cos", MIB): 1, ("SinBackward0", "aten::mul", MIB): 1}
    assert pieces == {("Linear", "aten::mm", MIB): 1, **in_backward}


def benched(tmp_path: Path, *options: str) -> dict[str, Any]:
    """Run the benchmark, and return what its only round has of each variant."""
    where = ("--rounds", "1", "--headroom_mib", "4096", "--nvme_path", tmp_path, "--json", tmp_path / "json")
    output = runs.benchmark("capacity.py", *options, *where)
    assert "losses equal those of the same arithmetic without ours, in all rounds: yes" in output
    (only,) = json.loads((tmp_path / "json").read_text())["rounds"]
    assert all(one["report"]["offloaded_bytes"] > 0 for name, one in only.items() if name.startswith("checkpoint_nvme"))
    return only


@pytest.mark.thorough
@pytest.mark.engine
def test_capacity_tiny(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    lengths = ("--timed_sequence", "256", "--shortest_sequence", "512", "--longest_sequence", "1024")
    variants = ("--variants", "checkpoint_nvme", "checkpoint_nvme_tiled")
    only = benched(tmp_path, *lengths, "--layers", "2", "--staging_mib", "8", *variants)
    assert [one["sequence"] for one in only["keep"]["lengths"]] == [512, 1024]
    assert only.keys() > {"checkpoint_nvme", "checkpoint_nvme_tiled"}


@pytest.mark.thorough
@pytest.mark.engine
def test_a_published_shape_has_lora_and_the_loss_in_tiles(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lengths = ("--timed_sequence", "256", "--shortest_sequence", "256", "--longest_sequence", "256")
    model = ("--model", "smollm2_135m", "--timed_steps", "2", "--variants", "checkpoint_nvme")
    assert "checkpoint_nvme" in benched(tmp_path, *lengths, *model)
