"""``ds_tba tune``: measures the drives with the store of a real run, and prints the fastest blocks to paste.

[Note: Honest rounds] All candidates are measured in turn, in a new order each round. The one with the best median then
meets the defaults again, in pairs measured one after the other: to be the best of many in the first rounds is partly
luck. A candidate is faster only if it won every pair; else there is no difference, and the defaults stay.

[Note: Staging] Less staging may reach the same rate. The output says so but does not recommend it: nothing computes
here, while in a run staging also buffers what forward saves in bursts, and must hold the largest storage.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ds_tba.cli.format import in_units_of, show, table
from ds_tba.config import AioConfig, IoConfig
from ds_tba.errors import DsTbaError

_DESCRIPTION = """\
Writes and reads noise with every backend that runs here, with 1, 2 and 4 lanes of each kind. Prints the fastest "io"
block of "activation_nvme_offload" (and DeepSpeed's "aio" block) next to the defaults. A difference counts only if every
pair of measurements shows it. Leaves no file behind; the bytes written are printed, because they wear the drives.
"""
GIB = 1 << 30

# Parts of the time: for all candidates, then for the pairs with the best of them; the rest is for staging.
EXPLORED_FRACTION, PAIRED_FRACTION = 0.35, 0.65
MIN_PAIRS = 3
LANES = (1, 2, 4)
STAGING_BYTES = (64 << 20, 128 << 20)
DEEP_QUEUE = 32
# Bytes that one measurement sends through the store: about so many seconds' worth, within bounds.
FLOW_S = 0.3
MIN_FLOW_BYTES, MAX_FLOW_BYTES = 64 << 20, 192 << 20


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings to compare; as many write lanes as read lanes."""

    backend: str
    lanes: int
    aio: AioConfig
    staging_bytes: int

    @property
    def name(self) -> str:
        """Name in a table."""
        depth = f", queue_depth {self.aio.queue_depth}" if self.backend == "aio" else ""
        return f"{self.backend}, {self.lanes} + {self.lanes} lanes{depth}"

    def blocks(self) -> dict[str, Any]:
        """The JSON to paste: ``"io"`` for the block, and DeepSpeed's ``"aio"`` if that is the backend."""
        io = {
            "backend": self.backend,
            "write_lanes": self.lanes,
            "read_lanes": self.lanes,
            "staging_bytes": self.staging_bytes,
        }
        return {"io": io, "aio": self.aio.model_dump()} if self.backend == "aio" else {"io": io}


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes per second of writes, of reads and of both at once; and the bytes written to measure them."""

    write: float
    read: float
    both: float
    written_bytes: int

    @property
    def score(self) -> float:
        """Bytes per second of a round trip."""
        return 2.0 / (1.0 / self.write + 1.0 / self.read)


@dataclass(frozen=True, slots=True)
class Ratios:
    """A candidate's score over that of the defaults, for each pair of measurements."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """NaN without a pair."""
        return statistics.median(self.values) if self.values else float("nan")

    @property
    def is_faster(self) -> bool:
        """Whether the candidate won every pair, of at least ``MIN_PAIRS``."""
        return len(self.values) >= MIN_PAIRS and min(self.values) > 1.0

    @property
    def is_slower(self) -> bool:
        """Whether the candidate lost every pair, of at least ``MIN_PAIRS``."""
        return len(self.values) >= MIN_PAIRS and max(self.values) < 1.0

    @property
    def words(self) -> str:
        """Median, range and verdict."""
        if len(self.values) < MIN_PAIRS:
            return f"{len(self.values)} pairs measured, too few to tell: raise --seconds or --most-gib"
        verdict = "faster" if self.is_faster else "slower" if self.is_slower else "no difference"
        return f"{self.median:.2f} [{min(self.values):.2f}-{max(self.values):.2f}], {verdict}"


@dataclass(slots=True)
class Tuned:
    """The result.

    Attributes:
        default: the settings of a run without an ``"io"`` block on this machine.
        found: all measurements of each candidate in the first rounds.
        best: the candidate with the best median; None if only the default was measured.
        ratios: of the best candidate.
        staging: of each size, with the lanes of the recommended candidate.
    """

    default: Candidate
    found: dict[Candidate, list[Measured]] = field(default_factory=dict)
    best: Candidate | None = None
    ratios: Ratios = Ratios(())
    staging: dict[int, Ratios] = field(default_factory=dict)
    written_bytes: int = 0
    took_s: float = 0.0

    @property
    def recommended(self) -> Candidate:
        """The candidate to use; see [Note: Honest rounds]."""
        return self.best if self.best is not None and self.ratios.is_faster else self.default


def candidates_of(backends: Sequence[str], aio: AioConfig, staging_bytes: int) -> list[Candidate]:
    """All settings to compare.

    Args:
        backends: those that can run here.
        aio: DeepSpeed's ``"aio"`` block with its defaults.
    """
    found = []
    for backend in backends:
        found += [Candidate(backend, lanes, aio, staging_bytes) for lanes in LANES]
        if backend == "aio":
            deep = aio.model_copy(update={"queue_depth": DEEP_QUEUE})
            found.append(Candidate(backend, IoConfig().write_lanes, deep, staging_bytes))
    return found


def default_of(backend: str) -> Candidate:
    """The settings of a run without an ``"io"`` and an ``"aio"`` block, for the backend that it would select."""
    io = IoConfig()
    return Candidate(backend, io.write_lanes, AioConfig(), io.ring_bytes)


Measure = Callable[[Candidate], Measured]
Flow = Callable[[Candidate, int], Measured]


class Tuning:
    """The rounds of measurements; see [Note: Honest rounds].

    Args:
        default: the settings of a run without ``"io"`` and ``"aio"`` blocks.
        others: compared with the default.
        measure: measures the drives with a candidate, as the lanes do at the start of a run.
        flow: sends a number of bytes through the whole store, staging included.
        seconds: time limit; one measurement may end later.
        max_written_bytes: limit of the bytes written, likewise.
        clock: seconds.
    """

    def __init__(
        self,
        default: Candidate,
        others: Sequence[Candidate],
        measure: Measure,
        flow: Flow,
        seconds: float,
        max_written_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._others = tuple(others)
        self._measure = measure
        self._flow = flow
        self._seconds = seconds
        self._max_written_bytes = max_written_bytes
        self._clock = clock
        self._started_s = clock()
        self._order = random.Random(0)
        self.tuned = Tuned(default)

    def run(self) -> Tuned:
        """Measure until a limit is reached."""
        tuned = self.tuned
        self._explore()
        medians = {one: statistics.median(each.score for each in found) for one, found in tuned.found.items()}
        medians.pop(tuned.default, None)
        if medians:
            tuned.best = max(medians, key=lambda one: medians[one])
            tuned.ratios = Ratios(tuple(self._pairs(tuned.best)))
        tuned.staging = self._try_staging(tuned.recommended)
        tuned.took_s = self._clock() - self._started_s
        return tuned

    def _explore(self) -> None:
        default, found = self.tuned.default, self.tuned.found
        found[default] = [self._counted(self._measure, default)]  # however little time there is
        order = list(self._others)
        while self._has_time(EXPLORED_FRACTION):
            self._order.shuffle(order)
            for candidate in order:
                if not self._has_time(EXPLORED_FRACTION):
                    return
                found.setdefault(candidate, []).append(self._counted(self._measure, candidate))
            order = [default, *self._others]

    def _pairs(self, best: Candidate) -> list[float]:
        ratios: list[float] = []
        while self._has_time(PAIRED_FRACTION):
            pair = [self.tuned.default, best]
            scores = {one: self._counted(self._measure, one).score for one in self._order.sample(pair, 2)}
            ratios.append(scores[best] / scores[self.tuned.default])
        return ratios

    def _try_staging(self, base: Candidate) -> dict[int, Ratios]:
        usual = self.tuned.default.staging_bytes
        sizes = sorted({*STAGING_BYTES, usual})
        ratios: dict[int, list[float]] = {size: [] for size in sizes if size != usual}
        rate = statistics.median(measured.write for measured in self.tuned.found[self.tuned.default])
        nbytes = int(min(MAX_FLOW_BYTES, max(MIN_FLOW_BYTES, rate * FLOW_S)))
        while self._has_time(1.0):
            scores = {}
            for size in self._order.sample(sizes, len(sizes)):
                one = Candidate(base.backend, base.lanes, base.aio, size)
                scores[size] = self._counted(lambda each: self._flow(each, nbytes), one).score
            for size, values in ratios.items():
                values.append(scores[size] / scores[usual])
        return {size: Ratios(tuple(values)) for size, values in ratios.items()}

    def _counted(self, measure: Measure, candidate: Candidate) -> Measured:
        measured = measure(candidate)
        self.tuned.written_bytes += measured.written_bytes
        return measured

    def _has_time(self, part: float) -> bool:
        """Whether less than this part of the time and of the bytes is used."""
        spent_s = self._clock() - self._started_s
        return spent_s < part * self._seconds and self.tuned.written_bytes < part * self._max_written_bytes


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


def _tuned(options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    from ds_tba.cli.opened_store import flow, probe
    from ds_tba.storage.backends.base import IoBackend
    from ds_tba.storage.backends.posix import PosixBackend
    from ds_tba.storage.nvme import Lanes

    paths, integrity = tuple(options.nvme_path), IoConfig().integrity
    backends, remarks = _backends(options.backend)

    def backend_of(one: Candidate) -> IoBackend:
        if one.backend == "posix":
            return PosixBackend()
        from ds_tba.storage.backends.aio import AioBackend

        return AioBackend(one.aio)

    def measure(one: Candidate) -> Measured:
        found = probe(paths, backend_of(one), Lanes(one.lanes, one.lanes), integrity)
        return Measured(
            sum(path.write_bytes_per_s for path in found.paths),
            sum(path.read_bytes_per_s for path in found.paths),
            sum(path.write_beside_read_bytes_per_s + path.read_beside_write_bytes_per_s for path in found.paths),
            found.written_bytes,
        )

    def through_store(one: Candidate, nbytes: int) -> Measured:
        lanes = Lanes(one.lanes, one.lanes)
        found = flow(paths, backend_of(one), lanes, one.staging_bytes, integrity, nbytes)
        return Measured(found.write_bytes_per_s, found.read_bytes_per_s, 0.0, found.written_bytes)

    default = default_of(backends[0])
    backend_of(default)  # loads DeepSpeed's op, whose seconds must not count
    others = [one for one in candidates_of(backends, AioConfig(), default.staging_bytes) if one != default]
    tuned = Tuning(default, others, measure, through_store, options.seconds, int(options.most_gib)).run()
    return [*lines(tuned), *remarks], to_dict(tuned)


def _backends(named: list[str] | None) -> tuple[list[str], list[str]]:
    """The backends to measure, the default of a run first; and a remark for each that is left out."""
    from ds_tba.device.memory import can_lock
    from ds_tba.storage.backends import aio

    remarks = []
    backends = ["posix"]
    needed = aio.requests_needed(AioConfig(queue_depth=DEEP_QUEUE), 2 * max(LANES))
    free = aio.requests_free()
    if not aio.is_built():
        remarks.append("not measured: aio, because DeepSpeed's op is not built (ds_tba doctor --build)")
    elif not can_lock(max(IoConfig().ring_bytes, *STAGING_BYTES)):
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


# ---- what is printed ------------------------------------------------------------------------------------------------


def lines(tuned: Tuned) -> Iterator[str]:
    """The text of a result, with the JSON to paste."""
    yield from table([("GB/s", "write", "read", "both at once", "round trip", "over the defaults"), *_rows(tuned)])
    yield ""
    if tuned.best is not None:
        yield f"{tuned.best.name} against the defaults, in pairs: {tuned.ratios.words}"
    for size, ratios in sorted(tuned.staging.items()):
        usual = tuned.default.staging_bytes >> 20
        yield f"staging of {size >> 20} MiB against {usual} MiB, in pairs: {ratios.words}"
    wrote = f"wrote {tuned.written_bytes / GIB:.1f} GiB"
    yield f"took {tuned.took_s:.0f} s and {wrote}, which counts as wear; no file is left"
    yield ""
    is_default = tuned.recommended == tuned.default
    yield (
        "nothing proved faster than the defaults, which are:"
        if is_default
        else "proved faster than the defaults; to paste:"
    )
    blocks = tuned.recommended.blocks()
    yield f'  into "activation_nvme_offload":  "io": {json.dumps(blocks["io"])}'
    if "aio" in blocks:
        yield f'  into ds_config.json:             "aio": {json.dumps(blocks["aio"])}'
    yield (
        "io.staging_bytes also buffers what forward saves in bursts: raise it if the report of a run shows stalls or "
        "fallbacks"
    )


def _rows(tuned: Tuned) -> Iterator[tuple[str, ...]]:
    usual = _median(tuned.found[tuned.default], "score")
    for one, found in sorted(tuned.found.items(), key=lambda item: -_median(item[1], "score")):
        name = f"{one.name} (defaults)" if one == tuned.default else one.name
        scores = [each.score / usual for each in found]
        spread = f"{statistics.median(scores):.2f} [{min(scores):.2f}-{max(scores):.2f}]"
        rates = [f"{_median(found, key) / 1e9:.2f}" for key in ("write", "read", "both", "score")]
        yield name, *rates, spread


def _median(found: list[Measured], key: str) -> float:
    return float(statistics.median(getattr(one, key) for one in found))


def to_dict(tuned: Tuned) -> dict[str, Any]:
    """For JSON."""
    return {
        "recommended": tuned.recommended.blocks(),
        "defaults": tuned.default.blocks(),
        "best": None if tuned.best is None else tuned.best.name,
        "best_over_defaults": list(tuned.ratios.values),
        "is_faster": tuned.ratios.is_faster,
        "staging_over_default": {str(size): list(ratios.values) for size, ratios in tuned.staging.items()},
        "written_bytes": tuned.written_bytes,
        "took_s": tuned.took_s,
        "candidates": [
            {
                "name": one.name,
                **one.blocks(),
                "write_bytes_per_s": [each.write for each in found],
                "read_bytes_per_s": [each.read for each in found],
                "both_bytes_per_s": [each.both for each in found],
            }
            for one, found in tuned.found.items()
        ],
    }
