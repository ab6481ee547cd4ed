"""Which tiers has this rank, over which backend? Opens the stores that the config asks for, and closes them.

Knows stores, backends and drives; cannot see the cache nor what is decided, nor which backend is the fastest.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import resource
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_tba.config import BLOCK, IO_ALIGNMENT_BYTES, AioConfig, OffloadConfig, Placement
from ds_tba.device.accelerator import Accelerator, available_bytes
from ds_tba.errors import BackendUnavailableError, ConfigError
from ds_tba.stats import ASSUMED_TBW, PathWear, StoreStats, drive_of, rated, readable
from ds_tba.storage.backends import IoBackend, PosixBackend, aio
from ds_tba.storage.base import AnyStore, Refusal
from ds_tba.storage.host import HostStore
from ds_tba.storage.integrity import Codec
from ds_tba.storage.nvme import Lanes, NvmeStore
from ds_tba.storage.path import SwapDirectory, SwapFile, SwapPath, check_directories
from ds_tba.storage.staging import StagingRing, lanes_of

logger = logging.getLogger(__name__)

# Without io.swap_file_bytes: this part of the free space, shared by the ranks of the machine.
FREE_SPACE_FRACTION = 0.9
# With host_budget_bytes null: this part of the memory that is free at the start stays free.
RESERVED_FRACTION = 0.5
DESCRIPTORS_OF_LANE = 2  # kvikio opens the file with and without O_DIRECT; aio opens it once for each transfer
SPARE_DESCRIPTORS = 32  # for what else opens files later: the report, the data loader, libraries

NAMED = "named in io.backend"


class Tiers:
    """NVMe and host memory, as far as the config wants them.

    Raises:
        PathError, ConfigError, BackendUnavailableError: a tier cannot be opened; names the repair. Nothing is left
            open.
    """

    def __init__(
        self,
        config: OffloadConfig,
        aio_config: AioConfig,
        accelerator: Accelerator,
        *,
        zero_paths: Sequence[str],
        ranks_on_node: int,
    ) -> None:
        self._config = config
        self._ranks_on_node = ranks_on_node  # that share this machine's directories
        self._accelerator = accelerator
        self._zero_paths = zero_paths  # directories of ZeRO's own offload to NVMe
        self.selection: Selection | None = None  # the backend, and why; None without swap files
        self.directories: list[SwapDirectory] = []
        self.nvme: NvmeStore | None = None  # None where nothing goes there
        self.host: HostStore | None = None  # None likewise
        self.by_placement: dict[Placement, AnyStore] = {}  # where the cache puts things, in order of preference
        uses_host = config.host_budget_bytes != 0 and config.placement != "keep"
        self._host_is_first = uses_host and config.placement != "nvme"
        host_bytes, reserve_bytes = _host_limits(config.host_budget_bytes, ranks_on_node) if uses_host else (0, 0)
        with ExitStack() as undo:
            undo.callback(self.close)
            if config.uses_nvme:
                self.nvme = self._open_nvme(aio_config)
                self.by_placement[Placement.NVME] = self.nvme
            if uses_host:
                self.host = HostStore(accelerator, host_bytes, config.io.ring_bytes, reserve_bytes=reserve_bytes)
                host = {Placement.HOST: self.host}  # costs its copies only, and wears nothing
                self.by_placement = host | self.by_placement if self._host_is_first else self.by_placement | host
            undo.pop_all()

    @property
    def paths(self) -> list[SwapPath]:
        return self.nvme.paths if self.nvme is not None else []

    @property
    def shares_drive_with_zero(self) -> bool:
        """True if ZeRO reads and writes on a drive of ours, too."""
        return not self._drives().isdisjoint(drive_of(Path(path).absolute()) for path in self._zero_paths)

    def rates(self) -> tuple[float, float]:
        """Return the bytes per second of writes and of reads, of all paths that work."""
        if self.nvme is None:
            return 0.0, 0.0
        with self.nvme.lock:
            rates = [path.rates() for path in self.nvme.working]
        return sum(write for write, _ in rates), sum(read for _, read in rates)

    def lane_s_per_byte(self) -> float:
        """Return the processor time that the lanes have taken for a byte that goes out and comes back."""
        meters = [path.meter for path in self.paths]
        return max((one.writes.lane_s_per_byte + one.reads.lane_s_per_byte for one in meters), default=0.0)

    def summary(self) -> dict[str, Any]:
        """Return the fields of the report about stores and drives."""
        # Takes no lock: the closer's thread calls this, too, after a lane has hung with its lock held.
        nvme, chosen = self.nvme, self.selection
        compression = None if nvme is None else self._config.io.compression
        store = nvme.stats if nvme is not None else StoreStats()
        writes, reads = [path.meter.writes for path in self.paths], [path.meter.reads for path in self.paths]
        compressed = {
            "uncompressed_bytes": sum(one.moved_bytes for one in writes),
            "compression_ratio": round(self.stored_share(), 4),
        }
        host = self.host.stats if self.host is not None else StoreStats()
        return {
            "backend": chosen.backend.name if chosen else "none",
            "backend_reason": chosen.reason if chosen else f"placement {self._config.placement}",
            "paths": [str(directory.path) for directory in self.directories],
            "offloaded_bytes": store.offloaded_bytes + host.offloaded_bytes,
            "written_bytes": sum(one.drive_bytes for one in writes),
            "compression": compression,
            **(compressed if compression else {}),
            "read_bytes": sum(one.drive_bytes for one in reads),
            "forwarded_bytes": store.forwarded_bytes,
            "cancelled_bytes": store.cancelled_bytes,
            "host_bytes": host.offloaded_bytes + store.rescued_bytes,
            "peak_staging_bytes": nvme.ring.slots.peak_used_bytes if nvme is not None else 0,
            "swap_file_bytes": sum(path.file.largest_bytes for path in self.paths),
            "fallbacks_by_reason": dict(+Counter({Refusal.PATH_FAILED.value: store.rescued_storages})),
            "write_bytes_per_s": sum(one.recent.bytes_per_s for one in writes),
            "read_bytes_per_s": sum(one.recent.bytes_per_s for one in reads),
            "stall_s": store.stall_s,
            "bandwidth": [path.bandwidth() for path in self.paths],
        }

    def wear(self, elapsed_s: float) -> list[PathWear]:
        """Return the wear of each path at the rate of the ``elapsed_s`` since the start."""
        tbw, ranks = self._config.ssd.rated_endurance_tbw, self._ranks_on_node
        return [
            PathWear.of(one.file.directory, one.meter.writes.drive_bytes, elapsed_s, tbw, ranks) for one in self.paths
        ]

    def left_tbw(self) -> float:
        """Return the terabytes that all drives together are rated for, as one rank's share."""
        return len(self._drives()) * (self._config.ssd.rated_endurance_tbw or ASSUMED_TBW) / self._ranks_on_node

    def _drives(self) -> set[int]:
        return {drive_of(directory.path) for directory in self.directories}

    def stored_share(self) -> float:
        """Return the bytes that the drives were written for a byte of storages; 1 without compression."""
        writes = [path.meter.writes for path in self.paths]
        tensor_bytes = sum(one.moved_bytes for one in writes)
        return sum(one.drive_bytes for one in writes) / tensor_bytes if tensor_bytes else 1.0

    def describe(self) -> list[str]:
        """Return parts of the line that says at the start what will run; empty where nothing is offloaded."""
        host = "" if self.host is None else f"host memory, up to {self.host.limit_bytes} bytes per rank"
        if self.selection is None:
            return [f"activations go to {host}"] if host else []
        why = self.selection.reason.removeprefix(NAMED).removeprefix("; ")  # what the config says needs no reason
        first = f"{host}, then to " if self._host_is_first else ""
        tbw = rated(self._config.ssd.rated_endurance_tbw)
        # With the file system: an empty mount point is on the wrong one.
        places = [f"{one.path} ({one.file_system}, {tbw})" for one in self.directories]
        parts = [
            f"activations go to {first}{', '.join(places)}",
            f"backend {self.selection.backend.name}{why and f' ({why})'}, "
            f"{readable(sum(path.file.limit_bytes for path in self.paths))} at most",
        ]
        if self.shares_drive_with_zero and self._config.placement == "adaptive":
            parts.append(
                "ZeRO's offload uses a drive of these, too: plans begin by keeping everything, and offload more "
                "in the same time with either of them on a second drive"
            )
        return parts

    def give_back(self) -> None:
        """Give lanes, staging, disk space and host memory back until the next save, where nothing of them is in use."""
        for store in self.by_placement.values():
            store.give_back()
        self._accelerator.give_pinned_back()

    def close(self) -> None:
        """Give everything back. Idempotent."""
        with ExitStack() as closing:  # each of them, whatever becomes of the others
            closing.callback(self._accelerator.give_pinned_back)  # last
            for store in self.by_placement.values():
                closing.callback(store.close)

    def _open_nvme(self, aio_config: AioConfig) -> NvmeStore:
        config, accelerator = self._config, self._accelerator
        limit_bytes = config.io.swap_file_bytes
        needed = limit_bytes or config.io.ring_bytes
        lower = "set io.staging_bytes to less, " if limit_bytes is None else "lower io.swap_file_bytes, "
        self.directories = check_directories(config.nvme_paths, needed, self._ranks_on_node, lower)
        self.selection = select_backend(
            config,
            aio_config,
            zero_uses_nvme=bool(self._zero_paths),
            pinned=not accelerator.is_synchronous,
            device=accelerator.device().type,
        )
        with ExitStack() as undo:
            files = []
            for directory in self.directories:
                share = int(directory.free_bytes * FREE_SPACE_FRACTION) // self._ranks_on_node
                file = SwapFile(directory.path, limit_bytes or max(share, needed))
                undo.callback(file.close)
                files.append(file)
            codec = _open_codec(config, self.selection)
            lanes = Lanes(config.io.write_lanes, config.io.read_lanes)
            buffers = 0 if codec is None else lanes_of(config)
            ring = StagingRing(accelerator, self.selection.backend, config.io.ring_bytes, buffers)
            store = NvmeStore(files, self.selection.backend, ring, lanes, config.io.integrity, codec)
            undo.pop_all()
        return store


def _open_codec(config: OffloadConfig, selection: Selection) -> Codec | None:
    """Return the codec of ``io.compression``; None without one."""
    if config.io.compression is None:
        return None
    if selection.backend.stages_on_device:
        raise BackendUnavailableError(
            f'io.compression "{config.io.compression}" compresses in host memory, through which backend '
            f'{selection.backend.name} moves no bytes here ({selection.reason}): set "io": {{"backend": "posix"}}, or '
            "leave io.compression out."
        )
    return Codec(config.io.compression)


def _host_limits(budget_bytes: int | None, ranks_on_node: int) -> tuple[int, int]:
    """Return how much host memory this rank takes at most, and how much of the machine's has to stay free.

    Raises:
        ConfigError: the machine's free memory cannot hold the budget, which is found before taking it page by page.
    """
    free_bytes = available_bytes()
    if budget_bytes is None:
        reserve_bytes = int(free_bytes * RESERVED_FRACTION)
        return (free_bytes - reserve_bytes) // ranks_on_node, reserve_bytes
    if budget_bytes * ranks_on_node > free_bytes:
        raise ConfigError(
            f'"{BLOCK}.host_budget_bytes" is {budget_bytes} for each of {ranks_on_node} rank(s) of this machine, with '
            f"{free_bytes} bytes of memory available: lower it to {free_bytes // ranks_on_node} at most."
        )
    return budget_bytes, 0


# ---- the backend ----------------------------------------------------------------------------------------------------


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
    name, lanes, obstacle = config.io.backend, lanes_of(config), None
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


def _check_descriptors(config: OffloadConfig) -> None:
    """Refuse what would run into ``RLIMIT_NOFILE``, in mid-run and in whoever opens a file then."""
    paths, write, read = len(config.nvme_paths), config.io.write_lanes, config.io.read_lanes
    needed = paths + lanes_of(config) * DESCRIPTORS_OF_LANE + SPARE_DESCRIPTORS
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


def can_lock(nbytes: int) -> bool:
    """Try whether this process may lock so much memory (``RLIMIT_MEMLOCK``, ``CAP_IPC_LOCK``); return the answer."""
    libc = ctypes.CDLL(None)
    libc.mlock.argtypes = libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    try:
        region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):  # more than the machine has, or than an address can tell
        return False
    address = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
    locked: bool = libc.mlock(address, nbytes) == 0
    if locked:
        libc.munlock(address, nbytes)
    return locked
