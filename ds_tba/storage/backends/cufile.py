"""What does cuFile need around it? An NVIDIA driver, a log file, and a name for the swap file, which has none.

Whether there is a driver is asked of the driver itself, before any library that needs it: without it kvikio raises at
the first transfer, and the cu13 build of cuFile never returns from opening its driver.

[Note: Names] cuFile opens by its path what it was given as a descriptor. Measured with cuFile 1.15: a file made with
``O_TMPFILE`` is refused (error 5019), and so is one that was reopened through ``/proc`` or unlinked (5031, "failed to
obtain new file descriptor"); once it is registered, the name may go.

[Note: Killed runs] Whoever gives a name holds a lock on the file, which ends with the process. A named file without
a lock is what a killed run left, and goes when the next one in that directory gives a name.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import os
import re
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from ds_tba.errors import BackendUnavailableError

DRIVER = "libcuda.so.1"
PREFIX = ".ds_tba-named-"
T = TypeVar("T")
_LOG = "CUFILE_LOGFILE_PATH"
_LOG_DIRECTORY = re.compile(r'^\s*"dir"\s*:', re.MULTILINE)  # cufile.json has // comments, which json does not read


def driver_obstacle(library: str = DRIVER) -> str | None:
    """The reason why CUDA cannot run on this machine, or None."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return f"there is no NVIDIA driver here ({library} does not load)"
    count = ctypes.c_int(0)
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if code or not count.value:
        return f"the NVIDIA driver finds no device (CUDA error {code}, {count.value} devices; see nvidia-smi)"
    return None


def move_cufile_log() -> None:
    """Let cuFile log to the temporary directory, unless the user has chosen a place: its default is the current one.

    cuFile reads the variable when its driver opens.
    """
    if _LOG in os.environ:
        return
    config = Path(os.environ.get("CUFILE_ENV_PATH_JSON", "/etc/cufile.json"))
    try:
        chosen = _LOG_DIRECTORY.search(config.read_text()) is not None
    except OSError:
        chosen = False
    if not chosen:
        os.environ[_LOG] = str(Path(tempfile.gettempdir()) / f"cufile-{os.getuid()}-{os.getpid()}.log")


def imported(module: str) -> Any:
    """A module, or None where it is not installed.

    Raises:
        ImportError: it is installed and does not load.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        return None


def give_name(fd: int, backend: str) -> Path:
    """Link a file of ``O_TMPFILE`` into its directory; the kernel allows that once.

    Args:
        backend: for the message.

    Raises:
        BackendUnavailableError: the file cannot be linked, as without ``O_TMPFILE``.
    """
    directory = Path(os.readlink(f"/proc/self/fd/{fd}")).parent
    with suppress(OSError):  # no locks on this file system: then nobody can take it for left behind either
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _remove_left_behind(directory)
    path = directory / f"{PREFIX}{uuid.uuid4().hex}"
    descriptors = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.link(str(fd), path, src_dir_fd=descriptors, follow_symlinks=True)
    except OSError as error:
        raise BackendUnavailableError(
            f"io.backend {backend}: cuFile opens files by their name, and the swap file in {directory} cannot be given "
            f"one ({error.strerror}), as on a file system without O_TMPFILE: name a directory on another one, or set "
            '"io": {"backend": "aio"} or "posix", or leave it out.'
        ) from error
    finally:
        os.close(descriptors)
    return path


class Shared(Generic[T]):
    """A resource that several handles share, ended with the last of them.

    Args:
        end: called once, by whichever thread closes the last handle.
    """

    def __init__(self, resource: T, end: Callable[[], object]) -> None:
        self.resource = resource
        self._end = end
        self._handles = 0
        self._lock = threading.Lock()

    @property
    def in_use(self) -> bool:
        """Whether a handle is left."""
        return self._handles > 0

    def join(self) -> None:
        """One more handle."""
        with self._lock:
            self._handles += 1

    def leave(self) -> None:
        """One handle fewer."""
        with self._lock:
            self._handles -= 1
            last = self._handles == 0
        if last:
            self._end()


@contextmanager
def named(fd: int, backend: str) -> Iterator[Path]:
    """The name within the context; see :func:`give_name`."""
    path = give_name(fd, backend)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _remove_left_behind(directory: Path) -> None:
    """See [Note: Killed runs]."""
    for path in directory.glob(f"{PREFIX}*"):
        with suppress(OSError):  # alive, or another user's, or gone already
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)
