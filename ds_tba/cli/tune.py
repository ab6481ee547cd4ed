"""``ds_tba tune``: which backend, and how many lanes, are fastest on these drives? A table of medians.

Each setting is measured as at the start of a run, in rounds as time allows. Nothing computes then: how much staging a
run needs for what forward saves in bursts is not seen.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from operator import itemgetter
from statistics import median
from typing import NamedTuple, get_args

from ds_tba.cli.format import Commands, Result, add_json, in_units_of, show
from ds_tba.config import CODEC_PACKAGE, AioConfig, Compression, IoConfig, OffloadConfig
from ds_tba.errors import BackendUnavailableError
from ds_tba.stats import aligned

_DESCRIPTION = """\
Writes and reads noise with every backend that runs here, with 1, 2 and 4 lanes of each kind; where blosc2 is installed,
also noise of BF16 numbers through io.compression, of which activations leave less. Prints a table, and the "io" block
of "activation_nvme_offload" to paste if one is faster than the defaults. Leaves no file behind; the bytes
written are printed, because they wear the drives.
"""
GIB = 1 << 30
LANES = (1, 2, 4)
BACKENDS = ("aio", "posix")
RATES = ("write", "read", "both")
CLEARLY = 1.1  # medians of the same setting differ by less


class Candidate(NamedTuple):
    """Settings to compare; as many write lanes as read lanes."""

    backend: str
    lanes: int
    compression: str | None = None

    def block(self) -> dict[str, object]:
        """Return the value for the key ``"io"``."""
        block: dict[str, object] = {"backend": self.backend, "write_lanes": self.lanes, "read_lanes": self.lanes}
        return block if self.compression is None else {**block, "compression": self.compression}


class DriveRates(NamedTuple):
    """Bytes per second over all paths, for :data:`RATES`, and the bytes written to measure them."""

    write: float
    read: float
    both: float
    written_bytes: int = 0

    @property
    def round_trip(self) -> float:
        """Bytes per second of a write and a read in turn."""
        return 2.0 / (1.0 / self.write + 1.0 / self.read)


Found = Mapping[Candidate, Sequence[DriveRates]]


class Drives:
    """The directories to measure, and the clock that a measurement takes time on."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = list(paths)

    def measure(self, one: Candidate) -> DriveRates:
        """Measure the directories once.

        Raises:
            PathError: a directory cannot hold a swap file, or a transfer failed.
            BackendUnavailableError: the backend cannot run here.
        """
        from ds_tba.storage.tiers import probe

        config = OffloadConfig.model_validate({"nvme_path": self._paths, "io": one.block()})
        rates, written_bytes = probe(config, AioConfig())
        write, read, write_beside, read_beside = map(sum, zip(*rates, strict=True))
        return DriveRates(write, read, write_beside + read_beside, written_bytes)

    def now_s(self) -> float:
        return time.monotonic()


def tuned(
    candidates: Sequence[Candidate], drives: Drives, seconds: float, max_written_bytes: float
) -> tuple[Found, float]:
    """Measure all in turn until a limit is reached, the first once at least; with the seconds that this took.

    Args:
        seconds, max_written_bytes: limits; one measurement may go beyond.
    """
    found: dict[Candidate, list[DriveRates]] = {}
    started_s = drives.now_s()
    # In turns: a drive that slows down as it gets warm would make the last setting look slow.
    for one in cycle(candidates):
        found.setdefault(one, []).append(drives.measure(one))
        written_bytes = sum(each.written_bytes for many in found.values() for each in many)
        if drives.now_s() - started_s >= seconds or written_bytes >= max_written_bytes:
            break
    return found, drives.now_s() - started_s


def round_trips(found: Found) -> dict[Candidate, float]:
    """Return the median round trip of each setting, the fastest first."""
    trips = {one: median(each.round_trip for each in many) for one, many in found.items()}
    return dict(sorted(trips.items(), key=itemgetter(1), reverse=True))


def recommended(found: Found, default: Candidate) -> Candidate:
    """Return the fastest setting where it is clearly faster than the default, else that."""
    trips = round_trips(found)
    best = next(iter(trips))
    return best if trips[best] > CLEARLY * trips[default] else default


# ---- the command ----------------------------------------------------------------------------------------------------


def add_parser(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "tune",
        help="measure the drives and print the fastest settings",
        description=_DESCRIPTION,
        epilog="example:\n    ds_tba tune --nvme-path /local_nvme0 --nvme-path /local_nvme1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nvme-path", action="append", required=True, help="a directory on a drive (may be repeated)")
    add("--seconds", type=in_units_of(1), default=20.0, help="time limit, about (default: 20)")
    add("--most-gib", type=in_units_of(GIB), default=32.0 * GIB, help="GiB written, about (default: 32)")
    add("--backend", action="append", choices=BACKENDS, help="only this one (may be repeated)")
    add_json(parser)
    parser.set_defaults(run=partial(show, "tune", _tune))


def _tune(options: argparse.Namespace) -> Result:
    from ds_tba.storage.backends import aio

    drives, remarks = Drives(options.nvme_path), []
    warming: dict[str, DriveRates] = {}
    for backend in options.backend or BACKENDS:
        try:
            if backend == "aio" and not aio.is_built():
                raise BackendUnavailableError("DeepSpeed's op is not built (ds_tba doctor --build)")
            warming[backend] = drives.measure(Candidate(backend, max(LANES)))
        except BackendUnavailableError as error:
            remarks.append(f"not measured: {backend}: {error}")
    if not warming:
        raise BackendUnavailableError("; ".join(remarks))
    remarks.append("not measured: kvikio and gds, which need a GPU; compare their rates in the report of a run")
    default = Candidate(next(iter(warming)), IoConfig().write_lanes)
    others = [Candidate(backend, lanes) for backend in warming for lanes in LANES]
    if find_spec(CODEC_PACKAGE) is not None:
        others += [Candidate(default.backend, lanes, name) for name in get_args(Compression) for lanes in LANES[1:]]
    else:
        remarks.append(f'not measured: io.compression, which needs {CODEC_PACKAGE}: pip install "ds_tba[compression]"')
    candidates = [default, *(one for one in others if one != default)]
    found, took_s = tuned(candidates, drives, options.seconds, options.most_gib)
    best = recommended(found, default)
    written_bytes = sum(each.written_bytes for many in (*found.values(), warming.values()) for each in many)
    lines = [
        *aligned([("GB/s", "lanes", "write", "read", "both at once", "round trip", "over the defaults"),
                *_rows(found, default)]),
        f"\ntook {took_s:.0f} s and wrote {written_bytes / GIB:.1f} GiB, which counts as wear; no file is left",
        "nothing is clearly faster than the defaults; they are:" if best == default else "to paste:",
        f'  into "activation_nvme_offload":  "io": {json.dumps(best.block())}',
        *remarks,
    ]  # fmt: skip
    told = {"recommended": best.block(), "defaults": default.block(), "written_bytes": written_bytes, "took_s": took_s}
    rates = [
        {**one.block(), **{f"{key}_bytes_per_s": [getattr(each, key) for each in many] for key in RATES}}
        for one, many in found.items()
    ]
    return Result(0, lines, {**told, "candidates": rates})


def _rows(found: Found, default: Candidate) -> Iterator[tuple[str, ...]]:
    trips = round_trips(found)
    for one, trip in trips.items():
        rates = [median(getattr(each, key) for each in found[one]) / 1e9 for key in RATES]
        ending = " (defaults)" if one == default else f", {one.compression}" if one.compression else ""
        name = f"{one.backend}{ending}"
        columns = [f"{rate:.2f}" for rate in (*rates, trip / 1e9, trip / trips[default])]
        yield (name, f"{one.lanes} + {one.lanes}", *columns)
