"""Checksums taken when bytes leave memory and compared when they come back.

DeepSpeed's aio op reports no errors (``csrc/aio/common/deepspeed_aio_common.cpp`` never reads the result of a
completion), so a dropped or short block is seen here or nowhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ds_tba.tensors import host_view

SAMPLE_BYTES = 4096


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
        mode: ``off``, ``sampled`` (the first and the last 4 KiB of every I/O block) or ``full``.
        blocks: how the backend splits a transfer of so many bytes; one block may be lost without the others.
    """

    def __init__(self, mode: str, blocks: Callable[[int], list[tuple[int, int]]]) -> None:
        self.mode = mode
        self._blocks = blocks

    def digest(self, data: torch.Tensor) -> tuple[int, ...]:
        """CRC-32 of every sample of ``data`` (uint8, 1-D, on the host)."""
        view = host_view(data)
        return tuple(zlib.crc32(view[start:end]) for start, end in self._samples(len(view)))

    def compare(self, data: torch.Tensor, expected: tuple[int, ...]) -> Mismatch | None:
        """The first sample of ``data`` that differs from the digest taken at write, or None."""
        view = host_view(data)
        for (start, end), wanted in zip(self._samples(len(view)), expected, strict=True):
            found = zlib.crc32(view[start:end])
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
