"""The benchmarks run, tiny; what they measure is not asserted, except that the soak holds, and sees what is broken."""

from __future__ import annotations

import json
import os
import tempfile
from operator import itemgetter
from pathlib import Path
from typing import Any

import benchmarking
import peers
import pytest
import update_time
from control_group import available
from plan_memory import SETTINGS, slope
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


@pytest.mark.thorough
@pytest.mark.engine
def test_planner_scale(tmp_path: Path) -> None:
    output = runs.benchmark("planner_scale.py", "--rounds", "1", "--counts", "1000", "--json", tmp_path / "json")
    found = json.loads((tmp_path / "json").read_text())
    assert [row["planner"] for row in found["planning_times"]] == ["recompute", "tba", "teraio", "adaptive"] * 2
    assert output.count("| 966 |") == 2


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


@pytest.mark.thorough
@pytest.mark.engine
def test_step_time_with_a_slow_drive(tmp_path: Path) -> None:
    size = ("--width", "256", "--depth", "2", "--sequence", "512", "--batch", "2", "--bf16", "--drive_mbps", "300")
    short = ("--rounds", "1", "--steps", "1", "--warmup", "1", "--staging_mib", "16", "--nvme_path", str(tmp_path))
    variants = ["keep", "nvme", "lz4", "zstd", "rematerialize", "recompute", "save_on_cpu"]
    output = runs.benchmark("step_time.py", *size, *short, "--variants", *variants, "--json", tmp_path / "json")
    assert "losses of all variants and rounds equal: yes" in output
    tables = [table.splitlines()[2:] for table in output.split("| variant |")[1:]]
    steps, drive = ({line.split("|")[1].strip(): line.split("|") for line in one if line[:2] == "| "} for one in tables)
    assert list(steps) == variants
    left = {name: float(drive[name][5]) for name in ("nvme", "lz4", "zstd")}
    assert left["zstd"] < left["lz4"] < left["nvme"] == 1.0
    (only,) = json.loads((tmp_path / "json").read_text())["rounds"]
    assert only["nvme"]["report"]["steps"] == 2
    without_a_drive = only["rematerialize"]["report"]
    assert without_a_drive["rematerialized_bytes"] > 0 and without_a_drive["offloaded_bytes"] == 0


@pytest.mark.thorough
@pytest.mark.engine
def test_update_time(tmp_path: Path) -> None:
    small = "--parameters 5e5 --width 256 --tokens 16 --rounds 2 --steps 1 --sub_group 2e5 --chunk_mib 1 --clip 1"
    output = runs.benchmark("update_time.py", *small.split(), "--json", tmp_path / "json")
    only = json.loads((tmp_path / "json").read_text())
    assert "losses equal step by step: yes" in output and "update of share 0 against stock" in output
    for turns in only["rounds"]:
        assert turns["share 0.5"]["device_share"] > 0 == turns["share 0"]["device_share"]
    losses, report = only["losses"], only["reports"]["interleaved"]
    assert (len(losses["stock"]), len(losses["interleaved"])) == (1 + 2 * 2, 3 * (1 + 2 * 2))
    assert report["steps"] == len(losses["interleaved"]) and not report["stock_steps"]


def test_losses_are_compared_step_by_step() -> None:
    assert update_time.are_equal({"a": [3.0, 2.0, 1.0], "b": [3.0, 2.0]})
    assert not update_time.are_equal({"a": [3.0, 2.0, 1.0], "b": [3.0, 2.5]})


def test_ratios_are_to_the_same_round() -> None:
    rounds = [{"stock": {"s": 1.0}, "x": {"s": 3.0}}, {"stock": {"s": 10.0}, "x": {"s": 5.0}}]
    assert benchmarking.ratios(rounds, "x", itemgetter("s"), "stock") == [0.5, 3.0]
    assert update_time.spread([1.0, 2.0, 3.0, 4.0]) == "2.500 (2.00-3.00) [1.00-4.00]"


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
    text = (tmp_path / "out" / "peers.md").read_text()
    assert all(f"| {name} |" in text for name in rows)
    ran = {name: row for name, row in rows.items() if "error" not in row}
    assert {"torch checkpoint", "torch save_on_cpu", "transformers offload", "TRL OffloadActivations"} < set(ran)
    assert all(row["exact"] for row in ran.values())
    plain = ran["plain"]
    assert plain["moved_bytes"] == 0 and plain["peak_bytes"] == ran["plain again"]["peak_bytes"]
    for name in ("torch save_on_cpu", "TRL OffloadActivations", "ds_tba, placement nvme"):
        assert ran[name]["moved_bytes"] > 0 and ran[name]["peak_bytes"] < plain["peak_bytes"], name
    for row in rows.values():
        assert "error" not in row or "No module named" in row["error"], row
