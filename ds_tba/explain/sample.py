"""Who saves bytes in one step, where, and when? The cache's hooks, looked at from around in the steps 1, 2, 4, 8, ...

Answers which modules hold saved bytes (:class:`ds_tba.report.Holder`) and when bytes came and went
(:class:`StepTimeline`). In all other steps it is not there: the hooks are the cache's own. Cannot see which op saves a
tensor: autograd calls its hook before it has the node; named is the op that made it.
"""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path

import torch

from ds_tba.core.accounts import CountedMemory
from ds_tba.core.saved import Hooks, RecordState, SavedCounted, SavedStorage, SavedView
from ds_tba.core.tensors import form_of, node_of
from ds_tba.remat.where import RunningModule
from ds_tba.report import Holder, ReportFile
from ds_tba.stats import CacheStats, PathMeter, StoreStats
from ds_tba.storage.base import Store

# Nodes that only look at a tensor in another shape, and those that ZeRO-3 puts around each module.
_VIEWS = frozenset(
    ("Alias", "Detach", "Expand", "Permute", "Reshape", "Select", "Slice", "Split", "Squeeze", "T", "Transpose")
    + ("Unsqueeze", "UnsafeView", "View", "PreBackwardFunctionForModule", "PostBackwardFunctionModule")
)
# Whole names between dots: "conv2d" and "layer1" are no numbers of layers.
LAYER_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_NODE = re.compile(r"(.*?)(?:Backward\d*)?")
_LIBRARIES = ("torch", "deepspeed", "ds_tba", "contextlib")
# Tracks from top to bottom; the categories of the spans.
TRACKS = ("compute", "copy", "write", "read", "stall", "again")
MAX_EVENTS = 40_000  # of a step with more, the rest is left out, and counted


class StepTimeline:
    """The events of one step, for Perfetto. Added to by several threads: appending to a list needs no lock.

    Times are ``time.perf_counter``'s, which is what the lanes have; the trace has them on the clock of
    ``torch.profiler`` (nanoseconds since 1970, here in microseconds), so that both can be opened together. Copies of an
    asynchronous device appear as the host's time for them: what the device itself does is in a profile of the user's.
    """

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


class StepSamples:
    """Samples the steps 1, 2, 4, 8, ...: seldom, and again while plans change and lengths grow.

    Args:
        file: has the timeline of the last sampled step; None where nobody wants timelines.
    """

    def __init__(
        self,
        cache: CacheStats,
        store: StoreStats,
        paths: Sequence[PathMeter],
        running: RunningModule,
        file: ReportFile | None,
        step: int,
    ) -> None:
        self._stats, self._store, self._paths, self._file, self._step = cache, store, paths, file, step
        self.running = running
        self.holders: list[Holder] = []  # of saved bytes, at the end of the last forward that was sampled
        # The step of that forward, and the saved bytes in device memory as the last step ended.
        self.holders_step = self.earlier_bytes = 0
        # Each storage by its record, or by its account where it has none: views of one count once.
        self._seen: dict[SavedStorage | CountedMemory, Holder] = {}
        self._is_after = False  # a forward
        self._phase_s = 0.0  # when the last part of the step ended
        self._timeline: StepTimeline | None = None
        self._begin_step()

    def around(self, hooks: Hooks) -> Hooks:
        """Return the hooks of a forward that begins."""
        return self._looking(hooks) if self._is_sampled else hooks

    def _looking(self, hooks: Hooks) -> Hooks:
        """Return hooks that look at what these do, for as long as this step lasts: those of a graph may live on."""
        (pack, unpack), step = hooks, self._step

        def look_at_pack(tensor: torch.Tensor) -> object:
            if self._step != step:
                return pack(tensor)
            started_s, moving_s = time.perf_counter(), self._stats.moving_s
            held = pack(tensor)
            if self._stats.moving_s > moving_s:
                self._span("copy", "copy out", started_s, tensor.untyped_storage().nbytes())
            if isinstance(held, SavedView):
                self._see(held.record, tensor, held.record.nbytes)
            elif isinstance(held, SavedCounted):
                self._see(held.memory, tensor, held.nbytes)
            self._level()
            return held

        def look_at_unpack(held: object) -> torch.Tensor:
            if self._step != step:
                return unpack(held)
            if self._is_after:
                self._take()  # what was saved between forward and backward, as by a loss outside
            stats, started_s = self._stats, time.perf_counter()
            stalled_s, made_bytes, moving_s = self._store.stall_s, stats.rematerialized_bytes, stats.moving_s
            tensor = unpack(held)
            nbytes = held.record.nbytes if isinstance(held, SavedView) else 0
            copying_s = started_s + self._store.stall_s - stalled_s
            if stats.rematerialized_bytes > made_bytes:
                self._span("again", "recompute", started_s, stats.rematerialized_bytes - made_bytes)
            elif stats.moving_s > moving_s:
                if copying_s > started_s:
                    self._span("stall", "wait for a read", started_s, nbytes, copying_s)
                self._span("copy", "copy back", copying_s, nbytes)
            self._level()
            return tensor

        return look_at_pack, look_at_unpack

    def _see(self, key: SavedStorage | CountedMemory, tensor: torch.Tensor, nbytes: int) -> None:
        seen = self._seen.get(key)
        if seen is None:
            module = LAYER_NUMBER.sub("*", self.running.path()) or f"({line_of_the_program()})"
            self._seen[key] = Holder(module, _op(tensor), saved_bytes=nbytes, largest=form_of(tensor))
        elif not seen.op:  # saved by the op that made it, which had no node yet
            seen.op = _op(tensor)

    def _take(self) -> None:
        """Put what was seen since the last call into the table. Seen no longer, a record gives its bytes up."""
        if self._seen:
            self.holders = _holders(self._seen, self.holders if self._is_after else ())
            self.holders_step = self._step
            self._seen.clear()

    def now(self) -> tuple[list[Holder], bool]:
        """Return the holders of saved bytes, and whether they are of a forward that runs, or has failed."""
        is_running = bool(self._seen) and not self._is_after
        return (_holders(self._seen) if is_running else self.holders), is_running

    def forward(self, saving: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Return the context of a forward, from that in which tensors are saved."""
        return self._forward(saving) if self._is_sampled else saving

    @contextmanager
    def _forward(self, saving: AbstractContextManager[None]) -> Iterator[None]:
        with saving:
            self._seen.clear()  # of one that raised
            self._is_after = False
            self._phase_s = time.perf_counter()
            yield
            self._end_phase("forward")
            self._take()
            self._is_after = True

    def end_backward(self) -> None:
        """Note that a micro-step is over."""
        self._end_phase("backward")

    def end_step(self) -> None:
        """End the sample of an optimizer step, and begin the next one where its turn is."""
        self._end_phase("optimizer")
        self._seen.clear()
        if self._timeline is not None and self._file is not None:
            self._file.write_text(self._timeline.to_json(self._step, self._file.rank))
        self.earlier_bytes = self._stats.resident.now
        self._step += 1
        self._begin_step()

    def _begin_step(self) -> None:
        self._is_sampled = self._step & (self._step - 1) == 0
        self._phase_s = 0.0
        self._timeline = StepTimeline() if self._is_sampled and self._file is not None else None
        for meter in self._paths:
            meter.listener = None if self._timeline is None else self._timeline.span

    def _end_phase(self, name: str) -> None:
        if self._phase_s:
            self._span("compute", name, self._phase_s)
            self._phase_s = time.perf_counter()

    def _span(self, track: str, name: str, started_s: float, nbytes: int = 0, ended_s: float | None = None) -> None:
        if self._timeline is not None:
            self._timeline.span(track, name, started_s, ended_s or time.perf_counter(), nbytes)

    def _level(self) -> None:
        if self._timeline is not None:
            self._timeline.level(self._stats.resident.now, self._stats.saved.now)

    def summary(self) -> dict[str, object]:
        """Return the fields of the report about who holds saved bytes, and when."""
        return {
            "holders": [asdict(one) for one in self.holders],
            "holders_step": self.holders_step,
            # May be another than the config's, where an engine beside this one has that.
            "timeline_path": None if self._file is None else str(self._file.path),
        }


def _holders(seen: dict[SavedStorage | CountedMemory, Holder], before: Sequence[Holder] = ()) -> list[Holder]:
    found = {(one.module, one.op): replace(one) for one in before}
    for key, one in list(seen.items()):
        where = "resident"
        if isinstance(key, SavedStorage) and key.state is RecordState.AWAY:
            where = "moved" if key.ticket is None or isinstance(key.ticket.store, Store) else "again"
        found.setdefault((one.module, one.op), Holder(one.module, one.op)).add(one.saved_bytes, where, one.largest)
    return sorted((one for one in found.values() if one.saved_bytes), key=attrgetter("saved_bytes"), reverse=True)


def _op(tensor: torch.Tensor) -> str:
    """Return the op that made a tensor, behind those that only look at it in another shape."""
    node, name = node_of(tensor), ""
    while node is not None:
        found = _NODE.fullmatch(type(node).name(node))  # a user's Function may have a ``ctx.name`` of its own
        name = name if found is None else found[1]
        before = node.next_functions
        if name not in _VIEWS or not before:
            break
        node = before[0][0]
    return name


# ---- where in the program -------------------------------------------------------------------------------------------


def line_of_the_program() -> str:
    """Return the innermost line that runs and is not of a library, as ``train.py:57``."""
    frame = inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
    return "outside of modules" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
