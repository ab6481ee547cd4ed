"""A store that is opened for a moment, to see what the drives and a way to them can do. Leaves nothing behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.errors import PathError
from ds_tba.planner.trace import PathRates
from ds_tba.storage.backends.base import IoBackend
from ds_tba.storage.bandwidth_probe import LARGEST_REQUEST_BYTES, REGION_BYTES
from ds_tba.storage.base import Refusal, SwapTicket
from ds_tba.storage.nvme import Lanes, NvmeStore
from ds_tba.storage.staging import StagingRing
from ds_tba.storage.swap_file import SwapFile, check_directories

STORAGE_BYTES = 16 << 20  # a typical one


@dataclass(frozen=True, slots=True)
class Probed:
    """What a store's paths did in one trial.

    Attributes:
        paths: the rates of each.
        written_bytes: what that cost the drives.
    """

    paths: tuple[PathRates, ...]
    written_bytes: int


@contextmanager
def opened(
    paths: Sequence[str], backend: IoBackend, lanes: Lanes, staging_bytes: int, file_bytes: int, integrity: str
) -> Iterator[NvmeStore]:
    """A store on directories, closed at the end.

    Args:
        file_bytes: of each directory's swap file, reserved at once.

    Raises:
        PathError: a directory cannot hold the file.
    """
    with ExitStack() as undo:
        files = []
        for directory in check_directories(tuple(paths), file_bytes, 1):
            file = SwapFile(Path(directory.path), file_bytes)
            undo.callback(file.close)
            file.reserve_first(file_bytes)
            files.append(file)
        ring = StagingRing(CpuAccelerator(), backend, staging_bytes)
        undo.callback(ring.close)
        store = NvmeStore(files, backend, ring, lanes, integrity)
        undo.pop_all()
        try:
            yield store
        finally:
            store.close()


def probe(paths: Sequence[str], backend: IoBackend, lanes: Lanes, integrity: str) -> Probed:
    """The rates of directories, found by the lanes as at the start of a run; takes a moment.

    Raises:
        PathError: a directory cannot hold a swap file, or a transfer failed.
    """
    staging_bytes = LARGEST_REQUEST_BYTES * (lanes.write + lanes.read) * len(paths)
    with opened(paths, backend, lanes, staging_bytes, REGION_BYTES, integrity) as store:
        store.measure()
        with store.space.lock:
            rates = tuple(PathRates(*path.rates()) for path in store.paths)
            return Probed(rates, sum(path.written_bytes for path in store.paths))


@dataclass(frozen=True, slots=True)
class Flowed:
    """What went through a store, in bytes per second, and what that cost the drives."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    written_bytes: int


def flow(
    paths: Sequence[str],
    backend: IoBackend,
    lanes: Lanes,
    staging_bytes: int,
    integrity: str,
    nbytes: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Flowed:
    """Storages of a typical size go through the whole store and come back, as fast as they can.

    Args:
        nbytes: of all of them; written twice, because fresh room in a file is slower at first.
        clock: seconds.

    Raises:
        PathError: a directory cannot hold them.
    """
    count = max(1, nbytes // STORAGE_BYTES)
    file_bytes = (count // len(paths) + 1) * STORAGE_BYTES
    data = torch.arange(STORAGE_BYTES // 8, dtype=torch.int64).view(torch.uint8)
    with opened(paths, backend, lanes, staging_bytes, file_bytes, integrity) as store:
        for ticket in _out(store, data, count):
            store.release(ticket)
        started_s = clock()
        tickets = _out(store, data, count)
        written_s = clock()
        _back(store, tickets)
        read_s = clock()
        written_bytes = sum(path.written_bytes for path in store.paths)
    moved = count * STORAGE_BYTES
    return Flowed(moved / (written_s - started_s), moved / (read_s - written_s), written_bytes)


def _out(store: NvmeStore, data: torch.Tensor, count: int) -> list[SwapTicket]:
    tickets: list[SwapTicket] = []
    for _ in range(count):
        taken = store.put(data, wait=True)
        if isinstance(taken, Refusal):
            raise PathError(f"{store.paths[0].file.directory} took {len(tickets)} of {count} storages: {taken.value}")
        tickets.append(taken)
    store.wait_for_writes()
    return tickets


def _back(store: NvmeStore, tickets: list[SwapTicket]) -> None:
    ahead = 0
    for index, ticket in enumerate(tickets):
        while ahead < len(tickets) and store.prefetch(tickets[ahead]):
            ahead += 1
        store.get(ticket, torch.device("cpu"))
        store.release(ticket)
        ahead = max(ahead, index + 1)
