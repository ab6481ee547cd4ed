"""A run's report of itself: bytes per tier, why, at which rate, held by whom; as JSON, as text, in a file never half.

Knows numbers and names only: whoever counts fills :class:`OffloadReport` in, and ``explain/sample.py`` finds the
holders. What is not counted it cannot tell.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ds_tba.errors import ConfigError, ReportError
from ds_tba.stats import PathWear, aligned, expanded, readable

logger = logging.getLogger("ds_tba")

# Age of the JSON at report.path at most when the process is killed, or one step, where steps take longer.
REPORT_AGE_S = 2.0
NOTHING_OFFLOADED = "nothing was offloaded"
SCHEMA = 1  # goes up when a field changes its meaning; one more field is no change
MAX_HOLDERS = 10  # rows of their table


# ---- who holds saved bytes ------------------------------------------------------------------------------------------


@dataclass
class Holder:
    """Saved tensors that one op makes in one module; layers of a list are one module.

    Attributes:
        module: path in the model, with ``*`` for the number of a layer; outside of all modules below the model the line
            of the program, as ``(train.py:57)``.
        op: that made the tensor, as autograd names it; empty of inputs, and of an output that its op alone saves.
        tensors: storages, each counted once.
        largest: shape and dtype of the largest tensor.
        largest_bytes: of its storage.
        saved_bytes: in all, of which ``resident_bytes`` are in device memory, ``moved_bytes`` in a store, and
            ``again_bytes`` recomputed in backward.
    """

    module: str
    op: str
    tensors: int = 0
    saved_bytes: int = 0
    resident_bytes: int = 0
    moved_bytes: int = 0
    again_bytes: int = 0
    largest: str = ""
    largest_bytes: int = 0

    def add(self, nbytes: int, where: str, shape: str = "") -> None:
        """Count a storage that is ``"resident"``, ``"moved"`` or recomputed, ``"again"``."""
        if nbytes > self.largest_bytes:
            self.largest, self.largest_bytes = shape, nbytes
        self.tensors += 1
        self.saved_bytes += nbytes
        setattr(self, f"{where}_bytes", getattr(self, f"{where}_bytes") + nbytes)


def cells(holders: Sequence[Holder]) -> list[tuple[str, ...]]:
    """Return the head and the rows of a table for people; of holders beyond :data:`MAX_HOLDERS` the bytes alone."""
    rows: list[tuple[str, ...]] = [
        ("module", "made by", "largest tensor", "tensors", "saved", "in memory", "moved", "recomputed")
    ]
    for one in holders[:MAX_HOLDERS]:
        sizes = (one.saved_bytes, one.resident_bytes, one.moved_bytes, one.again_bytes)
        names = (one.module or "(outside of modules)", one.op, one.largest, str(one.tensors))
        rows.append((*names, *(readable(nbytes) if nbytes else "-" for nbytes in sizes)))
    if rest := holders[MAX_HOLDERS:]:
        rows.append((f"{len(rest)} more", "", "", "", readable(sum(one.saved_bytes for one in rest)), "", "", ""))
    return rows


def table(holders: Sequence[Holder]) -> list[str]:
    """Return lines for people."""
    return aligned(cells(holders), left=3)


# ---- the report -----------------------------------------------------------------------------------------------------


def told(meaning: str, row: str = "", default: Any = MISSING, *, factory: Any = MISSING) -> Any:
    """Return a field of the report with its meaning, and the name of its row in the table for people if it has one."""
    return field(default=default, default_factory=factory, metadata={"meaning": meaning, "row": row})


def unit_of(name: str) -> str:
    """Return the unit that is in a field's name; empty for counts and texts."""
    if "_bytes" in name:
        return "bytes/s" if name.endswith("_per_s") else "bytes"
    return "s" if name.endswith("_s") else ""


def readable_as(unit: str, value: Any) -> str:
    """Return a value for people."""
    match unit:
        case "bytes":
            return readable(value)
        case "bytes/s":
            return f"{value / 1e9:.2f} GB/s"
        case "s":
            return f"{value:.2f} s"
    return ", ".join(value) if isinstance(value, list) else str(value)


@dataclass(frozen=True, kw_only=True)
class OffloadReport:
    """Counters of one rank since the engine was built: one table of what the JSON, ``ds_tba report`` and its page have.

    Rows come in the order of the fields; a field with a default has no row while it has that.
    """

    state: str = told(
        f"`running`, or `finished` once it is closed; `{NOTHING_OFFLOADED}` follows where that is so", "state"
    )
    rank: int = told("the rank that wrote it")
    backend: str = told("what moves bytes to and from the drives; `none` where nothing does", "backend")
    backend_reason: str = told("why it is that backend", "  chosen by")
    paths: list[str] = told("the directories of `nvme_path`", "paths")
    placement: str = told("as the block has it", "placement")
    integrity: str = told("as `io.integrity` has it")
    compression: str | None = told(
        "the codec that writes go through; null without `io.compression`", "compression", None
    )
    steps: int = told("steps of the optimizer", "steps")
    micro_steps: int = told("forwards with their backward", "micro-steps")
    packed_tensors: int = told("tensors that autograd saved, parameters included")
    passed_through_tensors: int = told("parameters and their views among the packed tensors, left alone")
    device_memory: dict[str, int] = told("the fields of `MemoryLevels`; empty on the CPU", factory=dict)
    schema: int = told("version of these fields", default=SCHEMA)

    peak_saved_bytes: int = told(
        "peak of saved tensors in device memory; each storage counts once", "activations at the peak, with the block"
    )
    peak_saved_bytes_without: int = told("the same, had all of them stayed there", "activations at the peak, without")
    step_peak_saved_bytes: int = told("`peak_saved_bytes` of the last whole step alone", default=0)
    budget_excess_bytes: int = told(
        "`peak_saved_bytes` in excess of `activation_budget_bytes`", "above activation_budget_bytes", 0
    )
    peak_staging_bytes: int = told("peak of `io.staging_bytes` in use", "peak staging")

    offloaded_bytes: int = told("storages handed to the store, each once", "offloaded")
    written_bytes: int = told("written to the drives, padded to the alignment", "written")
    uncompressed_bytes: int = told("what `written_bytes` were before `io.compression`", "  before compression", 0)
    compression_ratio: float = told("`written_bytes` over `uncompressed_bytes`", "  ratio", 0.0)
    read_bytes: int = told("read from the drives, padded to the alignment", "read")
    forwarded_bytes: int = told("handed over before their write had finished", "forwarded from memory")
    cancelled_bytes: int = told("offloaded, but loaded or dropped before their write began")
    deduplicated_bytes: int = told("saved again as views of a storage that was written already", "deduplicated")
    host_bytes: int = told("offloaded to host memory, with what a failed write left there")
    rematerialized_bytes: int = told("made from other saved tensors in backward instead of saved", "rematerialized", 0)
    rematerialized_s: float = told("the time that this took, by what it took when measured", "  in", 0.0)
    rematerialized_sites: dict[str, int] = told(
        "places of a forward that are in use for it, by op", "places of", factory=dict
    )
    refused_sites: dict[str, int] = told("places of a forward that are not, by reason", factory=dict)
    recomputed_bytes: int = told("recomputed in backward instead of saved", "recomputed in backward")
    stall_s: float = told("time that forward and backward waited for the store", "stalled")

    kept_bytes: int = told("left in device memory", "kept")
    kept_bytes_by_reason: dict[str, int] = told("the same, by reason", "kept", factory=dict)
    fallbacks: int = told("eligible tensors that stayed because no store could take or write them", "fallbacks")
    fallbacks_by_reason: dict[str, int] = told("the same, by reason", "fallback", factory=dict)
    holders: list[dict[str, Any]] = told(
        "fields of `Holder`: who held saved bytes as the forward of `holders_step` ended, the largest first",
        factory=list,
    )
    holders_step: int = told("the last step whose forward was sampled", default=0)
    timeline_path: str | None = told("timeline of a sampled step, where the block asks for one", default=None)

    plans: int = told("plans so far", default=0)
    plan: dict[str, Any] | None = told(
        "planner, reason, bytes of each placement and predictions of the plan in force; `measured_step_s` is the "
        "median of the last steps under it, null before the first",
        default=None,
    )

    write_bytes_per_s: float = told("of all drives, recently, while they were busy", "rate of writes")
    read_bytes_per_s: float = told("of all drives, recently, while they were busy", "rate of reads")
    swap_file_bytes: int = told("largest size of the file that activations are written to")
    bandwidth: list[dict[str, Any]] = told(
        "recent rates of each path, as measured, in bytes before compression; the `tensor_bytes` that were written "
        "there, and the `stored_bytes` that they came to",
        factory=list,
    )
    bandwidth_at_start: list[dict[str, Any]] = told("the same, as the first plan was made; empty before", factory=list)
    wear: list[dict[str, Any]] = told("the fields of `PathWear`, for each path", factory=list)

    @classmethod
    def read_json(cls, path: Path) -> OffloadReport:
        """Read the report that a run wrote to ``path``, also one of an older or newer version of this package.

        Raises:
            ReportError: there is no such file, or it is something else.
        """
        try:
            report = cls(**_known(cls, json.loads(path.read_text())))
            # Commands show these, and would end in the middle of a text.
            report.summary(), report.rows(), report.holder_lines(), report.held()
        except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError, ArithmeticError) as error:
            why = getattr(error, "strerror", None) or str(error)[:100]
            raise ReportError(f"{path} is no report of ds_tba ({why}): name the file of report.path.") from error
        return report

    def to_dict(self) -> dict[str, Any]:
        """Return every field, ready for JSON."""
        return asdict(self)

    def summary(self) -> str:
        """Return one line for the log; bytes are those of a step."""
        steps = max(self.steps, 1)
        parts = [NOTHING_OFFLOADED] if NOTHING_OFFLOADED in self.state else []
        parts += [
            f"{self.steps} steps: activations take {readable(self.peak_saved_bytes)} at the peak instead of "
            f"{readable(self.peak_saved_bytes_without)}",
            f"a step moves {readable(self.offloaded_bytes / steps)}",
        ]
        again_bytes = self.rematerialized_bytes + self.recomputed_bytes
        parts += [f"recomputes {readable(again_bytes / steps)}"] if again_bytes else []
        parts += [f"waits {self.stall_s / steps:.3f} s"] if self.stall_s else []
        parts += [f"{self.fallbacks} fallbacks"] if self.fallbacks else []
        wear = [one for one in self.path_wear() if one.written_bytes_per_day]
        parts += [min(wear, key=PathWear.days).in_words()] if wear and self.steps else []
        return ", ".join(parts)

    def rows(self) -> list[tuple[str, str]]:
        """Return name and value of each line of the table for people."""
        rows: list[tuple[str, str]] = []
        for one in fields(self):
            name, unit, value = one.metadata["row"], unit_of(one.name), getattr(self, one.name)
            if not name or (one.name not in NEEDED and not value):
                continue
            if isinstance(value, dict):
                rows += [(f"  {name}: {key}", readable_as(unit, each)) for key, each in value.items()]
            else:
                rows.append((name, readable_as(unit, value)))
        rows += [] if self.plan is None else self._plan_rows(self.plan)
        return [*rows, *((f"wear of {one.path}", one.in_words()) for one in self.path_wear())]

    def path_wear(self) -> list[PathWear]:
        """Return the wear of each path."""
        return [PathWear(**_known(PathWear, one)) for one in self.wear]

    def held(self) -> list[Holder]:
        """Return who held saved bytes; empty where no forward was looked at."""
        return [Holder(**_known(Holder, one)) for one in self.holders]

    def _plan_rows(self, plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        yield "plan", f"{plan.get('planner', 'unknown')}, number {self.plans}"
        for where, nbytes in plan.get("bytes", {}).items():
            yield f"  plan: {where}", readable(nbytes)
        if "peak_saved_bytes" in plan:
            measured = readable(self.step_peak_saved_bytes)
            yield "  plan: activations at the peak", f"{readable(plan['peak_saved_bytes'])} ({measured} measured)"
        if plan.get("kept_step_s") and "step_s" in plan:
            measured_s, kept = plan.get("measured_step_s"), f"{plan['kept_step_s']:.3g} s with everything kept"
            measured = f"{measured_s:.3g} s measured" if measured_s else "not measured yet"
            yield "  plan: step", f"{plan['step_s']:.3g} s ({measured}; {kept})"

    def holder_lines(self) -> list[str]:
        """Return the table of who held saved bytes; empty where no forward was looked at."""
        title = f"saved at the end of the forward of step {self.holders_step}:"
        return [title, *table(self.held())] if self.holders else []


NEEDED = frozenset(one.name for one in fields(OffloadReport) if one.default is one.default_factory is MISSING)


def _known(kind: type[Holder | PathWear | OffloadReport], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a dataclass has fields for: the file may be of a newer version, which has more."""
    names = {one.name for one in fields(kind)}
    return {name: value for name, value in found.items() if name in names}


# ---- files ----------------------------------------------------------------------------------------------------------


def checked_path(key: str, path: str, rank: int) -> Path:
    """Return where a rank writes: ``path`` for rank 0, ``path.rankN`` for others; see :class:`ReportFile`."""
    target = expanded(path if rank == 0 else f"{path}.rank{rank}")
    directory = Path(os.path.realpath(target.parent))  # Path's raises for loops
    # The system's are also symlinks such as /dev/stdout: os.replace() would put a file in their place.
    is_of_system = directory == Path("/dev") or directory.is_relative_to("/proc")
    if is_of_system or (os.path.exists(target) and not os.path.isfile(target)):
        raise ConfigError(
            f"{key} {target} is a directory, a device, a pipe or a file of the system's: name a regular file."
        )
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{key} {target}: its directory is missing or not writable: create it first.")
    return target


def write_file(path: Path, text: str) -> None:
    """Put a file at ``path`` at once: a reader never sees half of it.

    A symlink at ``path`` is replaced, not followed, and the name in between cannot be foreseen: in a directory that
    others may write to, either could lead to a file that only this user may change.
    """
    unfinished = path.with_name(f".ds_tba_{secrets.token_hex(8)}.tmp")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


class ReportFile:
    """A file that a key of the config names, kept up to date; a failure is logged, never raised into training.

    Written in training rather than from a signal handler: a handler runs only when the main thread comes back from C++,
    and SIGKILL has none. So a process that is killed in a hang still leaves a report.

    Args:
        key: of the config.
        path: what the config has there; None writes none.
        rank: of this process; each has a file of its own.

    Raises:
        ConfigError: nothing can be written there. It is found now, not after hours of training.
    """

    def __init__(self, key: str, path: str | None, rank: int) -> None:
        self._key = key
        self.rank = rank
        self.path = None if path is None else checked_path(key, path, rank)
        self._written_at, self._has_failed = -math.inf, False
        self._own_s = time.time()  # what was written to the file later is another engine's

    def refresh(self, make: Callable[[], Mapping[str, object]], *, now: bool = False, yields: bool = False) -> None:
        """Write what ``make`` returns if the file is old, or ``now``; ``yields`` to one that another engine wrote."""
        if self.path is not None and (now or time.monotonic() - self._written_at >= REPORT_AGE_S):
            self.write_text(json.dumps(make(), indent=2) + "\n", yields=yields)

    def write_text(self, text: str, *, yields: bool = False) -> None:
        if self.path is None:
            return
        try:
            if yields and self.path.is_file() and self.path.stat().st_mtime > self._own_s:
                return
            write_file(self.path, text)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:  # or a long run would say it without end
                logger.warning("%s %s cannot be written: %s", self._key, self.path, error)
            self._has_failed = True
        self._written_at, self._own_s = time.monotonic(), time.time()
