"""How fast bytes go between device memory and staging, and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ds_tba.device.accelerator import Accelerator, Copies
from ds_tba.storage.staging import wait_for_stream

COPY_BYTES = 16 << 20  # about the size of a storage
TIMES = 5


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Of one copy at a time, in bytes per second."""

    out_bytes_per_s: float
    in_bytes_per_s: float


def measure_copies(
    accelerator: Accelerator, staged: torch.Tensor, clock: Callable[[], float] = time.perf_counter
) -> CopyRates:
    """The best of a few copies each way, done as the stores do them; takes some tens of milliseconds.

    Args:
        staged: staging memory of the size to be copied; overwritten.
        clock: seconds.
    """
    device = torch.device(accelerator.device_name())
    data = accelerator.allocate(staged.numel(), device)
    accelerator.copy(staged, data)  # or the first copy out would find pages that nobody has touched
    wait_for_stream(accelerator)
    copies = Copies(accelerator)

    def copy_out() -> None:
        copies.out(data, staged)
        copies.finish()

    def copy_in() -> None:
        copies.into(staged, staged.numel(), device).wait()

    out_s, in_s = _best_s(copy_out, clock), _best_s(copy_in, clock)
    return CopyRates(staged.numel() / out_s, staged.numel() / in_s)


def _best_s(copy: Callable[[], None], clock: Callable[[], float]) -> float:
    took: list[float] = []
    for _ in range(TIMES):
        started_s = clock()
        copy()
        took.append(clock() - started_s)
    return min(took)
