"""``activation_budget_bytes`` holds in every step, and what counts for it.

Lengths that change and several forwards before a backward are drawn in ``programs/budgets.py``.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Closing, StoreFactory
from planners import PLANNERS
from support.doubles import Accelerator, ScriptedBackend, raising, slow
from support.models import Mlp, Stack
from support.offloaders import watching
from support.planned_training import FIRST_PLAN
from support.stepping import end_step, forward, note_backward
from support.stores import nothing_is_held
from torch import Tensor, nn
from torch.utils import checkpoint as checkpointing

from ds_tba.core.cache import TensorCache
from ds_tba.device.accelerator import MemoryLevels, MemoryMeter
from ds_tba.offloader import ActivationOffloader
from ds_tba.storage.base import Always
from ds_tba.storage.nvme import Lanes

KIB, MIB = 1 << 10, 1 << 20
WIDTH = 64
LENGTH = 512
Make = Callable[..., ActivationOffloader]


@pytest.fixture
def make(tmp_path: Path, closing: Closing) -> Make:
    io = {"backend": "posix", "staging_bytes": 8 * MIB, "swap_file_bytes": 128 * MIB}
    return closing(partial(watching, tmp_path, io=io))


def train(ours: nn.Module, offloader: ActivationOffloader, steps: int) -> list[int]:
    """The most that saved tensors held in each step."""
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
    torch.manual_seed(7)
    peaks = []
    for _ in range(steps):
        forward(ours, torch.randn(LENGTH, WIDTH), offloader).backward()
        note_backward(offloader)
        end_step(optimizer, offloader)
        offloader.cache.settle()
        peaks.append(offloader.report().step_peak_saved_bytes)
    return peaks


def fresh() -> Stack:
    torch.manual_seed(0)
    return Stack(lambda: Mlp(WIDTH, 0.1), 8)


def kept_peak(make: Make) -> int:
    ours = fresh()
    return max(train(ours, make(ours, placement="keep"), 2))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("part", [0.5, 0.15])
def test_a_loss_that_is_kept_without_backward_fits_the_plan_and_later_plans_go_without_it(
    make: Make, caplog: pytest.LogCaptureFixture, part: float
) -> None:
    """A validation loss, held with its graph in the steps that are recorded and in no other."""
    budget_bytes = int(part * kept_peak(make))
    ours, kept = fresh(), []
    offloader = make(ours, activation_budget_bytes=budget_bytes, recompute=True)
    recorded = range(FIRST_PLAN - 2, FIRST_PLAN + 1)
    blocks = []
    for step in range(30):
        kept.clear()
        if step in recorded:
            kept.append(forward(ours, torch.randn(LENGTH, WIDTH), offloader))
        assert train(ours, offloader, 1)[0] <= budget_bytes
        plan = offloader.report().plan
        if plan is not None:
            assert plan["peak_saved_bytes"] <= budget_bytes
            blocks.append(plan["blocks"])
    assert (blocks[0], blocks[-1]) == (2 * len(ours.layers), len(ours.layers))
    assert "no plan fits" not in caplog.text and offloader.report().budget_excess_bytes == 0


@pytest.mark.usefixtures("one_thread")
def test_a_budget_that_cannot_be_held_is_said_before_it_is_exceeded(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, at_first = fresh(), list[int]()
    offloader = make(ours, activation_budget_bytes=64 * KIB)

    def note(record: logging.LogRecord) -> None:
        if "activation_budget_bytes 65536 cannot be held" in record.getMessage():
            at_first.append(offloader.cache.stats.resident.peak)

    monkeypatch.setattr(caplog.handler, "emit", note)
    peaks = train(ours, offloader, 20)
    assert max(peaks) > 64 * KIB
    assert len(at_first) == 1, "once"
    assert at_first[0] <= 64 * KIB, "before"
    assert offloader.report().budget_excess_bytes == max(peaks) - 64 * KIB


# ---- the cache alone ------------------------------------------------------------------------------------------------


def bounded(make_store: StoreFactory) -> TensorCache:
    cache = TensorCache([make_store(staging_bytes=4 * MIB)], "cpu", KIB)
    cache.limit(10 * 64 * KIB, "the bound")
    return cache


def sines(x: Tensor, count: int) -> Tensor:
    for _ in range(count):
        x = x.sin()
    return x.sum()


def test_a_kept_tensor_that_was_moved_later_still_raises_if_it_was_changed(make_store: StoreFactory) -> None:
    cache = bounded(make_store)
    x = torch.randn(128, 128, requires_grad=True)
    with cache.saving(Always((), wait=False)):
        first = x.exp()
        loss = sines(first, 40)
    first.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("numel", "bound_bytes", "count", "options"),
    [
        pytest.param(16 * KIB, 256 * KIB, 30, {}, id="whole"),
        pytest.param(384 * KIB, 4 * MIB, 6, {"staging_bytes": MIB, "lanes": Lanes(1, 1)}, id="in parts"),
    ],
)
def test_what_a_retained_graph_forwarded_goes_back_and_leaves_nothing(
    make_store: StoreFactory, numel: int, bound_bytes: int, count: int, options: dict[str, Any]
) -> None:
    store = make_store(ScriptedBackend(slow(0.02)), **options)
    cache = TensorCache([store], "cpu", KIB, wait_for_staging=True)
    cache.limit(bound_bytes)
    x = torch.randn(numel, requires_grad=True)
    with cache.saving():
        loss = sines(x, count)
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once)
    assert cache.stats.resident.peak <= bound_bytes
    del loss, x
    cache.settle()
    nothing_is_held(store)


def test_two_engines_on_one_tensor_count_it_once_each(make_store: StoreFactory) -> None:
    caches = [TensorCache([make_store()], "cpu", KIB, wait_for_staging=True) for _ in range(2)]
    x = torch.randn(128, 128, requires_grad=True)
    shared = x * 2
    losses = []
    for cache in caches:
        with cache.saving():
            losses.append((shared * shared).sum())
    assert [cache.stats.resident.now for cache in caches] == [64 * KIB] * 2
    del shared
    losses.pop(0).backward(retain_graph=True)
    losses.pop().backward()
    for cache in caches:
        cache.settle()
        assert cache.stats.resident.now == 0


# ---- what blocks hold that run again ------------------------------------------------------------------------------


class Held:
    """Memory that is really alive, of what forward saved and what was computed again; what came back is in staging."""

    def __init__(self, offloader: ActivationOffloader, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.peak_bytes = 0
        cache, note = offloader.cache, self.note
        pack = cache.pack
        cache.pack = lambda tensor: (pack(tensor), note(tensor))[0]  # type: ignore[method-assign]

        class Again(checkpointing._recomputation_hook):
            def __init__(self, *of: Any) -> None:
                super().__init__(*of)
                save = self.pack_hook
                self.pack_hook = lambda tensor: (save(tensor), note(tensor))[0]

        monkeypatch.setattr(checkpointing, "_recomputation_hook", Again)

    def note(self, tensor: Tensor) -> None:
        if not isinstance(tensor, nn.Parameter) and tensor._base is None:
            self.alive.add(tensor.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, sum(one.nbytes() for one in list(self.alive)))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("part", [0.13, 0.25], ids=["no room", "plan"])
def test_what_blocks_hold_that_run_again_is_in_the_report_and_within_the_budget(
    make: Make, monkeypatch: pytest.MonkeyPatch, part: float
) -> None:
    budget_bytes, ours, fits = int(part * kept_peak(make)), fresh(), part > 0.2
    planner = PLANNERS["recompute" if fits else "adaptive"]
    offloader = make(ours, planner=planner, activation_budget_bytes=budget_bytes, recompute=True)
    held = Held(offloader, monkeypatch)
    train(ours, offloader, 8)
    report = offloader.report()
    assert held.peak_bytes <= report.peak_saved_bytes <= budget_bytes and report.budget_excess_bytes == 0
    assert (report.recomputed_bytes > 0) == (fits and report.plans > 0)


def test_a_buffer_that_recomputations_save_is_no_longer_counted_after_backward() -> None:
    cache = TensorCache([], "cpu", KIB)
    buffer = torch.ones(64, 64)
    for _ in range(2):
        cache.count_again(buffer)
    made = torch.ones(64, 64)
    cache.count_again(made)
    cache.count_again(nn.Linear(64, 64).weight.t())  # a parameter's memory is its owner's
    assert cache.stats.resident.now == 2 * buffer.nbytes
    del made
    cache.settle()
    assert cache.stats.resident.now == buffer.nbytes
    cache.end_recomputations()
    assert cache.stats.resident.now == 0


# ---- what counts ----------------------------------------------------------------------------------------------------


def test_a_slice_of_a_data_set_counts_as_the_slice() -> None:
    cache = TensorCache([], "cpu", KIB)
    data, weight = torch.randn(1024, 256), torch.randn(256, 256, requires_grad=True)
    with cache.saving():
        loss = (data[100:116] @ weight).sum()
    assert cache.stats.resident.now == 16 * 256 * 4
    del loss


@pytest.mark.parametrize("is_slice_first", [False, True])
def test_a_slice_of_an_activation_counts_as_all_of_it_for_nobody_else_has_the_rest(is_slice_first: bool) -> None:
    cache = TensorCache([], "cpu", KIB)
    x, weight = torch.randn(64, 256), torch.ones(256, requires_grad=True)
    with cache.saving():
        h = x * weight  # saves x
        loss = sum((one * one).sum() for one in ((h[:1], h) if is_slice_first else (h, h[:1])))
    assert cache.stats.resident.now == 2 * 64 * 256 * 4
    del loss, h
    cache.settle()
    assert cache.stats.resident.now == 0


def test_what_cannot_be_moved_counts_too(make_store: StoreFactory, caplog: pytest.LogCaptureFixture) -> None:
    cache = TensorCache([make_store()], "cpu", KIB, wait_for_staging=True)
    cache.limit(64 * KIB, "the bound")
    x = torch.randn(128, 128, dtype=torch.complex64, requires_grad=True)
    with cache.saving():
        loss = (x * x.sin().conj()).abs().sum()  # a lazy conjugate has bytes that are not its values
    assert cache.stats.resident.peak >= 128 * KIB
    assert "the bound 65536 cannot be held" in caplog.text
    loss.backward()
    del loss
    cache.settle()
    assert cache.stats.resident.now == cache.stats.saved.now == 0


# ---- what everything else takes -------------------------------------------------------------------------------------


class Device(Accelerator):
    """Of 100 bytes, of which so many are allocated, and so many of these for saved tensors."""

    allocated = peak = saved = 0

    def __init__(self) -> None:
        self.meter = MemoryMeter(self, lambda: self.saved)

    def take(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)

    def free_bytes(self) -> float:
        return 100 - self.allocated

    def levels(self) -> MemoryLevels:
        return MemoryLevels(self.allocated, self.peak, 100, 0)


def test_room_is_what_is_left_beside_the_peak_of_everything_else() -> None:
    device = Device()
    device.take(10)  # parameters
    device.meter.sample()
    device.take(30)  # activations
    device.saved = 30
    device.meter.sample()
    device.take(20)  # logits
    device.meter.sample()
    device.take(-30)
    device.saved = 0
    device.take(15)  # gradients
    device.meter.sample()
    device.take(-20)
    device.take(-15)
    assert device.free_bytes() == 90
    assert device.meter.room_bytes() == 100 - 10 - 20 - 15


def test_a_peak_between_two_samples_counts() -> None:
    device = Device()
    device.meter.sample()
    device.take(60)
    device.take(-60)
    device.meter.sample()
    assert device.meter.room_bytes() == 40


def test_where_memory_cannot_be_read_the_samples_before_count(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    device.take(60)
    device.meter.sample()
    device.take(-60)
    with monkeypatch.context() as patch:
        patch.setattr(device, "levels", raising(OSError("Too many open files")))
        device.meter.sample()
        with pytest.raises(OSError, match="Too many open files"):  # for who asks: a plan is made another time
            device.meter.room_bytes()
    assert device.meter.room_bytes() == 40
