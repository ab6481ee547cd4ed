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
    lockable = pinned or can_lock(config.io.staging_bytes)
    if config.io.backend is not None:
        return Selection(_named(config, aio_config, lockable), "named in io.backend")
    if not lockable:
        return Selection(PosixBackend(), f"aio would need to lock {config.io.staging_bytes} bytes, above ulimit -l")
    if zero_uses_nvme:
        return Selection(aio.AioBackend(aio_config), "ZeRO's NVMe offload uses DeepSpeed's aio op too")
    if aio.is_built():
        return Selection(aio.AioBackend(aio_config), "DeepSpeed's aio op is built")
    return Selection(PosixBackend(), "DeepSpeed's aio op is not built, and building it takes minutes")


def _named(config: OffloadConfig, aio_config: AioConfig, lockable: bool) -> IoBackend:
    name = config.io.backend
    if name == "posix":
        return PosixBackend()
    if name == "aio":
        if not lockable:
            raise BackendUnavailableError(
                f"io.backend aio locks io.staging_bytes ({config.io.staging_bytes} bytes) in memory, above this "
                'process\'s limit: raise it (ulimit -l unlimited), lower io.staging_bytes, or set "backend": "posix".'
            )
        return aio.AioBackend(aio_config)
    raise BackendUnavailableError(
        f'io.backend "{name}" is not available in this version of ds_tba: set "backend" to "aio" or "posix", '
        "or leave it out."
    )
