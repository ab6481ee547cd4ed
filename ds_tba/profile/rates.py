"""The rates of this machine as a plan needs them: of the copies as last measured, of the drives as they are now.

They are what this rank got: ranks that share drives have to measure at the same time.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median_low

import torch

from ds_tba.device.accelerator import Accelerator, pins_memory
from ds_tba.device.memory import huge_page_memory
from ds_tba.errors import StateError
from ds_tba.planner.trace import PathRates, Resources, Traffic
from ds_tba.profile.copies import COPY_BYTES, CopyRates, measure_copies
from ds_tba.storage.nvme import NvmeStore
from ds_tba.storage.swap_path import SwapPath
from ds_tba.telemetry.bandwidth import KindMeter

# So many bytes and more in a step tell what moving costs; of so many steps.
LEARN_BYTES = 4 << 20
LEARN_STEPS = 5
# Kernels lose more to lanes than these take of the processor (caches, memory, threads that wait for each other), but
# not more than so many times: kernels that start slowly after a long wait are another matter.
MOST_SHOWN = 3.0
# For each byte, steps that move a part of it all lose more than those that move all: a lane that works while the others
# rest stops all threads of a kernel, which wait for each other. Measured on two cores: up to 1.6 for half of it.
PART_TAKES_MORE = 1.25


class Rates:
    """What can be moved by a store and its device. Call :meth:`measure` before anything else.

    [Note: What moving costs] Where the training thread itself copies, moving takes more of it than the copies alone,
    which run here from warm caches with nothing beside them: what steps show (:meth:`learn`) counts where it is more.
    There the lanes take processor time from the kernels, too: what a byte's write and read take of it is added. That is
    what steps that move everything have shown (:meth:`learn_taken`), and before that the processor time of the lanes,
    measured alone. A plan is made for more than that, as much as it may be: what it promises is to be kept. Steps under
    a plan that are off correct that (:meth:`learn_excess`), until the drives are measured again.

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
        self._learned_until = (0, 0.0, 0.0)
        self._s_per_byte: deque[float] = deque(maxlen=LEARN_STEPS)
        self._lane_s_per_byte = 0.0
        self._shown_s_per_byte: float | None = None
        self._error_s_per_byte = 0.0
        self._excess_s_per_byte = 0.0
        self._moved_until = 0
        self._moved_in_step = 0

    def measure(self) -> None:
        """Measure drives and copies; blocks for a moment.

        Raises:
            PathError: a write or a read failed.
        """
        self._excess_s_per_byte = 0.0  # was it these drives, or something that has passed?
        if self._store is not None:
            began_s, before = time.process_time(), self._moved_bytes()
            self._store.measure()
            moved = self._moved_bytes() - before
            if moved and self._accelerator.is_synchronized_device():
                self._lane_s_per_byte = (time.process_time() - began_s) / moved
        self.copies = self._measure_copies()

    def note_step(self) -> None:
        """A step is over."""
        before, self._moved_until = self._moved_until, self._moved_bytes()
        self._moved_in_step = self._moved_until - before

    def moved_bytes(self) -> int:
        """By the lanes in the last step, either way."""
        return self._moved_in_step

    def taken_s(self, moved_bytes: int) -> float:
        """What moving so many bytes takes of the processor on which the kernels run; 0 where they run on a device."""
        shown = self._lane_s_per_byte if self._shown_s_per_byte is None else self._shown_s_per_byte
        return moved_bytes * min(MOST_SHOWN * self._lane_s_per_byte, shown)

    def learn_taken(self, taken_s: float, error_s: float, moved_bytes: int) -> None:
        """Take into account what moving has taken of the kernels. See [Note: What moving costs].

        Args:
            taken_s: by which steps that moved all, so many bytes more, were longer, without the training thread's part.
            error_s: the standard error of that.
            moved_bytes: by the lanes, either way.
        """
        if moved_bytes >= LEARN_BYTES:
            self._shown_s_per_byte = max(0.0, taken_s) / moved_bytes
            self._error_s_per_byte = error_s / moved_bytes

    def learn_excess(self, excess_s: float, moved_bytes: int) -> float:
        """Take into account that steps under a plan were longer than promised. See [Note: What moving costs].

        Args:
            excess_s: by so much; below 0 if they were shorter.
            moved_bytes: by the lanes, either way.

        Returns:
            What of it lanes cannot have taken, in seconds.
        """
        if not moved_bytes:
            return excess_s
        before = self._planned_s_per_byte()
        least, known = self._bounds_s_per_byte()
        wanted = max(least, before + excess_s / moved_bytes)
        self._excess_s_per_byte = min(MOST_SHOWN * self._lane_s_per_byte, wanted) - known
        return excess_s - (self._planned_s_per_byte() - before) * moved_bytes

    def _planned_s_per_byte(self) -> float:
        """What a byte's way takes of the kernels in a step that moves a part of all there is, as plans count it."""
        _, known = self._bounds_s_per_byte()
        return min(MOST_SHOWN * self._lane_s_per_byte, known + self._excess_s_per_byte)

    def _bounds_s_per_byte(self) -> tuple[float, float]:
        """The same: at least, and at most, as far as steps without a plan tell."""
        if self._shown_s_per_byte is None:
            return self._lane_s_per_byte, self._lane_s_per_byte
        least = max(0.0, self._shown_s_per_byte - self._error_s_per_byte)
        return least, PART_TAKES_MORE * (self._shown_s_per_byte + self._error_s_per_byte)

    def learn(self, moving_s: float, *, is_usual: bool = True) -> None:
        """Take into account what a step has shown. See [Note: What moving costs].

        Args:
            moving_s: all that the training thread has taken so far for storages that go to this store and come back.
            is_usual: False for a step that moved little of what a plan may move, which takes more for each byte.
        """
        if self._store is None or not self._accelerator.is_synchronized_device():
            return
        with self._store.space.changed:
            now = (self._store.stats.offloaded_bytes, moving_s, self._store.stats.stall_s)
        before, self._learned_until = self._learned_until, now
        nbytes, took_s, waited_s = (late - early for late, early in zip(now, before, strict=True))
        if is_usual and nbytes >= LEARN_BYTES and took_s > waited_s:
            self._s_per_byte.append((took_s - waited_s) / nbytes)

    def resources(self, traffic: tuple[Traffic, ...] = ()) -> Resources:
        """As it is now; a path that failed takes no more and is left out.

        Raises:
            StateError: a path was never measured and has moved nothing.
        """
        return Resources(
            self._paths(),
            self._out_bytes_per_s(),
            self.copies.in_bytes_per_s,
            self._staging_bytes,
            is_synchronous=self._accelerator.is_synchronized_device(),
            traffic=traffic,
        )

    def _out_bytes_per_s(self) -> float:
        """The way back is in it: on the CPU, what was read is used where it lies, and all of that is overhead."""
        s_per_byte = 1 / self.copies.out_bytes_per_s
        if self._s_per_byte:
            s_per_byte = max(s_per_byte, median_low(self._s_per_byte))
        s_per_byte += 2 * self._planned_s_per_byte()  # it is written and read
        return 1 / s_per_byte if s_per_byte else math.inf

    def _moved_bytes(self) -> int:
        """By the lanes, either way, since the beginning."""
        if self._store is None:
            return 0
        with self._store.space.changed:
            meters = [path.meter for path in self._store.paths]
            return sum(meter.writes.moved_bytes + meter.reads.moved_bytes for meter in meters)

    def _paths(self) -> tuple[PathRates, ...]:
        if self._store is None:
            return ()
        with self._store.space.changed:
            return tuple(path_rates(path) for path in self._store.paths if path.failure is None)

    def _measure_copies(self) -> CopyRates:
        with self._staged() as staged:
            return measure_copies(self._accelerator, staged)

    @contextmanager
    def _staged(self) -> Iterator[torch.Tensor]:
        """Memory that copies go through: of the ring where there is one, else pinned as the host tier's is."""
        nbytes = min(COPY_BYTES, self._staging_bytes)
        slot = None
        if self._store is not None:
            with self._store.space.changed:
                slot = self._store.ring.slots.allocate(nbytes)
        if self._store is None or slot is None:
            if pins_memory(self._accelerator):
                yield self._accelerator.pin_memory(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
            else:
                yield huge_page_memory(nbytes)
            return
        try:
            yield self._store.ring.view(slot)
        finally:
            with self._store.space.changed:
                self._store.ring.slots.free(slot)
                self._store.space.changed.notify_all()


def path_rates(path: SwapPath) -> PathRates:
    """The rates of a path. Call it under the store's lock.

    Raises:
        StateError: one kind was never measured.
    """
    write, write_beside = _of_kind(path, path.meter.writes)
    read, read_beside = _of_kind(path, path.meter.reads)
    return PathRates(write, read, write_beside, read_beside)


def _of_kind(path: SwapPath, kind: KindMeter) -> tuple[float, float]:
    alone = kind.alone if kind.alone.is_known else kind.beside
    if not alone.is_known:
        raise StateError(f"{path.file.directory} was not measured before a plan was asked for; this is a bug in ds_tba")
    # What was not seen of late stays as it was, but nothing is faster for having company.
    beside_bytes_per_s = min(kind.beside.bytes_per_s or alone.bytes_per_s, alone.bytes_per_s)
    return alone.bytes_per_s, beside_bytes_per_s
