"""The activation offloader of one engine: builds the parts from the config, counts steps, reports, cleans up.

Knows every part below; does not know DeepSpeed's engine (``engine.py`` holds the two together).
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict
from pathlib import Path

from ds_tba.cache import TensorCache
from ds_tba.config import BLOCK, AioConfig, OffloadConfig
from ds_tba.errors import BackendUnavailableError, ConfigError, IncompatibleError
from ds_tba.io.select import Selection, select_backend
from ds_tba.store.bundles import BundlingStore
from ds_tba.store.host import HostStore
from ds_tba.store.nvme import Lanes, NvmeStore
from ds_tba.store.paths import SwapDirectory, check_directories
from ds_tba.store.pieces import PiecesStore
from ds_tba.store.swap_file import SwapFile
from ds_tba.streams import Accelerator, pins_memory
from ds_tba.telemetry.drive import Drive, examine
from ds_tba.telemetry.report import OffloadReport, rank_path
from ds_tba.telemetry.stats import StoreStats
from ds_tba.telemetry.wear import PathWear, path_wear
from ds_tba.transfer import StagingRing

logger = logging.getLogger(__name__)

# Without io.swap_file_bytes: this part of the free space, shared by the ranks of the machine.
FREE_SPACE_PART = 0.9

# The JSON at report.path is at most so old when the process is killed (or one step, where steps are longer).
REPORT_AGE_S = 0.25

# Keys of the contract that only a planner can act on; naming them must not look like it had an effect.
_NOT_ACTED_ON = ("activation_budget_bytes", "blocks", "max_step_overhead", "recompute")


class ActivationOffloader:
    """What ``engine.activation_offloader`` is.

    Args:
        config: the block.
        aio_config: DeepSpeed's ``"aio"`` block.
        accelerator: the training device.
        zero_uses_nvme: ZeRO's own NVMe offload is on.
        rank: this process's rank, for the report.
        ranks_on_node: ranks that share this machine's directories.

    Raises:
        PathError, ConfigError, BackendUnavailableError: what stands in the way of training, with
            the repair; nothing is left open.
    """

    def __init__(
        self,
        config: OffloadConfig,
        aio_config: AioConfig,
        accelerator: Accelerator,
        *,
        zero_uses_nvme: bool = False,
        rank: int = 0,
        ranks_on_node: int = 1,
    ) -> None:
        self.config = config
        self._accelerator = accelerator
        self._rank = rank
        self._steps = 0
        self._state = "running"
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._started_at = time.monotonic()
        self._ended_at: float | None = None
        self._written_at = -REPORT_AGE_S
        self._selection: Selection | None = None
        self._directories: list[SwapDirectory] = []
        self._drives: list[Drive] = []
        self._report_path = _checked_report_path(config.report.path, rank)
        uses_host = config.host_budget_bytes > 0 and config.placement != "keep"
        if uses_host:
            _check_host_memory(config.host_budget_bytes, ranks_on_node)
        self._store: NvmeStore | None = (
            self._open_store(aio_config, accelerator, zero_uses_nvme, ranks_on_node) if config.uses_nvme else None
        )
        self._nvme = PiecesStore(BundlingStore(self._store), self._store) if self._store is not None else None
        self._host: HostStore | None = self._open_host(accelerator) if uses_host else None
        self.cache = TensorCache(
            [store for store in (self._nvme, self._host) if store is not None],
            accelerator.device_name(),
            config.min_tensor_bytes,
            wait_for_staging=config.placement == "nvme",
        )
        atexit.register(self.close)

    # ---- what a run calls ---------------------------------------------------------------------------------------

    def saving(self) -> AbstractContextManager[None]:
        """The context in which a forward runs so that what autograd saves goes through us.

        Raises:
            IncompatibleError: the stream is being captured into a graph.
        """
        if self._accelerator.is_capturing():
            raise IncompatibleError(
                "forward is being captured into a graph (torch.cuda.graph), whose replays would neither write nor read "
                f'activations: capture without "{BLOCK}", or run forward outside of the capture.'
            )
        self._refresh_report()
        return self.cache.saving()

    def note_step(self) -> None:
        """Tell that an optimizer step is done; reports every ``report.every_steps`` of them."""
        self._steps += 1
        every = self.config.report.every_steps
        if every and self._steps % every == 0:
            logger.info("rank %d: %s", self._rank, self.report().summary())
            self.write_report()
        self._refresh_report()

    def report(self) -> OffloadReport:
        """What happened so far."""
        cache = self.cache.stats
        store = self._store.stats if self._store is not None else StoreStats()
        host = self._host.stats if self._host is not None else StoreStats()
        slots = self._store.ring.slots if self._store is not None else None
        # What NVMe refuses and the host tier refuses too is one fallback.
        kept, fallbacks = Counter(cache.kept_bytes), Counter((store if self._store else host).fallbacks)
        return OffloadReport(
            state=self._state,
            rank=self._rank,
            backend=self._selection.backend.name if self._selection else "none",
            backend_reason=self._selection.reason if self._selection else f"placement {self.config.placement}",
            paths=[str(directory.path) for directory in self._directories],
            placement=self.config.placement,
            integrity=self.config.io.integrity,
            steps=self._steps,
            micro_steps=cache.micro_steps,
            packed_tensors=cache.packed_tensors,
            passed_through_tensors=cache.passed_through_tensors,
            offloaded_bytes=store.offloaded_bytes + host.offloaded_bytes,
            written_bytes=store.writes.nbytes,
            read_bytes=store.reads.nbytes,
            forwarded_bytes=store.forwarded_bytes,
            cancelled_bytes=store.cancelled_bytes,
            deduplicated_bytes=cache.deduplicated_bytes,
            kept_bytes=sum(kept.values()),
            host_bytes=host.offloaded_bytes + store.rescued_bytes,
            recomputed_bytes=0,
            peak_staging_bytes=slots.peak_used_bytes if slots else 0,
            swap_file_bytes=sum(path.file.size_bytes for path in self._store.paths) if self._store else 0,
            peak_saved_bytes=cache.resident.peak,
            peak_saved_bytes_without=cache.saved.peak,
            fallbacks=sum(fallbacks.values()),
            write_bytes_per_s=store.writes.bytes_per_s,
            read_bytes_per_s=store.reads.bytes_per_s,
            stall_s=store.stall_s,
            kept_bytes_by_reason=dict(kept),
            fallbacks_by_reason=dict(fallbacks),
            coalesced_bytes=store.coalesced_bytes,
            bandwidth=[path.bandwidth() for path in self._store.paths] if self._store is not None else [],
            wear=[asdict(one) for one in self._wear()],
        )

    def _wear(self) -> list[PathWear]:
        elapsed_s = (self._ended_at or time.monotonic()) - self._started_at
        rated = self.config.ssd.rated_endurance_tbw
        paths = self._store.paths if self._store is not None else []
        return [
            path_wear(path.file.directory, drive, path.written_bytes, elapsed_s, rated)
            for path, drive in zip(paths, self._drives, strict=True)
        ]

    def start_line(self) -> str:
        """What will run, for the log."""
        if self._host is not None and self._store is None:
            return f"ds_tba: activations go to host memory, up to {self.config.host_budget_bytes} bytes per rank"
        if self._selection is None or self._store is None:
            return 'ds_tba: placement "keep": activations are measured, not moved'
        config, files = self.config, [path.file for path in self._store.paths]
        parts = [
            f"ds_tba: activations go to {', '.join(self._places())}",
            f"backend {self._selection.backend.name} ({self._selection.reason})",
            f"up to {sum(file.limit_bytes for file in files) / 2**30:.1f} GiB per rank",
            f"eligible: saved storages of {config.min_tensor_bytes} bytes and more, up to io.staging_bytes "
            f"{config.io.staging_bytes}",
            f"{config.io.write_lanes} write and {config.io.read_lanes} read lanes, integrity {config.io.integrity}",
        ]
        if self._host is not None:
            parts.append(f"what NVMe cannot take goes to host memory, up to {config.host_budget_bytes} bytes per rank")
        if not all(file.direct for file in files):
            parts.append("no O_DIRECT on this file system: I/O goes through the page cache and is slower")
        ignored = [key for key in _NOT_ACTED_ON if getattr(config, key) != OffloadConfig.model_fields[key].default]
        ignored += ["report.trace_path"] if config.report.trace_path else []
        ignored += ["ssd.min_life_days"] if config.ssd.min_life_days else []
        if ignored:
            parts.append(f"not acted on in this version: {', '.join(ignored)}")
        return "; ".join(parts)

    def _places(self) -> list[str]:
        """Each directory with its file system and drive: an empty mount point would be on the wrong one."""
        return [
            f"{directory.path} ({' on '.join(filter(None, (directory.file_system, drive.device)))})"
            for directory, drive in zip(self._directories, self._drives, strict=True)
        ]

    def write_report(self) -> None:
        """Write the JSON at ``report.path``, if one is set; a failure is logged, never raised into training."""
        if self._report_path is None:
            return
        try:
            self.report().write_json(self._report_path)
        except OSError as error:
            logger.warning("report.path %s cannot be written: %s", self._report_path, error)
        self._written_at = time.monotonic()

    def _refresh_report(self) -> None:
        # Instead of a signal handler: that would run only when the main thread comes back from C++, SIGKILL has none,
        # and a process that is killed in a hang still leaves a report this way.
        if self._report_path is not None and time.monotonic() - self._written_at >= REPORT_AGE_S:
            self.write_report()

    def close(self) -> None:
        """Stop the lanes, give every byte back, write the last report. Idempotent.

        Blocks until the I/O under way is done, so a finalizer must call :meth:`close_soon` instead.
        """
        if self._pid != os.getpid():
            return  # a forked child has neither our threads nor our report
        with self._closing:
            if self._state == "finished":
                return
            self.cache.settle()
            for store in (self._nvme, self._host):
                if store is not None:
                    store.close()
            self._state = "finished"
            self._ended_at = time.monotonic()
            logger.info("ds_tba, rank %d: %s", self._rank, self.report().summary())
            self.write_report()
        atexit.unregister(self.close)

    def close_soon(self) -> None:
        """Close in another thread: a finalizer may run in a lane, or while this very thread holds one of our locks."""
        if self._pid == os.getpid() and self._state != "finished":
            with suppress(RuntimeError):  # no new thread at interpreter exit, where atexit closes
                threading.Thread(target=self.close, name="ds_tba-close", daemon=True).start()

    # ---- building -----------------------------------------------------------------------------------------------

    def _open_host(self, accelerator: Accelerator) -> HostStore:
        try:
            return HostStore(accelerator, self.config.host_budget_bytes, self.config.io.staging_bytes)
        except BaseException:
            if self._store is not None:
                self._store.close()
            raise

    def _warn_of_spinning_disks(self) -> None:
        for directory, drive in zip(self._directories, self._drives, strict=True):
            if drive.rotational and self._rank == 0:
                logger.warning(
                    "nvme_path %s is on %s, which the system takes for a spinning disk: activations would wait for it. "
                    "Name a directory on an NVMe drive",
                    directory.path,
                    drive.device,
                )

    def _open_store(
        self, aio_config: AioConfig, accelerator: Accelerator, zero_uses_nvme: bool, ranks_on_node: int
    ) -> NvmeStore:
        config = self.config
        needed = config.io.swap_file_bytes or config.io.staging_bytes
        self._directories = check_directories(config.nvme_paths, needed, ranks_on_node)
        self._drives = [examine(directory.path) for directory in self._directories]
        self._warn_of_spinning_disks()
        self._selection = select_backend(
            config,
            aio_config,
            zero_uses_nvme=zero_uses_nvme,
            pinned=pins_memory(accelerator),
            device=accelerator.device_name(),
        )
        with ExitStack() as undo:
            files = []
            for directory in self._directories:
                share = int(directory.free_bytes * FREE_SPACE_PART) // ranks_on_node
                file = SwapFile(directory.path, config.io.swap_file_bytes or max(share, needed))
                undo.callback(file.close)
                _check_direct(file, self._selection)
                file.reserve_first(min(needed, config.io.staging_bytes))
                files.append(file)
            ring = StagingRing(accelerator, self._selection.backend, config.io.staging_bytes)
            undo.callback(ring.close)
            lanes = Lanes(config.io.write_lanes, config.io.read_lanes)
            store = NvmeStore(files, self._selection.backend, ring, lanes, config.io.integrity)
            undo.pop_all()
        return store


def _check_direct(file: SwapFile, selection: Selection) -> None:
    """Refuse all but posix where the file system has no O_DIRECT.

    DeepSpeed's ops ask for it at every request and report no error; kvikio would silently fill the page cache.
    """
    name = selection.backend.name
    if not file.direct and name != "posix":
        raise BackendUnavailableError(
            f"io.backend {name}: the file system of {file.directory} has no O_DIRECT, which {name} needs: set "
            '"io": {"backend": "posix"}, or name another directory.'
        )


def _check_host_memory(budget_bytes: int, ranks_on_node: int) -> None:
    """Refuse a budget that the machine's free memory cannot hold, before taking it page by page."""
    meminfo = Path("/proc/meminfo").read_text()
    free_bytes = int(meminfo.partition("MemAvailable:")[2].split()[0]) * 1024
    if budget_bytes * ranks_on_node > free_bytes:
        raise ConfigError(
            f'"{BLOCK}.host_budget_bytes" is {budget_bytes} for each of {ranks_on_node} rank(s) of this machine, with '
            f"{free_bytes} bytes of memory available: lower it to {free_bytes // ranks_on_node} at most."
        )


def _checked_report_path(path: str | None, rank: int) -> Path | None:
    if path is None:
        return None
    target = rank_path(path, rank)
    if target.is_dir():
        raise ConfigError(f"report.path {target} is a directory: name a file, for example {target / 'report.json'}.")
    if not os.access(target.parent, os.W_OK):
        raise ConfigError(f"report.path {target}: its directory is missing or not writable: create it first.")
    return target
