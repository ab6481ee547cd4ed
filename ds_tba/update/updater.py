"""One optimizer update, on host and device at once: the host takes chunks from the front, the device from the back.

After Deep Optimizer States (Maurya et al., Middleware 2024), which gives every k-th sub-group to the device, k by hand.
Results are bit for bit those of CPUAdam whoever computes them, so the two may meet wherever their speeds let them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ds_tba.device.accelerator import Accelerator
from ds_tba.update.chunks import Chunk, Split, chunks_of, inside
from ds_tba.update.config import UpdateConfig
from ds_tba.update.device import DevicePipeline, Job
from ds_tba.update.formula import Powers, Scalars, update_
from ds_tba.update.host import HostUpdate, SubGroup

logger = logging.getLogger("ds_tba")


class UpdateCounters:
    """Counts, for the report."""

    def __init__(self) -> None:
        self.steps = self.stock_steps = self.elements = self.device_elements = 0
        self.last_device_share = self.update_s = self.host_s = self.drain_s = 0.0
        self.fallbacks: Counter[str] = Counter()

    def count(self, elements: int, device_elements: int, update_s: float, host_s: float, drain_s: float) -> None:
        """One update."""
        self.steps += 1
        self.elements += elements
        self.device_elements += device_elements
        self.last_device_share = device_elements / max(elements, 1)
        self.update_s += update_s
        self.host_s += host_s
        self.drain_s += drain_s

    @property
    def host_adam_per_s(self) -> float:
        """Elements per second of the host."""
        return (self.elements - self.device_elements) / self.host_s if self.host_s else 0.0

    def fall_back(self, reason: str, words: str) -> None:
        """Something was left to the host or to DeepSpeed; said once for each reason."""
        if not self.fallbacks[reason]:
            logger.warning("interleaved optimizer update: %s", words)
        self.fallbacks[reason] += 1


@dataclass(slots=True)
class Parts:
    """What updates are made with.

    Attributes:
        config: the block.
        accelerator: of the device.
        host: the host's side.
        pipeline: the device's side.
        powers: mirror of CPUAdam's hidden state.
        is_pinned: whether the device may copy from and to the arrays of a sub-group by itself.
        counters: for the report.
        target_on_device: whether the model's parameters are there.
        device_share: as the config says, or 0 where the device's bits are not CPUAdam's.
    """

    config: UpdateConfig
    accelerator: Accelerator
    host: HostUpdate
    pipeline: DevicePipeline
    powers: Powers
    is_pinned: Callable[[SubGroup], bool]
    counters: UpdateCounters
    target_on_device: bool
    device_share: float | None


def run_update(parts: Parts, sub_groups: Sequence[SubGroup]) -> None:
    """Update all sub-groups of ZeRO-3, in their order; returns when every byte is where it belongs."""
    _Update(parts, sub_groups).run()


class _Update:
    """One update."""

    def __init__(self, parts: Parts, sub_groups: Sequence[SubGroup]) -> None:
        self._parts = parts
        self._sub_groups = sub_groups
        self._pipeline = parts.pipeline
        self._host = parts.host
        # In the order of the sub-groups, as CPUAdam's hidden state will see them.
        self._scalars: list[Scalars] = [parts.powers.scalars(one.step, one.hyper) for one in sub_groups]
        self._device_chunks: list[Chunk] = []
        self._entered = 0
        self._host_s = 0.0
        self._split = self._new_split()

    def _new_split(self) -> Split:
        pinned = [self._parts.is_pinned(one) for one in self._sub_groups]
        chunks = chunks_of([one.elements for one in self._sub_groups], self._parts.config.chunk_elements)
        return Split(chunks, self._parts.device_share, may_go=lambda chunk: pinned[chunk.sub_group])

    # ---- the update ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        began_s = time.perf_counter()
        most_jobs = self._split.most_of_device()
        try:
            if not self._pipeline.begin(most_jobs=most_jobs) and most_jobs:
                self._parts.counters.fall_back("no device memory", "the device has no memory for one chunk")
                self._split.give_to_host()
            self._feed()
            self._take_front()
            self._take_rest()
        finally:
            drain_began_s = time.perf_counter()
            self._pipeline.drain()
        drain_s = time.perf_counter() - drain_began_s
        self._host.finish()
        self._cast_on_host()
        elements = sum(one.elements for one in self._sub_groups)
        device_elements = sum(chunk.elements for chunk in self._device_chunks)
        self._parts.counters.count(elements, device_elements, time.perf_counter() - began_s, self._host_s, drain_s)

    def _take_front(self) -> None:
        """The host's chunks; the device is fed between slices."""
        while (chunk := self._split.for_host()) is not None:
            self._enter(chunk.sub_group)
            part = self._part(chunk)
            began_s = time.perf_counter()
            for _ in self._host.slices(part, self._pipeline.upload):
                self._host_s += time.perf_counter() - began_s
                self._feed()
                began_s = time.perf_counter()
            self._host_s += time.perf_counter() - began_s
        self._enter(len(self._sub_groups) - 1)

    def _take_rest(self) -> None:
        """What a fixed share leaves to the device alone."""
        while (chunk := self._split.for_device()) is not None:
            self._pipeline.wait_for_room()
            self._submit(chunk)

    def _enter(self, last: int) -> None:
        """Bring CPUAdam's hidden state to a sub-group, through all before it, and update their ends."""
        while self._entered <= last:
            sub_group = self._sub_groups[self._entered]
            self._host.enter(sub_group)
            start, stop = inside(sub_group.elements)
            for end in (sub_group.cut(0, start), sub_group.cut(stop, sub_group.elements)):
                for _ in self._host.slices(end, self._pipeline.upload):
                    pass
            self._entered += 1

    def _part(self, chunk: Chunk) -> SubGroup:
        return self._sub_groups[chunk.sub_group].cut(chunk.start, chunk.stop)

    def _feed(self) -> None:
        """Give the device what it wants; one chunk where its work is done at once, so that the host has some."""
        while self._pipeline.wants_job() and (chunk := self._split.for_device()) is not None:
            self._submit(chunk)
            if self._parts.accelerator.is_synchronized_device():
                return

    def _submit(self, chunk: Chunk) -> None:
        part = self._part(chunk)
        self._device_chunks.append(chunk)
        self._pipeline.submit(
            Job(
                part.master,
                part.exp_avg,
                part.exp_avg_sq,
                part.gradient,
                part.target if self._parts.target_on_device else None,
                part.factor,
                partial(update_, scalars=self._scalars[chunk.sub_group]),
            )
        )

    def _cast_on_host(self) -> None:
        """Parameters that are kept on the host, of chunks that the device has updated."""
        if not self._parts.target_on_device:
            for chunk in self._device_chunks:
                self._host.write(self._part(chunk), self._pipeline.upload)
