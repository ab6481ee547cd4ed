"""Moves parts between staging and a file, and tells whether the bytes that came back are those that left.

Checksums are taken at the write and compared after the read. A codec packs the pieces of a part, where there is one: in
host memory; there is none that compresses on a device, before the copy to the host.

DeepSpeed's aio op reports no errors (``csrc/aio/common/deepspeed_aio_common.cpp`` never reads the result of a
completion), so a dropped or short block is seen here or nowhere.

[Note: What sampling finds] An I/O block is what a backend may lose without the others, ``IoBackend.block_bytes``
long. Its first and its last 4 KiB are sampled. That finds a block that was not moved, one whose
beginning or end was not, and one that has other bytes throughout. Below the backend the kernel splits requests again
(``max_sectors_kb``, ``chunk_sectors``, the stripes of a RAID), and a drive has pages of its own. What is lost there in
the middle of a block is found by ``full`` only: no sampling covers units of 4 KiB.

[Note: Compression] A lane compresses a piece of the staging slot into a buffer of its own, which is a part of staging,
and writes what it came to, padded to the alignment; a piece that does not become smaller by an eighth is written as it
is. Checksums cover what is on the drive, and how long a piece is there is known to its part only, so that a torn or
stale piece is found as without a codec. Extents are as long as the bytes, whatever comes of them.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import xxhash

from ds_tba.config import CODEC_PACKAGE
from ds_tba.device.accelerator import PAGE_BYTES, host_view
from ds_tba.errors import (
    ActivationCorruptionError,
    ActivationLostError,
    BackendUnavailableError,
    StorageError,
    TransferError,
)
from ds_tba.storage.backends import IoHandle
from ds_tba.storage.base import padded

logger = logging.getLogger(__name__)

SAMPLE_BYTES = PAGE_BYTES
LEAST_GAIN = 1 / 8  # of a piece's bytes; with less, the time of reading it back is not worth it
# Names in blosc2: a compressor, the filter before it (which sorts bytes or bits by their significance), and its level.
_BLOSC = {"lz4": ("LZ4", "BITSHUFFLE", 5), "zstd": ("ZSTD", "SHUFFLE", 1)}


class Integrity:
    """XXH3 checksums by mode."""

    def __init__(self, mode: str, block_bytes: int, *, on_device: bool = False) -> None:
        # ``off``, ``full`` or ``sampled`` (the first and last 4 KiB of each I/O block): [Note: What sampling finds].
        self._mode = mode
        self._block_bytes = block_bytes  # of the blocks of a transfer, of which one may be lost without the others
        self._on_device = on_device  # staging is device memory, so the samples are copied to the host first

    def digest(self, data: torch.Tensor) -> tuple[int, ...]:
        """Return a 64-bit checksum of every sample of ``data`` (uint8, 1-D, where staging is).

        Blocks until the copies to the host are done, if staging is device memory. They are queued on the calling
        thread's current stream, which must not be the one of the training thread: a lane has its own.
        """
        samples = self._samples(data.numel())
        if self._on_device:
            return tuple(xxhash.xxh3_64_intdigest(host_view(sample)) for sample in _copies_on_host(data, samples))
        view = host_view(data)
        return tuple(xxhash.xxh3_64_intdigest(view[start:end]) for start, end in samples)

    def difference(self, data: torch.Tensor, expected: tuple[int, ...], offset: int) -> str:
        """Tell of the first sample of ``data`` that differs from the digest taken at the write; empty if none does.

        Args:
            offset: of ``data`` in its file.
        """
        samples = self._samples(data.numel())
        for (start, end), found, wanted in zip(samples, self.digest(data), expected, strict=True):
            if found != wanted:
                where = f"{end - start} bytes at file offset {offset + start}"
                return f"{where} have checksum {found:#018x}, expected {wanted:#018x}"
        return ""

    def _samples(self, nbytes: int) -> list[tuple[int, int]]:
        if self._mode == "off":
            return []
        samples = []
        for start in range(0, nbytes, self._block_bytes):
            end = min(start + self._block_bytes, nbytes)
            if self._mode == "full" or end - start <= 2 * SAMPLE_BYTES:
                samples.append((start, end))
            else:
                samples += [(start, start + SAMPLE_BYTES), (end - SAMPLE_BYTES, end)]
        return samples


def _copies_on_host(data: torch.Tensor, samples: Sequence[tuple[int, int]]) -> Iterable[torch.Tensor]:
    """Return each sample of device memory, in host memory.

    Short samples are gathered on the device first, so that one copy brings them all instead of one synchronizing copy
    for each.
    """
    parts = [data[start:end] for start, end in samples]
    lengths = [part.numel() for part in parts]
    if parts and max(lengths) <= 2 * SAMPLE_BYTES:
        with suppress(torch.OutOfMemoryError):  # then as below, which takes no device memory
            return torch.split(torch.cat(parts).cpu(), lengths)
    return (part.cpu() for part in parts)


class Codec:
    """Compresses without loss, by blosc2 in the calling thread. Any lane may call it at any time.

    blosc2 raises a RuntimeError where it has no memory for a context or, given bytes that are whole, for compressing
    them; it does not tell which. So each is taken for memory that ran out. A ValueError says that bytes could not be
    decompressed, for whatever reason.

    Raises:
        BackendUnavailableError: the package is missing.
    """

    def __init__(self, name: str) -> None:
        self.name = name  # as in ``io.compression``
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


class Piece(NamedTuple):
    """Bytes of a part that are one transfer."""

    start: int  # in the part
    nbytes: int
    offset: int  # in the file, of what is stored for them
    stored_bytes: int  # length of that in the file
    packed_bytes: int = 0  # length of what a codec made of them; 0 where they are stored as they are
    checksums: tuple[int, ...] = ()  # of what is stored

    def within(self, part: torch.Tensor) -> torch.Tensor:
        """Return the place of the bytes in the memory of their part."""
        return part if self.nbytes == part.numel() else part[self.start : self.start + self.nbytes]


class PieceIo:
    """Moves parts between staging and a file, for the lanes."""

    def __init__(self, integrity: Integrity, codec: Codec | None = None) -> None:
        self.integrity = integrity
        self.codec = codec
        # The buffer in staging that the lane of each handle has for itself; none without a codec.
        self.buffers: dict[IoHandle, torch.Tensor] = {}

    def write(self, handle: IoHandle, staged: torch.Tensor, offset: int, item_bytes: int) -> tuple[Piece, ...]:
        """Write the bytes of a part from a file's ``offset`` on; return where they are.

        Raises:
            TransferError: the drive or the codec failed.
        """
        if self.codec is None:
            return (self._write_piece(handle, staged, Piece(0, staged.numel(), offset, staged.numel())),)
        pieces: list[Piece] = []
        buffer = self.buffers[handle]
        for start in range(0, staged.numel(), buffer.numel()):
            data = staged[start : start + buffer.numel()]
            packed_bytes = self.codec.compress(data, buffer, item_bytes)
            stored = buffer[: padded(packed_bytes)]
            if packed_bytes and stored.numel() <= (1 - LEAST_GAIN) * data.numel():
                stored[packed_bytes:].zero_()  # else bytes of the piece before would go to the drive
            else:
                stored, packed_bytes = data, 0
            piece = Piece(start, data.numel(), offset, stored.numel(), packed_bytes)
            pieces.append(self._write_piece(handle, stored, piece))
            offset += stored.numel()
        return tuple(pieces)

    def read_all(
        self, handle: IoHandle, pieces: Sequence[Piece], part: torch.Tensor, where: str, *, is_staging: bool = True
    ) -> StorageError | None:
        """Read the pieces of a part into its memory; return the error for which its bytes must not be used, if any.

        A piece that failed to come, or came wrong, is read once more: DeepSpeed's op tells no error of it.

        Args:
            where: the place of the part, for the error.
            is_staging: its memory is in the ring.
        """
        for piece in pieces:
            problem, failure = self._read(handle, piece, part, plainly=not is_staging)
            if problem:
                what = problem if failure is not None else "bytes read back are not the bytes written"
                logger.warning("%s: %s; trying once more", where, what)
                problem, failure = self._read(handle, piece, part, plainly=True)
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

    def _read(
        self, handle: IoHandle, piece: Piece, part: torch.Tensor, *, plainly: bool
    ) -> tuple[str, Exception | None]:
        """Read a piece; return what is wrong with the bytes, or nothing, and why they did not come."""
        target, is_packed = piece.within(part), piece.packed_bytes > 0
        stored = self.buffers[handle][: piece.stored_bytes] if is_packed else target
        try:
            (handle.read_plainly if plainly else handle.read)(stored, piece.offset)
            problem = self.integrity.difference(stored, piece.checksums, piece.offset)
            if is_packed and self.codec is not None and not problem:
                try:
                    self.codec.decompress(stored[: piece.packed_bytes], target)
                except TransferError as error:  # of bytes in which a checksum that samples has missed something
                    problem = str(error)
        except Exception as error:  # noqa: BLE001 - of the drive, of a library, or of memory: backward raises it
            return str(error) or type(error).__name__, error
        return problem, None

    def _write_piece(self, handle: IoHandle, stored: torch.Tensor, piece: Piece) -> Piece:
        checksums = self.integrity.digest(stored)
        handle.write(stored, piece.offset)
        return piece._replace(checksums=checksums)
