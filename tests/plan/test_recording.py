"""Two recordings of a micro-step, and what they show."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import StoreFactory
from support.recordings import MACHINE, MIN_BYTES, ROWS, WIDTH, Stack, Ticks, record

from ds_tba.core.cache import TensorCache
from ds_tba.plan.recorder import RECORDINGS, Recorder, Recording, Scene
from ds_tba.remat.where import RunningModule


@pytest.fixture
def cache(make_store: StoreFactory) -> TensorCache:
    return TensorCache([make_store()], "cpu", MIN_BYTES, wait_for_staging=True)


def recorded(cache: TensorCache, before_backward_s: float, rows: int = ROWS) -> Recorder:
    """A micro-step whose forward takes 6 s, with so much time before its backward."""
    ticks = Ticks()
    model = Stack(ticks)
    found = record(cache, ticks, model, torch.randn(rows, WIDTH))
    first = found.first_use  # of the pauses, the first of backward
    found.pauses[first:] = [
        (one + before_backward_s - 1.0, two + before_backward_s - 1.0) for one, two in found.pauses[first:]
    ]
    found.ended += before_backward_s - 1.0
    return found


@pytest.mark.parametrize("pause_s", [(1.0, 9.0), (9.0, 1.0)])
def test_a_pause_of_the_machine_in_one_of_two_recordings_does_not_count(
    cache: TensorCache, pause_s: tuple[float, float]
) -> None:
    recording = Recording(Scene(cache.eligibility_of, Ticks(), RunningModule()))
    recording._done = [recorded(cache, one_s) for one_s in pause_s]
    assert recording.recorded(MACHINE, 1).end_s == pytest.approx(7.0)


@pytest.mark.parametrize("rows", [(ROWS, 2 * ROWS), (2 * ROWS, ROWS)])
def test_of_two_shapes_the_larger_counts_though_it_took_longer(cache: TensorCache, rows: tuple[int, int]) -> None:
    recording = Recording(Scene(cache.eligibility_of, Ticks(), RunningModule()))
    recording._done = [recorded(cache, 1.0 if count == ROWS else 1.4, count) for count in rows]
    assert recording.recorded(MACHINE, 1).end_s == pytest.approx(7.4)


class SlowHooks(TensorCache):
    """Whose pack takes a second of the clock."""

    def __init__(self, ticks: Ticks, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.ticks = ticks

    def pack(self, tensor: torch.Tensor) -> Any:
        self.ticks.now_s += 1.0
        return super().pack(tensor)


def test_a_trace_is_as_if_there_were_no_hooks() -> None:
    ticks = Ticks()
    cache = SlowHooks(ticks, [], "cpu", MIN_BYTES, wait_for_staging=True)
    found = record(cache, ticks, Stack(ticks), torch.randn(ROWS, WIDTH))
    assert cache.stats.packed_tensors and found.trace(MACHINE).end_s == pytest.approx(7.0)


def begun(recording: Recording) -> Any:
    recording.begin()
    return recording.current


def record_one(recording: Recording, cache: TensorCache, model: Stack, rows: int = ROWS) -> None:
    """A micro-step."""
    recorder = begun(recording)
    with cache.saving(around=recorder.around):
        loss = model(torch.randn(rows, WIDTH), recorder)
    loss.backward()
    recording.end_micro_step()


def test_a_recording_is_over_when_it_has_two(cache: TensorCache) -> None:
    ticks = Ticks()
    recording, model = Recording(Scene(cache.eligibility_of, ticks, RunningModule())), Stack(ticks)
    for _ in range(RECORDINGS):
        assert not recording.is_over
        record_one(recording, cache, model)
        ticks.now_s += 0.25
        recording.end_step(ticks.mark())
    assert recording.is_over and begun(recording) is None
    trace = recording.recorded(MACHINE, 1)
    assert (trace.end_s, trace.optimizer_s) == (pytest.approx(6.0), pytest.approx(0.25))


def test_a_forward_without_backward_is_no_recording(cache: TensorCache) -> None:
    ticks = Ticks()
    recording, model = Recording(Scene(cache.eligibility_of, ticks, RunningModule())), Stack(ticks)
    for _ in range(2):
        recorder = begun(recording)
        with cache.saving(around=recorder.around):
            model(torch.randn(ROWS, WIDTH), recorder)
    recording.end_micro_step()
    assert recording.recorded(MACHINE, 1) is None
    recording.end_step(ticks.mark())
    assert begun(recording) is not None and recording.steps == 1


def test_a_backward_that_raises_is_no_recording(cache: TensorCache) -> None:
    """The loop catches it, and its next forward ends the micro-step."""
    ticks = Ticks()
    recording, model = Recording(Scene(cache.eligibility_of, ticks, RunningModule())), Stack(ticks)
    for fails in (True, False):
        recorder = begun(recording)
        with cache.saving(around=recorder.around):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            if fails:
                x.register_hook(lambda _: 1 / 0)
            loss = model(x, recorder)
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            loss.backward()
    recording.end_micro_step()
    assert recorder.first_use < len(recorder.pauses) and recording._done == [recorder]


def test_what_was_recorded_in_a_step_that_compiled_is_dropped(cache: TensorCache) -> None:
    ticks = Ticks()
    recording, model = Recording(Scene(cache.eligibility_of, ticks, RunningModule())), Stack(ticks)
    for has_compiled in (True, False, True, False):
        assert not recording.is_over
        record_one(recording, cache, model)
        ticks.now_s += 100.0 if has_compiled else 0.25  # the optimizer's step
        recording.end_step(ticks.mark(), has_compiled=has_compiled)
    assert recording.is_over and recording.steps == 4
    assert recording.recorded(MACHINE, 1).optimizer_s == pytest.approx(0.25)
