"""How do the bytes of a part reach the drive and come back? In blocks with checksums, and through a codec where one is.

[Note: Compression] A lane compresses a block of the staging slot into a buffer of its own, which is a part of staging,
and writes what it came to, padded to the alignment; a block that does not become smaller by an eighth is written as it
is. Checksums cover what is on the drive, and how long a block is there is known to its part only, so that a torn or
stale block is found as without a codec. Extents are as long as the bytes, whatever comes of them.

A codec sees host memory; there is none that compresses on a device, before the copy to the host.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

from ds_tba.config import CODEC_PACKAGE
from ds_tba.device.memory import host_view
from ds_tba.errors import (
    ActivationCorruptionError,
    ActivationLostError,
    BackendUnavailableError,
    StorageError,
    TransferError,
)
from ds_tba.storage.backends.base import IoHandle
from ds_tba.storage.integrity import Integrity
from ds_tba.storage.spans import Block, Span
from ds_tba.storage.staging import StagingRing

logger = logging.getLogger(__name__)

LEAST_GAIN = 1 / 8  # of a block's bytes; with less, the time of reading it back is not worth it


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


class BlockIo:
    """Moves parts between staging and a file, for the lanes.

    Args:
        integrity: takes and compares the checksums.
        ring: staging, with a buffer for each lane where there is a codec.
    """

    def __init__(self, integrity: Integrity, ring: StagingRing, codec: Codec | None = None) -> None:
        self.integrity = integrity
        self.codec = codec
        self._ring = ring
        self._buffers: dict[IoHandle, Span] = {}

    def give_buffers(self, lanes: Sequence[IoHandle]) -> None:
        """Give each lane, which has this handle, a buffer of its own, if the ring has such."""
        self._buffers = dict(zip(lanes, self._ring.buffers, strict=False))

    def write(self, handle: IoHandle, staged: torch.Tensor, offset: int, item_bytes: int) -> tuple[Block, ...]:
        """Write the bytes of a part from a file's ``offset`` on; return where they are.

        Raises:
            TransferError: the drive or the codec failed.
        """
        if self.codec is None:
            return (self._write_block(handle, staged, Block(0, staged.numel(), offset, staged.numel())),)
        blocks: list[Block] = []
        buffer = self._ring.view(self._buffers[handle])
        for start in range(0, staged.numel(), buffer.numel()):
            data = staged[start : start + buffer.numel()]
            stored, packed_bytes = self._pack(self.codec, data, buffer, item_bytes)
            block = Block(start, data.numel(), offset, stored.numel(), packed_bytes)
            blocks.append(self._write_block(handle, stored, block))
            offset += stored.numel()
        return tuple(blocks)

    def read_all(
        self, handle: IoHandle, blocks: Sequence[Block], part: torch.Tensor, where: str
    ) -> StorageError | None:
        """Read the blocks of a part into its memory; return the error for which its bytes must not be used, if any.

        A block that failed to come, or came wrong, is read once more: DeepSpeed's op tells no error of it.

        Args:
            where: the place of the part, for the error.
        """
        for block in blocks:
            problem, failure = self._try_to_read(handle, block, part)
            if problem:
                what = problem if failure is not None else "bytes read back are not the bytes written"
                logger.warning("%s: %s; trying once more", where, what)
                problem, failure = self._try_to_read(handle, block, part, again=True)
            if failure is not None:
                lost = ActivationLostError(
                    f"{where}: the activation cannot be read back ({problem}). Stop, check the drive (dmesg, "
                    "smartctl), and resume from the last checkpoint."
                )
                lost.__cause__ = failure
                return lost
            if problem:
                return ActivationCorruptionError(
                    f"{where}: bytes read back are not the bytes written: {problem}. A write was lost, short or stale: "
                    "check the drive (dmesg, smartctl), and resume from the last checkpoint."
                )
        return None

    def _try_to_read(
        self, handle: IoHandle, block: Block, part: torch.Tensor, *, again: bool = False
    ) -> tuple[str, Exception | None]:
        """Read a block; return what is wrong with the bytes, or nothing, and why they did not come."""
        try:
            return self.read(handle, block, part, again=again), None
        except Exception as error:  # noqa: BLE001 - of the drive, of a library, or of memory: backward raises it
            return str(error) or type(error).__name__, error

    def read(self, handle: IoHandle, block: Block, part: torch.Tensor, *, again: bool = False) -> str:
        """Read a block of a part whose memory is ``part``; return what is wrong with the bytes, or nothing.

        Args:
            again: they came wrong, or not at all.

        Raises:
            TransferError: the drive failed.
        """
        transfer = handle.read_again if again else handle.read
        target = block.within(part)
        if self.codec is None or not block.packed_bytes:
            transfer(target, block.offset)
            return self._difference(block, target)
        stored = self._ring.view(self._buffers[handle])[: block.stored_bytes]
        transfer(stored, block.offset)
        problem = self._difference(block, stored)
        if not problem:
            try:
                self.codec.decompress(stored[: block.packed_bytes], target)
            except TransferError as error:  # of bytes in which a checksum that samples has missed something
                problem = str(error)
        return problem

    def _pack(
        self, codec: Codec, data: torch.Tensor, buffer: torch.Tensor, item_bytes: int
    ) -> tuple[torch.Tensor, int]:
        """Return what to store of a block, and the length of what the codec made of it."""
        packed_bytes = codec.compress(data, buffer, item_bytes)
        stored_bytes = self._ring.slots.padded(packed_bytes)
        if not packed_bytes or stored_bytes > (1 - LEAST_GAIN) * data.numel():
            return data, 0
        buffer[packed_bytes:stored_bytes].zero_()  # else bytes of the block before would go to the drive
        return buffer[:stored_bytes], packed_bytes

    def _write_block(self, handle: IoHandle, stored: torch.Tensor, block: Block) -> Block:
        checksums = self.integrity.digest(stored)
        handle.write(stored, block.offset)
        return block._replace(checksums=checksums)

    def _difference(self, block: Block, stored: torch.Tensor) -> str:
        mismatch = self.integrity.compare(stored, block.checksums)
        if mismatch is None:
            return ""
        return (
            f"{mismatch.nbytes} bytes at file offset {block.offset + mismatch.offset} have checksum "
            f"{mismatch.found:#018x}, expected {mismatch.expected:#018x}"
        )
