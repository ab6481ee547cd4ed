"""Checksums taken when bytes leave memory and compared when they come back.

DeepSpeed's aio op reports no errors (``csrc/aio/common/deepspeed_aio_common.cpp`` never reads the result of a
completion), so a dropped or short block is seen here or nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash

from ds_tba.autograd.tensors import host_view
from ds_tba.storage.integrity import DeviceChecksum

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
