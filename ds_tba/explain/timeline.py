"""When did bytes move in one step? A sampled step as a Chrome trace for Perfetto.

Times are ``time.perf_counter``'s, which is what the lanes have; the trace has them on the clock of ``torch.profiler``
(nanoseconds since 1970, here in microseconds), so that both can be opened together. Copies of an asynchronous device
appear as the host's time for them: what the device itself does is in a profile of the user's.
"""

from __future__ import annotations

import json
import time

# Tracks from top to bottom; the categories of the spans.
TRACKS = ("compute", "copy", "write", "read", "stall", "again")
MAX_EVENTS = 40_000  # of a step with more, the rest is left out, and counted


class StepTimeline:
    """The events of one step. Added to by several threads: appending to a list needs no lock."""

    def __init__(self) -> None:
        self._events: list[dict[str, object]] = []
        self._left_out = 0
        # Once: the two clocks may drift apart by microseconds in a step, and no more.
        self._epoch_s = time.time() - time.perf_counter()

    def span(self, track: str, name: str, start_s: float, end_s: float, nbytes: int = 0) -> None:
        """Add what took from one time to another on one of :data:`TRACKS`, and moved so many bytes."""
        place = {"tid": TRACKS.index(track), "cat": track, "dur": round((end_s - start_s) * 1e6, 3)}
        self._add("X", name, start_s, {**place, "args": {"bytes": nbytes}})

    def level(self, resident_bytes: int, without_bytes: int) -> None:
        """Add the saved bytes that device memory has now, and what they would be without us."""
        self._add(
            "C", "saved bytes", time.perf_counter(), {"args": {"resident": resident_bytes, "without": without_bytes}}
        )

    def _add(self, kind: str, name: str, at_s: float, more: dict[str, object]) -> None:
        if len(self._events) < MAX_EVENTS:
            self._events.append({"ph": kind, "name": name, "ts": round((self._epoch_s + at_s) * 1e6, 3), **more})
        else:
            self._left_out += 1

    def to_json(self, step: int, rank: int) -> str:
        """Return Chrome's trace event format, which https://ui.perfetto.dev and ``chrome://tracing`` open."""
        names = [(0, "process_name", f"ds_tba, rank {rank}")]
        names += [(tid, "thread_name", track) for tid, track in enumerate(TRACKS)]
        heads = [{"ph": "M", "name": kind, "tid": tid, "args": {"name": name}} for tid, kind, name in names]
        events = [{**one, "pid": rank} for one in (*heads, *self._events)]
        other = {"step": step, "rank": rank, "events_left_out": self._left_out}
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}) + "\n"
