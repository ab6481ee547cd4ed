"""One trace from several recordings of a micro-step.

[Note: Two recordings] One recording alone holds whatever else the machine did: on two cores a pause of 40 ms in a gap
of 5 ms is not rare, and every plan made of that trace would carry the pause. Of two recordings the time between two
hooks is the mean, or the shorter of the two where they are far apart. With gradient accumulation both are of one step,
else of two.

[Note: Compilation] A step in which something was compiled shows how long that took, and not how long steps take. What
was recorded in it is dropped, and a later step is recorded.

Knows the recorder and the clock; does not decide when to record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ds_tba.adaptive.calibration import Observation
from ds_tba.adaptive.recorder import MicroStepRecord, Recorder
from ds_tba.device.accelerator import Clock
from ds_tba.planner.trace import Layout, Resources, Trace

RECORDINGS = 2
# Steps that are recorded at most until there are so many.
MAX_RECORDED_STEPS = 5


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """A trace, the places of its storages, and the observation of its steps for the fit."""

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
        clock: of the training device.
        make_recorder: of one micro-step.

    Attributes:
        running: the recorder of the micro-step that runs, if it is recorded.
        steps: optimizer steps since the beginning.
    """

    def __init__(self, clock: Clock, make_recorder: Callable[[], Recorder]) -> None:
        self._clock = clock
        self._make_recorder = make_recorder
        self._done: list[MicroStepRecord] = []
        self._of_step: list[MicroStepRecord] = []  # not done before the step is
        self._is_broken = False  # this step had a forward without its backward
        self._backward_ended: Any = None
        self._optimizer_steps: list[tuple[Any, Any]] = []
        self._moved_bytes: list[int] = []
        self.running: Recorder | None = None
        self.steps = 0

    @property
    def is_enough(self) -> bool:
        """Whether no more need be recorded."""
        return len(self._done) + len(self._of_step) >= RECORDINGS

    @property
    def has_any(self) -> bool:
        """Whether a trace can be made."""
        return bool(self._done)

    def begin(self) -> Recorder | None:
        """A forward begins: its recorder, if it is to be recorded."""
        if self.is_enough or self._is_broken:
            return None
        self.running = self._make_recorder()
        return self.running

    def end_micro_step(self) -> None:
        """Backward is over."""
        if self.running is not None:
            self.running.end()
        self._backward_ended = self._clock.mark()

    def abandon(self) -> None:
        """The micro-step that runs has raised: record nothing more in this step."""
        self.running, self._is_broken = None, True

    def settle(self) -> None:
        """Keep the record of the last micro-step, before the next forward, or at the end of the step."""
        recorder, self.running = self.running, None
        if recorder is None:
            return
        recorder.end()
        if recorder.record.is_complete:
            self._of_step.append(recorder.record)
        else:
            self._is_broken = True

    def end_step(self, ended: Any, moved_bytes: int, *, has_compiled: bool = False) -> None:
        """The optimizer has stepped.

        Args:
            ended: mark of the clock.
            moved_bytes: of the storages that went out in this step.
            has_compiled: whether something was compiled in the step; see [Note: Compilation].
        """
        self.steps += 1
        self._is_broken = False
        records, self._of_step = self._of_step, []
        backward_ended, self._backward_ended = self._backward_ended, None
        if has_compiled:
            return
        self._done += records
        self._moved_bytes.append(moved_bytes)
        if backward_ended is not None:
            self._optimizer_steps.append((backward_ended, ended))

    def recorded(self, resources: Resources, micro_steps: int) -> RecordedTrace:
        """The trace of all recordings; blocks the host until the device has reached their end.

        Args:
            resources: the machine.
            micro_steps: of one step.

        Raises:
            TraceError: it is not consistent.
        """
        # A plan for the recording that saved most holds for smaller micro-steps, too.
        largest = max(reversed(self._done), key=lambda record: record.saved_bytes)
        for other in self._done:
            if other is not largest:
                largest.confirm(other)
        optimizer_s = (
            median(max(0.0, self._clock.elapsed_s(*marks)) for marks in self._optimizer_steps)
            if self._optimizer_steps
            else 0.0
        )
        trace = largest.trace(resources, optimizer_s, micro_steps)
        hooks_s = sum(record.hooks_s() for record in self._done) / len(self._done)
        seen = Observation(trace.step_s + micro_steps * hooks_s, 0.0, int(median(self._moved_bytes)))
        return RecordedTrace(trace, largest.layout(), seen)
