"""A store that is opened for a moment, to measure drives and a backend. Leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.planner.trace import PathRates
from ds_tba.storage.backends.base import IoBackend
from ds_tba.storage.bandwidth_probe import LARGEST_REQUEST_BYTES, REGION_BYTES
from ds_tba.storage.nvme import Lanes, NvmeStore
from ds_tba.storage.staging import StagingRing
from ds_tba.storage.swap_file import SwapFile, check_directories


@dataclass(frozen=True, slots=True)
class Probed:
    """The rates of each path, and the bytes written to measure them."""

    paths: tuple[PathRates, ...]
    written_bytes: int


@contextmanager
def opened(
    paths: Sequence[str], backend: IoBackend, lanes: Lanes, staging_bytes: int, file_bytes: int, integrity: str
) -> Iterator[NvmeStore]:
    """A store on directories, closed at the end.

    Args:
        file_bytes: size of each directory's swap file, reserved at once.

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
    """Measure the rates of directories with the lanes, as at the start of a run; takes a moment.

    Raises:
        PathError: a directory cannot hold a swap file, or a transfer failed.
    """
    staging_bytes = LARGEST_REQUEST_BYTES * (lanes.write + lanes.read) * len(paths)
    with opened(paths, backend, lanes, staging_bytes, REGION_BYTES, integrity) as store:
        store.measure()
        with store.space.lock:
            rates = tuple(PathRates(*path.rates()) for path in store.paths)
            return Probed(rates, sum(path.written_bytes for path in store.paths))
