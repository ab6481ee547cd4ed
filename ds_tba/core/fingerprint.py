"""Tells whether a storage that is saved again still has the bytes that left when it was saved first.

Knows storages and an accelerator; does not know records, nor what follows from an answer.

[Note: Fingerprints] No version counter tells of a write through numpy, a raw kernel, a collective or ``.data``. So a
fingerprint is taken of the bytes that leave, and a further save of the same storage and version is compared with it.
What one operation of PyTorch has made, and none has changed in place, is complete before it is saved: ``SAMPLED_WORDS``
words of it show a kernel that writes over it. Any other storage is a buffer, which may be filled part by part between
two saves: all of its bytes count. A fingerprint of host memory is a number; that of device memory stays there, and is
compared there, late.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch
import xxhash

from ds_tba.core.tensors import storage_bytes
from ds_tba.device.accelerator import Accelerator, Event, PinnedAnswers, moment
from ds_tba.storage.finalizers import DeferredFinalizers

SAMPLED_WORDS = 128
_WORD_BYTES = 8
# A device folds so many words into one, and multiplies so many rows of them at a time (32 MiB).
_COLUMNS, _ROWS = 4096, 1024
# Odd factors with many bits, as signed numbers.
_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)


class Fingerprint(NamedTuple):
    """A fingerprint of the bytes of a storage; see [Note: Fingerprints].

    Attributes:
        is_whole: every byte counts.
        words: a number for host memory; a tensor (int64, 1-D) on the device for device memory.
    """

    is_whole: bool
    words: int | torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor, accelerator: Accelerator | None, *, is_whole: bool) -> Fingerprint:
        """Take the fingerprint of a tensor's storage, after the calling thread's current stream.

        Args:
            accelerator: of the device that has the memory; None where that is the host.
        """
        if accelerator is None:
            return cls(is_whole, _in_host_memory(tensor.untyped_storage(), is_whole=is_whole))
        words, tail = _split(storage_bytes(tensor))
        if is_whole:
            return cls(is_whole, _folded(words, tail))
        step = max(1, words.numel() // SAMPLED_WORDS)
        return cls(is_whole, torch.cat((words[step // 2 :: step], tail)))

    def compared(self, tensor: torch.Tensor, accelerator: Accelerator | None, answers: PinnedAnswers | None) -> Answer:
        """Compare with the bytes that a tensor's storage has now, after the calling thread's current stream.

        Args:
            answers: where the device writes its answer; None where the memory is the host's.
        """
        words, other = self.words, Fingerprint.of(tensor, accelerator, is_whole=self.is_whole).words
        if accelerator is None or answers is None or isinstance(words, int) or isinstance(other, int):
            return Answer(bool(words == other), None, None)
        host, differs = answers.take(), torch.ne(words, other).any().reshape(1)
        accelerator.copy(differs.view(torch.uint8), host.view(torch.uint8))
        return Answer(None, host, moment(accelerator))


class Answer(NamedTuple):
    """Whether two fingerprints are equal, which a device tells late.

    Attributes:
        known: the answer where no device has to give it; else None.
        differs: one flag in pinned memory, valid once ``done``.
        done: event of the device; None where it was done at once.
    """

    known: bool | None
    differs: torch.Tensor | None
    done: Event | None

    @property
    def is_done(self) -> bool:
        """True if it can be read without waiting for the device."""
        return self.done is None or bool(self.done.query())

    def read(self) -> bool:
        """Return whether they are equal. Waits for the device."""
        if self.differs is None:
            return bool(self.known)
        if self.done is not None:
            self.done.synchronize()  # or an earlier answer would be read from this memory
        return not self.differs.item()


class SavedAgain(Protocol):
    """A view of a storage whose bytes have left; it keeps its own until they are known to be the same."""

    def answered(self, *, is_equal: bool) -> None:
        """Act on the answer. Called under the cache's lock."""


class Doubts:
    """The views of storages that were saved again, which a device has yet to compare, in the order of their saves.

    Args:
        finalizers: have the lock under which an answer is acted on.
        accelerator: of the device; None where every answer is known at once.

    Attributes:
        answers: memory into which the device writes its answers; None without one.
        waiting: each view, not held, with the answer to come.
    """

    def __init__(self, finalizers: DeferredFinalizers[Any], accelerator: Accelerator | None) -> None:
        self._finalizers = finalizers
        self._accelerator = accelerator
        self.answers = None if accelerator is None else PinnedAnswers(accelerator, 1, torch.bool)
        self.waiting: deque[tuple[weakref.ref[SavedAgain], Answer]] = deque()

    def add(self, view: SavedAgain, answer: Answer) -> None:
        """Have a view wait for an answer. Call it under the lock."""
        self.waiting.append((weakref.ref(view), answer))  # not held, or a dropped graph would keep its bytes

    def read(self, *, wait: bool = False) -> None:
        """Act on what the device has answered; on everything, if that is to be waited for."""
        if self._accelerator is not None and self._accelerator.is_capturing():
            return  # no event may be asked for while a graph is being captured
        while self.waiting:
            with self._finalizers, self._finalizers.lock:
                if not self.waiting or not (wait or self.waiting[0][1].is_done):  # another thread may be first
                    return
                reference, answer = self.waiting.popleft()
            view, is_equal = reference(), answer.read()  # without the lock: it may wait for the device
            if view is not None:
                with self._finalizers, self._finalizers.lock:
                    view.answered(is_equal=is_equal)


def _in_host_memory(storage: torch.UntypedStorage, *, is_whole: bool) -> int:
    # Not through numpy, after which PyTorch refuses to resize the user's storage.
    address, nbytes = storage.data_ptr(), storage.nbytes()
    step = nbytes // _WORD_BYTES // SAMPLED_WORDS
    if is_whole or step < 2:
        return xxhash.xxh3_64_intdigest((ctypes.c_uint8 * nbytes).from_address(address))
    words = memoryview((ctypes.c_int64 * (nbytes // _WORD_BYTES)).from_address(address))
    return xxhash.xxh3_64_intdigest(words[step // 2 :: step].tobytes())


def _split(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the words of a storage, and the bytes behind the last of them, each as an int64 tensor."""
    end = data.numel() // _WORD_BYTES * _WORD_BYTES
    return data[:end].view(torch.int64), data[end:].to(torch.int64)


def _folded(words: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """Fold each column into one word, the sum of its words, each mixed with its row beforehand.

    Without the mixing, changes of several words could cancel in a sum: flipped signs, rows that trade places.
    """
    rows = words.numel() // _COLUMNS
    table, rest = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :]
    total = table.new_zeros(_COLUMNS)
    for first in range(0, rows, _ROWS):
        part = table[first : first + _ROWS]
        number = torch.arange(first, first + len(part), dtype=torch.int64, device=words.device)
        mixed = part ^ number.mul_(_ODD[0])[:, None]  # or rows that trade places would not be seen
        for factor in _ODD[1:]:  # as the finalizer of SplitMix64 does
            mixed.mul_(factor).bitwise_xor_(mixed >> 29)
        total += mixed.sum(0)
    return torch.cat((total, rest, tail))
