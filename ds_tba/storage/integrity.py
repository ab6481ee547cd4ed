"""Checksums of memory that the host does not see: computed where it lies, in one small copy back.

Knows tensors of any device and pages of 4 KiB; does not know files or tickets. [Note: What it finds] Every 64-bit word
of a page goes through ``_mix(word + its place)``, which is one-to-one and spreads each bit over all others; the sums
over a page, then over the pages of a sample, wrap around. So one changed word always changes the checksum, and changes
of many words (swapped, zeroed, stale) pass unseen with the odds of a random 64-bit number, about 5e-20. A plain
weighted sum would not do: two words that differ in their top bit only, as numbers of opposite sign do, cancel out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from ds_tba.device.memory import PAGE_BYTES

WORDS_PER_PAGE = PAGE_BYTES // 8
PAGES_PER_CHUNK = (4 << 20) // PAGE_BYTES  # bounds the working memory of each lane to about three times 4 MiB
PLANS_KEPT = 16

Samples = Sequence[tuple[int, int]]


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


# The constants of SplitMix64's step and of MurmurHash3's 64-bit finalizer.
_PLACE = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xFF51AFD7ED558CCD)
_SECOND = _signed(0xC4CEB9FE1A85EC53)
_ALL_BITS = (1 << 64) - 1
_SHIFT = 33
_SHIFTED = (1 << (64 - _SHIFT)) - 1  # torch shifts int64 with its sign


class _Plan:
    """Which pages the samples of a transfer consist of.

    Attributes:
        pages: indexes of the pages to read, in order.
        places: for each, its place in its sample, as :func:`_places` gives it.
        owners: for each, the index of its sample.
    """

    __slots__ = ("owners", "pages", "places")

    def __init__(self, samples: Samples, device: torch.device) -> None:
        ranges = [range(start // PAGE_BYTES, -(-end // PAGE_BYTES)) for start, end in samples]
        lengths = torch.tensor([len(one) for one in ranges], device="cpu")
        self.pages = torch.cat([torch.arange(one.start, one.stop, device="cpu") for one in ranges]).to(device)
        self.owners = torch.repeat_interleave(torch.arange(len(ranges), device="cpu"), lengths).to(device)
        self.places = torch.cat([_places(len(one)) for one in ranges]).to(device)


class DeviceChecksum:
    """Checksums on the device of the tensor, with what they need there kept for the sizes used last."""

    def __init__(self) -> None:
        self._plans: OrderedDict[tuple[torch.device, tuple[tuple[int, int], ...]], _Plan] = OrderedDict()
        self._words: dict[torch.device, torch.Tensor] = {}

    def digest(self, data: torch.Tensor, samples: Samples) -> tuple[int, ...]:
        """One 64-bit number for each sample; blocks until the device has computed them.

        Args:
            data: uint8, 1-D, 8-byte aligned, a multiple of 4096 bytes long.
            samples: (start, end) in bytes; each is widened to whole pages.
        """
        if not samples:
            return ()
        plan = self._plan(data.device, tuple(samples))
        words = data.view(torch.int64).view(-1, WORDS_PER_PAGE)
        places = self._words_of(data.device)
        sums = torch.cat(
            [
                _mix(words.index_select(0, pages).add_(places)).sum(1)
                for pages in torch.split(plan.pages, PAGES_PER_CHUNK)
            ]
        )
        digests = sums.new_zeros(len(samples)).index_add_(0, plan.owners, _mix(sums.add_(plan.places)))
        return tuple(digest & _ALL_BITS for digest in digests.tolist())

    def _plan(self, device: torch.device, samples: tuple[tuple[int, int], ...]) -> _Plan:
        # Lanes may come here at once: each step is atomic, and the worst that happens is a plan that is made twice.
        key = (device, samples)
        plan = self._plans.pop(key, None) or _Plan(samples, device)
        self._plans[key] = plan
        while len(self._plans) > PLANS_KEPT:
            self._plans.popitem(last=False)
        return plan

    def _words_of(self, device: torch.device) -> torch.Tensor:
        places = self._words.get(device)
        if places is None:
            places = self._words[device] = _places(WORDS_PER_PAGE).to(device)
        return places


def _places(count: int) -> torch.Tensor:
    """A number for each of ``count`` places, unlike in all their bits."""
    return torch.arange(1, count + 1, device="cpu") * _PLACE


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Change each word, in place and one-to-one, so that every bit depends on all bits."""
    for factor in (_FIRST, _SECOND):
        words ^= (words >> _SHIFT).bitwise_and_(_SHIFTED)
        words *= factor
    words ^= (words >> _SHIFT).bitwise_and_(_SHIFTED)
    return words
