"""A drive that is slower than the one that is there, and as slow as you like at any time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch

from ds_tba.storage.backends import IoBackend, IoHandle, PosixBackend
from ds_tba.storage.tiers import Selection


class _Channel:
    """One kind of transfers, for which all lanes together get ``bytes_per_s``."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._lock = threading.Lock()
        self._free_s = 0.0

    def move(self, call: Callable[[torch.Tensor, int], None], data: torch.Tensor, offset: int) -> None:
        rate, until_s = self.bytes_per_s, 0.0
        if rate is not None:
            with self._lock:
                self._free_s = until_s = max(time.perf_counter(), self._free_s) + data.numel() / rate
        call(data, offset)
        time.sleep(max(0.0, until_s - time.perf_counter()))


class ThrottledBackend(PosixBackend):
    """posix whose lanes sleep as long as a drive of that rate each way would take; None is the drive's own."""

    name = "throttled"

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._writes, self._reads = _Channel(), _Channel()
        self.throttle(bytes_per_s, bytes_per_s)

    def throttle(self, write_bytes_per_s: float | None, read_bytes_per_s: float | None) -> None:
        """Set the rates from the next transfer on; None is the drive's own."""
        self._writes.bytes_per_s, self._reads.bytes_per_s = write_bytes_per_s, read_bytes_per_s

    def open_handle(self, fd: int) -> IoHandle:
        return _ThrottledHandle(super().open_handle(fd), self._writes, self._reads)


class _ThrottledHandle(IoHandle):
    def __init__(self, inner: IoHandle, writes: _Channel, reads: _Channel) -> None:
        self._inner, self._writes, self._reads = inner, writes, reads

    def write(self, data: torch.Tensor, offset: int) -> None:
        self._writes.move(self._inner.write, data, offset)

    def read(self, data: torch.Tensor, offset: int) -> None:
        self._reads.move(self._inner.read, data, offset)


def opened(drive: IoBackend | None) -> AbstractContextManager[Any]:
    """Have offloaders that are built inside write and read with this backend; None is the machine's own."""
    if drive is None:
        return nullcontext()
    return mock.patch("ds_tba.storage.tiers.select_backend", lambda *_, **__: Selection(drive, "the benchmark's"))
