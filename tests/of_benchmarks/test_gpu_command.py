"""``make gpu``: its rehearsal on the CPU, that it goes on where it was interrupted, and what its table says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gpu.__main__ import chosen, run
from gpu.llama import WAYS, Shape
from gpu.pieces import TOKENS, Piece, pieces
from gpu.results import CUT, DONE, FAILED, Results
from gpu.table import longest, markdown
from support import runs

COMMAND = [sys.executable, str(runs.ROOT / "benchmarks" / "gpu")]
NOT_ON_A_CPU = {"hf offload", "trl offload", "deepspeed cpu_checkpointing"}
GIB = 1 << 30


def rehearsal(out: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "--rehearse", "--date", "2026-01-02", "--out", str(out), *arguments],
        env=runs.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.thorough
@pytest.mark.engine
def test_the_rehearsal_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "gpu_rehearsal_2026-01-02.json"
    with rehearsal(tmp_path) as interrupted:
        deadline = time.monotonic() + 120
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        interrupted.send_signal(signal.SIGINT)
        assert interrupted.wait(30) != 0
    before = json.loads(path.read_text())["pieces"]
    assert list(before) == ["facts"] and before["facts"]["state"] == DONE
    with rehearsal(tmp_path) as going_on:
        output, _ = going_on.communicate(timeout=240)
    assert going_on.returncode == 0, output
    results = json.loads(path.read_text())
    found = results["pieces"]
    assert found["facts"] == before["facts"] and "facts: done before" in output
    assert {name: one["state"] for name, one in found.items()} == {one.name: DONE for one in pieces(rehearse=True)}
    assert {one["part"] for one in found.values()} == set("abcde")
    check_facts(found["facts"]["found"])
    check_headline(found["headline 256"]["found"])
    suite = found["tests test_gpu"]["found"]
    assert suite["counts"]["skipped"] > 10 and set(suite["skipped"]) == {"no CUDA device"} and not suite["failed"]
    (update,) = found["update 300000"]["found"]["results"]
    assert {name for turns in update["rounds"] for name in turns} == {"stock", "share 0", "share 0.5", "null"}
    table = path.with_suffix(".md").read_text()
    assert table == markdown(results) and table.startswith("# Rehearsal on the CPU, tiny")
    assert all(f"| {way.title} |" in table for way in WAYS)


def check_facts(found: dict[str, Any]) -> None:
    assert set(found["copies"]["GB/s"]["registered"]) == {"out", "in", "both", "both / (out + in)"}
    assert set(found["bits"]["differ"].values()) == {0}
    assert found["pinning"]["huge pages"]["is_pinned"]
    assert found["forks"]["as the package pins"]["old bytes that the device read"] == 0


def check_headline(found: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == [way.name for way in WAYS] and found["base"] == found["equal_to"] == "keep"
    for name, row in rows.items():
        if name in NOT_ON_A_CPU:
            assert row["state"] == "failed" and row["reason"] and "step_s" not in row
            continue
        assert row["state"] == "runs" and row["equal"] is True and row["step_s"] > 0 and row["to_base"], row
    peaks = {name: row.get("activation_peak_bytes") for name, row in rows.items()}
    assert peaks["nvme"] < peaks["rematerialize"] < peaks["keep"] and peaks["checkpointing"] < peaks["keep"]
    # Of what is saved: on a CPU the memory of the host tier, which plans fill first, is memory of the device, too.
    saved = [rows[name]["report"]["step_peak_saved_bytes"] for name in ("adaptive 0.25", "adaptive 0.5")]
    assert saved[0] < saved[1] < peaks["keep"]
    assert rows["nvme"]["report"]["written_bytes"] and rows["host"]["report"]["host_bytes"]


def a_piece(program: str, limit_s: float = 60) -> Piece:
    return Piece("one", "a", ("-c", program, "RESULT"), limit_s=limit_s)


@pytest.mark.parametrize(
    ("program", "limit_s", "state", "found"),
    [
        ("import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('[1]')", 60, DONE, [1]),
        ("import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('[1]'); sys.exit(1)", 60, DONE, [1]),
        ("import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('[1]'); sys.exit(3)", 60, FAILED, [1]),
        ("print('it ends here')", 60, FAILED, None),
        (
            "import sys, pathlib, time; pathlib.Path(sys.argv[1]).write_text('[1]'); time.sleep(60)", 3, CUT, [1],
        ),
    ],
    ids=["done", "with a finding", "failed", "silent", "too long"],
)  # fmt: skip
def test_how_a_piece_ends(tmp_path: Path, program: str, limit_s: float, state: str, found: Any) -> None:
    results = Results(tmp_path / "json", rehearsal=True)
    run(a_piece(program), results, tmp_path, limit_s=limit_s, rehearse=True)
    read = Results(tmp_path / "json", rehearsal=True)
    assert read.pieces["one"]["state"] == state and read.pieces["one"]["found"] == found
    assert read.is_done("one") == (state == DONE)
    assert (state == DONE) == ("reason" not in read.pieces["one"])
    assert [path.name for path in tmp_path.iterdir()] == ["json"]


def test_a_rehearsal_and_a_measurement_do_not_share_a_file(tmp_path: Path) -> None:
    Results(tmp_path / "json", rehearsal=True).put("facts", state=DONE)
    with pytest.raises(SystemExit, match=r"is of a rehearsal, this run is a measurement"):
        Results(tmp_path / "json", rehearsal=False)


def test_pieces_are_named_by_how_they_begin() -> None:
    assert [one.name for one in chosen(["headline"], rehearse=False)] == [f"headline {tokens}" for tokens in TOKENS]
    assert [one.name for one in chosen(["update 1e", "facts"], rehearse=False)] == ["facts", "update 1e+09"]
    assert [one.part for one in chosen(None, rehearse=False)] == sorted(
        one.part for one in chosen(None, rehearse=False)
    )
    assert all(one.limit_s < 600 for one in chosen(None, rehearse=False))
    with pytest.raises(SystemExit, match=r"'heading': there are 'facts'"):
        chosen(["heading"], rehearse=False)


@pytest.mark.engine
def test_nothing_is_measured_without_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--out", str(tmp_path)],
        env=runs.environment(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2 and "no CUDA device" in done.stderr and not list(tmp_path.iterdir())


def test_as_many_layers_as_fit() -> None:
    shape = Shape()
    assert shape.layer_parameters == pytest.approx(218.1e6, rel=0.001)  # of Llama-3-8B, less its two norms
    assert [shape.layers_for(32768, memory * GIB) for memory in (20, 80, 140, 1000)] == [2, 8, 14, 32]


def a_length(tokens: int, layers: int, **states: tuple[str, str]) -> dict[str, Any]:
    rows = [{"name": name, "title": name, "state": state, "reason": why} for name, (state, why) in states.items()]
    return {"tokens": tokens, "shape": {"layers": layers}, "rows": rows}


def test_the_longest_sequence_says_what_ended_it_and_layers_do_not_mix() -> None:
    runs_, full = ("runs", ""), ("out of memory", "OutOfMemoryError: 1 GiB")
    lengths = [
        a_length(4, 8, keep=runs_, ours=runs_),
        a_length(8, 8, keep=full, ours=runs_),
        a_length(16, 2, keep=runs_),
    ]
    lines = list(longest(lengths))
    assert "| keep | 4 | 8: out of memory, OutOfMemoryError: 1 GiB |" in lines
    assert "| ours | 8 |  |" in lines and "| keep | 16 |  |" in lines
    assert "8 layers, tried: 4, 8 tokens" in lines and "2 layers, tried: 16 tokens" in lines
