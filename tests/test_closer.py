"""Closing in a thread of its own."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from support.disks import until

from ds_tba.closer import Closer
from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.device.accelerator import CpuAccelerator, new_thread
from ds_tba.offloader import ActivationOffloader


def test_a_finalizer_that_asks_for_the_end_starts_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a thread waits for it."""
    config = OffloadConfig(nvme_path=str(tmp_path), io={"backend": "posix", "staging_bytes": 1 << 20})
    offloader = ActivationOffloader(config, AioConfig(), CpuAccelerator())
    with monkeypatch.context() as patch:
        patch.delattr(threading.Thread, "start")
        offloader.close_soon()
    until(lambda: offloader.report().state == "finished", "the end")
    offloader.close()


def test_a_thread_of_ours_asks_for_the_end_and_does_not_wait_for_itself() -> None:
    """A user's finalizer, which the garbage collector runs in a lane, may close the offloader."""
    device, lanes, answers = CpuAccelerator(), list[threading.Thread](), list[bool]()
    closer = Closer(lambda: lanes[0].join(), device)

    def run() -> None:
        closer.ask()
        answers.append(closer.wait(60))

    started_s = time.monotonic()
    lanes.append(new_thread(device, run, "ds_tba-write-0"))
    lanes[0].start()
    assert closer.wait(60) and answers == [True]
    assert time.monotonic() - started_s < 30
