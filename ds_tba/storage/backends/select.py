"""Which backend serves this run, and why? Cannot see which is the fastest."""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_tba.config import IO_ALIGNMENT_BYTES, AioConfig, OffloadConfig
from ds_tba.device.memory import can_lock
from ds_tba.errors import BackendUnavailableError, ConfigError
from ds_tba.storage.backends import aio
from ds_tba.storage.backends.base import IoBackend
from ds_tba.storage.backends.posix import PosixBackend

logger = logging.getLogger(__name__)

SPARE_DESCRIPTORS = 32  # for what else opens files later: the report, the data loader, libraries

NAMED = "named in io.backend"


@dataclass(frozen=True, slots=True)
class Selection:
    """A backend and the reason for it, for the start-up line."""

    backend: IoBackend
    reason: str


def select_backend(
    config: OffloadConfig,
    aio_config: AioConfig,
    *,
    zero_uses_nvme: bool,
    pinned: bool,
    device: str = "cpu",
    directories: Sequence[Path] = (),
) -> Selection:
    """Return the backend that the config names, or for ``null`` the one that suits the run.

    Args:
        zero_uses_nvme: ZeRO's own NVMe offload is on, so that DeepSpeed builds its aio op anyway.
        pinned: the accelerator pins staging, so that aio need not lock it.
        device: the training device, such as ``"cuda"``.
        directories: where the swap files will be.

    Raises:
        BackendUnavailableError: the named backend cannot run on this machine; says what to install or to set.
        ConfigError: the process may not open as many files as the lanes need.
    """
    obstacle = None
    if zero_uses_nvme or config.io.backend == "aio" or (config.io.backend is None and aio.is_offered()):
        obstacle = aio.abandoned_build()
        if obstacle is None and (zero_uses_nvme or config.io.backend == "aio" or aio.is_built()):
            _check_descriptors(config, aio.AioBackend.name, aio.AioBackend.descriptors_per_handle)
            obstacle = aio.kernel_obstacle(aio_config, directories)
        if obstacle is not None and zero_uses_nvme:
            logger.warning("ZeRO's NVMe offload needs DeepSpeed's aio op, which cannot run here: %s", obstacle)
        obstacle = obstacle or _lock_obstacle(config, aio_config, pinned)
    if config.io.backend is not None:
        backend = _named(config, aio_config, obstacle, device)
        selection = Selection(backend, "; ".join(filter(None, [NAMED, backend.remark])))
    elif obstacle is not None:
        selection = Selection(PosixBackend(), obstacle)
    else:
        selection = _unnamed(config, aio_config, zero_uses_nvme)
    _check_descriptors(config, selection.backend.name, selection.backend.descriptors_per_handle)
    return selection


def _unnamed(config: OffloadConfig, aio_config: AioConfig, zero_uses_nvme: bool) -> Selection:
    if not (zero_uses_nvme or aio.is_offered()):
        return Selection(PosixBackend(), "this program does not import DeepSpeed, whose op aio is")
    if not (zero_uses_nvme or aio.is_built()):
        return Selection(PosixBackend(), "DeepSpeed's aio op is not built, and building it takes minutes")
    try:
        backend = aio.AioBackend(aio_config, _lanes(config) + 1)
    except BackendUnavailableError as error:
        return Selection(PosixBackend(), str(error).rstrip("."))
    uses = "ZeRO's NVMe offload uses DeepSpeed's aio op too" if zero_uses_nvme else "DeepSpeed's aio op is built"
    return Selection(backend, uses)


def _lanes(config: OffloadConfig) -> int:
    return (config.io.write_lanes + config.io.read_lanes) * len(config.nvme_paths)


def _check_descriptors(config: OffloadConfig, name: str, per_handle: int) -> None:
    """Refuse what would run into ``RLIMIT_NOFILE``, in mid-run and in whoever opens a file then."""
    needed = len(config.nvme_paths) + _lanes(config) * per_handle + SPARE_DESCRIPTORS
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        present = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        present = limit  # not even the one to count them with is left
    paths, write, read = len(config.nvme_paths), config.io.write_lanes, config.io.read_lanes
    if limit != resource.RLIM_INFINITY and present + needed > limit:
        raise ConfigError(
            f"{paths} path(s) with {write} write and {read} read lanes need up to {needed} file descriptors (backend "
            f"{name}, {SPARE_DESCRIPTORS} to spare), {present} are open, and this process may have {limit}: "
            f"raise the limit (ulimit -n {present + needed}) or lower io.write_lanes and io.read_lanes."
        )


def _lock_obstacle(config: OffloadConfig, aio_config: AioConfig, pinned: bool) -> str | None:
    """Name the limit of locked memory that aio would run into, with the repair; None if it does not."""
    pages_bytes = IO_ALIGNMENT_BYTES * aio_config.intra_op_parallelism  # of its first write
    if pinned and not can_lock(pages_bytes):
        return f"aio locks {pages_bytes} bytes in memory, above this process's limit: raise it (ulimit -l unlimited)"
    if not (pinned or can_lock(config.io.ring_bytes + pages_bytes)):
        return (
            f"aio locks all {config.io.ring_bytes} bytes of staging in memory, and {pages_bytes} more, above this "
            "process's limit: raise it (ulimit -l unlimited) or set io.staging_bytes to less"
        )
    return None


def _named(config: OffloadConfig, aio_config: AioConfig, obstacle: str | None, device: str) -> IoBackend:
    match config.io.backend:
        case "kvikio" | "gds":
            from ds_tba.storage.backends.kvikio import KvikioBackend

            return KvikioBackend(_lanes(config), device, direct=config.io.backend == "gds")
        case "aio" if obstacle is not None:
            raise BackendUnavailableError(f'io.backend: {obstacle}, or set "backend": "posix".')
        case "aio":
            return aio.AioBackend(aio_config, _lanes(config) + 1)
    return PosixBackend()
