"""One optimizer update: the host takes chunks from the front, the device from the back.

After Deep Optimizer States (Maurya et al., Middleware 2024), which gives every k-th sub-group to the device, k by hand.
Results are bit for bit those of CPUAdam whoever computes them, so the two may meet wherever their speeds let them.
This file cannot see DeepSpeed: ``zero3.py`` says when there is an update, and of which sub-groups.

[Note: Chunks] CPUAdam in parts of a multiple of 128 elements gives the bits of one call for all of them
(``csrc/adam/cpu_adam_impl.cpp``: ``Step_8`` works on eight registers of up to 16 elements). What is left over at the
end of a sub-group goes through code that rounds in another way, so it is never cut and always the host's. So is the
first and the last page of a sub-group's arrays, which is pinned nowhere: they share it with others.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch

from ds_tba.device.accelerator import PAGE_BYTES, Accelerator
from ds_tba.report import ReportFile
from ds_tba.update import BYTES_PER_ELEMENT, UpdateConfig
from ds_tba.update.device import DevicePipeline
from ds_tba.update.formula import Powers, update_
from ds_tba.update.host import HostUpdate, SubGroup
from ds_tba.update.pinning import Registry

logger = logging.getLogger("ds_tba")

GRAIN_ELEMENTS = 128
_PAGE_ELEMENTS = PAGE_BYTES // BYTES_PER_ELEMENT


@dataclass(frozen=True, slots=True)
class Chunk:
    """The elements from ``start`` to ``stop`` of a sub-group, both multiples of :data:`GRAIN_ELEMENTS`."""

    sub_group: int
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start


def inside(elements: int) -> tuple[int, int]:
    """Return the elements at which the chunks of a sub-group begin and end.

    Between them lie whole pages of its arrays, wherever in a page these begin. What is before and after is the host's;
    both are 0 where no chunk is left.
    """
    stop = (elements - _PAGE_ELEMENTS) // GRAIN_ELEMENTS * GRAIN_ELEMENTS
    return (_PAGE_ELEMENTS, stop) if stop > _PAGE_ELEMENTS else (0, 0)


def chunks_of(sub_groups: Sequence[int], chunk_elements: int) -> list[Chunk]:
    """Cut the insides of sub-groups of so many elements into chunks of whole slices, in order."""
    step = max(chunk_elements // GRAIN_ELEMENTS, 1) * GRAIN_ELEMENTS
    return [
        Chunk(sub_group, start, min(start + step, inside(elements)[1]))
        for sub_group, elements in enumerate(sub_groups)
        for start in range(*inside(elements), step)
    ]


class Split:
    """Hands out the chunks of one step: to the host from the front, to the device from the back.

    Whoever is faster takes more. Both compute the same bits, so that the place where they meet changes nothing. The
    host takes the chunks that may not go to the device, in their place: the host always goes forward.

    Args:
        device_share: fraction of all elements for the device, rounded to whole chunks; None lets them meet.
        barred: sub-groups whose chunks may not go to the device.
    """

    def __init__(
        self, chunks: Sequence[Chunk], device_share: float | None, barred: frozenset[int] = frozenset()
    ) -> None:
        self._chunks = chunks  # in the order of the sub-groups
        possible = [number for number in reversed(range(len(chunks))) if chunks[number].sub_group not in barred]
        self._for_device, self._not_for_host = deque(possible), set[int]()
        if device_share is not None:
            self._for_device = deque(_share(chunks, possible, device_share))
            self._not_for_host.update(self._for_device)
        self._next_of_host = 0

    def for_host(self) -> Chunk | None:
        """Take the host's next chunk; None where there is none."""
        while self._next_of_host < len(self._chunks):
            number = self._next_of_host
            self._next_of_host += 1
            if number not in self._not_for_host:
                return self._chunks[number]
        return None

    def for_device(self) -> Chunk | None:
        """Take the device's next chunk that the host has not taken; None where there is none."""
        while self._for_device:
            number = self._for_device.popleft()
            # The host passes over the chunks of a fixed share without taking them: its place does not bar them.
            if number >= self._next_of_host or number in self._not_for_host:
                self._not_for_host.add(number)
                return self._chunks[number]
        return None

    def most_of_device(self) -> int:
        """Return how many chunks the device can still be given if the host takes none of them before."""
        return len(self._for_device)

    def give_to_host(self) -> None:
        """Leave everything to the host, before either has taken anything."""
        self._for_device.clear()
        self._not_for_host.clear()


def _share(chunks: Sequence[Chunk], possible: Sequence[int], device_share: float) -> Iterator[int]:
    """Yield possible chunks from the back until they are a share of all elements, as nearly as whole chunks allow."""
    left = device_share * sum(chunk.elements for chunk in chunks)
    for number in possible:
        if chunks[number].elements / 2 > left:
            return
        left -= chunks[number].elements
        yield number


@dataclass(slots=True)
class UpdateReport:
    """The report. Counts and seconds are this rank's, since the run began.

    Attributes:
        steps: interleaved updates.
        stock_steps: updates that were left to DeepSpeed; ``fallbacks`` says why.
        elements: parameters updated in ``steps``, each counted once per step; ``device_elements`` by the device.
        device_share: fraction of ``elements`` that the device updated; ``last_device_share`` in the last step.
        update_s: seconds from the first chunk until everything is in place.
        host_s: seconds of ``update_s`` in the host's own chunks.
        drain_s: seconds of ``update_s`` waiting for the device at the end.
        uploaded_bytes, written_back_bytes: bytes copied to the device and from it, in updates.
        pinned_bytes: bytes of pinned host memory: master and moments (in place), and buffers.
        fallbacks: number of times that something was left to the host or to DeepSpeed, by reason.
    """

    rank: int = 0
    state: str = "running"
    steps: int = 0
    stock_steps: int = 0
    elements: int = 0
    device_elements: int = 0
    device_share: float = 0.0
    last_device_share: float = 0.0
    update_s: float = 0.0
    host_s: float = 0.0
    drain_s: float = 0.0
    uploaded_bytes: int = 0
    written_back_bytes: int = 0
    pinned_bytes: int = 0
    fallbacks: dict[str, int] = field(default_factory=Counter)

    def fall_back(self, reason: str, words: str) -> None:
        """Count what was left to the host or to DeepSpeed, and log each reason once."""
        if reason not in self.fallbacks:
            logger.warning("interleaved optimizer update: %s", words)
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1

    def to_dict(self) -> dict[str, object]:
        """Return every field, ready for JSON."""
        return asdict(self)

    def line(self) -> str:
        """Return the line of the log after a number of steps."""
        steps = max(self.steps, 1)
        return (
            f"{self.steps} optimizer updates of {self.update_s / steps:.3f} s: {self.device_share:.0%} on the device, "
            f"{self.host_s / steps:.3f} s in the host's part, {self.drain_s / steps:.3f} s waiting for the device"
        )


@dataclass(eq=False)
class Updater:
    """Runs the updates of one optimizer, and counts them."""

    config: UpdateConfig  # its ``device_share`` is 0 where the device's bits are not CPUAdam's
    accelerator: Accelerator
    host: HostUpdate
    pipeline: DevicePipeline
    powers: Powers  # mirror of CPUAdam's hidden state
    # Pins the host tensors that the device copies; None where the device needs no pins.
    registry: Registry | None = None
    target_on_device: bool = True  # the model's parameters are on the device
    counts: UpdateReport = field(default_factory=UpdateReport)  # so far; :meth:`report` derives the others
    file: ReportFile | None = None  # for the report

    def update(self, sub_groups: Sequence[SubGroup]) -> None:
        """Update all sub-groups, in their order; return when every byte is in its place."""
        self.pin([array for one in sub_groups for array in one.arrays])
        # Pinned before the chunks are divided: a sub-group that is not pinned is the host's for the whole step.
        _Update(self, sub_groups).run()
        every = self.config.report.every_steps
        is_due = every > 0 and self.counts.steps % every == 0
        if is_due and self.counts.rank == 0:
            logger.info("%s", self.report().line())
        if self.file is not None:
            self.file.refresh(lambda: self.report().to_dict(), now=is_due)

    def pin(self, arrays: Sequence[torch.Tensor]) -> None:
        """Pin from the back, where the device begins, and unpin arrays that were replaced."""
        registry = self.registry
        if registry is None or self.config.device_share == 0:
            return
        # Pins of arrays that a checkpoint has replaced would count against the limit, and hold their memory.
        registry.keep(arrays)
        for array in reversed(arrays):
            registry.pin(array)
        if registry.refused_bytes:
            self.counts.fall_back(
                "pageable memory",
                f"{registry.refused_bytes} bytes of optimizer states cannot be pinned, so that the host updates them: "
                "leave the driver more memory to pin (other pinned buffers, the container's limit), or set "
                "pinned_bytes to what it can pin",
            )

    def report(self) -> UpdateReport:
        """Return the counts so far, with the figures that follow from them."""
        counts, pipeline = self.counts, self.pipeline
        in_place_bytes = self.registry.pinned_bytes if self.registry is not None else 0
        return replace(
            counts,
            device_share=counts.device_elements / max(counts.elements, 1),
            uploaded_bytes=pipeline.uploaded_bytes,
            written_back_bytes=pipeline.written_back_bytes,
            pinned_bytes=in_place_bytes + self.host.pinned_bytes,
            fallbacks=dict(counts.fallbacks),
        )

    def close(self) -> None:
        """Unpin all memory and write the last report."""
        if self.registry is not None:
            self.registry.close()
        self.counts.state = "finished"
        if self.file is not None:
            self.file.refresh(lambda: self.report().to_dict(), now=True)
        if self.counts.rank == 0 and self.counts.steps:
            logger.info("%s", self.report().line())


class _Update:
    """One update under way: the chunks that the device has, and how far the host is."""

    def __init__(self, updater: Updater, sub_groups: Sequence[SubGroup]) -> None:
        self._updater = updater
        self._pipeline = updater.pipeline
        self._host = updater.host
        self._sub_groups = sub_groups
        # In the order of the sub-groups: CPUAdam's hidden powers depend on it, and so do the bits of a step.
        self._scalars = [updater.powers.scalars(one.step, one.hyper) for one in sub_groups]
        self._device_chunks: list[Chunk] = []
        self._entered = 0
        self._host_s = 0.0
        pageable = []  # the device cannot copy these by itself
        if (registry := updater.registry) is not None:
            pageable = [at for at, one in enumerate(sub_groups) if not all(map(registry.is_pinned, one.arrays))]
        chunks = chunks_of([one.elements for one in sub_groups], updater.config.chunk_elements)
        self._split = Split(chunks, updater.config.device_share, frozenset(pageable))

    def run(self) -> None:
        """Update everything, and count it."""
        began_s, counts = time.perf_counter(), self._updater.counts
        most_jobs = self._split.most_of_device()
        try:
            if not self._pipeline.begin(most_jobs=most_jobs) and most_jobs:
                counts.fall_back("no device memory", "the device has no memory for one chunk")
                self._split.give_to_host()
            self._feed()
            self._take_front()
            while (chunk := self._split.for_device()) is not None:  # a fixed share leaves these to the device alone
                self._pipeline.wait_for_room()
                self._submit(chunk)
        finally:  # also when interrupted, or copies would write to states that a checkpoint has loaded meanwhile
            drain_began_s = time.perf_counter()
            self._pipeline.drain()
        counts.drain_s += time.perf_counter() - drain_began_s
        self._host.finish()
        if not self._updater.target_on_device:  # where the device has not cast its chunks
            for chunk in self._device_chunks:
                self._host.write(self._part(chunk), self._pipeline.upload)
        elements = sum(one.elements for one in self._sub_groups)
        device_elements = sum(chunk.elements for chunk in self._device_chunks)
        counts.steps += 1
        counts.elements += elements
        counts.device_elements += device_elements
        counts.last_device_share = device_elements / max(elements, 1)
        counts.host_s += self._host_s
        counts.update_s += time.perf_counter() - began_s

    def _take_front(self) -> None:
        """Update the host's chunks, and feed the device between slices."""
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

    def _enter(self, last: int) -> None:
        """Take CPUAdam's hidden state to a sub-group, through all before it, and update their ends."""
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
        """Submit as many chunks as the device wants; one on a synchronous device, or the host would get none."""
        while self._pipeline.wants_job() and (chunk := self._split.for_device()) is not None:
            self._submit(chunk)
            if self._updater.accelerator.is_synchronous:
                return

    def _submit(self, chunk: Chunk) -> None:
        part = self._part(chunk)
        if not self._updater.target_on_device:
            part.target = None
        self._device_chunks.append(chunk)
        self._pipeline.submit(part, partial(update_, scalars=self._scalars[chunk.sub_group]))
