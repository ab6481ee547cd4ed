"""A lane: one thread with its own I/O handle, for writes or for reads of one swap file, never for both."""

from __future__ import annotations

import heapq
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


class Task(ABC):
    """A task that is not of the everyday kind; to be inherited, since to tell a protocol costs microseconds a task."""

    @abstractmethod
    def run_in_lane(self, handle: IoHandle) -> None:
        """Do it; as ``work`` of :class:`Lane`, it handles its own errors."""


class LaneQueue:
    """Tasks in order of priority, then of arrival.

    Not :class:`queue.PriorityQueue`, whose lock a signal handler that raises can leave locked.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: list[tuple[int, int, Any]] = []
        self._arrivals = itertools.count()
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each task

    def put(self, task: Any, priority: int = AHEAD) -> None:
        """Add a task: ``URGENT`` for bytes that backward waits for, ``AHEAD`` for all else."""
        with self._lock:
            heapq.heappush(self._tasks, (priority, next(self._arrivals), task))
        self._arrived.put(None)

    def get(self) -> Any:
        """The next task; None when the lane is to stop."""
        self._arrived.get()
        with self._lock:
            return heapq.heappop(self._tasks)[2]

    def stop(self, lanes: int) -> None:
        """Let ``lanes`` lanes stop once the tasks before are done."""
        for _ in range(lanes):
            self.put(None, _STOP)


class Lane:
    """A thread that runs ``work(task, handle)`` for every task of a queue that is no :class:`Task`, once it is started.

    Args:
        work: handles its own errors; what escapes it is a bug and ends the thread loudly.
    """

    def __init__(self, name: str, tasks: LaneQueue, handle: IoHandle, work: Callable[[Any, IoHandle], None]) -> None:
        # Not a subclass: what Python itself keeps in a Thread differs from version to version.
        # A daemon: interpreter exit must reach our own atexit hook, which stops the lanes in order.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._tasks = tasks
        self._handle = handle
        self._work = work

    def start(self) -> None:
        """Begin with what is queued."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether it has been started and has not stopped."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if isinstance(task, Task):
                task.run_in_lane(self._handle)
            else:
                self._work(task, self._handle)
            del task  # or an idle lane would keep the last ticket alive
        self._handle.close()

    def end(self, limit_s: float) -> bool:
        """Wait until it has stopped, as its queue has told it to; False where that takes longer than ``limit_s``."""
        if self._thread.ident is None:  # never started
            self._handle.close()
        else:
            self._thread.join(limit_s)
        return not self.is_alive()
