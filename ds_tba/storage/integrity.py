"""Checksums taken when bytes leave memory and compared when they come back.

DeepSpeed's aio op reports no errors (``csrc/aio/common/deepspeed_aio_common.cpp`` never reads the result of a
completion), so a dropped or short block is seen here or nowhere.

[Note: What sampling finds] An I/O block is what a backend may lose without the others: 1 MiB, or as
``IoBackend.blocks`` says. Its first and its last 4 KiB are sampled. That finds a block that was not moved, one whose
beginning or end was not, and one that has other bytes throughout. Below the backend the kernel splits requests again
(``max_sectors_kb``, ``chunk_sectors``, the stripes of a RAID), and a drive has pages of its own. What is lost there in
the middle of a block is found by ``full`` only: no sampling covers units of 4 KiB.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import xxhash

from ds_tba.device.memory import PAGE_BYTES, host_view

SAMPLE_BYTES = PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first differing sample of a transfer, offsets relative to its start."""

    offset: int
    nbytes: int
    expected: int
    found: int


class Integrity:
    """Checksums by mode.

    Args:
        mode: ``off``, ``sampled`` (the first and the last 4 KiB of every I/O block; see [Note: What sampling finds]) or
            ``full``.
        blocks: how the backend splits a transfer of so many bytes; one block may be lost without the others.
        on_device: staging is device memory, so the checksums are computed there (:class:`DeviceChecksum`) instead of
            with XXH3 on the host. One store never mixes the two.
    """

    def __init__(self, mode: str, blocks: Callable[[int], list[tuple[int, int]]], *, on_device: bool = False) -> None:
        self.mode = mode
        self._blocks = blocks
        self._device = DeviceChecksum() if on_device else None

    def digest(self, data: torch.Tensor) -> tuple[int, ...]:
        """A 64-bit checksum of every sample of ``data`` (uint8, 1-D, where staging is)."""
        samples = self._samples(data.numel())
        if self._device is not None:
            return self._device.digest(data, samples)
        view = host_view(data)
        return tuple(xxhash.xxh3_64_intdigest(view[start:end]) for start, end in samples)

    def compare(self, data: torch.Tensor, expected: tuple[int, ...]) -> Mismatch | None:
        """The first sample of ``data`` that differs from the digest taken at write, or None."""
        samples = self._samples(data.numel())
        for (start, end), found, wanted in zip(samples, self.digest(data), expected, strict=True):
            if found != wanted:
                return Mismatch(start, end - start, wanted, found)
        return None

    def _samples(self, nbytes: int) -> list[tuple[int, int]]:
        if self.mode == "off":
            return []
        samples = []
        for start, end in self._blocks(nbytes):
            if self.mode == "full" or end - start <= 2 * SAMPLE_BYTES:
                samples.append((start, end))
            else:
                samples += [(start, start + SAMPLE_BYTES), (end - SAMPLE_BYTES, end)]
        return samples


# Checksums of memory that the host does not see: computed where it lies, in one small copy back.
#
# Knows tensors of any device and pages of 4 KiB; does not know files or tickets. [Note: What it finds] Every 64-bit
# word of a page goes through ``_mix(word + its place)``, which is one-to-one and spreads each bit over all others; the
# sums over a page, then over the pages of a sample, wrap around. So one changed word always changes the checksum, and
# changes of many words (swapped, zeroed, stale) pass unseen with the odds of a random 64-bit number, about 5e-20. A
# plain weighted sum would not do: two words that differ in their top bit only, as numbers of opposite sign do, cancel
# out.


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
