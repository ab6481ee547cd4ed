"""Which backend serves this run, and why? Cannot see which is the fastest."""

from __future__ import annotations

import errno
import logging
import os
import resource
from dataclasses import dataclass

from ds_tba.config import IO_ALIGNMENT_BYTES, AioConfig, OffloadConfig
from ds_tba.device.memory import can_lock
from ds_tba.errors import BackendUnavailableError, ConfigError
from ds_tba.storage.backends import aio
from ds_tba.storage.backends.base import IoBackend
from ds_tba.storage.backends.posix import PosixBackend

logger = logging.getLogger(__name__)

DESCRIPTORS_OF_LANE = 2  # kvikio opens the file with and without O_DIRECT; aio opens it once for each transfer
SPARE_DESCRIPTORS = 32  # for what else opens files later: the report, the data loader, libraries

NAMED = "named in io.backend"


@dataclass(frozen=True, slots=True)
class Selection:
    """A backend and the reason for it, for the start-up line."""

    backend: IoBackend
    reason: str


def select_backend(
    config: OffloadConfig, aio_config: AioConfig, *, zero_uses_nvme: bool, pinned: bool, device: str = "cpu"
) -> Selection:
    """Return the backend that the config names, or for ``null`` the one that suits the run.

    Args:
        zero_uses_nvme: ZeRO's own NVMe offload is on, so that DeepSpeed builds its aio op anyway.
        pinned: the accelerator pins staging, so that aio need not lock it.
        device: the training device, such as ``"cuda"``.

    Raises:
        BackendUnavailableError: the named backend cannot run on this machine; says what to install or to set.
        ConfigError: the process may not open as many files as the lanes need.
    """
    _check_descriptors(config)
    name, lanes, obstacle = config.io.backend, _lanes(config), None
    if zero_uses_nvme or name in ("aio", None):
        if not (zero_uses_nvme or name):
            obstacle = _why_not_unnamed()
        obstacle = obstacle or aio.kernel_obstacle(aio_config)
        if obstacle is not None and zero_uses_nvme:
            logger.warning("ZeRO's NVMe offload needs DeepSpeed's aio op, which cannot run here: %s", obstacle)
        obstacle = obstacle or _lock_obstacle(config, pinned)
    match name:
        case "kvikio" | "gds":
            from ds_tba.storage.backends.kvikio import KvikioBackend

            backend = KvikioBackend(lanes, device, direct=name == "gds")
            return Selection(backend, f"{NAMED}; {backend.remark}")
        case "posix":
            return Selection(PosixBackend(), NAMED)
        case "aio" if obstacle is not None:
            raise BackendUnavailableError(f'io.backend: {obstacle}, or set "backend": "posix".')
        case "aio":
            return Selection(aio.AioBackend(aio_config, lanes), NAMED)
    if obstacle is not None:
        return Selection(PosixBackend(), obstacle)
    uses = "ZeRO's NVMe offload uses DeepSpeed's aio op too" if zero_uses_nvme else "DeepSpeed's aio op is built"
    try:
        return Selection(aio.AioBackend(aio_config, lanes), uses)
    except BackendUnavailableError as error:
        return Selection(PosixBackend(), str(error).rstrip("."))


def _why_not_unnamed() -> str | None:
    """Say why aio is not taken unless the config names it; None where nothing is against it."""
    if not aio.is_offered():
        return "this program does not import DeepSpeed, whose op aio is"
    if not aio.is_built():
        return "DeepSpeed's aio op is not built, and building it takes minutes"
    lock = aio.lock_that_stays()
    if lock is None:
        return None
    return f"loading DeepSpeed's aio op would wait for {lock}: delete that file if no process is building"


def _lanes(config: OffloadConfig) -> int:
    return (config.io.write_lanes + config.io.read_lanes) * len(config.nvme_paths)


def _check_descriptors(config: OffloadConfig) -> None:
    """Refuse what would run into ``RLIMIT_NOFILE``, in mid-run and in whoever opens a file then."""
    paths, write, read = len(config.nvme_paths), config.io.write_lanes, config.io.read_lanes
    needed = paths + _lanes(config) * DESCRIPTORS_OF_LANE + SPARE_DESCRIPTORS
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        present = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        present = limit  # not even the one to count them with is left
    if limit != resource.RLIM_INFINITY and present + needed > limit:
        raise ConfigError(
            f"{paths} path(s) with {write} write and {read} read lanes need up to {needed} file descriptors "
            f"({SPARE_DESCRIPTORS} to spare), {present} are open, and this process may have {limit}: raise the limit "
            f"(ulimit -n {present + needed}) or lower io.write_lanes and io.read_lanes."
        )


def _lock_obstacle(config: OffloadConfig, pinned: bool) -> str | None:
    """Name the limit of locked memory that aio would run into, with the repair; None if it does not."""
    nbytes = IO_ALIGNMENT_BYTES + (0 if pinned else config.io.ring_bytes)  # a page is of its first write
    if can_lock(nbytes):
        return None
    return (
        f"aio locks {nbytes} bytes in memory, {'' if pinned else 'most of them staging, '}above this process's limit: "
        f"raise it (ulimit -l unlimited){'' if pinned else ' or set io.staging_bytes to less'}"
    )
