from __future__ import annotations

import mmap

import pytest
import torch
from late_device import LateDevice

from ds_tba.update.device import DevicePipeline
from ds_tba.update.host import STAGING_BUFFERS, WriteBack
from ds_tba.update.pinning import Registry


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parameters_reach_the_device_through_a_few_buffers(dtype: torch.dtype) -> None:
    device = LateDevice()
    pipeline = DevicePipeline(device, torch.device("cpu"), 128, 1 << 20)
    write_back = WriteBack(device, dtype, 100)
    master, target = torch.randn(100 * 4 * STAGING_BUFFERS), torch.zeros(100 * 4 * STAGING_BUFFERS, dtype=dtype)
    for _ in range(2):
        master.mul_(1.5)
        pipeline.begin(most_jobs=0)
        for start in range(0, master.numel(), 100):
            write_back.write(master[start : start + 100], target[start : start + 100], pipeline.upload)
        pipeline.drain()
        write_back.finish()
        assert torch.equal(target, master.to(dtype))
    device.end()


class Pins:
    """Remembers what is pinned, as CUDA does."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.pinned: dict[int, int] = {}
        self.refuses = refuses

    def register(self, address: int, nbytes: int) -> bool:
        if self.refuses:
            return False
        self.pinned[address] = nbytes
        return True

    def unregister(self, address: int) -> None:
        del self.pinned[address]


def test_memory_is_pinned_once_up_to_the_limit_and_unpinned_when_it_is_replaced() -> None:
    pins = Pins()
    registry = Registry(pins.register, pins.unregister, 3 << 20)
    first, second, third = (torch.zeros(1 << 18) for _ in range(3))
    assert registry.pin(first) and registry.pin(first[5:]) and registry.pin(second)
    assert registry.is_pinned(first) and registry.is_pinned(second[1:]) and len(pins.pinned) == 2
    fourth = torch.zeros(1 << 19)
    assert not registry.pin(fourth) and not registry.is_pinned(fourth)
    registry.keep([second])
    assert list(pins.pinned) == [second.untyped_storage().data_ptr()] and registry.pinned_bytes == 1 << 20
    assert registry.pin(fourth) and registry.pinned_bytes == 3 << 20 and not registry.pin(third)
    registry.close()
    assert pins.pinned == {} and registry.pinned_bytes == 0 and registry.refused_bytes == 0


def test_memory_that_is_pinned_cannot_be_freed_before_it_is_unpinned() -> None:
    pins = Pins()
    registry = Registry(pins.register, pins.unregister, None)
    tensor = torch.ones(1 << 18)
    address = tensor.untyped_storage().data_ptr()
    registry.pin(tensor)
    del tensor
    others = [torch.zeros(1 << 18) for _ in range(8)]
    assert address not in {other.untyped_storage().data_ptr() for other in others}
    registry.close()


def test_a_small_array_that_shares_a_page_is_left_out_without_a_word() -> None:
    pins = Pins()
    registry = Registry(pins.register, pins.unregister, None)
    page = mmap.mmap(-1, 4096)
    first, second = (torch.frombuffer(page, dtype=torch.uint8, offset=offset, count=100) for offset in (0, 200))
    assert registry.pin(first) and not registry.pin(second)
    assert registry.refused_bytes == 0 and not registry.is_pinned(second)


def test_what_cannot_be_pinned_is_tried_once() -> None:
    pins = Pins(refuses=True)
    registry = Registry(pins.register, pins.unregister, None)
    tensor = torch.zeros(1000)
    assert not registry.pin(tensor) and not registry.pin(tensor)
    assert registry.refused_bytes == 4000 and registry.pinned_bytes == 0
    registry.keep([])
    assert registry.refused_bytes == 0
