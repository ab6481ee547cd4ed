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
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

HANG_S = 60.0
_CAPABILITY_VERSION_3, _CAP_IPC_LOCK = 0x20080522, 14  # linux/capability.h
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
        layers: storages of 4 MiB that one forward saves.
        at_start: faults while the offloader is made; ``faults`` follow them.
        grow_step_bytes: in what steps the swap file grows; None for the product's own, which is large.
        free_descriptors_at_start: how many files it may still open then; ``free_descriptors`` follows.
        lockable_bytes: its limit of locked memory, which root's privilege then does not lift.
        pauses: where it waits for a word: ``forward N`` (before it) and ``backward N`` (before it).
        forever: it trains until it is killed; else every backward begins when all is written.
    """

    directory: str
    backend: str | None = "posix"
    layers: int = 12
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
    """How it went.

    Attributes:
        error: the exception that ended it, or None where every gradient was equal; ``message`` is its text.
        log: what ds_tba logged, warnings and worse.
        start_line: what it said at the start; empty where it did not come to that.
        report: the report at the end.
        live_records: saved storages that were still held once the graph was gone.
        strikes: requests of each call since the faults were set.
        stderr: what else it wrote, such as DeepSpeed's op.
    """

    error: str | None
    message: str
    log: list[str]
    start_line: str
    report: dict[str, Any]
    live_records: int
    strikes: dict[str, int] = field(default_factory=dict)
    stderr: str = ""

    @property
    def said(self) -> str:
        """The one warning."""
        (message,) = self.log
        return message


# ---- the test's side ------------------------------------------------------------------------------------------------


class Victim:
    """A running one."""

    def __init__(self, connection: Connection, stderr: Path) -> None:
        self._connection = connection
        self._stderr = stderr
        self._ended = False
        self.pid: int = self._next()

    def wait_until(self, pause: str) -> None:
        """It has come to a pause of its job."""
        told = self._next()
        assert told == pause, told

    @property
    def is_silent(self) -> bool:
        """Return whether it has not come to its next pause, or end."""
        return not self._connection.poll()

    def go_on(self) -> None:
        """Let it leave its pause."""
        self._connection.send("go")

    def outcome(self) -> Outcome:
        """Wait for its end."""
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
        """Set a victim off."""
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
        """Set a victim off and wait for its end."""
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
    roots = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])
    environment = {**os.environ, "LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [roots, os.environ.get("PYTHONPATH")]))
    with (
        (directory / "stderr").open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", f"from support.victims import serve; serve({address!r})"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
        ) as server,
    ):
        assert server.stdin is not None and server.stdout is not None
        if not server.stdout.readline():
            raise RuntimeError(f"the server does not start: {(directory / 'stderr').read_text()[-2000:]}")
        try:
            yield Victims(address, directory)
        finally:
            server.stdin.close()


# ---- the victim's side ----------------------------------------------------------------------------------------------


def serve(address: str) -> None:
    """Fork a victim for every connection, until standard input ends."""
    import ds_tba.offloader  # noqa: F401
    from ds_tba.config import AioConfig
    from ds_tba.storage.backends import aio
    from support import hazards  # noqa: F401 - what every victim needs, imported once

    if aio.is_built():
        aio.AioBackend(AioConfig())  # loads the op
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the dead
    gc.freeze()  # victims collect garbage: not among what was imported before the fork
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _live(Connection(connection.detach()))
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
    status = 1
    try:
        connection.send(_outcome(job, connection))
        status = 0
    finally:
        if status:
            faulthandler.dump_traceback()
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(status)


def _outcome(job: Job, connection: Connection) -> Outcome:
    from ds_tba.config import BLOCK, AioConfig, parse_block
    from ds_tba.device.accelerator import Accelerator
    from ds_tba.errors import DsTbaError
    from ds_tba.offloader import ActivationOffloader
    from ds_tba.storage import path as swap_file
    from support.doubles import Warnings

    log = Warnings()
    logging.getLogger("ds_tba").addHandler(log)
    io = {"backend": job.backend, "staging_bytes": 16 << 20}
    # Every byte to the drive.
    block = {"nvme_path": job.directory, "placement": "nvme", "rematerialize": False, "io": io}
    parsed = parse_block({BLOCK: block})
    assert parsed is not None
    if job.lockable_bytes is not None:
        _limit_locked_memory(job.lockable_bytes)
    if job.grow_step_bytes is not None:
        swap_file.GROW_STEP_BYTES = job.grow_step_bytes
    _set(job.at_start)
    _leave_descriptors(job.free_descriptors_at_start)
    try:
        offloader = ActivationOffloader(parsed[0], AioConfig(), Accelerator())
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


def _train(job: Job, offloader: Any, connection: Connection) -> tuple[str | None, str]:
    """Train with and without the offloader; the exception that ended it, if one did."""
    import torch

    from support import hazards
    from support.doubles import wait_for_writes

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
        limit = next(itertools.islice(filter(_is_unused, itertools.count()), count, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most[1]))


def _is_unused(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False
