"""An exception in the middle of our bookkeeping: later steps are exact, or refused with the repair. And a child."""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import Alarm, AlarmError, StoreFactory
from support import runs
from support.doubles import raising, wait_for_writes
from support.offloaders import make

from ds_tba.core.accounts import Notice
from ds_tba.core.cache import TensorCache
from ds_tba.errors import ActivationLostError, ActivationModifiedError, StateError


def signals(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script that ends itself when it hangs."""
    return runs.python(runs.SCRIPTS / "signals.py", *arguments, timeout_s=600)


def test_figures_can_be_read_by_a_handler_that_has_interrupted_the_holder_of_the_lock() -> None:
    """Closing gives up then, and writes the report: it waited for its own thread for ever."""
    cache = TensorCache([], "cpu", 1)
    with cache.saving():
        loss = torch.ones(8, requires_grad=True).sin().sum()
    del loss
    with cache.lock:
        assert cache.ends.left and cache.stats.saved.now > 0
    assert cache.stats.saved.now == 0


def test_an_interrupt_while_figures_are_read_leaves_no_lock_taken(alarm: Alarm) -> None:
    """The next forward waited for ever: a handler may run right after a call has taken the lock."""
    cache, chance = TensorCache([], "cpu", 1), random.Random(0)
    for _ in range(100):
        with suppress(AlarmError):
            alarm(chance.uniform(5e-5, 5e-4))
            for _ in range(1000):  # an exception in a finalizer of PyTorch's would be dropped
                one = set[int]()
                cache.ends.watch(Notice(one, cache.ends.tell))
                del one
                assert cache.stats is cache.meter
            alarm(0)
        assert not cache.lock.locked()


@pytest.mark.long
def test_a_handler_that_closes_and_exits_never_hangs(tmp_path: Path) -> None:
    """At random moments, most of them in the middle of our own code, which may hold any lock."""
    times = 10
    done = signals("closes", tmp_path, times)
    assert done.returncode == 0, done.stderr
    ends = re.findall(r"^END \d+ (.*)$", done.stdout, re.MULTILINE)
    # A handler that raises may leave a lock taken: then closing gives up in time, and the process ends all the same.
    assert len(ends) == times and set(ends) <= {"0 finished", "0 running"}, done.stdout + done.stderr
    assert ends.count("0 finished") > times / 5, done.stdout + done.stderr
    assert "RUN return" in done.stdout
    assert len(re.findall(r"^RUN \w+ \S+ inside", done.stdout, re.MULTILINE)) > times / 2, done.stdout


# Each case has interrupts at other calls; the others are those of ``make test-all``.
@pytest.mark.parametrize(
    ("placement", "every"),
    [
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("nvme", 149), ("host", 149), ("adaptive", 389))),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in (("nvme", 37), ("host", 37), ("adaptive", 97))),
    ],
)
def test_after_an_interrupt_anywhere_the_next_steps_are_exact_or_refused(
    tmp_path: Path, placement: str, every: int
) -> None:
    """A gradient is never wrong, no step waits for ever, and what a scheduler's signal has raised is not lost."""
    done = signals("anywhere", tmp_path, 1, every, placement)
    assert done.returncode == 0, done.stdout + done.stderr
    exact, refused, others = map(int, re.findall(r"\d+", done.stdout.splitlines()[-1]))
    assert others == 0 and exact > 0 and refused > 5, done.stdout + done.stderr


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
@pytest.mark.parametrize("where", ["pack", "unpack", "end_micro_step"])
def test_an_exception_in_our_bookkeeping_poisons_unless_it_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, is_refused: bool, where: str
) -> None:
    cache, x = TensorCache([], "cpu", 1), torch.randn(8, requires_grad=True)
    with cache.saving():
        held = cache.pack(x * 2)
        calls: dict[str, Callable[[], object]] = {
            "pack": lambda: cache.pack(x * 3),
            "unpack": lambda: cache.unpack(cache.forward.micro_step, held),
            "end_micro_step": cache.end_micro_step,
        }
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(cache.ends, "act", raising(error))
            patch.setattr(cache.ends, "left", [1])
            calls[where]()
    if is_refused:
        with pytest.raises(StateError, match=f"{type(error).__name__} came in the middle of .* last checkpoint"):
            cache.refuse_broken()
    else:
        cache.refuse_broken()
    assert not cache.lock.locked()


def test_after_an_interrupt_in_our_bookkeeping_no_forward_and_no_step_goes_on(tmp_path: Path) -> None:
    offloader = make(tmp_path)
    offloader.cache.note_exception(KeyboardInterrupt())
    for call in (offloader.saving, offloader.interleaving, offloader.note_micro_step):
        with pytest.raises(StateError, match="KeyboardInterrupt came in the middle"):
            call()
    offloader.close()
    assert offloader.report().state == "finished"


# ---- a child that is forked between forward and backward ------------------------------------------------------------


def loss_of(x: torch.Tensor) -> torch.Tensor:
    for _ in range(8):
        x = x.sin()
    return x.sum()


@pytest.mark.parametrize("is_written", [False, True])
def test_a_child_is_told_that_it_has_no_lanes_and_its_parent_goes_on(
    make_store: StoreFactory, is_written: bool
) -> None:
    store = make_store()
    cache, x = TensorCache([store], "cpu", 1024), torch.randn(128, 128, requires_grad=True)
    with cache.saving():
        loss = loss_of(x)
    if is_written:
        wait_for_writes(store)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            loss.backward()
        except StateError:
            cache.refuse_broken()  # a forward of its own is not refused for that
            with cache.saving():
                loss_of(x.detach().requires_grad_()).backward()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loss.backward()
    expected = x.detach().clone().requires_grad_()
    loss_of(expected).backward()
    assert torch.equal(x.grad, expected.grad)
