"""Which backend serves this run, and why."""

from __future__ import annotations

from dataclasses import dataclass

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.errors import BackendUnavailableError
from ds_tba.io import aio
from ds_tba.io.base import IoBackend
from ds_tba.io.memory import can_lock
from ds_tba.io.posix import PosixBackend


@dataclass(frozen=True, slots=True)
class Selection:
    """A backend and the reason for it, for the start-up line."""

    backend: IoBackend
    reason: str


def select_backend(config: OffloadConfig, aio_config: AioConfig, *, zero_uses_nvme: bool, pinned: bool) -> Selection:
    """The backend that the config names, or for ``null`` the one of the design.

    Args:
        zero_uses_nvme: ZeRO's own NVMe offload is on, so that DeepSpeed builds its aio op anyway.
        pinned: the accelerator pins staging, so that aio need not lock it.

    Raises:
        BackendUnavailableError: the named backend cannot run on this machine; says what to install or to set.
    """
    obstacle = _aio_obstacle(config, aio_config, pinned)
    if config.io.backend is not None:
        return Selection(_named(config, aio_config, obstacle), "named in io.backend")
    if obstacle is not None:
        return Selection(PosixBackend(), obstacle)
    if zero_uses_nvme:
        return Selection(aio.AioBackend(aio_config), "ZeRO's NVMe offload uses DeepSpeed's aio op too")
    if aio.is_built():
        return Selection(aio.AioBackend(aio_config), "DeepSpeed's aio op is built")
    return Selection(PosixBackend(), "DeepSpeed's aio op is not built, and building it takes minutes")


def _aio_obstacle(config: OffloadConfig, aio_config: AioConfig, pinned: bool) -> str | None:
    """A limit of this process or machine that aio would run into, with the repair; None if there is none."""
    if not (pinned or can_lock(config.io.staging_bytes)):
        return (
            f"aio locks io.staging_bytes ({config.io.staging_bytes} bytes) in memory, above this process's limit: "
            "raise it (ulimit -l unlimited) or lower io.staging_bytes"
        )
    needed = aio.requests_needed(aio_config, (config.io.write_lanes + config.io.read_lanes) * len(config.nvme_paths))
    free = aio.requests_free()
    if free is not None and needed > free:
        return (
            f"aio needs {needed} kernel requests per rank and fs.aio-max-nr leaves {free}: raise it (sysctl "
            "fs.aio-max-nr=1048576) or lower the lanes or the aio block's queue_depth"
        )
    return None


def _named(config: OffloadConfig, aio_config: AioConfig, obstacle: str | None) -> IoBackend:
    name = config.io.backend
    if name == "posix":
        return PosixBackend()
    if name == "aio":
        if obstacle is not None:
            raise BackendUnavailableError(f'io.backend: {obstacle}, or set "backend": "posix".')
        return aio.AioBackend(aio_config)
    raise BackendUnavailableError(
        f'io.backend "{name}" is not available in this version of ds_tba: set "backend" to "aio" or "posix", '
        "or leave it out."
    )
