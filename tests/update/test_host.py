from __future__ import annotations

import threading

import pytest
import torch
from support.late_device import LateDevice

from ds_tba.update.device import DevicePipeline, uploads_before
from ds_tba.update.host import LEAST_BUFFERS, WriteBack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parameters_reach_the_device_through_a_few_buffers(dtype: torch.dtype) -> None:
    device = LateDevice()
    pipeline = DevicePipeline(device, torch.device("cpu"), 128, 1 << 20)
    write_back = WriteBack(device, dtype, 100)
    master, target = torch.randn(100 * 4 * LEAST_BUFFERS), torch.zeros(100 * 4 * LEAST_BUFFERS, dtype=dtype)
    for _ in range(2):
        master.mul_(1.5)
        pipeline.begin(most_jobs=0)
        for start in range(0, master.numel(), 100):
            write_back.write(master[start : start + 100], target[start : start + 100], pipeline.upload)
        pipeline.drain()
        write_back.finish()
        assert torch.equal(target, master.to(dtype))
    device.end()


def test_the_host_goes_on_while_chunks_of_the_device_are_on_the_link() -> None:
    """It would be slower than alone: its buffers hold as many bytes as are queued before its uploads."""
    device, gate = LateDevice(), threading.Event()
    pipeline = DevicePipeline(device, torch.device("cpu"), 1000, 1 << 20)
    write_back = WriteBack(device, torch.bfloat16, 100, uploads_before(1000))
    master, target = torch.randn(2 * 8 * 1000), torch.zeros(2 * 8 * 1000, dtype=torch.bfloat16)
    pipeline.begin(most_jobs=0)
    link_to_device = device.streams[0]
    link_to_device.run(gate.wait)
    for start in range(0, master.numel(), 100):
        write_back.write(master[start : start + 100], target[start : start + 100], pipeline.upload)  # or it waits here
    assert not target.any()
    gate.set()
    pipeline.drain()
    assert torch.equal(target, master.bfloat16())
    device.end()
