"""What a run says of itself: bytes per tier, why, at which rate; as JSON, as text, in a file that is never half.

Knows numbers only: whoever counts fills :class:`OffloadReport` in. What is not counted it cannot tell.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ds_tba.config import OffloadConfig
from ds_tba.errors import ConfigError, ReportError
from ds_tba.holders import Holder, table
from ds_tba.stats import expanded, readable
from ds_tba.wear import TERABYTE, PathWear

logger = logging.getLogger("ds_tba")

# Maximum age of the JSON at report.path when the process is killed (or one step, where steps take longer): at first, so
# that a run which ends early leaves one, and after some doublings.
FIRST_REPORT_AGE_S, REPORT_AGE_S = 0.25, 10.0
SCHEMA = 1  # goes up when a field changes its meaning; one more field is no change


@dataclass(frozen=True)
class OffloadReport:
    """Counters of one rank since the engine was built. Bytes are bytes, times are seconds.

    Attributes:
        packed_tensors: tensors that autograd saved, parameters included.
        passed_through_tensors: parameters and their views among the packed tensors, left alone.
        offloaded_bytes: storages handed to the store, each once.
        written_bytes, read_bytes: moved by the drive, padded to the alignment.
        forwarded_bytes: handed over from memory because their write had not finished.
        cancelled_bytes: offloaded, but read back or dropped before their write began.
        deduplicated_bytes: saved again as views of a storage that was written already.
        kept_bytes: left in device memory; ``kept_bytes_by_reason`` says why.
        host_bytes: moved to host memory, with what a failed write left there.
        peak_staging_bytes: host memory in use between the device and the drive, at most, of ``io.staging_bytes``.
        swap_file_bytes: largest size of the file that activations are written to.
        peak_saved_bytes: peak of saved tensors in device memory; each storage counts once.
        peak_saved_bytes_without: the same, had all of them stayed there.
        budget_excess_bytes: ``peak_saved_bytes`` in excess of ``activation_budget_bytes``.
        fallbacks: tensors that were eligible and stayed in memory because the store could not take or write them;
            ``fallbacks_by_reason`` says why.
        write_bytes_per_s, read_bytes_per_s: of all drives, recently, while they were busy.
        stall_s: time that forward and backward waited for the store.
        recomputed_bytes: recomputed in backward instead of being saved.
        rematerialized_bytes: made again in backward from other saved tensors instead of being saved.
        rematerialized_s: the time that took, by what it took when it was measured.
        rematerialized_sites: how many places of a forward are in use for that, by op.
        refused_sites: how many are not, by reason.
        step_peak_saved_bytes: ``peak_saved_bytes`` of the last whole step alone.
        plans: number of plans so far.
        plan: the plan in force: planner, reason, bytes of each placement, its predictions, and ``measured_step_s``, the
            median of the last steps under it (None before the first); None without a plan.
        blocks_left_out: ``path`` and ``reason`` of each block that is not recomputed, with ``"recompute": true``.
        bandwidth: for each path its written bytes and its recent rates, as measured.
        bandwidth_at_start: the same, as first measured for plans; empty where it was not.
        wear: for each path the fields of :class:`ds_tba.wear.PathWear`.
        holders: fields of :class:`ds_tba.holders.Holder`: who held saved bytes at the end of the forward of
            ``holders_step``, the largest first.
        timeline_path: of the timeline of a sampled step, where ``report.timeline_path`` asks for one.
        schema: of these fields.
        device_memory: the fields of :class:`ds_tba.device.accelerator.MemoryLevels`; empty on the CPU.
    """

    state: str
    rank: int
    backend: str
    backend_reason: str
    paths: list[str]
    placement: str
    integrity: str
    steps: int
    micro_steps: int
    packed_tensors: int
    passed_through_tensors: int
    offloaded_bytes: int
    written_bytes: int
    read_bytes: int
    forwarded_bytes: int
    cancelled_bytes: int
    deduplicated_bytes: int
    kept_bytes: int
    host_bytes: int
    recomputed_bytes: int
    peak_staging_bytes: int
    swap_file_bytes: int
    peak_saved_bytes: int
    peak_saved_bytes_without: int
    budget_excess_bytes: int
    fallbacks: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    stall_s: float
    kept_bytes_by_reason: dict[str, int] = field(default_factory=dict)
    fallbacks_by_reason: dict[str, int] = field(default_factory=dict)
    bandwidth: list[dict[str, Any]] = field(default_factory=list)
    bandwidth_at_start: list[dict[str, Any]] = field(default_factory=list)
    wear: list[dict[str, Any]] = field(default_factory=list)
    step_peak_saved_bytes: int = 0
    plans: int = 0
    plan: dict[str, Any] | None = None
    blocks_left_out: list[dict[str, str]] = field(default_factory=list)
    rematerialized_bytes: int = 0
    rematerialized_s: float = 0.0
    rematerialized_sites: dict[str, int] = field(default_factory=dict)
    refused_sites: dict[str, int] = field(default_factory=dict)
    device_memory: dict[str, int] = field(default_factory=dict)
    holders: list[dict[str, Any]] = field(default_factory=list)
    holders_step: int = 0
    timeline_path: str | None = None
    schema: int = SCHEMA

    @classmethod
    def read_json(cls, path: Path) -> OffloadReport:
        """The report that a run wrote to ``path``, also one of an older or newer version of this package.

        Raises:
            ReportError: there is no such file, or it is something else.
        """
        try:
            found = json.loads(path.read_text(), parse_int=_whole)
        except OSError as error:
            raise ReportError(
                f"{path} cannot be read ({error.strerror}): name the file of report.path, which a run writes."
            ) from error
        except (ValueError, RecursionError) as error:
            raise ReportError(f"{path} is no JSON ({error}): name the file of report.path.") from error
        needed = {one.name for one in fields(cls) if one.default is one.default_factory is MISSING}
        missing = needed - set(found) if isinstance(found, dict) else needed
        if missing:
            raise ReportError(
                f"{path} is no report of ds_tba ({', '.join(sorted(missing)[:3])} missing): name that of report.path."
            )
        types = get_type_hints(cls)
        for problem in chain(_misfits(found, types), _misfits_inside(found)):
            raise ReportError(f"{path} is no report of ds_tba: {problem}: name the file of report.path.")
        return cls(**{name: value for name, value in found.items() if name in types})

    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON."""
        return asdict(self)

    def summary(self) -> str:
        """One line for the log; bytes are those of a step."""
        steps = max(self.steps, 1)
        parts = [
            f"{self.steps} steps: activations take {readable(self.peak_saved_bytes)} at the peak instead of "
            f"{readable(self.peak_saved_bytes_without)}",
            f"a step moves {readable(self.offloaded_bytes / steps)}",
        ]
        again_bytes = self.rematerialized_bytes + self.recomputed_bytes
        parts += [f"makes {readable(again_bytes / steps)} again"] if again_bytes else []
        parts += [f"waits {self.stall_s / steps:.3f} s"] if self.stall_s else []
        parts += [f"{self.fallbacks} fallbacks"] if self.fallbacks else []
        wear = [PathWear(**path) for path in self.wear if path["written_bytes_per_day"]]
        if wear and self.steps:  # else it is the trial's at the start, in no time
            daily_bytes = sum(one.sharers * one.written_bytes_per_day for one in wear)
            worst = min(wear, key=PathWear.days)
            rating = worst.rating(worst.rated_endurance_tbw)
            parts.append(f"{daily_bytes / TERABYTE:.2f} TB a day ({worst.days():.0f} days to {rating})")
        return ", ".join(parts)

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each line of the table for people."""
        rows = [
            ("backend", f"{self.backend} ({self.backend_reason})"),
            ("paths", ", ".join(self.paths)),
            ("steps / micro-steps", f"{self.steps} / {self.micro_steps}"),
            ("offloaded", readable(self.offloaded_bytes)),
            ("written", f"{readable(self.written_bytes)} at {self.write_bytes_per_s / 1e9:.2f} GB/s"),
            ("read", f"{readable(self.read_bytes)} at {self.read_bytes_per_s / 1e9:.2f} GB/s"),
            ("forwarded from memory", readable(self.forwarded_bytes)),
            ("deduplicated", readable(self.deduplicated_bytes)),
            ("kept", readable(self.kept_bytes)),
        ]
        rows += [(f"  kept: {reason}", readable(nbytes)) for reason, nbytes in self.kept_bytes_by_reason.items()]
        if self.rematerialized_bytes:
            ops = ", ".join(f"{op} {count}" for op, count in sorted(self.rematerialized_sites.items()))
            rows.append(
                ("rematerialized", f"{readable(self.rematerialized_bytes)} in {self.rematerialized_s:.2f} s: {ops}")
            )
        rows += [
            ("activations at the peak, with the block", readable(self.peak_saved_bytes)),
            ("activations at the peak, without", readable(self.peak_saved_bytes_without)),
            ("peak staging", readable(self.peak_staging_bytes)),
            ("fallbacks", str(self.fallbacks)),
        ]
        if self.budget_excess_bytes:
            rows.append(("above activation_budget_bytes", readable(self.budget_excess_bytes)))
        if self.plan is not None:
            plan, measured = self.plan, readable(self.step_peak_saved_bytes)
            rows += [("plan", f"{plan.get('planner', 'unknown')}, the {_ordinal(self.plans)}")]
            rows += [(f"  plan: {where}", readable(nbytes)) for where, nbytes in plan.get("bytes", {}).items()]
            if "peak_saved_bytes" in plan:
                rows += [
                    ("  plan: activations at the peak", f"{readable(plan['peak_saved_bytes'])} ({measured} measured)")
                ]
            if plan.get("kept_step_s") and "step_s" in plan:
                rows += [("  plan: step", _step(plan))]
            rows += [("recomputed in backward", readable(self.recomputed_bytes))]
        reasons = Counter(one.get("reason", "unknown") for one in self.blocks_left_out)
        rows += [("blocks not recomputed", f"{count}: {reason}") for reason, count in reasons.items()]
        rows += [(f"  fallback: {reason}", str(count)) for reason, count in self.fallbacks_by_reason.items()]
        rows += [(f"wear of {path.get('path', '?')}", _wear(path)) for path in self.wear]
        return [*rows, ("stalled", f"{self.stall_s:.2f} s")]

    def holder_lines(self) -> list[str]:
        """The table of who held saved bytes, for people; empty where no forward was looked at."""
        if not self.holders:
            return []
        names = {one.name for one in fields(Holder)}
        blank = {"module": "", "op": ""}
        found = [
            Holder(**blank | {name: value for name, value in one.items() if name in names}) for one in self.holders
        ]
        return [f"saved at the end of the forward of step {self.holders_step}:", *table(found)]


# Of what the table shows of objects in a report. A key may be absent, for a file may be of another version.
_INSIDE: dict[str, dict[str, Any]] = {
    "plan": {
        "planner": str, "bytes": dict[str, int], "peak_saved_bytes": int, "step_s": float, "kept_step_s": float,
        "measured_step_s": float | None,
    },
    "blocks_left_out": {"reason": str},
    "wear": get_type_hints(PathWear),
    "holders": get_type_hints(Holder),
}  # fmt: skip


def _misfits(found: Mapping[str, Any], types: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Which values of an object are of another type, each with its key, what it is and what it should be."""
    for name in (one for one in types if one in found):
        try:
            TypeAdapter(types[name]).validate_python(found[name], strict=True)
        except ValidationError as error:
            (detail, *_) = error.errors()
            key, value = ".".join([f"{at}{name}", *map(str, detail["loc"])]), json.dumps(detail["input"])
            shown = value if len(value) <= 40 else f"{value[:40]}..."
            yield f'"{key}" is {shown}, and {detail["msg"].removeprefix("Input ")}'


def _misfits_inside(found: Mapping[str, Any]) -> Iterator[str]:
    """The same of the objects in a report that is one from the outside."""
    for name, types in _INSIDE.items():
        value = found.get(name) or []
        for at, one in {name: value}.items() if isinstance(value, dict) else enumerate(value):
            yield from _misfits(one, types, f"{name}." if at == name else f"{name}.{at}.")


def _whole(digits: str) -> int | float:
    """No count of bytes has more digits, and Python divides no number of hundreds of them."""
    return int(digits) if len(digits) < 20 else float(digits)


# Below this part of the saved bytes a user wants to know why no more is moved.
LITTLE = 0.1
# Proofs of what can be made again take two; then a step without a plan is as all later ones.
FIRST_STEPS = 3


class LittleMoved:
    """Tells why little is moved or made again, with the key that says so.

    Attributes:
        text: empty where enough is, or nothing is to be; None before the first step that is as all later ones.
        peak_bytes: peak of the saved tensors in the last step.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.text: str | None = None
        self.peak_bytes = 0
        self._config = config
        self._kept = Counter[str]()
        self._done_bytes = 0
        self._is_steady = False

    def end_step(self, kept: Mapping[str, int], done_bytes: int, steps: int, plans: int) -> str:
        """The text, where this step is the first to tell; else empty.

        Args:
            kept: bytes that were neither moved nor made again so far, by reason.
            done_bytes: that were.
            steps, plans: so far.
        """
        if self.text is not None:
            return ""
        if self._is_steady:
            return self.judge(Counter(kept) - self._kept, done_bytes - self._done_bytes)
        self._kept, self._done_bytes = Counter(kept), done_bytes
        self._is_steady = plans > 0 if self._config.placement == "adaptive" else steps >= FIRST_STEPS
        return ""

    def judge(self, kept: Mapping[str, int], done_bytes: int) -> str:
        """The text, by these bytes where nothing was told yet."""
        if self.text is None:
            self.text = self._judged(Counter(kept), done_bytes)
        return self.text

    def _judged(self, kept: Counter[str], done_bytes: int) -> str:
        config, all_bytes = self._config, kept.total() + done_bytes
        if config.placement == "keep" or done_bytes >= LITTLE * all_bytes:
            return ""
        ((reason, nbytes),) = kept.most_common(1)
        is_all = nbytes == all_bytes
        if reason != "plan":
            what = "all saved tensors are" if is_all else f"{nbytes / all_bytes:.0%} of the saved bytes are of tensors"
            small = f"smaller than min_tensor_bytes {config.min_tensor_bytes}"
            return f"little is moved: {what} {small if reason == 'small' else f'kept, because of: {reason}'}"
        if config.activation_budget_bytes is not None:
            budget = f"activation_budget_bytes {config.activation_budget_bytes}"
            if self.peak_bytes > config.activation_budget_bytes:
                return f"little is moved: {budget} does not fit what is kept, and moving it would not lower the peak"
            return f"little is moved: {budget} has room for what is kept"
        life = f" or ssd.min_life_days {config.ssd.min_life_days:g}" if config.ssd.min_life_days else ""
        return (
            f"little is moved: max_step_overhead {config.max_step_overhead:g}{life} allows no "
            f"{'' if is_all else 'more '}moves on this drive, or they would not lower the peak"
        )


# ---- files ----------------------------------------------------------------------------------------------------------


def rank_path(path: str, rank: int) -> Path:
    """The path at which a rank writes its report: ``path`` for rank 0, ``path.rankN`` for others."""
    return expanded(path if rank == 0 else f"{path}.rank{rank}")


def checked_path(key: str, path: str | None, rank: int) -> Path | None:
    """:func:`rank_path` of a path that the config may name.

    Raises:
        ConfigError: nothing can be written there.
    """
    if path is None:
        return None
    target = rank_path(path, rank)
    try:
        target.lstat()
    except FileNotFoundError:
        pass
    except OSError as error:  # too long, below a file, in a loop of symlinks, in a directory that may not be searched
        raise ConfigError(
            f"{key} {target} cannot be a file ({error.strerror}): name one in a directory that you may write to."
        ) from error
    if target.is_dir():
        raise ConfigError(f"{key} {target} is a directory: name a file, for example {target / 'report.json'}.")
    if not is_replaceable(target):
        raise ConfigError(f"{key} {target} is a device, a pipe or a file of the system's: name a regular file.")
    if not os.access(target.parent, os.W_OK):
        raise ConfigError(f"{key} {target}: its directory is missing or not writable: create it first.")
    return target


def is_replaceable(path: Path) -> bool:
    """Whether :func:`write_file` may take the name: what is there, if anything, is a file or a symlink.

    Names in ``/dev`` and ``/proc`` are the system's, also those that are symlinks, such as ``/dev/stdout``.
    """
    directory = Path(os.path.realpath(path.parent))  # Path's raises for loops
    is_of_system = directory == Path("/dev") or directory.is_relative_to("/proc")
    return not is_of_system and (path.is_file() or path.is_symlink() or not path.exists())


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


@dataclass(eq=False)
class Writer:
    """An engine as the writer of reports: engines from one config have one path, and one of them may have it.

    Attributes:
        rank: of this process; see :func:`rank_path`.
        claims: the file that each path is written by, of all writers of this process.
        steps: optimizer steps so far; a writer that has made none leaves the path to one that has.
    """

    rank: int
    claims: dict[Path, ReportFile] = field(default_factory=dict)
    steps: int = 0


class ReportFile:
    """A file that a key of the config names, kept up to date; a failure is logged, never raised into training.

    Written in training rather than from a signal handler: a handler runs only when the main thread comes back from C++,
    and SIGKILL has none. So a process that is killed in a hang still leaves a report.

    Args:
        key: of the config.
        path: what the config has there; None writes none.
        writer: the engine that it belongs to.

    Raises:
        ConfigError: nothing can be written there. It is found now, not after hours of training.
    """

    def __init__(self, key: str, path: str | None, writer: Writer) -> None:
        self._key = key
        self._name = path
        self.writer = writer
        self.has_lost = False  # the path to an engine that trains
        self.path = checked_path(key, path, writer.rank)
        self._written_at, self._age_s = -math.inf, 0.0

    def refresh(self, make: Callable[[], Mapping[str, Any]], *, now: bool = False) -> None:
        """Write what ``make`` returns if the file is old, or ``now``: seldom in a steady run, for it takes a ms."""
        if self.path is None or not (now or time.monotonic() - self._written_at >= self._age_s):
            return
        self.write(make())
        self._age_s = min(max(FIRST_REPORT_AGE_S, 2 * self._age_s), REPORT_AGE_S)

    def write(self, found: Mapping[str, Any]) -> None:
        self.write_text(json.dumps(found, indent=2) + "\n")

    def give_up(self) -> None:
        """Leave the path to whoever writes there next."""
        if self.path is not None and self.writer.claims.get(self.path) is self:
            del self.writer.claims[self.path]

    def _claimed(self) -> Path | None:
        """The path, once it is this engine's; another one beside it where another engine that trains has that."""
        claims = self.writer.claims
        for number in itertools.count(2):
            if self.path is None or self._name is None:
                return None
            holder = claims.get(self.path, self)
            trains = self.writer.steps > 0
            if (holder is self and not self.has_lost) or (trains and (holder is self or not holder.writer.steps)):
                claims[self.path], holder.has_lost, self.has_lost = self, True, False
                return self.path
            if not trains:
                self.has_lost = True
                return None
            taken, name = self.path, Path(self._name)
            self.path = rank_path(str(name.with_name(f"{name.stem}.{number}{name.suffix}")), self.writer.rank)
            if self.path not in claims:
                logger.info(
                    "%s %s is of another engine of this process: this one writes %s", self._key, taken, self.path
                )
        return None

    def write_text(self, text: str) -> None:
        path = self._claimed()
        if path is None:
            return
        try:
            write_file(path, text)
        except OSError as error:
            logger.warning("%s %s cannot be written: %s", self._key, self.path, error)
        self._written_at = time.monotonic()


def _step(plan: dict[str, Any]) -> str:
    text = f"{plan['step_s']:.3g} s, {plan['step_s'] / plan['kept_step_s'] - 1:+.1%}"
    measured_s = plan.get("measured_step_s")  # a file may be older
    return text if measured_s is None else f"{text} ({measured_s:.3g} s measured)"


def _wear(path: dict[str, Any]) -> str:
    drive = " ".join(filter(None, (path.get("device"), path.get("model")))) or "unknown drive"
    sharers = path.get("sharers", 1)
    text = f"{drive}: {sharers * path.get('written_bytes_per_day', 0.0) / TERABYTE:.2f} TB a day at this rate"
    text += f" of {sharers} ranks" if sharers > 1 else ""
    if path.get("life_days") is None:
        text += " (set ssd.rated_endurance_tbw to see how long the drive lasts)"
    else:
        text += (
            f", {path['life_days']:.0f} days to its rated {path.get('rated_endurance_tbw') or 0:g} TBW, if the drive "
            "amplifies these writes no more than those of its rating"
        )
    if path.get("percentage_used") is not None:
        text += f"; at the start {path['percentage_used']} % of its life was used"
    if path.get("drive_written_bytes") is not None:
        text += f", {path['drive_written_bytes'] / TERABYTE:.1f} TB written in all"
    return text


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
