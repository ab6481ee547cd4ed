"""``ds_tba tune``: which backend, and how many lanes, are fastest on these drives?

All candidates are measured in turn, in a new order each round, with the lanes of a real store. Machines are noisy, so
one is recommended only if its slowest measurement is above the fastest of the defaults. Nothing computes meanwhile: how
much staging a run needs to buffer what forward saves in bursts is not seen.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ds_tba.cli.format import in_units_of, show, table
from ds_tba.config import AioConfig, IoConfig
from ds_tba.errors import DsTbaError

if TYPE_CHECKING:
    from ds_tba.planner.trace import PathRates
    from ds_tba.storage.backends.base import IoBackend
    from ds_tba.storage.nvme import Lanes

_DESCRIPTION = """\
Writes and reads noise with every backend that runs here, with 1, 2 and 4 lanes of each kind. Prints a table, and the
"io" block of "activation_nvme_offload" to paste if one was faster than the defaults in every measurement. Leaves no
file behind; the bytes written are printed, because they wear the drives.
"""
GIB = 1 << 30
LANES = (1, 2, 4)
MIN_ROUNDS = 3  # below, nothing is recommended: two measurements are in one order half of the time


class Candidate(NamedTuple):
    """Settings to compare; as many write lanes as read lanes."""

    backend: str
    lanes: int

    def block(self) -> dict[str, Any]:
        """For the key ``"io"``."""
        return {"backend": self.backend, "write_lanes": self.lanes, "read_lanes": self.lanes}


class Measured(NamedTuple):
    """Rates of each path, and the bytes written to measure them."""

    paths: tuple[PathRates, ...]
    written_bytes: int

    @property
    def rates(self) -> tuple[float, float, float, float]:
        """Bytes per second over all paths: of writes, of reads, of both at once, of a write and a read in turn."""
        write, read = (sum(getattr(path, f"{kind}_bytes_per_s") for path in self.paths) for kind in ("write", "read"))
        both = sum(path.write_beside_read_bytes_per_s + path.read_beside_write_bytes_per_s for path in self.paths)
        return write, read, both, 2.0 / (1.0 / write + 1.0 / read)


def probe(paths: Sequence[str], backend: IoBackend, lanes: Lanes, integrity: str) -> Measured:
    """Measure directories as at the start of a run, which takes a moment; leaves nothing behind.

    Raises:
        PathError: a directory cannot hold a swap file, or a transfer failed.
    """
    from ds_tba.device.accelerator import CpuAccelerator
    from ds_tba.planner.trace import PathRates
    from ds_tba.storage.bandwidth_probe import LARGEST_REQUEST_BYTES, REGION_BYTES, measure_drives
    from ds_tba.storage.nvme import NvmeStore
    from ds_tba.storage.staging import StagingRing
    from ds_tba.storage.swap_file import SwapFile, check_directories

    with ExitStack() as undo:
        files = []
        for directory in check_directories(tuple(paths), REGION_BYTES, 1):
            file = SwapFile(Path(directory.path), REGION_BYTES)
            undo.callback(file.close)
            file.reserve_first(REGION_BYTES)
            files.append(file)
        ring = StagingRing(CpuAccelerator(), backend, LARGEST_REQUEST_BYTES * (lanes.write + lanes.read) * len(paths))
        undo.callback(ring.close)
        store = NvmeStore(files, backend, ring, lanes, integrity)
        undo.pop_all()  # they are the store's to close
        undo.callback(store.close)
        measure_drives(store.space, store.integrity)
        with store.space.lock:
            rates = tuple(PathRates(*path.rates()) for path in store.paths)
            return Measured(rates, sum(path.written_bytes for path in store.paths))


@dataclass(slots=True)
class Tuned:
    """All measurements of each candidate."""

    default: Candidate
    found: dict[Candidate, list[Measured]] = field(default_factory=dict)
    took_s: float = 0.0

    @property
    def written_bytes(self) -> int:
        """By all measurements."""
        return sum(one.written_bytes for found in self.found.values() for one in found)

    def median(self, one: Candidate) -> list[float]:
        """The median of each of ``Measured.rates``."""
        return [statistics.median(column) for column in zip(*(each.rates for each in self.found[one]), strict=True)]

    @property
    def recommended(self) -> Candidate:
        """The best of those that were faster than the default in every measurement, or the default."""
        trips = {one: [each.rates[-1] for each in found] for one, found in self.found.items()}
        usual = max(trips[self.default])
        faster = [one for one, found in trips.items() if len(found) >= MIN_ROUNDS and min(found) > usual]
        return max(faster, key=lambda one: self.median(one)[-1], default=self.default)


def tuned(
    backends: Sequence[str],
    measure: Callable[[Candidate], Measured],
    seconds: float,
    max_written_bytes: float,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned:
    """Measure in rounds until a limit is reached; the default once at least.

    Args:
        backends: that can run here, that of a run without an ``"io"`` block first.
        seconds, max_written_bytes: limits; one measurement may go beyond.
    """
    result = Tuned(Candidate(backends[0], IoConfig().write_lanes))
    candidates = [Candidate(backend, lanes) for backend in backends for lanes in LANES]
    order, started_s = random.Random(0), clock()
    result.found[result.default] = [measure(result.default)]
    while True:
        for candidate in order.sample(candidates, len(candidates)):
            result.took_s = clock() - started_s
            if result.took_s >= seconds or result.written_bytes >= max_written_bytes:
                return result
            result.found.setdefault(candidate, []).append(measure(candidate))


# ---- the command ----------------------------------------------------------------------------------------------------


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "tune",
        help="measure the drives and print the fastest settings",
        description=_DESCRIPTION,
        epilog="example:\n    ds_tba tune --nvme_path /local_nvme0 --nvme_path /local_nvme1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--nvme_path", "--nvme-path", action="append", required=True, help="a directory on a drive (may be repeated)"
    )
    parser.add_argument("--seconds", type=in_units_of(1), default=20.0, help="time limit, about (default: 20)")
    parser.add_argument(
        "--most-gib", type=in_units_of(GIB), default=32.0 * GIB, help="GiB written, about (default: 32)"
    )
    parser.add_argument("--backend", action="append", choices=("posix", "aio"), help="only this one (may be repeated)")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.set_defaults(run=partial(show, "tune", _tuned))


def _tuned(options: argparse.Namespace) -> tuple[int, list[str], dict[str, Any]]:
    from ds_tba.storage.backends.aio import AioBackend
    from ds_tba.storage.backends.posix import PosixBackend
    from ds_tba.storage.nvme import Lanes

    backends, remarks = _backends(options.backend)
    opened = {name: PosixBackend() if name == "posix" else AioBackend(AioConfig()) for name in backends}

    def measure(one: Candidate) -> Measured:
        return probe(options.nvme_path, opened[one.backend], Lanes(one.lanes, one.lanes), IoConfig().integrity)

    result = tuned(backends, measure, options.seconds, options.most_gib)
    return 0, [*lines(result), *remarks], to_dict(result)


def _backends(named: list[str] | None) -> tuple[list[str], list[str]]:
    """The backends to measure, the default of a run first; and a remark for each that is left out."""
    from ds_tba.device.memory import can_lock
    from ds_tba.storage.backends import aio

    remarks, backends = [], ["posix"]
    needed, free = aio.requests_needed(AioConfig(), 2 * max(LANES)), aio.requests_free()
    if not aio.is_built():
        remarks.append("not measured: aio, because DeepSpeed's op is not built (ds_tba doctor --build)")
    elif not can_lock(IoConfig().ring_bytes):
        remarks.append("not measured: aio, because this process cannot lock its staging (ulimit -l unlimited)")
    elif free is not None and needed > free:
        remarks.append(f"not measured: aio, which needs {needed} requests; fs.aio-max-nr leaves {free}")
    else:
        backends.insert(0, "aio")
    remarks.append("not measured: kvikio and gds, which need a GPU; compare their rates in the report of a run")
    chosen = [one for one in backends if not named or one in named]
    if not chosen:
        raise DsTbaError(f"--backend {', '.join(named or [])} cannot run here. {remarks[0]}")
    return chosen, remarks


def lines(result: Tuned) -> Iterator[str]:
    """The text of a result, with the JSON to paste."""
    rows = [("GB/s", "lanes", "write", "read", "both at once", "round trip", "over the defaults")]
    usual = result.median(result.default)[-1]
    for one in sorted(result.found, key=lambda one: -result.median(one)[-1]):
        name = f"{one.backend} (defaults)" if one == result.default else one.backend
        write, read, both, trip = result.median(one)
        rates = f"{write / 1e9:.2f}", f"{read / 1e9:.2f}", f"{both / 1e9:.2f}", f"{trip / 1e9:.2f}"
        rows.append((name, f"{one.lanes} + {one.lanes}", *rates, f"{trip / usual:.2f}"))
    yield from table(rows)
    wrote = f"wrote {result.written_bytes / GIB:.1f} GiB"
    yield f"\ntook {result.took_s:.0f} s and {wrote}, which counts as wear; no file is left"
    nothing, default = "nothing was faster than the defaults in every measurement; they are:", result.default
    yield nothing if result.recommended == default else "faster than the defaults in every measurement; to paste:"
    yield f'  into "activation_nvme_offload":  "io": {json.dumps(result.recommended.block())}'


def to_dict(result: Tuned) -> dict[str, Any]:
    """For JSON."""
    keys = ("write_bytes_per_s", "read_bytes_per_s", "both_bytes_per_s")
    return {
        "recommended": result.recommended.block(),
        "defaults": result.default.block(),
        "written_bytes": result.written_bytes,
        "took_s": result.took_s,
        "candidates": [
            {**one.block(), **{key: [each.rates[at] for each in found] for at, key in enumerate(keys)}}
            for one, found in result.found.items()
        ],
    }
