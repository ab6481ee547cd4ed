"""When did bytes move in one step? Spans and levels of a sampled step, as a Chrome trace for Perfetto.

Times are ``time.perf_counter``'s, which is what the lanes have; the trace has them on the clock of ``torch.profiler``
(nanoseconds since 1970, here in microseconds), so that both can be opened together. Copies of an asynchronous device
appear as the host's time for them: what the device itself does is in a profile of the user's.
"""

from __future__ import annotations

import json
import time
from operator import attrgetter
from typing import NamedTuple

# Tracks from top to bottom; the categories of the spans.
TRACKS = ("compute", "copy", "write", "read", "stall", "again")
MAX_EVENTS = 20_000  # of a step with more, the rest is left out, and counted


class TimelineSpan(NamedTuple):
    """Something that took from ``start_s`` to ``end_s``, with the bytes that it moved."""

    track: str
    name: str
    start_s: float
    end_s: float
    nbytes: int


class Level(NamedTuple):
    """Saved bytes in device memory, and what they would be without us, at ``at_s``."""

    at_s: float
    resident_bytes: int
    without_bytes: int


class StepTimeline:
    """The spans and levels of one step. Added to by several threads: appending to a list needs no lock."""

    def __init__(self) -> None:
        self.spans: list[TimelineSpan] = []
        self.levels: list[Level] = []
        self.left_out = 0
        # Once: the two clocks may drift apart by microseconds in a step, and no more.
        self._epoch_s = time.time() - time.perf_counter()

    def span(self, track: str, name: str, start_s: float, end_s: float, nbytes: int = 0) -> None:
        """Add a span to one of :data:`TRACKS`."""
        if len(self.spans) < MAX_EVENTS:
            self.spans.append(TimelineSpan(track, name, start_s, end_s, nbytes))
        else:
            self.left_out += 1

    def level(self, resident_bytes: int, without_bytes: int) -> None:
        """Add the levels of now."""
        if len(self.levels) < MAX_EVENTS:
            self.levels.append(Level(time.perf_counter(), resident_bytes, without_bytes))
        else:
            self.left_out += 1

    def to_json(self, step: int, rank: int) -> str:
        """Return Chrome's trace event format, which https://ui.perfetto.dev and ``chrome://tracing`` open."""
        names = [(0, "process_name", f"ds_tba, rank {rank}")]
        names += [(tid, "thread_name", track) for tid, track in enumerate(TRACKS)]
        events: list[dict[str, object]] = [
            {"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": {"name": name}} for tid, kind, name in names
        ]
        events += [
            {
                "ph": "X",
                "name": one.name,
                "cat": one.track,
                "pid": rank,
                "tid": TRACKS.index(one.track),
                "ts": self._us(one.start_s),
                "dur": round((one.end_s - one.start_s) * 1e6, 3),
                "args": {"bytes": one.nbytes},
            }
            for one in sorted(self.spans, key=attrgetter("start_s"))
        ]
        events += [
            {
                "ph": "C",
                "name": "saved bytes",
                "pid": rank,
                "ts": self._us(one.at_s),
                "args": {"resident": one.resident_bytes, "without": one.without_bytes},
            }
            for one in self.levels
        ]
        other = {"step": step, "rank": rank, "events_left_out": self.left_out}
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}) + "\n"

    def _us(self, at_s: float) -> float:
        return round((self._epoch_s + at_s) * 1e6, 3)
