"""``make gpu``: its rehearsal on the CPU, that it goes on where it was interrupted, and what its table says."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import update_time
from gpu import table
from gpu.__main__ import MINUTES, Build, chosen, run
from gpu.llama import WAYS
from gpu.pieces import WAYS as QUICK_WAYS
from gpu.pieces import Piece, longer
from gpu.results import BEGUN, CUT, DONE, FAILED, Results
from gpu.smoke import CONTROL, KEEP, SHOWN, Setting, Smoke
from gpu.table import PARTS, markdown
from support import runs
from support.disks import until

COMMAND = [sys.executable, str(runs.ROOT / "benchmarks" / "gpu")]
NAME = "gpu_rehearsal_2026-01-02"
QUICK = ["probe", "smoke", "headline", "hooks", "update"]


def rehearsal(out: Path, *arguments: str, path: Path | None = None) -> subprocess.Popen[str]:
    """The command; with ``path`` first where modules are looked for."""
    first = {} if path is None else {"PYTHONPATH": f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [*COMMAND, "--rehearse", "--date", "2026-01-02", "--out", str(out), *arguments]
    return subprocess.Popen(
        command, env=runs.environment(**first), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        # Tests started in the background of a shell inherit an ignored SIGINT, and so would the command.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> str:
    with process:
        output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    return output


@pytest.mark.long
@pytest.mark.engine
def test_the_eight_minutes_go_on_where_they_were_interrupted(tmp_path: Path) -> None:
    """Without DeepSpeed, which what comes before the update does not need."""
    out, without_deepspeed = tmp_path / "out", tmp_path / "modules"
    (without_deepspeed / "deepspeed").mkdir(parents=True)
    (without_deepspeed / "deepspeed" / "__init__.py").write_text("raise ImportError('DeepSpeed is not here')")
    path = out / f"{NAME}.json"

    def states() -> dict[str, str]:
        found = json.loads(path.read_text())["pieces"] if path.exists() else {}
        return {name: one["state"] for name, one in found.items()}

    with rehearsal(out, path=without_deepspeed) as interrupted:
        deadline = time.monotonic() + 200
        while states().get("smoke") != BEGUN and time.monotonic() < deadline:
            time.sleep(0.1)
        interrupted.send_signal(signal.SIGINT)
        assert interrupted.wait(120) != 0  # it ends a process that may still import torch, on a busy machine
    assert states() == {"probe": DONE, "smoke": BEGUN}
    before = json.loads(path.read_text())["pieces"]["probe"]
    ended(rehearsal(out, "--pieces", *QUICK[:4], path=without_deepspeed))
    assert states() == dict.fromkeys(QUICK[:4], DONE)
    output = ended(rehearsal(out))
    assert all(f"{name}: done before" in output for name in QUICK[:4])
    results = json.loads(path.read_text())
    found = results["pieces"]
    assert found["probe"] == before and states() == dict.fromkeys(QUICK, DONE)
    smoke = found["smoke"]["found"]
    tried = [(row["dtype"], row["way"]) for row in smoke["rows"]]
    assert tried == [(dtype, way) for dtype in ("bf16", "autocast") for way in (KEEP, CONTROL, *SHOWN)]
    assert all(row["equal"] for row in smoke["rows"]) and not smoke["failed"] and not smoke["untried"]
    check_headline(found["headline"]["found"], QUICK_WAYS)
    text = path.with_suffix(".md").read_text()
    assert text == markdown(results) and text.startswith("# Rehearsal on the CPU, tiny")
    assert {one.name for one in out.iterdir()} == {f"{NAME}.{kind}" for kind in ("json", "md", "log")}


@pytest.mark.thorough
@pytest.mark.engine
def test_the_longer_pieces_rehearse(tmp_path: Path) -> None:
    names = [one.name for one in longer(rehearse=True)]
    ended(rehearsal(tmp_path, "--pieces", *names))
    results = json.loads((tmp_path / f"{NAME}.json").read_text())
    found = results["pieces"]
    assert {name: one["state"] for name, one in found.items()} == dict.fromkeys(names, DONE)
    check_headline(found["length 256"]["found"], [way.name for way in WAYS])
    suite = found["tests test_gpu"]["found"]
    assert suite["counts"]["skipped"] > 10 and set(suite["skipped"]) == {"no CUDA device"} and not suite["failed"]
    assert update_time.are_equal(found["update 300000"]["found"]["losses"])
    (shape,) = found["curve GPT"]["found"]["shapes"]
    points = {one["name"]: one for one in shape["points"]}
    assert points["recompute"]["peak_bytes"] < points["plain"]["peak_bytes"] == points["keep"]["peak_bytes"]
    assert (tmp_path / f"{NAME}.md").read_text() == markdown(results)


def check_headline(found: dict[str, Any], ways: Sequence[str]) -> None:
    rows = {row["name"]: row for row in found["rows"]}
    assert set(rows) == set(ways) and found["base"] == found["equal_to"] == "keep"
    for row in rows.values():
        assert row["state"] == "runs" and row["equal"] is True and row["step_s"] > 0 and row["to_base"], row
        assert row["host_forward_s"] > 0 and row["host_backward_s"] > 0
    peaks = {name: row.get("activation_peak_bytes") for name, row in rows.items()}
    assert peaks["rematerialize"] < peaks["keep"] and peaks["checkpointing"] < peaks["keep"]
    assert rows["checkpointing + nvme"]["report"]["written_bytes"] and rows["host"]["report"]["host_bytes"]


def wrote(found: str, then: str = "sys.exit(1)") -> str:
    return f"import sys, pathlib, time; pathlib.Path(sys.argv[1]).write_text({found!r}); {then}"


@pytest.mark.parametrize(
    ("program", "limit_s", "state", "found"),
    [
        (wrote("[1]", ""), 60, DONE, [1]),
        (wrote("[1]"), 60, DONE, [1]),
        (wrote("[1]", "sys.exit(3)"), 60, FAILED, [1]),
        ("print('it ends here')", 60, FAILED, None),
        (wrote("[1]", "time.sleep(60)"), 3, CUT, [1]),
        (wrote('{"failed": ["this"]}'), 60, FAILED, {"failed": ["this"]}),
        (wrote('{"failed": [], "untried": ["this"]}'), 60, CUT, {"failed": [], "untried": ["this"]}),
    ],
    ids=["done", "with a finding", "failed", "silent", "too long", "says what failed", "no time for all"],
)
def test_how_a_piece_ends(tmp_path: Path, program: str, limit_s: float, state: str, found: Any) -> None:
    results = Results(tmp_path / "results.json", rehearsal=True)
    piece = Piece("one", "probe", ("-c", program, "RESULT"), limit_s=60)
    run(piece, results, tmp_path, limit_s=limit_s, rehearse=True)
    read = Results(tmp_path / "results.json", rehearsal=True)
    assert read.pieces["one"]["state"] == state and read.pieces["one"]["found"] == found
    assert read.is_done("one") == (state == DONE)
    assert (state == DONE) == ("reason" not in read.pieces["one"])


def test_what_a_piece_had_found_outlives_the_run(tmp_path: Path) -> None:
    """A machine that is taken away ends the command without a signal: the next run reads what a piece had written."""
    results = Results(tmp_path / "results.json", rehearsal=True)
    results.begin("smoke", part="smoke")
    results.running.write_text('{"rows": [], "failed": [], "untried": ["one"]}')
    read = Results(tmp_path / "results.json", rehearsal=True)
    assert read.pieces["smoke"]["state"] == CUT and read.pieces["smoke"]["found"]["untried"] == ["one"]
    assert not read.is_done("smoke") and not read.running.exists()
    results.begin("smoke", part="smoke")  # and one that had found nothing yet
    read = Results(tmp_path / "results.json", rehearsal=True)
    assert read.pieces["smoke"]["state"] == CUT and "the run ended in it" in markdown(read.found)


def test_a_rehearsal_and_a_measurement_do_not_share_a_file(tmp_path: Path) -> None:
    Results(tmp_path / "json", rehearsal=True).put("probe", state=DONE)
    with pytest.raises(SystemExit, match=r"is of a rehearsal, this run is a measurement"):
        Results(tmp_path / "json", rehearsal=False)


def test_what_is_worth_most_comes_first_and_takes_eight_minutes() -> None:
    found = chosen(None, rehearse=False)
    assert [one.name for one in found if one.is_quick] == [one.name for one in found[:5]] == QUICK
    assert sum(one.limit_s for one in found[:5]) <= 60 * MINUTES
    assert all(one.limit_s < 600 for one in found)
    assert {one.part for one in found} == set(PARTS)


def test_what_is_built_meanwhile_stands_still_beside_what_is_timed(tmp_path: Path) -> None:
    build = Build(tmp_path, "import time; time.sleep(600)")
    assert build.variables == {"TORCH_EXTENSIONS_DIR": str(tmp_path)}

    def comes_to(wanted: str) -> None:
        assert build._process is not None
        path = Path(f"/proc/{build._process.pid}/stat")
        until(lambda: path.read_text().rpartition(")")[2].split()[0] in wanted, wanted)

    named = {one.name: one for one in chosen(None, rehearse=False)}
    build.allow(named["probe"])
    assert build._process is None
    for name, state in (("smoke", "RSD"), ("headline", "T"), ("hooks", "T"), ("update", "RSD")):
        build.allow(named[name])
        comes_to(state)
    build.end()
    assert build._process is not None and build._process.returncode == -signal.SIGKILL


# ---- the smoke ------------------------------------------------------------------------------------------------------


@pytest.fixture
def smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smoke:
    """One dtype and the host's way only."""
    monkeypatch.setattr("gpu.smoke.SHOWN", {"host": SHOWN["host"]})
    monkeypatch.setattr("gpu.smoke.STEPS", 2)
    paths = {"nvme_path": tmp_path, "result": tmp_path / "result.json"}
    return Smoke(argparse.Namespace(device="cpu", tiny=True, seconds=600.0, **paths))


ONE = Setting("bf16", "default stream")


def test_a_way_that_moved_nothing_has_failed(smoke: Smoke, monkeypatch: pytest.MonkeyPatch) -> None:
    block = {"placement": "host", "host_budget_bytes": 8 << 20, "min_tensor_bytes": 8 << 20}
    monkeypatch.setattr(smoke, "_block", lambda way, _: block if way == "host" else None)
    smoke._run(ONE)
    assert smoke.failed == ["bf16, default stream, host: nothing is shown: no host_bytes"]
    assert [row["failed"] for row in smoke.rows[:2]] == ["", ""]


@pytest.mark.parametrize(
    ("way", "said"), [("host", "losses or gradients differ from step 1 on"), (CONTROL, "two runs without us differ")]
)
def test_other_gradients_are_seen_and_a_control_that_differs_is(
    smoke: Smoke, monkeypatch: pytest.MonkeyPatch, way: str, said: str
) -> None:
    train = smoke._train

    def other(setting: Setting, name: str, block: Any) -> Any:
        steps, report = train(setting, name, block)
        return (steps[:1] + [(loss, "others") for loss, _ in steps[1:]] if name == way else steps), report

    monkeypatch.setattr(smoke, "_train", other)
    smoke._run(ONE)
    (failed,) = smoke.failed
    assert failed.startswith(f"bf16, default stream, {way}: {said}")


def test_an_error_of_one_way_is_its_row_and_want_of_time_is_told(smoke: Smoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "_block", lambda way, _: {"nvme_path": "/nowhere"} if way == "host" else None)
    smoke._run(ONE)
    assert smoke.rows[-1]["failed"].startswith("PathError")
    smoke._ends_s = 0
    smoke._run(ONE)
    assert smoke.untried == [f"bf16, default stream, {way}" for way in (KEEP, CONTROL, "host")]
    found = json.loads(smoke._options.result.read_text())
    assert found["untried"] == smoke.untried and "**PathError" in "".join(table._smoke({"smoke": found}))


# ---- the rest -------------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_nothing_is_measured_without_a_gpu(tmp_path: Path) -> None:
    done = runs.python(COMMAND[1], "--out", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "no CUDA device" in done.stderr and not list(tmp_path.iterdir())
