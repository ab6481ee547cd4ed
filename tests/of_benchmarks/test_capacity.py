"""The capacity benchmark: its arithmetic, and that it runs, tiny."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from account import live_at_peak
from capacity import MIB, VARIANTS, account_table, between, line, longest, with_compared
from peers import PEERS
from support import runs

PEAKS = {1024: 600.0 * MIB, 2048: 700.0 * MIB, 4096: 900.0 * MIB}
LENGTHS = [{"sequence": sequence, "peak_bytes": peak} for sequence, peak in PEAKS.items()]


def test_memory_per_token_is_the_slope() -> None:
    assert line(LENGTHS) == pytest.approx((100 * MIB / 1024, 500 * MIB))
    out_of_memory = {"sequence": 8192, "peak_bytes": math.inf}
    assert line([*LENGTHS, out_of_memory]) == pytest.approx((100 * MIB / 1024, 500 * MIB))
    assert math.isnan(line(LENGTHS[:1])[0])


def test_lengths_at_which_something_else_is_the_peak_do_not_flatten_the_line() -> None:
    floor = {"sequence": 512, "peak_bytes": 600 * MIB}
    assert line([floor, *LENGTHS]) == pytest.approx((100 * MIB / 1024, 500 * MIB))
    assert longest([floor, *LENGTHS], 1000 * MIB) == "more than 4,096; by the slope 5,100"


def test_the_longest_says_whether_a_longer_one_was_tried() -> None:
    assert longest(LENGTHS, 800 * MIB) == "2,048"
    assert longest(LENGTHS, 1000 * MIB) == "more than 4,096; by the slope 5,100"
    flat = [{"sequence": 1024, "peak_bytes": 600 * MIB}, {"sequence": 2048, "peak_bytes": 600 * MIB}]
    assert longest(flat, 1000 * MIB) == "more than 2,048"
    assert longest(LENGTHS[:1], 1000 * MIB) == "more than 1,024"
    assert longest(LENGTHS, 100 * MIB) == "0"


@pytest.mark.parametrize(
    ("fails_bytes", "expected"),
    [(900 * MIB, 3072), (math.inf, 3072), (100_000 * MIB, 2112), (800.1 * MIB, 4032)],
    ids=["on the line", "out of memory", "not below the next", "not above the one before"],
)
def test_between(fails_bytes: float, expected: int) -> None:
    assert between({2048: 700.0 * MIB, 4096: fails_bytes}, 2048, 4096, 800 * MIB) == expected


def test_each_variant_runs_after_the_one_that_its_losses_are_compared_with() -> None:
    assert with_compared(["checkpoint_nvme_tiled", "nvme"]) == ["keep", "tiled", "checkpoint_nvme_tiled", "nvme"]
    for one in VARIANTS.values():
        other = VARIANTS[one.compared_with]
        assert one.is_tiled == other.is_tiled
        assert other.block is None and not other.is_checkpointed and not other.peer
    assert {one.peer for one in VARIANTS.values() if one.peer} < set(PEERS)


def test_an_account_has_the_memory_of_the_peak_by_who_made_it() -> None:
    layer = torch.nn.Linear(256, 1024, bias=False)
    inputs = torch.ones(256, 256)

    def step() -> None:
        torch.zeros(MIB, dtype=torch.uint8)  # gone before the peak
        layer(inputs).sin().sum().backward()

    pieces = {key: count for key, count in live_at_peak(step).items() if key[-1] == MIB}
    in_backward = {("SinBackward0", "aten::cos", MIB): 1, ("SinBackward0", "aten::mul", MIB): 1}
    assert pieces == {("Linear", "aten::mm", MIB): 1, **in_backward}


def test_an_account_says_what_its_sum_is_of_the_peak() -> None:
    pieces = {"Linear, aten::mm": {"nbytes": 300 * MIB, "count": 3}}
    pieces |= {name: {"nbytes": MIB, "count": 20} for name in ("one", "another")}
    assert account_table({"peak_bytes": 400 * MIB, "pieces": pieces}, tokens=1 << 18)[2:] == [
        "| Linear, aten::mm | 3 | 300.0 | 300 |",
        "| smaller ones | 40 | 2.0 | 2 |",
        "| sum |  | 302.0 | 302 |",
        "| peak, 0.755 of it in the sum |  | 400.0 | 400 |",
    ]


@pytest.mark.thorough
@pytest.mark.engine
def test_capacity_tiny(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    lengths = ("--timed_sequence", "256", "--shortest_sequence", "512", "--longest_sequence", "1024")
    size = ("--layers", "2", "--rounds", "1", "--headroom_mib", "4096", "--staging_mib", "8")
    variants = ("--variants", "checkpoint_nvme", "checkpoint_nvme_tiled")
    output = runs.benchmark(
        "capacity.py", *lengths, *size, *variants, "--nvme_path", tmp_path, "--json", tmp_path / "json"
    )
    assert "losses equal those of the same arithmetic without ours, in all rounds: yes" in output
    found = json.loads((tmp_path / "json").read_text())
    (only,) = found["rounds"]
    assert [one["sequence"] for one in only["keep"]["lengths"]] == [512, 1024]
    assert only["checkpoint_nvme_tiled"]["report"]["offloaded_bytes"] > 0
    assert only["checkpoint_nvme"]["report"]["offloaded_bytes"] > 0


@pytest.mark.thorough
@pytest.mark.engine
def test_a_published_shape_has_lora_and_the_loss_in_tiles(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lengths = ("--timed_sequence", "256", "--shortest_sequence", "256", "--longest_sequence", "256")
    model = ("--model", "smollm2_135m", "--timed_steps", "2", "--rounds", "1", "--headroom_mib", "4096")
    output = runs.benchmark(
        "capacity.py",
        *lengths,
        *model,
        "--variants",
        "checkpoint_nvme",
        "--nvme_path",
        tmp_path,
        "--json",
        tmp_path / "json",
    )
    assert "losses equal those of the same arithmetic without ours, in all rounds: yes" in output
    (only,) = json.loads((tmp_path / "json").read_text())["rounds"]
    assert only["checkpoint_nvme"]["report"]["offloaded_bytes"] > 0
