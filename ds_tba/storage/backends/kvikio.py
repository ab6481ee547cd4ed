"""How do bytes reach a file from device memory? NVIDIA's kvikio: straight where GPUDirect Storage is, else by the host.

As ``gds`` it never goes through host memory. DeepSpeed's op of that name is not used: it ends the process on an error.
References are to kvikio 26.10. It opens files by path, so the swap file is given as ``/proc/self/fd/N``; cuFile wants a
real name, which a file can be given once, so that the lanes share one ``CuFile``. The thread pool is one for the
process, first in first out: a request of host memory is cut short, so that a read never waits behind more than a few
tasks of each writing lane. A request of device memory is not: each one first waits for the default stream
(``sync_default_stream`` in ``file_handle.hpp``, which Python cannot turn off).

Whether there is a driver is asked of the driver itself, before any library that needs it: without it kvikio raises at
the first transfer, and the cu13 build of cuFile never returns from opening its driver.

[Note: Names] cuFile opens by its path what it was given as a descriptor. Measured with cuFile 1.15: a file made with
``O_TMPFILE`` is refused (error 5019), and so is one that was reopened through ``/proc`` or unlinked (5031, "failed to
obtain new file descriptor"); once it is registered, the name may go. A run that is killed in that moment leaves
an empty file: no disk space is taken before its handles are open.
"""

from __future__ import annotations

import ctypes
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from ds_tba.device.accelerator import aligned_memory, host_view, huge_page_memory
from ds_tba.errors import BackendUnavailableError, TransferError
from ds_tba.storage.backends import IoBackend, IoHandle

# The first whose future ends only when every task has left the buffer, also after an error (parallel_operation.hpp).
MIN_VERSION = Version("26.10")
TASK_BYTES = 4 << 20
MIN_THREADS = 4  # measured to reach fio's rate
HOST_REQUEST_BYTES = MIN_THREADS * TASK_BYTES
DRIVER = "libcuda.so.1"
PREFIX = ".ds_tba-named-"
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)
_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_INSTEAD = 'set "io": {"backend": "aio"} or "posix", or leave it out'
_NO_CUFILE = "cuFile is not there, or /run/udev is not (mount it into a container), or this is WSL"


class KvikioBackend(IoBackend):
    """kvikio's ``CuFile``.

    Args:
        lanes: lanes of all paths together, for the size of the thread pool.
        device: the training device, such as ``"cuda"``.
        direct: ``"gds"``: refuse to go through host memory.

    Raises:
        BackendUnavailableError: no driver, no kvikio, or one that is too old; or not ``direct``, with the reason.
    """

    block_bytes = TASK_BYTES

    def __init__(self, lanes: int, device: str, *, direct: bool = False) -> None:
        self.name = "gds" if direct else "kvikio"
        problem = obstacle()
        if problem is not None:
            raise BackendUnavailableError(f"io.backend {self.name}: {problem}; or {_INSTEAD}.")
        self._kvikio = import_module("kvikio")
        self._device = device
        self._sharers: dict[int, list[_KvikioHandle]] = {}  # of one file, by its descriptor
        why_not = _why_not_direct(self._kvikio.CompatMode, device, insist=direct)
        if direct and why_not is not None:
            raise BackendUnavailableError(
                f"io.backend gds reaches files from device memory only, and here that cannot be: {why_not}. Repair it "
                f'(gdscheck -p tells more), or set "io": {{"backend": "kvikio"}}, which may go through host memory; or '
                f"{_INSTEAD}."
            )
        self.stages_on_device = why_not is None
        # How it runs here, for the start-up line.
        self.remark = (
            "GPUDirect Storage, from device memory straight to the file"
            if why_not is None
            else f"compatibility mode, through host memory: {why_not}"
        )
        modes, defaults = self._kvikio.CompatMode, import_module("kvikio.defaults")
        defaults.set(
            {
                # Never AUTO, which falls back for each file by itself and says nothing.
                "compat_mode": modes.OFF if self.stages_on_device else modes.ON,
                "num_threads": max(MIN_THREADS, lanes, defaults.get("num_threads")),
                "task_size": TASK_BYTES,
                "auto_direct_io_read": True,
                "auto_direct_io_write": True,
            }
        )

    def open_handle(self, fd: int) -> IoHandle:
        if not self.stages_on_device:
            return _KvikioHandle(self._open(f"/proc/self/fd/{fd}"), [], on_device=False)
        sharers = self._sharers.setdefault(fd, [])
        if sharers:
            return _KvikioHandle(sharers[0].file, sharers, on_device=True)
        with named(fd, self.name) as path:
            return _KvikioHandle(self._open(str(path)), sharers, on_device=True)

    def _open(self, path: str) -> Any:
        try:
            return self._kvikio.CuFile(path, "r+")
        except (RuntimeError, OSError) as error:
            raise BackendUnavailableError(
                f"io.backend {self.name} cannot open the swap file ({self.remark}): {error}. To go through host memory "
                f'set "io": {{"backend": "kvikio"}} and the environment variable KVIKIO_COMPAT_MODE=ON; or {_INSTEAD}.'
            ) from error

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        if not self.stages_on_device:
            return huge_page_memory(nbytes)
        staging = aligned_memory(nbytes, self._device)
        try:
            self._kvikio.memory_register(staging)
        except (RuntimeError, OSError) as error:
            raise BackendUnavailableError(
                f"io.backend {self.name}: staging ({nbytes} bytes of device memory) cannot be registered with cuFile: "
                f"{error}. Set io.staging_bytes to less; or {_INSTEAD}."
            ) from error
        return staging

    def free_staging(self, staging: torch.Tensor) -> None:
        if self.stages_on_device:
            with suppress(RuntimeError, OSError):  # at the end of a run: the process gives it back
                self._kvikio.memory_deregister(staging)


class _KvikioHandle(IoHandle):
    """One of the ``sharers`` of a ``CuFile``, the last of which closes it."""

    def __init__(self, file: Any, sharers: list[_KvikioHandle], *, on_device: bool) -> None:
        self.file = file
        self._sharers = sharers
        self._on_device = on_device
        sharers.append(self)

    def write(self, data: torch.Tensor, offset: int) -> None:
        self._move("write", self.file.pwrite, data, offset)

    def read(self, data: torch.Tensor, offset: int) -> None:
        self._move("read", self.file.pread, data, offset)

    def close(self) -> None:
        self._sharers.remove(self)
        if not self._sharers:
            self.file.close()

    def _move(self, verb: str, submit: Callable[..., Any], data: torch.Tensor, offset: int) -> None:
        request_bytes = data.numel() if self._on_device else HOST_REQUEST_BYTES
        for start in range(0, data.numel(), request_bytes):
            # The future holds neither memory nor file; both live until it is done because this frame does.
            piece, place = data[start : start + request_bytes], offset + start
            wanted = piece.numel()
            try:  # it takes objects with a buffer or with __cuda_array_interface__
                moved = submit(piece if self._on_device else host_view(piece), wanted, place, TASK_BYTES).get()
            except (RuntimeError, OSError) as error:  # RuntimeError with the kernel's words and without its number
                raise TransferError(f"kvikio's {verb} of {wanted} bytes at offset {place} failed: {error}") from error
            if moved != wanted:
                raise TransferError(f"kvikio's {verb} at offset {place} was short: {moved} of {wanted} bytes")


def driver_obstacle(library: str = DRIVER) -> str | None:
    """Return the reason why CUDA cannot run on this machine, or None."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return f"there is no NVIDIA driver here ({library} does not load)"
    count = ctypes.c_int(0)
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if code or not count.value:
        return f"the NVIDIA driver finds no device (CUDA error {code}, {count.value} devices; see nvidia-smi)"
    return None


def obstacle() -> str | None:
    """Return the reason why kvikio cannot run here, with the repair, or None. Does no I/O through it."""
    problem = driver_obstacle()
    if problem is not None:
        return f"{problem}: install the driver"
    try:
        kvikio = import_module("kvikio")
    except ModuleNotFoundError as error:
        return f'kvikio is not installed ({error}): pip install "ds_tba[gds]"'
    except (ImportError, OSError, RuntimeError) as error:  # it loads libcufile and others by hand
        return f"kvikio is installed but does not load ({' '.join(str(error).split())}): install it anew"
    if Version(kvikio.__version__) < MIN_VERSION:
        return f'kvikio {kvikio.__version__} is older than {MIN_VERSION}: pip install -U "ds_tba[gds]"'
    return None


def _why_not_direct(modes: Any, device: str, *, insist: bool) -> str | None:
    """Say why transfers go through host memory; None where GPUDirect Storage serves them, or will say so at the file.

    Args:
        insist: as with ``KVIKIO_COMPAT_MODE=OFF``: also without nvidia-fs, which newer drivers do not need.
    """
    if device != "cuda":
        return f"the training device is {device}"
    if any(_EXPANDABLE.search(os.environ.get(name, "")) for name in _ALLOCATOR_SETTINGS):
        return "torch allocates in expandable segments, of which cuFile registers one piece only"
    defaults = import_module("kvikio.defaults")
    asked = defaults.get("compat_mode")
    if asked == modes.ON:
        return "kvikio's compat_mode was ON already (environment variable KVIKIO_COMPAT_MODE)"
    if asked != modes.OFF and defaults.is_compat_mode_preferred():
        return _NO_CUFILE
    # cuFile has a compatibility mode of its own, for a missing module and for single file systems, and is silent too.
    os.environ.setdefault("CUFILE_ALLOW_COMPAT_MODE", "false")
    if insist or asked == modes.OFF:
        return None
    if not import_module("kvikio.cufile_driver").get("is_gds_available"):
        return "the kernel module nvidia-fs is not loaded (KVIKIO_COMPAT_MODE=OFF insists)"
    return None


# ---- what cuFile wants around it ----


@contextmanager
def named(fd: int, backend: str) -> Iterator[Path]:
    """Give a file of ``O_TMPFILE`` a name within the context, beside its place; the kernel allows that once.

    Args:
        backend: for the message.

    Raises:
        BackendUnavailableError: the file cannot be linked, as without ``O_TMPFILE``.
    """
    directory = Path(os.readlink(f"/proc/self/fd/{fd}")).parent
    path = directory / f"{PREFIX}{uuid.uuid4().hex}"
    descriptors = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.link(str(fd), path, src_dir_fd=descriptors, follow_symlinks=True)
    except OSError as error:
        raise BackendUnavailableError(
            f"io.backend {backend}: cuFile opens files by their name, and the swap file in {directory} cannot be given "
            f"one ({error.strerror}), as on a file system without O_TMPFILE: name a directory on another one, or "
            f"{_INSTEAD}."
        ) from error
    finally:
        os.close(descriptors)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
