"""Processes that train while a fault strikes, forked off a server that has everything imported: it takes milliseconds.

The server runs with ``faults.cpp`` preloaded, so that a victim can have its own system calls fail; it can also have few
descriptors, little lockable memory, or no privileges. A victim tells where it is and waits for a word at the moments
that its job names, so that a test can break the drive beneath it there. It ends itself, with the stacks of its threads,
when it hangs.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import gc
import itertools
import logging
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch

from ds_tba.config import AioConfig
from ds_tba.errors import DsTbaError
from ds_tba.offloader import ActivationOffloader
from ds_tba.storage import path as swap_file
from ds_tba.storage.backends import aio
from support import hazards, offloaders, runs
from support.doubles import Warnings, wait_for_writes

HANG_S = 60.0
_CAPABILITY_VERSION_3, _CAP_IPC_LOCK = 0x20080522, 14  # linux/capability.h
_SET_PARENT_DEATH_SIGNAL = 1  # linux/prctl.h
SHIM_SOURCE = Path(__file__).with_name("faults.cpp")
_CALLS = ("write", "read", "allocate", "op_write", "op_read")
_ACTIONS = ("none", "fail", "half", "nothing", "drop", "slow")


class NoVictims(Exception):
    """This machine cannot start the server."""


@dataclass(frozen=True)
class Fault:
    """The fate of the requests of ``call`` from number ``first`` to ``last``.

    Args:
        call: ``write``, ``read`` or ``allocate``; of DeepSpeed's op ``op_write`` or ``op_read``, where one block is one
            request, which ``drop`` and ``slow`` can strike.
        action: ``fail`` with ``code``, ``half`` of the bytes, ``nothing`` moved (end of file), ``drop`` with success,
            ``slow`` by ``code`` seconds.
    """

    call: str
    action: str
    code: int = errno.EIO
    first: int = 0
    last: int = 1 << 40


@dataclass(frozen=True)
class Job:
    """The acts of a victim.

    Args:
        at_start: faults while the offloader is made; ``faults`` follow them.
        grow_step_bytes: in what steps the swap file grows; None for the product's own, which is large.
        free_descriptors_at_start: how many files it may still open then; ``free_descriptors`` follows.
        lockable_bytes: its limit of locked memory, which root's privilege then does not lift.
        pauses: where it waits for a word: ``forward N`` (before it) and ``backward N`` (before it).
        forever: it trains until it is killed; else every backward begins when all is written.
    """

    directory: str
    backend: str | None = "posix"
    layers: int = 12  # each saves a storage of 4 MiB
    steps: int = 2
    at_start: list[Fault] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    grow_step_bytes: int | None = None
    free_descriptors_at_start: int | None = None
    free_descriptors: int | None = None
    lockable_bytes: int | None = None
    pauses: tuple[str, ...] = ()
    forever: bool = False


@dataclass(frozen=True)
class Outcome:
    """How it went."""

    error: str | None  # the exception that ended it, or None where every gradient was equal
    message: str  # the text of the error
    log: list[str]  # what ds_tba logged, warnings and worse
    start_line: str
    report: dict[str, Any]
    live_records: int  # saved storages that were still held once the graph was gone
    strikes: dict[str, int] = field(default_factory=dict)  # requests of each call since the faults were set
    stderr: str = ""  # what else it wrote, such as DeepSpeed's op

    @property
    def said(self) -> str:
        """The one warning."""
        (message,) = self.log
        return message


# ---- the test's side ------------------------------------------------------------------------------------------------


class Victim:
    def __init__(self, connection: Connection, stderr: Path) -> None:
        self._connection = connection
        self._stderr = stderr
        self._ended = False
        self.pid: int = self._next()

    def wait_until(self, pause: str) -> None:
        told = self._next()
        assert told == pause, told

    @property
    def is_silent(self) -> bool:
        """Return whether it has not come to its next pause, or end."""
        return not self._connection.poll()

    def go_on(self) -> None:
        self._connection.send("go")

    def outcome(self) -> Outcome:
        told = self._next()
        assert isinstance(told, Outcome), told
        self._ended = True
        self._connection.close()
        return replace(told, stderr=self._stderr.read_text())

    def end(self) -> None:
        """SIGKILL, if it is running still."""
        if not self._ended:
            self._ended = True
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.end()
        with suppress(EOFError, ConnectionResetError):
            while True:
                self._connection.recv()  # the kernel closes it with the process's other files
        self._connection.close()

    def _next(self) -> Any:
        with suppress(EOFError, ConnectionResetError):
            if self._connection.poll(HANG_S + 10):
                return self._connection.recv()
        raise AssertionError(f"the victim died or hangs:\n{self._stderr.read_text()[-4000:]}")


class Victims:
    """The server's client."""

    def __init__(self, address: str, directory: Path) -> None:
        self._address = address
        self._directory = directory
        self._running: list[Victim] = []
        self._count = 0

    def start(self, job: Job) -> Victim:
        self._count += 1
        stderr = self._directory / f"stderr{self._count}"
        stderr.touch()
        connection = Client(self._address, "AF_UNIX")
        connection.send((job, str(stderr)))
        self._running.append(Victim(connection, stderr))
        return self._running[-1]

    def end(self) -> None:
        """End what a test has left running."""
        while self._running:
            self._running.pop().end()

    def run(self, job: Job) -> Outcome:
        return self.start(job).outcome()


@contextmanager
def serving(directory: Path) -> Iterator[Victims]:
    """A server; ends with the context, or with this process.

    Raises:
        NoVictims: there is no compiler for ``faults.cpp``.
    """
    shim = directory / "faults.so"
    try:
        subprocess.run(
            ["g++", "-O1", "-shared", "-fPIC", "-o", str(shim), str(SHIM_SOURCE), "-ldl"], check=True, text=True,
            capture_output=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoVictims(f"{SHIM_SOURCE.name} does not compile: {getattr(error, 'stderr', error)}") from error
    address = f"\0ds_tba-victims-{os.getpid()}"
    environment = runs.environment(LD_PRELOAD=str(shim), PYTHONPATH=runs.import_path())
    with (
        (directory / "stderr").open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", f"from support.victims import serve; serve({address!r})"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
        ) as server,
    ):
        assert server.stdout is not None
        if not server.stdout.readline():
            raise RuntimeError(f"the server does not start: {(directory / 'stderr').read_text()[-2000:]}")
        try:
            yield Victims(address, directory)
        finally:
            server.kill()


# ---- the victim's side ----------------------------------------------------------------------------------------------


def serve(address: str) -> None:
    """Fork a victim for every connection, until this process is killed, or its parent ends."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if aio.is_built():
        aio.AioBackend(AioConfig())  # loads the op
    listener = Listener(address, "AF_UNIX", backlog=16)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the dead
    gc.freeze()  # victims collect garbage: not among what was imported before the fork
    print("ready", flush=True)
    while True:
        connection = listener.accept()
        if os.fork() == 0:
            listener.close()
            _live(connection)
        connection.close()


def _live(connection: Connection) -> None:
    job, path = connection.recv()
    stderr = os.open(path, os.O_WRONLY)
    os.dup2(stderr, 1)
    os.dup2(stderr, 2)
    os.close(stderr)
    faulthandler.enable()
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.send(os.getpid())
    try:
        connection.send(_outcome(job, connection))
    except BaseException:  # noqa: BLE001 - whatever ends it, it goes on no further
        traceback.print_exc()
        faulthandler.dump_traceback()
        os._exit(1)
    os._exit(0)


def _outcome(job: Job, connection: Connection) -> Outcome:
    log = Warnings()
    logging.getLogger("ds_tba").addHandler(log)
    io = {"backend": job.backend, "staging_bytes": 16 << 20}
    if job.lockable_bytes is not None:
        _limit_locked_memory(job.lockable_bytes)
    if job.grow_step_bytes is not None:
        swap_file.GROW_STEP_BYTES = job.grow_step_bytes
    _set(job.at_start)
    _leave_descriptors(job.free_descriptors_at_start)
    try:
        # Every byte to the drive.
        offloader = offloaders.make(Path(job.directory), placement="nvme", rematerialize=False, io=io)
    except DsTbaError as error:
        return Outcome(type(error).__name__, str(error), log.texts, "", {}, 0)
    finally:
        _leave_descriptors(None)
    _set([Fault(call, "none") for call in _CALLS])
    _set(job.faults)
    _leave_descriptors(job.free_descriptors)
    error, message = _train(job, offloader, connection)
    gc.collect()
    offloader.cache.settle()
    live_records = offloader.cache.live_records
    offloader.close()
    strikes = {call: ctypes.CDLL(None).ds_tba_fault_count(index) for index, call in enumerate(_CALLS)}
    report = offloader.report().to_dict()
    return Outcome(error, message, log.texts, offloader.start_line(), report, live_records, strikes)


def _train(job: Job, offloader: ActivationOffloader, connection: Connection) -> tuple[str | None, str]:
    """Train with and without the offloader; the exception that ended it, if one did."""

    def pause(where: str) -> None:
        if where in job.pauses:
            connection.send(where)
            connection.recv()

    def training(saving: hazards.Saving) -> list[torch.Tensor]:
        ours = saving is not nullcontext
        x = torch.randn(1024, 1024, requires_grad=True)  # 4 MiB
        for step in range(job.steps):
            if ours:
                pause(f"forward {step}")
            with saving():
                y = x * (step + 1)  # other bytes in each step, or stale ones would go unseen
                for _ in range(job.layers):
                    y = y.sin()
                loss = y.sum()
            if ours and not job.forever:
                wait_for_writes(offloader._tiers.nvme)  # so that backward reads
                pause(f"backward {step}")
            loss.backward()
        return hazards.grads(x)

    try:
        while job.forever:
            hazards.run(training, offloader.cache.saving)
        hazards.check(training, offloader.cache)
    except Exception as error:  # noqa: BLE001 - told to the test
        return type(error).__name__, str(error)
    return None, ""


def _set(faults: list[Fault]) -> None:
    shim = ctypes.CDLL(None)
    long = ctypes.c_long
    for fault in faults:
        call, action = _CALLS.index(fault.call), _ACTIONS.index(fault.action)
        shim.ds_tba_fault(call, action, fault.code, long(fault.first), long(fault.last))


def _limit_locked_memory(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (nbytes, nbytes))
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; the low words, then the high ones
    libc = ctypes.CDLL(None)
    libc.capget(header, sets)
    sets[0] &= ~(1 << _CAP_IPC_LOCK)
    libc.capset(header, sets)


def _leave_descriptors(count: int | None) -> None:
    """Let this process open ``count`` files more, or as many as it may."""
    _, limit = most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if count is not None:
        unused = (fd for fd in itertools.count() if not os.path.exists(f"/proc/self/fd/{fd}"))
        limit = next(itertools.islice(unused, count, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most[1]))
