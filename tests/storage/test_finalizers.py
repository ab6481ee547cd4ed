"""Finalizers run wherever the garbage collector does, so that none of them may wait for anything."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from test_store import until

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.offloader import ActivationOffloader
from ds_tba.storage.finalizers import DeferredFinalizers
from ds_tba.storage.swap_path import LaneQueue

HERE = Path(__file__).parents[1]


def script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script that ends itself when it hangs."""
    return subprocess.run(
        [sys.executable, str(HERE / "scripts" / name), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_graphs_that_are_garbage_are_freed_in_lanes(tmp_path: Path) -> None:
    """A lane may free a graph that was dropped without backward while it holds the lock of the store."""
    done = script("garbage_in_lanes.py", tmp_path, 5)
    assert done.returncode == 0, done.stderr
    found = re.search(r"GARBAGE (\d+) steps, 0 of them wrong, (\d+) graphs freed in lanes", done.stdout)
    assert found is not None and int(found[1]) > 10 and int(found[2]) > 10, done.stdout


def test_a_finalizer_that_asks_for_the_end_starts_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a thread waits for it."""
    config = OffloadConfig(nvme_path=str(tmp_path), io={"backend": "posix", "staging_bytes": 1 << 20})
    offloader = ActivationOffloader(config, AioConfig(), CpuAccelerator())
    with monkeypatch.context() as patch:
        patch.delattr(threading.Thread, "start")
        offloader.close_soon()
    until(lambda: offloader.report().state == "finished", "the end")
    offloader.close()


# ---- signal handlers ------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    """Raised by the handler of a signal, as KeyboardInterrupt is."""


def interrupt(repeat: Callable[[], None], after_s: float) -> None:
    """Repeat something until a signal handler raises in the middle of it."""

    def handler(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        while True:
            repeat()
    except Interrupted:
        pass
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_signal_handler_that_raises_leaves_no_lock_taken() -> None:
    """Or closing, at the latest, would wait for ever."""
    chance = random.Random(0)
    store_lock, notes_lock, lane_queue = threading.Lock(), threading.Lock(), LaneQueue()
    notes: DeferredFinalizers[int] = DeferredFinalizers(notes_lock, lambda note: None)

    def take_notes() -> None:
        notes.leave(1)

    def take_lock() -> None:
        with store_lock:
            pass

    def queue_a_task() -> None:
        lane_queue.put(1)
        lane_queue.get()

    for repeat in (take_notes, take_lock, queue_a_task):
        for _ in range(300):
            interrupt(repeat, chance.uniform(0.0001, 0.001))
            assert not notes_lock.locked() and not lane_queue._lock.locked()


def test_a_handler_that_closes_and_exits_never_hangs(tmp_path: Path) -> None:
    """At random moments, most of them in the middle of our own code, which may hold any lock."""
    runs = 10
    done = script("closes_on_signal.py", tmp_path, runs)
    assert done.returncode == 0, done.stderr
    ends = re.findall(r"^END \d+ (.*)$", done.stdout, re.MULTILINE)
    assert ends == ["0 finished"] * runs, done.stdout + done.stderr
    assert len(re.findall(r"^RUN \w+ \S+ inside", done.stdout, re.MULTILINE)) > runs / 2, done.stdout
