"""The lanes of a path: threads that end with their work, whatever comes between."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Alarm, AlarmError

from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.storage.backends.posix import PosixBackend
from ds_tba.storage.path import SwapPath

# Python ignores what comes in a finalizer of its own, such as that of a thread in ``threading``'s set of them.
ignored_in_finalizers = pytest.mark.filterwarnings("ignore:(?s).*AlarmError:pytest.PytestUnraisableExceptionWarning")


def a_path() -> SwapPath:
    return SwapPath(SimpleNamespace(directory="nvme"), 1, 1)  # type: ignore[arg-type]


@ignored_in_finalizers
def test_an_interrupt_leaves_lanes_at_work(alarm: Alarm, tmp_path: Path) -> None:
    lanes, done = a_path().writes, queue.SimpleQueue[int]()

    def put_until_it_comes(seconds: float) -> None:
        """In a function: what a handler raises in a loop passes the ``with`` around that loop in Python 3.13.0."""
        alarm(seconds)
        while not alarm.has_come:
            lanes.put(lambda _: None)

    with (tmp_path / "file").open("wb") as file:
        lanes.handles.append(PosixBackend().open_handle(file.fileno()))
        lanes.start("lane", CpuAccelerator())
        try:
            for number in range(1000):
                with suppress(AlarmError):
                    put_until_it_comes(20e-6 + number % 50 * 1e-6)
                lanes.put(lambda _, number=number: done.put(number))
                assert done.get(timeout=10) == number, f"after {number + 1} interrupts"
        finally:
            lanes.stop()
        assert lanes.end(time.monotonic() + 10.0)


def test_an_interrupted_start_leaves_no_lane(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A handler may raise while whoever starts a lane waits for its first sign of life."""
    start, lanes = threading.Thread.start, a_path().writes

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if len(lanes._threads) > 1:
            raise AlarmError

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with (tmp_path / "file").open("wb") as file:
        lanes.handles += [PosixBackend().open_handle(file.fileno()) for _ in range(3)]
        with suppress(AlarmError):
            lanes.start("interrupted-lane", CpuAccelerator())
        lanes.stop()
        assert lanes.end(time.monotonic() + 10.0)
    assert not [one for one in threading.enumerate() if one.name == "interrupted-lane"]


def test_a_lane_that_runs_late_after_an_interrupted_start_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lanes, made = a_path().writes, list[threading.Thread]()

    def interrupted(thread: threading.Thread) -> None:
        made.append(thread)  # the system runs it when all is over
        raise AlarmError

    with monkeypatch.context() as patch, (tmp_path / "file").open("wb") as file:
        patch.setattr(threading.Thread, "start", interrupted)
        lanes.handles += [PosixBackend().open_handle(file.fileno())]
        with suppress(AlarmError):
            lanes.start("late-lane", CpuAccelerator())
        lanes.stop()
        assert lanes.end(time.monotonic() + 10.0)
    made[0].start()
    made[0].join(10.0)
    assert not made[0].is_alive()


def test_a_lane_that_fails_ends_and_says_why(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    path = a_path()
    lanes = path.reads

    def fails(_: object) -> None:
        raise MemoryError

    with (tmp_path / "file").open("wb") as file:
        lanes.handles.append(PosixBackend().open_handle(file.fileno()))
        lanes.start("lane", CpuAccelerator())
        lanes.put(fails)
        assert lanes.end(time.monotonic() + 10.0)
    assert isinstance(lanes.error, MemoryError) and path.failure == "MemoryError"
    assert caplog.messages == ["nvme: a lane failed (MemoryError); from here on activations stay in memory instead"]
