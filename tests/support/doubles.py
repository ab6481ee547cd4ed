"""Stand-ins: an accelerator that looks asynchronous; backends that fail, or stage on what plays the device; a log."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

import torch

from ds_tba.device.accelerator import Accelerator, aligned_memory, huge_page_memory
from ds_tba.errors import TransferError
from ds_tba.storage.backends import IoHandle, PosixBackend
from ds_tba.storage.nvme import NvmeStore
from ds_tba.storage.space import Part, SwapTicket


def wait_for_writes(store: NvmeStore) -> None:
    """Wait until no write is queued or under way."""
    with store.lock:
        while store.writes and not store.closed:
            store.changed.wait(1.0)


def part_of(ticket: SwapTicket) -> Part:
    """The only part of a storage that is small."""
    (part,) = ticket.parts
    return part


class EventAccelerator(Accelerator):
    """Asynchronous as far as the host can tell: copies are done at once, but their events not before ``done`` is set.

    ``late_device.py`` has a device whose copies really are late.
    """

    is_synchronous = False

    def __init__(self, done: threading.Event | None = None) -> None:
        self.waited: list[object] = []
        self.entered: list[object] = []
        owner = self

        class Event:
            """And stream."""

            def record(self, stream: object) -> None:
                pass

            wait_event = record

            def query(self) -> bool:
                return done is None or done.is_set()

            def synchronize(self) -> None:
                if done is not None and not done.wait(30):
                    raise TimeoutError("a test left its event undone")
                owner.waited.append(self)

        self.new_event = self.new_stream = Event
        self._default = Event()

    def current_stream(self) -> Any:
        return self._default

    def on(self, stream: object) -> AbstractContextManager[None]:
        self.entered.append(stream)
        return nullcontext()

    def pinned(self, nbytes: int) -> torch.Tensor:
        return huge_page_memory(nbytes)  # page-aligned, as pinned memory is


class ScriptedBackend(PosixBackend):
    """posix, with a function called before each transfer that may raise, wait, or ask for the bytes to be dropped.

    Args:
        script: called with the verb and the number of the transfer of that verb, from 0; returns "drop" to pretend
            success without moving a byte, "half" to move the first half and pretend success, as aio does on an error.
    """

    name = "scripted"

    def __init__(self, script: Callable[[str, int], str | None]) -> None:
        self.script = script
        self.counts = {"write": 0, "read": 0}
        self.lock = threading.Lock()

    def open_handle(self, fd: int) -> IoHandle:
        return _ScriptedHandle(self, super().open_handle(fd))


class _ScriptedHandle(IoHandle):
    def __init__(self, backend: ScriptedBackend, inner: IoHandle) -> None:
        self._backend = backend
        self._inner = inner

    def write(self, data: torch.Tensor, offset: int) -> None:
        self._do("write", self._inner.write, data, offset)

    def read(self, data: torch.Tensor, offset: int) -> None:
        self._do("read", self._inner.read, data, offset)

    def _do(self, verb: str, call: Callable[[torch.Tensor, int], None], data: torch.Tensor, offset: int) -> None:
        backend = self._backend
        with backend.lock:
            number = backend.counts[verb]
            backend.counts[verb] += 1
        action = backend.script(verb, number)
        if action == "half":
            data = data[: data.numel() // 2 // 4096 * 4096]
        if action != "drop":
            call(data, offset)


class DeviceBackend(ScriptedBackend):
    """Stages on the device, which plain host memory plays; tells what it handed out and what came back."""

    name = "device"
    stages_on_device = True

    def __init__(self, script: Callable[[str, int], str | None] = lambda verb, number: None) -> None:
        super().__init__(script)
        self.staging: list[int] = []

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        staging = aligned_memory(nbytes, "cpu")
        self.staging.append(staging.data_ptr())
        return staging

    def free_staging(self, staging: torch.Tensor) -> None:
        self.staging.remove(staging.data_ptr())


def fails(verb: str, *, first: int = 0, last: int = 1 << 30) -> Callable[[str, int], None]:
    """A script: transfers of ``verb`` from ``first`` to ``last`` fail as the kernel would make them."""

    def script(what: str, number: int) -> None:
        if what == verb and first <= number <= last:
            raise TransferError(f"{verb} failed: {os.strerror(errno.EIO)}")

    return script


def in_turn(*scripts: Callable[[str, int], None]) -> Callable[[str, int], None]:
    """A script that does what each of these does."""

    def script(verb: str, number: int) -> None:
        for one in scripts:
            one(verb, number)

    return script


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises this, whatever it is called with."""

    def fail(*_: object, **__: object) -> Any:
        raise copy(error)  # one alone would hold the frames in which it was raised

    return fail


def slow(seconds: float, verb: str = "write") -> Callable[[str, int], None]:
    """A script: every transfer of ``verb`` takes at least so long."""

    def script(what: str, number: int) -> None:
        if what == verb:
            time.sleep(seconds)

    return script


class Gate:
    """A script that holds every transfer of ``verb`` until the gate is opened."""

    def __init__(self, verb: str = "write") -> None:
        self.verb = verb
        self.arrived = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self, what: str, number: int) -> None:
        if what == self.verb:
            self.arrived.release()
            if not self.opened.wait(60):
                raise TimeoutError("a test left the gate shut")


class Warnings(logging.Handler):
    """Keeps what our loggers warn of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def new_operation() -> None:
    """Begin another operation of autograd's, for a test that calls the pack hook itself: what others save may leave."""
    torch.zeros((), requires_grad=True).add(1)


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s
