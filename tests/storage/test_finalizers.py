"""Finalizers run wherever the garbage collector does, so that none of them may wait for anything."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from conftest import Alarm, AlarmError
from support import runs
from support.disks import until

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.errors import ActivationLostError, ActivationModifiedError, StateError
from ds_tba.offloader import ActivationOffloader
from ds_tba.remat.store import RematStore
from ds_tba.storage.finalizers import DeferredFinalizers


def signals(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script that ends itself when it hangs."""
    return runs.python(runs.SCRIPTS / "signals.py", *arguments, timeout_s=600)


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

# Python ignores what comes in a finalizer of its own, such as that of a thread in ``threading``'s set of them.
ignored_in_finalizers = pytest.mark.filterwarnings("ignore:(?s).*AlarmError:pytest.PytestUnraisableExceptionWarning")


@ignored_in_finalizers
@pytest.mark.parametrize("leaves", [False, True])
def test_an_interrupt_leaves_no_lock_taken(alarm: Alarm, leaves: bool) -> None:
    """It may come between any two bytecodes of the way in, the critical section and the way out."""
    deferred: DeferredFinalizers[int] = DeferredFinalizers(threading.Lock(), lambda _: None)
    for number in range(2000):
        with suppress(AlarmError):
            alarm(20e-6 + number % 50 * 1e-6)
            while not alarm.has_come:
                if leaves:
                    deferred.leave(0)
                with deferred, deferred.lock:
                    pass
        assert deferred.lock.acquire(timeout=10), f"taken after {number + 1} interrupts"
        deferred.lock.release()


@pytest.mark.long
def test_a_handler_that_closes_and_exits_never_hangs(tmp_path: Path) -> None:
    """At random moments, most of them in the middle of our own code, which may hold any lock."""
    times = 10
    done = signals("closes", tmp_path, times)
    assert done.returncode == 0, done.stderr
    ends = re.findall(r"^END \d+ (.*)$", done.stdout, re.MULTILINE)
    # A handler that raises may leave a lock taken: then closing gives up in time, and the process ends all the same.
    assert len(ends) == times and set(ends) <= {"0 finished", "0 running"}, done.stdout + done.stderr
    assert ends.count("0 finished") > times / 2, done.stdout + done.stderr
    assert "RUN return" in done.stdout
    assert len(re.findall(r"^RUN \w+ \S+ inside", done.stdout, re.MULTILINE)) > times / 2, done.stdout


class Watched:
    pass


def test_an_object_ends_without_a_line_of_ours() -> None:
    """A line is where a signal handler may run; what it raises in a finalizer is reported and lost."""
    acted, lines = list[int](), list[str]()
    deferred: DeferredFinalizers[int] = DeferredFinalizers(threading.Lock(), acted.append)
    one, other = Watched(), Watched()
    other.itself = other  # type: ignore[attr-defined]
    deferred.watch(one, 1)
    deferred.watch(other, 2)

    def trace(frame: FrameType, event: str, _argument: object) -> None:
        lines.append(f"{event} {frame.f_code.co_name}")

    callbacks, gc.callbacks[:] = gc.callbacks[:], []  # those of the tests' libraries
    gc.collect()
    sys.setprofile(trace)
    try:
        del one, other
        gc.collect()
    finally:
        sys.setprofile(None)
        gc.callbacks[:] = callbacks
    assert not [line for line in lines if not line.startswith("c_")]
    assert acted == []
    with deferred, deferred.lock:
        assert acted == [1, 2]


_IN_PYTHON = ("__del__", "WeakKeyDictionary", "WeakValueDictionary", "WeakSet")
_NEVER = ("core", "device", "explain", "plan", "recompute", "remat", "storage")


def runs_python(node: ast.AST) -> bool:
    """Return whether this is a weak reference that calls back, or a finalizer."""
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return name == "weakref.finalize" or (name == "weakref.ref" and len(node.args) > 1)  # type: ignore[attr-defined]


def test_no_class_has_a_finalizer_in_python() -> None:
    """See [Note: No Python in finalizers]: whoever adds one loses what a handler raises in it.

    Nor may a graph that is garbage wait for a lock wherever the collector runs, such as in a lane that has it.
    """
    package = runs.ROOT / "ds_tba"
    found = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if getattr(node, "name", getattr(node, "attr", "")) in _IN_PYTHON
        or (path.relative_to(package).parts[0] in _NEVER and runs_python(node))
    ]
    assert found == []


@pytest.mark.long
@pytest.mark.parametrize("placement", ["nvme", "adaptive"])
def test_a_handler_that_saves_a_checkpoint_and_exits_ends_the_training(tmp_path: Path, placement: str) -> None:
    """A scheduler sends one signal, and SIGKILL after that: what the handler raises must not be lost."""
    done = signals("exits", tmp_path, 30, placement)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOST 0 OTHERS 0", done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize(("placement", "every"), [("nvme", 37), ("host", 37), ("adaptive", 97)])
def test_after_an_interrupt_anywhere_the_next_steps_are_exact_or_refused(
    tmp_path: Path, placement: str, every: int
) -> None:
    """A gradient is never wrong: neither is a step that waits for ever."""
    done = signals("anywhere", tmp_path, 1, every, placement)
    assert done.returncode == 0, done.stdout + done.stderr
    exact, refused, others = map(int, re.findall(r"\d+", done.stdout.splitlines()[-1]))
    assert others == 0 and exact > 5 and refused > 5, done.stdout + done.stderr


# ---- a section that was left half done ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "is_refused"),
    [
        (KeyboardInterrupt(), True),
        (AlarmError(), True),
        (MemoryError(), True),
        (StateError("an illegal move"), True),
        (RuntimeError("a defect"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"), False),
        (ActivationModifiedError("modified in place"), False),
        (ActivationLostError("not read back"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
@pytest.mark.parametrize("where", ["section", "finalizer"])
def test_an_exception_that_leaves_a_section_half_done_is_remembered(
    error: BaseException, is_refused: bool, where: str
) -> None:
    def act(_: int) -> None:
        raise error

    deferred: DeferredFinalizers[int] = DeferredFinalizers(threading.Lock(), act)
    with pytest.raises(type(error)):
        if where == "finalizer":
            deferred.leave(1)
        else:
            with deferred, deferred.lock:
                raise error
    if is_refused:
        with pytest.raises(StateError, match=f"{type(error).__name__} came in the middle of .* last checkpoint"):
            deferred.refuse_broken()
    else:
        deferred.refuse_broken()
    assert not deferred.lock.locked()


def of_cache(offloader: ActivationOffloader) -> DeferredFinalizers[Any]:
    return offloader.cache.finalizers


def of_recipes(offloader: ActivationOffloader) -> DeferredFinalizers[Any]:
    store = offloader.cache.rematerialization
    assert isinstance(store, RematStore)
    return store._deferred


@pytest.mark.parametrize("whose", [of_cache, of_recipes])
def test_after_an_interrupted_section_no_forward_and_no_step_goes_on(
    tmp_path: Path, whose: Callable[[ActivationOffloader], DeferredFinalizers[Any]]
) -> None:
    config = OffloadConfig(nvme_path=str(tmp_path), io={"backend": "posix", "staging_bytes": 1 << 20})
    offloader = ActivationOffloader(config, AioConfig(), CpuAccelerator())
    with pytest.raises(KeyboardInterrupt), whose(offloader), whose(offloader).lock:
        raise KeyboardInterrupt
    for call in (offloader.saving, offloader.interleaving, offloader.note_micro_step):
        with pytest.raises(StateError, match="KeyboardInterrupt came in the middle"):
            call()
    offloader.close()
    assert offloader.report().state == "finished"
