"""The device's part of an update, on a device as late and hostile as the rules of streams allow."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from conftest import Closing
from support.disks import until
from support.late_device import LateDevice

from ds_tba.update.device import ARRAYS_PER_CHUNK, DevicePipeline
from ds_tba.update.formula import Hyper
from ds_tba.update.host import SubGroup

CPU = torch.device("cpu")
CHUNK = 256
SLOT_BYTES = ARRAYS_PER_CHUNK * 4 * CHUNK
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Long enough for a stream that does not wait to show it; a stream that does is not hurried by it.
WRONG_SOON_S = 0.03
Tensors = list[torch.Tensor]


@pytest.fixture
def make_device(closing: Closing) -> Callable[..., LateDevice]:
    def make(kind: type[LateDevice] = LateDevice, **options: Any) -> LateDevice:
        return kind(late_compute=True, **{"longest_pause_s": 0.0004, "watch_freed": True} | options)

    return closing(make, LateDevice.end)


def update(rate: float, *tensors: torch.Tensor) -> None:
    """Rounds each element of each op once, so that it has one right result."""
    master, exp_avg, exp_avg_sq, gradient, scratch = tensors
    exp_avg.mul_(0.5).add_(gradient)
    scratch.copy_(gradient).mul_(gradient)
    exp_avg_sq.mul_(0.75).add_(scratch)
    scratch.copy_(exp_avg_sq).add_(1)
    torch.div(exp_avg, scratch, out=scratch)
    master.sub_(scratch.mul_(rate))


def state(elements: int) -> Tensors:
    """Master, two moments and a gradient."""
    return [torch.randn(elements) for _ in range(4)]


def updated(tensors: Tensors, factor: float = 1.0, rate: float = 0.125) -> Tensors:
    """What an update in one piece makes of them."""
    result = [tensor.clone() for tensor in tensors]
    if factor != 1.0:
        result[3].mul_(factor)
    update(rate, *result, torch.empty_like(result[0]))
    return result


def same(found: Tensors, expected: Tensors) -> bool:
    return all(
        one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(found, expected, strict=True)
    )


def fill(device: LateDevice, memory: torch.Tensor, values: torch.Tensor) -> None:
    """The current stream writes the values."""
    values = values.clone()
    device.launch(lambda to: to.copy_(values), memory)


def on_device(device: LateDevice, values: torch.Tensor) -> torch.Tensor:
    """Memory of the device into which the current stream writes the values."""
    return device.filled(values.view(torch.uint8)).view(values.dtype)


def bits_of(device: LateDevice, memory: torch.Tensor) -> torch.Tensor:
    """What the current stream finds there; to be looked at when the device was synchronized."""
    seen = torch.empty(memory.shape, dtype=memory.dtype)
    device.launch(lambda found: seen.copy_(found), memory)
    return seen


def submit(
    pipeline: DevicePipeline, tensors: Tensors, target: torch.Tensor | None, factor: float = 1.0, rate: float = 0.125
) -> None:
    hyper = Hyper(1e-3, 0.9, 0.999, 1e-8, 0.0)
    pipeline.submit(SubGroup(*tensors, target, hyper, 1, factor), partial(update, rate))


# ---- Random steps ---------------------------------------------------------------------------------------------------


class Training:
    """A few steps of which host and device take chunks at random, beside a plain computation of the same."""

    def __init__(self, chance: random.Random, device: LateDevice, slots: int) -> None:
        self.chance, self.device = chance, device
        self.pipeline = DevicePipeline(device, CPU, CHUNK, slots * SLOT_BYTES + chance.randrange(SLOT_BYTES))
        sizes = [8 * chance.randrange(1, CHUNK // 8 + 1) for _ in range(chance.randrange(4, 14))]
        self.cuts = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        self.elements = sum(sizes)
        self.dtype = chance.choice(DTYPES)
        self.host = state(self.elements)
        self.expected = [tensor.clone() for tensor in self.host]
        self.low = self.host[0].to(self.dtype, copy=True)
        self.parameters = on_device(device, self.low)
        self.staging = torch.empty(CHUNK, dtype=self.dtype)
        self.staged: Any = None

    def step(self) -> None:
        """One step, and whether everything is as if it had been computed in one piece."""
        chance, device, pipeline = self.chance, self.device, self.pipeline
        factor, rate = chance.choice([1.0, 0.3]), chance.choice([0.125, 0.3])
        share = chance.choice([0, 0.5, 1, chance.random()])
        gradient = torch.randn(self.elements)
        is_job = [chance.random() < share for _ in self.cuts]
        for cut, on_its_way in zip(self.cuts, is_job, strict=True):
            if on_its_way:  # from the device
                fill(device, self.host[3][cut], gradient[cut])
            else:
                self.host[3][cut] = gradient[cut]
        before = bits_of(device, self.parameters)
        old, self.expected[3] = self.low, gradient
        self.expected = updated(self.expected, factor, rate)
        self.low = self.expected[0].to(self.dtype, copy=True)

        assert pipeline.begin(most_jobs=9)
        for number in chance.sample(range(len(self.cuts)), len(self.cuts)):
            cut = self.cuts[number]
            tensors = [tensor[cut] for tensor in self.host]
            if not is_job[number]:
                self.on_host(tensors, cut, factor, rate)
                continue
            until(pipeline.has_room, "a free slot")
            submit(pipeline, tensors, self.parameters[cut], factor, rate)
            tensors.clear()  # the last hold on the gradient
        pipeline.drain()

        assert same(self.host, self.expected)
        after = bits_of(device, self.parameters)
        assert not device.is_freed_memory_written()
        assert device.allocated_bytes == self.parameters.nbytes
        assert same([before, after], [old, self.low]) and same(self.host, self.expected)

    def on_host(self, tensors: Tensors, cut: slice, factor: float, rate: float) -> None:
        """The host's update of a chunk, through staging that it has only once."""
        if factor != 1.0:
            tensors[3].mul_(factor)
        update(rate, *tensors, torch.empty_like(tensors[0]))
        if self.staged is not None:
            self.staged.synchronize()
        low = self.staging[: cut.stop - cut.start]
        low.copy_(tensors[0])
        self.staged = self.pipeline.upload(low, self.parameters[cut])


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("seed", range(16))
def test_random_steps_on_a_late_device(make_device: Callable[..., LateDevice], seed: int, slots: int) -> None:
    torch.manual_seed(seed)
    device = make_device()
    training = Training(random.Random(seed), device, slots)
    assert len(device.streams) == 4
    device.streams[seed % 4].longest_pause_s *= 8
    for _ in range(2):
        training.step()


def test_the_host_s_part_of_a_chunk_is_held_until_it_is_written_back(make_device: Callable[..., LateDevice]) -> None:
    """A device has the addresses of host memory, and nothing else holds the gradient by then."""
    device = make_device()
    pipeline = DevicePipeline(device, CPU, 64, 1 << 20)
    pipeline.begin(most_jobs=9)
    tensors = state(64)
    held = [weakref.ref(tensor) for tensor in tensors]
    submit(pipeline, tensors, None)
    tensors.clear()
    assert None not in [one() for one in held]
    pipeline.drain()
    assert [one() for one in held] == [None] * 4


# ---- One wait each


def held_up(device: LateDevice, number: int) -> threading.Event:
    """Hold a stream up until the event is set."""
    gate = threading.Event()
    device.streams[number].run(gate.wait)
    return gate


KERNELS, UP, COMPUTE, DOWN = range(4)


def a_step(device: LateDevice) -> tuple[DevicePipeline, Tensors, torch.Tensor]:
    """A pipeline with one slot; state; zeros for parameters."""
    target = on_device(device, torch.zeros(CHUNK, dtype=torch.bfloat16))
    pipeline = DevicePipeline(device, CPU, CHUNK, SLOT_BYTES)
    device.synchronize()
    return pipeline, state(CHUNK), target


@pytest.mark.parametrize("held", [KERNELS, UP, COMPUTE, DOWN])
def test_nothing_goes_ahead_of_what_it_waits_for(make_device: Callable[..., LateDevice], held: int) -> None:
    device = make_device(longest_pause_s=0.0)
    pipeline, tensors, target = a_step(device)
    old, new = [tensor.clone() for tensor in tensors], updated(tensors, 0.5)
    staged, uploaded = torch.ones(8, dtype=torch.bfloat16), on_device(device, torch.zeros(8, dtype=torch.bfloat16))
    device.synchronize()
    gate = held_up(device, held)
    assert pipeline.begin(most_jobs=9)
    submit(pipeline, tensors, target, 0.5)
    event = pipeline.upload(staged, uploaded)
    if held in (COMPUTE, DOWN):  # an upload waits for neither
        until(event.query, "an upload")
        assert bool(uploaded.all())
    if held == DOWN:  # nor does a cast
        until(lambda: same([target.clone()], [new[0].bfloat16()]), "a cast")
    time.sleep(WRONG_SOON_S)

    assert same(tensors, old) and not pipeline.has_room()
    assert held == DOWN or not bool(target.any())
    assert held in (COMPUTE, DOWN) or not (event.query() or bool(uploaded.any()))

    drained = threading.Event()
    thread = threading.Thread(target=lambda: (pipeline.drain(), drained.set()))
    thread.start()
    time.sleep(WRONG_SOON_S)
    assert not drained.is_set()
    gate.set()
    thread.join()
    assert same([*tensors, target.clone()], [*new, new[0].bfloat16()])
    assert bool(uploaded.all())
    assert not device.is_freed_memory_written()


def test_the_device_wants_no_job_while_another_waits_for_its_upload(make_device: Callable[..., LateDevice]) -> None:
    """The host's own uploads would wait behind them all, and the host for its buffers."""
    device = make_device()
    pipeline = DevicePipeline(device, CPU, CHUNK, 2 * SLOT_BYTES)
    pipeline.begin(most_jobs=9)
    gate = held_up(device, UP)
    assert pipeline.wants_job()
    submit(pipeline, state(CHUNK), None)
    assert pipeline.has_room() and not pipeline.wants_job()
    gate.set()
    until(pipeline.wants_job, "the upload")
    pipeline.drain()


# ---- Faults ---------------------------------------------------------------------------------------------------------


class LittleMemory(LateDevice):
    """Has memory for so many arrays of a slot, beside what it has now."""

    arrays = 1 << 30
    failures = 0

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self.arrays == 0:
            self.failures += 1
            raise torch.OutOfMemoryError("no memory")
        self.arrays -= 1
        return super().allocate(nbytes, device)


@pytest.mark.parametrize("arrays", [0, 4])
def test_without_memory_for_a_slot_the_host_still_uploads(make_device: Callable[..., LateDevice], arrays: int) -> None:
    device = make_device(LittleMemory)
    pipeline, _, target = a_step(device)
    device.arrays = arrays  # type: ignore[attr-defined]
    assert not pipeline.begin(most_jobs=9) and not pipeline.has_room()
    assert device.allocated_bytes == target.nbytes
    gate = held_up(device, UP)
    pipeline.upload(torch.ones(CHUNK, dtype=torch.bfloat16), target)
    timer = threading.Timer(WRONG_SOON_S, gate.set)
    timer.start()
    pipeline.drain()  # which waits for the upload alone
    assert bool(target.all())


def test_slots_are_as_many_as_there_is_memory_for(make_device: Callable[..., LateDevice]) -> None:
    device = make_device(LittleMemory)
    pipeline = DevicePipeline(device, CPU, CHUNK, 4 * SLOT_BYTES)
    device.arrays = 13  # type: ignore[attr-defined]
    assert pipeline.begin(most_jobs=9) and device.allocated_bytes == 2 * SLOT_BYTES
    pipeline.drain()
    assert device.allocated_bytes == 0
    device.arrays = 10  # type: ignore[attr-defined]
    assert pipeline.begin(most_jobs=9) and device.allocated_bytes == 2 * SLOT_BYTES  # and memory did not run out again
    pipeline.drain()
    assert device.failures == 1  # type: ignore[attr-defined]


class Raising(LateDevice):
    """An op that cannot be queued raises on the host; what was queued before it runs."""

    raises = False

    def launch(self, kernel: Callable[..., object], *tensors: torch.Tensor) -> None:
        if not self.raises:
            super().launch(kernel, *tensors)
            return
        self.raises = False
        super().launch(lambda *memory: [one.fill_(7.0) for one in memory], *tensors)
        raise RuntimeError("it cannot be queued")


def test_an_update_that_raises_leaves_its_chunk_as_it_was(make_device: Callable[..., LateDevice]) -> None:
    device = make_device(Raising)
    pipeline = DevicePipeline(device, CPU, CHUNK, 2 * SLOT_BYTES)
    chunks = [state(CHUNK) for _ in range(3)]
    targets = [on_device(device, torch.zeros(CHUNK, dtype=torch.bfloat16)) for _ in chunks]
    expected = [*updated(chunks[0], 0.5), *updated(chunks[1], 0.5), *[tensor.clone() for tensor in chunks[2]]]
    assert pipeline.begin(most_jobs=9)
    for tensors, target in zip(chunks[:2], targets, strict=False):
        until(pipeline.has_room, "a free slot")
        submit(pipeline, tensors, target, 0.5)
    until(lambda: pipeline.has_room() and len(pipeline._free) == 2, "two free slots")
    gate = held_up(device, COMPUTE)
    device.raises = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="it cannot be queued"):
        submit(pipeline, chunks[2], targets[2])
    pipeline.has_room()
    assert len(pipeline._free) == 1  # the other slot may still be written
    timer = threading.Timer(WRONG_SOON_S, gate.set)
    timer.start()
    pipeline.drain()
    timer.join()
    for _ in range(2):
        assert same([tensor for tensors in chunks for tensor in tensors], expected)
        seen = [bits_of(device, target) for target in targets]
        assert not device.is_freed_memory_written() and device.allocated_bytes == 3 * targets[0].nbytes
        assert same(seen, [expected[0].bfloat16(), expected[4].bfloat16(), torch.zeros_like(targets[2])])
        pipeline.drain()  # once more

    again = updated(chunks[2], 0.5)
    assert pipeline.begin(most_jobs=9)
    submit(pipeline, chunks[2], targets[2], 0.5)
    pipeline.drain()
    assert same([*chunks[2], targets[2].clone()], [*again, again[0].bfloat16()])
