"""``ds_tba tune``: measures the drives with the real store, and prints the fastest blocks to paste."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_tba.cli.format import above_0, table
from ds_tba.errors import DsTbaError

if TYPE_CHECKING:
    from ds_tba.cli.tuning import Candidate, Measured, Tuned

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
    from ds_tba.cli.tuning import Measured, Tuning, candidates_of, default_of
    from ds_tba.config import AioConfig, IoConfig
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
    from ds_tba.cli.tuning import LANES, STAGING_BYTES
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
