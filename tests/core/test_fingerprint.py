"""Whether a storage that is saved again is told from what it was: each byte of a buffer, and a sample of what one
operation has made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import Closing
from hypothesis import given, settings
from hypothesis import strategies as st
from support import hazards
from support.late_device import LateDevice

from ds_tba.core.cache import TensorCache
from ds_tba.core.fingerprint import Fingerprint
from ds_tba.core.saved import CHANGED
from ds_tba.device.accelerator import CpuAccelerator, PinnedAnswers
from ds_tba.storage.host import HostStore

MIB = 1 << 20
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([8 * 4096 - 1, 8 * 4096, 8 * 4096 + 9, 8 * 4096 * 1025 + 3]))


class LateAnswers(LateDevice):
    """Kernels are done at once; the host learns of it late."""

    def __init__(self) -> None:
        super().__init__(late_answers=True, longest_pause_s=0.01)


@pytest.fixture
def device(closing: Closing) -> LateAnswers:
    return closing(LateAnswers, LateDevice.end)()


@pytest.fixture
def host(device: LateAnswers, closing: Closing) -> HostStore:
    return closing(HostStore)(device, 32 * MIB)


@pytest.fixture
def cache(device: LateAnswers, host: HostStore) -> TensorCache:
    return TensorCache([host], "cpu", 1024, accelerator=device)


def is_told(before: torch.Tensor, after: torch.Tensor, device: CpuAccelerator | None, *, is_whole: bool = True) -> bool:
    answers = None if device is None else PinnedAnswers(device, 1, torch.bool)
    return not Fingerprint.of(before, device, is_whole=is_whole).compared(after, device, answers).read()


@pytest.mark.parametrize("on_device", [False, True])
@given(nbytes=SIZES, data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_changed_byte_of_a_buffer_is_told(on_device: bool, nbytes: int, data: st.DataObject) -> None:
    device = CpuAccelerator() if on_device else None
    before = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
    after = before.clone()
    assert not is_told(before, after, device)
    after[data.draw(st.integers(0, nbytes - 1))] ^= data.draw(st.integers(1, 255))
    assert is_told(before, after, device)


@pytest.mark.parametrize("rows", [2, 1026])
def test_words_that_trade_places_are_told(device: LateDevice, rows: int) -> None:
    before = torch.randint(0, 1 << 62, (rows, 4096))
    for order in ([1, 0, *range(2, rows)], [rows - 1, *range(1, rows - 1), 0]):
        assert is_told(before, before[order].clone(), device)
    assert is_told(before, before.roll(1, dims=1).clone(), device)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("nbytes", [8, 1000, 4096, 4097, MIB + 5])
def test_a_kernel_that_writes_over_all_of_it_is_told_by_a_sample(
    device: LateDevice, on_device: bool, nbytes: int
) -> None:
    before = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    used = device if on_device else None
    assert not is_told(before, before.clone(), used, is_whole=False)
    assert is_told(before, before + 1, used, is_whole=False)


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("change", ["negate", "swap", "pairs"])
def test_changes_of_many_words_do_not_cancel(change: str, rows: int) -> None:
    """Signs that flip, and rows that trade places in patterns, do where words are only added."""
    one, other = torch.randn(2, 4096, dtype=torch.float64)
    before = torch.stack([one, other, other, one] * rows)
    after = {
        "negate": lambda: -before,
        "swap": lambda: torch.stack([other, one, one, other] * rows),
        "pairs": lambda: before.roll(1, 0),
    }[change]()
    assert is_told(before, after, CpuAccelerator())


def test_a_storage_can_be_resized_after_its_fingerprint_was_taken() -> None:
    buffer = torch.zeros(100)
    for is_whole in (False, True):
        Fingerprint.of(buffer, None, is_whole=is_whole)
    assert buffer.resize_(200).shape == (200,)


@pytest.mark.parametrize("scenario", hazards.UNVERSIONED)
def test_gradients_are_exact_where_the_device_answers_late(
    device: LateDevice, host: HostStore, scenario: hazards.Callable[[hazards.Saving], list[torch.Tensor]]
) -> None:
    hazards.check(scenario, TensorCache([host], "cpu", hazards.MIN_BYTES, accelerator=device))


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_later_view_keeps_its_bytes_until_the_device_has_answered(
    device: LateDevice, cache: TensorCache, is_changed: bool
) -> None:
    x, buffer = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    with cache.saving():
        first = (x * buffer).sum()
        other = x.exp().sum()  # saves something, so that the operation that saved the buffer is over
        if is_changed:
            buffer.data[0, 0] += 1
        second = (x * buffer).sum()
        wanted = buffer.clone()
    device.synchronize()
    cache._doubts.read(wait=True)
    assert cache.stats.kept_bytes[CHANGED] == (buffer.nbytes if is_changed else 0)
    assert cache.stats.deduplicated_bytes == (0 if is_changed else buffer.nbytes)
    (second + 0 * (first + other)).backward()
    assert torch.equal(x.grad, wanted)  # type: ignore[arg-type]


def test_what_one_operation_saves_twice_waits_for_the_device_twice(device: LateDevice, cache: TensorCache) -> None:
    """That an operation saves the same bytes twice says nothing while the first save is in doubt."""
    x = torch.randn(64, 64, requires_grad=True)
    with cache.saving():
        first = x.sin().sum()
        other = x.exp().sum()  # saves something, so that the operation that saved x is over
        x.data[0, 0] += 1
        second = (x * x).sum()
    device.synchronize()
    cache._doubts.read(wait=True)
    assert torch.equal(torch.autograd.grad(second, x)[0], 2 * x.detach())
    del first, other


def test_views_that_the_device_has_yet_to_answer_for_are_in_the_budget(cache: TensorCache) -> None:
    """They keep their bytes, and a budget has the host wait for the answer instead."""
    limit_bytes = 4 * 64 * 64 * 4
    cache.room.limit(limit_bytes)
    x = torch.randn(64, 64, requires_grad=True)
    with cache.saving():
        y = x
        for _ in range(30):
            y = y.exp()
            y = (y * 1e-3 * y).sin()
        loss = y.sum()
        del y
    assert cache.stats.resident.peak <= limit_bytes
    loss.backward()


def test_nothing_leaves_while_a_graph_is_being_captured_inside_forward(
    device: LateAnswers, cache: TensorCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing = False

    def unless_capturing(usual: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: pytest.fail("of ours, in the graph") if capturing else usual(*given)

    monkeypatch.setattr(device, "is_capturing", lambda: capturing)
    for name in ("copy", "new_event"):
        monkeypatch.setattr(device, name, unless_capturing(getattr(device, name)))
    b, found = torch.randn(64, 64), []
    x = torch.randn(64, 64, requires_grad=True)
    for saving in (nullcontext, cache.saving):
        with saving():
            loss = (x * b).sum() + (x.exp() * b).sum()  # b waits for the end of the operation, and is saved again
            capturing = True
            static = x.detach().clone().requires_grad_()
            (static.sin() * static).sum()
            capturing = False
            loss = loss + x.cos().sum()
        found += torch.autograd.grad(loss, x)
        del loss
    assert torch.equal(*found)
