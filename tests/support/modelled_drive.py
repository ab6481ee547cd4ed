"""A drive of a given speed whose bytes are kept in memory, so that the machine's own drive decides nothing."""

from __future__ import annotations

import os
import threading
import weakref

from curves.throttled import ThrottledBackend

from ds_tba.storage.backends import IoHandle

LARGEST_BYTES = 1 << 40  # of a swap file; what is not written takes no memory


class ModelledDrive(ThrottledBackend):
    """Transfers take what the throttle says: a file in memory stands for each swap file, which stays unwritten."""

    name = "modelled"

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(bytes_per_s)
        self._lock = threading.Lock()
        self._files: dict[tuple[int, int], int] = {}  # descriptors, by the swap file's device and inode

    def open_handle(self, fd: int) -> IoHandle:
        status = os.fstat(fd)
        swap_file = status.st_dev, status.st_ino
        with self._lock:
            if swap_file not in self._files:
                in_memory = os.memfd_create("swap")
                os.ftruncate(in_memory, LARGEST_BYTES)
                weakref.finalize(self, os.close, in_memory)
                self._files[swap_file] = in_memory
            return super().open_handle(self._files[swap_file])
