"""Are the bytes that came back those that left? Checksums taken at the write and compared after the read.

DeepSpeed's aio op reports no errors (``csrc/aio/common/deepspeed_aio_common.cpp`` never reads the result of a
completion), so a dropped or short block is seen here or nowhere.

[Note: What sampling finds] An I/O block is what a backend may lose without the others: 1 MiB, or as
``IoBackend.blocks`` says. Its first and its last 4 KiB are sampled. That finds a block that was not moved, one whose
beginning or end was not, and one that has other bytes throughout. Below the backend the kernel splits requests again
(``max_sectors_kb``, ``chunk_sectors``, the stripes of a RAID), and a drive has pages of its own. What is lost there in
the middle of a block is found by ``full`` only: no sampling covers units of 4 KiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter

import torch
import xxhash

from ds_tba.device.memory import PAGE_BYTES, host_view

SAMPLE_BYTES = PAGE_BYTES
GATHER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first differing sample of a transfer, offsets relative to its start."""

    offset: int
    nbytes: int
    expected: int
    found: int


class Integrity:
    """XXH3 checksums by mode.

    Args:
        mode: ``off``, ``sampled`` (the first and the last 4 KiB of every I/O block; see [Note: What sampling finds]) or
            ``full``.
        blocks: how the backend splits a transfer of so many bytes; one block may be lost without the others.
        on_device: staging is device memory, so the samples are copied to the host first.
    """

    def __init__(self, mode: str, blocks: Callable[[int], list[tuple[int, int]]], *, on_device: bool = False) -> None:
        self.mode = mode
        self._blocks = blocks
        self._on_device = on_device

    def digest(self, data: torch.Tensor) -> tuple[int, ...]:
        """Return a 64-bit checksum of every sample of ``data`` (uint8, 1-D, where staging is).

        Blocks until the copies to the host are done, if staging is device memory. They are queued on the calling
        thread's current stream, which must not be the one of the training thread: see ``StagingRing.lane_stream``.
        """
        samples = self._samples(data.numel())
        if self._on_device:
            return tuple(xxhash.xxh3_64_intdigest(host_view(sample)) for sample in _copies_on_host(data, samples))
        view = host_view(data)
        return tuple(xxhash.xxh3_64_intdigest(view[start:end]) for start, end in samples)

    def compare(self, data: torch.Tensor, expected: tuple[int, ...]) -> Mismatch | None:
        """Return the first sample of ``data`` that differs from the digest taken at write, or None."""
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


def _copies_on_host(data: torch.Tensor, samples: Sequence[tuple[int, int]]) -> Iterator[torch.Tensor]:
    """Yield each sample of device memory, in host memory.

    The samples are gathered on the device first, so that one copy brings them all instead of one synchronizing copy
    for each. Gathering takes device and host memory of ``GATHER_BYTES`` and at most one sample more.
    """
    lengths = [end - start for start, end in samples]
    chunks = (total // GATHER_BYTES for total in accumulate(lengths))
    for _, chunk in groupby(zip(chunks, samples, strict=True), key=itemgetter(0)):
        parts = [data[start:end] for _, (start, end) in chunk]
        try:
            gathered = parts[0] if len(parts) == 1 else torch.cat(parts)
        except torch.OutOfMemoryError:
            yield from (part.cpu() for part in parts)  # which takes no device memory
            continue
        yield from torch.split(gathered.cpu(), [part.numel() for part in parts])
