"""How do bytes reach a file through DeepSpeed's ``async_io`` op? One handle per lane, and synchronous calls only.

``sync_pread/sync_pwrite`` release the GIL; the ``async_`` calls hold it and deadlock with a ``wait()`` of another
thread (``csrc/aio/py_lib/py_ds_aio.cpp``). The op skips its own bounce copy only for memory that is pinned by the
accelerator or locked by itself (``deepspeed_cpu_op.cpp``), so without a GPU staging is its locked memory. Cannot see an
error of the drive: the op tells none (``integrity.py``).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

import torch

from ds_tba.config import IO_ALIGNMENT_BYTES, AioConfig
from ds_tba.device.memory import advise_huge_pages, keep_from_children, show_to_children
from ds_tba.errors import BackendUnavailableError
from ds_tba.storage.backends.base import IoBackend, IoHandle
from ds_tba.storage.backends.posix import PosixHandle

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

    Raises:
        BackendUnavailableError: the op cannot be built or loaded here.
    """

    name = "aio"
    descriptors_per_handle = 1  # the op opens the file anew for every transfer

    def __init__(self, config: AioConfig) -> None:
        self._config = config
        self._op = _load_op()
        self.block_bytes = config.block_size
        # Each of the op's threads takes an equal part, and each part must be aligned by itself.
        self.alignment_bytes = IO_ALIGNMENT_BYTES * config.intra_op_parallelism
        self._owner: Any = None
        self._wrote = False

    def open_handle(self, fd: int) -> IoHandle:
        if not self._wrote:
            self._write_once(fd)
        return _AioHandle(self._new_handle(), fd)

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        self._owner = self._new_handle()
        staging: torch.Tensor = self._owner.new_cpu_locked_tensor(
            nbytes, torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        advise_huge_pages(staging, collapse=True)
        keep_from_children(staging)
        return staging.zero_()

    def free_staging(self, staging: torch.Tensor) -> None:
        if self._owner is not None:
            show_to_children(staging)
            self._owner.free_cpu_locked_tensor(staging)
            self._owner = None

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
        handle = self._new_handle()
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
    """The op opens the file by name for each request, which takes a descriptor; where it cannot, and for second tries,
    plain calls on our own descriptor move the bytes or tell the kernel's reason."""

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

    def read_again(self, data: torch.Tensor, offset: int) -> None:
        self._plain.read(data, offset)

    def close(self) -> None:
        self._handle = None


def import_deepspeed(log: TextIO) -> None:
    """Import it if it is installed; it logs to what is the standard output at its import, for good."""
    with redirect_stdout(log), suppress(ImportError):  # the doctor names what is missing
        import deepspeed  # noqa: F401


def is_built() -> bool:
    """Whether the op was built before, with DeepSpeed's installation or just in time, so that loading takes seconds."""
    if _is_installed(OP):
        return True
    return any((directory / f"{OP}.so").is_file() for directory in _build_directories(OP))


def build_locks() -> list[Path]:
    """Lock files of builds under way, or of builds that were killed: for the latter everyone waits for ever."""
    just_in_time = [op for op in NEEDED_OPS if not _is_installed(op)]
    return [one / "lock" for op in just_in_time for one in _build_directories(op) if (one / "lock").exists()]


def abandoned_build() -> str | None:
    """The lock of a build that was killed, for which the op's loading would wait, and the repair; None without one."""
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
    """Seconds since a file, or the newest one in a directory, was written."""
    written = []
    for file in path.iterdir() if path.is_dir() else [path]:
        with suppress(FileNotFoundError):  # a build makes and removes files
            written.append(file.stat().st_mtime)
    now = time.time()
    return now - max(written, default=now)


def _is_installed(op: str) -> bool:
    """Whether the op came with DeepSpeed's installation, so that nothing is built nor locked."""
    from deepspeed.git_version_info import installed_ops

    return bool(installed_ops.get(op))


def _build_directories(op: str) -> list[Path]:
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root:
        return [Path(root) / op]
    tag = f"py{sys.version_info.major}{sys.version_info.minor}*"
    return list(Path(get_default_build_root()).glob(f"{tag}/{op}"))


def requests_needed(config: AioConfig, lanes: int) -> int:
    """Kernel aio requests that so many lanes reserve: one context per handle and one per thread of it.

    The op ignores a failed ``io_setup`` (``csrc/aio/common/deepspeed_aio_types.cpp``), so it is counted beforehand.
    """
    handles = lanes + 1  # one more owns the staging memory
    return handles * (1 + config.intra_op_parallelism) * config.queue_depth


def requests_free(proc: Path = Path("/proc/sys/fs")) -> int | None:
    """Kernel aio requests that nobody on this machine has reserved; None where the kernel does not tell."""
    try:
        return int((proc / "aio-max-nr").read_text()) - int((proc / "aio-nr").read_text())
    except (OSError, ValueError):
        return None


def _load_op() -> Any:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    repair = (
        'Install libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora), g++ and ninja, or set "io": {"backend": "posix"}'
    )
    if not (is_built() or builder.is_compatible(verbose=False)):  # its compiler check takes a second
        raise BackendUnavailableError(f"backend aio: DeepSpeed's {OP} op cannot be built here. {repair}.")
    _warn_of_build()
    try:
        return builder.load(verbose=False)
    except (RuntimeError, ImportError, OSError) as error:
        raise BackendUnavailableError(
            f"backend aio: DeepSpeed's {OP} op did not build or load: {error}. {repair}."
        ) from error
