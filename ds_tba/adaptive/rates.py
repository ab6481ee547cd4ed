"""The rates of this machine as a plan needs them: of the copies as last measured, of the drives as they are now.

They are this rank's own: ranks that share drives have to measure at the same time. They cannot see what moving costs
the kernels in training, which ``feedback.py`` learns from the steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ds_tba.device.accelerator import Accelerator, Copies
from ds_tba.device.memory import huge_page_memory
from ds_tba.planner.trace import PathRates, Resources
from ds_tba.storage.bandwidth_probe import measure_drives
from ds_tba.storage.nvme import NvmeStore
from ds_tba.storage.staging import COPY_BYTES, CopyRates, measure_copies

# Kernel time that copies by an engine of their own take, as a fraction of the copies' time: the link has about this
# fraction of the device memory's bandwidth.
LINK_FRACTION = 0.02
# Of a run: the most that may be spent on measuring drives to which nothing is moved.
MEASURING_FRACTION = 0.01


class Rates:
    """The rates of a store and its device. Call :meth:`measure` before anything else.

    [Note: I/O interference] On a device the lanes and the copy engine work beside the kernels, and take next to nothing
    from them. On a CPU they share processor and memory: there moving a byte is assumed to cost the kernels as much time
    as its write and read took of the processor when they were measured alone.

    Args:
        store: None where nothing goes to NVMe.
        accelerator: the device.
        staging_bytes: bound of what is between device and file.
    """

    def __init__(self, store: NvmeStore | None, accelerator: Accelerator, staging_bytes: int) -> None:
        self._store = store
        self._accelerator = accelerator
        self._staging_bytes = staging_bytes
        self.copies = CopyRates(math.inf, math.inf)
        self._copies = Copies(accelerator)  # once: a device has few streams, and more share these
        self._compute_s_per_byte = 0.0
        self._moved_until = 0
        self._measured_at_s = self._measuring_s = 0.0

    @property
    def is_synchronous(self) -> bool:
        """Whether the device is the host."""
        return self._accelerator.is_synchronized_device()

    def measure(self) -> None:
        """Measure drives and copies; blocks for a moment.

        Raises:
            PathError: a write or a read failed.
        """
        started_s = time.monotonic()
        if self._store is not None:
            began_s, before = time.process_time(), self._moved_bytes()
            measure_drives(self._store.space, self._store.integrity)
            moved_bytes = self._moved_bytes() - before
            if moved_bytes and self.is_synchronous:  # either way was counted; a storage goes both
                self._compute_s_per_byte = 2 * (time.process_time() - began_s) / moved_bytes
        with self._staged() as staged:
            self.copies = measure_copies(self._accelerator, self._copies, staged)
        self._moved_until = self._moved_bytes()
        self._measured_at_s = time.monotonic()
        self._measuring_s = self._measured_at_s - started_s

    def should_measure(self) -> bool:
        """Whether the rates may be out of date, because nothing was written or read since the last call.

        Measuring takes ``MEASURING_FRACTION`` of a run at most.
        """
        before, self._moved_until = self._moved_until, self._moved_bytes()
        is_affordable = (time.monotonic() - self._measured_at_s) * MEASURING_FRACTION >= self._measuring_s
        return self._store is not None and self._moved_until == before and is_affordable

    def resources(self) -> Resources:
        """The rates of now; a path that failed is left out.

        Raises:
            StateError: a path was never measured and has moved nothing.
        """
        return Resources(
            self._paths(),
            self.copies.out_bytes_per_s,
            self.copies.in_bytes_per_s,
            self._staging_bytes,
            is_synchronous=self.is_synchronous,
            compute_s_per_byte=self._compute_s_per_byte
            if self.is_synchronous
            else LINK_FRACTION / self.copies.out_bytes_per_s,
        )

    def _moved_bytes(self) -> int:
        """By the lanes, either way, since the beginning."""
        if self._store is None:
            return 0
        with self._store.space.lock:
            meters = [path.meter for path in self._store.paths]
            return sum(meter.writes.moved_bytes + meter.reads.moved_bytes for meter in meters)

    def _paths(self) -> tuple[PathRates, ...]:
        if self._store is None:
            return ()
        with self._store.space.lock:
            return tuple(PathRates(*path.rates()) for path in self._store.paths if path.failure is None)

    @contextmanager
    def _staged(self) -> Iterator[torch.Tensor]:
        """Memory that copies go through: of the ring where there is one, else pinned as the host tier's is."""
        nbytes = min(COPY_BYTES, self._staging_bytes)
        slot = None
        if self._store is not None:
            with self._store.space.lock:
                slot = self._store.ring.slots.allocate(nbytes)
        if self._store is None or slot is None:
            if self.is_synchronous:
                yield huge_page_memory(nbytes)
            else:
                yield self._accelerator.pin_memory(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
            return
        try:
            yield self._store.ring.view(slot)
        finally:
            with self._store.space.lock:
                self._store.ring.slots.free(slot)
                self._store.space.changed.notify_all()
