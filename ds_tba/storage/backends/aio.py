"""How do bytes reach a file through DeepSpeed's ``async_io`` op? One handle per lane, and synchronous calls only.

``sync_pread/sync_pwrite`` release the GIL; the ``async_`` calls hold it and deadlock with a ``wait()`` of another
thread (``csrc/aio/py_lib/py_ds_aio.cpp``). The op skips its own bounce copy only for memory that is pinned by the
accelerator or locked by itself (``deepspeed_cpu_op.cpp``), so without a GPU staging is its locked memory. Cannot see an
error of the drive: the op tells none (``integrity.py``).

[Note: Asking the kernel] The op ignores a failed ``io_setup``, and asserts that ``io_submit`` and ``io_pgetevents``
succeed: where a container forbids one, or nobody may reserve more requests, the process aborts, or waits for ever if
the op was compiled without assertions. So a child makes the calls first: a filter may also end the process that calls.
All contexts are made at the start, and counted, because other processes of the machine may take the last requests in
between.
"""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

import torch

from ds_tba.config import IO_ALIGNMENT_BYTES, AioConfig
from ds_tba.device.accelerator import advise_huge_pages, keep_from_children, show_to_children
from ds_tba.errors import BackendUnavailableError
from ds_tba.storage.backends import IoBackend, IoHandle, PosixHandle

logger = logging.getLogger(__name__)

OP = "async_io"
NEEDED_OPS = (OP, "pin_memory")
LOADING_S = 3.0  # a rank that only loads what is built holds the lock for less
_COMPLETED = 1  # what the op returns for one request; -1 where it did not begin, never an error of the drive


class AioBackend(IoBackend):
    """DeepSpeed's aio thread pool.

    Raises:
        BackendUnavailableError: the op cannot be built or loaded here, or the kernel has too few requests.
    """

    name = "aio"

    def __init__(self, config: AioConfig, lanes: int = 0) -> None:
        self._config = config
        self._op = _load_op()
        before = _contexts()
        self._owner = self._new_handle()  # of locked memory
        self._spare = [self._new_handle() for _ in range(lanes)]  # of the lanes, made at once
        made, wanted = _contexts() - before, (1 + lanes) * 2  # of a handle itself, and of its thread
        if made < wanted:
            raise BackendUnavailableError(
                f"backend aio: the kernel gave {made} of {wanted} contexts for requests, because other "
                "processes have taken the rest of fs.aio-max-nr: raise it (sysctl fs.aio-max-nr=1048576), or set "
                '"io": {"backend": "posix"}.'
            )
        self.block_bytes = config.block_size
        self._wrote = False

    def open_handle(self, fd: int) -> IoHandle:
        if not self._wrote:
            self._write_once(fd)
        return _AioHandle(self._spare.pop() if self._spare else self._new_handle(), fd)

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        staging = self._locked(nbytes)
        advise_huge_pages(staging, collapse=True)
        keep_from_children(staging)
        return staging.zero_()

    def free_staging(self, staging: torch.Tensor) -> None:
        show_to_children(staging)
        self._owner.free_cpu_locked_tensor(staging)

    def _write_once(self, fd: int) -> None:
        """Make the op's first write of this process here, before any lane.

        That write logs a warning under ``std::call_once`` while it holds the GIL (``deepspeed_aio_op_desc.cpp``,
        ``warn_consumer_ssd_writes``); logging lets the GIL go, and a second thread that writes then waits for the once
        flag with the GIL in its hands, for ever.
        """
        data = self._locked(IO_ALIGNMENT_BYTES)
        try:
            completed = self._owner.sync_pwrite(data.zero_(), f"/proc/self/fd/{fd}", 0)
        finally:
            self._owner.free_cpu_locked_tensor(data)
        if completed != _COMPLETED:
            raise BackendUnavailableError(
                "backend aio: DeepSpeed's op cannot open the swap file (standard error has its reason). If that is "
                'error 24, raise the limit of open files (ulimit -n); else set "io": {"backend": "posix"}.'
            )
        self._wrote = True

    def _locked(self, nbytes: int) -> torch.Tensor:
        locked: torch.Tensor = self._owner.new_cpu_locked_tensor(
            nbytes, torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        return locked

    def _new_handle(self) -> Any:
        config = self._config
        return self._op.aio_handle(
            config.block_size,
            config.queue_depth,
            config.single_submit,
            config.overlap_events,
            1,  # its threads would share a transfer: the lanes are threads enough
        )


class _AioHandle(IoHandle):
    """The op moves staging, and opens the file by name for each request. Plain calls on our own descriptor move what it
    could not, and tell the kernel's reason. They also move memory that is not staging: of that the op would lock a
    copy, and it aborts the process if the limit of locked memory forbids that."""

    def __init__(self, handle: Any, fd: int) -> None:
        self._handle = handle
        self._name = f"/proc/self/fd/{fd}"
        self._plain = PosixHandle(fd)

    def write(self, data: torch.Tensor, offset: int) -> None:
        if self._handle.sync_pwrite(data, self._name, offset) != _COMPLETED:
            self._plain.write(data, offset)

    def read(self, data: torch.Tensor, offset: int) -> None:
        if self._handle.sync_pread(data, self._name, offset) != _COMPLETED:
            self._plain.read(data, offset)

    def read_plainly(self, data: torch.Tensor, offset: int) -> None:
        self._plain.read(data, offset)

    def close(self) -> None:
        self._handle = None


def import_deepspeed(log: TextIO) -> None:
    """Import it if it is installed; it logs to what is the standard output at its import, for good."""
    with redirect_stdout(log), suppress(ImportError):  # the doctor names what is missing
        import deepspeed  # noqa: F401


def is_offered() -> bool:
    """Return whether DeepSpeed is imported already: its import takes seconds, and a program may do without it."""
    return sys.modules.get("deepspeed") is not None


def is_built() -> bool:
    """Return whether the op was built before, so that loading takes seconds: at DeepSpeed's installation, or later."""
    if _is_installed(OP):
        return True
    return any((directory / f"{OP}.so").is_file() for directory in _build_directories(OP))


def build_locks(ops: Sequence[str] = NEEDED_OPS) -> list[Path]:
    """List lock files of builds under way, or of builds that were killed: for the latter everyone waits for ever.

    Args:
        ops: names of ops, as patterns: ``"*"`` is all that torch compiles at run time.
    """
    from torch.utils import cpp_extension

    if not hasattr(cpp_extension, "FileBaton"):  # from PyTorch 2.14 on the kernel frees the lock of a killed build
        return []
    just_in_time = [op for op in ops if not _is_installed(op)]
    locks = [one / "lock" for op in just_in_time for one in _build_directories(op)]
    return [one for one in locks if one.exists()]


def lock_that_stays() -> Path | None:
    """Return the lock for which loading the op would wait, unless it goes within the time of another rank's loading."""
    deadline_s = time.monotonic() + LOADING_S
    while locks := build_locks():
        if time.monotonic() > deadline_s:
            return locks[0]
        time.sleep(0.1)
    return None


def _is_installed(op: str) -> bool:
    """Return whether the op came with DeepSpeed's installation, so that nothing is built nor locked."""
    try:
        from deepspeed.git_version_info import installed_ops
    except ImportError as error:
        raise BackendUnavailableError(
            f"backend aio is DeepSpeed's {OP} op, and DeepSpeed cannot be imported ({error}): install it, or set "
            '"io": {"backend": "posix"}.'
        ) from error

    return bool(installed_ops.get(op))


def _build_directories(op: str) -> list[Path]:
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root:
        return list(Path(root).glob(op))
    tag = f"py{sys.version_info.major}{sys.version_info.minor}*"
    return list(Path(get_default_build_root()).glob(f"{tag}/{op}"))


# ---- asking the kernel ----

# asm/unistd.h: of io_setup, io_destroy, io_submit and io_pgetevents, which are all that the op calls.
_CALLS = {"x86_64": (206, 207, 209, 333), "aarch64": (0, 1, 2, 292)}
_ANSWERS_IN_S = 60.0
# Writes a page by each of the calls, and ends at one that is refused, with its name; the request: linux/aio_abi.h.
_CHILD = """
import ctypes, mmap, os, struct, sys
setup, destroy, submit, wait, depth = map(int, sys.argv[1:])
libc, context, event = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(0), ctypes.create_string_buffer(32)
def call(name, number, *arguments):
    if libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)) < 0:
        sys.exit(f"{name} ({os.strerror(ctypes.get_errno())})")
page = ctypes.c_char.from_buffer(mmap.mmap(-1, 4096))
file, place = os.memfd_create("ds_tba"), ctypes.addressof(page)
held = ctypes.create_string_buffer(struct.pack("QIIHhIQQqQII", 0, 0, 0, 1, 0, file, place, 4096, 0, 0, 0, 0))
pointer = ctypes.c_void_p(ctypes.addressof(held))
call("io_setup", setup, depth, ctypes.addressof(context))
call("io_submit", submit, context.value, 1, ctypes.addressof(pointer))
call("io_pgetevents", wait, context.value, 1, 1, ctypes.addressof(event), 0, 0)
call("io_destroy", destroy, context.value)
"""


def kernel_obstacle(config: AioConfig) -> str | None:
    """Return what the op would run into in the kernel, with the repair; None if there is nothing."""
    if platform.machine() not in _CALLS:
        return None  # their numbers are not known here
    repair = "let the container's seccomp profile allow io_setup, io_submit, io_pgetevents and io_destroy"
    arguments = map(str, (*_CALLS[platform.machine()], config.queue_depth))
    command = [sys.executable, "-I", "-S", "-c", _CHILD, *arguments]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWERS_IN_S)
    except (OSError, subprocess.TimeoutExpired):  # no process can be started, or not in time: then it is risked
        return None
    if asked.returncode < 0:
        return f"a filter of system calls ends processes that use the kernel's aio: {repair}"
    if asked.returncode:
        refusal = asked.stderr.strip().rpartition("\n")[2]
        return (
            f"the kernel refuses {refusal}, without which DeepSpeed's aio op ends the process: {repair}, or raise "
            "fs.aio-max-nr where that is used up (sysctl fs.aio-max-nr=1048576)"
        )
    return None


def _contexts() -> int:
    """Count the aio contexts of this process."""
    return Path("/proc/self/maps").read_bytes().count(b"[aio]")


def _load_op() -> Any:
    _is_installed(OP)  # first: it names the way out where DeepSpeed cannot be imported
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder, instead = AsyncIOBuilder(), 'or set "io": {"backend": "posix"}.'
    repair = f"Install libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora), g++ and ninja, {instead}"
    # Its check needs a standard error with a descriptor, which that of a notebook is not, and finds no libaio without.
    with redirect_stderr(sys.__stderr__ or sys.stderr):
        if not (is_built() or builder.is_compatible(verbose=False)):  # its compiler check takes a second
            raise BackendUnavailableError(f"backend aio: DeepSpeed's {OP} op cannot be built here. {repair}")
        if lock := lock_that_stays():
            logger.warning(
                "%s is there: another process builds DeepSpeed's aio op, and this one waits. If none is building, a "
                "build was killed: delete that file",
                lock,
            )
        try:
            return builder.load(verbose=False)
        except (RuntimeError, ImportError, OSError) as error:
            if isinstance(error, OSError):  # of the cache, when another user has built the op
                repair = f"Set TORCH_EXTENSIONS_DIR to a directory that you may write, {instead}"
            raise BackendUnavailableError(
                f"backend aio: DeepSpeed's {OP} op did not build or load: {error}. {repair}"
            ) from error
