"""One trace from several recordings of a micro-step.

[Note: Two recordings] One alone holds whatever the machine did besides: on two cores a pause of 40 ms in a gap of 5 ms
is not rare, and every plan made of it would carry it. Of two recordings the time between two hooks is the mean, or the
shorter of the two where they are far apart. With gradient accumulation both are of one step, else of two.

Knows the recorder and the clock; does not decide when to record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ds_tba.adaptive.calibration import Observation
from ds_tba.adaptive.recorder import Recorder
from ds_tba.autograd.saved import ObservedCache
from ds_tba.device.accelerator import Clock
from ds_tba.planner.trace import Layout, Resources, Trace

RECORDINGS = 2
# Steps that are recorded at most until there are so many.
MAX_RECORDED_STEPS = 5


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """A trace, the places of its storages, and what its steps showed for the fit."""

    trace: Trace
    layout: Layout
    observation: Observation

    def at_least(self, earlier: RecordedTrace | None) -> RecordedTrace:
        """With the sizes of an earlier trace of the same places where those were larger."""
        if earlier is None or earlier.layout != self.layout or len(earlier.trace.blocks) != len(self.trace.blocks):
            return self
        pairs = zip(earlier.trace.storages, self.trace.storages, strict=False)
        larger = {index: one.nbytes for index, (one, other) in enumerate(pairs) if one.nbytes > other.nbytes}
        grown = self.trace.grown(larger)
        longer_s = self.observation.time_s + grown.step_s - self.trace.step_s
        return RecordedTrace(grown, self.layout, replace(self.observation, time_s=longer_s))


class Recording:
    """The recordings from which one trace is made.

    Args:
        cache: does the saving.
        clock: of the training device.
        paths: for each module (by ``id``) its path in the model.
        is_synchronous, look: see :class:`ds_tba.adaptive.recorder.Recorder`.

    Attributes:
        running: the recorder of the micro-step that runs, if it is recorded.
        steps: optimizer steps since the beginning.
    """

    def __init__(
        self,
        cache: ObservedCache,
        clock: Clock,
        paths: dict[int, str],
        *,
        is_synchronous: bool,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._paths = paths
        self._is_synchronous = is_synchronous
        self._look = look
        self._done: list[Recorder] = []
        self._is_broken = False  # what this step recorded is no micro-step
        self._backward_ended: Any = None
        self._rests: list[tuple[Any, Any]] = []
        self._moved_bytes: list[int] = []
        self.running: Recorder | None = None
        self.steps = 0

    @property
    def is_enough(self) -> bool:
        """Whether no more need be recorded."""
        return len(self._done) >= RECORDINGS

    @property
    def has_any(self) -> bool:
        """Whether there is something to make a trace from."""
        return bool(self._done)

    def begin(self) -> Recorder | None:
        """A forward begins: what records it, if it is to be."""
        if self.is_enough or self._is_broken:
            return None
        self.running = Recorder(
            self._cache, self._clock, self._paths, is_synchronous=self._is_synchronous, look=self._look
        )
        return self.running

    def end_micro_step(self) -> None:
        """Backward is over."""
        if self.running is not None:
            self.running.end()
        self._backward_ended = self._clock.mark()

    def settle(self) -> None:
        """Take what has run so far, before the next forward, or at the end of the step."""
        recorder, self.running = self.running, None
        if recorder is None:
            return
        recorder.end()
        if recorder.is_complete:
            self._done.append(recorder)
        else:  # a forward without backward: no trace of a micro-step comes of it
            self._is_broken = True

    def end_step(self, ended: Any, moved_bytes: int) -> None:
        """The optimizer has stepped.

        Args:
            ended: mark of the clock.
            moved_bytes: of the storages that went out in this step.
        """
        self.steps += 1
        self._is_broken = False
        self._moved_bytes.append(moved_bytes)
        if self._backward_ended is not None:
            self._rests.append((self._backward_ended, ended))
            self._backward_ended = None

    def recorded(self, resources: Resources, micro_steps: int) -> RecordedTrace:
        """What was recorded; blocks the host until the device has come so far.

        Args:
            resources: the machine.
            micro_steps: of one step.

        Raises:
            TraceError: it is not consistent.
        """
        # A plan for the recording that saved most holds for smaller micro-steps, too.
        largest = max(reversed(self._done), key=lambda recorder: recorder.saved_bytes)
        for other in self._done:
            if other is not largest:
                largest.confirm(other)
        optimizer_s = median(max(0.0, self._clock.elapsed_s(*rest)) for rest in self._rests) if self._rests else 0.0
        trace = largest.trace(resources, optimizer_s, micro_steps)
        hooks_s = sum(recorder.hooks_s() for recorder in self._done) / len(self._done)
        seen = Observation(trace.step_s + micro_steps * hooks_s, 0.0, int(median(self._moved_bytes)))
        return RecordedTrace(trace, largest.layout(), seen)
