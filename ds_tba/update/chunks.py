"""Which part of the update goes to the host and which to the device: pure arithmetic, of numbers of elements alone.

DeepSpeed's CPUAdam in slices of a multiple of 128 elements gives the bits of one call for all of them
(``csrc/adam/cpu_adam_impl.cpp``: ``Step_8`` works on eight registers of up to 16 elements). What is left over at the
end of a sub-group goes through code that rounds in another way, so it is never cut and always the host's. So is the
first and the last page of a sub-group's arrays, which is pinned nowhere: they share it with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ds_tba.device.memory import PAGE_BYTES
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
    """Where the ragged end of a sub-group begins."""
    return elements - elements % SLICE_ELEMENTS


def inside(elements: int) -> tuple[int, int]:
    """Where the chunks of a sub-group begin and end: within whole pages of its arrays, wherever in a page these begin.

    Before it and after it everything is the host's; both are 0 where that is all.
    """
    start, stop = _PAGE_ELEMENTS, tail_start(max(elements - _PAGE_ELEMENTS, 0))
    return (start, stop) if start < stop else (0, 0)


def chunks_of(sub_groups: Sequence[int], chunk_elements: int) -> list[Chunk]:
    """The insides of sub-groups of so many elements, in order, cut into chunks, rounded down to whole slices."""
    step = max(chunk_elements // SLICE_ELEMENTS, 1) * SLICE_ELEMENTS
    return [
        Chunk(sub_group, start, min(start + step, inside(elements)[1]))
        for sub_group, elements in enumerate(sub_groups)
        for start in range(*inside(elements), step)
    ]


class Split:
    """Hands out the chunks of one step: to the host from the front, to the device from the back.

    Whoever is faster takes more. Both compute the same bits, so that the place where they meet changes nothing. What
    may not go to the device is the host's, in its place: the host always goes forward.

    Args:
        chunks: in the order of the sub-groups.
        device_share: the part of all elements that is the device's, rounded to whole chunks; None lets them meet.
        may_go: whether a chunk may go to the device.
    """

    def __init__(
        self, chunks: Sequence[Chunk], device_share: float | None, may_go: Callable[[Chunk], bool] = lambda _: True
    ) -> None:
        self._chunks = chunks
        possible = [number for number in reversed(range(len(chunks))) if may_go(chunks[number])]
        self._for_device, self._not_for_host = possible, set[int]()
        if device_share is not None:
            self._for_device = list(_share(chunks, possible, device_share))
            self._not_for_host.update(self._for_device)
        self._next_of_host = 0
        self._next_of_device = 0  # in _for_device

    def for_host(self) -> Chunk | None:
        """The host's next chunk; None where there is none."""
        while self._next_of_host < len(self._chunks):
            number = self._next_of_host
            self._next_of_host += 1
            if number not in self._not_for_host:
                return self._chunks[number]
        return None

    def for_device(self) -> Chunk | None:
        """The device's next chunk that the host has not taken; None where there is none."""
        while self._next_of_device < len(self._for_device):
            number = self._for_device[self._next_of_device]
            self._next_of_device += 1
            # What only the device may take, the host passes over.
            if number >= self._next_of_host or number in self._not_for_host:
                self._not_for_host.add(number)
                return self._chunks[number]
        return None

    def most_of_device(self) -> int:
        """How many chunks the device can still be given, where the host takes none of them before."""
        return len(self._for_device) - self._next_of_device

    def give_to_host(self) -> None:
        """Leave everything to the host, before either has taken anything."""
        self._for_device = []
        self._not_for_host.clear()


def _share(chunks: Sequence[Chunk], possible: Sequence[int], device_share: float) -> Iterator[int]:
    """Those of the possible ones, from the back, that are a share of all elements, as nearly as whole chunks allow."""
    left = device_share * sum(chunk.elements for chunk in chunks)
    for number in possible:
        if chunks[number].elements / 2 > left:
            return
        left -= chunks[number].elements
        yield number
