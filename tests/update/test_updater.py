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
from ds_tba.update.updater import Updater


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
    calls, accelerator = Calls(), CpuAccelerator()
    updater = Updater(
        config,
        accelerator,
        HostUpdate(calls, None),  # type: ignore[arg-type]
        DevicePipeline(accelerator, torch.device("cpu"), config.chunk_elements, config.device_buffer_bytes),
        Powers(0.9, 0.999),
    )
    updater.update(sub_groups)
    assert [lr for lr, elements in calls.made if elements == 0] == [1.0, 2.0, 3.0, 4.0]
    assert [lr for lr, _ in calls.made] == sorted(lr for lr, _ in calls.made)
    of_host = sum(elements for _, elements in calls.made)
    assert updater.counts.elements == sum(sizes) == of_host + updater.counts.device_elements
