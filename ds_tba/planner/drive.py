"""The drives of one rank as a replay sees them: one queue of writes, one of reads, each as fast as measured."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from ds_tba.planner.trace import Resources

NOBODY = -1

# The states of a storage's bytes, as far as a replay needs them (compare ds_tba/storage/base.py).
UNSEEN, QUEUED, WRITING, STORED, READ_QUEUED, READING, LOADED, FORWARDED = range(8)


class DriveQueues:
    """Writes and reads in progress. Several lanes share one rate, so that each queue is served one at a time.

    Args:
        resources: the rates.
        state: of each storage; changed here between QUEUED and STORED, and between READ_QUEUED and LOADED.
        nbytes: of each storage, as they count on the drive.
        on_written, on_read: called with the storage when its bytes are there; the former may make STORED another.
    """

    def __init__(
        self,
        resources: Resources,
        state: list[int],
        nbytes: list[int],
        on_written: Callable[[int], None],
        on_read: Callable[[int], None],
    ) -> None:
        self.now_s = 0.0
        self.writes_under_way = 0
        self._state = state
        self._nbytes = nbytes
        self._on_written = on_written
        self._on_read = on_read
        self._write_rate = resources.write_bytes_per_s
        self._read_rate = resources.read_bytes_per_s
        self._write_rate_beside = sum(path.write_beside_read_bytes_per_s for path in resources.paths)
        self._read_rate_beside = sum(path.read_beside_write_bytes_per_s for path in resources.paths)
        self._writes: deque[tuple[int, float]] = deque()
        self._reads: deque[int] = deque()
        self._urgent: deque[int] = deque()
        self._writing = self._reading = NOBODY
        self._ready_s = self._write_left = self._read_left = 0.0

    def write(self, storage: int, ready_s: float) -> None:
        """Queue a write whose bytes are in staging from ``ready_s`` on."""
        self._state[storage] = QUEUED
        self.writes_under_way += 1
        self._writes.append((storage, ready_s))

    def cancel_write(self, storage: int) -> None:
        """Take back a queued write."""
        self._state[storage] = FORWARDED
        self.writes_under_way -= 1

    def read(self, storage: int, *, urgent: bool) -> None:
        """Queue a read; an urgent one overtakes the others, also where it was queued before."""
        self._state[storage] = READ_QUEUED
        (self._urgent if urgent else self._reads).append(storage)

    def advance(self, until_s: float) -> None:
        """Move on to ``until_s``."""
        self._run(until_s, False, NOBODY)

    def advance_past_a_write(self) -> float:
        """Move on to the end of the next write, which there must be; the time."""
        self._run(math.inf, True, NOBODY)
        return self.now_s

    def advance_past_read(self, storage: int) -> float:
        """Move on to the end of a storage's read; the time."""
        self._run(math.inf, False, storage)
        return self.now_s

    def _take(self) -> bool:
        """Begin what can begin; whether anything is under way."""
        while self._writing == NOBODY and self._writes:
            storage, self._ready_s = self._writes.popleft()
            if self._state[storage] == QUEUED:
                self._state[storage] = WRITING
                self._writing = storage
                self._write_left = float(self._nbytes[storage])
        while self._reading == NOBODY and (self._urgent or self._reads):
            storage = (self._urgent or self._reads).popleft()
            if self._state[storage] == READ_QUEUED:
                self._state[storage] = READING
                self._reading = storage
                self._read_left = float(self._nbytes[storage])
        return self._writing != NOBODY or self._reading != NOBODY

    def _run(self, until_s: float, stop_at_write: bool, stop_at_read: int) -> None:
        while True:
            if not self._take():
                self.now_s = max(self.now_s, until_s)
                return
            now_s, end_s, ended = self.now_s, until_s, ""
            is_writing = self._writing != NOBODY and self._ready_s <= now_s
            is_reading = self._reading != NOBODY
            write_rate = self._write_rate_beside if is_reading else self._write_rate
            read_rate = self._read_rate_beside if is_writing else self._read_rate
            if is_writing:
                if now_s + self._write_left / write_rate <= end_s:
                    end_s, ended = now_s + self._write_left / write_rate, "write"
            elif self._writing != NOBODY and self._ready_s <= end_s:
                end_s, ended = self._ready_s, "copy"
            if is_reading and now_s + self._read_left / read_rate <= end_s:
                end_s, ended = now_s + self._read_left / read_rate, "read"
            if end_s > now_s:
                if is_writing:
                    self._write_left = max(0.0, self._write_left - (end_s - now_s) * write_rate)
                if is_reading:
                    self._read_left = max(0.0, self._read_left - (end_s - now_s) * read_rate)
                self.now_s = end_s
            if not ended:
                return
            if ended == "write":
                self._end_write()
                if stop_at_write:
                    return
            elif ended == "read" and self._end_read() == stop_at_read:
                return

    def _end_write(self) -> None:
        storage, self._writing = self._writing, NOBODY
        self.writes_under_way -= 1
        if self._state[storage] == WRITING:
            self._state[storage] = STORED
        self._on_written(storage)

    def _end_read(self) -> int:
        storage, self._reading = self._reading, NOBODY
        self._state[storage] = LOADED
        self._on_read(storage)
        return storage
