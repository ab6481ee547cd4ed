"""Training loops without DeepSpeed: the same gradients, no room that no key asks for, clear refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import runs
from support.ranks import environment, free_port
from torch import nn

import ds_tba
from ds_tba.errors import BackendUnavailableError, ConfigError, IncompatibleError, StateError
from ds_tba.loop import Offloader

SMALL = {"min_tensor_bytes": 4096, "io": {"staging_bytes": 8 << 20, "swap_file_bytes": 64 << 20}}
SCRIPT = runs.SCRIPTS / "loop.py"


def lines(what: str, directory: Path) -> dict[str, list[str]]:
    """What ``tests/scripts/loop.py`` prints: by the name of each loop its outcome, and the rooms imported by then."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), what, str(directory)],
        env={**os.environ, "PYTHONPATH": str(runs.ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: rest for name, *rest in map(str.split, done.stdout.splitlines())}


def test_loops_without_deepspeed_have_the_same_gradients(tmp_path: Path) -> None:
    found = lines("gradients", tmp_path)
    assert [outcome for outcome, *_ in found.values()] == ["EQUAL"] * 4, found
    for placement in found:
        report = json.loads((tmp_path / placement / "report.json").read_text())
        assert report["state"] == "finished" and report["placement"] == placement
        assert report["steps"] == 10 and report["micro_steps"] == 20
        assert (report["offloaded_bytes"] > 0) == (placement != "keep")
        assert report["peak_saved_bytes"] < report["peak_saved_bytes_without"]
        assert (report["plans"] > 0) == (placement == "adaptive")
        assert any("layers" in one["module"] for one in report["holders"])


def test_a_room_is_loaded_where_its_key_asks_for_it_and_the_core_trains_with_none(tmp_path: Path) -> None:
    """Who reads the core must not have to know plans, recipes, recomputation or explanations."""
    found = lines("rooms", tmp_path)
    assert found == {
        "nvme": ["EQUAL"],
        "host": ["EQUAL"],
        "keep": ["EQUAL"],
        "rematerialize": ["EQUAL", "remat"],
        "timeline": ["EQUAL", "explain", "remat"],
        "adaptive": ["EQUAL", "explain", "plan", "recompute", "remat"],
    }


@pytest.mark.engine
def test_ranks_of_a_loop_agree_on_a_plan(tmp_path: Path) -> None:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "ranks", str(tmp_path)],
            env={**environment(RANK=str(rank), **shared), "PYTHONPATH": str(runs.ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert all("ranks EQUAL" in output for output in outputs), "\n".join(outputs)
    reports = [json.loads((tmp_path / name).read_text()) for name in ("report.json", "report.json.rank1")]
    assert [one["rank"] for one in reports] == [0, 1] and all(one["plans"] for one in reports)


# ---- in this process ------------------------------------------------------------------------------------------------


def loop(offloader: Offloader, model: nn.Module, steps: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        with offloader.saving():
            loss = model(torch.randn(64, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        offloader.step()


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def test_it_is_exported() -> None:
    assert ds_tba.Offloader is Offloader


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({}, r'placement "adaptive" plans for a model: give it, as in ds_tba.Offloader\(model'),
        ({"placement": "keep", "report": {"trace_path": "trace.json"}}, "report.trace_path records a model"),
        ({"placement": "keep", "until_backward": True}, "until_backward is true.*inside of saving"),
        ({"placement": "keep", "enabled": False}, "enabled is false: make no ds_tba.Offloader"),
        ({"placement": "keep", "colour": 1}, r'ds_tba.Offloader\(...\) is refused:\n  "ds_tba.Offloader.colour"'),
        ({"placement": "auto"}, '"ds_tba.Offloader.placement" is "auto"'),
        ({"placement": "cpu"}, "did you mean `host`"),
    ],
)
def test_what_a_loop_cannot_tell_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Offloader(nvme_path=str(tmp_path), **keys)


def test_another_device_is_refused_by_name() -> None:
    with pytest.raises(IncompatibleError, match="the device is meta: without DeepSpeed"):
        Offloader(device="meta", placement="keep")


def test_aio_without_deepspeed_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.git_version_info", None)
    with pytest.raises(BackendUnavailableError, match=r'DeepSpeed cannot be imported.*"backend": "posix"'):
        Offloader(nvme_path=str(tmp_path), placement="nvme", io={"backend": "aio"})


def test_a_closed_one_refuses_the_next_forward() -> None:
    with Offloader(placement="keep") as offloader:
        loop(offloader, model_of())
    with pytest.raises(StateError, match="after close"):
        loop(offloader, model_of())


def test_steps_that_are_not_told_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    with caplog.at_level("WARNING", "ds_tba"), Offloader(placement="keep") as offloader, offloader.saving():
        model(torch.randn(8, 64))
    assert "Offloader.step() was never called" in caplog.text
    caplog.clear()
    with caplog.at_level("WARNING", "ds_tba"), Offloader(placement="keep") as offloader:
        loop(offloader, model)
    assert not caplog.text


def test_memory_that_runs_out_in_the_loop_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    with (
        caplog.at_level("ERROR", "ds_tba"),
        pytest.raises(MemoryError),
        Offloader(model, placement="keep", min_tensor_bytes=1) as offloader,
        offloader.saving(),
    ):
        model(torch.randn(8, 64))
        raise MemoryError
    assert "memory ran out" in caplog.text and "What would help" in caplog.text


def test_an_evaluation_in_the_loop_counts_as_no_micro_step(tmp_path: Path) -> None:
    model = model_of()
    with Offloader(model, nvme_path=str(tmp_path), placement="nvme", **SMALL) as offloader:
        loop(offloader, model)
        with torch.no_grad(), offloader.saving():
            model(torch.randn(8, 64))
        loop(offloader, model)
        report = offloader.report()
    assert (report.steps, report.micro_steps) == (2, 2)
