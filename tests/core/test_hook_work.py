"""How much is done for a saved tensor in the thread that trains, counted."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from conftest import Closing
from support.late_device import LateDevice

from ds_tba.core.cache import TensorCache
from ds_tba.storage.host import HostStore

MIB = 1 << 20
KEPT_CALLS = 32  # functions of ours that Python enters


def test_a_kept_tensor_takes_few_calls_from_its_save_to_its_end() -> None:
    """Models of small tensors feel each of them; counted are the functions of ds_tba that Python enters."""
    count, calls = 100, Counter[str]()

    def enter(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and str(frame.f_globals.get("__name__")).startswith("ds_tba."):
            calls[frame.f_code.co_name] += 1

    cache = TensorCache([], "cpu", 1)
    tensors = [torch.randn(8) for _ in range(count)]
    with cache.saving():
        sys.setprofile(enter)
        held = [cache.pack(one) for one in tensors]
        sys.setprofile(None)
    step = cache.forward.micro_step
    cache.unpack(step, held[-1])
    sys.setprofile(enter)
    while held:
        cache.unpack(step, held.pop())
    cache.settle()
    sys.setprofile(None)
    assert sum(calls.values()) <= KEPT_CALLS * count, calls
    assert cache.live_records == 0


class Counting(LateDevice):
    """Counts what the host asks of the device."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        super().__init__(longest_pause_s=0.0)

    def new_event(self) -> Any:
        self.calls["events"] += 1
        return super().new_event()

    def on(self, stream: Any) -> Any:
        self.calls["stream switches"] += 1
        return super().on(stream)

    def share(self, tensor: torch.Tensor, stream: Any) -> None:
        self.calls["shared"] += 1
        super().share(tensor, stream)


@pytest.fixture
def device(closing: Closing) -> Counting:
    return closing(Counting, LateDevice.end)()


def test_a_moved_tensor_takes_few_calls_of_the_device(
    device: Counting, closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way takes an event before the copy and one after, in one switch. Only the way out shares memory.

    Loaded memory is of the consumer's own stream, which waits for the copy.
    """
    count = 10
    monkeypatch.setattr("ds_tba.core.cache.has_graph", lambda tensor: True)  # as an activation has one
    store = closing(HostStore)(device, 8 * MIB)
    cache = TensorCache([store], "cpu", 1, wait_for_staging=True, accelerator=device)
    tensors = [device.allocate(4096, torch.device("cpu")) for _ in range(count)]
    with cache.saving():
        held = [cache.pack(one) for one in tensors]
    assert device.calls == {"events": 2 * count, "stream switches": count, "shared": count}
    del tensors
    device.synchronize()
    cache.settle()  # or backward would get the storages themselves, which the copies out still hold
    device.calls.clear()
    step = cache.forward.micro_step
    for one in held:
        cache.unpack(step, one)  # type: ignore[arg-type]
    assert device.calls == {"events": 2 * count, "stream switches": count}
    del one, held
    device.synchronize()
