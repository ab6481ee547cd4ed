"""Which tiers has this rank? Opens the stores that the config asks for, knows what is behind them, closes them.

Knows stores, backends and drives; cannot see the cache nor what is decided.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ds_tba.config import BLOCK, AioConfig, OffloadConfig, Placement
from ds_tba.device.accelerator import Accelerator, available_bytes
from ds_tba.errors import BackendUnavailableError, ConfigError
from ds_tba.stats import ASSUMED_TBW, PathWear, StoreStats, drive_of, rated, readable
from ds_tba.storage.backends.select import NAMED, Selection, select_backend
from ds_tba.storage.base import AnyStore, Refusal
from ds_tba.storage.codec import Codec
from ds_tba.storage.host import HostStore
from ds_tba.storage.nvme import Lanes, NvmeStore
from ds_tba.storage.path import SwapPath
from ds_tba.storage.staging import StagingRing
from ds_tba.storage.swap_file import SwapDirectory, SwapFile, check_directories

logger = logging.getLogger(__name__)

# Without io.swap_file_bytes: this part of the free space, shared by the ranks of the machine.
FREE_SPACE_FRACTION = 0.9
# With host_budget_bytes null: this part of the memory that is free at the start stays free.
RESERVED_FRACTION = 0.5


class Tiers:
    """NVMe and host memory, as far as the config wants them.

    Args:
        aio_config: DeepSpeed's ``"aio"`` block.
        zero_paths: directories of ZeRO's own offload to NVMe.
        ranks_on_node: ranks that share this machine's directories.

    Attributes:
        nvme: the store of swap files; None where nothing goes there.
        host: the store in host memory; None likewise.
        by_placement: where the cache puts things, in order of preference.
        selection: the backend, and why; None without swap files.

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
        self._ranks_on_node = ranks_on_node
        self._accelerator = accelerator
        self._zero_paths = zero_paths
        self.selection: Selection | None = None
        self.directories: list[SwapDirectory] = []
        self.nvme: NvmeStore | None = None
        self.host: HostStore | None = None
        self.by_placement: dict[Placement, AnyStore] = {}
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

    def rates(self) -> list[tuple[float, float, float, float]]:
        """Return :meth:`SwapPath.rates` of each path that works."""
        if self.nvme is None:
            return []
        with self.nvme.lock:
            return [path.rates() for path in self.nvme.working]

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
        compressed = {
            "uncompressed_bytes": sum(path.tensor_bytes for path in self.paths),
            "compression_ratio": round(self.stored_share(), 4),
        }
        host = self.host.stats if self.host is not None else StoreStats()
        return {
            "backend": chosen.backend.name if chosen else "none",
            "backend_reason": chosen.reason if chosen else f"placement {self._config.placement}",
            "paths": [str(directory.path) for directory in self.directories],
            "offloaded_bytes": store.offloaded_bytes + host.offloaded_bytes,
            "written_bytes": store.written_bytes,
            "compression": compression,
            **(compressed if compression else {}),
            "read_bytes": store.read_bytes,
            "forwarded_bytes": store.forwarded_bytes,
            "cancelled_bytes": store.cancelled_bytes,
            "host_bytes": host.offloaded_bytes + store.rescued_bytes,
            "peak_staging_bytes": nvme.ring.slots.peak_used_bytes if nvme is not None else 0,
            "swap_file_bytes": sum(path.file.largest_bytes for path in self.paths),
            "fallbacks_by_reason": dict(+Counter({Refusal.PATH_FAILED.value: store.rescued_storages})),
            "write_bytes_per_s": sum(path.meter.writes.recent.bytes_per_s for path in self.paths),
            "read_bytes_per_s": sum(path.meter.reads.recent.bytes_per_s for path in self.paths),
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
        tensor_bytes = sum(path.tensor_bytes for path in self.paths)
        return sum(path.stored_bytes for path in self.paths) / tensor_bytes if tensor_bytes else 1.0

    def describe(self) -> list[str]:
        """Return parts of the line that says at the start what will run; empty where nothing is offloaded."""
        if self.selection is None:
            return [] if self.host is None else [f"activations go to {self.host_in_words}"]
        why = self.selection.reason.removeprefix(NAMED).removeprefix("; ")  # what the config says needs no reason
        first = f"{self.host_in_words}, then to " if self._host_is_first else ""
        parts = [
            f"activations go to {first}{', '.join(self._places())}",
            f"backend {self.selection.backend.name}{why and f' ({why})'}, "
            f"{readable(sum(path.file.limit_bytes for path in self.paths))} at most",
        ]
        if self.shares_drive_with_zero and self._config.placement == "adaptive":
            parts.append(
                "ZeRO's offload uses a drive of these, too: plans begin with a quarter of the bytes, and offload more "
                "in the same time with either of them on a second drive"
            )
        return parts

    @property
    def host_in_words(self) -> str:
        """Return words for host memory and its bound."""
        return f"host memory, up to {0 if self.host is None else self.host.limit_bytes} bytes per rank"

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

    def _places(self) -> list[str]:
        """Name each directory with its file system and rating: an empty mount point is on the wrong one."""
        tbw = self._config.ssd.rated_endurance_tbw
        return [f"{one.path} ({', '.join(filter(None, (one.file_system, rated(tbw))))})" for one in self.directories]

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
            buffers = 0 if codec is None else len(files) * (lanes.write + lanes.read)
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
