"""TERAIO's planner: benefit over cost, with bandwidth reserved on a timeline; SSD first, host memory where it is full.

After arXiv 2506.06472: the benefit of a move is the integral over time of what it takes off the memory *above
capacity*, its cost the time of both transfers; the best ratio first, until the peak fits. Without a budget the
capacity is nothing. Time is cut into equal slices here, and a move's benefit is computed again only when it comes up
(benefits only fall), so that planning takes seconds where the published planner took 31 to 397.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from ds_tba.config import Placement
from ds_tba.plan.plan import Limits
from ds_tba.plan.replay import Assignment, Floats, Ints, Timeline

SLICES = 1024
# A move whose ratio is within this part of the next one's is taken before that one is looked at again.
NEAR_ENOUGH = 0.9
MAX_BYTES = 2.0**60  # in a slice: sums of infinities are not numbers


@dataclass(frozen=True, slots=True)
class Reservation:
    """The slices of the timeline that a move's transfers would take, the last one of each in part."""

    out_first: int
    out_last: int
    in_first: int
    in_last: int


class Channel:
    """A drive or a link, out and back, with the bytes that are left of it in each slice.

    Args:
        out_bytes, in_bytes: capacity of a slice.
    """

    def __init__(self, out_bytes: float, in_bytes: float) -> None:
        self._out = np.full(SLICES, min(out_bytes, MAX_BYTES))
        self._in = np.full(SLICES, min(in_bytes, MAX_BYTES))

    def find(self, nbytes: int, packed: int, used: int) -> Reservation | None:
        """Return the earliest way out after slice ``packed`` with the latest way back before slice ``used``."""
        out = np.searchsorted(np.cumsum(self._out[packed:used]), nbytes)
        gone = packed + int(out) + 1
        if gone >= used:
            return None
        back = int(np.searchsorted(np.cumsum(self._in[gone:used][::-1]), nbytes))
        if back >= used - gone:
            return None
        return Reservation(packed, gone - 1, used - 1 - back, used - 1)

    def take(self, nbytes: int, where: Reservation) -> None:
        """Reserve a move's slices."""
        _take(self._out[where.out_first : where.out_last + 1], nbytes)
        _take(self._in[where.in_first : where.in_last + 1][::-1], nbytes)


def _take(left: Floats, nbytes: int) -> None:
    """Take bytes from the first slices on."""
    rest = nbytes - (left.sum() - left[-1])
    left[:-1] = 0.0
    left[-1] = max(0.0, left[-1] - rest)


class Greedy:
    """The timeline while moves are chosen."""

    def __init__(self, timeline: Timeline, limits: Limits) -> None:
        self._timeline, resources = timeline, timeline.trace.resources
        self._slice_s = slice_s = timeline.trace.end_s / SLICES
        at_s = (timeline.left_s, timeline.used_s, timeline.freed_s)
        self._packed, self._used, self._freed = map(self._slices, at_s)
        self._memory = np.zeros(SLICES)
        for index in np.flatnonzero(timeline.saved):
            self._memory[self._packed[index] : self._freed[index] + 1] += timeline.nbytes[index]
        self._capacity_bytes = limits.activation_budget_bytes or 0
        self._host = np.zeros(SLICES)
        self._host_budget_bytes = limits.host_budget_bytes
        self._ssd = Channel(resources.write_bytes_per_s * slice_s, resources.read_bytes_per_s * slice_s)
        self._link = Channel(resources.copy_out_bytes_per_s * slice_s, resources.copy_in_bytes_per_s * slice_s)
        # A storage that is larger than staging goes in pieces, for which compute waits: this planner has no such move.
        self._to_ssd = timeline.to_nvme & (timeline.padded_bytes <= resources.staging_bytes)
        self._ssd_s = _transfer_s(timeline.padded_bytes, resources.write_bytes_per_s, resources.read_bytes_per_s)
        self._host_s = _transfer_s(timeline.nbytes, resources.copy_out_bytes_per_s, resources.copy_in_bytes_per_s)

    def choose(self) -> Assignment:
        """Return the moves, the best ratio of benefit to cost first."""
        assignment, nbytes = self._timeline.kept, self._timeline.nbytes
        candidates = np.flatnonzero(self._timeline.movable & self._timeline.saved).tolist()
        heap = [(-self._highest_ratio(index), index) for index in candidates]
        heapq.heapify(heap)
        while heap and self._memory.max() > self._capacity_bytes:
            _, index = heapq.heappop(heap)
            size = int(nbytes[index])
            placement, where = self._find(index, size)
            if where is None:
                continue
            ratio = self._ratio(index, placement, where, size)
            if ratio <= 0:
                continue
            if heap and ratio < -heap[0][0] * NEAR_ENOUGH:
                heapq.heappush(heap, (-ratio, index))
                continue
            assignment.placements[index] = placement
            (self._ssd if placement is Placement.NVME else self._link).take(size, where)
            if placement is Placement.HOST:
                self._host[where.out_first : self._freed[index] + 1] += size
            self._memory[where.out_last + 1 : where.in_first] -= size
        return assignment

    def _slices(self, at_s: Floats) -> list[int]:
        return np.minimum((at_s / self._slice_s).astype(np.int64), SLICES - 1).tolist()  # type: ignore[no-any-return]

    def _find(self, index: int, size: int) -> tuple[Placement, Reservation | None]:
        packed, used = self._packed[index], self._used[index]
        if self._to_ssd[index]:
            where = self._ssd.find(size, packed, used)
            if where is not None:
                return Placement.NVME, where
        if self._host[packed : self._freed[index] + 1].max() + size > self._host_budget_bytes:
            return Placement.KEEP, None
        return Placement.HOST, self._link.find(size, packed, used)

    def _highest_ratio(self, index: int) -> float:
        """Return the ratio that no reservation can exceed."""
        whole = Reservation(self._packed[index], self._packed[index] - 1, self._used[index], self._used[index])
        placement = Placement.NVME if self._to_ssd[index] and not self._host_budget_bytes else Placement.HOST
        return self._ratio(index, placement, whole, int(self._timeline.nbytes[index]))

    def _ratio(self, index: int, placement: Placement, where: Reservation, size: int) -> float:
        above = self._memory[where.out_last + 1 : where.in_first] - self._capacity_bytes
        benefit = float(np.clip(above, 0, size).sum()) * self._slice_s
        cost_s = float((self._ssd_s if placement is Placement.NVME else self._host_s)[index])
        return benefit / cost_s if cost_s > 0 else benefit * np.inf if benefit else 0.0


def _transfer_s(nbytes: Ints, out_bytes_per_s: float, in_bytes_per_s: float) -> Floats:
    """Return the seconds of each storage's way out and back; infinite where a rate is 0."""
    with np.errstate(divide="ignore"):
        return np.asarray(nbytes / np.float64(out_bytes_per_s) + nbytes / np.float64(in_bytes_per_s))


def teraio_assignment(timeline: Timeline, limits: Limits) -> Assignment:
    """Return TERAIO's choice."""
    if not len(timeline.nbytes) or timeline.trace.end_s <= 0:
        return timeline.kept
    return Greedy(timeline, limits).choose()
