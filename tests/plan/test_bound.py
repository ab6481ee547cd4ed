"""``activation_budget_bytes`` holds in every step: unforeseen lengths, several forwards, wrong plans."""

from __future__ import annotations

import errno
import logging
import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Closing, StoreFactory
from planners import PLANNERS
from support.doubles import ScriptedBackend, raising, slow
from support.late_device import LateDevice
from support.models import Stack
from support.offloaders import watching
from support.planned_training import FIRST_PLAN, SmallDevice, controller_of, model, steps
from support.stepping import assert_same_steps, end_step, forward, note_backward
from support.stores import nothing_is_held
from torch import Tensor, nn
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import TorchDispatchMode

from ds_tba.core.cache import TensorCache
from ds_tba.core.saved import Hooks, RecordState
from ds_tba.core.tensors import Eligibility
from ds_tba.device.accelerator import MemoryLevels, MemoryMeter
from ds_tba.offloader import ActivationOffloader
from ds_tba.plan.feedback import Action
from ds_tba.stats import Gauge
from ds_tba.storage.base import Choice
from ds_tba.storage.nvme import Lanes

KIB, MIB = 1 << 10, 1 << 20
WIDTH = 64
LENGTHS = tuple(range(64, 513, 64))
Make = Callable[..., ActivationOffloader]


class Block(nn.Module):
    """Attention and an MLP: most of what it saves grows with the length."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (one.unflatten(-1, (4, -1)).transpose(0, 1) for one in self.qkv(self.norm(x)).chunk(3, -1))
        attention = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attention.transpose(0, 1).flatten(1))
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.fixture
def make(tmp_path: Path, closing: Closing) -> Make:
    io = {"backend": "posix", "staging_bytes": 8 * MIB, "swap_file_bytes": 128 * MIB}
    return closing(partial(watching, tmp_path, io=io))


def train(
    ours: nn.Module, offloader: ActivationOffloader | None, lengths: list[int], forwards: int = 1
) -> tuple[list[Tensor], list[int]]:
    """The loss and the gradients of all steps, and the most that saved tensors held in each."""
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
    torch.manual_seed(7)
    found, peaks = [], []
    for length in lengths:
        losses = []
        for number in range(forwards):
            x = torch.randn(max(16, length - 64 * number), WIDTH)
            losses.append(forward(ours, x, offloader))
        loss = torch.stack(losses).sum()
        loss.backward()
        found += [loss.detach(), *(one.grad.clone() for one in ours.parameters() if one.grad is not None)]
        del loss, losses
        note_backward(offloader)
        end_step(optimizer, offloader)
        if offloader is not None:
            offloader.cache.settle()
            peaks.append(offloader.report().step_peak_saved_bytes)
    return found, peaks


def fresh() -> Stack:
    torch.manual_seed(0)
    return Stack(Block, 8)


def kept_peak(make: Make, forwards: int) -> int:
    ours = fresh()
    return max(train(ours, make(ours, placement="keep"), [max(LENGTHS)] * 2, forwards)[1])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("forwards", [1, 2], ids=["one forward", "two forwards"])
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(0.5, marks=pytest.mark.long, id="half"),
        pytest.param(0.25, id="a quarter"),
        pytest.param(0.125, marks=pytest.mark.long, id="an eighth"),
    ],
)
def test_no_step_of_random_lengths_is_above_the_budget(make: Make, part: float, forwards: int) -> None:
    chance = random.Random(3)
    lengths = [chance.choice(LENGTHS) for _ in range(30)]
    expected, _ = train(fresh(), None, lengths, forwards)
    budget_bytes = int(part * kept_peak(make, forwards))
    ours = fresh()
    offloader = make(ours, activation_budget_bytes=budget_bytes)
    found, peaks = train(ours, offloader, lengths, forwards)
    assert_same_steps([expected], [found])
    assert max(peaks) <= budget_bytes, f"{sum(peak > budget_bytes for peak in peaks)} steps of {len(peaks)}"
    assert offloader.report().plans >= 1


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("part", [0.5, 0.15])
def test_a_loss_that_is_kept_without_backward_fits_the_plan_and_later_plans_go_without_it(
    make: Make, caplog: pytest.LogCaptureFixture, part: float
) -> None:
    """A validation loss, held with its graph in the steps that are recorded and in no other."""
    budget_bytes = int(part * kept_peak(make, 1))
    ours, kept = fresh(), []
    offloader = make(ours, activation_budget_bytes=budget_bytes, recompute=True)
    recorded = range(FIRST_PLAN - 2, FIRST_PLAN + 1)
    blocks = []
    for step in range(30):
        kept.clear()
        if step in recorded:
            kept.append(forward(ours, torch.randn(max(LENGTHS), WIDTH), offloader))
        _, peaks = train(ours, offloader, [max(LENGTHS)])
        assert peaks[0] <= budget_bytes
        plan = offloader.report().plan
        if plan is not None:
            assert plan["peak_saved_bytes"] <= budget_bytes
            blocks.append(plan["blocks"])
    assert (blocks[0], blocks[-1]) == (2 * len(ours.layers), len(ours.layers))
    assert "no plan fits" not in caplog.text and offloader.report().budget_excess_bytes == 0


@pytest.mark.usefixtures("one_thread")
def test_a_budget_that_cannot_be_held_is_said_before_it_is_exceeded(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    ours = fresh()
    offloader = make(ours, activation_budget_bytes=64 * KIB)
    at_first: list[int] = []

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "activation_budget_bytes 65536 cannot be held" in record.getMessage():
                at_first.append(offloader.cache.stats.resident.peak)

    handler = Notes()
    logging.getLogger("ds_tba").addHandler(handler)
    try:
        _, peaks = train(ours, offloader, [512] * 20)
    finally:
        logging.getLogger("ds_tba").removeHandler(handler)
    assert max(peaks) > 64 * KIB
    assert len(at_first) == 1, "once"
    assert at_first[0] <= 64 * KIB, "before"
    assert offloader.report().budget_excess_bytes == max(peaks) - 64 * KIB


@pytest.mark.usefixtures("one_thread", "steady_drives")
def test_longer_inputs_have_a_plan_made_for_them_without_another_recording(make: Make) -> None:
    ours = model()
    offloader = make(ours, activation_budget_bytes=MIB, max_step_overhead=1000.0)
    steps(ours, offloader, [32] * FIRST_PLAN)
    small = offloader.report()
    assert small.plans == 1 and small.plan is not None
    steps(ours, offloader, [64] * 2)
    large = offloader.report()
    assert large.plans > 1 and large.plan is not None and "larger" in large.plan["reason"]
    assert sum(large.plan["bytes"].values()) > 1.8 * sum(small.plan["bytes"].values())
    steps(ours, offloader, [32, 64, 48, 16] * 4)
    assert "larger" not in offloader.report().plan["reason"] or offloader.report().plans == large.plans


@pytest.mark.usefixtures("one_thread")
def test_recording_again_follows_the_plan_for_the_rest_of_the_step(make: Make) -> None:
    ours = model()
    offloader = make(ours, max_step_overhead=1000.0)
    controller = controller_of(offloader)
    steps(ours, offloader, [64] * FIRST_PLAN, 6)
    controller._do(Action.RECORD)
    policies = []
    for _ in range(6):
        with offloader.saving():
            loss = ours(torch.randn(64, WIDTH))
            policies.append(type(controller._policy).__name__)
        loss.backward()
        offloader.note_micro_step()
    assert policies[2:] == ["ByPlan"] * 4


# ---- the cache alone ------------------------------------------------------------------------------------------------


def bounded(make_store: StoreFactory, bound_bytes: int) -> TensorCache:
    cache = TensorCache([make_store(staging_bytes=4 * MIB)], "cpu", KIB)
    cache._default_policy = cache.forward.policy = Keeping()
    cache.limit(bound_bytes, "the bound")
    return cache


class Keeping:
    """A wrong plan: keeps everything."""

    def choose(self, key: Any, nbytes: int) -> Choice:
        return Choice((), False, "plan")


def test_a_plan_that_keeps_too_much_costs_no_memory(make_store: StoreFactory) -> None:
    cache = bounded(make_store, 10 * 64 * KIB)
    x = torch.randn(128, 128, requires_grad=True)

    def function(y: Tensor) -> Tensor:
        for _ in range(40):
            y = y.sin()
        return y.sum()

    function(x).backward()
    expected, x.grad = x.grad, None
    with cache.saving():
        loss = function(x)
    assert any(record.state is RecordState.AWAY for record in cache.forward.by_key.values())
    loss.backward()
    assert torch.equal(expected, x.grad)
    cache.settle()
    assert cache.stats.resident.peak <= 10 * 64 * KIB
    assert cache.stats.resident.now == cache.stats.saved.now == cache.live_records == 0


def test_a_kept_tensor_that_was_moved_later_still_raises_if_it_was_changed(make_store: StoreFactory) -> None:
    cache = bounded(make_store, 10 * 64 * KIB)
    x = torch.randn(128, 128, requires_grad=True)
    with cache.saving():
        y = first = x.exp()
        for _ in range(40):
            y = y.sin()
        loss = y.sum()
    first.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def two_backwards_give_twice_the_gradient(cache: TensorCache, x: Tensor, length: int) -> None:
    """Through one graph of so many operations, which is gone afterwards."""
    with cache.saving():
        y = x
        for _ in range(length):
            y = y.sin()
        loss = y.sum()
    del y
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once)


def test_what_a_retained_graph_forwarded_goes_back(make_store: StoreFactory) -> None:
    cache = TensorCache([make_store()], "cpu", KIB, wait_for_staging=True)
    cache.limit(4 * 64 * KIB)
    x = torch.randn(128, 128, requires_grad=True)
    two_backwards_give_twice_the_gradient(cache, x, 30)
    assert cache.stats.resident.peak <= 4 * 64 * KIB


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


# ---- an honest gauge ------------------------------------------------------------------------------------------------


class TruthfulDevice(LateDevice):
    """Knows how much of it is used by what the store brings back and by originals that are alive."""

    def __init__(self) -> None:
        super().__init__(longest_pause_s=0.0005)
        self.originals: weakref.WeakSet[Any] = weakref.WeakSet()
        self.peak_bytes = 0

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        data = super().allocate(nbytes, device)
        self.look()
        return data

    def look(self) -> None:
        used_bytes = self.allocated_bytes + sum(one.nbytes for one in list(self.originals))
        self.peak_bytes = max(self.peak_bytes, used_bytes)

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if not hasattr(storage, "_original") and not hasattr(storage, "_tenant"):
            storage._original = original = Original(storage.nbytes())
            self.originals.add(original)
        self.look()


class Original:
    """Lies on a storage that was saved."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


@pytest.mark.parametrize(("size", "staging"), [(64 * KIB, MIB), (MIB, 2 * MIB), (MIB, 8 * MIB), (2 * MIB, 4 * MIB)])
def test_a_device_really_holds_no_more_than_the_bound(make_store: StoreFactory, size: int, staging: int) -> None:
    device = TruthfulDevice()
    store = make_store(accelerator=device, staging_bytes=staging)
    cache = TensorCache([store], "cpu", KIB, wait_for_staging=True, accelerator=device)
    cache.limit(5 * size)
    x = torch.randn(size // 4, requires_grad=True)

    def around(hooks: Hooks) -> Hooks:
        return lambda tensor: (hooks[0](tensor), device.note(tensor))[0], hooks[1]

    for _ in range(3):
        with cache.saving(around=around):
            y = x
            for _ in range(20):
                y = y.sin()
            loss = y.sum()
        del y
        loss.backward()
        del loss
    cache.settle()
    assert max(device.peak_bytes, cache.stats.resident.peak) <= 5 * size and cache.stats.resident.now == 0
    device.end()


class Held:
    """Memory that is really alive, of what forward saved and what was computed again; what came back is in staging."""

    def __init__(self, offloader: ActivationOffloader, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: weakref.WeakSet[Original] = weakref.WeakSet()
        self.peak_bytes = 0
        cache = offloader.cache
        pack = cache.pack
        cache.pack = lambda tensor: (pack(tensor), self.note(tensor))[0]  # type: ignore[method-assign]
        note = self.note

        class Again(checkpointing._recomputation_hook):
            def __init__(self, *of: Any) -> None:
                super().__init__(*of)
                save = self.pack_hook
                self.pack_hook = lambda tensor: (save(tensor), note(tensor))[0]

        monkeypatch.setattr(checkpointing, "_recomputation_hook", Again)

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, nn.Parameter) and tensor._base is None and not hasattr(storage, "_original"):
            storage._original = original = Original(storage.nbytes())
            self.alive.add(original)
        self.peak_bytes = max(self.peak_bytes, sum(one.nbytes for one in list(self.alive)))
        return tensor


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("part", [0.12, 0.25], ids=["no room", "plan"])
def test_what_blocks_hold_that_run_again_is_in_the_report_and_within_the_budget(
    make: Make, monkeypatch: pytest.MonkeyPatch, part: float
) -> None:
    budget_bytes, ours, fits = int(part * kept_peak(make, 1)), fresh(), part > 0.2
    planner = PLANNERS["recompute" if fits else "adaptive"]
    offloader = make(ours, planner=planner, activation_budget_bytes=budget_bytes, recompute=True)
    held = Held(offloader, monkeypatch)
    train(ours, offloader, [max(LENGTHS)] * 8)
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


def test_what_was_partly_forwarded_leaves_nothing_when_it_is_moved_again(make_store: StoreFactory) -> None:
    nvme = make_store(ScriptedBackend(slow(0.02)), staging_bytes=MIB, lanes=Lanes(1, 1))
    cache = TensorCache([nvme], "cpu", KIB, wait_for_staging=True)
    cache.limit(4 * MIB)
    x = torch.randn(384 * KIB, requires_grad=True)
    two_backwards_give_twice_the_gradient(cache, x, 6)
    del x
    cache.settle()
    nothing_is_held(nvme)


def test_a_storage_that_is_kept_many_times_is_counted_once() -> None:
    cache = TensorCache([], "cpu", 64 * KIB)
    small, large, x = torch.randn(4 * KIB), torch.randn(64 * KIB), torch.randn(64 * KIB, requires_grad=True)
    with cache.saving():
        loss = sum((x[: 4 * KIB] * small).sum() + (x * large.detach()).sum() for _ in range(10))
    cache.settle()
    assert cache.stats.resident.now == 4 * (4 + 64) * KIB
    loss.backward()
    del loss
    cache.settle()
    assert cache.stats.resident.now == cache.stats.saved.now == 0
    with cache.saving():  # and again, though it was counted before
        loss = (x * large).sum()
    assert cache.stats.resident.now == 4 * 64 * KIB
    del loss


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
        parts = [lambda h: (h[:1] * h[:1]).sum(), lambda h: h.sin().sum()]
        loss = sum(part(h) for part in (parts if is_slice_first else parts[::-1]))
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


def test_an_interrupt_while_room_is_made_takes_off_nothing_that_was_not_counted(
    make_store: StoreFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = bounded(make_store, 10 * 64 * KIB)
    cache.gate._min_tensor_bytes = 64 * KIB
    with pytest.raises(KeyboardInterrupt), cache.saving():
        y = torch.randn(128, 128, requires_grad=True)
        for _ in range(9):
            y = y.sin()
        monkeypatch.setattr(cache.stores[0], "put", raising(KeyboardInterrupt()))
        small = torch.randn(60, 256, requires_grad=True)
        for _ in range(20):
            small = small.sin()
    del y, small
    cache.settle()
    assert cache.stats.resident.now == cache.stats.saved.now == cache.live_records == 0


def test_what_is_saved_under_a_mode_of_the_user_is_kept_and_the_mode_sees_nothing_of_ours(
    make_store: StoreFactory,
) -> None:
    class Sees(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.operations: list[str] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.operations.append(str(function))
            return function(*args, **(kwargs or {}))

    def operations(saving: Any) -> list[str]:
        x = torch.ones(128, 128, requires_grad=True)
        with saving, Sees() as sees:
            loss = x.sin().exp().sum()
        loss.backward()
        assert torch.equal(x.grad, x.detach().cos() * x.detach().sin().exp())
        return [one for one in sees.operations if "detach" not in one]

    cache = TensorCache([make_store()], "cpu", KIB, wait_for_staging=True)
    assert operations(cache.saving()) == operations(nullcontext())
    assert cache.stats.kept_bytes[Eligibility.UNDER_A_MODE.value] > 0


# ---- what everything else takes -------------------------------------------------------------------------------------


class Device(SmallDevice):
    """Of 100 bytes, of which so many are allocated."""

    def __init__(self) -> None:
        super().__init__(0)
        self.allocated = self.peak = 0

    def take(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)

    def free_bytes(self) -> float:
        return 100 - self.allocated

    def levels(self) -> MemoryLevels:
        return MemoryLevels(self.allocated, self.peak, 100, 0)


def test_room_is_what_is_left_beside_the_peak_of_everything_else() -> None:
    device, resident = Device(), Gauge()
    meter = MemoryMeter(device, lambda: resident.now)
    device.take(10)  # parameters
    meter.sample()
    device.take(30)  # activations
    resident.add(30)
    meter.sample()
    device.take(20)  # logits
    meter.sample()
    device.take(-30)
    resident.add(-30)
    device.take(15)  # gradients
    meter.sample()
    device.take(-20)
    device.take(-15)
    assert device.free_bytes() == 90
    assert meter.room_bytes() == 100 - 10 - 20 - 15


def test_a_peak_between_two_samples_counts() -> None:
    device, resident = Device(), Gauge()
    meter = MemoryMeter(device, lambda: resident.now)
    meter.sample()
    device.take(60)
    device.take(-60)
    meter.sample()
    assert meter.room_bytes() == 40


def test_where_memory_cannot_be_read_the_samples_before_count() -> None:
    device, resident = Device(), Gauge()
    meter = MemoryMeter(device, lambda: resident.now)
    device.take(60)
    meter.sample()
    device.take(-60)
    levels, device.levels = device.levels, raising(OSError(errno.EMFILE, "Too many open files"))
    meter.sample()
    with pytest.raises(OSError, match="Too many open files"):  # for who asks: a plan is made another time
        meter.room_bytes()
    device.levels = levels
    assert meter.room_bytes() == 40
