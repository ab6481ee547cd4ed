"""The division of an update between host and device: pure arithmetic on numbers of elements.

DeepSpeed's CPUAdam in slices of a multiple of 128 elements gives the bits of one call for all of them
(``csrc/adam/cpu_adam_impl.cpp``: ``Step_8`` works on eight registers of up to 16 elements). What is left over at the
end of a sub-group goes through code that rounds in another way, so it is never cut and always the host's. So is the
first and the last page of a sub-group's arrays, which is pinned nowhere: they share it with others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds_tba.device.accelerator import PAGE_BYTES
from ds_tba.update.config import BYTES_PER_ELEMENT

SLICE_ELEMENTS = 128
_PAGE_ELEMENTS = PAGE_BYTES // BYTES_PER_ELEMENT


@dataclass(frozen=True, slots=True)
class Chunk:
    """The elements from ``start`` to ``stop`` of a sub-group, both multiples of :data:`SLICE_ELEMENTS`."""

    sub_group: int
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start


def tail_start(elements: int) -> int:
    """Return the element at which the ragged end of a sub-group begins."""
    return elements - elements % SLICE_ELEMENTS


def inside(elements: int) -> tuple[int, int]:
    """Return the elements at which the chunks of a sub-group begin and end.

    Between them lie whole pages of its arrays, wherever in a page these begin. What is before and after is the host's;
    both are 0 where no chunk is left.
    """
    start, stop = _PAGE_ELEMENTS, tail_start(max(elements - _PAGE_ELEMENTS, 0))
    return (start, stop) if start < stop else (0, 0)


def chunks_of(sub_groups: Sequence[int], chunk_elements: int) -> list[Chunk]:
    """Cut the insides of sub-groups of so many elements into chunks of whole slices, in order."""
    step = max(chunk_elements // SLICE_ELEMENTS, 1) * SLICE_ELEMENTS
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
        chunks: chunks in the order of the sub-groups.
        device_share: fraction of all elements for the device, rounded to whole chunks; None lets them meet.
        barred: sub-groups whose chunks may not go to the device.
    """

    def __init__(
        self, chunks: Sequence[Chunk], device_share: float | None, barred: frozenset[int] = frozenset()
    ) -> None:
        self._chunks = chunks
        possible = [number for number in reversed(range(len(chunks))) if chunks[number].sub_group not in barred]
        self._for_device, self._not_for_host = possible, set[int]()
        if device_share is not None:
            self._for_device = list(_share(chunks, possible, device_share))
            self._not_for_host.update(self._for_device)
        self._next_of_host = 0
        self._next_of_device = 0  # index into _for_device

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
        while self._next_of_device < len(self._for_device):
            number = self._for_device[self._next_of_device]
            self._next_of_device += 1
            # The host passes over the chunks of a fixed share without taking them: its place does not bar them.
            if number >= self._next_of_host or number in self._not_for_host:
                self._not_for_host.add(number)
                return self._chunks[number]
        return None

    def most_of_device(self) -> int:
        """Return how many chunks the device can still be given if the host takes none of them before."""
        return len(self._for_device) - self._next_of_device

    def give_to_host(self) -> None:
        """Leave everything to the host, before either has taken anything."""
        self._for_device = []
        self._not_for_host.clear()


def _share(chunks: Sequence[Chunk], possible: Sequence[int], device_share: float) -> Iterator[int]:
    """Yield possible chunks from the back until they are a share of all elements, as nearly as whole chunks allow."""
    left = device_share * sum(chunk.elements for chunk in chunks)
    for number in possible:
        if chunks[number].elements / 2 > left:
            return
        left -= chunks[number].elements
        yield number
