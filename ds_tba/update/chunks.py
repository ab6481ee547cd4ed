"""Which part of the update goes to the host and which to the device: pure arithmetic.

DeepSpeed's CPUAdam in slices of a multiple of 128 elements gives the bits of one call for all of them
(``csrc/adam/cpu_adam_impl.cpp``: ``Step_8`` works on eight registers of up to 16 elements). What is left over at the
end of a sub-group goes through code that rounds in another way, so it is never cut and always the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

SLICE_ELEMENTS = 128


@dataclass(frozen=True, slots=True)
class Chunk:
    """The elements from ``start`` to ``stop`` of a sub-group, both multiples of :data:`SLICE_ELEMENTS`."""

    sub_group: int
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """How many there are."""
        return self.stop - self.start


def tail_start(elements: int) -> int:
    """Where the ragged end of a sub-group begins."""
    return elements - elements % SLICE_ELEMENTS


def chunks_of(sub_groups: Sequence[int], chunk_elements: int) -> list[Chunk]:
    """All sub-groups without their ragged ends, in order, cut into chunks.

    Args:
        sub_groups: the number of elements of each.
        chunk_elements: of each chunk but the last ones of sub-groups; rounded down to whole slices.
    """
    step = max(chunk_elements // SLICE_ELEMENTS, 1) * SLICE_ELEMENTS
    return [
        Chunk(sub_group, start, min(start + step, tail_start(elements)))
        for sub_group, elements in enumerate(sub_groups)
        for start in range(0, tail_start(elements), step)
    ]


class Split:
    """Hands out the chunks of one step: to the host from the front, to the device from the back.

    Whoever is faster takes more. Both compute the same bits, so that the place where they meet changes nothing.

    Args:
        chunks: in the order of the sub-groups.
        device_share: the part of all elements that is the device's, rounded to whole chunks; None lets them meet.
        may_go: whether a chunk may go to the device. The first one from the back that may not ends the device's part.
        reserved: so many chunks at the end are the device's in any case, where they may go there.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        device_share: float | None,
        may_go: Callable[[Chunk], bool] = lambda _: True,
        reserved: int = 0,
    ) -> None:
        self._chunks = chunks
        self._next_of_host = 0
        self._end = len(chunks)
        possible = _first(chunks, 0.0, may_go)
        reserved_from = max(len(chunks) - reserved, possible)
        if device_share is None:
            self._first_of_device, self._host_end = possible, reserved_from
        else:
            wanted = _first(chunks, 1 - device_share, may_go)
            self._first_of_device = self._host_end = min(wanted, reserved_from)

    def for_host(self) -> Chunk | None:
        """The host's next chunk; None where there is none."""
        if self._next_of_host >= min(self._host_end, self._end):
            return None
        self._next_of_host += 1
        return self._chunks[self._next_of_host - 1]

    def for_device(self) -> Chunk | None:
        """The device's next chunk; None where there is none."""
        if self._end <= max(self._first_of_device, self._next_of_host):
            return None
        self._end -= 1
        return self._chunks[self._end]

    def first_of_device(self, count: int) -> list[Chunk]:
        """The chunks that the device would take first, at most so many."""
        first = max(self._first_of_device, self._end - count)
        return list(reversed(self._chunks[first : self._end]))

    def give_to_host(self) -> None:
        """Leave to the host all that the device has not taken yet."""
        self._first_of_device = self._host_end = self._end


def _first(chunks: Sequence[Chunk], host_share: float, may_go: Callable[[Chunk], bool]) -> int:
    """The first chunk that may go to the device."""
    host_elements = host_share * sum(chunk.elements for chunk in chunks)
    first, before = len(chunks), sum(chunk.elements for chunk in chunks)
    for number in reversed(range(len(chunks))):
        before -= chunks[number].elements
        # Half of a chunk beyond the share is too much.
        if before + chunks[number].elements / 2 < host_elements or not may_go(chunks[number]):
            break
        first = number
    return first
