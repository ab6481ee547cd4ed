"""A lane: one thread with its own I/O handle, for writes or for reads of one swap file, never for both."""

from __future__ import annotations

import itertools
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ds_tba.storage.backends.base import IoHandle

URGENT = 0
AHEAD = 1
_STOP = 2


class Errand(ABC):
    """A task that is not of the everyday kind; to be inherited, since to tell a protocol costs microseconds a task."""

    @abstractmethod
    def run_in_lane(self, handle: IoHandle) -> None:
        """Do it; as ``work`` of :class:`Lane`, it handles its own errors."""


class LaneQueue:
    """Tasks in order of priority, then of arrival."""

    def __init__(self) -> None:
        self._queue: queue.PriorityQueue[tuple[int, int, Any]] = queue.PriorityQueue()
        self._arrivals = itertools.count()

    def put(self, task: Any, priority: int = AHEAD) -> None:
        """Add a task: ``URGENT`` for bytes that backward waits for, ``AHEAD`` for all else."""
        self._queue.put((priority, next(self._arrivals), task))

    def get(self) -> Any:
        """The next task; None when the lane is to stop."""
        return self._queue.get()[2]

    def stop(self, lanes: int) -> None:
        """Let ``lanes`` lanes stop once the tasks before are done."""
        for _ in range(lanes):
            self._queue.put((_STOP, next(self._arrivals), None))


class Lane(threading.Thread):
    """Runs ``work(task, handle)`` for every task of a queue that is no :class:`Errand`.

    Args:
        work: handles its own errors; what escapes it is a bug and ends the thread loudly.
    """

    def __init__(self, name: str, tasks: LaneQueue, handle: IoHandle, work: Callable[[Any, IoHandle], None]) -> None:
        # A daemon: interpreter exit must reach our own atexit hook, which stops the lanes in order.
        super().__init__(name=name, daemon=True)
        self._tasks = tasks
        self._handle = handle
        self._work = work
        self.start()

    def run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if isinstance(task, Errand):
                task.run_in_lane(self._handle)
            else:
                self._work(task, self._handle)
            del task  # or an idle lane would keep the last ticket alive
        self._handle.close()
