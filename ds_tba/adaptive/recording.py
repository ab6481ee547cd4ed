"""One trace from several recordings of a micro-step.

[Note: Two recordings] One alone holds whatever the machine did besides: on two cores a pause of 40 ms in a gap of 5 ms
is not rare, and every plan made of it would carry it. Of two recordings the time between two hooks is the mean, or the
shorter of the two where they are far apart. With gradient accumulation both are of one step, else of two.

Knows the recorder and the clock; does not decide when to record.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

from ds_tba.adaptive.recorder import Recorder
from ds_tba.autograd.cache import TensorCache
from ds_tba.device.accelerator import Clock
from ds_tba.plan.layout import Layout
from ds_tba.planner.trace import Resources, Trace, Traffic
from ds_tba.telemetry.traffic import on_another_clock

RECORDINGS = 2


class Others(Protocol):
    """What others move on the same drives."""

    def begin(self, at_s: float = 0.0) -> None: ...
    def sample(self, at_s: float) -> None: ...
    def traffic(self) -> tuple[Traffic, ...]: ...


class Recording:
    """The recordings from which one trace is made.

    Args:
        cache: does the saving.
        clock: of the training device.
        paths: for each module (by ``id``) its path in the model.
        others: what others move.
        is_synchronous: see :class:`ds_tba.adaptive.recorder.Recorder`.

    Attributes:
        running: the recorder of the micro-step that runs, if it is recorded.
        steps: optimizer steps since the beginning.
    """

    def __init__(
        self, cache: TensorCache, clock: Clock, paths: dict[int, str], others: Others, *, is_synchronous: bool
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._paths = paths
        self._others = others
        self._is_synchronous = is_synchronous
        self._done: list[Recorder] = []
        self._is_broken = False  # what this step recorded is no micro-step
        self._backward_ended: Any = None
        self._rests: list[tuple[Any, Any]] = []
        self._moved_bytes: list[int] = []
        self._sampled_s: list[float] = []
        self._beside: tuple[list[float], tuple[Traffic, ...]] = ([], ())  # when, and what others moved by then
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
        self.running = Recorder(self._cache, self._clock, self._paths, is_synchronous=self._is_synchronous)
        self._sampled_s = [time.perf_counter()]
        self._others.begin()
        return self.running

    def end_forward(self) -> None:
        """Forward is over."""
        if self.running is not None:
            self._sample_others()

    def end_micro_step(self) -> None:
        """Backward is over."""
        if self.running is not None:
            self.running.end()
            self._sample_others()
        self._backward_ended = self._clock.mark()

    def settle(self) -> None:
        """Take what has run so far, before the next forward, or at the end of the step."""
        recorder, self.running = self.running, None
        if recorder is None:
            return
        recorder.end()
        if recorder.is_complete:
            self._done.append(recorder)
            self._beside = (self._sampled_s, self._others.traffic())
        else:  # such as two forwards before one backward: what comes of them is no trace of a micro-step
            self._is_broken = True

    @property
    def moved_bytes(self) -> int:
        """In a step, by the lanes, either way."""
        return int(median(self._moved_bytes)) if self._moved_bytes else 0

    def end_step(self, ended: Any, moved_bytes: int) -> None:
        """The optimizer has stepped.

        Args:
            ended: mark of the clock.
            moved_bytes: by the lanes in this step, either way.
        """
        self.steps += 1
        self._is_broken = False
        self._moved_bytes.append(moved_bytes)
        if self._backward_ended is not None:
            self._rests.append((self._backward_ended, ended))
            self._backward_ended = None

    def trace(self, resources: Callable[[tuple[Traffic, ...]], Resources], micro_steps: int) -> Trace:
        """What was recorded; blocks the host until the device has come so far.

        Args:
            resources: the machine, with what others moved beside.
            micro_steps: of one step.

        Raises:
            TraceError: it is not consistent.
        """
        last = self._done[-1]
        for earlier in self._done[:-1]:
            last.confirm(earlier)
        rest_s = median(max(0.0, self._clock.elapsed_s(*rest)) for rest in self._rests) if self._rests else 0.0
        return last.trace(resources(self._traffic_beside(last)), rest_s, micro_steps)

    def hooks_s(self) -> float:
        """What the hooks took of the device in a micro-step beside moving, which the trace does not count."""
        return sum(recorder.hooks_s() for recorder in self._done) / len(self._done)

    def layout(self) -> Layout:
        """The places of the trace's storages."""
        return self._done[-1].layout()

    def _sample_others(self) -> None:
        self._sampled_s.append(time.perf_counter())
        self._others.sample(self._sampled_s[-1] - self._sampled_s[0])

    def _traffic_beside(self, recorder: Recorder) -> tuple[Traffic, ...]:
        """What others moved beside the micro-step, sampled by the host's clock at the ends of forward and backward."""
        sampled_s, traffic = self._beside
        if len(sampled_s) < 3:
            return ()
        moments_s = [at_s - sampled_s[0] for at_s in sampled_s[:3]]
        return on_another_clock(traffic, moments_s, (0.0, *recorder.forward_and_end_s()))
