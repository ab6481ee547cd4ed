"""The benchmarks run, tiny; what they measure is not asserted, except that the soak holds, and sees what is broken."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
import update_time
from account import live_at_peak
from capacity import longest
from control_group import available
from soaking.meters import disk_bytes
from support import runs

MIB = 1 << 20


# By what is sabotaged, the checks that must fail.
BROKEN = {
    "flip": {"losses, gradients, parameters equal"}, "deaf": {"all steps done, errors as due"},
    "leak": {"memory at rest", "open files at rest", "objects of ours at rest",
             "records, staging and extents given back between steps"},
}  # fmt: skip


def soak(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of a short soak, which leaves nothing behind but that JSON."""
    target = tmp_path / "json"
    size = ("--steps", "25", "--segment_steps", "5", "--sample_every", "5")
    where = ("--nvme_path", tmp_path, "--json", target)
    done = runs.python(runs.ROOT / "benchmarks" / "soak.py", *size, *arguments, *where)
    assert target.exists(), done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["json"]
    return done.returncode, json.loads(target.read_text())


def failed(result: dict[str, Any]) -> set[str]:
    return {one["check"] for one in result["verdicts"] if not one["held"]}


@pytest.mark.thorough
@pytest.mark.engine
def test_soak(tmp_path: Path) -> None:
    status, result = soak(tmp_path)
    assert not failed(result), [one for one in result["verdicts"] if not one["held"]]
    assert status == 0 and result["held"]
    offload = result["runs"]["offload"]
    assert offload["sums"]["written_bytes"] and offload["faults"] and not result["runs"]["plain"]["sums"]


@pytest.mark.thorough
@pytest.mark.engine
@pytest.mark.parametrize("sabotage", BROKEN)
def test_a_broken_soak_fails(tmp_path: Path, sabotage: str) -> None:
    status, result = soak(tmp_path, "--sabotage", sabotage)
    assert status == 1 and not result["held"]
    assert BROKEN[sabotage] <= failed(result)


def test_files_without_a_name_count_as_disk(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with tempfile.TemporaryFile(dir=tmp_path / "in") as file:
        os.posix_fallocate(file.fileno(), 0, MIB)
        assert disk_bytes(tmp_path / "in") == MIB
        assert disk_bytes(tmp_path / "i") == 0
    assert disk_bytes(tmp_path / "in") == 0


SHORT = "--rounds 1 --nvme_path . --variants"
# Scripts in their smallest form: their options, and the modules that they need.
TINY: dict[str, tuple[str, ...]] = {
    "planner_scale.py": ("--rounds 1 --counts 1000",),
    "step_time.py": (
        f"--width 256 --depth 2 --sequence 512 --batch 2 --bf16 --drive_mbps 300 --steps 1 --warmup 1 --staging_mib 16 "
        f"{SHORT} keep nvme lz4 zstd rematerialize recompute save_on_cpu",
    ),
    "update_time.py": (
        "--parameters 5e5 --width 256 --tokens 16 --rounds 2 --steps 1 --sub_group 2e5 --chunk_mib 1 --clip 1",
    ),
    "plan_memory.py": ("--models Llama --layers 2 --lengths 64 128 --nvme_path .", "transformers"),
    "capacity.py": (
        "--headroom_mib 4096 --timed_sequence 256 --shortest_sequence 512 --longest_sequence 1024 --layers 2 "
        f"--staging_mib 8 {SHORT} checkpoint_nvme checkpoint_nvme_tiled", "transformers",
    ),
    "capacity.py, a published shape with LoRA": (
        "--headroom_mib 4096 --timed_sequence 256 --shortest_sequence 256 --longest_sequence 256 --timed_steps 2 "
        f"--model smollm2_135m {SHORT} checkpoint_nvme", "peft",
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.engine
@pytest.mark.parametrize("name", TINY)
def test_a_script_runs_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It ends with status 0, which it does not where losses differ, and each way does what its name says."""
    options, *modules = TINY[name]
    for module in modules:
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    runs.benchmark(name.partition(",")[0], *options.split(), "--json", tmp_path / "json")
    first, *_ = json.loads((tmp_path / "json").read_text()).get("rounds", [{}])
    for way, found in first.items():
        assert "nvme" not in way or found["report"]["offloaded_bytes"] > 0
        assert way != "rematerialize" or found["report"]["rematerialized_bytes"] > 0
        assert way != "share 0.5" or found["device_share"] > 0


def test_at_scale(tmp_path: Path) -> None:
    """One node of 8 GPUs and two: what a rank gets does not depend on nodes, and a slow drive asks for another plan."""
    output = runs.benchmark("at_scale.py", "--nodes", "2", "--drives", "2", "--json", tmp_path / "json")
    assert output.endswith("1 nodes begin with the plan of 2: yes\n")
    for one, two in (found["rows"] for found in json.loads((tmp_path / "json").read_text())["found"]):
        same = ("write_bytes_per_s", "step_s", "peak_bytes", "written_bytes", "lost_s", "changes")
        assert [one[name] for name in same] == [two[name] for name in same] and two["ranks"] == 16
        assert not one["written_bytes"] or (one["slow_step_s"] > one["step_s"] and one["changes"])


def test_the_page_of_scale_has_figures_that_the_command_printed() -> None:
    printed = (runs.ROOT / "benchmarks/results/at_scale_simulated_202611.md").read_text()
    text = (runs.ROOT / "docs/guides/at_scale.md").read_text()
    page = text.partition("## 2, 4 and 8 drives")[2].partition("\n## ")[0]
    told = [line.split(" | ")[1:] for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(told) >= 8
    for cells in told:  # of a node's 2, 4 and 8 drives; the same with 64 nodes
        assert f" | {' | '.join(cells).removesuffix(' |')} |" in printed, cells


def test_losses_are_compared_step_by_step() -> None:
    assert update_time.are_equal({"a": [3.0, 2.0, 1.0], "b": [3.0, 2.0]})
    assert not update_time.are_equal({"a": [3.0, 2.0, 1.0], "b": [3.0, 2.5]})


@pytest.mark.thorough
@pytest.mark.engine
def test_in_a_small_control_group_only_ours_finishes(tmp_path: Path) -> None:
    """Others are killed, ours is bit-equal."""
    pytest.importorskip("transformers")
    if why_not := available():
        pytest.skip(why_not)
    size = ("--layers", "64", "--width", "64", "--rows", "16", "--steps", "2", "--nvme_path", tmp_path)
    output = runs.benchmark("control_group.py", *size)
    assert output.count("killed by the kernel") == 3 and "finishes, losses equal" in output


@pytest.mark.thorough
def test_peers_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curves.turns.STEPS_AT_REST", 1)
    (tmp_path / "nvme").mkdir()
    options = ["--tiny", "--rounds", "2", "--steps", "1", "--nvme_path", str(tmp_path / "nvme")]
    assert peers.main([*options, "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "peers.json").read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert set(rows) > set(peers.PEERS)
    ran = {name: row for name, row in rows.items() if "error" not in row}
    assert all("No module named" in row["error"] for name, row in rows.items() if name not in ran)
    assert all(row["exact"] for row in ran.values())
    for name in ("torch save_on_cpu", "TRL OffloadActivations", "ds_tba, placement nvme"):
        assert ran[name]["moved_bytes"] > 0 and ran[name]["peak_bytes"] < ran["plain"]["peak_bytes"], name


# ---- the longest sequence of the benchmark of capacity --------------------------------------------------------------

LENGTHS = [{"sequence": 1024 << doubled, "peak_bytes": mib * MIB} for doubled, mib in enumerate((600.0, 700.0, 900.0))]


def test_the_longest_says_whether_a_longer_one_was_tried() -> None:
    assert longest(LENGTHS, 800 * MIB) == "2,048"
    assert longest(LENGTHS, 1000 * MIB) == "more than 4,096; by the slope 5,100"
    assert longest(LENGTHS[:1], 1000 * MIB) == "more than 1,024"
    assert longest(LENGTHS, 100 * MIB) == "0"


def test_an_account_has_the_memory_of_the_peak_by_who_made_it() -> None:
    layer = torch.nn.Linear(256, 1024, bias=False)
    inputs = torch.ones(256, 256)

    def step() -> None:
        torch.zeros(MIB, dtype=torch.uint8)  # gone before the peak
        layer(inputs).sin().sum().backward()

    pieces = {key: count for key, count in live_at_peak(step).items() if key[-1] == MIB}
    in_backward = {("SinBackward0", "aten::cos", MIB): 1, ("SinBackward0", "aten::mul", MIB): 1}
    assert pieces == {("Linear", "aten::mm", MIB): 1, **in_backward}
