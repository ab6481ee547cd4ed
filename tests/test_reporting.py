"""The report of a run has the fields of each room; a run that has not trained says nothing."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest
from support.offloaders import make, step

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.offloader import ENGINES, ActivationOffloader


class Room:
    def summary(self) -> dict[str, object]:
        return {"plans": 7}


def test_a_room_gives_its_own_fields(tmp_path: Path) -> None:
    offloader = ActivationOffloader(OffloadConfig(placement="keep"), AioConfig(), CpuAccelerator())
    assert offloader.report().plans == 0
    offloader._reporter.add(Room())
    assert offloader.report().plans == 7 and offloader.report().state == "running"
    offloader.close()
    assert offloader.report().state == "finished"


def test_a_run_that_has_not_trained_has_no_last_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "report.json"
    config = OffloadConfig.model_validate({"placement": "keep", "report": {"path": str(path)}})
    with caplog.at_level(logging.INFO, logger="ds_tba"):
        ActivationOffloader(config, AioConfig(), CpuAccelerator()).close()
    assert not path.exists() and not caplog.messages


def test_whatever_fails_as_it_closes_the_last_report_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that has failed every question to an event raises."""
    path = tmp_path / "report.json"
    offloader = make(tmp_path, placement="nvme", report={"path": str(path)})
    step(offloader)
    close_tiers, told = offloader._tiers.close, list[threading.ExceptHookArgs]()

    def fails() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def fails_after() -> None:
        close_tiers()
        fails()

    offloader.on_close(fails)
    monkeypatch.setattr(offloader.cache, "settle", fails)
    monkeypatch.setattr(offloader._tiers, "close", fails_after)
    monkeypatch.setattr(threading, "excepthook", told.append)
    offloader.close()
    assert json.loads(path.read_text())["state"] == "finished"
    assert offloader.is_closed and offloader not in ENGINES.open
    assert [one.exc_type for one in told] == [RuntimeError]


def test_one_for_which_there_is_no_thread_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(ENGINES.open)

    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("ds_tba.offloader.Closer", refused)
    with pytest.raises(RuntimeError, match="new thread"):
        make(tmp_path)
    assert before == set(ENGINES.open)
