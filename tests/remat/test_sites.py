"""What rematerialization proves, holds and waits for."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from conftest import StoreFactory
from support.doubles import EventAccelerator, raising, wait_for_writes
from support.stores import bytes_read
from torch.nn import functional

from ds_tba.core.cache import TensorCache
from ds_tba.device.accelerator import Accelerator
from ds_tba.errors import ActivationModifiedError, RematerializationError
from ds_tba.remat import recipe as recipes
from ds_tba.remat import store as store_module
from ds_tba.remat.rules import RULES
from ds_tba.remat.sites import Sites
from ds_tba.remat.store import RematStore
from ds_tba.storage.base import Always, Choice

Forward = Callable[..., torch.Tensor]
SIZE = (33, 65)


def tensor(seed: int = 0) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)).requires_grad_()


class Run:
    """A cache that keeps what is not made again, and its sites."""

    def __init__(self, accelerator: Any = None, stores: tuple[Any, ...] = ()) -> None:
        self.cache = TensorCache(stores, "cpu", 1024, accelerator=accelerator)
        self.sites = Sites(self.cache, accelerator or Accelerator())
        self.store = RematStore(self.cache, self.sites)
        self.cache.rematerialize(self.store)

    @property
    def nbytes(self) -> int:
        return self.cache.stats.rematerialized_bytes

    @property
    def is_refused(self) -> bool:
        """Whether a site was found to differ."""
        return "it differs when recomputed" in self.sites.summary()["refused_sites"]

    def step(self, forward: Forward, *inputs: torch.Tensor) -> list[torch.Tensor]:
        with self.cache.saving():
            loss = forward(*inputs).sum()
        return list(torch.autograd.grad(loss, inputs))

    def nothing_is_left(self) -> bool:
        gc.collect()
        self.cache.settle()
        stats = self.cache.stats
        return self.cache.live_records == stats.resident.now == stats.saved.now == 0


def are_equal(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def agrees(run: Run, forward: Forward, *inputs: torch.Tensor) -> None:
    assert are_equal(run.step(forward, *inputs), torch.autograd.grad(forward(*inputs).sum(), inputs))


def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Saves the input of silu, its output and ``z``."""
    z = y * 1.5
    return functional.silu(x * 0.5) * z


def changed(x: torch.Tensor, y: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    """As ``gated``, with a change that autograd does not record."""
    z = y * 1.5
    made = functional.silu(x * 0.5)
    made.data.mul_(factor)
    return made * z


def test_a_site_is_used_from_the_first_step_on() -> None:
    run, x, y = Run(), tensor(), tensor(1)
    for step in range(3):
        agrees(run, gated, x, y)
        assert run.nbytes == (step + 1) * x.nbytes
    assert run.sites.summary()["rematerialized_sites"] == {"silu": 1}
    assert run.nothing_is_left()


def test_a_change_behind_the_back_of_autograd_is_seen_and_its_site_never_used() -> None:
    run, x, y = Run(), tensor(), tensor(1)
    for _ in range(3):
        agrees(run, changed, x, y)
    assert run.nbytes == 0
    assert run.sites.summary()["refused_sites"]["it differs when recomputed"] == 1
    for _ in range(3):  # nor later
        agrees(run, gated, x, y)
    assert run.nbytes == 0


@pytest.mark.parametrize("answers_late", [False, True])
def test_a_difference_is_no_error_where_nothing_was_left_out(answers_late: bool) -> None:
    """In its second step it is compared before it is let go of, and saved; both stay until a late device answers."""
    done = threading.Event()
    run, x, y = Run(EventAccelerator(done) if answers_late else None), tensor(), tensor(1)
    for forward in (gated, changed):
        agrees(run, forward, x, y)
    done.set()
    run.cache.end_micro_step()
    assert run.is_refused


def test_a_difference_is_no_error_where_a_plan_kept_all_since_the_last_comparison() -> None:
    run, x, y = Run(), tensor(), tensor(1)
    agrees(run, gated, x, y)
    for _ in range(5):
        with run.cache.saving(Always((), wait=False, rematerialize=False)):
            loss = changed(x, y).sum()
        loss.backward()
        run.cache.end_micro_step()
    agrees(run, changed, x, y)
    assert run.is_refused


def test_a_site_is_compared_in_its_turn_whatever_is_found_at_others() -> None:
    class Gate(torch.nn.Module):
        factor = 1.0

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return changed(x, y, self.factor)

    run, x, y, first, other = Run(), tensor(), tensor(1), Gate(), Gate()
    for step in range(1, 30):
        run.sites.step = step
        agrees(run, first, x, y)
    other.factor = first.factor = 2.0
    agrees(run, other, x, y)  # another module: compared at once, and given up
    assert run.is_refused
    with pytest.raises(RematerializationError, match=r"gradients of steps? "):
        for run.sites.step in range(30, 30 + recipes.PERIOD):
            run.step(first, x, y)


def test_branches_of_one_shape_are_sites_of_their_own() -> None:
    class Branches(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            made, z = functional.silu(x * 0.5), y * 1.5
            if step > 3 and step % 7 == 3:
                made.data.mul_(2)
                return made * z
            return made * z

    run, x, y, branches = Run(), tensor(), tensor(1), Branches()
    for step in range(40):  # noqa: B007 - read by the module
        agrees(run, branches, x, y)
    assert run.sites.summary()["rematerialized_sites"] == {"silu": 1} and run.is_refused


def test_what_begins_to_differ_is_an_error_within_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    run, x, y = Run(), tensor(), tensor(1)
    monkeypatch.setattr(run.sites._running, "path", lambda: "layers.3")
    equal = 100
    with pytest.raises(RematerializationError) as error:
        for step in range(1, equal + recipes.PERIOD + 1):
            run.sites.step = step
            with run.cache.saving():
                changed(x, y, 1.0 if step <= equal else 2.0).sum().backward()
            run.cache.end_micro_step()
    text = str(error.value)
    assert "silu has made, saved in layers.3," in text and '"exclude": ["silu"]' in text
    last = run.sites.step
    assert equal < last <= equal + recipes.PERIOD
    known = int(text.split("it was in step ")[1].split(",")[0])
    concerned = f"step {last}" if known + 1 == last else f"steps {known + 1} to {last}"
    assert last - recipes.PERIOD <= known <= equal and f"gradients of {concerned} of" in text
    assert f"before step {known + 1} of" in text
    before = run.nbytes
    agrees(run, changed, x, y)  # a script that goes on does so without the site
    assert run.nbytes == before


class OperandIn(Always):
    """A plan by which the first storage goes to these stores, or stays, and all others are made again."""

    first: Any = None

    def choose(self, key: Any, nbytes: int) -> Choice:
        self.first = self.first or key
        return super().choose(key, nbytes) if key == self.first else Choice((), True, "plan", rematerialize=True)


def test_a_site_stays_itself_when_a_plan_has_its_operand_stay(make_store: StoreFactory) -> None:
    """A new site would be proven anew, by a change that begins after it has run."""
    store = make_store()
    run, made_bytes = Run(stores=(store,)), []
    for stores in ((store,), (store,), (), ()):
        with run.cache.saving(OperandIn(stores, wait=True)):
            loss = functional.silu(tensor().cumsum(0)).square().sum()
        loss.backward()
        run.cache.end_micro_step()
        made_bytes.append(run.nbytes)
    assert run.sites.summary()["rematerialized_sites"] == {"silu": 1}
    assert 0 < made_bytes[1] < made_bytes[2] < made_bytes[3]


def test_every_site_is_compared_again_within_so_many_visits() -> None:
    for key in range(200):
        site, due = recipes.Site("silu", key, equal_in=1), []
        for site.visits in range(1, 1000):
            due.append(site.is_due)
            if due[-1]:
                site.compared()
        assert due[:4] in ([True, True, False, True], [True, True, True, False])
        assert all(any(due[start : start + recipes.PERIOD]) for start in range(len(due) - recipes.PERIOD))
        assert due[recipes.PERIOD :].count(True) <= 2 * len(due) / recipes.PERIOD


def test_a_parameter_that_changes_without_a_version_is_that_of_forward() -> None:
    """As under ZeRO, whose optimizer writes so, between two backwards of one forward."""
    run, x = Run(), tensor()
    weight = torch.nn.Parameter(torch.rand(SIZE[1]) + 0.5)
    original, found = weight.detach().clone(), []
    for saving in (nullcontext, run.cache.saving):
        weight.data.copy_(original)
        with saving():
            loss = ((x * 0.5) * weight).sin().sum()
        weight.data.mul_(3)
        found.append(torch.autograd.grad(loss, [x, weight]))
    assert run.nbytes == x.nbytes
    assert are_equal(*found)


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_device_is_not_waited_for(is_equal: bool) -> None:
    """Until it answers the storage is kept; then it need not be, or stays."""
    done = threading.Event()
    device = EventAccelerator(done)
    run, x, y = Run(device), tensor(), tensor(1)
    forward = gated if is_equal else changed
    plain = torch.autograd.grad(forward(x, y).sum(), (x, y))
    with run.cache.saving():
        loss = forward(x, y).sum()
        assert run.nbytes == 0 and not device.waited
        assert run.cache.stats.resident.now >= 3 * x.nbytes
        done.set()
        (x * 3.0).sin()  # the next that is saved looks
    assert run.nbytes == (x.nbytes if is_equal else 0)
    assert are_equal(torch.autograd.grad(loss, (x, y)), plain)
    run.cache.end_micro_step()
    del loss
    assert run.nothing_is_left()


@pytest.mark.parametrize(("limit_bytes", "compared"), [(2 * SIZE[0] * SIZE[1] * 4, 2), (1, 1)])
def test_answers_that_are_late_hold_no_more_than_so_many_bytes(
    monkeypatch: pytest.MonkeyPatch, limit_bytes: int, compared: int
) -> None:
    """What comes beyond them is saved, and compared another time: nobody waits for the device."""
    done, waits = threading.Event(), []
    device = EventAccelerator(done)
    device.new_event.synchronize = lambda self: waits.append(self)  # type: ignore[method-assign]
    run, x = Run(device), tensor()
    monkeypatch.setattr(store_module, "MAX_UNREAD_BYTES", limit_bytes)
    for step in range(1, 4):
        done.clear()
        with run.cache.saving():
            loss = sum(functional.silu(x * (0.5 + n)).sin() for n in range(8))
            assert len(run.store.copies_out()) <= compared and not waits
        done.set()
        loss.sum().backward()
        run.cache.end_micro_step()
        assert sum(site.is_proven for site in run.sites._sites.values()) == step * compared
        waits.clear()


def test_lengths_that_never_come_again_bring_nothing_back_to_compare(make_store: StoreFactory) -> None:
    store = make_store()
    run, x, y = Run(stores=(store,)), tensor(), tensor(1)
    for rows in range(SIZE[0], SIZE[0] - 4, -1):
        before = bytes_read(store)
        with run.cache.saving():
            loss = gated(x[:rows].clone(), y[:rows].clone()).sum()
            wait_for_writes(store)
        assert bytes_read(store) == before
        loss.backward()
    assert run.nbytes == 0
    for _ in range(2):
        agrees(run, gated, x, y)
    assert run.nbytes > 0


@pytest.mark.parametrize("is_equal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_is_equal_to_nan_whatever_its_bits_are(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_equal: bool
) -> None:
    """Rows that are masked out in full are NaN, whose bits may depend on their place in memory. Zeros have a sign."""

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        made = torch.mul(a, b)
        other = made.isnan() if is_equal else made == 0
        made[other] = -made[other]
        return made

    monkeypatch.setitem(RULES, "MulBackward0", dataclasses.replace(RULES["MulBackward0"], make=multiply))
    run, x, y = Run(), torch.randn(SIZE, dtype=dtype), torch.randn(SIZE, dtype=dtype)
    x[0], y[1], x[2] = float("nan"), float("inf"), 0
    with run.cache.saving():
        made = (x.requires_grad_() * 1) * (y.requires_grad_() * 1)
        loss = (made * made).sum()
    assert (run.nbytes > 0) is is_equal
    del loss


def test_zeros_prove_nothing_for_the_next_time() -> None:
    """The change behind autograd's back shows only once the values are other than 0."""
    run, x, y, zeros = Run(), tensor(), tensor(1), torch.zeros(SIZE, requires_grad=True)
    for _ in range(3):
        agrees(run, changed, zeros, y)
    used = run.nbytes
    assert used == 3 * x.nbytes  # zeros are zeros
    for _ in range(3):
        agrees(run, changed, x, y)
    assert run.nbytes == used and run.is_refused


def test_operands_are_read_once_for_both(make_store: StoreFactory) -> None:
    store = make_store()
    run, x, y = Run(stores=(store,)), tensor(), tensor(1)
    for _ in range(2):
        agrees(run, gated, x, y)
    for _ in range(3):
        with run.cache.saving():
            loss = gated(x, y).sum()
        wait_for_writes(store)
        before = bytes_read(store)
        loss.backward()
        # Of silu's input and of z, in whole pages.
        assert bytes_read(store) - before == 2 * (-(-x.nbytes // 4096) * 4096)
    del loss
    assert run.nothing_is_left()


def test_an_operand_changed_in_place_raises_and_the_error_says_what_wanted_it() -> None:
    run, x, y = Run(), tensor(), tensor(1)
    with run.cache.saving():
        gate = x * 0.5
        loss = (functional.silu(gate) * (y * 1.5)).sum()
    with torch.no_grad():
        gate.add_(1)
    assert run.nbytes
    with pytest.raises(ActivationModifiedError, match=r"modified by an inplace operation.*silu.*exclude"):
        loss.backward()


class Streams(EventAccelerator):
    """Which tensors were shared, and for how many events a consumer waited."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: list[int] = []
        self.waits = 0
        owner = self

        class Stream:
            def wait_event(self, event: object) -> None:
                owner.waits += 1

        self._default = Stream()  # type: ignore[assignment]

    def share(self, tensor: torch.Tensor, stream: Any) -> None:
        self.shared.append(tensor.untyped_storage().data_ptr())


def test_what_two_want_is_made_once_and_streams_and_the_allocator_know_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, gates, made = Streams(), [], []
    run, x, y = Run(streams), tensor(), tensor(1)
    make = run.sites.make
    monkeypatch.setattr(run.sites, "make", lambda recipe: made.append(recipe) or make(recipe))

    def shared(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        gate = a * 0.5
        gates.append(gate.data_ptr())
        half = functional.silu(gate)
        output = half * (b * 1.5) + half * (b * 2.5)
        streams.waits = 0
        streams.shared.clear()  # of what forward has saved
        return output

    for step in (1, 2):
        plain = torch.autograd.grad(shared(x, y).sum(), (x, y))
        assert are_equal(run.step(shared, x, y), plain)
        assert run.nbytes == step * x.nbytes and len(made) == step
        assert streams.waits >= 2  # each of the two consumers
        assert gates[-1] in streams.shared  # the operand may be in the memory of another stream


# ---- room -----------------------------------------------------------------------------------------------------------


def summed(*parts: torch.Tensor) -> torch.Tensor:
    """A sum of what is saved elsewhere: all of it is wanted to make it again."""
    held = [part * 1.5 for part in parts]
    return sum(one.cos() for one in held) + sum(held[1:], held[0]).sin()


@pytest.mark.parametrize("limit", [3, 6, 8, 12, 20, 30])
def test_budgets_hold_while_many_operands_are_brought_back(limit: int, make_store: StoreFactory) -> None:
    run, parts = Run(stores=(make_store(),)), [tensor(seed) for seed in range(6)]
    run.cache.limit(limit * parts[0].nbytes)
    for _ in range(5):
        agrees(run, summed, *parts)
        run.cache.end_micro_step()
    # Forward itself holds the parts, and one more.
    assert run.cache.stats.resident.peak <= max(limit, len(parts) + 2) * parts[0].nbytes
    assert run.nbytes > 0 or limit < 30


@pytest.mark.parametrize("limit", [3, 4, 6, 8])
def test_what_is_due_and_cannot_be_compared_is_saved(limit: int, make_store: StoreFactory) -> None:
    run, x, y = Run(stores=(make_store(),)), tensor(), tensor(1)
    for _ in range(2):
        agrees(run, gated, x, y)
    run.cache.limit(limit * x.nbytes)
    wrong = 0
    try:
        for step in range(100):
            forward = partial(changed, factor=1.0 if step < 8 else 2.0)
            found = run.step(forward, x, y)
            run.cache.end_micro_step()
            wrong += not are_equal(found, torch.autograd.grad(forward(x, y).sum(), (x, y)))
    except RematerializationError:
        assert wrong <= recipes.PERIOD
    else:
        assert wrong == 0


@pytest.mark.parametrize("runs_out", ["make", "owned"])
def test_memory_that_runs_out_in_a_comparison_saves_the_tensor(monkeypatch: pytest.MonkeyPatch, runs_out: str) -> None:
    run, x, y = Run(), tensor(), tensor(1)
    with monkeypatch.context() as patch:
        patch.setattr(recipes.Recipe, runs_out, raising(torch.OutOfMemoryError("no memory for what is compared")))
        agrees(run, gated, x, y)
    assert run.nbytes == 0
    agrees(run, gated, x, y)
    assert run.nbytes == x.nbytes  # there was room another time


def test_forwards_in_several_threads_make_nothing_again() -> None:
    """Each thread counts its nodes itself: nobody knows which of them are of earlier forwards."""
    run, x, y = Run(), tensor(), tensor(1)
    run.step(gated, x, y)
    before = run.nbytes
    for _ in range(4):
        thread = threading.Thread(target=run.step, args=(gated, x, y))
        thread.start()
        thread.join()
    assert run.nbytes == before > 0


def test_what_a_site_tells_while_another_is_compared_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making room for an operand reads late answers; the error of one is not a reason to leave this site alone."""
    run, x, y = Run(), tensor(), tensor(1)
    error = RematerializationError("gradients since an earlier step may be wrong")
    with monkeypatch.context() as patch, pytest.raises(RematerializationError, match="an earlier step"):
        patch.setattr(run.sites, "_restore", raising(error))
        run.step(gated, x, y)
    agrees(run, gated, x, y)
