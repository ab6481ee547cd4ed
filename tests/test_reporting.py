"""The report of a run has the fields of each room; a run that has not trained says nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.offloader import ActivationOffloader


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
