"""What a device has left, by the counts of its driver and its allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.doubles import EventAccelerator

from ds_tba.config import AioConfig, OffloadConfig
from ds_tba.device.accelerator import TEMPORARY_FRACTION, DeviceMemoryUse, MemoryLevels
from ds_tba.offloader import ActivationOffloader

TOTAL_BYTES = 1000
FREE_BYTES = 500  # others have 100
COUNTS = {
    "active_bytes.all.current": 300,  # 50 of which a stream still uses
    "active_bytes.all.peak": 390,
    "reserved_bytes.all.current": 400,
    "num_alloc_retries": 2,
}


class Api:
    """DeepSpeed's accelerator, of the second device."""

    def __init__(self, counts: dict[str, int] | None, name: str = "cuda") -> None:
        self._counts = counts
        self._name = name

    def device_name(self) -> str:
        return self._name

    def _of(self, index: int, found: Any) -> Any:
        assert index == 1
        return found

    def memory_stats(self, index: int) -> Any:
        return self._of(index, self._counts)

    def memory_allocated(self, index: int) -> Any:
        return self._of(index, 250)

    def max_memory_allocated(self, index: int) -> Any:
        return self._of(index, 350)

    def total_memory(self, index: int) -> Any:
        return self._of(index, TOTAL_BYTES)

    def available_memory(self, index: int) -> Any:
        return self._of(index, FREE_BYTES)


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", {1: (FREE_BYTES, TOTAL_BYTES)}.get)


def test_an_allocator_that_counts_all_is_asked_once() -> None:
    """PyTorch takes all counts anew to answer any of the three, and a recorded step asks at each saved tensor."""
    asked: list[str] = []

    class Watched(Api):
        def _of(self, index: int, found: Any) -> Any:
            asked.append("once")
            return super()._of(index, found)

    counts = COUNTS | {"allocated_bytes.all.current": 240, "allocated_bytes.all.peak": 395}
    assert DeviceMemoryUse(Watched(counts), 1).levels() == MemoryLevels(300, 395, 400, 2)
    assert asked == ["once"]


def test_what_streams_still_use_is_in_use() -> None:
    assert DeviceMemoryUse(Api(COUNTS), 1).levels() == MemoryLevels(300, 390, 400, 2)


@pytest.mark.parametrize("counts", [None, {}, {"active_bytes.all.current": 0, "active_bytes.all.peak": 0}])
def test_an_allocator_that_counts_less_is_taken_at_its_word(counts: dict[str, int] | None) -> None:
    assert DeviceMemoryUse(Api(counts), 1).levels() == MemoryLevels(250, 350, 0, 0)


@pytest.mark.parametrize("name", ["cuda", "a device that torch has no module for"])
def test_room_is_what_the_driver_and_the_allocator_have_left(name: str) -> None:
    room_bytes = FREE_BYTES + (400 - 300) - TEMPORARY_FRACTION * TOTAL_BYTES
    assert DeviceMemoryUse(Api(COUNTS, name), 1).free_bytes() == room_bytes


def test_the_report_has_the_levels_of_a_device() -> None:
    class Device(EventAccelerator):
        memory = DeviceMemoryUse(Api(COUNTS), 1)

    config = OffloadConfig(enabled=True, placement="keep")
    offloader = ActivationOffloader(config, AioConfig(), Device())
    try:
        assert offloader.report().to_dict()["device_memory"] == MemoryLevels(300, 390, 400, 2)._asdict()
    finally:
        offloader.close()
