"""The recorder: what one micro-step of a real model looks like as a trace, and what two recordings of it show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from conftest import StoreFactory
from torch import nn

from ds_tba.core.cache import TensorCache
from ds_tba.plan.recorder import RECORDINGS, Recorder, Recording, Scene
from ds_tba.plan.trace import OUTSIDE, Resources, StorageTrace, Trace
from ds_tba.remat.where import RunningModule

WIDTH, ROWS = 64, 32
MIN_BYTES = 4096
MACHINE = Resources(1e9, 1e9, 1e9, 1e9, 1 << 24)


class Ticks:
    """A clock whose seconds pass only where a test adds them to ``now_s``."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def mark(self) -> float:
        return self.now_s

    def elapsed_s(self, earlier: float, later: float) -> float:
        return later - earlier


class Block(nn.Module):
    """Saves its input, the inside of its MLP (4 wide) and a small tensor."""

    def __init__(self, ticks: Ticks) -> None:
        super().__init__()
        self.ticks = ticks
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ticks.now_s += 1.0
        small = torch.tanh(self.scale * 2.0)
        y: torch.Tensor = x + self.down(torch.relu(self.up(x))) * small
        self.ticks.now_s += 1.0
        return y


class Stack(nn.Module):
    def __init__(self, ticks: Ticks) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(ticks) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, recorder: Recorder | None = None) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            with nullcontext() if recorder is None else recorder.passing(f"blocks.{number}", [x]):
                x = block(x)
        return self.head(x).square().mean()


@contextmanager
def recorded(cache: TensorCache, ticks: Any, model: nn.Module) -> Iterator[Recorder]:
    running = RunningModule()
    running.watch(model)
    recorder = Recorder(Scene(cache.eligibility_of, ticks, running))
    with cache.saving(around=recorder.around):
        yield recorder


def record(cache: TensorCache, ticks: Ticks, model: Stack, x: torch.Tensor) -> Recorder:
    with recorded(cache, ticks, model) as recorder:
        loss = model(x, recorder)
    ticks.now_s += 1.0
    loss.backward()
    recorder.end()
    return recorder


@pytest.fixture
def ticks() -> Ticks:
    return Ticks()


@pytest.fixture(params=["keep", "nvme"])
def cache(request: pytest.FixtureRequest, make_store: StoreFactory) -> TensorCache:
    stores = [] if request.param == "keep" else [make_store()]
    return TensorCache(stores, "cpu", MIN_BYTES, wait_for_staging=True)


@pytest.fixture
def trace(cache: TensorCache, ticks: Ticks) -> Trace:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, requires_grad=True) * 1  # what has no graph would stay
    return record(cache, ticks, Stack(ticks), x).trace(MACHINE, optimizer_s=0.5)


def movable(trace: Trace) -> list[StorageTrace]:
    return [storage for storage in trace.storages if storage.is_movable]


def test_every_storage_is_there_once_with_its_size_and_its_module(trace: Trace) -> None:
    narrow, wide = 4 * ROWS * WIDTH, 16 * ROWS * WIDTH
    found = [(storage.nbytes, storage.module, storage.blocks) for storage in movable(trace)]
    assert found[:2] == [(narrow, "", (0,)), (wide, "blocks.0", (0,))]  # the input, and what relu returns
    assert found[-1] == (narrow, "head", (OUTSIDE,))
    # Beside four of these inputs (the head's too) and three insides: what down returns, saved by the product.
    assert sum(storage.nbytes for storage in movable(trace)) == 4 * narrow + 3 * wide + 3 * narrow


def test_blocks_run_when_the_clock_says(trace: Trace) -> None:
    assert [(block.module, block.forward_start_s, block.forward_end_s) for block in trace.blocks] == [
        ("blocks.0", 0.0, 2.0), ("blocks.1", 2.0, 4.0), ("blocks.2", 4.0, 6.0),
    ]  # fmt: skip
    assert all(block.backward_start_s == 7.0 and block.is_recomputable for block in trace.blocks)
    assert (trace.end_s, trace.step_s) == (7.0, 7.5)


def test_times_are_in_order_and_every_index_is_there(trace: Trace) -> None:
    """The planner does not look: what is out of order would be a plan for no step that ever runs."""
    packed_s = 0.0
    for index, one in enumerate(trace.storages):
        times = [packed_s, one.pack_s, one.last_forward_use_s, one.first_backward_use_s, one.freed_s, trace.end_s]
        assert times == sorted(times) and one.nbytes > 0
        assert all(OUTSIDE <= block < len(trace.blocks) for block in one.blocks)
        assert all(0 <= source < index for source in one.sources)
        packed_s = one.pack_s
    for block in trace.blocks:
        times = [0.0, block.forward_start_s, block.forward_end_s, block.backward_start_s, block.backward_end_s]
        assert [*times, trace.end_s] == sorted([*times, trace.end_s])
        assert all(0 <= index < len(trace.storages) for index in block.inputs)


def test_small_tensors_are_storages_of_their_block_that_stay(trace: Trace) -> None:
    small = [storage for storage in trace.storages if not storage.is_movable]
    assert [storage.blocks for storage in small[:3]] == [(0,), (1,), (2,)]
    assert all(0 < storage.nbytes < MIN_BYTES for storage in small)


def test_inputs_of_blocks_are_known_by_their_storage(trace: Trace) -> None:
    for number, block in enumerate(trace.blocks):
        (index,) = block.inputs
        assert trace.storages[index].nbytes == 4 * ROWS * WIDTH
        assert trace.storages[index].blocks == (number,)  # up's weight needs a gradient, so that its input is saved
    assert len({block.inputs for block in trace.blocks}) == 3


def test_what_backward_never_touched_is_not_used(cache: TensorCache, ticks: Ticks) -> None:
    torch.manual_seed(0)
    model, recorder = Stack(ticks), Recorder(Scene(cache.eligibility_of, ticks, RunningModule()))
    losses = []
    for _ in range(2):
        with cache.saving(around=recorder.around):
            losses.append(model(torch.randn(ROWS, WIDTH, requires_grad=True), recorder))
    losses[1].backward()
    recorder.end()
    trace = recorder.trace(MACHINE)
    count = len(trace.storages) // 2
    assert [one.is_used for one in trace.storages] == [False] * count + [True] * count
    assert {one.freed_s for one in trace.storages[:count]} == {trace.end_s}


def test_a_small_tensor_that_every_block_saves_counts_once(make_store: StoreFactory) -> None:
    """As T5's position bias or rotary tables: a trace with a storage of no bytes would be refused."""
    shared = torch.randn(ROWS, 1)
    cache = TensorCache([make_store()], "cpu", MIN_BYTES, wait_for_staging=True)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with recorded(cache, Ticks(), nn.Module()) as recorder:
        for name in ("a", "b", "c"):
            with recorder.passing(name, [x]):
                x = (x * shared) * nn.Parameter(torch.ones(WIDTH))
        loss = x.sum()
    loss.backward()
    recorder.end()
    trace = recorder.trace(MACHINE)
    assert len(trace.blocks) == 3
    assert sum(one.nbytes for one in trace.storages if not one.is_movable) == shared.nbytes


def test_a_module_that_is_not_of_the_model_has_the_path_of_the_one_around_it(cache: TensorCache) -> None:
    class Calls(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.GELU()(x) + x.sigmoid()

    model = nn.Sequential(Calls())
    with recorded(cache, Ticks(), model) as recorder:
        model(torch.randn(ROWS, WIDTH, requires_grad=True)).sum().backward()
    recorder.end()
    assert {storage.module for storage in recorder.storages} == {"0"}


# ---- several recordings ---------------------------------------------------------------------------------------------


@pytest.fixture
def recording(cache: TensorCache, ticks: Ticks) -> Recording:
    return Recording(Scene(cache.eligibility_of, ticks, RunningModule()))


def paused(cache: TensorCache, before_backward_s: float, rows: int = ROWS) -> Recorder:
    """A micro-step whose forward takes 6 s, with so much time before its backward."""
    ticks = Ticks()
    found = record(cache, ticks, Stack(ticks), torch.randn(rows, WIDTH))
    first, more_s = found.first_use, before_backward_s - 1.0  # of the pauses, the first of backward
    found.pauses[first:] = [(one + more_s, two + more_s) for one, two in found.pauses[first:]]
    found.ended += more_s
    return found


@pytest.mark.parametrize(
    ("recordings", "end_s"),
    [
        ([(1.0, ROWS), (9.0, ROWS)], 7.0), ([(9.0, ROWS), (1.0, ROWS)], 7.0),
        ([(1.0, ROWS), (1.4, 2 * ROWS)], 7.4), ([(1.4, 2 * ROWS), (1.0, ROWS)], 7.4),
    ],
)  # fmt: skip
def test_a_pause_of_the_machine_in_one_of_two_does_not_count_but_of_two_shapes_the_larger_does(
    cache: TensorCache, recording: Recording, recordings: list[tuple[float, int]], end_s: float
) -> None:
    recording._done = [paused(cache, pause_s, rows) for pause_s, rows in recordings]
    assert recording.trace(MACHINE, 1).end_s == pytest.approx(end_s)


def test_a_trace_is_as_if_there_were_no_hooks(
    cache: TensorCache, ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = cache.pack

    def slow(tensor: torch.Tensor) -> Any:
        ticks.now_s += 1.0
        return pack(tensor)

    monkeypatch.setattr(cache, "pack", slow)
    found = record(cache, ticks, Stack(ticks), torch.randn(ROWS, WIDTH))
    assert cache.stats.packed_tensors and found.trace(MACHINE).end_s == pytest.approx(7.0)


def forward(recording: Recording, cache: TensorCache, model: Stack, x: torch.Tensor) -> torch.Tensor:
    recording.begin()
    assert recording.current is not None
    with cache.saving(around=recording.current.around):
        return model(x, recording.current)


def test_a_recording_is_over_when_it_has_two(cache: TensorCache, ticks: Ticks, recording: Recording) -> None:
    model = Stack(ticks)
    for _ in range(RECORDINGS):
        assert not recording.is_over
        forward(recording, cache, model, torch.randn(ROWS, WIDTH)).backward()
        recording.end_micro_step()
        ticks.now_s += 0.25
        recording.end_step(ticks.mark())
    recording.begin()
    assert recording.is_over and recording.current is None
    trace = recording.trace(MACHINE, 1)
    assert (trace.end_s, trace.optimizer_s) == (pytest.approx(6.0), pytest.approx(0.25))


def test_a_backward_that_raises_is_no_recording(cache: TensorCache, ticks: Ticks, recording: Recording) -> None:
    """The loop catches it, and its next forward ends the micro-step."""
    model = Stack(ticks)
    for fails in (True, False):
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        if fails:
            x.register_hook(lambda _: 1 / 0)
        loss = forward(recording, cache, model, x)
        recorder = recording.current
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            loss.backward()
    recording.end_micro_step()
    assert recorder.first_use < len(recorder.pauses) and recording._done == [recorder]
