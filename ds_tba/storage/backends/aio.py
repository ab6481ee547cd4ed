"""How do bytes reach a file through DeepSpeed's ``async_io`` op? One handle per lane, and synchronous calls only.

``sync_pread/sync_pwrite`` release the GIL; the ``async_`` calls hold it and deadlock with a ``wait()`` of another
thread (``csrc/aio/py_lib/py_ds_aio.cpp``). The op skips its own bounce copy only for memory that is pinned by the
accelerator or locked by itself (``deepspeed_cpu_op.cpp``), so without a GPU staging is its locked memory. Cannot see an
error of the drive: the op tells none (``integrity.py``).

[Note: Asking the kernel] The op ignores a failed ``io_setup``, and asserts that ``io_submit`` and ``io_pgetevents``
succeed: where a container forbids one, or nobody may reserve more requests, the process aborts, or waits for ever if
the op was compiled without assertions. So the calls are made here first, by themselves, with a file of each directory;
a child makes them before, because a filter may also end the process that calls. All contexts are made at the start, and
counted, because other processes of the machine may take the last requests in between.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import platform
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

import torch

from ds_tba.config import IO_ALIGNMENT_BYTES, AioConfig
from ds_tba.device.memory import advise_huge_pages, keep_from_children, show_to_children
from ds_tba.errors import BackendUnavailableError, PathError
from ds_tba.storage.backends.base import IoBackend, IoHandle
from ds_tba.storage.backends.posix import PosixHandle
from ds_tba.storage.swap_file import SwapFile

logger = logging.getLogger(__name__)

OP = "async_io"
NEEDED_OPS = (OP, "pin_memory")
# A build that has not written a file for so long was killed: no file of these ops takes that long to compile.
ABANDONED_AFTER_S = 900.0
# A rank that only loads what is built holds the lock for less.
LOADING_S = 3.0
_COMPLETED = 1  # what the op returns for one request; -1 where it did not begin, never an error of the drive


class AioBackend(IoBackend):
    """DeepSpeed's aio thread pool.

    Args:
        config: DeepSpeed's ``"aio"`` block.
        handles: made at once, and handed out first; one of them owns staging.

    Raises:
        BackendUnavailableError: the op cannot be built or loaded here, or the kernel has too few requests.
    """

    name = "aio"
    descriptors_per_handle = 1  # the op opens the file anew for every transfer

    def __init__(self, config: AioConfig, handles: int = 0) -> None:
        self._config = config
        self._op = _load_op()
        self._staging: torch.Tensor | None = None
        self._spare: list[Any] = []
        before = _contexts()
        self._spare += [self._new_handle() for _ in range(handles)]
        made, wanted = _contexts() - before, handles * (1 + config.intra_op_parallelism)
        if before >= 0 and made < wanted:
            raise BackendUnavailableError(
                f"backend aio: the kernel gave {made} of {wanted} contexts for requests, because other "
                "processes have taken the rest of fs.aio-max-nr: raise it (sysctl fs.aio-max-nr=1048576), or set "
                '"io": {"backend": "posix"}.'
            )
        self.block_bytes = config.block_size
        # Each of the op's threads takes an equal part, and each part must be aligned by itself.
        self.alignment_bytes = IO_ALIGNMENT_BYTES * config.intra_op_parallelism
        self._owner: Any = None
        self._wrote = False

    def open_handle(self, fd: int) -> IoHandle:
        if not self._wrote:
            self._write_once(fd)
        return _AioHandle(self._take_handle(), fd, self)

    def is_direct(self, data: torch.Tensor) -> bool:
        """Return whether the op moves ``data`` itself: else it locks a copy, and aborts where that cannot be had."""
        staging = self._staging
        if staging is None:
            return data.is_pinned()
        return staging.data_ptr() <= data.data_ptr() < staging.data_ptr() + staging.numel()

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        self._owner = self._take_handle()
        staging: torch.Tensor = self._owner.new_cpu_locked_tensor(
            nbytes, torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        advise_huge_pages(staging, collapse=True)
        keep_from_children(staging)
        self._staging = staging
        return staging.zero_()

    def free_staging(self, staging: torch.Tensor) -> None:
        if self._owner is not None:
            show_to_children(staging)
            self._owner.free_cpu_locked_tensor(staging)
            self._owner = self._staging = None

    def blocks(self, nbytes: int) -> list[tuple[int, int]]:
        part = nbytes // self._config.intra_op_parallelism
        starts = range(0, nbytes, part)
        return [(start + a, start + b) for start in starts for a, b in super(AioBackend, self).blocks(part)]

    def _write_once(self, fd: int) -> None:
        """Make the op's first write of this process here, before any lane.

        That write logs a warning under ``std::call_once`` while it holds the GIL (``deepspeed_aio_op_desc.cpp``,
        ``warn_consumer_ssd_writes``); logging lets the GIL go, and a second thread that writes then waits for the once
        flag with the GIL in its hands, for ever.
        """
        handle = self._spare[-1] if self._spare else self._new_handle()
        data = handle.new_cpu_locked_tensor(self.alignment_bytes, torch.empty(0, dtype=torch.uint8, device="cpu"))
        try:
            completed = handle.sync_pwrite(data.zero_(), f"/proc/self/fd/{fd}", 0)
        finally:
            handle.free_cpu_locked_tensor(data)
        if completed != _COMPLETED:
            raise BackendUnavailableError(
                "backend aio: DeepSpeed's op cannot open the swap file (standard error has its reason). If that is "
                'error 24, raise the limit of open files (ulimit -n); else set "io": {"backend": "posix"}.'
            )
        self._wrote = True

    def _take_handle(self) -> Any:
        return self._spare.pop() if self._spare else self._new_handle()

    def _new_handle(self) -> Any:
        config = self._config
        return self._op.aio_handle(
            config.block_size,
            config.queue_depth,
            config.single_submit,
            config.overlap_events,
            config.intra_op_parallelism,
        )


class _AioHandle(IoHandle):
    """The op opens the file by name for each request, which takes a descriptor; where it cannot, for second tries, and
    for memory of which it would lock a copy, plain calls on our own descriptor move the bytes or tell the kernel's
    reason."""

    def __init__(self, handle: Any, fd: int, backend: AioBackend) -> None:
        self._handle = handle
        self._backend = backend
        self._name = f"/proc/self/fd/{fd}"
        self._plain = PosixHandle(fd)

    def write(self, data: torch.Tensor, offset: int) -> None:
        if self._handle.sync_pwrite(data, self._name, offset) != _COMPLETED:
            self._plain.write(data, offset)

    def read(self, data: torch.Tensor, offset: int) -> None:
        if not self._backend.is_direct(data) or self._handle.sync_pread(data, self._name, offset) != _COMPLETED:
            self._plain.read(data, offset)

    def read_again(self, data: torch.Tensor, offset: int) -> None:
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
    just_in_time = [op for op in ops if not _is_installed(op)]
    locks = [one / "lock" for op in just_in_time for one in _build_directories(op)]
    return [one for one in locks if _is_taken(one)]


def _is_taken(lock: Path) -> bool:
    """Return whether loading waits for a lock: while it is there, or from PyTorch 2.14 on while a process has it."""
    from torch.utils import cpp_extension

    if hasattr(cpp_extension, "FileBaton"):
        return lock.exists()
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # another process has it; or the file system knows no such locks, and the file is the lock again
        return True
    return False


def abandoned_build() -> str | None:
    """Name the lock of a killed build, for which the op's loading would wait, and the repair; None without one."""
    for lock in build_locks():
        quiet_s = _unchanged_s(lock.parent)
        if quiet_s > ABANDONED_AFTER_S:
            return (
                f"a build of DeepSpeed's aio op seems to have been killed, and loading would wait for its lock for "
                f"ever: {lock} is there, and nothing in its directory has changed for {quiet_s / 60:.0f} minutes. "
                "Delete it if no other process is building"
            )
    return None


def _warn_of_build() -> None:
    """Say what loading is about to wait for, unless that is another rank's loading."""
    while (locks := build_locks()) and max(map(_unchanged_s, locks)) < LOADING_S:
        time.sleep(0.1)
    for lock in locks:
        logger.warning(
            "%s has been there for %.0f s: another process builds DeepSpeed's aio op, and this one waits. If none "
            "is building, a build was killed: delete that file",
            lock,
            _unchanged_s(lock),
        )


def _unchanged_s(path: Path) -> float:
    """Return the seconds since a file, or the newest one in a directory, was written."""
    written = []
    for file in path.iterdir() if path.is_dir() else [path]:
        with suppress(FileNotFoundError):  # a build makes and removes files
            written.append(file.stat().st_mtime)
    now = time.time()
    return now - max(written, default=now)


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

# linux/aio_abi.h, asm/unistd.h: of io_setup, io_destroy, io_submit and io_pgetevents, which are all that the op calls.
_CALLS = {"x86_64": (206, 207, 209, 333), "aarch64": (0, 1, 2, 292)}
_PREAD, _PWRITE = 0, 1
_LONGEST_WAIT_S = 10
# Arguments that are never right: each call fails, unless the process is ended for it.
_CHILD = "import ctypes, sys\nfor n in sys.argv[1:]: ctypes.CDLL(None).syscall(int(n), -1, 0, -1, 0, 0, 0)"


def kernel_obstacle(config: AioConfig, directories: Sequence[Path] = ()) -> str | None:
    """Return what the op would run into in the kernel, with the repair; None if there is nothing.

    Args:
        directories: where swap files will be; an empty file is made in each for a moment.
    """
    if platform.machine() not in _CALLS:
        return None  # their numbers are not known here
    repair = "let the container's seccomp profile allow io_setup, io_submit, io_pgetevents and io_destroy"
    if _ends_the_process():
        return f"a filter of system calls ends processes that use the kernel's aio: {repair}"
    with suppress(OSError):  # no descriptor, or no such call: the files are asked
        if refusal := _refused(os.memfd_create("ds_tba"), config.queue_depth):
            return (
                f"the kernel refuses {refusal}, without which DeepSpeed's aio op ends the process: {repair}, or raise "
                "fs.aio-max-nr where that is used up (sysctl fs.aio-max-nr=1048576)"
            )
    for directory in directories:
        with suppress(PathError), closing(SwapFile(directory, IO_ALIGNMENT_BYTES)) as file:  # a run says that better
            if not file.direct:
                return f"the file system of {directory} has no O_DIRECT, which aio needs: name another directory"
            file.reserve_first(IO_ALIGNMENT_BYTES)
            if refusal := _refused(os.dup(file.fd), config.queue_depth):
                return f"aio does not work in {directory}: the kernel refuses {refusal}: name another directory"
    return None


def _ends_the_process() -> bool:
    command = [sys.executable, "-I", "-S", "-c", _CHILD, *map(str, _CALLS[platform.machine()])]
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode < 0
    except (OSError, subprocess.TimeoutExpired):  # no process can be started, or not in time: then it is risked
        return False


def _refused(fd: int, queue_depth: int) -> str:
    """Write a page of a file and read it again; returns what the kernel refused, with its reason. Closes ``fd``."""
    memory = mmap.mmap(-1, IO_ALIGNMENT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    try:
        for name, code in _answers(fd, page, queue_depth):
            if code:
                return f"{name} ({os.strerror(code)})"
    finally:
        os.close(fd)
    return ""


def _answers(fd: int, page: int, queue_depth: int) -> Iterator[tuple[str, int]]:
    """Make each call; yield its name, and its error number or 0."""
    setup, destroy, submit, wait = _CALLS[platform.machine()]
    context, event = ctypes.c_ulong(0), ctypes.create_string_buffer(32)
    timeout = ctypes.create_string_buffer(struct.pack("qq", _LONGEST_WAIT_S, 0))
    yield "io_setup", _call(setup, queue_depth, ctypes.addressof(context))[1]
    try:
        for verb, kind in (("write", _PWRITE), ("read", _PREAD)):
            request = struct.pack("QIIHhIQQqQII", 0, 0, 0, kind, 0, fd, page, IO_ALIGNMENT_BYTES, 0, 0, 0, 0)
            held = ctypes.create_string_buffer(request)
            pointer = ctypes.c_void_p(ctypes.addressof(held))
            yield f"io_submit of a {verb}", _call(submit, context.value, 1, ctypes.addressof(pointer))[1]
            found, code = _call(wait, context.value, 1, 1, ctypes.addressof(event), ctypes.addressof(timeout), 0)
            yield "io_pgetevents", code if found else errno.ETIMEDOUT
            moved = struct.unpack("QQqq", event.raw)[2]
            yield f"a {verb}", 0 if moved == IO_ALIGNMENT_BYTES else max(-moved, errno.EIO)
    finally:
        if context.value:
            _call(destroy, context.value)


def _call(number: int, *arguments: int) -> tuple[int, int]:
    """Make a system call; return its result, and its error number or 0."""
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    result = int(syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)))
    return result, ctypes.get_errno() if result < 0 else 0


def _contexts() -> int:
    """Count the aio contexts of this process; -1 where the kernel does not tell."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"[aio]")
    except OSError:
        return -1


def _load_op() -> Any:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder, instead = AsyncIOBuilder(), 'or set "io": {"backend": "posix"}.'
    repair = f"Install libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora), g++ and ninja, {instead}"
    # Its check needs a standard error with a descriptor, which that of a notebook is not, and finds no libaio without.
    with redirect_stderr(sys.__stderr__ or sys.stderr):
        if not (is_built() or builder.is_compatible(verbose=False)):  # its compiler check takes a second
            raise BackendUnavailableError(f"backend aio: DeepSpeed's {OP} op cannot be built here. {repair}")
        _warn_of_build()
        try:
            return builder.load(verbose=False)
        except (RuntimeError, ImportError, OSError) as error:
            if isinstance(error, OSError):  # of the cache, when another user has built the op
                repair = f"Set TORCH_EXTENSIONS_DIR to a directory that you may write, {instead}"
            raise BackendUnavailableError(
                f"backend aio: DeepSpeed's {OP} op did not build or load: {error}. {repair}"
            ) from error
