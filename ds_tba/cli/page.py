"""One page about a run: what its reports and its sampled step say, as data for ``page.html.j2``, and as HTML.

The page loads nothing and runs nothing. Files may be of another version, cut short, or made by somebody else: values
are checked as they are read (:class:`Found`), a section without its values says how to get them, and the page stays
below :data:`MAX_PAGE_BYTES` whatever the files have. It knows the files only and cannot ask the run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ds_tba.errors import ReportError
from ds_tba.telemetry.drive_health import TERABYTE
from ds_tba.telemetry.report import LITTLE, OffloadReport
from ds_tba.telemetry.stats import readable

MAX_PAGE_BYTES = 1_500_000
MAX_TIMELINE_BYTES = 64 << 20  # a few thousand events have less than 1 MiB
DETAILED = 8  # reports with details; more are only compared
MAX_ROWS = 20
MAX_TEXT = 160
# Drawings are stretched to their place on the page. The last two are of all reports of a page together.
WIDTH, HEIGHT = 1000.0, 200.0
PAGE_MARKS, PAGE_COLUMNS = 6000, 900
MAX_NUMBER = 1e18  # beyond are no bytes and no times, and beyond 1e308 no float

TRACKS = {"copy": "copies", "write": "writes", "read": "reads", "stall": "stalls", "again": "made again"}
ORDER = ["compute", *TRACKS]
MAX_COMPUTE_TRACKS = 4
LONG_WAIT, SLOWER, SHORT_LIFE_DAYS = 0.05, 1.05, 365.0  # above, above and below which something should change
# What to do about bytes that stay, by the report's words for the reason.
REMEDIES = {
    "small": "lower min_tensor_bytes, unless these tensors are far smaller",
    "plan": "set a smaller activation_budget_bytes, or raise max_step_overhead",
    "placement keep": 'set "placement": "adaptive"; with "keep" nothing is moved',
    "staging full": "raise io.staging_bytes; forward saves faster than the drives write",
    "larger than staging": "raise io.staging_bytes above the largest tensor, or train smaller micro-batches",
    "no space in the swap file": "raise io.swap_file_bytes, or free space on the drive",
    "path failed": "look at dmesg and smartctl, and name another directory in nvme_path",
    "no room in host_budget_bytes": "raise host_budget_bytes",
}


class Found:
    """Values of a JSON object that cannot be relied upon: what is absent or of another type is 0 or empty."""

    def __init__(self, values: Any) -> None:
        self._values: dict[str, Any] = values if isinstance(values, dict) else {}

    def __bool__(self) -> bool:
        return bool(self._values)

    def number(self, name: str) -> float:
        value = self._values.get(name)
        return value if isinstance(value, (int, float)) and -MAX_NUMBER < value < MAX_NUMBER else 0.0

    def text(self, name: str) -> str:
        value = self._values.get(name)
        return "" if value is None or isinstance(value, (dict, list)) else shortened(str(value))

    def part(self, name: str) -> Found:
        return Found(self._values.get(name))

    def rows(self, name: str) -> list[Found]:
        value = self._values.get(name)
        return [Found(one) for one in value if isinstance(one, dict)] if isinstance(value, list) else []

    def texts(self, name: str) -> list[str]:
        value = self._values.get(name)
        return [shortened(str(one)) for one in value[:MAX_ROWS]] if isinstance(value, list) else []

    def counts(self, name: str) -> list[tuple[str, float]]:
        """Numbers above 0 by their names, the largest first."""
        part = self.part(name)
        found = Counter({shortened(key): part.number(key) for key in part._values})
        return [one for one in found.most_common(MAX_ROWS) if one[1] > 0]


@dataclass(frozen=True)
class Track:
    """Work of one kind in a step: its class, and left edge, width and title of each rectangle, in :data:`WIDTH`."""

    kind: str
    name: str
    note: str
    marks: list[tuple[float, float, str]]


@dataclass(frozen=True)
class Levels:
    """Bytes over a step, in :data:`WIDTH` and :data:`HEIGHT`.

    Attributes:
        lines: an SVG path by its class.
        legend: names by class.
        ticks: from the top down to 0, evenly.
        budget_y: None where there is no budget, or one far above.
    """

    lines: dict[str, str]
    legend: dict[str, str]
    ticks: list[str]
    budget_y: float | None


@dataclass(frozen=True)
class Step:
    """A sampled step; ``times`` are evenly spaced."""

    note: str
    times: list[str]
    tracks: list[Track]
    levels: Levels | None


@dataclass(frozen=True)
class Run:
    """A report as the page shows it.

    Attributes:
        overhead: by which part a step is longer than with everything kept; None where that is not known.
        is_measured: whether the overhead is.
        step: None without a timeline, and then ``why_not`` says how to get one.
    """

    name: str
    found: Found
    spared: float
    overhead: float | None
    is_measured: bool
    bytes_per_day: float
    step: Step | None
    why_not: str

    @property
    def is_good(self) -> bool:
        return self.spared >= LITTLE

    @property
    def verdict(self) -> str:
        """Did the offload do anything?"""
        peak, without = (self.found.number(f"peak_saved_bytes{which}") for which in ("", "_without"))
        if without <= 0:
            return "Nothing was saved for backward yet."
        word = "The offload works" if self.is_good else "The offload does little"
        if self.found.text("placement") == "keep":
            word = "Nothing was to be moved"
        parts = [f"{word}: {readable(peak)} of saved tensors at the peak instead of {readable(without)}"]
        parts[0] += f" ({-self.spared:+.0%})"
        if self.overhead is None:
            parts.append("the cost in step time is not known without a plan")
        else:
            longer = f"{abs(self.overhead):.1%} {'longer' if self.overhead >= 0 else 'shorter'}"
            parts.append(f"a step {'takes' if self.is_measured else 'should take'} {longer} than with everything kept")
        if self.found.texts("paths"):
            parts.append(f"{self.bytes_per_day / TERABYTE:.2f} TB written a day")
        return ", ".join(parts) + "."

    @property
    def advice(self) -> list[str]:
        """What to change, with the keys that do it."""
        nothing = "Nothing stands out. A smaller activation_budget_bytes lowers the peak further."
        return list(self._advice()) or [nothing]

    def _advice(self) -> Iterator[str]:
        found, plan = self.found, self.found.part("plan")
        excess_bytes, steps = found.number("budget_excess_bytes"), found.number("steps")
        if excess_bytes > 0:
            yield (
                f"activation_budget_bytes was exceeded by {readable(excess_bytes)}: raise it by that, lower "
                "min_tensor_bytes, or train smaller micro-batches."
            )
        kept = found.counts("kept_bytes_by_reason")
        done = sum(found.number(f"{how}_bytes") for how in ("offloaded", "rematerialized", "recomputed"))
        if kept and kept[0][0] in REMEDIES and kept[0][1] > (sum(one for _, one in kept) + done) / 3:
            reason, nbytes = kept[0]
            yield f"{readable(nbytes)} so far were kept because of: {reason}. To change that, {REMEDIES[reason]}."
        for reason, count in found.counts("fallbacks_by_reason"):
            advice = REMEDIES.get(reason, "see the log")
            yield f"{count:.0f} tensors found no place because of: {reason}. To change that, {advice}."
        promised_s, measured_s = plan.number("step_s"), plan.number("measured_step_s")
        if measured_s > SLOWER * promised_s > 0:
            yield (
                f"Steps take {measured_s / promised_s - 1:+.0%} of what the plan promised: ds_tba tune looks for a "
                'faster "io"; a lower max_step_overhead moves less.'
            )
        elif steps and measured_s and found.number("stall_s") / steps > LONG_WAIT * measured_s:
            yield (
                'Forward and backward wait for the drive: ds_tba tune looks for a faster "io"; nvme_path may name '
                "several drives."
            )
        lives = [life for one in found.rows("wear") if (life := one.number("life_days")) > 0]
        if lives and min(lives) < SHORT_LIFE_DAYS:
            yield f"At this rate a drive lasts {min(lives):.0f} days: ssd.min_life_days limits what plans write."
        elif self.bytes_per_day > 0 and not lives:
            yield "To see how long the drive lasts, set ssd.rated_endurance_tbw from its data sheet."
        if found.part("device_memory").number("allocation_retries") > 0:
            yield (
                "The device was full at times: lower activation_budget_bytes, or train with "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
            )


def view(name: str, found: Found, timeline: Found, why_not: str, sharers: int = 1) -> Run:
    """A report and the timeline of its step, or the reason for none; ``sharers`` of them are on the page."""
    plan, without = found.part("plan"), found.number("peak_saved_bytes_without")
    kept_s, measured_s = plan.number("kept_step_s"), plan.number("measured_step_s")
    step_s = measured_s or plan.number("step_s")
    step = _step(timeline, sharers)
    return Run(
        shortened(name),
        found,
        1 - found.number("peak_saved_bytes") / without if without > 0 else 0.0,
        step_s / kept_s - 1 if kept_s > 0 and step_s > 0 else None,
        measured_s > 0,
        sum(one.number("written_bytes_per_day") for one in found.rows("wear")),
        step,
        why_not or ("" if step else "The timeline has no events with a length: train again to have another."),
    )


def render(paths: Sequence[Path]) -> str:
    """The page about the reports in these files: details of the first ones, and a comparison where there are several.

    Raises:
        ReportError: a file is no report, or these are more than a page can show.
    """
    runs = []
    sharers = min(len(paths), DETAILED)
    for number, path in enumerate(paths):
        # With the keys that only another version knows.
        found = Found({**OffloadReport.read_json(path).to_dict(), **json.loads(path.read_text())})
        timeline, why_not = read_timeline(found, path.parent) if number < DETAILED else (Found({}), "not shown")
        runs.append(view(str(path), found, timeline, why_not, sharers))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "breakable": lambda text: Markup("<wbr>").join(re.split(r"(?<=[./_])", text)),
        "bytes": lambda value: readable(value) if value > 0 else "-",
        "rate": lambda value: f"{value / 1e9:.2f} GB/s" if value > 0 else "-",
        "seconds": _seconds,
        "sha256": lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode(),
    }
    template = environment.from_string(files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8"))
    page = template.render(
        runs=runs, detailed=runs[:DETAILED], width=WIDTH, height=HEIGHT, max_rows=MAX_ROWS, remedies=REMEDIES,
        terabyte=TERABYTE,
    )  # fmt: skip
    page = page.strip().encode(errors="replace").decode()  # of surrogate pairs JSON may have a half, and UTF-8 may not
    if len(page.encode()) > MAX_PAGE_BYTES:
        raise ReportError(f"{len(paths)} reports are more than a page can show: name fewer.")
    return page


def read_timeline(found: Found, directory: Path) -> tuple[Found, str]:
    """The timeline that a report names, or one of its name in the directory; else the reason, and how to get one."""
    named = found.text("timeline_path")
    if not named:
        return Found({}), 'Set "report": {"timeline_path": "/some/step.json"} in the block, and train again.'
    try:
        for path in (Path(named), directory / Path(named).name):
            # A pipe or a device may have no end.
            if path.is_file() and path.stat().st_size <= MAX_TIMELINE_BYTES:
                return Found(json.loads(path.read_text())), ""
    except (OSError, ValueError, RecursionError):
        return Found({}), f"The timeline {named} cannot be read: train again to have another."
    return Found({}), f"The timeline {named} is not here: copy it beside the report, and make this page again."


def shortened(text: str) -> str:
    """A text without its middle where it is long."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}…{text[-MAX_TEXT // 2 :]}"


def _seconds(value: float, of: float = 0.0) -> str:
    """A time in the unit that suits it, or suits the time that it is part of."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if max(value, of) >= size:
            return f"{value / size:.3g} {unit}"
    return "0 s"


# ---- one step -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Span:
    """``count`` events that are drawn as one; ``busy_us`` is the sum of their times."""

    start_us: float
    end_us: float
    name: str
    nbytes: float
    busy_us: float
    count: int = 1


def _step(timeline: Found, sharers: int) -> Step | None:
    spans: dict[tuple[str, str], list[_Span]] = {}  # by kind and name of the track
    levels: list[tuple[float, float, float]] = []  # time, bytes in device memory, bytes without the offload
    for one in timeline.rows("traceEvents"):
        start_us, kind, phase, values = one.number("ts"), one.text("cat"), one.text("ph"), one.part("args")
        if phase == "C" and one.text("name") == "saved bytes":
            levels.append((start_us, values.number("resident"), values.number("without")))
        elif phase == "X" and kind in ORDER:
            name, took_us = one.text("name"), max(one.number("dur"), 0.0)
            track = kind, TRACKS.get(kind, name)
            if track not in spans and sum(other == kind for other, _ in spans) >= MAX_COMPUTE_TRACKS:
                track = kind, "other compute"
            span = _Span(start_us, start_us + took_us, name, values.number("bytes"), took_us)
            spans.setdefault(track, []).append(span)
    edges = [edge for track in spans.values() for one in track for edge in (one.start_us, one.end_us)]
    edges += [at_us for at_us, *_ in levels]
    began_us = min(edges, default=0.0)
    length_us = max(edges, default=0.0) - began_us
    if length_us <= 0:
        return None
    other = timeline.part("otherData")
    note = f"Step {other.number('step'):.0f} of rank {other.number('rank'):.0f}."
    if left_out := other.number("events_left_out"):
        note += f" {left_out:.0f} events are left out."
    limit = PAGE_MARKS // (len(ORDER) + MAX_COMPUTE_TRACKS) // sharers
    tracks = [
        _track(*key, spans[key], began_us, length_us, limit)
        for key in sorted(spans, key=lambda one: ORDER.index(one[0]))
    ]
    drawn = _levels(levels, other.number("budget_bytes"), began_us, length_us, PAGE_COLUMNS // sharers)
    return Step(
        note,
        [_seconds(length_us * part / 4e6, length_us / 1e6) for part in range(5)],
        tracks,
        drawn if levels else None,
    )


def _track(kind: str, name: str, spans: list[_Span], began_us: float, length_us: float, limit: int) -> Track:
    """A track with at most ``limit`` marks: spans narrower than a pixel are merged, and wider ones if they must."""
    spans.sort(key=lambda one: one.start_us)
    grain_us = length_us / WIDTH
    while len(drawn := _merged(spans, grain_us)) > limit:
        grain_us *= 2
    marks = []
    for one in drawn:
        size = f", {readable(one.nbytes)}" if one.nbytes > 0 else ""
        title = f"{one.name}{f' ({one.count} times)' if one.count > 1 else ''}: {_seconds(one.busy_us / 1e6)}{size}"
        width = max((one.end_us - one.start_us) / length_us * WIDTH, 1.0)
        marks.append(((one.start_us - began_us) / length_us * WIDTH, width, title))
    nbytes = sum(one.nbytes for one in spans)
    note = f"{_seconds(sum(one.busy_us for one in spans) / 1e6)} in {len(spans)}"
    return Track(kind, name, f"{note}, {readable(nbytes)}" if nbytes > 0 else note, marks)


def _merged(spans: Sequence[_Span], grain_us: float) -> list[_Span]:
    """The spans, of which those that are shorter than ``grain_us`` and as near to each other are one."""
    found: list[_Span] = []
    is_run = False
    for one in spans:
        is_short = one.end_us - one.start_us < grain_us
        if is_short and is_run and one.start_us - found[-1].end_us < grain_us:
            last = found[-1]
            last.name = last.name if last.name == one.name else "several"
            last.end_us = max(last.end_us, one.end_us)
            last.nbytes, last.busy_us, last.count = last.nbytes + one.nbytes, last.busy_us + one.busy_us, last.count + 1
        else:
            found.append(_Span(one.start_us, one.end_us, one.name, one.nbytes, one.busy_us))
        is_run = is_short
    return found


def _levels(
    levels: list[tuple[float, float, float]], budget_bytes: float, began_us: float, length_us: float, columns: int
) -> Levels:
    """Lines with the highest and the last level of each of ``columns``."""
    levels.sort()
    peaks = {"resident": max((one[1] for one in levels), default=0.0)}
    peaks["without"] = max((one[2] for one in levels), default=0.0)
    highest = max(*peaks.values(), 1.0)
    highest = max(highest, budget_bytes if budget_bytes < 1.5 * highest else 0.0)
    unit = 1024 ** int(math.log(highest, 1024))
    unit *= 10 ** int(math.log10(highest / unit))
    top = unit * next(part for part in (1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10, 12) if unit * part >= highest)
    lines = {}
    for which, kind in ((2, "without"), (1, "resident")):
        drawn: dict[int, tuple[float, float]] = {}  # by column
        for one in levels:
            column = int((one[0] - began_us) / length_us * columns)
            drawn[column] = max(drawn.get(column, (0.0, 0.0))[0], one[which]), one[which]
        path = [f"M0 {HEIGHT:g}"]
        for column, pair in drawn.items():
            path.append(f"H{column / columns * WIDTH:.1f}")
            path += [f"V{HEIGHT * (1 - nbytes / top):.1f}" for nbytes in dict.fromkeys(pair)]
        lines[kind] = "".join([*path, f"H{WIDTH:g}V{HEIGHT:g}"])
    legend = {"without": f"without the offload, up to {readable(peaks['without'])}"}
    legend["resident"] = f"in device memory, up to {readable(peaks['resident'])}"
    if budget_bytes > 0:
        where = "" if budget_bytes <= top else ", above this drawing"
        legend["budget"] = f"activation_budget_bytes, {readable(budget_bytes)}{where}"
    ticks = [readable(top * part / 2).replace(".00", "") for part in (2, 1, 0)]
    return Levels(lines, legend, ticks, HEIGHT * (1 - budget_bytes / top) if 0 < budget_bytes <= top else None)
