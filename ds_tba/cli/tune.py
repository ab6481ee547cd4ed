"""``ds_tba tune``: measures the drives with the real store, and prints the fastest blocks to paste."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_tba.cli.format import above_0, table
from ds_tba.config import AioConfig, IoConfig
from ds_tba.errors import DsTbaError

_DESCRIPTION = """\
Writes and reads noise with every backend that runs here, with 1, 2 and 4 lanes of each kind, and prints the "io" block
of "activation_nvme_offload" (and DeepSpeed's "aio" block) that was fastest, beside the defaults. A difference that does
not show in every pair of measurements is none. Leaves no file behind; what was written is told, because it wears.
"""
GIB = 1 << 30


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
    parser.add_argument("--seconds", type=above_0, default=20.0, help="of measuring, about (default: 20)")
    parser.add_argument("--most-gib", type=above_0, default=32.0, help="to write at most, about (default: 32)")
    parser.add_argument("--backend", action="append", choices=("posix", "aio"), help="only this one (may be repeated)")
    parser.add_argument("--json", type=Path, help="write everything to this file, too")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what was found; 2 if a directory cannot be measured."""
    try:
        tuned, remarks = _tuned(options)
        if options.json is not None:
            options.json.write_text(json.dumps(to_dict(tuned), indent=2))
    except DsTbaError as error:
        sys.stderr.write(f"ds_tba tune: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"ds_tba tune: --json {options.json} cannot be written: {error.strerror}\n")
        return 2
    sys.stdout.writelines(f"{line}\n" for line in [*lines(tuned), *remarks])
    return 0


def _tuned(options: argparse.Namespace) -> tuple[Tuned, list[str]]:
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
        rates = found.paths
        both = sum(path.write_beside_read_bytes_per_s + path.read_beside_write_bytes_per_s for path in rates)
        write, read = (sum(path.write_bytes_per_s for path in rates), sum(path.read_bytes_per_s for path in rates))
        return Measured(write, read, both, found.written_bytes)

    def through_store(one: Candidate, nbytes: int) -> Measured:
        lanes = Lanes(one.lanes, one.lanes)
        found = flow(paths, backend_of(one), lanes, one.staging_bytes, integrity, nbytes)
        return Measured(found.write_bytes_per_s, found.read_bytes_per_s, 0.0, found.written_bytes)

    default = default_of(backends[0])
    backend_of(default)  # loads DeepSpeed's op, which takes seconds that are not the drives'
    others = [one for one in candidates_of(backends, AioConfig(), default.staging_bytes) if one != default]
    most_bytes = int(options.most_gib * GIB)
    return Tuning(default, others, measure, through_store, options.seconds, most_bytes).run(), remarks


def _backends(named: list[str] | None) -> tuple[list[str], list[str]]:
    """Those that run here, the one that a run takes by itself first; and what is left out, and why."""
    from ds_tba.cli.tune import LANES, STAGING_BYTES
    from ds_tba.config import AioConfig, IoConfig
    from ds_tba.device.memory import can_lock
    from ds_tba.storage.backends import aio

    remarks = []
    backends = ["posix"]
    needed = aio.requests_needed(AioConfig(queue_depth=32), 2 * max(LANES))
    free = aio.requests_free()
    if not aio.is_built():
        remarks.append("not measured: aio, because DeepSpeed's op is not built (ds_tba doctor --build)")
    elif not can_lock(max(IoConfig().ring_bytes, *STAGING_BYTES)):
        remarks.append("not measured: aio, because this process may not lock its staging (ulimit -l unlimited)")
    elif free is not None and needed > free:
        remarks.append(f"not measured: aio, because fs.aio-max-nr leaves {free} requests of {needed}")
    else:
        backends.insert(0, "aio")
    remarks.append("not measured: kvikio and gds, which need a GPU; compare their rates in the report of a run")
    chosen = [one for one in backends if not named or one in named]
    if not chosen:
        raise DsTbaError(f"--backend {', '.join(named or [])}: it cannot run here. {remarks[0]}")
    return chosen, remarks


# ---- what is printed ------------------------------------------------------------------------------------------------


def lines(tuned: Tuned) -> Iterator[str]:
    """What was found, and what to paste."""
    yield from table([("GB/s", "write", "read", "both at once", "there and back", "of the defaults"), *_rows(tuned)])
    yield ""
    if tuned.best is not None:
        yield f"{tuned.best.name} in pairs with the defaults: {tuned.ratios.words}"
    for size, ratios in sorted(tuned.staging.items()):
        usual = tuned.default.staging_bytes >> 20
        yield f"staging of {size >> 20} MiB in pairs with {usual} MiB: {ratios.words}"
    wrote = f"{tuned.written_bytes / GIB:.1f} GiB"
    yield f"took {tuned.took_s:.0f} s and wrote {wrote}, which counts as wear; no file is left"
    yield ""
    chosen = tuned.recommended
    same = chosen == tuned.default
    yield "nothing was found to be faster than the defaults:" if same else "to paste:"
    blocks = chosen.blocks()
    yield f'  into "activation_nvme_offload":  "io": {json.dumps(blocks["io"])}'
    if "aio" in blocks:
        yield f'  into ds_config.json:             "aio": {json.dumps(blocks["aio"])}'
    yield (
        "io.staging_bytes also takes up what forward saves in bursts: raise it if the report of a run counts stalls or "
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


# Which ways to the drives are the fastest, and whether they are faster than the defaults at all.
#
# [Note: Honest rounds] All candidates are measured in turn, in a new order each round. The best by its median then
# meets the defaults again, in pairs measured one after the other: being the best of many in the first rounds is
# partly luck. It is faster only if it is in every pair; else there is no difference, and the defaults stay.
#
# [Note: Staging] Less of it may carry as much, which is told but not recommended: here nothing computes, and in a run
# staging also takes up what forward saves in bursts, and the largest storage.


# Parts of the time: for all candidates, for the pairs with the best of them; the rest is for staging.
EXPLORED_FRACTION, PAIRED_FRACTION = 0.35, 0.65
MIN_PAIRS = 3
LANES = (1, 2, 4)
STAGING_BYTES = (64 << 20, 128 << 20)
DEEP_QUEUE = 32
# What flows through the store at once: about so long, within bounds.
FLOW_S = 0.3
MIN_FLOW_BYTES, MAX_FLOW_BYTES = 64 << 20, 192 << 20


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to the drives; lanes of each kind."""

    backend: str
    lanes: int
    aio: AioConfig
    staging_bytes: int

    @property
    def name(self) -> str:
        """Short, for a table."""
        depth = f", queue_depth {self.aio.queue_depth}" if self.backend == "aio" else ""
        return f"{self.backend}, {self.lanes} + {self.lanes} lanes{depth}"

    def blocks(self) -> dict[str, Any]:
        """What to paste: ``"io"`` for the block, and DeepSpeed's ``"aio"`` where that is the backend."""
        io = {
            "backend": self.backend,
            "write_lanes": self.lanes,
            "read_lanes": self.lanes,
            "staging_bytes": self.staging_bytes,
        }
        if self.backend != "aio":
            return {"io": io}
        return {"io": io, "aio": self.aio.model_dump(include={"block_size", "queue_depth", "intra_op_parallelism",
                                                              "single_submit", "overlap_events"})}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """What a candidate moved, in bytes per second: writing, reading, and both at once; and what it wrote for that."""

    write: float
    read: float
    both: float
    written_bytes: int

    @property
    def score(self) -> float:
        """Bytes per second that go there and come back."""
        return 2.0 / (1.0 / self.write + 1.0 / self.read)


@dataclass(frozen=True, slots=True)
class Ratios:
    """Of one candidate's score over the defaults', from pairs measured one after the other."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """NaN without any."""
        return statistics.median(self.values) if self.values else float("nan")

    @property
    def is_faster(self) -> bool:
        """In every pair, of which there are enough."""
        return len(self.values) >= MIN_PAIRS and min(self.values) > 1.0

    @property
    def is_slower(self) -> bool:
        """In every pair, of which there are enough."""
        return len(self.values) >= MIN_PAIRS and max(self.values) < 1.0

    @property
    def words(self) -> str:
        """Median, range and verdict."""
        if len(self.values) < MIN_PAIRS:
            return f"{len(self.values)} pairs measured, too few to tell: give it more seconds"
        verdict = "faster" if self.is_faster else "slower" if self.is_slower else "no difference"
        return f"{self.median:.2f} [{min(self.values):.2f}-{max(self.values):.2f}], {verdict}"


@dataclass(slots=True)
class Tuned:
    """What was found.

    Attributes:
        default: what a run takes without an ``"io"`` block here.
        found: of each candidate, every time it was measured with all others.
        best: of these by its median; None where nothing but the default was measured.
        ratios: of the best.
        staging: of each size, with the lanes of what is recommended.
        recommended: see [Note: Honest rounds].
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
        """What to set."""
        return self.best if self.best is not None and self.ratios.is_faster else self.default


Measure = Callable[[Candidate], Measured]
Flow = Callable[[Candidate, int], Measured]


class Tuning:
    """The rounds.

    Args:
        default: what a run takes by itself.
        others: what is compared with it.
        measure: the drives with a candidate, as the lanes find them.
        flow: so many bytes through the whole store, staging included.
        seconds: when it ends, at the latest one measurement later.
        most_written_bytes: ends it, too.
        clock: seconds.
    """

    def __init__(
        self,
        default: Candidate,
        others: Sequence[Candidate],
        measure: Measure,
        flow: Flow,
        seconds: float,
        most_written_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._others = tuple(others)
        self._measure = measure
        self._flow = flow
        self._seconds = seconds
        self._most_written_bytes = most_written_bytes
        self._clock = clock
        self._started_s = clock()
        self._order = random.Random(0)
        self.tuned = Tuned(default)

    def run(self) -> Tuned:
        """Measure until the time or the bytes are used up."""
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
        """Whether this part of time and bytes is not used up."""
        spent_s = self._clock() - self._started_s
        return spent_s < part * self._seconds and self.tuned.written_bytes < part * self._most_written_bytes


def candidates_of(backends: Sequence[str], aio: AioConfig, staging_bytes: int) -> list[Candidate]:
    """All that are compared.

    Args:
        backends: that can run here.
        aio: DeepSpeed's ``"aio"`` block as it would be by itself.
    """
    found = []
    for backend in backends:
        found += [Candidate(backend, lanes, aio, staging_bytes) for lanes in LANES]
        if backend == "aio":
            deep = aio.model_copy(update={"queue_depth": DEEP_QUEUE})
            found.append(Candidate(backend, IoConfig().write_lanes, deep, staging_bytes))
    return found


def default_of(backend: str) -> Candidate:
    """What a run takes without an ``"io"`` and an ``"aio"`` block, with the backend it would find."""
    io = IoConfig()
    return Candidate(backend, io.write_lanes, AioConfig(), io.ring_bytes)
