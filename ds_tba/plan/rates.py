"""The rates of this machine as a plan needs them: of the copies as last measured, of the drives as they are now.

They are this rank's own: ranks that share drives have to measure at the same time. They cannot see what moving costs
the kernels in training, which ``feedback.py`` learns from the steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from ds_tba.config import OffloadConfig, Placement
from ds_tba.device.accelerator import Accelerator, Clock, MemoryMeter
from ds_tba.device.copies import Copies
from ds_tba.errors import StateError
from ds_tba.plan.plan import Limits
from ds_tba.plan.trace import PathRates, Resources
from ds_tba.storage.base import AnyStore
from ds_tba.storage.host import HostStore, host_memory
from ds_tba.storage.probe import DriveProbe
from ds_tba.storage.staging import COPY_BYTES, CopyRates, measure_copies
from ds_tba.wear import write_limit_bytes_per_step

# Kernel time that copies by an engine of their own take, as a fraction of the copies' time: the link has about this
# fraction of the device memory's bandwidth.
LINK_FRACTION = 0.02
# Fraction of a run that may be spent on measuring drives to which nothing is offloaded.
MEASURING_FRACTION = 0.01


class Rates:
    """The rates of drives and of a device. Call :meth:`measure` before anything else.

    [Note: I/O interference] On a device the lanes and the copy engine work beside the kernels, and take next to nothing
    from them. On a CPU they share processor and memory: there moving a byte is assumed to cost the kernels as much time
    as its write and read took of the processor when they were measured alone.

    Args:
        drives: None where nothing goes to NVMe.
        accelerator: the device.
        staging_bytes: bound of what is between device and file.
    """

    def __init__(self, drives: DriveProbe | None, accelerator: Accelerator, staging_bytes: int) -> None:
        self._drives = drives
        self._accelerator = accelerator
        self._staging_bytes = staging_bytes
        self.copies = CopyRates(math.inf, math.inf)
        self._copies = Copies(accelerator)  # once: a device has few streams, and more share these
        self._compute_s_per_byte = 0.0
        self._idle: tuple[float, ...] = ()  # rates of the drives when they were measured last
        self._again_at_s = 0.0  # by ``time.monotonic()``: then measuring is affordable again

    @property
    def is_synchronous(self) -> bool:
        """True if the device is the host."""
        return self._accelerator.is_synchronous

    def measure_plain(self) -> None:
        """Measure the drives once without compression, if there is any, before :meth:`measure`.

        Raises:
            PathError: a write or a read failed.
        """
        if self._drives is not None:
            self._drives.measure_plain()

    def measure(self) -> None:
        """Measure drives and copies; blocks for a moment.

        Raises:
            PathError: a write or a read failed.
        """
        started_s = time.monotonic()
        if self._drives is not None:
            cpu_s = time.process_time()
            before_bytes = self._drives.moved_bytes()
            self._drives.measure()
            moved_bytes = self._drives.moved_bytes() - before_bytes
            if moved_bytes and self.is_synchronous:  # either way was counted; a storage goes both
                self._compute_s_per_byte = 2 * (time.process_time() - cpu_s) / moved_bytes
            with suppress(StateError):  # a path had no room to be measured
                self._idle = self.resources().rates
        staged = host_memory(min(COPY_BYTES, self._staging_bytes), self._accelerator)
        self.copies = measure_copies(self._accelerator, self._copies, staged)
        if not self.is_synchronous:
            self._compute_s_per_byte = LINK_FRACTION / self.copies.out_bytes_per_s
        now_s = time.monotonic()
        self._again_at_s = now_s + (now_s - started_s) / MEASURING_FRACTION

    def drop_codec(self) -> bool:
        """Leave off compression with which drives are slower; return whether they are to be measured again."""
        return self._drives is not None and self._drives.drop_codec()

    def fade(self) -> None:
        """Count what steps show from now on, and the rates of idle drives only where they show nothing."""
        if self._drives is not None:
            self._drives.fade()

    def left(self) -> float:
        """Return the fraction of the idle drives' rates that is left, of the kind and path that has lost most."""
        now = self.resources().rates
        pairs = list(zip(now, self._idle, strict=True)) if len(now) == len(self._idle) else []  # else a path has failed
        return min((rate / idle for rate, idle in pairs), default=1.0)

    def may_measure(self) -> bool:
        """Return whether there are drives, and measuring them again takes ``MEASURING_FRACTION`` of the run at most."""
        return self._drives is not None and time.monotonic() >= self._again_at_s

    def resources(self) -> Resources:
        """Return the rates of now; a path that failed is left out.

        Raises:
            StateError: a path was never measured and has moved nothing.
        """
        return Resources(
            () if self._drives is None else tuple(PathRates(*path) for path in self._drives.rates()),
            self.copies.out_bytes_per_s,
            self.copies.in_bytes_per_s,
            self._staging_bytes,
            is_synchronous=self.is_synchronous,
            compute_s_per_byte=self._compute_s_per_byte,
        )


class Places(Protocol):
    """The tiers, as plans see them."""

    @property
    def by_placement(self) -> Mapping[Placement, AnyStore]:
        """Return the store of each tier."""
        ...

    @property
    def host(self) -> HostStore | None:
        """Return the store of the host tier, if there is one."""
        ...

    def left_tbw(self) -> float:
        """Return the terabytes that the drives still take."""
        ...

    def stored_share(self) -> float:
        """Return the bytes that drives were written for a byte of storages."""
        ...


@dataclass(frozen=True, slots=True)
class Machine:
    """The limits of the config, the rates of the machine, its memory and its clock: plans are made for them.

    Attributes:
        memory: of everything but saved tensors.
        clock: of the training device.
        sharers: ranks that share the device's memory.
        is_drive_shared: ZeRO uses a drive of any rank, too.
    """

    config: OffloadConfig
    tiers: Places
    rates: Rates
    memory: MemoryMeter
    clock: Clock
    sharers: int = 1
    is_drive_shared: bool = False

    def limits(self, step_s: float) -> Limits:
        """Return the limits of the cost of a plan for a step that takes so many seconds."""
        left_tbw, stored_share = self.tiers.left_tbw(), self.tiers.stored_share()
        # In bytes of storages, as plans count.
        write_limit = write_limit_bytes_per_step(left_tbw, self.config.ssd.min_life_days, step_s) / stored_share
        host_bytes = self.tiers.host.limit_bytes if self.tiers.host is not None else 0
        found = Limits.of(self.config, write_limit)
        return replace(found, endurance_tbw=left_tbw, stored_share=stored_share, host_budget_bytes=host_bytes)

    def room_bytes(self) -> float:
        """Return the device memory that is free for this rank's activations at the beginning of a step."""
        return self.memory.room_bytes() / self.sharers
