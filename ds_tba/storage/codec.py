"""Compresses saved tensors without loss on their way to the drive.

[Note: Compression] A lane compresses a piece of the staging slot into a buffer of its own, which is a part of staging,
and writes what it came to, padded to the alignment; a piece that does not become smaller by an eighth is written as it
is. Checksums cover what is on the drive, and how long a piece is there is known to its part only, so that a torn or
stale piece is found as without a codec. Extents are as long as the bytes, whatever comes of them.

A codec sees host memory; there is none that compresses on a device, before the copy to the host.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ds_tba.config import CODEC_PACKAGE
from ds_tba.device.memory import host_view
from ds_tba.errors import BackendUnavailableError, TransferError

# Names in blosc2: a compressor, the filter before it (which sorts bytes or bits by their significance), and its level.
_BLOSC = {"lz4": ("LZ4", "BITSHUFFLE", 5), "zstd": ("ZSTD", "SHUFFLE", 1)}


class Codec:
    """Compresses without loss, by blosc2 in the calling thread. Any lane may call it at any time.

    blosc2 raises a RuntimeError where it has no memory for a context or, given bytes that are whole, for compressing
    them; it does not tell which. So each is taken for memory that ran out. A ValueError says that bytes could not be
    decompressed, for whatever reason.

    Attributes:
        name: as in ``io.compression``.

    Raises:
        BackendUnavailableError: the package is missing.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            blosc2: Any = importlib.import_module(CODEC_PACKAGE)
        except ImportError as error:
            raise BackendUnavailableError(
                f'io.compression "{name}" needs the package {CODEC_PACKAGE}, which cannot be imported ({error}): '
                'pip install "ds_tba[compression]", or leave io.compression out.'
            ) from error
        blosc2.set_releasegil(True)  # for all of the process; else a lane would stop the training thread
        compressor, sorts, level = _BLOSC[name]
        self._blosc2 = blosc2
        self._parameters = {
            "codec": getattr(blosc2.Codec, compressor),
            "clevel": level,
            "filters": [getattr(blosc2.Filter, sorts)],
            "filters_meta": [0],
            "nthreads": 1,
        }

    def compress(self, data: torch.Tensor, into: torch.Tensor, item_bytes: int) -> int:
        """Compress ``data`` (uint8, 1-D, host memory) into the first bytes of ``into``.

        Args:
            item_bytes: length of an element; a wrong one costs compression only.

        Returns:
            The length of what it came to; 0 where that does not fit.

        Raises:
            TransferError: it failed.
            MemoryError: for want of memory.
        """
        try:
            packed = self._blosc2.compress2(host_view(data), typesize=item_bytes, **self._parameters)
        except (RuntimeError, ValueError) as error:
            raise self._failure("compress", data.numel(), error) from error
        if len(packed) > into.numel():
            return 0
        host_view(into)[: len(packed)] = packed
        return len(packed)

    def decompress(self, packed: torch.Tensor, into: torch.Tensor) -> None:
        """Fill ``into`` with the bytes of which ``packed`` was made.

        Raises:
            TransferError: ``packed`` was not made of so many bytes.
            MemoryError: there is none for a context.
        """
        view = host_view(packed)
        try:
            nbytes, packed_bytes, _ = self._blosc2.get_cbuffer_sizes(view)
            is_ours = (nbytes, packed_bytes) == (into.numel(), packed.numel())
            if is_ours:  # else blosc2, which believes the length that stands in the bytes, would write beyond ``into``
                self._blosc2.decompress2(view, dst=host_view(into), nthreads=1)
        except (RuntimeError, ValueError) as error:
            raise self._failure("decompress", packed.numel(), error) from error
        if not is_ours:
            raise self._failure("decompress", packed.numel(), f"they tell of {packed_bytes}, made of {nbytes}")

    def _failure(self, verb: str, nbytes: int, why: Exception | str) -> Exception:
        text = f"{self.name} cannot {verb} {nbytes} bytes ({why})"
        return MemoryError(text) if isinstance(why, RuntimeError) else TransferError(text)
