"""One page about a run: what its reports and its sampled step say, as data for ``page.html.j2``, and as HTML.

The page loads nothing and runs nothing. Files may be of another version, cut short, or made by somebody else: values
are checked as they are read (:class:`Found`), a section without its values says how to get them, and the page stays
below :data:`MAX_PAGE_BYTES` whatever the files have. It knows the files only and cannot ask the run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from operator import attrgetter
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ds_tba.errors import ReportError
from ds_tba.report import LITTLE, OffloadReport, longer, parts
from ds_tba.stats import readable
from ds_tba.wear import TERABYTE

MAX_PAGE_BYTES = 1_500_000
MAX_TIMELINE_BYTES = 64 << 20  # a few thousand events have less than 1 MiB
DETAILED = 8  # reports with details; more are only compared
MAX_ROWS = 20
MAX_TEXT, MAX_NAME = 160, 24  # characters of a text, and of the name of a mark, which there are thousands of
# Drawings are stretched to their place on the page. The last two are of all reports of a page together.
WIDTH, HEIGHT = 1000.0, 200.0
PAGE_MARKS, PAGE_COLUMNS = 5000, 900
MAX_NUMBER = 1e18  # beyond are no bytes and no times, and beyond 1e308 no float

TRACKS = {"copy": "copies", "write": "writes", "read": "reads", "stall": "stalls", "again": "made again"}
ORDER, LEVELS = ["compute", *TRACKS], "saved bytes"
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

    def __init__(self, values: object) -> None:
        self._values: dict[str, object] = values if isinstance(values, dict) else {}

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


@dataclass
class Mark:
    """``count`` spans that are drawn as one from ``x`` to ``end`` of :data:`WIDTH`; ``filled`` is the sum of theirs."""

    x: float
    end: float
    name: str
    nbytes: float
    filled: float
    count: int = 1

    @property
    def opacity(self) -> float:
        """How full the mark is drawn: many short spans do not look like a long one."""
        return max(0.2, min(0.75, self.filled / max(self.end - self.x, 1e-9)))

    def title(self, length_s: float) -> str:
        """Return the mark in words, in a step of this length."""
        size = f", {readable(self.nbytes)}" if self.nbytes > 0 else ""
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.name}{times}: {_seconds(self.filled / WIDTH * length_s)}{size}"


@dataclass(frozen=True)
class SampledStep:
    """A sampled step.

    Attributes:
        tracks: class, name, a note and the marks of each.
        lines: of saved bytes, as SVG paths by class, in :data:`WIDTH` and :data:`HEIGHT`; empty without levels.
        legend: names of the lines, and of the budget if there is one.
        ticks: of the lines, evenly from the top down to 0.
        budget_y: None where the budget is far above, too.
    """

    note: str
    length_s: float
    tracks: list[tuple[str, str, str, list[Mark]]]
    lines: dict[str, str]
    legend: dict[str, str]
    ticks: list[str]
    budget_y: float | None


@dataclass(frozen=True)
class Run:
    """A report as the page shows it.

    Attributes:
        overhead: by which part a step is longer than with everything kept; None where that is not known.
        spared: the part of the peak of saved bytes that the offload takes away.
        is_measured: whether the overhead is, rather than planned.
        step: None without a timeline, and then ``why_not`` says how to get one.
    """

    name: str
    found: Found
    spared: float
    overhead: float | None
    is_measured: bool
    bytes_per_day: float
    step: SampledStep | None
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
        elif self.is_measured:
            parts.append(f"a step took {longer(self.overhead)} than estimated with everything kept")
        else:
            parts.append(
                f"by the plan, not measured yet, a step takes {longer(self.overhead)} than with everything kept"
            )
        if self.found.rows("wear"):
            parts.append(f"{self.bytes_per_day / TERABYTE:.2f} TB written a day")
        return ", ".join(parts) + "."

    @property
    def advice(self) -> list[str]:
        """Lines that say what to change, with the keys that do it."""
        nothing = "Nothing stands out. A smaller activation_budget_bytes lowers the peak further."
        return list(self._advice()) or [nothing]

    def _advice(self) -> Iterator[str]:
        found, plan = self.found, self.found.part("plan")
        excess_bytes, steps = found.number("budget_excess_bytes"), found.number("steps")
        if excess_bytes > 0:
            excess = f"activation_budget_bytes was exceeded by {readable(excess_bytes)}"
            yield f"{excess}: raise it by that, lower min_tensor_bytes, or train smaller micro-batches."
        kept = found.counts("kept_bytes_by_reason")
        done = sum(found.number(f"{how}_bytes") for how in ("offloaded", "rematerialized", "recomputed"))
        if kept and kept[0][0] in REMEDIES and kept[0][1] > (sum(one for _, one in kept) + done) / 3:
            reason, nbytes = kept[0]
            yield f"{readable(nbytes)} so far were kept because of: {reason}. To change that, {REMEDIES[reason]}."
        for reason, count in found.counts("fallbacks_by_reason"):
            advice = REMEDIES.get(reason, "see the log")
            yield f"{count:.0f} tensors found no place because of: {reason}. To change that, {advice}."
        promised_s, measured_s = plan.number("step_s"), plan.number("measured_step_s")
        if steps and measured_s and found.number("stall_s") / steps > LONG_WAIT * measured_s:
            yield "Steps wait for the drives: ds_tba tune looks for a faster io, and nvme_path may name more of them."
        elif measured_s > SLOWER * promised_s > 0:
            than_planned = f"{longer(measured_s / promised_s - 1)} than planned"
            yield f"Steps take {than_planned}, not for the drives: compare with a run with enabled: false."
        lives = [life for one in found.rows("wear") if (life := one.number("life_days")) > 0]
        if lives and min(lives) < SHORT_LIFE_DAYS:
            yield f"At this rate a drive lasts {min(lives):.0f} days: ssd.min_life_days limits what plans write."
        elif self.bytes_per_day > 0 and not lives:
            yield "To see how long the drive lasts, set ssd.rated_endurance_tbw from its data sheet."
        if found.part("device_memory").number("allocation_retries") > 0:
            remedy = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            yield f"The device was full at times: lower activation_budget_bytes, or train with {remedy}."


def view(name: str, found: Found, timeline: Found, why_not: str, sharers: int = 1) -> Run:
    """Return a report with the timeline of its step, or the reason for none; ``sharers`` of them are on the page."""
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
        sum((one.number("sharers") or 1) * one.number("written_bytes_per_day") for one in found.rows("wear")),
        step,
        why_not or ("" if step else "The timeline has no events with a length: train again to have another."),
    )


def render(paths: Sequence[Path]) -> str:
    """Return the page about reports: details of the first ones, and a comparison where there are several.

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
        "breakable": _breakable, "bytes": _bytes, "rate": _rate, "seconds": _seconds, "sha256": _sha256,
    }  # fmt: skip
    template = environment.from_string(files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8"))
    page = template.render(
        runs=runs, detailed=runs[:DETAILED], width=WIDTH, height=HEIGHT, max_rows=MAX_ROWS, remedies=REMEDIES,
        terabyte=TERABYTE, facts=[(one.name, one.metadata["row"] or one.name) for one in parts()["The run"]],
    )  # fmt: skip
    page = page.strip().encode(errors="replace").decode()  # of surrogate pairs JSON may have a half, and UTF-8 may not
    if len(page.encode()) > MAX_PAGE_BYTES:
        raise ReportError(f"{len(paths)} reports are more than a page can show: name fewer.")
    return page


def read_timeline(found: Found, directory: Path) -> tuple[Found, str]:
    """Return the timeline that a report names, or one of its name in the directory; else how to get one."""
    named = found.text("timeline_path")
    if not named:
        why_not = (
            'There is no timeline: set "report": {"timeline_path": "/some/step.json"} in the block, and train again.'
        )
        return Found({}), why_not
    try:
        for path in (Path(named), directory / Path(named).name):
            # A pipe or a device may have no end.
            if path.is_file() and path.stat().st_size <= MAX_TIMELINE_BYTES:
                return Found(json.loads(path.read_text())), ""
    except (OSError, ValueError, RecursionError):
        return Found({}), f"The timeline {named} cannot be read: train again to have another."
    return Found({}), f"The timeline {named} is not here: copy it beside the report, and make this page again."


def shortened(text: str) -> str:
    """Return a text without its middle where it is long."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}…{text[-MAX_TEXT // 2 :]}"


def _breakable(text: str) -> Markup:
    """Return a path that a browser may break behind its separators."""
    return Markup("<wbr>").join(re.split(r"(?<=[./_])", text))


def _bytes(value: float) -> str:
    return readable(value) if value > 0 else "-"


def _rate(value: float) -> str:
    return f"{value / 1e9:.2f} GB/s" if value > 0 else "-"


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _seconds(value: float, of: float = 0.0) -> str:
    """Return a time in the unit that suits it, or suits the time that it is part of."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if max(value, of) >= size:
            return f"{value / size:.3g} {unit}"
    return "0 s"


# ---- one step -------------------------------------------------------------------------------------------------------


def _step(timeline: Found, sharers: int) -> SampledStep | None:
    events = []
    for one in timeline.rows("traceEvents"):
        kind = {"X": one.text("cat"), "C": one.text("name")}.get(one.text("ph"), "")
        if kind in (*ORDER, LEVELS):
            events.append((kind, one, one.number("ts"), max(one.number("dur"), 0.0)))
    began_us = min((start_us for *_, start_us, _ in events), default=0.0)
    length_us = max((start_us + took_us for *_, start_us, took_us in events), default=0.0) - began_us
    if length_us <= 0:
        return None
    tracks: dict[tuple[str, str], list[Mark]] = {}  # by kind and name
    levels: list[tuple[float, float, float]] = []  # place, bytes in device memory, bytes without the offload
    for kind, one, start_us, took_us in events:
        x, values, name = (start_us - began_us) / length_us * WIDTH, one.part("args"), one.text("name")
        if kind == LEVELS:
            levels.append((x, values.number("resident"), values.number("without")))
            continue
        track = kind, TRACKS.get(kind, name)
        if track not in tracks and sum(other == kind for other, _ in tracks) >= MAX_COMPUTE_TRACKS:
            track = kind, "other compute"
        width = took_us / length_us * WIDTH
        mark = Mark(x, x + width, name[:MAX_NAME], values.number("bytes"), width)
        tracks.setdefault(track, []).append(mark)
    other = timeline.part("otherData")
    note = f"Step {other.number('step'):.0f} of rank {other.number('rank'):.0f}."
    if left_out := other.number("events_left_out"):
        note += f" {left_out:.0f} events are left out."
    limit = PAGE_MARKS // (len(ORDER) + MAX_COMPUTE_TRACKS) // sharers
    return SampledStep(
        note,
        length_us / 1e6,
        [
            (kind, name, _note(tracks[kind, name], length_us / 1e6), _merged(tracks[kind, name], limit))
            for wanted in ORDER
            for kind, name in tracks
            if kind == wanted
        ],
        *_lines(levels, other.number("budget_bytes"), PAGE_COLUMNS // sharers),
    )


def _note(marks: Sequence[Mark], length_s: float) -> str:
    nbytes, filled = sum(one.nbytes for one in marks), sum(one.filled for one in marks)
    size = f", {readable(nbytes)}" if nbytes > 0 else ""
    return f"{_seconds(filled / WIDTH * length_s)} in {len(marks)}{size}"


def _merged(marks: Sequence[Mark], limit: int) -> list[Mark]:
    """Return at most ``limit`` marks: those narrower than a pixel and as near to each other are one."""
    grain, found = 0.5, [*marks]
    while grain < 1 or len(found) > limit:
        grain, found, is_run = 2 * grain, [], False
        for one in sorted(marks, key=attrgetter("x")):
            is_short = one.end - one.x < grain
            if is_short and is_run and one.x - found[-1].end < grain:
                last, name = found[-1], one.name if one.name == found[-1].name else "several"
                sums = last.nbytes + one.nbytes, last.filled + one.filled, last.count + 1
                found[-1] = Mark(last.x, max(last.end, one.end), name, *sums)
            else:
                found.append(one)
            is_run = is_short
    return found


def _lines(
    levels: list[tuple[float, float, float]], budget_bytes: float, columns: int
) -> tuple[dict[str, str], dict[str, str], list[str], float | None]:
    """Return lines with the highest and the last level of each column; legend, ticks, and place of the budget."""
    if not levels:
        return {}, {}, [], None
    levels.sort()
    peaks = {"without": max(one[2] for one in levels), "resident": max(one[1] for one in levels)}
    top = max(*peaks.values(), 1.0)
    top = max(top, budget_bytes if budget_bytes < 1.5 * top else 0.0)
    lines = {}
    for kind, which in (("without", 2), ("resident", 1)):
        drawn: dict[int, tuple[float, float]] = {}  # by column
        for one in levels:
            column = int(one[0] / WIDTH * columns)
            drawn[column] = max(drawn.get(column, (0.0, 0.0))[0], one[which]), one[which]
        path = [f"M0 {HEIGHT:g}"]
        for column, pair in drawn.items():
            path.append(f"H{column / columns * WIDTH:.1f}")
            path += [f"V{HEIGHT * (1 - nbytes / top):.1f}" for nbytes in dict.fromkeys(pair)]
        lines[kind] = "".join([*path, f"H{WIDTH:g}V{HEIGHT:g}"])
    legend = {"without": f"without the offload, up to {readable(peaks['without'])}"}
    legend["resident"] = f"in device memory, up to {readable(peaks['resident'])}"
    is_drawn = 0 < budget_bytes <= top
    if budget_bytes > 0:
        legend["budget"] = (
            f"activation_budget_bytes, {readable(budget_bytes)}{'' if is_drawn else ', above this drawing'}"
        )
    ticks = [readable(top), readable(top / 2), "0"]
    return lines, legend, ticks, HEIGHT * (1 - budget_bytes / top) if is_drawn else None
