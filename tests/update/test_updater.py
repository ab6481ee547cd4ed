"""One update, without DeepSpeed's optimizer around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_tba.device.accelerator import CpuAccelerator
from ds_tba.update.config import UpdateConfig
from ds_tba.update.device import DevicePipeline
from ds_tba.update.formula import Hyper, Powers
from ds_tba.update.host import HostUpdate, SubGroup
from ds_tba.update.updater import Parts, UpdateCounters, run_update


class Calls:
    """In place of CPUAdam: remembers what it was called with."""

    def __init__(self) -> None:
        self.made: list[tuple[float, int]] = []

    def update(self, step: int, hyper: Hyper, master: torch.Tensor, *more: Any) -> None:
        self.made.append((hyper.lr, master.numel()))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, None])
def test_cpu_adam_hears_of_each_sub_group_once_in_order_before_its_parts(share: float | None) -> None:
    """Its hidden powers of the betas depend on that; see ``Powers``."""
    sizes = [1 << 14, 1 << 15, 5, (1 << 15) + 3]
    hypers = [Hyper(lr, 0.9, 0.999, 1e-8, 0.0) for lr in (1.0, 2.0, 3.0, 4.0)]
    sub_groups = [
        SubGroup(*(torch.zeros(size) for _ in range(4)), torch.zeros(size), hyper, 1, 1.0)
        for size, hyper in zip(sizes, hypers, strict=True)
    ]
    config = UpdateConfig(chunk_bytes=1 << 16, device_share=share)
    calls, accelerator, counters = Calls(), CpuAccelerator(), UpdateCounters()
    parts = Parts(
        config=config,
        accelerator=accelerator,
        host=HostUpdate(calls, None),  # type: ignore[arg-type]
        pipeline=DevicePipeline(accelerator, torch.device("cpu"), config.chunk_elements, config.device_buffer_bytes),
        powers=Powers(0.9, 0.999),
        is_pinned=lambda _: True,
        counters=counters,
        target_on_device=True,
        device_share=share,
    )
    run_update(parts, sub_groups)
    assert [lr for lr, elements in calls.made if elements == 0] == [1.0, 2.0, 3.0, 4.0]
    assert [lr for lr, _ in calls.made] == sorted(lr for lr, _ in calls.made)
    of_host = sum(elements for _, elements in calls.made)
    assert counters.elements == sum(sizes) == of_host + counters.device_elements
