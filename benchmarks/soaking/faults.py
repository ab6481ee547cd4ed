"""Faults of a drive, injected into the handles of the backend that the offloader chose.

There are two kinds. The store must get over delays, write errors, and a read error that its second try does not see,
without a word to training. It must raise where bytes are gone: after a read that fails twice, and when it reads bytes
whose write was dropped, cut short or stale. Faults of the second kind are armed for one step, and the error is due as
soon as such bytes were read.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import ds_tba.storage.tiers
from ds_tba.device.accelerator import PAGE_BYTES, huge_page_memory
from ds_tba.errors import ActivationCorruptionError, ActivationLostError, StorageError, TransferError
from ds_tba.storage.backends import IoBackend, IoHandle
from ds_tba.storage.tiers import Selection

BAD_WRITES = ("dropped write", "short write", "stale write")
LOST_READ = "read error twice"
WRITE_ERRORS = {"write error EIO": errno.EIO, "write error ENOSPC": errno.ENOSPC}
KINDS = ("slow write", "slow read", *WRITE_ERRORS, "read error once", LOST_READ, *BAD_WRITES)
ARMED_FRACTION = 0.3


@dataclass(frozen=True)
class Rates:
    """Probabilities per transfer, and the longest delay."""

    slow_write: float = 0.0
    slow_read: float = 0.0
    write_error: float = 0.0
    read_error: float = 0.0
    delay_s: float = 0.0


class Injector:
    """Decides what goes wrong. Lanes ask at once, so that a seed fixes the odds and not the moments.

    Args:
        flip_reads: also change a bit of every so many-th read, for the test that this does not go unseen.
    """

    def __init__(self, seed: str, rates: Rates, flip_reads: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self.due: type[StorageError] | None = None
        self._seed, self._rates, self._flip_reads = seed, rates, flip_reads
        self._handles = self._reads = 0
        self.is_off = True
        self._armed = ""
        self._previous: torch.Tensor | None = None
        self._bad: dict[tuple[int, int], torch.Tensor] = {}
        self._lock = threading.Lock()

    def new_chance(self) -> random.Random:
        """Return the random numbers of one handle."""
        self._handles += 1
        return random.Random(f"{self._seed}/{self._handles}")

    def arm(self, kind: str) -> None:
        """Let some transfers lose bytes from here on; ``""`` ends that, and nothing is due."""
        with self._lock:
            self._armed, self.due, self._previous = kind, None, None
            self._bad.clear()

    def before_write(self, chance: random.Random, fd: int, data: torch.Tensor, offset: int) -> tuple[str, Any]:
        """Return what happens to a write, and the bytes that are written instead, if any."""
        with self._lock:
            for at, intended in list(self._bad.items()):
                if at[0] == fd and at[1] < offset + data.numel() and offset < at[1] + intended.numel():
                    del self._bad[at]
            kind, instead = self._write_kind(chance), None
            if kind == "stale write":
                instead = _repeated(self._previous, data.numel())
            if self._armed == "stale write":
                self._previous = data.clone()
            if kind in BAD_WRITES:
                self._bad[fd, offset] = data.clone()
            self.counts[kind] += 1
        return kind, instead

    def before_read(self, chance: random.Random) -> str:
        """Return what happens to a read."""
        rates, roll = self._rates, chance.random()
        kind = "slow read" if roll < rates.read_error + rates.slow_read else ""
        if self._armed == LOST_READ and chance.random() < ARMED_FRACTION:
            kind = LOST_READ
        elif roll < rates.read_error:
            kind = "read error once"
        with self._lock:
            self.counts[kind] += 1
        return kind

    def after_read(self, fd: int, data: torch.Tensor, offset: int) -> None:
        """Compare bytes that were read with those that were meant, and owe an error where they differ."""
        with self._lock:
            intended = self._bad.get((fd, offset))
            self._reads += 1
            flip = self._flip_reads and self._reads % self._flip_reads == 0
        if intended is not None and not torch.equal(intended, data):
            self.owe(ActivationCorruptionError)
        if flip:
            data[data.numel() // 2 + 2] ^= 0x40  # of a float32 the greatest bit of the mantissa

    def owe(self, error: type[StorageError]) -> None:
        """Note that this error must come from now on."""
        with self._lock:
            self.due = error

    def nap(self, chance: random.Random) -> None:
        """Wait as a slow drive does."""
        time.sleep(chance.uniform(0, self._rates.delay_s))

    def _write_kind(self, chance: random.Random) -> str:
        rates, roll = self._rates, chance.random()
        if self._armed in BAD_WRITES and chance.random() < ARMED_FRACTION:
            return "" if self._armed == "stale write" and self._previous is None else self._armed
        if roll < rates.write_error:
            return chance.choice(list(WRITE_ERRORS))
        return "slow write" if roll < rates.write_error + rates.slow_write else ""


def _repeated(data: torch.Tensor | None, nbytes: int) -> torch.Tensor:
    """Return older bytes in place of newer ones, aligned for direct I/O."""
    stale = huge_page_memory(nbytes)
    if data is not None:
        stale.copy_(data.repeat(-(-nbytes // data.numel()))[:nbytes])
    return stale


class FaultyBackend(IoBackend):
    """A backend whose handles do what an injector says."""

    def __init__(self, inner: IoBackend, injector: Injector) -> None:
        self.name, self.block_bytes = inner.name, inner.block_bytes
        self._inner, self._injector = inner, injector

    def open_handle(self, fd: int) -> IoHandle:
        return _FaultyHandle(self._inner.open_handle(fd), fd, self._injector)

    def allocate_staging(self, nbytes: int) -> torch.Tensor:
        return self._inner.allocate_staging(nbytes)

    def free_staging(self, staging: torch.Tensor) -> None:
        self._inner.free_staging(staging)


class _FaultyHandle(IoHandle):
    def __init__(self, inner: IoHandle, fd: int, injector: Injector) -> None:
        self._inner, self._fd = inner, fd
        self._injector, self._chance = injector, injector.new_chance()
        self._trying_again = ""

    def write(self, data: torch.Tensor, offset: int) -> None:
        if self._injector.is_off:
            self._inner.write(data, offset)
            return
        kind, instead = self._injector.before_write(self._chance, self._fd, data, offset)
        if kind in WRITE_ERRORS:
            raise _error("write", data, WRITE_ERRORS[kind])
        if kind == "slow write":
            self._injector.nap(self._chance)
        if kind == "short write":
            data = data[: data.numel() // 2 // PAGE_BYTES * PAGE_BYTES]
        if kind != "dropped write" and data.numel():
            self._inner.write(data if instead is None else instead, offset)

    def read(self, data: torch.Tensor, offset: int) -> None:
        if self._injector.is_off:
            self._inner.read(data, offset)
            return
        first, self._trying_again = self._trying_again, ""
        if first == LOST_READ:
            self._injector.owe(ActivationLostError)
            raise _error("read", data, errno.EIO)
        kind = "" if first else self._injector.before_read(self._chance)
        if kind in ("read error once", LOST_READ):
            self._trying_again = kind
            raise _error("read", data, errno.EIO)
        if kind == "slow read":
            self._injector.nap(self._chance)
        self._inner.read(data, offset)
        self._injector.after_read(self._fd, data, offset)

    def read_plainly(self, data: torch.Tensor, offset: int) -> None:
        if self._trying_again:
            self.read(data, offset)
            return
        # After bytes that came wrong; an error now would be told instead of the corruption that is due.
        self._inner.read_plainly(data, offset)
        self._injector.after_read(self._fd, data, offset)

    def close(self) -> None:
        self._inner.close()


def _error(what: str, data: torch.Tensor, code: int) -> TransferError:
    return TransferError(f"{what} of {data.numel()} bytes failed: {os.strerror(code)}")


class Faults:
    """Wraps the backend of every offloader that is built inside.

    Attributes:
        injector: decides what goes wrong, for offloaders that are built from now on.
    """

    def __init__(self) -> None:
        self.injector = Injector("", Rates())
        self._select = ds_tba.storage.tiers.select_backend
        self._patch = mock.patch.object(ds_tba.storage.tiers, "select_backend", self._chosen)

    def __enter__(self) -> None:
        self._patch.start()

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    def _chosen(self, *args: Any, **kwargs: Any) -> Selection:
        chosen = self._select(*args, **kwargs)
        return Selection(FaultyBackend(chosen.backend, self.injector), chosen.reason)
