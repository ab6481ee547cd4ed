"""One update in the time of a double: streams take the time of their bytes, and the host that of its work.

Tensors have shapes and no memory, so that the update has the size of a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ds_tba.device.accelerator import Accelerator
from ds_tba.update import UpdateConfig
from ds_tba.update.device import DevicePipeline, uploads_before
from ds_tba.update.formula import Hyper, Powers
from ds_tba.update.host import SLICE_ELEMENTS, HostUpdate, SubGroup, WriteBack
from ds_tba.update.updater import Updater

LINK_BYTES_PER_S, DEVICE_BYTES_PER_S = 55e9, 3.35e12
META = torch.device("meta")


class TimedEvent:
    """Done at a time."""

    def __init__(self, device: TimedDevice) -> None:
        self._device, self.done_s = device, 0.0

    def record(self, stream: TimedStream) -> None:
        self.done_s = max(stream.busy_until_s, self._device.now_s)

    def query(self) -> bool:
        return self.done_s <= self._device.now_s

    def synchronize(self) -> None:
        self._device.now_s = max(self._device.now_s, self.done_s)


class TimedStream:
    """Does one thing after the other; a direction of the link, or the kernels."""

    def __init__(self) -> None:
        self.busy_until_s = 0.0

    def wait_event(self, event: TimedEvent) -> None:
        self.busy_until_s = max(self.busy_until_s, event.done_s)


class TimedDevice(Accelerator):
    """A device that computes nothing and takes its time for that.

    Attributes:
        now_s: the host's clock.
    """

    is_synchronous = False

    def __init__(self) -> None:
        self.now_s = 0.0
        self._stream = TimedStream()

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=META)

    def new_stream(self) -> TimedStream:
        return TimedStream()

    def new_event(self) -> TimedEvent:
        return TimedEvent(self)

    def current_stream(self) -> TimedStream:
        return self._stream

    @contextmanager
    def on(self, stream: TimedStream) -> Iterator[None]:
        before, self._stream = self._stream, stream
        yield
        self._stream = before

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=META)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._take(source.nbytes / LINK_BYTES_PER_S)

    def launch(self, kernel: Callable[..., object], *tensors: torch.Tensor) -> None:
        # The formula in operations that are not fused goes over its tensors several times.
        self._take(5 * sum(tensor.nbytes for tensor in tensors) / DEVICE_BYTES_PER_S)

    def _take(self, seconds: float) -> None:
        self._stream.busy_until_s = max(self._stream.busy_until_s, self.now_s) + seconds


class TimedAdam:
    """CPUAdam that only takes its time."""

    def __init__(self, device: TimedDevice, per_s: float) -> None:
        self._device, self._per_s = device, per_s

    def adam_update(self, opt_id: int, step: int, *numbers_and_tensors: Any) -> None:
        self._device.now_s += numbers_and_tensors[-1].numel() / self._per_s


def update_s(device_share: float | None, host_per_s: float, elements: int = 2 * 10**9) -> float:
    """Seconds of one update with the default block."""
    device = TimedDevice()
    config = UpdateConfig(device_share=device_share)
    arrays = [torch.empty(elements, device=META) for _ in range(4)]
    target = torch.empty(elements, dtype=torch.bfloat16, device=META)
    pipeline = DevicePipeline(device, META, config.chunk_elements, config.device_buffer_bytes)
    queued_bytes = 0 if device_share == 0 else uploads_before(config.chunk_elements)
    write_back = WriteBack(device, torch.bfloat16, SLICE_ELEMENTS, queued_bytes)
    host = HostUpdate(TimedAdam(device, host_per_s), 0, write_back)
    updater = Updater(config, device, host, pipeline, Powers(0.9, 0.999))
    updater.update([SubGroup(*arrays, target, Hyper(1e-3, 0.9, 0.999, 1e-8, 0.0), 1, 1.0)])
    return device.now_s


@pytest.mark.parametrize("host_per_s", [0.5e9, 1e9, 2e9, 4e9, 8e9, 12e9, 16e9])
def test_a_share_that_balances_itself_is_no_slower_than_the_host_alone(host_per_s: float) -> None:
    """Up to where the host's parameters, 32 GB/s of them, take more than half of the link."""
    assert update_s(None, host_per_s) <= update_s(0, host_per_s)
