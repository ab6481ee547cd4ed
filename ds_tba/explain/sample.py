"""Who saves bytes in one step, where, and when? The cache's hooks, looked at from around in the steps 1, 2, 4, 8, ...

Answers which modules hold saved bytes (:mod:`ds_tba.holders`) and when bytes came and went
(:mod:`ds_tba.explain.timeline`). In all other steps it is not there: the hooks are the cache's own. Under a
profiler of the user's they have ranges, in every step. Cannot see which op saves a tensor: autograd calls its hook
before it has the node; named is the op that made it, or the user's own Function that saves it.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import FrameType

import torch
from torch.autograd.profiler import record_function

from ds_tba.core.accounts import CountedMemory
from ds_tba.core.saved import Hooks, RecordState, SavedCounted, SavedStorage, SavedView
from ds_tba.core.tensors import form_of, node_of
from ds_tba.explain.timeline import StepTimeline
from ds_tba.holders import Holder, merged
from ds_tba.remat.where import RunningModule
from ds_tba.report import ReportFile
from ds_tba.stats import CacheStats, PathMeter, StoreStats

# Nodes that only look at a tensor in another shape.
_VIEWS = frozenset(
    ("Alias", "Detach", "Expand", "Permute", "Reshape", "Select", "Slice", "Split", "Squeeze", "T", "Transpose")
    + ("Unsqueeze", "UnsafeView", "View")
    + ("PreBackwardFunctionForModule", "PostBackwardFunctionModule")  # which ZeRO-3 puts around each module
)
_NODE = re.compile(r"(.*?)(?:Backward\d*)?")
# Since PyTorch 2.14 it is no Python code, and leaves no frame: then the op that made the tensor is named.
_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
_LIBRARIES = ("torch", "deepspeed", "ds_tba", "contextlib")


@dataclass(slots=True)
class _Seen:
    """A saved storage."""

    module: str
    op: str
    nbytes: int
    shape: str


@dataclass(frozen=True)
class Counters:
    """The counters that samples read.

    Attributes:
        cache: counts saved tensors.
        store: counts the waits of the training thread.
        paths: tell a timeline of I/O.
    """

    cache: CacheStats
    store: StoreStats
    paths: Sequence[PathMeter]


class StepSample:
    """One sampled step of a cache.

    Args:
        counters: those of the cache and of the store that the training thread may wait for.
        running: names the module that runs.
        timeline: takes spans and levels; None where nobody wants to know when.
    """

    def __init__(self, counters: Counters, running: RunningModule, timeline: StepTimeline | None) -> None:
        self.timeline = timeline
        self._stats = counters.cache
        self._store = counters.store
        self._running = running
        # By the record of a storage, or by its stamp where it has none: views of one count once.
        self._seen: dict[SavedStorage | CountedMemory, _Seen] = {}
        self._is_open = True
        self._is_after = False  # a forward
        self._phase_s = 0.0  # when the last part of the step ended
        self.found: list[Holder] = []

    def around(self, hooks: Hooks) -> Hooks:
        """Return hooks that call these, for a forward that begins."""
        pack, unpack = hooks

        def look_at_pack(tensor: torch.Tensor) -> object:
            if not self._is_open:
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
            if not self._is_open:
                return unpack(held)
            # What was saved between forward and backward, as by a loss outside, would be in no table.
            if self._is_after and self._seen:  # backward begins
                self._found_more()
            started_s, stalled_s, made_bytes = (
                time.perf_counter(),
                self._store.stall_s,
                self._stats.rematerialized_bytes,
            )
            moving_s = self._stats.moving_s
            tensor = unpack(held)
            nbytes = held.record.nbytes if isinstance(held, SavedView) else 0
            waited_s = self._store.stall_s - stalled_s
            if self._stats.rematerialized_bytes > made_bytes:
                self._span("again", "make again", started_s, self._stats.rematerialized_bytes - made_bytes)
            elif self._stats.moving_s > moving_s:
                if waited_s > 0 and self.timeline is not None:
                    self.timeline.span("stall", "wait for a read", started_s, started_s + waited_s, nbytes)
                self._span("copy", "copy back", started_s + waited_s, nbytes)
            self._level()
            return tensor

        return look_at_pack, look_at_unpack

    def _see(self, key: SavedStorage | CountedMemory, tensor: torch.Tensor, nbytes: int) -> None:
        seen = self._seen.get(key)
        if seen is None:
            frame = _caller()
            function = frame.f_locals["cls"].__name__ if frame is not None and frame.f_code is _APPLY else ""
            module = merged(self._running.path()) or f"({line_of(frame)})"
            self._seen[key] = _Seen(module, function or _op(tensor), nbytes, form_of(tensor))
        elif not seen.op:  # saved by the op that made it, which had no node yet
            seen.op = _op(tensor)

    def holders(self) -> list[Holder]:
        """Return the holders of saved bytes, the largest first: as they are in forward, else as its end found them."""
        if self._is_after:
            return _holders(self._seen, self.found)
        return _holders(self._seen) if self._seen else self.found

    def _found_more(self) -> None:
        self.found[:] = self.holders()
        self._seen.clear()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Look at a forward of the step: at its end as much is saved as will be."""
        self._seen.clear()  # of one that raised
        self._is_after = False
        self._phase_s = time.perf_counter()
        yield
        self.end_phase("forward")
        self.found = self.holders()
        self._seen.clear()  # a record that is read back would keep its bytes
        self._is_after = True

    def end_phase(self, name: str) -> None:
        """Note that the step's forward, backward or optimizer has run since the last call of this."""
        if self._phase_s and self.timeline is not None:
            self.timeline.span("compute", name, self._phase_s, time.perf_counter())
        self._phase_s = time.perf_counter()

    def end(self) -> None:
        """Look no more: hooks of a graph may live on."""
        # A record is a key here: its storage would live until the next sample.
        self._is_open = False
        self._seen.clear()

    def _span(self, track: str, name: str, started_s: float, nbytes: int) -> None:
        if self.timeline is not None:
            self.timeline.span(track, name, started_s, time.perf_counter(), nbytes)

    def _level(self) -> None:
        if self.timeline is not None:
            self.timeline.level(self._stats.resident.now, self._stats.saved.now)


class StepSamples:
    """Samples the steps 1, 2, 4, 8, ...: seldom, and again while plans change and lengths grow.

    Args:
        counters: those of the cache, the store and the paths of the drives.
        running: names the module that runs.
        file: has the timeline of the last sampled step; None where nobody wants timelines.
        step: number of the step that runs.

    Attributes:
        running: as above.
        holders, holders_step: who held saved bytes at the end of the last forward that was sampled, and in which step.
        earlier_bytes: saved bytes in device memory as the last step ended.
    """

    def __init__(self, counters: Counters, running: RunningModule, file: ReportFile | None, step: int) -> None:
        self.running = running
        self.holders: list[Holder] = []
        self.holders_step = 0
        self.earlier_bytes = 0
        self._counters = counters
        self._file = file
        self._step = step
        self._sample: StepSample | None = None
        self._begin_step()

    def around(self, hooks: Hooks) -> Hooks:
        """Return the hooks of a forward that begins."""
        if self._sample is not None:
            hooks = self._sample.around(hooks)
        return _ranged(hooks) if torch.autograd.profiler._is_profiler_enabled else hooks

    def forward(self, saving: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Return the context of a forward, from that in which tensors are saved."""
        return saving if self._sample is None else self._forward(self._sample, saving)

    @contextmanager
    def _forward(self, sample: StepSample, saving: AbstractContextManager[None]) -> Iterator[None]:
        with saving, sample.forward():
            yield
        self.holders, self.holders_step = sample.found, self._step

    def end_backward(self) -> None:
        """Note that a micro-step is over."""
        if self._sample is not None:
            self._sample.end_phase("backward")

    def end_step(self) -> None:
        """End the sample of an optimizer step, and begin the next one where its turn is."""
        sample, self._sample = self._sample, None
        if sample is not None:
            sample.end_phase("optimizer")
            sample.end()
            if sample.timeline is not None and self._file is not None:
                self._file.write_text(sample.timeline.to_json(self._step, self._file.writer.rank))
        self.earlier_bytes = self._counters.cache.resident.now
        self._step += 1
        self._begin_step()

    def _begin_step(self) -> None:
        timeline = None
        if self._step & (self._step - 1) == 0:
            timeline = None if self._file is None else StepTimeline()
            self._sample = StepSample(self._counters, self.running, timeline)
        for meter in self._counters.paths:
            meter.tell(timeline)

    def summary(self) -> dict[str, object]:
        """Return the fields of the report about who holds saved bytes, and when."""
        return {
            "holders": [asdict(one) for one in self.holders],
            "holders_step": self.holders_step,
            # May be another than the config's, where an engine beside this one has that.
            "timeline_path": None if self._file is None else str(self._file.path),
        }

    def now(self) -> list[Holder]:
        """Return the holders of saved bytes: in a sampled forward as they are now, else as its end found them."""
        return self.holders if self._sample is None else self._sample.holders() or self.holders


def _ranged(hooks: Hooks) -> Hooks:
    """Return hooks with ranges in the profile that the user takes."""
    pack, unpack = hooks

    def ranged_pack(tensor: torch.Tensor) -> object:
        with record_function("ds_tba::pack"):
            return pack(tensor)

    def ranged_unpack(held: object) -> torch.Tensor:
        with record_function("ds_tba::unpack"):
            return unpack(held)

    return ranged_pack, ranged_unpack


def _holders(seen: dict[SavedStorage | CountedMemory, _Seen], before: Sequence[Holder] = ()) -> list[Holder]:
    found = {(one.module, one.op): replace(one) for one in before}
    for key, one in list(seen.items()):
        where = "resident"
        if isinstance(key, SavedStorage) and key.state is RecordState.AWAY:
            where = "moved" if key.ticket is None or key.ticket.store.keeps_bytes else "again"
        found.setdefault((one.module, one.op), Holder(one.module, one.op)).add(one.nbytes, where, one.shape)
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


def is_library(frame: FrameType) -> bool:
    """Return whether a frame is of a library, whose lines tell a user nothing of the program."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that have called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _caller() -> FrameType | None:
    """Return the innermost frame that is not ours: the caller of our hook."""
    frames = frames_from(inspect.currentframe())
    return next((one for one in frames if not str(one.f_globals.get("__name__")).startswith("ds_tba.")), None)


def line_of(frame: FrameType | None) -> str:
    """Return the innermost line of the program from a frame on outwards, as ``train.py:57``."""
    found = next((one for one in frames_from(frame) if not is_library(one)), None)
    return "outside of modules" if found is None else f"{Path(found.f_code.co_filename).name}:{found.f_lineno}"
