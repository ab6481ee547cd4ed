from __future__ import annotations

import pytest
import torch
from support.late_device import LateDevice

from ds_tba.update.device import DevicePipeline
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
