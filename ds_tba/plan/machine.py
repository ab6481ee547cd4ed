"""The machine that plans are made for: its limits, its rates as steps show them, its memory and its clock.

No drive is measured before training: the first and the recorded steps move everything, and show their rates.

[Note: I/O interference] On a device the lanes and the copy engine work beside the kernels, and take next to nothing
from them. On a CPU they share processor and memory: there moving a byte is assumed to cost the kernels as much time as
its write and its read took of the lanes' processor time. What else moving costs, ``feedback.py`` learns from the steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ds_tba.config import OffloadConfig, Placement
from ds_tba.device.accelerator import Accelerator, MemoryMeter
from ds_tba.plan.plan import Limits
from ds_tba.plan.trace import Resources
from ds_tba.stats import write_limit_bytes_per_step
from ds_tba.storage.base import AnyStore
from ds_tba.storage.host import HostStore
from ds_tba.storage.staging import slots_bytes_of

# Kernel time that copies by an engine of their own take, as a fraction of the copies' time: the link has about this
# fraction of the device memory's bandwidth.
LINK_FRACTION = 0.02
COPY_BYTES = 16 << 20  # about the size of a storage
TIMES = 5


def measure_copies(
    accelerator: Accelerator, staged: torch.Tensor, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Return the rates of one copy at a time out of the device and into it, in bytes per second: the best of a few.

    Takes some tens of milliseconds, and overwrites ``staged``, which has the size to be copied.
    """
    nbytes, device, stream = staged.numel(), accelerator.device(), accelerator.current_stream()
    data = accelerator.allocate(nbytes, device)
    accelerator.copy(staged, data)  # or the first copy out would find pages that nobody has touched
    out_s, in_s = math.inf, math.inf
    for _ in range(TIMES):
        stream.synchronize()
        began_s = clock()
        accelerator.copy(data, staged)
        stream.synchronize()
        copied_out_s = clock()
        accelerator.copy(staged, accelerator.allocate(nbytes, device))  # new memory, as for what comes back
        stream.synchronize()
        in_s = min(in_s, clock() - copied_out_s)
        out_s = min(out_s, copied_out_s - began_s)
    return nbytes / out_s, nbytes / in_s


class Places(Protocol):
    """The tiers, as plans see them: ``Tiers`` documents these."""

    by_placement: dict[Placement, AnyStore]
    host: HostStore | None

    def left_tbw(self) -> float: ...
    def stored_share(self) -> float: ...
    def rates(self) -> tuple[float, float]: ...
    def lane_s_per_byte(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Machine:
    """See the head."""

    config: OffloadConfig
    tiers: Places
    copies: tuple[float, float]  # see measure_copies()
    memory: MemoryMeter  # of everything but saved tensors
    accelerator: Accelerator  # of the training device, and its clock
    sharers: int = 1  # ranks that share the device's memory
    is_drive_shared: bool = False  # ZeRO uses a drive of any rank, too

    def resources(self) -> Resources:
        """Return the rates of now; a path that failed is left out."""
        is_synchronous = self.accelerator.is_synchronous
        compute_s_per_byte = self.tiers.lane_s_per_byte() if is_synchronous else LINK_FRACTION / self.copies[0]
        staging_bytes = slots_bytes_of(self.config)
        return Resources(*self.tiers.rates(), *self.copies, staging_bytes, is_synchronous, compute_s_per_byte)

    def limits(self, step_s: float) -> Limits:
        """Return the limits of the cost of a plan for a step that takes so many seconds."""
        tiers, min_life_days = self.tiers, self.config.ssd.min_life_days
        # In bytes of storages, as plans count.
        write_limit = write_limit_bytes_per_step(tiers.left_tbw(), min_life_days, step_s) / tiers.stored_share()
        host_bytes = tiers.host.limit_bytes if tiers.host is not None else 0
        room_bytes = self.memory.room_bytes() / self.sharers  # at the beginning of a step
        return replace(Limits.of(self.config, write_limit), host_budget_bytes=host_bytes, room_bytes=room_bytes)
