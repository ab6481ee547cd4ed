"""Whether this machine has an NVIDIA driver and a device, asked of the driver itself.

Asked before any library that needs the driver: without it kvikio raises at the first transfer, and the cu13 build of
cuFile never returns from opening its driver.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any

DRIVER = "libcuda.so.1"
_LOG = "CUFILE_LOGFILE_PATH"
_LOG_DIRECTORY = re.compile(r'^\s*"dir"\s*:', re.MULTILINE)  # cufile.json has // comments, which json does not read


def driver_obstacle(library: str = DRIVER) -> str | None:
    """What this machine lacks to run CUDA, or None."""
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
